"""Measured errors and costs in live models: eager and compiled, every so many steps, the same on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gnmr_fx
from gnmr_fx import formats, measure, runtime
from gnmr_fx.recipe import Format
from tests.loops import chain, decoder, noisy, readable_kernels, train
from tests.ranks import on_ranks

EVERY = 3
CONFIG = gnmr_fx.GnmrConfig(signal="error", signal_every=EVERY, warmup_steps=2, lock_steps=2)


@pytest.fixture(autouse=True, scope="module")
def _readable_kernels() -> Iterator[None]:
    with readable_kernels():
        yield


@contextlib.contextmanager
def heard() -> Iterator[list[dict[str, Any]]]:
    """What each step's decision was given besides norms."""
    original, found = runtime.update, []

    def update(state: Any, norms: Any, config: Any, **others: Any) -> Any:
        vectors = {"norms": norms} | others
        found.append({name: v and torch.tensor(v, dtype=torch.float64) for name, v in vectors.items()})
        return original(state, norms, config, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "update", update)
        yield found


def exact_error(x: Tensor, fmt: Format) -> float:
    stored = formats.decode(formats.encode(x, fmt, 1), fmt, x.shape, x.dtype)
    return float((x.double() - stored.double()).norm() / x.double().norm())


# Pure -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["int4/group32", "int2/token", "int4/tensor", "int2/tensor", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("shape", [(64,), (3, 40), (8, 64, 96), (1, 50_000)])
def test_a_sample_has_the_error_of_the_whole(spec: str, shape: tuple[int, ...]) -> None:
    fmt, generator = Format.parse(spec), torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator)
    x.view(-1)[7] = 20.0  # an outlier, which alone decides over a scale that all share
    whole = exact_error(x, fmt)
    small = x.numel() <= measure.SAMPLE
    for offset in range(3):
        found = float(measure.squared_error(x, fmt, offset=offset)) ** 0.5
        assert found == pytest.approx(whole, rel=1e-6 if small else 0.06)


def test_a_sample_is_small_and_moves() -> None:
    x = torch.arange(4 * measure.SAMPLE).view(-1, 128).float()
    first, extra = measure.sample(x, Format("int4"), 0)
    second, _ = measure.sample(x, Format("int4"), 1)
    assert extra == 0
    assert first.numel() == second.numel() == measure.SAMPLE
    assert torch.equal(first[0], x[0])
    assert torch.equal(second[0], x[1])
    assert torch.equal(measure.sample(x, Format("int4"), 5)[0], second)
    part, extra = measure.sample(x, Format("int4", "tensor"), 2)
    assert extra == 2
    assert part[-2:].tolist() == [0.0, x.numel() - 1.0]
    assert torch.equal(part[:-2], x.view(-1)[2::4])


def test_zeros_have_no_error_and_what_is_not_finite_shows() -> None:
    fmt = Format("int4")
    assert measure.squared_error(torch.zeros(2, 128), fmt) == 0.0
    assert measure.squared_error(torch.full((2, 128), 1e30), fmt).isfinite()
    for value in (torch.inf, torch.nan):
        x = torch.randn(2, 128)
        x[1, 3] = value
        assert not measure.squared_error(x, fmt).isfinite()


# Live -----------------------------------------------------------------------------------------------------------------


def expected_errors(x: Tensor, model: nn.Sequential, fmt: Format) -> list[float]:
    found = []
    for layer in model:
        found.append(exact_error(x, fmt))
        x = layer(x).detach()
    return found


def test_errors_are_those_of_what_units_store_every_few_steps() -> None:
    model, inputs = chain(3), noisy(2 * EVERY)
    gnmr_fx.instrument(model, "saved-int2-int8", max_active=1, config=CONFIG)
    exact = expected_errors(inputs[0], model, Format("int2"))
    with heard() as found:
        train(model, inputs)
    assert [step["errors"] is not None for step in found] == [True, False, False] * 2
    assert found[0]["errors"].tolist() == pytest.approx(exact, rel=1e-6)
    assert len({tuple(gnmr_fx.controller(model).decision.gnmr.tolist())} | {tuple(exact)}) == 2


@pytest.mark.parametrize("guards", ["low", "high"])
def test_errors_do_not_depend_on_the_path(guards: Any) -> None:
    model, (x,) = chain(3), noisy(1)
    gnmr_fx.instrument(model, gnmr_fx.Recipe(Format("int4"), Format("none")), config=CONFIG)
    gnmr_fx.controller(model).force(guards)
    exact = expected_errors(x, model, Format("int4"))
    with heard() as found:
        train(model, [x])
    assert found[0]["errors"].tolist() == pytest.approx(exact, rel=1e-6)


