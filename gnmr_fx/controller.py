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

The numbers of a unit depend on the history of that unit alone, bit for bit: neither on its index, nor on the
number of units, nor on the number of threads (but for ``gap`` and automatic thresholds, which are about all units).
Nothing here mutates its arguments.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from gnmr_fx import signals
from gnmr_fx.config import (
    BudgetUnit,
    GnmrConfig,
    HistoryKind,
    MeanKind,
    Signal,
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

_LARGEST: Final = torch.finfo(torch.float64).max
_LEAST_AUTO: Final = 1e-30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """Everything that the decisions of later steps depend on, besides the configuration.

    All tensors are on the CPU, finite and non-negative, and are to be treated as read-only. ``U`` is the
    number of units, ``W`` is ``config.window``. Histories hold the newest value in row 0, and zeros below the
    values. ``H`` is U, or 2U with histories per path: then those of the low-cost path come first.

    Attributes:
        num_units: U.
        max_active: the budget: the largest number of active units in a step; for a budget in bytes or operations, that
            number of them (int), or the share of what all units cost (float).
        step: number of updates made.
        mean_kind, signal, history: as in :class:`GnmrConfig`.
        mean: ``[H]`` float64, mean of the norms of all earlier steps, in units of the norms; 0 if none.
        count: ``[H]`` int64, number n of steps that entered the mean since the start. Then ``norms`` holds min(n, W)
            values and ``ratios`` as many, or, for the signal ``gnmr``, min(n - 1, W), as the first norm has no GNMR.
        norms: ``[W, H]`` float64, the last norms, for ``mean_kind="window"``; else ``[0, H]``.
        ratios: ``[W, H]`` float64, the last levels (GNMR values), each at most :data:`MAX_RATIO`.
        lock: ``[U]`` int64, steps for which the unit stays a candidate.
        active: ``[U]`` bool, the last decision.
        error: ``[U]`` float64, the relative error measured last.
        measured: ``[U]`` bool, whether there was one.
        auto: ``[2]`` float64, the automatic thresholds in the place of alpha and beta; 0 before the first level.
    """

    num_units: int
    max_active: int | float
    step: int
    mean_kind: MeanKind
    signal: Signal
    history: HistoryKind
    mean: Tensor
    count: Tensor
    norms: Tensor
    ratios: Tensor
    lock: Tensor
    active: Tensor
    error: Tensor
    measured: Tensor
    auto: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """What one update decided and why. All tensors are ``[U]``, on the CPU, free of NaN, and read-only.

    Attributes:
        step: index of the step, from 1; the value that schedules of ``alpha`` and ``beta`` were given.
        gnmr: float64, ratio of the norm to the mean, or the level of another signal in its place; dimensionless, may
            be ``inf``.
        delta_gnmr: float64, ratio of that to its recent mean; dimensionless, may be ``inf``.
        risk: float64, the larger of the two ratios in units of its threshold; may be ``inf``.
        risky: bool, a threshold fired or the norm is not finite.
        candidates: bool, risky or locked.
        active: bool, on the recovery path from now on; at most ``max_active`` are True.
        refused: bool, a candidate that the budget left out.
        lock: int64, lock after this step, in steps.
        missing: bool, the unit had no gradient in this step, or no error was measured yet for a signal that needs one.
        alpha, beta: the thresholds in force, positive; ``inf`` = off.
    """

    step: int
    gnmr: Tensor
    delta_gnmr: Tensor
    risk: Tensor
    risky: Tensor
    candidates: Tensor
    active: Tensor
    refused: Tensor
    lock: Tensor
    missing: Tensor
    alpha: float
    beta: float


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
    norm_rows = config.window if config.mean == "window" else 0
    columns = num_units * (2 if config.history == "per_path" else 1)
    return State(
        num_units=num_units,
        max_active=budget,
        step=0,
        mean_kind=config.mean,
        signal=config.signal,
        history=config.history,
        mean=_zeros(columns),
        count=_zeros(columns, dtype=torch.int64),
        norms=_zeros(norm_rows, columns),
        ratios=_zeros(config.window, columns),
        lock=_zeros(num_units, dtype=torch.int64),
        active=_zeros(num_units, dtype=torch.bool),
        error=_zeros(num_units),
        measured=_zeros(num_units, dtype=torch.bool),
        auto=_zeros(2),
    )


def update(
    state: State,
    norms: Tensor | Sequence[float],
    config: GnmrConfig,
    *,
    errors: Tensor | Sequence[float] | None = None,
    costs: Tensor | Sequence[float] | None = None,
    recovered: Tensor | None = None,
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
    _check_config((state.mean_kind, state.ratios.shape[0], state.signal, state.history), config)
    norm = _vector("norms", norms, state.num_units)
    step = state.step + 1
    alpha, beta = thresholds(state, step, config)

    broken = norm == math.inf
    missing = norm < 0.0
    error, held, measured = state.error, state.error, state.measured
    if config.measures_errors:
        if errors is not None:
            found = _vector("errors", errors, state.num_units)
            error, measured = torch.where(found >= 0.0, found, error), measured | (found >= 0.0)
        infinite = error == math.inf
        broken = broken | (infinite & ~missing)
        missing = missing | (~measured & ~broken)
        # An error that is not finite is no error to hold: until the next measurement the unit has none.
        held, measured = error.masked_fill(infinite, 0.0), measured & ~infinite
    usable = ~(broken | missing)

    path = None
    if config.history == "per_path":
        on = state.active if recovered is None else recovered
        path = torch.arange(state.num_units) + state.num_units * on
    mean, count, norm_history, ratios = (
        history if path is None else history[..., path]
        for history in (state.mean, state.count, state.norms, state.ratios)
    )
    if config.signal == "gnmr":
        level, levels_known = signals.gnmr(norm, mean, missing | (count == 0)), count - 1
    else:
        levels_known = count
        level = signals.error(error, ~usable) if config.signal == "error" else signals.gap(error, norm, ~usable)
    level.masked_fill_(broken, math.inf)
    recent = _row_sum(ratios) / levels_known.clamp(1, config.window)
    change = signals.ratio(level, recent, missing | (levels_known <= 0)).masked_fill_(broken, math.inf)
    risk = torch.maximum(_relative(level, alpha), _relative(change, beta))
    risk.masked_fill_(missing, 0.0).masked_fill_(broken, math.inf)

    risky = broken
    if step > config.warmup_steps:
        risky = broken | (usable & ((level > alpha) | (change > beta)))
    candidates = risky | (state.lock > 0)
    priced = None if config.budget_unit == "units" else _costs(costs, state.num_units, config.budget_unit)
    active = _chosen(candidates, risk, state, priced, config)
    lock = (state.lock - 1).clamp_(min=0).masked_fill_(active & risky, config.lock_steps)

    heard = usable & (count >= 0 if config.measures_errors else count > 0)  # there is a level
    counted = count + usable
    norm_history = _pushed(norm_history, norm, usable)
    values: tuple[Tensor, ...] = (
        _next_mean(mean, norm, usable, counted, norm_history, config),
        counted,
        norm_history,
        _pushed(ratios, level.clamp(max=MAX_RATIO), heard),
    )
    if path is not None:
        whole = (state.mean, state.count, state.norms, state.ratios)
        values = tuple(old.index_copy(-1, path, new) for old, new in zip(whole, values, strict=True))
    next_state = State(
        num_units=state.num_units,
        max_active=state.max_active,
        step=step,
        mean_kind=state.mean_kind,
        signal=state.signal,
        history=state.history,
        mean=values[0],
        count=values[1],
        norms=values[2],
        ratios=values[3],
        lock=lock,
        active=active,
        error=held,
        measured=measured,
        auto=_next_auto(state, (level, change), heard, priced, config),
    )
    decision = Decision(
        step=step,
        gnmr=level,
        delta_gnmr=change,
        risk=risk,
        risky=risky,
        candidates=candidates,
        active=active,
        refused=candidates ^ active,
        lock=lock,
        missing=missing,
        alpha=alpha,
        beta=beta,
    )
    return next_state, decision


def thresholds(state: State, step: int, config: GnmrConfig) -> tuple[float, float]:
    """Alpha and beta in force at ``step``; ``inf`` for an automatic one that has not seen a level yet."""
    alpha, beta = (
        (float(calibrated) or math.inf) if is_auto(bound) else threshold(bound, step, name)
        for name, bound, calibrated in zip(
            ("alpha", "beta"), (config.alpha, config.beta), state.auto.tolist(), strict=True
        )
    )
    return alpha, beta


def capacity(max_active: int | float, costs: Tensor) -> float:
    """A budget in bytes or operations as a number of them: an int as it is, a share of what all units cost."""
    known = costs.isfinite()
    whole = float(costs.masked_fill(~known, 0.0).cumsum(0)[-1])
    return max_active * whole if isinstance(max_active, float) else float(max_active)


def check_costs(max_active: int | float, costs: Tensor | Sequence[float], unit: BudgetUnit) -> None:
    """Refuse a budget in bytes or operations that no unit fits into, as far as costs are known.

    Args:
        max_active, costs, unit: as for :func:`update`.

    Raises:
        BudgetError: the budget is above 0 and smaller than the cost of the cheapest unit.
    """
    priced = torch.as_tensor(costs, dtype=torch.float64, device="cpu")
    known = priced[priced.isfinite() & (priced > 0)]
    if not len(known) or not max_active:
        return
    room, cheapest = capacity(max_active, priced), float(known.min())
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
        "window": state.ratios.shape[0],
        "step": state.step,
    }
    for name in _tensor_layout(state.num_units, state.ratios.shape[0], state.mean_kind, state.history):
        saved[name] = getattr(state, name).clone()
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
    return State(
        num_units=fresh.num_units,
        max_active=fresh.max_active,
        step=step,
        mean_kind=fresh.mean_kind,
        signal=fresh.signal,
        history=fresh.history,
        mean=tensors["mean"],
        count=tensors["count"],
        norms=tensors.get("norms", fresh.norms),
        ratios=tensors["ratios"].clamp(max=MAX_RATIO),
        lock=tensors["lock"],
        active=tensors["active"],
        error=tensors["error"],
        measured=tensors["measured"],
        auto=tensors["auto"],
    )


def _zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="cpu")


