"""Transients on purpose, and how a controller met them.

    spikes = [testing.Outliers(["layers.1.mlp.down_proj"], start=100, stop=120), testing.LearningRateSpike(200, 210)]
    with testing.inject(model, spikes, optimizer) as injected:   # before torch.compile(model)
        for step, batch in enumerate(data):
            with injected.at(step):
                loss = model(injected.batch(batch)).loss
                ...
                optimizer.step()
    print(testing.score(gnmr_fx.controller(model), injected.spans))

All of them are seeded and reversible: outside their span, and after the context manager, nothing of them is left but
what the training made of it.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from gnmr_fx.errors import ConfigError, UnknownUnitError
from gnmr_fx.instrument import controller as controller_of
from gnmr_fx.runtime import Controller, Event

__all__ = [
    "DamagedWeight",
    "Detection",
    "Injection",
    "LearningRateSpike",
    "Outliers",
    "ShiftedData",
    "Span",
    "Transient",
    "inject",
    "score",
    "score_events",
]


@dataclass(frozen=True)
class Outliers:
    """In steps ``start`` to ``stop - 1``, a few input channels of each of ``units`` are ``factor`` times as large.

    By a forward pre-hook on the module that holds the unit's weight, set up before the model is compiled: it multiplies
    by a vector that is 1 outside the span, so nothing is recompiled.

    Args:
        units: names of units.
        start, stop: training steps, as given to :meth:`Injection.at`.
        factor: of the chosen channels.
        channels: how many channels of each unit, at least 1.
        seed: of the choice of channels.
    """

    units: tuple[str, ...] | Sequence[str]
    start: int
    stop: int
    factor: float = 30.0
    channels: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", tuple(self.units))
        _check_span(self)
        if not self.units or self.channels < 1:
            raise ConfigError(
                f"Outliers: expected at least one unit and one channel, found {len(self.units)} units and "
                f"{self.channels} channels; name units of the table"
            )


@dataclass(frozen=True)
class ShiftedData:
    """In steps ``start`` to ``stop - 1``, batches come from another distribution.

    :meth:`Injection.batch` gives integers below ``vocabulary`` other names (one seeded permutation), and multiplies
    floating-point tensors by ``factor``.
    """

    start: int
    stop: int
    vocabulary: int = 256
    factor: float = 4.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_span(self)


@dataclass(frozen=True)
class LearningRateSpike:
    """In steps ``start`` to ``stop - 1``, the optimizer's learning rates are ``factor`` times as large."""

    start: int
    stop: int
    factor: float = 10.0

    def __post_init__(self) -> None:
        _check_span(self)


@dataclass(frozen=True)
class DamagedWeight:
    """From step ``start`` on, a ``share`` of the elements of a unit's weight are ``factor`` times as large.

    At step ``stop`` these elements get back the values that they had.
    """

    unit: str
    start: int
    stop: int
    share: float = 0.001
    factor: float = 30.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_span(self)
        if not 0 < self.share <= 1:
            raise ConfigError(f"DamagedWeight: expected a share in (0, 1], found {self.share!r}")


Transient: TypeAlias = Outliers | ShiftedData | LearningRateSpike | DamagedWeight


class Span(NamedTuple):
    """A transient as the controller met it: in its steps ``start`` to ``stop - 1``, for ``units`` (None = all)."""

    transient: Transient
    units: tuple[str, ...] | None
    start: int
    stop: int


