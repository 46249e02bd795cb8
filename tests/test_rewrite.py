"""Passes ``rewrite`` and ``check``, and the runner."""

from __future__ import annotations

import copy
import logging
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import gnmr_fx
from gnmr_fx.errors import InvariantError
from gnmr_fx.instrument import CONTROLLER
from gnmr_fx.ops import guarded_projection
from gnmr_fx.passes import pipeline
from gnmr_fx.passes.check import check
from gnmr_fx.passes.plan import Plan
from gnmr_fx.passes.rewrite import compile_forward
from gnmr_fx.recipe import get_recipe
from tests.toys import (
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


def planned(model: nn.Module, inputs: object = None) -> Plan:
    return pipeline.run(Plan(model.train(), get_recipe(), example_inputs=inputs))


def guarded_nodes(plan: Plan, site: str) -> int:
    forward = next(f for f in plan.forwards if f.site == site)
    assert forward.graph is not None
    return sum(node.target is guarded_projection for node in forward.graph.nodes)


def test_each_projection_of_a_unit_is_replaced_once():
    plan = planned(nn.Sequential(OwnParameters(), nn.Linear(8, 8)))
    assert guarded_nodes(plan, "0") == 5
    assert guarded_nodes(plan, "1") == 1
    assert {forward.kind for forward in plan.forwards} == {"traced"}


def test_other_nodes_are_left_alone():
    plan = planned(OwnParameters())
    before = [n.target for n in plan.findings[0].traced.nodes if n.target is torch.tanh]  # type: ignore[union-attr]
    after = [n.target for n in plan.forwards[0].graph.nodes if n.target is torch.tanh]  # type: ignore[union-attr]
    assert len(before) == len(after) == 2


def test_a_node_with_several_users_keeps_them_all():
    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.matmul(x, self.w)
            return y + torch.tanh(y), y

    model, x = Reused(), torch.randn(2, 8)
    expected = model(x)
    gnmr_fx.instrument(model)
    assert all(torch.equal(a, b) for a, b in zip(model.train()(x), expected, strict=True))


def test_only_chosen_units_are_replaced():
    plan = pipeline.run(Plan(OwnParameters(), get_recipe(), gnmr_fx.passes.plan.Selection(include=("b", "d"))))
    assert guarded_nodes(plan, "") == 2
    assert set(plan.forwards[0].handles.values()) == {"b", "d"}


@pytest.mark.parametrize(
    "module",
    [OwnParameters(), Ellipsis_(), Branching(), ReadsTraining(), ChildWeight()],
    ids=lambda m: type(m).__name__,
)
@pytest.mark.parametrize("force", ["low", "high"])
def test_numerics(module, force):
    """Outputs are bit-equal, and with an exact recipe all gradients; input gradients are, up to the order of sums."""
    torch.manual_seed(1)
    x = torch.randn(5, 8)
    stock = copy.deepcopy(module).train()
    ours = gnmr_fx.instrument(copy.deepcopy(module).train(), "saved-int4-bf16")
    gnmr_fx.controller(ours).force(force)
    results = []
    for model in (stock, ours):
        torch.manual_seed(2)  # dropout
        leaf = x.clone().requires_grad_()
        out = model(leaf)
        out.square().sum().backward()
        results.append((out, leaf.grad, {n: p.grad for n, p in model.named_parameters()}))
    (out0, gx0, gw0), (out1, gx1, gw1) = results
    assert torch.equal(out0, out1)
    assert torch.equal(gx0, gx1) if force == "high" else torch.allclose(gx0, gx1, rtol=1e-5, atol=1e-5)
    for name, grad in gw0.items():
        if grad is None:
            assert gw1[name] is None
        elif force == "high" or grad.dim() < 2:
            assert torch.equal(grad, gw1[name]), name
        else:
            assert not torch.equal(grad, gw1[name]), name  # what it is exactly: tests/test_ops.py


def test_equal_blocks_share_one_function():
    model = Stack(blocks=3)
    gnmr_fx.instrument(model)
    functions = {id(block.gate.forward.__func__) for block in model.blocks}
    assert len(functions) == 1
    assert model.blocks[0].gate.forward.__self__ is model.blocks[0].gate


def test_signatures_are_kept():
    import inspect

    for module in (nn.Linear(8, 8), Branching()):
        before = inspect.signature(module.forward)
        gnmr_fx.instrument(module)
        assert inspect.signature(module.forward) == before


def test_a_forward_set_by_another_library_still_runs_and_comes_back():
    module = nn.Linear(8, 8).train()
    original = module.forward

    def hooked(x: Tensor) -> Tensor:
        return original(x) + 1

    module.forward = hooked  # type: ignore[method-assign]
    x = torch.randn(2, 8)
    expected = module(x)
    model = nn.Sequential(module, nn.Linear(8, 8))
    gnmr_fx.instrument(model)
    assert torch.equal(module(x), expected)
    gnmr_fx.controller(model).force("low")
    module(x).sum().backward()
    assert gnmr_fx.controller(model).units[0].observation.seen
    gnmr_fx.uninstrument(model)
    assert module.__dict__["forward"] is hooked


def test_check_finds_broken_plans():
    plan = planned(Stack())
    check(plan)
    for broken in (
        replace(plan, forwards=plan.forwards[:-1]),
        replace(plan, forwards=(*plan.forwards, plan.forwards[0])),
        replace(plan, units=(*plan.units, plan.units[0])),
        replace(plan, forwards=(replace(plan.forwards[0], handles={"_gnmr_other": "other"}), *plan.forwards[1:])),
        replace(plan, findings=()),
    ):
        with pytest.raises((InvariantError, KeyError)):
            check(broken)


def test_a_failure_while_installing_leaves_the_model_as_it_was(monkeypatch):
    model = Stack()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    monkeypatch.setattr(sys.modules["gnmr_fx.instrument"], "compile_forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gnmr_fx.instrument(model)
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    assert CONTROLLER not in model.__dict__


def test_runner_logs_and_dumps(tmp_path, caplog):
    with caplog.at_level(logging.DEBUG, logger="gnmr_fx.passes.pipeline"):
        pipeline.run(Plan(Stack().train(), get_recipe(), example_inputs=torch.randn(2, 8)), dump=tmp_path)
    names = [step.__name__ for step in pipeline.PASSES]
    assert names == ["admit", "capture", "find", "freeze", "group", "rewrite", "check"]
    ours = [record.message for record in caplog.records if record.name == "gnmr_fx.passes.pipeline"]
    assert [message.partition(":")[0] for message in ours] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00_before.txt", *(f"{i:02d}_{name}.txt" for i, name in enumerate(names, 1)),
    ]  # fmt: skip
    assert "guarded_projection" in (tmp_path / "06_rewrite.txt").read_text()


def test_compiled_forwards_are_cached_by_content():
    plan = planned(Stack())
    first, second = (compile_forward(f, nn.Linear.forward) for f in plan.forwards[:2])
    assert first is second


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("kind", [ParameterContainers, NumberedChildren, StaticHelper, Experts])
def test_weights_in_containers_and_of_children_are_guarded(kind: type[nn.Module], backend: str | None) -> None:
    model, x = kind(), torch.randn(4, 8)
    stock = copy.deepcopy(model)
    gnmr_fx.instrument(model, "saved-int4-bf16", example_inputs=x)
    controller = gnmr_fx.controller(model)
    call = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    weights = {f"{unit.spec.owner}.{unit.spec.parameter}" for unit in controller.units}
    stock(x).square().sum().backward()
    expected = {name: p.grad for name, p in stock.named_parameters()}
    for guards in ("high", "low"):
        controller.force(guards)
        model.zero_grad()
        call(x).square().sum().backward()
        close = {n: torch.allclose(p.grad, expected[n], rtol=1e-5, atol=1e-5) for n, p in model.named_parameters()}
        assert {name for name, same in close.items() if not same} == (weights if guards == "low" else set())
    gnmr_fx.uninstrument(model)
    assert torch.equal(model(x), stock(x))
