"""Every architecture of transformers with gnmr-fx: train it in eager mode and compiled, compare gradients, undo.

    python benchmarks/architectures.py                          # all; goes on where an earlier run stopped
    python benchmarks/architectures.py --only 'causal-lm/*' --jobs 2 --backend inductor
    python benchmarks/architectures.py --only '*/mamba' --again # measure anew
    python benchmarks/architectures.py --backend none           # a quick look: eager mode only
    python benchmarks/architectures.py --show --doc docs/architectures.md     # the table of what was measured

Takes the classes that transformers names for causal and masked language modelling, for sequence-to-sequence models and
for image classification, each with a shrunken configuration (``tiny_configs.py``), in fp32 on the CPU and without
dropout. One process per architecture, so that a crash or a hang is one row.

*Excluded* is what does not train for two steps without gnmr-fx. All others *pass* if

* gradients: with recipe saved-int4-bf16 and all guards high, outputs and every gradient are those of the stock model,
  bit for bit (of a model whose own gradients differ from run to run: to rounding);
* train: two AdamW steps on the low-cost path have finite losses, the first one the stock model's bit for bit, and every
  unit whose weight gets a gradient was guarded;
* coverage: every weight that the model multiplies with is a unit's, or is left alone for a reason in the table;
* compile: the same gradients to rounding under torch.compile, one training step there, and the same units guarded
  as in eager mode; a model that torch.compile does not take without gnmr-fx either passes without, and the table
  says so;
* uninstrument: the modules, ``state_dict()``, outputs and gradients are those of a stock model.

Models of convolutions only have no projection: ``instrument`` raises an error that says so. They do not pass.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fnmatch
import functools
import gc
import hashlib
import json
import math
import multiprocessing
import os
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from tiny_configs import build, inputs
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

import gnmr_fx
from gnmr_fx.instrument import ModelController

NONE = "none"
"""In place of a backend: the stages in eager mode only, and without a captured graph. A quick look at all."""
RECIPE = "saved-int4-bf16"
"""Its recovery path keeps the activation as it is."""
MARKER = "<!-- below: what --show prints -->"
ROUNDING = 1e-4
"""Largest difference of a gradient, in units of the largest gradient: fp32 sums in another order, through the model."""

TASKS: Mapping[str, str] = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}


@dataclass(frozen=True, order=True)
class Architecture:
    """One class of transformers in one role."""

    task: str
    model_type: str
    class_name: str

    def __str__(self) -> str:
        return f"{self.task}/{self.model_type}/{self.class_name}"


@dataclass
class Row:
    """What became of one architecture.

    Attributes:
        status: ``"pass"``, ``"fail"``, ``"no projection"`` or ``"excluded"``.
        stage, reason: where and why it did not pass; first line of the error.
        units: units found; ``ran``: of these, how many the batch runs.
        weights: weights that the model multiplies with.
        left_alone: reason -> how many of those weights.
        note: what is worth knowing of one that passes.
        graphs: graphs that torch.compile made.
        backend: of torch.compile; ``"none"``: not compiled, and instrumented without a captured graph.
        sources: a hash of the sources of gnmr-fx that it was measured with.
    """

    task: str
    model_type: str
    class_name: str
    status: str = "fail"
    stage: str = "build"
    reason: str = ""
    units: int = 0
    ran: int = 0
    weights: int = 0
    left_alone: dict[str, int] = field(default_factory=dict)
    note: str = ""
    graphs: int = 0
    seconds: float = 0.0
    sources: str = ""
    backend: str = ""


class Excluded(Exception):
    """The stock model does not train in this harness."""


class Difference(Exception):
    """Something is not as it should be."""


def architectures() -> list[Architecture]:
    """All, in the order of the tasks and of transformers' own lists."""
    import transformers.models.auto.modeling_auto as auto

    return [
        Architecture(task, model_type, class_name)
        for task, mapping in TASKS.items()
        for model_type, names in getattr(auto, mapping).items()
        for class_name in ([names] if isinstance(names, str) else names)
    ]


# One architecture -----------------------------------------------------------------------------------------------------


class Pass(NamedTuple):
    """What one forward and backward gave."""

    loss: Tensor
    outputs: list[Tensor]
    grads: dict[str, Tensor]


def _fixed_seed() -> int:
    return 0


def run(model: nn.Module, batch: Mapping[str, Any], call: Callable[..., Any] | None = None) -> Pass:
    """One forward and backward, from a fixed random state."""
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    with mock.patch.object(torch, "seed", _fixed_seed):  # Reformer's hashes start from it
        out = (model if call is None else call)(**batch)
    loss = getattr(out, "loss", None)
    floats = [t for t in tree_leaves(dict(out)) if isinstance(t, Tensor) and t.is_floating_point()]
    if loss is None:  # the class takes no labels
        loss = floats[0].float().square().mean()
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Pass(loss.detach().clone(), [t.detach().clone() for t in floats], grads)


