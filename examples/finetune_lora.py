"""Fine-tune with LoRA over a base in 8, 4 or 2 bits, with budgeted recovery; on any machine, without a download.

A small byte-level Llama is first trained on one kind of text, Python's standard library, and then tuned with adapters
(PEFT) on another, the English of Python's language reference (``pydoc`` topics). The tuning starts from the same
weights under several policies: the base as it is; the base stored in a low-cost format throughout; gnmr-fx, which moves
at most ``--budget`` projections at a time to their exact weights; and a random choice of as many. gnmr-fx needs one
line, marked below; the rest is PEFT and a training loop like any other.

    python examples/finetune_lora.py                                   # about 3 minutes on 2 CPU cores
    python examples/finetune_lora.py --low int8/token nf4 --seeds 0 1 2
    python examples/finetune_lora.py --model DIR --device cuda --seq 1024 --batch 4 --low nf4 --budget 0.05

It ends with one table: the loss on validation texts of both kinds, with the exact base (as after PEFT's merge) and with
the stored one, and what the frozen weights take on their device. ``--model`` names a local folder of a Hugging Face
model, which is tuned in place of the small one; nothing is trained before then.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pretrain_tiny_llama import (
    MAX_GRADIENT_NORM,
    SIZES,
    VALIDATION_PART,
    Text,
    as_tensor,
    budget,
    build_model,
    device,
    existing,
    integer,
    load_text,
    lr_share,
    positive,
)
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import gnmr_fx

VALIDATION_WINDOWS = 128
RANK = 8
PRETRAIN_LR = 2e-3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What one call does; the fields are the command line's."""

    size: str = "tiny"
    model: Path | None = None
    pretrain_steps: int = 300
    steps: int = 100
    batch: int = 8
    seq: int = 128
    low: tuple[gnmr_fx.Recipe, ...] = ()
    budget: int | float = 5
    alpha: float = 1.5
    beta: float = 1.5
    window: int = 8
    lock: int = 20
    warmup: int = 10
    lr: float = 1e-3
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    seeds: tuple[int, ...] = (0,)
    text: Path | None = None
    tune_text: Path | None = None

    @property
    def config(self) -> gnmr_fx.GnmrConfig:
        """The controller's part of the settings."""
        return gnmr_fx.GnmrConfig(
            alpha=self.alpha,
            beta=self.beta,
            window=self.window,
            lock_steps=self.lock,
            warmup_steps=self.warmup,
        )


@dataclass(frozen=True)
class Policy:
    """How the base is kept: under ``recipe`` (None = as it is), at most ``budget`` projections recovered.

    ``redraw`` chooses them at random every so many steps; None leaves the choice to the controller.
    """

    name: str
    recipe: gnmr_fx.Recipe | None = None
    budget: int | float = 0
    redraw: int | None = None


@dataclass(frozen=True)
class Run:
    """A finished tuning run of one seed; losses in nats per token (a byte, for the small model).

    Attributes:
        policy: its name.
        seed: of the weights, the adapters and the batches.
        tuned, first: validation loss on the text tuned on, and on the other one, with the exact base.
        stored: the former with the base as the policy stores it; NaN where that is the exact one.
        device_mib: frozen weights on their device, the largest recovered ones of the budget included.
        recovered: unit-steps on the recovery path.
        losses: training loss of each step.
    """

    policy: str
    seed: int
    tuned: float
    first: float
    stored: float
    device_mib: float
    recovered: int
    losses: tuple[float, ...]


# Model and texts -----------------------------------------------------------------------------------------------------


def base_model(settings: Settings, first: Text, seed: int) -> nn.Module:
    """The model to tune: the one in ``--model``, or a small one trained on the first kind of text."""
    dtype = DTYPES[settings.dtype]
    if settings.model is not None:
        from transformers import AutoModelForCausalLM

        loaded: nn.Module = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype)
        return loaded.to(settings.device)
    torch.manual_seed(seed)
    model = build_model(SIZES[settings.size], settings.seq).to(settings.device)
    data = batches(first.train, settings, seed, settings.pretrain_steps)
    for _ in train(model, data, settings, PRETRAIN_LR, settings.pretrain_steps, f"seed {seed}: pre-training"):
        pass
    return model.to(dtype)


