"""The controller against a plain-Python transcription of its definitions, and its guarantees on any norms."""

import io
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gnmr_fx.config import GnmrConfig, MeanKind, Threshold, threshold
from gnmr_fx.controller import (
    MAX_RATIO,
    MISSING,
    STATE_VERSION,
    Decision,
    State,
    init,
    state_from_dict,
    state_to_dict,
    update,
)
from gnmr_fx.errors import BudgetError, ConfigError, GnmrError, StateMismatchError

MEANS: tuple[MeanKind, ...] = ("all", "ema", "window")
INF, NAN = math.inf, math.nan


# --- helpers ---


def run(
    rows: Sequence[Sequence[float]], config: GnmrConfig, max_active: int | float, state: State | None = None
) -> Iterator[tuple[State, Decision]]:
    """Updates over the rows of norms, yielding the state after and the decision of each."""
    if state is None:
        state = init(len(rows[0]), config, max_active)
    for row in rows:
        state, decision = update(state, row, config)
        yield state, decision


def decisions(rows: Sequence[Sequence[float]], config: GnmrConfig, max_active: int | float) -> list[Decision]:
    return [decision for _, decision in run(rows, config, max_active)]


def indices(mask: Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def contents(record: State | Decision) -> str:
    """Equal where all bits are: the shortest text that a float is read back from. -0.0 and 0.0 differ."""
    return repr(record)


def column(state: State, name: str) -> Tensor:
    """An entry of the saved form."""
    value = state_to_dict(state)[name]
    assert isinstance(value, Tensor)
    return value


def plain(**changes: object) -> GnmrConfig:
    """A configuration without warm-up and with short times, for tests by hand."""
    base = GnmrConfig(alpha=3.0, beta=INF, window=4, lock_steps=2, warmup_steps=0)
    return replace(base, **changes)  # type: ignore[arg-type]


# --- the oracle ---


@dataclass
class Unit:
    """The history of one unit, as the definitions state it."""

    norms: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    lock: int = 0


def mean_of(values: Sequence[float]) -> float:
    return float(sum(map(Fraction, values), Fraction()) / len(values))


def norm_mean(norms: Sequence[float], config: GnmrConfig) -> float:
    if config.mean == "all":
        return mean_of(norms)
    if config.mean == "window":
        return mean_of(norms[-config.window :])
    average, decay = Fraction(norms[0]), Fraction(config.ema_decay)
    for norm in norms[1:]:
        average = decay * average + (1 - decay) * Fraction(norm)
    return float(average)


def ratio_of(value: float, mean: float) -> float:
    if mean == 0.0:
        return 1.0 if value == 0.0 else INF
    return value / mean


def close(found: float, expected: float) -> bool:
    return found == expected or math.isclose(found, expected, rel_tol=1e-10)


def check_step(
    units: list[Unit], norms: Sequence[float], step: int, config: GnmrConfig, max_active: int, got: Decision
) -> None:
    """Compare one decision with the definitions, and advance the histories.

    The ratios must agree to rounding. What is decided from them must follow exactly from the ratios reported,
    so that no rounding decides a comparison here.
    """
    alpha = threshold(config.alpha, step, "alpha")
    beta = threshold(config.beta, step, "beta")
    gnmr, delta = got.gnmr.tolist(), got.delta_gnmr.tolist()
    risk, risky, candidates = [], [], []
    for u, (unit, norm) in enumerate(zip(units, norms, strict=True)):
        if not math.isfinite(norm):
            assert gnmr[u] == delta[u] == INF
            risk.append(INF)
            risky.append(True)
        elif norm < 0:
            assert gnmr[u] == delta[u] == 1.0
            risk.append(0.0)
            risky.append(False)
        else:
            assert close(gnmr[u], ratio_of(norm, norm_mean(unit.norms, config)) if unit.norms else 1.0)
            recent = unit.ratios[-config.window :]
            assert close(delta[u], ratio_of(gnmr[u], mean_of(recent)) if recent else 1.0)
            ratios = (gnmr[u], alpha), (delta[u], beta)
            risk.append(max(0.0 if bound == INF else ratio / bound for ratio, bound in ratios))
            risky.append(step > config.warmup_steps and (gnmr[u] > alpha or delta[u] > beta))
            if unit.norms:
                unit.ratios.append(min(gnmr[u], MAX_RATIO))
            unit.norms.append(norm)
        candidates.append(risky[u] or unit.lock > 0)
    ranked = sorted((u for u in range(len(units)) if candidates[u]), key=lambda u: (-risk[u], u))
    active = [u in ranked[:max_active] for u in range(len(units))]
    for u, unit in enumerate(units):
        unit.lock = config.lock_steps if active[u] and risky[u] else max(unit.lock - 1, 0)

    assert got.step == step
    assert got.risk.tolist() == risk
    assert got.risky.tolist() == risky
    assert got.candidates.tolist() == candidates
    assert got.active.tolist() == active
    assert got.refused.tolist() == [c and not a for c, a in zip(candidates, active, strict=True)]
    assert got.lock.tolist() == [unit.lock for unit in units]
    assert got.missing.tolist() == [math.isfinite(norm) and norm < 0 for norm in norms]


# --- strategies ---

ORDINARY = st.one_of(
    st.sampled_from([0.0, 0.5, 1.0, 2.0, 10.0, MISSING, -7.5, INF, -INF, NAN]),
    st.floats(0.1, 10.0),
    st.floats(1e-100, 1e100),
)
ANY = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 1e38, 1e308, 1.7976931348623157e308, 5e-324, 2e-308, MISSING, INF, NAN]),
    st.floats(),
    st.floats(0.0, 10.0),
)
BOUNDS = st.sampled_from([0.5, 1.0, 1.3, 2.5, 4.0, INF])


