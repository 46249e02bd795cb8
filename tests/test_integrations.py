"""Loggers and trainers: what they log is what the controller did, and a resumed run is the run that was not killed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gnmr_fx
from gnmr_fx.errors import LogError
from gnmr_fx.integrations.jsonl import JsonlLogger, read_log
from gnmr_fx.integrations.metrics import Meter, kept_bytes, numbers, step_metrics
from gnmr_fx.integrations.tensorboard import TensorBoardLogger
from tests.loops import CONFIG, chain, noisy, readable_kernels, train


@pytest.fixture(autouse=True, scope="module")
def _readable_kernels() -> Any:
    with readable_kernels():
        yield


def instrumented(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return gnmr_fx.instrument(chain(4), max_active=2, config=CONFIG, **options)


def logged(model: nn.Module, path: Path, steps: range) -> None:
    """Train on the batches of ``steps``, and log each."""
    with JsonlLogger(path, model) as log:
        for step in steps:
            train(model, [noisy(steps.stop)[step]])
            assert log.log()


# Metrics -------------------------------------------------------------------------------------------------------------


def test_metrics_before_anything_ran():
    found = step_metrics(gnmr_fx.controller(instrumented()))
    assert found == {"active_units": 0, "budget": 2, "budget_use": 0.0}


def test_metrics_are_what_the_controller_did():
    model = instrumented()
    controller = gnmr_fx.controller(model)
    meter, seen = Meter(model), 0
    for x in noisy(24):
        train(model, [x])
        found = meter.read()
        assert found == step_metrics(controller)  # the meter's shortcut changes nothing
        assert found["active_units"] == len(controller.active)
        assert found["budget_use"] == len(controller.active) / 2
        seen += found["over_threshold"]
        assert seen == controller.stats["risky"]
        highest = max(range(4), key=lambda i: controller.decision.gnmr[i])
        assert found["highest_gnmr_unit"] == controller.units[highest].name
        assert found["highest_gnmr"] == controller.decision.gnmr[highest]
        assert found["highest_delta_gnmr"] == controller.decision.delta_gnmr.max()
        rows = gnmr_fx.table(model).units
        assert found["bytes_recovered"] == sum(row.bytes_high for row in rows if row.guard == "high")
    assert seen > 0
    totals = gnmr_fx.table(model).totals
    assert found["bytes_saved"] == totals["bytes_full"] - totals["bytes_low"] > 0
    assert found["over_threshold_share"] == seen / (24 * 4)
    assert set(numbers(found)) == {f"gnmr_fx/{name}" for name, value in found.items() if not isinstance(value, str)}


def test_bytes_are_counted_anew_where_they_change():
    model = instrumented()
    meter = Meter(model)
    train(model, [torch.randn(8, 40)])
    first = meter.read()["bytes_saved"]
    train(model, [torch.randn(16, 40)])
    assert meter.read()["bytes_saved"] == 2 * first
    model[0].requires_grad_(False)
    assert meter.read()["bytes_saved"] < 2 * first


def test_units_without_a_gradient_are_not_the_highest():
    model = instrumented()
    model[0].requires_grad_(False)
    train(model, noisy(3))
    assert step_metrics(gnmr_fx.controller(model))["highest_gnmr_unit"] != "0"


# JSONL ---------------------------------------------------------------------------------------------------------------


def test_the_report_of_a_log_is_the_report_of_the_model(tmp_path):
    model = instrumented()
    logged(model, tmp_path / "run.jsonl", range(24))
    log = read_log(tmp_path / "run.jsonl")
    assert not log.cut
    assert log.header["gnmr_fx"] == gnmr_fx.__version__
    assert [line["step"] for line in log.steps] == list(range(1, 25))
    assert log.report() == gnmr_fx.report(model)
    assert log.report().events  # something was recovered
    assert str(log.report()) == str(gnmr_fx.report(model))


def test_a_log_that_starts_late_counts_what_was_before(tmp_path):
    model = instrumented()
    train(model, noisy(12))
    logged(model, tmp_path / "run.jsonl", range(12, 24))
    report = read_log(tmp_path / "run.jsonl").report()
    live = gnmr_fx.report(model)
    assert report.steps_recovered == live.steps_recovered
    assert report.times_recovered == live.times_recovered
    assert report.steps == 24
    assert report.events == tuple(event for event in live.events if event.step > 12)
    assert report.first_step > 12


@pytest.mark.parametrize("recipe", [*gnmr_fx.RECIPES.values(), gnmr_fx.Recipe(*[gnmr_fx.Format("int2", "token")] * 2)])
def test_every_recipe_goes_through_the_log(tmp_path, recipe):
    model = chain()
    if recipe.frozen is not None:
        model[0].requires_grad_(False)
    JsonlLogger(tmp_path / "run.jsonl", gnmr_fx.instrument(model, recipe)).close()
    assert read_log(tmp_path / "run.jsonl").report().recipe == recipe


@pytest.mark.parametrize("before", [0, 7, 13])
def test_a_log_may_begin_with_the_step_just_made(tmp_path, before):
    plain, late, model = tmp_path / "plain.jsonl", tmp_path / "late.jsonl", instrumented()
    train(model, noisy(before))
    first = JsonlLogger(plain, model)
    train(model, [noisy(before + 1)[before]])
    second = JsonlLogger(late, model, with_last=True)
    assert [log.log() for log in (first, second)] == [True, True]
    assert plain.read_text() == late.read_text()


def test_schedules_and_infinities_go_through_the_log(tmp_path):
    config = gnmr_fx.GnmrConfig(
        alpha=lambda step: 1.2 if step < 8 else 1.5, beta=math.inf, warmup_steps=2, lock_steps=2
    )
    torch.manual_seed(0)
    model = gnmr_fx.instrument(chain(4), max_active=1, config=config)
    with JsonlLogger(tmp_path / "run.jsonl", model) as log:
        for x in noisy(16):
            train(model, [x * (math.inf if log._step == 10 else 1.0)])
            log.log()
    live, read = gnmr_fx.report(model), read_log(tmp_path / "run.jsonl").report()
    assert live.stats["non_finite"]
    assert read.events == live.events
    assert json.loads(read.to_json())["events"] == json.loads(live.to_json())["events"]
    assert read.config.beta == math.inf


def test_a_log_is_readable_at_any_time_and_records_of_force_are_kept(tmp_path):
    model = instrumented()
    controller = gnmr_fx.controller(model)
    log = JsonlLogger(tmp_path / "run.jsonl", model)
    assert not log.log()  # no step yet
    train(model, noisy(1))
    assert log.log()
    assert not log.log()
    controller.force(["1"])
    train(model, noisy(2))
    log.log()
    found = read_log(tmp_path / "run.jsonl")
    assert [len(line["events"]) for line in found.steps] == [0, 1]  # two steps, of which the last one has a line
    assert found.steps[-1]["step"] == 3
    assert found.report().forced


def test_a_resumed_run_goes_on_with_its_log(tmp_path):
    whole, path = tmp_path / "whole.jsonl", tmp_path / "run.jsonl"
    model = instrumented()
    logged(model, whole, range(20))

    model = instrumented()
    logged(model, path, range(10))
    saved = [{name: t.clone() for name, t in model.state_dict().items()}, gnmr_fx.controller(model).state_dict()]
    logged(model, path, range(10, 14))  # steps that are lost, with the process
    with path.open("a") as file:
        file.write('{"step": 15, "acti')
    model = instrumented()
    model.load_state_dict(saved[0])
    gnmr_fx.controller(model).load_state_dict(saved[1])
    logged(model, path, range(10, 20))

    def without_time(file: Path) -> list[Any]:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        return [{**line, "stats": {**line.get("stats", {}), "seconds": 0}} for line in lines]

    resumed, uninterrupted = without_time(path), without_time(whole)
    for line in (*resumed, *uninterrupted):
        line["stats"].pop("events_dropped", None)  # records do not survive the process; the log has them
    assert resumed == uninterrupted


def test_a_new_run_does_not_write_over_the_log_of_another(tmp_path):
    path = tmp_path / "run.jsonl"
    logged(instrumented(), path, range(3))
    before = path.read_bytes()
    with pytest.raises(LogError, match="found one of 3 steps"):
        JsonlLogger(path, instrumented())
    assert path.read_bytes() == before
    JsonlLogger(path, instrumented(), overwrite=True).close()
    assert read_log(path).steps == []
    logged(instrumented(), path, range(3))  # a log without steps is nobody's
    model = instrumented(include=["0", "1"])
    train(model, noisy(1))
    with pytest.raises(LogError, match="another units"):
        JsonlLogger(path, model)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty file"),
        (b'{"gnmr_fx": "0.1', "no complete line"),
        (b"hello\nworld\n", "'hello'"),
        (b'{"loss": 1}\n', "first line tells its version"),
        (b"\x89PNG\r\n\x1a\n", "first line tells its version"),
        (b'{"gnmr_fx": "9.0", "log": 7}\n', "version 7"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path, content, message):
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(LogError, match=message):
        read_log(tmp_path / "log")


def test_every_cut_of_a_log_is_read_up_to_there(tmp_path):
    path = tmp_path / "run.jsonl"
    logged(instrumented(), path, range(8))
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    for size in (*ends, ends[0] + 1, ends[3] + 20, ends[-1] - 1):
        path.write_bytes(data[:size])
        log = read_log(path)
        assert len(log.steps) == sum(end <= size for end in ends) - 1
        assert log.cut == (size not in ends)
        assert log.report().steps == len(log.steps)
    path.write_bytes(data[: ends[3] + 20] + b"\n" + data[ends[4] :])
    with pytest.raises(LogError, match="line 5"):
        read_log(path)
    path.write_bytes(data[: ends[3] + 20] + b"\n")
    assert read_log(path).cut
    assert len(read_log(path).steps) == 3


# TensorBoard ---------------------------------------------------------------------------------------------------------


def read_tensorboard(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def test_tensorboard_reads_what_was_logged(tmp_path):
    model = instrumented()
    controller = gnmr_fx.controller(model)
    expected, names = [], {}
    with TensorBoardLogger(tmp_path, model) as log:
        for x in noisy(16):
            train(model, [x])
            log.log()
            assert not log.log()
            expected.append(step_metrics(controller))
            names.setdefault(expected[-1]["highest_gnmr_unit"], len(expected))
    found = read_tensorboard(tmp_path)
    assert set(found.Tags()["scalars"]) == set(numbers(expected[-1]))
    for name in ("active_units", "highest_gnmr", "bytes_saved", "bytes_recovered", "over_threshold"):
        events = found.Scalars(f"gnmr_fx/{name}")
        assert [event.step for event in events] == list(range(1, 17))
        assert [event.value for event in events] == pytest.approx([line[name] for line in expected])
    texts = found.Tensors("gnmr_fx/highest_gnmr_unit/text_summary")
    assert {text.tensor_proto.string_val[0].decode() for text in texts} == set(names)


def test_tensorboard_shows_a_resumed_step_once(tmp_path):
    model = instrumented()
    saved = {}
    with TensorBoardLogger(tmp_path, model) as log:
        for step, x in enumerate(noisy(9), 1):
            train(model, [x])
            log.log()
            if step == 6:
                saved = gnmr_fx.controller(model).state_dict()
    gnmr_fx.controller(model).load_state_dict(saved)
    with TensorBoardLogger(tmp_path, model) as log:
        for x in noisy(4):
            train(model, [x])
            log.log()
    steps = [event.step for event in read_tensorboard(tmp_path).Scalars("gnmr_fx/active_units")]
    assert steps == list(range(1, 11))


MISSING = """
import importlib, sys
for name in ("tensorboard", "transformers", "lightning", "pytorch_lightning"): sys.modules[name] = None
from gnmr_fx.errors import MissingDependencyError
for name in ("tensorboard", "hf", "lightning"):
    try:
        importlib.import_module(f"gnmr_fx.integrations.{name}")
    except MissingDependencyError as error:
        print(error)
importlib.import_module("gnmr_fx.integrations.jsonl")
importlib.import_module("gnmr_fx.integrations.torchtitan")
"""


def test_a_missing_library_is_named_with_the_extra_that_brings_it():
    done = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line, extra in zip(done.stdout.splitlines(), ("tensorboard", "transformers", "lightning"), strict=True):
        assert line.endswith(f"pip install 'gnmr-fx[{extra}]'")


def test_bytes_of_a_model_that_never_ran():
    assert kept_bytes(gnmr_fx.controller(instrumented())) is None


def test_the_use_of_a_budget_in_bytes():
    config = gnmr_fx.GnmrConfig(alpha=1.2, beta=1.2, window=3, lock_steps=4, warmup_steps=3, budget_unit="bytes")
    torch.manual_seed(0)
    model = gnmr_fx.instrument(chain(4), max_active=0.5, config=config)
    controller, used = gnmr_fx.controller(model), set()
    for x in noisy(24):
        train(model, [x])
        found = step_metrics(controller)
        assert found["budget"] == 0.5
        assert found["budget_use"] == len(controller.active) / 2  # four units of equal size
        used.add(found["budget_use"])
    assert 1.0 in used
