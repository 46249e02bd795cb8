"""Low-precision GEMMs: what native kernels buy, what emulation costs, what the guard costs, and how exact they are.

    python benchmarks/gemm.py                                              # this CPU, widths 256 and 512, eager
    python benchmarks/gemm.py --device cuda --modes eager compiled         # widths 2048, 4096 and 8192
    python benchmarks/gemm.py --only guard                                 # the guard against a static recipe
    python benchmarks/gemm.py --only numerics                              # errors against float64

*Times*: one square linear, forward and backward, in a recipe against a plain one in the same dtype. Every round runs
every variant once, so that a change in the machine's load meets them all; ratios are to plain in the same round
(median, and the 10th and 90th percentile over the rounds). *native* multiplies codes by a kernel of torch, *emulated*
quantizes, dequantizes and multiplies in the dtype of the run; a variant that this device has no kernel for is left out.

*Guard*: a training step (forward, backward, SGD) of a compiled stack of linears, guarded, against the same stack whose
linears call the same GEMMs in the same formats with no guard and no controller. Each is measured at a width and, to
tell a small cost from noise, at a width so small that little but overhead is left.

*Numerics*: relative error and signal-to-quantization-noise ratio of the three GEMMs, emulated in fp32, against float64.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from step import synchronize
from tabulate import tabulate
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from tqdm import tqdm

import gnmr_fx
from gnmr_fx import gemm, kernels
from gnmr_fx.formats import Encoded, empty_encoded
from gnmr_fx.recipe import FULL, RECIPES, Backend, Format, Recipe, dsv3

NAMES = ("gemm-int8-bf16", "gemm-fp8-bf16", "gemm-fp8-tensor-bf16", "dsv3-fp8", "dsv3-fp6")
PLAIN = "plain"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PARTS = ("times", "guard", "numerics")
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
OVERHEAD_WIDTH = 32


def with_backend(recipe: Recipe, backend: Backend) -> Recipe:
    """``recipe`` with its GEMMs computed so."""
    assert recipe.gemm is not None
    return replace(recipe, gemm=replace(recipe.gemm, backend=backend))


def has_native(recipe: Recipe, device: torch.device) -> tuple[bool, str]:
    """Whether every GEMM of the low path has a kernel on ``device``; if not, why."""
    assert recipe.gemm is not None
    for name in gemm.GEMMS:
        operands = getattr(recipe.gemm, name).low
        kernel, reason = gemm.native_kernel(operands, device)
        if operands != FULL and kernel is None:
            return False, reason
    return True, ""


# A linear without a guard --------------------------------------------------------------------------------------------

_library = torch.library.Library("gnmr_fx_benchmark", "DEF")
_library.define("save(Tensor x, str fmt) -> (Tensor, Tensor)")
_library.define("output(Tensor x, Tensor w, Tensor[] stored, str fmt, str[] spec) -> Tensor")
_library.define("grad_input(Tensor g, Tensor w, SymInt[] size, str[] spec) -> Tensor")
_library.define("grad_weight(Tensor g, Tensor[] x, Tensor w, str fmt, str[] spec) -> Tensor")


def _save(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    return kernels.encode(x, Format.parse(fmt))


def _output(x: Tensor, w: Tensor, stored: list[Tensor], fmt: str, spec: list[str]) -> Tensor:
    kept = (Encoded(*stored), Format.parse(fmt)) if stored else None
    return gemm.output(x, w, None, None, False, None, "linear", "", gemm.Spec(*spec), kept).contiguous()  # type: ignore[arg-type]


def _grad_input(g: Tensor, w: Tensor, size: list[int], spec: list[str]) -> Tensor:
    return gemm.grad_input(g, w, None, False, None, "linear", "", gemm.Spec(*spec), size).contiguous()  # type: ignore[arg-type]


def _grad_weight(g: Tensor, x: list[Tensor], w: Tensor, fmt: str, spec: list[str]) -> Tensor:
    size = (*g.shape[:-1], w.shape[-1])
    whole = kernels.decode(Encoded(*x), Format.parse(fmt), size, g.dtype) if len(x) == 2 else x[0]
    return gemm.grad_weight(g, whole, w, None, False, None, "linear", "", gemm.Spec(*spec)).contiguous()  # type: ignore[arg-type]


for _name, _implementation, _fake in (
    ("save", _save, lambda x, fmt: empty_encoded(x, Format.parse(fmt))),
    ("output", _output, lambda x, w, stored, fmt, spec: x.new_empty((*x.shape[:-1], w.shape[0]))),
    ("grad_input", _grad_input, lambda g, w, size, spec: g.new_empty(size)),
    ("grad_weight", _grad_weight, lambda g, x, w, fmt, spec: g.new_empty(w.shape)),
):
    _library.impl(_name, _disable_dynamo(_implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"gnmr_fx_benchmark::{_name}", _fake, lib=_library)


class _Static(torch.autograd.Function):
    """What a guarded linear computes on its low-cost path, and no more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, fmt: str, spec: list[str]) -> Tensor:
        ops = torch.ops.gnmr_fx_benchmark
        stored = list(ops.save(x, fmt)) if fmt != "none" else []
        ctx.save_for_backward(w, *(stored or [x]))
        ctx.fmt, ctx.spec, ctx.size = fmt, spec, x.shape
        return ops.output(x, w, stored, fmt, spec)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        ops = torch.ops.gnmr_fx_benchmark
        w, *kept = ctx.saved_tensors
        grad_x = ops.grad_input(g, w, ctx.size, ctx.spec) if ctx.needs_input_grad[0] else None
        return grad_x, ops.grad_weight(g, kept, w, ctx.fmt, ctx.spec), None, None


