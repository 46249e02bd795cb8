"""``report``: what the controller of a model recovered, when and why."""

from __future__ import annotations

import collections
import functools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from gnmr_fx.config import GnmrConfig, Threshold
from gnmr_fx.history import SIGNAL_NAMES, Period, UnitSummary, fired, periods, summary, told
from gnmr_fx.instrument import controller
from gnmr_fx.operator_table import Table, table
from gnmr_fx.plot import draw
from gnmr_fx.recipe import Recipe
from gnmr_fx.runtime import Event
from gnmr_fx.text import below, budget_text, common_parent, counted, grid, listed, recipe_data, share, to_json

__all__ = ["Report", "Table", "report", "table"]

TOP_UNITS = 15
LAST_EVENTS = 10
"""Rows of a printed report."""


def report(model: nn.Module) -> Report:
    """What the controller of an instrumented model has done so far.

    Args:
        model: an instrumented model, compiled or wrapped in DDP or not.

    Returns:
        A :class:`Report`; print it, or draw it with :meth:`Report.plot`.

    Raises:
        NotInstrumentedError: for a model without gnmr-fx.
    """
    installed = controller(model)
    return Report(
        units=tuple(unit.name for unit in installed.units),
        active=tuple(installed.flags.tolist()),
        times_recovered=tuple(installed.times_recovered(unit.index) for unit in installed.units),
        steps_recovered=tuple(installed.steps_recovered(unit.index) for unit in installed.units),
        stats=dict(installed.stats),
        events=tuple(installed.events),
        recipe=installed.recipe,
        budget=installed.max_active,
        forced=installed.forced,
        config=installed.config,
    )


