"""Recoverable units and what connects them to the operators they stand for."""

from __future__ import annotations

import enum
import functools
import json
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from gnmr_fx.formats import Encoded
from gnmr_fx.recipe import FrozenRecipe
from gnmr_fx.scope import AllSaved

HANDLE_PREFIX = "_gnmr_"
"""Modules carry their handles as plain attributes of this prefix (neither parameters nor buffers)."""
Signal = Literal["weight", "adapters", "output"]
UNIT_KEY = "gnmr_fx_unit"
"""Key of an autograd node's metadata under which the handle of the unit that it is part of is kept."""


class Marker(enum.Enum):
    """What stands in a handle's place where a projection is known and no unit."""

    LOSS_HEAD = "loss head"
    """The output head: what comes after it is the loss head, and stays as it is unless asked otherwise."""


class Memo:
    """What is encoded already: operators that read one tensor store it once.

    Keyed by the input's storage, place in it and version. Holds neither the input nor its encoding alive: an entry
    ends with whichever goes first. Not used under torch.compile, where common-subexpression elimination does this.
    """

    MAX_ENTRIES = 256

    def __init__(self) -> None:
        self._entries: OrderedDict[
            tuple[Any, ...], tuple[StorageWeakRef, TensorWeakRef, TensorWeakRef, tuple[int, ...]]
        ] = OrderedDict()

    @staticmethod
    def key(x: Tensor, dtype: torch.dtype, fmt: str) -> tuple[Any, ...] | None:
        """Identifies ``x`` cast to ``dtype`` in format ``fmt``; None where a tensor has no version to rely on."""
        if x.is_inference():
            return None
        place = (x.shape[-1:], x.numel()) if x.is_contiguous() else (x.shape, x.stride())
        return (x.untyped_storage()._cdata, x.storage_offset(), place, x._version, x.dtype, dtype, fmt)

    def get(self, key: tuple[Any, ...] | None) -> Encoded | None:
        """The encoding stored under ``key``, if it and its input are both alive."""
        found = self.stored(key)
        return None if found is None else found[0]

    def stored(self, key: tuple[Any, ...] | None) -> tuple[Encoded, tuple[int, ...]] | None:
        """Like :meth:`get`, with the shape of the input that was put there."""
        entry = self._entries.get(key) if key is not None else None
        if entry is None:
            return None
        storage, payload, scales, shape = entry[0], entry[1](), entry[2](), entry[3]
        if storage.expired() or payload is None or scales is None:
            return None
        return Encoded(payload, scales), shape

    def put(self, key: tuple[Any, ...] | None, x: Tensor, encoded: Encoded) -> None:
        """Remember that ``x`` is encoded as ``encoded``."""
        if key is None:
            return
        self._entries[key] = (
            StorageWeakRef(x.untyped_storage()),
            TensorWeakRef(encoded.payload),
            TensorWeakRef(encoded.scales),
            tuple(x.shape),
        )
        while len(self._entries) > self.MAX_ENTRIES:
            self._entries.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return Memo, ()


