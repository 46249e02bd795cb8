"""GnmrConfig, threshold and resolve_budget: what they accept, and what they say where they do not."""

import copy
import dataclasses
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnmr_fx.config import GnmrConfig, Signal, Threshold, check_budget, resolve_budget, threshold
from gnmr_fx.errors import BudgetError, ConfigError, GnmrError
from gnmr_fx.recipe import RECIPES, Format, Recipe


def test_defaults() -> None:
    config = GnmrConfig()
    assert dataclasses.asdict(config) == {
        "alpha": 8.0,
        "beta": 2.5,
        "window": 8,
        "lock_steps": 50,
        "warmup_steps": 50,
        "mean": "all",
        "ema_decay": 0.99,
        "max_events": 100_000,
        "signal": "gnmr",
        "signal_every": 10,
        "history": "shared",
        "auto_share": None,
        "budget_unit": "units",
        "hysteresis": 1.0,
    }


@pytest.mark.parametrize(
    ("signal", "alpha", "beta"), [("gnmr", 8.0, 2.5), ("error", "auto", 4.0), ("gap", "auto", 4.0)]
)
def test_thresholds_left_out_are_the_signals_own(signal: Signal, alpha: Threshold, beta: Threshold) -> None:
    left_out = GnmrConfig(signal=signal)
    assert left_out == GnmrConfig(signal=signal, alpha=None, beta=None)  # type: ignore[arg-type]
    assert (left_out.alpha, left_out.beta) == (alpha, beta)
    assert GnmrConfig(signal=signal, beta=9.0).beta == 9.0
    assert GnmrConfig(signal=signal, alpha=0.3).alpha == 0.3
    assert GnmrConfig(signal=signal, alpha=math.inf).alpha == math.inf


def test_a_threshold_that_no_relative_error_passes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"alpha: expected a relative error of at most 1 .* found 8\.0"):
        dataclasses.replace(GnmrConfig(), signal="error")


def test_the_papers_rule() -> None:
    paper = GnmrConfig.paper(alpha=2.0, lock_steps=7)
    assert (paper.signal, paper.history, paper.mean, paper.budget_unit, paper.hysteresis) == (
        "gnmr",
        "shared",
        "all",
        "units",
        1.0,
    )
    assert (paper.alpha, paper.lock_steps) == (2.0, 7)
    with pytest.raises(ConfigError, match=r"paper: expected only alpha, .* found mean, hysteresis"):
        GnmrConfig.paper(mean="ema", hysteresis=2.0)


@pytest.mark.parametrize(
    ("low", "signal"),
    [
        (Format("int2", "tensor"), "error"),
        (Format("int4", "tensor", rounding="stochastic"), "error"),
        (Format("int2", "token"), "gnmr"),
        (Format("int2"), "gnmr"),
        (Format("fp8_e4m3", "tensor"), "gnmr"),
        (Format("none"), "gnmr"),
    ],
)
def test_the_recommended_signal_rests_on_the_scales(low: Format, signal: str) -> None:
    recipe = Recipe(low, Format("int8"))
    assert GnmrConfig.recommended(recipe) == GnmrConfig(signal=signal)  # type: ignore[arg-type]
    changed = GnmrConfig.recommended(recipe, lock_steps=7, signal="gap")
    assert changed == GnmrConfig(lock_steps=7, signal="gap")


def test_named_recipes_are_run_under_the_papers_signal() -> None:
    assert {GnmrConfig.recommended(recipe).signal for recipe in RECIPES.values()} == {"gnmr"}


@pytest.mark.parametrize(("given", "expected"), [(0, 0), (1 << 20, 1 << 20), (0.2, 0.2), (1.0, 1.0)])
def test_budgets_that_do_not_count_units(given: float, expected: float) -> None:
    found = check_budget(given, "bytes")
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize("given", [-1, 0.0, 1.5, math.nan, True, None, "1 MiB"])
def test_invalid_budgets_that_do_not_count_units(given: object) -> None:
    with pytest.raises(BudgetError, match="max_active: expected a number of bytes"):
        check_budget(given, "bytes")  # type: ignore[arg-type]