@st.composite
def configs(draw: st.DrawFn, *, extreme: bool) -> GnmrConfig:
    bounds = st.one_of(BOUNDS, st.floats(5e-324, allow_nan=False)) if extreme else BOUNDS
    decay = st.floats(0.0, 1.0, exclude_min=True, exclude_max=True) if extreme else st.floats(0.5, 0.999)
    early, late, turn = draw(bounds), draw(bounds), draw(st.integers(1, 10))
    alphas: list[Threshold] = [early, lambda step: late if step > turn else early]
    return GnmrConfig(
        alpha=draw(st.sampled_from(alphas)),
        beta=draw(bounds),
        window=draw(st.integers(1, 9)),
        lock_steps=draw(st.integers(1, 6)),
        warmup_steps=draw(st.integers(0, 4)),
        mean=draw(st.sampled_from(MEANS)),
        ema_decay=draw(decay),
    )


@st.composite
def runs(
    draw: st.DrawFn, norms: st.SearchStrategy[float] = ANY, *, extreme: bool = True, max_units: int = 6
) -> tuple[list[list[float]], GnmrConfig, int]:
    """Rows of norms, a configuration, and a budget from 0 to beyond all units."""
    num_units = draw(st.integers(1, max_units))
    row = st.lists(norms, min_size=num_units, max_size=num_units)
    rows = draw(st.lists(row, min_size=1, max_size=16))
    return rows, draw(configs(extreme=extreme)), draw(st.integers(0, num_units + 1))


# --- agreement with the definitions ---


@settings(max_examples=150, deadline=None)
@given(runs(ORDINARY, extreme=False))
def test_agrees_with_the_definitions(case: tuple[list[list[float]], GnmrConfig, int]) -> None:
    rows, config, max_active = case
    units = [Unit() for _ in rows[0]]
    for row, (state, decision) in zip(rows, run(rows, config, max_active), strict=True):
        check_step(units, row, state.step, config, max_active, decision)
        for u, unit in enumerate(units):
            assert close(state.pasts[u].mean, norm_mean(unit.norms, config) if unit.norms else 0.0)
            recent = unit.ratios[-config.window :][::-1]
            assert list(state.pasts[u].levels) == recent
            assert column(state, "ratios")[:, u].tolist() == recent + [0.0] * (config.window - len(recent))


@pytest.mark.parametrize("mean", MEANS)
def test_agrees_with_the_definitions_on_a_long_run(mean: MeanKind) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(80, 9, generator=generator).mul(0.8).exp().tolist()
    config = GnmrConfig(alpha=2.5, beta=2.0, window=5, lock_steps=7, warmup_steps=9, mean=mean, ema_decay=0.9)
    units = [Unit() for _ in rows[0]]
    seen = {"refused": 0, "active": 0}
    for step, (row, decision) in enumerate(zip(rows, decisions(rows, config, 2), strict=True), start=1):
        check_step(units, row, step, config, 2, decision)
        seen["refused"] += int(decision.refused.sum())
        seen["active"] += int(decision.active.sum())
    assert seen["refused"] > 20
    assert len(rows) < seen["active"] < 2 * len(rows)


