"""The GNMR controller: which units run on their recovery path, as pure functions over explicit state.

GNMR is the Gradient Norm-to-Mean Ratio of arXiv 2606.00539. At step t, with gradient norm ``n_t(u) >= 0`` of
unit ``u``::

    gnmr_t(u)   = n_t(u) / mean(n_1(u) ... n_{t-1}(u))            (or another level, see below)
    delta_t(u)  = gnmr_t(u) / mean(gnmr_{t-1}(u) ... gnmr_{t-window}(u))
    risk_t(u)   = max(gnmr_t(u) / alpha_t, delta_t(u) / beta_t)
    risky(u)    = gnmr_t(u) > alpha_t  or  delta_t(u) > beta_t
    candidates  = risky units and units whose lock is above 0
    active      = the max_active candidates of highest risk; ties go to the lower unit index
    lock(u)     = lock_steps if u is active and risky, else max(lock(u) - 1, 0)

What may differ from the paper's rule, each by a setting of :class:`~gnmr_fx.config.GnmrConfig`:

- *Another signal*: ``error`` and ``gap`` put another level (:mod:`gnmr_fx.signals`) in the place of ``gnmr_t``. It is
  missing until the unit's error was measured for the first time; an error that is not finite is treated as a norm
  that is not. The error measured last holds until the next one.
- *Histories per path*: means and recent levels are kept apart for the steps that a unit spent on each of its paths.
- *Automatic thresholds*: from the first step with a level on, ``tau`` follows
  ``log tau += AUTO_GAIN * (share - target)``, with the share of the units heard whose level (change) was above ``tau``.
  So over any T steps the mean share is within ``|log tau_T - log tau_0| / (AUTO_GAIN * T)`` of the target, whatever the
  levels are. It starts at the quantile of the levels of its first step.
- *Costs*: with a budget in bytes or operations, candidates are taken in the order of risk per cost while they fit; if
  one candidate that fits is riskier than all of those together, it comes first. That is at least half the risk that
  the best choice covers, and never more than the budget.
- *Hysteresis*: for the choice among candidates, the risk of a unit that was active counts ``hysteresis`` times; where
  that is above 1, ties go to active units first.

Rules for values that the formulas leave open:

- *No history yet*: the ratio is 1.0. Such a placeholder is no GNMR value and does not enter the GNMR history,
  which therefore starts with the second norm of a unit.
- *Zero mean*: the ratio is 1.0 for a zero value and ``inf`` for a positive one.
- *Non-finite norm* (inf, NaN): both ratios and the risk are ``inf`` and the unit is risky, in warm-up too.
  The norm enters no history.
- *Missing norm* (any finite negative value, see :data:`MISSING`): the unit had no gradient in this step. Both
  ratios are 1.0, the risk is 0.0, the unit is not risky and its histories stay as they are. A lock that it
  holds keeps running, and it stays a candidate.
- *Warm-up*: in steps 1 to ``warmup_steps`` no threshold fires, so units run on the low-cost path, save those
  with a non-finite norm and the locks that these take.

The numbers of a unit depend on the history of that unit alone, bit for bit: neither on its index nor on the number of
units (but for ``gap`` and automatic thresholds, which are about all units). Nothing here mutates its arguments.

All of it is plain arithmetic on Python floats, unit by unit. A model has tens to hundreds of units: on vectors that
short a tensor operation costs many times its numbers, most of all after a training step, which leaves caches cold.
Tensors are what may come in (norms), what is saved (:func:`state_to_dict`), and columns of a :class:`Decision`.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gnmr_fx import signals
from gnmr_fx.config import (
    BudgetUnit,
    GnmrConfig,
    HistoryKind,
    MeanKind,
    Signal,
    Threshold,
    check_budget,
    is_auto,
    resolve_budget,
    threshold,
)
from gnmr_fx.errors import BudgetError, ConfigError, StateMismatchError

MISSING: Final = -1.0
"""The norm of a unit that had no gradient in a step. Any finite negative value means the same."""

MAX_RATIO: Final = 1e30
"""Largest GNMR value kept in a history; larger ones, ``inf`` included, are stored as this one."""

AUTO_GAIN: Final = 0.5
"""How fast automatic thresholds follow: the change of their logarithm per step for a share that is off by 1."""

STATE_VERSION: Final = 2
"""Version of the format that :func:`state_to_dict` writes."""

StateDict: TypeAlias = dict[str, Tensor | int | str]

_LARGEST: Final = sys.float_info.max
_LEAST_AUTO: Final = 1e-30


class Past(NamedTuple):
    """What decisions remember of a unit. Numbers are finite and at least 0; ``W`` is ``config.window``.

    Attributes:
        mean: of the norms of all earlier steps, in units of the norms; 0.0 if there were none.
        steps: number n of those that entered the mean since the start.
        norms: the last min(n, W) norms, the newest first, for ``mean="window"``; else none.
        levels: the last levels (GNMR values), the newest first, each at most :data:`MAX_RATIO`: min(n, W) of them, or
            for the signal ``gnmr`` min(n - 1, W), as the first norm has no GNMR.
    """

    mean: float = 0.0
    steps: int = 0
    norms: tuple[float, ...] = ()
    levels: tuple[float, ...] = ()


class State(NamedTuple):
    """Everything that the decisions of later steps depend on, besides the configuration. ``U`` is the number of units.

    Attributes:
        num_units: U.
        max_active: the budget: the largest number of active units in a step; for a budget in bytes or operations, that
            number of them (int), or the share of what all units cost (float).
        step: number of updates made.
        mean_kind, window, signal, history: as in :class:`GnmrConfig`.
        pasts: of each unit, U of them; with histories per path 2U, and those of the low-cost path come first.
        locks: of each unit, the steps for which it stays a candidate.
        recovered: of each unit, the last decision.
        errors: of each unit, the relative error measured last; :data:`MISSING` if there was none.
        tau: the automatic thresholds in the place of alpha and beta; 0.0 before the first level.
    """

    num_units: int
    max_active: int | float
    step: int
    mean_kind: MeanKind
    window: int
    signal: Signal
    history: HistoryKind
    pasts: tuple[Past, ...]
    locks: tuple[int, ...]
    recovered: tuple[bool, ...]
    errors: tuple[float, ...]
    tau: tuple[float, float]


class Verdict(NamedTuple):
    """What one update found and decided about one unit. No number is NaN.

    Attributes:
        norm: the gradient norm as it was heard; negative if there was none, ``inf`` if it is not finite.
        gnmr: ratio of the norm to the mean, or the level of another signal in its place; dimensionless, may be ``inf``.
        delta_gnmr: ratio of that to its recent mean; dimensionless, may be ``inf``.
        risk: the larger of the two ratios in units of its threshold; may be ``inf``.
        risky: a threshold fired or the norm is not finite.
        candidate: risky or locked.
        active: on the recovery path from now on.
        lock: lock after this step, in steps.
        missing: the unit had no gradient in this step, or no error was measured yet for a signal that needs one.
    """

    norm: float
    gnmr: float
    delta_gnmr: float
    risk: float
    risky: bool
    candidate: bool
    active: bool
    lock: int
    missing: bool

    @property
    def refused(self) -> bool:
        """A candidate that the budget left out."""
        return self.candidate and not self.active


UNJUDGED: Final = Verdict(MISSING, 1.0, 1.0, 0.0, risky=False, candidate=False, active=False, lock=0, missing=False)
"""What there is to say about a unit before the first step."""


class Decision(NamedTuple):
    """What one update decided and why: a record for each unit, and each field of these as a tensor ``[U]``.

    Attributes:
        step: index of the step, from 1; the value that schedules of ``alpha`` and ``beta`` were given.
        units: the verdict on each unit; within the budget, they are ``active``.
        alpha, beta: the thresholds in force, positive; ``inf`` = off.
    """

    step: int
    units: tuple[Verdict, ...]
    alpha: float
    beta: float

    @property
    def gnmr(self) -> Tensor:
        """:attr:`Verdict.gnmr` of each unit, float64."""
        return _tensor([unit.gnmr for unit in self.units])

    @property
    def delta_gnmr(self) -> Tensor:
        """:attr:`Verdict.delta_gnmr` of each unit, float64."""
        return _tensor([unit.delta_gnmr for unit in self.units])

    @property
    def risk(self) -> Tensor:
        """:attr:`Verdict.risk` of each unit, float64."""
        return _tensor([unit.risk for unit in self.units])

    @property
    def risky(self) -> Tensor:
        """:attr:`Verdict.risky` of each unit, bool."""
        return _tensor([unit.risky for unit in self.units], torch.bool)

    @property
    def candidates(self) -> Tensor:
        """:attr:`Verdict.candidate` of each unit, bool."""
        return _tensor([unit.candidate for unit in self.units], torch.bool)

    @property
    def active(self) -> Tensor:
        """:attr:`Verdict.active` of each unit, bool."""
        return _tensor([unit.active for unit in self.units], torch.bool)

    @property
    def refused(self) -> Tensor:
        """:attr:`Verdict.refused` of each unit, bool."""
        return _tensor([unit.refused for unit in self.units], torch.bool)

    @property
    def lock(self) -> Tensor:
        """:attr:`Verdict.lock` of each unit, int64."""
        return _tensor([unit.lock for unit in self.units], torch.int64)

    @property
    def missing(self) -> Tensor:
        """:attr:`Verdict.missing` of each unit, bool."""
        return _tensor([unit.missing for unit in self.units], torch.bool)


def init(num_units: int, config: GnmrConfig, max_active: int | float) -> State:
    """The state before the first step.

    Args:
        num_units: number of units, at least 1.
        config: the configuration; its ``mean``, ``window``, ``signal`` and ``history`` are fixed for the life of the
            state.
        max_active: the budget, as in :func:`gnmr_fx.config.resolve_budget`; for one in bytes or operations as in
            :func:`gnmr_fx.config.check_budget`.

    Raises:
        ConfigError: ``num_units`` is no int of at least 1.
        BudgetError: an invalid ``max_active``.
    """
    found: object = num_units
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ConfigError(f"num_units: expected an int of at least 1, found {found!r}. Count the units.")
    unit = config.budget_unit
    budget = resolve_budget(max_active, num_units) if unit == "units" else check_budget(max_active, unit)
    return State(
        num_units=num_units,
        max_active=budget,
        step=0,
        mean_kind=config.mean,
        window=config.window,
        signal=config.signal,
        history=config.history,
        pasts=(Past(),) * _columns(num_units, config.history),
        locks=(0,) * num_units,
        recovered=(False,) * num_units,
        errors=(MISSING,) * num_units,
        tau=(0.0, 0.0),
    )


def update(
    state: State,
    norms: Tensor | Sequence[float],
    config: GnmrConfig,
    *,
    errors: Tensor | Sequence[float] | None = None,
    costs: Tensor | Sequence[float] | None = None,
    recovered: Tensor | Sequence[bool] | None = None,
) -> tuple[State, Decision]:
    """One step of the controller: the formulas and rules of the module's docstring.

    Args:
        state: the state after the previous step; not changed.
        norms: gradient norm of each unit, ``[U]``, all in one unit of measure: a tensor of any floating
            dtype, on any device (it is copied to the CPU), or a sequence of floats. A negative value means
            that the unit had no gradient; inf and NaN are allowed.
        config: the configuration that the state was made with. Fields that are not fixed for the life of the state
            may differ from one step to the next.
        errors: relative quantization errors measured since the last step, ``[U]``, dimensionless; a negative value
            means that there was none. None: there was none for any unit. Only read for signals that need them.
        costs: what each unit on the recovery path costs, ``[U]``, in ``config.budget_unit``; a value that is negative
            or not finite means that it is not known, and the unit cannot be chosen. Only read for a budget in bytes or
            operations, where it has to be given.
        recovered: ``[U]`` bool, the path on which each unit ran in this step; None: as decided in the last one.

    Returns:
        The next state and the decision of this step.

    Raises:
        StateMismatchError: a vector is no floating one of length U, or ``config`` has another value of a field that is
            fixed than the state.
        ConfigError: a schedule returned something else than a positive number.
    """
    _check_config((state.mean_kind, state.window, state.signal, state.history), config)
    norm = _vector("norms", norms, state.num_units)
    priced = None if config.budget_unit == "units" else _costs(costs, state.num_units, config.budget_unit)
    step = state.step + 1
    alpha, beta = thresholds(state, step, config)

    broken = [n == math.inf for n in norm]
    missing = [n < 0.0 for n in norm]
    error = held = state.errors
    if config.measures_errors:
        if errors is not None:
            found = _vector("errors", errors, state.num_units)
            error = tuple(new if new >= 0.0 else old for new, old in zip(found, error, strict=True))
        broken = [b or (e == math.inf and not m) for b, e, m in zip(broken, error, missing, strict=True)]
        missing = [not b and (m or e < 0.0) for b, e, m in zip(broken, error, missing, strict=True)]
        # An error that is not finite is no error to hold: until the next measurement the unit has none.
        held = tuple(MISSING if e == math.inf else e for e in error)
    usable = [not (b or m) for b, m in zip(broken, missing, strict=True)]

    places: Sequence[int] = range(state.num_units)
    if config.history == "per_path":
        on = state.recovered if recovered is None else recovered
        places = [unit + state.num_units * bool(high) for unit, high in enumerate(on)]
    past = [state.pasts[place] for place in places]

    levels = _levels(norm, error, past, usable, config)
    change, risk, risky, now = [], [], [], []
    firing = step > config.warmup_steps
    for unit, level in enumerate(levels):
        if usable[unit]:
            recent = past[unit].levels
            moved = signals.ratio(level, math.fsum(recent) / len(recent)) if recent else 1.0
            change.append(moved)
            risk.append(max(_relative(level, alpha), _relative(moved, beta)))
            risky.append(firing and (level > alpha or moved > beta))
            now.append(_remembered(past[unit], norm[unit], level, config))
        else:
            if broken[unit]:
                levels[unit] = math.inf
            change.append(math.inf if broken[unit] else 1.0)
            risk.append(math.inf if broken[unit] else 0.0)
            risky.append(broken[unit])
            now.append(past[unit])

    candidates = [fired or lock > 0 for fired, lock in zip(risky, state.locks, strict=True)]
    active = _chosen(candidates, risk, state, priced, config)
    locks = tuple(
        config.lock_steps if fired and high else lock - 1 if lock else 0
        for fired, high, lock in zip(risky, active, state.locks, strict=True)
    )
    if config.history == "per_path":
        pasts = list(state.pasts)
        for place, new in zip(places, now, strict=True):
            pasts[place] = new
        now = pasts
    next_state = state._replace(
        step=step,
        pasts=tuple(now),
        locks=locks,
        recovered=tuple(active),
        errors=held,
        tau=_next_auto(state, (levels, change), past, usable, priced, config),
    )
    units = tuple(map(Verdict, norm, levels, change, risk, risky, candidates, active, locks, missing))
    return next_state, Decision(step=step, units=units, alpha=alpha, beta=beta)


def thresholds(state: State, step: int, config: GnmrConfig) -> tuple[float, float]:
    """Alpha and beta in force at ``step``; ``inf`` for an automatic one that has not seen a level yet."""
    alpha, beta = state.tau
    return _in_force(config.alpha, alpha, step, "alpha"), _in_force(config.beta, beta, step, "beta")


def _in_force(bound: Threshold, calibrated: float, step: int, name: str) -> float:
    if is_auto(bound):
        return calibrated or math.inf
    return threshold(bound, step, name)


def capacity(max_active: int | float, costs: Sequence[float]) -> float:
    """A budget in bytes or operations as a number of them: an int as it is, a share of what all units cost.

    Args:
        max_active: the budget.
        costs: of each unit; not counted where negative or not finite, that is, not known.
    """
    if not isinstance(max_active, float):
        return float(max_active)
    return max_active * math.fsum(cost for cost in costs if 0.0 <= cost < math.inf)


def check_costs(max_active: int | float, costs: Sequence[float], unit: BudgetUnit) -> None:
    """Check that a budget above 0 has room for some unit.

    Args:
        max_active: the budget.
        costs: of each unit; not known where negative or not finite.
        unit: of the budget, for the message.

    Raises:
        BudgetError: the budget is below what the cheapest unit costs.
    """
    known = [cost for cost in costs if 0.0 < cost < math.inf]
    if not known or not max_active:
        return
    room, cheapest = capacity(max_active, costs), min(known)
    if room < cheapest:
        share = f" ({max_active:g} of all units' {room / max_active:.0f})" if isinstance(max_active, float) else ""
        raise BudgetError(
            f"max_active: expected at least the {cheapest:.0f} {unit} that the cheapest unit costs on the recovery "
            f"path, found {room:.0f}{share}, which no unit fits into. Raise the budget, or pass 0 to recover nothing."
        )


def state_to_dict(state: State) -> StateDict:
    """The state as a flat dictionary of tensors, ints and strings, fit for ``torch.load(weights_only=True)``.

    The tensors are copies, so loading a checkpoint into them in place leaves ``state`` as it is. The budget
    is not part of it: a run may resume with another one.
    """
    saved: StateDict = {
        "version": STATE_VERSION,
        "mean_kind": state.mean_kind,
        "signal": state.signal,
        "history": state.history,
        "num_units": state.num_units,
        "window": state.window,
        "step": state.step,
    }
    columns: dict[str, Sequence[object]] = {
        "mean": [past.mean for past in state.pasts],
        "count": [past.steps for past in state.pasts],
        "norms": _rows([past.norms for past in state.pasts], state.window),
        "ratios": _rows([past.levels for past in state.pasts], state.window),
        "lock": state.locks,
        "active": state.recovered,
        "error": [max(error, 0.0) for error in state.errors],
        "measured": [error >= 0.0 for error in state.errors],
        "auto": state.tau,
    }
    for name, (shape, dtype) in _tensor_layout(state.num_units, state.window, state.mean_kind, state.history).items():
        saved[name] = _tensor(columns[name], dtype).reshape(shape)
    return saved


def state_from_dict(saved: Mapping[str, object], config: GnmrConfig, max_active: int | float, num_units: int) -> State:
    """The inverse of :func:`state_to_dict`.

    Args:
        saved: what :func:`state_to_dict` returned; its tensors are copied, from any device.
        config: the configuration to go on with.
        max_active: the budget to go on with, as in :func:`gnmr_fx.config.resolve_budget`.
        num_units: the number of units to go on with.

    Raises:
        StateMismatchError: another version, number of units, window, kind of mean, signal or kind of history, or an
            entry that is absent or invalid.
        BudgetError: an invalid ``max_active``.
    """
    version = _entry(saved, "version")
    if version != STATE_VERSION:
        raise StateMismatchError(
            f"version of the saved state: expected {STATE_VERSION}, found {version!r}. Load it with the "
            "version of gnmr-fx that wrote it, or start from a fresh state."
        )
    found_units = _entry(saved, "num_units")
    if found_units != num_units:
        raise StateMismatchError(
            f"units of the saved state: expected {num_units}, found {found_units!r}. Instrument the model "
            "with the same recipe and patterns as when the state was saved, or start from a fresh state."
        )
    window = _entry(saved, "window")
    _check_config((_entry(saved, "mean_kind"), window, _entry(saved, "signal"), _entry(saved, "history")), config)
    step = _entry(saved, "step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise _invalid("step", "an int of at least 0", step)

    fresh = init(num_units, config, max_active)
    tensors = {
        name: _loaded(name, _entry(saved, name), shape, dtype)
        for name, (shape, dtype) in _tensor_layout(num_units, config.window, config.mean, config.history).items()
    }
    past_norms = _histories(tensors["norms"], tensors["count"]) if "norms" in tensors else ((),) * len(tensors["count"])
    first = 0 if config.measures_errors else 1  # the first norm of all has no level
    levels = _histories(tensors["ratios"].clamp(max=MAX_RATIO), tensors["count"] - first)
    alpha, beta = tensors["auto"].tolist()
    return fresh._replace(
        step=step,
        pasts=tuple(map(Past, tensors["mean"].tolist(), tensors["count"].tolist(), past_norms, levels)),
        locks=tuple(tensors["lock"].tolist()),
        recovered=tuple(tensors["active"].tolist()),
        errors=tuple(tensors["error"].masked_fill(~tensors["measured"], MISSING).tolist()),
        tau=(alpha, beta),
    )


def digest(state: State) -> int:
    """64 bits that differ where the state does, the same in every process of one version of Python."""
    return hash((state.step, state.pasts, state.locks, state.recovered, state.errors, state.tau)) & 0xFFFFFFFFFFFFFFFF


def _tensor(values: Sequence[object], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu")


def _columns(num_units: int, history: HistoryKind) -> int:
    """Number of histories."""
    return num_units * (2 if history == "per_path" else 1)


def _rows(histories: Sequence[tuple[float, ...]], window: int) -> list[list[float]]:
    """Histories as a matrix ``[W, U]``: the newest values in row 0, and zeros below the values."""
    padded = [(*values, *(0.0,) * (window - len(values))) for values in histories]
    return [list(row) for row in zip(*padded, strict=True)]


def _histories(rows: Tensor, lengths: Tensor) -> tuple[tuple[float, ...], ...]:
    """The inverse of :func:`_rows`, for so many values of each."""
    return tuple(tuple(column[: max(0, n)]) for column, n in zip(rows.T.tolist(), lengths.tolist(), strict=True))


def _vector(name: str, values: Tensor | Sequence[float], num_units: int) -> list[float]:
    """The values as floats, ``inf`` in the place of every one that is not finite, 0.0 in that of -0.0."""
    if isinstance(values, Tensor):
        if not values.is_floating_point():
            raise StateMismatchError(
                f"{name}: expected a floating dtype, found {values.dtype}. Convert the {name} to float first."
            )
        shape, found = tuple(values.shape), values.detach().to("cpu", torch.float64)
    elif type(values) is list and len(values) == num_units and all(type(value) is float for value in values):
        return _finite(values)
    else:
        try:
            found = torch.as_tensor(values, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise StateMismatchError(
                f"{name}: expected a tensor or a sequence of floats, found {type(values).__name__} that does "
                f"not convert ({error}). Pass one float for each unit."
            ) from error
        shape = tuple(found.shape)
    if shape != (num_units,):
        raise StateMismatchError(
            f"{name}: expected shape ({num_units},), found {shape}. Pass one for each "
            "unit, in the order of the units, and a negative number for a unit that has none."
        )
    return _finite(found.tolist())


def _finite(values: list[float]) -> list[float]:
    # The sum turns -0.0 into 0.0: a quotient by a mean of -0.0 would have the wrong sign.
    return [value + 0.0 if math.isfinite(value) else math.inf for value in values]


def _costs(costs: Tensor | Sequence[float] | None, num_units: int, unit: BudgetUnit) -> list[float]:
    """Costs, ``inf`` where one is not known."""
    if costs is None:
        raise StateMismatchError(
            f"costs: expected what each of the {num_units} units costs in {unit}, found None. Pass costs=..., or use "
            "budget_unit='units'."
        )
    return [cost if cost >= 0.0 else math.inf for cost in _vector("costs", costs, num_units)]


def _levels(
    norm: list[float], error: Sequence[float], past: list[Past], usable: list[bool], config: GnmrConfig
) -> list[float]:
    """The level of each unit; of one that is not usable that of a calm one."""
    if config.signal == "gnmr":
        return [signals.gnmr(n, p.mean) if ok and p.steps else 1.0 for n, p, ok in zip(norm, past, usable, strict=True)]
    if config.signal == "error":
        return [e if ok else 0.0 for e, ok in zip(error, usable, strict=True)]
    return signals.gap(error, norm, usable)


def _relative(ratio: float, bound: float) -> float:
    """The ratio in units of its threshold; 0 for an infinite threshold, also where the ratio is infinite."""
    return 0.0 if bound == math.inf else ratio / bound


def _chosen(
    candidates: list[bool], risk: list[float], state: State, costs: list[float] | None, config: GnmrConfig
) -> list[bool]:
    """The candidates that the budget goes to; a mask."""
    first = None
    if config.hysteresis > 1.0:
        first = state.recovered
        risk = [r * config.hysteresis if high else r for r, high in zip(risk, first, strict=True)]
    room = float(state.max_active) if costs is None else capacity(state.max_active, costs)
    return choose(candidates, risk, room, costs, first)


def choose(
    candidates: Sequence[bool],
    risk: Sequence[float],
    room: float,
    costs: Sequence[float] | None = None,
    first: Sequence[bool] | None = None,
) -> list[bool]:
    """The candidates of highest risk that the budget allows; a mask.

    Args:
        candidates: of each unit, whether it is one.
        risk: of each unit, at least 0; may be ``inf``.
        room: the most units or, with ``costs``, the most that they may cost together.
        costs: of each unit, ``inf`` where not known; None: every unit costs 1.
        first: these come first in ties. Other ties go to the lower index.
    """
    open_ = [unit for unit, candidate in enumerate(candidates) if candidate]
    if costs is not None:
        taken = _knapsack(open_, risk, costs, room, first)
    elif len(open_) <= room:
        return list(candidates)
    else:
        taken = _ranked(open_, risk, first)[: int(room)]
    mask = [False] * len(candidates)
    for unit in taken:
        mask[unit] = True
    return mask


def _ranked(units: list[int], key: Sequence[float], first: Sequence[bool] | None) -> list[int]:
    """The units by ``key``, the highest first; ties to those in ``first``, then to the lower index."""
    if first is None:
        return sorted(units, key=lambda unit: (-key[unit], unit))
    return sorted(units, key=lambda unit: (-key[unit], not first[unit], unit))


def _knapsack(
    candidates: list[int], risk: Sequence[float], costs: Sequence[float], room: float, first: Sequence[bool] | None
) -> list[int]:
    """Candidates of at most ``room`` cost together, greedily by risk per cost.

    At least half the risk that the best choice covers: the better of the greedy choice and the riskiest candidate
    that fits alone is (Dantzig 1957; Martello & Toth 1990, section 2.4).
    """
    worth = [min(r, MAX_RATIO) for r in risk]
    density = [w / cost if cost > 0.0 else math.inf for w, cost in zip(worth, costs, strict=True)]
    order = _ranked([unit for unit in candidates if costs[unit] <= room], density, first)
    if not order:
        return []
    greedy = _filled(order, costs, room)
    best = max(order, key=lambda unit: worth[unit])
    if worth[best] > sum(worth[unit] for unit in greedy):
        return _filled([best, *(unit for unit in order if unit != best)], costs, room)
    return greedy


def _filled(order: list[int], price: Sequence[float], room: float) -> list[int]:
    """Of the units in their order, those that still fit."""
    taken, spent = [], 0.0
    for unit in order:
        if spent + price[unit] <= room:
            taken.append(unit)
            spent += price[unit]
    return taken


def _next_auto(
    state: State,
    values: tuple[list[float], list[float]],
    past: list[Past],
    usable: list[bool],
    costs: list[float] | None,
    config: GnmrConfig,
) -> tuple[float, float]:
    """The automatic thresholds after a step with these levels and changes."""
    automatic = [is_auto(bound) for bound in (config.alpha, config.beta)]
    if not any(automatic):
        return state.tau
    heard = [ok and _has_level(unit_past, config) for unit_past, ok in zip(past, usable, strict=True)]
    if not any(heard):
        return state.tau
    target = config.auto_share
    if target is None:
        if costs is None:
            target = min(1.0, state.max_active / state.num_units)
        else:
            whole = capacity(1.0, costs)
            target = min(1.0, capacity(state.max_active, costs) / whole) if whole > 0 else 1.0
    target = target / sum(automatic)
    alpha, beta = (
        _followed(tau, [v for v, is_heard in zip(value, heard, strict=True) if is_heard], target) if auto else tau
        for auto, value, tau in zip(automatic, values, state.tau, strict=True)
    )
    return alpha, beta


def _followed(tau: float, values: list[float], target: float) -> float:
    """An automatic threshold after it saw the values, at least one, of which it should let so large a share pass."""
    if tau == 0.0:
        tau = sorted(values)[min(len(values) - 1, int((1.0 - target) * len(values)))]
    else:
        share = sum(value > tau for value in values) / len(values)
        tau *= math.exp(AUTO_GAIN * (share - target))
    return min(max(tau, _LEAST_AUTO), MAX_RATIO) if tau > 0.0 else 0.0


def _has_level(past: Past, config: GnmrConfig) -> bool:
    """Whether a usable step after this past has a level: the first norm of all has no GNMR."""
    return past.steps > 0 or config.measures_errors


def _remembered(past: Past, norm: float, level: float, config: GnmrConfig) -> Past:
    """The past with a step's norm in it, and with its level, where it has one."""
    count = past.steps + 1
    norms = (norm, *past.norms)[: config.window] if config.mean == "window" else ()
    levels = past.levels
    if _has_level(past, config):
        levels = (level if level < MAX_RATIO else MAX_RATIO, *levels)[: config.window]
    return Past(_mean(past.mean, norm, count, norms, config), count, norms, levels)


