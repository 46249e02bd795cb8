"""Several ranks: the norms and decisions of one process with the whole batch, the same on every rank.

Every run clips its gradients to a tiny norm before the step, and every rank has other data, so norms that were clipped,
local to a rank, of one shard or of one micro-batch would be far off.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gnmr_fx
from gnmr_fx import distributed
from gnmr_fx.controller import MISSING
from tests.ranks import (
    BATCH,
    CONFIG,
    EXACT,
    WIDTH,
    Log,
    RankFailed,
    chain,
    inputs,
    on_ranks,
    own_part,
    plain_backward,
    recorded,
    single,
    train,
)

STEPS = 24
LONG = 200


def instrumented(recipe: Any = EXACT, **options: Any) -> nn.Module:
    return gnmr_fx.instrument(chain(), recipe, **{"max_active": 1, "config": CONFIG, **options})


def assert_same(ranks: list[Log], expected: Log, rtol: float = 1e-5) -> None:
    """All ranks bit for bit the same, and as one process with the whole batch."""
    assert all(rank.norms == ranks[0].norms for rank in ranks)
    assert all(rank.active == ranks[0].active for rank in ranks)
    assert len(ranks[0].norms) == len(expected.norms)
    torch.testing.assert_close(torch.tensor(ranks[0].norms), torch.tensor(expected.norms), rtol=rtol, atol=0)
    assert ranks[0].active == expected.active
    assert len({tuple(names) for names in expected.active}) > 2, "the run has to make different decisions"


# DDP ------------------------------------------------------------------------------------------------------------------


def ddp(steps: int, options: dict[str, Any], compiled: str = "") -> Log:
    model = instrumented()
    if compiled == "blocks":
        for block in model:
            block.compile(backend="aot_eager")
    wrapped = DDP(model, **options)
    return train(model, torch.compile(wrapped, backend="aot_eager") if compiled == "whole" else wrapped, steps)


@pytest.mark.parametrize(
    "options",
    [{}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_ddp_decides_as_one_process(options):
    assert_same(on_ranks(2, ddp, STEPS, options), single(STEPS))


@pytest.mark.parametrize("compiled", [pytest.param("blocks", marks=pytest.mark.slow), "whole"])
def test_compiled_ddp_decides_as_one_process(compiled):
    assert_same(on_ranks(2, ddp, STEPS, {}, compiled), single(STEPS))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_200_steps_of_ddp(world):
    assert_same(on_ranks(world, ddp, LONG, {}), single(LONG))


def accumulating(call: Callable[..., Tensor], x: Tensor, pieces: int = 2, no_sync: bool = True) -> None:
    """A backward for each piece of the batch; all but the last without communication, if asked."""
    for at, piece in enumerate(x.chunk(pieces)):
        quiet = no_sync and at < pieces - 1
        if isinstance(call, DDP):
            context: Any = call.no_sync() if quiet else contextlib.nullcontext()
        else:
            context = contextlib.nullcontext()
            call.set_requires_gradient_sync(not quiet)  # type: ignore[attr-defined]
        with context:
            (call(piece).square().mean() / pieces).backward()


def ddp_accumulating(no_sync: bool) -> Log:
    model = instrumented()
    return train(model, DDP(model), STEPS, functools.partial(accumulating, no_sync=no_sync))


@pytest.mark.parametrize("no_sync", [True, False])
def test_ddp_with_accumulation_decides_as_one_batch(no_sync):
    assert_same(on_ranks(2, ddp_accumulating, no_sync), single(STEPS))


class Branches(nn.Module):
    """Rows of one sign take one way, those of the other sign another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, way: str) -> Tensor:
        return self.c(self.a(x) if way == "a" else self.b(x))


