"""``table`` (what can be recovered, and what it keeps) and ``report`` (what was recovered, when and why).

Both return a frozen snapshot: it prints, gives its data as plain rows and JSON, and stays as it is as training goes on.
"""

from __future__ import annotations

import functools
import html
import itertools
import json
import math
import operator
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tabulate import tabulate
from torch import nn

from gnmr_fx.config import GnmrConfig, threshold
from gnmr_fx.errors import MissingDependencyError
from gnmr_fx.formats import nbytes
from gnmr_fx.instrument import ModelController, controller
from gnmr_fx.recipe import Format, Recipe
from gnmr_fx.runtime import Event
from gnmr_fx.units import Observation, Unit

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

__all__ = ["Report", "Table", "report", "table"]

MAX_ROWS = 60
"""Units up to which a printed table has a row for each; beyond it, equal rows of numbered layers are one."""

MAX_LEFT_ALONE = 8
"""Operators left alone for one reason up to which a printed table has a row for each."""

TOP_UNITS = 15
LAST_EVENTS = 10
"""Rows of a printed report."""

MAX_PLOT_STEPS = 500
MAX_PLOT_LABELS = 45
"""Columns of a plot, beyond which steps are binned, and unit names along it, beyond which some are left out."""


def table(model: nn.Module) -> Table:
    """The recoverable operators of an instrumented model, as they are now.

    Args:
        model: an instrumented model, compiled or wrapped in DDP or not.

    Returns:
        A :class:`Table`; print it. Byte counts are those of the last forward-backward pass, and None ("-") for a unit
        that has not run in training mode yet.

    Raises:
        NotInstrumentedError: for a model without gnmr-fx.
    """
    installed = controller(model)
    return Table(
        units=unit_rows(installed),
        left_alone=tuple(_plain(asdict(item)) for item in installed.left_alone),
        recipe=installed.recipe,
        budget=installed.max_active,
        capture_note=installed.capture_note,
    )


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
    flags = installed.flags.tolist()
    return Report(
        units=tuple(unit.name for unit in installed.units),
        active=tuple(flags),
        times_recovered=tuple(installed.times_recovered(unit.index) for unit in installed.units),
        steps_recovered=tuple(installed.steps_recovered(unit.index) for unit in installed.units),
        stats=dict(installed.stats),
        events=tuple(installed.events),
        recipe=installed.recipe,
        budget=installed.max_active,
        config=installed.config,
    )


# What a unit keeps ---------------------------------------------------------------------------------------------------


class Activation(NamedTuple):
    """One saved activation as formats see it: a matrix. ``[4, 8, 16]`` and its view ``[32, 16]`` are the same one."""

    rows: int
    width: int
    dtype: torch.dtype

    def nbytes(self, fmt: Format) -> int:
        """Bytes it takes in ``fmt``, scales included."""
        return nbytes((self.rows, self.width), fmt, self.dtype)


def activations(observation: Observation) -> Counter[Activation]:
    """How often a unit stored which activation in its last pass."""
    found: Counter[Activation] = Counter()
    for (shape, dtype), calls in observation.current.items():
        found[Activation(math.prod(shape[:-1]), shape[-1] if shape else 1, dtype)] += calls
    return found


def counted_once(
    units: Iterable[Unit], kept: Sequence[Counter[Activation]]
) -> Iterator[tuple[Counter[Activation], str]]:
    """For each unit, the activations that no earlier unit has stored already, and the first one that has some.

    Units that read one tensor store it once. A unit called several times may share only some of its inputs, so the
    calls that its earlier companions made are taken off, not the unit.
    """
    earlier: dict[str, Counter[Activation]] = {}
    for unit, own in zip(units, kept, strict=True):
        companions = [name for name in unit.spec.shares_input_with if name in earlier]
        stored: Counter[Activation] = functools.reduce(operator.or_, (earlier[name] for name in companions), Counter())
        yield own - stored, next((name for name in companions if own & earlier[name]), "")
        earlier[unit.name] = own


def total_bytes(kept: Counter[Activation], fmt: Format) -> int:
    """Bytes of all activations in ``kept``."""
    return sum(calls * activation.nbytes(fmt) for activation, calls in kept.items())


