"""The readable reference of every :class:`~gnmr_fx.recipe.Format`: encode to packed codes, decode back.

Canonical form. Every scaled format works on groups that share one scale: a tensor ``x[..., K]`` becomes ``N``
groups of ``g`` elements, ``[N, g]``:

- ``"group"``: ``G = ceil(K / group_size)`` groups per row of the last dimension, all of the same size
  ``g = ceil(K / G)``, rounded up to whole bytes of codes. So a ragged ``K`` gets equal groups, not a short
  last one.
- ``"token"``: one group per row.
- ``"block"``: rectangles of the last two dimensions, cut like groups along both; ``N`` runs over leading
  dimensions, bands of rows, and blocks within a band, and ``g`` over a block's elements, row by row.
- ``"tensor"``: one group in all.

Rows are zero-padded to ``G * g`` (blocks along both dimensions). Zero is always representable and never widens a
range, so padding changes no scale. A 1-D tensor is one row, a 0-D tensor one element, and a tensor without elements
has ``N = 0``.

Storage. ``Encoded(payload, scales)``:

=========  =================================================  =======================================
dtype      payload                                            scales
=========  =================================================  =======================================
intB       uint8 ``[N, g * B / 8]``                           ``[N, 2]``: scale, zero point
symmetric  int8 ``[N, g]``                                    ``[N, 1]``: scale
fp6_*      uint8 ``[N, g * 6 / 8]``                           ``[N, 1]``: scale
fp8_*      the float8 dtype, ``[N, g]``                       ``[N, 1]``: scale
bf16       bfloat16 ``[rows, K]``                             ``[rows, 0]``
none       the dtype of ``x``, ``[rows, K]``                  ``[rows, 0]``
=========  =================================================  =======================================

Scales are bfloat16, float32, or, for e8m0, uint8 (the exponent plus 127; 255 = nan), as the format says.

Codes are packed in split order: with ``c = 8 / B`` codes a byte and ``h = g / c``, byte ``j`` of a group
holds codes ``j, j + h, j + 2h, …``, lowest bits first, so that packing and unpacking touch runs of
neighbours. Of int3 8 codes make 3 bytes, of 6-bit floats (sign, exponent, mantissa, as in the OCP MX specification) 4:
with ``h = g / c``, the codes ``j, j + h, j + 2h, …`` are the digits of a 24-bit number, lowest first, whose bytes,
lowest first, are bytes ``j, j + h, j + 2h`` of the group.

Numerics. Arithmetic is in fp32, whatever the dtype of ``x``. Integer formats are torchao's affine
quantization (``torchao.quantization.quant_primitives``: asymmetric, zero kept exactly) with the scale
rounded to its dtype before codes are made; symmetric int8 has ``scale = amax / 127``, float formats
``scale = amax / max`` of the dtype, as torchao's float8, rounded up where the scale is e8m0 (MX with the
"RCEIL" scale of torchao's mx_formats).

- Integers, nearest: the error is at most half a step (the stored scale) inside the representable range, and
  at most one step at its ends, where the rounded scale and zero point clip. Stochastic: less than one step
  inside the range, and unbiased.
- A group that holds an inf or a nan decodes to nan as a whole, so non-finite values are never hidden. So
  does a group whose max - min overflows fp32, and fp32 values within 2^-8 of the largest one may decode to
  inf.
- An all-zero group decodes to exact zeros. Scales are at least ``finfo(float32).tiny``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import math
import threading
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gnmr_fx.errors import FormatError
from gnmr_fx.recipe import Format

__all__ = [
    "Encoded",
    "Layout",
    "decode",
    "encode",
    "layout",
    "nbytes",
    "payload_dtype",
    "payload_shape",
    "scales_shape",
]

_INPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FP8_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_SCALE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "e8m0": torch.uint8}
# Smallest normal exponent, mantissa bits and largest value (OCP 8-bit floating point specification, table 1; OCP
# Microscaling Formats specification, section 5.3).
_GRID = {
    "fp8_e4m3": (-6, 3, 448.0),
    "fp8_e5m2": (-14, 2, 57344.0),
    "fp6_e3m2": (-2, 2, 28.0),
    "fp6_e2m3": (0, 3, 7.5),
}
_SYMMETRIC_TOP = 127.0
_TINY = torch.finfo(torch.float32).tiny


class Encoded(NamedTuple):
    """A tensor in storage: see the table in :mod:`gnmr_fx.formats`."""

    payload: Tensor
    scales: Tensor


class Layout(NamedTuple):
    """How a tensor is cut into groups. Fields may be ``torch.SymInt``.

    Attributes:
        rows: rows of the canonical matrix (1 for ``"tensor"`` granularity).
        width: elements in a row.
        groups: groups in a row, ``G``.
        group: elements in a group, ``g``, padding included.
        block: of ``"block"`` granularity, ``(bands in a matrix, rows in a band)``; ``rows`` then counts the bands of
            all matrices, and ``height`` is the number of rows of one matrix.
    """

    rows: int
    width: int
    groups: int
    group: int
    block: tuple[int, int] | None = None
    height: int = 1

    @property
    def total(self) -> int:
        """Groups in all, ``N``."""
        return self.rows * self.groups

    @property
    def padding(self) -> int:
        """Zeros appended to every row."""
        return self.groups * self.across - self.width

    @property
    def across(self) -> int:
        """Elements of one row in a group."""
        return self.group if self.block is None else self.group // self.block[1]


class Packing(NamedTuple):
    """``codes`` elements lie in ``words`` elements of the payload."""

    codes: int
    words: int


def packing(fmt: Format) -> Packing:
    """How ``fmt`` packs its codes: in the smallest whole number of bytes that some number of codes fills."""
    if fmt.bits is None or not (fmt.is_integer or fmt.is_fp6):
        return Packing(1, 1)
    shared = math.gcd(fmt.bits, 8)
    return Packing(8 // shared, fmt.bits // shared)


def _cut(length: int, size: int, multiple: int = 1) -> tuple[int, int]:
    """``length`` in equal parts of at most ``size``: ``(number of parts, length of each)``, a multiple of that."""
    parts = (length + size - 1) // size
    divisor = torch.sym_max(parts, 1) * multiple
    return parts, (length + divisor - 1) // divisor * multiple


def layout(size: Sequence[int], fmt: Format) -> Layout:
    """The groups of a tensor of shape ``size`` in ``fmt``. Sizes may be symbolic; none is branched on."""
    width = size[-1] if len(size) > 0 else 1
    if fmt.granularity == "block":
        height = size[-2] if len(size) > 1 else 1
        bands, tall = _cut(height, fmt.group_size)
        groups, across = _cut(width, fmt.group_size, packing(fmt).codes)
        return Layout(math.prod(size[:-2]) * bands, width, groups, tall * across, (bands, tall), height)
    rows = math.prod(size[:-1])
    if fmt.granularity == "tensor":
        width = rows * width
        rows = torch.sym_min(width, 1)
    if not fmt.is_scaled:
        return Layout(rows, width, 1, width)
    if fmt.granularity == "group":
        return Layout(rows, width, *_cut(width, fmt.group_size, packing(fmt).codes))
    codes = packing(fmt).codes
    return Layout(rows, width, torch.sym_min(width, 1), (width + codes - 1) // codes * codes)


def payload_shape(size: Sequence[int], fmt: Format) -> tuple[int, int]:
    """Shape of the payload, in elements of :func:`payload_dtype`; for scaled formats ``(N, bytes)``.

    Sizes may be symbolic.
    """
    cut, (codes, words) = layout(size, fmt), packing(fmt)
    return cut.total, cut.group // codes * words


def scales_shape(size: Sequence[int], fmt: Format) -> tuple[int, int]:
    """Shape of the scales: ``[N, 2]`` with zero points, ``[N, 1]`` without, ``[rows, 0]`` where there is no scale."""
    return layout(size, fmt).total, scales_per_group(fmt)


def scales_per_group(fmt: Format) -> int:
    """2 with a zero point, 1 without, 0 where there is no scale."""
    return 2 if is_affine(fmt) else int(fmt.is_scaled)


def is_affine(fmt: Format) -> bool:
    """Whether codes have a zero point."""
    return fmt.is_integer and not fmt.symmetric


def scales_dtype(fmt: Format) -> torch.dtype:
    """Element type of the scales."""
    return _SCALE_DTYPES[fmt.scale]


def payload_dtype(fmt: Format, dtype: torch.dtype) -> torch.dtype:
    """Element type of the payload of a tensor of ``dtype``."""
    if fmt.symmetric:
        return torch.int8
    if fmt.is_integer or fmt.is_fp6:
        return torch.uint8
    if fmt.is_fp8:
        return _FP8_DTYPES[fmt.dtype]
    return torch.bfloat16 if fmt.dtype == "bf16" else dtype


def nbytes(size: Sequence[int], fmt: Format, dtype: torch.dtype) -> int:
    """Bytes that ``encode`` of a tensor of that shape and dtype stores: payload and scales."""
    payload, scales = payload_shape(size, fmt), scales_shape(size, fmt)
    bytes_of_scales = scales[0] * scales[1] * scales_dtype(fmt).itemsize
    return payload[0] * payload[1] * payload_dtype(fmt, dtype).itemsize + bytes_of_scales


def encode(x: Tensor, fmt: Format, seed: int | Tensor | None = None) -> Encoded:
    """Store ``x`` in ``fmt``. Nothing returned aliases ``x``.

    Args:
        x: float16, bfloat16, float32 or float64, of any shape and strides.
        fmt: the format.
        seed: an int, or a 0-dim int64 CPU tensor; needed where ``fmt.rounding`` is ``"stochastic"``. Equal
            seeds and equal ``x`` give equal results, in eager and compiled alike.

    Raises:
        FormatError: for another dtype, or a missing or unfit seed.
    """
    check_input(x, fmt)
    word = seed_word(seed, fmt)
    with torch.no_grad():
        if not fmt.is_scaled:
            return encode_unscaled(x, fmt)
        cut = layout(x.shape, fmt)
        if cut.total == 0:
            return empty_encoded(x, fmt)
        return Encoded(*encode_groups(to_groups(x, cut), fmt, word))


def decode(encoded: Encoded, fmt: Format, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor of shape ``size`` and ``dtype`` that ``encoded`` stores, in fp32 arithmetic, contiguous.

    Raises:
        FormatError: where ``encoded`` is not what ``encode`` makes of a tensor of that shape.
    """
    encoded = Encoded(*encoded)  # operators hand back plain tuples
    check_encoded(encoded, fmt, size)
    with torch.no_grad():
        if not fmt.is_scaled:
            return decode_unscaled(encoded, size, dtype)
        cut = layout(size, fmt)
        if cut.total == 0:
            return torch.empty(tuple(size), dtype=dtype, device=encoded.payload.device)
        return from_groups(decode_groups(*encoded, fmt, dtype), cut, size)