def test_is_a_frozen_value() -> None:
    config = GnmrConfig(alpha=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.alpha = 5.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        GnmrConfig(4.0)  # type: ignore[call-arg]
    assert config == GnmrConfig(alpha=4.0)
    assert hash(config) == hash(GnmrConfig(alpha=4.0))
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert dataclasses.replace(config, alpha=GnmrConfig().alpha) == GnmrConfig()


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("alpha", 0, "positive number"),
        ("alpha", -1.0, "positive number"),
        ("alpha", math.nan, "positive number"),
        ("alpha", -math.inf, "positive number"),
        ("alpha", True, "positive number"),
        ("alpha", "3", "positive number"),
        ("alpha", "automatic", "positive number"),
        ("signal", "eror", "did you mean 'error'?"),
        ("signal", 3, "'gnmr', 'error', 'gap'"),
        ("history", "per-path", "did you mean 'per_path'?"),
        ("budget_unit", "byte", "did you mean 'bytes'?"),
        ("signal_every", 0, "int of at least 1"),
        ("auto_share", 0.0, "(0, 1]"),
        ("auto_share", 1.5, "(0, 1]"),
        ("hysteresis", 0.99, "at least 1"),
        ("hysteresis", math.inf, "at least 1"),
        ("beta", 0.0, "positive number"),
        ("beta", math.nan, "positive number"),
        ("window", 0, "int of at least 1"),
        ("window", 8.0, "int of at least 1"),
        ("window", True, "int of at least 1"),
        ("lock_steps", 0, "int of at least 1"),
        ("warmup_steps", -1, "int of at least 0"),
        ("warmup_steps", None, "int of at least 0"),
        ("max_events", 0, "int of at least 1"),
        ("mean", "median", "'all', 'ema', 'window'"),
        ("mean", ["all"], "'all', 'ema', 'window'"),
        ("ema_decay", 0.0, "strictly between 0 and 1"),
        ("ema_decay", 1.0, "strictly between 0 and 1"),
        ("ema_decay", 1, "strictly between 0 and 1"),
        ("ema_decay", math.nan, "strictly between 0 and 1"),
        ("ema_decay", "0.9", "strictly between 0 and 1"),
    ],
)
def test_invalid_values_say_what_was_expected_and_found(field: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GnmrConfig(**{field: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"{field}: expected ")
    assert expected in message
    assert f"found {value!r}" in message
    assert isinstance(caught.value, (GnmrError, ValueError))


def test_smallest_valid_values() -> None:
    GnmrConfig(alpha=math.inf, beta=5e-324, window=1, lock_steps=1, warmup_steps=0, max_events=1, ema_decay=5e-324)


def test_a_schedule_is_not_called_when_the_config_is_built() -> None:
    def never(step: int) -> float:
        raise AssertionError(step)

    assert GnmrConfig(alpha=never, beta=never).alpha is never


def test_threshold_evaluates_numbers_and_schedules() -> None:
    assert threshold(3, 7, "alpha") == 3.0
    assert isinstance(threshold(3, 7, "alpha"), float)
    assert threshold(lambda step: 1 + 10 / step, 5, "alpha") == 3.0
    assert threshold(lambda _: math.inf, 5, "alpha") == math.inf


@pytest.mark.parametrize("returned", [0, -2.0, math.nan, True, None, "3", torch.tensor(3.0)])
def test_threshold_checks_what_a_schedule_returns(returned: object) -> None:
    with pytest.raises(ConfigError, match=r"^beta: expected .* from the schedule at step 12"):
        threshold(lambda _: returned, 12, "beta")  # type: ignore[arg-type, return-value]


def test_errors_of_a_schedule_pass_through() -> None:
    with pytest.raises(ZeroDivisionError):
        threshold(lambda step: 1 / (step - 3), 3, "alpha")


@pytest.mark.parametrize(
    ("max_active", "num_units", "units"),
    [
        (0, 28, 0),
        (5, 28, 5),
        (28, 28, 28),
        (100, 28, 100),
        (1, 28, 1),
        (1.0, 28, 28),
        (0.5, 28, 14),
        (0.2, 28, 5),
        (0.01, 28, 1),
        (5e-324, 28, 1),
        (0.29, 100, 29),
        (0.57, 100, 57),
        (0.999, 1, 1),
    ],
)
def test_resolve_budget(max_active: float, num_units: int, units: int) -> None:
    assert resolve_budget(max_active, num_units) == units


@given(share=st.floats(0, 1, exclude_min=True), num_units=st.integers(1, 10_000))
def test_a_share_is_at_least_one_unit_and_never_more_than_all(share: float, num_units: int) -> None:
    units = resolve_budget(share, num_units)
    assert 1 <= units <= num_units
    assert units <= max(1.0, share * num_units + 1e-9)
    assert units + 1 > share * num_units


@pytest.mark.parametrize(
    "max_active", [-1, 0.0, -0.5, 1.0000001, 5.0, math.nan, math.inf, True, False, None, "5", torch.tensor(5)]
)
def test_invalid_budgets(max_active: object) -> None:
    with pytest.raises(BudgetError) as caught:
        resolve_budget(max_active, 28)  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith("max_active: expected a number of units (an int of at least 0) or a share")
    assert f"found {max_active!r}" in message
    assert "Pass an int such as 5" in message
