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

import importlib
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._library.fake_impl import allocate_size
from torch.fx.traceback import annotate

from gnmr_fx import gemm, kernels
from gnmr_fx.distributed import Layout, layout_of, local_value
from gnmr_fx.errors import DoubleBackwardError, UnsupportedBackendError, UnsupportedTransformError
from gnmr_fx.formats import Encoded, empty_encoded
from gnmr_fx.frozen_ops import frozen_projection
from gnmr_fx.projections import KINDS, autocast, no_view
from gnmr_fx.recipe import parse_format
from gnmr_fx.scope import AllSaved
from gnmr_fx.units import Handle, Kept, Marker, announce, mark, measure, observe, observe_scope, stores

NAMESPACE = "gnmr_fx"
HEAD_KEY = "gnmr_fx_loss_head"
"""Graph nodes of an output head have this key in ``meta["custom"]``."""

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define("save_low(Tensor x, Tensor? seed, str fmt) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    "save_high(Tensor x, Tensor guard, Tensor? seed, str fmt, Tensor? weight=None, str scope='', str low='') "
    "-> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "keep(Tensor x, Tensor[] guards, Tensor? seed, str low, str high, str role) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define("copy(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.define("note(Tensor[] guards, str left) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    "restore(Tensor low_payload, Tensor low_scales, Tensor high_payload, Tensor high_scales, "
    "str low, str high, SymInt[] size, ScalarType dtype, Tensor? after=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _save_low(x: Tensor, seed: Tensor | None, fmt: str) -> tuple[Tensor, Tensor]:
    return kernels.encode(x, parse_format(fmt), seed)


def _save_high(
    x: Tensor,
    guard: Tensor,
    seed: Tensor | None,
    fmt: str,
    weight: Tensor | None = None,
    scope: str = "",
    low: str = "",
) -> tuple[Tensor, Tensor]:
    if scope:
        _without_partition_pass(guard, AllSaved.parse(scope))
    stores(guard, Kept(tuple(x.shape), x.dtype), x, low)
    parsed = parse_format(fmt)
    needed = guard.item() and low != fmt  # a recipe may have the same format twice
    return kernels.encode(x, parsed, seed) if needed else empty_encoded(x, parsed, 0)


def _without_partition_pass(guard: Tensor, scope: AllSaved) -> None:
    """A graph of a model in scope "all" runs as it was traced: no partition pass has seen it."""
    if scope.unsupported_backend == "raise":
        raise UnsupportedBackendError(
            "expected torch.compile's Inductor backend for a model that was instrumented with scope='all', found a "
            "graph that the partition pass has not seen: another backend compiled it, or another library replaced "
            "torch._inductor.config.custom_partitioner_fn; compile with backend='inductor', or instrument with "
            "scope='projections', or with scope=gnmr_fx.AllSaved(unsupported_backend='projections') to have just the "
            "projections' inputs stored in such graphs"
        )
    observe_scope([guard], "projections")


def _keep(
    x: Tensor, guards: list[Tensor], seed: Tensor | None, low: str, high: str, role: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``x`` in ``low``, and also in ``high`` where any of ``guards`` is set and that is another format."""
    observe(guards[0], Kept(tuple(x.shape), x.dtype, role, low))
    for guard in guards:
        measure(guard, x, low)
    parsed = parse_format(high)
    encoded = kernels.encode(x, parse_format(low), seed)
    if low != high and any(guard.item() for guard in guards):
        return (*encoded, *kernels.encode(x, parsed, seed))
    return (*encoded, *empty_encoded(x, parsed, 0))


def _copy(x: Tensor) -> Tensor:
    """``aten.clone``, which Inductor leaves out where it takes it for needless."""
    return x.clone(memory_format=torch.contiguous_format)


def _note(guards: list[Tensor], left: str) -> Tensor:
    observe_scope(guards, "all", left)
    return torch.empty(0, dtype=torch.uint8)


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
        return kernels.decode(Encoded(high_payload, high_scales), parse_format(high), size, dtype)
    return kernels.decode(Encoded(low_payload, low_scales), parse_format(low), size, dtype)


_PARTITION = "gnmr_fx.passes.partition"


def install_partitioner() -> None:
    """Make the partition pass Inductor's partitioner: its module, which imports Inductor, is not needed before."""
    importlib.import_module(_PARTITION).install()


def remove_partitioner() -> None:
    """Undo :func:`install_partitioner`."""
    if _PARTITION in sys.modules:
        sys.modules[_PARTITION].remove()


@torch.library.register_fake(f"{NAMESPACE}::save_low", lib=_library)
def _save_low_fake(x: Tensor, seed: Tensor | None, fmt: str) -> tuple[Tensor, Tensor]:
    return empty_encoded(x, parse_format(fmt))


@torch.library.register_fake(f"{NAMESPACE}::save_high", lib=_library)
def _save_high_fake(
    x: Tensor,
    guard: Tensor,
    seed: Tensor | None,
    fmt: str,
    weight: Tensor | None = None,
    scope: str = "",
    low: str = "",
) -> tuple[Tensor, Tensor]:
    if scope:
        install_partitioner()
    return empty_encoded(x, parse_format(fmt), _dynamic_size())


@torch.library.register_fake(f"{NAMESPACE}::keep", lib=_library)
def _keep_fake(
    x: Tensor, guards: list[Tensor], seed: Tensor | None, low: str, high: str, role: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        *empty_encoded(x, parse_format(low)),
        *empty_encoded(x, parse_format(high), 0 if low == high else _dynamic_size()),
    )


@torch.library.register_fake(f"{NAMESPACE}::copy", lib=_library)
def _copy_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake(f"{NAMESPACE}::note", lib=_library)
def _note_fake(guards: list[Tensor], left: str) -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


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


for _name, _implementation in (
    ("save_low", _save_low),
    ("save_high", _save_high),
    ("restore", _restore),
    ("keep", _keep),
    ("copy", _copy),
    ("note", _note),
):
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
        stored: tuple[int, ...] | None,
        layout: Layout | None,
    ) -> Tensor:
        saved = (w, low_payload, low_scales, high_payload, high_scales)
        ctx.save_for_backward(*saved) if offs is None else ctx.save_for_backward(*saved, offs)
        ctx.kind, ctx.extra, ctx.low, ctx.high = kind, extra, low, high
        ctx.x_shape, ctx.x_dtype, ctx.layout = x.shape, x.dtype, layout
        ctx.stored = stored
        ctx.b_shape = None if b is None else b.shape
        return no_view(KINDS[kind].forward(x, w, b, offs, extra))

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
            shape = ctx.x_shape if ctx.layout is None else ctx.layout.local_shape
            x = torch.ops.gnmr_fx.restore(
                low_payload,
                low_scales,
                high_payload,
                high_scales,
                ctx.low,
                ctx.high,
                stored_shape(shape) if ctx.stored is None else ctx.stored,
                ctx.x_dtype,
                (g if ctx.layout is None else local_value(g)) if torch.compiler.is_compiling() else None,
            ).view(shape)
            x = x if ctx.layout is None else ctx.layout.whole(x)
            grad_w = projection.grad_weight(g, x, offs, ctx.extra, w.shape)
        if ctx.b_shape is not None and ctx.needs_input_grad[2]:
            grad_b = g.sum_to_size(ctx.b_shape)
        return grad_x, grad_w, grad_b, *(None,) * 11


def stock_projection(kind: str, extra: str, x: Tensor, w: Tensor, b: Tensor | None, offs: Tensor | None) -> Tensor:
    """The operator as PyTorch has it."""
    if kind == "linear":  # the public function, which tensor subclasses override
        return F.linear(x, w, b)
    return KINDS[kind].forward(x, w, b, offs, extra)


def stored_shape(shape: Any) -> list[Any]:
    """The shape that an activation of ``shape`` is stored in: columns as rows, or each element had its own scale."""
    return [*shape[:-2], 1, shape[-2]] if len(shape) > 1 and shape[-1] == 1 else list(shape)


def head_projection(kind: str, extra: str, x: Tensor, w: Tensor, b: Tensor | None, offs: Tensor | None) -> Tensor:
    """The operator as PyTorch has it, marked as the output head: in the graph that is traced, or in autograd's."""
    if torch.compiler.is_compiling():
        with annotate({HEAD_KEY: True}):
            return stock_projection(kind, extra, x, w, b, offs)
    out = stock_projection(kind, extra, x, w, b, offs)
    if out.grad_fn is not None:
        mark(out, Marker.LOSS_HEAD)
    return out


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
    handle: Handle | Marker,
    training: bool,
) -> Tensor:
    """A projection on its low-cost or its recovery path.

    Where the recipe says how GEMMs are computed, see :mod:`gnmr_fx.gemm`. Else the output is bit for bit that of the
    operator it stands for. The input gradient does not depend on the path (for
    linear it is bit-equal too, elsewhere up to the order of sums). The weight gradient is that of the activation as the
    path in force stores it.

    Args:
        kind: key of :data:`gnmr_fx.projections.KINDS`.
        extra: static part of the call, the equation of an einsum.
        x: activation, floating point, any shape the operator takes.
        w: weight, a parameter or a view or slice of one.
        b: bias, where the operator takes one.
        offs: int32 [E], row offsets of a grouped GEMM.
        handle: guard, formats and bookkeeping of the unit; a marker where the stock operator is to run and be marked.
        training: where False (and under no_grad, and for a frozen weight) nothing of ``x`` is kept and the stock
            operator runs.

    Raises:
        DoubleBackwardError: in a backward with ``create_graph=True``.
        NativeKernelError, UnsupportedInputError: where a recipe for GEMMs cannot be followed.
        UnsupportedTransformError: under a ``torch.func`` transform.
    """
    if isinstance(handle, Marker):
        return head_projection(kind, extra, x, w, b, offs)
    if handle.frozen is not None:
        return frozen_projection(kind, extra, x, w, b, offs, handle, training)
    eager = not torch.compiler.is_compiling()
    if handle.gemms is not None:
        return _low_precision(kind, extra, x, w, b, offs, handle, training, eager)
    out = (
        _guarded_projection(kind, extra, x, w, b, offs, handle, eager)
        if is_guardable(x, w, training)
        else stock_projection(kind, extra, x, w, b, offs)
    )
    if eager and handle.scope is not None and out.grad_fn is not None:
        mark(out, handle)
    return out


def _guarded_projection(
    kind: str,
    extra: str,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    offs: Tensor | None,
    handle: Handle,
    eager: bool,
) -> Tensor:
    layout = layout_of(x)
    source, active, stored = local_value(x), False, None
    cast, dtype = autocast(kind, x)
    if eager:
        _refuse_transforms()
        announce(handle.guard)
        active = bool(handle.guard)
        if handle.saver is not None:
            handle.observation.enter("all" if handle.saver.active else "projections")
        if (handle.high if active else handle.low) == "none":  # before the cast, which autocast makes once per weight
            if active:
                measure(handle.guard, source.detach().to(dtype), handle.low)
            handle.observation.add(Kept(tuple(stored_shape(source.shape)), dtype))
            return stock_projection(kind, extra, x, w, b, offs)
    if cast:
        x, w, b = x.to(dtype), w.to(dtype), None if b is None else b.to(dtype)
    saved = x.detach() if layout is None else local_value(x.detach())
    saved = saved.reshape(stored_shape(saved.shape))
    if eager:
        low, high, stored = _encode_eager(source, saved, handle, active)
    else:
        low = torch.ops.gnmr_fx.save_low(saved, handle.seed, handle.low)
        scoped = (local_value(w.detach()), str(handle.scope), handle.low) if handle.scope is not None else ()
        high = torch.ops.gnmr_fx.save_high(saved, handle.guard, handle.seed, handle.high, *scoped)
    return _Guarded.apply(x, w, b, offs, *low, *high, kind, extra, handle.low, handle.high, stored, layout)


def _refuse_transforms() -> None:
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedTransformError(
            "expected plain autograd, found a torch.func transform (grad, vmap, jvp, ...) over an operator guarded "
            "by gnmr-fx, whose packed activation it cannot see through; call model.eval() or "
            "gnmr_fx.uninstrument(model) for this computation"
        )


def _low_precision(
    kind: str,
    extra: str,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    offs: Tensor | None,
    handle: Handle,
    training: bool,
    eager: bool,
) -> Tensor:
    """A projection whose recipe says how its GEMMs are computed; also under no_grad, and in ``eval()`` on one path."""
    spec = handle.gemms[0 if training else 1]  # type: ignore[index]
    if not training and spec.is_full:
        return stock_projection(kind, extra, x, w, b, offs)
    gemm.check_operands(x, w, kind)
    cast, dtype = autocast(kind, x)
    source = x
    if cast:
        x, w, b = x.to(dtype), w.to(dtype), None if b is None else b.to(dtype)
    keeps = torch.is_grad_enabled() and w.requires_grad
    stores = training and keeps and not (handle.low == handle.high == "none")
    size = stored_shape(x.shape)
    low: Any = (None, None)
    high: Any = (None, None)
    seed: Any = handle.seed  # both are taken as they are now: a step may come before the backward
    if eager:
        _refuse_transforms()
        seed = None if seed is None else int(seed)
        active: Any = False
        if training:
            announce(handle.guard)
            active = bool(handle.guard)
            handle.observation.backends = gemm.backends(kind, spec, x.shape, w, x.dtype)
        if stores:
            low, high, _ = _encode_eager(source, x.detach().reshape(size), handle, active)
        elif training and keeps:
            handle.observation.add(Kept(tuple(size), dtype))
            measure(handle.guard, x.detach(), gemm.operand_spec(spec))
    else:
        active = torch.ops.gnmr_fx.latch(handle.guard)
        seed = None if seed is None else torch.ops.gnmr_fx.latch(seed)
        if stores:
            saved = x.detach().reshape(size)
            low = torch.ops.gnmr_fx.save_low(saved, handle.seed, handle.low)
            high = torch.ops.gnmr_fx.save_high(saved, handle.guard, handle.seed, handle.high, low=handle.low)
    reports = training and keeps and not stores
    return gemm.GuardedGemms.apply(
        x, w, b, offs, active, handle.guard, seed, *low, *high,
        kind, extra, spec, handle.low, handle.high, size, keeps, reports,
    )  # fmt: skip


def _encode_eager(
    source: Tensor, x: Tensor, handle: Handle, active: bool
) -> tuple[Encoded, Encoded, tuple[int, ...] | None]:
    """``(low, high)``, of which only the one in force holds rows, and the shape it was stored in if not that of ``x``.

    Shared with operators that read ``source`` too, and, where everything is stored, with whatever saves its memory.
    """
    spec, other = (handle.high, handle.low) if active else (handle.low, handle.high)
    measure(handle.guard, x, handle.low)
    saver = handle.saver
    nothing = empty_encoded(x, parse_format(other), 0)
    shared = saver.find(x, spec) if saver is not None else None
    if shared is not None:
        encoded, stored = shared
        return (nothing, encoded, stored) if active else (encoded, nothing, stored)
    handle.observation.add(Kept(tuple(x.shape), x.dtype))
    key = handle.memo.key(source, x.dtype, spec)
    encoded = handle.memo.get(key)
    if encoded is None:
        encoded = kernels.encode(x, parse_format(spec), handle.seed)
        handle.memo.put(key, source, encoded)
        if saver is not None:
            saver.remember(x, spec, encoded)
    return (nothing, encoded, None) if active else (encoded, nothing, None)