# --- arguments ----------------------------------------------------------------------------------------------


def check_input(x: Tensor, fmt: Format) -> None:
    """Raise :class:`FormatError` where ``fmt`` cannot hold a tensor of the dtype of ``x``."""
    if x.dtype not in _INPUT_DTYPES:
        raise FormatError(
            f"expected a tensor of float16, bfloat16, float32 or float64 to store as {fmt}, found {x.dtype}; "
            "leave such tensors as they are"
        )


def check_encoded(encoded: Encoded, fmt: Format, size: Sequence[int]) -> None:
    """Raise :class:`FormatError` where shapes in ``encoded`` are not those of a tensor of shape ``size``."""
    found = (tuple(encoded.payload.shape), tuple(encoded.scales.shape))
    expected = (payload_shape(size, fmt), scales_shape(size, fmt))
    if found != expected:
        raise FormatError(
            f"expected payload and scales of shapes {expected} for a tensor of shape {tuple(size)} in {fmt}, "
            f"found {found}; decode with the format and shape it was encoded with"
        )


def seed_word(seed: int | Tensor | None, fmt: Format) -> int:
    """The seed as one well-mixed signed 32-bit word (splitmix64's finalizer); 0 for rounding to nearest.

    Raises:
        FormatError: where rounding is stochastic and ``seed`` is no int or 0-dim int64 CPU tensor.
    """
    if not fmt.is_stochastic:
        return 0
    if isinstance(seed, Tensor) and (seed.dtype, seed.dim(), seed.device.type) == (torch.int64, 0, "cpu"):
        seed = int(seed.item())
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise FormatError(
            f"expected a seed for {fmt}: an int or a 0-dim int64 CPU tensor, found {_describe(seed)}; "
            "stochastic rounding is reproducible only by its seed"
        )
    mask = (1 << 64) - 1
    z = (seed + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return (z & 0x7FFFFFFF) - (z & 0x80000000)


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    return repr(value)


# --- canonical form -----------------------------------------------------------------------------------------


def to_groups(x: Tensor, cut: Layout) -> Tensor:
    """``x`` as ``[N, g]``, zero-padded; a view where strides and padding allow."""
    if cut.block is not None:
        (bands, tall), across = cut.block, cut.across
        matrices = x.reshape(-1, cut.height, cut.width)
        if cut.padding or bands * tall != cut.height:
            matrices = F.pad(matrices, (0, cut.padding, 0, bands * tall - cut.height))
        blocks = matrices.reshape(-1, bands, tall, cut.groups, across).transpose(2, 3)
        return blocks.reshape(cut.total, cut.group)
    if cut.padding == 0:
        return x.reshape(cut.total, cut.group)
    return F.pad(x.reshape(cut.rows, cut.width), (0, cut.padding)).view(cut.total, cut.group)


def from_groups(groups: Tensor, cut: Layout, size: Sequence[int]) -> Tensor:
    """The inverse of :func:`to_groups`, contiguous and without the padding."""
    if cut.block is not None:
        (bands, tall), across = cut.block, cut.across
        blocks = groups.view(-1, bands, cut.groups, tall, across).transpose(2, 3)
        matrices = blocks.reshape(-1, bands * tall, cut.groups * across)[:, : cut.height, : cut.width]
        return matrices.contiguous().view(tuple(size))
    if cut.padding == 0:
        return groups.view(tuple(size))
    return groups.view(cut.rows, -1)[:, : cut.width].contiguous().view(tuple(size))


def empty_encoded(x: Tensor, fmt: Format, groups: Any = None) -> Encoded:
    """Uninitialized room for an encoding of ``x``: for all its groups, or for ``groups`` (int or SymInt) of them."""
    payload, scales = payload_shape(x.shape, fmt), scales_shape(x.shape, fmt)
    if groups is not None:
        payload, scales = (groups, *payload[1:]), (groups, *scales[1:])
    return Encoded(
        x.new_empty(payload, dtype=payload_dtype(fmt, x.dtype)), x.new_empty(scales, dtype=scales_dtype(fmt))
    )


def encode_unscaled(x: Tensor, fmt: Format) -> Encoded:
    """``"bf16"`` and ``"none"``: a copy, in another dtype or the same."""
    cut = layout(x.shape, fmt)
    payload = torch.empty((cut.rows, cut.width), dtype=payload_dtype(fmt, x.dtype), device=x.device)
    payload.view(x.shape).copy_(x)
    return Encoded(payload, torch.empty((cut.rows, 0), dtype=torch.bfloat16, device=x.device))


def decode_unscaled(encoded: Encoded, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`encode_unscaled`; never aliases the payload."""
    payload = encoded.payload.view(tuple(size))
    decoded = payload.to(dtype, copy=True)
    if dtype == torch.float16 and payload.dtype == torch.bfloat16:
        # 65504 is 65536 in bfloat16, which would be inf.
        top = torch.finfo(dtype).max
        decoded = torch.where(payload.isfinite(), decoded.clamp(-top, top), decoded)
    return decoded


# --- the arithmetic, on groups [N, g]; what gnmr_fx.kernels traces ------------------------------------------


def encode_groups(x: Tensor, fmt: Format, word: int | Tensor = 0) -> tuple[Tensor, Tensor]:
    """Payload and scales of groups ``x[N, g]``, N and g at least 1. ``word``: see :func:`seed_word`."""
    x = x.float()
    if fmt.symmetric:
        return _encode_symmetric(x, fmt, word)
    return _encode_int(x, fmt, word) if fmt.is_integer else _encode_float(x, fmt, word)


def decode_groups(payload: Tensor, scales: Tensor, fmt: Format, dtype: torch.dtype) -> Tensor:
    """Groups ``[N, g]`` in ``dtype`` from payload and scales."""
    if is_affine(fmt):
        decoded = _decode_int(payload, scales, fmt)
    else:
        scale = _scale_from_e8m0(scales) if fmt.scale == "e8m0" else scales.float()
        values = _fp6_values(torch.cat(_unpack(payload, fmt), dim=1), fmt) if fmt.is_fp6 else payload.float()
        decoded = values * scale
    return _finish(decoded, dtype)


def _finish(decoded: Tensor, dtype: torch.dtype) -> Tensor:
    """Decoded fp32 values in ``dtype``."""
    if dtype == torch.float16:
        # Half a step past 65504 would be inf. nan, which stands for any non-finite group, passes the clamp.
        top = torch.finfo(dtype).max
        decoded = torch.clamp(decoded, -top, top)
    return decoded.to(dtype)


def roundtrip_groups(x: Tensor, fmt: Format, word: int | Tensor = 0) -> Tensor:
    """Groups ``[N, g]`` as decoding their encoding gives them back, bit for bit, in the dtype of ``x``."""
    if fmt.is_integer:
        return decode_groups(*encode_groups(x, fmt, word), fmt, x.dtype)
    scale, _ = _amax_scale(x.float(), fmt, _GRID[fmt.dtype][2])
    # Without codes: making them and reading them again is most of the work.
    return _finish(_on_grid(x.float(), scale, fmt, word) * scale, x.dtype)


def rescaled(sums: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """``sums [M, P]`` times ``rows [M, 1]`` times ``columns [1, P]`` in fp32, cast to ``dtype``."""
    return (sums.to(torch.float32) * rows * columns).to(dtype)


def _encode_int(x: Tensor, fmt: Format, word: int | Tensor) -> tuple[Tensor, Tensor]:
    ao = torchao_primitives()
    top = _top_code(fmt)
    scale, zero_point = ao.choose_qparams_affine_with_min_max(
        x.amin(dim=1, keepdim=True),
        x.amax(dim=1, keepdim=True),
        ao.MappingType.ASYMMETRIC,
        (1, x.shape[1]),
        torch.uint8,
        quant_min=0,
        quant_max=top,
        eps=_TINY,
        scale_dtype=torch.float32,
        zero_point_dtype=torch.float32,
    )
    scale = _round_to_bf16(scale) if fmt.scale == "bf16" else scale
    finite = scale < math.inf  # False for nan
    # Joined, because Inductor gives a cat a buffer of its own: it would compute these anew for every vector
    # of a group otherwise.
    parameters = [torch.where(finite, 1.0 / scale, 0.0), torch.where(finite, zero_point, 0.0)]
    inverse, offset = torch.cat(parameters, dim=1).split(1, dim=1)
    # torchao's quantize_affine, with codes kept in fp32 (exact) until they are packed.
    steps = x * inverse
    rounded = _round_stochastic(steps, _uniform(x, word)) if fmt.is_stochastic else torch.round(steps)
    codes = rounded + offset
    # A clamp that turns nan, which has no integer, into code 0: the non-finite scale makes it nan again.
    codes = torch.where(codes > 0.0, codes, 0.0)
    codes = torch.where(codes < top, codes, float(top))
    return _pack(codes, fmt), torch.cat([scale, zero_point], dim=1).to(scales_dtype(fmt))


def _decode_int(payload: Tensor, scales: Tensor, fmt: Format) -> Tensor:
    scale, zero_point = scales.float().split(1, dim=1)
    return torch.cat([(codes - zero_point) * scale for codes in _unpack(payload, fmt)], dim=1)


def _encode_symmetric(x: Tensor, fmt: Format, word: int | Tensor) -> tuple[Tensor, Tensor]:
    scale, stored = _amax_scale(x, fmt, _SYMMETRIC_TOP)
    steps = x / scale
    codes = _round_stochastic(steps, _uniform(x, word)) if fmt.is_stochastic else torch.round(steps)
    # nan, which has no integer, becomes 0: times a non-finite scale that is nan again.
    codes = torch.where(codes == codes, torch.clamp(codes, -_SYMMETRIC_TOP, _SYMMETRIC_TOP), 0.0)
    return codes.to(torch.int8), stored


def _encode_float(x: Tensor, fmt: Format, word: int | Tensor) -> tuple[Tensor, Tensor]:
    smallest, mantissa, top = _GRID[fmt.dtype]
    scale, stored = _amax_scale(x, fmt, top)
    if fmt.is_fp6:
        steps, _, exponent = _in_steps(x, x / scale, fmt, word)
        return _pack(_fp6_codes(steps, (exponent - (127 + smallest)).to(torch.float32), mantissa), fmt), stored
    y = _on_grid(x, scale, fmt, word) if fmt.is_stochastic else x / scale
    # A rounded scale lets y pass the largest value by 2^-8: e4m3 would turn that into nan.
    return torch.clamp(y, -top, top).to(_FP8_DTYPES[fmt.dtype]), stored


def _in_steps(x: Tensor, y: Tensor, fmt: Format, word: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``y``, which is ``x`` scaled, in whole steps of its binade; the step, and the binade's biased exponent."""
    smallest, mantissa, _ = _GRID[fmt.dtype]
    exponent = torch.clamp((y.view(torch.int32) >> 23) & 0xFF, min=127 + smallest)
    step = ((exponent - mantissa) << 23).view(torch.float32)
    y = y / step
    return _round_stochastic(y, _uniform(x, word)) if fmt.is_stochastic else torch.round(y), step, exponent


def _on_grid(x: Tensor, scale: Tensor, fmt: Format, word: int | Tensor) -> Tensor:
    """``x / scale`` rounded to a value of the dtype, in fp32."""
    top = _GRID[fmt.dtype][2]
    steps, step, _ = _in_steps(x, x / scale, fmt, word)
    y = torch.clamp(steps * step, -top, top)
    return torch.where(y == 0.0, 0.0, y) if fmt.is_fp6 else y  # fp6 is stored without negative zeros


def _amax_scale(x: Tensor, fmt: Format, top: float) -> tuple[Tensor, Tensor]:
    """``amax / top`` of each group in fp32, rounded to the dtype it is stored in; and so stored."""
    scale = torch.clamp(x.abs().amax(dim=1, keepdim=True) / top, min=_TINY)
    if fmt.scale == "bf16":
        scale = _round_to_bf16(scale)
    elif fmt.scale == "e8m0":
        bits = scale.view(torch.int32)
        exponent = torch.clamp((bits + 0x7FFFFF) >> 23, max=0xFF)  # rounded up; that of nan and inf stays 255
        exponent = torch.where(scale < math.inf, torch.clamp(exponent, max=0xFE), 0xFF)
        stored = exponent.to(torch.uint8)
        return _scale_from_e8m0(stored), stored
    return scale, scale.to(scales_dtype(fmt))


def _scale_from_e8m0(stored: Tensor) -> Tensor:
    """fp32 powers of two from their biased exponents (from 1 on); 255 is nan."""
    exponent = stored.to(torch.int32)
    return torch.where(exponent == 0xFF, math.nan, (exponent << 23).view(torch.float32))


# Packing is arithmetic on fp32, where numbers of up to 24 bits are exact: a byte (or three of them) is the number whose
# digits in base 2**bits are its codes. Inductor vectorizes conversions between uint8 and fp32 best; those through
# int32 it does one by one.


def _pack(codes: Tensor, fmt: Format) -> Tensor:
    """Whole-numbered fp32 codes ``[N, g]`` to bytes ``[N, g * bits / 8]``, in split order."""
    count, size = packing(fmt)
    low, *higher = codes.chunk(count, dim=1)
    for index, part in enumerate(higher, start=1):
        low = low + part * float(_base(fmt) ** index)
    return low.to(torch.uint8) if size == 1 else torch.cat(_digits(low, 256, size), dim=1).to(torch.uint8)


def _unpack(payload: Tensor, fmt: Format) -> list[Tensor]:
    """The parts that :func:`_pack` joined, one after the other, fp32."""
    count, size = packing(fmt)
    number = payload.to(torch.float32)
    if size > 1:
        number, *higher = number.chunk(size, dim=1)
        for index, part in enumerate(higher, start=1):
            number = number + part * float(256**index)
    return _digits(number, _base(fmt), count)


def _digits(number: Tensor, base: int, count: int) -> list[Tensor]:
    """The ``count`` digits of whole numbers below ``base**count``, lowest first, in fp32; ``base`` is a power of 2."""
    digits = []
    for _ in range(count - 1):
        higher = torch.floor(number * (1.0 / base))
        digits.append(number - higher * float(base))
        number = higher
    return [*digits, number]


def _fp6_codes(steps: Tensor, exponent: Tensor, mantissa: int) -> Tensor:
    """The codes of 6-bit floats ``[N, g]``, whole numbers in fp32.

    Args:
        steps: the value in steps of its binade, whole, ``[N, g]`` fp32; nan becomes 0.
        exponent: the binade, from 0 for the subnormals and the first normal one, ``[N, g]`` fp32.
        mantissa: bits of the mantissa.
    """
    # Codes of one sign are in the order of the values: each binade has 2^mantissa of them. So the leading one of a
    # normal value is what lifts its code into the next binade, and a value rounded up to a power of two, too.
    code = torch.clamp(exponent * float(2**mantissa) + steps.abs(), max=31.0)
    code = torch.where(code >= 0.0, code, 0.0)
    return torch.where(steps < 0.0, code + 32.0, code)


def _fp6_values(code: Tensor, fmt: Format) -> Tensor:
    """The values of 6-bit floats, fp32, from their codes."""
    smallest, mantissa, _ = _GRID[fmt.dtype]
    negative = code >= 32.0
    magnitude = torch.where(negative, code - 32.0, code)
    binade = torch.floor(magnitude * 2.0**-mantissa)
    fraction = magnitude - binade * float(2**mantissa)
    normal = (binade >= 1.0).to(torch.float32)
    steps = fraction + normal * float(2**mantissa)
    value = steps * torch.exp2(binade - normal) * 2.0 ** (smallest - mantissa)
    return torch.where(negative, -value, value)


def _base(fmt: Format) -> int:
    """Number of codes of a format."""
    return 2 ** (fmt.bits or 0)


def _top_code(fmt: Format) -> int:
    return _base(fmt) - 1


def _round_to_bf16(x: Tensor) -> Tensor:
    """Non-negative fp32 rounded to the nearest bfloat16, ties to even, kept in fp32.

    On the bits, because Inductor drops a cast to bfloat16 and back. nan stays nan.
    """
    bits = x.view(torch.int32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)
    return torch.where(x == x, rounded, x)


def _round_stochastic(x: Tensor, u: Tensor) -> Tensor:
    """Up with a probability of the fraction of ``x``, else down; ``u`` uniform in [0, 1)."""
    down = torch.floor(x)
    return down + (u < x - down).to(torch.float32)


def _uniform(x: Tensor, word: int | Tensor) -> Tensor:
    """fp32 in [0, 1), a multiple of 2^-24, hashed from element index, fp32 bits and seed.

    Weyl sequences over row and column, then MurmurHash3's 32-bit finalizer (Appleby), in wrapping int32
    arithmetic: no generator state, so any order of evaluation gives the same numbers.
    """
    count, width = x.shape
    row = torch.arange(count, dtype=torch.int32, device=x.device)[:, None]
    column = torch.arange(width, dtype=torch.int32, device=x.device)
    h = (row * -0x61C88647 + column * -0x7A143589 + word) ^ x.view(torch.int32)  # 0x9E3779B9, 0x85EBCA77
    h = (h ^ _shift_right(h, 16)) * -0x7A143595  # 0x85EBCA6B
    h = (h ^ _shift_right(h, 13)) * -0x3D4D51CB  # 0xC2B2AE35
    h = h ^ _shift_right(h, 16)
    return _shift_right(h, 8).to(torch.float32) * 2.0**-24


def _shift_right(h: Tensor, bits: int) -> Tensor:
    """Logical shift: int32 shifts keep the sign."""
    return (h >> bits) & ((1 << (32 - bits)) - 1)


# --- torchao, quietly ---------------------------------------------------------------------------------------


@functools.cache
def torchao_primitives() -> ModuleType:
    """``torchao.quantization.quant_primitives``, imported on first use."""
    with _quiet_torchao_import():
        return importlib.import_module("torchao.quantization.quant_primitives")


@contextlib.contextmanager
def _quiet_torchao_import() -> Iterator[None]:
    """Drop the known log records of importing torchao on this thread, and nothing else.

    They tell of CUDA libraries that another build cannot load, and of torchao's use of a deprecated pytree
    call.
    """
    known = {
        "torchao": ("Failed to load", "Skipping import of cpp extensions"),
        "torchao.kernel.intmm": ("Detected no triton",),
        "torch.utils._pytree": ("is an Enum subclass and is now natively supported",),
    }
    thread = threading.get_ident()

    def keep(record: logging.LogRecord) -> bool:
        text: Any = record.getMessage()
        return record.thread != thread or not any(part in text for part in known.get(record.name, ()))

    for name in known:
        logging.getLogger(name).addFilter(keep)
    try:
        yield
    finally:
        for name in known:
            logging.getLogger(name).removeFilter(keep)
