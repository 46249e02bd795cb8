"""How often thresholds are passed in an ordinary run: what the defaults of ``alpha`` and ``beta`` rest on.

    python benchmarks/thresholds.py --seeds 0 1

Trains the demo model with every unit on the low-cost path, and counts the unit-steps (after the warm-up) whose GNMR or
delta-GNMR passes a pair of thresholds. A run without transients should hardly pass them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

import gnmr_fx

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import pretrain_tiny_llama as demo

QUANTILES = (0.5, 0.9, 0.99, 0.995, 0.998, 0.999)
ALPHAS, BETAS = (3.0, 4.0, 5.0, 6.0, 8.0), (2.5, 3.0, 4.0, 5.0)


def ratios(seed: int, steps: int) -> tuple[Tensor, Tensor]:
    """GNMR and delta-GNMR [steps after the warm-up, units] of one run."""
    settings = demo.Settings(steps=steps, seed=seed)
    text = demo.load_text(None, settings.seq + 1)
    torch.manual_seed(seed)
    model = demo.build_model(demo.SIZES[settings.size], settings.seq)
    gnmr_fx.instrument(model, max_active=0)
    controller = gnmr_fx.controller(model)
    gnmr, delta = [], []
    losses = demo.optimize(model, demo.batches(text.train, settings), settings)
    for step, _ in enumerate(tqdm(losses, total=steps, desc=f"seed {seed}", leave=False)):
        if step >= controller.config.warmup_steps and controller.decision is not None:
            gnmr.append(controller.decision.gnmr)
            delta.append(controller.decision.delta_gnmr)
    return torch.stack(gnmr), torch.stack(delta)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print two tables, write JSON; returns what it wrote."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("out/thresholds.json"))
    arguments = parser.parse_args(argv)
    runs = [ratios(seed, arguments.steps) for seed in arguments.seeds]
    at = torch.tensor(QUANTILES, dtype=torch.float64)
    quantiles = {
        f"{name}, seed {seed}": torch.quantile(run[index].flatten(), at).tolist()
        for seed, run in zip(arguments.seeds, runs, strict=True)
        for index, name in enumerate(("GNMR", "delta-GNMR"))
    }
    shares = [
        {"alpha": alpha, "beta": beta, "over": [float(((g > alpha) | (d > beta)).double().mean()) for g, d in runs]}
        for alpha, beta in itertools.product(ALPHAS, BETAS)
    ]
    print(tabulate([[k, *v] for k, v in quantiles.items()], headers=["", *map(str, QUANTILES)], floatfmt=".2f"))
    print()
    rows = [[s["alpha"], s["beta"], *(f"{over:.2%}" for over in s["over"])] for s in shares]  # type: ignore[attr-defined]
    print(tabulate(rows, headers=["alpha", "beta", *(f"over, seed {seed}" for seed in arguments.seeds)]))
    result = {"torch": torch.__version__, "steps": arguments.steps, "quantiles": quantiles, "shares": shares}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
