"""Pretrain a tiny Llama with budgeted recovery, from scratch, on any machine and without a download.

The model is a Hugging Face ``LlamaForCausalLM`` with a vocabulary of 256 bytes. The text is what every machine with
Python has: the source files of its standard library, split by file into training and validation (``--text`` takes your
own instead). gnmr-fx needs one line, marked below; the rest is a training loop like any other.

    python examples/pretrain_tiny_llama.py                  # about 3 minutes on 2 CPU cores
    python examples/pretrain_tiny_llama.py --budget 0.1 --alpha 2 --lock 20
    python examples/pretrain_tiny_llama.py --scope all
    python examples/pretrain_tiny_llama.py --compare --recipe int2/tensor:int8

It ends with the validation perplexity per byte, the table of recoverable operators, the report of what was recovered,
when and why, and a plot of it. ``--compare`` trains the same model on the same batches under five policies instead:
full precision, every unit on the high-fidelity format, every unit on the low-cost format, GNMR, and a random choice of
units of the same budget. Ctrl-C ends the training early and still prints the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import math
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import gnmr_fx
from gnmr_fx.config import resolve_budget
from gnmr_fx.recipe import DEFAULT_RECIPE, get_recipe
from gnmr_fx.report import Report, Table
from gnmr_fx.runtime import Controller

DEFAULTS = gnmr_fx.GnmrConfig()
STEPS, STEPS_COMPARE = 500, 250
VOCABULARY = 256

WEIGHT_DECAY = 0.1
MAX_GRADIENT_NORM = 1.0
LR_WARMUP_SHARE = 0.05
LR_FLOOR_SHARE = 0.1

MAX_TEXT_BYTES = 4_000_000
VALIDATION_PART = 10
"""One file in so many validates."""
VALIDATION_WINDOWS = 256
FINAL_STEPS = 20
"""The final training loss is the mean over this many last steps."""

SKIPPED_FOLDERS = frozenset(
    [
        *("__pycache__", "dist-packages", "site-packages", "test", "tests"),
        *("encodings", "idlelib", "lib2to3", "pydoc_data", "turtledemo"),  # tables, generated, or not in every release
    ]
)


@dataclass(frozen=True)
class Size:
    """The dimensions of a Llama. Each layer has seven projections, so seven recoverable units."""

    layers: int
    hidden: int
    intermediate: int
    heads: int


SIZES: Mapping[str, Size] = MappingProxyType(
    {
        "nano": Size(layers=2, hidden=64, intermediate=192, heads=2),  # 0.1 M parameters
        "tiny": Size(layers=4, hidden=128, intermediate=384, heads=4),  # 0.9 M
        "small": Size(layers=6, hidden=256, intermediate=768, heads=8),  # 5 M
        "medium": Size(layers=8, hidden=512, intermediate=1536, heads=8),  # 27 M
        "large": Size(layers=12, hidden=1024, intermediate=2816, heads=16),  # 155 M
    }
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What one call does; the fields are the command line's."""

    size: str = "tiny"
    steps: int = STEPS
    batch: int = 16
    seq: int = 128
    recipe: gnmr_fx.Recipe = field(default_factory=get_recipe)
    scope: Literal["projections", "all"] = "projections"
    budget: int | float = 5
    signal: Literal["gnmr", "error", "gap"] | None = None
    alpha: float | None = None
    beta: float | None = None
    window: int = DEFAULTS.window
    lock: int = DEFAULTS.lock_steps
    warmup: int = DEFAULTS.warmup_steps
    lr: float = 1e-3
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: Literal["fp32", "bf16"] = "fp32"
    seed: int = 0
    compile: bool = True
    text: Path | None = None
    out: Path = Path("out")
    compare: bool = False

    @property
    def config(self) -> gnmr_fx.GnmrConfig:
        """The controller's part of the settings; what is None is as recommended for the recipe."""
        given = {name: getattr(self, name) for name in ("signal", "alpha", "beta") if getattr(self, name) is not None}
        return gnmr_fx.GnmrConfig.recommended(
            self.recipe, window=self.window, lock_steps=self.lock, warmup_steps=self.warmup, **given
        )


@dataclass(frozen=True)
class Policy:
    """Which path units run on: under ``recipe`` (None = not instrumented), at most ``budget`` units recovered.

    ``redraw`` chooses the units at random every so many steps; None leaves the choice to the controller.
    """

    name: str
    recipe: gnmr_fx.Recipe | None
    budget: int | float = 0
    redraw: int | None = None


