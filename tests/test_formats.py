"""The readable formats against torchao's primitives, brute force, and derived error bounds."""

import itertools
import math
import subprocess
import sys
from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gnmr_fx import formats
from gnmr_fx.errors import FormatError
from gnmr_fx.recipe import Format, FormatDtype, Granularity, Rounding

INT_DTYPES = ("int2", "int3", "int4", "int8")
FP8_DTYPES = ("fp8_e4m3", "fp8_e5m2")
FP6_DTYPES = ("fp6_e2m3", "fp6_e3m2")
FLOAT_GRID = {"fp8_e4m3": (-6, 3), "fp8_e5m2": (-14, 2), "fp6_e2m3": (0, 3), "fp6_e3m2": (-2, 2)}
ALL_FORMATS = [
    *(
        Format(dtype, granularity, 32, rounding)
        for dtype, granularity, rounding in itertools.product(
            (*INT_DTYPES, *FP8_DTYPES, *FP6_DTYPES), get_args(Granularity), get_args(Rounding)
        )
    ),
    *(
        Format("int8", granularity, 32, rounding, scale, symmetric=True)
        for granularity, rounding, scale in itertools.product(("token", "block"), get_args(Rounding), ("bf16", "fp32"))
    ),
    *(
        Format(dtype, granularity, 32, "nearest", scale)
        for dtype, granularity, scale in itertools.product(
            ("fp8_e4m3", *FP6_DTYPES), ("group", "block"), ("fp32", "e8m0")
        )
    ),
    *(Format("int4", rounding=rounding, scale="fp32") for rounding in get_args(Rounding)),
    Format("bf16"),
    Format("none"),
]
INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = [(), (1,), (7,), (3, 64), (2, 3, 70), (5, 1), (4, 33), (0, 5), (5, 0), (0,), (2, 1, 256)]


def round_trip(x: Tensor, fmt: Format, seed: int = 1) -> Tensor:
    return formats.decode(formats.encode(x, fmt, seed), fmt, x.shape, x.dtype)


def naive_groups(x: Tensor, fmt: Format) -> Tensor:
    """``[N, g]`` in fp32, by plain loops."""
    rows = x.reshape(1, -1) if fmt.granularity == "tensor" else x.reshape(-1, x.shape[-1] if x.dim() else 1)
    height, width = (x.shape[-2] if x.dim() > 1 else 1), rows.shape[1]
    sized = fmt.granularity in ("group", "block")
    groups = math.ceil(width / fmt.group_size) if sized else 1
    packed = fmt.is_integer or fmt.is_fp6
    together = {2: 4, 3: 8, 4: 2, 6: 4, 8: 1}[fmt.bits or 8] if packed else 1  # codes that share whole bytes
    size = math.ceil(math.ceil(width / groups) / together) * together
    padded = torch.zeros(rows.shape[0], groups * size)
    for index, row in enumerate(rows):
        padded[index, :width] = row.float()
    if fmt.granularity != "block":
        return torch.stack([part for row in padded for part in row.split(size)])
    tall = math.ceil(height / math.ceil(height / fmt.group_size))
    blocks = []
    for matrix in padded.split(height):
        for band in matrix.split(tall):
            whole = torch.cat([band, torch.zeros(tall - len(band), groups * size)])
            blocks += [block.flatten() for block in whole.split(size, dim=1)]
    return torch.stack(blocks)


def naive_ungroup(groups: Tensor, x: Tensor, fmt: Format) -> Tensor:
    """The inverse of :func:`naive_groups`, in the shape of ``x``."""
    place = naive_groups(torch.arange(1.0, x.numel() + 1).reshape(x.shape), fmt).long()
    flat = groups.new_empty(x.numel())
    flat[place[place > 0] - 1] = groups[place > 0]
    return flat.reshape(x.shape)