def train(
    model: nn.Module, batch: Mapping[str, Any], steps: int, call: Callable[..., Any] | None = None
) -> list[float]:
    """Losses of ``steps`` steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        losses.append(run(model, batch, call).loss.item())
        optimizer.step()
    return losses


def different(found: Pass, expected: Pass, tolerance: float) -> str:
    """What is not the same in two passes ("" = nothing); bit for bit with tolerance 0."""
    if found.grads.keys() != expected.grads.keys():
        names = sorted(found.grads.keys() ^ expected.grads.keys())
        return f"{len(names)} gradients are missing or new: {', '.join(names[:3])}"
    outputs = [{str(at): output for at, output in enumerate(each.outputs)} for each in (found, expected)]
    for kind, (ours, theirs) in (("outputs", outputs), ("gradients", [found.grads, expected.grads])):
        unequal = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
        largest = max((float(t.abs().max()) for t in theirs.values() if t.numel()), default=0.0) or 1.0
        errors = {n: float((ours[n].double() - theirs[n].double()).abs().max()) / largest for n in unequal}
        wrong = [name for name in unequal if not errors[name] <= tolerance]
        if wrong:
            worst = max(wrong, key=lambda name: errors[name])
            return (
                f"{len(wrong)} of {len(theirs)} {kind} differ from the stock model's, most {worst} "
                f"by {errors[worst]:.1e} of the largest"
            )
    return ""


class Multiplied(TorchDispatchMode):
    """Records the storages of the operands of matrix products and convolutions, below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "mm" in name or "conv" in name or name in ("linear", "mv", "addmv", "_thnn_fused_lstm_cell"):
            factors = args[1:] if "add" in name else args  # what a product is added to is no factor
            self.seen |= {storage(t) for t in tree_leaves((factors, kwargs)) if isinstance(t, Tensor) and t.dim() >= 2}
        return func(*args, **(kwargs or {}))


def storage(tensor: Tensor) -> int:
    """Where the memory of ``tensor`` begins."""
    return tensor.untyped_storage().data_ptr()


def multiplied_weights(model: nn.Module, batch: Mapping[str, Any]) -> list[list[str]]:
    """All names of each parameter of two or more dimensions that a forward multiplies with."""
    with Multiplied() as mode:
        torch.manual_seed(0)
        model(**batch)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.dim() >= 2 and storage(parameter) in mode.seen:
            names.setdefault(storage(parameter), []).append(name)
    return list(names.values())


def structure(model: nn.Module) -> dict[str, Any]:
    """Classes, attributes and numbers of hooks of all modules."""
    return {
        path: (type(module), frozenset(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks))
        for path, module in model.named_modules()
    }


