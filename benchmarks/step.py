"""What a step costs: time and bytes of full precision, fixed 4-bit and GNMR side by side, and the controller alone.

    python benchmarks/step.py                    # the demo model, eager and compiled
    python benchmarks/step.py --hidden 512 --layers 8 --seq 512 --batch 4 --dtype bf16 --device cuda
    python benchmarks/step.py --modes compiled --signal error gap       # what other signals cost

Every round runs one step of every variant, so that a change in the machine's load meets them all; times are ratios to
full precision in the same round (median, and the 10th and 90th percentile over the rounds), and to GNMR with its
default signal (mean and median over the rounds: signals that measure errors do so every few steps only). Bytes are
those of distinct storages that autograd keeps between forward and backward, parameters left out. The controller's share
is what it reports for itself (norms, decisions, guards), and in brackets that with the calls that projections make to
it in the forward.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import gnmr_fx

UNIT_COUNTS = (28, 280, 10_000)


def demo_model(arguments: argparse.Namespace) -> nn.Module:
    """A byte-level Llama of the given proportions."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(arguments.seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 11 // 4,
        num_hidden_layers=arguments.layers,
        num_attention_heads=max(1, arguments.hidden // 32),
        max_position_embeddings=arguments.seq,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.to(arguments.device, getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[arguments.dtype])).train()


def kept_bytes(loss: Tensor, model: nn.Module) -> int:
    """Bytes of the distinct storages that the autograd graph of ``loss`` keeps, those of the model left out."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}
    for node in autograd_nodes(loss):
        for tensor in _saved(node):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def autograd_nodes(loss: Tensor) -> Iterator[Any]:
    """Every node of the autograd graph behind ``loss``, once."""
    seen: set[Any] = set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [parent for parent, _ in node.next_functions]
            yield node


def _saved(node: Any) -> Iterator[Tensor]:
    values = list(getattr(node, "saved_tensors", ()) or ())
    for name in dir(node):
        if name.startswith("_saved_") and not name.endswith("_raw"):
            value = getattr(node, name)
            values += value if isinstance(value, tuple | list) else [value]
    return (value for value in values if isinstance(value, Tensor))


class Timed:
    """A function, and the seconds that its calls have taken."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        found = self.function(*arguments, **options)
        self.seconds += time.perf_counter() - start
        return found


class Variant:
    """One way to train: a model of its own, a step function and an optimizer."""

    def __init__(self, name: str, model: nn.Module, compiled: bool) -> None:
        self.name = name
        self.model = model
        self.call: Callable[..., Any] = torch.compile(model) if compiled else model
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        self.seconds: list[float] = []
        self.controller_seconds: list[float] = []
        self.bytes = 0
        self.controller: Any = None if name == "full precision" else gnmr_fx.controller(model)
        if self.controller is not None:
            self.controller.projection_ran = Timed(self.controller.projection_ran)  # type: ignore[method-assign]
        self.calls_seconds: list[float] = []

    def step(self, ids: Tensor, measure: bool) -> None:
        """One training step on ``ids`` [batch, seq], int64."""
        own, calls = self.controller_total(), self.calls_total()
        synchronize(ids.device)
        start = time.perf_counter()
        loss = self.call(input_ids=ids, labels=ids).loss
        if not measure:
            self.bytes = kept_bytes(loss, self.model)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize(ids.device)
        if measure:
            self.seconds.append(time.perf_counter() - start)
            self.controller_seconds.append(self.controller_total() - own)
            self.calls_seconds.append(self.calls_total() - calls)

    def controller_total(self) -> float:
        """Seconds that the controller has reported for itself so far; 0.0 where there is none."""
        return 0.0 if self.controller is None else float(self.controller.stats["seconds"])

    def calls_total(self) -> float:
        """Seconds of the calls that projections have made to the controller so far; 0.0 where there is none."""
        return 0.0 if self.controller is None else float(self.controller.projection_ran.seconds)


