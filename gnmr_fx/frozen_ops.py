"""The guarded projection of a frozen weight: computed from the low-cost format, or from the exact weight.

:func:`frozen_projection` is what :func:`gnmr_fx.ops.guarded_projection` becomes under a recipe for frozen weights. The
low-cost path dequantizes the weight into the dtype of the activation and multiplies; the recovery path multiplies with
the exact weight. The input gradient is that of the path which the forward took, whatever has become of the guard since.

Both directions are opaque operators that dequantize inside: what autograd keeps are the tensors of the low-cost format,
which are the weight itself, and a note of which path it was. The low-cost format is an input of the operators; the
exact weight is looked up, at run time, at the unit that the guard belongs to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from gnmr_fx.errors import (
    DoubleBackwardError,
    FrozenWeightError,
    InvariantError,
    UnsupportedInputError,
    UnsupportedTransformError,
)
from gnmr_fx.formats import Encoded
from gnmr_fx.frozen import FrozenWeight, decode
from gnmr_fx.projections import KINDS, autocast
from gnmr_fx.units import Handle, place_of, unit_at

_library = torch.library.Library("gnmr_fx", "FRAGMENT")
_library.define(
    "frozen(Tensor x, Tensor payload, Tensor scales, Tensor? b, Tensor? offs, Tensor guard, str kind, str extra, "
    "str spec, str mode, int[] shape) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "frozen_grad(Tensor g, Tensor payload, Tensor scales, Tensor note, Tensor? offs, str kind, str extra, str spec, "
    "int[] shape, SymInt[] x_shape) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


# ``mode``: "train" and "no_grad" take the path of the guard, with a gradient to come or not; "high" and "low" that one.
def _frozen(
    x: Tensor,
    payload: Tensor,
    scales: Tensor,
    b: Tensor | None,
    offs: Tensor | None,
    guard: Tensor,
    kind: str,
    extra: str,
    spec: str,
    mode: str,
    shape: list[int],
) -> tuple[Tensor, Tensor]:
    place = place_of(guard)
    controller, unit = _alive(unit_at(*place))
    if mode in ("train", "no_grad"):
        unit.observation.enter("")
        controller.projection_ran(unit.index, counts=mode == "train")
        high = bool(guard)
    else:
        high = mode == "high"
    w = _weight(unit, Encoded(payload, scales), spec, shape, x.dtype, high)
    # The guard itself is not saved: autograd refuses what was written to since, as it is when guards change.
    return KINDS[kind].forward(x, w, b, offs, extra), torch.tensor([high, *place])


def _frozen_grad(
    g: Tensor,
    payload: Tensor,
    scales: Tensor,
    note: Tensor,
    offs: Tensor | None,
    kind: str,
    extra: str,
    spec: str,
    shape: list[int],
    x_shape: list[int],
) -> Tensor:
    high, *place = note.tolist()
    controller, unit = _alive(unit_at(*place))
    controller.output_gradient(unit.index, g)
    w = _weight(unit, Encoded(payload, scales), spec, shape, g.dtype, bool(high))
    return KINDS[kind].grad_input(g, w, offs, extra, x_shape)


def _alive(found: tuple[Any, Any]) -> tuple[Any, Any]:
    if found[0] is None:
        raise InvariantError(
            "expected the controller of a frozen weight to be alive, found none at its guard's address; keep the "
            "instrumented model, whose compiled code this is, alive"
        )
    return found


def _weight(unit: Any, low: Encoded, spec: str, shape: list[int], dtype: torch.dtype, high: bool) -> Tensor:
    if not high:
        return decode(low, spec, shape, dtype)
    weight = unit.weight
    exact: Tensor = weight.store.exact() if isinstance(weight, FrozenWeight) else weight.detach()
    return exact.to(dtype)


@torch.library.register_fake("gnmr_fx::frozen", lib=_library)
def _frozen_fake(
    x: Tensor,
    payload: Tensor,
    scales: Tensor,
    b: Tensor | None,
    offs: Tensor | None,
    guard: Tensor,
    kind: str,
    extra: str,
    spec: str,
    mode: str,
    shape: list[int],
) -> tuple[Tensor, Tensor]:
    return KINDS[kind].forward(x, x.new_empty(shape), b, offs, extra), torch.empty(3, dtype=torch.int64)


@torch.library.register_fake("gnmr_fx::frozen_grad", lib=_library)
def _frozen_grad_fake(
    g: Tensor,
    payload: Tensor,
    scales: Tensor,
    note: Tensor,
    offs: Tensor | None,
    kind: str,
    extra: str,
    spec: str,
    shape: list[int],
    x_shape: list[Any],
) -> Tensor:
    return KINDS[kind].grad_input(g, g.new_empty(shape), offs, extra, x_shape)


for _name, _implementation in (("frozen", _frozen), ("frozen_grad", _frozen_grad)):
    _library.impl(_name, _disable_dynamo(_implementation), "CompositeExplicitAutograd")


class _Frozen(torch.autograd.Function):
    """A projection that keeps nothing but its low-cost weight, which is there anyway."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        payload: Tensor,
        scales: Tensor,
        b: Tensor | None,
        offs: Tensor | None,
        guard: Tensor,
        kind: str,
        extra: str,
        spec: str,
        mode: str,
        shape: tuple[int, ...],
    ) -> Tensor:
        out, note = torch.ops.gnmr_fx.frozen(x, payload, scales, b, offs, guard, kind, extra, spec, mode, shape)
        saved = (note, payload, scales)
        ctx.save_for_backward(*saved) if offs is None else ctx.save_for_backward(*saved, offs)
        ctx.kind, ctx.extra, ctx.spec, ctx.shape = kind, extra, spec, shape
        ctx.x_shape = x.shape
        ctx.b_shape = None if b is None else b.shape
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            raise DoubleBackwardError(
                "expected a first-order backward, found create_graph=True through a projection whose frozen weight is "
                "stored quantized by gnmr-fx; call gnmr_fx.uninstrument(model) or exclude these operators "
                "(exclude=...) for this computation"
            )
        note, payload, scales, *rest = ctx.saved_tensors
        offs = rest[0] if rest else None
        grad_x = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.gnmr_fx.frozen_grad(
                g, payload, scales, note, offs, ctx.kind, ctx.extra, ctx.spec, ctx.shape, ctx.x_shape
            )
        if ctx.b_shape is not None and ctx.needs_input_grad[3]:
            grad_b = g.sum_to_size(ctx.b_shape)
        return grad_x, None, None, grad_b, *(None,) * 7