# --- guarantees, whatever the norms ---


@settings(max_examples=150, deadline=None)
@given(runs())
def test_guarantees(case: tuple[list[list[float]], GnmrConfig, int]) -> None:
    rows, config, max_active = case
    candidate_until = [0] * len(rows[0])
    for state, decision in run(rows, config, max_active):
        assert int(decision.active.sum()) <= max_active
        assert not (decision.active & ~decision.candidates).any()
        assert torch.equal(decision.refused, decision.candidates & ~decision.active)
        assert int(decision.active.sum()) == min(max_active, int(decision.candidates.sum()))
        for u, until in enumerate(candidate_until):
            assert decision.step > until or bool(decision.candidates[u])
            if decision.active[u] and decision.risky[u]:
                candidate_until[u] = decision.step + config.lock_steps

        for tensor in (decision.gnmr, decision.delta_gnmr, decision.risk):
            assert tensor.dtype == torch.float64
            assert not tensor.isnan().any()
            assert (tensor >= 0).all()
        if decision.active.any() and decision.refused.any():
            assert decision.risk[decision.active].min() >= decision.risk[decision.refused].max()
        for past in state.pasts:
            numbers = [past.mean, *past.norms, *past.levels]
            assert all(0.0 <= number < INF for number in numbers)
            assert len(past.norms) == (min(past.steps, config.window) if config.mean == "window" else 0)
            assert len(past.levels) == min(max(past.steps - 1, 0), config.window)
        assert max(state.locks) <= config.lock_steps


@settings(max_examples=50, deadline=None)
@given(runs())
def test_is_deterministic_and_mutates_nothing(case: tuple[list[list[float]], GnmrConfig, int]) -> None:
    rows, config, max_active = case
    state = init(len(rows[0]), config, max_active)
    for row in rows:
        norms = torch.tensor(row, dtype=torch.float64)
        state_before, norms_before = contents(state), norms.numpy().tobytes()
        first, second = update(state, norms, config), update(state, row, config)
        assert contents(first[0]) == contents(second[0])
        assert contents(first[1]) == contents(second[1])
        assert contents(state) == state_before
        assert norms.numpy().tobytes() == norms_before
        norms.fill_(123.0)
        assert contents(first[0]) == contents(second[0])
        state = first[0]


