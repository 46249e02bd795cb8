"""Which signals and thresholds find trouble, after how many steps, and how often do they cry wolf?

    python benchmarks/detection.py --seeds 0 1 2 3 4 --jobs 2        # records what is missing, then replays
    python benchmarks/detection.py --show --plot out/detection.png

Trains the demo model with every unit on the low-cost path and no budget, and keeps each unit's gradient norm and
quantization error in each step: with the five transients of ``benchmarks/quality.py`` and without any. Then gives the
recorded numbers to the controller (:func:`gnmr_fx.controller.update`) under every configuration below, which takes a
few seconds each, and scores its decisions as :func:`gnmr_fx.testing.score` does. So all configurations meet
the very same run. What a replay leaves out is that a recovered unit's norm is another one.

A *hit* is a unit over a threshold during a transient that affects it (outliers and a damaged weight affect the units
that they are in, shifted data and a spike of the learning rate all units); a *false alarm* is a unit-step over a
threshold that no transient affects. *Quiet* is the share of unit-steps over a threshold in runs without transients.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quality
import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

import gnmr_fx
from gnmr_fx import testing
from gnmr_fx.controller import init, update
from gnmr_fx.runtime import Event

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import pretrain_tiny_llama as demo

VERSION = 1
KINDS = ("Outliers", "DamagedWeight", "ShiftedData", "LearningRateSpike")
QUANTILES = (0.5, 0.9, 0.99, 0.995, 0.998, 0.999)
SHARES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
CHANGES = (1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)

Changes = dict[str, Any]
FIXED: tuple[Changes, ...] = (
    *({"alpha": a, "beta": b} for a in (2.0, 3.0, 4.0, 5.0, 6.0, 8.0) for b in (1.5, 2.0, 2.5, 3.0, 4.0, 5.0)),
    *({"alpha": math.inf, "beta": b} for b in CHANGES),
    *({"beta": math.inf, "alpha": a} for a in (1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)),
)
"""Numbers for the thresholds of the paper's signal."""
HISTORIES: tuple[Changes, ...] = (
    *({"window": window} for window in (2, 4, 8, 16, 32)),
    *({"mean": mean} for mean in ("ema", "window")),
    *({"mean": "window", "window": window} for window in (16, 32)),
    *({"warmup_steps": steps} for steps in (10, 20, 100)),
    {"alpha": 5.0, "beta": 4.0, "warmup_steps": 20},
)
"""What the ratios are taken to, and from when on, under the default thresholds; and the ones before those."""


def configurations() -> Iterator[tuple[str, Changes]]:
    """Every configuration that is replayed, with the group that it belongs to."""
    yield "default", {}
    yield from (("gnmr", changes) for changes in FIXED)
    yield from (("gnmr, history", changes) for changes in HISTORIES)
    yield from (("gnmr, auto", {"alpha": "auto", "beta": "auto", "auto_share": share}) for share in SHARES)
    for signal in ("error", "gap"):
        for every in (1, 10):
            shared = {"signal": signal, "signal_every": every}
            group = f"{signal}, every step" if every == 1 else f"{signal}, every {every}"
            yield from ((group, shared | {"beta": math.inf, "auto_share": share}) for share in SHARES)
            yield from ((group, shared | {"alpha": math.inf, "beta": beta}) for beta in CHANGES)
            yield from ((group, shared | {"alpha": "auto", "beta": "auto", "auto_share": share}) for share in SHARES)


