"""``gnmr-fx doctor``: what this machine can run, by trying it on tiny tensors."""

from __future__ import annotations

import functools
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gnmr_fx import formats, frozen
from gnmr_fx.gemm import GEMMS, native_kernel
from gnmr_fx.recipe import FULL, RECIPES, GemmRecipe, Operands, Recipe
from gnmr_fx.text import grid, to_json

__all__ = ["Examination", "Tried", "devices", "examine", "what_computes"]

PACKAGES = (
    "gnmr-fx",
    "torch",
    "torchao",
    "transformers",
    "peft",
    "accelerate",
    "lightning",
    "tensorboard",
    "matplotlib",
)
_COMPILE_SECONDS = 20.0
_CPU_FEATURES = (
    ("AVX2", "_is_avx2_supported"),
    ("AVX-512", "_is_avx512_supported"),
    ("AVX-512 VNNI (int8)", "_is_avx512_vnni_supported"),
    ("AVX-512 BF16", "_is_avx512_bf16_supported"),
    ("AMX tiles (bf16, int8)", "_is_amx_tile_supported"),
)
"""What ``torch.cpu`` can be asked, where this version of torch has the question."""


class Tried(NamedTuple):
    """Something that was tried: whether it works, and what is to be said about it."""

    name: str
    works: bool
    note: str = ""


@dataclass(frozen=True)
class Examination:
    """What was found; prints as text.

    Attributes:
        packages: name -> version, ``""`` where it is not installed.
        machine: the processor and its features, and the devices.
        toolchain: what ``torch.compile`` and the fused packing kernels need.
        operators: matrix products in low precision, on each device.
        recipes: each named recipe; ``works`` says that it runs as named, ``note`` how, or what runs in its place.
    """

    packages: Mapping[str, str]
    machine: tuple[Tried, ...]
    toolchain: tuple[Tried, ...]
    operators: tuple[Tried, ...]
    recipes: tuple[Tried, ...]

    def to_json(self, indent: int | None = None) -> str:
        """Everything as a JSON object."""
        lists = {
            name: [item._asdict() for item in value] if isinstance(value, tuple) else value
            for name, value in ((field, getattr(self, field)) for field in asdict(self))
        }
        return to_json(lists, indent)

    def __str__(self) -> str:
        packages = [(name, found or "not installed") for name, found in self.packages.items()]
        blocks = [grid([("python", platform.python_version()), *packages], style="plain")]
        for title, items in (
            ("machine", self.machine),
            ("torch.compile and fused packing", self.toolchain),
            ("low-precision matrix products", self.operators),
            ("recipes", self.recipes),
        ):
            rows = [(item.name, "yes" if item.works else "no", item.note) for item in items]
            blocks.append(f"{title}\n{grid(rows, style='plain')}")
        return "\n\n".join(blocks)


def examine() -> Examination:
    """Try it all; seconds."""
    toolchain = _toolchain()
    found = devices()
    return Examination(
        packages={name: _version(name) for name in PACKAGES},
        machine=_machine(),
        toolchain=toolchain,
        operators=tuple(tried for device in found for tried in _operators(device)),
        recipes=tuple(_recipe(recipe, found[-1], toolchain) for recipe in RECIPES.values()),
    )