class StaticLinear(nn.Linear):
    """A linear without bias whose GEMMs are those of the low path of a recipe, with no guard and no controller."""

    def __init__(self, width: int, recipe: Recipe) -> None:
        super().__init__(width, width, bias=False)
        assert recipe.gemm is not None
        self.fmt, self.spec = str(recipe.low), list(gemm.Spec.of(recipe.gemm))

    def forward(self, input: Tensor) -> Tensor:
        """``[..., width]`` to the same."""
        return _Static.apply(input, self.weight, self.fmt, self.spec)


# Times ---------------------------------------------------------------------------------------------------------------


class Variant:
    """One way to compute a linear: a model of its own, and the seconds of its forwards and backwards."""

    def __init__(self, model: nn.Module, compiled: bool, **labels: str) -> None:
        self.model = model
        self.call: Callable[[Tensor], Tensor] = torch.compile(model) if compiled else model
        self.labels = labels
        self.forward: list[float] = []
        self.backward: list[float] = []
        self.controller = gnmr_fx.controller(model) if "recipe" in labels else None

    def once(self, x: Tensor, g: Tensor, clock: Callable[[], float]) -> None:
        """One forward and backward."""
        synchronize(x.device)
        start = clock()
        out = self.call(x)
        synchronize(x.device)
        middle = clock()
        out.backward(g)
        synchronize(x.device)
        self.forward.append(middle - start)
        self.backward.append(clock() - middle)
        if self.controller is not None:
            self.controller.step()
        self.model.zero_grad()
        x.grad = None


def linear(width: int, arguments: argparse.Namespace) -> nn.Module:
    """A stack of one linear without bias."""
    return nn.Sequential(nn.Linear(width, width, bias=False)).to(arguments.device, DTYPES[arguments.dtype]).train()


def variants(width: int, compiled: bool, arguments: argparse.Namespace) -> Iterator[Variant]:
    """Plain first: it is what the others are measured against."""
    yield Variant(linear(width, arguments), compiled, variant=PLAIN)
    for name in arguments.recipes:
        backends: tuple[Backend, ...] = ("native", "emulated")
        for backend in backends:
            recipe = with_backend(RECIPES[name], backend)
            assert recipe.gemm is not None
            if backend == "native" and not has_native(recipe, torch.device(arguments.device))[0]:
                continue
            for guard in ("low", "high"):
                if guard == "high" and recipe.gemm.output.low == recipe.gemm.output.high:
                    continue  # a static recipe
                if guard == "high" and backend == "native" and recipe.gemm.output.high == FULL:
                    continue  # the same as emulated: PyTorch's own GEMM
                model = gnmr_fx.instrument(linear(width, arguments), recipe, include=["*"])
                gnmr_fx.controller(model).force("high" if guard == "high" else "low")
                yield Variant(model, compiled, variant=name, recipe=name, backend=backend, guard=guard)


