"""``audit``: the true recovery gap of every unit, and how close the controller's choices come to the best ones."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from gnmr_fx import signals
from gnmr_fx.config import BudgetUnit
from gnmr_fx.controller import MISSING, capacity, choose
from gnmr_fx.distributed import is_distributed
from gnmr_fx.errors import AuditError
from gnmr_fx.heard import root_means
from gnmr_fx.instrument import ModelController, controller, unwrap
from gnmr_fx.plot import draw_audit
from gnmr_fx.report import report
from gnmr_fx.text import below, budget_text, common_parent, counted, grid, to_json

__all__ = ["Audit", "audit", "spearman"]

CHECKED_UNITS = 3
"""Units on which an estimate is compared with the gap itself."""


@dataclass(frozen=True)
class Audit:
    """What :func:`audit` found. A snapshot: it prints as a table, and gives its data as JSON and as a plot.

    Attributes:
        units: names of the units, in the order of all tuples.
        gaps: L2 norm of what recovering that unit alone changes in the gradient.
        norms: L2 norm of each unit's own weight gradient on the recovery path, in the same measure.
        costs: of each unit on the recovery path, in ``budget_unit``; None where it is not known.
        risks: the controller's last; None before its first step.
        recent: share of the last ``recent_steps`` steps (of those that the records tell of) that each unit was on the
            recovery path.
        active: whether each was on the recovery path when the audit began.
        oracle: whether each is in the set of largest summed squared gaps that the budget allows (for a budget that does
            not count units: by the greedy rule of the controller).
        budget, budget_unit: as the controller has them.
        recent_steps: number of steps that ``recent`` is about.
        gradient_norm: L2 norm of the whole gradient, everything on the recovery path.
        error_low: L2 norm of the difference between the gradient with everything on the low-cost path and that with
            everything on the recovery path, as a share of the latter.
        rank_correlation: Spearman's, with the gaps: of the controller's last ``"risk"``, and of what signals would say
            of this batch, ``"norm"``, ``"error"`` and ``"gap"``. NaN where it is not defined.
        passes: forward-backward passes made.
        is_exact: whether gaps are those of one unit at a time; else they are differences of each unit's own gradient
            between two passes.
        estimate_error: of an estimate, the largest relative error found on the units that it was checked on; 0.0 where
            gaps are exact.
    """

    units: tuple[str, ...]
    gaps: tuple[float, ...]
    norms: tuple[float, ...]
    costs: tuple[float | None, ...]
    risks: tuple[float, ...] | None
    recent: tuple[float, ...]
    active: tuple[bool, ...]
    oracle: tuple[bool, ...]
    budget: int | float
    budget_unit: BudgetUnit
    recent_steps: int
    gradient_norm: float
    error_low: float
    rank_correlation: Mapping[str, float]
    passes: int
    is_exact: bool
    estimate_error: float

    def gain_of(self, weights: Sequence[float]) -> float:
        """Summed squared gaps of units with these weights, as a share of the oracle's; NaN where that has none."""
        best = sum(gap**2 for gap, inside in zip(self.gaps, self.oracle, strict=True) if inside)
        return sum(weight * gap**2 for weight, gap in zip(weights, self.gaps, strict=True)) / best if best else math.nan

    @property
    def share_of_gain(self) -> float:
        """What the controller's recent choices recovered of the summed squared gaps, as a share of what the oracle
        would have: the share of steps that each unit was recovered, times its squared gap. 1 = as good as the oracle on
        this batch; what a random choice of the same size would have is :attr:`random_share`."""
        return self.gain_of(self.recent)

    @property
    def share_of_gain_now(self) -> float:
        """The same of the units on the recovery path when the audit began."""
        return self.gain_of([float(on) for on in self.active])

    @property
    def random_share(self) -> float:
        """The same of as many unit-steps as the controller recovered, spread evenly over all units."""
        spread = sum(self.recent) / len(self.recent)
        return self.gain_of([spread] * len(self.units))

    def error_with(self, weights: Sequence[float]) -> float:
        """Relative error of the gradient with units of these weights recovered, as far as gaps add up in squares."""
        removed = sum(weight * gap**2 for weight, gap in zip(weights, self.gaps, strict=True))
        return math.sqrt(max(0.0, (self.error_low * self.gradient_norm) ** 2 - removed)) / self.gradient_norm

    def to_json(self, indent: int | None = None) -> str:
        """Everything as a JSON object."""
        shares = {name: getattr(self, name) for name in ("share_of_gain", "share_of_gain_now", "random_share")}
        return to_json(asdict(self) | shares, indent)

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw the gaps, the oracle's set and the controller's choices to an image file.

        Args:
            path: the file; its suffix tells the format (``.png``, ``.pdf``, ``.svg``).

        Returns:
            The path.

        Raises:
            MissingDependencyError: without matplotlib.
        """
        draw_audit(self.units, self.gaps, self.oracle, self.recent, self.gradient_norm).savefig(
            os.fspath(path), dpi=150
        )
        return Path(path)

    def __str__(self) -> str:
        parent = common_parent(self.units)
        order = sorted(range(len(self.units)), key=lambda index: -self.gaps[index])
        headers = [
            "unit",
            "gap\n% of gradient",
            "own\nerror",
            "oracle",
            "on now",
            f"on, last\n{self.recent_steps} steps",
        ]
        rows = [
            [
                below(self.units[i], parent),
                f"{100 * self.gaps[i] / self.gradient_norm:.3g}",
                f"{self.gaps[i] / self.norms[i]:.3f}" if self.norms[i] else "-",
                "yes" if self.oracle[i] else "",
                "yes" if self.active[i] else "",
                f"{100 * self.recent[i]:.0f}%",
            ]
            for i in order
        ]
        if self.risks is not None:
            headers.append("last\nrisk")
            for row, i in zip(rows, order, strict=True):
                row.append(f"{self.risks[i]:.2f}")
        return "\n\n".join(
            [
                f"recovery gaps of {counted(len(self.units), 'unit')}{f' below {parent}' if parent else ''}, "
                f"largest first; budget {budget_text(self.budget, self.budget_unit)}",
                grid(rows, headers, "lrrllr" + ("r" if self.risks is not None else "")),
                grid(list(self._overview()), style="plain"),
            ]
        )

    def _overview(self) -> Iterator[tuple[str, str]]:
        oracle, now = ([float(flag) for flag in flags] for flags in (self.oracle, self.active))
        yield (
            "error of the gradient",
            f"{100 * self.error_low:.3g}% on the low-cost path, {100 * self.error_with(oracle):.3g}% with the oracle's "
            f"set recovered, {100 * self.error_with(now):.3g}% with the units that are now",
        )
        yield (
            "share of the oracle's gain",
            f"{_percent(self.share_of_gain_now)} by the units on now, {_percent(self.share_of_gain)} by the choices of "
            f"the last {counted(self.recent_steps, 'step')}, {_percent(self.random_share)} if these were random",
        )
        ranks = ", ".join(f"{name} {_number(value)}" for name, value in self.rank_correlation.items())
        yield "rank correlation with the gaps", ranks
        how = "exact" if self.is_exact else f"estimated, off by up to {100 * self.estimate_error:.0f}%"
        yield "gaps", f"{how}; {self.passes} passes"


def audit(
    model: nn.Module,
    loss_fn: Callable[[], Tensor],
    *,
    each: bool | None = None,
    recent_steps: int = 50,
    progress: bool = True,
) -> Audit:
    """The true recovery gap of every unit of an instrumented model, on the user's own data.

    The gap of a unit is the L2 norm of what recovering it alone changes in the gradient of the loss. The oracle
    recovers the units of largest squared gaps that the budget allows.

    Costs. Two forward-backward passes, all units on the recovery path and all on the low-cost path, and memory for two
    gradients of the model. Where the paths change nothing but each unit's own weight gradient, as activations stored
    for projections alone do, that gives all gaps exactly; it is told by the loss and all other gradients being equal
    bit for bit in the two passes. Else one more pass for each unit (and a third gradient), or, with ``each=False``, for
    three units, on which the estimate is checked.

    The model, its gradients and buffers, torch's random generators, the controller and the guards are left as they
    were; all passes start from the same random state, so dropout is the same in all of them.

    Args:
        model: an instrumented model in training mode, compiled or not; not distributed.
        loss_fn: runs one forward on a batch of yours and returns the loss, a scalar; the backward is made here. It is
            called once for each pass and has to use the same batch every time.
        each: True: one pass for each unit in any case. False: never; where units influence each other's gradients, a
            unit's gap is estimated as the difference of its own weight gradient between the two passes. None: where
            needed.
        recent_steps: steps of the controller whose choices are compared with the oracle's.
        progress: whether there is a progress bar.

    Raises:
        NotInstrumentedError: for a model without gnmr-fx.
        AuditError: for a model in eval mode or distributed over ranks, a recipe whose paths are the same, or a
            ``loss_fn`` that returns no finite scalar with a gradient.
    """
    installed = controller(model)
    target = unwrap(model)
    _check(installed, target)
    past = report(model)
    now, count = tuple(installed.flags.tolist()), len(installed.units)
    parameters = {name: p for name, p in target.named_parameters() if p.requires_grad}
    own = [_name_of(parameters, unit.weight) for unit in installed.units]
    on, off = torch.ones(count, dtype=torch.bool), torch.zeros(count, dtype=torch.bool)
    passes = 2 + (count if each else 0)
    with (
        _undisturbed(installed, target) as restart,
        tqdm(total=passes, desc="audit", unit="pass", disable=not progress) as bar,
    ):

        def run(flags: Tensor) -> tuple[float, dict[str, Tensor]]:
            restart()
            installed.flags.copy_(flags)
            found = _gradients(loss_fn, parameters)
            bar.update()
            return found

        loss_high, high = run(on)
        installed.probe.reset(is_open=True, offset=0)
        loss_low, low = run(off)
        if loss_low == loss_high and all(torch.equal(low[name], high[name]) for name in parameters):
            raise AuditError(
                "expected a recipe with a recovery path that differs from the low-cost path, found the same gradient "
                f"on both with {installed.recipe}; instrument the model with another recipe"
            )
        errors = _errors(installed)
        costs = installed.costs()
        independent = loss_low == loss_high and all(
            torch.equal(low[name], high[name]) for name in parameters if name not in own
        )
        gaps = [_norm([low[name] - high[name]]) if name else 0.0 for name in own]
        one_by_one = [] if independent and not each else list(range(count))
        if each is False and one_by_one:
            one_by_one = sorted(range(count), key=lambda index: -gaps[index])[:CHECKED_UNITS]
        bar.total = 2 + len(one_by_one)
        off_by = 0.0
        for index in one_by_one:
            _, changed = run(off.index_fill(0, torch.tensor(index), True))
            exact = _norm(changed[name] - low[name] for name in parameters)
            if each is False and exact:
                off_by = max(off_by, abs(gaps[index] - exact) / exact)
            elif each is not False:
                gaps[index] = exact
    norms = [_norm([high[name]]) if name else 0.0 for name in own]
    whole = _norm(high.values())
    lost = _norm(low[name] - high[name] for name in parameters)
    risks = None if installed.decision is None else tuple(installed.decision.risk.tolist())
    recent, steps = _recent(past.periods, past.units, past.steps, past.first_step, recent_steps)
    return Audit(
        units=past.units,
        gaps=tuple(gaps),
        norms=tuple(norms),
        costs=tuple(None if cost < 0 else cost for cost in costs),
        risks=risks,
        recent=recent,
        active=now,
        oracle=tuple(_best(gaps, costs, installed)),
        budget=installed.max_active,
        budget_unit=installed.config.budget_unit,
        recent_steps=steps,
        gradient_norm=whole,
        error_low=lost / whole if whole else math.nan,
        rank_correlation=_correlations(gaps, norms, errors, risks),
        passes=2 + len(one_by_one),
        is_exact=not (each is False and one_by_one),
        estimate_error=off_by,
    )


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation of two sequences, ties at their mean rank; NaN where one of them is constant."""
    ranks = torch.stack([_ranks(torch.tensor(values, dtype=torch.float64)) for values in (a, b)])
    if len(a) < 2 or bool((ranks.std(dim=1) == 0).any()):
        return math.nan
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: Tensor) -> Tensor:
    _, inverse, counts = values.unique(sorted=True, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[inverse]


def _check(installed: ModelController, model: nn.Module) -> None:
    if not model.training:
        raise AuditError(
            "expected a model in training mode, found one in eval mode, in which nothing is stored in another format; "
            "call model.train() first"
        )
    if any(is_distributed(parameter) for parameter in model.parameters()):
        raise AuditError(
            "expected parameters that this process holds whole, found DTensors; audit an unsharded copy of the model"
        )


@contextlib.contextmanager
def _undisturbed(installed: ModelController, model: nn.Module) -> Iterator[Callable[[], None]]:
    """Put everything back that a pass may change; what is given puts back what each pass is to start from."""
    devices = sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with installed.undisturbed(), torch.random.fork_rng(devices):
        states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]

        def restart() -> None:
            torch.set_rng_state(states[0])
            for device, state in zip(devices, states[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)

        try:
            yield restart
        finally:
            with torch.no_grad():
                restart()


def _gradients(loss_fn: Callable[[], Tensor], parameters: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The loss and its gradient, zeros where it does not depend on a parameter. Accumulates nothing."""
    with torch.enable_grad():
        loss: object = loss_fn()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            if isinstance(loss, Tensor) and loss.numel() == 1:
                found = "one that does not require a gradient"
            raise AuditError(
                f"expected loss_fn to return the loss, a scalar tensor with a gradient, found {found}; return the loss "
                "of one forward in training mode, without calling backward() or item()"
            )
        if not bool(loss.isfinite()):
            raise AuditError(f"expected a finite loss, found {loss.item()}; gaps of such a gradient say nothing")
        found_gradients = torch.autograd.grad(loss.sum(), list(parameters.values()), allow_unused=True)
    return float(loss.detach()), {
        name: torch.zeros_like(parameter) if gradient is None else gradient.detach()
        for (name, parameter), gradient in zip(parameters.items(), found_gradients, strict=True)
    }


def _norm(tensors: Any) -> float:
    """L2 norm of tensors together."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def _name_of(parameters: Mapping[str, Tensor], weight: Tensor) -> str:
    """The name of a unit's weight; ``""`` where it is no trainable parameter."""
    return next((name for name, parameter in parameters.items() if parameter is weight), "")


def _errors(installed: ModelController) -> list[float]:
    """Relative error that the pass just made measured for each unit, 0 where there was none."""
    found = root_means(installed.probe.sums(torch.device("cpu")).tolist())
    return [0.0 if error == MISSING else error for error in found]


def _best(gaps: Sequence[float], costs: Sequence[float], installed: ModelController) -> list[bool]:
    """The oracle's set: a mask."""
    squared = [gap * gap for gap in gaps]
    candidates = [square > 0.0 for square in squared]
    if installed.config.budget_unit == "units":
        return choose(candidates, squared, float(installed.max_active))
    priced = [math.inf if cost < 0.0 else cost for cost in costs]
    return choose(candidates, squared, capacity(installed.max_active, priced), priced)


def _correlations(
    gaps: list[float], norms: list[float], errors: list[float], risks: tuple[float, ...] | None
) -> dict[str, float]:
    estimate = signals.gap(errors, norms, [True] * len(gaps))
    found = {"norm": spearman(norms, gaps), "error": spearman(errors, gaps), "gap": spearman(estimate, gaps)}
    return found if risks is None else {"risk": spearman(risks, gaps)} | found


def _recent(
    periods: Mapping[str, Any], units: Sequence[str], steps: int, first: int, wanted: int
) -> tuple[tuple[float, ...], int]:
    """Share of the last ``wanted`` steps that each unit was on the recovery path, and how many steps there are."""
    start = max(first, steps - wanted + 1)
    count = max(0, steps + 1 - start)
    covered = (sum(max(0, p.stop - max(p.start, start)) for p in periods[unit] if p.on) for unit in units)
    return tuple(on / count if count else 0.0 for on in covered), count


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.0f}%"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"