def with_adapters(model: nn.Module, seed: int) -> nn.Module:
    """A copy of the model with LoRA adapters on all its projections, the same ones for the same seed."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules="all-linear")
    return get_peft_model(copy.deepcopy(model), config).train()


def reference_text(min_bytes: int) -> Text:
    """The topics of Python's language reference that ``pydoc`` prints, one in ten of them to validate on.

    Raises:
        ValueError: where this Python comes without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError("this Python has no pydoc topics; pass a file or a folder as --tune-text") from error
    parts: dict[bool, list[str]] = {False: [], True: []}
    for number, name in enumerate(sorted(topics)):
        parts[number % VALIDATION_PART == 0].append(topics[name])
    train, validation = (as_tensor("\n\n".join(parts[part]).encode()) for part in (False, True))
    if min(len(train), len(validation)) < min_bytes:
        raise ValueError(f"expected at least {min_bytes} bytes of pydoc topics; pass --tune-text, or a smaller --seq")
    return Text(train, validation, f"{len(topics)} topics of the Python language reference")


def tokenized(text: Text, settings: Settings) -> Text:
    """Bytes as they are, or, for a model of one's own, the tokens of its tokenizer."""
    if settings.model is None:
        return text
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.model)

    def tokens(part: Tensor) -> Tensor:
        decoded = part.numpy().tobytes().decode(errors="replace")
        return torch.tensor(tokenizer(decoded, verbose=False)["input_ids"])

    return replace(text, train=tokens(text.train), validation=tokens(text.validation))