def measure_times(width: int, compiled: bool, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per variant."""
    runs = list(variants(width, compiled, arguments))
    device, dtype = torch.device(arguments.device), DTYPES[arguments.dtype]
    x = torch.randn(arguments.tokens, width, device=device, dtype=dtype, requires_grad=True)
    g = torch.randn(arguments.tokens, width, device=device, dtype=dtype)
    mode = "compiled" if compiled else "eager"
    for _ in range(2):  # the first builds kernels
        for run in tqdm(runs, desc=f"{mode} {width}: warm-up", leave=False):
            run.once(x, g, CLOCKS[arguments.clock])
    for run in runs:
        run.forward.clear()
        run.backward.clear()
    for _ in tqdm(range(arguments.rounds), desc=f"{mode} {width}: {arguments.rounds} rounds", leave=False):
        for run in runs:
            run.once(x, g, CLOCKS[arguments.clock])
    base = runs[0]
    whole = [both(run) for run in runs]
    return [
        {
            "mode": mode, "width": width, "tokens": arguments.tokens, **run.labels,
            "ms": 1e3 * float(total.median()),
            "forward": ratio(torch.tensor(run.forward), torch.tensor(base.forward)),
            "backward": ratio(torch.tensor(run.backward), torch.tensor(base.backward)),
            "both": ratio(total, whole[0]),
        }
        for run, total in zip(runs, whole, strict=True)
    ]  # fmt: skip


def both(run: Variant) -> Tensor:
    """Seconds of forward and backward together, in each round."""
    return torch.tensor(run.forward) + torch.tensor(run.backward)


def ratio(seconds: Tensor, base: Tensor) -> dict[str, float]:
    """Of each round; median, 10th and 90th percentile."""
    low, middle, high = torch.quantile(seconds / base, torch.tensor([0.1, 0.5, 0.9])).tolist()
    return {"p10": low, "median": middle, "p90": high}


# The guard -----------------------------------------------------------------------------------------------------------


def measure_guard(name: str, width: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """A compiled training step of a stack of linears, guarded (all guards low) against static."""
    recipe = with_backend(RECIPES[name], "auto")

    def stack(make: Callable[[], nn.Module]) -> nn.Module:
        layers = [layer for _ in range(arguments.depth) for layer in (make(), nn.ReLU())]
        return nn.Sequential(*layers).to(arguments.device, DTYPES[arguments.dtype]).train()

    static = stack(lambda: StaticLinear(width, recipe))
    guarded = gnmr_fx.instrument(stack(lambda: nn.Linear(width, width, bias=False)), recipe, include=["*"])
    guarded.load_state_dict(static.state_dict())
    gnmr_fx.controller(guarded).force("low")
    x = torch.randn(arguments.tokens, width, device=arguments.device, dtype=DTYPES[arguments.dtype])
    steps = [Step(model, x, arguments.compile_backend) for model in (static, guarded)]
    clock = CLOCKS[arguments.clock]
    found = [step.once(clock) for step in steps]
    assert torch.equal(*found), "the guarded and the static stack differ"
    for step in steps:
        step.once(clock)
        step.seconds.clear()
    for _ in tqdm(range(arguments.guard_rounds), desc=f"guard, {name}, {width}", leave=False):
        for step in steps:
            step.once(clock)
    base, own = (torch.tensor(step.seconds) for step in steps)
    differences = (own - base) / arguments.depth
    return {
        "recipe": name, "width": width, "tokens": arguments.tokens, "depth": arguments.depth,
        "static_ms": 1e3 * float(base.median()), "guarded_ms": 1e3 * float(own.median()),
        "ratio": ratio(own, base), "least_ratio": float(own.min() / base.min()),
        "us_per_linear": 1e6 * float(differences.median()),
        "us_error": 1e6 * 1.25 * float(differences.std()) / math.sqrt(len(differences)),
    }  # fmt: skip


class Step:
    """A compiled model and its optimizer."""

    def __init__(self, model: nn.Module, x: Tensor, backend: str) -> None:
        self.call: Callable[[Tensor], Tensor] = torch.compile(model, backend=backend)
        self.optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        self.x = x
        self.seconds: list[float] = []

    def once(self, clock: Callable[[], float]) -> Tensor:
        """One training step; the output."""
        synchronize(self.x.device)
        start = clock()
        out = self.call(self.x)
        out.square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize(self.x.device)
        self.seconds.append(clock() - start)
        return out.detach()


# Numerics ------------------------------------------------------------------------------------------------------------


def numeric_recipes() -> dict[str, Recipe]:
    """What is compared with float64."""
    return {
        "gemm-int8-bf16": RECIPES["gemm-int8-bf16"],
        "gemm-fp8-bf16": RECIPES["gemm-fp8-bf16"],
        "gemm-fp8-tensor-bf16": RECIPES["gemm-fp8-tensor-bf16"],
        "dsv3-fp8": RECIPES["dsv3-fp8"],
        "dsv3, fp8_e5m2": dsv3("fp8_e5m2", "fp8_e5m2"),
        "dsv3-fp6 (e3m2)": RECIPES["dsv3-fp6"],
        "dsv3, fp6_e2m3": dsv3("fp6_e2m3", "fp6_e2m3"),
        "dsv3, fp6_e3m2, mx": dsv3("fp6_e3m2", "fp6_e3m2", mx=True),
        "dsv3, fp6_e2m3, mx": dsv3("fp6_e2m3", "fp6_e2m3", mx=True),
    }


def operands(kind: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [512, 384], w [256, 384] and g [512, 256] in fp32: normal, or with a few features 100 times as large in x."""
    generator = torch.Generator().manual_seed(seed)
    x, w, g = (torch.randn(*size, generator=generator) for size in ((512, 384), (256, 384), (512, 256)))
    if kind == "outliers":
        x[:, ::100] *= 100
    elif kind == "heavy tails":  # products of three normals
        x, w, g = (t * torch.randn(2, *t.shape, generator=generator).prod(0) for t in (x, w, g))
    return x, w, g


def measure_numerics(seeds: int) -> list[dict[str, Any]]:
    """One row per recipe and kind of operands; mean over seeds."""
    rows = []
    for kind in ("normal", "heavy tails", "outliers"):
        for name, recipe in tqdm(numeric_recipes().items(), desc=kind, leave=False):
            assert recipe.gemm is not None
            spec = gemm.Spec.of(replace(recipe.gemm, backend="emulated"))
            errors: dict[str, list[float]] = {which: [] for which in gemm.GEMMS}
            for seed in range(seeds):
                x, w, g = operands(kind, seed)
                common: tuple[None, bool, None, str, str, gemm.Spec] = (None, False, None, "linear", "", spec)
                found = {
                    "output": gemm.output(x, w, None, *common),
                    "grad_input": gemm.grad_input(g, w, *common, x.shape),
                    "grad_weight": gemm.grad_weight(g, x, w, *common),
                }
                exact = {
                    "output": x.double() @ w.double().t(),
                    "grad_input": g.double() @ w.double(),
                    "grad_weight": g.double().t() @ x.double(),
                }
                for which, value in found.items():
                    errors[which].append(float((value.double() - exact[which]).norm() / exact[which].norm()))
            means = {which: sum(values) / len(values) for which, values in errors.items()}
            rows.append({"operands": kind, "recipe": name, "relative_error": means})
    return rows


# Printing ------------------------------------------------------------------------------------------------------------


def show_ratio(found: dict[str, float]) -> str:
    """``"1.23 (1.20-1.30)"``."""
    return f"{found['median']:.2f} ({found['p10']:.2f}-{found['p90']:.2f})"


def times_table(rows: Sequence[dict[str, Any]]) -> str:
    """Of :func:`measure_times`."""
    headers = ("mode", "width", "recipe", "GEMMs", "guard", "ms", "forward", "backward", "both")
    cells = [
        (row["mode"], row["width"], row["variant"], row.get("backend", "-"), row.get("guard", "-"), f"{row['ms']:.2f}",
         *(show_ratio(row[part]) for part in ("forward", "backward", "both")))
        for row in rows
    ]  # fmt: skip
    return tabulate(cells, headers, disable_numparse=True, colalign=("left",) * 5 + ("right",) * 4)


def guard_table(rows: Sequence[dict[str, Any]]) -> str:
    """Of :func:`measure_guard`."""
    headers = ("recipe", "width", "linears", "static ms", "guarded ms", "ratio", "fastest, ratio", "µs per linear")
    cells = [
        (row["recipe"], row["width"], row["depth"], f"{row['static_ms']:.2f}", f"{row['guarded_ms']:.2f}",
         show_ratio(row["ratio"]), f"{row['least_ratio']:.3f}", f"{row['us_per_linear']:.0f} ± {row['us_error']:.0f}")
        for row in rows
    ]  # fmt: skip
    return tabulate(cells, headers, disable_numparse=True, colalign=("left",) + ("right",) * 7)


def numerics_table(rows: Sequence[dict[str, Any]]) -> str:
    """Of :func:`measure_numerics`."""
    cells = [
        (row["operands"], row["recipe"], *(
            f"{error:.4f} ({-20 * math.log10(error):.1f} dB)" for error in row["relative_error"].values()
        ))
        for row in rows
    ]  # fmt: skip
    headers = ("operands", "recipe", "output", "input gradient", "weight gradient")
    return tabulate(cells, headers, disable_numparse=True, colalign=("left",) * 2 + ("right",) * 3)


def save(path: Path, result: dict[str, Any]) -> None:
    """Write what there is so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print its tables, write its JSON; returns what it wrote."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--widths", type=int, nargs="+", help="default: 256 512, on cuda 2048 4096 8192")
    parser.add_argument("--tokens", type=int, help="rows of the activation (default: 512, on cuda 8192)")
    parser.add_argument("--recipes", nargs="+", choices=NAMES, default=NAMES, metavar="RECIPE", help=", ".join(NAMES))
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager"])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the plain linear and of the run")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--guard-rounds", type=int, default=200)
    parser.add_argument("--guard-recipes", nargs="+", choices=NAMES, default=["gemm-int8-bf16", "dsv3-fp6"])
    parser.add_argument("--guard-widths", type=int, nargs="+", help="default: 32 and the first of --widths")
    parser.add_argument("--depth", type=int, default=8, help="linears of the guard's stack")
    parser.add_argument("--compile-backend", default="inductor", help="of the guard's stack (default: inductor)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: processor time, on a machine in use")
    parser.add_argument("--seeds", type=int, default=3, help="of the operands of the numerics")
    parser.add_argument("--out", type=Path, default=Path("out/gemm.json"))
    arguments = parser.parse_args(argv)
    on_cuda = torch.device(arguments.device).type == "cuda"
    arguments.widths = arguments.widths or ([2048, 4096, 8192] if on_cuda else [256, 512])
    arguments.tokens = arguments.tokens or (8192 if on_cuda else 512)
    arguments.guard_widths = arguments.guard_widths or [OVERHEAD_WIDTH, arguments.widths[0]]
    torch.manual_seed(0)

    result: dict[str, Any] = {
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "version": gnmr_fx.__version__,
    }
    if "times" in arguments.only:
        for name in arguments.recipes:
            there, reason = has_native(RECIPES[name], torch.device(arguments.device))
            print(f"{name}: " + ("native kernels tried and taken" if there else f"emulated only: {reason}"))
        result["times"] = []
        for mode in arguments.modes:
            for width in arguments.widths:
                result["times"] += measure_times(width, mode == "compiled", arguments)
                save(arguments.out, result)
        print(f"\n{times_table(result['times'])}\n")
    if "guard" in arguments.only:
        cases = [(name, width) for name in arguments.guard_recipes for width in arguments.guard_widths]
        result["guard"] = []
        for name, width in cases:
            result["guard"].append(measure_guard(name, width, arguments))
            save(arguments.out, result)
            torch.compiler.reset()
        print(f"{guard_table(result['guard'])}\n")
    if "numerics" in arguments.only:
        result["numerics"] = measure_numerics(arguments.seeds)
        print(f"{numerics_table(result['numerics'])}\n")
    save(arguments.out, result)
    print(f"written to {arguments.out}")
    return result


if __name__ == "__main__":
    main()
