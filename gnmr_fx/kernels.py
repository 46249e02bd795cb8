"""The formats of :mod:`gnmr_fx.formats` as fused kernels, one each for encode and decode.

The readable functions on groups ``[N, g]`` are traced with ``make_fx``, once per kind, format, dtype,
device and group size, and handed to Inductor's graph compiler. Dynamo takes no part: its frame counters,
recompile limits and ``error_on_recompile`` are untouched, and a kernel can be built at run time, inside an
operator of a model that is compiled already. ``N`` is symbolic (for ``"tensor"`` granularity ``g`` is), so
a new batch size or layer builds nothing new. Inductor's on-disk cache serves later processes.

Call these from an operator or from eager code, not from code that Dynamo traces. Results agree bitwise with
the readable code on CPU.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gnmr_fx import formats
from gnmr_fx.errors import FormatError, GnmrWarning, MissingDependencyError
from gnmr_fx.formats import Encoded, Layout
from gnmr_fx.recipe import Format

__all__ = ["Backend", "decode", "encode", "rescale", "roundtrip"]

Backend = Literal["auto", "inductor", "eager"]
_BACKENDS = get_args(Backend)

# Inductor takes a list of inputs, which it may clear, and returns the outputs in order.
_Kernel = Callable[[list[Any]], Sequence[Tensor]]

_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)

# Groups that Inductor is told to expect: enough for it to choose several threads.
_EXPECTED_GROUPS = 16384
_EXPECTED_TENSOR = 1 << 20
# Stands for a group size where a kernel takes rows of any length.
_DYNAMIC = -1
_EXPECTED_ROW = 1024
# From here on a kernel needs 64-bit indices, and Inductor chooses them by the sizes it is told to expect.
_LARGE = 2**31 - 1


def encode(
    x: Tensor, fmt: Format, seed: int | Tensor | None = None, *, backend: Backend = "auto", dynamic: bool = False
) -> Encoded:
    """:func:`gnmr_fx.formats.encode` by a fused kernel.

    Args:
        x, fmt, seed: as there.
        backend: ``"inductor"``: the fused kernel. ``"eager"``: the readable code. ``"auto"``: the kernel, and
            where Inductor cannot build it (no C++ compiler, say) one :class:`GnmrWarning` per process, then
            the readable code. Tensor subclasses and formats without scales take the readable code in any
            case.

    Raises:
        FormatError: as there, or for an unknown backend.
        MissingDependencyError: with ``"inductor"``, where the kernel cannot be built.
    """
    _check_backend(backend)
    if isinstance(x, FakeTensor):  # no values to encode
        return formats.empty_encoded(x, fmt)
    if backend == "eager" or not fmt.is_scaled or type(x) not in _PLAIN_TENSORS:
        return formats.encode(x, fmt, seed)
    plan, key, inputs = _prepare("encode", x, fmt, seed, dynamic)
    if plan.is_empty:
        return formats.empty_encoded(x, fmt)
    kernel = _kernels.get(key) or _build(key)
    if kernel is _unavailable:
        _warn_or_raise(key, backend)
        return formats.encode(x, fmt, seed)
    payload, scales = kernel(inputs)
    return Encoded(payload, scales)


def roundtrip(
    x: Tensor, fmt: Format, seed: int | Tensor | None = None, *, backend: Backend = "auto", dynamic: bool = False
) -> Tensor:
    """``decode(encode(x))`` in the shape and dtype of ``x``, contiguous, by one kernel that packs nothing.

    Args and errors are those of :func:`encode`. A format without scales gives a cast there and back.
    """
    _check_backend(backend)
    if backend == "eager" or not fmt.is_scaled or type(x) not in _PLAIN_TENSORS:
        return formats.decode(formats.encode(x, fmt, seed), fmt, x.shape, x.dtype)
    plan, key, inputs = _prepare("roundtrip", x, fmt, seed, dynamic)
    if plan.is_empty:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernel = _kernels.get(key) or _build(key)
    if kernel is _unavailable:
        _warn_or_raise(key, backend)
        return formats.decode(formats.encode(x, fmt, seed), fmt, x.shape, x.dtype)
    (groups,) = kernel(inputs)
    return formats.from_groups(groups, plan.cut, x.shape)


def rescale(sums: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """``sums * rows * columns`` in fp32, cast to ``dtype``: what turns an integer product into one of scaled operands.

    Args:
        sums: int32 [M, P], contiguous.
        rows: fp32 [M, 1].
        columns: fp32 [1, P].
    """
    if sums.numel() == 0:
        return sums.to(dtype)
    key = ("rescale", Format("none"), dtype, sums.device, _DYNAMIC, sums.numel() > _LARGE)
    kernel = _kernels.get(key) or _build(key)
    if kernel is _unavailable:
        _warn_or_raise(key, "auto")
        return formats.rescaled(sums, rows, columns, dtype)
    (scaled,) = kernel([sums, rows.contiguous(), columns.contiguous()])
    return scaled


def _prepare(
    kind: str, x: Tensor, fmt: Format, seed: int | Tensor | None, dynamic: bool
) -> tuple[_Plan, _Key, list[Tensor]]:
    """The plan for ``x``, the key of the kernel, and the kernel's inputs."""
    formats.check_input(x, fmt)
    word = formats.seed_word(seed, fmt)
    plan = _plan(x.shape, fmt)
    dynamic = dynamic and fmt.granularity == "token" and formats.packing(fmt).codes == 1
    key = (kind, fmt, x.dtype, x.device, _DYNAMIC if dynamic else plan.group, plan.is_large)
    if plan.is_empty:
        return plan, key, []
    groups = formats.to_groups(x.detach() if x.requires_grad else x, plan.cut).contiguous()
    if plan.group == 0:
        groups = groups.view(formats.packing(fmt).codes, -1)
    inputs = [groups]
    if fmt.is_stochastic:
        inputs.append(torch.full((), word, dtype=torch.int32, device=x.device))
    return plan, key, inputs


