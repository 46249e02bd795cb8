"""Frozen weights stored in 8 or 4 bits: what the formats hold, and that every operation sees the exact values."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gnmr_fx
from gnmr_fx import formats, frozen
from gnmr_fx.frozen import FrozenWeight
from tests.loops import readable_kernels

INT8, NF4 = "int8/token/nearest", "nf4"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def _readable() -> Iterator[None]:
    with readable_kernels():
        yield


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*(shape or (32, 64))).to(dtype)


def stored(x: Tensor, spec: str = INT8, place: Any = "host") -> nn.Parameter:
    return FrozenWeight.parameter(x.clone(), spec, place)


def low(weight: Any) -> Tensor:
    """What the low-cost path computes with."""
    return frozen.decode(weight.store.low, weight.store.spec, weight.shape, weight.dtype)


def device_bytes(weight: Any) -> int:
    """Of the storages of the low-cost format."""
    return sum(t.untyped_storage().nbytes() for t in weight.store.low)


# Formats --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(32, 64), (7, 129), (1, 1), (3, 5, 17), (0, 8)])
def test_int8_errs_by_half_a_step_of_its_row(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = values(*shape, dtype=dtype)
    if x.numel() > 100:
        x[0, 0], x[1] = 1e4, 0.0  # an outlier costs its own row only; zeros stay zero
    weight: Any = stored(x)
    found, expected = low(weight), x
    assert found.dtype == dtype
    # A row spans at most 255 steps of the stored scale. Half a step, or one at the ends of the range (see formats), and
    # the rounding of the result to the weight's dtype, half a unit in its last place.
    rows = x.float().reshape(-1, shape[-1])
    scale = weight.scales[:, :1].float()
    span = rows.amax(1, keepdim=True).clamp(min=0) - rows.amin(1, keepdim=True).clamp(max=0)
    assert (scale <= (span / 255 * 1.01).clamp(min=torch.finfo(torch.float32).tiny)).all()
    error = (found.float() - expected.float()).reshape(rows.shape).abs()
    rounding = rows.abs() * torch.finfo(dtype).eps
    inside = (rows < rows.amax(1, keepdim=True)) & (rows > rows.amin(1, keepdim=True))
    assert (error <= scale / 2 * 1.01 + rounding)[inside].all()
    assert (error <= scale * 1.01 + rounding).all()
    assert (found.reshape(rows.shape)[rows.abs().amax(1) == 0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nf4_is_that_of_torchao(dtype: torch.dtype) -> None:
    from torchao.quantization import to_nf4

    x = values(64, 256, dtype=dtype)
    assert torch.equal(low(stored(x, NF4)), to_nf4(x, 64, 256).get_original_weight())


def test_nf4_errs_by_half_a_gap_of_its_code() -> None:
    x = values(64, 64)
    weight: Any = stored(x, NF4)
    blocks = x.reshape(-1, 64)
    scaler = blocks.abs().amax(1, keepdim=True)
    # Codes are nearest among 16 values, whose widest gap is 1 - 0.6962; the scaler itself is stored in 8 bits around
    # the mean, in one group here: off by at most 1/128 of its largest distance from the mean (half of that, or one
    # where the code 128 is clipped).
    scaler_error = (scaler - scaler.mean()).abs().max() / 128
    assert ((low(weight) - x).reshape(-1, 64).abs() <= scaler * (1 - 0.6962) / 2 + scaler_error).all()
    assert (low(weight) - x).norm() / x.norm() < 0.12  # NF4 on normal values: 0.096 at blocks of 64 (arXiv 2305.14314)


@pytest.mark.parametrize("spec", [INT8, NF4, "int4/group32/nearest", "int2/token/nearest", "fp8_e4m3/token/nearest"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_those_of_the_formula(spec: str, dtype: torch.dtype) -> None:
    for shape in ((32, 64), (128, 384), (3, 192)):
        weight: Any = stored(values(*shape, dtype=dtype), spec)
        assert device_bytes(weight) == frozen.nbytes(shape, spec, dtype)


def test_nf4_needs_whole_blocks() -> None:
    assert "multiples of 64" in frozen.unfit(values(3, 5), NF4)
    assert not frozen.unfit(values(3, 64), NF4)
    assert not frozen.unfit(values(3, 5), INT8)


@pytest.mark.parametrize("spec", [INT8, NF4])
def test_zeros(spec: str) -> None:
    assert torch.equal(low(stored(torch.zeros(4, 64), spec)).abs(), torch.zeros(4, 64))


# The weight as a tensor -----------------------------------------------------------------------------------------------

READS = {
    "whole": lambda w: w + 0,
    "transposed": lambda w: w.t(),
    "row": lambda w: w[3],
    "slice": lambda w: w[:, 5:9],
    "chunk": lambda w: w.chunk(2)[1],
    "norm": lambda w: w.norm(dim=1),
    "product": lambda w: w @ w.t(),
    "linear": lambda w: nn.functional.linear(torch.ones(2, 64), w),
    "double": lambda w: w.double() + 0,
    "int": lambda w: w.to(torch.int8),
    "compare": lambda w: w > 0,
    "list": lambda w: torch.tensor(w.tolist()),
    "numpy": lambda w: torch.from_numpy(w.detach().numpy()).clone(),
    "cat": lambda w: torch.cat([w, w]),
    "like": torch.zeros_like,
}


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("read", READS)
def test_reading_sees_the_exact_values(read: str, place: str) -> None:
    x = values()
    found, expected = READS[read](stored(x, place=place)), READS[read](x)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    assert type(found + 0) is Tensor


WRITES = {
    "add": lambda w, d: w.add_(d),
    "data +=": lambda w, d: _add_to_data(w, d),
    "data =": lambda w, d: setattr(w, "data", w.detach() + d),
    "data of another": lambda w, d: setattr(w, "data", stored(w + d) if isinstance(w, FrozenWeight) else w + d),
    "copy": lambda w, d: w.copy_(w + d),
    "copy one value": lambda w, d: w.copy_(torch.tensor(2.0)),
    "zero": lambda w, d: w.zero_(),
    "fill": lambda w, d: nn.init.constant_(w, 0.5),
    "set row": lambda w, d: w[3].copy_(d[0]),
    "transposed": lambda w, d: w.t()[1:4].mul_(2.0),
    "data view": lambda w, d: w.data.view(-1).add_(1.0),
    "chunks": lambda w, d: [part.zero_() for part in w.chunk(4)[:2]],
    "set": lambda w, d: w.__setitem__((slice(None), 3), 7.0),
    "out": lambda w, d: torch.add(w, d, out=w),
    "foreach": lambda w, d: torch._foreach_add_([w], [d]),
    "addmm": lambda w, d: w.addmm_(d[:, :2], d[:2]),
}


def _add_to_data(weight: Any, delta: Tensor) -> None:
    weight.data += delta


@pytest.mark.parametrize("spec", [INT8, NF4])
@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_writing_stores_the_weight_anew(write: str, spec: str) -> None:
    x, delta = values(), values()
    weight: Any = stored(x, spec)
    place = weight.payload.data_ptr()
    recovered = weight.store.recover()
    for _ in range(2):
        WRITES[write](weight, delta)
        WRITES[write](x, delta)
        assert isinstance(weight, FrozenWeight)
        assert torch.equal(weight + 0, x)
        assert torch.equal(low(weight), low(stored(x, spec)))
        assert torch.equal(weight.store.exact(), x)
    assert recovered is None
    assert weight.payload.data_ptr() == place  # compiled code reads the same memory


def test_a_parameter() -> None:
    weight = stored(values())
    assert isinstance(weight, nn.Parameter)
    assert not weight.requires_grad
    assert weight.is_leaf
    layer = nn.Linear(64, 32)
    layer.weight = weight
    assert dict(layer.named_parameters())["weight"] is weight


def test_a_clone_and_an_alias() -> None:
    x = values()
    weight: Any = stored(x)
    alias, clone = weight.detach(), weight.clone()
    assert isinstance(alias, FrozenWeight)
    assert isinstance(clone, FrozenWeight)
    with torch.no_grad():
        weight += 1
    assert torch.equal(alias + 0, x + 1)
    assert torch.equal(clone + 0, x)


def through_torch_save(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w)), through_torch_save])
@pytest.mark.parametrize("spec", [INT8, NF4])
def test_copies(way: Any, spec: str) -> None:
    x = values()
    both = nn.ParameterList([stored(x, spec)])
    both.append(both[0])
    twin = way(both)
    assert twin[0] is twin[1]
    assert isinstance(twin[0], FrozenWeight)
    assert isinstance(twin[0], nn.Parameter)
    assert torch.equal(low(twin[0]), low(both[0]))
    with torch.no_grad():
        twin[0].zero_()
    assert torch.equal(both[0] + 0, x)


@pytest.mark.parametrize("place", ["host", "device"])
def test_a_cast_stores_the_cast_values(place: str) -> None:
    x = values()
    layer = nn.Linear(64, 32, bias=False)
    layer.weight = weight = stored(x, place=place)
    layer.to(torch.bfloat16)
    assert layer.weight is weight
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight + 0, x.bfloat16())
    assert torch.equal(low(weight), low(stored(x.bfloat16())))


def test_values_of_another_shape_or_dtype_are_refused() -> None:
    weight: Any = stored(values())
    for other in (values(32, 63), values().double()):
        with pytest.raises(TypeError, match="uninstrument"):
            weight.data = other


# Recipes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"low": "int8"},
        {"low": gnmr_fx.Format("bf16")},
        {"low": gnmr_fx.Format("int8", rounding="stochastic")},
        {"residual": "disk"},
        {"evaluate": "exact"},
    ],
)
def test_invalid_recipes(options: dict[str, Any]) -> None:
    with pytest.raises(gnmr_fx.FormatError):
        gnmr_fx.FrozenRecipe(**options)


def test_recipes_of_frozen_weights_store_no_activations() -> None:
    recipe = gnmr_fx.RECIPES["lora-int8-bf16"]
    assert recipe.frozen == gnmr_fx.FrozenRecipe(gnmr_fx.Format("int8", "token"), residual="host")
    assert recipe.with_residual("device").frozen.residual == "device"
    assert "int8 token" in str(recipe)
    with pytest.raises(gnmr_fx.FormatError, match="none"):
        gnmr_fx.Recipe(gnmr_fx.Format("int4"), gnmr_fx.Format("int8"), frozen=recipe.frozen)
    with pytest.raises(gnmr_fx.FormatError, match="lora-int8-bf16"):
        gnmr_fx.RECIPES["saved-int4-int8"].with_residual("device")


def test_formats_of_the_library_are_used_as_they_are() -> None:
    x = values()
    fmt = gnmr_fx.Format("int8", "token")
    assert torch.equal(low(stored(x)), formats.decode(formats.encode(x, fmt), fmt, x.shape, x.dtype))