def unused_on_one_rank() -> list[list[float]]:
    """Steps: each rank another branch; both branch a; both branch b."""
    model = gnmr_fx.instrument(Branches().train(), EXACT)
    wrapped = DDP(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with recorded() as norms:
        for step, ways in enumerate(("ab", "aa", "bb")):
            wrapped(own_part(inputs(step)), ways[dist.get_rank()]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return norms


def test_a_unit_that_only_one_rank_used_is_heard_on_all():
    first, second = on_ranks(2, unused_on_one_rank)
    assert first == second
    expected = []
    for step, ways in enumerate(("ab", "aa", "bb")):
        stock = Branches()
        parts = inputs(step).chunk(2)
        (sum(stock(x, way).square().mean() for x, way in zip(parts, ways, strict=True)) / 2).backward()
        layers = (stock.a, stock.b, stock.c)
        expected.append([MISSING if n.weight.grad is None else float(n.weight.grad.norm()) for n in layers])
    torch.testing.assert_close(torch.tensor(first), torch.tensor(expected), rtol=1e-5, atol=0)


def one_rank_without_a_gradient() -> tuple[list[list[float]], int]:
    """In the second step only rank 0 runs a unit at all."""
    model = gnmr_fx.instrument(Branches().train(), EXACT, include=["a"])
    controller = gnmr_fx.controller(model)
    wrapped = DDP(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with recorded() as norms:
        for step, ways in enumerate(("aa", "ab", "aa")):
            wrapped(own_part(inputs(step)), ways[dist.get_rank()]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return norms, controller.step_count


def test_a_rank_without_any_gradient_does_not_hang_the_others():
    first, second = on_ranks(2, one_rank_without_a_gradient)
    assert first == second
    assert first[1] == 3
    assert all(norms[0] > 0 for norms in first[0])


def scaled() -> Log:
    """A GradScaler whose third step overflows on rank 1 alone."""
    model = instrumented(max_active=3)
    wrapped = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    controller, active = gnmr_fx.controller(model), []
    with recorded() as norms:
        for step in range(6):
            loss = wrapped(own_part(inputs(step))).square().mean()
            if step == 2 and dist.get_rank() == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            active.append(controller.active)
    return Log(norms, active)


def test_an_overflow_on_one_rank_is_a_risk_on_all():
    first, second = on_ranks(2, scaled)
    assert first == second
    assert len(first.norms) == 5  # one step was skipped
    assert all(norm == float("inf") for norm in first.norms[2])  # and told with the next
    assert first.active[3] == ["0.0", "1.0", "2.0"]
    expected = single(2, clip=False)
    torch.testing.assert_close(torch.tensor(first.norms[:2]), torch.tensor(expected.norms), rtol=1e-5, atol=0)


# FSDP2 ----------------------------------------------------------------------------------------------------------------


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model:  # type: ignore[attr-defined]
        fully_shard(block, **options)
    return fully_shard(model, **options)


def policies(name: str) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    world = dist.get_world_size()
    return {
        "plain": dict,
        "kept": lambda: {"reshard_after_forward": False},
        "bf16": lambda: {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        "offload": lambda: {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "hybrid": lambda: {"mesh": init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))},
    }[name]()


def fsdp(steps: int, policy: str = "plain", compiled: str = "", shard_first: bool = False) -> Log:
    model = sharded(chain(), **policies(policy)) if shard_first else chain()
    gnmr_fx.instrument(model, EXACT, max_active=1, config=CONFIG)
    if compiled == "blocks":
        for block in model:
            block.compile(backend="aot_eager")
    model = model if shard_first else sharded(model, **policies(policy))
    return train(model, torch.compile(model, backend="aot_eager") if compiled == "whole" else model, steps)


@pytest.mark.parametrize("policy", ["plain", "kept", "offload"])
def test_fsdp2_decides_as_one_process(policy):
    assert_same(on_ranks(2, fsdp, STEPS, policy), single(STEPS))


def test_fsdp2_before_instrument_decides_as_one_process():
    assert_same(on_ranks(2, fsdp, STEPS, "plain", "", True), single(STEPS))


@pytest.mark.parametrize("compiled", [pytest.param("blocks", marks=pytest.mark.slow), "whole"])
def test_compiled_fsdp2_decides_as_one_process(compiled):
    assert_same(on_ranks(2, fsdp, STEPS, "plain", compiled), single(STEPS))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_200_steps_of_fsdp2(world):
    assert_same(on_ranks(world, fsdp, LONG), single(LONG))


def never_resharded(shard_first: bool) -> tuple[int, list[str]]:
    model = sharded(chain()) if shard_first else chain()
    gnmr_fx.instrument(model, EXACT, max_active=1, config=CONFIG)
    model = model if shard_first else sharded(model)
    model.set_reshard_after_backward(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log = train(model, model, 6)
    return len(log.norms), [str(w.message) for w in caught if issubclass(w.category, gnmr_fx.GnmrWarning)]


def test_shards_that_are_never_to_be_seen_are_told_of():
    assert on_ranks(2, never_resharded, True) == [(6, [])] * 2
    for steps, (message,) in on_ranks(2, never_resharded, False):
        assert steps == 0
        assert "call gnmr_fx.instrument after fully_shard" in message


def test_hybrid_sharding_counts_every_shard_once():
    assert_same(on_ranks(4, fsdp, STEPS, "hybrid"), single(STEPS))


def test_fsdp2_with_mixed_precision_hears_whole_gradients():
    ranks = on_ranks(2, fsdp, STEPS, "bf16")
    assert ranks[0] == ranks[1]
    # bf16 keeps 8 bits: a dozen roundings of 2**-8 in a row, against an error of 2**0.5 for half a gradient.
    torch.testing.assert_close(torch.tensor(ranks[0].norms), torch.tensor(single(STEPS).norms), rtol=0.1, atol=0)


def fsdp_accumulating(no_sync: bool) -> Log:
    model = sharded(instrumented())
    return train(model, model, STEPS, functools.partial(accumulating, no_sync=no_sync))


@pytest.mark.parametrize("no_sync", [True, False])
def test_fsdp2_with_accumulation_decides_as_one_batch(no_sync):
    assert_same(on_ranks(2, fsdp_accumulating, no_sync), single(STEPS))


def stepping_inside(model: nn.Module, call: Callable[..., Tensor], steps: int) -> Log:
    """An optimizer for each parameter, which steps and clears the gradient inside the backward."""
    optimizers = {p: torch.optim.SGD([p], 0.001) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    controller, active = gnmr_fx.controller(model), []
    with recorded() as norms:
        for at in range(steps):
            plain_backward(call, own_part(inputs(at)))
            active.append(controller.active)
    return Log(norms, active)


def fsdp_stepping_inside() -> Log:
    model = sharded(chain())
    gnmr_fx.instrument(model, EXACT, max_active=1, config=CONFIG)
    return stepping_inside(model, model, STEPS)


def test_fsdp2_with_the_optimizer_in_the_backward():
    model = instrumented()
    assert_same(on_ranks(2, fsdp_stepping_inside), stepping_inside(model, model, STEPS))


# Tensor parallelism: weights and activations are DTensors -------------------------------------------------------------


def tensor_parallel(recipe: Any, guards: str | None, compiled: bool) -> tuple[Log, list[Any]]:
    """Pairs of projections split over 2 ranks, and FSDP2 over what is left of them: a mesh of two dimensions."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from tests.loops import readable_kernels

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    model = chain(4)
    plan = {f"{at}.0": (RowwiseParallel() if at % 2 else ColwiseParallel()) for at in range(4)}
    gnmr_fx.instrument(model, recipe, max_active=1, config=CONFIG)
    if guards is not None:
        gnmr_fx.controller(model).force(guards)
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    call = torch.compile(model, backend="aot_eager") if compiled else model
    rank, size = mesh["data"].get_local_rank(), mesh["data"].size()
    optimizer, active = torch.optim.SGD(model.parameters(), 0.1), []
    with recorded() as norms, readable_kernels():
        for step in range(STEPS):
            plain_backward(call, inputs(step).chunk(size)[rank])
            optimizer.step()
            optimizer.zero_grad()
            active.append(gnmr_fx.controller(model).active)
    return Log(norms, active), [p.detach().full_tensor().tolist() for p in model.parameters()]


@pytest.mark.parametrize(
    ("world", "recipe", "guards", "compiled"),
    [
        (2, EXACT, None, False),
        (4, EXACT, None, False),
        pytest.param(4, EXACT, None, True, marks=pytest.mark.slow),
        (4, "saved-int4-bf16", "high", False),
        (2, "saved-int4-bf16", "high", True),
    ],
)
def test_tensor_parallel_units_decide_as_one_process(world, recipe, guards, compiled):
    """Of the lossless path with a recipe that stores, the weights tell that what was stored is what is restored."""
    model = gnmr_fx.instrument(chain(4), EXACT, max_active=1, config=CONFIG)
    if guards is not None:
        gnmr_fx.controller(model).force(guards)
    expected = train(model, model, STEPS, clip=False)
    found = on_ranks(world, tensor_parallel, recipe, guards, compiled)
    logs = [log for log, _ in found]
    assert all(log == logs[0] for log in logs)
    torch.testing.assert_close(torch.tensor(logs[0].norms), torch.tensor(expected.norms), rtol=1e-4, atol=0)
    assert logs[0].active == expected.active
    for weight, stock in zip(found[0][1], model.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(weight), stock.detach(), rtol=1e-4, atol=1e-6)


def test_tensor_parallel_units_quantize_what_each_rank_holds():
    first, second = on_ranks(2, tensor_parallel, "saved-int4-int8", None, False)
    assert first[0] == second[0]
    assert len({tuple(names) for names in first[0].active}) > 2


# Decisions that differ would do harm only on the recovery path: a real recipe, guards in force ------------------------


def lossy(kind: str) -> tuple[Log, list[float]]:
    from tests.loops import readable_kernels

    with readable_kernels():
        model = instrumented("saved-int4-int8", max_active=2)
        call = DDP(model) if kind == "ddp" else sharded(model)
        log = train(model, call, STEPS)
    gradient = [float(p.detach().full_tensor().sum()) if kind == "fsdp" else float(p.sum()) for p in model.parameters()]
    return log, gradient


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_quantizing_recipe_on_ranks(kind):
    (first, weights), (second, others) = on_ranks(2, lossy, kind)
    assert first == second
    assert weights == others
    assert len({tuple(names) for names in first.active}) > 2


# Ranks that disagree, and ranks that have nothing to do with one another ----------------------------------------------


def disagreeing(part: str) -> str:
    """The error that the first optimizer step raises on this rank."""
    other = dist.get_rank() == 1
    options: dict[str, Any] = {
        "units": {"exclude": ["2.*"]},
        "max_active": {"max_active": 2},
        "recipe": {"recipe": "saved-int4-bf16"},
        "config": {"config": gnmr_fx.GnmrConfig(alpha=2.0)},
        "state": {},
    }[part]
    model = instrumented(**(options if other else {}))
    if part == "state" and other:
        gnmr_fx.controller(model).step()
    wrapped, optimizer = DDP(model), torch.optim.SGD(model.parameters(), 0.1)
    plain_backward(wrapped, own_part(inputs(0)))
    try:
        optimizer.step()
    except gnmr_fx.RankMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("part", ["units", "max_active", "recipe", "config", "state"])
def test_ranks_that_disagree_get_an_error_at_the_first_step(part):
    for rank, message in enumerate(on_ranks(2, disagreeing, part)):
        assert f"found other {part} on some (rank {rank}" in message
        assert "on every rank" in message


def one_rank_resumes() -> list[str]:
    """Only rank 0 loads a state, after the run has begun."""
    model = instrumented()
    controller, wrapped = gnmr_fx.controller(model), DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    saved, errors = copy.deepcopy(controller.state_dict()), []
    for step in range(3):
        if step == 2 and dist.get_rank() == 0:
            controller.load_state_dict(saved)
        plain_backward(wrapped, own_part(inputs(step)))
        try:
            optimizer.step()
        except gnmr_fx.RankMismatchError as error:
            errors.append(f"{step}: {error}")
        optimizer.zero_grad()
    return errors


def test_a_state_loaded_on_one_rank_only_is_an_error_on_all():
    for errors in on_ranks(2, one_rank_resumes):
        assert len(errors) == 1
        assert errors[0].startswith("2: expected the same state")


def one_rank_without_gnmr() -> str:
    distributed.AGREEMENT_TIMEOUT = datetime.timedelta(seconds=2)
    model = chain()
    if dist.get_rank() == 0:
        gnmr_fx.instrument(model, EXACT)
    wrapped, optimizer = DDP(model), torch.optim.SGD(model.parameters(), 0.1)
    plain_backward(wrapped, own_part(inputs(0)))
    try:
        optimizer.step()
    except gnmr_fx.RankMismatchError as error:
        return str(error)
    import time

    time.sleep(4)  # another rank that ends would be an error of its own
    return ""


def test_a_rank_without_gnmr_is_an_error_and_no_hang():
    message, silence = on_ranks(2, one_rank_without_gnmr)
    assert "call gnmr_fx.instrument on every rank" in message
    assert silence == ""


def unrelated() -> int:
    """Each rank trains a model of its own (as pipeline stages do), and only one of them makes a second step."""
    rank = dist.get_rank()
    model = gnmr_fx.instrument(chain(2 + rank), EXACT)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with forbidden_collectives():
        for step in range(1 + rank):
            plain_backward(model, inputs(step))
            optimizer.step()
            optimizer.zero_grad()
    return gnmr_fx.controller(model).step_count


@contextlib.contextmanager
def forbidden_collectives() -> Iterator[None]:
    original = dist.all_reduce

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective")

    dist.all_reduce = refuse
    try:
        yield
    finally:
        dist.all_reduce = original


def test_ranks_without_a_common_model_do_not_talk():
    assert on_ranks(2, unrelated) == [1, 2]


def counted_collectives(kind: str) -> list[int]:
    """How many times each step called all_reduce for the controller, four micro-batches each."""
    calls = [0]
    original = distributed.sum_over

    def counting(groups: Any, values: Tensor) -> Tensor:
        calls[0] += len(groups)
        return original(groups, values)

    distributed.sum_over = counting
    model = instrumented()
    call = DDP(model) if kind == "ddp" else sharded(model, **policies("hybrid" if kind == "hybrid" else "plain"))
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(3):
        before = calls[0]
        for _ in range(4):
            plain_backward(call, own_part(inputs(step)))
        optimizer.step()
        optimizer.zero_grad()
        found.append(calls[0] - before)
    return found


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("fsdp", 2), ("hybrid", 4)])
def test_one_collective_a_step(kind, world):
    assert on_ranks(world, counted_collectives, kind) == [[1, 1, 1]] * world


def stages() -> tuple[list[list[float]], int]:
    """Ranks 0 and 1 train one stage over DDP of their own, 2 and 3 another with other units and other steps."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    stage = rank // 2
    model = gnmr_fx.instrument(chain(2 + stage), EXACT)
    wrapped, optimizer = DDP(model, process_group=groups[stage]), torch.optim.SGD(model.parameters(), 0.0)
    with recorded() as norms:
        for step in range(2 + stage):
            plain_backward(wrapped, inputs(step).chunk(2)[rank % 2])
            optimizer.step()
            optimizer.zero_grad()
    return norms, distributed.groups_of([], groups[stage])[0].size()


def test_stages_decide_each_for_themselves():
    found = on_ranks(4, stages)
    assert found[0] == found[1]
    assert found[2] == found[3]
    for stage, (norms, size) in enumerate(found[::2]):
        assert size == 2
        assert len(norms) == 2 + stage
        stock = chain(2 + stage)
        stock(inputs(0)).square().mean().backward()
        expected = torch.tensor([float(block[0].weight.grad.norm()) for block in stock])
        torch.testing.assert_close(torch.tensor(norms[0]), expected, rtol=1e-5, atol=0)


def sub_mesh_groups() -> list[list[int]]:
    """A mesh of part of the ranks has one group for each dimension; one inside another is left out."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    weight = distribute_tensor(torch.ones(4, 2), mesh["shard"], [Shard(0)])
    whole = distribute_tensor(torch.ones(4, 2), mesh, [Replicate(), Shard(0)])
    part, count = distributed.local_part(whole)
    assert (part.shape, count) == ((2, 2), 2)
    found = [distributed.groups_of([weight]), distributed.groups_of([weight, whole])]
    return [sorted(dist.get_process_group_ranks(group)) for groups in found for group in groups]


def test_groups_of_meshes():
    found = on_ranks(4, sub_mesh_groups)
    assert found == [[own, [0, 1, 2, 3]] for own in ([0, 1], [0, 1], [2, 3], [2, 3])]


def partial_gradient() -> tuple[float, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (2,))
    term = torch.full((3, 3), float(1 + dist.get_rank()))
    part, count = distributed.local_part(DTensor.from_local(term, mesh, [Partial()]))
    return float(part.sum()), count


def test_terms_of_a_sum_are_added_before_the_norm():
    assert on_ranks(2, partial_gradient) == [(27.0, 1)] * 2


def test_one_process_does_not_touch_torch_distributed(monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective")

    for name in ("all_reduce", "all_gather", "broadcast", "barrier", "get_rank", "get_world_size"):
        monkeypatch.setattr(dist, name, refuse)
    assert len(single(3).norms) == 3


def test_a_failing_rank_is_reported():
    with pytest.raises(RankFailed, match="ZeroDivisionError"):
        on_ranks(2, divmod, BATCH, 0)