def decode(
    encoded: Encoded, fmt: Format, size: Sequence[int], dtype: torch.dtype, *, backend: Backend = "auto"
) -> Tensor:
    """:func:`gnmr_fx.formats.decode` by a fused kernel; ``backend`` as in :func:`encode`."""
    _check_backend(backend)
    payload, scales = encoded
    if backend == "eager" or not fmt.is_scaled or type(payload) is not Tensor or type(scales) is not Tensor:
        return formats.decode(encoded, fmt, size, dtype)
    size = tuple(size)
    plan = _plan(size, fmt)
    if payload.shape != plan.payload_shape or scales.shape != plan.scales_shape:
        formats.check_encoded(Encoded(payload, scales), fmt, size)
    if plan.is_empty:
        return torch.empty(size, dtype=dtype, device=payload.device)
    key = ("decode", fmt, dtype, payload.device, plan.group, plan.is_large)
    kernel = _kernels.get(key) or _build(key)
    if kernel is _unavailable:
        _warn_or_raise(key, backend)
        return formats.decode(encoded, fmt, size, dtype)
    payload = payload.contiguous()
    if plan.group == 0:
        payload = payload.view(formats.packing(fmt).words, -1)
    (groups,) = kernel([payload, scales.contiguous()])
    return formats.from_groups(groups, plan.cut, size)


class _Plan(NamedTuple):
    """What a call needs to know of a shape, worked out once.

    Attributes:
        cut: the layout.
        group: the group size that a kernel is built for; 0 where it is dynamic.
        is_empty: there is no group.
        is_large: 32-bit indices do not reach.
        payload_shape, scales_shape: shapes in storage.
    """

    cut: Layout
    group: int
    is_empty: bool
    is_large: bool
    payload_shape: tuple[int, int]
    scales_shape: tuple[int, int]