@dataclass(frozen=True)
class Text:
    """Bytes to train on and to validate on, each a 1-D uint8 tensor, and where they come from."""

    train: Tensor
    validation: Tensor
    source: str


@dataclass
class Trace:
    """What happened in each training step: mean loss in nats per byte, units on the recovery path, seconds."""

    losses: list[float] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    interrupted: bool = False


@dataclass(frozen=True)
class Run:
    """A finished training run.

    Attributes:
        policy: its name.
        trace: what happened in each step.
        perplexity: per byte of the validation text.
        table, report: gnmr-fx's own; None where the model was not instrumented.
    """

    policy: str
    trace: Trace
    perplexity: float
    table: Table | None
    report: Report | None

    @property
    def final_loss(self) -> float:
        """Mean training loss of the last steps, in nats per byte; NaN where there was no step."""
        last = self.trace.losses[-FINAL_STEPS:]
        return statistics.fmean(last) if last else math.nan

    @property
    def ms_per_step(self) -> float:
        """Median time of a step in milliseconds, which leaves compilation out; NaN where there was no step."""
        return statistics.median(self.trace.seconds) * 1e3 if self.trace.seconds else math.nan

    @property
    def saved_bytes(self) -> float | None:
        """Bytes that units keep for the backward, mean over the steps; None where that is not known."""
        if self.table is None or not self.trace.losses:
            return None
        recovered = sum((row.bytes_high or 0) * row.steps_recovered for row in self.table.units)
        low: int = self.table.totals["bytes_low"]
        return low + recovered / len(self.trace.losses)


