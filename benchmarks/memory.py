"""What training keeps between forward and backward: stock, checkpointing, PyTorch's fp8 pass and gnmr-fx side by side.

    python benchmarks/memory.py                               # small models of six architectures, eager and compiled
    python benchmarks/memory.py --models llama --large --dtype float32    # hidden 512, 8 layers, sequence 512
    python benchmarks/memory.py --large --bytes-only --modes eager partitioned      # all six at that size in bf16
    python benchmarks/memory.py --show --json out/memory.jsonl --plot docs/memory.png      # what was measured before

The modes are eager, compiled (by Inductor) and partitioned: the same graphs, interpreted, for bytes alone.

Every variant trains a copy of the same model on the same batch, all guards low, and is measured after a warm-up step;
with --large each in a process of its own, since peak memory is a process's. *Kept* is the number of bytes of the
distinct storages that autograd holds between forward and backward, parameters, buffers and inputs left out; *no loss
head* leaves out, in every variant alike, tensors as wide as the vocabulary. *Peak* is how far the process's memory
grows during steps after the first. *Error* is that of the whole gradient, relative to the stock model's in eager mode.
Times are medians, as ratios to stock in the same mode.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import logging
import multiprocessing
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from step import autograd_nodes
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import gnmr_fx
from gnmr_fx.saved import AsItIs, Packed

VOCABULARY = 1000
VARIANTS = (
    "stock", "checkpointing", "fp8 pass", "projections int4", "all int8", "all int4", "all int2", "all int4, low q k",
    "all int2, int4 q k", "all int2, low q k",
)  # fmt: skip
MODELS = ("llama", "gpt2", "bert", "qwen3", "mixtral", "vit")


def build(name: str, large: bool, dtype: torch.dtype, seed: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model in train mode, and a batch."""
    import transformers as t

    torch.manual_seed(seed)
    hidden, layers, heads, length, batch = (512, 8, 8, 512, 1) if large else (128, 2, 4, 128, 4)
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": length,
        "use_cache": False,
    }
    gated = {**common, "intermediate_size": hidden * 11 // 4, "num_key_value_heads": heads // 2}
    if name == "vit":
        config = t.ViTConfig(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * hidden,
            image_size=176 if not large else 352, patch_size=16, num_labels=VOCABULARY, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, problem_type="single_label_classification",
        )  # fmt: skip
        model: nn.Module = t.ViTForImageClassification(config)
        pixels = torch.randn(batch, 3, config.image_size, config.image_size, dtype=dtype)
        return model.to(dtype).train(), {"pixel_values": pixels, "labels": torch.arange(batch)}
    models: Mapping[str, Callable[[], nn.Module]] = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**gated)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**gated, head_dim=hidden // heads)),
        "mixtral": lambda: t.MixtralForCausalLM(
            t.MixtralConfig(**gated, num_local_experts=4, experts_implementation="grouped_mm")
        ),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(
                n_embd=hidden,
                n_layer=layers,
                n_head=heads,
                vocab_size=VOCABULARY,
                n_positions=length,
                use_cache=False,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        ),
        "bert": lambda: t.BertForMaskedLM(
            t.BertConfig(
                **common, intermediate_size=4 * hidden, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
            )
        ),
    }
    ids = torch.randint(0, VOCABULARY, (batch, length))
    language: Any = models[name]().to(dtype).train()
    if name == "gpt2":
        language.loss_type = "ForCausalLM"  # else its loss logs a message, where Dynamo breaks the graph
    return language, {"input_ids": ids, "labels": ids.clone()}


MODES: Mapping[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "eager": lambda model: model,
    "compiled": lambda model: torch.compile(model),
    "partitioned": lambda model: torch.compile(model, backend=partition_only()),
}