class _Scaled:
    """A forward pre-hook that multiplies a module's input by a vector."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        return x * self.scale.to(x.dtype), *args[1:]


@dataclass(eq=False)
class Injection:
    """Transients at work on a model; made by :func:`inject`.

    Attributes:
        spans: the transients that were met so far, in steps of the controller.
    """

    controller: Controller
    transients: tuple[Transient, ...]
    optimizer: torch.optim.Optimizer | None
    spans: list[Span] = field(default_factory=list)
    _scales: dict[tuple[Transient, str], Tensor] = field(default_factory=dict)
    _damage: dict[Transient, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    _met: dict[Transient, int] = field(default_factory=dict)
    _now: tuple[Transient, ...] = ()

    @contextlib.contextmanager
    def at(self, step: int) -> Iterator[None]:
        """What is to happen in training step ``step`` happens inside: forward, backward and optimizer step."""
        self._now = tuple(t for t in self.transients if t.start <= step < t.stop)
        for transient in self.transients:
            self._enter(transient) if transient in self._now else self._leave(transient)
        rates = self._spiked()
        try:
            yield
        finally:
            for group, rate, spiked in rates:
                if group["lr"] == spiked:  # else a scheduler has set another one meanwhile
                    group["lr"] = rate
            for transient in self._now:
                self._count(transient)

    def batch(self, batch: Any) -> Any:
        """A batch (a tensor, or tuples, lists and dictionaries of them) as the transients of this step make it."""
        for transient in self._now:
            if isinstance(transient, ShiftedData):
                batch = _shifted(batch, transient)
        return batch

    def _enter(self, transient: Transient) -> None:
        if isinstance(transient, Outliers):
            for name in transient.units:
                self._scales[transient, name][:] = _scale(transient, name, len(self._scales[transient, name]))
        elif isinstance(transient, DamagedWeight) and transient not in self._damage:
            weight = _unit(self.controller, transient.unit).weight
            generator = torch.Generator().manual_seed(transient.seed)
            count = max(1, round(transient.share * weight.numel()))
            places = torch.randperm(weight.numel(), generator=generator)[:count].to(weight.device)
            with torch.no_grad():
                values = weight.view(-1)[places].clone()
                weight.view(-1)[places] = values * transient.factor
            self._damage[transient] = (weight, places, values)

    def _leave(self, transient: Transient) -> None:
        if isinstance(transient, Outliers):
            for name in transient.units:
                self._scales[transient, name].fill_(1.0)
        elif transient in self._damage:
            weight, places, values = self._damage.pop(transient)
            with torch.no_grad():
                weight.view(-1)[places] = values

    def _spiked(self) -> list[tuple[dict[str, Any], Any, Any]]:
        """Raise the learning rates; the groups, with their rates before and after."""
        factor = math.prod(t.factor for t in self._now if isinstance(t, LearningRateSpike))
        if factor == 1 or self.optimizer is None:
            return []
        rates = [(group, group["lr"], group["lr"] * factor) for group in self.optimizer.param_groups]
        for group, _, spiked in rates:
            group["lr"] = spiked
        return rates

    def _count(self, transient: Transient) -> None:
        """The controller has made its step under ``transient``: its span reaches that far."""
        step = self.controller.step_count
        place = self._met.get(transient)
        if place is None:
            self._met[transient] = len(self.spans)
            self.spans.append(Span(transient, _affected(transient), step, step + 1))
        else:
            self.spans[place] = self.spans[place]._replace(stop=step + 1)


@contextlib.contextmanager
def inject(
    model: nn.Module, transients: Iterable[Transient], optimizer: torch.optim.Optimizer | None = None
) -> Iterator[Injection]:
    """Have ``transients`` happen while ``model`` trains; see the module's docstring.

    Args:
        model: an instrumented model. Enter before its first compiled forward: hooks are part of what is compiled.
        transients: what is to happen.
        optimizer: whose learning rates are spiked.

    Raises:
        NotInstrumentedError: for a model without gnmr-fx.
        UnknownUnitError: for a unit that the model does not have.
        ConfigError: for outliers in a unit whose weight is not read by a module's own forward, or a spike of the
            learning rate without an optimizer.
    """
    installed = controller_of(model)
    injection = Injection(installed, tuple(transients), optimizer)
    hooks = []
    try:
        for transient in injection.transients:
            if isinstance(transient, LearningRateSpike) and optimizer is None:
                raise ConfigError(f"expected an optimizer for {transient}, found None; pass inject(..., optimizer)")
            if isinstance(transient, DamagedWeight):
                _unit(installed, transient.unit)
            if isinstance(transient, Outliers):
                for name in transient.units:
                    unit = _unit(installed, name)
                    if not isinstance(unit.module, nn.Linear):
                        raise ConfigError(
                            f"outliers: expected a unit whose weight an nn.Linear holds, found {name!r} in a "
                            f"{type(unit.module).__name__}; choose another unit"
                        )
                    scale = torch.ones(unit.module.in_features, device=unit.weight.device)
                    injection._scales[transient, name] = scale
                    hooks.append(unit.module.register_forward_pre_hook(_Scaled(scale)))
        yield injection
    finally:
        for transient in injection.transients:
            if transient in injection._damage:
                injection._leave(transient)
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class Detection:
    """How a controller met transients.

    Attributes:
        pairs: transients times units that they affect.
        hits: of these, how many were over a threshold while the transient lasted.
        recovered: of these, how many were on the recovery path at least once while it lasted.
        delays: for each hit, steps from the transient's first to the first over a threshold (0 = at once).
        false_alarms: unit-steps over a threshold that no transient affects.
        quiet: unit-steps that no transient affects.
    """

    pairs: int
    hits: int
    recovered: int
    delays: tuple[int, ...]
    false_alarms: int
    quiet: int

    @property
    def hit_rate(self) -> float:
        """Share of the pairs that were hit; NaN of none."""
        return self.hits / self.pairs if self.pairs else math.nan

    @property
    def recovered_rate(self) -> float:
        """Share of the pairs that were recovered; NaN of none."""
        return self.recovered / self.pairs if self.pairs else math.nan

    @property
    def mean_delay(self) -> float:
        """Mean delay of the hits, in steps; NaN of none."""
        return statistics.fmean(self.delays) if self.delays else math.nan

    @property
    def false_alarms_per_1000(self) -> float:
        """False alarms per 1,000 unit-steps that no transient affects; NaN of none."""
        return 1000 * self.false_alarms / self.quiet if self.quiet else math.nan

    def __str__(self) -> str:
        return (
            f"{self.hits} of {self.pairs} transients × units over a threshold ({100 * self.hit_rate:.0f}%), "
            f"{self.recovered} recovered, after {self.mean_delay:.1f} steps on average; "
            f"{self.false_alarms_per_1000:.2f} false alarms per 1,000 unit-steps"
        )


def score(controller: Controller, spans: Sequence[Span], after: int = 0) -> Detection:
    """How ``controller`` met ``spans``, by its records.

    Args:
        controller: whose run it was.
        spans: as :attr:`Injection.spans` has them.
        after: steps after a transient that still count as its own: neither a late hit nor a false alarm.

    Raises:
        ConfigError: where records were dropped.
    """
    dropped = controller.stats["events_dropped"]
    if dropped:
        raise ConfigError(
            f"expected the records of the whole run, found {dropped} dropped; raise GnmrConfig.max_events, which is "
            f"{controller.config.max_events}"
        )
    units = [unit.name for unit in controller.units]
    first = controller.config.warmup_steps + 1
    return score_events(tuple(controller.events), spans, units, first, controller.step_count, after)


def score_events(
    events: Sequence[Event], spans: Sequence[Span], units: Sequence[str], first: int, last: int, after: int = 0
) -> Detection:
    """:func:`score` of records, over the steps ``first`` to ``last`` (inclusive).

    A unit was on the recovery path during a transient if a record of its steps says that it was chosen. One that was
    there since before and stayed there without a record does not count as recovered by it.
    """
    risky: dict[str, list[int]] = {unit: [] for unit in units}
    chosen: dict[str, set[int]] = {unit: set() for unit in units}
    for event in events:
        if event.risky and first <= event.step <= last:
            risky[event.unit].append(event.step)
        if event.outcome == "chosen":
            chosen[event.unit].add(event.step)
    excused: dict[str, set[int]] = {unit: set() for unit in units}
    delays: list[int] = []
    pairs = recovered = 0
    for span in spans:
        for unit in units if span.units is None else span.units:
            excused[unit].update(range(max(first, span.start), min(last + 1, span.stop + after)))
            pairs += 1
            hits = [step for step in risky[unit] if span.start <= step < span.stop]
            delays += [min(hits) - span.start] if hits else []
            recovered += any(span.start <= step < span.stop for step in chosen[unit])
    false = sum(step not in excused[unit] for unit in units for step in risky[unit])
    quiet = max(0, last - first + 1) * len(units) - sum(map(len, excused.values()))
    return Detection(pairs, len(delays), recovered, tuple(delays), false, quiet)


def _affected(transient: Transient) -> tuple[str, ...] | None:
    if isinstance(transient, Outliers):
        return tuple(transient.units)
    return (transient.unit,) if isinstance(transient, DamagedWeight) else None


def _unit(controller: Controller, name: str) -> Any:
    for unit in controller.units:
        if unit.name == name:
            return unit
    raise UnknownUnitError(
        f"expected the name of a unit, found {name!r}; units are "
        f"{', '.join(unit.name for unit in controller.units[:5])}{', ...' if len(controller.units) > 5 else ''}"
    )


def _scale(transient: Outliers, name: str, width: int) -> Tensor:
    """The vector that a unit's input is multiplied by while its outliers last."""
    generator = torch.Generator().manual_seed(transient.seed + transient.units.index(name))
    scale = torch.ones(width)
    scale[torch.randperm(width, generator=generator)[: transient.channels]] = transient.factor
    return scale


def _shifted(batch: Any, transient: ShiftedData) -> Any:
    if isinstance(batch, dict):
        return {key: _shifted(value, transient) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(_shifted(value, transient) for value in batch)
    if not isinstance(batch, Tensor) or batch.dtype == torch.bool:
        return batch
    if batch.is_floating_point():
        return batch * transient.factor
    generator = torch.Generator().manual_seed(transient.seed)
    names = torch.randperm(transient.vocabulary, generator=generator).to(batch.device, batch.dtype)
    known = (batch >= 0) & (batch < transient.vocabulary)  # -100 marks what the loss ignores
    return torch.where(known, names[batch.clamp(0, transient.vocabulary - 1).long()], batch)


def _check_span(transient: Any) -> None:
    if not 0 <= transient.start < transient.stop:
        raise ConfigError(
            f"{type(transient).__name__}: expected 0 <= start < stop, found start={transient.start!r} and "
            f"stop={transient.stop!r}"
        )
