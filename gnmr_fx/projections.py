"""The projections gnmr-fx understands: one activation times one weight, and their two gradients.

A projection is bilinear in an activation ``x`` and a weight ``w``. Its input gradient needs only ``w`` and its
weight gradient only ``x``, which is why ``x`` alone can be stored in a cheaper format between forward and backward.

Each kind is three plain functions. ``extra`` is a static string (the einsum equation, else empty), ``offs`` the row
offsets of a grouped GEMM (else None):

* ``forward(x, w, b, offs, extra) -> out``, through ``torch.ops.aten`` so that no torch-function mode sees it twice;
* ``grad_input(g, w, offs, extra, x_shape) -> Tensor`` of shape ``x_shape``, bit for bit what autograd makes: a product
  with a matrix is one GEMM over all rows, as it is in a forward whose matrix needs a gradient;
* ``grad_weight(g, x, offs, extra, w_shape) -> Tensor`` of shape ``w_shape``.
"""

from __future__ import annotations

import operator
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Projection:
    """The forward and the two gradients of one kind of projection (see the module docstring)."""

    forward: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, str], Tensor]
    grad_input: Callable[[Tensor, Tensor, Tensor | None, str, Any], Tensor]
    grad_weight: Callable[[Tensor, Tensor, Tensor | None, str, Any], Tensor]
    autocast: bool = True
    """Whether torch.autocast casts the operands of this operator."""


def _rows_times(x: Tensor, matrix: Tensor) -> Tensor:
    """``x @ matrix`` as one GEMM over all rows of ``x``, whatever its strides."""
    if x.dim() < 3:
        return torch.matmul(x, matrix)
    return torch.mm(x.reshape(-1, x.shape[-1]), matrix).view(*x.shape[:-1], matrix.shape[-1])


def _linear(x: Tensor, w: Tensor, b: Tensor | None, offs: Tensor | None, extra: str) -> Tensor:
    return aten.linear(x, w, b)


def _linear_grad_input(g: Tensor, w: Tensor, offs: Tensor | None, extra: str, x_shape: Any) -> Tensor:
    return _rows_times(g, w)


def _linear_grad_weight(g: Tensor, x: Tensor, offs: Tensor | None, extra: str, w_shape: Any) -> Tensor:
    return torch.mm(g.reshape(-1, w_shape[0]).t(), x.reshape(-1, w_shape[1]))


def _right(x: Tensor, w: Tensor, b: Tensor | None, offs: Tensor | None, extra: str) -> Tensor:
    """``x @ w``; with a bias the fused ``addmm`` or ``baddbmm``, as in the operator it stands for."""
    if b is None:
        return aten.matmul(x, w)
    return aten.addmm(b, x, w) if x.dim() == 2 else aten.baddbmm(b, x, w)


def _right_grad_input(g: Tensor, w: Tensor, offs: Tensor | None, extra: str, x_shape: Any) -> Tensor:
    if len(x_shape) == 1:
        return torch.matmul(g.unsqueeze(-2), w.transpose(-1, -2)).squeeze(-2).sum_to_size(x_shape)
    if w.dim() == 2:
        return _rows_times(g, w.t())
    return torch.matmul(g, w.transpose(-1, -2)).sum_to_size(x_shape)


def _right_grad_weight(g: Tensor, x: Tensor, offs: Tensor | None, extra: str, w_shape: Any) -> Tensor:
    if x.dim() == 1:
        x, g = x.unsqueeze(0), g.unsqueeze(-2)
    if len(w_shape) == 2:  # one GEMM over all rows, not one per batch entry and a sum
        return torch.mm(x.reshape(-1, w_shape[0]).t(), g.reshape(-1, w_shape[1]))
    return torch.matmul(x.transpose(-1, -2), g).sum_to_size(w_shape)


def _left(x: Tensor, w: Tensor, b: Tensor | None, offs: Tensor | None, extra: str) -> Tensor:
    """``w @ x``."""
    return aten.matmul(w, x)