@dataclass(frozen=True)
class Result:
    """What :func:`main` returns: the settings, the finished runs (one, or one a policy) and the plot, if drawn."""

    settings: Settings
    runs: tuple[Run, ...]
    plot: Path | None

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C cut it short."""
        return any(run.trace.interrupted for run in self.runs)


# Model and text ------------------------------------------------------------------------------------------------------


def build_model(size: Size, seq: int) -> nn.Module:
    """A Llama over bytes, with random weights drawn from torch's global generator."""
    # transformers imports torchao, which warns of extensions it has no use for here.
    for noisy in ("torchao", "torch.utils._pytree"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=seq,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def load_text(path: Path | None, min_bytes: int) -> Text:
    """Text from a file (its last tenth validates), a folder (a tenth of its files), or Python's standard library.

    Files are split and ordered by a hash of their relative names, which does not depend on the machine.

    Raises:
        ValueError: where there is too little of it.
    """
    root = path or Path(sysconfig.get_paths()["stdlib"])
    if root.is_file():
        data = root.read_bytes()[:MAX_TEXT_BYTES]
        cut = len(data) - len(data) // VALIDATION_PART
        train, validation = data[:cut], data[cut:]
        source = str(root)
    else:
        parts: dict[bool, list[bytes]] = {False: [], True: []}
        total = 0
        for digest, file in sorted((name_hash(file, root), file) for file in text_files(root, "*" if path else "*.py")):
            data = file.read_bytes()
            if b"\0" not in data:
                parts[digest[-1] % VALIDATION_PART == 0].append(data)
                total += len(data)
            if total >= MAX_TEXT_BYTES:
                break
        train, validation = b"".join(parts[False]), b"".join(parts[True])
        source = f"{sum(map(len, parts.values()))} files of {path or 'the Python standard library'}"
    if min(len(train), len(validation)) < min_bytes:
        raise ValueError(
            f"expected at least {min_bytes} bytes of text to train on and as many to validate on, found {len(train)} "
            f"and {len(validation)} in {root}; pass a file or a folder with more text as --text, or a smaller --seq"
        )
    return Text(as_tensor(train), as_tensor(validation), source)


def text_files(root: Path, pattern: str) -> Iterator[Path]:
    """Files below ``root`` that are worth reading: no tests, installed packages, caches or hidden files."""
    for file in root.rglob(pattern):
        parts = file.relative_to(root).parts
        if not SKIPPED_FOLDERS.intersection(parts) and not any(p.startswith(".") for p in parts) and file.is_file():
            yield file


def name_hash(file: Path, root: Path) -> bytes:
    """A hash of the file's name relative to ``root``."""
    return hashlib.sha256(file.relative_to(root).as_posix().encode()).digest()


def as_tensor(data: bytes) -> Tensor:
    """The bytes as a 1-D uint8 tensor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batches(text: Tensor, settings: Settings) -> Iterator[Tensor]:
    """Random windows of the text, int64 [batch, seq] each, one a step; the same for the same seed."""
    generator = torch.Generator().manual_seed(settings.seed)
    offsets = torch.arange(settings.seq)
    for _ in range(settings.steps):
        starts = torch.randint(len(text) - settings.seq + 1, (settings.batch, 1), generator=generator)
        yield text[starts + offsets].long().to(settings.device)


# Training ------------------------------------------------------------------------------------------------------------


def run_policy(policy: Policy, text: Text, settings: Settings) -> Run:
    """Train a model from scratch under a policy, and validate it."""
    torch.manual_seed(settings.seed)
    model = build_model(SIZES[settings.size], settings.seq).to(settings.device)

    if policy.recipe is not None:
        gnmr_fx.instrument(  # the one line
            model, policy.recipe, max_active=policy.budget, scope=settings.scope, config=settings.config
        )

    controller = gnmr_fx.controller(model) if policy.recipe is not None else None
    trace = follow(optimize(model, batches(text.train, settings), settings), policy, controller, settings)
    return Run(
        policy.name,
        trace,
        perplexity(model, text.validation, settings),
        gnmr_fx.table(model) if controller else None,
        gnmr_fx.report(model) if controller else None,
    )


def optimize(model: nn.Module, data: Iterable[Tensor], settings: Settings) -> Iterator[float]:
    """A plain training loop, in which nothing knows of gnmr-fx. Yields the loss of each step, in nats per byte."""
    forward: Callable[..., Any] = torch.compile(model) if settings.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_share(step, settings.steps))
    for batch in data:
        with precision(settings):
            loss = forward(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        yield loss.item()


def follow(losses: Iterator[float], policy: Policy, controller: Controller | None, settings: Settings) -> Trace:
    """Run the training loop behind ``losses`` to its end, or to Ctrl-C, with a progress bar."""
    trace = Trace()
    units = [unit.name for unit in controller.units] if controller else []
    max_active = min(int(controller.max_active), len(units)) if controller else 0
    draw = random.Random(settings.seed)
    refresh = 0.1 if sys.stderr.isatty() else 10.0  # seconds between two states of the bar; fewer of them in a log
    with tqdm(total=settings.steps, mininterval=refresh, unit="step") as bar:
        bar.set_description(f"{policy.name}: compiling" if settings.compile else policy.name)
        try:
            for step in range(settings.steps):
                if controller and policy.redraw and step % policy.redraw == 0:
                    controller.force(draw.sample(units, max_active))
                active = len(controller.active) if controller else 0
                start = time.perf_counter()
                loss = next(losses)
                trace.seconds.append(time.perf_counter() - start)
                trace.losses.append(loss)
                trace.active.append(active)
                bar.set_description(policy.name, refresh=False)
                bar.set_postfix(loss=f"{loss:.3f}", active=f"{active}/{max_active}", refresh=False)
                bar.update()
        except KeyboardInterrupt:
            trace.interrupted = True
    return trace


def lr_share(step: int, steps: int) -> float:
    """Learning rate of a step (from 0) as a share of its peak: a linear warm-up, then half a cosine to the floor."""
    warmup = max(1, round(steps * LR_WARMUP_SHARE))
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return LR_FLOOR_SHARE + (1 - LR_FLOOR_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))


def precision(settings: Settings) -> contextlib.AbstractContextManager[Any]:
    """Autocast to bf16 where asked; weights stay in fp32."""
    if settings.dtype == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(settings.device.type, torch.bfloat16)


@torch.no_grad()
def perplexity(model: nn.Module, text: Tensor, settings: Settings) -> float:
    """Perplexity per byte in fp32, over windows spread evenly over the text. Leaves the model in train mode."""
    count = min(VALIDATION_WINDOWS, len(text) // settings.seq)
    starts = torch.linspace(0, len(text) - settings.seq, count).long()
    windows = text[starts[:, None] + torch.arange(settings.seq)].long().to(settings.device)
    model.eval()
    losses = [model(input_ids=part, labels=part).loss.item() * len(part) for part in windows.split(settings.batch)]
    model.train()
    try:
        return math.exp(sum(losses) / count)
    except OverflowError:
        return math.inf


# The two things to do ------------------------------------------------------------------------------------------------


def run_one(text: Text, settings: Settings) -> Result:
    """Train under GNMR; print and plot what happened."""
    run = run_policy(gnmr_policy(settings), text, settings)
    plot = show(run, settings)
    print(
        f"\nafter {len(run.trace.losses)} steps: training loss {run.final_loss:.3f} nats per byte, "
        f"validation perplexity {run.perplexity:.3f} per byte; {run.ms_per_step:.0f} ms per step"
    )
    return Result(settings, (run,), plot)


def run_compare(text: Text, settings: Settings) -> Result:
    """Train under each policy, from the same weights on the same batches; print a table of them all."""
    runs: list[Run] = []
    plot = None
    for policy in policies(settings):
        runs.append(run_policy(policy, text, settings))
        if policy == gnmr_policy(settings):
            plot = show(runs[-1], settings)
        if runs[-1].trace.interrupted:
            break
        torch.compiler.reset()  # each policy is compiled by itself
    print(f"\n{comparison(runs)}")
    return Result(settings, tuple(runs), plot)


def gnmr_policy(settings: Settings) -> Policy:
    """The controller's choice, within the budget."""
    signal = settings.config.signal
    return Policy("GNMR" if signal == "gnmr" else f"by {signal}", settings.recipe, settings.budget)


def policies(settings: Settings) -> Iterator[Policy]:
    """What ``--compare`` runs."""
    low, high = settings.recipe.low, settings.recipe.high
    yield Policy(f"full precision ({settings.dtype})", None)
    yield Policy(f"all {high.label}", gnmr_fx.Recipe(high, high))
    yield Policy(f"all {low.label}", settings.recipe, 0)
    yield gnmr_policy(settings)
    yield Policy("random choice", settings.recipe, settings.budget, redraw=settings.lock)


def comparison(runs: Sequence[Run]) -> str:
    """A table with a row for each run."""
    full: int | None = next((run.table.totals["bytes_full"] for run in runs if run.table), None)
    headers = ("policy", "train loss", "val. perplexity", "saved MiB", "recovered unit-steps", "ms/step")
    rows = [
        (
            run.policy,
            f"{run.final_loss:.3f}",
            f"{run.perplexity:.3f}",
            mebibytes(run.saved_bytes if run.table else full),
            f"{sum(run.trace.active)} of {len(run.table.units) * len(run.trace.losses)}" if run.table else "-",
            f"{run.ms_per_step:.0f}",
        )
        for run in runs
    ]
    table = tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * (len(headers) - 1)))
    return f"{table}\n\nsaved: by units for the backward, mean per step. ms/step: median, compilation left out."


