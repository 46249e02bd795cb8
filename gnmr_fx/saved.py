"""The eager twin of the partition pass: every saved activation in its unit's format, without a graph.

While the model's forward runs in eager mode, autograd hands each tensor that it saves to :meth:`Saver.pack`. That one
asks the autograd graph built so far which unit made the tensor, and stores the memory it lies in, once, however many
operators save it. What :mod:`gnmr_fx.passes.attribute` leaves alone is left alone here: what depends on nothing that is
trained, parameters, statistics, the loss head, small tensors.

Two things are different from a compiled graph, since what comes after a tensor is not known yet: an attention's output
belongs to the unit that made it rather than to the one that reads it, and what no unit made (embeddings) belongs to the
first unit.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from gnmr_fx import kernels
from gnmr_fx.formats import Encoded
from gnmr_fx.physical import Physical
from gnmr_fx.recipe import Format, at_least, parse_format
from gnmr_fx.scope import AllSaved
from gnmr_fx.units import UNIT_KEY, Handle, Kept, Marker, Memo, measure

LOSS_HEAD = Marker.LOSS_HEAD.value
"""Why what comes after an output head is left alone."""
PARAMETER = "a parameter"
_ATTENTION_OPERANDS = 4
"""Tensors that an attention saves before its output: query, key, value and a mask."""
_MAX_NODES = 256
_VIEWS = frozenset({
    "View", "UnsafeView", "Transpose", "Permute", "T", "Expand", "ReshapeAlias", "Unsqueeze", "Squeeze", "Clone",
    "Slice",
    "Select", "Split", "SplitWithSizes", "Alias", "Unbind", "AsStrided",
})  # fmt: skip
_CASTS = frozenset({"ToCopy", "Toc"})
_REDUCTIONS = frozenset(
    {
        "Mean",
        "Sum",
        "Var",
        "VarMean",
        "Std",
        "Amax",
        "Amin",
        "Max",
        "Min",
        "Logsumexp",
        "Rsqrt",
        "LinalgVectorNorm",
    }
)
_LOOKUPS = frozenset({"Embedding", "EmbeddingBag", "Gather", "Index", "IndexSelect", "Expand", "Repeat"})
"""Operations whose result may be much larger than the parameter they read."""
_INFINITE = frozenset({"MaskedFill", "Where"})
_POINTWISE = _CASTS | {"Add", "Sub", "Mul", "Div", "Cat"}
"""Operations that infinities survive."""
_at_least = functools.cache(lambda spec, bits: str(at_least(Format.parse(spec), bits)))


class Packed:
    """What is kept in place of a saved tensor.

    It is stored a few saved tensors later, or when it is asked for: that a tensor is an attention's query or key shows
    only when the attention's output is saved.
    """

    __slots__ = ("_waiting", "dtype", "encoded", "node", "physical", "role", "size", "spec", "stored", "version")
    encoded: Encoded
    spec: str
    stored: tuple[int, ...]
    dtype: torch.dtype
    physical: Physical
    size: tuple[int, ...]

    def __init__(self, x: Tensor, node: Any, role: str, store: Callable[[Packed, Tensor], None]) -> None:
        self.node: Any = node
        self.role = role
        self.version = x._version
        self._waiting: tuple[Tensor, Callable[[Packed, Tensor], None]] | None = (x, store)

    def settle(self) -> None:
        """Store the tensor now, if it is not stored yet."""
        if self._waiting is None:
            return
        x, store = self._waiting
        self._waiting = self.node = None
        _check_unchanged(x, self.version)
        store(self, x)

    def unpack(self) -> Tensor:
        """The tensor as stored, with the strides it had (without its gaps)."""
        self.settle()
        block = kernels.decode(self.encoded, parse_format(self.spec), self.stored, self.dtype)
        return self.physical.view(block, self.size)


class AsItIs:
    """A saved tensor that is kept as it is. Autograd does not look for changes in place where there are hooks."""

    __slots__ = ("tensor", "version")

    def __init__(self, x: Tensor) -> None:
        # An output that is kept with its history would keep itself alive. An encoding is shared while it is alive.
        self.tensor = x if x.grad_fn is None else x.detach()
        self.version = x._version

    def unpack(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: if it was changed since.
        """
        _check_unchanged(self.tensor, self.version)
        return self.tensor


