"""Pass ``partition``: every saved activation in its unit's format, under torch.compile with Inductor.

Runs where PyTorch lets a pass run that sees forward and backward as one graph: as Inductor's custom partitioner. For a
graph with units of a model in scope "all" it

1. takes the units' own packing out again (:func:`gnmr_fx.passes.attribute.unfold`), so that nothing is stored twice,
2. has the partitioner that was there before, the stock min-cut one by default, decide what is kept: what it
   recomputes, what checkpointing marks for recomputation, and what a memory budget rules out are not kept here either,
3. stores each tensor that is kept in the low-cost format of the unit it belongs to, and in the recovery format where
   the guard of that unit is set at run time. The guards stay graph inputs: one graph serves all states and all blocks.

Every other graph is handed on untouched.

Invariants: user outputs, parameters, statistics and whatever else :class:`~gnmr_fx.passes.attribute.Attribution` names
a reason for are kept as they are; the forward's outputs are user outputs, tensors, symbolic sizes, in that order; the
backward takes what the forward saves, in its order.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import SymInt, fx
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput, SavedForBackwardsNoVcCheckAOTOutput
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import compute_unbacked_bindings

from gnmr_fx import formats, physical, recipe, scope
from gnmr_fx import ops as ops_module
from gnmr_fx.passes import attribute
from gnmr_fx.passes.attribute import (
    PACKED,
    PARAMETER,
    SMALL,
    Attribution,
    Belongs,
    Place,
    find_units,
    is_piece,
    memory_of,
    tensor_of,
    unfold,
)
from gnmr_fx.physical import Physical
from gnmr_fx.recipe import Format, at_least

aten, ops = torch.ops.aten, torch.ops.gnmr_fx
_NO_VERSION_CHECK = "saved_tensor_with_no_vc_check"


class Partitioner(CustomPartitionerFn):
    """Inductor's partitioner while models in scope "all" exist; ``inner`` is the one that was set before, or None."""

    def __init__(self, inner: CustomPartitionerFn | None) -> None:
        self.inner = inner

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> tuple[Any, Any]:
        partition = min_cut_rematerialization_partition if self.inner is None else self.inner
        units = find_units(gm.graph)
        if not units:
            return partition(gm, joint_inputs, **kwargs)
        unfold(gm.graph, units)
        gm.recompile()
        num_outputs = kwargs["num_fwd_outputs"]
        # Answered before the partitioner runs, which may change the graph; names stay.
        static = kwargs.get("static_lifetime_input_indices") or ()
        places = Attribution.of_joint(gm.graph, units, num_outputs, static).places()
        forward, backward = partition(gm, joint_inputs, **kwargs)
        pack(forward, backward, num_outputs, places, [unit.guard.name for unit in units])
        return forward, backward

    def uuid(self) -> Any:
        """Identifies this pass in the keys of Inductor's caches: its sources, and the partitioner inside it."""
        inner = None if self.inner is None else self.inner.uuid()
        if self.inner is not None and inner is None:
            return None  # not to be cached, says the one inside
        return f"gnmr_fx {_sources()} {inner}"


@functools.cache
def _sources() -> str:
    """A digest of the sources that decide what the pass makes of a graph; options travel in the graph itself."""
    digest = hashlib.sha256()
    for module in (attribute, formats, ops_module, physical, recipe, scope, sys.modules[__name__]):
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()


def pack(
    forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, places: Mapping[str, Place], guards: list[str]
) -> None:
    """Store what ``forward`` saves for ``backward`` in its units' formats, in place.

    Args:
        forward, backward: as partitioned; the forward's outputs from ``num_outputs`` on are saved.
        places: what is to happen to a tensor of the joint graph, by its name.
        guards: names of the guards of all units.
    """
    output = forward.graph.output_node()
    outputs = list(output.args[0])  # type: ignore[arg-type]
    saved = outputs[num_outputs:]
    returned = {node for node in outputs[:num_outputs] if isinstance(node, fx.Node)}
    # The backward takes sizes first, then the saved tensors in their order.
    arriving = [n for n in backward.graph.find_nodes(op="placeholder") if tensor_of(n) is not None]
    move = _Move(forward.graph, backward.graph)
    tensors: list[fx.Node] = []
    left: list[Mapping[str, Any]] = []
    for node, incoming in zip([n for n in saved if tensor_of(n) is not None], arriving, strict=False):
        place = _final_place(node, incoming, places, returned)
        if place.reason:
            tensors.append(move.piece(node, incoming) if _is_piece(node, place) else node)
            if place.reason not in (PACKED, PARAMETER):
                left.append(place.describe(node))
        else:
            tensors += move.tensor(node, incoming, place)
    tensors.insert(0, move.note(guards, left))
    rest = [node for node in saved if tensor_of(node) is None] + move.sizes_added
    _set_outputs(output, outputs[:num_outputs], tensors, rest)
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


