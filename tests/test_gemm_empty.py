"""Low-precision GEMMs of batches without a row: zeros of the right shapes, whatever the backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

import gnmr_fx
from tests.loops import readable_kernels


@pytest.fixture(autouse=True)
def _readable_kernels() -> Iterator[None]:
    with readable_kernels():
        yield


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)])
@pytest.mark.parametrize(
    ("name", "backend"),
    [("gemm-int8-bf16", "native"), ("gemm-int8-bf16", "emulated"), ("dsv3-fp6-fp8", "auto")],
)
def test_empty_batches(name: str, backend: str, shape: tuple[int, ...]) -> None:
    recipe = gnmr_fx.RECIPES[name]
    assert recipe.gemm is not None
    recipe = replace(recipe, gemm=replace(recipe.gemm, backend=backend))  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(16, 24)).train()
    gnmr_fx.instrument(model, recipe, include=["*"])
    gnmr_fx.controller(model).force("low")
    for size in (shape, (5, 16)):
        x = torch.randn(size, requires_grad=True)
        out = model(x)
        assert out.shape == (*size[:-1], 24)
        out.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == size
        weight, bias = model[0].weight.grad, model[0].bias.grad
        assert weight.shape == (24, 16)
        assert bool(weight.any()) == bool(bias.any()) == (0 not in size)
        model.zero_grad()