def partition_only() -> Callable[..., Any]:
    """A backend that gives Inductor's partitioner the graphs that Inductor would, and interprets what comes out.

    What is kept is the partitioner's choice; compiling the graphs takes minutes, and changes but the layout of it.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    def interpret(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return make_boxed_func(graph.forward)

    def partition(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        chosen = config.custom_partitioner_fn or min_cut_rematerialization_partition
        return chosen(graph, inputs, compiler="inductor", **options)

    decompositions = select_decomp_table()
    return aot_autograd(
        fw_compiler=interpret, bw_compiler=interpret, partition_fn=partition, decompositions=decompositions
    )


def skip_products() -> torch.library.Library:
    """Let matrix products on the CPU give zeros while the result is alive: bytes do not depend on values, and bf16
    products take minutes on many CPUs."""
    library = torch.library.Library("aten", "IMPL")

    def zeros(*operands: Tensor, **_: Any) -> Tensor:
        a, b = operands[-2:]
        return a.new_zeros(*a.shape[:-1], b.shape[-1])

    def fill(*_: Tensor, out: Tensor, **__: Any) -> Tensor:
        return out.zero_()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced
        for name in ("mm", "addmm", "bmm", "baddbmm"):
            library.impl(name, zeros, "CPU")
            library.impl(f"{name}.out", fill, "CPU")
        library.impl("_grouped_mm", lambda a, b, *_, **__: zeros(a, b), "CPU")
    return library


def prepare(model: nn.Module, variant: str) -> dict[str, Any]:
    """Set ``model`` up as ``variant`` says; the options of Inductor's passes."""
    if variant == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    elif variant == "fp8 pass":
        options = {
            "quant_type": "torch.float8_e5m2", "size_in_mb": 0.004, "use_scaling": True, "exclude_primals": True,
            "allowed_dtypes": "torch.bfloat16;torch.float32",
        }  # fmt: skip
        return {"activation_quantization_aten_pass": options}
    elif variant != "stock":
        scope, _, rest = variant.partition(" ")
        bits, _, attention = rest.removesuffix(" q k").partition(", ")
        queries: Any = attention or "int8"
        all_saved = gnmr_fx.AllSaved(min_bytes=1 << 12, attention=queries)
        recipe = gnmr_fx.Recipe(gnmr_fx.Format.parse(bits), gnmr_fx.Format("int8"))
        gnmr_fx.instrument(model, recipe, scope="projections" if scope == "projections" else all_saved)
        gnmr_fx.controller(model).force("low")
    return {}


def kept(loss: Tensor, exclude: list[Tensor]) -> tuple[int, int]:
    """Bytes that the autograd graph of ``loss`` holds: all of them, and those that are no loss head's."""
    own = {t.untyped_storage().data_ptr() for t in exclude}
    everything: dict[int, int] = {}
    head: set[int] = set()
    for node in autograd_nodes(loss):
        for tensor in held_by(node):
            at = tensor.untyped_storage().data_ptr()
            if at not in own:
                everything[at] = tensor.untyped_storage().nbytes()
                if tensor.dim() and tensor.shape[-1] == VOCABULARY:
                    head.add(at)
    return sum(everything.values()), sum(size for at, size in everything.items() if at not in head)


def held_by(node: Any) -> Iterator[Tensor]:
    """The tensors that an autograd node holds, as they are stored."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            raw = getattr(node, name)
            for one in raw if isinstance(raw, tuple | list) else [raw]:
                try:
                    data = one.data
                except (RuntimeError, AttributeError):
                    continue
                if isinstance(data, Packed):
                    yield from data.encoded
                elif isinstance(data, AsItIs):
                    yield data.tensor
                elif isinstance(data, Tensor):
                    yield data
    for value in [*(getattr(node, "saved_tensors", None) or ()), *(getattr(node, "_tensors_no_vc_check", None) or ())]:
        if isinstance(value, Tensor):
            yield value


def reset_peak() -> float:
    """Give freed memory back, and forget the process's peak, where the system can; MiB in use now."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return memory("VmRSS")


def memory(field: str) -> float:
    """``VmHWM`` (peak) or ``VmRSS`` (now) of this process in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    return float("nan")


def measure(task: tuple[str, str, str, bool, str, int]) -> dict[str, Any]:
    """One variant of one model, in this process."""
    name, variant, mode, large, dtype, rounds = task
    for noisy in ("torchao", "torch.utils._pytree", "transformers"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    model, batch = build(name, large, getattr(torch, dtype))
    stock = gradients(model, batch, model) if rounds else {}
    kernels = None if rounds else skip_products()
    from torch._inductor import config

    with config.patch(post_grad_fusion_options=prepare(model, variant)):
        found = {"model": name, "variant": variant, **measured(model, batch, mode, rounds, stock)}
    del kernels
    return found


def measured(
    model: nn.Module, batch: dict[str, Tensor], mode: str, rounds: int, stock: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The figures of a model that is set up; without ``rounds`` nothing but bytes, of one forward."""
    call = MODES[mode](model)
    exclude = [*model.parameters(), *model.buffers(), *batch.values()]
    found = gradients(model, batch, call) if rounds else {}
    loss = call(**batch).loss
    total, body = kept(loss, exclude)
    if rounds:
        loss.backward()
    del loss
    gc.collect()
    if not rounds:
        return {"mode": mode, "kept": total, "kept_body": body, "peak_mib": None, "ms": None, "error": None}
    before = reset_peak()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call(**batch).loss.backward()
        seconds.append(time.perf_counter() - start)
    peak = memory("VmHWM") - before
    return {
        "mode": mode,
        "kept": total,
        "kept_body": body,
        "peak_mib": peak,
        "ms": 1e3 * statistics.median(seconds),
        "error": error(found, stock),
    }