def _left_grad_input(g: Tensor, w: Tensor, offs: Tensor | None, extra: str, x_shape: Any) -> Tensor:
    if len(x_shape) == 1:
        return torch.matmul(w.transpose(-1, -2), g.unsqueeze(-1)).squeeze(-1).sum_to_size(x_shape)
    if w.dim() == 2 and g.dim() > 2:
        return _rows_times(g.transpose(-1, -2), w).transpose(-1, -2)
    return torch.matmul(w.transpose(-1, -2), g).sum_to_size(x_shape)


def _left_grad_weight(g: Tensor, x: Tensor, offs: Tensor | None, extra: str, w_shape: Any) -> Tensor:
    if x.dim() == 1:
        x, g = x.unsqueeze(-1), g.unsqueeze(-1)
    if len(w_shape) == 2:
        rows = x.transpose(-1, -2).reshape(-1, w_shape[1])
        return torch.mm(g.transpose(-1, -2).reshape(-1, w_shape[0]).t(), rows)
    return torch.matmul(g, x.transpose(-1, -2)).sum_to_size(w_shape)


def _einsum(x: Tensor, w: Tensor, b: Tensor | None, offs: Tensor | None, extra: str) -> Tensor:
    return aten.einsum(extra, [x, w])


def _einsum_grad_input(g: Tensor, w: Tensor, offs: Tensor | None, extra: str, x_shape: Any) -> Tensor:
    xs, ws, out = _in_output_order(extra)
    return torch.einsum(f"{out},{ws}->{xs}", g, w)


def _einsum_grad_weight(g: Tensor, x: Tensor, offs: Tensor | None, extra: str, w_shape: Any) -> Tensor:
    xs, ws, out = _in_output_order(extra)
    return torch.einsum(f"{out},{xs}->{ws}", g, x)


def _in_output_order(equation: str) -> tuple[str, str, str]:
    """The parts of ``equation``, renamed so that the indices of the output come first in the alphabet, in its order.

    ``torch.einsum`` sums over several indices in alphabetical order, autograd in the order of the output.
    """
    xs, ws, out = split_equation(equation)
    order = out + "".join(sorted(c for c in set(xs + ws) if c not in out))
    xs, ws, out = ("".join([string.ascii_letters[order.index(c)] for c in part]) for part in (xs, ws, out))
    return xs, ws, out


def _grouped(x: Tensor, w: Tensor, b: Tensor | None, offs: Tensor | None, extra: str) -> Tensor:
    """Rows of ``x`` [R, K] in groups that end at ``offs`` [E], each times its own ``w`` [E, K, N]."""
    return aten._grouped_mm(x, w, offs)


def _grouped_grad_input(g: Tensor, w: Tensor, offs: Tensor | None, extra: str, x_shape: Any) -> Tensor:
    return aten._grouped_mm(g, w.transpose(-2, -1), offs)


def _grouped_grad_weight(g: Tensor, x: Tensor, offs: Tensor | None, extra: str, w_shape: Any) -> Tensor:
    return aten._grouped_mm(x.t(), g, offs)


def _hf_grouped(x: Tensor, w: Tensor, b: Tensor | None, offs: Tensor | None, extra: str) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(x, w, offs)


def _hf_grouped_grad_input(g: Tensor, w: Tensor, offs: Tensor | None, extra: str, x_shape: Any) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(g.contiguous(), w.transpose(-2, -1), offs)


def _hf_grouped_grad_weight(g: Tensor, x: Tensor, offs: Tensor | None, extra: str, w_shape: Any) -> Tensor:
    # The one backward there is makes both gradients; the input gradient made on the way is dropped.
    unused_weight = x.new_zeros((1,)).expand(w_shape)
    return torch.ops.transformers.grouped_mm_fallback_backward(x, unused_weight, offs, g.contiguous())[1]


