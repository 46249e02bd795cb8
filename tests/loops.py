"""A model that tables and reports are made of, and the loop that trains it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn

import gnmr_fx
from gnmr_fx import formats, kernels

CONFIG = gnmr_fx.GnmrConfig(alpha=1.2, beta=1.2, window=3, lock_steps=4, warmup_steps=3)


@contextlib.contextmanager
def readable_kernels() -> Iterator[None]:
    """Store by the readable code, which stores the same bits: building kernels takes seconds each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "encode", formats.encode)
        patch.setattr(kernels, "decode", formats.decode)
        yield


def chain(depth: int = 3, width: int = 40) -> nn.Sequential:
    """Linears alone: nothing else keeps anything for the backward."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def train(model: nn.Module, inputs: Iterable[Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for x in inputs:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def noisy(steps: int, width: int = 40) -> list[Tensor]:
    """Inputs whose gradients spike every seventh step."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, width, generator=generator) * (6.0 if step % 7 == 6 else 1.0) for step in range(steps)]


def trained_model() -> nn.Module:
    """A model after 24 steps, some of them with recovery."""
    torch.manual_seed(0)
    model = gnmr_fx.instrument(chain(4), max_active=2, config=CONFIG)
    train(model, noisy(24))
    return model
