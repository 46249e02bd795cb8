"""Pretrain with DeepSeek-V3's fine-grained GEMMs: in 6 bits, in 8, and in 6 with 8 where gradients say so.

The model, the text and the loop are those of pretrain_tiny_llama.py. Five policies train it in turn from the same
weights on the same batches: full precision; every projection's three GEMMs in 6 bits; in fp8; GNMR, 6 bits with at most
``--budget`` projections in fp8 at a time; and a random choice, in each step of as many projections as GNMR had there,
each kept for a while as GNMR does. One table at the end.

    python examples/pretrain_dsv3_recipe.py                                   # a few minutes on 2 CPU cores
    python examples/pretrain_dsv3_recipe.py --seeds 0 1 2 --low fp6_e2m3 --mx
    python examples/pretrain_dsv3_recipe.py --device cuda --model ~/models/some-llama --seq 2048 --steps 5000
    python examples/pretrain_dsv3_recipe.py --show out/a.json out/b.json      # train nothing: a table of earlier runs

On a CPU the model runs in fp32 (bf16 is slow on many), and GEMMs in 6 bits and in fp8 are emulated: this shows what
they do to training, not how fast they are. ``--model`` takes the architecture and, where there is one, the tokenizer of
a local Hugging Face directory; weights are drawn at random, and nothing is downloaded. Ctrl-C ends the run under way
and still prints the table.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pretrain_tiny_llama as demo
import torch
from tabulate import tabulate
from torch import Tensor, nn

import gnmr_fx
from gnmr_fx.recipe import Backend, FormatDtype, dsv3
from gnmr_fx.report import Table

STEPS, BATCH = 150, 8
LOWS: tuple[FormatDtype, ...] = ("fp6_e3m2", "fp6_e2m3")
BACKENDS: tuple[Backend, ...] = ("auto", "native", "emulated")
FULL = "full precision"


@dataclass(frozen=True)
class Source:
    """A model with random weights, and the text as it reads it."""

    build: Callable[[], nn.Module]
    text: demo.Text
    unit: str
    """What a loss is per: ``"byte"`` or ``"token"``."""


def source(model: Path | None, settings: demo.Settings) -> Source:
    """The byte-level Llama of the demo, or the architecture and the tokenizer in a local Hugging Face directory.

    Raises:
        ValueError: where there is too little text, or a vocabulary without room for bytes and no tokenizer.
    """
    text = demo.load_text(settings.text, settings.seq)
    if model is None:
        return Source(lambda: demo.build_model(demo.SIZES[settings.size], settings.seq), text, "byte")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(model, local_files_only=True)
    config.use_cache = False
    unit = "byte"
    folder = model if model.is_dir() else model.parent
    if any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        train, validation = (tokens(tokenizer, part) for part in (text.train, text.validation))
        text, unit = replace(text, train=train, validation=validation), "token"
    elif config.vocab_size < demo.VOCABULARY:
        raise ValueError(
            f"expected a tokenizer in {folder} or a vocabulary of at least {demo.VOCABULARY} for bytes, "
            f"found neither (a vocabulary of {config.vocab_size}); put the tokenizer's files next to the config"
        )
    if min(len(text.train), len(text.validation)) < settings.seq:
        raise ValueError(f"expected at least --seq {settings.seq} {unit}s to train and to validate on, found fewer")
    return Source(lambda: AutoModelForCausalLM.from_config(config).train(), text, unit)


def tokens(tokenizer: Any, part: Tensor) -> Tensor:
    """Text, given as bytes, as a 1-D tensor of token ids."""
    ids = tokenizer(part.numpy().tobytes().decode(errors="replace"), add_special_tokens=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int32)


# Policies ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What the policies are made of."""

    low: FormatDtype = "fp6_e3m2"
    mx: bool = False
    backend: Backend = "auto"

    def policies(self, settings: demo.Settings) -> Iterator[demo.Policy]:
        """Full precision first: it is what the others are measured against."""
        low = f"{self.low}{' mx' if self.mx else ''}"
        mixed = dsv3(self.low, mx=self.mx, backend=self.backend)
        yield demo.Policy(FULL, None)
        yield demo.Policy(f"static {low}", dsv3(self.low, self.low, mx=self.mx, backend=self.backend))
        yield demo.Policy("static fp8_e4m3", dsv3("fp8_e4m3", "fp8_e4m3", backend=self.backend))
        yield demo.Policy(f"GNMR {low}/fp8", mixed, settings.budget)
        yield demo.Policy("random, as many", mixed, settings.budget, redraw=settings.lock)


def random_choices(units: Sequence[str], counts: Sequence[int], seed: int) -> list[list[str]]:
    """As many of ``units`` in each step as ``counts`` says, at random; one that is chosen stays as long as it may."""
    draw = random.Random(seed)
    chosen: list[str] = []
    choices = []
    for count in counts:
        del chosen[: max(0, len(chosen) - count)]  # the one that was chosen first leaves first
        chosen += draw.sample([unit for unit in units if unit not in chosen], count - len(chosen))
        choices.append(list(chosen))
    return choices


