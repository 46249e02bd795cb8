"""What each recoverable unit keeps for the backward: the rows of :func:`gnmr_fx.table`."""

from __future__ import annotations

import functools
import json
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gnmr_fx.formats import nbytes
from gnmr_fx.frozen import FrozenWeight
from gnmr_fx.instrument import ModelController
from gnmr_fx.recipe import Format, FrozenRecipe
from gnmr_fx.scope import AllSaved
from gnmr_fx.units import Observation, Unit


@dataclass(frozen=True)
class UnitRow:
    """One recoverable unit. Bytes are per forward-backward pass; None before the first one. Under a recipe for frozen
    weights they are those of the weight on its device: as it was, in the low-cost format, and what recovery adds.

    Attributes:
        index: of the unit's guard.
        unit: its name.
        operator: what reads the weight; ``""`` where that is not known before it runs.
        shape: of the weight.
        trainable: whether the weight needs a gradient. A frozen one keeps nothing.
        shares_input_with: units that read the same tensor, which is stored once.
        low_format, high_format: of the saved activation on the low-cost and on the recovery path.
        dtypes: of the activations that were stored.
        activations: ``{"rows", "width", "dtype", "calls", "role", "low_format", "bytes_full", "bytes_low"}`` of
            each, taken as a matrix. ``role`` says what it is to the unit: its ``"input"``, its ``"output"``, ...
        bytes_full: what PyTorch keeps: the activation in its own dtype. 0 for what ``stored_with`` counts.
        bytes_low: what the low-cost path keeps. 0 for what ``stored_with`` counts.
        bytes_high: what the recovery path keeps; the unit's own, as under torch.compile; 0 where both paths have
            one format. (In eager mode, units that share their input share this too, and it replaces the low-cost one
            instead of joining it.)
        bytes_host: what is kept in host memory: the exact values of a weight that is stored in another format.
        signal: what its norm is the norm of: the gradient of its ``"weight"``, those of its ``"adapters"``, or that of
            its ``"output"``.
        stored_with: the first unit of the table that stores this unit's input, or some of it; ``""`` if that is itself.
        guard: ``"low"`` or ``"high"``: the path it is on now.
        times_recovered: how often it went onto the recovery path.
        steps_recovered: in how many steps it was there.
        seen: whether it ever ran in training mode.
        notes: what else there is to know.
        backends: where the recipe says how GEMMs are computed, for the output, the input and the weight gradient what
            computes them on the low-cost and on the recovery path: ``"native"``, ``"emulated"`` or ``"full"``;
            empty before the unit has run.
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
    bytes_host: int
    signal: str
    stored_with: str
    guard: str
    times_recovered: int
    steps_recovered: int
    seen: bool
    notes: tuple[str, ...]
    backends: tuple[tuple[str, str], ...] = ()


def unit_rows(installed: ModelController) -> tuple[UnitRow, ...]:
    """The rows of the table, in the order of the units."""
    if installed.recipe.frozen is not None:
        return tuple(_frozen_row(installed, unit, installed.recipe.frozen) for unit in installed.units)
    units, recipe = installed.units, installed.recipe
    high = installed.flags.tolist()
    kept = [activations(unit.observation, recipe.low) if unit.trainable else Counter[Activation]() for unit in units]
    # Where everything is stored, what units share is recorded for one of them only.
    counting = counted_once(units, kept) if installed.scope is None else recorded_once(units, kept)
    rows = []
    for unit, own, (counted, stored_with) in zip(units, kept, counting, strict=True):
        known = bool(own) or not unit.trainable or bool(unit.observation.scope)
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
                    {
                        "rows": a.rows,
                        "width": a.width,
                        "dtype": _dtype_name(a.dtype),
                        "calls": calls,
                        "role": a.role,
                        "low_format": a.low.label,
                        "bytes_full": calls * a.nbytes(Format("none")),
                        "bytes_low": calls * a.nbytes(a.low),
                    }
                    for a, calls in own.items()
                ),
                bytes_full=total_bytes(counted, Format("none")) if known else None,
                bytes_low=sum(calls * a.nbytes(a.low) for a, calls in counted.items()) if known else None,
                bytes_high=recovered_bytes(own, recipe.high) if known else None,
                bytes_host=0,
                signal=unit.spec.signal,
                stored_with=stored_with,
                guard="high" if high[unit.index] else "low",
                times_recovered=installed.times_recovered(unit.index),
                steps_recovered=installed.steps_recovered(unit.index),
                seen=unit.observation.seen,
                notes=tuple(_notes(unit, installed.scope)),
                backends=unit.observation.backends,
            )
        )
    return tuple(rows)


def _frozen_row(installed: ModelController, unit: Unit, recipe: FrozenRecipe) -> UnitRow:
    weight = unit.weight
    stored = weight.store if isinstance(weight, FrozenWeight) else None
    full = weight.numel() * weight.dtype.itemsize
    on_host = recipe.residual == "host"
    return UnitRow(
        index=unit.index,
        unit=unit.name,
        operator=unit.spec.operator,
        shape=unit.spec.shape,
        trainable=unit.trainable,
        shares_input_with=unit.spec.shares_input_with,
        low_format=recipe.label,
        high_format="exact",
        dtypes=(_dtype_name(weight.dtype),),
        activations=(),
        bytes_full=full,
        # What lies beside it on the device is there on either path.
        bytes_low=full if stored is None else sum(t.nbytes for t in stored.low) + (0 if on_host else full),
        bytes_high=full if stored is not None and on_host else 0,
        bytes_host=full if stored is not None and on_host else 0,
        signal=unit.spec.signal,
        stored_with="",
        guard="high" if installed.flags[unit.index] else "low",
        times_recovered=installed.times_recovered(unit.index),
        steps_recovered=installed.steps_recovered(unit.index),
        seen=unit.observation.seen,
        notes=tuple(_frozen_notes(unit, stored is not None)),
    )


def _frozen_notes(unit: Unit, is_stored: bool) -> Iterator[str]:
    if not is_stored:
        yield "replaced: not the weight that instrument stored, so not quantized"
    if not unit.observation.seen:
        yield "not seen yet: no forward in training mode has run it"


def _notes(unit: Unit, scope: AllSaved | None) -> Iterator[str]:
    if unit.spec.note and scope is None:
        yield unit.spec.note
    if not unit.trainable:
        yield "frozen: saves nothing" if scope is None else "frozen: its weight gradient needs no input"
    elif not unit.observation.seen:
        yield "not seen yet: no forward in training mode has run it"
    elif scope is not None and unit.observation.scope == "projections":
        yield "stored here: the projection's input alone (not compiled by Inductor, or not run by the model's forward)"


class Activation(NamedTuple):
    """One saved activation as formats see it: a matrix. ``[4, 8, 16]`` and its view ``[32, 16]`` are the same one."""

    rows: int
    width: int
    dtype: torch.dtype
    role: str
    low: Format

    def nbytes(self, fmt: Format) -> int:
        """Bytes it takes in ``fmt``, scales included."""
        return nbytes((self.rows, self.width), fmt, self.dtype)


def activations(observation: Observation, low: Format) -> Counter[Activation]:
    """How often a unit stored which activation in its last pass; ``low`` is the unit's low-cost format."""
    found: Counter[Activation] = Counter()
    for kept, calls in observation.current.items():
        shape, own = kept.shape, Format.parse(kept.low) if kept.low else low
        found[Activation(math.prod(shape[:-1]), shape[-1] if shape else 1, kept.dtype, kept.role, own)] += calls
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


