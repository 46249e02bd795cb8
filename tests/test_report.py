"""``table`` and ``report``: what they say against what is stored, decided and recorded."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gnmr_fx
from gnmr_fx import formats, kernels
from gnmr_fx.errors import MissingDependencyError, NotInstrumentedError
from gnmr_fx.formats import nbytes
from gnmr_fx.report import Name, Period, Report, Table, bin_edges, collapse, fired, human_bytes, periods, relative_name
from gnmr_fx.report import _Line as Line
from gnmr_fx.runtime import Event

CONFIG = gnmr_fx.GnmrConfig(alpha=1.2, beta=1.2, window=3, lock_steps=4, warmup_steps=3)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True, scope="module")
def _readable_kernels() -> Iterator[None]:
    """Store by the readable code, which stores the same bits: building kernels takes seconds each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "encode", formats.encode)
        patch.setattr(kernels, "decode", formats.decode)
        yield


class Shared(nn.Module):
    """q, k and v read one tensor; the output is read by another projection."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(24, 16) for _ in range(3))
        self.o = nn.Linear(16, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.q(x) + self.k(x) + self.v(x))


def chain(depth: int = 3, width: int = 40) -> nn.Sequential:
    """Linears alone: nothing else keeps anything for the backward."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


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


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """A model after 24 steps, some of them with recovery; tests only look at it."""
    torch.manual_seed(0)
    model = gnmr_fx.instrument(chain(4), max_active=2, config=CONFIG)
    train(model, noisy(24))
    return model


# The table -----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("recipe", sorted(gnmr_fx.RECIPES))
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
    assert sum(row["bytes_high"] for row in table.rows) == high
    chosen = gnmr_fx.RECIPES[recipe]
    for row in table.rows:
        assert row["bytes_full"] == math.prod(shape) * 4
        assert row["bytes_low"] == nbytes(shape, chosen.low, torch.float32)
        assert row["bytes_high"] == nbytes(shape, chosen.high, torch.float32)
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
    assert rows["a"]["activations"] == [{"rows": 6, "width": 16, "dtype": "float32", "calls": 2}]
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
    gnmr_fx.controller(model).force("high")
    assert [row["guard"] for row in gnmr_fx.table(model).rows] == ["high"] * 3
    assert [row["guard"] for row in table.rows] == ["low", "high", "low"], "a table is a snapshot"


def test_formats_without_scales_name_the_dtype_once_it_is_known() -> None:
    model = gnmr_fx.instrument(chain(), "saved-int4-bf16")
    assert "none (float32)" not in str(gnmr_fx.table(model))
    model(torch.randn(2, 40)).sum().backward()
    assert "none (float32)" in str(gnmr_fx.table(model))


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
    names = [line.split()[0] for line in str(table).splitlines() if line.startswith("layers")]
    assert names == ["layers.{0..30}.up", "layers.{0..30}.down"]
    assert "1 high" in str(table)


def test_lines_join_only_where_all_are_equal() -> None:
    def line(name: str, cell: str = "x") -> Line:
        return Line(Name.parse(name), (cell,), ((0, 0),), 0)

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
    ("count", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1024**2 - 1, "1.0 MiB"), (3 << 29, "1.5 GiB")],
)
def test_human_bytes(count: int | None, text: str) -> None:
    assert human_bytes(count) == text


# The report ----------------------------------------------------------------------------------------------------------


def test_a_report_before_the_first_step(tmp_path: Path) -> None:
    report = gnmr_fx.report(gnmr_fx.instrument(chain()))
    assert "no optimizer step yet" in str(report)
    assert json.loads(report.to_json())["events"] == []
    assert report.plot(tmp_path / "empty.png").read_bytes().startswith(PNG)


def test_periods_are_the_guards_step_by_step() -> None:
    model = gnmr_fx.instrument(chain(4), max_active=2, config=CONFIG)
    controller = gnmr_fx.controller(model)
    flags = []
    for x in noisy(24):
        train(model, [x])
        flags.append(controller.flags.tolist())
    report = gnmr_fx.report(model)
    assert report.events, "nothing was recovered: the test tests nothing"
    for index, unit in enumerate(report.units):
        told = [p.on for p in report.periods[unit] for _ in range(p.start, p.stop)]
        assert told == [row[index] for row in flags]
    assert report.unexplained_steps == 0
    assert report.full_steps == sum(sum(row) == 2 for row in flags) > 0
    assert report.stats["recovered"] == sum(map(sum, flags))


def test_every_number_of_the_summaries_is_in_the_records(trained: nn.Module) -> None:
    report = gnmr_fx.report(trained)
    assert {s.unit for s in report.summaries()} == set(report.units)
    for summary in report.summaries():
        events = [event for event in report.events if event.unit == summary.unit]
        assert summary.gnmr == max(event.gnmr for event in events)
        assert any((e.step, e.delta_gnmr) == (summary.delta_gnmr_step, summary.delta_gnmr) for e in events)
        assert summary.risky == sum(event.risky for event in events)
    steps = [summary.steps for summary in report.summaries()]
    assert steps == sorted(steps, reverse=True)
    assert sum(steps) == report.stats["recovered"]


