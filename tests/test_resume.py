"""A run that is killed and resumed is the run that was not: guards, locks, histories, rounding noise, weights."""

from __future__ import annotations

import copy
import io
import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import gnmr_fx
from tests.loops import readable_kernels
from tests.ranks import CONFIG, EXACT, PRELOADED, WIDTH, Log, chain, inputs, on_ranks, own_part, recorded, train
from tests.test_distributed import sharded

STEPS, SAVE_EVERY = 30, 4
OVERFLOWS = (11, 19)  # 11 is the last step before a checkpoint: a skipped step that is told only after it
STOCHASTIC = gnmr_fx.Recipe(gnmr_fx.Format("int2", rounding="stochastic"), gnmr_fx.Format("int8"))
PHASES = ("forward", "backward", "optimizer", "saving")


def fresh() -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    model = gnmr_fx.instrument(chain(), STOCHASTIC, max_active=1, config=CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)


def everything(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> dict[str, Any]:
    return {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "gnmr": gnmr_fx.controller(model).state_dict(),
    }


def training(folder: Path, kill_at: tuple[int, str] | None = None) -> None:
    """The whole run, from the checkpoint in ``folder`` if there is one; ends by SIGKILL at a step and phase."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, optimizer, scaler = fresh()
    start, at = 0, folder / "checkpoint.pt"
    if at.exists():
        saved = torch.load(at, weights_only=True)
        for name, part in (("model", model), ("optimizer", optimizer), ("scaler", scaler)):
            part.load_state_dict(saved[name])
        gnmr_fx.controller(model).load_state_dict(saved["gnmr"])
        start = saved["step"]

    def die(step: int, phase: str) -> None:
        if kill_at == (step, phase):
            os.kill(os.getpid(), signal.SIGKILL)

    with readable_kernels():
        for step in range(start, STEPS):
            loss = model(inputs(step)).square().mean() * (float("inf") if step in OVERFLOWS else 1.0)
            die(step, "forward")
            scaler.scale(loss).backward()
            die(step, "backward")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            die(step, "optimizer")
            if (step + 1) % SAVE_EVERY == 0:
                torch.save(everything(model, optimizer, scaler, step + 1), folder / "new")
                die(step, "saving")
                os.replace(folder / "new", at)
    torch.save(everything(model, optimizer, scaler, STEPS), folder / "end.pt")


def in_a_process(*args: Any) -> int | None:
    """Exit code of a process that runs :func:`training`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=training, args=args)
    process.start()
    process.join(240)
    return process.exitcode


