"""Does training with every saved activation in a low-cost format end where full precision does?

    python benchmarks/all_saved_training.py                      # 1,000 steps of the demo model, 4 variants, 3 seeds
    python benchmarks/all_saved_training.py --steps 100 --seeds 1 --out quick.jsonl

Trains the model of examples/pretrain_tiny_llama.py, compiled, from the same weights on the same batches, once in full
precision and once in scope "all" for each format: every unit on int8, on int4, GNMR int4/int8, and every unit on int2.
Each finished run is one JSON line; runs that the file already holds are not run again. Ends with a table: validation
perplexity per byte, mean and standard deviation over the seeds, and the paired difference to full precision.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import gnmr_fx

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import pretrain_tiny_llama as demo

FULL = "full precision"


def policies() -> Iterator[demo.Policy]:
    """Full precision first: it is what the others are measured against."""
    int8, int4, int2 = (gnmr_fx.Format(name) for name in ("int8", "int4", "int2"))
    yield demo.Policy(FULL, None)
    yield demo.Policy("all int8", gnmr_fx.Recipe(int8, int8))
    yield demo.Policy("all int4", gnmr_fx.Recipe(int4, int8), 0)
    yield demo.Policy("GNMR int4/int8", gnmr_fx.Recipe(int4, int8), 5)
    yield demo.Policy("all int2", gnmr_fx.Recipe(int2, int8), 0)


def run(policy: demo.Policy, settings: demo.Settings) -> dict[str, Any]:
    """Train once; what is worth keeping of it."""
    text = demo.load_text(settings.text, settings.seq)
    finished = demo.run_policy(policy, text, settings)
    torch.compiler.reset()
    totals = finished.table.totals if finished.table else {}
    return {
        "policy": policy.name,
        "seed": settings.seed,
        "steps": settings.steps,
        "perplexity": finished.perplexity,
        "train_loss": finished.final_loss,
        "ms_per_step": finished.ms_per_step,
        "bytes_full": totals.get("bytes_full"),
        "bytes_low": totals.get("bytes_low"),
        "recovered": sum(finished.trace.active),
        "torch": torch.__version__,
        "version": gnmr_fx.__version__,
    }


def summary(lines: list[dict[str, Any]]) -> str:
    """A table with a row for each policy."""
    full = {line["seed"]: line["perplexity"] for line in lines if line["policy"] == FULL}
    rows = []
    for name in dict.fromkeys(line["policy"] for line in lines):
        own = {line["seed"]: line for line in lines if line["policy"] == name}
        values = [line["perplexity"] for line in own.values()]
        differences = [line["perplexity"] - full[seed] for seed, line in own.items() if seed in full]
        low = next((line["bytes_low"] for line in own.values()), None)
        ratio = "-" if low is None else f"{next(iter(own.values()))['bytes_full'] / low:.2f}x"
        rows.append((name, len(values), spread(values), spread(differences, "+"), ratio))
    headers = ("policy", "seeds", "validation perplexity", "difference to full precision", "fewer bytes")
    return tabulate(rows, headers, disable_numparse=True)


def spread(values: list[float], sign: str = "") -> str:
    """``"4.935 ± 0.012"``, the standard deviation where there are two values at least."""
    if not values:
        return "-"
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.3f}{deviation}"


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=None, metavar="POLICY", help="these policies only")
    parser.add_argument("--out", type=Path, default=Path("out/all_saved_training.jsonl"))
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    lines = [line for line in lines if line["steps"] == arguments.steps]
    known = {(line["policy"], line["seed"]) for line in lines}
    for seed in range(arguments.seeds):
        for policy in policies():
            if (policy.name, seed) in known or (arguments.only and policy.name not in arguments.only):
                continue
            settings = demo.Settings(steps=arguments.steps, seed=seed, scope="all")
            lines.append(run(policy, settings))
            with arguments.out.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    print(summary(lines))


if __name__ == "__main__":
    main()
