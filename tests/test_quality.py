"""The quality harness: runs, resumes, refuses files of other versions, and reckons right."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gnmr_fx
from tests.loops import benchmark

pytest.importorskip("transformers")
SMALL = ["--size", "nano", "--batch", "2", "--seq", "32", "--steps", "12", "--warmup", "2", "--lock", "3"]
SMALL += ["--budget", "2", "--oracle-every", "5", "--signal-every", "2"]


@pytest.fixture(scope="module")
def quality() -> Iterator[ModuleType]:
    with benchmark("quality") as module:
        yield module


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} is followed by {n + 1}. " for n in range(400)))
    return path


def jobs(quality: ModuleType, text: Path, settings: list[str], policies: list[str], seeds: str = "0") -> Any:
    """What a command line stands for."""
    found: list[Any] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(quality, "run_all", lambda given, out, processes: found.extend(given) or 0)
    argv = [*SMALL, "--settings", *settings, "--policies", *policies, "--seeds", seeds, "--text", str(text)]
    quality.main([*argv, "--out", str(text.parent / "none.jsonl")])
    patch.undo()
    return found


def test_every_policy_runs(quality: ModuleType, text: Path) -> None:
    policies = ["full", "high", "low", "gnmr-auto", "error-sticky", "gap", "random", "random-lock", "fixed", "oracle"]
    rows = {job.policy: quality.run(job) for job in jobs(quality, text, ["int2-tensor"], policies)}
    assert list(rows) == policies
    for policy, row in rows.items():
        assert 1 < row["perplexity"] < 300
        assert len(row["curve"]) == 12
        recovered = 0 if row["stats"] is None else row["stats"]["recovered"]
        units = row["units"]
        expected = {
            "full": 0, "low": 0, "high": 12 * units, "random": 24, "random-lock": 24, "fixed": 2 * 10, "oracle": 2 * 10,
        }  # fmt: skip
        assert recovered == expected.get(policy, recovered)
        assert policy == "high" or recovered <= 24
    assert rows["random"]["stats"]["switches"] > rows["random-lock"]["stats"]["switches"] > 0
    assert rows["fixed"]["stats"]["switches"] == 2
    firsts = {row["curve"][0] for row in rows.values()}
    assert len(firsts) == 1, "the same weights and the same first batch"
    again = quality.run(jobs(quality, text, ["int2-tensor"], ["gap"])[0])
    assert again["curve"] == rows["gap"]["curve"]
    assert rows["full"]["curve"] != rows["low"]["curve"]


def test_transients_are_met_by_every_policy(quality: ModuleType, text: Path) -> None:
    full, error = (
        quality.run(dataclasses.replace(job, steps=30))
        for job in jobs(quality, text, ["int4-tensor+transients"], ["full", "error"])
    )
    assert full["job"]["setting"] == "none>none+transients"
    for row in (full, error):
        assert set(row["detection"]) == {"Outliers", "ShiftedData", "LearningRateSpike", "DamagedWeight", "all"}
        assert row["detection"]["Outliers"]["pairs"] == 4
    assert error["detection"]["all"]["pairs"] == 5 + 2 * error["units"]


def test_a_grid_resumes_and_shows(
    quality: ModuleType, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    out = tmp_path / "runs.jsonl"
    made: list[Any] = []

    def fake(job: Any) -> dict[str, Any]:
        made.append(job)
        base = {"low": 7.0, "gnmr": 6.5, "full": 6.0}[job.policy] + job.seed * (1.0 if job.policy != "gnmr" else 1.1)
        stats = None if job.policy == "full" else {"recovered": 10, "unit_steps": 100, "switches": 5, "steps": 10}
        return {
            "harness": quality.HARNESS, "job": dataclasses.asdict(job), "perplexity": base, "ms_per_step": 100.0,
            "seconds": 1.0, "stats": stats, "detection": None,
        }  # fmt: skip

    class Now:
        """A pool of this process."""

        def __init__(self, *_: Any) -> None: ...

        def __enter__(self) -> Now:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def submit(self, _: Any, job: Any) -> Any:
            import concurrent.futures

            future: Any = concurrent.futures.Future()
            if job.policy == "low" and job.seed == 1 and not made:
                future.set_exception(MemoryError("no room"))
            else:
                future.set_result(fake(job))
            return future

    monkeypatch.setattr(quality.concurrent.futures, "ProcessPoolExecutor", Now)
    argv = [*SMALL, "--settings", "int4-g128", "int2-g128", "--policies", "full", "low", "gnmr", "--out", str(out)]
    assert quality.main([*argv, "--seeds", "0", "1"]) == 0
    assert len(made) == 2 * (1 + 2 * 2), "full precision is one run a seed, whatever the formats"
    with out.open("a") as file:
        file.write('{"harness": 1, "job"')  # killed here
    assert quality.main([*argv, "--seeds", "0", "1", "2"]) == 0
    assert len(made) == 15
    assert len({quality.key_of(job) for job in made}) == 15
    assert [json.loads(line)["harness"] for line in out.read_text().splitlines()] == [quality.HARNESS] * 15

    capsys.readouterr()
    assert quality.main(["--show", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    rows = {tuple(line.split()[:2]): line for line in shown.splitlines()}
    # gnmr - low is -0.5, -0.4, -0.3: mean -0.4, sd 0.1, t(2) 4.303 / sqrt(3) = 2.484
    assert "7.600 ± 1.100" in rows["int4-g128", "gnmr"]
    assert "-0.400 ± 0.248" in rows["int4-g128", "gnmr"]
    assert "+1.000 ± 0.000" in rows["int2-g128", "low"]
    assert "10.0%" in rows["int4-g128", "gnmr"]
    assert quality.main(["--plot", str(tmp_path / "plot.png"), "--out", str(out)]) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert quality.main(["--plot", str(tmp_path / "one.png"), "--out", str(out), "--settings", "int2-g128"]) == 0
    assert (tmp_path / "one.png").stat().st_size < (tmp_path / "plot.png").stat().st_size
    with pytest.raises(SystemExit, match="expected runs of int3-g128 in"):
        quality.main(["--plot", str(tmp_path / "no.png"), "--out", str(out), "--settings", "int3-g128"])
    references = tmp_path / "references.jsonl"
    references.write_text("".join(line for line in out.open() if '"full"' in line))
    with pytest.raises(SystemExit, match=r"expected runs in .* of other policies than full and high, found none"):
        quality.main(["--plot", str(tmp_path / "no.png"), "--out", str(references)])


def test_a_failed_run_does_not_lose_the_others(quality: ModuleType, text: Path, tmp_path: Path) -> None:
    found = jobs(quality, text, ["int4-g128"], ["low", "high"])
    broken = dataclasses.replace(found[0], text=str(tmp_path / "nothing here"))
    assert quality.run_all([broken], tmp_path / "runs.jsonl", 1) == 1
    assert quality.read(tmp_path / "runs.jsonl") == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"harness": 0, "job": {}}', "line 2: expected runs of harness version 1, found version 0"),
        ("perplexity 3.2", "line 2: expected a run as JSON"),
        ("{}", "line 2: expected a run as JSON"),
    ],
)
def test_a_file_of_something_else_is_an_error(quality: ModuleType, tmp_path: Path, line: str, message: str) -> None:
    out = tmp_path / "runs.jsonl"
    out.write_text(f'{{"harness": {quality.HARNESS}, "job": {{}}}}\n{line}\n')
    with pytest.raises(SystemExit, match=message):
        quality.main(["--show", "--out", str(out)])


def test_names_of_settings(quality: ModuleType) -> None:
    parse = quality.Setting.parse
    assert str(parse("int3-tensor").recipe) == "int3 tensor -> int8 g128"
    assert str(parse("int2-g64>none").recipe) == "int2 g64 -> none"
    assert parse("recipe:saved-fp8-bf16+transients") == quality.Setting(
        "recipe:saved-fp8-bf16+transients", gnmr_fx.RECIPES["saved-fp8-bf16"], True
    )
    for bad in ("int5-tensor", "int4-row", "recipe:nothing", "int4-g128+noise"):
        with pytest.raises(quality.argparse.ArgumentTypeError):
            parse(bad)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("clairvoyant", "expected a policy among full, high, low, gnmr"),
        ("clairvoyant:alpha=2", "expected a policy among full, high, low, gnmr"),
        ("gnmr:alpa=2", "expected FIELD=VALUE with a field of GnmrConfig, found 'alpa=2'"),
        ("gnmr:window=0", "window"),
    ],
)
def test_unknown_policies_are_refused_before_anything_runs(
    quality: ModuleType, capsys: pytest.CaptureFixture[str], policy: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        quality.main([*SMALL, "--policies", "low", policy])
    assert message in capsys.readouterr().err


def test_policies_take_other_values(quality: ModuleType, text: Path) -> None:
    def config(policy: str) -> gnmr_fx.GnmrConfig:
        found: gnmr_fx.GnmrConfig = quality.config_of(jobs(quality, text, ["int2-tensor"], [policy])[0])
        return found

    shared = {"lock_steps": 3, "warmup_steps": 2}
    assert config("gnmr:alpha=2,beta=inf") == gnmr_fx.GnmrConfig(alpha=2, beta=math.inf, **shared)
    assert config("gap:beta=auto,lock_steps=9") == gnmr_fx.GnmrConfig(
        signal="gap", signal_every=2, beta="auto", lock_steps=9, warmup_steps=2
    )
    assert config("error-sticky") == gnmr_fx.GnmrConfig(signal="error", signal_every=2, hysteresis=1.5, **shared)
    assert config("paper:lock_steps=4") == gnmr_fx.GnmrConfig.paper(lock_steps=4, warmup_steps=2)


def test_what_a_policy_does_not_use_is_no_part_of_its_run(quality: ModuleType, text: Path) -> None:
    settings = ["int4-g64", "int2-tensor", "int2-tensor>none", "recipe:dsv3-fp6"]
    made = [(job.setting, job.policy) for job in jobs(quality, text, settings, ["full", "high", "low"])]
    assert made == [
        *(("none>none", "full"), ("int8-g128>int8-g128", "high"), ("int4-g64", "low"), ("int2-tensor", "low")),
        *(("none>none", "high"), ("int2-tensor>none", "low"), ("recipe:dsv3-fp6", "high"), ("recipe:dsv3-fp6", "low")),
    ]


def test_quantiles_and_intervals(quality: ModuleType) -> None:
    assert quality.t_quantile(1) == 12.706
    assert quality.t_quantile(4) == 2.776
    assert quality.t_quantile(31) == pytest.approx(2.0395, abs=5e-4)
    assert quality.t_quantile(60) == pytest.approx(2.0003, abs=5e-4)
    assert quality.paired_difference([3.0, 5.0], [1.0, 1.0]) == (3.0, pytest.approx(12.706))
    mean, half = quality.paired_difference([3.0], [1.0])
    assert mean == 2.0
    assert math.isnan(half)
