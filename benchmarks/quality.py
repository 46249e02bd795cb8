"""Is the chosen unit the right one? Policies × settings × seeds on the demo model, at equal budget and data order.

    python benchmarks/quality.py --settings int2-tensor int4-g128 --policies full low gnmr error --seeds 0 1 2 --jobs 2
    python benchmarks/quality.py --show                       # mean ± standard deviation, paired differences
    python benchmarks/quality.py --show --against random --plot out/quality.png

A run trains the model of examples/pretrain_tiny_llama.py from scratch and validates it. Runs of one seed start from the
same weights and see the same batches, whatever the policy. Each finished run is a line of JSON in ``--out``; runs that
are there already are not made again, so the same command goes on where it was stopped.

Settings are formats of the low-cost path: ``DTYPE-tensor``, ``DTYPE-token`` or ``DTYPE-gN`` (one scale for N values),
recovered in int8 with one scale for 128, or in what ``>`` names (``int2-g128>none``); or ``recipe:NAME`` for one of
gnmr_fx.RECIPES. ``+transients`` adds outliers, shifted data, a spike of the learning rate and a damaged weight.

Policies: ``full`` (not instrumented), ``high`` and ``low`` (every unit on the format of one path), ``gnmr`` (the
defaults), ``paper`` (GnmrConfig.paper), ``gnmr-auto`` (automatic thresholds), ``gnmr-path`` (histories per path),
``error`` and ``gap`` (the signals), each with ``-sticky`` for a hysteresis of 1.5 and with other values for fields of
GnmrConfig after a colon (``gnmr:alpha=2,beta=1.5,lock_steps=20``), ``random`` (other units in each step),
``random-lock`` (other units every lock_steps), ``fixed`` (the best set of one audit after the warm-up, for good), and
``oracle`` (the best set of an audit of the coming batch, every ``--oracle-every`` steps). Where units influence one
another's gradients, as under recipes for GEMMs, these audits are estimates. What a policy does not depend on is run
once: ``full`` for all settings, ``high`` for all with the same format of the recovery path.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import gnmr_fx
from gnmr_fx import testing
from gnmr_fx.instrument import ModelController

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import pretrain_tiny_llama as demo

HARNESS = 1
"""Version of what a run is: raised whenever lines of another version could not be compared with new ones."""

SETTINGS = ("int4-g128", "int2-g128", "int4-tensor", "int3-tensor", "int2-tensor")
RECOVERY = "int8-g128"
"""Format of the recovery path of a setting that names none."""
POLICIES = ("full", "high", "low", "gnmr", "error", "gap", "random", "random-lock", "fixed", "oracle")
CURVE_POINTS = 50
"""Points of a training curve that a line keeps, each the mean of the steps since the one before."""


# What a run is -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Formats, and what else happens; made of its name by :meth:`parse`.

    Attributes:
        name: as on the command line.
        recipe: of the units.
        transients: whether there are any.
        prepare: what is done to the model before it is instrumented (adapters put in, say); None = nothing.
    """

    name: str
    recipe: gnmr_fx.Recipe
    transients: bool = False
    prepare: Callable[[nn.Module], nn.Module] | None = None

    @classmethod
    def parse(cls, name: str) -> Setting:
        """The setting of that name; see the module's docstring.

        Raises:
            argparse.ArgumentTypeError: where there is none.
        """
        base, plus, extra = name.partition("+")
        if plus and extra != "transients":
            raise argparse.ArgumentTypeError(f"expected nothing or +transients after {base!r}, found {plus}{extra}")
        try:
            if base.startswith("recipe:"):
                return cls(name, gnmr_fx.recipe.get_recipe(base.removeprefix("recipe:")), bool(extra))
            low, _, high = base.partition(">")
            recipe = gnmr_fx.Recipe(_format(low), _format(high or RECOVERY))
        except gnmr_fx.GnmrError as error:
            raise argparse.ArgumentTypeError(f"{name}: {error}") from error
        return cls(name, recipe, bool(extra))


def setting_of(policy: str, name: str) -> str:
    """The setting that runs of ``policy`` have in the place of ``name``: without the formats that they never use."""
    base, plus, extra = name.partition("+")
    if policy == "full":
        return f"none>none{plus}{extra}"
    if policy == "high" and not base.startswith("recipe:"):
        high = base.partition(">")[2] or RECOVERY
        return f"{high}>{high}{plus}{extra}"
    return name