def _check_unchanged(x: Tensor, version: int) -> None:
    if x._version != version:
        raise RuntimeError(
            f"expected a tensor of shape {tuple(x.shape)} that autograd saved to be left as it is until the backward, "
            "found it changed by an in-place operation; use the operation that is not in place, or change the tensor "
            "after the backward"
        )


def block_key(x: Tensor, spec: str) -> tuple[Any, ...]:
    """Identifies the memory of ``x`` in format ``spec``: in whatever shape, unless it has gaps."""
    place = (x.numel(),) if x.is_contiguous() else (x.shape, x.stride())
    return (x.untyped_storage()._cdata, x.storage_offset(), place, x._version, x.dtype, spec)


class Saver:
    """Stores what autograd saves during a model's forward.

    Attributes:
        options: of scope "all".
        first: handle of the unit that what no unit made belongs to.
        active: whether a forward is under way whose saved tensors come here.
        blocks: the memory that is stored already.
        left: the kinds of saved tensors that the last forward kept as they are.
    """

    first: Handle

    def __init__(self, options: AllSaved) -> None:
        self.options = options
        self.active = False
        self.blocks = Memo()
        self.left: dict[Left, None] = {}
        self._waiting: deque[Packed] = deque()

    def run(self, training: bool, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``forward(*args, **kwargs)`` with all that it saves stored; as it is if none is to be saved."""
        if self.active or _top_hooks() is not None or not (training and torch.is_grad_enabled()):
            # Inside checkpointing, or hooks of the user's own, what is saved is their business.
            return forward(*args, **kwargs)
        self.active = True
        self.left.clear()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, unpack):
                made = forward(*args, **kwargs)
            self._settle()
            return made
        finally:
            self._waiting.clear()  # after an exception: each of these is stored when it is asked for, if ever
            self.active = False
            self.blocks.clear()

    def pack(self, x: Tensor) -> Packed | AsItIs:
        """What is kept in place of ``x``."""
        node = x.grad_fn
        if node is None:
            return AsItIs(x)
        if is_attention(node):
            self._tell_queries(node)
        if not self.is_worth_it(x):
            return AsItIs(x.detach().clone() if self._is_piece(x) else x)
        found = nearest_unit(node)
        role = role_of(node, found)
        if found.reason and not (found.reason == LOSS_HEAD and self.options.loss_head):
            if found.reason != PARAMETER:
                self.left[Left(role, tuple(x.shape), x.dtype, found.reason)] = None
            return AsItIs(x)
        handle = found.handle or self.first
        if (handle.high if bool(handle.guard) else handle.low) == "none":
            return AsItIs(x)
        packed = Packed(x.detach(), node, role, functools.partial(self._store, handle))
        self._waiting.append(packed)
        if len(self._waiting) > _ATTENTION_OPERANDS:
            self._waiting.popleft().settle()
        return packed

    def _tell_queries(self, attention: Any) -> None:
        """Of what was saved last, mark what is the query and the key of ``attention``, whose output is saved now."""
        makers = [maker for maker, _ in attention.next_functions[:2]]
        for packed in self._waiting:
            if packed.node in makers:
                packed.role = ("query", "key")[makers.index(packed.node)]

    def _settle(self) -> None:
        while self._waiting:
            self._waiting.popleft().settle()

    def find(self, x: Tensor, spec: str) -> tuple[Encoded, tuple[int, ...]] | None:
        """What the memory of a contiguous ``x`` is stored as, in this forward and in format ``spec``; and its shape."""
        if not self._shares(x):
            return None
        self._settle()
        return self.blocks.stored(block_key(x, spec))

    def remember(self, x: Tensor, spec: str, encoded: Encoded) -> None:
        """The memory of ``x`` is stored as ``encoded``."""
        if self._shares(x):
            self.blocks.put(block_key(x, spec), x, encoded)

    def _shares(self, x: Tensor) -> bool:
        """Whether what ``x`` is stored as may be shared: not inside a checkpointed region, which is run again alone."""
        hooks = _top_hooks() if self.active else None
        return hooks is not None and hooks[0] == self.pack and x.is_contiguous()

    def is_worth_it(self, x: Tensor) -> bool:
        """Whether a tensor is of a kind and size that is stored in another format."""
        return (
            type(x) in (Tensor, FakeTensor)
            and x.is_floating_point()
            and x.dtype.itemsize > 1
            and x.dim() > 0
            and x.shape[-1] > 1
            and x.numel() * x.dtype.itemsize >= self.options.min_bytes
        )

    def _is_piece(self, x: Tensor) -> bool:
        """Whether ``x`` would keep memory alive that is not small, and is a small part of it; not of a parameter."""
        small = type(x) is Tensor and x.numel() * x.dtype.itemsize < self.options.min_bytes
        return (
            small
            and x.untyped_storage().nbytes() >= self.options.min_bytes
            and nearest_unit(x.grad_fn).reason != PARAMETER
        )

    def _store(self, handle: Handle, packed: Packed, x: Tensor) -> None:
        """Store ``x`` in the format of the unit of ``handle`` that is in force."""
        bits = self.options.attention_bits if packed.role in ("query", "key") else 0
        low, high = (_at_least(spec, bits) for spec in (handle.low, handle.high))
        spec = high if bool(handle.guard) else low
        physical = Physical.of(x, parse_format(low))
        block = physical.block(x)
        measure(handle.guard, block, low)
        key = block_key(block, spec)
        found = self.blocks.stored(key)
        if found is None:
            handle.observation.add(Kept(tuple(block.shape), x.dtype, packed.role, low))
            found = kernels.encode(block, parse_format(spec), handle.seed), tuple(block.shape)
            if block.untyped_storage()._cdata == x.untyped_storage()._cdata:  # else a copy, as it had gaps
                self.blocks.put(key, block, found[0])
        packed.encoded, packed.stored = found
        packed.spec, packed.dtype, packed.physical, packed.size = spec, x.dtype, physical, tuple(x.shape)


def _top_hooks() -> tuple[Any, Any] | None:
    """The saved-tensor hooks that are in force, if any are."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def unpack(kept: Packed | AsItIs) -> Tensor:
    """The tensor that :meth:`Saver.pack` was given, as stored."""
    return kept.unpack()


class Left(NamedTuple):
    """A saved tensor that is kept as it is: what it is, its shape and dtype, and why it is."""

    role: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    reason: str


class Found(NamedTuple):
    """Where a tensor comes from.

    Attributes:
        handle: of the unit that made it, if any did.
        distance: operations from there that compute something.
        reason: why it is not to be stored in another format; ``""`` if nothing speaks against that.
    """

    handle: Handle | None = None
    distance: int = 0
    reason: str = ""


def name_of(node: Any) -> str:
    """``Mul`` of ``MulBackward0``."""
    return str(type(node).__name__).partition("Backward")[0]


def is_attention(node: Any) -> bool:
    """Whether a fused attention made the tensor: PyTorch's own, or one of a library."""
    name = name_of(node).lower()
    return "attention" in name or "attn" in name


def role_of(node: Any, found: Found) -> str:
    """What the tensor that ``node`` made is to the unit it belongs to."""
    if found.handle is not None and found.distance == 0:
        return "output"
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name_of(node)).lower()
    return "attention output" if is_attention(node) else name


