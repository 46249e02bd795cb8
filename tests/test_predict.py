"""The table of a model that is not run is the table of one that was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gnmr_fx
from gnmr_fx.passes import pipeline
from gnmr_fx.passes.capture import capture
from gnmr_fx.passes.plan import Plan, Selection
from gnmr_fx.passes.record import record
from gnmr_fx.predict import faked, inputs_of, predict
from gnmr_fx.recipe import get_recipe
from tests.loops import readable_kernels
from tests.models import CASES, instrument_options, llama
from tests.toys import Stack

ALL = gnmr_fx.AllSaved(min_bytes=64)
QUICK = ("llama", "vit", "encoder", "functional", "shared-parameter")
UNCAPTURED = ("gpt2", "mixtral-loop", "mixtral-grouped")
"""What Dynamo (the first two) or fake kernels (the last two; fp32 grouped GEMMs have none) do not take."""


@pytest.fixture(autouse=True, scope="module")
def _readable_kernels() -> Iterator[None]:
    with readable_kernels():
        yield


@pytest.mark.parametrize("scope", ["projections", ALL], ids=["projections", "all"])
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_the_predicted_table_is_the_observed_one(name, scope):
    if name in UNCAPTURED:
        pytest.skip("has a test of its own")
    case = CASES[name]
    torch.manual_seed(0)
    built = case.build()
    inputs = built.args or built.kwargs
    options = {n: value for n, value in instrument_options(case, built).items() if n != "example_inputs"}

    with torch.device("meta"):
        bare = case.build().model
    predicted = predict(bare, "saved-int4-int8", inputs=inputs, scope=scope, **options)

    model = gnmr_fx.instrument(built.model, scope=scope, example_inputs=inputs, **options)
    model(*built.args, **built.kwargs)
    observed = gnmr_fx.table(model)
    assert predicted.totals == observed.totals
    assert predicted.totals["bytes_full"] > 0
    assert predicted.predicted
    if (name, scope) == ("lora", ALL):  # a frozen base's output is a view of another kind on fake tensors
        return
    assert replace(predicted, predicted="") == observed


@pytest.mark.slow
def test_what_dynamo_does_not_capture():
    built = CASES["gpt2"].build()
    with torch.device("meta"):
        bare = CASES["gpt2"].build().model
    predicted = predict(bare, "saved-int4-int8", inputs=built.kwargs)
    model = gnmr_fx.instrument(built.model)
    model(**built.kwargs)
    assert predicted.totals == gnmr_fx.table(model).totals


def test_a_forward_that_reads_values_has_no_bytes_and_says_so():
    built = CASES["mixtral-loop"].build()
    found = predict(built.model, "saved-int4-int8", inputs=built.kwargs)
    assert found.capture_note
    assert not found.predicted
    assert found.totals["units_known"] == 0
    assert found.totals["units"] == 7


def test_without_inputs_there_are_units_and_no_bytes():
    found = predict(Stack(), "saved-int4-int8", inputs=None)
    assert found.totals["units"] == 6
    assert found.totals["units_known"] == 0
    assert "known after" in str(found)


def test_a_frozen_weight_keeps_nothing():
    model = Stack()
    model.blocks[0].gate.requires_grad_(False)
    rows = predict(model, "saved-int4-int8", inputs=torch.empty(4, 8)).units
    assert [row.bytes_full for row in rows if row.unit == "blocks.0.gate"] == [0]
    assert all(row.bytes_full is not None for row in rows)


@pytest.mark.parametrize("recipe", [name for name, recipe in gnmr_fx.RECIPES.items() if recipe.frozen is None])
def test_bytes_of_every_recipe(recipe):
    predicted = predict(Stack(128), recipe, inputs=torch.empty(64, 128))
    model = gnmr_fx.instrument(Stack(128), recipe, example_inputs=torch.randn(64, 128))
    model(torch.randn(64, 128))
    observed = gnmr_fx.table(model)
    # What computes the GEMMs is tried where they run.
    observed = replace(observed, units=tuple(replace(row, backends=()) for row in observed.units))
    assert replace(predicted, predicted="") == observed
    assert predicted.totals["bytes_full"] > 0


@pytest.mark.parametrize("recipe", [name for name, recipe in gnmr_fx.RECIPES.items() if recipe.frozen is not None])
def test_bytes_of_frozen_weights(recipe):
    built = CASES["lora"].build()
    predicted = predict(CASES["lora"].build().model, recipe, inputs=built.kwargs)
    model = gnmr_fx.instrument(built.model, recipe)
    model(**built.kwargs)
    observed = gnmr_fx.table(model)
    assert predicted.totals == observed.totals
    assert 0 < predicted.totals["bytes_low"] < predicted.totals["bytes_full"]
    assert replace(predicted, predicted="") == observed


def test_batch_and_sequence_scale_what_is_kept():
    def bytes_of(batch: int, sequence: int) -> Any:
        with torch.device("meta"):
            model = llama(1).model
        return predict(model, "saved-int4-int8", inputs=inputs_of(model, batch, sequence)).totals

    one, four = bytes_of(1, 8), bytes_of(2, 16)
    for name in ("bytes_full", "bytes_low", "bytes_recovery_max"):
        assert four[name] == 4 * one[name]


# The pass ``record`` -------------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Views of weights, several outputs, an in-place operation, a module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).chunk(2, dim=-1)
        x = torch.cat((b, a), dim=-1)
        x = self.second(self.second(x))
        x += x @ self.weight.t()
        return F.linear(x, self.weight[:4].reshape(4, 8))


def recorded(model: nn.Module, *inputs: Tensor) -> Plan:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    faked(model, mode)
    with mode:
        return record(Plan(model, get_recipe(), Selection(), tuple(torch.empty_like(x) for x in inputs)))


def test_it_sees_what_dynamo_sees():
    x = torch.randn(2, 8)
    captured = capture(Plan(Everything(), get_recipe(), Selection(), (x,)))
    found = recorded(Everything(), x)
    assert not captured.capture_note
    assert not found.capture_note
    assert [(c.site, c.weight, c.shape) for c in found.calls] == [(c.site, c.weight, c.shape) for c in captured.calls]
    assert len(found.calls) == 5


def test_it_sees_an_attribute_that_is_a_view():
    class Transposed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T + self.bias

    (call,) = recorded(Transposed(8, 8), torch.randn(2, 8)).calls
    assert (call.weight, call.operator, call.shape) == ("weight", "matmul", (2, 8))


def test_it_changes_nothing_but_runs_the_forward():
    from torch.nn.modules import module

    hooks = len(module._global_forward_pre_hooks), len(module._global_forward_hooks)
    model = Stack()
    before = {name: id(p) for name, p in faked(model, FakeTensorMode()).named_parameters()}
    recorded(model, torch.randn(3, 8))
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert (len(module._global_forward_pre_hooks), len(module._global_forward_hooks)) == hooks


def test_a_failing_forward_is_a_note_and_leaves_no_hook():
    from torch.nn.modules import module

    hooks = len(module._global_forward_hooks)
    found = recorded(Stack(), torch.randn(3, 5))
    assert found.capture_note
    assert found.graph is None
    assert len(module._global_forward_hooks) == hooks


def test_shared_parameters_stay_shared():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    faked(nn.Sequential(first, second), FakeTensorMode())
    assert second.weight is first.weight
    assert isinstance(first.weight, nn.Parameter)


def test_the_passes_are_those_of_the_pipeline():
    from gnmr_fx.predict import LOOKED_AT

    names = [step.__name__ for step in pipeline.PASSES]
    assert [step.__name__.replace("record", "capture") for step in LOOKED_AT] == names[: len(LOOKED_AT)]
    assert names[len(LOOKED_AT) :] == ["rewrite", "check"]
