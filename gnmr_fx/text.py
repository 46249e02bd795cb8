"""Plain text, module paths and JSON, as tables, reports and plots write them."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from gnmr_fx.recipe import Recipe

# Numbers and lists ---------------------------------------------------------------------------------------------------


def counted(number: int, noun: str) -> str:
    """``"1 unit"``, ``"2 units"``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def share(part: int, whole: int) -> str:
    """``"12.5%"``; ``"-"`` of nothing."""
    return f"{100 * part / whole:.3g}%" if whole else "-"


def listed(names: Sequence[str], limit: int = 4) -> str:
    """Names with commas, ``"-"`` for none, the last ones as a number where there are more than ``limit``."""
    if len(names) <= limit:
        return ", ".join(names) or "-"
    return f"{', '.join(names[: limit - 1])}, +{len(names) - limit + 1}"


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


def budget_text(budget: int | float, unit: str) -> str:
    """A budget in words: ``"5"`` units, ``"1.5 MiB"``, ``"1.2e+09 flops"``, ``"20% of all units' bytes"``."""
    if unit == "units":
        return str(budget)
    if isinstance(budget, float):
        return f"{100 * budget:.3g}% of all units' {unit}"
    return human_bytes(budget) if unit == "bytes" else f"{budget:.3g} {unit}"


def grid(rows: Sequence[Sequence[str]], headers: Sequence[str] = (), right: str = "", style: str = "simple") -> str:
    """Rows as a table in a style of tabulate's; ``right`` has an ``r`` for each column that is aligned to the right."""
    align = ["right" if letter == "r" else "left" for letter in right] or None
    return str(tabulate(rows, headers, style, disable_numparse=True, colalign=align))


# Module paths --------------------------------------------------------------------------------------------------------


def common_parent(paths: Sequence[str]) -> str:
    """The module that all of them lie in; ``""`` where that is the root, or there is but one path."""
    columns = zip(*(path.split(".")[:-1] for path in paths), strict=False) if len(paths) > 1 else ()
    return ".".join(parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, columns))


def below(path: str, parent: str) -> str:
    """``path`` as seen from ``parent``, which it lies in."""
    return path.removeprefix(f"{parent}.") if parent else path


def relative_name(name: str, base: str) -> str:
    """``name`` as seen from ``base``, without the modules both lie in: ``q_proj`` for a sibling."""
    parent = common_parent([name, base])
    while parent and below(name, parent).split(".")[0].isdigit():
        parent = parent.rpartition(".")[0]  # a number alone tells nothing
    return below(name, parent)


def family(path: str) -> str:
    """A module path with ``*`` for its numbers, as ``include`` and ``exclude`` take it: ``layers.*.mlp``."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def families_in(text: str) -> str:
    """``text`` with a family for each module path in it; plain numbers stay."""
    return re.sub(
        r"\w+(?:\.\w+)+", lambda path: path[0] if path[0].replace(".", "").isdigit() else family(path[0]), text
    )


@dataclass(frozen=True)
class Name:
    """A module path in which numbers may stand for several: ``layers.{0..31}.mlp``."""

    parts: tuple[str | frozenset[int], ...]

    @classmethod
    def parse(cls, path: str) -> Name:
        """The name of one module."""
        return cls(tuple(frozenset({int(part)}) if part.isdigit() else part for part in path.split(".")))

    def numbers(self, position: int) -> frozenset[int] | None:
        """The numbers at ``position``; None where there are none."""
        part = self.parts[position] if position < len(self.parts) else ""
        return None if isinstance(part, str) else part

    def replace(self, position: int, numbers: frozenset[int]) -> Name:
        """The name with other numbers at ``position``."""
        return Name((*self.parts[:position], numbers, *self.parts[position + 1 :]))

    def __str__(self) -> str:
        return ".".join(part if isinstance(part, str) else _runs(part) for part in self.parts)


def _runs(numbers: Iterable[int]) -> str:
    """``"7"``, ``"{0..31}"``, ``"{0..3,5,9}"``."""
    runs: list[str] = []
    for _, group in itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs += [f"{run[0]}..{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    text = ",".join(runs)
    return text if text.isdigit() else f"{{{text}}}"


# JSON ----------------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """``value`` in the types that JSON knows; non-finite floats as ``"Infinity"``, ``"-Infinity"`` and ``"NaN"``."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def to_json(value: Mapping[str, Any], indent: int | None) -> str:
    """``value`` as strict JSON."""
    return json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def recipe_data(recipe: Recipe) -> dict[str, Any]:
    """A recipe for JSON: its name, the specs of both formats, and those of its GEMMs or of frozen weights."""
    data: dict[str, Any] = {"name": recipe.name, "low": str(recipe.low), "high": str(recipe.high)}
    if recipe.gemm is not None:
        paths = {gemm: getattr(recipe.gemm, gemm) for gemm in ("output", "grad_input", "grad_weight")}
        data["gemm"] = {gemm: {"low": str(pair.low), "high": str(pair.high)} for gemm, pair in paths.items()}
        data["gemm"] |= {"backend": recipe.gemm.backend, "evaluate": recipe.gemm.evaluate}
    if recipe.frozen is not None:
        data["frozen"] = {
            "low": recipe.frozen.spec,
            "residual": recipe.frozen.residual,
            "evaluate": recipe.frozen.evaluate,
        }
    return data
