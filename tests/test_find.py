"""Pass ``find``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from gnmr_fx.errors import LazyParameterError, NoRecoverableOperatorError, PatternError
from gnmr_fx.passes.capture import capture
from gnmr_fx.passes.find import find, matches
from gnmr_fx.passes.plan import Plan, Selection
from gnmr_fx.passes.trace import children_weights_in_code, trace_site
from gnmr_fx.recipe import get_recipe
from tests.toys import (
    Block,
    Branching,
    ChildWeight,
    Ellipsis_,
    Experts,
    NumberedChildren,
    OwnParameters,
    ParameterContainers,
    ReadsTraining,
    Stack,
    StaticHelper,
)


def found(model: nn.Module, inputs: object = None, **selection: tuple[str, ...]) -> Plan:
    plan = Plan(model.train(), get_recipe(), Selection(**selection), inputs)
    return find(capture(plan) if inputs is not None else plan)


def names(plan: Plan) -> list[str]:
    return [unit.name for unit in plan.units]


@pytest.mark.parametrize("inputs", [None, torch.randn(2, 8)])
def test_linears_are_found_with_and_without_a_captured_graph(inputs):
    plan = found(Stack(), inputs)
    assert names(plan) == [f"blocks.{i}.{name}" for i in range(2) for name in ("gate", "up", "down")]
    assert [(item.name, item.reason) for item in plan.left_alone] == [
        ("lm_head", "output head (left alone unless include names it)")
    ]


@pytest.mark.parametrize("inputs", [None, torch.randn(2, 8)])
def test_own_parameters_are_traced(inputs):
    plan = found(OwnParameters(), inputs)
    assert names(plan) == ["a", "b", "c", "d", "e"]
    assert [unit.operator for unit in plan.units] == ["linear", "matmul", "matmul", "einsum", "addmm"]
    assert all(finding.traced is not None for finding in plan.findings)


@pytest.mark.parametrize("module", [nn.Linear(4, 4), nn.Linear(4, 4, bias=False), OwnParameters()])
def test_straight_line_forwards_are_traced(module):
    assert trace_site(module) is not None


class _Loops(nn.Linear):
    def forward(self, x):  # type: ignore[no-untyped-def]
        for _ in range(2):
            x = F.linear(x, self.weight)
        return x


class _Configured(nn.Linear):
    def forward(self, x):  # type: ignore[no-untyped-def]
        return F.linear(x, self.weight) * self.in_features


def _helper(x, w):  # type: ignore[no-untyped-def]
    return F.linear(x, w)


class _Helped(nn.Linear):
    def forward(self, x):  # type: ignore[no-untyped-def]
        return _helper(x, self.weight)


class _Stores(nn.Linear):
    def forward(self, x):  # type: ignore[no-untyped-def]
        self.last = x
        return F.linear(x, self.weight)


class _Variadic(nn.Linear):
    def forward(self, *xs):  # type: ignore[no-untyped-def]
        return F.linear(xs[0], self.weight)


class _Manages(nn.Linear):
    def forward(self, x):  # type: ignore[no-untyped-def]
        with torch.autocast("cpu"):
            return F.linear(x, self.weight)


@pytest.mark.parametrize(
    "module",
    [
        Branching(),
        ReadsTraining(),
        Ellipsis_(),
        *(cls(4, 4) for cls in (_Loops, _Configured, _Helped, _Stores, _Variadic, _Manages)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_forwards_that_may_take_another_way_are_not_traced(module):
    assert trace_site(module) is None
    assert len(found(nn.Sequential(module)).units) == 1


def test_a_forward_set_on_the_instance_is_not_traced():
    module = nn.Linear(4, 4)
    module.forward = lambda x: x  # type: ignore[method-assign]
    assert trace_site(module) is None


def test_a_missing_bias_is_read_again_at_run_time():
    graph = trace_site(nn.Linear(4, 4, bias=False))
    assert graph is not None
    assert [str(n.target) for n in graph.nodes if n.op == "get_attr"] == ["weight", "bias"]


def test_weights_of_children_in_the_code():
    assert children_weights_in_code(ChildWeight()) == ["inner.weight"]
    assert children_weights_in_code(Stack()) == []


@pytest.mark.parametrize("inputs", [None, torch.randn(2, 8)])
def test_a_childs_weight_is_one_unit_with_the_callers_site(inputs):
    plan = found(nn.Sequential(ChildWeight()), inputs)
    assert names(plan) == ["0.inner"]
    assert ("0", "inner.weight") in plan.units[0].sites


@pytest.mark.parametrize("inputs", [None, torch.randn(2, 8)])
def test_parameters_in_containers_belong_to_the_module_that_holds_the_container(inputs):
    plan = found(nn.Sequential(ParameterContainers(), nn.Linear(8, 8)), inputs)
    assert names(plan) == ["0.weights.0", "0.weights.1", "0.named.up-proj", "1"]
    assert plan.units[0].sites == (("0", "weights.0"),)


def test_a_parameter_in_a_container_that_no_projection_reads_is_listed():
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables, self.out = nn.ParameterList([torch.randn(8, 8)]), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(x + self.tables[0].sum(0)) if x.dim() else x

    plan = found(Sum(), torch.randn(2, 8))
    assert names(plan) == ["out"]
    assert [(item.name, item.reason) for item in plan.left_alone] == [
        ("tables.0", "no projection reads it in the captured forward")
    ]


def test_children_in_a_list_whose_weights_are_read():
    plan = found(nn.Sequential(NumberedChildren()), torch.randn(2, 8))
    assert names(plan) == ["0.experts.0", "0.experts.1"]
    assert ("0", "experts.0.weight") in plan.units[0].sites


@pytest.mark.parametrize("inputs", [None, torch.randn(2, 8)])
def test_a_weight_that_is_handed_to_its_own_module_is_taken_where_it_is_read(inputs):
    plan = found(nn.Sequential(Experts()), inputs)
    assert names(plan) == ["0.mlp.w"]
    assert plan.units[0].sites == (("0", "mlp.w"),)


@pytest.mark.parametrize("inputs", [None, torch.randn(2, 8)])
def test_a_static_method_multiplies_and_a_convolutions_weight_is_no_unit(inputs):
    plan = found(StaticHelper(), inputs)
    assert names(plan) == ["table"]
    assert [(item.name, item.reason) for item in plan.left_alone] == [("conv", "a convolution is not a projection")]


def test_one_parameter_is_one_unit():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    plan = found(model)
    assert names(plan) == ["0"]
    assert {site for site, _ in plan.units[0].sites} == {"0", "1"}


def test_other_layers_are_left_alone_with_a_reason():
    model = nn.ModuleDict({
        "linear": nn.Linear(8, 8), "conv": nn.Conv1d(8, 8, 3), "rnn": nn.LSTM(8, 8), "embedding": nn.Embedding(8, 8),
        "normed": parametrizations.weight_norm(nn.Linear(8, 8)), "norm": nn.LayerNorm(8),
    })  # fmt: skip
    plan = found(model)
    assert names(plan) == ["linear"]
    reasons = {item.name: item.reason for item in plan.left_alone}
    assert "convolution" in reasons["conv"]
    assert any("recurrent" in reason for name, reason in reasons.items() if name.startswith("rnn"))
    assert "parametrization" in reasons["normed.weight"]
    assert not any(name.startswith(("embedding", "norm.")) for name in reasons)


def test_quantized_and_integer_weights_are_left_alone():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.uint8), requires_grad=False)
    plan = found(model)
    assert names(plan) == ["0"]
    assert any("uint8" in item.reason for item in plan.left_alone)


def test_weights_that_hooks_compute_are_left_alone():
    from torch.nn.utils import prune

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    prune.l1_unstructured(model[0], "weight", 0.5)
    plan = found(model)
    assert names(plan) == ["1"]
    assert [(i.name, i.reason) for i in plan.left_alone] == [
        ("0.weight_orig", "weight is computed from it before each forward")
    ]


def test_what_the_captured_forward_does_not_multiply_with_is_left_alone():
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(8, 8))
            self.linear = nn.Linear(8, 8)

        def forward(self, x, add=True):  # type: ignore[no-untyped-def]
            return self.linear(x) + self.table[0] if add else x

    assert names(found(Table())) == ["table", "linear"]  # nobody knows yet
    plan = found(Table(), torch.randn(2, 8))
    assert names(plan) == ["linear"]
    assert [(i.name, i.reason) for i in plan.left_alone] == [
        ("table", "no projection reads it in the captured forward")
    ]


def test_include_and_exclude():
    assert names(found(Stack(), include=("*.gate",))) == ["blocks.0.gate", "blocks.1.gate"]
    assert names(found(Stack(), include=("*",)))[-1] == "lm_head"
    assert names(found(Stack(), exclude=("blocks.0",))) == [f"blocks.1.{n}" for n in ("gate", "up", "down")]
    plan = found(Stack(), include=("blocks.*",), exclude=("*.up",))
    assert {(i.name, i.reason) for i in plan.left_alone} == {
        ("lm_head", "not in include"), ("blocks.0.up", "in exclude"), ("blocks.1.up", "in exclude"),
    }  # fmt: skip


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_nothing(option):
    with pytest.raises(PatternError, match=r"'\*\.q_proj'.*blocks\.0\.gate"):
        found(Stack(), **{option: ("*.q_proj",)})


def test_nothing_to_recover():
    with pytest.raises(NoRecoverableOperatorError, match="found none in Sequential"):
        found(nn.Sequential(nn.LayerNorm(8), nn.ReLU()))
    with pytest.raises(NoRecoverableOperatorError, match="a convolution is not a projection"):
        found(nn.Sequential(nn.Conv2d(3, 3, 1)))
    with pytest.raises(NoRecoverableOperatorError, match="complex64"):
        found(nn.Sequential(nn.Linear(8, 8, dtype=torch.complex64)))
    with pytest.raises(NoRecoverableOperatorError, match="output head"):
        found(nn.ModuleDict({"lm_head": nn.Linear(8, 8)}))


def test_lazy_parameters():
    with pytest.raises(LazyParameterError, match=r"0\.weight"):
        found(nn.Sequential(nn.LazyLinear(8)))


def test_patterns_match_a_path_or_a_module_above_it():
    assert matches("a.0.b", "a.*")
    assert matches("a.0.b", "a.0")
    assert matches("a.0.b", "*.b")
    assert not matches("a.0.b", "b")
    assert not matches("a.0.b", "*.c")


def test_scan_of_a_block_leaves_other_modules_alone():
    plan = found(Block())
    assert all(finding.weight == "weight" for finding in plan.findings)
    assert len(plan.findings) == 3
