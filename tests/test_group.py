"""Pass ``group``."""

from __future__ import annotations

import networkx as nx
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnmr_fx.passes.capture import capture
from gnmr_fx.passes.find import find
from gnmr_fx.passes.group import group
from gnmr_fx.passes.plan import Plan
from gnmr_fx.recipe import get_recipe
from tests.toys import Stack


def grouped(model: nn.Module, inputs: object) -> Plan:
    return group(find(capture(Plan(model.train(), get_recipe(), example_inputs=inputs))))


def shares(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {unit.name: unit.shares_input_with for unit in plan.units}


def test_readers_of_one_tensor_are_known():
    found = shares(grouped(Stack(), torch.randn(2, 8)))
    assert found["blocks.0.gate"] == ("blocks.0.up",)
    assert found["blocks.0.up"] == ("blocks.0.gate",)
    assert found["blocks.0.down"] == ()


def test_dataflow_order_and_edges():
    plan = grouped(Stack(), torch.randn(2, 8))
    graph = plan.dataflow
    assert nx.is_directed_acyclic_graph(graph)
    assert sorted(graph.nodes, key=lambda name: graph.nodes[name]["order"]) == [unit.name for unit in plan.units]
    assert set(graph.successors("blocks.0.gate")) == {"blocks.0.down"}
    assert set(graph.predecessors("blocks.1.up")) == {"blocks.0.down"}


def test_views_of_one_tensor_are_one_tensor_and_slices_are_not():
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            left, _ = x.chunk(2, dim=-1)
            return self.a(x.view(-1, 8)) + self.b(x) + self.c(left)

    found = shares(grouped(Views(), torch.randn(2, 8)))
    assert found == {"a": ("b",), "b": ("a",), "c": ()}


def test_the_output_of_attention_is_noted():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.o = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).unsqueeze(1)
            return self.o(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(x.shape))

    notes = {unit.name: unit.note for unit in grouped(Attention(), torch.randn(2, 3, 8)).units}
    assert notes["q"] == ""
    assert "attention keeps" in notes["o"]


def test_without_a_graph_there_is_no_sharing():
    plan = grouped(Stack(), None)
    assert not any(shares(plan).values())
    assert plan.dataflow.number_of_edges() == 0
    assert set(plan.dataflow.nodes) == set(shares(plan))
