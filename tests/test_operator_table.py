"""``table``: what it says against what is stored, decided and recorded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gnmr_fx
from gnmr_fx.errors import NotInstrumentedError
from gnmr_fx.formats import nbytes
from gnmr_fx.operator_table import Line, Table, collapse
from gnmr_fx.report import Report
from gnmr_fx.text import Name, common_parent, human_bytes, relative_name
from tests.loops import chain, readable_kernels, trained_model


@pytest.fixture(autouse=True, scope="module")
def _readable_kernels() -> Iterator[None]:
    with readable_kernels():
        yield


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """Tests only look at it."""
    return trained_model()


class Shared(nn.Module):
    """q, k and v read one tensor; the output is read by another projection."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(24, 16) for _ in range(3))
        self.o = nn.Linear(16, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.q(x) + self.k(x) + self.v(x))


def stored_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes of the storages that autograd holds after a forward, the model's own parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    found = sum(t.untyped_storage().nbytes() for pointer, t in held.items() if pointer not in parameters)
    output.sum().backward()
    return found


@pytest.mark.parametrize("query", [gnmr_fx.table, gnmr_fx.report])
def test_a_bare_model_has_neither(query: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(NotInstrumentedError, match="instrument"):
        query(chain())


def test_before_any_forward_bytes_are_not_known() -> None:
    model = gnmr_fx.instrument(chain(), example_inputs=torch.randn(8, 40))
    table = gnmr_fx.table(model)
    assert [row["unit"] for row in table.rows] == ["0", "1", "2"]
    for row in table.rows:
        assert row["bytes_full"] is row["bytes_low"] is row["bytes_high"] is None
        assert not row["seen"]
        assert row["guard"] == "low"
        assert (row["low_format"], row["high_format"]) == ("int4 g128", "int8 g128")
        assert (row["shape"], row["operator"], row["trainable"]) == ([40, 40], "linear", True)
    assert table.totals["ratio"] is None
    assert "not seen yet" in str(table)
    assert "known after the first forward" in str(table)
    assert "not captured" not in str(table)


def test_the_capture_note_is_printed() -> None:
    table = gnmr_fx.table(gnmr_fx.instrument(chain()))
    assert table.capture_note
    assert f"not captured as a whole: {table.capture_note}" in str(table)


@pytest.mark.parametrize("recipe", sorted(name for name, recipe in gnmr_fx.RECIPES.items() if recipe.frozen is None))
@pytest.mark.parametrize("shape", [(8, 40), (2, 3, 40)])
def test_bytes_are_those_that_autograd_holds(recipe: str, shape: tuple[int, ...]) -> None:
    model, x = chain(), torch.randn(shape)
    full = stored_bytes(model, lambda: model(x))
    gnmr_fx.instrument(model, recipe)
    low = stored_bytes(model, lambda: model(x))
    gnmr_fx.controller(model).force("high")
    high = stored_bytes(model, lambda: model(x))

    table = gnmr_fx.table(model)
    assert sum(row["bytes_full"] for row in table.rows) == table.totals["bytes_full"] == full
    assert sum(row["bytes_low"] for row in table.rows) == table.totals["bytes_low"] == low
    chosen = gnmr_fx.RECIPES[recipe]
    adds = chosen.low != chosen.high  # else the low-cost payload serves both paths
    assert sum(row["bytes_high"] for row in table.rows) == (high if adds else 0)
    assert adds or high == low
    for row in table.rows:
        assert row["bytes_full"] == math.prod(shape) * 4
        assert row["bytes_low"] == nbytes(shape, chosen.low, torch.float32)
        assert row["bytes_high"] == (nbytes(shape, chosen.high, torch.float32) if adds else 0)
    assert table.totals["ratio"] == full / low


def test_a_shared_input_is_counted_once_as_it_is_stored_once() -> None:
    model, x = Shared(), torch.randn(5, 24)
    full = stored_bytes(model, lambda: model(x))
    gnmr_fx.instrument(model, example_inputs=x)
    low = stored_bytes(model, lambda: model(x))
    table = gnmr_fx.table(model)
    rows = {row["unit"]: row for row in table.rows}
    assert rows["k"]["shares_input_with"] == ["q", "v"]
    assert [rows[name]["stored_with"] for name in "qkvo"] == ["", "q", "q", ""]
    assert rows["k"]["bytes_full"] == rows["k"]["bytes_low"] == rows["v"]["bytes_low"] == 0
    assert rows["k"]["bytes_high"] == rows["q"]["bytes_high"] > 0
    assert (table.totals["bytes_full"], table.totals["bytes_low"]) == (full, low)
    assert str(table).count("as q") == 4


def test_a_unit_called_twice_shares_only_the_input_that_it_shares() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.b(x) + self.a(x))

    model, x = Twice(), torch.randn(6, 16)
    gnmr_fx.instrument(model, example_inputs=x)
    low = stored_bytes(model, lambda: model(x))
    one = nbytes(x.shape, gnmr_fx.controller(model).recipe.low, x.dtype)
    rows = {row["unit"]: row for row in gnmr_fx.table(model).rows}
    assert {name: row["bytes_low"] for name, row in rows.items()} == {"b": one, "a": one}
    (activation,) = rows["a"]["activations"]
    assert activation == {
        "rows": 6,
        "width": 16,
        "dtype": "float32",
        "calls": 2,
        "role": "input",
        "low_format": "int4 g128",
        "bytes_full": 2 * 6 * 16 * 4,
        "bytes_low": 2 * one,
    }
    assert low == 2 * one