def gradients(model: nn.Module, batch: dict[str, Tensor], call: Callable[..., Any] | None) -> dict[str, Tensor]:
    """Of the model's own loss."""
    model.zero_grad(set_to_none=True)
    (model if call is None else call)(**batch).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Of the whole gradient, relative."""
    difference = sum(float((found[k].double() - g.double()).square().sum()) for k, g in expected.items())
    return float((difference / sum(float(g.double().square().sum()) for g in expected.values())) ** 0.5)


def table(results: list[dict[str, Any]]) -> str:
    """A row for each result, ratios to stock in the same mode."""
    stock = {(r["model"], r["mode"]): r for r in results if r["variant"] == "stock"}
    rows = []
    for r in results:
        base = stock.get((r["model"], r["mode"]))
        ratios = [ratio(r, base, key) for key in ("kept", "kept_body", "ms")]
        peak = number(r["peak_mib"], ".1f")
        kept_mib = f"{r['kept'] / 2**20:.2f}"
        rows.append(
            (r["model"], r["mode"], r["variant"], kept_mib, *ratios[:2], peak, ratios[2], number(r["error"], ".4f"))
        )
    headers = ("model", "mode", "variant", "kept MiB", "ratio", "no loss head", "peak MiB", "time", "error")
    return tabulate(rows, headers, disable_numparse=True, colalign=("left",) * 3 + ("right",) * 6)


def number(value: float | None, form: str) -> str:
    """As text; "-" for None."""
    return "-" if value is None else format(value, form)


def ratio(result: Mapping[str, Any], base: Mapping[str, Any] | None, key: str) -> str:
    """Of one figure to the same one of ``base``."""
    return f"{result[key] / base[key]:.3f}" if base and base[key] and result[key] else "-"


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Bars of what is kept, relative to stock, loss head left out."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    modes = [mode for mode in MODES if any(r["mode"] == mode for r in results)]
    figure, axes = plt.subplots(len(modes), 1, figsize=(9, 3.2 * len(modes)), squeeze=False)
    models = list(dict.fromkeys(r["model"] for r in results))
    variants = [v for v in VARIANTS if any(r["variant"] == v for r in results)]
    for axis, mode in zip(axes[:, 0], modes, strict=True):
        for at, variant in enumerate(variants):
            heights = []
            for model in models:
                own = {r["variant"]: r["kept_body"] for r in results if r["model"] == model and r["mode"] == mode}
                heights.append(own.get(variant, float("nan")) / own.get("stock", float("nan")))
            axis.bar([m + (at - len(variants) / 2) * 0.8 / len(variants) for m in range(len(models))], heights,
                     0.8 / len(variants), align="edge", label=variant)  # fmt: skip
        axis.set_xticks(range(len(models)), models)
        axis.set_ylabel("kept, ratio to stock")
        axis.set_title(f"{mode}: bytes kept for the backward, loss head left out")
    handles, labels = axes[-1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=7)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print, plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS, metavar="MODEL")
    parser.add_argument("--variants", nargs="*", default=VARIANTS, choices=VARIANTS, metavar="VARIANT")
    parser.add_argument("--modes", nargs="*", default=("eager", "compiled"), choices=MODES, metavar="MODE")
    parser.add_argument("--large", action="store_true", help="hidden 512, 8 layers, sequence 512")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("out/memory.jsonl"), help="results are appended to it")
    parser.add_argument("--plot", type=Path, default=None)
    parser.add_argument("--bytes-only", action="store_true", help="one forward of each variant, without its products")
    parser.add_argument("--show", action="store_true", help="measure nothing: show what the file of --json holds")
    arguments = parser.parse_args()
    if arguments.show:
        results = [json.loads(line) for line in arguments.json.read_text().splitlines()]
        print(table(results))
        if arguments.plot:
            plot(results, arguments.plot)
        return
    tasks = [
        (
            name,
            variant,
            mode,
            arguments.large,
            arguments.dtype,
            0 if arguments.bytes_only else arguments.rounds,
        )
        for name in arguments.models
        for mode in arguments.modes
        for variant in arguments.variants
        if not (variant == "fp8 pass" and mode == "eager")
    ]
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    results = []
    context = multiprocessing.get_context("spawn")
    for task in tqdm(tasks):
        if arguments.large and not arguments.bytes_only:
            with context.Pool(1) as pool:
                results.append(pool.apply(measure, (task,)))
        else:
            results.append({**measure(task), "peak_mib": None})
            torch.compiler.reset()
        with arguments.json.open("a") as file:
            file.write(json.dumps({**results[-1], "large": arguments.large, "dtype": arguments.dtype}) + "\n")
    print(table(results))
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