def scales_of(encoded: formats.Encoded, fmt: Format) -> Tensor:
    """The scales as numbers, ``[N]`` float64."""
    stored = encoded.scales[:, 0].double()
    return torch.exp2(stored - 127) if fmt.scale == "e8m0" else stored


def per_element(column: Tensor, x: Tensor, fmt: Format) -> Tensor:
    """One value per group, ``[N]``, given to every element of its group."""
    groups = naive_groups(x, fmt)
    return naive_ungroup(column[:, None].expand_as(groups), x, fmt)


def error_bound(x: Tensor, encoded: formats.Encoded, fmt: Format) -> Tensor:
    """How far decoding may be from ``x``, from the stored scale (float64)."""
    magnitude = x.double().abs()
    output = torch.finfo(x.dtype).eps * magnitude + torch.finfo(x.dtype).smallest_normal
    if fmt.dtype == "none":
        return torch.zeros_like(magnitude)
    if fmt.dtype == "bf16":
        return torch.finfo(torch.bfloat16).eps / 2 * magnitude + torch.finfo(torch.bfloat16).tiny
    scale = per_element(scales_of(encoded, fmt), x, fmt)
    rounding = 1.0 if fmt.is_stochastic else 0.5
    if fmt.symmetric:
        # Half a step; a scale rounded to bfloat16 clips 127 steps by up to 2^-8.
        return max(rounding, 127 * 2.0**-8 if fmt.scale == "bf16" else 0.0) * (1 + 1e-4) * scale + output
    if fmt.is_integer:
        # Half a step, and at the ends up to half a step for the rounded zero point and (2^bits - 1) * 2^-9 for
        # the scale rounded to bfloat16; a few units of fp32 rounding in the last place of a code.
        top = 2 ** (fmt.bits or 0) - 1
        clipped = 0.5 + top * 2.0**-9
        return max(rounding, clipped) * (1 + 1e-4) * scale + output
    smallest, mantissa = FLOAT_GRID[fmt.dtype]
    # A step is 2^-mantissa of the value, or that of the smallest normal; rounding the scale clips by 2^-8.
    relative = max(rounding * 2.0**-mantissa, 2.0**-8)
    return relative * 1.01 * magnitude + rounding * scale * 2.0 ** (smallest - mantissa) + output


def assert_within_bound(x: Tensor, fmt: Format, seed: int = 1) -> None:
    encoded = formats.encode(x, fmt, seed)
    decoded = formats.decode(encoded, fmt, x.shape, x.dtype)
    assert decoded.shape == x.shape
    assert decoded.dtype == x.dtype
    assert decoded.is_contiguous()
    if x.numel():
        error = (decoded.double() - x.double()).abs()
        assert (error <= error_bound(x, encoded, fmt)).all()
    assert (decoded[x == 0] == 0).all()


# --- storage --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_every_shape_and_dtype(fmt: Format) -> None:
    for shape, dtype in itertools.product(SHAPES, INPUT_DTYPES):
        x = torch.randn(shape).to(dtype)
        encoded = formats.encode(x, fmt, seed=1)
        assert tuple(encoded.payload.shape) == formats.payload_shape(shape, fmt)
        assert tuple(encoded.scales.shape) == formats.scales_shape(shape, fmt)
        assert encoded.payload.dtype == formats.payload_dtype(fmt, dtype)
        stored = sum(part.untyped_storage().nbytes() for part in encoded)
        assert stored == formats.nbytes(shape, fmt, dtype)
        if x.numel():
            assert encoded.payload.data_ptr() != x.data_ptr()
        assert_within_bound(x, fmt)


