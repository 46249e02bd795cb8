"""A model that tables and reports are made of, and the loop that trains it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gnmr_fx
from gnmr_fx import formats, kernels
from tests.models import Built
from tests.toys import Decoder

CONFIG = gnmr_fx.GnmrConfig(alpha=1.2, beta=1.2, window=3, lock_steps=4, warmup_steps=3)


@contextlib.contextmanager
def readable_kernels() -> Iterator[None]:
    """Store by the readable code, which stores the same bits: building kernels takes seconds each."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("encode", "roundtrip", "decode"):
            patch.setattr(kernels, name, functools.partial(getattr(kernels, name), backend="eager"))
        patch.setattr(kernels, "rescale", formats.rescaled)
        yield


@contextlib.contextmanager
def benchmark(name: str, *imports: str) -> Iterator[ModuleType]:
    """A module of benchmarks/, run by the readable code; it and those it ``imports`` are forgotten afterwards."""
    folder = str(Path(__file__).resolve().parent.parent / "benchmarks")
    sys.path.insert(0, folder)
    try:
        with readable_kernels():
            yield importlib.import_module(name)
    finally:
        sys.path.remove(folder)
        for module in (name, *imports):
            sys.modules.pop(module, None)


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


def decoder(blocks: int = 1) -> Built:
    """A small language model that returns its loss, and its input."""
    torch.manual_seed(0)
    return Built(Decoder(blocks=blocks).train(), (torch.randint(0, 48, (2, 8)),), {}, lambda loss: loss)


def gradients(built: Built, call: Callable[..., Any] | None = None) -> dict[str, Tensor]:
    """Of every parameter, by one call of the model, or of ``call`` in its place."""
    built.model.zero_grad(set_to_none=True)
    built.loss((built.model if call is None else call)(*built.args, **built.kwargs)).backward()
    return {name: p.grad.clone() for name, p in built.model.named_parameters() if p.grad is not None}


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of the whole gradient."""
    assert found.keys() == expected.keys()
    difference = sum(float((found[k].double() - expected[k].double()).square().sum()) for k in expected)
    return (difference / sum(float(g.double().square().sum()) for g in expected.values())) ** 0.5


def roles(model: nn.Module) -> dict[str, list[str]]:
    """What each unit stores, sorted."""
    return {row.unit: sorted(a["role"] for a in row.activations) for row in gnmr_fx.table(model).units}


def autograd_nodes(loss: Tensor) -> Iterator[Any]:
    """Every node of the autograd graph behind ``loss``, once."""
    todo, seen = [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
            yield node