@settings(max_examples=50, deadline=None)
@given(runs(), st.integers(0, 16))
def test_a_saved_state_goes_on_bitwise(case: tuple[list[list[float]], GnmrConfig, int], split: int) -> None:
    rows, config, max_active = case
    whole = [(contents(after), contents(made)) for after, made in run(rows, config, max_active)]
    state = init(len(rows[0]), config, max_active)
    for row in rows[:split]:
        state, _ = update(state, row, config)
    file = io.BytesIO()
    torch.save(state_to_dict(state), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    loaded = state_from_dict(saved, config, max_active, len(rows[0]))
    assert contents(loaded) == contents(state)
    rest = [(contents(after), contents(made)) for after, made in run(rows[split:], config, max_active, loaded)]
    assert rest == whole[split:]


@pytest.mark.parametrize("mean", MEANS)
def test_a_unit_does_not_depend_on_the_others(mean: MeanKind) -> None:
    generator = torch.Generator().manual_seed(1)
    history = torch.rand(12, generator=generator).tolist()
    config = plain(mean=mean, window=7)
    alone = decisions([[norm] for norm in history], config, 1)
    crowd = decisions([[7.0, *[norm] * 500, 0.1] for norm in history], config, 1)
    for one, many in zip(alone, crowd, strict=True):
        assert torch.equal(many.gnmr[1:-1], one.gnmr.expand(500))
        assert torch.equal(many.delta_gnmr[1:-1], one.delta_gnmr.expand(500))
        assert torch.equal(many.risk[1:-1], one.risk.expand(500))


# --- the rules, by hand ---


def test_first_step_says_nothing() -> None:
    state, decision = update(init(2, plain(), 1), [5.0, 0.0], plain())
    assert decision.step == state.step == 1
    assert decision.gnmr.tolist() == decision.delta_gnmr.tolist() == [1.0, 1.0]
    assert not decision.candidates.any()
    assert not any(past.levels for past in state.pasts)


def test_the_mean_leaves_the_current_step_out() -> None:
    second, third = decisions([[1.0], [3.0], [4.0]], plain(), 1)[1:]
    assert second.gnmr.tolist() == [3.0]
    assert not second.risky.any(), "a ratio equal to the threshold is not above it"
    assert third.gnmr.tolist() == [2.0]


def test_the_three_means() -> None:
    rows = [[1.0], [3.0], [5.0], [6.0]]
    config = plain(window=2, ema_decay=0.5)
    assert decisions(rows, config, 1)[-1].gnmr.tolist() == [6.0 / 3.0]
    assert decisions(rows, replace(config, mean="window"), 1)[-1].gnmr.tolist() == [6.0 / 4.0]
    assert decisions(rows, replace(config, mean="ema"), 1)[-1].gnmr.tolist() == [6.0 / 3.5]


def test_delta_gnmr_looks_back_on_the_window() -> None:
    # GNMR from the second step on: 1, 1, 4; then 3 against the mean 7/4 of the norms.
    rows = [[1.0], [1.0], [1.0], [4.0], [5.25]]
    config = plain(alpha=INF, beta=2.5, window=2)
    found = decisions(rows, config, 1)
    assert [decision.delta_gnmr.item() for decision in found] == [1.0, 1.0, 1.0, 4.0, 3.0 / 2.5]
    assert [indices(decision.risky) for decision in found] == [[], [], [], [0], []]
    assert found[3].risk.tolist() == [4.0 / 2.5]


def test_a_steady_norm_has_ratio_exactly_one() -> None:
    for mean in MEANS:
        for decision in decisions([[0.1, 1e-310, 1e308]] * 30, plain(mean=mean, window=7), 1):
            assert decision.gnmr.tolist() == decision.delta_gnmr.tolist() == [1.0, 1.0, 1.0]


def test_ties_go_to_the_lower_index() -> None:
    spike = decisions([[1.0] * 6, [0.5, 4.0, 8.0, 4.0, 4.0, 8.0]], plain(), 3)[-1]
    assert indices(spike.candidates) == [1, 2, 3, 4, 5]
    assert indices(spike.active) == [1, 2, 5]
    assert indices(spike.refused) == [3, 4]
    many = decisions([[1.0] * 500, [4.0] * 500], plain(), 7)[-1]
    assert indices(many.active) == list(range(7))


def test_a_lock_lasts_lock_steps_and_is_renewed() -> None:
    rows = [[1.0], [9.0], [1.0], [1.0], [1.0]]
    found = decisions(rows, plain(lock_steps=2), 1)
    assert [decision.active.item() for decision in found] == [False, True, True, True, False]
    assert [decision.lock.item() for decision in found] == [0, 2, 1, 0, 0]
    renewed = decisions([[1.0], [9.0], [50.0], [1.0]], plain(lock_steps=2), 1)
    assert [decision.lock.item() for decision in renewed] == [0, 2, 2, 1]


def test_a_risky_unit_displaces_a_locked_one_which_comes_back() -> None:
    rows = [[1.0, 1.0], [9.0, 1.0], [1.0, 40.0], [1.0, 1.0]]
    found = decisions(rows, plain(lock_steps=3), 1)
    assert [indices(decision.active) for decision in found] == [[], [0], [1], [0]]
    assert [indices(decision.refused) for decision in found] == [[], [], [0], [1]]
    assert [decision.lock.tolist() for decision in found] == [[0, 0], [3, 0], [2, 3], [1, 2]]


def test_a_refused_unit_takes_no_lock() -> None:
    refused = decisions([[1.0, 1.0], [9.0, 8.0], [1.0, 1.0]], plain(), 1)
    assert refused[1].lock.tolist() == [2, 0]
    assert indices(refused[2].candidates) == [0]


def test_budgets_of_none_and_of_all() -> None:
    rows = [[1.0, 1.0, 1.0], [9.0, 9.0, 1.0]]
    assert indices(decisions(rows, plain(), 0)[-1].refused) == [0, 1]
    assert not decisions(rows, plain(), 0)[-1].lock.any()
    for max_active in (3, 100, 1.0):
        assert indices(decisions(rows, plain(), max_active)[-1].active) == [0, 1]
    assert init(10, plain(), 0.25).max_active == 2


def test_no_threshold_fires_in_warm_up() -> None:
    rows = [[1.0, 1.0], [99.0, 1.0], [1.0, NAN], [999.0, 1.0]]
    found = decisions(rows, plain(warmup_steps=3), 2)
    assert [indices(decision.risky) for decision in found] == [[], [], [1], [0]]
    assert found[1].risk[0] == 33.0, "the risk is reported all the same"
    assert indices(found[3].active) == [0, 1], "a lock taken in warm-up holds"


def test_zero_mean() -> None:
    found = decisions([[0.0, 0.0, 0.0], [0.0, 1.0, -0.0], [0.0, 1.0, 0.0]], plain(beta=2.5), 3)
    assert found[1].gnmr.tolist() == [1.0, INF, 1.0]
    assert found[1].risk.tolist() == [max(1 / 3, 1 / 2.5), INF, max(1 / 3, 1 / 2.5)]
    assert indices(found[1].risky) == [1]
    assert found[2].gnmr.tolist() == [1.0, 2.0, 1.0]
    assert found[2].delta_gnmr.tolist() == [1.0, 2.0 / MAX_RATIO, 1.0]


def test_zero_mean_of_gnmr() -> None:
    found = decisions([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]], plain(beta=2.5), 2)
    assert found[2].gnmr.tolist() == [0.0, 2.0]
    assert found[2].delta_gnmr.tolist() == [1.0, INF]
    assert indices(found[2].risky) == [1]


