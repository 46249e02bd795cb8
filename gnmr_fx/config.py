"""Settings of the controller, validated when they are built."""

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias, get_args

from gnmr_fx.errors import BudgetError, ConfigError
from gnmr_fx.recipe import Recipe

MeanKind: TypeAlias = Literal["all", "ema", "window"]
Signal: TypeAlias = Literal["gnmr", "error", "gap"]
HistoryKind: TypeAlias = Literal["shared", "per_path"]
BudgetUnit: TypeAlias = Literal["units", "bytes", "flops"]
Threshold: TypeAlias = float | Callable[[int], float] | Literal["auto"]

_THRESHOLDS: dict[Signal, dict[str, Threshold]] = {
    "gnmr": {"alpha": 8.0, "beta": 2.5},
    "error": {"alpha": "auto", "beta": 4.0},
    "gap": {"alpha": "auto", "beta": 4.0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GnmrConfig:
    """How the controller turns gradient norms into decisions (see :mod:`gnmr_fx.controller`).

    A step is one controller update, that is one optimizer step; steps count from 1.

    Args:
        alpha: threshold on the level of the signal: on GNMR, the ratio of a unit's gradient norm to its own
            mean, under the default one. Dimensionless. A positive number, a callable that takes the step and
            returns one, or ``"auto"`` (see ``auto_share``). ``math.inf`` switches the criterion off. A steady
            norm has ratio 1, so useful values lie above 1; a relative error is at most about 1, so useful
            values of the other signals lie below. None: 8.0 for ``"gnmr"``, ``"auto"`` for the others.
        beta: threshold on the change of that level, its ratio to its own recent mean (delta-GNMR);
            dimensionless. As ``alpha``. None: 2.5 for ``"gnmr"``, 4.0 for the others.
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
        signal: what is watched (:mod:`gnmr_fx.signals`): ``"gnmr"``, the gradient norm against its own mean
            (the paper's); ``"error"``, the relative quantization error of what the unit stores or multiplies;
            ``"gap"``, an estimate of how far the whole gradient is off because of the unit.
        signal_every: number of steps from one measurement of the quantization error to the next; the last
            one counts meanwhile. Not read for ``"gnmr"``, which measures none.
        history: whether the means are over all steps (``"shared"``, the paper's), or apart for the steps that
            the unit spent on each path (``"per_path"``), so that a switch, which changes the norm by itself,
            does not look like a risk.
        auto_share: the share of unit-steps that ``"auto"`` thresholds let pass, in (0, 1]; where both
            are, each lets pass half of it. None: the budget's share of the units (or of their costs).
        budget_unit: what ``max_active`` counts: ``"units"``; ``"bytes"``, what the recovery payloads of the
            units take per pass; or ``"flops"``, the floating point operations of their projections, forward
            and backward. Other than units, those of highest risk per cost come first.
        hysteresis: factor of at least 1 on the risk of units that are recovered already, where the budget
            does not suffice for all candidates: others take their place only where they are riskier by
            more than that. 1 is the paper's rule.

    The defaults of ``alpha``, ``beta``, ``window`` and ``warmup_steps`` are those that found most outliers at the
    fewest false alarms in ``benchmarks/detection.py`` (docs/quality.md); the paper's own values are not public.

    Raises:
        ConfigError: a value out of its range. What a callable threshold returns is checked when it is used.
    """

    alpha: Threshold = None  # type: ignore[assignment]  # never None once built
    beta: Threshold = None  # type: ignore[assignment]  # nor this
    window: int = 8
    lock_steps: int = 50
    warmup_steps: int = 50
    mean: MeanKind = "all"
    ema_decay: float = 0.99
    max_events: int = 100_000
    signal: Signal = "gnmr"
    signal_every: int = 10
    history: HistoryKind = "shared"
    auto_share: float | None = None
    budget_unit: BudgetUnit = "units"
    hysteresis: float = 1.0

    def __post_init__(self) -> None:
        _check_choice("signal", self.signal, get_args(Signal))
        _check_choice("history", self.history, get_args(HistoryKind))
        _check_choice("budget_unit", self.budget_unit, get_args(BudgetUnit))
        for name, default in _THRESHOLDS[self.signal].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        for name, bound in (("alpha", self.alpha), ("beta", self.beta)):
            if not callable(bound) and not is_auto(bound):
                threshold(bound, 1, name)
        if self.signal != "gnmr" and 1.0 < _as_float(self.alpha) < math.inf:
            raise ConfigError(
                f"alpha: expected a relative error of at most 1 for signal={self.signal!r}, found {self.alpha!r}. "
                "Pass a number such as 0.1, inf to switch the criterion off, or leave alpha out: it is then "
                "calibrated. For a threshold on the ratio of norms pass signal='gnmr'."
            )
        _check_integer("window", self.window, minimum=1)
        _check_integer("lock_steps", self.lock_steps, minimum=1)
        _check_integer("warmup_steps", self.warmup_steps, minimum=0)
        _check_integer("max_events", self.max_events, minimum=1)
        _check_integer("signal_every", self.signal_every, minimum=1)
        if self.auto_share is not None and not 0.0 < _as_float(self.auto_share) <= 1.0:
            raise ConfigError(
                f"auto_share: expected a share of the unit-steps in (0, 1] or None, found {self.auto_share!r}. "
                "Pass a number such as 0.05, or None for the share of the units that the budget covers."
            )
        if not 1.0 <= _as_float(self.hysteresis) < math.inf:
            raise ConfigError(
                f"hysteresis: expected a finite number of at least 1, found {self.hysteresis!r}. Pass a factor such "
                "as 1.5, or 1.0 for none."
            )
        if self.mean not in get_args(MeanKind):
            choices = ", ".join(repr(kind) for kind in get_args(MeanKind))
            raise ConfigError(f"mean: expected one of {choices}, found {self.mean!r}. Choose one of these.")
        if not 0.0 < _as_float(self.ema_decay) < 1.0:
            raise ConfigError(
                f"ema_decay: expected a number strictly between 0 and 1, found {self.ema_decay!r}. "
                "Pass the weight of the old average, such as 0.99."
            )

    @classmethod
    def paper(cls, **changes: Any) -> "GnmrConfig":
        """The paper's exact rule, whatever the defaults are: the plain norm ratio over one history, a number of units.

        Args:
            changes: any of ``alpha``, ``beta``, ``window``, ``lock_steps``, ``warmup_steps`` and ``max_events``; the
                paper's own values of these are not public.

        Raises:
            ConfigError: for another field, which would make it another rule; or for a value out of range.
        """
        free = ("alpha", "beta", "window", "lock_steps", "warmup_steps", "max_events")
        other = [name for name in changes if name not in free]
        if other:
            raise ConfigError(
                f"paper: expected only {', '.join(free)}, found {', '.join(other)}. Build GnmrConfig({other[0]}=...) "
                "for another rule than the paper's."
            )
        return cls(signal="gnmr", history="shared", mean="all", budget_unit="units", hysteresis=1.0, **changes)

    @classmethod
    def recommended(cls, recipe: Recipe, **changes: Any) -> "GnmrConfig":
        """What :func:`gnmr_fx.instrument` takes for ``recipe`` where it is given no configuration.

        ``signal="error"`` where activations are stored as integers with one scale for a whole tensor: there, errors
        differ several times between units, and recovering those with the largest ones gave back most of what the
        format costs, which the ratio of norms did not (docs/quality.md). The defaults of this class elsewhere.

        Args:
            recipe: of the units.
            changes: fields with other values.

        Raises:
            ConfigError: as for this class.
        """
        low = recipe.low
        coarse = low.is_integer and low.granularity == "tensor"
        return cls(**({"signal": "error"} if coarse else {}) | changes)

    @property
    def measures_errors(self) -> bool:
        """Whether the signal rests on the quantization error."""
        return self.signal != "gnmr"


def is_auto(bound: object) -> bool:
    """Whether a threshold is calibrated while the run goes on."""
    return isinstance(bound, str) and bound == "auto"


def threshold(value: Threshold, step: int, name: str) -> float:
    """The value of a threshold at a step, for any but an ``"auto"`` one.

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
            f"{name}: expected a positive number (inf switches it off), a callable from the step to one, or 'auto', "
            f"found {found!r}{origin}. Pass a plain number such as 3.0, or let the schedule return one."
        )
    return number


def check_max_active(max_active: int | float, config: GnmrConfig) -> None:
    """Refuse a budget that ``config`` has no meaning for, before units are known.

    Raises:
        BudgetError: see :func:`resolve_budget` and :func:`check_budget`.
    """
    if config.budget_unit == "units":
        resolve_budget(max_active, 1)
    else:
        check_budget(max_active, config.budget_unit)


def check_budget(max_active: int | float, unit: BudgetUnit) -> int | float:
    """``max_active`` as given, for a budget that does not count units: what it comes to is known with the costs.

    Args:
        max_active: an int is a number of bytes or operations (0 recovers nothing), a float in (0, 1] a share of
            what recovering all units would cost.

    Raises:
        BudgetError: anything else.
    """
    number = _as_int(max_active)
    if number is not None and number >= 0:
        return number
    share = _as_float(max_active)
    if number is None and 0.0 < share <= 1.0:
        return share
    raise BudgetError(
        f"max_active: expected a number of {unit} (an int of at least 0) or a share of what all units cost (a float in "
        f"(0, 1]), found {max_active!r}. Pass an int such as 1 << 20, a float such as 0.2, or 0 to recover nothing."
    )


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
    if type(value) is float:
        return value
    return float(value) if isinstance(value, Real) and not _is_bool(value) else math.nan


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if isinstance(value, str) and value in choices:
        return
    near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.4)
    suggestion = f"; did you mean {near[0]!r}?" if near else "."
    raise ConfigError(
        f"{name}: expected one of {', '.join(map(repr, choices))}, found {value!r}{suggestion} Choose one of these."
    )


def _check_integer(name: str, value: object, *, minimum: int) -> None:
    number = _as_int(value)
    if number is None or number < minimum:
        noun = "records" if name == "max_events" else "steps"
        raise ConfigError(
            f"{name}: expected an int of at least {minimum}, found {value!r}. Pass a whole number of {noun}."
        )
