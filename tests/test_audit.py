"""``audit``: gaps against gradients taken by hand, the oracle's set, and everything left as it was."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gnmr_fx
from gnmr_fx.audit import spearman
from tests.loops import CONFIG, chain, decoder, noisy, readable_kernels, relative_error, train
from tests.toys import Stack

RECIPE = "saved-int2-int8"


@pytest.fixture(autouse=True, scope="module")
def _readable_kernels() -> Iterator[None]:
    with readable_kernels():
        yield


def loss_of(model: nn.Module, x: Tensor | None = None) -> Callable[[], Tensor]:
    data = noisy(1)[0] if x is None else x
    return lambda: model(data).square().mean()


def gradient(model: nn.Module, loss_fn: Callable[[], Tensor], which: Any) -> dict[str, Tensor]:
    """The whole gradient with guards pinned by hand."""
    gnmr_fx.controller(model).force(which)
    model.zero_grad()
    loss_fn().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    gnmr_fx.controller(model).force(None)
    return found


def by_hand(model: nn.Module, loss_fn: Callable[[], Tensor]) -> list[float]:
    """The gap of each unit, one at a time."""
    low, gaps = gradient(model, loss_fn, "low"), []
    for unit in gnmr_fx.controller(model).units:
        changed = gradient(model, loss_fn, [unit.name])
        gaps.append(sum(float((changed[n] - low[n]).double().square().sum()) for n in low) ** 0.5)
    return gaps


def test_gaps_are_those_of_one_unit_at_a_time_in_two_passes() -> None:
    model = gnmr_fx.instrument(chain(4), RECIPE, max_active=2, config=CONFIG)
    loss_fn = loss_of(model)
    found = gnmr_fx.audit(model, loss_fn, progress=False)
    assert (found.passes, found.is_exact, found.estimate_error) == (2, True, 0.0)
    assert found.gaps == pytest.approx(by_hand(model, loss_fn), rel=1e-5)
    each = gnmr_fx.audit(model, loss_fn, each=True, progress=False)
    assert each.passes == 6
    assert each.gaps == pytest.approx(found.gaps, rel=1e-5)
    low, high = gradient(model, loss_fn, "low"), gradient(model, loss_fn, "high")
    assert found.error_low == pytest.approx(relative_error(low, high), rel=1e-5)
    best = sorted(range(4), key=lambda i: -found.gaps[i])[:2]
    assert [i for i, inside in enumerate(found.oracle) if inside] == sorted(best)
    everything = gradient(model, loss_fn, [found.units[i] for i in best])
    remaining = sum(float((everything[n] - high[n]).double().square().sum()) for n in high) ** 0.5
    norm = sum(float(high[n].double().square().sum()) for n in high) ** 0.5
    assert found.error_with([float(inside) for inside in found.oracle]) == pytest.approx(remaining / norm, rel=1e-4)


def test_units_that_influence_one_another_take_a_pass_each() -> None:
    built = decoder()
    gnmr_fx.instrument(built.model, RECIPE, max_active=2, scope=gnmr_fx.AllSaved(min_bytes=1))

    def loss_fn() -> Tensor:
        return built.loss(built.model(*built.args))

    found = gnmr_fx.audit(built.model, loss_fn, progress=False)
    assert (found.passes, found.is_exact) == (2 + len(found.units), True)
    assert found.gaps == pytest.approx(by_hand(built.model, loss_fn), rel=1e-4)
    estimate = gnmr_fx.audit(built.model, loss_fn, each=False, progress=False)
    assert (estimate.passes, estimate.is_exact) == (5, False)
    top = sorted(range(len(found.units)), key=lambda i: -estimate.gaps[i])[:3]
    worst = max(abs(estimate.gaps[i] - found.gaps[i]) / found.gaps[i] for i in top)
    assert estimate.estimate_error == pytest.approx(worst, rel=1e-3)
    assert estimate.estimate_error > 0
    assert "off by up to" in str(estimate)


@pytest.mark.parametrize("compiled", [False, True])
def test_everything_is_left_as_it_was(compiled: bool) -> None:
    """Twins train with dropout and batch statistics; one is audited on the way, in the middle of an accumulation."""
    config = gnmr_fx.GnmrConfig(signal="gap", signal_every=2, warmup_steps=1, lock_steps=2)
    states: list[Any] = []
    for audited in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Dropout(0.3), nn.Linear(40, 40)).train()
        fmt = gnmr_fx.Format("int2", rounding="stochastic")
        gnmr_fx.instrument(model, gnmr_fx.Recipe(fmt, gnmr_fx.Format("int8")), max_active=1, config=config)
        call = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, x in enumerate(noisy(7)):
            call(x).square().mean().backward()
            if audited and step in (3, 4):
                for _ in range(1 + (step == 3)):
                    found = gnmr_fx.audit(call, loss_of(call, noisy(9)[8]), progress=False)
                    assert found.is_exact
            call(x + 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        controller = gnmr_fx.controller(model)
        kept = [copy.deepcopy(unit.observation) for unit in controller.units]
        state = controller.state_dict() | {"seconds": 0.0}
        states.append((model.state_dict(), state, list(controller.events), kept, torch.get_rng_state()))
    (weights, controller_state, events, kept, rng), other = states
    assert all(torch.equal(other[0][name], value) for name, value in weights.items())
    assert_equal(other[1], controller_state)
    assert other[2] == events
    assert events, "nothing was decided: the test tests nothing"
    assert other[3] == kept
    assert torch.equal(other[4], rng)


def assert_equal(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            assert_equal(a[name], b[name])
    else:
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def test_gradients_and_an_error_inside_leave_things_too() -> None:
    model = gnmr_fx.instrument(chain(3), RECIPE, max_active=1)
    loss_of(model)().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    values = {name: p.grad.clone() for name, p in model.named_parameters()}
    gnmr_fx.audit(model, loss_of(model), progress=False)
    calls = itertools.count()

    def failing() -> Tensor:
        if next(calls):
            raise ZeroDivisionError
        return loss_of(model)()

    with pytest.raises(ZeroDivisionError):
        gnmr_fx.audit(model, failing, progress=False)
    for name, p in model.named_parameters():
        assert p.grad is gradients[name]
        assert torch.equal(p.grad, values[name])
    assert not gnmr_fx.controller(model).flags.any()
    assert gnmr_fx.controller(model).probe.is_open is False


def test_how_close_the_controller_came() -> None:
    torch.manual_seed(0)
    model = gnmr_fx.instrument(chain(4), RECIPE, max_active=2, config=CONFIG)
    train(model, noisy(24))
    report = gnmr_fx.report(model)
    found = gnmr_fx.audit(model, loss_of(model), recent_steps=10, progress=False)
    assert found.active == report.active
    for unit, share in zip(found.units, found.recent, strict=True):
        track = [p.on for p in report.periods[unit] for _ in range(p.start, p.stop)]
        assert share == sum(track[-10:]) / 10
    squares = [gap**2 for gap in found.gaps]
    best = sum(sorted(squares)[-2:])
    assert found.share_of_gain == pytest.approx(sum(s * r for s, r in zip(squares, found.recent, strict=True)) / best)
    assert found.gain_of([float(inside) for inside in found.oracle]) == pytest.approx(1.0)
    assert found.random_share == pytest.approx(sum(found.recent) / 4 * sum(squares) / best)
    risk = gnmr_fx.controller(model).decision.risk.tolist()
    assert found.rank_correlation["risk"] == pytest.approx(spearman(risk, found.gaps), nan_ok=True)
    assert set(found.rank_correlation) == {"risk", "norm", "error", "gap"}
    text = str(found)
    assert "last" in text.splitlines()[2]
    assert "share of the oracle's gain" in text
    assert json.loads(found.to_json())["share_of_gain"] == pytest.approx(found.share_of_gain)


def test_the_gap_signal_ranks_units_that_differ(tmp_path: Any) -> None:
    """Operands of ever larger error, by outliers of ever larger size: the estimate has to see it."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(64, 8) for _ in range(5)).train()
    recipe = gnmr_fx.Recipe(gnmr_fx.Format("int4", "tensor"), gnmr_fx.Format("int8"))
    gnmr_fx.instrument(model, recipe, max_active=2)
    x = torch.randn(32, 64)

    def loss_fn() -> Tensor:
        total = torch.zeros(())
        for size, layer in enumerate(model):
            own = x.clone()
            own[0, 0] = 1.0 + 8.0 * size
            total = total + layer(own).square().mean()
        return total

    found = gnmr_fx.audit(model, loss_fn, progress=False)
    assert found.rank_correlation["gap"] == pytest.approx(1.0)
    assert found.rank_correlation["error"] == pytest.approx(1.0)
    assert found.oracle == (False, False, False, True, True)
    assert found.risks is None
    assert found.plot(tmp_path / "audit.png").stat().st_size > 0