# Records -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """What the controller of one run heard.

    Attributes:
        units: their names.
        norms: gradient norm of each unit in each step, float64 [steps, units], not clipped.
        errors: relative quantization errors, float64 [steps, units]; -1 where there was none.
        spans: the transients met, in the controller's steps, which count from 1.
    """

    units: tuple[str, ...]
    norms: Tensor
    errors: Tensor
    spans: tuple[testing.Span, ...]


def record(job: quality.Job) -> Record:
    """Train under ``job``, whose policy is ``low``."""
    settings, setting, text, model = quality.begin(job)
    config = gnmr_fx.GnmrConfig(signal="error", signal_every=1)
    gnmr_fx.instrument(model, setting.recipe, max_active=0, config=config)
    controller = gnmr_fx.controller(model)
    norms: list[Tensor] = []
    levels: list[Tensor] = []  # of the step before: the controller makes its own after the backward

    def heard() -> None:
        if controller.decision is not None:
            levels.append(controller.decision.gnmr)
        gradients = [unit.weight.grad for unit in controller.units]
        norms.append(
            torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients if g is not None])
        )

    _, _, spans = quality.train(job, settings, setting, model, controller, text.train, heard)
    assert controller.decision is not None
    errors = torch.stack([*levels, controller.decision.gnmr])
    return Record(
        tuple(unit.name for unit in controller.units),
        torch.stack(norms),
        errors.masked_fill(errors == 0.0, -1.0),
        tuple(spans),
    )


def record_to(job: quality.Job, path: Path) -> None:
    """:func:`record` into a file."""
    made = record(job)
    spans = [(type(s.transient).__name__, dataclasses.asdict(s.transient), *s[1:]) for s in made.spans]
    whole = {"version": VERSION, "job": dataclasses.asdict(job), "units": made.units, "spans": spans}
    whole |= {"norms": made.norms, "errors": made.errors}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(whole, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def load(path: Path) -> tuple[dict[str, Any], Record]:
    """A recorded run, and the job that it was.

    Raises:
        SystemExit: with a message, for a file of another version.
    """
    saved = torch.load(path, weights_only=True)
    if saved.get("version") != VERSION:
        raise SystemExit(f"error: {path}: expected a record of version {VERSION}, found {saved.get('version')!r}")
    spans = tuple(
        testing.Span(getattr(testing, kind)(**fields), units and tuple(units), start, stop)
        for kind, fields, units, start, stop in saved["spans"]
    )
    return saved["job"], Record(tuple(saved["units"]), saved["norms"], saved["errors"], spans)


# Replays -------------------------------------------------------------------------------------------------------------


def replay(run: Record, config: gnmr_fx.GnmrConfig, budget: int) -> list[Event]:
    """What a controller that hears ``run`` would put on record: risks, and changes of guards."""
    state = init(len(run.units), config, budget)
    events = []
    for at, norms in enumerate(run.norms):
        before = state.recovered
        errors = run.errors[at] if at % config.signal_every == 0 else None
        state, decision = update(state, norms, config, errors=errors)
        for unit, verdict, was_on in zip(run.units, decision.units, before, strict=True):
            changed = verdict.active != was_on
            if changed or verdict.risky:
                events.append(Event.of(unit, verdict, verdict.active, step=at + 1, changed=changed, forced=False))
    return events


def score(run: Record, config: gnmr_fx.GnmrConfig, budget: int) -> dict[str, dict[str, Any]]:
    """Detections of each kind of transient, and of all."""
    events = replay(run, config, budget)
    first, last = config.warmup_steps + 1, len(run.norms)
    kinds = {kind: [s for s in run.spans if type(s.transient).__name__ == kind] for kind in KINDS} | {
        "all": list(run.spans)
    }
    return {
        kind: dataclasses.asdict(testing.score_events(events, spans, run.units, first, last, after=2))
        for kind, spans in kinds.items()
    }


def replay_all(paths: Sequence[Path], budget: int, lock: int, jobs: int = 1) -> Iterator[dict[str, Any]]:
    """A row for each configuration: hit rates over all runs with transients, alarms over all runs."""
    todo = list(configurations())
    one = functools.partial(_row_of_files, tuple(paths), budget, lock)
    with quality.process_pool(jobs) as pool:
        yield from tqdm(pool.map(one, todo), total=len(todo), desc="replays", mininterval=1.0)


def _row_of_files(paths: Sequence[Path], budget: int, lock: int, configuration: tuple[str, Changes]) -> dict[str, Any]:
    return replay_row([record_of(path) for path in paths], budget, lock, configuration)


def replay_row(records: Sequence[Record], budget: int, lock: int, configuration: tuple[str, Changes]) -> dict[str, Any]:
    """The row of one configuration."""
    group, changes = configuration
    fields: Changes = {"lock_steps": lock} | changes
    config = gnmr_fx.GnmrConfig(**fields)
    scores = [score(run, config, budget) for run in records if run.spans]
    row: dict[str, Any] = {"group": group, "changes": changes}
    for kind in KINDS:
        found = [s[kind] for s in scores]
        pairs = sum(f["pairs"] for f in found)
        delays = [d for f in found for d in f["delays"]]
        row[kind] = {
            "hit_rate": sum(f["hits"] for f in found) / pairs if pairs else math.nan,
            "recovered_rate": sum(f["recovered"] for f in found) / pairs if pairs else math.nan,
            "delay": statistics.fmean(delays) if delays else math.nan,
            "pairs": pairs,
        }
    row["false_alarms_per_1000"] = _per_1000(s["all"] for s in scores)
    row["quiet_per_1000"] = _per_1000(score(run, config, budget)["all"] for run in records if not run.spans)
    return row


@functools.cache
def record_of(path: Path) -> Record:
    """The recorded run of a file, read once in each process."""
    return load(path)[1]


def _per_1000(scores: Iterable[dict[str, Any]]) -> float:
    found = list(scores)
    quiet = sum(f["quiet"] for f in found)
    return 1000 * sum(f["false_alarms"] for f in found) / quiet if quiet else math.nan


# What is shown -------------------------------------------------------------------------------------------------------


def quantiles(records: Sequence[Record]) -> str:
    """Of GNMR and delta-GNMR after the warm-up, in the runs without transients."""
    config = gnmr_fx.GnmrConfig()
    rows = []
    for seed, run in enumerate(run for run in records if not run.spans):
        state = init(len(run.units), config, 0)
        found = []
        for norms in run.norms:
            state, decision = update(state, norms, config)
            found.append(torch.stack((decision.gnmr, decision.delta_gnmr)))
        values = torch.stack(found[config.warmup_steps :], dim=1).flatten(1)
        at = torch.quantile(values, torch.tensor(QUANTILES, dtype=torch.float64), dim=1)
        rows += [[name, seed, *at[:, index].tolist()] for index, name in enumerate(("GNMR", "delta-GNMR"))]
    return tabulate(rows, ["quantile", "run", *map(str, QUANTILES)], floatfmt=".2f")


def table(rows: Iterable[dict[str, Any]]) -> str:
    """All replays."""
    lines = []
    for row in rows:
        changes = ", ".join(
            f"{name} {value}" for name, value in row["changes"].items() if name not in ("signal", "signal_every")
        )
        line = [row["group"], changes]
        for kind in KINDS:
            of_kind = row[kind]
            line += [f"{100 * of_kind['hit_rate']:.0f}%", f"{of_kind['delay']:.1f}"]
        lines.append([*line, f"{row['false_alarms_per_1000']:.1f}", f"{row['quiet_per_1000']:.1f}"])
    headers = ["signal", "configuration"]
    for kind in KINDS:
        headers += [kind, "delay"]
    return tabulate(lines, [*headers, "false/1000", "quiet/1000"], disable_numparse=True)


def plot(rows: Sequence[dict[str, Any]], to: Path) -> None:
    """Hit rate against false alarms, a panel for each kind of transient, a colour for each signal."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = {"gnmr": "#0b4f8a", "gnmr, auto": "#58a6e0", "error, every step": "#c0392b", "gap, every step": "#e0902b"}
    figure = Figure(figsize=(3.1 * len(KINDS) + 1, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, kind in zip(figure.subplots(1, len(KINDS), squeeze=False)[0], KINDS, strict=True):
        for group, colour in groups.items():
            points = [(max(r["false_alarms_per_1000"], 0.1), r[kind]["hit_rate"]) for r in rows if r["group"] == group]
            axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=3, label=group)
        default = next(row for row in rows if row["group"] == "default")
        at = (max(default["false_alarms_per_1000"], 0.1), default[kind]["hit_rate"])
        axes.plot(*at, "*", color="black", markersize=9, label="default")
        axes.set_xscale("log")
        axes.set_title(kind, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(fontsize=6)
    figure.supxlabel("false alarms per 1,000 unit-steps (0 drawn at 0.1)", fontsize=8)
    figure.supylabel("hit rate", fontsize=8)
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=150)


# Command line --------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Record what is missing, replay, print; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--setting", default="int4-tensor", help="format of the low-cost path, as in benchmarks/quality.py")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    for name, default in (("steps", 600), ("batch", 8), ("seq", 128), ("budget", 5), ("lock", 50)):
        add(f"--{name}", type=int, default=default)
    add("--size", choices=demo.SIZES, default="tiny")
    add("--lr", type=float, default=1e-3)
    add("--text", default="", help="own text, as in examples/pretrain_tiny_llama.py")
    add("--jobs", type=int, default=1, help="processes at a time")
    add("--out", type=Path, default=Path("out/detection"), help="folder of the records")
    add("--show", action="store_true", help="print what is in --out, and record and replay nothing")
    add("--plot", type=Path, help="draw it to this file")
    arguments = parser.parse_args(argv)
    found = arguments.out / f"{arguments.setting}.json"
    if not arguments.show:
        _record_missing(arguments)
        paths = list(_paths(arguments).values())
        rows = list(replay_all(paths, arguments.budget, arguments.lock, arguments.jobs))
        shown = quantiles([record_of(path) for path in paths])
        found.write_text(json.dumps({"version": VERSION, "quantiles": shown, "rows": rows}) + "\n")
    if not found.exists():
        raise SystemExit(f"error: expected {found}, found no such file; run without --show first")
    result = json.loads(found.read_text())
    print(f"{result['quantiles']}\n\n{table(result['rows'])}")
    if arguments.plot:
        plot(result["rows"], arguments.plot)
        print(f"plot: {arguments.plot}")
    return 0


def _jobs(arguments: argparse.Namespace) -> Iterator[quality.Job]:
    names = ("steps", "size", "batch", "seq", "lr", "budget", "lock", "text")
    shared = {name: getattr(arguments, name) for name in names}
    for seed in arguments.seeds:
        for extra in ("", "+transients"):
            setting = quality.Setting.parse(arguments.setting + extra).name
            yield quality.Job(
                setting=setting, policy="low", seed=seed, dtype="fp32", warmup=0, signal_every=1, oracle_every=0,
                compile=False, **shared,
            )  # fmt: skip


def _paths(arguments: argparse.Namespace) -> dict[quality.Job, Path]:
    return {job: arguments.out / f"{job.setting}-{job.seed}.pt" for job in _jobs(arguments)}


def _record_missing(arguments: argparse.Namespace) -> None:
    todo = {}
    for job, path in _paths(arguments).items():
        if not path.exists():
            todo[job] = path
        elif load(path)[0] != dataclasses.asdict(job):
            raise SystemExit(f"error: {path} is the record of another run; name another folder with --out")
    with quality.process_pool(arguments.jobs) as pool, tqdm(total=len(todo), unit="run", mininterval=1.0) as bar:
        for future in concurrent.futures.as_completed([pool.submit(record_to, *item) for item in todo.items()]):
            future.result()
            bar.update()


if __name__ == "__main__":
    sys.exit(main())