def mebibytes(count: float | None) -> str:
    """``"1.25"``, or ``"-"`` where the number of bytes is not known."""
    return "-" if count is None else f"{count / 2**20:.2f}"


def show(run: Run, settings: Settings) -> Path | None:
    """Print a run's table and report; save the plot and return its path, or None where it cannot be drawn."""
    assert run.report is not None
    print(f"\n{run.table}\n\n{run.report}\n")
    try:
        plot = run.report.plot(settings.out / "pretrain_tiny_llama.png")
    except gnmr_fx.MissingDependencyError as error:
        print(f"no plot: {error}")
        return None
    print(f"plot: {plot}")
    return plot


# Command line --------------------------------------------------------------------------------------------------------


def integer(minimum: int) -> Callable[[str], int]:
    """A type for argparse: a whole number of at least ``minimum``."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = minimum - 1
        if number < minimum:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {minimum}, found {text!r}")
        return number

    return parse


def positive(text: str) -> float:
    """A type for argparse: a positive number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, found {text!r}")
    return number


def budget(text: str) -> int | float:
    """A type for argparse: ``5`` is five units, ``0.2`` a fifth of them."""
    number: int | float
    try:
        number = int(text)
    except ValueError:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
    try:
        resolve_budget(number, 1)
    except gnmr_fx.BudgetError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return number


def recipe(text: str) -> gnmr_fx.Recipe:
    """A type for argparse: the name of a recipe, or two formats as ``LOW:HIGH``."""
    try:
        if ":" not in text:
            return get_recipe(text)
        low, high = text.split(":", 1)
        return gnmr_fx.Recipe(gnmr_fx.Format.parse(low), gnmr_fx.Format.parse(high))
    except gnmr_fx.GnmrError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def device(text: str) -> torch.device:
    """A type for argparse: a device that this machine has."""
    try:
        found = torch.device(text)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"cannot use {text!r}: {str(error).splitlines()[0]}") from error
    return found