def test_an_infinite_threshold_switches_its_criterion_off() -> None:
    off = plain(alpha=INF, beta=INF)
    found = decisions([[0.0, 1.0, 1.0], [1.0, 1e300, NAN]], off, 3)[-1]
    assert found.gnmr.tolist() == [INF, 1e300, INF]
    assert found.risk.tolist() == [0.0, 0.0, INF]
    assert indices(found.risky) == [2]


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("broken", [INF, -INF, NAN])
def test_a_non_finite_norm_is_risky_and_enters_no_history(mean: MeanKind, broken: float) -> None:
    config = plain(mean=mean, beta=2.5)
    before = list(run([[1.0, 1.0], [2.0, 2.0]], config, 1))[-1][0]
    after, decision = update(before, [1.0, broken], config)
    assert decision.gnmr[1] == decision.delta_gnmr[1] == decision.risk[1] == INF
    assert indices(decision.active) == indices(decision.risky) == [1]
    assert not decision.missing.any()
    assert after.pasts[1] == before.pasts[1]
    assert after.pasts[0].levels != before.pasts[0].levels
    assert after.pasts[0].steps == before.pasts[0].steps + 1


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("absent", [MISSING, -5e-324, -1e308])
def test_a_missing_norm_changes_nothing_but_the_lock(mean: MeanKind, absent: float) -> None:
    config = plain(mean=mean, alpha=0.5, beta=0.5, lock_steps=2)
    before = list(run([[1.0, 1.0], [9.0, 1.0]], config, 1))[-1][0]
    assert before.locks == (2, 0)
    after, decision = update(before, [absent, absent], config)
    assert decision.missing.all()
    assert decision.gnmr.tolist() == decision.delta_gnmr.tolist() == [1.0, 1.0]
    assert decision.risk.tolist() == [0.0, 0.0]
    assert not decision.risky.any()
    assert indices(decision.candidates) == indices(decision.active) == [0]
    assert decision.lock.tolist() == [1, 0]
    assert after.pasts == before.pasts
    assert after.step == before.step + 1


@pytest.mark.parametrize("mean", MEANS)
def test_the_state_stays_finite_at_the_ends_of_the_range(mean: MeanKind) -> None:
    largest, smallest = torch.finfo(torch.float64).max, 5e-324
    config = plain(mean=mean, window=3, ema_decay=1e-300)
    # The last column: with a decay this small, the moving average rounds to above the largest float.
    rows = [
        [largest, smallest, smallest, 3 * 2.0**970],
        [largest, smallest, largest, largest],
        [1.0, 0.0, smallest, smallest],
    ]
    for state, decision in run(rows * 4, config, 3):
        for past in state.pasts:
            assert all(map(math.isfinite, (past.mean, *past.norms)))
            assert max(past.levels, default=0.0) <= MAX_RATIO
        assert not decision.gnmr.isnan().any()