def differing(a: Any, b: Any, path: str = "") -> list[str]:
    """Paths at which two nested states differ, bit for bit; time spent is no part of a state."""
    if isinstance(a, Tensor):
        same = torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b)
        return [] if same else [path]
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        return [found for key in a if key != "seconds" for found in differing(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, list | tuple):
        assert len(a) == len(b)
        return [found for i, (x, y) in enumerate(zip(a, b, strict=True)) for found in differing(x, y, f"{path}[{i}]")]
    return [] if a == b else [path]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert in_a_process(folder) == 0
    end = torch.load(folder / "end.pt", weights_only=True)
    assert end["gnmr"]["counts"]["switches"] > 4
    assert end["gnmr"]["counts"]["non_finite"] == len(OVERFLOWS) * len(end["gnmr"]["units"])
    return end


def kill_points(count: int) -> list[tuple[int, str]]:
    chance = random.Random(0)
    return [(chance.randrange(STEPS), chance.choice(PHASES[:3])) for _ in range(count - 2)] + [
        (15, "saving"),
        (12, "forward"),
    ]


@pytest.mark.parametrize("kill_at", kill_points(10), ids=lambda at: f"{at[0]}-{at[1]}")
def test_killed_and_resumed_is_bit_for_bit_the_same(tmp_path, uninterrupted, kill_at):
    assert in_a_process(tmp_path, kill_at) == -signal.SIGKILL
    assert not (tmp_path / "end.pt").exists()
    assert in_a_process(tmp_path) == 0
    assert differing(torch.load(tmp_path / "end.pt", weights_only=True), uninterrupted) == []


def test_a_lost_controller_state_would_be_noticed(tmp_path, uninterrupted):
    """The comparison above is worth something: without the state the run is another one."""
    assert in_a_process(tmp_path, (13, "forward")) == -signal.SIGKILL
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    saved["gnmr"] = gnmr_fx.controller(fresh()[0]).state_dict()
    torch.save(saved, tmp_path / "checkpoint.pt")
    assert in_a_process(tmp_path) == 0
    found = differing(torch.load(tmp_path / "end.pt", weights_only=True), uninterrupted)
    assert any(path.startswith(".model") for path in found)
    assert any(path.startswith(".gnmr.rules") for path in found)


# torch.distributed.checkpoint -----------------------------------------------------------------------------------------

SAVED_AT, UNTIL = 10, 24


def parts(model: nn.Module) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return {"model": get_model_state_dict(model), "gnmr": gnmr_fx.controller(model)}


def exact_model() -> nn.Module:
    return gnmr_fx.instrument(chain(), EXACT, max_active=1, config=CONFIG)


def run_steps(model: nn.Module, steps: range) -> Log:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    controller, active = gnmr_fx.controller(model), []
    with recorded() as norms:
        for step in steps:
            model(own_part(inputs(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            active.append(controller.active)
    return Log(norms, active)


def save_sharded(folder: str) -> Log:
    model = sharded(exact_model())
    log = run_steps(model, range(SAVED_AT))
    dcp.save(parts(model), checkpoint_id=folder)
    return log


def resume(folder: str) -> Log:
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    model = exact_model()
    if dist.is_initialized():
        sharded(model)
    state = parts(model)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    assert gnmr_fx.controller(model).step_count == SAVED_AT
    return run_steps(model, range(SAVED_AT, UNTIL))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_distributed_checkpoint_resumes_on_any_number_of_ranks(tmp_path, world):
    first = on_ranks(2, save_sharded, str(tmp_path))
    found = [resume(str(tmp_path))] if world == 1 else on_ranks(world, resume, str(tmp_path))
    assert all(log == found[0] for log in found)
    expected = run_steps(exact_model(), range(UNTIL))
    norms = torch.tensor(first[0].norms + found[0].norms)
    torch.testing.assert_close(norms, torch.tensor(expected.norms), rtol=1e-5, atol=0)
    assert first[0].active + found[0].active == expected.active
    assert len({tuple(names) for names in found[0].active}) > 1
    assert first[0].active[-1], "saved with a guard set"


def test_a_distributed_checkpoint_as_a_plain_dictionary(tmp_path):
    model = exact_model()
    run_steps(model, range(SAVED_AT))
    dcp.save({"gnmr": gnmr_fx.controller(model).state_dict()}, checkpoint_id=tmp_path)
    other = exact_model()
    state = {"gnmr": gnmr_fx.controller(other).state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    gnmr_fx.controller(other).load_state_dict(state["gnmr"])
    assert differing(gnmr_fx.controller(other).state_dict(), gnmr_fx.controller(model).state_dict()) == []


# States that do not fit -----------------------------------------------------------------------------------------------


def trained() -> tuple[nn.Module, dict[str, Any]]:
    model = exact_model()
    train(model, model, 6)
    return model, gnmr_fx.controller(model).state_dict()


def without(state: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: {}, "version"),
        (lambda s: {**s, "version": 2}, "version 3, found 2"),
        (lambda s: without(s, "flags"), "flags"),
        (lambda s: without(s, "seed", "rules"), "rules, seed|seed, rules|rules|seed"),
        (lambda s: {**s, "flags": s["flags"][:-1]}, "flags of the saved state"),
        (lambda s: {**s, "seen": [True] * 3}, "seen of the saved state"),
        (lambda s: {**s, "rules": without(s["rules"], "mean")}, "'mean'"),
        (lambda s: {**s, "rules": {**s["rules"], "mean": -s["rules"]["mean"]}}, "mean of the saved state"),
        (lambda s: {**s, "units": ["a", "b", "c"]}, "include and exclude"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage, message):
    model, state = trained()
    controller = gnmr_fx.controller(model)
    before = copy.deepcopy(controller.state_dict())
    with pytest.raises(gnmr_fx.StateMismatchError, match=message):
        controller.load_state_dict(damage(state))
    assert differing(controller.state_dict(), before) == []


def test_a_state_of_another_model_is_refused():
    _, state = trained()
    other = gnmr_fx.instrument(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), EXACT, config=CONFIG)
    with pytest.raises(gnmr_fx.StateMismatchError, match="2 units, found one of 3 units"):
        gnmr_fx.controller(other).load_state_dict(state)


def test_a_state_of_another_model_in_a_distributed_checkpoint_is_an_error(tmp_path):
    model, _ = trained()
    dcp.save({"gnmr": gnmr_fx.controller(model)}, checkpoint_id=tmp_path)
    other = gnmr_fx.instrument(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), EXACT, config=CONFIG)
    before = copy.deepcopy(gnmr_fx.controller(other).state_dict())
    with pytest.raises((gnmr_fx.StateMismatchError, dcp.api.CheckpointException)):
        dcp.load({"gnmr": gnmr_fx.controller(other)}, checkpoint_id=tmp_path)
    assert differing(gnmr_fx.controller(other).state_dict(), before) == []


def test_a_state_holds_plain_data_alone():
    file = io.BytesIO()
    torch.save(trained()[1], file)
    file.seek(0)
    model, _ = trained()
    gnmr_fx.controller(model).load_state_dict(torch.load(file, weights_only=True))


def test_pinned_guards_are_no_part_of_the_state():
    model, _ = trained()
    controller = gnmr_fx.controller(model)
    chosen = controller.active
    controller.force("high")
    state = controller.state_dict()
    other = gnmr_fx.controller(exact_model())
    other.load_state_dict(state)
    assert other.active == chosen
    other.force("low")
    other.load_state_dict(state)
    assert other.active == []
    other.force(None)
    assert other.active == chosen
