"""Tensors as they lie in memory: what is stored comes back in the same place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gnmr_fx.physical import Physical
from gnmr_fx.recipe import Format


@st.composite
def placed(draw: st.DrawFn) -> Tensor:
    """A tensor of any order of dimensions in memory, with gaps or without, some dimensions expanded."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    step = draw(st.sampled_from([1, 2]))
    base = torch.arange(float(torch.Size([*sizes, step]).numel())).view(*sizes, step)[..., 0]
    x = base.permute(draw(st.permutations(range(len(sizes)))))
    for dim in range(x.dim()):
        if x.size(dim) == 1 and draw(st.booleans()):
            x = x.expand([3 if d == dim else n for d, n in enumerate(x.shape)])
    return x


@settings(max_examples=300, deadline=None)
@given(placed(), st.sampled_from(["int4/group8", "int4/group128", "int8/token", "int8/tensor", "none"]))
def test_a_block_is_the_tensor_again(x: Tensor, spec: str) -> None:
    physical = Physical.of(x, Format.parse(spec))
    block = physical.block(x)
    again = physical.view(block.contiguous(), tuple(x.shape))
    assert torch.equal(again, x)
    assert again.dim() == x.dim()
    # Nothing that is repeated is stored twice.
    repeated = torch.Size([n for n, s in zip(x.shape, x.stride(), strict=True) if s == 0 and n > 1]).numel()
    assert block.numel() * repeated == x.numel()


def test_memory_without_gaps_is_stored_without_a_copy_and_keeps_its_strides() -> None:
    x = torch.randn(2, 8, 4, 16).transpose(1, 2)  # as attention has its heads
    physical = Physical.of(x, Format("int4"))
    block = physical.block(x)
    assert block.data_ptr() == x.data_ptr()
    assert physical.view(block, tuple(x.shape)).stride() == x.stride()


@pytest.mark.parametrize(
    ("fmt", "width"), [(Format("int4"), 4 * 16 * 8), (Format("int4", group_size=64), 64), (Format("int4", "token"), 16)]
)
def test_narrow_rows_are_merged_up_to_a_group(fmt: Format, width: int) -> None:
    x = torch.randn(2, 8, 4, 16).transpose(1, 2)
    assert Physical.of(x, fmt).block(x).shape[-1] == width