class Kept(NamedTuple):
    """One activation that is stored for a unit.

    Attributes:
        shape, dtype: of the activation, as it is stored.
        role: what it is to the unit: its ``"input"`` or its ``"output"``, an attention's ``"query"``, or the name of
            the operator that made it.
        low: spec of its low-cost format where that is not the unit's.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    role: str = "input"
    low: str = ""


@dataclass(slots=True)
class Observation:
    """What one pass (forward and backward) has stored for one unit.

    ``calls`` maps each :class:`Kept` activation to how often it was encoded in the pass under way;
    ``last`` is the same for the last whole pass; ``was_seen`` says that there was any, in this run or one resumed;
    ``recomputed``, that activation checkpointing makes some of them again inside the backward; ``scope``, what
    was stored where the unit last ran (``"all"`` or ``"projections"``; ``""`` for a model instrumented for the latter);
    ``backends``, what computes each of its GEMMs on the low-cost and on the recovery path, where a recipe says how.
    """

    calls: dict[Kept, int] = field(default_factory=dict)
    last: dict[Kept, int] = field(default_factory=dict)
    was_seen: bool = False
    recomputed: bool = False
    scope: str = ""
    backends: tuple[tuple[str, str], ...] = ()

    def add(self, kept: Kept) -> None:
        """Count one encoded activation; one made by a recomputation inside a backward is not kept, and not counted."""
        if torch._C._current_graph_task_id() == -1:
            self.calls[kept] = self.calls.get(kept, 0) + 1
        else:
            self.recomputed = self.was_seen = True

    def enter(self, scope: str) -> None:
        """Note what is stored where the unit runs now."""
        if torch._C._current_graph_task_id() == -1:
            self.scope, self.was_seen = scope, True

    def close(self) -> None:
        """End the pass under way."""
        if self.calls:
            self.last, self.calls = self.calls, {}
            self.was_seen = True

    def restore(self, other: Observation) -> None:
        """Take over what ``other`` holds."""
        for item in fields(self):
            setattr(self, item.name, getattr(other, item.name))

    @property
    def seen(self) -> bool:
        """Whether the operator was ever run on its guarded path."""
        return bool(self.was_seen or self.calls)

    @property
    def current(self) -> dict[Kept, int]:
        """The last whole pass; before there is one, the pass under way."""
        return self.last or self.calls


class Handle:
    """What a guarded operator reads at run time.

    Attributes:
        guard: 0-dim bool CPU tensor, a view of the controller's flag vector; True = recovery path.
        seed: 0-dim int64 CPU tensor for stochastic rounding, changed every step; None where nothing is stochastic.
        low, high: format specs of the two paths.
        memo: shared by all handles of one model.
        observation: shared by all call sites of one unit.
        scope: options of scope "all"; None where only what projections read is stored.
        saver: what stores everything in eager mode; None in that scope only.
        gemms: how GEMMs are computed in training and in ``eval()``; None where PyTorch's own are.
        frozen: how frozen weights are kept; None under a recipe that leaves them alone.
    """

    __slots__ = (
        "__weakref__",
        "frozen",
        "gemms",
        "guard",
        "high",
        "low",
        "memo",
        "observation",
        "saver",
        "scope",
        "seed",
    )

    def __init__(
        self,
        guard: Tensor,
        seed: Tensor | None,
        low: str,
        high: str,
        memo: Memo,
        observation: Observation,
        scope: AllSaved | None = None,
        saver: Any = None,
        gemms: tuple[Any, Any] | None = None,
        frozen: FrozenRecipe | None = None,
    ) -> None:
        self.guard = guard
        self.seed = seed
        self.low = low
        self.high = high
        self.memo = memo
        self.observation = observation
        self.scope = scope
        self.saver = saver
        self.gemms = gemms
        self.frozen = frozen


@dataclass(frozen=True)
class UnitSpec:
    """One recoverable unit as the passes found it.

    Attributes:
        name: path of the module that owns the weight, with the parameter's name where that is not ``weight``.
        operator: what reads the weight: ``linear``, ``addmm``, ``matmul``, ``einsum``, ``grouped_mm``, ...
        owner: path of the module that owns the weight.
        parameter: the weight's attribute name there.
        shape: of the weight.
        sites: (path of the calling module, path of the weight from there) of every module that calls it.
        shares_input_with: names of the units that read the same tensor, where the dataflow is known.
        signal: what its norm is the norm of: the gradient of its ``"weight"``, those of its ``"adapters"``, or that of
            its ``"output"``.
        adapters: path of the module whose trainable parameters are its adapters.
        note: something the user should know about it.
    """

    name: str
    operator: str
    owner: str
    parameter: str
    shape: tuple[int, ...]
    sites: tuple[tuple[str, str], ...]
    shares_input_with: tuple[str, ...] = ()
    example_shape: tuple[int, ...] | None = None
    note: str = ""
    signal: Signal = "weight"
    adapters: str = ""


@dataclass(frozen=True)
class LeftAlone:
    """An operator that was found and is not guarded, with the reason."""

    name: str
    operator: str
    shape: tuple[int, ...]
    reason: str


@dataclass(eq=False, slots=True)
class Unit:
    """A unit of a live model: its spec, the module that owns its weight, its index, what it stored, and the module
    whose trainable parameters are its adapters, if its signal is theirs."""

    spec: UnitSpec
    index: int
    module: nn.Module
    observation: Observation = field(default_factory=Observation)
    adapters: nn.Module | None = None

    @property
    def name(self) -> str:
        """Its name, as in the table."""
        return self.spec.name

    @property
    def weight(self) -> Tensor:
        """The weight as the owning module holds it now (it may have been moved, wrapped or sharded since)."""
        weight = self.module._parameters.get(self.spec.parameter)  # quicker than the module's __getattr__
        return weight if weight is not None else getattr(self.module, self.spec.parameter)

    @property
    def parameter(self) -> nn.Parameter | None:
        """The weight where the module holds it as a parameter; None where it is computed (parametrized, pruned), and
        while a copy of the module is being made."""
        parameter: nn.Parameter | None = self.module.__dict__.get("_parameters", {}).get(self.spec.parameter)
        return parameter

    def heard(self) -> list[nn.Parameter]:
        """The parameters whose gradients are the unit's signal, as the modules hold them now."""
        if self.adapters is not None:
            return [p for p in self.adapters.parameters() if p.requires_grad]
        parameter = self.parameter if self.spec.signal == "weight" else None
        return [] if parameter is None else [parameter]

    @property
    def trainable(self) -> bool:
        """Whether the weight needs a gradient now."""
        return self.weight.requires_grad

    def __repr__(self) -> str:
        return f"Unit({self.index}, {self.name!r})"


_OBSERVERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Flag vector address -> its controller. A custom operator receives tensors only: a guard's address is the one thing
that tells, inside a compiled graph, which unit of which model it runs for."""


def register_observer(flags: Tensor, controller: Any) -> None:
    """Let guarded operators in compiled graphs report to ``controller`` what they store."""
    _OBSERVERS[flags.data_ptr()] = controller


def unregister_observer(flags: Tensor) -> None:
    """Undo :func:`register_observer`."""
    _OBSERVERS.pop(flags.data_ptr(), None)


def observers() -> list[Any]:
    """The controllers that are registered."""
    return list(_OBSERVERS.values())


def mark(made: Tensor, unit: Any) -> None:
    """Note in the autograd graph that ``unit`` (its handle, or a marker) made a tensor."""
    metadata: Any = made.grad_fn.metadata  # type: ignore[union-attr]  # a dict, whatever its annotation says
    metadata[UNIT_KEY] = unit


def _observer_of(guard: Tensor) -> tuple[Any, int]:
    """The controller that ``guard`` belongs to (None if it is gone), and the index of its unit."""
    address, index = place_of(guard)
    return _OBSERVERS.get(address), index


def place_of(guard: Tensor) -> tuple[int, int]:
    """The address of the flag vector that ``guard`` is a view of, and its index there."""
    offset = int(guard.storage_offset())
    return guard.data_ptr() - offset * guard.element_size(), offset


def unit_at(address: int, index: int) -> tuple[Any, Any]:
    """The controller of the flag vector at that address, and its unit; (None, None) if the controller is gone."""
    controller = _OBSERVERS.get(address)
    return (None, None) if controller is None else (controller, controller.units[index])


def observe(guard: Tensor, kept: Kept) -> None:
    """Record that an activation of the unit guarded by ``guard`` was stored."""
    controller, index = _observer_of(guard)
    if controller is not None:
        controller.units[index].observation.add(kept)


def stores(guard: Tensor, kept: Kept, x: Tensor, spec: str) -> None:
    """:func:`observe`, :func:`announce` and :func:`measure` in one, for an operator that stores what it runs on."""
    controller, index = _observer_of(guard)
    if controller is None:
        return
    controller.units[index].observation.add(kept)
    controller.projection_ran(index)
    _measure(controller, index, x, spec)


def observe_backends(guard: Tensor, backends: tuple[tuple[str, str], ...]) -> None:
    """Record what computes the GEMMs of the unit guarded by ``guard``."""
    controller, index = _observer_of(guard)
    if controller is not None:
        controller.units[index].observation.backends = backends


def measure(guard: Tensor, x: Tensor, spec: str = "") -> None:
    """Where the controller of ``guard`` measures errors in this step, measure that of an operand of its unit.

    Args:
        guard: of the unit.
        x: what the unit stores or multiplies: floating point, what this rank holds of it.
        spec: the format of the low-cost path for it; ``""`` for that of saved activations.
    """
    controller, index = _observer_of(guard)
    if controller is not None:
        _measure(controller, index, x, spec)


def _measure(controller: Any, index: int, x: Tensor, spec: str) -> None:
    if controller.probe.is_open:
        controller.probe.take(index, x, spec or str(controller.recipe.low), controller.seed)


def announce(guard: Tensor) -> None:
    """Tell the controller of ``guard`` that its operator runs."""
    controller, index = _observer_of(guard)
    if controller is not None:
        controller.projection_ran(index)


def observe_scope(guards: Sequence[Tensor], scope: str, left: str = "") -> None:
    """Record what is stored in the graph that runs now, and tell the controller that its units run.

    Args:
        guards: of the graph's units.
        scope: ``"all"`` or ``"projections"``.
        left: JSON list of the saved tensors that the graph keeps as they are; their ``unit`` counts in ``guards``.
    """
    positions: dict[Any, list[int]] = {}
    for position, guard in enumerate(guards):
        controller, _ = _observer_of(guard)
        if controller is not None:
            positions.setdefault(controller, []).append(position)
    for controller, own in positions.items():
        indices = tuple(int(guards[position].storage_offset()) for position in own)
        for index in indices:
            controller.units[index].observation.enter(scope)
            controller.projection_ran(index)
        controller.left_in_graph[indices] = left if len(own) == len(guards) else _part_of(left, tuple(own))


@functools.cache
def _part_of(left: str, positions: tuple[int, ...]) -> str:
    """Of ``left``, what belongs to the units at ``positions`` of the graph, or, to the first unit's model, to none."""
    items = json.loads(left or "[]")
    own = [item | {"unit": positions.index(item["unit"])} for item in items if item["unit"] in positions]
    return json.dumps(own + [item for item in items if item["unit"] is None and 0 in positions])
