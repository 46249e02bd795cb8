"""``report``: what it says against what was decided and recorded."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gnmr_fx
from gnmr_fx.errors import MissingDependencyError
from gnmr_fx.history import Period, fired, periods, told
from gnmr_fx.plot import bin_edges
from gnmr_fx.runtime import Event
from tests.loops import CONFIG, chain, noisy, readable_kernels, train, trained_model

PNG = b"\x89PNG\r\n\x1a\n"


def event(step: int, outcome: Any = "chosen", changed: bool = True, **others: Any) -> Event:
    """A record of unit ``"u"``, over its threshold by default."""
    values = {"norm": 1.0, "gnmr": 9.0, "delta_gnmr": 1.0, "risk": 3.0, "risky": True, "lock": 50, "forced": False}
    return Event(step=step, unit="u", outcome=outcome, changed=changed, **{**values, **others})


@pytest.fixture(autouse=True, scope="module")
def _readable_kernels() -> Iterator[None]:
    with readable_kernels():
        yield


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """Tests only look at it."""
    return trained_model()


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
        found = [p.on for p in report.periods[unit] for _ in range(p.start, p.stop)]
        assert found == [row[index] for row in flags]
    assert report.stats["full"] == sum(sum(row) == 2 for row in flags) > 0
    assert report.stats["recovered"] == sum(map(sum, flags))


def test_every_number_of_the_summaries_is_in_the_records(trained: nn.Module) -> None:
    report = gnmr_fx.report(trained)
    assert {s.unit for s in report.summaries()} == set(report.units)
    for summary in report.summaries():
        events = [record for record in report.events if record.unit == summary.unit]
        assert summary.gnmr == max(record.gnmr for record in events)
        assert any((e.step, e.delta_gnmr) == (summary.delta_gnmr_step, summary.delta_gnmr) for e in events)
        assert summary.risky == sum(record.risky for record in events)
    steps = [summary.steps for summary in report.summaries()]
    assert steps == sorted(steps, reverse=True)
    assert sum(steps) == report.stats["recovered"]


def test_what_is_risky_says_why(trained: nn.Module) -> None:
    report = gnmr_fx.report(trained)
    for record in report.events:
        assert bool(fired(record, CONFIG)) == record.risky
        assert ("gnmr" in fired(record, CONFIG)) == (record.risky and record.gnmr > 1.2)
    text = str(report)
    assert "GNMR" in text
    assert "most recovered units" in text
    assert f"last 10 of {len(report.events)} records" in text
    assert text.count("\nstep ") == 10


def test_schedules_are_evaluated_at_the_step_of_the_event() -> None:
    config = gnmr_fx.GnmrConfig(alpha=lambda step: 10.0 / step, beta=math.inf, warmup_steps=0)
    assert fired(event(4), config) == ("gnmr",)
    assert fired(event(1, norm=math.inf, gnmr=math.inf, delta_gnmr=math.inf), config) == ("non_finite",)
    assert fired(event(4, gnmr=math.inf), config) == ("gnmr",), "a mean of 0 is not a norm that is not finite"
    assert told(event(4), config) == ("recovered", "GNMR 9.00 > 2.5; lock 50")
    model = gnmr_fx.instrument(chain(), config=config)
    train(model, noisy(3))
    report = gnmr_fx.report(model)
    assert "GNMR > α = a schedule or ΔGNMR > β = off" in str(report)
    assert json.loads(report.to_json())["config"]["alpha"] == "schedule"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (event(4), ("recovered", "GNMR 9.00 > 3; lock 50")),
        (event(4, changed=False), ("stays on", "GNMR 9.00 > 3; lock 50")),
        (event(4, delta_gnmr=8.0), ("recovered", "GNMR 9.00 > 3, ΔGNMR 8.00 > 2.5; lock 50")),
        (event(4, risky=False, lock=7), ("recovered", "locked; lock 7")),
        (event(4, norm=math.inf), ("recovered", "norm not finite; lock 50")),
        (event(4, "refused"), ("displaced", "GNMR 9.00 > 3; the budget went to others")),
        (event(4, "refused", changed=False), ("refused", "GNMR 9.00 > 3; the budget went to others")),
        (event(4, "released", risky=False), ("released", "neither over a threshold nor locked")),
        (event(4, forced=True, risky=False), ("pinned high", "by hand")),
        (event(4, "refused", changed=False, forced=True), ("pinned low", "by hand; GNMR 9.00 > 3")),
    ],
)
def test_records_in_words(record: Event, expected: tuple[str, str]) -> None:
    assert told(record, gnmr_fx.GnmrConfig(alpha=3.0, beta=2.5)) == expected


def test_guards_pinned_by_hand_are_told_exactly(tmp_path: Path) -> None:
    model = gnmr_fx.instrument(chain(4), max_active=2, config=CONFIG)
    controller = gnmr_fx.controller(model)
    inputs = noisy(24)
    pins = {0: ["0", "1", "2"], 2: None, 8: "high", 12: "low", 15: ["3"], 16: None, 22: ["0"]}
    flags = []
    for step, x in enumerate(inputs):
        if step in pins:
            controller.force(pins[step])
        flags.append(controller.flags.tolist())  # of the forward after this step, the first one before any
        train(model, [x])
    flags.append(controller.flags.tolist())
    report = gnmr_fx.report(model)
    for index, unit in enumerate(report.units):
        recovered = [p.on for p in report.periods[unit] for _ in range(p.start, p.stop)]
        assert recovered == [row[index] for row in flags[1:]]
        assert report.times_recovered[index] == sum(e.changed and e.outcome == "chosen" for e in report.events_of[unit])
    assert report.forced
    assert "guards are pinned by hand" in str(report)
    assert json.loads(report.to_json())["forced"] is True
    assert "by hand" in str(report)
    assert report.plot(tmp_path / "forced.png").read_bytes().startswith(PNG)


def test_the_report_in_json(trained: nn.Module) -> None:
    report = gnmr_fx.report(trained)
    data = json.loads(report.to_json())
    assert len(data["events"]) == len(report.events)
    for found, record in zip(data["events"], report.events, strict=True):
        assert found == {**record._asdict(), "fired": list(fired(record, CONFIG))}
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
    ("changes", "now", "expected"),
    [
        ([], False, [Period(1, 11, False)]),
        ([], True, [Period(1, 11, True)]),
        ([(3, "chosen"), (7, "released")], False, [Period(1, 3, False), Period(3, 7, True), Period(7, 11, False)]),
        ([(3, "refused")], False, [Period(1, 3, True), Period(3, 11, False)]),
        ([(1, "chosen"), (10, "refused")], False, [Period(1, 10, True), Period(10, 11, False)]),
        ([(0, "chosen"), (5, "released"), (5, "chosen")], True, [Period(1, 11, True)]),
    ],
)
def test_periods(changes: list[tuple[int, str]], now: bool, expected: list[Period]) -> None:
    events = [event(step, outcome) for step, outcome in changes]
    assert periods(events, 1, 11, now) == expected
    unchanged = [
        event(step, "chosen" if p.on else "refused", changed=False) for p in expected for step in range(*p[:2])
    ]
    assert periods(sorted([*events, *unchanged], key=lambda e: e.step), 1, 11, now) == expected


def test_where_older_records_are_gone_the_rest_is_still_exact(tmp_path: Path) -> None:
    config = gnmr_fx.GnmrConfig(alpha=1.2, beta=1.2, window=3, lock_steps=4, warmup_steps=3, max_events=5)
    model = gnmr_fx.instrument(chain(4), max_active=2, config=config)
    controller, flags = gnmr_fx.controller(model), []
    for x in noisy(24):
        train(model, [x])
        flags.append(controller.flags.tolist())
    report = gnmr_fx.report(model)
    assert report.stats["events_dropped"] > 0
    assert report.first_step == report.events[0].step > 1
    assert "older are gone" in str(report)
    for index, unit in enumerate(report.units):
        kept = [p.on for p in report.periods[unit] for _ in range(p.start, p.stop)]
        assert kept == [row[index] for row in flags[report.first_step - 1 :]]
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