@pytest.mark.parametrize(
    ("spec", "size", "stored"),
    [
        ("int4/group128", (2, 256), 2 * 128 + 4 * 4),  # two codes a byte, 4 bytes of scales a group
        ("int2/token", (3, 64), 3 * 16 + 3 * 4),
        ("int3/group128", (2, 256), 2 * 96 + 4 * 4),  # eight codes in three bytes
        ("int3/token", (2, 130), 2 * 51 + 2 * 4),  # padded to 136
        ("int3/tensor", (3, 64), 72 + 4),
        ("int8/tensor", (3, 64), 192 + 4),
        ("int4/group128", (2, 130), 2 * 2 * 33 + 4 * 4),  # two groups of 65, padded to 66
        ("fp8_e4m3/group128", (2, 256), 512 + 4 * 2),
        ("fp8_e4m3/group128/nearest/fp32", (2, 256), 512 + 4 * 4),
        ("fp6_e3m2/group128/nearest/fp32", (2, 256), 384 + 4 * 4),  # four codes in three bytes
        ("fp6_e2m3/group32/nearest/e8m0", (2, 256), 384 + 16),
        ("int8/token/nearest/fp32/symmetric", (3, 64), 192 + 3 * 4),
        ("fp8_e4m3/block128/nearest/fp32", (256, 384), 256 * 384 + 6 * 4),
        ("fp8_e4m3/block128/nearest/fp32", (2, 130, 128), 2 * 130 * 128 + 4 * 4),  # two bands of 65
        ("bf16", (3, 5), 30),
        ("none", (3, 5), 60),
        ("int4/tensor", (0, 5), 0),
        ("int4/token", (5, 0), 0),
    ],
)
def test_bytes(spec: str, size: tuple[int, ...], stored: int) -> None:
    fmt = Format.parse(spec)
    assert formats.nbytes(size, fmt, torch.float32) == stored
    encoded = formats.encode(torch.randn(size), fmt)
    assert sum(part.untyped_storage().nbytes() for part in encoded) == stored


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_sizes_may_be_unknown(fmt: Format) -> None:
    """Fake implementations of operators ask for sizes of tensors whose rows have no value yet."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = ShapeEnv()
    rows = shapes.create_unbacked_symint()
    torch._check(rows >= 0)
    payload = formats.payload_shape((rows, 96), fmt)
    scales = formats.scales_shape((rows, 96), fmt)
    total = formats.nbytes((rows, 96), fmt, torch.float32)
    for value in (0, 1, 5):
        replace = {rows.node.expr: value}
        known = [
            size.node.expr.subs(replace) if isinstance(size, torch.SymInt) else size
            for size in (*payload, *scales, total)
        ]
        expected = (
            *formats.payload_shape((value, 96), fmt),
            *formats.scales_shape((value, 96), fmt),
            formats.nbytes((value, 96), fmt, torch.float32),
        )
        assert tuple(map(int, known)) == expected


@pytest.mark.parametrize("dtype", INT_DTYPES)
def test_packing_matches_a_plain_loop(dtype: FormatDtype) -> None:
    fmt = Format(dtype, group_size=32)
    bits = fmt.bits or 0
    together = {2: 4, 3: 8, 4: 2, 8: 1}[bits]
    codes = torch.randint(0, 2**bits, (5, 32))
    part = 32 // together
    numbers = [
        [sum(int(row[j + i * part]) << (bits * i) for i in range(together)) for j in range(part)] for row in codes
    ]
    expected = [[n >> (8 * byte) & 255 for byte in range(together * bits // 8) for n in row] for row in numbers]
    packed = formats._pack(codes.float(), fmt)
    assert packed.tolist() == expected
    assert torch.equal(torch.cat(formats._unpack(packed, fmt), dim=1), codes.float())


@pytest.mark.parametrize("dtype", ["int2", "int4"])
def test_packing_is_that_of_torchao(dtype: FormatDtype) -> None:
    formats.torchao_primitives()
    bitpacking = pytest.importorskip("torchao.prototype.dtypes.uintx.bitpacking")
    fmt = Format(dtype, group_size=32)
    codes = torch.randint(0, 2 ** (fmt.bits or 0), (5, 32), dtype=torch.uint8)
    (shard,) = bitpacking.pack(codes, fmt.bits, dim=-1)
    assert torch.equal(formats._pack(codes.float(), fmt), shard)


def test_inputs_are_left_alone_and_strides_do_not_matter() -> None:
    x = torch.randn(6, 8, 64)
    for fmt in ALL_FORMATS:
        for view in (x.transpose(0, 2), x[:, ::2, 1::3], x[:, :, :32], x[0, 0, 0].expand(4, 40)):
            before = view.clone()
            strided, plain = formats.encode(view, fmt, 3), formats.encode(before, fmt, 3)
            assert all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(strided, plain, strict=True)
            )
            assert torch.equal(view, before)


def test_none_is_lossless_and_bf16_a_cast() -> None:
    x = torch.tensor([1.0, -0.0, math.pi, 1e-42, math.inf, math.nan])
    for dtype in INPUT_DTYPES:
        y = x.to(dtype)
        assert torch.equal(round_trip(y, Format("none")).view(torch.uint8), y.view(torch.uint8))
        assert torch.equal(round_trip(y, Format("bf16")), y.to(torch.bfloat16).to(dtype)) or y.isnan().any()
        assert torch.equal(
            round_trip(y, Format("bf16")).nan_to_num(7.0), y.to(torch.bfloat16).to(dtype).nan_to_num(7.0)
        )


# --- numerics -------------------------------------------------------------------------------------------


def torchao_oracle(groups: Tensor, fmt: Format) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scale, zero point and dequantized values of fp32 groups ``[N, g]``, g > 1."""
    ao = formats.torchao_primitives()
    block, top = (1, groups.shape[1]), 2 ** (fmt.bits or 0) - 1
    scale, zero_point = ao.choose_qparams_affine(
        groups,
        ao.MappingType.ASYMMETRIC,
        block,
        torch.uint8,
        0,
        top,
        torch.finfo(torch.float32).tiny,
        torch.bfloat16,
        torch.int32,
        keepdim=True,
    )
    codes = ao.quantize_affine(groups, block, scale.float(), zero_point, torch.uint8, 0, top)
    values = ao.dequantize_affine(codes, block, scale.float(), zero_point, torch.uint8, 0, top)
    return codes, scale, zero_point, values