def test_a_view_of_a_shared_input_is_the_same_activation() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).flatten(0, 1) + self.b(x.flatten(0, 1))

    model, x = Views(), torch.randn(2, 3, 16)
    gnmr_fx.instrument(model, example_inputs=x)
    low = stored_bytes(model, lambda: model(x))
    assert gnmr_fx.table(model).totals["bytes_low"] == low


def test_recovery_adds_at_most_the_largest_high_payloads() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 32), nn.Linear(32, 16))
    gnmr_fx.instrument(model, max_active=2)
    model(torch.randn(4, 16)).sum().backward()
    table = gnmr_fx.table(model)
    assert table.totals["bytes_recovery_max"] == sum(nbytes((4, k), table.recipe.high, torch.float32) for k in (64, 32))


def test_frozen_units_keep_nothing() -> None:
    model = chain()
    model[1].weight.requires_grad_(False)
    gnmr_fx.instrument(model)
    low = stored_bytes(model, lambda: model(torch.randn(8, 40)))
    table = gnmr_fx.table(model)
    row = table.rows[1]
    assert not row["trainable"]
    assert row["notes"] == ["frozen: saves nothing"]
    assert row["bytes_full"] == row["bytes_low"] == row["bytes_high"] == 0
    assert table.totals["bytes_low"] == low
    assert "frozen: saves nothing" in str(table)


def test_forced_guards_show() -> None:
    model = gnmr_fx.instrument(chain())
    gnmr_fx.controller(model).force(["1"])
    table = gnmr_fx.table(model)
    assert [row["guard"] for row in table.rows] == ["low", "high", "low"]
    assert table.totals["units_active"] == 1
    assert table.forced
    assert "1 on the recovery path now (pinned by hand)" in str(table)
    gnmr_fx.controller(model).force("high")
    assert [row["guard"] for row in gnmr_fx.table(model).rows] == ["high"] * 3
    assert [row["times_recovered"] for row in gnmr_fx.table(model).rows] == [1, 1, 1]
    gnmr_fx.controller(model).force(None)
    assert "pinned" not in str(gnmr_fx.table(model))
    assert [row["guard"] for row in table.rows] == ["low", "high", "low"], "a table is a snapshot"


def test_formats_without_scales_name_the_dtype_once_it_is_known() -> None:
    model = gnmr_fx.instrument(chain(), "saved-int4-bf16")
    assert "none (float32)" not in str(gnmr_fx.table(model))
    model(torch.randn(2, 40)).sum().backward()
    assert "none (float32)" in str(gnmr_fx.table(model))


def test_what_all_units_have_in_common_is_said_once() -> None:
    model = gnmr_fx.instrument(chain())
    text = str(gnmr_fx.table(model))
    formats = "low-cost path int4 g128, recovery path int8 g128"
    assert text.startswith(f"3 units, each linear, trainable, {formats}\n")
    assert text.count("trainable") == text.count("low-cost path") == 1
    model[1].weight.requires_grad_(False)
    text = str(gnmr_fx.table(model))
    assert text.startswith(f"3 units, each linear, {formats}\n")
    assert (text.count("trainable"), text.count("frozen ")) == (2, 1)


def test_recovered_counts_are_those_of_the_controller(trained: nn.Module) -> None:
    controller = gnmr_fx.controller(trained)
    for row in gnmr_fx.table(trained).rows:
        assert row["times_recovered"] == controller.times_recovered(row["index"])
        assert row["steps_recovered"] == controller.steps_recovered(row["index"])


def test_the_table_in_json_and_html(trained: nn.Module) -> None:
    table = gnmr_fx.table(trained)
    data = json.loads(table.to_json())
    assert data["rows"] == table.rows
    assert data["left_alone"] == []
    assert data["totals"] == table.totals
    assert data["budget"] == 2
    assert data["recipe"] == {
        "name": "saved-int4-int8",
        "low": "int4/group128/nearest",
        "high": "int8/group128/nearest",
    }
    assert data["capture_note"] == table.capture_note
    assert "<table>" in table._repr_html_()


def test_operators_left_alone_stand_apart() -> None:
    model = gnmr_fx.instrument(chain(12), exclude=["[1-9]*"])
    table = gnmr_fx.table(model)
    assert [row["unit"] for row in table.rows] == ["0"]
    assert [item["name"] for item in table.left_alone] == [str(index) for index in range(1, 12)]
    assert {item["reason"] for item in json.loads(table.to_json())["left_alone"]} == {"in exclude"}
    text = str(table)
    assert "Left alone (11)" in text
    assert text.count("in exclude") == 1, "many of one family are one row"
    few = str(gnmr_fx.table(gnmr_fx.instrument(chain(4), exclude=["[1-9]*"])))
    assert few.count("in exclude") == 3