def _final_place(node: fx.Node, incoming: fx.Node, places: Mapping[str, Place], returned: set[fx.Node]) -> Place:
    place = places.get(node.name, Place("made by the partitioner"))
    if node in returned:
        return replace(place, reason="returned to the caller")
    if not place.reason and any("as_strided" in str(user.target) for user in incoming.users):
        return replace(place, reason="read by its place in memory")
    return place


def _is_piece(node: fx.Node, place: Place) -> bool:
    """Whether ``node`` is small enough to be kept as it is, and its memory is not."""
    options = place.belongs.units[0].scope if place.belongs is not None else None
    return place.reason == SMALL and options is not None and is_piece(node, options.min_bytes)


def _set_outputs(output: fx.Node, user: list[Any], tensors: list[fx.Node], rest: list[Any]) -> None:
    """Let the forward return ``user`` and save ``tensors`` and the ``rest``, as AOTAutograd describes them."""
    output.args = ((*user, *tensors, *rest),)
    unchecked = [bool(node.meta.get(_NO_VERSION_CHECK)) for node in tensors] + [False] * len(rest)
    if "desc" in output.meta:
        output.meta["desc"] = [*output.meta["desc"][: len(user)]] + [
            SavedForBackwardsNoVcCheckAOTOutput(i) if flag else SavedForBackwardsAOTOutput(i)
            for i, flag in enumerate(unchecked)
        ]
    traces = output.meta.get("output_stack_traces")
    if traces is not None:
        output.meta["output_stack_traces"] = [
            *traces[: len(user)],
            *(n.meta.get("stack_trace") for n in (*tensors, *rest)),
        ]


