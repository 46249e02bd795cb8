"""Settings of the controller, validated when they are built."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, TypeAlias, get_args

from gnmr_fx.errors import BudgetError, ConfigError

MeanKind: TypeAlias = Literal["all", "ema", "window"]
Threshold: TypeAlias = float | Callable[[int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class GnmrConfig:
    """How the controller turns gradient norms into decisions (see :mod:`gnmr_fx.controller`).

    A step is one controller update, that is one optimizer step; steps count from 1.

    Args:
        alpha: threshold on GNMR, the ratio of a unit's gradient norm to its own mean; dimensionless. A
            positive number, or a callable that takes the step and returns one. ``math.inf`` switches the
            criterion off. A steady norm has ratio 1, so useful values lie above 1.
        beta: threshold on delta-GNMR, the ratio of GNMR to its own recent mean; dimensionless. As ``alpha``.
        window: number of earlier GNMR values of a unit that delta-GNMR looks back on (the paper's delta),
            and of earlier norms for ``mean="window"``; in steps in which the unit had a finite gradient.
        lock_steps: number of steps for which a unit stays a candidate after a step in which it was active
            and risky.
        warmup_steps: number of first steps in which no threshold fires while the histories fill. Units run
            on the low-cost path meanwhile, save those with a non-finite norm, which are risky at any time.
        mean: which mean GNMR divides by: ``"all"``, the arithmetic mean over all earlier steps (the paper's);
            ``"ema"``, an exponential moving average that starts at the first norm; ``"window"``, the
            arithmetic mean of the last ``window`` norms.
        ema_decay: weight of the old value in the moving average, in (0, 1); dimensionless. Only read for
            ``mean="ema"``.
        max_events: largest number of event records kept for the report.

    The default thresholds are passed by less than 1% of the unit-steps of an ordinary run of the demo model
    (``benchmarks/thresholds.py``); the paper's own thresholds are not public.

    Raises:
        ConfigError: a value out of its range. What a callable threshold returns is checked when it is used.
    """

    alpha: Threshold = 5.0
    beta: Threshold = 4.0
    window: int = 8
    lock_steps: int = 50
    warmup_steps: int = 20
    mean: MeanKind = "all"
    ema_decay: float = 0.99
    max_events: int = 100_000

    def __post_init__(self) -> None:
        for name, bound in (("alpha", self.alpha), ("beta", self.beta)):
            if not callable(bound):
                threshold(bound, 1, name)
        _check_integer("window", self.window, minimum=1)
        _check_integer("lock_steps", self.lock_steps, minimum=1)
        _check_integer("warmup_steps", self.warmup_steps, minimum=0)
        _check_integer("max_events", self.max_events, minimum=1)
        if self.mean not in get_args(MeanKind):
            choices = ", ".join(repr(kind) for kind in get_args(MeanKind))
            raise ConfigError(f"mean: expected one of {choices}, found {self.mean!r}. Choose one of these.")
        if not 0.0 < _as_float(self.ema_decay) < 1.0:
            raise ConfigError(
                f"ema_decay: expected a number strictly between 0 and 1, found {self.ema_decay!r}. "
                "Pass the weight of the old average, such as 0.99."
            )


def threshold(value: Threshold, step: int, name: str) -> float:
    """The value of a threshold at a step.

    Args:
        value: a number, or a callable that takes the step and returns a number.
        step: index of the step, from 1.
        name: name of the field, for the error message.

    Returns:
        A positive float, possibly ``inf``.

    Raises:
        ConfigError: the number is NaN, not positive, or no real number (bools and tensors are none).
    """
    found = value(step) if callable(value) else value
    number = _as_float(found)
    if not number > 0.0:
        origin = f" from the schedule at step {step}" if callable(value) else ""
        raise ConfigError(
            f"{name}: expected a positive number (inf switches it off) or a callable from the step to one, "
            f"found {found!r}{origin}. Pass a plain number such as 3.0, or let the schedule return one."
        )
    return number


def resolve_budget(max_active: int | float, num_units: int) -> int:
    """The cap on active units as a number of units.

    Args:
        max_active: an int is a number of units (0 recovers nothing; more than ``num_units`` is no limit); a
            float in (0, 1] is a share of the units. So ``1`` is one unit and ``1.0`` is all of them.
        num_units: number of recoverable units.

    Returns:
        The int as it is, or the share rounded down to whole units, at least 1.

    Raises:
        BudgetError: a negative int, a float outside (0, 1], or neither an int nor a float.
    """
    units = _as_int(max_active)
    if units is not None and units >= 0:
        return units
    share = _as_float(max_active)
    if units is None and 0.0 < share <= 1.0:
        # 0.29 * 100 is 28.999999999999996: without the slack a share would lose the unit it names.
        return max(1, math.floor(share * num_units + 1e-9))
    raise BudgetError(
        "max_active: expected a number of units (an int of at least 0) or a share of the units (a float in "
        f"(0, 1]), found {max_active!r}. Pass an int such as 5, a float such as 0.2, or 0 to recover nothing."
    )


def _as_int(value: object) -> int | None:
    """The value as an int, or None where it is no integer; a bool is none."""
    return int(value) if isinstance(value, Integral) and not _is_bool(value) else None


def _as_float(value: object) -> float:
    """The value as a float, or NaN where it is no real number; a bool is none."""
    return float(value) if isinstance(value, Real) and not _is_bool(value) else math.nan


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _check_integer(name: str, value: object, *, minimum: int) -> None:
    number = _as_int(value)
    if number is None or number < minimum:
        noun = "records" if name == "max_events" else "steps"
        raise ConfigError(
            f"{name}: expected an int of at least {minimum}, found {value!r}. Pass a whole number of {noun}."
        )