KINDS: Mapping[str, Projection] = MappingProxyType(
    {
        "linear": Projection(_linear, _linear_grad_input, _linear_grad_weight),
        "right": Projection(_right, _right_grad_input, _right_grad_weight),
        "left": Projection(_left, _left_grad_input, _left_grad_weight),
        "einsum": Projection(_einsum, _einsum_grad_input, _einsum_grad_weight),
        "grouped": Projection(_grouped, _grouped_grad_input, _grouped_grad_weight, autocast=False),
        "hf_grouped": Projection(_hf_grouped, _hf_grouped_grad_input, _hf_grouped_grad_weight, autocast=False),
    }
)


def autocast(kind: str, x: Tensor) -> tuple[bool, torch.dtype]:
    """Whether autocast casts the operands, and the dtype that the projection is computed in."""
    cast = KINDS[kind].autocast and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    return cast, torch.get_autocast_dtype(x.device.type) if cast else x.dtype


def no_view(out: Tensor) -> Tensor:
    """The output of a projection, for an ``autograd.Function`` to return.

    Autograd lets nobody change a view in place that a Function made; of the stock operator's output it does.
    """
    if not torch.compiler.is_compiling() and not out._is_view():
        return out
    return aten._unsafe_view(out, out.shape)


UNKNOWN = -1
"""Number of dimensions of a value that nothing is known about."""


def split_equation(equation: str) -> tuple[str, str, str]:
    """``"xs,ws->out"`` as its three parts."""
    operands, out = equation.split("->")
    xs, ws = operands.split(",")
    return xs, ws, out


def normalize_einsum(equation: str, dims: tuple[int, int], weight_at: int) -> str | None:
    """The two-operand einsum ``equation`` as ``"xs,ws->out"``, weight second, ellipsis spelled out.

    Args:
        equation: as given to ``torch.einsum``.
        dims: number of dimensions of each operand, or UNKNOWN.
        weight_at: which operand (0 or 1) is the weight.

    Returns:
        None where the gradients are not plain einsums: an index repeated inside one operand, an index of one
        operand that is in neither the other nor the output, or an ellipsis in the weight, or in an activation of
        unknown width.
    """
    equation = equation.replace(" ", "")
    if equation.count(",") != 1:
        return None
    left, arrow, out = equation.partition("->")
    specs = left.split(",")
    if not arrow:
        letters = specs[0] + specs[1]
        if "." in letters:
            return None
        out = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    x_spec, w_spec = specs[1 - weight_at], specs[weight_at]
    if "..." in w_spec:
        return None
    if "..." in x_spec:
        if dims[1 - weight_at] == UNKNOWN:
            return None
        width = dims[1 - weight_at] - (len(x_spec) - 3)
        free = [c for c in string.ascii_letters if c not in equation][: max(width, 0)]
        x_spec, out = x_spec.replace("...", "".join(free)), out.replace("...", "".join(free))
    for own, other in ((x_spec, w_spec), (w_spec, x_spec)):
        if len(set(own)) != len(own) or not set(own) <= set(other) | set(out):
            return None
    return f"{x_spec},{w_spec}->{out}"


@dataclass(frozen=True)
class Call:
    """One call of a projection operator, operands sorted out.

    ``weight`` and the tensors are whatever the caller uses for values (tensors or FX nodes).
    """

    kind: str
    extra: str
    x: Any
    weight: Any
    bias: Any = None
    offs: Any = None


def _function(module: Any, name: str) -> Any:
    return getattr(module, name, None)


_LINEAR = {F.linear}
_MATMUL = {torch.matmul, operator.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm}
_RMATMUL = {Tensor.__rmatmul__}
_ADDMM = {torch.addmm, torch.baddbmm, Tensor.addmm, Tensor.baddbmm}
_EINSUM = {torch.einsum}
GROUPED = {f for f in (_function(F, "grouped_mm"), _function(torch, "_grouped_mm")) if f is not None}
_METHODS = {"matmul": torch.matmul, "mm": torch.mm, "bmm": torch.bmm, "addmm": torch.addmm, "baddbmm": torch.baddbmm}