def _format(text: str) -> gnmr_fx.Format:
    """``int4-g128`` is ``int4/group128``."""
    return gnmr_fx.Format.parse(re.sub(r"/g(\d)", r"/group\1", text.replace("-", "/")))


@dataclass(frozen=True)
class Job:
    """Everything that a run depends on; its fields identify its line."""

    setting: str
    policy: str
    seed: int
    steps: int
    size: str
    batch: int
    seq: int
    lr: float
    dtype: str
    budget: int
    lock: int
    warmup: int
    signal_every: int
    oracle_every: int
    text: str
    compile: bool


def config_of(job: Job) -> gnmr_fx.GnmrConfig:
    """The controller's configuration under the policy of ``job``.

    Raises:
        argparse.ArgumentTypeError: for an unknown policy.
    """
    name, _, options = job.policy.partition(":")
    base = name.removesuffix("-sticky")
    shared: dict[str, Any] = {"lock_steps": job.lock, "warmup_steps": job.warmup}
    changes: dict[str, dict[str, Any]] = {
        "gnmr-auto": {"alpha": "auto", "beta": "auto"},
        "gnmr-path": {"history": "per_path"},
        "gnmr-auto-path": {"alpha": "auto", "beta": "auto", "history": "per_path"},
        "error": {"signal": "error", "signal_every": job.signal_every},
        "gap": {"signal": "gap", "signal_every": job.signal_every},
    }
    known = dict.fromkeys((*POLICIES, "paper", *changes))
    if base not in known:
        raise argparse.ArgumentTypeError(
            f"expected a policy among {', '.join(known)} or one with -sticky, found {job.policy!r}"
        )
    fields = shared | changes.get(base, {}) | ({"hysteresis": 1.5} if name != base else {}) | _options(options)
    return gnmr_fx.GnmrConfig.paper(**fields) if base == "paper" else gnmr_fx.GnmrConfig(**fields)


