"""Diverting the projection calls of a forward that cannot be traced soundly."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gnmr_fx.ops import guarded_projection
from gnmr_fx.projections import Call, is_projection, match
from gnmr_fx.units import Handle, Marker
from gnmr_fx.views import SPLITS, VIEWS, functions

_VIEWS, _SPLITS = functions(VIEWS), functions(SPLITS)


class Intercept(TorchFunctionMode):
    """Inside this context, projections against the given weights run guarded.

    Args:
        weights: pairs of a weight and the handle of its unit, or the marker of an output head.
        training: whether the module that is running is in training mode.

    A weight is followed through views, slices and casts. Works in eager mode and under Dynamo, in loops and branches.
    """

    def __init__(self, weights: tuple[tuple[Tensor, Handle | Marker], ...], training: bool) -> None:
        super().__init__()
        self.training = training
        self.known: list[tuple[Tensor, Handle | Marker]] = list(weights)

    def handle_of(self, value: Any) -> Handle | Marker | None:
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
            return self.attention(*args, **kwargs)
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

    def divert(self, call: Call, handle: Handle | Marker | None) -> Tensor:
        """Run ``call`` guarded by ``handle``."""
        assert handle is not None
        return guarded_projection(
            call.kind, call.extra, call.x, call.weight, call.bias, call.offs, handle, self.training
        )

    def attention(self, *args: Any, **kwargs: Any) -> Any:
        """``F.multi_head_attention_forward`` with its own projections guarded."""
        in_proj, out_proj, q_proj, k_proj, v_proj = _bind(args, kwargs, _ATTENTION_WEIGHTS)
        whole = (out_proj, q_proj, k_proj, v_proj)
        packed = self.handle_of(in_proj)

        def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
            # Anything but the whole weights is a slice that attention made of its packed one.
            handle = self.handle_of(w) if any(w is weight for weight in whole) else packed
            return F.linear(x, w, b) if handle is None else self.divert(Call("linear", "", x, w, b), handle)

        return _attention(*args, **kwargs, linear=linear)


_ATTENTION_WEIGHTS = tuple(
    (list(inspect.signature(F.multi_head_attention_forward).parameters).index(name), name)
    for name in ("in_proj_weight", "out_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
)


def _bind(args: tuple[Any, ...], kwargs: Mapping[str, Any], names: tuple[tuple[int, str], ...]) -> tuple[Any, ...]:
    return tuple(args[at] if at < len(args) else kwargs.get(name) for at, name in names)


class _TakeLinear(ast.NodeTransformer):
    """Give functions a keyword ``linear`` and hand it on where they call one another."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = []
        node.args.kwonlyargs.append(ast.arg("linear"))
        node.args.kw_defaults.append(None)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in self.names:
            node.keywords.append(ast.keyword("linear", ast.Name("linear", ast.Load())))
        return self.generic_visit(node)


def _attention_with_linear() -> Callable[..., Any]:
    """``F.multi_head_attention_forward`` as installed, with the ``linear`` it calls as an argument.

    A torch-function mode sees that function as one call and is not active inside it, so its own projections cannot be
    intercepted; and Dynamo cannot follow functions whose globals are exchanged at run time.
    """
    names = ("_in_projection_packed", "_in_projection", "multi_head_attention_forward")
    functions = [getattr(F, name) for name in names]
    transform = _TakeLinear(frozenset(names))
    # No __name__: these are not the globals of a module that can be imported, and Dynamo must not take them for one.
    scope = {name: value for name, value in vars(F).items() if name != "__name__"}
    scope["has_torch_function"] = lambda _: False
    for function in functions:
        tree = transform.visit(ast.parse(inspect.getsource(function)))
        exec(compile(ast.fix_missing_locations(tree), inspect.getfile(function), "exec"), scope)
    attention: Callable[..., Any] = scope[F.multi_head_attention_forward.__name__]
    return attention


_attention = _attention_with_linear()