def test_schedules_are_given_the_step_from_one() -> None:
    seen: list[int] = []

    def falling(step: int) -> float:
        seen.append(step)
        return 5.0 if step < 3 else 2.0

    found = decisions([[1.0], [4.0], [7.5]], plain(alpha=falling), 1)
    assert seen == [1, 2, 3]
    assert [decision.risky.item() for decision in found] == [False, False, True]
    found = decisions([[1.0], [1.0], [2.0]], plain(alpha=INF, beta=falling), 1)
    assert found[-1].risk.tolist() == [2.0 / 2.0]


def test_a_bad_schedule_is_reported_in_the_step_in_which_it_is_bad() -> None:
    config = plain(beta=lambda step: 3.0 - step)
    state, _ = update(init(1, config, 1), [1.0], config)
    state, _ = update(state, [1.0], config)
    with pytest.raises(ConfigError, match=r"beta: expected .* found 0\.0 from the schedule at step 3"):
        update(state, [1.0], config)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_floating_tensor_will_do(dtype: torch.dtype) -> None:
    config = plain()
    state, _ = update(init(3, config, 1), torch.ones(3, dtype=dtype, requires_grad=True), config)
    state, decision = update(state, torch.tensor([4.0, 0.5, -1.0], dtype=dtype), config)
    assert decision.gnmr.tolist() == [4.0, 0.5, 1.0]
    assert decision.gnmr.dtype == column(state, "mean").dtype == torch.float64
    assert all(type(past.mean) is float for past in state.pasts)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_state_is_on_the_cpu_whatever_the_default_device(device: str) -> None:
    config = plain(mean="window")
    with torch.device(device):
        state, _ = update(init(2, config, 1), [1.0, 1.0], config)
        state, decision = update(state, [9.0, 8.0], config)
    assert indices(decision.active) == [0]
    tensors = [value for value in state_to_dict(state).values() if isinstance(value, Tensor)]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


# --- errors ---


@pytest.mark.parametrize(
    ("norms", "message"),
    [
        ([1.0, 2.0], r"norms: expected shape \(3,\), found \(2,\)"),
        (torch.ones(4), r"norms: expected shape \(3,\), found \(4,\)"),
        (torch.ones(3, 1), r"norms: expected shape \(3,\), found \(3, 1\)"),
        (1.0, r"norms: expected shape \(3,\), found \(\)"),
        (torch.ones(3, dtype=torch.int64), "norms: expected a floating dtype, found torch.int64"),
        (torch.ones(3, dtype=torch.complex64), "norms: expected a floating dtype, found torch.complex64"),
        (["a", "b", "c"], "norms: expected a tensor or a sequence of floats"),
        ([1.0, None, 2.0], "norms: expected a tensor or a sequence of floats"),
        ([[1.0], [2.0, 3.0], [4.0]], "norms: expected a tensor or a sequence of floats"),
    ],
)
def test_norms_that_do_not_fit(norms: list[float], message: str) -> None:
    with pytest.raises(StateMismatchError, match=message):
        update(init(3, plain(), 1), norms, plain())


@pytest.mark.parametrize("num_units", [0, -1, 2.0, True])
def test_invalid_number_of_units(num_units: int) -> None:
    with pytest.raises(ConfigError, match="num_units: expected an int of at least 1, found"):
        init(num_units, plain(), 1)


def test_invalid_budget() -> None:
    with pytest.raises(BudgetError, match="max_active: expected"):
        init(3, plain(), -1)


def test_update_wants_the_configuration_of_the_state() -> None:
    state = init(3, plain(window=4), 1)
    with pytest.raises(StateMismatchError, match=r"window of the state: expected 5 .* found 4"):
        update(state, [1.0] * 3, plain(window=5))
    with pytest.raises(StateMismatchError, match=r"mean of the state: expected 'ema' .* found 'all'"):
        update(state, [1.0] * 3, plain(mean="ema"))
    update(state, [1.0] * 3, plain(alpha=9.0, lock_steps=9, warmup_steps=9))


# --- the saved form ---


