"""Pass ``capture``."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gnmr_fx.passes.capture import capture, find_calls, inputs_from_config, operator_name, split_inputs
from gnmr_fx.passes.plan import Plan
from gnmr_fx.recipe import get_recipe
from tests.toys import Block, Branching, ChildWeight, OwnParameters, Stack

RECIPE = get_recipe()


def captured(model: nn.Module, inputs: object) -> Plan:
    return capture(Plan(model.train(), RECIPE, example_inputs=inputs))


def test_calls_in_the_order_they_run_with_sites_weights_and_shapes():
    plan = captured(Stack(), torch.randn(3, 8))
    assert plan.capture_note == ""
    expected = [f"blocks.{i}.{name}" for i in range(2) for name in ("gate", "up", "down")] + ["lm_head"]
    assert [call.site for call in plan.calls] == expected
    assert [call.weight for call in plan.calls] == [f"{site}.weight" for site in expected]
    assert {call.shape for call in plan.calls} == {(3, 8)}
    assert {call.operator for call in plan.calls} == {"linear"}


def test_every_covered_operator_and_views_of_weights():
    plan = captured(OwnParameters(), torch.randn(3, 8))
    assert [(call.weight, call.operator) for call in plan.calls] == [
        ("a", "linear"), ("b", "matmul"), ("c", "matmul"), ("d", "einsum"), ("e", "addmm"),
    ]  # fmt: skip


@pytest.mark.parametrize("transposed", [lambda w: w.T, lambda w: w.mT, lambda w: w.t(), lambda w: w.transpose(0, 1)])
def test_transposed_weights(transposed: Callable[[Tensor], Tensor]) -> None:
    """Dynamo shows ``w.T`` as a read of an attribute."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor, skip: bool = False) -> Tensor:
            return x if skip else x @ transposed(self.w)

    plan = captured(Product(), torch.randn(3, 8))
    assert [(call.weight, call.operator, call.shape) for call in plan.calls] == [("w", "matmul", (3, 8))]


def test_a_childs_weight_is_attributed_to_the_caller():
    plan = captured(nn.Sequential(ChildWeight()), torch.randn(3, 8))
    assert [(call.site, call.weight) for call in plan.calls] == [("0", "0.inner.weight")]


def test_a_forward_may_call_its_self_anything():
    class Odd(Block):
        def forward(this, x):  # type: ignore[no-untyped-def]
            return this.down(this.gate(x) * this.up(x))

    assert [call.site for call in captured(Odd(), torch.randn(3, 8)).calls] == ["gate", "up", "down"]
    assert [call.site for call in captured(nn.Sequential(Odd()), torch.randn(3, 8)).calls] == [
        "0.gate",
        "0.up",
        "0.down",
    ]


def test_a_module_of_two_names_is_called_by_its_first():
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Sequential()})
    model["b"].append(model["a"])
    model.forward = lambda x: model["b"](x)  # type: ignore[method-assign]
    assert [call.site for call in captured(model, torch.randn(2, 8)).calls] == ["a"]


def test_without_inputs_there_is_a_note_and_no_graph():
    plan = capture(Plan(Block(), RECIPE))
    assert plan.graph is None
    assert "no example inputs" in plan.capture_note
    assert plan.calls == ()


def test_a_failing_forward_becomes_a_note(caplog):
    plan = captured(Block(), torch.randn(3, 5))
    assert plan.graph is None
    assert plan.capture_note
    assert "could not capture" in caplog.text  # the user gave inputs: say so at once


def test_the_model_and_dynamos_counters_are_untouched():
    from torch._dynamo.utils import counters

    model = Stack()
    state = copy.deepcopy(model.state_dict())
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    before = copy.deepcopy(dict(counters))
    captured(model, torch.randn(3, 8))
    assert dict(counters) == before
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_python_side_effects_of_the_forward_do_not_happen():
    class Counts(Block):
        calls = 0

        def forward(self, x):  # type: ignore[no-untyped-def]
            self.calls = self.calls + 1
            return super().forward(x)

    model = Counts()
    assert captured(model, torch.randn(3, 8)).graph is not None
    assert model.calls == 0


def test_a_graph_without_projections_has_no_calls():
    plan = captured(nn.Sequential(nn.LayerNorm(8), nn.ReLU()), torch.randn(3, 8))
    assert plan.graph is not None
    assert list(find_calls(plan.graph, {})) == []


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [((1, 2), ((1, 2), {})), ([1], ((1,), {})), ({"x": 1}, ((), {"x": 1})), (3, ((3,), {}))],
)
def test_forms_of_example_inputs(inputs, expected):
    assert split_inputs(inputs) == expected


def test_keyword_inputs_and_branches():
    assert len(captured(Branching(), {"x": torch.randn(3, 8), "double": True}).calls) == 1


def test_no_inputs_from_a_module_without_a_configuration():
    assert inputs_from_config(Block()) is None


def test_operator_names():
    assert operator_name(torch.nn.functional.linear) == "linear"
    assert operator_name("addmm") == "addmm"
    assert operator_name(torch.ops.aten._grouped_mm.default) == "grouped_mm"
    assert operator_name(torch.Tensor.__matmul__) == "matmul"