def devices() -> list[str]:
    """The kinds of device that there are: ``"cpu"``, and behind it the accelerator, if torch has one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def _version(package: str) -> str:
    if package == "torch":
        return torch.__version__  # with the build, such as +cu130, which the package's metadata may leave out
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _machine() -> tuple[Tried, ...]:
    cpu = Tried(
        f"processor {platform.machine()}",
        True,
        f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, torch kernels for "
        f"{torch.backends.cpu.get_cpu_capability()}",
    )
    features = [
        Tried(name, bool(getattr(torch.cpu, query)())) for name, query in _CPU_FEATURES if hasattr(torch.cpu, query)
    ]
    cards = [Tried("accelerator", False, "none that torch sees")]
    if torch.cuda.is_available():
        cards = []
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            cards.append(Tried(card.name, True, f"capability {card.major}.{card.minor}, {card.total_memory >> 30} GiB"))
    elif len(devices()) > 1:
        cards = [Tried(devices()[-1], True, "not under test with gnmr-fx")]
    return (cpu, *features, *cards)


# torch.compile -------------------------------------------------------------------------------------------------------


def _toolchain() -> tuple[Tried, ...]:
    cpu = _cpp_compiler()
    if devices()[-1] == "cpu":
        return (cpu,)
    return (cpu, _tried("Triton", lambda: f"version {__import__('triton').__version__}"))


def _cpp_compiler() -> Tried:
    """Build and link a few lines with OpenMP, as Inductor's kernels are."""

    def build() -> str:
        # As Inductor chooses it; asking Inductor itself takes seconds of imports.
        compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.cpp"
            source.write_text("#include <cmath>\n#include <omp.h>\nint f() { return omp_get_max_threads(); }\n")
            command = [compiler, "-std=c++17", "-shared", "-fPIC", "-fopenmp", str(source), "-o", f"{folder}/probe.so"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
        if done.returncode:
            raise RuntimeError(done.stderr or f"exit code {done.returncode}")
        return compiler

    found = _tried("C++ compiler", build)
    return found if found.works else found._replace(note=f"{found.note}; without one, plain PyTorch code packs")


# Matrix products -----------------------------------------------------------------------------------------------------

_SIZE = 128
"""Rows and columns: some of these are thousands of times slower than bf16, and take seconds at large sizes."""
_BASE = "bf16 torch.mm"


def _operators(device: str) -> list[Tried]:
    def ones(dtype: torch.dtype) -> Tensor:
        return torch.ones(_SIZE, _SIZE, device=device).to(dtype)

    def scaled(shape: tuple[int, ...]) -> Callable[[], Tensor]:
        a, b, scale = ones(torch.float8_e4m3fn), ones(torch.float8_e4m3fn).t(), torch.ones(shape, device=device)
        return lambda: torch._scaled_mm(a, b, scale, scale.t() if shape else scale, out_dtype=torch.bfloat16)

    def plain(multiply: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> Callable[[], Tensor]:
        a, b = ones(dtype), ones(dtype)
        return lambda: multiply(a, b)

    attempts: tuple[tuple[str, Callable[[], Callable[[], Tensor]]], ...] = (
        (_BASE, lambda: plain(torch.mm, torch.bfloat16)),
        ("int8 torch._int_mm", lambda: plain(torch._int_mm, torch.int8)),
        ("fp8 torch._scaled_mm, one scale", lambda: scaled(())),
        ("fp8 torch._scaled_mm, a scale per row", lambda: scaled((_SIZE, 1))),
    )
    seconds: dict[str, float] = {}

    def attempt(name: str, prepare: Callable[[], Callable[[], Tensor]]) -> str:
        multiply = prepare()
        wrong = (multiply().float() - _SIZE).abs().max().item()
        if wrong:
            raise RuntimeError(f"a product of ones is off by {wrong:g}")
        seconds[name] = _seconds(multiply, device)
        base = seconds.get(_BASE)
        return "" if name == _BASE or base is None else f"{seconds[name] / base:.3g} × the time of bf16 at {_SIZE}³"

    return [_tried(f"{device}: {name}", functools.partial(attempt, name, prepare)) for name, prepare in attempts]


def _seconds(run: Callable[[], Tensor], device: str, repeats: int = 5) -> float:
    """The least time of a few calls."""
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        if device != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def _tried(name: str, attempt: Callable[[], str]) -> Tried:
    try:
        return Tried(name, True, attempt())
    except Exception as error:  # whatever a missing kernel, compiler or package raises
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
        return Tried(name, False, f"{type(error).__name__}: {line[:100]}")


# Recipes -------------------------------------------------------------------------------------------------------------


def _recipe(recipe: Recipe, device: str, toolchain: tuple[Tried, ...]) -> Tried:
    """How a recipe runs on ``device``: what stores its activations, and what computes its GEMMs."""

    def store() -> str:
        x = torch.linspace(-1, 1, 256, device=device).view(2, 128)
        seed = torch.tensor(0)
        for fmt in (recipe.low, recipe.high):
            encoded = formats.encode(x, fmt, seed if fmt.is_stochastic else None)
            formats.decode(encoded, fmt, x.shape, x.dtype)
        kernels = toolchain[-1 if device != "cpu" else 0]
        packing = "fused kernels" if kernels.works else f"plain PyTorch code (no {kernels.name})"
        if recipe.frozen is not None:
            weight = torch.linspace(-1, 1, 64 * 64, device=device).view(64, 64)
            frozen.decode(frozen.encode(weight, recipe.frozen.spec), recipe.frozen.spec, weight.shape, weight.dtype)
            return f"on {device}: frozen weights by {packing}"
        gemms = "" if recipe.gemm is None else f", GEMMs {what_computes(recipe.gemm, torch.device(device))}"
        return f"on {device}: activations by {packing}{gemms}"

    return _tried(recipe.name or str(recipe), store)


def what_computes(recipe: GemmRecipe, device: torch.device) -> str:
    """What computes a recipe's GEMMs on the low-cost and on the recovery path, as far as the device decides it.

    Returns:
        ``"emulated"``, ``"native -> full"``, ...: what :func:`gnmr_fx.gemm.native_kernel` finds by trying. (Shapes and
        dtypes of a model may rule a kernel out that is there; its table tells after a forward.)
    """
    low, high = (
        _path([getattr(getattr(recipe, gemm), path) for gemm in GEMMS], recipe.backend, device)
        for path in ("low", "high")
    )
    return low if low == high else f"{low} -> {high}"


def _path(operands: list[Operands], backend: str, device: torch.device) -> str:
    found = dict.fromkeys(_one(each, backend, device) for each in operands)
    return " and ".join(found)


def _one(operands: Operands, backend: str, device: torch.device) -> str:
    if operands == FULL:
        return "full"
    native = backend != "emulated" and native_kernel(operands, device)[0] is not None
    return "native" if native else "emulated"