def batches(text: Tensor, settings: Settings, seed: int, steps: int) -> Iterator[Tensor]:
    """Random windows of the text, int64 [batch, seq] each, one a step; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(settings.seq)
    for _ in range(steps):
        starts = torch.randint(len(text) - settings.seq + 1, (settings.batch, 1), generator=generator)
        yield text[starts + offsets].long().to(settings.device)


# Training ------------------------------------------------------------------------------------------------------------


def train(
    model: nn.Module, data: Iterator[Tensor], settings: Settings, lr: float, steps: int, title: str
) -> Iterator[float]:
    """A plain training loop, in which nothing knows of gnmr-fx. Yields the loss of each step."""
    forward: Callable[..., Any] = torch.compile(model) if settings.compile else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_share(step, steps))
    with tqdm(total=steps, desc=title, unit="step", mininterval=0.1 if sys.stderr.isatty() else 30.0) as bar:
        for batch in data:
            loss = forward(input_ids=batch, labels=batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            bar.update()
            yield loss.item()


def tune(model: nn.Module, policy: Policy, texts: Sequence[Text], settings: Settings, seed: int) -> Run:
    """Tune adapters under a policy, and validate them."""
    first, second = texts
    model = with_adapters(model, seed)

    if policy.recipe is not None:
        gnmr_fx.instrument(model, policy.recipe, max_active=policy.budget, config=settings.config)  # the one line

    controller = gnmr_fx.controller(model) if policy.recipe is not None else None
    names = [unit.name for unit in controller.units] if controller else []
    draw = random.Random(seed)
    losses = train(
        model,
        batches(second.train, settings, seed + 1, settings.steps),
        settings,
        settings.lr,
        settings.steps,
        f"seed {seed}: {policy.name}",
    )
    found = []
    for step in range(settings.steps):
        if controller and policy.redraw and step % policy.redraw == 0:
            controller.force(draw.sample(names, min(int(controller.max_active), len(names))))
        found.append(next(losses))
    next(losses, None)  # ends its progress bar
    recovered, device_bytes, stored = 0, frozen_bytes(model), math.nan
    if policy.recipe is not None and policy.recipe.frozen is not None:
        totals = gnmr_fx.table(model).totals
        device_bytes = totals["bytes_low"] + totals["bytes_recovery_max"]
        recovered = gnmr_fx.controller(model).stats["recovered"]
        gnmr_fx.uninstrument(model)
        as_stored = replace(policy.recipe, frozen=replace(policy.recipe.frozen, evaluate="low"))
        gnmr_fx.instrument(model, as_stored, max_active=0)
        stored = validation_loss(model, second.validation, settings)
        gnmr_fx.uninstrument(model)
    return Run(
        policy.name,
        seed,
        validation_loss(model, second.validation, settings),
        validation_loss(model, first.validation, settings),
        stored,
        device_bytes / 2**20,
        recovered,
        tuple(found),
    )


def frozen_bytes(model: nn.Module) -> int:
    """Of the frozen weights that a recipe would store: those of linear layers, without the output head."""
    modules = (m for name, m in model.named_modules() if isinstance(m, nn.Linear) and not name.endswith("lm_head"))
    return sum(m.weight.nbytes for m in modules if not m.weight.requires_grad)


@torch.no_grad()
def validation_loss(model: nn.Module, text: Tensor, settings: Settings) -> float:
    """Mean loss per token, over windows spread evenly over the text. Leaves the model in train mode."""
    count = min(VALIDATION_WINDOWS, len(text) - settings.seq + 1)
    starts = torch.linspace(0, len(text) - settings.seq, count).long()
    windows = text[starts[:, None] + torch.arange(settings.seq)].long().to(settings.device)
    model.eval()
    losses = [model(input_ids=part, labels=part).loss.item() * len(part) for part in windows.split(settings.batch)]
    model.train()
    return sum(losses) / count


# What is compared ----------------------------------------------------------------------------------------------------


def policies(settings: Settings) -> Iterator[Policy]:
    """The base as it is, then three policies for each low-cost format."""
    yield Policy(settings.dtype)
    for recipe in settings.low:
        assert recipe.frozen is not None
        label = recipe.frozen.label
        yield Policy(f"{label}", recipe)
        yield Policy(f"GNMR {label} / {settings.dtype}", recipe, settings.budget)
        yield Policy(f"random {label} / {settings.dtype}", recipe, settings.budget, redraw=settings.lock)


def comparison(runs: Sequence[Run], untuned: Sequence[tuple[float, float]], settings: Settings) -> str:
    """A table with a row for each policy: means over the seeds, and for several of them the sample deviation."""
    headers = (
        "policy",
        "tuned text,\nexact base",
        f"minus {settings.dtype},\nsame seed",
        "tuned text,\nstored base",
        "first text,\nexact base",
        "base on\ndevice, MiB",
        "recovered\nunit-steps",
    )
    before, after = zip(*untuned, strict=True)
    rows = [("not tuned", spread(after), "-", "-", spread(before), "-", "-")]
    exact = {run.seed: run.tuned for run in runs if run.policy == settings.dtype}
    for policy in dict.fromkeys(run.policy for run in runs):
        own = [run for run in runs if run.policy == policy]
        rows.append(
            (
                policy,
                spread([run.tuned for run in own]),
                spread([run.tuned - exact[run.seed] for run in own], "+.4f"),
                spread([run.stored for run in own]),
                spread([run.first for run in own]),
                f"{own[0].device_mib:.2f}",
                str(round(statistics.fmean(run.recovered for run in own))),
            )
        )
    table = tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * (len(headers) - 1)))
    seeds = ", ".join(map(str, settings.seeds))
    return (
        f"{table}\n\nvalidation loss in nats per token; seeds {seeds}: mean ± sample deviation where there are several"
    )


def spread(values: Sequence[float], spec: str = ".4f") -> str:
    """``"1.2345 ± 0.0012"``."""
    if any(math.isnan(value) for value in values):
        return "-"
    mean = format(statistics.fmean(values), spec)
    return f"{mean} ± {statistics.stdev(values):.4f}" if len(values) > 1 else mean


# Command line --------------------------------------------------------------------------------------------------------


def low_format(text: str) -> gnmr_fx.Recipe:
    """A type for argparse: ``nf4``, or a format such as ``int8/token`` or ``int2/group64``."""
    try:
        low: Any = text if text == "nf4" else gnmr_fx.Format.parse(text)
        return gnmr_fx.Recipe.for_frozen(gnmr_fx.FrozenRecipe(low))
    except gnmr_fx.GnmrError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    base = Settings()
    parser = argparse.ArgumentParser(description="LoRA over a low-precision base with budgeted recovery. No download.")
    shown = " (default: %(default)s)"

    add = parser.add_argument_group("model and training").add_argument
    add("--size", choices=SIZES, default=base.size, help=f"size of the small model{shown}")
    add("--model", type=existing, metavar="DIR", help="tune the Hugging Face model in this folder instead")
    add("--pretrain-steps", type=integer(1), metavar="N", default=base.pretrain_steps, help=f"of the small one{shown}")
    add("--steps", type=integer(1), metavar="N", default=base.steps, help=f"steps of tuning, each policy{shown}")
    add("--batch", type=integer(1), metavar="N", default=base.batch, help=f"sequences in a batch{shown}")
    add("--seq", type=integer(2), metavar="N", default=base.seq, help=f"tokens in a sequence{shown}")
    add("--lr", type=positive, metavar="X", default=base.lr, help=f"peak learning rate of tuning{shown}")
    add("--seeds", type=integer(0), nargs="+", default=list(base.seeds), metavar="N", help=f"one run each{shown}")
    add("--text", type=existing, metavar="PATH", help="the first kind of text: a file, or a folder, split by file")
    add("--tune-text", type=existing, metavar="PATH", help="the second kind")
    add("--device", type=device, help="default: cuda where there is one, else cpu")
    add("--dtype", choices=DTYPES, help="of the exact base; default: bf16 on cuda, else fp32")
    add("--compile", action="store_true", help="torch.compile each run; pays off for larger models")

    add = parser.add_argument_group("base and recovery").add_argument
    add(
        "--low",
        type=low_format,
        nargs="+",
        default=[low_format("int8/token"), low_format("int2/group64")],
        metavar="FORMAT",
        help="how the base is stored: int8/token, nf4, int4/group64, ... (default: int8/token int2/group64)",
    )
    add(
        "--budget",
        type=budget,
        metavar="N",
        default=base.budget,
        help=f"most projections on the recovery path at a time: a number (5) or a share of them (0.2){shown}",
    )
    add("--alpha", type=float, metavar="X", default=base.alpha, help=f"threshold on GNMR{shown}")
    add("--beta", type=float, metavar="X", default=base.beta, help=f"threshold on delta-GNMR{shown}")
    add("--window", type=int, metavar="N", default=base.window, help=f"steps that delta-GNMR looks back on{shown}")
    add("--lock", type=int, metavar="N", default=base.lock, help=f"steps that a unit stays once recovered{shown}")
    add("--warmup", type=int, metavar="N", default=base.warmup, help=f"first steps, when no threshold fires{shown}")
    return parser


def parse(argv: Sequence[str] | None = None) -> Settings:
    """Settings from a command line (None = the process's own). Exits with a message on a bad one."""
    parser = build_parser()
    options = vars(parser.parse_args(argv))
    options["device"] = options["device"] or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options["dtype"] = options["dtype"] or ("bf16" if options["device"].type == "cuda" else "fp32")
    options["low"], options["seeds"] = tuple(options["low"]), tuple(options["seeds"])
    settings = Settings(**options)
    try:
        _ = settings.config
    except gnmr_fx.ConfigError as error:
        parser.error(str(error))
    return settings


def main(argv: Sequence[str] | None = None) -> list[Run]:
    """Run the example.

    Args:
        argv: the command line's arguments; None = the process's own.

    Returns:
        The runs, seed by seed.
    """
    settings = parse(argv)
    try:
        first = load_text(settings.text, settings.seq)
        second = load_text(settings.tune_text, settings.seq) if settings.tune_text else reference_text(settings.seq)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    for name, text in (("first", first), ("second", second)):
        print(f"{name} kind of text: {text.source}; {len(text.train)} bytes to train on, {len(text.validation)} others")
    texts = (tokenized(first, settings), tokenized(second, settings))
    runs: list[Run] = []
    untuned: list[tuple[float, float]] = []
    for seed in settings.seeds:
        model = base_model(settings, texts[0], seed)
        untuned.append(tuple(validation_loss(model, text.validation, settings) for text in texts))  # type: ignore[arg-type]
        for policy in policies(settings):
            runs.append(tune(model, policy, texts, settings, seed))
            torch.compiler.reset()
    print(f"\n{comparison(runs, untuned, settings)}", flush=True)
    return runs


if __name__ == "__main__":
    main()