def _mean(mean: float, norm: float, count: int, norms: tuple[float, ...], config: GnmrConfig) -> float:
    """The mean with this step's norm in it; ``count`` and ``norms`` include it already."""
    if config.mean == "window":
        # Scaled by the largest norm, so that large ones do not overflow nor subnormal ones vanish.
        scale = max(norms) or 1.0
        return math.fsum(n / scale for n in norms) / len(norms) * scale
    if config.mean == "ema" and count > 1:
        moved = mean + (norm - mean) * (1.0 - config.ema_decay)
    elif config.mean == "ema":
        moved = norm
    else:
        moved = mean + (norm - mean) / count
    # Between norms close to the largest float, rounding alone can step over it.
    return moved if moved < _LARGEST else _LARGEST


def _tensor_layout(
    num_units: int, window: int, mean_kind: MeanKind, history: HistoryKind
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor of a saved state, by field name."""
    columns = _columns(num_units, history)
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "mean": ((columns,), torch.float64),
        "count": ((columns,), torch.int64),
        "ratios": ((window, columns), torch.float64),
        "lock": ((num_units,), torch.int64),
        "active": ((num_units,), torch.bool),
        "error": ((num_units,), torch.float64),
        "measured": ((num_units,), torch.bool),
        "auto": ((2,), torch.float64),
    }
    if mean_kind == "window":
        layout["norms"] = ((window, columns), torch.float64)
    return layout


def _check_config(fixed: tuple[object, ...], config: GnmrConfig) -> None:
    """Compare what is fixed for the life of a state (mean, window, signal, history) with the configuration."""
    if fixed == (config.mean, config.window, config.signal, config.history):
        return
    for name, found in zip(("mean", "window", "signal", "history"), fixed, strict=True):
        expected = getattr(config, name)
        if found != expected:
            raise StateMismatchError(
                f"{name} of the state: expected {expected!r} as configured, found {found!r}. Use the "
                f"configuration that the state was made with ({name}={found!r}), or start from a fresh state."
            )


def _entry(saved: Mapping[str, object], name: str) -> object:
    if name not in saved:
        raise StateMismatchError(
            f"saved state: expected an entry {name!r}, found only {sorted(map(str, saved))}. Pass what "
            "state_to_dict returned, whole."
        )
    return saved[name]


def _loaded(name: str, value: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != shape or value.dtype != dtype:
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise _invalid(name, f"a {dtype} tensor of shape {shape}", found)
    copy = value.detach().to("cpu", copy=True)
    invalid = int((~(copy.isfinite() & (copy >= 0))).count_nonzero())
    if invalid:
        raise _invalid(name, "finite values of at least 0", f"{invalid} others")
    return copy


def _invalid(name: str, expected: str, found: object) -> StateMismatchError:
    return StateMismatchError(
        f"{name} of the saved state: expected {expected}, found {found}. Pass what state_to_dict returned, unchanged."
    )