@pytest.mark.parametrize("granularity", get_args(Granularity))
@pytest.mark.parametrize("dtype", INT_DTYPES)
def test_ints_are_torchaos_bit_for_bit(dtype: FormatDtype, granularity: Granularity) -> None:
    fmt = Format(dtype, granularity, 32)
    for shape, input_dtype in itertools.product([(7,), (3, 64), (2, 3, 70), (4, 33)], INPUT_DTYPES):
        for transform in (
            torch.clone,
            torch.relu,
            lambda x: -x.abs() - 1,
            lambda x: x * 1e30,
            lambda x: x * 1e-30,
        ):
            x = transform(torch.randn(shape, dtype=torch.float64)).to(input_dtype)
            if x.isinf().any():
                continue
            groups = naive_groups(x, fmt)
            codes, scale, zero_point, values = torchao_oracle(groups, fmt)
            encoded = formats.encode(x, fmt)
            assert torch.equal(torch.cat(formats._unpack(encoded.payload, fmt), dim=1), codes.float())
            assert torch.equal(encoded.scales[:, :1], scale)
            assert torch.equal(encoded.scales[:, 1:].float(), zero_point.float())
            decoded = formats.decode(encoded, fmt, shape, torch.float32)
            assert torch.equal(decoded, naive_ungroup(values, x, fmt))