def _options(text: str) -> dict[str, Any]:
    """``alpha=2,history=per_path`` as keyword arguments of GnmrConfig."""
    fields = {field.name for field in dataclasses.fields(gnmr_fx.GnmrConfig)}
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals or name not in fields:
            raise argparse.ArgumentTypeError(f"expected FIELD=VALUE with a field of GnmrConfig, found {part!r}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = math.inf if value == "inf" else value
    return found


def transients_of(controller: ModelController, steps: int, seed: int) -> list[testing.Transient]:
    """Five transients, spread over the run, each a thirtieth of it long."""
    units = [u.name for u in controller.units if isinstance(u.module, nn.Linear)]
    draw = random.Random(seed)
    length = max(2, steps // 30)

    def span(share: float) -> tuple[int, int]:
        return round(share * steps), round(share * steps) + length

    return [
        testing.Outliers(draw.sample(units, 2), *span(0.30), seed=seed),
        testing.ShiftedData(*span(0.45), vocabulary=demo.VOCABULARY, seed=seed),
        testing.Outliers(draw.sample(units, 2), *span(0.60), seed=seed + 100),
        testing.LearningRateSpike(*span(0.72)),
        testing.DamagedWeight(draw.choice(units), *span(0.84), seed=seed),
    ]


# A run ---------------------------------------------------------------------------------------------------------------


def begin(job: Job) -> tuple[demo.Settings, Setting, demo.Text, nn.Module]:
    """What a run starts from: the demo's settings, the formats, the text, and the model of that seed."""
    names = ("size", "steps", "batch", "seq", "lr", "seed", "dtype")
    settings = demo.Settings(**{name: getattr(job, name) for name in names})
    setting = Setting.parse(job.setting)
    text = demo.load_text(Path(job.text) if job.text else None, job.seq)
    torch.manual_seed(job.seed)
    model = demo.build_model(demo.SIZES[job.size], job.seq)
    return settings, setting, text, model if setting.prepare is None else setting.prepare(model)


def run(job: Job) -> dict[str, Any]:
    """Train and validate; the line of ``job``."""
    start = time.perf_counter()
    settings, setting, text, model = begin(job)
    controller = None
    if job.policy != "full" or setting.transients:
        budget = 0 if job.policy in ("full", "high", "low") else job.budget
        gnmr_fx.instrument(model, setting.recipe, max_active=budget, config=config_of(job))
        controller = gnmr_fx.controller(model)
        if job.policy == "high":
            controller.force("high")
    losses, seconds, spans = train(job, settings, setting, model, controller, text.train)
    return {
        "harness": HARNESS,
        "job": dataclasses.asdict(job),
        "perplexity": demo.perplexity(model, text.validation, settings),
        "train_loss": statistics.fmean(losses[-demo.FINAL_STEPS :]),
        "curve": _thinned(losses, CURVE_POINTS),
        "ms_per_step": 1e3 * statistics.median(seconds),
        "seconds": time.perf_counter() - start,
        "torch": torch.__version__,
        "units": 0 if controller is None else len(controller.units),
        "stats": None if controller is None else controller.stats,
        "detection": None if controller is None or not spans else _detection(controller, spans),
    }


def train(
    job: Job,
    settings: demo.Settings,
    setting: Setting,
    model: nn.Module,
    controller: ModelController | None,
    text: Tensor,
    after_backward: Callable[[], None] = lambda: None,
) -> tuple[list[float], list[float], list[testing.Span]]:
    """Losses in nats per byte and seconds of each step, and the transients met."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, betas=(0.9, 0.95), weight_decay=demo.WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: demo.lr_share(step, job.steps))
    forward: Callable[..., Any] = torch.compile(model) if job.compile else model
    choose = chooser(job, model, controller)
    losses, seconds = [], []
    with contextlib.ExitStack() as stack:
        injected = None
        if controller is not None and setting.transients:
            transients = transients_of(controller, job.steps, job.seed)
            injected = stack.enter_context(testing.inject(model, transients, optimizer))
        for step, batch in enumerate(demo.batches(text, settings)):
            start = time.perf_counter()
            with injected.at(step) if injected else contextlib.nullcontext():
                batch = injected.batch(batch) if injected else batch

                def loss_of(batch: Tensor = batch) -> Tensor:
                    with demo.precision(settings):
                        loss: Tensor = forward(input_ids=batch, labels=batch).loss
                    return loss

                choose(step, loss_of)
                loss = loss_of()
                loss.backward()
                after_backward()
                nn.utils.clip_grad_norm_(model.parameters(), demo.MAX_GRADIENT_NORM)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
        spans = [] if injected is None else list(injected.spans)
    return losses, seconds, spans


def chooser(
    job: Job, model: nn.Module, controller: ModelController | None
) -> Callable[[int, Callable[[], Tensor]], None]:
    """What pins the guards before a step, for policies that do not leave the choice to the controller."""
    draw = random.Random(job.seed)

    def nothing(step: int, loss_of: Callable[[], Tensor]) -> None:
        pass

    def at_random(every: int, step: int, loss_of: Callable[[], Tensor]) -> None:
        assert controller is not None
        if step % every == 0:
            names = [unit.name for unit in controller.units]
            controller.force(draw.sample(names, min(job.budget, len(names))))

    def by_audit(again: int | None, step: int, loss_of: Callable[[], Tensor]) -> None:
        assert controller is not None
        since = step - job.warmup
        if since == 0 or (again and since > 0 and since % again == 0):
            found = gnmr_fx.audit(model, loss_of, each=False, progress=False)
            controller.force([name for name, best in zip(found.units, found.oracle, strict=True) if best])

    return {
        "random": functools.partial(at_random, 1),
        "random-lock": functools.partial(at_random, job.lock),
        "fixed": functools.partial(by_audit, None),
        "oracle": functools.partial(by_audit, job.oracle_every),
    }.get(job.policy, nothing)


def _detection(controller: ModelController, spans: Sequence[testing.Span]) -> dict[str, Any]:
    """Counts over all transients, and of each kind of them."""
    kinds: dict[str, list[testing.Span]] = collections.defaultdict(list)
    for span in spans:
        kinds[type(span.transient).__name__].append(span)
    found = {kind: dataclasses.asdict(testing.score(controller, of_kind)) for kind, of_kind in kinds.items()}
    return {kind: {k: row[k] for k in ("pairs", "hits", "recovered", "delays")} for kind, row in found.items()} | {
        "all": dataclasses.asdict(testing.score(controller, spans, after=2))
    }


def _thinned(values: Sequence[float], count: int) -> list[float]:
    """At most ``count`` means over equal parts."""
    size = max(1, math.ceil(len(values) / count))
    return [round(statistics.fmean(values[at : at + size]), 5) for at in range(0, len(values), size)]


# The file ------------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of runs; none where there is no file. A last line that was cut short is taken off the file.

    Raises:
        SystemExit: with a message, for a line of another harness version, or one that is none.
    """
    if not path.exists():
        return []
    data = path.read_text()
    whole, newline, cut = data.rpartition("\n")
    if cut:
        path.write_text(whole + newline)
        print(f"dropped the last line of {path}, which was cut short", file=sys.stderr)
    lines = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            row = json.loads(line)
            version = row["harness"]
        except (ValueError, TypeError, KeyError) as error:
            raise SystemExit(
                f"error: {path}, line {number}: expected a run as JSON, found {line[:60]!r}; name another file "
                "with --out"
            ) from error
        if version != HARNESS:
            raise SystemExit(
                f"error: {path}, line {number}: expected runs of harness version {HARNESS}, found version {version!r}, "
                "which cannot be compared with these; name another file with --out, or move this one away"
            )
        lines.append(row)
    return lines


def key_of(job: Job | Mapping[str, Any]) -> str:
    """What identifies a run."""
    return json.dumps(dataclasses.asdict(job) if isinstance(job, Job) else job, sort_keys=True)


def process_pool(processes: int) -> concurrent.futures.ProcessPoolExecutor:
    """Processes that share the cores."""
    threads = max(1, (os.cpu_count() or 1) // processes)
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(processes, context, torch.set_num_threads, (threads,))


def run_all(jobs: Sequence[Job], out: Path, processes: int) -> int:
    """Make the runs that ``out`` lacks; returns how many failed."""
    done = {key_of(row["job"]) for row in read(out)}
    todo = [job for job in jobs if key_of(job) not in done]
    print(f"{len(jobs)} runs, {len(jobs) - len(todo)} of them in {out} already", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    failed = 0
    with process_pool(processes) as pool, tqdm(total=len(todo), unit="run", mininterval=1.0) as bar:
        futures = {pool.submit(run, job): job for job in todo}
        try:
            for future in concurrent.futures.as_completed(futures):
                job = futures[future]
                try:
                    row = future.result()
                except concurrent.futures.BrokenExecutor:
                    tqdm.write("stopped: a process was killed (out of memory?); the same command goes on from here")
                    return failed + sum(not f.done() or f.exception() is not None for f in futures)
                except Exception as error:  # one run's failure is no reason to lose the others
                    failed += 1
                    tqdm.write(f"failed: {job.setting}, {job.policy}, seed {job.seed}: {type(error).__name__}: {error}")
                else:
                    with out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    tqdm.write(
                        f"{job.setting}, {job.policy}, seed {job.seed}: perplexity {row['perplexity']:.3f}, "
                        f"{row['seconds']:.0f} s"
                    )
                bar.update()
        except KeyboardInterrupt:
            for future in futures:
                future.cancel()
            raise
    return failed


# What is shown -------------------------------------------------------------------------------------------------------

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""97.5% quantiles of Student's t, for 1 to 30 degrees of freedom."""


def t_quantile(degrees: int) -> float:
    """The 97.5% quantile of Student's t; above 30 degrees of freedom by the first terms of its expansion in 1 / n."""
    if degrees <= len(T_975):
        return T_975[degrees - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def paired_difference(values: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Mean difference of pairs and half the width of its 95% confidence interval (paired t; NaN of one pair)."""
    differences = [a - b for a, b in zip(values, others, strict=True)]
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return mean, math.nan
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return mean, t_quantile(len(differences) - 1) * error


Runs = Mapping[tuple[str, str], Mapping[int, Mapping[str, Any]]]


def groups(rows: Iterable[Mapping[str, Any]]) -> dict[str, Runs]:
    """Runs by what they have in common but setting, policy and seed; then by (setting, policy), and by seed."""
    found: dict[str, dict[tuple[str, str], dict[int, Mapping[str, Any]]]] = {}
    for row in rows:
        job = dict(row["job"])
        setting, policy, seed = (job.pop(name) for name in ("setting", "policy", "seed"))
        of_kind = found.setdefault(json.dumps(job, sort_keys=True), {})
        of_kind.setdefault((setting, policy), {})[seed] = row
    return dict(found)


def quality_rows(runs: Runs, against: str) -> Iterator[list[str]]:
    """A row for each setting and policy: perplexity, and its paired difference to ``against`` and to ``full``."""
    for (setting, policy), by_seed in sorted(runs.items(), key=lambda item: _order(item[0])):
        values = [by_seed[seed]["perplexity"] for seed in sorted(by_seed)]
        spread = statistics.stdev(values) if len(values) > 1 else math.nan
        row = [setting, policy, str(len(values)), f"{statistics.fmean(values):.3f} ± {spread:.3f}"]
        for reference in (against, "full"):
            other = runs.get((setting_of(reference, setting), reference), {})
            seeds = sorted(by_seed.keys() & other.keys())
            row.append("-" if policy == reference or not seeds else _difference(by_seed, other, seeds))
        stats = [run["stats"] for run in by_seed.values() if run["stats"]]
        recovered = [s["recovered"] / s["unit_steps"] for s in stats if s["unit_steps"]]
        switches = [s["switches"] / s["steps"] for s in stats if s["steps"]]
        ms = statistics.median(run["ms_per_step"] for run in by_seed.values())
        row += [f"{100 * statistics.fmean(recovered):.1f}%" if recovered else "-"]
        row += [f"{statistics.fmean(switches):.2f}" if switches else "-", f"{ms:.0f}"]
        yield row


def _difference(by_seed: Mapping[int, Any], other: Mapping[int, Any], seeds: list[int]) -> str:
    mean, half = paired_difference(
        [by_seed[seed]["perplexity"] for seed in seeds], [other[seed]["perplexity"] for seed in seeds]
    )
    return f"{mean:+.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}")


def detection_rows(runs: Runs) -> Iterator[list[str]]:
    """A row for each setting, policy and kind of transient: hits, recoveries, delay, false alarms, over all seeds."""
    for (setting, policy), by_seed in sorted(runs.items(), key=lambda item: _order(item[0])):
        found = [run["detection"] for run in by_seed.values() if run["detection"]]
        for kind in dict.fromkeys(itertools.chain.from_iterable(found)):
            rows = [detection[kind] for detection in found if kind in detection]
            pairs, hits, recovered = (sum(row[name] for row in rows) for name in ("pairs", "hits", "recovered"))
            delays = [delay for row in rows for delay in row["delays"]]
            quiet = sum(row.get("quiet", 0) for row in rows)
            shares = [f"{hits} of {pairs}", f"{100 * hits / pairs:.0f}%", f"{100 * recovered / pairs:.0f}%"]
            delay = f"{statistics.fmean(delays):.1f}" if delays else "-"
            false = f"{1000 * sum(row['false_alarms'] for row in rows) / quiet:.2f}" if quiet else "-"
            yield [setting, policy, kind, *shares, delay, false]


def _order(key: tuple[str, str]) -> tuple[str, int, str]:
    setting, policy = key
    return setting, POLICIES.index(policy) if policy in POLICIES else len(POLICIES), policy


def show(path: Path, against: str) -> str:
    """Tables of all runs in a file."""
    blocks = []
    for common, runs in groups(read(path)).items():
        headers = ["setting", "policy", "n", "perplexity", f"against {against}", "against full", "recovered"]
        headers += ["switches/step", "ms/step"]
        blocks.append(", ".join(f"{name} {value}" for name, value in json.loads(common).items() if value != ""))
        blocks.append(_table(quality_rows(runs, against), headers))
        detected = list(detection_rows(runs))
        if detected:
            headers = ["setting", "policy", "transient", "hits", "hit rate", "recovered", "delay", "false alarms/1000"]
            blocks.append(_table(detected, headers))
    if not blocks:
        return f"no runs in {path}"
    blocks.append("± after a mean: standard deviation over seeds; after a difference: 95% interval, paired by seed.")
    return "\n\n".join(blocks)


def _table(rows: Iterable[Sequence[str]], headers: Sequence[str]) -> str:
    return tabulate(rows, headers, disable_numparse=True)


def plot(path: Path, to: Path, only: Sequence[str] = ()) -> None:
    """A panel for each setting: the perplexity of each run, the mean of each policy, and that of full precision.

    Args:
        path: of the runs; the largest grid among them is drawn.
        to: the picture.
        only: settings to draw, in this order; by default all but those that only serve as a reference.

    Raises:
        SystemExit: with a message, where there is nothing to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = groups(read(path))
    if not found:
        raise SystemExit(f"error: expected runs in {path}, found none; run the grid first")
    runs = max(found.values(), key=lambda of_kind: sum(map(len, of_kind.values())))  # the largest grid
    references = {setting_of(policy, setting) for policy in ("full", "high") for setting, _ in runs}
    there = {setting for setting, _ in runs}
    absent = [setting for setting in only if setting not in there]
    if absent:
        raise SystemExit(f"error: expected runs of {', '.join(absent)} in {path}, found none; run them first")
    settings = list(only) or sorted(there - references)
    if not settings:
        raise SystemExit(f"error: expected runs in {path} of other policies than full and high, found none")
    figure = Figure(figsize=(3.2 * len(settings) + 1.5, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, setting in zip(figure.subplots(1, len(settings), squeeze=False)[0], settings, strict=True):
        policies = sorted((policy for own, policy in runs if own == setting), key=lambda p: _order((setting, p)))
        for place, policy in enumerate(policies):
            values = [run["perplexity"] for run in runs[setting, policy].values()]
            axes.plot([place] * len(values), values, "o", color="#9ecae8", markersize=4)
            axes.plot(place, statistics.fmean(values), "_", color="#0b4f8a", markersize=16, markeredgewidth=2)
        full = runs.get((setting_of("full", setting), "full"))
        if full:
            mean = statistics.fmean(run["perplexity"] for run in full.values())
            axes.axhline(mean, color="#c0392b", linewidth=0.9, linestyle="--")
            axes.text(0, mean, " full precision", color="#c0392b", fontsize=6, va="bottom")
        labels = [re.sub("[:,]", "\n", policy) for policy in policies]
        axes.set_xticks(range(len(policies)), labels, rotation=60, ha="right", fontsize=6)
        axes.tick_params(axis="y", labelsize=7)
        axes.set_title(setting, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supylabel("validation perplexity per byte, seeds and mean", fontsize=8)
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=150)


# Command line --------------------------------------------------------------------------------------------------------


def jobs_of(arguments: argparse.Namespace) -> list[Job]:
    """The grid, seed by seed, so that a grid that is stopped holds whole pairs."""
    names = [field.name for field in dataclasses.fields(Job) if field.name not in ("setting", "policy", "seed")]
    shared = {name: getattr(arguments, name) for name in names}
    found: dict[Job, None] = {}
    for seed, setting, policy in itertools.product(arguments.seeds, arguments.settings, arguments.policies):
        found[Job(setting=setting_of(policy, setting.name), policy=policy, seed=seed, **shared)] = None
    return list(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, or show what was run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--settings", nargs="+", type=Setting.parse, metavar="NAME", help=f"default: {' '.join(SETTINGS)}")
    add("--policies", nargs="+", default=list(POLICIES), metavar="NAME")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    for name, default in (("steps", 600), ("batch", 16), ("seq", 128), ("budget", 5), ("lock", 50), ("warmup", 20)):
        add(f"--{name}", type=int, default=default)
    add("--signal-every", type=int, default=10)
    add("--oracle-every", type=int, default=25)
    add("--size", choices=demo.SIZES, default="tiny")
    add("--lr", type=float, default=1e-3)
    add("--dtype", choices=("fp32", "bf16"), default="fp32")
    add("--text", default="", help="own text, as in examples/pretrain_tiny_llama.py")
    add("--compile", action="store_true", help="torch.compile each run's model (a minute more for each)")
    add("--jobs", type=int, default=1, help="processes at a time")
    add("--out", type=Path, default=Path("out/quality.jsonl"))
    add("--show", action="store_true", help="show what is in --out, and run nothing")
    add("--against", default="low", help="the policy that others are compared with")
    add("--plot", type=Path, help="draw what is in --out to this file, and run nothing")
    arguments = parser.parse_args(argv)
    if arguments.show or arguments.plot:
        if arguments.show:
            print(show(arguments.out, arguments.against))
        if arguments.plot:
            plot(arguments.out, arguments.plot, [setting.name for setting in arguments.settings or ()])
            print(f"plot: {arguments.plot}")
        return 0
    arguments.settings = arguments.settings or [Setting.parse(name) for name in SETTINGS]
    jobs = jobs_of(arguments)
    try:
        for job in jobs:
            config_of(job)
    except (argparse.ArgumentTypeError, gnmr_fx.GnmrError) as error:
        parser.error(str(error))
    failed = run_all(jobs, arguments.out, max(1, arguments.jobs))
    print(f"\n{show(arguments.out, arguments.against)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