def test_the_oracle_of_a_byte_budget() -> None:
    config = gnmr_fx.GnmrConfig(budget_unit="bytes")
    model = gnmr_fx.instrument(chain(4), RECIPE, max_active=0.5, config=config)
    found = gnmr_fx.audit(model, loss_of(model), progress=False)
    assert sum(found.oracle) == 2
    assert sum(cost for cost, inside in zip(found.costs, found.oracle, strict=True) if inside) <= 0.5 * sum(found.costs)
    assert "50% of all units' bytes" in str(found)


def test_a_frozen_unit_has_no_gap() -> None:
    model = chain(3)
    model[1].weight.requires_grad_(False)
    gnmr_fx.instrument(model, RECIPE)
    found = gnmr_fx.audit(model, loss_of(model), progress=False)
    assert found.gaps[1] == 0.0
    assert found.costs[1] is None
    assert not found.oracle[1]
    assert min(found.gaps[0], found.gaps[2]) > 0


# Spearman -------------------------------------------------------------------------------------------------------------


def test_spearman_by_hand() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 1e9]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(1 - 6 * 4 / (5 * 24))
    # Ties at their mean rank: ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4.
    assert spearman([1, 5, 5, 9], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))
    assert math.isnan(spearman([1], [1]))
    assert spearman([1, math.inf, 3], [1, 9, 3]) == pytest.approx(1.0)


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=20))
def test_spearman_knows_only_the_order(values: list[int]) -> None:
    found = spearman(values, [math.exp(value) for value in values])
    assert math.isnan(found) if len(set(values)) == 1 else found == pytest.approx(1.0)