def first_line(error: BaseException) -> str:
    """Class and first line of an error; two lines where the first announces the second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {line}"[:300]


class Check:
    """The stages for one architecture; each fills in its part of the row, or raises."""

    def __init__(self, row: Row, backend: str) -> None:
        self.row = row
        self.backend = backend
        self.tolerance = 0.0

    def all(self) -> None:
        """Run them in order."""
        for stage in (
            self.stock,
            self.instrument,
            self.gradients,
            self.train,
            self.coverage,
            self.compile,
            self.uninstrument,
        ):
            if stage == self.compile and self.backend == NONE:
                continue
            self.row.stage = stage.__name__
            stage()
        self.row.status, self.row.stage = "pass", ""

    def stock(self) -> None:
        """The model without gnmr-fx: two steps, and gradients to compare with."""
        row = self.row
        try:
            torch.manual_seed(0)
            self.model = build(row.task, row.model_type, row.class_name)
            self.batch = inputs(self.model, row.task)
            self.reference = copy.deepcopy(self.model)
            trained = copy.deepcopy(self.model)
            self.losses = train(trained, self.batch, 2)
        except Exception as error:
            raise Excluded(first_line(error)) from error
        if not all(map(math.isfinite, self.losses)):
            raise Excluded(f"losses {self.losses} without gnmr-fx")
        start = copy.deepcopy(self.reference)
        self.expected = run(self.reference, self.batch)
        if not self.expected.grads:
            raise Excluded("no gradients without gnmr-fx")
        if different(run(start, self.batch), self.expected, 0.0):
            self.tolerance = ROUNDING
            row.note = "gradients of the stock model itself differ from run to run"

    def instrument(self) -> None:
        """``gnmr_fx.instrument``, with nothing but a recipe."""
        self.fresh = copy.deepcopy(self.model)
        with contextlib.ExitStack() as stack:
            if self.backend == NONE:  # as a model that Dynamo cannot capture
                stack.enter_context(mock.patch("gnmr_fx.passes.capture.inputs_from_config", return_value=None))
            gnmr_fx.instrument(self.model, RECIPE, max_active=0.25)
        self.row.units = len(self.controller.units)

    @property
    def controller(self) -> ModelController:
        """Of the model."""
        return gnmr_fx.controller(self.model)

    def gradients(self) -> None:
        """All guards high, against the stock model."""
        self.controller.force("high")
        problem = different(run(self.model, self.batch), self.expected, self.tolerance)
        if problem:
            raise Difference(problem)
        self.controller.force(None)

    def train(self) -> None:
        """Two steps as a user takes them."""
        self.model.load_state_dict(self.fresh.state_dict())
        losses = train(self.model, self.batch, 2)
        if not all(map(math.isfinite, losses)):
            raise Difference(f"losses {losses}; without gnmr-fx {self.losses}")
        if losses[0] != self.losses[0] and not self.tolerance:
            raise Difference(f"the first loss is {losses[0]!r}; without gnmr-fx {self.losses[0]!r}")
        if self.controller.step_count != 2:
            raise Difference(f"the controller saw {self.controller.step_count} steps of 2")

    def coverage(self) -> None:
        """Every weight that takes part in a product is a unit's or is listed."""
        units = {f"{u.spec.owner}.{u.spec.parameter}".lstrip("."): u for u in self.controller.units}
        reasons = {item.name: item.reason for item in self.controller.left_alone}
        left: Counter[str] = Counter()
        missed, unguarded = [], []
        weights = multiplied_weights(self.fresh, self.batch)
        for names in weights:
            unit = next((units[name] for name in names if name in units), None)
            listed = [reasons.get(name) or reasons.get(name.removesuffix(".weight")) for name in names]
            if unit is not None:
                self.row.ran += 1
                if not unit.observation.seen and any(name in self.expected.grads for name in names):
                    unguarded.append(unit.name)
            elif any(listed):
                left[next(filter(None, listed))] += 1
            else:
                missed.append(names[0])
        self.row.weights, self.row.left_alone = len(weights), dict(left)
        self.guarded = {unit.name for unit in self.controller.units if unit.observation.seen}
        if missed:
            raise Difference(f"{len(missed)} of {len(weights)} weights are in no table: {', '.join(missed[:3])}")
        if unguarded:
            raise Difference(f"{len(unguarded)} of {self.row.ran} units ran unguarded: {', '.join(unguarded[:3])}")

    def compile(self) -> None:
        """Gradients with all guards high, then a step of the optimizer, under torch.compile."""
        self.model.load_state_dict(self.fresh.state_dict())
        for unit in self.controller.units:
            unit.observation.was_seen = False
            unit.observation.calls.clear()
            unit.observation.last.clear()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self.controller.force("high")
        try:
            compiled = torch.compile(self.model, backend=self.backend)
            torch.compile(self.reference, backend=self.backend)  # leaves a mark on a module, called or not
            found = run(self.model, self.batch, compiled)
        except Exception as error:
            self._blame_stock(error)
            return
        self.row.graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        self.controller.force(None)
        torch.optim.AdamW(self.model.parameters(), lr=1e-3).step()
        if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            raise Difference("parameters are not finite after a compiled step")
        problem = different(found, self.expected, ROUNDING)
        if problem:
            torch._dynamo.reset()
            stock = copy.deepcopy(self.fresh)
            expected = run(stock, self.batch, torch.compile(stock, backend=self.backend))
            problem = different(found, expected, ROUNDING) and problem
        if problem:
            raise Difference(problem)
        lost = sorted(self.guarded - {unit.name for unit in self.controller.units if unit.observation.seen})
        if lost:
            raise Difference(
                f"{len(lost)} of {len(self.guarded)} units are not guarded when compiled: {', '.join(lost[:3])}"
            )

    def _blame_stock(self, error: Exception) -> None:
        """Raise ``error``, unless the stock model fails under torch.compile as well."""
        torch._dynamo.reset()
        stock = copy.deepcopy(self.fresh)
        try:
            run(stock, self.batch, torch.compile(stock, backend=self.backend))
        except Exception as own:
            self.row.note = f"torch.compile fails without gnmr-fx too: {first_line(own)}"
            return
        raise error

    def uninstrument(self) -> None:
        """A stock model again."""
        gnmr_fx.uninstrument(self.model)
        if structure(self.model) != structure(self.reference):
            ours, theirs = structure(self.model), structure(self.reference)
            paths = [path for path in theirs if ours.get(path) != theirs[path]]
            names = sorted(ours[paths[0]][1] ^ theirs[paths[0]][1]) if paths else []
            raise Difference(f"{len(paths)} modules differ from those of a stock model: {paths[:2]} {names[:3]}")
        self.model.load_state_dict(self.fresh.state_dict())
        problem = different(run(self.model, self.batch), run(self.fresh, self.batch), self.tolerance)
        if problem:
            raise Difference(problem)