@functools.lru_cache(maxsize=4096)
def _plan(size: Sequence[int], fmt: Format) -> _Plan:
    cut = formats.layout(size, fmt)
    return _Plan(
        cut,
        group=0 if fmt.granularity == "tensor" else cut.group,
        is_empty=cut.total == 0,
        is_large=cut.total * cut.group > _LARGE,
        payload_shape=formats.payload_shape(size, fmt),
        scales_shape=formats.scales_shape(size, fmt),
    )


def _check_backend(backend: Backend) -> None:
    if backend not in _BACKENDS:
        raise FormatError(f"expected backend to be one of {', '.join(_BACKENDS)}, found {backend!r}")


# --- building kernels ---------------------------------------------------------------------------------------

# (kind, format, dtype of the decoded tensor, device, group size or 0, large)
_Key = tuple[str, Format, torch.dtype, torch.device, int, bool]


def _unavailable(inputs: list[Any]) -> Sequence[Tensor]:
    raise AssertionError("stands for a kernel that cannot be built; never called")


_kernels: dict[_Key, _Kernel] = {}
_causes: dict[_Key, Exception] = {}
_lock = threading.RLock()
_warned = False


def _build(key: _Key) -> _Kernel:
    """The kernel of ``key``, built here or by another thread; :func:`_unavailable` where Inductor fails."""
    with _lock:
        if key not in _kernels:
            try:
                _kernels[key] = _compile(key)
            # Inductor reports a missing or broken toolchain by many types, down to OSError.
            except Exception as cause:
                _causes[key], _kernels[key] = cause, _unavailable
        return _kernels[key]


def _warn_or_raise(key: _Key, backend: Backend) -> None:
    """Tell that the kernel of ``key`` cannot be built: at most one warning per process, or an error."""
    global _warned
    if backend == "auto" and _warned:
        return
    kind, fmt, dtype, device, *_ = key
    cause = _causes[key]
    first_line = (str(cause).strip().splitlines() or [""])[0]
    message = (
        f"expected Inductor to build the {kind} kernel for {fmt} ({dtype}, {device}), but it raised "
        f"{type(cause).__name__}: {first_line}\nA C++ compiler (CPU) or Triton (GPU) that Inductor can use "
        "makes it work"
    )
    if backend == "inductor":
        raise MissingDependencyError(f"{message}; backend='eager' needs neither.") from cause
    _warned = True
    warnings.warn(f"{message}; until then slower, unfused code runs.", GnmrWarning, stacklevel=3)


def _compile(key: _Key) -> _Kernel:
    kind, fmt, dtype, device, group, large = key
    formats.torchao_primitives()  # imported outside of the trace

    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.utils import BoxedBool
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.utils._python_dispatch import _disable_current_modes

    # 0 and 1 are sizes like any other; different dimensions of equal size stay different.
    shapes = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    fake_mode = FakeTensorMode(shape_env=shapes)
    with (
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        _no_autocast(device.type),
        _inductor_settings(),
        tracing(TracingContext(fake_mode)),
    ):
        with fake_mode:
            if group == _DYNAMIC:
                function, inputs = _dynamic_graph(kind, fmt, dtype, device, shapes, large)
            else:
                function, inputs = _graph(kind, fmt, dtype, device, group, _symbol(shapes, group, large))
        trace = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="symbolic")
        traced = trace(*inputs)
        return compile_fx_inner(
            # Without the attributes that make_fx leaves on its module, for which Inductor finds no cache key.
            torch.fx.GraphModule(traced, traced.graph),
            inputs,
            is_inference=True,
            # A captured graph would hand out the same output memory at every call.
            cudagraphs=BoxedBool(False),
        )