# Errors ---------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_audited() -> None:
    with pytest.raises(gnmr_fx.NotInstrumentedError):
        gnmr_fx.audit(chain(), lambda: torch.zeros(()))
    model = gnmr_fx.instrument(chain(), RECIPE)
    model.eval()
    with pytest.raises(gnmr_fx.AuditError, match="expected a model in training mode"):
        gnmr_fx.audit(model, loss_of(model))
    model.train()
    for bad, message in (
        (lambda: 3.0, "found 3.0"),
        (lambda: model(noisy(1)[0]), r"found a tensor of shape \(8, 40\)"),
        (lambda: loss_of(model)().detach(), "does not require a gradient"),
        (lambda: loss_of(model)() * math.inf, "expected a finite loss, found inf"),
    ):
        with pytest.raises(gnmr_fx.AuditError, match=message):
            gnmr_fx.audit(model, bad, progress=False)  # type: ignore[arg-type]
    same = gnmr_fx.instrument(Stack(), gnmr_fx.Recipe(gnmr_fx.Format("int4"), gnmr_fx.Format("int4")))
    with pytest.raises(gnmr_fx.AuditError, match="expected a recipe with a recovery path that differs"):
        gnmr_fx.audit(same, loss_of(same, torch.randn(4, 8)), progress=False)


def test_there_is_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    model = gnmr_fx.instrument(chain(3), RECIPE)
    gnmr_fx.audit(model, loss_of(model), each=True)
    assert "audit: 100%" in capsys.readouterr().err
