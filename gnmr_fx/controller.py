"""The GNMR controller: which units run on their recovery path, as pure functions over explicit state.

GNMR is the Gradient Norm-to-Mean Ratio of arXiv 2606.00539. At step t, with gradient norm ``n_t(u) >= 0`` of
unit ``u``::

    gnmr_t(u)   = n_t(u) / mean(n_1(u) ... n_{t-1}(u))
    delta_t(u)  = gnmr_t(u) / mean(gnmr_{t-1}(u) ... gnmr_{t-window}(u))
    risk_t(u)   = max(gnmr_t(u) / alpha_t, delta_t(u) / beta_t)
    risky(u)    = gnmr_t(u) > alpha_t  or  delta_t(u) > beta_t
    candidates  = risky units and units whose lock is above 0
    active      = the max_active candidates of highest risk; ties go to the lower unit index
    lock(u)     = lock_steps if u is active and risky, else max(lock(u) - 1, 0)

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
number of units, nor on the number of threads. Nothing here mutates its arguments.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from gnmr_fx.config import GnmrConfig, MeanKind, resolve_budget, threshold
from gnmr_fx.errors import ConfigError, StateMismatchError

MISSING: Final = -1.0
"""The norm of a unit that had no gradient in a step. Any finite negative value means the same."""

MAX_RATIO: Final = 1e30
"""Largest GNMR value kept in a history; larger ones, ``inf`` included, are stored as this one."""

STATE_VERSION: Final = 1
"""Version of the format that :func:`state_to_dict` writes."""

StateDict: TypeAlias = dict[str, Tensor | int | str]

_LARGEST: Final = torch.finfo(torch.float64).max


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """Everything that the decisions of later steps depend on, besides the configuration.

    All tensors are on the CPU, finite and non-negative, and are to be treated as read-only. ``U`` is the
    number of units, ``W`` is ``config.window``. Histories hold the newest value in row 0, and zeros below the
    values.

    Attributes:
        num_units: U.
        max_active: largest number of active units in a step.
        step: number of updates made.
        mean_kind: which mean ``mean`` is, as in :attr:`GnmrConfig.mean`.
        mean: ``[U]`` float64, mean of the norms of all earlier steps, in units of the norms; 0 if none.
        count: ``[U]`` int64, number n of norms that entered the mean since the start. Then ``norms`` holds
            min(n, W) values and ``ratios`` min(n - 1, W), as the first norm has no GNMR.
        norms: ``[W, U]`` float64, the last norms, for ``mean_kind="window"``; else ``[0, U]``.
        ratios: ``[W, U]`` float64, the last GNMR values, each at most :data:`MAX_RATIO`.
        lock: ``[U]`` int64, steps for which the unit stays a candidate.
    """

    num_units: int
    max_active: int
    step: int
    mean_kind: MeanKind
    mean: Tensor
    count: Tensor
    norms: Tensor
    ratios: Tensor
    lock: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """What one update decided and why. All tensors are ``[U]``, on the CPU, free of NaN, and read-only.

    Attributes:
        step: index of the step, from 1; the value that schedules of ``alpha`` and ``beta`` were given.
        gnmr: float64, ratio of the norm to the mean; dimensionless, may be ``inf``.
        delta_gnmr: float64, ratio of GNMR to its recent mean; dimensionless, may be ``inf``.
        risk: float64, the larger of the two ratios in units of its threshold; may be ``inf``.
        risky: bool, a threshold fired or the norm is not finite.
        candidates: bool, risky or locked.
        active: bool, on the recovery path from now on; at most ``max_active`` are True.
        refused: bool, a candidate that the budget left out.
        lock: int64, lock after this step, in steps.
        missing: bool, the unit had no gradient in this step.
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


