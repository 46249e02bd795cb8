"""What Dynamo has to be told to show to function modes: grouped GEMMs, and views read as attributes."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import get_overridable_functions
from torch.overrides import TorchFunctionMode

import gnmr_fx
from gnmr_fx import Format, Recipe, function_modes, units
from gnmr_fx.projections import GROUPED
from tests.loops import gradients, readable_kernels
from tests.models import CASES, Built, cast

LOSSLESS = Recipe(Format("int4"), Format("none"))
GEMMS: dict[str, Callable[..., Tensor]] = {"F.grouped_mm": F.grouped_mm, "torch._grouped_mm": torch._grouped_mm}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with readable_kernels():
        yield
    torch._dynamo.reset()


class Experts(nn.Module):
    """Two layers of experts over sorted rows; a branch, so that the calls are intercepted."""

    def __init__(self, gemm: Callable[..., Tensor], width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.gemm = gemm
        self.up = nn.Parameter(torch.randn(experts, 2 * width, width) / 8)
        self.down = nn.Parameter(torch.randn(experts, width, 2 * width) / 8)

    def forward(self, x: Tensor, ends: Tensor, scale: float = 1.0) -> Tensor:
        inner = self.gemm(x.to(self.up.dtype), self.up.transpose(-2, -1), offs=ends)
        if scale != 1.0:
            inner = inner * scale
        return self.gemm(torch.tanh(inner), self.down.transpose(-2, -1), offs=ends)


def toy(gemm: str) -> Built:
    torch.manual_seed(0)
    model = Experts(GEMMS[gemm]).bfloat16().train()
    inputs = (torch.randn(48, 32, dtype=torch.bfloat16), torch.tensor([9, 9, 30, 48], dtype=torch.int32))
    return Built(model, inputs, {}, lambda out: out.float().square().mean())


def mixtral() -> Built:
    torch.manual_seed(0)
    return cast(CASES["mixtral-grouped"].build(), torch.bfloat16)


def seen(model: nn.Module) -> dict[str, bool]:
    return {unit.name: unit.observation.seen for unit in gnmr_fx.controller(model).units}


def outputs(built: Built, call: Callable[..., Any]) -> Tensor:
    with torch.no_grad():
        out = call(*built.args, **built.kwargs)
    return out if isinstance(out, Tensor) else out.logits


@pytest.mark.parametrize("make", [lambda: toy("F.grouped_mm"), lambda: toy("torch._grouped_mm"), mixtral])
def test_experts_are_guarded_under_compile(make: Callable[[], Built]) -> None:
    stock = make()
    built = stock._replace(model=copy.deepcopy(stock.model))
    compiled_stock = torch.compile(stock.model, backend="aot_eager", fullgraph=True)
    expected, exact = outputs(stock, compiled_stock), gradients(stock, compiled_stock)
    gnmr_fx.instrument(built.model, LOSSLESS, max_active=1.0)
    controller = gnmr_fx.controller(built.model)
    call = torch.compile(built.model, backend="aot_eager", fullgraph=True)
    weight_of = {u.name: u.name if len(u.spec.shape) == 3 else f"{u.name}.weight" for u in controller.units}
    experts = [name for name, weight in weight_of.items() if name == weight]
    assert len(experts) == 2

    controller.force("high")
    found = gradients(built, call)
    assert all(seen(built.model).values()), seen(built.model)
    assert not {name for name in exact if not torch.equal(found[name], exact[name])}
    assert torch.equal(outputs(built, call), expected)

    controller.force("low")
    found, eager = gradients(built, call), gradients(built)
    assert torch.equal(outputs(built, call), expected)
    for name in experts:
        assert 0 < (found[name].float() - exact[name].float()).norm() < 0.2 * exact[name].float().norm()
        # Stored in 4 bits here and there: what differs is how compiled code rounds activations to bf16.
        assert (found[name].float() - eager[name].float()).norm() < 0.05 * exact[name].float().norm()
    changed = {name for name in exact if not torch.equal(found[name], exact[name])}
    assert changed == set(weight_of.values())

    names, draw = [unit.name for unit in controller.units], random.Random(0)
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(20):
            controller.force(draw.sample(names, draw.randrange(len(names) + 1)))
            gradients(built, call)
    assert counters["stats"]["unique_graphs"] == 0  # since the first call
    gnmr_fx.uninstrument(built.model)


class Transposed(nn.Module):
    """Reads a weight's transpose as an attribute, of the whole, of a slice and in a helper; a branch, as in Falcon."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(2 * width, width) / 8)
        self.packed = nn.Parameter(torch.randn(2, 3 * width, 2 * width) / 8)
        self.last = nn.Parameter(torch.randn(3, width, 3 * width) / 8)

    def forward(self, x: Tensor, index: int = 1, scale: float = 1.0) -> Tensor:
        inner = torch.tanh(x @ self.first.T)
        if scale != 1.0:
            inner = inner * scale
        return self.helper(torch.tanh(inner.matmul(self.packed[index].T)), self.last)

    @staticmethod
    def helper(x: Tensor, weight: Tensor) -> Tensor:
        return torch.matmul(x, weight.mT)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_weights_read_as_attributes_are_guarded_under_compile(backend: str) -> None:
    torch.manual_seed(0)
    stock = Built(Transposed().train(), (torch.randn(48, 32),), {}, lambda out: out.square().mean())
    built = stock._replace(model=copy.deepcopy(stock.model))
    exact = gradients(stock, torch.compile(stock.model, backend=backend, fullgraph=True))
    gnmr_fx.instrument(built.model, LOSSLESS, max_active=1.0)
    controller = gnmr_fx.controller(built.model)
    call = torch.compile(built.model, backend=backend, fullgraph=True)
    controller.force("high")
    found = gradients(built, call)
    assert seen(built.model) == {"first": True, "packed": True, "last": True}
    for name in exact:
        torch.testing.assert_close(found[name], exact[name])
    controller.force("low")
    found = gradients(built, call)
    assert {name for name in exact if not torch.allclose(found[name], exact[name], rtol=1e-3)} == set(exact)
    gnmr_fx.uninstrument(built.model)