def _graph(
    kind: str, fmt: Format, dtype: torch.dtype, device: torch.device, group: int, symbol: Any
) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """The function to trace, and example inputs: ``symbol`` groups, or one group packed in ``symbol`` times the
    least whole number of bytes.

    A lambda, since Inductor finds no cache key for the module that make_fx makes of a function with a name.
    """
    codes, words = formats.packing(fmt)
    if kind == "decode":
        shape = (symbol, group // codes * words) if group else (words, symbol)
        payload = torch.empty(shape, dtype=formats.payload_dtype(fmt, dtype), device=device)
        scale_shape = (symbol if group else 1, formats.scales_per_group(fmt))
        scales = torch.empty(scale_shape, dtype=formats.scales_dtype(fmt), device=device)
        flat = (lambda p: p) if group or words == 1 else (lambda p: p.reshape(1, -1))
        return lambda codes, scale: (formats.decode_groups(flat(codes), scale, fmt, dtype),), [payload, scales]

    # A dynamic group comes as a matrix of as many rows as it has to be a multiple of, which no plain symbol can say.
    inputs = [torch.empty((symbol, group) if group else (codes, symbol), dtype=dtype, device=device)]
    if fmt.is_stochastic:
        inputs.append(torch.empty((), dtype=torch.int32, device=device))
    return lambda x, *word: _made_of(kind, x if group else x.reshape(1, -1), fmt, *word), inputs


def _made_of(kind: str, groups: Tensor, fmt: Format, *word: Tensor) -> tuple[Tensor, ...]:
    if kind == "roundtrip":
        return (formats.roundtrip_groups(groups, fmt, *word),)
    return formats.encode_groups(groups, fmt, *word)


def _dynamic_graph(
    kind: str, fmt: Format, dtype: torch.dtype, device: torch.device, shapes: Any, large: bool
) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """The function to trace where both sizes of a matrix are symbolic, and example inputs."""
    rows = 2 * _LARGE // _EXPECTED_ROW if large else _EXPECTED_ROW
    size = [_new_symbol(shapes, name, typical) for name, typical in (("rows", rows), ("width", _EXPECTED_ROW))]
    if kind == "rescale":
        sums = torch.empty(size, dtype=torch.int32, device=device)
        scales = [torch.empty(shape, device=device) for shape in ((size[0], 1), (1, size[1]))]
        return lambda sums, rows, columns: (formats.rescaled(sums, rows, columns, dtype),), [sums, *scales]
    inputs = [torch.empty(size, dtype=dtype, device=device)]
    if fmt.is_stochastic:
        inputs.append(torch.empty((), dtype=torch.int32, device=device))
    return lambda x, *word: _made_of(kind, x, fmt, *word), inputs


def _symbol(shapes: Any, group: int, large: bool) -> Any:
    """A symbolic size in ``shapes``, with a typical value for Inductor's heuristics."""
    typical = _EXPECTED_GROUPS if group else _EXPECTED_TENSOR
    if large:
        typical = 2 * _LARGE // (group or 1)
    return _new_symbol(shapes, "size", typical)


def _new_symbol(shapes: Any, name: str, typical: int) -> Any:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = shapes.create_symbol(typical, source, dynamic_dim=DimDynamic.DYNAMIC)
    return shapes.create_symintnode(symbol, hint=typical, source=source)


@contextlib.contextmanager
def _no_autocast(device_type: str) -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast(device_type, enabled=False):
        yield


@contextlib.contextmanager
def _inductor_settings() -> Iterator[None]:
    """Settings that the numerics rest on, and none of the passes a user may have registered."""
    from torch._inductor import config

    wanted = {
        "cpp.dynamic_threads": True,
        "cpp.enable_unsafe_math_opt_flag": False,
        "cpp.enable_floating_point_contract_flag": "off",
        "eager_numerics.division_rounding": True,
        "post_grad_custom_pre_pass": None,
        "post_grad_custom_post_pass": None,
        "_pre_fusion_custom_pass": None,
        "_post_fusion_custom_pass": None,
    }
    known = config.get_config_copy()
    with config.patch({name: value for name, value in wanted.items() if name in known}):
        yield
