"""Whom the saved activations of a joint graph belong to, and which of them have to stay as they are.

Works on the joint forward-backward graph that AOTAutograd hands to the partitioner. :func:`find_units` reads which
units it holds, :func:`unfold` takes their own packing out, so that the graph is that of the stock model again, and
:class:`Attribution` answers for any forward tensor: which units' guards decide over it, or why it is left alone.

A tensor that units read belongs to them all (the guards are or-ed). Any other belongs to the nearest unit it was made
by, counted in operations that compute something; failing that, to the nearest one that it flows into.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from gnmr_fx.errors import InvariantError
from gnmr_fx.ops import HEAD_KEY
from gnmr_fx.physical import hint
from gnmr_fx.recipe import Format
from gnmr_fx.scope import AllSaved

ops = torch.ops.gnmr_fx
_VIEWS = frozenset({
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "squeeze", "unsqueeze", "expand", "detach", "alias",
    "clone", "flatten", "unflatten",
})  # fmt: skip
"""Operations that change the shape of a tensor and keep all its values."""
_SAME_MEMORY = _VIEWS - {"reshape", "expand", "clone", "flatten"}
"""Those of them that neither copy nor repeat."""
_PARTS = frozenset({"slice", "select", "split", "split_with_sizes", "chunk", "unbind"})
"""Operations that take a part of a tensor's memory."""
_SLICES = frozenset(
    {"slice", "select", "split", "split_with_sizes", "chunk", "unbind", "getitem", "index", "index_select"}
)
_SPREADING = frozenset({"expand", "repeat", "embedding", "index", "index_select", "gather"})
"""Operations whose result may be much larger than the parameter they read."""
_CASTS = frozenset({"convert_element_type", "_to_copy", "to"})
_GEMMS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "grouped_mm_fallback", "matmul", "linear", "_scaled_mm"}
)
_SQUASHING = frozenset(
    {"exp", "exp2", "sigmoid", "tanh", "erf", "softplus", "reciprocal", "isinf", "isnan", "nan_to_num"}
)
"""Pointwise operations whose result is finite for an infinite operand of one sign at least."""
PARAMETER = "a parameter or a buffer"
PACKED = "stored by a unit of another model"
SMALL = "small"
_NOT_FLOAT = "not floating point numbers of 16 bits or more"
_LARGE = 1e30
"""Constants from here on stand for infinity: a mask holds the lowest value of its dtype instead of -inf."""


@dataclass(frozen=True)
class JointUnit:
    """A unit in a joint graph.

    Attributes:
        index: its place among the units of the graph.
        packing: the operator that stores its input in its recovery format.
        guard, seed: the placeholders of its guard and of the seed for stochastic rounding (None without one).
        low, high: its formats.
        input, weight: the activation it reads, as it would store it, and its weight.
        scope: options of the model it is part of.
    """

    index: int
    packing: fx.Node
    guard: fx.Node
    seed: fx.Node | None
    low: Format
    high: Format
    input: fx.Node
    weight: fx.Node
    scope: AllSaved


@dataclass(frozen=True)
class Belongs:
    """``units`` whose guards decide over a tensor, the most important one first, and what it is to that one."""

    units: tuple[JointUnit, ...]
    role: str


@dataclass(frozen=True)
class Place:
    """What is to happen to one forward tensor, if it is saved.

    Attributes:
        reason: why it is kept as it is; ``""`` if it is stored in its units' formats.
        belongs: the units it belongs to.
        bits: the fewest bits it is to be stored in.
    """

    reason: str = ""
    belongs: Belongs | None = None
    bits: int = 0

    def describe(self, node: fx.Node) -> dict[str, Any]:
        """A line for the table about a saved tensor that is kept as it is."""
        value = tensor_of(node)
        assert value is not None
        return {
            "role": self.belongs.role if self.belongs else _made_by(node),
            "unit": self.belongs.units[0].index if self.belongs else None,
            "shape": [hint(size) for size in value.shape],
            "dtype": str(value.dtype).removeprefix("torch."),
            "bytes": bytes_of(value),
            "reason": self.reason,
        }