def nearest_unit(start: Any) -> Found:
    """The unit that made a tensor: the nearest one upstream of its node in the autograd graph."""
    queue, seen = deque([(0, start, True)]), {start}
    alone = True  # nothing but views and casts so far
    computed = True  # from parameters alone, so far
    while queue and len(seen) < _MAX_NODES:
        distance, node, pointwise = queue.popleft()
        unit = node.metadata.get(UNIT_KEY)
        if unit is not None:
            return Found(reason=LOSS_HEAD) if unit is Marker.LOSS_HEAD else Found(unit, distance)
        name = name_of(node)
        if node is start and name in _REDUCTIONS:
            return Found(reason="statistics of a softmax or a norm")
        if pointwise and name in _INFINITE:
            return Found(reason="may hold infinities")
        following = [n for n, _ in node.next_functions if n is not None]
        if alone and not following:
            return Found(reason=PARAMETER)
        computed = computed and name not in _LOOKUPS and _leads_to_parameters(node, following)
        free = name in _VIEWS
        alone = alone and (free or name in _CASTS) and len(following) == 1
        further = distance + (0 if free else 1)
        goes_on = pointwise and (free or name in _POINTWISE)
        for n in following:
            if n not in seen:
                seen.add(n)
                (queue.appendleft if free else queue.append)((further, n, goes_on))
    return Found(reason=PARAMETER) if computed and not queue else Found()


def _leads_to_parameters(node: Any, following: list[Any]) -> bool:
    """Whether all that ``node`` was made of has a history, or is a parameter."""
    if not following:
        return isinstance(getattr(node, "variable", None), nn.Parameter)
    return len(following) == len(node.next_functions)
