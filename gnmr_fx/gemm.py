"""The three GEMMs of a projection in low precision: the output, the input gradient and the weight gradient.

Each is one opaque operator that reads the guard at run time and takes its operands in the formats of the path in force
(:class:`gnmr_fx.recipe.GemmPaths`), so one graph serves every guard state and no quantized operand is saved that the
recipe does not name. An operand is quantized along the dimension that is summed over, whichever that is in memory.

*Emulated*: operands are quantized, dequantized into the dtype of the run, and multiplied there, with that dtype's
accumulation. *Native*: torch multiplies codes, and scales are applied to the sums. Which one runs is decided from
formats, shapes, dtype and device alone (:func:`backends`), never from what happens to fail.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from gnmr_fx import distributed, kernels
from gnmr_fx.errors import DoubleBackwardError, NativeKernelError, UnsupportedInputError
from gnmr_fx.formats import Encoded, from_groups, layout
from gnmr_fx.projections import KINDS, no_view, split_equation
from gnmr_fx.recipe import FULL, Backend, Format, GemmPaths, GemmRecipe, Operands, parse_format
from gnmr_fx.units import Kept, observe_backends, stores

NAMESPACE = "gnmr_fx"
Seed: TypeAlias = Tensor | int | None
Gemm = Literal["output", "grad_input", "grad_weight"]
GEMMS: tuple[Gemm, ...] = ("output", "grad_input", "grad_weight")


class Spec(NamedTuple):
    """A :class:`GemmRecipe` as text, which operators can be given: a GEMM is ``"left x right -> left x right"``."""

    output: str
    grad_input: str
    grad_weight: str
    backend: Backend

    @classmethod
    def of(cls, recipe: GemmRecipe) -> Spec:
        """The text of ``recipe``."""
        return cls._of({gemm: getattr(recipe, gemm) for gemm in GEMMS}, recipe.backend)

    @classmethod
    def of_eval(cls, recipe: GemmRecipe) -> Spec:
        """The text of what runs in ``eval()``: one path, whatever the guard says."""
        chosen = {gemm: getattr(getattr(recipe, gemm), recipe.evaluate) for gemm in GEMMS}
        return cls._of({gemm: GemmPaths(operands, operands) for gemm, operands in chosen.items()}, recipe.backend)

    @classmethod
    def _of(cls, paths: Mapping[Gemm, GemmPaths], backend: Backend) -> Spec:
        output, grad_input, grad_weight = (f"{paths[gemm].low} -> {paths[gemm].high}" for gemm in GEMMS)
        return cls(output, grad_input, grad_weight, backend)

    @property
    def is_full(self) -> bool:
        """Whether all three GEMMs are PyTorch's own on both paths."""
        return all(parse_paths(text) == GemmPaths() for text in self[:3])


@functools.cache
def parse_paths(text: str) -> GemmPaths:
    """The paths that a field of :class:`Spec` names."""
    low, _, high = text.partition(" -> ")
    return GemmPaths(Operands.parse(low), Operands.parse(high))


def operand_spec(spec: Spec) -> str:
    """The format in which the low-cost path takes the activation."""
    return str(parse_paths(spec.output).low.left)


def in_force(text: str, active: bool) -> Operands:
    """The operands' formats on the path that the guard chooses."""
    paths = parse_paths(text)
    return paths.high if active else paths.low


# Along which dimensions a GEMM sums -----------------------------------------------------------------------------------


def summed(kind: str, extra: str, gemm: Gemm, dims: tuple[int, int], w_dim: int) -> tuple[tuple[int, ...], ...]:
    """The dimensions of the two operands of ``gemm`` that are summed over, negative or from 0.

    Args:
        kind, extra: of the projection, as in :mod:`gnmr_fx.projections`.
        gemm: which of the three.
        dims: numbers of dimensions of its operands: (x, w), (g, w), or (g, x).
        w_dim: number of dimensions of the weight.

    An outer product sums over nothing; its operands are taken along their last dimension.
    """
    if kind == "einsum":
        xs, ws, out = split_equation(extra)
        left, right, result = {"output": (xs, ws, out), "grad_input": (out, ws, xs), "grad_weight": (out, xs, ws)}[gemm]
        letters = [c for c in left if c in right and c not in result]
        return tuple(tuple(spec.index(c) for c in letters) or (-1,) for spec in (left, right))
    if gemm == "grad_weight":
        rows = -1 if kind != "left" else -2  # the dimension that is not summed over, in g and x
        if kind in ("grouped", "hf_grouped"):
            return (0,), (0,)
        if w_dim > 2:
            return ((-2,), (-2,)) if kind == "right" else ((-1,), (-1,))
        kept = [dim + rows for dim in dims]
        return tuple(tuple(d for d in range(dim) if d != keep) or (-1,) for dim, keep in zip(dims, kept, strict=True))
    activation = (-1,) if kind != "left" or dims[0] < 2 else (-2,)
    inner = {"linear": -1, "left": -1}.get(kind, -2)  # the weight's dimension of input features
    return activation, (inner if gemm == "output" else (-1 if inner == -2 else -2),)


