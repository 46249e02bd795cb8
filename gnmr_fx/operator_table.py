"""``table``: the recoverable operators of an instrumented model, and what they keep."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import nn

from gnmr_fx.config import BudgetUnit
from gnmr_fx.gemm import GEMMS
from gnmr_fx.instrument import controller
from gnmr_fx.operator_rows import UnitRow, left_rows, unit_rows
from gnmr_fx.recipe import Format, GemmRecipe, Recipe
from gnmr_fx.scope import AllSaved
from gnmr_fx.text import (
    Name,
    below,
    budget_text,
    common_parent,
    counted,
    families_in,
    family,
    grid,
    human_bytes,
    listed,
    plain,
    recipe_data,
    relative_name,
    to_json,
)

__all__ = ["Table", "table"]

MAX_ROWS = 60
"""Units up to which a printed table has a row for each; beyond it, equal rows of numbered layers are one."""

MAX_LEFT_ALONE = 8
"""Operators left alone up to which a printed table has a row for each; beyond it, equal rows of a family are one."""


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
        left_alone=tuple(plain(asdict(item)) for item in installed.left_alone),
        recipe=installed.recipe,
        budget=installed.max_active,
        budget_unit=installed.config.budget_unit,
        forced=installed.forced,
        capture_note=installed.capture_note,
        scope=installed.scope,
        kept_as_it_is=left_rows(installed),
    )


@dataclass(frozen=True)
class Table:
    """The recoverable operators of a model; made by :func:`gnmr_fx.table`.

    A snapshot: it prints, gives its data as plain rows and JSON, and stays as it is as training goes on.

    Attributes:
        units: one row per recoverable unit.
        left_alone: ``{"name", "operator", "shape", "reason"}`` of each operator that was found and is not guarded.
        recipe: the formats of both paths.
        budget: the most units on the recovery path at a time; in another ``budget_unit`` the most that these may
            cost, a number or a share (float) of what all units cost.
        forced: whether the guards are pinned by hand, budget or not.
        capture_note: why the whole model could not be captured; ``""`` if it was.
        scope: options of scope "all"; None where only what projections read is stored in another format.
        kept_as_it_is: in scope "all", the saved tensors that are not: ``{"role", "unit", "shape", "dtype", "bytes",
            "reason", "count"}``, with the unit they would belong to.
        predicted: for a model that was not run, what the bytes are worked out from; ``""`` where they were observed.
    """

    units: tuple[UnitRow, ...]
    left_alone: tuple[Mapping[str, Any], ...]
    recipe: Recipe
    budget: int | float
    forced: bool
    capture_note: str
    scope: AllSaved | None = None
    kept_as_it_is: tuple[Mapping[str, Any], ...] = ()
    budget_unit: BudgetUnit = "units"
    predicted: str = ""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The fields of each :class:`UnitRow`, as values that JSON knows."""
        return [plain(asdict(row)) for row in self.units]

    @property
    def totals(self) -> dict[str, Any]:
        """Sums over the units whose bytes are known.

        ``bytes_full`` and ``bytes_low`` per pass and their ``ratio`` (None before a pass); ``bytes_recovery_max``, what
        recovery can add to that at most: the largest ``budget`` recovery payloads, or a budget in bytes itself; numbers
        of ``units``, of those ``units_known`` in bytes and ``units_active`` now; and ``bytes_host``, what is kept in
        host memory.
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
            "bytes_recovery_max": self._recovery_max(high),
            "bytes_host": sum(row.bytes_host for row in self.units),
        }

    def _recovery_max(self, high: Sequence[int]) -> int:
        """The most that recovery can add; ``high`` are the payloads of the units, the largest first."""
        if self.budget_unit == "units":
            return sum(high[: int(self.budget)])
        if self.budget_unit == "flops":
            return sum(high)
        return min(sum(high), int(self.budget * sum(high)) if isinstance(self.budget, float) else self.budget)

    def to_json(self, indent: int | None = 2) -> str:
        """Everything as a JSON object."""
        return to_json(
            {
                "rows": self.rows,
                "left_alone": self.left_alone,
                "totals": self.totals,
                "recipe": recipe_data(self.recipe),
                "budget": self.budget,
                "budget_unit": self.budget_unit,
                "forced": self.forced,
                "capture_note": self.capture_note,
                "scope": "projections" if self.scope is None else asdict(self.scope),
                "kept_as_it_is": self.kept_as_it_is,
                "predicted": self.predicted,
            },
            indent,
        )

    def __str__(self) -> str:
        return _Document(self).text()

    def _repr_html_(self) -> str:
        return _Document(self).html()


@dataclass(frozen=True)
class Line:
    """A printed row: ``count`` units of equal ``cells``, ``high`` of them on the recovery path now.

    ``times`` and ``steps`` are the lowest and the highest number of times and of steps on that path.
    """

    name: Name
    cells: tuple[str, ...]
    times: tuple[int, int]
    steps: tuple[int, int]
    high: int
    count: int = 1

    @property
    def guard(self) -> str:
        """``"low"``, ``"high"``, or how many are high."""
        return "low" if not self.high else "high" if self.high == self.count else f"{self.high} high"


def collapse(lines: Sequence[Line]) -> list[Line]:
    """Join lines that differ in one number of their names alone, innermost number first, as often as possible.

    A joined name stands for exactly the units in it: ``{0..3}.experts.{0..7}`` only where all 32 are there and equal.
    """
    found = list(lines)
    for position in reversed(range(max((len(line.name.parts) for line in lines), default=0))):
        joined: dict[tuple[Name, tuple[str, ...]], Line] = {}
        for line in found:
            numbers = line.name.numbers(position)
            key = (line.name if numbers is None else line.name.replace(position, frozenset()), line.cells)
            earlier = joined.get(key)
            if earlier is not None and numbers is not None:
                numbers |= earlier.name.numbers(position) or frozenset()
                line = replace(
                    line,
                    name=line.name.replace(position, numbers),
                    times=(min(earlier.times[0], line.times[0]), max(earlier.times[1], line.times[1])),
                    steps=(min(earlier.steps[0], line.steps[0]), max(earlier.steps[1], line.steps[1])),
                    high=earlier.high + line.high,
                    count=earlier.count + line.count,
                )
            joined[key] = line
        found = list(joined.values())
    return found


@dataclass(frozen=True)
class _Column:
    """``once``: how it is said above the table instead, where all its cells are equal."""

    header: str
    cells: Sequence[str]
    align: str = "l"
    once: str = ""

    @property
    def folds(self) -> bool:
        return bool(self.once) and len(set(self.cells)) == 1 and self.cells[0] != "?"


class _Document:
    """A :class:`Table` laid out for reading."""

    def __init__(self, source: Table) -> None:
        self.table = source
        self.parent = common_parent([row.unit for row in source.units])
        self.footnotes: dict[str, str] = {}
        self.columns = self._columns()

    def text(self) -> str:
        notes = [f"{mark} {note}" for note, mark in self.footnotes.items()]
        blocks = [self._heading(), self._units("simple"), "\n".join(notes)]
        if self.table.left_alone:
            blocks += [f"Left alone ({len(self.table.left_alone)})", self._left_alone("simple")]
        if self.table.kept_as_it_is:
            blocks += ["Saved activations kept as they are", self._kept_as_it_is("simple")]
        return "\n\n".join(block for block in [*blocks, "\n".join(self._totals())] if block)

    def html(self) -> str:
        blocks = [f"<p>{html.escape(self._heading())}</p>", self._units("html")]
        blocks += [f"<p>{mark} {html.escape(note)}</p>" for note, mark in self.footnotes.items()]
        if self.table.left_alone:
            blocks += [f"<p><b>Left alone ({len(self.table.left_alone)})</b></p>", self._left_alone("html")]
        if self.table.kept_as_it_is:
            blocks += ["<p><b>Saved activations kept as they are</b></p>", self._kept_as_it_is("html")]
        return "\n".join([*blocks, "<p>" + "<br>".join(map(html.escape, self._totals())) + "</p>"])

    def _heading(self) -> str:
        said = ", ".join(column.once.format(column.cells[0]) for column in self.columns if column.folds)
        where = f" below {self.parent}" if self.parent else ""
        return counted(len(self.table.units), "unit") + where + (f", each {said}" if said else "")

    def _units(self, style: str) -> str:
        shown = [column for column in self.columns if not column.folds]
        rows = list(zip(*(column.cells for column in shown), strict=True))
        return grid(rows, [column.header for column in shown], "".join(column.align for column in shown), style)

    def _columns(self) -> list[_Column]:
        lines = [self._line(row) for row in self.table.units]
        lines = collapse(lines) if len(lines) > MAX_ROWS else lines
        operators, weights, trainable, shared, low, high, gemm_low, gemm_high, stored, *kept, signal, marks = zip(
            *(line.cells for line in lines), strict=True
        )
        kept_full, kept_low, kept_high = kept
        saved = "" if self.table.recipe.gemm is None else "saved "
        gemms = [
            _Column("GEMMs\nlow path", gemm_low, once="GEMMs {}"),
            _Column("GEMMs\nhigh path", gemm_high, once="on recovery {}"),
        ]
        frozen = self.table.recipe.frozen is not None
        headers = (
            ("weight is\nfull", "kept as\nlow", "recovery\nadds")
            if frozen
            else ("kept\nfull", "per pass\nlow", "\nhigh")
        )
        columns = [
            _Column("unit", [str(line.name) for line in lines]),
            _Column("operator", operators, once="{}"),
            _Column("weight", weights),
            _Column("", trainable, once="{}"),
            *(
                [_Column("signal", signal, once="signal from {}")]
                if frozen
                else [_Column("shares\ninput with", shared)]
            ),
            *([] if self.table.recipe.gemm is None else gemms),
            _Column("low\npath", low, once=f"{saved}low-cost path {{}}"),
            _Column("high\npath", high, once=f"{saved}recovery path {{}}"),
            *([] if self.table.scope is None else [_Column("stores", stored)]),
            _Column(headers[0], kept_full, "r"),
            _Column(headers[1], kept_low, "r"),
            _Column(headers[2], kept_high, "r"),
            _Column("guard\nnow", [line.guard for line in lines]),
            _Column("times\nhigh", [_span(line.times) for line in lines], "r"),
            _Column("steps\nhigh", [_span(line.steps) for line in lines], "r"),
        ]
        return [*columns, _Column("note", marks)] if any(marks) else columns

    def _line(self, row: UnitRow) -> Line:
        recipe = self.table.recipe
        with_unit = f"as {relative_name(row.stored_with, row.unit)}" if row.stored_with and not row.bytes_full else ""
        cells = (
            row.operator or "?",
            "×".join(map(str, row.shape)),
            "trainable" if row.trainable else "frozen",
            listed([relative_name(name, row.unit) for name in row.shares_input_with]),
            _format_label(recipe.low, row.dtypes) if recipe.frozen is None else row.low_format,
            _format_label(recipe.high, row.dtypes) if recipe.frozen is None else f"exact ({'/'.join(row.dtypes)})",
            *(_gemm_label(recipe.gemm, path, row.backends) for path in ("low", "high")),
            "\n".join(_stored(activation, recipe) for activation in row.activations) or "-",
            with_unit or human_bytes(row.bytes_full),
            with_unit or human_bytes(row.bytes_low),
            human_bytes(row.bytes_high),
            row.signal,
            " ".join(sorted(self.footnotes.setdefault(note, f"[{len(self.footnotes) + 1}]") for note in row.notes)),
        )
        times, steps = row.times_recovered, row.steps_recovered
        name = Name.parse(below(row.unit, self.parent))
        return Line(name, cells, (times, times), (steps, steps), int(row.guard == "high"))

    def _left_alone(self, style: str) -> str:
        by_family = len(self.table.left_alone) > MAX_LEFT_ALONE
        groups: dict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
        for item in self.table.left_alone:
            name, shape, reason = item["name"], "×".join(map(str, item["shape"])) or "-", item["reason"]
            own: tuple[str, ...] = (name, item["operator"] or "?", shape, reason)
            groups[(family(name), *own[1:3], families_in(reason)) if by_family else own].append(own)
        rows = []
        for key, members in groups.items():
            name, *cells = key if len(members) > 1 else members[0]
            rows.append([name, str(len(members)), *cells])
        return grid(rows, ["name", "count", "operator", "weight", "reason"], "lrlll", style)

    def _kept_as_it_is(self, style: str) -> str:
        """By reason; equal tensors of several units are one row."""
        groups: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
        for item in self.table.kept_as_it_is:
            what = (
                ("several", "-", item["dtype"])
                if item["reason"] == "small"
                else (item["role"], "×".join(map(str, item["shape"])) or "-", item["dtype"])
            )
            groups[(item["reason"], *what)] += [item["bytes"]] * item["count"]
        rows = [
            [role, shape, dtype, str(len(sizes)), human_bytes(sum(sizes)), reason]
            for (reason, role, shape, dtype), sizes in groups.items()
        ]
        return grid(rows, ["tensor", "shape", "dtype", "count", "bytes", "why"], "lllrrl", style)

    def _totals(self) -> Iterator[str]:
        totals, budget = self.table.totals, self.table.budget
        units, known = totals["units"], totals["units_known"]
        full, low, recovery = (human_bytes(totals[f"bytes_{name}"]) for name in ("full", "low", "recovery_max"))
        pinned = " (pinned by hand)" if self.table.forced else ""
        shown = budget_text(budget, self.table.budget_unit)
        yield f"{totals['units_active']} on the recovery path now{pinned}, budget {shown}, recipe {self.table.recipe}"
        if self.table.scope is not None:
            yield "scope all: whatever autograd keeps, from the output head on " + (
                "too" if self.table.scope.loss_head else "not included"
            )
        if self.table.recipe.frozen is not None:
            yield f"frozen weights on their device: {full} as they were -> {low}, {1 / totals['ratio']:.3f} of it"
            yield (
                f"recovery adds at most {recovery}: the {counted(min(budget, units), 'largest weight')}; "
                f"{human_bytes(totals['bytes_host'])} of exact values in host memory"
            )
        elif totals["ratio"]:
            which = "whose inputs are known" if self.table.predicted else "that have run"
            part = "" if known == units else f" (in the {known} of {units} units {which})"
            yield f"kept for the backward per pass: {full} full -> {low} low, {totals['ratio']:.2f}x less{part}"
            most = f": the {counted(int(min(budget, units)), 'largest high payload')}"
            yield f"recovery adds at most {recovery}{most if self.table.budget_unit == 'units' else ''}"
            if self.table.predicted:
                yield f"predicted {self.table.predicted}"
        else:
            yield "kept for the backward per pass: known after the first forward in training mode"
        if self.table.capture_note:
            yield f"not captured as a whole: {self.table.capture_note}"
            yield "so which units share an input is not known, and what they share is counted for each"


def _format_label(fmt: Format, dtypes: Sequence[str]) -> str:
    return f"none ({'/'.join(dtypes)})" if fmt.dtype == "none" and dtypes else fmt.label


def _gemm_label(recipe: GemmRecipe | None, path: Literal["low", "high"], backends: Sequence[tuple[str, str]]) -> str:
    """``fp8_e4m3 g128 x b128, grad_weight g128 x g128, emulated``: what differs from the output's is named."""
    if recipe is None:
        return ""
    labels = [getattr(getattr(recipe, gemm), path).label for gemm in GEMMS]
    ran = [pair[path == "high"] for pair in backends] or ["not run yet"] * len(GEMMS)
    if set(labels) == {"full"}:
        return "full"
    same = len(set(ran)) == 1
    parts = [
        label + ("" if same else f" ({which})")
        if gemm == "output"
        else f"{gemm} {label}" + ("" if same else f" ({which})")
        for gemm, label, which in zip(GEMMS, labels, ran, strict=True)
        if gemm == "output" or label != labels[0] or not same
    ]
    return ", ".join([*parts, *([ran[0]] if same else [])])


def _stored(activation: Mapping[str, Any], recipe: Recipe) -> str:
    """``query 1.0 MiB (int8 g128)``, the format where it is not the unit's."""
    own = "" if activation["low_format"] == recipe.low.label else f" ({activation['low_format']})"
    calls = "" if activation["calls"] == 1 else f"{activation['calls']}× "
    return f"{calls}{activation['role']} {human_bytes(activation['bytes_full'])}{own}"


def _span(bounds: tuple[int, int]) -> str:
    low, high = bounds
    return str(low) if low == high else f"{low}..{high}"