def init(num_units: int, config: GnmrConfig, max_active: int | float) -> State:
    """The state before the first step.

    Args:
        num_units: number of units, at least 1.
        config: the configuration; its ``mean`` and ``window`` are fixed for the life of the state.
        max_active: the budget, as in :func:`gnmr_fx.config.resolve_budget`.

    Raises:
        ConfigError: ``num_units`` is no int of at least 1.
        BudgetError: an invalid ``max_active``.
    """
    found: object = num_units
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ConfigError(f"num_units: expected an int of at least 1, found {found!r}. Count the units.")
    norm_rows = config.window if config.mean == "window" else 0
    return State(
        num_units=num_units,
        max_active=resolve_budget(max_active, num_units),
        step=0,
        mean_kind=config.mean,
        mean=_zeros(num_units),
        count=_zeros(num_units, dtype=torch.int64),
        norms=_zeros(norm_rows, num_units),
        ratios=_zeros(config.window, num_units),
        lock=_zeros(num_units, dtype=torch.int64),
    )


def update(state: State, norms: Tensor | Sequence[float], config: GnmrConfig) -> tuple[State, Decision]:
    """One step of the controller: the formulas and rules of the module's docstring.

    Args:
        state: the state after the previous step; not changed.
        norms: gradient norm of each unit, ``[U]``, all in one unit of measure: a tensor of any floating
            dtype, on any device (it is copied to the CPU), or a sequence of floats. A negative value means
            that the unit had no gradient; inf and NaN are allowed.
        config: the configuration that the state was made with. Fields other than ``mean`` and ``window`` may
            differ from one step to the next.

    Returns:
        The next state and the decision of this step.

    Raises:
        StateMismatchError: ``norms`` is no floating vector of length U, or ``config`` has another ``mean`` or
            ``window`` than the state.
        ConfigError: a schedule returned something else than a positive number.
    """
    _check_config(state.mean_kind, state.ratios.shape[0], config)
    norm = _as_norms(norms, state.num_units)
    step = state.step + 1
    alpha = threshold(config.alpha, step, "alpha")
    beta = threshold(config.beta, step, "beta")

    broken = norm == math.inf
    missing = norm < 0.0
    usable = ~(broken | missing)

    gnmr = _ratio(norm, state.mean, missing | (state.count == 0)).masked_fill_(broken, math.inf)
    recent = _row_sum(state.ratios) / (state.count - 1).clamp_(1, config.window)
    delta_gnmr = _ratio(gnmr, recent, missing | (state.count <= 1)).masked_fill_(broken, math.inf)
    risk = torch.maximum(_relative(gnmr, alpha), _relative(delta_gnmr, beta))
    risk.masked_fill_(missing, 0.0).masked_fill_(broken, math.inf)

    risky = broken
    if step > config.warmup_steps:
        risky = broken | (usable & ((gnmr > alpha) | (delta_gnmr > beta)))
    candidates = risky | (state.lock > 0)
    active = _highest(candidates, risk, state.max_active)
    lock = (state.lock - 1).clamp_(min=0).masked_fill_(active & risky, config.lock_steps)

    count = state.count + usable
    norm_history = _pushed(state.norms, norm, usable)
    next_state = State(
        num_units=state.num_units,
        max_active=state.max_active,
        step=step,
        mean_kind=state.mean_kind,
        mean=_next_mean(state.mean, norm, usable, count, norm_history, config),
        count=count,
        norms=norm_history,
        ratios=_pushed(state.ratios, gnmr.clamp(max=MAX_RATIO), usable & (state.count > 0)),
        lock=lock,
    )
    decision = Decision(
        step=step,
        gnmr=gnmr,
        delta_gnmr=delta_gnmr,
        risk=risk,
        risky=risky,
        candidates=candidates,
        active=active,
        refused=candidates ^ active,
        lock=lock,
        missing=missing,
    )
    return next_state, decision