def quantized(t: Tensor, dims: tuple[int, ...], fmt: Format, seed: Seed) -> Tensor:
    """``t`` as ``fmt`` along ``dims`` gives it back, in the same shape and dtype, of any strides."""
    if fmt == Format("none"):
        return t
    ends = tuple(d % t.dim() for d in dims) if t.dim() else ()
    if ends in ((), (t.dim() - 1,)):
        return kernels.roundtrip(t, fmt, seed)
    moved = t.movedim(ends, tuple(range(-len(ends), 0)))
    rows = moved.flatten(start_dim=-len(ends))
    return _along_rows(rows, fmt, seed).view(moved.shape).movedim(tuple(range(-len(ends), 0)), ends)


def _along_rows(rows: Tensor, fmt: Format, seed: Seed) -> Tensor:
    """Like :func:`gnmr_fx.kernels.roundtrip`, where the length of a row is a number of tokens and changes."""
    length = rows.shape[-1]
    if fmt.granularity == "group" and length % fmt.group_size:
        # Whole groups and a part of one, not equal ones: a kernel is built for every group size.
        padded = torch.nn.functional.pad(rows, (0, -length % fmt.group_size))
        return kernels.roundtrip(padded, fmt, seed)[..., :length].contiguous()
    return kernels.roundtrip(rows, fmt, seed, dynamic=True)


# Native kernels -------------------------------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """A GEMM of torch on codes.

    Attributes:
        name: of the function in torch.
        multiply: the function, with its arguments sorted out.
        multiples: what M, P and C have to be multiples of.
        rows: the least M.
        dtypes: of the results it can give.
    """

    name: str
    multiply: Callable[[Matrix, Matrix, torch.dtype], Tensor]
    multiples: tuple[int, int, int] = (1, 1, 1)
    rows: int = 1
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)

    def run(self, left: Matrix, right: Matrix, dtype: torch.dtype) -> Tensor:
        """The product of ``left`` [M, C] and ``right`` [P, C] transposed, [M, P] in ``dtype``."""
        if left.codes.numel() == 0 or right.codes.numel() == 0:  # refused by some kernels
            shape = (left.codes.shape[0], right.codes.shape[0])
            return torch.zeros(shape, dtype=dtype, device=left.codes.device)
        return self.multiply(left, right, dtype)


class Matrix(NamedTuple):
    """An operand as a kernel takes it: codes [M, C], contiguous, and scales."""

    codes: Tensor
    scales: Tensor


def _int_mm(left: Matrix, right: Matrix, dtype: torch.dtype) -> Tensor:
    # The stride of a dimension of 1 is arbitrary, yet the CPU's kernel takes it for the leading dimension and reads
    # past the end (pytorch/pytorch#195066): both operands get the strides that their shapes have.
    (rows, summed), columns = left.codes.shape, right.codes.shape[0]
    transposed = (1, summed) if summed > 1 else (columns, 1)
    sums = torch._int_mm(
        left.codes.as_strided((rows, summed), (summed, 1)), right.codes.as_strided((summed, columns), transposed)
    )
    return kernels.rescale(sums, left.scales, right.scales.t(), dtype)


def _scaled_mm(left: Matrix, right: Matrix, dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(
        left.codes,
        right.codes.t(),
        scale_a=left.scales,
        scale_b=right.scales.t(),
        out_dtype=dtype,
        use_fast_accum=False,
    )


def _scaled_mm_tiles(left: Matrix, right: Matrix, dtype: torch.dtype) -> Tensor:
    from torch.nn.functional import ScalingType, scaled_mm

    def tiles(matrix: Matrix) -> tuple[Tensor, Any]:
        rows, columns = matrix.codes.shape
        if matrix.scales.numel() == rows * (columns // 128):  # cuBLAS takes scales of 1x128 tiles column by column
            return matrix.scales.view(rows, -1).t().contiguous().t(), ScalingType.BlockWise1x128
        return matrix.scales.view(rows // 128, -1), ScalingType.BlockWise128x128

    (scale_a, recipe_a), (scale_b, recipe_b) = tiles(left), tiles(right)
    return scaled_mm(left.codes, right.codes.t(), scale_a, recipe_a, scale_b.t(), recipe_b, output_dtype=dtype)


def cpu_multiplies_int8() -> bool:
    """Whether the CPU has instructions for products of int8 (AVX-512 VNNI, AMX); else torch's kernel is a slow loop."""
    return torch.cpu._is_vnni_supported() or torch.cpu._is_amx_tile_supported()