def synchronize(device: torch.device) -> None:
    """Wait for the device, where it runs ahead of Python."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def variants(arguments: argparse.Namespace, compiled: bool) -> list[Variant]:
    """Full precision first: it is what the others are measured against."""
    base = demo_model(arguments)
    models = {"full precision": copy.deepcopy(base)}
    for name, budget in (("fixed 4-bit", 0), ("GNMR 4/8-bit", arguments.budget)):
        models[name] = gnmr_fx.instrument(copy.deepcopy(base), "saved-int4-int8", max_active=budget)
    high = gnmr_fx.instrument(copy.deepcopy(base), "saved-int4-int8")
    gnmr_fx.controller(high).force("high")
    models["all recovered"] = high
    for signal in arguments.signal:
        config = gnmr_fx.GnmrConfig(signal=signal, signal_every=arguments.signal_every)
        models[f"signal {signal}"] = gnmr_fx.instrument(copy.deepcopy(base), max_active=arguments.budget, config=config)
    return [Variant(name, model, compiled) for name, model in models.items()]


def measure_steps(arguments: argparse.Namespace, compiled: bool) -> list[dict[str, Any]]:
    """One row per variant."""
    runs = variants(arguments, compiled)
    ids = torch.randint(0, 256, (arguments.batch, arguments.seq), device=arguments.device)
    mode = "compiled" if compiled else "eager"
    for _ in range(2):  # the first compiles; the second finds momenta in place
        for run in tqdm(runs, desc=f"{mode}: warm-up", leave=False):
            run.step(ids, measure=False)
    for _ in tqdm(range(arguments.rounds), desc=f"{mode}: {arguments.rounds} rounds", leave=False):
        for run in runs:
            run.step(ids, measure=True)
    base = torch.tensor(runs[0].seconds)
    gnmr = torch.tensor(next(run.seconds for run in runs if run.name == "GNMR 4/8-bit"))
    rows = []
    for run in runs:
        ratios = torch.tensor(run.seconds) / base
        low, middle, high = torch.quantile(ratios, torch.tensor([0.1, 0.5, 0.9])).tolist()
        to_gnmr = torch.tensor(run.seconds) / gnmr
        rows.append({
            "mode": mode, "variant": run.name, "ms": 1e3 * float(torch.tensor(run.seconds).median()),
            "time_ratio": middle, "time_ratio_p10": low, "time_ratio_p90": high,
            "bytes": run.bytes, "bytes_ratio": run.bytes / runs[0].bytes,
            "controller_share": share(run, run.controller_seconds), "calls_share": share(run, run.calls_seconds),
            "to_gnmr_mean": float(to_gnmr.mean()), "to_gnmr_median": float(to_gnmr.median()),
        })  # fmt: skip
    return rows


def share(run: Variant, seconds: Sequence[float]) -> float | None:
    """Share of the measured steps' time; None where there is no controller."""
    return None if run.controller is None else sum(seconds) / sum(run.seconds)


def measure_controller(count: int, rounds: int = 20) -> dict[str, Any]:
    """The controller alone on ``count`` small linears: its own time, and that of its gradient hooks, per step."""
    model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(count)).train()
    gnmr_fx.instrument(model)
    c = gnmr_fx.controller(model)
    x = torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    hooks, own = [], []
    for _ in range(rounds):
        torch.stack([layer(x) for layer in model]).square().mean().backward()
        before = c.stats["seconds"]
        optimizer.step()
        own.append(c.stats["seconds"] - before)
        optimizer.zero_grad()
        start = time.perf_counter()
        for unit in c.units:
            for hook in unit.weight._post_accumulate_grad_hooks.values():
                c._round.open_in = torch._C._current_graph_task_id()  # nothing to queue: only the calls are timed
                hook(unit.weight)
        hooks.append(time.perf_counter() - start)
        c._reset_step()
    gnmr_fx.uninstrument(model)
    return {"units": count, "tick ms/step": median_ms(own), "hooks ms/step": median_ms(hooks)}


def median_ms(seconds: list[float]) -> float:
    """Median in milliseconds."""
    return 1e3 * float(torch.tensor(seconds).median())


STEP_HEADERS = ["mode", "variant", "ms/step", "time ratio (p10-p90)", "MiB kept", "bytes ratio", "controller"]
STEP_HEADERS += ["time to GNMR, mean (median)"]


def show_step(row: dict[str, Any]) -> list[str]:
    """A row of :func:`measure_steps` under :data:`STEP_HEADERS`."""
    own, calls = row["controller_share"], row["calls_share"]
    return [
        row["mode"],
        row["variant"],
        f"{row['ms']:.1f}",
        f"{row['time_ratio']:.3f} ({row['time_ratio_p10']:.3f}-{row['time_ratio_p90']:.3f})",
        f"{row['bytes'] / 2**20:.2f}",
        f"{row['bytes_ratio']:.3f}",
        "-" if own is None else f"{own:.2%} ({own + calls:.2%})",
        f"{row['to_gnmr_mean']:.3f} ({row['to_gnmr_median']:.3f})",
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print its tables, write its JSON; returns what it wrote."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("hidden", 128),
        ("layers", 4),
        ("batch", 16),
        ("seq", 128),
        ("rounds", 20),
        ("budget", 5),
        ("seed", 0),
        ("signal-every", 10),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--signal", nargs="*", choices=("gnmr", "error", "gap"), default=[], help="variants of GNMR")
    parser.add_argument("--out", type=Path, default=Path("out/step.json"))
    arguments = parser.parse_args(argv)
    rows = [row for mode in arguments.modes for row in measure_steps(arguments, mode == "compiled")]
    controllers = [measure_controller(count) for count in tqdm(UNIT_COUNTS, desc="controller", leave=False)]
    print(tabulate([show_step(row) for row in rows], headers=STEP_HEADERS))
    print()
    print(tabulate(controllers, headers="keys", floatfmt=".2f"))
    result = {
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "steps": rows,
        "controller": controllers,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten to {arguments.out}")
    return result


if __name__ == "__main__":
    main()