@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_fp8_takes_the_nearest_value_there_is(dtype: FormatDtype) -> None:
    fmt = Format(dtype, group_size=32)
    x = torch.cat([torch.randn(64, 32), torch.randn(64, 32).pow(9)])
    payload, scales = formats.encode(x, fmt)
    every = torch.arange(256, dtype=torch.uint8).view(payload.dtype).float()
    every = every[every.isfinite()]
    amax = x.abs().amax(dim=1, keepdim=True)
    assert torch.equal(scales, (amax / torch.finfo(payload.dtype).max).to(torch.bfloat16))
    y = (x / scales.float()).double()
    nearest = (y[..., None] - every.double()).abs().amin(dim=-1)
    assert torch.equal((y - payload.double()).abs(), nearest)


@pytest.mark.parametrize("dtype", FP6_DTYPES)
def test_fp6_codes_are_those_of_the_specification(dtype: FormatDtype) -> None:
    """All 64: sign, exponent and mantissa, as torchao reads them."""
    formats.torchao_primitives()
    from torchao.prototype.custom_fp_utils import _floatx_unpacked_to_f32

    fmt, codes = Format(dtype, "token", scale="fp32"), torch.arange(64, dtype=torch.uint8)
    values = _floatx_unpacked_to_f32(codes, int(dtype[5]), int(dtype[7]))
    encoded = formats.encode(values, fmt)
    assert encoded.scales.item() == 1.0
    assert torch.equal(formats.decode(encoded, fmt, (64,), torch.float32), values)
    first, second, third = encoded.payload[0].long().split(16)
    number = first | second << 8 | third << 16
    read = torch.cat([(number >> shift) & 63 for shift in (0, 6, 12, 18)])
    assert torch.equal(read, torch.where(codes == 32, 0, codes).long())  # there is one zero


@pytest.mark.parametrize("dtype", FP6_DTYPES)
def test_mx_is_torchaos(dtype: FormatDtype) -> None:
    formats.torchao_primitives()
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    fmt = Format(dtype, "group", 32, scale="e8m0")
    for scale in (1.0, 1e30, 1e-30):
        x = torch.cat([torch.randn(8, 64), torch.randn(8, 64).pow(5)]) * scale
        exponents, codes = to_mx(x, dtype, 32, ScaleCalculationMode.RCEIL)
        encoded = formats.encode(x, fmt)
        assert torch.equal(encoded.scales.flatten(), exponents.view(torch.uint8).flatten())
        expected = to_dtype(codes, exponents, dtype, 32, torch.float32)
        assert torch.equal(formats.decode(encoded, fmt, x.shape, torch.float32), expected)


@pytest.mark.parametrize(("granularity", "block"), [("group", (1, 32)), ("block", (32, 32)), ("token", (1, 128))])
def test_fp8_with_fp32_scales_is_torchaos_bit_for_bit(granularity: Granularity, block: tuple[int, int]) -> None:
    ao = formats.torchao_primitives()
    x = torch.randn(64, 128) * torch.logspace(-3, 3, 64)[:, None]
    fmt = Format("fp8_e4m3", granularity, 32, scale="fp32")
    scale = ao._choose_scale_float8(x, block, torch.float8_e4m3fn)
    codes = ao._quantize_affine_float8(x, scale, torch.float8_e4m3fn)
    assert torch.equal(
        formats.decode(formats.encode(x, fmt), fmt, x.shape, torch.float32),
        ao._dequantize_affine_float8(codes, scale, torch.float32),
    )


@pytest.mark.parametrize("rounding", get_args(Rounding))
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_error_on_normal_numbers(dtype: FormatDtype, rounding: Rounding) -> None:
    """The error of a step s is uniform: s / sqrt(12) for nearest, s / sqrt(6) for stochastic rounding (rms)."""
    x = torch.randn(512, 1024)
    fmt = Format(dtype, rounding=rounding)
    encoded = formats.encode(x, fmt, seed=5)
    error = formats.decode(encoded, fmt, x.shape, x.dtype) - x
    step = encoded.scales[:, 0].float().square().mean().sqrt()
    expected = step / math.sqrt(6 if rounding == "stochastic" else 12)
    assert error.square().mean().sqrt() == pytest.approx(expected.item(), rel=0.05)