def _candidate(operands: Operands, device: torch.device) -> Kernel | None:
    """The kernel that multiplies such operands, where this kind of device has one that is not a slow reference."""
    left, right = operands.left, operands.right
    if left.symmetric and right.symmetric and left.granularity == right.granularity == "token":
        if device.type == "cuda":
            return Kernel("torch._int_mm", _int_mm, (1, 8, 8), 17)
        return Kernel("torch._int_mm", _int_mm) if device.type == "cpu" and cpu_multiplies_int8() else None
    # On the CPU, products of fp8 are a reference that takes seconds.
    fp8 = left.is_fp8 and right.is_fp8 and "fp8_e4m3" in (left.dtype, right.dtype)
    if not fp8 or device.type != "cuda" or left.scale != "fp32" or right.scale != "fp32":
        return None
    granularity = (left.granularity, right.granularity)
    if granularity in (("token", "token"), ("tensor", "tensor")):
        return Kernel("torch._scaled_mm", _scaled_mm, (1, 16, 16), dtypes=(torch.bfloat16,))
    if left.granularity == "group" and left.group_size == right.group_size == 128 and right.granularity != "token":
        return Kernel("torch.nn.functional.scaled_mm", _scaled_mm_tiles, (1, 128, 128), dtypes=(torch.bfloat16,))
    return None


@functools.cache
def native_kernel(operands: Operands, device: torch.device) -> tuple[Kernel | None, str]:
    """The kernel for such operands on ``device``, or None and why there is none.

    A kernel counts only if it was tried here, once per process: on a 256x256 product, against the emulation.
    """
    kernel = _candidate(operands, device)
    what = f"{operands.label} on {device.type}"
    if kernel is None:
        return None, f"torch has no kernel for {what} that is not a slow reference"
    dtype = kernel.dtypes[0]
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(256, 256, generator=generator).to(device, dtype) for _ in range(2))
        seed = torch.zeros((), dtype=torch.int64)
        expected = (
            quantized(a, (-1,), operands.left, seed).float() @ quantized(b, (-1,), operands.right, seed).float().t()
        )
        try:
            found = kernel.run(_matrix(a, operands.left, seed), _matrix(b, operands.right, seed), dtype)
        except (RuntimeError, ValueError, NotImplementedError, ImportError, AttributeError, TypeError) as cause:
            return None, f"{kernel.name} refused {what}: {str(cause).strip().splitlines()[0]}"
    # Both are off by roundings of operands and result to dtype: sqrt(256) of them against sums of 256 products.
    error = (found.float() - expected).norm() / expected.norm()
    if not error < 4 * torch.finfo(dtype).eps:
        return None, f"{kernel.name} gave another product for {what}: relative difference {error:.3g}"
    return kernel, ""


def _matrix(rows: Tensor, fmt: Format, seed: Seed) -> Matrix:
    """``rows`` [M, C] in ``fmt``, as kernels take it."""
    encoded = kernels.encode(rows, fmt, seed, dynamic=True)
    return _codes(encoded, fmt, rows.shape)


def _codes(encoded: Encoded, fmt: Format, shape: Sequence[int]) -> Matrix:
    payload, scales = encoded
    if fmt.granularity == "block":
        payload = from_groups(payload.view(torch.uint8), layout(shape, fmt), shape).view(payload.dtype)
    return Matrix(payload.view(shape[0], shape[1]), scales)