def recorded_once(
    units: Iterable[Unit], kept: Sequence[Counter[Activation]]
) -> Iterator[tuple[Counter[Activation], str]]:
    """Like :func:`counted_once` where each tensor is recorded for one of its units only."""
    with_input: set[str] = set()
    for unit, own in zip(units, kept, strict=True):
        has_input = any(activation.role == "input" for activation in own)
        if has_input:
            with_input.add(unit.name)
        shared = (name for name in unit.spec.shares_input_with if name in with_input)
        yield own, "" if has_input else next(shared, "")


def total_bytes(kept: Counter[Activation], fmt: Format) -> int:
    """Bytes of all activations in ``kept``."""
    return sum(calls * activation.nbytes(fmt) for activation, calls in kept.items())


def recovered_bytes(kept: Counter[Activation], fmt: Format) -> int:
    """Bytes of the recovery payloads of ``kept``; a query or key that has 8 bits already gets none."""
    return sum(calls * a.nbytes(fmt) for a, calls in kept.items() if a.low != fmt)


def left_rows(installed: ModelController) -> tuple[Mapping[str, Any], ...]:
    """The saved tensors that are kept as they are, in scope "all": ``{"role", "unit", "shape", "dtype", "bytes",
    "reason", "count"}``, equal ones once. ``unit`` is the one it would belong to, ``""`` if there is none."""
    found: Counter[tuple[Any, ...]] = Counter()
    for indices, text in installed.left_in_graph.items():
        for item in json.loads(text or "[]"):
            unit = "" if item["unit"] is None else installed.units[indices[item["unit"]]].name
            found[item["role"], unit, tuple(item["shape"]), item["dtype"], item["bytes"], item["reason"]] += 1
    for left in installed.saver.left if installed.saver is not None else ():
        size = math.prod(left.shape) * left.dtype.itemsize
        found[left.role, "", left.shape, _dtype_name(left.dtype), size, left.reason] += 1
    names = ("role", "unit", "shape", "dtype", "bytes", "reason")
    return tuple({**dict(zip(names, key, strict=True)), "count": count} for key, count in found.items())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
