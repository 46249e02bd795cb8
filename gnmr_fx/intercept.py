"""Diverting the projection calls of a forward that cannot be traced soundly."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gnmr_fx.ops import guarded_projection
from gnmr_fx.projections import Call, is_projection, match
from gnmr_fx.units import Handle

_VIEWS: frozenset[Any] = frozenset({
    Tensor.__getitem__, Tensor.t, Tensor.transpose, Tensor.permute, Tensor.view, Tensor.reshape, Tensor.contiguous,
    Tensor.select, Tensor.narrow, Tensor.unsqueeze, Tensor.squeeze, Tensor.flatten, Tensor.to, Tensor.float,
    Tensor.bfloat16, Tensor.half, Tensor.type_as, Tensor.swapaxes, Tensor.movedim, Tensor.expand, Tensor.index_select,
    Tensor.T.__get__, Tensor.mT.__get__, torch.t, torch.transpose, torch.permute, torch.reshape, torch.select,
    torch.narrow, torch.unsqueeze, torch.squeeze, torch.flatten, torch.swapaxes, torch.movedim, torch.index_select,
})  # type: ignore[attr-defined]  # fmt: skip
"""Operations whose result is still the weight: another view, a slice, another dtype."""
_SPLITS: frozenset[Any] = frozenset({Tensor.chunk, Tensor.split, Tensor.unbind, torch.chunk, torch.split, torch.unbind})


class Intercept(TorchFunctionMode):
    """Inside this context, projections against the given weights run guarded.

    Args:
        weights: pairs of a weight and the handle of its unit.
        training: whether the module that is running is in training mode.

    A weight is followed through views, slices and casts. Works in eager mode and under Dynamo, in loops and branches.
    """

    def __init__(self, weights: tuple[tuple[Tensor, Handle], ...], training: bool) -> None:
        super().__init__()
        self.training = training
        self.known: list[tuple[Tensor, Handle]] = list(weights)

    def handle_of(self, value: Any) -> Handle | None:
        """The handle of the unit that ``value`` is the weight of, if it is one."""
        for weight, handle in self.known:
            if value is weight:
                return handle
        return None

    def is_weight(self, value: Any) -> bool:
        """Whether ``value`` is one of the weights, or a view, slice or cast of one."""
        return isinstance(value, Tensor) and self.handle_of(value) is not None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            return attention_forward(self)(*args, **kwargs)
        if is_projection(func):
            call = match(func, args, kwargs, self.is_weight, Tensor.dim)
            if isinstance(call, Call):
                return self.divert(call, self.handle_of(call.weight))
        out = func(*args, **kwargs)
        if func in _VIEWS or func in _SPLITS:
            handle = self.handle_of(args[0])
            if handle is not None:
                self.known += [(o, handle) for o in ((out,) if func in _VIEWS else out)]
        return out

    def divert(self, call: Call, handle: Handle | None) -> Tensor:
        """Run ``call`` guarded by ``handle``."""
        assert handle is not None
        return guarded_projection(
            call.kind, call.extra, call.x, call.weight, call.bias, call.offs, handle, self.training
        )

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """``F.linear``, guarded where ``w`` is one of the weights."""
        handle = self.handle_of(w)
        return F.linear(x, w, b) if handle is None else self.divert(Call("linear", "", x, w, b), handle)


def _rebound(function: types.FunctionType, **names: Any) -> Callable[..., Any]:
    """``function`` with some of its global names bound to something else."""
    scope = {k: v for k, v in function.__globals__.items() if k != "__name__"}  # unnamed: not taken for the module
    rebound = types.FunctionType(function.__code__, {**scope, **names}, function.__name__, function.__defaults__)
    rebound.__kwdefaults__ = function.__kwdefaults__
    return rebound


def attention_forward(mode: Intercept) -> Callable[..., Any]:
    """``F.multi_head_attention_forward`` with its own projections guarded.

    A torch-function mode sees that function as one call, and inside it no mode is active: its body is run with
    ``linear`` bound to the guarded one.
    """

    def packed(q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor | None = None) -> Any:
        handle = mode.handle_of(w)
        if handle is None:
            return F._in_projection_packed(q, k, v, w, b)

        def linear(x: Tensor, part: Tensor, bias: Tensor | None = None) -> Tensor:  # every part is a slice of w
            return mode.divert(Call("linear", "", x, part, bias), handle)

        return _rebound(F._in_projection_packed, linear=linear)(q, k, v, w, b)

    return _rebound(
        F.multi_head_attention_forward,
        linear=mode.linear,
        has_torch_function=lambda _: False,
        _in_projection_packed=packed,
        _in_projection=_rebound(F._in_projection, linear=mode.linear),
    )