def state_to_dict(state: State) -> StateDict:
    """The state as a flat dictionary of tensors, ints and strings, fit for ``torch.load(weights_only=True)``.

    The tensors are copies, so loading a checkpoint into them in place leaves ``state`` as it is. The budget
    is not part of it: a run may resume with another one.
    """
    saved: StateDict = {
        "version": STATE_VERSION,
        "mean_kind": state.mean_kind,
        "num_units": state.num_units,
        "window": state.ratios.shape[0],
        "step": state.step,
    }
    for name in _tensor_layout(state.num_units, state.ratios.shape[0], state.mean_kind):
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
        StateMismatchError: another version, number of units, window or kind of mean, or an entry that is
            absent or invalid.
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
    _check_config(_entry(saved, "mean_kind"), window, config)
    step = _entry(saved, "step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise _invalid("step", "an int of at least 0", step)

    fresh = init(num_units, config, max_active)
    tensors = {
        name: _loaded(name, _entry(saved, name), shape, dtype)
        for name, (shape, dtype) in _tensor_layout(num_units, config.window, config.mean).items()
    }
    return State(
        num_units=fresh.num_units,
        max_active=fresh.max_active,
        step=step,
        mean_kind=fresh.mean_kind,
        mean=tensors["mean"],
        count=tensors["count"],
        norms=tensors.get("norms", fresh.norms),
        ratios=tensors["ratios"].clamp(max=MAX_RATIO),
        lock=tensors["lock"],
    )


def _zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="cpu")


def _as_norms(norms: Tensor | Sequence[float], num_units: int) -> Tensor:
    """A new ``[U]`` float64 tensor on the CPU, every non-finite norm in it as ``inf``."""
    if isinstance(norms, Tensor):
        if not norms.is_floating_point():
            raise StateMismatchError(
                f"norms: expected a floating dtype, found {norms.dtype}. Convert the norms to float first."
            )
        vector = norms.detach().cpu().to(torch.float64)
    else:
        try:
            vector = torch.as_tensor(norms, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise StateMismatchError(
                f"norms: expected a tensor or a sequence of floats, found {type(norms).__name__} that does "
                f"not convert ({error}). Pass one float for each unit."
            ) from error
    if vector.shape != (num_units,):
        raise StateMismatchError(
            f"norms: expected shape ({num_units},), found {tuple(vector.shape)}. Pass one norm for each "
            "unit, in the order of the units, and a negative number for a unit without a gradient."
        )
    # The sum turns -0.0 into 0.0: a quotient by a mean of -0.0 would have the wrong sign.
    return (vector + 0.0).nan_to_num_(nan=math.inf, posinf=math.inf, neginf=math.inf)


def _ratio(value: Tensor, mean: Tensor, unknown: Tensor) -> Tensor:
    """``value / mean``; 1.0 where unknown, and for 0 / 0, which is the only NaN that can come up."""
    return (value / mean).nan_to_num_(nan=1.0, posinf=math.inf).masked_fill_(unknown, 1.0)


def _relative(ratio: Tensor, bound: float) -> Tensor:
    """The ratio in units of its threshold; 0 for an infinite threshold, also where the ratio is infinite."""
    return torch.zeros_like(ratio) if math.isinf(bound) else ratio / bound


def _highest(candidates: Tensor, risk: Tensor, max_active: int) -> Tensor:
    """The ``max_active`` candidates of highest risk, ties to the lower index; a mask."""
    if int(candidates.count_nonzero()) <= max_active:
        return candidates.clone()
    ranked = torch.where(candidates, risk, -1.0).sort(descending=True, stable=True).indices
    return torch.zeros_like(candidates).index_fill_(0, ranked[:max_active], True)


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


def _tensor_layout(num_units: int, window: int, mean_kind: MeanKind) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor of a saved state, by field name."""
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "mean": ((num_units,), torch.float64),
        "count": ((num_units,), torch.int64),
        "ratios": ((window, num_units), torch.float64),
        "lock": ((num_units,), torch.int64),
    }
    if mean_kind == "window":
        layout["norms"] = ((window, num_units), torch.float64)
    return layout


def _check_config(mean_kind: object, window: object, config: GnmrConfig) -> None:
    for name, found, expected in (("mean", mean_kind, config.mean), ("window", window, config.window)):
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