def test_saved_form_is_plain_and_a_copy() -> None:
    for mean in MEANS:
        config = plain(mean=mean)
        state = list(run([[1.0, 2.0], [3.0, 4.0]], config, 1))[-1][0]
        before = contents(state)
        saved = state_to_dict(state)
        assert saved["version"] == STATE_VERSION
        assert saved["mean_kind"] == mean
        assert all(type(value) in (Tensor, int, str) for value in saved.values())
        assert all(value.numel() for value in saved.values() if isinstance(value, Tensor))
        loaded = state_from_dict(saved, config, 1, 2)
        for value in saved.values():
            if isinstance(value, Tensor):
                value.fill_(7)
        assert contents(state) == contents(loaded) == before


def test_the_digest_is_the_same_in_every_process_and_differs_between_states() -> None:
    """Ranks compare it: Python's own hashes of texts would differ between processes."""
    code = (
        "from gnmr_fx.config import GnmrConfig\n"
        "from gnmr_fx.controller import digest, init, update\n"
        "config = GnmrConfig(alpha=1.5, warmup_steps=0)\n"
        "state = init(3, config, 1)\n"
        "for norms in ([0.1, 2.0, -1.0], [0.4, 2.5, 1e-30]):\n"
        "    state, _ = update(state, norms, config)\n"
        "    print(digest(state))\n"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_a_run_may_resume_with_another_budget() -> None:
    config = plain()
    saved = state_to_dict(list(run([[1.0] * 4, [9.0] * 4], config, 4))[-1][0])
    state, decision = update(state_from_dict(saved, config, 0.5, 4), [1.0] * 4, config)
    assert state.max_active == 2
    assert indices(decision.active) == [0, 1]
    assert indices(decision.refused) == [2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": STATE_VERSION + 1}, rf"version of the saved state: expected {STATE_VERSION}, found"),
        ({"num_units": 3}, "units of the saved state: expected 2, found 3"),
        ({"window": 5}, r"window of the state: expected 4 .* found 5"),
        ({"mean_kind": "ema"}, r"mean of the state: expected 'window' .* found 'ema'"),
        ({"step": -1}, "step of the saved state: expected an int of at least 0, found -1"),
        ({"step": 1.5}, "step of the saved state: expected an int of at least 0, found 1.5"),
        ({"mean": torch.ones(3).double()}, r"mean of the saved state: expected .*\(2,\), found .*\(3,\)"),
        (
            {"mean": torch.ones(2)},
            r"mean of the saved state: expected a torch.float64 .* found torch.float32",
        ),
        ({"mean": [1.0, 1.0]}, r"mean of the saved state: expected .* found \[1.0, 1.0\]"),
        ({"ratios": torch.full((4, 2), NAN).double()}, r"ratios of .* finite values .* found 8 others"),
        ({"lock": torch.tensor([-1, 0])}, r"lock of .* expected finite values of at least 0, found 1 others"),
        ({"norms": None}, r"norms of the saved state: expected .* found None"),
    ],
)
def test_saved_states_that_do_not_fit(changes: dict[str, object], message: str) -> None:
    config = plain(mean="window")
    saved = state_to_dict(init(2, config, 1))
    with pytest.raises(StateMismatchError, match=message) as caught:
        state_from_dict(saved | changes, config, 1, 2)
    assert isinstance(caught.value, (GnmrError, ValueError))


@pytest.mark.parametrize("name", list(state_to_dict(init(2, plain(mean="window"), 1))))
def test_saved_states_with_an_entry_absent(name: str) -> None:
    config = plain(mean="window")
    saved = state_to_dict(init(2, config, 1))
    del saved[name]
    with pytest.raises(StateMismatchError, match=f"saved state: expected an entry '{name}', found only"):
        state_from_dict(saved, config, 1, 2)


def test_a_state_of_other_units_or_another_configuration_is_refused() -> None:
    saved = state_to_dict(init(2, plain(), 1))
    with pytest.raises(StateMismatchError, match="units of the saved state: expected 5, found 2"):
        state_from_dict(saved, plain(), 1, 5)
    with pytest.raises(StateMismatchError, match="window of the state: expected 9"):
        state_from_dict(saved, plain(window=9), 1, 2)
    with pytest.raises(StateMismatchError, match="mean of the state: expected 'window'"):
        state_from_dict(saved, plain(mean="window"), 1, 2)
    with pytest.raises(BudgetError):
        state_from_dict(saved, plain(), -1, 2)