# The table -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitRow:
    """One recoverable unit. Bytes are per forward-backward pass; None before the first one.

    Attributes:
        index: of the unit's guard.
        unit: its name.
        operator: what reads the weight; ``""`` where that is not known before it runs.
        shape: of the weight.
        trainable: whether the weight needs a gradient. A frozen one keeps nothing.
        shares_input_with: units that read the same tensor, which is stored once.
        low_format, high_format: of the saved activation on the low-cost and on the recovery path.
        dtypes: of the activations that were stored.
        activations: ``{"rows", "width", "dtype", "calls"}`` of each, the activation taken as a matrix.
        bytes_full: what PyTorch keeps: the activation in its own dtype. 0 for what ``stored_with`` counts.
        bytes_low: what the low-cost path keeps. 0 for what ``stored_with`` counts.
        bytes_high: what the recovery path keeps; the unit's own, as under torch.compile. (In eager mode, units that
            share their input share this too, and it replaces the low-cost one instead of joining it.)
        stored_with: the first unit of the table that stores this unit's input, or some of it; ``""`` if that is itself.
        guard: ``"low"`` or ``"high"``: the path it is on now.
        times_recovered: how often it went onto the recovery path.
        steps_recovered: in how many steps it was there.
        seen: whether it ever ran in training mode.
        notes: what else there is to know.
    """

    index: int
    unit: str
    operator: str
    shape: tuple[int, ...]
    trainable: bool
    shares_input_with: tuple[str, ...]
    low_format: str
    high_format: str
    dtypes: tuple[str, ...]
    activations: tuple[Mapping[str, Any], ...]
    bytes_full: int | None
    bytes_low: int | None
    bytes_high: int | None
    stored_with: str
    guard: str
    times_recovered: int
    steps_recovered: int
    seen: bool
    notes: tuple[str, ...]


def unit_rows(installed: ModelController) -> tuple[UnitRow, ...]:
    """The rows of the table, in the order of the units."""
    units, recipe = installed.units, installed.recipe
    high = installed.flags.tolist()
    kept = [activations(unit.observation) if unit.trainable else Counter[Activation]() for unit in units]
    rows = []
    for unit, own, (counted, stored_with) in zip(units, kept, counted_once(units, kept), strict=True):
        known = bool(own) or not unit.trainable
        dtypes = tuple(dict.fromkeys(_dtype_name(activation.dtype) for activation in own))
        rows.append(
            UnitRow(
                index=unit.index,
                unit=unit.name,
                operator=unit.spec.operator,
                shape=unit.spec.shape,
                trainable=unit.trainable,
                shares_input_with=unit.spec.shares_input_with,
                low_format=recipe.low.label,
                high_format=recipe.high.label,
                dtypes=dtypes,
                activations=tuple(
                    {"rows": a.rows, "width": a.width, "dtype": _dtype_name(a.dtype), "calls": calls}
                    for a, calls in own.items()
                ),
                bytes_full=total_bytes(counted, Format("none")) if known else None,
                bytes_low=total_bytes(counted, recipe.low) if known else None,
                bytes_high=total_bytes(own, recipe.high) if known else None,
                stored_with=stored_with,
                guard="high" if high[unit.index] else "low",
                times_recovered=installed.times_recovered(unit.index),
                steps_recovered=installed.steps_recovered(unit.index),
                seen=unit.observation.seen,
                notes=tuple(_notes(unit)),
            )
        )
    return tuple(rows)


def _notes(unit: Unit) -> Iterator[str]:
    if unit.spec.note:
        yield unit.spec.note
    if not unit.trainable:
        yield "frozen: saves nothing"
    elif not unit.observation.seen:
        yield "not seen yet: no forward in training mode has run it"


@dataclass(frozen=True)
class Table:
    """The recoverable operators of a model; made by :func:`gnmr_fx.table`.

    Attributes:
        units: one row per recoverable unit.
        left_alone: ``{"name", "operator", "shape", "reason"}`` of each operator that was found and is not guarded.
        recipe: the formats of both paths.
        budget: the most units on the recovery path at a time.
        capture_note: why the whole model could not be captured; ``""`` if it was.
    """

    units: tuple[UnitRow, ...]
    left_alone: tuple[Mapping[str, Any], ...]
    recipe: Recipe
    budget: int
    capture_note: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The fields of each :class:`UnitRow`, as values that JSON knows."""
        return [_plain(asdict(row)) for row in self.units]

    @property
    def totals(self) -> dict[str, Any]:
        """Sums over the units whose bytes are known.

        ``bytes_full`` and ``bytes_low`` per pass and their ``ratio`` (None before a pass); ``bytes_recovery_max``, what
        recovery can add to that at most: the largest ``budget`` recovery payloads; numbers of ``units``, of those
        ``units_known`` in bytes and ``units_active`` now.
        """
        known = [row for row in self.units if row.bytes_full is not None]
        full, low = sum(row.bytes_full or 0 for row in known), sum(row.bytes_low or 0 for row in known)
        high = sorted((row.bytes_high or 0 for row in known), reverse=True)
        return {
            "units": len(self.units),
            "units_known": len(known),
            "units_active": sum(row.guard == "high" for row in self.units),
            "bytes_full": full,
            "bytes_low": low,
            "ratio": full / low if low else None,
            "bytes_recovery_max": sum(high[: self.budget]),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Everything as a JSON object."""
        return _to_json(
            {
                "rows": self.rows,
                "left_alone": self.left_alone,
                "totals": self.totals,
                "recipe": _recipe(self.recipe),
                "budget": self.budget,
                "capture_note": self.capture_note,
            },
            indent,
        )

    def __str__(self) -> str:
        return _Document(self).text()

    def _repr_html_(self) -> str:
        return _Document(self).html()


