"""Replays of recorded runs: what a controller would have made of them, live."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import gnmr_fx
from tests.loops import benchmark

pytest.importorskip("transformers")
SMALL = {"size": "nano", "batch": 2, "seq": 32, "steps": 40, "lr": 1e-3, "dtype": "fp32", "budget": 2, "lock": 3}
SMALL |= {"warmup": 0, "signal_every": 1, "oracle_every": 0, "compile": False}


@pytest.fixture(scope="module")
def detection() -> Iterator[ModuleType]:
    with benchmark("detection", "quality") as module:
        yield module


@pytest.fixture(scope="module")
def job(detection: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("".join(f"{n} is followed by {n + 1}. " for n in range(400)))
    return detection.quality.Job(setting="int4-tensor+transients", policy="low", seed=0, text=str(text), **SMALL)


@pytest.fixture(scope="module")
def recorded(detection: ModuleType, job: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("records") / "one.pt"
    detection.record_to(job, path)
    saved, run = detection.load(path)
    assert saved == detection.dataclasses.asdict(job)
    return run


def test_a_record_has_every_step(recorded: Any) -> None:
    assert recorded.norms.shape == recorded.errors.shape == (40, 14)
    assert bool((recorded.norms > 0).all())
    assert bool((recorded.errors > 0).all())
    assert bool((recorded.errors < 1).all())
    assert [type(span.transient).__name__ for span in recorded.spans] == [
        *("Outliers", "ShiftedData", "Outliers", "LearningRateSpike", "DamagedWeight")
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"alpha": 1.3, "beta": 1.2},
        {"signal": "error", "signal_every": 1, "alpha": 0.2, "beta": 1.1},
        {"signal": "gap", "signal_every": 1, "alpha": "auto", "beta": "auto", "auto_share": 0.3},
    ],
)
def test_a_replay_decides_as_a_live_controller(
    detection: ModuleType, job: Any, recorded: Any, changes: dict[str, Any]
) -> None:
    quality = detection.quality
    config = gnmr_fx.GnmrConfig(warmup_steps=5, lock_steps=3, **changes)
    settings, setting, text, model = quality.begin(job)
    gnmr_fx.instrument(model, setting.recipe, max_active=0, config=config)
    live = gnmr_fx.controller(model)
    _, _, spans = quality.train(job, settings, setting, model, live, text.train)

    replayed = detection.replay(recorded, config, 0)
    expected = [event for event in live.events if event.risky]
    assert len(expected) > 20
    assert [(e.step, e.unit, e.outcome, e.lock) for e in replayed] == [
        (e.step, e.unit, e.outcome, e.lock) for e in expected
    ]
    assert [e.gnmr for e in replayed] == pytest.approx([e.gnmr for e in expected], rel=1e-6)
    assert tuple(spans) == recorded.spans


def test_rows_count_what_the_records_have(detection: ModuleType, recorded: Any) -> None:
    loud = {"alpha": 1e-6, "beta": 1e-6, "warmup_steps": 0}
    silent = {"alpha": float("inf"), "beta": float("inf"), "warmup_steps": 0}
    quiet = detection.Record(recorded.units, recorded.norms, recorded.errors, ())
    both = [("loud", loud), ("silent", silent)]
    rows = {name: detection.replay_row([recorded, quiet], 14, 3, (name, changes)) for name, changes in both}
    assert rows["loud"]["Outliers"] == {"hit_rate": 1.0, "recovered_rate": 1.0, "delay": 0.0, "pairs": 4}
    assert rows["loud"]["LearningRateSpike"]["pairs"] == 14
    assert rows["loud"]["false_alarms_per_1000"] == 1000.0
    assert rows["silent"]["Outliers"]["hit_rate"] == 0.0
    assert rows["silent"]["false_alarms_per_1000"] == rows["silent"]["quiet_per_1000"] == 0.0
    assert "loud" in detection.table(rows.values())


def test_a_record_of_another_version_is_refused(detection: ModuleType, tmp_path: Path) -> None:
    torch.save({"version": 0}, tmp_path / "old.pt")
    with pytest.raises(SystemExit, match="expected a record of version 1, found 0"):
        detection.load(tmp_path / "old.pt")
