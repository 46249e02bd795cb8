"""Signals, automatic thresholds, histories per path, budgets by cost and hysteresis: formulas and guarantees."""

from __future__ import annotations

import io
import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gnmr_fx import signals
from gnmr_fx.config import BudgetUnit, GnmrConfig, HistoryKind, Signal
from gnmr_fx.controller import (
    AUTO_GAIN,
    MAX_RATIO,
    MISSING,
    Decision,
    capacity,
    check_costs,
    digest,
    init,
    state_from_dict,
    state_to_dict,
    update,
)
from gnmr_fx.errors import BudgetError, StateMismatchError

INF, NAN = math.inf, math.nan
ANY = st.one_of(st.sampled_from([0.0, 1.0, 1e308, 5e-324, MISSING, INF, NAN]), st.floats(), st.floats(0.0, 10.0))


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def indices(mask: Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


# Levels ---------------------------------------------------------------------------------------------------------------


def test_gap_is_error_times_share_of_the_gradient() -> None:
    errors, known = [0.1, 0.2, 0.3], [True, True, False]
    assert signals.gap(errors, [3.0, 4.0, 99.0], known) == pytest.approx([0.1 * 3 / 5, 0.2 * 4 / 5, 0.0])
    assert signals.gap(errors, [0.0, 0.0, 1.0], known) == [0.0] * 3


@given(st.lists(st.floats(0.0, 1e308), min_size=1, max_size=8))
def test_gaps_of_any_norms_are_shares(norms: list[float]) -> None:
    found = signals.gap([1.0] * len(norms), norms, [True] * len(norms))
    assert all(0.0 <= share <= 1.0 + 1e-12 for share in found)
    if max(norms) > 1e-300:
        assert sum(share * share for share in found) == pytest.approx(1.0)


def test_the_error_signal_looks_at_errors_alone_and_holds_the_last_one() -> None:
    config = GnmrConfig(signal="error", alpha=0.3, beta=INF, warmup_steps=0, lock_steps=1)
    state = init(2, config, 1)
    found = []
    for norms, errors in (
        ([9.0, 1.0], None),  # nothing measured yet
        ([1.0, 1.0], [0.1, 0.4]),
        ([900.0, 1.0], None),  # held
        ([1.0, 1.0], [0.5, 0.4]),
        ([1.0, MISSING], [MISSING, 0.9]),  # no gradient in this step, but an error
        ([1.0, 1.0], [0.2, MISSING]),
    ):
        state, decision = update(state, norms, config, errors=errors)
        found.append((decision.gnmr.tolist(), indices(decision.risky), indices(decision.active)))
    assert found == [
        ([0.0, 0.0], [], []),
        ([0.1, 0.4], [1], [1]),
        ([0.1, 0.4], [1], [1]),
        ([0.5, 0.4], [0, 1], [0]),
        ([0.5, 0.0], [0], [0]),
        ([0.2, 0.9], [1], [1]),
    ]


def test_a_jump_of_the_error_passes_beta() -> None:
    config = GnmrConfig(signal="error", alpha=INF, beta=3.0, warmup_steps=0, window=2)
    state = init(1, config, 1)
    changes = []
    for error in (0.1, 0.1, 0.4, 0.4, 0.4):
        state, decision = update(state, [1.0], config, errors=[error])
        changes.append((round(decision.delta_gnmr.item(), 6), decision.risky.item()))
    assert changes == [(1.0, False), (1.0, False), (4.0, True), (1.6, False), (1.0, False)]


@pytest.mark.parametrize("signal", ["error", "gap"])
def test_an_error_that_is_not_finite_is_a_risk_and_no_history(signal: Signal) -> None:
    config = GnmrConfig(signal=signal, alpha=0.5, beta=INF, warmup_steps=3)
    before, _ = update(init(2, config, 1), [1.0, 1.0], config, errors=[0.1, 0.1])
    after, decision = update(before, [1.0, 1.0], config, errors=[0.1, NAN])
    assert indices(decision.active) == indices(decision.risky) == [1]
    assert decision.risk[1] == INF
    assert after.pasts[1] == before.pasts[1]
    assert after.errors == (0.1, MISSING)


# Guarantees, whatever is heard ----------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[GnmrConfig, float, list[list[list[float]]]]:
    """A configuration, a budget, and for each step norms, errors and costs."""
    units = draw(st.integers(1, 5))
    signal: Signal = draw(st.sampled_from(["gnmr", "error", "gap"]))
    bounds = st.sampled_from([0.25, 0.9, "auto", INF] + ([2.5] if signal == "gnmr" else []))
    unit: BudgetUnit = draw(st.sampled_from(["units", "bytes", "flops"]))
    config = GnmrConfig(
        signal=signal,
        alpha=draw(bounds),
        beta=draw(st.sampled_from([1.5, "auto", INF])),
        window=draw(st.integers(1, 4)),
        lock_steps=draw(st.integers(1, 4)),
        warmup_steps=draw(st.integers(0, 3)),
        mean=draw(st.sampled_from(["all", "ema", "window"])),
        history=draw(st.sampled_from(["shared", "per_path"])),
        auto_share=draw(st.sampled_from([None, 0.05, 0.5])),
        budget_unit=unit,
        hysteresis=draw(st.sampled_from([1.0, 1.5, 10.0])),
    )
    row = st.lists(ANY, min_size=units, max_size=units)
    prices = st.lists(st.sampled_from([0.0, 1.0, 3.0, 10.0, 64.0, MISSING, INF]), min_size=units, max_size=units)
    steps = draw(st.lists(st.tuples(row, row, prices).map(list), min_size=1, max_size=12))
    budget = draw(st.sampled_from([0, 1, 2, 12, 70, 0.3, 1.0]))
    return config, budget, steps


@given(cases())
def test_guarantees(case: tuple[GnmrConfig, float, list[list[list[float]]]]) -> None:
    config, budget, steps = case
    units = len(steps[0][0])
    state = init(units, config, budget)
    until = [0] * units
    for norms, errors, costs in steps:
        before = state
        state, decision = update(state, norms, config, errors=errors, costs=costs)
        again = update(before, doubles(*norms), config, errors=doubles(*errors), costs=doubles(*costs))
        assert again == (state, decision)

        active, candidates = decision.active, decision.candidates
        assert not (active & ~candidates).any()
        assert torch.equal(decision.refused, candidates & ~active)
        if config.budget_unit == "units":
            assert int(active.sum()) == min(int(candidates.sum()), int(state.max_active))
        else:
            spent = sum(price for price, on in zip(costs, active.tolist(), strict=True) if on)
            assert 0 <= spent <= capacity(state.max_active, costs)
        for u, end in enumerate(until):
            assert decision.step > end or bool(candidates[u])
            if active[u] and decision.risky[u]:
                until[u] = decision.step + config.lock_steps
        for tensor in (decision.gnmr, decision.delta_gnmr, decision.risk):
            assert not tensor.isnan().any()
            assert (tensor >= 0).all()
        numbers = [*state.tau, *(error for error in state.errors if error != MISSING)]
        for past in state.pasts:
            numbers += [past.mean, *past.norms, *past.levels]
        assert all(0.0 <= number < INF for number in numbers)
        assert state.recovered == tuple(active.tolist())

        file = io.BytesIO()
        torch.save(state_to_dict(state), file)
        file.seek(0)
        loaded = state_from_dict(torch.load(file, weights_only=True), config, budget, units)
        assert loaded == state
        assert digest(loaded) == digest(state)


@given(st.lists(st.lists(st.floats(0.01, 100.0), min_size=4, max_size=4), min_size=2, max_size=60), st.data())
def test_automatic_thresholds_let_their_share_pass(rows: list[list[float]], data: st.DataObject) -> None:
    """Whatever the levels are: the mean share over T steps is within |log tau_T/tau_0| / (gain T) of the target."""
    share = data.draw(st.sampled_from([0.05, 0.25, 0.7]))
    config = GnmrConfig(signal="error", alpha="auto", beta=INF, auto_share=share, warmup_steps=0)
    state, _ = update(init(4, config, 2), [1.0] * 4, config, errors=rows[0])
    first, over = state.tau[0], 0
    for row in rows[1:]:
        state, decision = update(state, [1.0] * 4, config, errors=row)
        over += int(decision.risky.sum())
    steps = len(rows) - 1
    drift = abs(math.log(state.tau[0] / first)) / AUTO_GAIN
    assert abs(over / 4 - share * steps) <= drift + 1e-6
    assert 0.01 * math.exp(-AUTO_GAIN) <= state.tau[0] <= 100.0 * math.exp(AUTO_GAIN)


def test_automatic_thresholds_of_ordinary_norms_pass_the_budgets_share() -> None:
    generator = torch.Generator().manual_seed(0)
    norms = torch.randn(600, 20, generator=generator).mul(0.6).exp()
    for changes, target in (({"beta": INF}, 0.25), ({"beta": "auto"}, 0.25), ({"auto_share": 0.02, "beta": INF}, 0.02)):
        config = GnmrConfig(alpha="auto", warmup_steps=20, **changes)  # type: ignore[arg-type]
        state, risky = init(20, config, 5), 0
        for row in norms:
            state, decision = update(state, row, config)
            risky += int(decision.risky.sum())
        share = risky / (580 * 20)
        assert (0.5 if changes["beta"] == "auto" else 0.8) * target < share < 1.2 * target


def test_no_automatic_threshold_fires_before_it_has_seen_a_level() -> None:
    config = GnmrConfig(alpha="auto", beta="auto", warmup_steps=0)
    state, decision = update(init(3, config, 1), [1.0, 2.0, 3.0], config)
    assert decision.alpha == decision.beta == INF
    assert not decision.risky.any()
    state, decision = update(state, [1.0, 2.0, 3.0], config)
    assert state.tau[0] == 1.0, "the quantile of the first levels"


# Histories per path ---------------------------------------------------------------------------------------------------


def run_switching(history: HistoryKind) -> list[Decision]:
    """A norm that halves whenever the unit is on the recovery path."""
    config = GnmrConfig(alpha=1.5, beta=INF, window=4, warmup_steps=2, lock_steps=2, history=history)
    state, found = init(1, config, 1), []
    for step in range(30):
        norm = (8.0 if step == 4 else 1.0) * (0.5 if state.recovered[0] else 1.0)
        state, decision = update(state, [norm], config)
        found.append(decision)
    return found


def test_a_switch_is_no_risk_where_histories_are_kept_per_path() -> None:
    per_path = run_switching("per_path")
    assert [d.step for d in per_path if d.risky.any()] == [5]
    assert [d.step for d in per_path if d.active.any()] == [5, 6, 7]
    # On the recovery path the norm is judged by its own past, of which there is none at first.
    assert [d.gnmr.item() for d in per_path[5:8]] == [1.0, 1.0, 1.0]
    assert run_switching("shared")[5].gnmr.item() < 0.5


def test_the_path_that_ran_may_be_told() -> None:
    config = GnmrConfig(history="per_path", window=2)
    state, _ = update(init(2, config, 1), [3.0, 5.0], config, recovered=torch.tensor([False, True]))
    assert [past.mean for past in state.pasts] == [3.0, 0.0, 0.0, 5.0]
    assert [past.steps for past in state.pasts] == [1, 0, 0, 1]


@pytest.mark.parametrize("changes", [{"signal": "error"}, {"history": "per_path"}])
def test_a_state_of_another_signal_or_history_is_refused(changes: dict[str, str]) -> None:
    config, other = GnmrConfig(), GnmrConfig(**changes)  # type: ignore[arg-type]
    with pytest.raises(StateMismatchError, match=f"{next(iter(changes))} of the state: expected"):
        update(init(2, config, 1), [1.0, 1.0], other)
    with pytest.raises(StateMismatchError, match=f"{next(iter(changes))} of the state: expected"):
        state_from_dict(state_to_dict(init(2, config, 1)), other, 1, 2)


# Budgets by cost ------------------------------------------------------------------------------------------------------


def choose(risks: list[float], costs: list[float], budget: float, **changes: object) -> list[int]:
    """The units chosen where the risk of each is as given."""
    config = GnmrConfig(
        signal="error",
        alpha=1e-9,
        beta=INF,
        warmup_steps=0,
        budget_unit="bytes",
        **changes,  # type: ignore[arg-type]
    )
    _, decision = update(init(len(risks), config, budget), [1.0] * len(risks), config, errors=risks, costs=costs)
    return indices(decision.active)


def test_units_are_taken_by_risk_per_cost() -> None:
    assert choose([0.95, 0.5, 0.4], [10, 4, 3], 10) == [0], "the riskiest outweighs the two that are denser"
    assert choose([0.8, 0.5, 0.4], [10, 4, 3], 10) == [1, 2]
    assert choose([0.8, 0.5, 0.4], [10, 4, 3], 17) == [0, 1, 2]
    assert choose([0.5, 0.5, 0.5], [3, 3, 3], 7) == [0, 1]
    assert choose([0.1, 0.9], [1, 100], 100) == [1], "the densest would leave no room for nearly all of the risk"
    assert choose([0.5, 0.5], [MISSING, INF], 100) == []
    assert choose([0.5, 0.5], [0, 101], 100) == [0]
    assert choose([0.5, 0.5], [1, 1], 0) == []


@given(st.lists(st.tuples(st.floats(0.001, 1.0), st.integers(1, 50)), min_size=1, max_size=9), st.integers(1, 120))
def test_at_least_half_of_the_best_choice(units: list[tuple[float, int]], budget: int) -> None:
    risks, costs = [risk for risk, _ in units], [float(cost) for _, cost in units]
    found = choose(risks, costs, budget)
    assert sum(costs[i] for i in found) <= budget
    subsets = itertools.chain.from_iterable(itertools.combinations(range(len(units)), n) for n in range(len(units) + 1))
    best = max(sum(risks[i] for i in s) for s in subsets if sum(costs[i] for i in s) <= budget)
    assert sum(risks[i] for i in found) >= best / 2 - 1e-12


def test_a_share_is_one_of_what_all_units_cost() -> None:
    assert capacity(0.25, [10.0, 30.0, INF, MISSING]) == 10.0
    assert choose([0.5, 0.4, 0.3], [10, 10, 20], 0.5) == [0, 1]


def test_a_budget_below_the_cheapest_unit_is_an_error() -> None:
    with pytest.raises(BudgetError, match=r"expected at least the 10 bytes .* found 9, which no unit fits into"):
        check_costs(9, [30.0, 10.0, INF], "bytes")
    with pytest.raises(BudgetError, match=r"the 10 flops .* found 4 \(0.1 of all units' 40\)"):
        check_costs(0.1, [30.0, 10.0, INF, MISSING], "flops")
    check_costs(10, [30.0, 10.0], "bytes")
    check_costs(0, [30.0, 10.0], "bytes")
    check_costs(9, [INF, MISSING], "bytes")


def test_costs_have_to_be_given() -> None:
    config = GnmrConfig(budget_unit="flops")
    with pytest.raises(StateMismatchError, match="costs: expected what each of the 2 units costs in flops, found None"):
        update(init(2, config, 0.5), [1.0, 1.0], config)


# Hysteresis -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.floats(1.1, 50.0), min_size=5, max_size=5), min_size=1, max_size=15), st.integers(1, 4))
def test_only_what_is_clearly_riskier_displaces_what_is_recovered(rows: list[list[float]], budget: int) -> None:
    factor = 2.0
    config = replace(
        GnmrConfig(signal="error", alpha=1e-3, beta=INF, warmup_steps=0), hysteresis=factor, budget_unit="units"
    )
    state = init(5, config, budget)
    for row in rows:
        before = torch.tensor(state.recovered)
        state, decision = update(state, [1.0] * 5, config, errors=row)
        kept_out = decision.refused & before
        new = decision.active & ~before
        if kept_out.any() and new.any():
            assert decision.risk[new].min() > factor * decision.risk[kept_out].max()


def test_ties_go_to_what_is_recovered_already() -> None:
    for factor, expected in ((1.0, [0]), (1.0001, [1])):
        config = GnmrConfig(signal="error", alpha=0.1, beta=INF, warmup_steps=0, hysteresis=factor)
        state, _ = update(init(2, config, 1), [1.0, 1.0], config, errors=[0.0, 0.5])
        _, decision = update(state, [1.0, 1.0], config, errors=[MAX_RATIO, MAX_RATIO])
        assert indices(decision.active) == expected