def test_dynamo_is_as_it_was_after_uninstrument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "_OBSERVERS", weakref.WeakValueDictionary())  # no models of other tests
    function_modes.hide()  # what those have shown
    before, tensor = set(get_overridable_functions()), dict(vars(TensorVariable))
    first, second = toy("F.grouped_mm"), toy("F.grouped_mm")
    for built in (first, second):
        gnmr_fx.instrument(built.model)
    assert get_overridable_functions() >= GROUPED
    assert hasattr(TensorVariable, "method_attr_T")
    gnmr_fx.uninstrument(first.model)
    assert get_overridable_functions() >= GROUPED
    assert hasattr(TensorVariable, "method_attr_T")
    gnmr_fx.uninstrument(second.model)
    assert get_overridable_functions() == before
    assert dict(vars(TensorVariable)) == tensor


def test_traced_forwards_leave_dynamo_alone() -> None:
    before, tensor = set(get_overridable_functions()), dict(vars(TensorVariable))
    gnmr_fx.instrument(nn.Sequential(nn.Linear(8, 8)))
    assert get_overridable_functions() == before
    assert dict(vars(TensorVariable)) == tensor


class _Doubles(TorchFunctionMode):
    """Doubles what a read of ``T`` or ``mT`` gives."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out + out if func in (Tensor.T.__get__, Tensor.mT.__get__) else out


def test_modes_of_others_see_under_compile_what_they_see_in_eager_mode() -> None:
    def reads(x: Tensor) -> Tensor:
        with _Doubles():
            return x.T.mT.T + x.real.T

    x = torch.randn(4, 3)
    try:
        function_modes.show()
        assert torch.equal(reads(x), 10 * x.T)
        assert torch.equal(torch.compile(reads, backend="eager", fullgraph=True)(x), 10 * x.T)
    finally:
        gnmr_fx.uninstrument(gnmr_fx.instrument(nn.Sequential(nn.Linear(8, 8))))  # hides it, unless others need it