@pytest.mark.parametrize(
    ("spec", "relative"),
    [
        ("int8", 0.008),
        ("int4", 0.11),
        ("int3", 0.25),
        ("int2", 0.55),
        ("fp8_e4m3", 0.03),
        ("fp8_e5m2", 0.06),
        ("fp6_e2m3", 0.03),
        ("fp6_e3m2", 0.06),
        ("int8/token/nearest/fp32/symmetric", 0.012),
        ("bf16", 0.002),
    ],
)
def test_relative_error_on_normal_numbers(spec: str, relative: float) -> None:
    x = torch.randn(256, 1024)
    error = (round_trip(x, Format.parse(spec)) - x).norm() / x.norm()
    assert relative / 2 < error < relative


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
@pytest.mark.parametrize("scale", [1e38, 1e30, 1.0, 1e-30, 1e-37], ids=["1e38", "1e30", "1", "1e-30", "1e-37"])
def test_huge_and_tiny(fmt: Format, scale: float) -> None:
    x = torch.linspace(-1, 1, 3 * 64).reshape(3, 64) * scale
    decoded = round_trip(x, fmt)
    assert decoded.isfinite().all()
    if scale > 1e-36:
        assert_within_bound(x, fmt)
        assert (decoded != 0).any()


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_zeros_are_exact(fmt: Format) -> None:
    for shape in SHAPES:
        assert torch.equal(round_trip(torch.zeros(shape), fmt), torch.zeros(shape))
    x = torch.randn(4, 64)
    x[:, ::3] = 0
    assert (round_trip(x, fmt)[:, ::3] == 0).all()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("fmt", [f for f in ALL_FORMATS if f.is_scaled], ids=str)