# Printing a table ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Name:
    """A module path in which numbers may stand for several: ``layers.{0..31}.mlp``."""

    parts: tuple[str | frozenset[int], ...]

    @classmethod
    def parse(cls, path: str) -> Name:
        """The name of one module."""
        return cls(tuple(frozenset({int(part)}) if part.isdigit() else part for part in path.split(".")))

    def is_number(self, position: int) -> bool:
        """Whether a number stands at ``position``."""
        return position < len(self.parts) and isinstance(self.parts[position], frozenset)

    def without(self, position: int) -> Name:
        """The name with the numbers at ``position`` left out."""
        return Name((*self.parts[:position], frozenset(), *self.parts[position + 1 :]))

    def union(self, other: Name, position: int) -> Name:
        """Both names, which differ at ``position`` alone."""
        mine, theirs = self.parts[position], other.parts[position]
        assert isinstance(mine, frozenset)
        assert isinstance(theirs, frozenset)
        return Name((*self.parts[:position], mine | theirs, *self.parts[position + 1 :]))

    def __str__(self) -> str:
        return ".".join(part if isinstance(part, str) else _numbers(part) for part in self.parts)


def _numbers(numbers: Iterable[int]) -> str:
    """``"7"``, ``"{0..31}"``, ``"{0..3,5,9}"``."""
    runs: list[str] = []
    for _, group in itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs += [f"{run[0]}..{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    text = ",".join(runs)
    return text if text.isdigit() else f"{{{text}}}"


@dataclass(frozen=True)
class _Line:
    """A printed row: ``count`` units of equal ``cells``, ``high`` of them on the recovery path now.

    ``recovered`` is the range of their times and of their steps on that path.
    """

    name: Name
    cells: tuple[str, ...]
    recovered: tuple[tuple[int, int], ...]
    high: int
    count: int = 1

    def join(self, other: _Line, position: int) -> _Line:
        ranges = zip(self.recovered, other.recovered, strict=True)
        return replace(
            self,
            name=self.name.union(other.name, position),
            recovered=tuple((min(a, c), max(b, d)) for (a, b), (c, d) in ranges),
            high=self.high + other.high,
            count=self.count + other.count,
        )

    @property
    def guard(self) -> str:
        """``"low"``, ``"high"``, or how many are high."""
        return "low" if not self.high else "high" if self.high == self.count else f"{self.high} high"


def collapse(lines: Sequence[_Line]) -> list[_Line]:
    """Join lines that differ in one number of their names alone, innermost number first, as often as possible.

    A joined name stands for exactly the units in it: ``{0..3}.experts.{0..7}`` only where all 32 are there and equal.
    """
    found = list(lines)
    for position in reversed(range(max((len(line.name.parts) for line in lines), default=0))):
        joined: dict[tuple[Name, tuple[str, ...]], _Line] = {}
        for line in found:
            key = (line.name.without(position) if line.name.is_number(position) else line.name, line.cells)
            joined[key] = joined[key].join(line, position) if key in joined else line
        found = list(joined.values())
    return found


class _Section(NamedTuple):
    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: frozenset[int] = frozenset()  # columns aligned to the right

    def render(self, style: str) -> str:
        align = ["right" if column in self.right else "left" for column in range(len(self.headers))]
        return str(tabulate(self.rows, self.headers, style, disable_numparse=True, colalign=align))


class _Document:
    """A :class:`Table` laid out for reading."""

    def __init__(self, source: Table) -> None:
        self.table = source
        self.footnotes: dict[str, str] = {}
        self.sections = [self._units(), *self._left_alone()]

    def text(self) -> str:
        notes = [f"{mark}  {note}" for note, mark in self.footnotes.items()]
        blocks = [self.sections[0].render("simple"), "\n".join(notes)]
        blocks += [f"{section.title}\n\n{section.render('simple')}" for section in self.sections[1:]]
        blocks.append("\n".join(self._totals()))
        return "\n\n".join(block for block in blocks if block)

    def html(self) -> str:
        blocks = [self.sections[0].render("html")]
        blocks += [f"<p><sup>{mark}</sup> {html.escape(text)}</p>" for text, mark in self.footnotes.items()]
        for section in self.sections[1:]:
            blocks += [f"<p><b>{html.escape(section.title)}</b></p>", section.render("html")]
        blocks.append("<p>" + "<br>".join(map(html.escape, self._totals())) + "</p>")
        return "\n".join(blocks)

    def _units(self) -> _Section:
        lines = [self._line(row) for row in self.table.units]
        collapsed = collapse(lines) if len(lines) > MAX_ROWS else lines
        headers = ["unit", "operator", "weight", "", "shares input with", "low", "high"]
        headers += ["kept\nfull", "per pass\nlow", "\nhigh", "guard\nnow", "times\nhigh", "steps\nhigh", "note"]
        rows = [
            [str(line.name), *line.cells[:-1], line.guard, *map(_range, line.recovered), line.cells[-1]]
            for line in collapsed
        ]
        right = {7, 8, 9, 11, 12}
        if len(collapsed) < len(lines):
            headers.insert(1, "units")
            rows = [[row[0], str(line.count), *row[1:]] for row, line in zip(rows, collapsed, strict=True)]
            right = {1, *(column + 1 for column in right)}
        return _Section("", headers, rows, frozenset(right))

    def _line(self, row: UnitRow) -> _Line:
        recipe = self.table.recipe
        with_unit = f"as {relative_name(row.stored_with, row.unit)}" if row.stored_with and not row.bytes_full else ""
        cells = (
            row.operator or "?",
            "×".join(map(str, row.shape)),
            "trainable" if row.trainable else "frozen",
            _listed([relative_name(name, row.unit) for name in row.shares_input_with]),
            _format_label(recipe.low, row.dtypes),
            _format_label(recipe.high, row.dtypes),
            with_unit or human_bytes(row.bytes_full),
            with_unit or human_bytes(row.bytes_low),
            human_bytes(row.bytes_high),
            " ".join(sorted(self._mark(note) for note in row.notes)),
        )
        recovered = ((row.times_recovered,) * 2, (row.steps_recovered,) * 2)
        return _Line(Name.parse(row.unit), cells, recovered, int(row.guard == "high"))

    def _mark(self, note: str) -> str:
        """The footnote mark of a text: a, b, …, aa, …."""
        if note not in self.footnotes:
            number, letters = divmod(len(self.footnotes), 26)
            self.footnotes[note] = chr(ord("a") + letters) * (number + 1)
        return self.footnotes[note]

    def _left_alone(self) -> Iterator[_Section]:
        by_reason: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for item in self.table.left_alone:
            by_reason[_families_in(item["reason"])].append(item)
        rows: list[list[str]] = []
        for reason, items in by_reason.items():
            groups: dict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
            for item in items:
                name, shape = item["name"], "×".join(map(str, item["shape"])) or "-"
                own: tuple[str, ...] = (name, item["operator"] or "?", shape, item["reason"])
                key = (family(name), *own[1:3], reason) if len(items) > MAX_LEFT_ALONE else own
                groups[key].append(own)
            for key, members in groups.items():
                name, *cells = key if len(members) > 1 else members[0]
                rows.append([name, str(len(members)), *cells])
        if rows:
            title = f"Left alone ({len(self.table.left_alone)})"
            yield _Section(title, ["name", "count", "operator", "weight", "reason"], rows, frozenset({1}))

    def _totals(self) -> Iterator[str]:
        totals, budget = self.table.totals, self.table.budget
        units, known = totals["units"], totals["units_known"]
        full, low, recovery = (human_bytes(totals[f"bytes_{name}"]) for name in ("full", "low", "recovery_max"))
        yield (
            f"{_count(units, 'unit')}, {totals['units_active']} on the recovery path now, budget {budget}, "
            f"recipe {self.table.recipe}"
        )
        if totals["ratio"]:
            part = "" if known == units else f" (in the {known} of {units} units that have run)"
            yield (
                f"kept for the backward per pass: {full} full -> {low} low, {totals['ratio']:.2f}x less{part}; "
                f"recovery adds at most {recovery}, the {_count(min(budget, units), 'largest high payload')}"
            )
        else:
            yield "kept for the backward per pass: known after the first forward in training mode"
        if self.table.capture_note:
            yield (
                f"not captured as a whole: {self.table.capture_note}; so which units share an input is not known, "
                "and what they share is counted for each"
            )


def family(path: str) -> str:
    """A module path with ``*`` for its numbers, as ``include`` and ``exclude`` take it: ``layers.*.mlp``."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _families_in(text: str) -> str:
    """``text`` with a family for each module path in it; plain numbers stay."""
    return re.sub(
        r"\w+(?:\.\w+)+", lambda path: path[0] if path[0].replace(".", "").isdigit() else family(path[0]), text
    )


def relative_name(name: str, base: str) -> str:
    """``name`` as seen from ``base``, without the modules both lie in: ``q_proj`` for a sibling."""
    parts = name.split(".")
    common = 0
    for a, b in zip(parts[:-1], base.split(".")[:-1], strict=False):
        if a != b:
            break
        common += 1
    while common and parts[common].isdigit():
        common -= 1  # a number alone tells nothing
    return ".".join(parts[common:])


def human_bytes(count: int | None) -> str:
    """``"512 B"``, ``"1.5 KiB"``, ``"12.3 MiB"``; ``"-"`` for None."""
    if count is None:
        return "-"
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1023.95 or unit == "TiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def _format_label(fmt: Format, dtypes: Sequence[str]) -> str:
    return f"none ({'/'.join(dtypes)})" if fmt.dtype == "none" and dtypes else fmt.label


def _listed(names: Sequence[str], limit: int = 4) -> str:
    if len(names) <= limit:
        return ", ".join(names) or "-"
    return f"{', '.join(names[: limit - 1])}, +{len(names) - limit + 1}"


def _range(bounds: tuple[int, int]) -> str:
    low, high = bounds
    return str(low) if low == high else f"{low}..{high}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


# The report ----------------------------------------------------------------------------------------------------------


class Period(NamedTuple):
    """A unit in steps ``start`` to ``stop - 1``: on the recovery path, off it, or not known (None)."""

    start: int
    stop: int
    on: bool | None


def periods(events: Sequence[Event], start: int, stop: int, before: bool | None) -> list[Period]:
    """One unit's way through steps ``start`` to ``stop - 1``, from its events, oldest first.

    Every change is an event, so it is on the path from an event with outcome ``"chosen"`` to the next one with another
    outcome, and stays as it is between events. ``before`` is the state before the first event.
    """
    found: list[Period] = []
    state = before
    for step, next_state in [*((event.step, event.outcome == "chosen") for event in events), (stop, None)]:
        if step > start:
            if found and found[-1].on == state:
                found[-1] = found[-1]._replace(stop=step)
            else:
                found.append(Period(start, step, state))
            start = step
        state = next_state
    return found


def fired(event: Event, config: GnmrConfig) -> tuple[str, ...]:
    """Why a unit was risky: ``"gnmr"``, ``"delta_gnmr"``, ``"non_finite"``; empty if it was not."""
    if not event.risky:
        return ()
    if event.step <= config.warmup_steps:
        return ("non_finite",)
    bounds = (("gnmr", event.gnmr, config.alpha), ("delta_gnmr", event.delta_gnmr, config.beta))
    over = tuple(name for name, value, bound in bounds if value > threshold(bound, event.step, name))
    return over or ("non_finite",)


@dataclass(frozen=True)
class UnitSummary:
    """One unit over the whole run.

    Attributes:
        unit: its name.
        times, steps: how often and in how many steps it was on the recovery path.
        risky: records in which it was over a threshold.
        refused: records in which it was a candidate and the budget went to others.
        gnmr, gnmr_step: highest recorded GNMR (dimensionless) and its step; None without a record.
        delta_gnmr, delta_gnmr_step: the same of Δ-GNMR.
    """

    unit: str
    times: int
    steps: int
    risky: int
    refused: int
    gnmr: float | None
    gnmr_step: int | None
    delta_gnmr: float | None
    delta_gnmr_step: int | None


@dataclass(frozen=True)
class Report:
    """What a controller did, and why; made by :func:`gnmr_fx.report`.

    A step is that of the decision: a unit chosen in step t runs on the recovery path from the forward after it.

    Attributes:
        units: names of the units, in the order of the next three.
        active: whether each is on the recovery path now.
        times_recovered, steps_recovered: how often, and in how many steps, each was there.
        stats: the counts of :attr:`Controller.stats`.
        events: the records kept, oldest first.
        recipe, budget, config: as the controller has them.
    """

    units: tuple[str, ...]
    active: tuple[bool, ...]
    times_recovered: tuple[int, ...]
    steps_recovered: tuple[int, ...]
    stats: Mapping[str, Any]
    events: tuple[Event, ...]
    recipe: Recipe
    budget: int
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
        return self.events[0].step if self.events else self.steps

    @functools.cached_property
    def events_of(self) -> Mapping[str, tuple[Event, ...]]:
        """The records of each unit, oldest first."""
        found: dict[str, list[Event]] = {unit: [] for unit in self.units}
        for event in self.events:
            found[event.unit].append(event)
        return {unit: tuple(events) for unit, events in found.items()}

    @functools.cached_property
    def periods(self) -> Mapping[str, tuple[Period, ...]]:
        """Each unit's way through steps ``first_step`` to ``steps``; not known only where older records are gone."""
        return {
            unit: tuple(periods(events, self.first_step, self.steps + 1, self._before(index, events)))
            for index, (unit, events) in enumerate(self.events_of.items())
        }

    def _before(self, index: int, events: Sequence[Event]) -> bool | None:
        """Whether a unit was on the recovery path before its oldest record."""
        if not self.stats["events_dropped"]:
            return False
        if not events:
            return self.active[index]
        return True if events[0].outcome == "released" else None

    @property
    def unexplained_steps(self) -> int:
        """Unit-steps on the recovery path that differ from what the records say: the guards were forced by hand.

        0 where older records are gone, as nothing can be told then.
        """
        if self.stats["events_dropped"]:
            return 0
        told = (sum(p.stop - p.start for p in self.periods[unit] if p.on) for unit in self.units)
        return sum(abs(a - b) for a, b in zip(told, self.steps_recovered, strict=True))

    @property
    def full_steps(self) -> int | None:
        """Steps in which the whole budget was used; None where the records do not tell."""
        if self.stats["events_dropped"] or self.unexplained_steps:
            return None
        changes: Counter[int] = Counter()
        for period in itertools.chain.from_iterable(self.periods.values()):
            if period.on:
                changes[period.start] += 1
                changes[period.stop] -= 1
        bounds = sorted({1, self.steps + 1, *changes})
        active, full = 0, 0
        for start, stop in itertools.pairwise(bounds):
            active += changes[start]
            full += (stop - start) * (active >= min(self.budget, len(self.units)))
        return full

    def summaries(self) -> list[UnitSummary]:
        """Every unit, the most recovered first."""
        found = [self._summary(index, unit) for index, unit in enumerate(self.units)]
        return sorted(found, key=lambda s: (-s.steps, -s.times, -s.risky, -s.refused))

    def _summary(self, index: int, unit: str) -> UnitSummary:
        events = self.events_of[unit]
        by_gnmr = max(events, key=lambda e: e.gnmr, default=None)
        by_delta = max(events, key=lambda e: e.delta_gnmr, default=None)
        return UnitSummary(
            unit=unit,
            times=self.times_recovered[index],
            steps=self.steps_recovered[index],
            risky=sum(e.risky for e in events),
            refused=sum(e.outcome == "refused" for e in events),
            gnmr=by_gnmr.gnmr if by_gnmr else None,
            gnmr_step=by_gnmr.step if by_gnmr else None,
            delta_gnmr=by_delta.delta_gnmr if by_delta else None,
            delta_gnmr_step=by_delta.step if by_delta else None,
        )

    def to_json(self, indent: int | None = None) -> str:
        """Everything as a JSON object, all records included; infinite ratios are the string ``"Infinity"``."""
        return _to_json(
            {
                "units": self.units,
                "active": [unit for unit, on in zip(self.units, self.active, strict=True) if on],
                "stats": self.stats,
                "first_step": self.first_step,
                "full_steps": self.full_steps,
                "unexplained_steps": self.unexplained_steps,
                "recipe": _recipe(self.recipe),
                "budget": self.budget,
                "config": _config(self.config),
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
        figure = draw(self)
        figure.savefig(os.fspath(path), dpi=150)
        return Path(path)

    def __str__(self) -> str:
        blocks = [f"gnmr-fx: {_count(self.steps, 'step')}, {_count(len(self.units), 'unit')}, recipe {self.recipe}"]
        blocks.append(tabulate(list(self._overview()), tablefmt="plain", disable_numparse=True))
        ranked = [s for s in self.summaries() if s.times or s.steps or s.risky]
        if ranked:
            blocks.append(_most_recovered(ranked))
        if self.events:
            blocks.append(self._timeline())
        return "\n\n".join(blocks)

    def _overview(self) -> Iterator[tuple[str, str]]:
        stats, config, units = self.stats, self.config, len(self.units)
        yield "over a threshold if", f"GNMR > α = {_bound(config.alpha)} or ΔGNMR > β = {_bound(config.beta)}"
        mean = {"all": "all earlier steps", "ema": f"decay {config.ema_decay:g}", "window": f"{config.window} steps"}
        yield (
            "history",
            f"mean over {mean[config.mean]}, window {config.window}, lock {config.lock_steps}, "
            f"warm-up {config.warmup_steps} steps",
        )
        yield "budget", f"{self.budget} of {_count(units, 'unit')} at a time ({_share(self.budget, units)})"
        if not self.steps:
            yield "so far", "no optimizer step yet"
            return
        full = self.full_steps
        yield (
            "on the recovery path",
            f"{stats['recovered'] / self.steps:.2f} units on average, {stats['most_active']} at most; "
            + ("" if full is None else f"whole budget in {_share(full, self.steps)} of steps; ")
            + f"{_count(stats['switches'], 'guard change')}",
        )
        yield (
            "over a threshold",
            f"{stats['risky']} of {stats['unit_steps']} unit-steps ({_share(stats['risky'], stats['unit_steps'])}), "
            f"{stats['non_finite']} with a norm that is not finite",
        )
        yield "refused by the budget", f"{_count(stats['refused'], 'unit-step')}"
        yield "time in the controller", f"{1e3 * stats['seconds'] / self.steps:.3f} ms per step"
        active = [unit for unit, on in zip(self.units, self.active, strict=True) if on]
        yield "on the path now", _listed(active) if active else "none"
        if stats["events_dropped"]:
            gone = stats["events_dropped"]
            yield "records", f"{len(self.events)}, from step {self.first_step} on; {gone} older are gone"
        if self.unexplained_steps:
            yield "forced by hand", f"{_count(self.unexplained_steps, 'unit-step')} that no record explains"

    def _timeline(self) -> str:
        shown = self.events[-LAST_EVENTS:]
        rows = [
            (f"step {event.step}", event.unit, *_told(event, was_on, self.config))
            for event, was_on in self._with_state_before(len(shown))
        ]
        title = f"last {len(shown)} of {_count(self.stats['events'], 'record')}"
        return f"{title}\n\n{tabulate(rows, tablefmt='plain', disable_numparse=True)}"

    def _with_state_before(self, last: int) -> list[tuple[Event, bool | None]]:
        """The last events, each with whether its unit was on the recovery path before it."""
        on = {unit: self._before(index, events) for index, (unit, events) in enumerate(self.events_of.items())}
        found = []
        for event in self.events:
            found.append((event, on[event.unit]))
            on[event.unit] = event.outcome == "chosen"
        return found[-last:]


def _most_recovered(ranked: Sequence[UnitSummary]) -> str:
    rows = [
        [
            s.unit,
            str(s.times),
            str(s.steps),
            str(s.risky),
            str(s.refused),
            *_peak(s.gnmr, s.gnmr_step),
            *_peak(s.delta_gnmr, s.delta_gnmr_step),
        ]
        for s in ranked[:TOP_UNITS]
    ]
    headers = ["unit", "times", "steps", "over", "refused", "highest\nGNMR", "at\nstep", "highest\nΔGNMR", "at\nstep"]
    title = "most recovered units" + (f" ({TOP_UNITS} of {len(ranked)})" if len(ranked) > TOP_UNITS else "")
    return f"{title}\n\n{_Section('', headers, rows, frozenset(range(1, 9))).render('simple')}"


def _peak(value: float | None, step: int | None) -> tuple[str, str]:
    return ("-", "-") if value is None else (f"{value:.2f}", str(step))


def _told(event: Event, was_on: bool | None, config: GnmrConfig) -> tuple[str, str]:
    """What happened, and why: ``("recovered", "GNMR 5.21 > 3; lock 50")``."""
    over = []
    for reason in fired(event, config):
        if reason == "non_finite":
            over.append("norm not finite")
        elif reason == "gnmr":
            over.append(f"GNMR {event.gnmr:.2f} > {threshold(config.alpha, event.step, 'alpha'):g}")
        else:
            over.append(f"ΔGNMR {event.delta_gnmr:.2f} > {threshold(config.beta, event.step, 'beta'):g}")
    if event.outcome == "released":
        return "released", "lock over"
    if event.outcome == "refused":
        return "displaced" if was_on else "refused", f"{', '.join(over) or 'locked'}; the budget went to others"
    return "stays on" if was_on else "recovered", f"{', '.join(over) or 'locked'}; lock {event.lock}"


def _bound(value: float | Callable[[int], float]) -> str:
    return "a schedule" if callable(value) else "off" if math.isinf(value) else f"{value:g}"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g}%" if whole else "-"


# JSON ----------------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """``value`` in the types that JSON knows; non-finite floats as ``"Infinity"``, ``"-Infinity"`` and ``"NaN"``."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _to_json(value: Mapping[str, Any], indent: int | None) -> str:
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _recipe(recipe: Recipe) -> dict[str, Any]:
    return {"name": recipe.name, "low": str(recipe.low), "high": str(recipe.high)}


def _config(config: GnmrConfig) -> dict[str, Any]:
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return {name: "schedule" if callable(value) else value for name, value in values.items()}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# The plot ------------------------------------------------------------------------------------------------------------

_ON, _RISKY, _REFUSED, _UNKNOWN = "#9ecae8", "#0b4f8a", "#f0853f", "#dddddd"


def bin_edges(start: int, stop: int, most: int = MAX_PLOT_STEPS) -> list[int]:
    """Edges of at most ``most`` bins of equal width (but for the last one) over steps ``start`` to ``stop - 1``."""
    width = max(1, math.ceil((stop - start) / most))
    return [*range(start, stop, width), stop]


def share_of_bins(found: Iterable[Period], edges: np.ndarray, on: bool | None) -> np.ndarray:
    """The share of each bin, in [0, 1], that lies in periods of state ``on``."""
    import numpy as np

    covered = np.zeros(len(edges) - 1)
    for period in found:
        if period.on is on:
            covered += np.diff(np.clip(edges, period.start, period.stop))
    return covered / np.diff(edges)


def draw(source: Report) -> Figure:
    """The figure that :meth:`Report.plot` writes. Leaves pyplot and its backend alone.

    Raises:
        MissingDependencyError: without matplotlib.
    """
    try:
        import numpy as np
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import to_rgb
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise MissingDependencyError(
            "expected matplotlib, which Report.plot draws with, found none; pip install 'gnmr-fx[plot]'"
        ) from error

    first, stop = max(1, source.first_step), max(1, source.first_step, source.steps) + 1
    edges = np.array(bin_edges(first, stop))
    width = int(edges[1] - edges[0])
    on = np.stack([share_of_bins(source.periods[unit], edges, True) for unit in source.units])
    unknown = np.stack([share_of_bins(source.periods[unit], edges, None) for unit in source.units]) > 0

    pixels = np.ones((*on.shape, 3))
    pixels += (on[..., None] ** 0.5) * (np.array(to_rgb(_ON)) - 1)  # even a single step of a wide bin shows
    pixels[unknown] = to_rgb(_UNKNOWN)
    row_of = {unit: row for row, unit in enumerate(source.units)}
    for refused, color in ((False, _RISKY), (True, _REFUSED)):
        marked = [e for e in source.events if (e.outcome == "refused") is refused and (e.risky or refused)]
        columns = np.searchsorted(edges, [e.step for e in marked], side="right") - 1
        pixels[[row_of[e.unit] for e in marked], np.clip(columns, 0, len(edges) - 2)] = to_rgb(color)

    rows = len(source.units)
    shown = list(range(0, rows, math.ceil(rows / MAX_PLOT_LABELS)))
    map_height = min(9.0, max(1.2, 0.2 * rows))
    figure = Figure(figsize=(11, map_height + 2.2), layout="constrained")
    FigureCanvasAgg(figure)
    top, heatmap = figure.subplots(2, 1, sharex=True, height_ratios=[0.9, map_height])

    active = np.where(unknown.any(0), np.nan, on.sum(0))
    top.stairs(active, edges - 0.5, fill=True, color=_ON)
    top.stairs(active, edges - 0.5, color=_RISKY, linewidth=0.8)
    top.axhline(source.budget, color="0.35", linewidth=1, linestyle="--")
    peak = float(np.nanmax(active)) if np.isfinite(active).any() else 0.0
    top.set_ylim(0, 1.4 * max(1.0, min(source.budget, rows), peak))
    top.set_ylabel("units on\nthe path", fontsize=8)
    top.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    top.set_title(
        f"gnmr-fx: recovery of {_count(rows, 'unit')} over {_count(source.steps, 'step')}, budget {source.budget}"
        + (f" ({width} steps a column)" if width > 1 else ""),
        fontsize=10,
        loc="left",
    )

    heatmap.pcolormesh(edges - 0.5, np.arange(rows + 1) - 0.5, pixels, rasterized=True)
    heatmap.set_ylim(rows - 0.5, -0.5)
    heatmap.set_xlim(edges[0] - 0.5, edges[-1] - 0.5)
    heatmap.set_yticks(shown, [source.units[row] for row in shown], fontsize=7)
    heatmap.set_xlabel("step")
    heatmap.xaxis.set_major_locator(MaxNLocator(integer=True))
    if rows <= MAX_PLOT_LABELS:
        heatmap.hlines(np.arange(1, rows) - 0.5, *heatmap.get_xlim(), color="0.93", linewidth=0.5)
    warm = source.config.warmup_steps
    for axes in (top, heatmap):
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        if first <= warm < stop - 1:
            axes.axvline(warm + 0.5, color="0.35", linewidth=0.8, linestyle=":")

    if first <= warm < stop - 1:
        top.annotate(
            "warm-up ends", (warm + 0.5, 1), (3, -2), ("data", "axes fraction"), "offset points", fontsize=7, va="top"
        )

    legend = [
        Patch(color=_ON, label="on the recovery path"),
        Patch(color=_RISKY, label="over a threshold, recovered"),
        Patch(color=_REFUSED, label="refused by the budget"),
    ]
    if unknown.any():
        legend.append(Patch(color=_UNKNOWN, label="not known: records gone"))
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), fontsize=8, frameon=False)
    return figure
