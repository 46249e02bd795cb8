"""Passes ``admit`` and ``freeze``: which projections are units under a recipe for frozen weights, what they hear."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import gnmr_fx
from gnmr_fx.errors import AdapterError, QuantizedWeightError
from gnmr_fx.passes import pipeline
from gnmr_fx.passes.find import find
from gnmr_fx.passes.freeze import ADAPTER, TRAINABLE, admit, freeze
from gnmr_fx.passes.plan import Plan, Selection
from tests.toys import Block, OwnParameters, WithAdapter

RECIPE = gnmr_fx.RECIPES["lora-int8-bf16"]


def plan_of(model: nn.Module, recipe: gnmr_fx.Recipe = RECIPE, **selection: Any) -> Plan:
    """As ``find`` leaves it."""
    return find(Plan(model, recipe, Selection(**selection)))


def signals(plan: Plan) -> dict[str, tuple[str, str]]:
    return {unit.name: (unit.signal, unit.adapters) for unit in freeze(plan).units}


def reasons(plan: Plan) -> dict[str, str]:
    return {item.name: item.reason for item in freeze(plan).left_alone}


def test_other_recipes_are_none_of_its_business() -> None:
    plan = plan_of(Block(), gnmr_fx.RECIPES["saved-int4-int8"])
    assert admit(plan) is plan
    assert freeze(plan) is plan


def test_it_runs_before_forwards_are_made() -> None:
    names = [step.__name__ for step in pipeline.PASSES]
    assert names[0] == "admit"
    assert names.index("find") < names.index("freeze") < names.index("rewrite")


def test_frozen_projections_are_units_and_trainable_ones_are_left_alone() -> None:
    model = Block()
    model.gate.requires_grad_(False)
    model.up.requires_grad_(False)
    plan = plan_of(model)
    assert signals(plan) == {"gate": ("output", ""), "up": ("output", "")}
    assert reasons(plan) == {"down": TRAINABLE}
    assert len(freeze(plan).units) + len(freeze(plan).left_alone) == len(plan.units)
    assert [u.signal for u in plan.units] == ["weight"] * 3  # the plan it was given is unchanged


class Pair(nn.Module):
    """Two adapted projections and one without adapters, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = WithAdapter(nn.Linear(8, 8)), WithAdapter(nn.Linear(8, 8))
        self.bare = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return self.bare(self.second(self.first(x)))


def test_adapters_belong_to_the_one_unit_they_are_nearest_to() -> None:
    model = nn.Sequential(Pair(), nn.LayerNorm(8))
    assert signals(plan_of(model)) == {
        "0.first.inner": ("adapters", "0.first"),
        "0.second.inner": ("adapters", "0.second"),
        "0.bare": ("output", ""),
    }


def test_what_trains_elsewhere_is_no_adapter() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    assert signals(plan_of(model)) == {"0": ("output", "")}
    model[0].bias.requires_grad_(True)  # but its own bias is
    assert signals(plan_of(model)) == {"0": ("adapters", "0")}


def test_adapters_that_are_frozen_are_still_adapters() -> None:
    class Layer(WithAdapter):
        adapter_layer_names = ("down", "up")

        def __init__(self) -> None:
            super().__init__(nn.Linear(8, 8))
            self.down = nn.ModuleDict({"idle": nn.Linear(8, 2).requires_grad_(False)})

    plan = plan_of(nn.Sequential(Layer()))
    assert signals(plan) == {"0.inner": ("adapters", "0")}
    assert reasons(plan) == {"0.down.idle": ADAPTER, "0.a": TRAINABLE, "0.b": TRAINABLE}


def test_views_of_a_weight_are_left_alone() -> None:
    model = OwnParameters()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "bias")
    plan = plan_of(model)
    assert list(signals(plan)) == ["a", "b", "d", "e"]
    assert "view" in reasons(plan)["c"]  # x @ c.t()


def test_a_weight_that_an_embedding_reads_is_left_alone() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
            self.out.weight = self.table.weight
            self.out.requires_grad_(False)
            self.mid = WithAdapter(nn.Linear(8, 8))

        def forward(self, ids: Any) -> Any:
            return self.out(self.mid(self.table(ids)))

    plan = plan_of(Tied(), include=("*",))
    assert list(signals(plan)) == ["mid.inner"]
    assert "embedding" in reasons(plan)["out"]


def test_the_output_head_is_a_unit_where_it_is_included() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mid, self.lm_head = WithAdapter(nn.Linear(8, 8)), nn.Linear(8, 4).requires_grad_(False)

        def forward(self, x: Any) -> Any:
            return self.lm_head(self.mid(x))

    assert "lm_head" not in signals(plan_of(Model()))
    assert signals(plan_of(Model(), include=("*",)))["lm_head"] == ("output", "")


def test_nothing_trainable_and_nothing_frozen() -> None:
    with pytest.raises(AdapterError, match="none of them trainable"):
        admit(Plan(Block().requires_grad_(False), RECIPE))
    with pytest.raises(AdapterError, match="3 trainable projections"):
        freeze(plan_of(Block()))


def test_weights_of_another_library_are_refused_unless_they_are_not_asked_for() -> None:
    class Packed(nn.Parameter):
        """A library's own kind of parameter."""

    model = nn.Sequential(WithAdapter(nn.Linear(8, 8)), WithAdapter(nn.Linear(8, 8)))
    model[1].inner.weight = Packed(model[1].inner.weight.data, requires_grad=False)
    with pytest.raises(QuantizedWeightError, match=r"1\.inner\.weight.*Packed"):
        admit(Plan(model, RECIPE))
    for selection in (Selection(exclude=("1.*",)), Selection(include=("0.*",))):
        plan = Plan(model, RECIPE, selection)
        assert admit(plan) is plan


def test_the_model_is_only_read() -> None:
    model = nn.Sequential(Pair())
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    plan = freeze(plan_of(model))
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert replace(plan) == plan
