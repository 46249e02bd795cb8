"""What deciding together costs: a step of DDP and FSDP2 without gnmr-fx, with it, and with it less the collective.

    python benchmarks/distributed.py                  # 2 gloo processes on the CPU, the demo model
    python benchmarks/distributed.py --ranks 4 --layers 8 --kinds ddp

Every round runs one step of every variant, so that a change in the machine's load meets them all; times are ratios to
the stock model in the same round (median, and the 10th and 90th percentile over the rounds). The recipe keeps
activations as they are, so that the controller alone makes the difference. The collective is also timed by itself,
behind a barrier, for several numbers of units; inside a step it includes the wait for the slowest rank.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step import demo_model
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import gnmr_fx
from gnmr_fx import distributed

EXACT = gnmr_fx.Recipe(gnmr_fx.Format("none"), gnmr_fx.Format("none"))
UNIT_COUNTS = (28, 280, 10_000)
VARIANTS = ("stock", "GNMR, no collective", "GNMR")


def wrap(kind: str, model: nn.Module) -> Callable[..., Any]:
    """The model under ``ddp`` or ``fsdp2``."""
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    sharded: Any = fully_shard(model)
    return sharded


class Variant:
    """One way to train: a model of its own, wrapped, and its optimizer."""

    def __init__(self, name: str, kind: str, model: nn.Module) -> None:
        self.name = name
        if name != "stock":
            gnmr_fx.instrument(model, EXACT)
        self.call = wrap(kind, model)
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        self.seconds: list[float] = []
        self.in_collective: list[float] = []

    def step(self, ids: Tensor) -> None:
        """One training step on ``ids`` [batch, seq], int64; all ranks begin it together."""
        groups_of = distributed.groups_of
        if self.name == VARIANTS[1]:
            distributed.groups_of = lambda *_: ()
        sum_over, spent = distributed.sum_over, [0.0]

        def timed(groups: Any, values: Tensor) -> Tensor:
            begun = time.perf_counter()
            sum_over(groups, values)
            spent[0] += time.perf_counter() - begun
            return values

        distributed.sum_over = timed
        dist.barrier()
        start = time.perf_counter()
        self.call(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        self.in_collective.append(spent[0])
        distributed.groups_of, distributed.sum_over = groups_of, sum_over


def measure_steps(kind: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per variant."""
    base = demo_model(arguments)
    runs = [Variant(name, kind, copy.deepcopy(base)) for name in VARIANTS]
    ids = torch.randint(0, 256, (arguments.batch, arguments.seq))
    for _ in tqdm(range(2 + arguments.rounds), desc=kind, leave=False, disable=dist.get_rank() > 0):
        for run in runs:
            run.step(ids)
    stock = torch.tensor(runs[0].seconds[2:])
    return [
        {
            "kind": kind,
            "variant": run.name,
            "ms": 1e3 * float(torch.tensor(run.seconds[2:]).median()),
            "collective_share": float((torch.tensor(run.in_collective) / torch.tensor(run.seconds))[2:].median()),
        }
        | quantiles(torch.tensor(run.seconds[2:]) / stock)
        for run in runs
    ]


def measure_collective(count: int, rounds: int) -> dict[str, Any]:
    """The sum over the ranks for ``count`` units, in milliseconds."""
    table, seconds = torch.zeros(3, count + 1, dtype=torch.float64), []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        distributed.sum_over((dist.group.WORLD,), table)
        seconds.append(1e3 * (time.perf_counter() - start))
    return {"units": count, "KiB": table.nbytes / 1024} | quantiles(torch.tensor(seconds))


def quantiles(values: Tensor) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    low, middle, high = torch.quantile(values, torch.tensor([0.1, 0.5, 0.9])).tolist()
    return {"median": middle, "p10": low, "p90": high}


def rank_main(rank: int, store: str, arguments: argparse.Namespace, pipe: Any) -> None:
    """What each process runs; rank 0 sends its rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks)
    steps = [row for kind in arguments.kinds for row in measure_steps(kind, arguments)]
    collectives = [measure_collective(count, 5 * arguments.rounds) for count in UNIT_COUNTS]
    if rank == 0:
        pipe.send((steps, collectives))
    dist.barrier()
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print its tables, write its JSON; returns what it wrote."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("ranks", 2),
        ("hidden", 128),
        ("layers", 4),
        ("batch", 8),
        ("seq", 128),
        ("rounds", 20),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kinds", nargs="+", choices=("ddp", "fsdp2"), default=["ddp", "fsdp2"])
    parser.add_argument("--out", type=Path, default=Path("out/distributed.json"))
    arguments = parser.parse_args(argv)
    arguments.device, arguments.dtype = "cpu", "fp32"
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank_main, args=(rank, f"{folder}/store", arguments, sender))
            for rank in range(arguments.ranks)
        ]
        for process in ranks:
            process.start()
        sender.close()
        steps, collectives = receiver.recv()
        for process in ranks:
            process.join()
    print(
        tabulate(
            [
                [
                    r["kind"],
                    r["variant"],
                    f"{r['ms']:.1f}",
                    f"{r['median']:.3f} ({r['p10']:.3f}-{r['p90']:.3f})",
                    f"{r['collective_share']:.2%}" if r["collective_share"] else "-",
                ]
                for r in steps
            ],
            headers=["kind", "variant", "ms/step", "time ratio (p10-p90)", "in the collective"],
        )
    )
    print()
    print(
        tabulate(
            [
                [r["units"], f"{r['KiB']:.1f}", f"{r['median']:.3f} ({r['p10']:.3f}-{r['p90']:.3f})"]
                for r in collectives
            ],
            headers=["units", "KiB", "collective, ms (p10-p90)"],
        )
    )
    result = {
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "torch": torch.__version__,
        "steps": steps,
        "collective": collectives,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten to {arguments.out}")
    return result


if __name__ == "__main__":
    main()