def forced(losses: Iterator[float], controller: Any, choices: Sequence[Sequence[str]]) -> Iterator[float]:
    """``losses``, with the units of the next step put on the recovery path after each."""
    for loss, following in zip(losses, [*choices[1:], []], strict=False):
        controller.force(following)
        yield loss


def run(
    policy: demo.Policy, made: Source, settings: demo.Settings, counts: Sequence[int]
) -> tuple[demo.Run, dict[str, Any]]:
    """Train under a policy and validate: the run, and what of it is worth keeping.

    Args:
        counts: how many units a random choice puts on the recovery path in each step.
    """
    torch.manual_seed(settings.seed)
    model = made.build().to(settings.device)
    controller = None
    if policy.recipe is not None:
        gnmr_fx.instrument(model, policy.recipe, max_active=policy.budget, config=settings.config)
        controller = gnmr_fx.controller(model)
    losses = demo.optimize(model, demo.batches(made.text.train, settings), settings)
    if controller is not None and policy.redraw is not None and counts:
        choices = random_choices([unit.name for unit in controller.units], counts, settings.seed)
        controller.force(choices[0])
        losses = forced(losses, controller, choices)
    trace = demo.follow(losses, replace(policy, redraw=None), controller, settings)
    own_loss = math.log(demo.perplexity(model, made.text.validation, settings))
    table = gnmr_fx.table(model) if controller else None
    report = gnmr_fx.report(model) if controller else None
    if controller is not None:
        gnmr_fx.uninstrument(model)
    perplexity = demo.perplexity(model, made.text.validation, settings)
    finished = demo.Run(policy.name, trace, perplexity, table, report)
    return finished, {
        "policy": policy.name,
        "seed": settings.seed,
        "steps": len(trace.losses),
        "unit": made.unit,
        "validation_loss": math.log(perplexity),
        "validation_loss_in_eval": own_loss,
        "train_loss": finished.final_loss,
        "gemms": backends(table),
        "recovered": sum(trace.active),
        "unit_steps": len(table.units) * len(trace.losses) if table else 0,
        "bytes": finished.saved_bytes if table else None,
        "bytes_full": table.totals["bytes_full"] if table else None,
        "ms_per_step": finished.ms_per_step,
    }


def backends(table: Table | None) -> str:
    """What multiplied: ``"emulated"``, or, where GEMMs or paths differ, ``"emulated, native"``."""
    if table is None:
        return "full"
    return ", ".join(sorted({which for row in table.units for gemm in row.backends for which in gemm}))


# Tables --------------------------------------------------------------------------------------------------------------


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """A row for each policy: means over the seeds, with the standard deviation where there are two at least."""
    full = {line["seed"]: line for line in lines if line["policy"] == FULL}
    kept = next((line["bytes_full"] for line in lines if line["bytes_full"] is not None), None)
    rows = []
    for name in dict.fromkeys(line["policy"] for line in lines):
        own = [line for line in lines if line["policy"] == name]
        pairs = [(line, full[line["seed"]]) for line in own if line["seed"] in full]
        rows.append((
            name,
            own[0]["gemms"],
            spread([line["validation_loss"] for line in own]),
            spread([line["validation_loss"] - base["validation_loss"] for line, base in pairs], "+"),
            f"{math.exp(statistics.fmean(line['validation_loss'] for line in own)):.3f}",
            spread([line["validation_loss_in_eval"] for line in own]),
            "-" if not own[0]["unit_steps"] else
            f"{statistics.fmean(line['recovered'] for line in own):.0f} of {own[0]['unit_steps']}",
            demo.mebibytes(statistics.fmean(line["bytes"] for line in own) if own[0]["bytes"] is not None else kept),
            spread([line["ms_per_step"] / base["ms_per_step"] for line, base in pairs], form=".2f"),
        ))  # fmt: skip
    headers = (
        "policy", "GEMMs", "validation loss", "difference to full", "perplexity", "loss as evaluated",
        "recovered unit-steps", "saved MiB", "time, ratio",
    )  # fmt: skip
    table = tabulate(rows, headers, disable_numparse=True, colalign=("left", "left", *["right"] * 7))
    seeds = len({line["seed"] for line in lines})
    return (
        f"{table}\n\n{seeds} seed{'s' * (seeds != 1)}, {lines[0]['steps']} steps; losses in nats per "
        f"{lines[0]['unit']}, of the trained weights in full precision, and (loss as evaluated) as the instrumented "
        "model computes in eval().\nDifferences and times are paired with full precision of the same seed; saved: by "
        "units for the backward, mean per step; time: median step."
    )


def spread(values: Sequence[float], sign: str = "", form: str = ".4f") -> str:
    """``"1.9350 ± 0.0120"``: mean and, of two values at least, standard deviation."""
    if not values:
        return "-"
    deviation = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}{form}}{deviation}"