@functools.lru_cache(maxsize=4096)
def _backend(
    gemm: Gemm,
    text: str,
    backend: Backend,
    sizes: tuple[int, int, int] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[str, str]:
    """What runs on the two paths of ``gemm``, ``"native"``, ``"emulated"`` or ``"full"``.

    Args:
        sizes: M, P and C of the product as one matrix times another; None where it is not one.
    """
    paths = parse_paths(text)
    low, high = (_choose(gemm, operands, backend, sizes, dtype, device) for operands in (paths.low, paths.high))
    return low, high


def _choose(
    gemm: Gemm,
    operands: Operands,
    backend: Backend,
    sizes: tuple[int, int, int] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> str:
    if operands == FULL:
        return "full"
    if backend == "emulated":
        return "emulated"
    kernel, reason = native_kernel(operands, device)
    if kernel is not None:
        if sizes is None:
            reason = "it is not a product of two matrices (a linear layer, or x @ w with a matrix w)"
        elif dtype not in kernel.dtypes:
            reason = f"{kernel.name} gives {', '.join(map(str, kernel.dtypes))}, not {dtype}"
        elif 0 in sizes:
            return "native"  # which multiplies nothing
        elif sizes[0] < kernel.rows or any(n % m for n, m in zip(sizes, kernel.multiples, strict=True)):
            reason = (
                f"{kernel.name} takes M, N, K in multiples of {kernel.multiples} with M from {kernel.rows}, not {sizes}"
            )
        else:
            return "native"
    if backend == "native":
        raise _no_kernel(gemm, operands, reason)
    return "emulated"


def _no_kernel(gemm: Gemm, operands: Operands, reason: str) -> NativeKernelError:
    return NativeKernelError(
        f"expected a native kernel for the {gemm} GEMM with operands {operands.label}, found none: {reason}; use "
        "backend='auto' to emulate where there is none, or backend='emulated'"
    )


def check_native(recipe: GemmRecipe, device: torch.device) -> None:
    """Raise :class:`NativeKernelError` where ``recipe`` asks for native kernels and ``device`` has none at all."""
    if recipe.backend != "native":
        return
    for gemm in GEMMS:
        paths: GemmPaths = getattr(recipe, gemm)
        for operands in {paths.low, paths.high} - {FULL}:
            kernel, reason = native_kernel(operands, device)
            if kernel is None:
                raise _no_kernel(gemm, operands, reason)


def _sizes(kind: str, gemm: Gemm, x_shape: Sequence[int], w: Tensor) -> tuple[int, int, int] | None:
    """M, P and C of ``gemm``; None where it is not a product of two matrices."""
    if kind not in ("linear", "right") or w.dim() != 2 or len(x_shape) < 1:
        return None
    outputs, inputs = w.shape if kind == "linear" else w.shape[::-1]
    tokens = 1
    for n in x_shape[:-1]:
        tokens *= n
    return {
        "output": (tokens, outputs, inputs),
        "grad_input": (tokens, inputs, outputs),
        "grad_weight": (outputs, inputs, tokens),
    }[gemm]


def backends(
    kind: str, spec: Spec, x_shape: Sequence[int], w: Tensor, dtype: torch.dtype
) -> tuple[tuple[str, str], ...]:
    """For each of :data:`GEMMS`, what runs on its low-cost and on its recovery path.

    Raises:
        NativeKernelError: where the recipe asks for native kernels and there is none.
    """
    return tuple(
        _backend(gemm, getattr(spec, gemm), spec.backend, _sizes(kind, gemm, x_shape, w), dtype, w.device)
        for gemm in GEMMS
    )


# The three GEMMs ------------------------------------------------------------------------------------------------------


def output(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    offs: Tensor | None,
    active: bool,
    seed: Seed,
    kind: str,
    extra: str,
    spec: Spec,
    stored: tuple[Encoded, Format] | None = None,
) -> Tensor:
    """The output, its operands in the formats of the path in force.

    Args:
        x, w, b, offs, kind, extra: as in :mod:`gnmr_fx.projections`.
        active: whether that is the recovery path.
        seed: for stochastic rounding.
        spec: the recipe.
        stored: ``x`` as it is stored for the backward, and in what format, where that is the operand's too.
    """
    operands = in_force(spec.output, active)
    if operands == FULL:
        return KINDS[kind].forward(x, w, b, offs, extra)
    which = _backend("output", spec.output, spec.backend, _sizes(kind, "output", x.shape, w), x.dtype, w.device)
    of_x, of_w = summed(kind, extra, "output", (x.dim(), w.dim()), w.dim())
    # An activation is stored along its last dimension.
    is_operand = stored is not None and stored[1] == operands.left and of_x[0] % x.dim() == x.dim() - 1
    shared = stored[0] if stored is not None and is_operand else None
    if which[active] == "native":
        kernel = _native(operands, w.device)
        shape = (x.numel() // x.shape[-1] if x.shape[-1] else 0, x.shape[-1])
        fmt = operands.left
        rows = _codes(shared, fmt, shape) if shared is not None else _matrix(x.reshape(shape), fmt, seed)
        right = _matrix(w if kind == "linear" else w.t().contiguous(), operands.right, seed)
        out = kernel.run(rows, right, x.dtype).view(*x.shape[:-1], right.codes.shape[0])
        return out if b is None else out + b
    left = (
        quantized(x, of_x, operands.left, seed)
        if shared is None
        else kernels.decode(shared, operands.left, x.shape, x.dtype)
    )
    return KINDS[kind].forward(left, quantized(w, of_w, operands.right, seed), b, offs, extra)


def grad_input(
    g: Tensor,
    w: Tensor,
    offs: Tensor | None,
    active: bool,
    seed: Seed,
    kind: str,
    extra: str,
    spec: Spec,
    x_shape: Sequence[int],
) -> Tensor:
    """The gradient of the activation, of shape ``x_shape``; arguments as for :func:`output`."""
    operands = in_force(spec.grad_input, active)
    if operands == FULL:
        return KINDS[kind].grad_input(g, w, offs, extra, x_shape)
    which = _backend(
        "grad_input", spec.grad_input, spec.backend, _sizes(kind, "grad_input", x_shape, w), g.dtype, w.device
    )
    if which[active] == "native":
        kernel = _native(operands, w.device)
        left = _matrix(g.reshape(-1, g.shape[-1]), operands.left, seed)
        right = _matrix(w.t().contiguous() if kind == "linear" else w, operands.right, seed)
        return kernel.run(left, right, g.dtype).view(tuple(x_shape))
    of_g, of_w = summed(kind, extra, "grad_input", (g.dim(), w.dim()), w.dim())
    operand = quantized(w, of_w, operands.right, seed)
    return KINDS[kind].grad_input(quantized(g, of_g, operands.left, seed), operand, offs, extra, x_shape)


def grad_weight(
    g: Tensor,
    x: Tensor,
    w: Tensor,
    offs: Tensor | None,
    active: bool,
    seed: Seed,
    kind: str,
    extra: str,
    spec: Spec,
) -> Tensor:
    """The gradient of the weight, of the shape of ``w``, of which nothing else is read."""
    operands = in_force(spec.grad_weight, active)
    if operands == FULL:
        return KINDS[kind].grad_weight(g, x, offs, extra, w.shape)
    sizes = _sizes(kind, "grad_weight", x.shape, w)
    which = _backend("grad_weight", spec.grad_weight, spec.backend, sizes, g.dtype, w.device)
    if which[active] == "native":
        kernel = _native(operands, w.device)
        left, right = (
            _matrix(t.reshape(-1, t.shape[-1]).t().contiguous(), fmt, seed)
            for t, fmt in ((g, operands.left), (x, operands.right))
        )
        made = kernel.run(left, right, g.dtype)
        return made if kind == "linear" else made.t()
    of_g, of_x = summed(kind, extra, "grad_weight", (g.dim(), x.dim()), w.dim())
    left_operand, right_operand = quantized(g, of_g, operands.left, seed), quantized(x, of_x, operands.right, seed)
    return KINDS[kind].grad_weight(left_operand, right_operand, offs, extra, w.shape)


def _native(operands: Operands, device: torch.device) -> Kernel:
    kernel, reason = native_kernel(operands, device)
    assert kernel is not None, reason
    return kernel


# Operators for compiled graphs ----------------------------------------------------------------------------------------

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_SPEC = "str kind, str extra, str output, str grad_input, str grad_weight, str backend"
for _definition in (
    "latch(Tensor guard) -> Tensor",
    f"gemm_output(Tensor x, Tensor w, Tensor? b, Tensor? offs, Tensor active, Tensor guard, Tensor? seed, "
    f"Tensor[] stored, str low, str high, SymInt[] size, bool reports, {_SPEC}) -> Tensor",
    f"gemm_grad_input(Tensor g, Tensor w, Tensor? offs, Tensor active, Tensor? seed, SymInt[] size, {_SPEC}) -> Tensor",
    f"gemm_grad_weight(Tensor g, Tensor x, Tensor w, Tensor? offs, Tensor active, Tensor? seed, {_SPEC}) -> Tensor",
):
    _library.define(_definition, tags=(torch.Tag.pt2_compliant_tag,))


def _latch_op(guard: Tensor) -> Tensor:
    return guard.clone()


def _output_op(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    offs: Tensor | None,
    active: Tensor,
    guard: Tensor,
    seed: Seed,
    stored: list[Tensor],
    low: str,
    high: str,
    size: list[int],
    reports: bool,
    kind: str,
    extra: str,
    *spec: str,
) -> Tensor:
    parsed = Spec(*spec)  # type: ignore[arg-type]
    if reports:
        stores(guard, Kept(tuple(size), x.dtype), x, operand_spec(parsed))
    observe_backends(guard, backends(kind, parsed, x.shape, w, x.dtype))
    kept = None
    if stored and tuple(size) == tuple(x.shape):
        high_is_there = stored[2].size(0) > 0
        kept = (
            (Encoded(*stored[2:]), parse_format(high)) if high_is_there else (Encoded(*stored[:2]), parse_format(low))
        )
    return output(x, w, b, offs, bool(active), seed, kind, extra, parsed, kept).contiguous()


def _grad_input_op(
    g: Tensor,
    w: Tensor,
    offs: Tensor | None,
    active: Tensor,
    seed: Seed,
    size: list[int],
    kind: str,
    extra: str,
    *spec: str,
) -> Tensor:
    return grad_input(g, w, offs, bool(active), seed, kind, extra, Spec(*spec), size).contiguous()  # type: ignore[arg-type]


def _grad_weight_op(
    g: Tensor,
    x: Tensor,
    w: Tensor,
    offs: Tensor | None,
    active: Tensor,
    seed: Seed,
    kind: str,
    extra: str,
    *spec: str,
) -> Tensor:
    return grad_weight(g, x, w, offs, bool(active), seed, kind, extra, Spec(*spec)).contiguous()  # type: ignore[arg-type]


@torch.library.register_fake(f"{NAMESPACE}::latch", lib=_library)
def _latch_fake(guard: Tensor) -> Tensor:
    return torch.empty_like(guard)


@torch.library.register_fake(f"{NAMESPACE}::gemm_output", lib=_library)
def _output_fake(x: Tensor, w: Tensor, b: Tensor | None, offs: Tensor | None, *rest: Any) -> Tensor:
    kind, extra = rest[-6:-4]
    return KINDS[kind].forward(x, w, b, offs, extra).contiguous()


@torch.library.register_fake(f"{NAMESPACE}::gemm_grad_input", lib=_library)
def _grad_input_fake(g: Tensor, w: Tensor, offs: Any, active: Tensor, seed: Any, size: Any, *spec: str) -> Tensor:
    return g.new_empty(size)


@torch.library.register_fake(f"{NAMESPACE}::gemm_grad_weight", lib=_library)
def _grad_weight_fake(g: Tensor, x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    return g.new_empty(w.shape)


for _name, _implementation in (
    ("latch", _latch_op),
    ("gemm_output", _output_op),
    ("gemm_grad_input", _grad_input_op),
    ("gemm_grad_weight", _grad_weight_op),
):
    _library.impl(_name, _disable_dynamo(_implementation), "CompositeExplicitAutograd")


class GuardedGemms(torch.autograd.Function):
    """A projection with its three GEMMs in the formats of a recipe, and its activation as that stores it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        offs: Tensor | None,
        active: Any,
        guard: Tensor,
        seed: Seed,
        low_payload: Tensor | None,
        low_scales: Tensor | None,
        high_payload: Tensor | None,
        high_scales: Tensor | None,
        kind: str,
        extra: str,
        spec: Spec,
        low: str,
        high: str,
        size: Any,
        keeps: bool,
        reports: bool,
    ) -> Tensor:
        """``active`` and ``seed`` are tensors in a traced graph, a bool and an int in eager mode; ``size`` is the
        activation's shape as it is stored; ``keeps`` says that a weight gradient will be wanted, ``reports``, that the
        operator tells the controller of the activation."""
        compiling = torch.compiler.is_compiling()
        stores = (low_payload, low_scales, high_payload, high_scales)
        encoded = [part for part in stores if part is not None]
        kept = [*encoded] if encoded else [x] if keeps else []
        traced = [t for t in (offs, *((active, seed) if compiling else ())) if t is not None]
        ctx.save_for_backward(w, *kept, *traced)
        ctx.layout = (len(kept), offs is not None, seed is not None)
        ctx.active, ctx.seed = (None, None) if compiling else (active, seed)
        ctx.kind, ctx.extra, ctx.spec, ctx.low, ctx.high = kind, extra, spec, low, high
        ctx.x_shape, ctx.x_dtype, ctx.b_shape = x.shape, x.dtype, None if b is None else b.shape
        ctx.size = size
        if compiling:
            return torch.ops.gnmr_fx.gemm_output(
                x, w, b, offs, active, guard, seed, encoded, low, high, size, reports, kind, extra, *spec
            )
        stored = None
        if encoded and tuple(size) == tuple(x.shape):
            payload, scales = encoded[2:] if active else encoded[:2]
            stored = Encoded(payload, scales), parse_format(high if active else low)
        return no_view(output(x, w, b, offs, active, seed, kind, extra, spec, stored))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        compiling = torch.compiler.is_compiling()
        if not compiling and torch.is_grad_enabled():
            raise DoubleBackwardError(
                "expected a first-order backward, found create_graph=True through an operator guarded by gnmr-fx, "
                "whose GEMMs are quantized, so second derivatives would be wrong; call gnmr_fx.uninstrument(model) or "
                "exclude these operators (exclude=...) for this computation"
            )
        count, has_offs, has_seed = ctx.layout
        w, *saved = ctx.saved_tensors
        kept, rest = saved[:count], list(saved[count:])  # a tuple, where Dynamo of torch 2.11 traces this
        offs = rest.pop(0) if has_offs else None
        active = rest.pop(0) if compiling else ctx.active
        seed = rest.pop(0) if compiling and has_seed else ctx.seed
        kind, extra, spec = ctx.kind, ctx.extra, ctx.spec
        grad_x = grad_w = grad_b = None
        if ctx.needs_input_grad[0]:
            if compiling:
                grad_x = torch.ops.gnmr_fx.gemm_grad_input(g, w, offs, active, seed, ctx.x_shape, kind, extra, *spec)
            else:
                grad_x = grad_input(g, w, offs, active, seed, kind, extra, spec, ctx.x_shape)
        if ctx.needs_input_grad[1]:
            x = kept[0]
            if count == 4:
                after = g if compiling else None
                x = torch.ops.gnmr_fx.restore(*kept, ctx.low, ctx.high, ctx.size, ctx.x_dtype, after).view(ctx.x_shape)
            if compiling:
                grad_w = torch.ops.gnmr_fx.gemm_grad_weight(g, x, w, offs, active, seed, kind, extra, *spec)
            else:
                grad_w = grad_weight(g, x, w, offs, active, seed, kind, extra, spec)
        if ctx.b_shape is not None and ctx.needs_input_grad[2]:
            grad_b = g.sum_to_size(ctx.b_shape)
        return grad_x, grad_w, grad_b, *(None,) * 16


def check_operands(x: Tensor, w: Tensor, kind: str) -> None:
    """Refuse what cannot be quantized.

    Raises:
        UnsupportedInputError: for an activation that is not floating point, or in parts on several devices.
    """
    if not x.is_floating_point():
        raise UnsupportedInputError(
            f"expected a floating-point activation for a projection ({kind}) whose recipe quantizes its GEMMs, found "
            f"{x.dtype}; cast it, or leave the operator out with exclude=[...]"
        )
    if distributed.layout_of(x) is not None or distributed.layout_of(w) is not None:
        raise UnsupportedInputError(
            f"expected plain tensors for a projection ({kind}) whose recipe quantizes its GEMMs, found a DTensor "
            "(tensor parallelism), whose scales would have to be agreed on between ranks; use a recipe that only "
            "stores activations (saved-*), or FSDP2 alone, which gathers weights before they are used"
        )