def _vector(name: str, values: Tensor | Sequence[float], num_units: int) -> Tensor:
    """A new ``[U]`` float64 tensor on the CPU, every non-finite value in it as ``inf``."""
    if isinstance(values, Tensor):
        if not values.is_floating_point():
            raise StateMismatchError(
                f"{name}: expected a floating dtype, found {values.dtype}. Convert the {name} to float first."
            )
        vector = values.detach().cpu().to(torch.float64)
    else:
        try:
            vector = torch.as_tensor(values, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise StateMismatchError(
                f"{name}: expected a tensor or a sequence of floats, found {type(values).__name__} that does "
                f"not convert ({error}). Pass one float for each unit."
            ) from error
    if vector.shape != (num_units,):
        raise StateMismatchError(
            f"{name}: expected shape ({num_units},), found {tuple(vector.shape)}. Pass one for each "
            "unit, in the order of the units, and a negative number for a unit that has none."
        )
    # The sum turns -0.0 into 0.0: a quotient by a mean of -0.0 would have the wrong sign.
    return (vector + 0.0).nan_to_num_(nan=math.inf, posinf=math.inf, neginf=math.inf)


def _costs(costs: Tensor | Sequence[float] | None, num_units: int, unit: BudgetUnit) -> Tensor:
    """Costs ``[U]``, ``inf`` where one is not known."""
    if costs is None:
        raise StateMismatchError(
            f"costs: expected what each of the {num_units} units costs in {unit}, found None. Pass costs=..., or use "
            "budget_unit='units'."
        )
    priced = _vector("costs", costs, num_units)
    return priced.masked_fill(priced < 0.0, math.inf)


def _relative(ratio: Tensor, bound: float) -> Tensor:
    """The ratio in units of its threshold; 0 for an infinite threshold, also where the ratio is infinite."""
    return torch.zeros_like(ratio) if math.isinf(bound) else ratio / bound


def _chosen(candidates: Tensor, risk: Tensor, state: State, costs: Tensor | None, config: GnmrConfig) -> Tensor:
    """The candidates that the budget goes to; a mask."""
    if config.hysteresis > 1.0:
        risk = torch.where(state.active, risk * config.hysteresis, risk)
    first = state.active if config.hysteresis > 1.0 else None
    room = float(state.max_active) if costs is None else capacity(state.max_active, costs)
    return choose(candidates, risk, room, costs, first)


def choose(
    candidates: Tensor, risk: Tensor, room: float, costs: Tensor | None = None, first: Tensor | None = None
) -> Tensor:
    """The candidates of highest risk that the budget allows; a mask.

    Args:
        candidates: bool ``[U]``.
        risk: float64 ``[U]``, at least 0; may be ``inf``.
        room: the most units or, with ``costs``, the most that they may cost together.
        costs: float64 ``[U]``, ``inf`` where not known; None: every unit costs 1.
        first: bool ``[U]``: these come first in ties. Other ties go to the lower index.
    """
    if costs is None:
        return _highest(candidates, risk, int(room), first)
    return _knapsack(candidates, risk, costs, room, first)


def _ranked(key: Tensor, first: Tensor | None) -> Tensor:
    """Indices by ``key``, the highest first; ties to those in ``first``, then to the lower index."""
    if first is None:
        return key.sort(descending=True, stable=True).indices
    order = first.to(torch.int8).sort(descending=True, stable=True).indices
    return order[key[order].sort(descending=True, stable=True).indices]


def _highest(candidates: Tensor, risk: Tensor, max_active: int, first: Tensor | None) -> Tensor:
    """The ``max_active`` candidates of highest risk; a mask."""
    if int(candidates.count_nonzero()) <= max_active:
        return candidates.clone()
    ranked = _ranked(torch.where(candidates, risk, -1.0), first)
    return torch.zeros_like(candidates).index_fill_(0, ranked[:max_active], True)


def _knapsack(candidates: Tensor, risk: Tensor, costs: Tensor, room: float, first: Tensor | None) -> Tensor:
    """Candidates of at most ``room`` cost together, greedily by risk per cost; a mask.

    At least half the risk that the best choice covers: the better of the greedy choice and the riskiest candidate
    that fits alone is (Dantzig 1957; Martello & Toth 1990, section 2.4).
    """
    fitting = candidates & (costs <= room)
    value = risk.clamp(max=MAX_RATIO)
    density = torch.where(costs > 0, value / costs, math.inf)
    count = int(fitting.count_nonzero())
    order = _ranked(torch.where(fitting, density, -1.0), first)[:count].tolist()
    if not order:
        return torch.zeros_like(candidates)
    price, worth = costs.tolist(), value.tolist()
    greedy = _filled(order, price, room)
    best = max(order, key=lambda index: worth[index])
    if worth[best] > sum(worth[index] for index in greedy):
        greedy = _filled([best, *(index for index in order if index != best)], price, room)
    return torch.zeros_like(candidates).index_fill_(0, torch.tensor(greedy, dtype=torch.int64), True)


def _filled(order: list[int], price: list[float], room: float) -> list[int]:
    """Of the units in their order, those that still fit."""
    taken, spent = [], 0.0
    for index in order:
        if spent + price[index] <= room:
            taken.append(index)
            spent += price[index]
    return taken


def _next_auto(
    state: State, values: tuple[Tensor, Tensor], heard: Tensor, costs: Tensor | None, config: GnmrConfig
) -> Tensor:
    """The automatic thresholds after a step with these levels and changes."""
    bounds = (config.alpha, config.beta)
    automatic = [is_auto(bound) for bound in bounds]
    if not any(automatic) or not heard.any():
        return state.auto
    target = config.auto_share
    if target is None:
        if costs is None:
            target = min(1.0, state.max_active / state.num_units)
        else:
            whole = capacity(1.0, costs)
            target = min(1.0, capacity(state.max_active, costs) / whole) if whole > 0 else 1.0
    target = target / sum(automatic)
    found = []
    for auto, value, tau in zip(automatic, values, state.auto.tolist(), strict=True):
        if auto:
            own = value[heard]
            if tau == 0.0:
                ordered = own.sort().values
                tau = float(ordered[min(len(own) - 1, int((1.0 - target) * len(own)))])
            else:
                share = int((own > tau).count_nonzero()) / len(own)
                tau *= math.exp(AUTO_GAIN * (share - target))
            tau = min(max(tau, _LEAST_AUTO), MAX_RATIO) if tau > 0.0 else 0.0
        found.append(tau)
    return torch.tensor(found, dtype=torch.float64, device="cpu")


def _pushed(history: Tensor, value: Tensor, where: Tensor) -> Tensor:
    """The history ``[W, U]`` with ``value`` as its newest row in the columns chosen by ``where``."""
    if history.shape[0] == 0:
        return history
    return torch.where(where, torch.cat([value.unsqueeze(0), history[:-1]]), history)


def _next_mean(
    mean: Tensor, norm: Tensor, usable: Tensor, count: Tensor, norm_history: Tensor, config: GnmrConfig
) -> Tensor:
    """The mean with this step's usable norms in it; ``count`` and ``norm_history`` include them already."""
    if config.mean == "window":
        # Scaled by the largest norm, so that large ones do not overflow nor subnormal ones vanish.
        largest = norm_history.amax(dim=0)
        scale = torch.where(largest > 0, largest, 1.0)
        return _row_sum(norm_history / scale).div_(count.clamp(1, config.window)).mul_(scale)
    if config.mean == "ema":
        moved = torch.where(count == 1, norm, mean + (norm - mean) * (1.0 - config.ema_decay))
    else:
        moved = mean + (norm - mean) / count
    # Between norms close to the largest float, rounding alone can step over it.
    return torch.where(usable, moved.clamp_(max=_LARGEST), mean)


def _row_sum(rows: Tensor) -> Tensor:
    """Sum over the rows, from the first to the last.

    ``Tensor.sum`` adds in an order that depends on the index of the column, their number and the number of
    threads, which would make equal units unequal and let decisions differ between machines.
    """
    return rows.cumsum(dim=0)[-1]


def _tensor_layout(
    num_units: int, window: int, mean_kind: MeanKind, history: HistoryKind
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor of a saved state, by field name."""
    columns = num_units * (2 if history == "per_path" else 1)
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