# Command line --------------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    base = demo.Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shown = " (default: %(default)s)"

    add = parser.add_argument_group("formats").add_argument
    add("--low", choices=LOWS, default=LOWS[0], help=f"dtype of the low-cost path{shown}")
    add("--mx", action="store_true", help="the low-cost path in MX blocks of 32 instead of tiles of 128")
    add("--backend", choices=BACKENDS, default="auto", help=f"what multiplies{shown}")

    add = parser.add_argument_group("model and training").add_argument
    add("--model", type=demo.existing, metavar="DIR", help="local Hugging Face directory or config.json, not --size")
    add("--size", choices=demo.SIZES, default=base.size, help=f"size of the byte-level Llama{shown}")
    add("--steps", type=demo.integer(1), metavar="N", default=STEPS, help=f"per policy and seed{shown}")
    add(
        "--seeds", type=demo.integer(0), nargs="+", metavar="N", default=[0], help="of weights and batches (default: 0)"
    )
    add("--batch", type=demo.integer(1), metavar="N", default=BATCH, help=f"sequences in a batch{shown}")
    add("--seq", type=demo.integer(2), metavar="N", default=base.seq, help=f"bytes or tokens in a sequence{shown}")
    add("--lr", type=demo.positive, metavar="X", default=base.lr, help=f"peak learning rate{shown}")
    add("--text", type=demo.existing, metavar="PATH", help="own text: a file, or a folder, which is split by file")
    add("--device", type=demo.device, default=torch.device("cpu"), help=f"cpu, cuda, ...{shown}")
    add("--dtype", choices=("fp32", "bf16"), help="bf16 is autocast, and the default on cuda; elsewhere fp32 is")
    add("--compile", action="store_true", help="with torch.compile, which takes longer to begin with")

    add = parser.add_argument_group("recovery").add_argument
    add("--budget", type=demo.budget, metavar="N", default=base.budget, help=f"most units in fp8 at a time{shown}")
    add("--alpha", type=float, metavar="X", help=f"threshold on GNMR (default: {demo.DEFAULTS.alpha})")
    add("--beta", type=float, metavar="X", help=f"threshold on delta-GNMR (default: {demo.DEFAULTS.beta})")
    add("--lock", type=int, metavar="N", default=base.lock, help=f"steps that a unit stays once recovered{shown}")
    add("--warmup", type=int, metavar="N", default=base.warmup, help=f"first steps, when no threshold fires{shown}")

    add = parser.add_argument_group("results").add_argument
    add("--out", type=Path, metavar="FILE", default=Path("out/pretrain_dsv3_recipe.json"), help=f"JSON of all{shown}")
    add("--show", type=demo.existing, nargs="+", metavar="FILE", help="train nothing: a table of what these files hold")
    return parser


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the example; returns one dictionary for each run.

    Args:
        argv: the command line's arguments; None = the process's own.
    """
    parser = build_parser()
    arguments = vars(parser.parse_args(argv))
    show, out, model, seeds = (arguments.pop(name) for name in ("show", "out", "model", "seeds"))
    options = Options(arguments.pop("low"), arguments.pop("mx"), arguments.pop("backend"))
    if show:
        lines = [line for file in show for line in json.loads(file.read_text())["runs"]]
        print(summary(lines))
        return lines
    arguments["dtype"] = arguments["dtype"] or ("bf16" if arguments["device"].type == "cuda" else "fp32")
    settings = demo.Settings(**arguments, recipe=dsv3(options.low, mx=options.mx, backend=options.backend))
    try:
        _ = settings.config
        out.parent.mkdir(parents=True, exist_ok=True)
        made = source(model, settings)
    except (gnmr_fx.ConfigError, OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    print(
        f"text: {made.text.source}; model: {model or settings.size}, {settings.dtype} on {settings.device}", flush=True
    )
    lines = []
    try:
        for seed in seeds:
            for line in train_all(options, made, replace(settings, seed=seed)):
                lines.append(line)
                save(out, options, settings, lines)
            print(f"\n{summary(lines)}\n\nwritten to {out}", flush=True)
            if lines[-1]["steps"] < settings.steps:
                break
    except gnmr_fx.NativeKernelError as error:
        raise SystemExit(f"error: {error}") from error
    return lines


def train_all(options: Options, made: Source, settings: demo.Settings) -> Iterator[dict[str, Any]]:
    """One seed: every policy in turn, up to an interruption."""
    counts: list[int] = []
    for policy in options.policies(settings):
        finished, line = run(policy, made, settings, counts)
        yield line
        counts = finished.trace.active
        if finished.trace.interrupted:
            break
        if settings.compile:
            torch.compiler.reset()  # each policy is compiled by itself


def save(path: Path, options: Options, settings: demo.Settings, lines: list[dict[str, Any]]) -> None:
    """Write the runs, and what they were run with, as JSON."""
    data = {
        "options": vars(options),
        "settings": {name: str(value) for name, value in vars(settings).items() if name not in ("seed", "recipe")},
        "recipe": str(settings.recipe),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "version": gnmr_fx.__version__,
        "runs": lines,
    }
    path.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