@pytest.mark.slow
def test_inductor_measures_in_scope_all_in_one_graph() -> None:
    built = decoder()
    config = gnmr_fx.GnmrConfig(signal="error", signal_every=2)
    gnmr_fx.instrument(built.model, "saved-int4-int8", config=config, scope=gnmr_fx.AllSaved(min_bytes=1))
    call = torch.compile(built.model, fullgraph=True)
    optimizer = torch.optim.SGD(built.model.parameters(), 0.1)
    with heard() as steps, torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):
            built.loss(call(*built.args)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [step["errors"] is None for step in steps] == [False, True] * 2
    for step in steps[::2]:  # a unit may keep nothing but a query or key, in 8 bits
        assert ((step["errors"] > 0.003) & (step["errors"] < 0.2)).all()
        assert float(step["errors"].median()) > 0.05


def test_eager_and_compiled_measure_the_same_in_one_graph() -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = chain(3)
        gnmr_fx.instrument(model, "saved-int2-int8", max_active=1, config=CONFIG)
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with heard() as steps, torch._dynamo.config.patch(error_on_recompile=True):
            for x in noisy(8):
                call(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append([step["errors"] for step in steps])
        assert len(gnmr_fx.controller(model).events) > 0, "no guard changed: the test tests nothing"
    for eager, graph in zip(*found, strict=True):
        assert (eager is None) == (graph is None)
        assert eager is None or torch.allclose(eager, graph, rtol=1e-6)


def test_scope_all_measures_every_tensor_of_a_unit() -> None:
    built = decoder()
    config = gnmr_fx.GnmrConfig(signal="error", signal_every=1)
    gnmr_fx.instrument(built.model, "saved-int4-int8", config=config, scope=gnmr_fx.AllSaved(min_bytes=1))
    controller = gnmr_fx.controller(built.model)
    optimizer = torch.optim.SGD(built.model.parameters(), 0.1)
    with heard() as found:
        built.loss(built.model(*built.args)).backward()
        taken = list(controller.probe._taken)
        optimizer.step()
    assert max(taken) > 1
    assert ((found[0]["errors"] > 0.03) & (found[0]["errors"] < 0.2)).all()


def test_the_default_signal_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gnmr_fx.instrument(chain(2))
    monkeypatch.setattr(measure, "squared_error", lambda *_: pytest.fail("measured"))
    with heard() as found:
        train(model, noisy(3))
    assert all(step["errors"] is None and step["costs"] is None for step in found)


def test_a_resumed_run_measures_in_the_same_steps_and_decides_the_same() -> None:
    def run(model: nn.Module, inputs: list[Tensor]) -> list[tuple[bool, ...]]:
        flags = []
        for x in inputs:
            train(model, [x])
            flags.append(tuple(gnmr_fx.controller(model).flags.tolist()))
        return flags

    config = gnmr_fx.GnmrConfig(signal="gap", signal_every=4, warmup_steps=1, lock_steps=1, history="per_path")
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(gnmr_fx.instrument(chain(4), "saved-int2-int8", max_active=2, config=config))
    whole, first = models
    expected = run(whole, noisy(20))
    assert len(set(expected)) > 2, "the run must make different decisions to test anything"
    assert run(first, noisy(20)[:9]) == expected[:9]
    second = gnmr_fx.instrument(chain(4), "saved-int2-int8", max_active=2, config=config)
    second.load_state_dict(first.state_dict())
    gnmr_fx.controller(second).load_state_dict(gnmr_fx.controller(first).state_dict())
    assert run(second, noisy(20)[9:]) == expected[9:]


# Costs ----------------------------------------------------------------------------------------------------------------


class Widths(nn.Module):
    """Two operators of different width, and so of different cost."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(256, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x))


@pytest.mark.parametrize(
    ("unit", "costs"),
    [
        ("bytes", [16 * (256 + 2 * 4), 16 * (64 + 4)]),  # int8 and 4 bytes of scales for each group of 128
        ("flops", [6 * 16 * 256 * 64, 6 * 16 * 64 * 8]),
    ],
)
def test_costs_are_those_of_the_last_pass(unit: Any, costs: list[int]) -> None:
    config = gnmr_fx.GnmrConfig(alpha=1e-6, warmup_steps=0, budget_unit=unit)
    for budget, active in (
        (costs[1], [{"narrow"}]),
        (costs[0], [{"narrow"}, {"wide"}]),
        (sum(costs), [{"wide", "narrow"}]),
    ):
        model = gnmr_fx.instrument(Widths(), max_active=budget, config=config)
        with heard() as found:
            train(model, [torch.randn(16, 256) for _ in range(2)])
        assert found[0]["costs"].tolist() == costs
        assert set(gnmr_fx.controller(model).active) in active
        row = {row.unit: row.bytes_high for row in gnmr_fx.table(model).units}
        assert unit != "bytes" or list(row.values()) == costs
        assert gnmr_fx.table(model).totals["bytes_recovery_max"] <= sum(filter(None, row.values()))


def test_a_byte_budget_below_the_cheapest_unit_is_an_error_at_the_first_step(tmp_path: Any) -> None:
    config = gnmr_fx.GnmrConfig(budget_unit="bytes")
    model = gnmr_fx.instrument(Widths(), max_active=1000, config=config)
    with pytest.raises(gnmr_fx.BudgetError, match=r"the 1088 bytes that the cheapest unit costs .* found 1000"):
        train(model, [torch.randn(16, 256)])
    with pytest.raises(gnmr_fx.BudgetError, match="expected a number of bytes"):
        gnmr_fx.instrument(Widths(), max_active=1.5, config=config)


def test_tables_and_reports_tell_of_other_budgets_and_signals(tmp_path: Any) -> None:
    config = gnmr_fx.GnmrConfig(signal="error", signal_every=1, warmup_steps=0, budget_unit="bytes", history="per_path")
    model = gnmr_fx.instrument(Widths(), "saved-int2-int8", max_active=5000, config=config)
    train(model, [torch.randn(16, 256) for _ in range(6)])
    report = gnmr_fx.report(model)
    text = str(report)
    for part in (
        "error > α = auto or Δerror > β = 4",
        "each path by itself",
        "every 1 step",
        "4.9 KiB at a time",
        "highest",
    ):
        assert part in text, text
    assert report.events
    assert any("error 0." in line for line in text.splitlines())
    assert report.plot(tmp_path / "plot.png").stat().st_size > 0
    assert "budget 4.9 KiB" in str(gnmr_fx.table(model))
    assert gnmr_fx.table(model).totals["bytes_recovery_max"] == 5000
    assert '"budget_unit": "bytes"' in gnmr_fx.table(model).to_json()


def frozen_model() -> nn.Module:
    """A frozen projection with something trainable after it."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 48), nn.LayerNorm(48)).train()
    for layer in model[:2]:
        layer.weight.requires_grad_(False)
    return model


def test_frozen_weights_cost_the_bytes_of_the_exact_ones() -> None:
    config = gnmr_fx.GnmrConfig(alpha=1e-6, warmup_steps=0, budget_unit="bytes")
    model = gnmr_fx.instrument(frozen_model(), "lora-int8-bf16", max_active=4 * 32 * 48, config=config)
    with heard() as found:
        train(model, [torch.randn(16, 64) for _ in range(3)])
    assert found[0]["costs"].tolist() == [4 * 64 * 32, 4 * 32 * 48]
    assert gnmr_fx.controller(model).active == ["1"]


@pytest.mark.parametrize(
    ("recipe", "config", "message"),
    [
        ("lora-int8-bf16", {"signal": "gap"}, "signal: expected 'gnmr'"),
        ("lora-int8-bf16", {"budget_unit": "flops"}, "budget_unit: expected 'units' or 'bytes'"),
        (gnmr_fx.Recipe(Format("int4"), Format("int4")), {"budget_unit": "bytes"}, "expected 'units' or 'flops'"),
    ],
)
def test_settings_that_a_recipe_would_make_no_use_of_are_refused(recipe: Any, config: Any, message: str) -> None:
    with pytest.raises(gnmr_fx.RecipeError, match=message):
        gnmr_fx.instrument(frozen_model(), recipe, max_active=0.5, config=gnmr_fx.GnmrConfig(**config))


def test_operands_of_gemms_are_measured() -> None:
    """Of a recipe that stores everything as it is and multiplies in 4 bits."""
    low = gnmr_fx.Operands(Format("int4", "token"), Format("int4", "token"))
    gemm = gnmr_fx.GemmRecipe(output=gnmr_fx.GemmPaths(low=low), backend="emulated")
    recipe = gnmr_fx.Recipe(Format("none"), Format("none"), gemm=gemm)
    model, (x,) = chain(1), noisy(1)
    exact = exact_error(x, Format("int4", "token"))
    gnmr_fx.instrument(model, recipe, config=gnmr_fx.GnmrConfig(signal="error", budget_unit="flops"), max_active=1.0)
    with heard() as found:
        train(model, [x])
    assert found[0]["errors"].tolist() == pytest.approx([exact], rel=1e-6)
    assert found[0]["costs"].tolist() == [6 * 8 * 40 * 40]
    audit = gnmr_fx.audit(model, lambda: model(x).square().mean(), progress=False)
    assert audit.passes == 3, "what a GEMM makes reaches every gradient"
    assert audit.gaps[0] > 0


# Ranks ----------------------------------------------------------------------------------------------------------------


def on_a_rank(batches: list[int]) -> tuple[list[Any], list[Any], list[int]]:
    """Errors and costs that each decision saw, and collectives of each step; ranks see batches of other sizes."""
    from gnmr_fx import distributed

    calls, original = [0], distributed.sum_over

    def counting(groups: Any, values: Tensor) -> Tensor:
        calls[0] += len(groups)
        return original(groups, values)

    distributed.sum_over = counting
    torch.manual_seed(0)
    config = gnmr_fx.GnmrConfig(signal="gap", signal_every=2, warmup_steps=0, budget_unit="bytes")
    model = gnmr_fx.instrument(Widths(), "saved-int2-int8", max_active=0.9, config=config)
    wrapped, optimizer, collectives = DDP(model), torch.optim.SGD(model.parameters(), 0.1), []
    with readable_kernels(), heard() as found:
        for _ in range(4):
            before = calls[0]
            x = torch.randn(batches[dist.get_rank()], 256) * (1 + dist.get_rank())
            wrapped(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            collectives.append(calls[0] - before)
    return (
        [step["errors"] if step["errors"] is None else step["errors"].tolist() for step in found],
        [step["costs"].tolist() for step in found],
        collectives,
    )


def test_ranks_share_errors_and_costs_in_their_one_collective() -> None:
    (errors, costs, collectives), *others = on_ranks(2, on_a_rank, [16, 48])
    assert all(other == (errors, costs, collectives) for other in others)
    assert collectives == [1] * 4
    assert [e is None for e in errors] == [False, True] * 2
    assert all(0 < value < 1 for row in errors if row is not None for value in row)
    assert costs[0] == [32 * (256 + 8), 32 * (64 + 4)], "the mean over the ranks"


# Logs -----------------------------------------------------------------------------------------------------------------


def test_metrics_and_logs_know_other_budgets_and_automatic_thresholds(tmp_path: Any) -> None:
    from gnmr_fx.integrations import jsonl
    from gnmr_fx.integrations.metrics import step_metrics
    from gnmr_fx.integrations.setup import Setup

    config = gnmr_fx.GnmrConfig(signal="error", signal_every=1, warmup_steps=0, budget_unit="bytes")
    Setup("saved-int2-int8", max_active=2000, config=config)
    with pytest.raises(gnmr_fx.BudgetError, match="expected a number of bytes"):
        Setup(max_active=-1, config=config)
    model = gnmr_fx.instrument(Widths(), "saved-int2-int8", max_active=2000, config=config)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with jsonl.JsonlLogger(tmp_path / "log.jsonl", model) as log:
        for _ in range(6):
            model(torch.randn(16, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            log.log()
    metrics = step_metrics(gnmr_fx.controller(model))
    active = gnmr_fx.controller(model).active
    assert active == ["narrow"]
    assert (metrics["budget"], metrics["budget_use"]) == (2000, 1088 / 2000)
    assert str(jsonl.read_log(tmp_path / "log.jsonl").report()) == str(gnmr_fx.report(model))


def test_without_a_configuration_the_recommended_one_is_in_force() -> None:
    coarse = gnmr_fx.Recipe(gnmr_fx.Format("int2", "tensor"), gnmr_fx.Format("int8"))
    for recipe, signal in ((coarse, "error"), ("saved-int2-int8", "gnmr")):
        torch.manual_seed(0)
        model = gnmr_fx.instrument(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)), recipe, max_active=1)
        controller = gnmr_fx.controller(model)
        assert controller.config == gnmr_fx.GnmrConfig(signal=signal)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(controller.config.warmup_steps + 2):
            model(torch.randn(4, 128)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(controller.active) == (signal == "error")
        assert ("errors measured" in str(gnmr_fx.report(model))) == (signal == "error")
