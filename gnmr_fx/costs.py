"""What a unit costs on its recovery path, for budgets that count bytes or operations."""

from __future__ import annotations

import functools
import math

from gnmr_fx.config import BudgetUnit
from gnmr_fx.formats import nbytes
from gnmr_fx.recipe import Format
from gnmr_fx.units import Kept, Unit

UNKNOWN = -1.0
"""The cost of a unit that has not run yet."""


def cost_of(unit: Unit, low: Format, high: Format, budget_unit: BudgetUnit) -> float:
    """What ``unit`` costs per forward-backward pass, by what it stored in its last one.

    Args:
        unit: the unit.
        low, high: the formats of its paths.
        budget_unit: ``"bytes"``: of the recovery payloads, scales included, of everything stored for the unit (what
            several units store in common counts for each that would store it). ``"flops"``: operations of its GEMMs,
            forward, input gradient and weight gradient, at 2 per multiplication: ``6 * rows * in * out``.

    Returns:
        Bytes or operations; :data:`UNKNOWN` before the unit's first pass, and for one that stores nothing.
    """
    stored = tuple(unit.observation.current.items())
    if not stored:
        return UNKNOWN
    if budget_unit == "bytes":
        return _bytes(stored, low, high)
    return _flops(stored, unit.spec.shape)


@functools.lru_cache(maxsize=4096)
def _bytes(stored: tuple[tuple[Kept, int], ...], low: Format, high: Format) -> float:
    total = 0
    for kept, calls in stored:
        if (Format.parse(kept.low) if kept.low else low) != high:
            rows, width = math.prod(kept.shape[:-1]), kept.shape[-1] if kept.shape else 1
            total += calls * nbytes((rows, width), high, kept.dtype)
    return float(total)


@functools.lru_cache(maxsize=4096)
def _flops(stored: tuple[tuple[Kept, int], ...], weight: tuple[int, ...]) -> float:
    matrix = math.prod(weight[-2:])  # of a stack of experts each row meets one
    rows = sum(calls * math.prod(kept.shape[:-1]) for kept, calls in stored if kept.role == "input")
    return 6.0 * rows * matrix