def find_units(graph: fx.Graph) -> list[JointUnit]:
    """The units of models in scope "all" that the graph holds, in the order they run."""
    units: list[JointUnit] = []
    for node in graph.find_nodes(op="call_function", target=ops.save_high.default):
        x, guard, seed, high, weight, scope, low = _arguments(node, ("", None, None, "", None, "", ""))
        if scope:
            units.append(
                JointUnit(
                    len(units),
                    node,
                    guard,
                    seed,
                    Format.parse(low),
                    Format.parse(high),
                    x,
                    weight,
                    AllSaved.parse(scope),
                )
            )
    return units


def _arguments(node: fx.Node, defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return tuple(given.get(name, default) for name, default in zip(names, defaults, strict=True))


def unfold(graph: fx.Graph, units: Iterable[JointUnit]) -> None:
    """Take the packing of ``units`` out of the graph, in place: their backward reads the activation itself."""
    inputs, packings = {unit.input for unit in units}, {unit.packing for unit in units}
    for node in list(graph.find_nodes(op="call_function", target=ops.restore.default)):
        low, high = node.args[0].args[0], node.args[2].args[0]  # through getitem
        if low.target is not ops.save_low.default or high.target is not ops.save_high.default:
            raise InvariantError(
                f"expected a restore of payloads of save_low and save_high, found {low} and {high}; please report this"
            )
        if high in packings:
            _allow_gaps(node)  # what was decoded lay in order; the activation itself may not
            node.replace_all_uses_with(low.args[0])
            graph.erase_node(node)
    lows = [n for n in graph.find_nodes(op="call_function", target=ops.save_low.default) if n.args[0] in inputs]
    for node in [*packings, *lows]:
        made = _downstream(node)  # sizes, and assertions on them, which nothing else removes
        if not any(n.target is ops.restore.default for n in made):  # else a unit of another model reads it as well
            for dead in reversed(made):
                graph.erase_node(dead)


def _allow_gaps(node: fx.Node) -> None:
    """Turn the views of a tensor, and views of those, into reshapes, which any strides will do for."""
    for user in node.users:
        if op_name(user) in _VIEWS:
            if user.target is torch.ops.aten.view.default:
                user.target = torch.ops.aten.reshape.default
            _allow_gaps(user)


def _downstream(node: fx.Node) -> list[fx.Node]:
    """``node`` and all that depends on it, in the order of the graph."""
    found = {node: None}
    for candidate in _following(node):
        if any(n in found for n in candidate.all_input_nodes):
            found[candidate] = None
    return list(found)


def _following(node: fx.Node) -> Iterator[fx.Node]:
    current = node.next
    while current.op != "root":
        yield current
        current = current.next


def op_name(node: fx.Node) -> str:
    """``mm`` of ``aten.mm.default``."""
    if node.op != "call_function":
        return ""
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else getattr(node.target, "__name__", str(node.target))


def _made_by(node: fx.Node) -> str:
    """The operator that made a tensor, as text."""
    source = node.args[0] if node.target is operator.getitem else node
    assert isinstance(source, fx.Node)
    return op_name(source).strip("_") or "graph input"


def root_of(node: fx.Node, through: frozenset[str] = _VIEWS) -> fx.Node:
    """The tensor that ``node`` is another shape of."""
    while op_name(node) in through and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def memory_of(node: fx.Node) -> fx.Node:
    """The tensor whose memory, all of it, ``node`` is another view of."""
    while op_name(node) in _SAME_MEMORY or (op_name(node) == "reshape" and _is_contiguous(node.all_input_nodes[0])):
        node = node.all_input_nodes[0]
    return node


def is_piece(node: fx.Node, size: int) -> bool:
    """Whether ``node``, as it is, would keep alive memory of ``size`` bytes or more, that it is a small part of."""
    whole = node
    while True:
        source = whole.args[0] if whole.target is operator.getitem else whole
        assert isinstance(source, fx.Node)
        shares = op_name(source) in _SAME_MEMORY | _PARTS or (op_name(source) == "reshape" and _is_view(source))
        if not shares:
            break
        whole = source.all_input_nodes[0]
    value, memory = tensor_of(node), tensor_of(whole)
    return value is not None and memory is not None and bytes_of(value) < size <= bytes_of(memory)


def _is_view(reshape: fx.Node) -> bool:
    """Whether a reshape shares the memory of its operand, by the sizes first seen."""
    operand, value = tensor_of(reshape.all_input_nodes[0]), tensor_of(reshape)
    if operand is None or value is None:
        return False
    sizes, strides = ([hint(n) for n in numbers] for numbers in (operand.shape, operand.stride()))
    laid = torch.empty_strided(sizes, strides, device="meta")
    made = laid.reshape([hint(n) for n in value.shape])
    return bool(made.untyped_storage()._cdata == laid.untyped_storage()._cdata)


def _is_contiguous(node: fx.Node) -> bool:
    value, expected = tensor_of(node), 1
    if value is None:
        return False
    for size, stride in zip(map(hint, reversed(value.shape)), map(hint, reversed(value.stride())), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def tensor_of(node: fx.Node) -> Tensor | None:
    """The fake tensor that a node makes, if it makes one."""
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def bytes_of(value: Tensor) -> int:
    """Bytes of a fake tensor, by the sizes first seen."""
    return math.prod(hint(size) for size in value.shape) * value.dtype.itemsize


def is_attention(node: fx.Node) -> bool:
    """Whether the node is a fused attention operator's forward or backward."""
    name = op_name(node)
    return "attention" in name or "sdpa" in name


class Attribution:
    """Answers for the forward tensors of one unfolded joint graph.

    Args:
        graph: the joint graph.
        units: as :func:`find_units` found them.
        user_outputs: nodes that the forward returns to its caller.
        static: placeholders that are parameters or buffers.
        trained: placeholders whose gradient is computed.
    """

    def __init__(
        self,
        graph: fx.Graph,
        units: list[JointUnit],
        user_outputs: Iterable[fx.Node],
        static: Iterable[fx.Node],
        trained: Iterable[fx.Node],
    ) -> None:
        self.graph, self.units = graph, units
        self.static = frozenset(static)
        self.returned = {root_of(node) for node in user_outputs}
        self.readers: dict[fx.Node, list[JointUnit]] = defaultdict(list)
        for unit in units:
            self.readers[root_of(unit.input)].append(unit)
        self.producers = self._producers(graph)
        self.backward = _closure(
            (n for n in graph.find_nodes(op="placeholder") if n.name.startswith("tangents")), lambda node: True
        )
        self.weights = self._weights(graph)
        self.trained = _closure(trained, lambda node: True)
        self.infinite = _closure(filter(_is_infinite, graph.nodes), _passes_infinity)
        self.statistics = _statistics(graph)
        self.loss_head = self._loss_head(graph)
        self.roles = _attention_roles(graph)

    @classmethod
    def of_joint(
        cls, graph: fx.Graph, units: list[JointUnit], num_outputs: int, static_indices: Iterable[int]
    ) -> Attribution:
        """Of a joint graph whose first ``num_outputs`` outputs are the forward's, the others the inputs' gradients."""
        placeholders = [n for n in graph.find_nodes(op="placeholder") if not n.name.startswith("tangents")]
        outputs = pytree.arg_tree_leaves(*graph.output_node().args)
        gradients = outputs[num_outputs:]
        trained = [n for n, gradient in zip(placeholders, gradients, strict=False) if isinstance(gradient, fx.Node)]
        returned = [n for n in outputs[:num_outputs] if isinstance(n, fx.Node)]
        return cls(graph, units, returned, [placeholders[i] for i in static_indices], trained)

    def places(self) -> dict[str, Place]:
        """What is to happen to each forward tensor, by name."""
        return {
            node.name: self.place(node)
            for node in self.graph.nodes
            if node not in self.backward and tensor_of(node) is not None
        }

    def place(self, node: fx.Node) -> Place:
        """What is to happen to ``node`` if it is saved."""
        reason = self.reason_against(node)
        if reason in (PACKED, PARAMETER, _NOT_FLOAT):
            return Place(reason)
        belongs = self.belongs(node)
        if belongs is None:
            return Place(reason or "connected to no unit")
        options = belongs.units[0].scope
        return Place(reason or self.reason_in(node, options), belongs, self.fewest_bits(node, options))

    def _producers(self, graph: fx.Graph) -> dict[fx.Node, JointUnit]:
        """The nodes that multiply a unit's input with its weight."""
        by_weight: dict[fx.Node, list[JointUnit]] = defaultdict(list)
        for unit in self.units:
            by_weight[root_of(unit.weight)].append(unit)
        found = {}
        for weight, units in by_weight.items():
            aliases = _closure([weight], lambda node: op_name(node) in _VIEWS | _SLICES | _CASTS)
            for user in {user for alias in aliases for user in alias.users} - aliases:
                sources = {root_of(node) for node in user.all_input_nodes}
                for unit in units:
                    if root_of(unit.input) in sources:
                        found[user] = unit
        return found

    def _weights(self, graph: fx.Graph) -> set[fx.Node]:
        """What units multiply with, and whatever else is computed from parameters alone."""
        data = [n for n in graph.find_nodes(op="placeholder") if n not in self.static]
        spread = [n for n in graph.nodes if op_name(n) in _SPREADING]
        from_data = _closure([*data, *self.producers, *spread, *self.readers], lambda node: True)
        computed = {n for n in graph.nodes if n.op == "call_function" and n not in from_data}
        multiplied = {root_of(unit.weight, through) for unit in self.units for through in (_VIEWS, _VIEWS | _CASTS)}
        aliases = _closure(multiplied - set(self.readers), lambda node: op_name(node) in _VIEWS | _CASTS)
        return computed | aliases

    def _nearest(
        self,
        start: fx.Node,
        neighbours: Callable[[fx.Node], Iterable[fx.Node]],
        unit_at: Callable[[fx.Node], JointUnit | None],
    ) -> JointUnit | None:
        """The unit at the node nearest to ``start``; operations that only reshape count nothing (0-1 breadth-first)."""
        queue: deque[tuple[int, fx.Node]] = deque([(0, start)])
        best: dict[fx.Node, int] = {start: 0}
        while queue:
            distance, node = queue.popleft()
            if distance > best[node]:
                continue
            unit = unit_at(node)
            if unit is not None:
                return unit
            for neighbour in neighbours(node):
                if neighbour in self.backward or neighbour.op == "output":
                    continue
                free = op_name(node) in _VIEWS | _SLICES
                further = distance + (0 if free else 1)
                if further < best.get(neighbour, 1 << 30):
                    best[neighbour] = further
                    (queue.appendleft if free else queue.append)((further, neighbour))
        return None

    def _loss_head(self, graph: fx.Graph) -> set[fx.Node]:
        """What comes after the GEMM of an output head, where no unit follows."""
        before = _upstream(set(self.readers) | set(self.producers))
        heads = [n for n in graph.nodes if _is_head(n) and op_name(n) in _GEMMS and n not in before | self.backward]
        return _closure(heads, lambda node: True)

    def reason_against(self, node: fx.Node) -> str:
        """Why a saved tensor is to stay as it is, whatever the options are; ``""`` if nothing speaks against storing it
        in another format."""
        value = tensor_of(node)
        root = root_of(node)
        if _is_packed(root):
            return PACKED
        if value is None or type(value).__name__ != "FakeTensor":
            return "not a plain tensor"
        if not value.dtype.is_floating_point or value.dtype.itemsize < 2:
            return _NOT_FLOAT
        if root in self.weights or root_of(node, _VIEWS | _CASTS) in self.static:
            return PARAMETER
        if root in self.returned:
            return "returned to the caller"
        if node not in self.trained and (root not in self.readers or root.op == "placeholder"):
            return "depends on nothing that is trained"
        if node in self.infinite:
            return "may hold infinities"
        if root in self.statistics and root not in self.readers:
            return "statistics of a softmax or a norm"
        return ""

    def reason_in(self, node: fx.Node, options: AllSaved) -> str:
        """Why a saved tensor of a unit with these options is to stay as it is; ``""`` if nothing speaks against it."""
        value = tensor_of(node)
        assert value is not None
        if node in self.loss_head and not options.loss_head:
            return "loss head"
        if value.dim() == 0 or bytes_of(value) < options.min_bytes:
            return SMALL
        return ""

    def belongs(self, node: fx.Node) -> Belongs | None:
        """The units that a forward tensor belongs to; None where no unit is connected to it."""
        root = root_of(node)
        if root in self.readers:
            return Belongs(tuple(self.readers[root]), "input")
        role = self.roles.get(root, "")
        made_by = self._nearest(root, lambda n: n.all_input_nodes, self.producers.get)
        if made_by is not None:
            return Belongs((made_by,), role or ("output" if root in self.producers else _made_by(root)))
        read_by = self._nearest(root, lambda n: n.users, lambda n: self.readers.get(n, [None])[0])
        return None if read_by is None else Belongs((read_by,), role or _made_by(root))

    def fewest_bits(self, node: fx.Node, options: AllSaved) -> int:
        """What it takes: as the query or key of an attention more than other tensors (see AllSaved)."""
        return options.attention_bits if self.roles.get(root_of(node)) in ("query", "key") else 0


def _closure(start: Iterable[fx.Node], passes: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """``start`` and all that depends on it through nodes that ``passes``."""
    found = set(start)
    todo = list(found)
    while todo:
        for user in todo.pop().users:
            if user not in found and user.op == "call_function" and passes(user):
                found.add(user)
                todo.append(user)
    return found


def _upstream(start: Iterable[fx.Node]) -> set[fx.Node]:
    found = set(start)
    todo = list(found)
    while todo:
        for node in todo.pop().all_input_nodes:
            if node not in found:
                found.add(node)
                todo.append(node)
    return found


def _is_head(node: fx.Node) -> bool:
    """Whether an output head's code made the node, in the forward or, as autograd copies it, in the backward."""
    return HEAD_KEY in (node.meta.get("custom") or {})


def _is_packed(node: fx.Node) -> bool:
    """Whether a node is part of what a packing operator made."""
    if node.target is not operator.getitem:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source.target in (ops.save_low.default, ops.save_high.default)


def _is_infinite(node: fx.Node) -> bool:
    """Whether a node brings a constant that is, or stands for, infinity into the graph."""
    if node.op != "call_function":
        return False
    numbers = (a for a in (*node.args, *node.kwargs.values()) if isinstance(a, float | int) and not isinstance(a, bool))
    name = op_name(node)
    if name in ("slice", "clamp", "clamp_min", "clamp_max", "hardtanh"):
        return False
    value = tensor_of(node)
    return value is not None and value.dtype.is_floating_point and any(abs(number) > _LARGE for number in numbers)


def _passes_infinity(node: fx.Node) -> bool:
    name = op_name(node)
    if name in _VIEWS | _SLICES | _CASTS | {"cat", "index_put", "scatter", "where"}:
        return True
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and name not in _SQUASHING


def _statistics(graph: fx.Graph) -> set[fx.Node]:
    """Results of reductions, and what is computed pointwise from nothing else."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        name, tags = op_name(node), getattr(node.target, "tags", ())
        if node.target is operator.getitem:
            if node.args[0] in found or _is_statistic_output(node):
                found.add(node)
        elif torch.Tag.reduction in tags or name in ("var_mean", "logsumexp", "linalg_vector_norm"):
            found.add(node)
        elif name in _VIEWS | _CASTS or torch.Tag.pointwise in tags:
            sources = [n for n in node.all_input_nodes if tensor_of(n) is not None]
            if sources and all(n in found for n in sources):
                found.add(node)
    return found


def _is_statistic_output(node: fx.Node) -> bool:
    """Whether a getitem takes a further output of an attention or a norm."""
    source, index = node.args
    assert isinstance(source, fx.Node)
    return bool(index) and (is_attention(source) or "norm" in op_name(source))


def _attention_roles(graph: fx.Graph) -> dict[fx.Node, str]:
    """Which tensors are an attention's query, key, value and output."""
    roles: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not is_attention(node) or "backward" in op_name(node):
            continue
        schema = getattr(node.target, "_schema", None)
        names = [a.name for a in schema.arguments] if schema else ["query", "key", "value"]
        for name, value in zip(names, node.args, strict=False):
            if name in ("query", "key", "value") and isinstance(value, fx.Node):
                roles.setdefault(root_of(value), name)
        outputs = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0] or [node]
        roles.update(dict.fromkeys(outputs, "attention output"))
    return roles


__all__ = [
    "PACKED", "PARAMETER", "SMALL", "Attribution", "Belongs", "JointUnit", "Place", "bytes_of", "find_units",
    "is_attention", "is_piece", "memory_of", "op_name", "root_of", "tensor_of", "unfold",
]  # fmt: skip
