"""The guarded dual-path projection.

:func:`guarded_projection` computes exactly what the operator it replaces computes, and keeps its activation for the
weight gradient in the low-cost format, or in the recovery format where the guard is set.

Under torch.compile one graph serves every guard state, with real memory savings:

* ``save_low(x)`` is always made, has a static size and depends on ``x`` alone, so operators that read one tensor share
  it (common-subexpression elimination);
* ``save_high(x, guard)`` has as many rows as the guard says at run time: none, or all;
* ``restore(low, high, after)`` in the backward decodes whichever is to be used. It takes the output gradient as
  ``after``, and does not read it: without it, the partitioner would decode in the forward and save the result.

They are opaque operators: traceable packing would let the partitioner save the unpacked activation again. In eager
mode the guard is read in Python and only the one that is needed is made.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._library.fake_impl import allocate_size

from gnmr_fx import kernels
from gnmr_fx.distributed import Layout, layout_of, local_value
from gnmr_fx.errors import DoubleBackwardError, UnsupportedTransformError
from gnmr_fx.formats import Encoded, empty_encoded
from gnmr_fx.projections import KINDS
from gnmr_fx.recipe import Format
from gnmr_fx.units import Handle, announce, observe

NAMESPACE = "gnmr_fx"

_parse = functools.cache(Format.parse)

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define("save_low(Tensor x, Tensor? seed, str fmt) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    "save_high(Tensor x, Tensor guard, Tensor? seed, str fmt) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.define(
    "restore(Tensor low_payload, Tensor low_scales, Tensor high_payload, Tensor high_scales, "
    "str low, str high, SymInt[] size, ScalarType dtype, Tensor? after=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _save_low(x: Tensor, seed: Tensor | None, fmt: str) -> tuple[Tensor, Tensor]:
    return kernels.encode(x, _parse(fmt), seed)


def _save_high(x: Tensor, guard: Tensor, seed: Tensor | None, fmt: str) -> tuple[Tensor, Tensor]:
    observe(guard, x.shape, x.dtype)
    parsed = _parse(fmt)
    return kernels.encode(x, parsed, seed) if guard.item() else empty_encoded(x, parsed, 0)


def _restore(
    low_payload: Tensor,
    low_scales: Tensor,
    high_payload: Tensor,
    high_scales: Tensor,
    low: str,
    high: str,
    size: list[int],
    dtype: torch.dtype,
    after: Tensor | None = None,
) -> Tensor:
    if high_payload.size(0):
        return kernels.decode(Encoded(high_payload, high_scales), _parse(high), size, dtype)
    return kernels.decode(Encoded(low_payload, low_scales), _parse(low), size, dtype)


@torch.library.register_fake(f"{NAMESPACE}::save_low", lib=_library)
def _save_low_fake(x: Tensor, seed: Tensor | None, fmt: str) -> tuple[Tensor, Tensor]:
    return empty_encoded(x, _parse(fmt))


@torch.library.register_fake(f"{NAMESPACE}::save_high", lib=_library)
def _save_high_fake(x: Tensor, guard: Tensor, seed: Tensor | None, fmt: str) -> tuple[Tensor, Tensor]:
    return empty_encoded(x, _parse(fmt), _dynamic_size())


def _dynamic_size() -> Any:
    """A size known only at run time.

    What ``torch.library.get_ctx().new_dynamic_size(min=0)`` makes, save that Dynamo's
    ``capture_dynamic_output_shape_ops`` (off by default) does not apply: with it, every guard would break the graph.
    """
    context = torch.library.get_ctx()
    if context._shape_env is None:
        return context.new_dynamic_size(min=0)
    return allocate_size(context._shape_env, 0, None)


@torch.library.register_fake(f"{NAMESPACE}::restore", lib=_library)
def _restore_fake(
    low_payload: Tensor,
    low_scales: Tensor,
    high_payload: Tensor,
    high_scales: Tensor,
    low: str,
    high: str,
    size: list[int],
    dtype: torch.dtype,
    after: Tensor | None = None,
) -> Tensor:
    return low_payload.new_empty(size, dtype=dtype)


for _name, _implementation in (("save_low", _save_low), ("save_high", _save_high), ("restore", _restore)):
    # Disabled, or Dynamo would trace into what these call after a graph break of the model. Not by
    # torch.compiler.disable: that imports Dynamo at once.
    _library.impl(_name, _disable_dynamo(_implementation), "CompositeExplicitAutograd")


class _Guarded(torch.autograd.Function):
    """A projection that keeps the encodings of its activation, not the activation."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        offs: Tensor | None,
        low_payload: Tensor,
        low_scales: Tensor,
        high_payload: Tensor,
        high_scales: Tensor,
        kind: str,
        extra: str,
        low: str,
        high: str,
        layout: Layout | None,
    ) -> Tensor:
        saved = (w, low_payload, low_scales, high_payload, high_scales)
        ctx.save_for_backward(*saved) if offs is None else ctx.save_for_backward(*saved, offs)
        ctx.kind, ctx.extra, ctx.low, ctx.high = kind, extra, low, high
        ctx.x_shape, ctx.x_dtype, ctx.layout = x.shape, x.dtype, layout
        ctx.b_shape = None if b is None else b.shape
        return KINDS[kind].forward(x, w, b, offs, extra)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            raise DoubleBackwardError(
                "expected a first-order backward, found create_graph=True through an operator guarded by gnmr-fx, "
                "whose activation is stored quantized, so second derivatives would be wrong; call "
                "gnmr_fx.uninstrument(model) or exclude these operators (exclude=...) for this computation"
            )
        w, low_payload, low_scales, high_payload, high_scales, *rest = ctx.saved_tensors
        offs = rest[0] if rest else None
        projection = KINDS[ctx.kind]
        grad_x = grad_w = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = projection.grad_input(g, w, offs, ctx.extra, ctx.x_shape)
        if ctx.needs_input_grad[1]:
            stored = ctx.x_shape if ctx.layout is None else ctx.layout.local_shape
            x = torch.ops.gnmr_fx.restore(
                low_payload,
                low_scales,
                high_payload,
                high_scales,
                ctx.low,
                ctx.high,
                stored_shape(stored),
                ctx.x_dtype,
                (g if ctx.layout is None else local_value(g)) if torch.compiler.is_compiling() else None,
            ).view(stored)
            x = x if ctx.layout is None else ctx.layout.whole(x)
            grad_w = projection.grad_weight(g, x, offs, ctx.extra, w.shape)
        if ctx.b_shape is not None and ctx.needs_input_grad[2]:
            grad_b = g.sum_to_size(ctx.b_shape)
        return grad_x, grad_w, grad_b, None, None, None, None, None, None, None, None, None, None