def test_operators_left_alone_for_like_reasons_are_one_row() -> None:
    left = [
        {"name": f"l.{i}.w", "operator": "linear", "shape": [4, 2], "reason": f"read by 'l.{i}.x'"} for i in range(9)
    ]
    table = replace(gnmr_fx.table(gnmr_fx.instrument(chain())), left_alone=tuple(left))
    assert re.search(r"l\.\*\.w +9 +linear +4×2 +read by 'l\.\*\.x'", str(table))
    few = str(replace(table, left_alone=tuple(left[:8])))
    assert "l.3.w" in few
    assert "read by 'l.3.x'" in few


def test_a_large_table_prints_one_row_per_family() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x))

    model = nn.ModuleDict({"layers": nn.Sequential(*(Block() for _ in range(31)))})
    gnmr_fx.instrument(model)
    gnmr_fx.controller(model).force(["layers.4.up"])
    table = gnmr_fx.table(model)
    assert len(table.rows) == 62
    assert "62 units below layers" in str(table)
    names = [line.split()[0] for line in str(table).splitlines() if line.startswith("{")]
    assert names == ["{0..30}.up", "{0..30}.down"]
    assert "1 high" in str(table)


def test_lines_join_only_where_all_are_equal() -> None:
    def line(name: str, cell: str = "x") -> Line:
        return Line(Name.parse(name), (cell,), (0, 0), (0, 0), 0)

    grid = [line(f"l.{i}.e.{j}.w") for i in range(2) for j in range(3)]
    assert [(str(x.name), x.count) for x in collapse(grid)] == [("l.{0,1}.e.{0..2}.w", 6)]
    odd = [*grid[:-1], line("l.1.e.2.w", "y")]
    assert [str(x.name) for x in collapse(odd)] == ["l.0.e.{0..2}.w", "l.1.e.{0,1}.w", "l.1.e.2.w"]
    assert [str(x.name) for x in collapse([line("a.0.u"), line("a.0.v"), line("b"), line("0")])] == [
        "a.0.u",
        "a.0.v",
        "b",
        "0",
    ]
    assert sum(x.count for x in collapse(odd)) == len(odd)


@pytest.mark.parametrize(
    ("name", "base", "short"),
    [
        ("l.0.attn.q", "l.0.attn.k", "q"),
        ("l.0.attn.q", "l.0.mlp.up", "attn.q"),
        ("e.0.up", "e.1.up", "e.0.up"),
        ("0", "1", "0"),
        ("q.base", "v.lora.a", "q.base"),
    ],
)
def test_relative_names(name: str, base: str, short: str) -> None:
    assert relative_name(name, base) == short


@pytest.mark.parametrize(
    ("paths", "parent"),
    [
        (["l.0.q", "l.1.q"], "l"),
        (["l.0.q", "l.0.k.a"], "l.0"),
        (["a", "b"], ""),
        (["l.0", "l.0.lora"], "l"),
        (["l.10.q", "l.11.q"], "l"),
        (["l.0.q"], ""),
    ],
)
def test_common_parents(paths: list[str], parent: str) -> None:
    assert common_parent(paths) == parent


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1024**2 - 1, "1.0 MiB"), (3 << 29, "1.5 GiB")],
)
def test_human_bytes(count: int | None, text: str) -> None:
    assert human_bytes(count) == text


# A Hugging Face model ------------------------------------------------------------------------------------------------


def test_llama() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = gnmr_fx.instrument(transformers.LlamaForCausalLM(config), max_active=2)
    ids = torch.arange(16).view(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    table = gnmr_fx.table(torch.compile(model))
    assert isinstance(table, Table)
    assert isinstance(gnmr_fx.report(torch.compile(model)), Report)
    assert [item["name"] for item in table.left_alone] == ["lm_head"]
    rows = {row["unit"]: row for row in table.rows}
    assert len(rows) == 14
    for layer in range(2):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        assert rows[f"{attention}.q_proj"]["bytes_full"] == 2 * 8 * 32 * 4
        assert rows[f"{attention}.v_proj"]["stored_with"] == f"{attention}.q_proj"
        assert rows[f"{mlp}.up_proj"]["stored_with"] == f"{mlp}.gate_proj"
        assert rows[f"{mlp}.down_proj"]["bytes_low"] == nbytes((2, 8, 64), table.recipe.low, torch.float32)
        assert any("attention keeps" in note for note in rows[f"{attention}.o_proj"]["notes"])
    widths = (32, 32, 32, 64) * 2  # inputs of q/k/v, o, gate/up and down
    full, low = (
        sum(nbytes((16, width), fmt, torch.float32) for width in widths)
        for fmt in (gnmr_fx.Format("none"), table.recipe.low)
    )
    assert (table.totals["bytes_full"], table.totals["bytes_low"]) == (full, low)
    assert "attention keeps its output" in str(table)
    assert "as q_proj" in str(table)
    assert max(map(len, str(table).splitlines())) <= 120
    assert "2 of 14 units at a time" in str(gnmr_fx.report(model))