@dataclass(frozen=True)
class Report:
    """What a controller did, and why; made by :func:`gnmr_fx.report`.

    A snapshot: it prints, gives its data as JSON and a plot, and stays as it is as training goes on.
    A step is that of the decision: a unit chosen in step t runs on the recovery path from the forward after it.

    Attributes:
        units: names of the units, in the order of the next three.
        active: whether each is on the recovery path now.
        times_recovered, steps_recovered: how often, and in how many steps, each was there.
        stats: the counts of :attr:`Controller.stats`.
        events: the records kept, oldest first.
        recipe, budget, config: as the controller has them.
        forced: whether the guards are pinned by hand, budget or not.
    """

    units: tuple[str, ...]
    active: tuple[bool, ...]
    times_recovered: tuple[int, ...]
    steps_recovered: tuple[int, ...]
    stats: Mapping[str, Any]
    events: tuple[Event, ...]
    recipe: Recipe
    budget: int | float
    forced: bool
    config: GnmrConfig

    @property
    def steps(self) -> int:
        """Optimizer steps decided on."""
        return int(self.stats["steps"])

    @property
    def first_step(self) -> int:
        """The first step that the records tell of: 1, or that of the oldest record where there were others before."""
        if not self.stats["events_dropped"]:
            return 1
        return max(1, self.events[0].step if self.events else self.steps)

    @functools.cached_property
    def events_of(self) -> Mapping[str, tuple[Event, ...]]:
        """The records of each unit, oldest first."""
        found: dict[str, list[Event]] = {unit: [] for unit in self.units}
        for event in self.events:
            found[event.unit].append(event)
        return {unit: tuple(events) for unit, events in found.items()}

    @functools.cached_property
    def periods(self) -> Mapping[str, tuple[Period, ...]]:
        """Each unit's way through steps ``first_step`` to ``steps``."""
        return {
            unit: tuple(periods(self.events_of[unit], self.first_step, self.steps + 1, now))
            for unit, now in zip(self.units, self.active, strict=True)
        }

    def summaries(self) -> list[UnitSummary]:
        """Every unit, the most recovered first."""
        counts = zip(self.units, self.times_recovered, self.steps_recovered, strict=True)
        found = [summary(unit, times, steps, self.events_of[unit]) for unit, times, steps in counts]
        return sorted(found, key=lambda s: (-s.steps, -s.times, -s.risky, -s.refused))

    def to_json(self, indent: int | None = None) -> str:
        """Everything as a JSON object, all records included; infinite ratios are the string ``"Infinity"``."""
        config = {field.name: getattr(self.config, field.name) for field in fields(self.config)}
        return to_json(
            {
                "units": self.units,
                "active": self._active(),
                "forced": self.forced,
                "stats": self.stats,
                "first_step": self.first_step,
                "recipe": recipe_data(self.recipe),
                "budget": self.budget,
                "config": {name: "schedule" if callable(value) else value for name, value in config.items()},
                "summaries": [asdict(summary) for summary in self.summaries()],
                "events": [{**event._asdict(), "fired": fired(event, self.config)} for event in self.events],
            },
            indent,
        )

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw units × steps to an image file: on the recovery path, over a threshold, refused.

        Args:
            path: the file; its suffix tells the format (``.png``, ``.pdf``, ``.svg``).

        Returns:
            The path.

        Raises:
            MissingDependencyError: without matplotlib.
        """
        limit = int(self.budget) if self.config.budget_unit == "units" else None
        figure = draw(self.periods, self.events, self.first_step, self.steps, limit, self.config.warmup_steps)
        figure.savefig(os.fspath(path), dpi=150)
        return Path(path)

    def __str__(self) -> str:
        parent = common_parent(self.units)
        where = f" below {parent}" if parent else ""
        heading = (
            f"gnmr-fx: {counted(self.steps, 'step')}, {counted(len(self.units), 'unit')}{where}, recipe {self.recipe}"
        )
        if self.forced:
            heading += "\nguards are pinned by hand"
        blocks = [heading, grid(list(self._overview(parent)), style="plain")]
        ranked = [s for s in self.summaries() if s.times or s.steps or s.risky]
        if ranked:
            part = f" ({TOP_UNITS} of {len(ranked)})" if len(ranked) > TOP_UNITS else ""
            headers = ["unit", "times", "steps", "over", "refused"]
            name = SIGNAL_NAMES[self.config.signal]
            headers += [f"highest\n{name}", "at\nstep", f"highest\nΔ{name}", "at\nstep"]
            rows = [_summary_row(s, parent) for s in ranked[:TOP_UNITS]]
            blocks += [f"most recovered units{part}", grid(rows, headers, "lrrrrrrrr")]
        if self.events:
            last = self.events[-LAST_EVENTS:]
            events = [(f"step {e.step}", below(e.unit, parent), *told(e, self.config)) for e in last]
            blocks += [f"last {len(last)} of {counted(self.stats['events'], 'record')}", grid(events, style="plain")]
        return "\n\n".join(blocks)

    def _active(self) -> list[str]:
        return [unit for unit, on in zip(self.units, self.active, strict=True) if on]

    def _overview(self, parent: str) -> Iterator[tuple[str, str]]:
        stats, config, units = self.stats, self.config, len(self.units)
        name = SIGNAL_NAMES[config.signal]
        yield "over a threshold if", f"{name} > α = {_bound(config.alpha)} or Δ{name} > β = {_bound(config.beta)}"
        mean = {"all": "all earlier steps", "ema": f"decay {config.ema_decay:g}", "window": f"{config.window} steps"}
        yield (
            "history",
            f"{'each path by itself, ' if config.history == 'per_path' else ''}"
            f"mean over {mean[config.mean]}, window {config.window}, lock {config.lock_steps}, "
            f"warm-up {config.warmup_steps} steps",
        )
        if config.measures_errors:
            yield "errors measured", f"every {counted(config.signal_every, 'step')}"
        if config.budget_unit == "units":
            yield "budget", f"{self.budget} of {counted(units, 'unit')} at a time ({share(int(self.budget), units)})"
        else:
            yield "budget", f"{budget_text(self.budget, config.budget_unit)} at a time, {counted(units, 'unit')}"
        if not self.steps:
            yield "so far", "no optimizer step yet"
            return
        full = "whole budget" if config.budget_unit == "units" else "a unit refused"
        yield (
            "on the recovery path",
            f"{stats['recovered'] / self.steps:.2f} units on average, {stats['most_active']} at most; "
            f"{full} in {share(stats['full'], self.steps)} of steps; "
            f"{counted(stats['switches'], 'guard change')}",
        )
        yield (
            "over a threshold",
            f"{stats['risky']} of {stats['unit_steps']} unit-steps ({share(stats['risky'], stats['unit_steps'])}), "
            f"{stats['non_finite']} with a norm that is not finite",
        )
        first = collections.Counter(below(e.unit, parent) for e in self.events if e.first_non_finite)
        if first:
            yield (
                "first to go not finite",
                listed([f"{unit} ({counted(n, 'step')})" for unit, n in first.most_common()]),
            )
        yield "refused by the budget", counted(stats["refused"], "unit-step")
        yield "time in the controller", f"{1e3 * stats['seconds'] / self.steps:.3f} ms per step"
        yield "on the path now", listed([below(unit, parent) for unit in self._active()])
        if stats["events_dropped"]:
            gone = stats["events_dropped"]
            yield "records", f"{len(self.events)}, from step {self.first_step} on; {gone} older are gone"


def _summary_row(found: UnitSummary, parent: str) -> list[str]:
    numbers = [str(number) for number in (found.times, found.steps, found.risky, found.refused)]
    for value, step in ((found.gnmr, found.gnmr_step), (found.delta_gnmr, found.delta_gnmr_step)):
        numbers += ["-", "-"] if value is None else [f"{value:.2f}", str(step)]
    return [below(found.unit, parent), *numbers]


def _bound(value: Threshold) -> str:
    if isinstance(value, str):
        return value
    return "a schedule" if callable(value) else "off" if math.isinf(value) else f"{value:g}"