def measure(architecture: Architecture, backend: str) -> Row:
    """The row of one architecture."""
    row = Row(**asdict(architecture), sources=sources(), backend=backend)
    start = time.perf_counter()
    try:
        Check(row, backend).all()
    except Excluded as error:
        row.status, row.reason = "excluded", str(error)
    except Difference as error:
        row.reason = str(error)
    except gnmr_fx.errors.NoRecoverableOperatorError as error:
        row.status, row.reason = "no projection", first_line(error)
    except Exception as error:
        row.reason = first_line(error)
        if os.environ.get("GNMR_TRACEBACK"):
            traceback.print_exc()
    row.seconds = round(time.perf_counter() - start, 1)
    return row


# All of them ----------------------------------------------------------------------------------------------------------


def sweep(
    chosen: Sequence[Architecture], backend: str, jobs: int, limit: float, verbose: bool = False
) -> Iterator[Row]:
    """Rows in the order they are done, each from a process of its own that ends after ``limit`` seconds."""
    context = multiprocessing.get_context("fork")  # transformers and torch are imported once
    _warm_up(backend)
    waiting = list(chosen)
    running: dict[Connection, tuple[Architecture, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(waiting[0], backend, send, verbose), daemon=True)
            process.start()
            send.close()
            running[receive] = (waiting.pop(0), process, time.monotonic() + limit)
        ready = wait(list(running), timeout=1.0)
        for receive, (architecture, process, end) in list(running.items()):
            if receive not in ready and time.monotonic() < end:
                continue
            row = Row(**asdict(architecture), stage="", reason=f"no result within {limit:.0f} s", seconds=limit)
            if receive in ready:
                try:
                    row = receive.recv()
                except EOFError:
                    process.join()
                    row.reason, row.seconds = f"the process ended with code {process.exitcode}", 0.0
            process.kill()
            process.join()
            del running[receive]
            yield row


def _warm_up(backend: str) -> None:
    import importlib

    import torch._dynamo
    import torch._inductor.compile_fx
    import transformers

    sources()
    transformers.logging.set_verbosity_error()
    for name in ("llama", "mixtral", "bert", "t5", "bart", "vit", "clip", "mamba"):
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measure(Architecture("causal-lm", "llama", "LlamaForCausalLM"), backend)  # builds the kernels of common widths


def _child(architecture: Architecture, backend: str, send: Connection, verbose: bool) -> None:
    if not verbose:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.disable()  # compiling makes garbage collection expensive, and the process ends soon
    send.send(measure(architecture, backend))


@functools.cache
def sources() -> str:
    """A hash of the sources of gnmr-fx, as they were when this was first called."""
    root = Path(gnmr_fx.__file__).parent
    files = sorted([*root.glob("*.py"), *(root.parent / "passes").glob("*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def read(path: Path) -> dict[Architecture, Row]:
    """The last row of each architecture."""
    if not path.exists():
        return {}
    rows = [Row(**json.loads(line)) for line in path.read_text().splitlines()]
    return {Architecture(row.task, row.model_type, row.class_name): row for row in rows}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not measured yet; or show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["*"], metavar="GLOB", help="on task/model_type or its class")
    parser.add_argument("--backend", default="aot_eager", help='of torch.compile; "none": eager mode only')
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one architecture")
    parser.add_argument("--json", type=Path, default=Path("out/architectures.jsonl"), help="rows are appended to it")
    parser.add_argument("--again", action="store_true", help="measure those again that have a row")
    parser.add_argument("--failed", action="store_true", help="measure those again that did not pass")
    parser.add_argument("--show", action="store_true", help="measure nothing: print the table, in Markdown")
    parser.add_argument("--doc", type=Path, help="with --show: write it into this file, below the line that says so")
    parser.add_argument("--verbose", action="store_true", help="show what the processes print")
    options = parser.parse_args(arguments)
    done = read(options.json)
    if options.show:
        shown = markdown(done)
        print(shown)
        if options.doc:
            above, marker, _ = options.doc.read_text().partition(MARKER)
            options.doc.write_text(f"{above}{marker or MARKER}\n\n{shown}\n")
        return

    def wanted(architecture: Architecture) -> bool:
        row = done.get(architecture)
        new = row is None or options.again or (options.failed and row.status != "pass")
        new = new or (row is not None and row.backend == NONE != options.backend)
        names = (f"{architecture.task}/{architecture.model_type}", architecture.class_name)
        return new and any(fnmatch.fnmatch(name, pattern) for name in names for pattern in options.only)

    chosen = list(filter(wanted, architectures()))
    random.Random(0).shuffle(chosen)  # what is done so far is a sample
    options.json.parent.mkdir(parents=True, exist_ok=True)
    bar = tqdm(total=len(chosen), file=sys.stderr)
    for row in sweep(chosen, options.backend, options.jobs, options.limit, options.verbose):
        with options.json.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        if row.status != "pass":
            bar.write(f"{row.task}/{row.model_type}/{row.class_name}: {row.status}, {row.stage}: {row.reason}")
        bar.update()


# The table ------------------------------------------------------------------------------------------------------------


def markdown(rows: Mapping[Architecture, Row]) -> str:
    """What became of each architecture, in Markdown."""
    ordered = [rows[architecture] for architecture in architectures() if architecture in rows]
    parts = [_summary(ordered), _how(ordered)]
    for task in TASKS:
        passed = [row for row in ordered if row.task == task and row.status == "pass"]
        if passed:
            parts.append(f"### {task}: {len(passed)} pass\n\n" + ", ".join(map(_brief, passed)) + ".")
    titles = {
        "fail": "Do not pass",
        "no projection": "Have no projection",
        "excluded": "Do not train without gnmr-fx in this harness",
    }
    for status, title in titles.items():
        chosen = [row for row in ordered if row.status == status]
        if chosen:
            cells = [(_name(row), row.stage, _cell(row.reason)) for row in chosen]
            parts.append(f"### {title}: {len(chosen)}\n\n" + _table(cells, ("architecture", "stage", "why")))
    notes = [(_name(row), _cell(row.note)) for row in ordered if row.status == "pass" and row.note]
    if notes:
        parts.append(f"### Pass, with a note: {len(notes)}\n\n" + _table(notes, ("architecture", "note")))
    left: Counter[str] = Counter()
    for row in ordered:
        left.update(row.left_alone)
    reasons = [(_cell(reason), str(count)) for reason, count in left.most_common()]
    parts.append("### Weights left alone\n\n" + _table(reasons, ("reason", "weights")))
    return "\n\n".join(parts)


def _summary(rows: Sequence[Row]) -> str:
    cells = []
    for task in (*TASKS, "all"):
        chosen = [row for row in rows if task in (row.task, "all")]
        count = Counter(row.status for row in chosen)
        trained = len(chosen) - count["excluded"]
        share = f"{100 * count['pass'] / trained:.1f}%" if trained else "-"
        ran = sum(row.ran for row in chosen)
        weights = sum(row.weights for row in chosen if row.status != "excluded")
        numbers = (len(chosen), count["excluded"], trained, count["pass"], count["no projection"], count["fail"])
        cells.append((task, *map(str, numbers), share, str(weights), str(ran)))
    counts = ("architectures", "excluded", "train", "pass", "no projection", "fail")
    headers = ("task", *counts, "pass of train", "weights multiplied", "of these units")
    return _table(cells, headers)


def _how(rows: Sequence[Row]) -> str:
    present = sum(row.sources == sources() for row in rows)
    backends = Counter(row.backend for row in rows if row.status in ("pass", "fail"))
    quick = backends.pop(NONE, 0)
    compiled = ", ".join(f"{count} with backend {name}" for name, count in backends.items()) or "none"
    return (
        f"All stages: {compiled}. Eager stages only, instrumented without a captured graph: {quick}. "
        f"Of the present sources: {present} rows, of earlier ones: {len(rows) - present}."
    )


def _brief(row: Row) -> str:
    return f"{_name(row).partition('/')[2]} {row.ran}" + (f" of {row.units}" if row.units != row.ran else "")


def _name(row: Row) -> str:
    import transformers.models.auto.modeling_auto as auto

    classes = getattr(auto, TASKS[row.task])[row.model_type]
    return f"{row.task}/{row.model_type}" + ("" if isinstance(classes, str) else f" ({row.class_name})")


def _cell(text: str) -> str:
    """Fit for a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def _table(cells: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    lines = [headers, ["---"] * len(headers), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