class _Move:
    """Moves saved tensors from one format to another, in a forward graph and the backward graph that belongs to it."""

    def __init__(self, forward: fx.Graph, backward: fx.Graph) -> None:
        self.forward, self.backward = forward, backward
        self.sizes_added: list[fx.Node] = []
        # The memory that is stored already -> its shape as stored, and its pieces in the backward.
        self.stored: dict[tuple[fx.Node, str, str], tuple[list[Any], list[fx.Node]]] = {}
        placeholders = backward.find_nodes(op="placeholder")
        self.sizes = {str(n.meta["val"].node.expr): n for n in placeholders if isinstance(n.meta.get("val"), SymInt)}
        with backward.inserting_before(next(n for n in placeholders if not isinstance(n.meta.get("val"), SymInt))):
            # The backward takes its sizes first: new ones go before this.
            self.arriving_note = backward.placeholder("kept_note")
        self.inputs = {node.name: node for node in forward.find_nodes(op="placeholder")}

    def tensor(self, node: fx.Node, incoming: fx.Node, place: Place) -> list[fx.Node]:
        """Save ``node`` in the formats of its ``place`` instead.

        Args:
            incoming: the same tensor in the backward, where it is replaced.

        Returns:
            The nodes to save; none for another view of what is stored already.
        """
        assert place.belongs is not None
        unit = place.belongs.units[0]
        low, high = (str(at_least(f, place.bits)) for f in (unit.low, unit.high))
        physical = Physical.of(node.meta["val"], Format.parse(low))
        with self._inserting_after(node):
            placed = node
            for dim in physical.expanded:
                placed = _call(self.forward, aten.slice.Tensor, (placed, dim, 0, 1))
            if physical.is_permuted:
                placed = _call(self.forward, aten.permute.default, (placed, list(physical.order)))
            sizes = [self._size(placed, dim) for dim in range(len(physical.order))]  # in the backward
            key = (memory_of(node), low, high)
            pieces = [] if key in self.stored else self._keep(placed, physical, place.belongs, low, high)
        if pieces:
            merged = len(sizes) != physical.rows + 1
            width = math.prod(placed.meta["val"].shape[physical.rows :]) if merged else sizes[physical.rows]
            with self.backward.inserting_before(incoming):
                arrived = [self._placeholder(piece) for piece in pieces]
            self.stored[key] = [*sizes[: physical.rows], width], arrived
        self._restore(incoming, physical, sizes, *self.stored[key], low, high)
        if node.meta.get(_NO_VERSION_CHECK):
            for piece in pieces:
                piece.meta[_NO_VERSION_CHECK] = True
        return pieces

    def piece(self, node: fx.Node, incoming: fx.Node) -> fx.Node:
        """Save a copy of ``node`` in its place: a view keeps all the memory alive that it is part of."""
        with self._inserting_after(node):
            copy = _call(self.forward, ops.copy.default, (node,))
        with self.backward.inserting_before(incoming):
            arrived = self._placeholder(copy)
        incoming.replace_all_uses_with(arrived)
        self.backward.erase_node(incoming)
        return copy

    def _inserting_after(self, node: fx.Node) -> Any:
        last_input = next(reversed(self.inputs.values()))
        return self.forward.inserting_before((last_input if node.op == "placeholder" else node).next)

    def _keep(self, placed: fx.Node, physical: Physical, belongs: Belongs, low: str, high: str) -> list[fx.Node]:
        """The payloads and scales of ``placed``, whose dimensions lie in memory in their order."""
        rows, x = physical.rows, placed
        if len(physical.order) != rows + 1:
            here = [self._forward_size(placed, dim) for dim in range(rows)]
            width = math.prod(placed.meta["val"].shape[rows:])
            x = _call(self.forward, aten.reshape.default, (placed, [*here, width]))
        unit = belongs.units[0]
        guards = [self.inputs[unit.guard.name] for unit in belongs.units]
        seed = None if unit.seed is None else self.inputs[unit.seed.name]
        kept = _call(self.forward, ops.keep.default, (x, guards, seed, low, high, belongs.role))
        pieces = [_call(self.forward, operator.getitem, (kept, i)) for i in range(4)]
        self._size(pieces[2], 0)
        return pieces

    def _restore(
        self,
        incoming: fx.Node,
        physical: Physical,
        sizes: list[Any],
        stored: list[Any],
        arrived: list[fx.Node],
        low: str,
        high: str,
    ) -> None:
        """Replace the tensor ``incoming`` to the backward by its pieces there, decoded where it is first used."""
        value = incoming.meta["val"]
        with self.backward.inserting_before(next(n for n in self.backward.nodes if n in incoming.users)):
            x = _call(self.backward, ops.restore.default, (*arrived, low, high, stored, value.dtype))
            if stored != sizes:
                x = _call(self.backward, aten.view.default, (x, sizes))
            if physical.is_permuted:
                x = _call(self.backward, aten.permute.default, (x, physical.inverse))
            if physical.expanded:
                shape = [-1 if d not in physical.expanded else value.shape[d] for d in range(value.dim())]
                x = _call(self.backward, aten.expand.default, (x, shape))
        incoming.replace_all_uses_with(x)
        self.backward.erase_node(incoming)

    def note(self, guards: list[str], left: list[Mapping[str, Any]]) -> fx.Node:
        """A tensor without elements whose making tells, at run time, that the graph's units run and what it left."""
        last_input = next(reversed(self.inputs.values()))
        with self.forward.inserting_before(last_input.next):
            made = _call(self.forward, ops.note.default, ([self.inputs[g] for g in guards], json.dumps(left)))
        self.arriving_note.meta["val"] = made.meta["val"]
        return made

    def _size(self, node: fx.Node, dim: int) -> Any:
        """The size of a forward tensor, as the backward knows it: a number, or a node there."""
        size = node.meta["val"].shape[dim]
        if isinstance(size, int):
            return size
        key = str(size.node.expr)
        if key not in self.sizes:
            made = self._forward_size(node, dim)
            self.sizes_added.append(made)
            with self.backward.inserting_before(self.arriving_note):
                self.sizes[key] = self._placeholder(made)
        return self.sizes[key]

    def _forward_size(self, node: fx.Node, dim: int) -> Any:
        size = node.meta["val"].shape[dim]
        return size if isinstance(size, int) else _call(self.forward, aten.sym_size.int, (node, dim))

    def _placeholder(self, saved: fx.Node) -> fx.Node:
        arrived = self.backward.placeholder(f"kept_{saved.name}")  # no name of the graph's own: arguments go by it
        arrived.meta["val"] = saved.meta["val"]
        return arrived


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """A new node at the insertion point, with the metadata that later passes need."""
    node = graph.call_function(target, args)
    values = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], args)
    fakes = [v for v in pytree.tree_leaves(values) if isinstance(v, FakeTensor)]
    mode = fakes[0].fake_mode
    with mode:
        node.meta["val"] = target(*values)
    if mode.shape_env is not None:
        bindings = compute_unbacked_bindings(mode.shape_env, node.meta["val"])
        if bindings:
            node.meta["unbacked_bindings"] = bindings
    return node


def install() -> None:
    """Make this pass Inductor's partitioner, if it is not. Inductor's settings belong to a thread and its context, so
    this happens where a graph is traced, and not once."""
    if not isinstance(config.custom_partitioner_fn, Partitioner):
        config.custom_partitioner_fn = Partitioner(config.custom_partitioner_fn)


def remove() -> None:
    """Put the partitioner back that was there before; one that was set over this pass since stays."""
    if isinstance(config.custom_partitioner_fn, Partitioner):
        config.custom_partitioner_fn = config.custom_partitioner_fn.inner