def test_non_finite_values_show(fmt: Format, value: float) -> None:
    x = torch.randn(4, 64)
    x[1, 40] = value
    encoded = formats.encode(x, fmt, 1)
    again = formats.encode(x, fmt, 1)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(encoded, again, strict=True))
    for dtype in INPUT_DTYPES:
        decoded = formats.decode(encoded, fmt, x.shape, dtype)
        in_group = torch.zeros(4, 64, dtype=torch.bool)
        last = slice(-(-64 // fmt.group_size) * fmt.group_size - fmt.group_size, None) if fmt.group_size else None
        where = {"tensor": slice(None), "token": 1, "group": (1, last), "block": (slice(None), last)}
        in_group[where[fmt.granularity]] = True  # type: ignore[index]
        assert torch.equal(decoded.isnan(), in_group)


@pytest.mark.parametrize("fmt", [f for f in ALL_FORMATS if f.is_scaled], ids=str)
def test_values_without_codes_are_those_of_the_codes(fmt: Format) -> None:
    """What a GEMM takes as its operand is, bit for bit, what storing and reading it would give."""
    wide = torch.randn(64, 64).mul(6).exp() * torch.randn(64, 64).sign()
    wide[3], wide[4], wide[5, ::2], wide[6] = 0.0, -0.0, -1e-30, 1e-38 * wide[6]
    wide[10, :4] = torch.tensor([448.0, 57344.0, 28.0, 7.5])
    wide[12, 5], wide[14, 6] = math.inf, math.nan
    halves = torch.arange(-2048, 2048).reshape(64, 64) / 64  # many of them ties
    for x, dtype in itertools.product((wide, halves, wide[:8]), INPUT_DTYPES):
        x = x.to(dtype)
        cut = formats.layout(x.shape, fmt)
        found = formats.roundtrip_groups(formats.to_groups(x, cut), fmt, formats.seed_word(1, fmt))
        found, expected = formats.from_groups(found, cut, x.shape), round_trip(x, fmt)
        same = (found == expected) & (found.signbit() == expected.signbit())
        assert (same | (found.isnan() & expected.isnan())).all()


def test_float16_stays_finite() -> None:
    """The step of a scale that was rounded up would take the largest float16 to inf."""
    x = torch.linspace(-65504, 65504, 128).to(torch.float16).reshape(2, 64)
    for fmt in ALL_FORMATS:
        assert round_trip(x, fmt).isfinite().all()


finite_rows = st.lists(
    st.floats(-(2.0**120), 2.0**120, width=32) | st.sampled_from([0.0, -0.0, 1e-30, 1.0, -1.0]),
    min_size=1,
    max_size=40,
)


@given(values=finite_rows, fmt=st.sampled_from(ALL_FORMATS), dtype=st.sampled_from(INPUT_DTYPES))
def test_round_trip_is_within_a_step(values: list[float], fmt: Format, dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    x = torch.where(x.isfinite(), x, torch.ones((), dtype=dtype))
    assert_within_bound(x, fmt)


# --- stochastic rounding --------------------------------------------------------------------------------


STOCHASTIC = [f for f in ALL_FORMATS if f.is_stochastic and f.granularity == "group"]


@pytest.mark.parametrize("fmt", STOCHASTIC, ids=str)
def test_stochastic_is_unbiased(fmt: Format) -> None:
    """The mean error of n values is within 5 standard deviations of 0, each at most step / 2 / sqrt(n)."""
    n = 20000
    for inside in (0.05, 0.3, -0.6):
        x = torch.full((n, 32), inside)
        x[:, 0], x[:, 1] = 1.0, -1.0  # the ends, which may clip
        values = round_trip(x, fmt, seed=11)[:, 2:].double()
        levels = values.unique()
        assert len(levels) == 2
        step = (levels.max() - levels.min()).item()
        error = values.mean().item() - x[0, 2].double().item()
        assert abs(error) <= 5 * step / 2 / math.sqrt(n * 30)


def test_stochastic_is_unbiased_over_seeds() -> None:
    fmt = Format("int4", rounding="stochastic")
    x = torch.linspace(-1, 1, 128)
    n = 2000
    values = torch.stack([round_trip(x, fmt, seed) for seed in range(n)]).double()
    step = formats.encode(x, fmt, 0).scales[0, 0].double()
    inside = slice(8, -8)  # a step is 2 / 15, the spacing 2 / 127: the ends, half a step each, may clip
    error = (values.mean(dim=0) - x.double())[inside].abs()
    assert error.max() <= 5 * step / 2 / math.sqrt(n)


def test_stochastic_is_reproducible() -> None:
    x = torch.randn(8, 64)
    for fmt in STOCHASTIC:
        first = formats.encode(x, fmt, 7)
        assert torch.equal(
            first.payload.view(torch.uint8), formats.encode(x, fmt, torch.tensor(7)).payload.view(torch.uint8)
        )
        torch.manual_seed(99)
        assert torch.equal(first.payload.view(torch.uint8), formats.encode(x, fmt, 7).payload.view(torch.uint8))
        for seed in (8, -7, 7 + 2**32, 2**63 - 1):
            other = formats.encode(x, fmt, seed)
            assert not torch.equal(first.payload.view(torch.uint8), other.payload.view(torch.uint8))
            assert torch.equal(first.scales, other.scales)


def test_uniform_numbers_are_uniform() -> None:
    """Kolmogorov-Smirnov at 1e-6: the largest gap to the diagonal is below sqrt(ln(2 / 1e-6) / 2 / n)."""
    for x in (
        torch.zeros(1024, 256),
        torch.randn(1024, 256),
        torch.randn(1, 256).expand(1024, 256).contiguous(),
    ):
        u = formats._uniform(x, formats.seed_word(3, STOCHASTIC[0]))
        n = u.numel()
        ordered = u.flatten().double().sort().values
        gap = (ordered - (torch.arange(n) + 0.5) / n).abs().max()
        assert gap <= math.sqrt(math.log(2e6) / 2 / n) + 0.5 / n
        assert u.min() >= 0
        assert u.max() < 1
        neighbours = torch.corrcoef(torch.stack([u[:, :-1].flatten(), u[:, 1:].flatten()]))[0, 1]
        assert neighbours.abs() <= 5 / math.sqrt(n)


# --- errors and surroundings ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.uint8, torch.float8_e4m3fn])
def test_rejects_other_dtypes(dtype: torch.dtype) -> None:
    for fmt in (Format("int4"), Format("none"), Format("bf16")):
        with pytest.raises(FormatError, match=str(dtype)):
            formats.encode(torch.zeros(4, 4, dtype=dtype), fmt)


@pytest.mark.parametrize(
    "seed", [None, 1.5, True, torch.tensor(1.0), torch.tensor([1]), torch.tensor(1, dtype=torch.int32)]
)
def test_stochastic_needs_a_seed(seed: object) -> None:
    with pytest.raises(FormatError, match="expected a seed"):
        formats.encode(torch.zeros(4, 4), Format("int4", rounding="stochastic"), seed)  # type: ignore[arg-type]


def test_decode_rejects_another_shape() -> None:
    encoded = formats.encode(torch.zeros(4, 64), Format("int4"))
    with pytest.raises(FormatError, match="expected payload and scales of shapes"):
        formats.decode(encoded, Format("int4"), (4, 66), torch.float32)
    with pytest.raises(FormatError, match="expected payload and scales of shapes"):
        formats.decode(encoded, Format("int8"), (4, 64), torch.float32)


@pytest.fixture(params=["autocast", "default dtype", "default device", "deterministic", "inference", "grad"])
def ambient(request: pytest.FixtureRequest) -> Iterator[str]:
    """A state of the process that results must not depend on."""
    if request.param == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            yield request.param
    elif request.param == "default dtype":
        torch.set_default_dtype(torch.float64)
        yield request.param
        torch.set_default_dtype(torch.float32)
    elif request.param == "default device":
        with torch.device("meta"):
            yield request.param
    elif request.param == "deterministic":
        torch.use_deterministic_algorithms(True)
        yield request.param
        torch.use_deterministic_algorithms(False)
    elif request.param == "inference":
        with torch.inference_mode():
            yield request.param
    else:
        with torch.enable_grad():
            yield request.param


def test_surroundings_do_not_matter(ambient: str) -> None:
    x = torch.randn(3, 64, device="cpu", dtype=torch.float32)
    with torch.inference_mode(False), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        expected = {fmt: formats.encode(x.clone(), fmt, 1) for fmt in ALL_FORMATS}
    if ambient == "grad":
        x.requires_grad_()
    for fmt in ALL_FORMATS:
        encoded = formats.encode(x, fmt, 1)
        assert not any(part.requires_grad for part in encoded)
        assert all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(encoded, expected[fmt], strict=True)
        )
        assert torch.equal(
            formats.decode(encoded, fmt, x.shape, x.dtype),
            formats.decode(expected[fmt], fmt, x.shape, x.dtype),
        )


def test_imports_are_light_and_quiet() -> None:
    """torchao's import is heavy and logs; importing gnmr_fx does neither, and using it logs nothing."""
    program = """
import logging, sys
import torch
logging.basicConfig(level=logging.WARNING, format="%(message)s")
before = set(sys.modules)
import gnmr_fx.recipe, gnmr_fx.formats, gnmr_fx.kernels
new = {name.split(".")[0] for name in set(sys.modules) - before}
assert "torchao" not in new and "torch._inductor.compile_fx" not in sys.modules, new
gnmr_fx.formats.encode(torch.randn(4, 8), gnmr_fx.recipe.Format("int4"))
assert "torchao" in sys.modules
print("silent until here", file=sys.stderr, flush=True)
logging.getLogger("torchao").warning("Failed to load is shown when it is the user's")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stderr.splitlines() == ["silent until here", "Failed to load is shown when it is the user's"]