def frozen_projection(
    kind: str,
    extra: str,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    offs: Tensor | None,
    handle: Handle,
    training: bool,
) -> Tensor:
    """A projection against a frozen weight, on its low-cost or its recovery path.

    Args:
        kind, extra, x, b, offs, handle, training: as of :func:`gnmr_fx.ops.guarded_projection`. In eval mode the path
            is the one that the recipe names for it; under no_grad in training mode it is the one with gradients.
        w: the :class:`FrozenWeight` of the unit.

    Raises:
        FrozenWeightError: where ``w`` is another tensor, or needs a gradient now.
        UnsupportedInputError: where ``x`` has not the dtype that the weight stands for.
        UnsupportedTransformError: under a ``torch.func`` transform.
    """
    assert handle.frozen is not None
    spec = handle.frozen.spec
    if not isinstance(w, FrozenWeight) or w.requires_grad:
        raise FrozenWeightError(_not_the_weight(w, spec))
    cast, dtype = autocast(kind, x)
    if cast and x.is_floating_point():
        x, b = x.to(dtype), None if b is None else b.to(dtype)
    elif x.dtype != w.dtype:
        raise UnsupportedInputError(
            f"expected an input of {w.dtype}, the dtype of the frozen weight that is stored as {spec}, found {x.dtype};"
            " cast it, or run the model under torch.autocast"
        )
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise UnsupportedTransformError(
            "expected plain autograd, found a torch.func transform (grad, vmap, jvp, ...) over a frozen weight that "
            "gnmr-fx has quantized; call gnmr_fx.uninstrument(model) for this computation"
        )
    mode = handle.frozen.evaluate if not training else "train" if torch.is_grad_enabled() else "no_grad"
    return _Frozen.apply(x, w.payload, w.scales, b, offs, handle.guard, kind, extra, spec, mode, tuple(w.shape))


def _not_the_weight(w: Tensor, spec: str) -> str:
    if isinstance(w, FrozenWeight):
        return (
            "expected a frozen weight, found one that needs a gradient now; call gnmr_fx.uninstrument(model) before "
            f"weights that are stored as {spec} are to be trained"
        )
    if isinstance(w, nn.Parameter):
        return (
            f"expected the frozen weight that gnmr-fx stores as {spec}, found another parameter in its place "
            f"({type(w.data).__name__}, {tuple(w.shape)}): it was replaced, or sharded by FSDP2; pass fully_shard the "
            "frozen weights as ignored_params, and before a weight is replaced call gnmr_fx.uninstrument(model)"
        )
    return (
        f"expected a projection that reads the whole of the frozen weight that gnmr-fx stores as {spec}, found one "
        f"that reads a view or slice of it, of shape {tuple(w.shape)}; leave this operator alone with exclude=[...]"
    )