def existing(text: str) -> Path:
    """A type for argparse: a file or folder that exists."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"expected a file or a folder, found nothing at {text!r}")
    return path


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    base = Settings()
    parser = argparse.ArgumentParser(
        description="Pretrain a tiny byte-level Llama with budgeted recovery. Nothing is downloaded."
    )
    shown, recommended = " (default: %(default)s)", " (default: as recommended for the recipe)"

    add = parser.add_argument_group("model and training").add_argument
    add("--size", choices=SIZES, default=base.size, help=f"size of the model{shown}")
    add("--steps", type=integer(1), metavar="N", help=f"default: {STEPS}, or {STEPS_COMPARE} a policy with --compare")
    add("--batch", type=integer(1), metavar="N", default=base.batch, help=f"sequences in a batch{shown}")
    add("--seq", type=integer(2), metavar="N", default=base.seq, help=f"bytes in a sequence{shown}")
    add("--lr", type=positive, metavar="X", default=base.lr, help=f"peak learning rate{shown}")
    add("--seed", type=integer(0), metavar="N", default=base.seed, help=f"of weights and batches{shown}")
    add("--text", type=existing, metavar="PATH", help="own text: a file, or a folder, which is split by file")
    add("--device", type=device, help="default: cuda where there is one, else cpu")
    add("--dtype", choices=("fp32", "bf16"), help="bf16 is autocast, and the default on cuda; elsewhere fp32 is")
    add("--no-compile", dest="compile", action="store_false", help="eager mode, without torch.compile")

    add = parser.add_argument_group("recovery").add_argument
    add(
        "--recipe",
        type=recipe,
        default=DEFAULT_RECIPE,
        help=f"{', '.join(gnmr_fx.RECIPES)}, or two formats LOW:HIGH such as int2/tensor:int8/group128{shown}",
    )
    add(
        "--scope",
        choices=("projections", "all"),
        default=base.scope,
        help=f"store what projections read, or all that autograd keeps{shown}",
    )
    add(
        "--budget",
        type=budget,
        metavar="N",
        default=base.budget,
        help=f"most units on the recovery path at a time: a number (5) or a share of them (0.2){shown}",
    )
    add("--signal", choices=("gnmr", "error", "gap"), help=f"what the controller watches{recommended}")
    add("--alpha", type=float, metavar="X", help=f"threshold on GNMR, or on another signal{recommended}")
    add("--beta", type=float, metavar="X", help=f"threshold on its change{recommended}")
    add("--window", type=int, metavar="N", default=base.window, help=f"steps that delta-GNMR looks back on{shown}")
    add("--lock", type=int, metavar="N", default=base.lock, help=f"steps that a unit stays once recovered{shown}")
    add("--warmup", type=int, metavar="N", default=base.warmup, help=f"first steps, when no threshold fires{shown}")

    add = parser.add_argument_group("what to do").add_argument
    add(
        "--compare",
        action="store_true",
        help="train under five policies in turn and compare them (slow)",
    )
    add("--out", type=Path, metavar="DIR", default=base.out, help=f"where the plot goes{shown}")
    return parser


def parse(argv: Sequence[str] | None = None) -> Settings:
    """Settings from a command line (None = the process's own). Exits with a message on a bad one."""
    parser = build_parser()
    options = vars(parser.parse_args(argv))
    options["device"] = options["device"] or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options["dtype"] = options["dtype"] or ("bf16" if options["device"].type == "cuda" else "fp32")
    options["steps"] = options["steps"] or (STEPS_COMPARE if options["compare"] else STEPS)
    settings = Settings(**options)
    try:
        _ = settings.config
    except gnmr_fx.ConfigError as error:
        parser.error(str(error))
    return settings


def main(argv: Sequence[str] | None = None) -> Result:
    """Run the example.

    Args:
        argv: the command line's arguments; None = the process's own.
    """
    settings = parse(argv)
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
        text = load_text(settings.text, settings.seq)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    print(f"text: {text.source}; {len(text.train)} bytes to train on, {len(text.validation)} to validate on")
    print(f"model: {settings.size} Llama, {settings.dtype} on {settings.device}; recipe: {settings.recipe}", flush=True)
    return (run_compare if settings.compare else run_one)(text, settings)


if __name__ == "__main__":
    sys.exit(130 if main().interrupted else 0)