def test_what_is_risky_says_why(trained: nn.Module) -> None:
    report = gnmr_fx.report(trained)
    for event in report.events:
        assert bool(fired(event, CONFIG)) == event.risky
        assert ("gnmr" in fired(event, CONFIG)) == (event.risky and event.gnmr > 1.2)
    text = str(report)
    assert "GNMR" in text
    assert "most recovered units" in text
    assert f"last 10 of {len(report.events)} records" in text
    assert text.count("\nstep ") == 10


def test_schedules_are_evaluated_at_the_step_of_the_event() -> None:
    config = gnmr_fx.GnmrConfig(alpha=lambda step: 10.0 / step, beta=math.inf, warmup_steps=0)
    event = Event(4, "0", 3.0, 9.0, 1.2, True, "chosen", 50)
    assert fired(event, config) == ("gnmr",)
    assert fired(event._replace(gnmr=math.inf), gnmr_fx.GnmrConfig(alpha=math.inf, beta=math.inf)) == ("non_finite",)
    model = gnmr_fx.instrument(chain(), config=config)
    train(model, noisy(3))
    report = gnmr_fx.report(model)
    assert "GNMR > α = a schedule or ΔGNMR > β = off" in str(report)
    assert json.loads(report.to_json())["config"]["alpha"] == "schedule"


def test_the_report_in_json(trained: nn.Module) -> None:
    report = gnmr_fx.report(trained)
    data = json.loads(report.to_json())
    assert len(data["events"]) == len(report.events)
    for told, event in zip(data["events"], report.events, strict=True):
        assert told == {**event._asdict(), "fired": list(fired(event, CONFIG))}
    assert data["stats"] == report.stats
    assert data["active"] == gnmr_fx.controller(trained).active
    assert [s["unit"] for s in data["summaries"]] == [s.unit for s in report.summaries()]


def test_infinite_ratios_are_strict_json() -> None:
    model = gnmr_fx.instrument(chain(), config=CONFIG)
    x = torch.randn(8, 40)
    train(model, [x])
    for unit in gnmr_fx.controller(model).units:
        unit.weight.grad = None
    (model(x) * math.inf).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    report = gnmr_fx.report(model)
    assert report.stats["non_finite"] == 3

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    data = json.loads(report.to_json(), parse_constant=refuse)
    assert float(data["events"][0]["gnmr"]) == math.inf
    assert "norm not finite" in str(report)


@pytest.mark.parametrize(
    ("outcomes", "before", "expected"),
    [
        ([], False, [Period(1, 11, False)]),
        (
            [(3, "chosen"), (5, "chosen"), (7, "released")],
            False,
            [Period(1, 3, False), Period(3, 7, True), Period(7, 11, False)],
        ),
        ([(3, "refused")], None, [Period(1, 3, None), Period(3, 11, False)]),
        ([(1, "chosen"), (10, "refused")], False, [Period(1, 10, True), Period(10, 11, False)]),
    ],
)
def test_periods(outcomes: list[tuple[int, Any]], before: bool | None, expected: list[Period]) -> None:
    events = [Event(step, "u", 1.0, 1.0, 1.0, False, outcome, 0) for step, outcome in outcomes]
    assert periods(events, 1, 11, before) == expected


def test_what_older_records_would_tell_is_not_known(tmp_path: Path) -> None:
    config = gnmr_fx.GnmrConfig(alpha=1.2, beta=1.2, window=3, lock_steps=4, warmup_steps=3, max_events=5)
    model = gnmr_fx.instrument(chain(4), max_active=2, config=config)
    train(model, noisy(24))
    report = gnmr_fx.report(model)
    assert report.stats["events_dropped"] > 0
    assert report.first_step == report.events[0].step > 1
    assert report.full_steps is None
    assert "older are gone" in str(report)
    for unit, active in zip(report.units, report.active, strict=True):
        assert report.periods[unit][0].start == report.first_step
        assert report.periods[unit][-1].on is active
    assert report.plot(tmp_path / "part.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_plot_is_a_file(trained: nn.Module, tmp_path: Path, suffix: str) -> None:
    path = gnmr_fx.report(trained).plot(str(tmp_path / f"plot.{suffix}"))
    assert path == tmp_path / f"plot.{suffix}"
    assert path.stat().st_size > 5_000
    if suffix == "png":
        from matplotlib.image import imread

        assert imread(path).std() > 0.05


def test_the_plot_leaves_pyplot_alone(trained: nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    assert gnmr_fx.report(trained).plot(tmp_path / "plot.png").exists()


def test_the_plot_names_its_dependency(trained: nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("matplotlib", *(name for name in sys.modules if name.startswith("matplotlib."))):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match=r"gnmr-fx\[plot\]"):
        gnmr_fx.report(trained).plot(tmp_path / "plot.png")


@pytest.mark.parametrize(("start", "stop"), [(1, 2), (1, 501), (1, 1200), (7, 100_000)])
def test_bins_cover_the_steps(start: int, stop: int) -> None:
    edges = bin_edges(start, stop)
    assert (edges[0], edges[-1]) == (start, stop)
    assert 1 <= len(edges) - 1 <= 500
    assert edges == sorted(set(edges))


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
    assert "2 of 14 units at a time" in str(gnmr_fx.report(model))