def stock_projection(kind: str, extra: str, x: Tensor, w: Tensor, b: Tensor | None, offs: Tensor | None) -> Tensor:
    """The operator as PyTorch has it."""
    if kind == "linear":  # the public function, which tensor subclasses override
        return F.linear(x, w, b)
    return KINDS[kind].forward(x, w, b, offs, extra)


def stored_shape(shape: Any) -> list[Any]:
    """The shape that an activation of ``shape`` is stored in: columns as rows, or each element had its own scale."""
    return [*shape[:-2], 1, shape[-2]] if len(shape) > 1 and shape[-1] == 1 else list(shape)


def is_guardable(x: Tensor, w: Tensor, training: bool) -> bool:
    """Whether an activation of this call would be saved, and can be stored in another format."""
    return training and torch.is_grad_enabled() and w.requires_grad and x.is_floating_point()


def guarded_projection(
    kind: str,
    extra: str,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    offs: Tensor | None,
    handle: Handle,
    training: bool,
) -> Tensor:
    """A projection on its low-cost or its recovery path.

    The output is bit for bit that of the operator it stands for. The input gradient does not depend on the path (for
    linear it is bit-equal too, elsewhere up to the order of sums). The weight gradient is that of the activation as the
    path in force stores it.

    Args:
        kind: key of :data:`gnmr_fx.projections.KINDS`.
        extra: static part of the call, the equation of an einsum.
        x: activation, floating point, any shape the operator takes.
        w: weight, a parameter or a view or slice of one.
        b: bias, where the operator takes one.
        offs: int32 [E], row offsets of a grouped GEMM.
        handle: guard, formats and bookkeeping of the unit.
        training: where False (and under no_grad, and for a frozen weight) nothing of ``x`` is kept and the stock
            operator runs.

    Raises:
        DoubleBackwardError: in a backward with ``create_graph=True``.
        UnsupportedTransformError: under a ``torch.func`` transform.
    """
    if not is_guardable(x, w, training):
        return stock_projection(kind, extra, x, w, b, offs)
    layout = layout_of(x)
    source, eager, active = local_value(x), not torch.compiler.is_compiling(), False
    cast = KINDS[kind].autocast and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    dtype = torch.get_autocast_dtype(x.device.type) if cast else x.dtype
    if eager:
        if torch._C._are_functorch_transforms_active():
            raise UnsupportedTransformError(
                "expected plain autograd, found a torch.func transform (grad, vmap, jvp, ...) over an operator guarded "
                "by gnmr-fx, whose packed activation it cannot see through; call model.eval() or "
                "gnmr_fx.uninstrument(model) for this computation"
            )
        handle.observation.add(torch.Size(stored_shape(source.shape)), dtype)
        announce(handle.guard)
        active = bool(handle.guard)
        if (handle.high if active else handle.low) == "none":  # before the cast, which autocast makes once per weight
            return stock_projection(kind, extra, x, w, b, offs)
    if cast:
        x, w, b = x.to(dtype), w.to(dtype), None if b is None else b.to(dtype)
    saved = x.detach() if layout is None else local_value(x.detach())
    saved = saved.reshape(stored_shape(saved.shape))
    if eager:
        low, high = _encode_eager(source, saved, handle, active)
    else:
        low = torch.ops.gnmr_fx.save_low(saved, handle.seed, handle.low)
        high = torch.ops.gnmr_fx.save_high(saved, handle.guard, handle.seed, handle.high)
    return _Guarded.apply(x, w, b, offs, *low, *high, kind, extra, handle.low, handle.high, layout)


def _encode_eager(source: Tensor, x: Tensor, handle: Handle, active: bool) -> tuple[Encoded, Encoded]:
    """``(low, high)``, of which only the one in force holds rows. Shared with operators that read ``source`` too."""
    spec = handle.high if active else handle.low
    fmt = _parse(spec)
    key = handle.memo.key(source, x.dtype, spec)
    encoded = handle.memo.get(key)
    if encoded is None:
        encoded = kernels.encode(x, fmt, handle.seed)
        handle.memo.put(key, source, encoded)
    other = empty_encoded(x, _parse(handle.low if active else handle.high), 0)
    return (other, encoded) if active else (encoded, other)