PROJECTIONS = frozenset(_LINEAR | _MATMUL | _RMATMUL | _ADDMM | _EINSUM | GROUPED)
"""Functions that may be projections; with :func:`is_projection` for those that exist only at run time."""


def _is_hf_grouped(func: Any) -> bool:
    return str(func).startswith("transformers.grouped_mm_fallback") and "backward" not in str(func)


def is_projection(func: Any) -> bool:
    """Whether ``func`` (a function, a method name, or a torch operator) is one of the covered operators."""
    if isinstance(func, str):
        return func in _METHODS
    return func in PROJECTIONS or (
        isinstance(func, torch._ops.OpOverloadPacket | torch._ops.OpOverload) and _is_hf_grouped(func)
    )


def match(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    is_weight: Callable[[Any], bool],
    dim: Callable[[Any], int],
) -> Call | str | None:
    """Sort out the operands of a call.

    Args:
        func: the function, operator or method name called.
        args, kwargs: as passed.
        is_weight: tells whether a value is a weight (a parameter, or a view or slice of one).
        dim: number of dimensions of a value, or UNKNOWN.

    Returns:
        A :class:`Call`; or a reason (text) where it is a projection against a weight that is not covered; or None
        where it is not a projection, or not against a weight.
    """
    if isinstance(func, str):
        func = _METHODS.get(func)
    if func is None or not is_projection(func):
        return None
    if func in _EINSUM:
        return _match_einsum(args, kwargs, is_weight, dim)
    if func in _ADDMM:
        return _match_addmm(args, kwargs, is_weight)
    if func in _LINEAR:
        x, w, b = _bind(args, kwargs, ("input", "weight", "bias"))
        return Call("linear", "", x, w, b) if is_weight(w) else None
    if func in GROUPED or func not in PROJECTIONS:
        names = ("input", "weight", "offs") if func not in PROJECTIONS else ("mat_a", "mat_b", "offs")
        x, w, offs = _bind(args, kwargs, names)
        if not is_weight(w):
            return None
        if offs is None or dim(x) != 2 or dim(w) != 3 or kwargs.get("bias") is not None:
            return "grouped GEMM in a layout other than rows [R, K] by experts [E, K, N] with offsets"
        return Call("grouped" if func in GROUPED else "hf_grouped", "", x, w, None, offs)
    first, second = _bind(args, kwargs, ("input", "other" if "mat2" not in kwargs else "mat2"))[:2]
    left, right = (second, first) if func in _RMATMUL else (first, second)
    if is_weight(right):
        return Call("right", "", left, right) if not is_weight(left) else "product of two weights"
    return Call("left", "", right, left) if is_weight(left) else None


def _bind(args: tuple[Any, ...], kwargs: Mapping[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names))


def _match_addmm(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], is_weight: Callable[[Any], bool]
) -> Call | str | None:
    b, x, w = _bind(
        args,
        kwargs,
        ("input", "mat1" if "batch1" not in kwargs else "batch1", "mat2" if "batch2" not in kwargs else "batch2"),
    )
    if not is_weight(w):
        return "addmm with the weight as its first factor" if is_weight(x) else None
    if kwargs.get("alpha", 1) != 1 or kwargs.get("beta", 1) != 1:
        return "addmm with alpha or beta other than 1"
    return Call("right", "", x, w, b)


def _match_einsum(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], is_weight: Callable[[Any], bool], dim: Callable[[Any], int]
) -> Call | str | None:
    operands = list(args[1:])
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    weights = [i for i, value in enumerate(operands) if is_weight(value)]
    if not weights:
        return None
    if len(operands) != 2 or len(weights) != 1 or not isinstance(args[0], str):
        return "einsum of other than one activation and one weight"
    at = weights[0]
    extra = normalize_einsum(args[0], (dim(operands[0]), dim(operands[1])), at)
    if extra is None:
        return f"einsum {args[0]!r}, whose gradients are not plain einsums"
    return Call("einsum", extra, operands[1 - at], operands[at])
