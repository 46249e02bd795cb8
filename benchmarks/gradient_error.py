"""How far gradients are off when every saved activation is stored in 8, 4 or 2 bits.

    python benchmarks/gradient_error.py                    # six small models, and attention on its own
    python benchmarks/gradient_error.py --models llama bert --seeds 1

First table: models at their random start, fp32, eager, scope "all", all guards low: the error of the whole gradient,
and of each recoverable unit's weight gradient (the median and the largest one), relative to the stock model, mean over
the seeds (of the weights, the batch and stochastic rounding). Second table: the fused attention's backward, whose
exact log-sum-exp meets queries and keys that are stored: relative error of the gradient of the query for products of
growing size, with everything in the format, and with query and key in 4 or 8 bits at least (8 is what
scope "all" does unless told otherwise).
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from memory import MODELS, build, error, gradients
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

import gnmr_fx
from gnmr_fx import formats
from gnmr_fx.recipe import at_least

FORMATS = tuple(
    gnmr_fx.Format.parse(f"{bits}/group128/{rounding}")
    for bits in ("int8", "int4", "int2")
    for rounding in ("nearest", "stochastic")
)
SCALES = (1, 2, 4, 8)
"""Standard deviations of the products of queries and keys."""


def of_model(name: str, fmt: gnmr_fx.Format, seed: int) -> tuple[float, list[float]]:
    """Error of the whole gradient, and of each unit's weight gradient."""
    model, batch = build(name, large=False, dtype=torch.float32, seed=seed)
    stock = gradients(model, batch, None)
    torch.manual_seed(seed)
    gnmr_fx.instrument(model, gnmr_fx.Recipe(fmt, fmt), scope=gnmr_fx.AllSaved(min_bytes=1 << 12))
    found = gradients(model, batch, None)
    weights = {id(unit.weight) for unit in gnmr_fx.controller(model).units}
    own = [key for key, parameter in model.named_parameters() if id(parameter) in weights]
    return error(found, stock), [error({key: found[key]}, {key: stock[key]}) for key in own]


def of_attention(fmt: gnmr_fx.Format, scale: float, bits: int, seed: int) -> float:
    """Error of the query's gradient, where the backward is given stored tensors and the exact log-sum-exp."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 256, 8, 64)  # batch, sequence, heads, width

    def draw(size: float) -> Tensor:
        return size * torch.randn(shape, generator=generator)

    def stored(x: Tensor, own: gnmr_fx.Format) -> Tensor:
        flat = x.flatten(2)
        return formats.decode(formats.encode(flat, own, seed), own, flat.shape, flat.dtype).view(shape).transpose(1, 2)

    # A product of two vectors of N(0, s) entries, divided by the root of their width, has deviation s².
    query, key, value, gradient = draw(scale**0.5), draw(scale**0.5), draw(1.0), draw(1.0)
    exact = [x.transpose(1, 2).requires_grad_() for x in (query, key, value)]
    attention(*exact).backward(gradient.transpose(1, 2))
    own = at_least(fmt, bits)
    replaced = {
        id(x): y for x, y in zip(exact, [stored(query, own), stored(key, own), stored(value, fmt)], strict=True)
    }
    given = [x.detach().clone().requires_grad_() for x in exact]
    replaced = {x.data_ptr(): replaced[id(e)] for x, e in zip(given, exact, strict=True)}

    def unpack(x: Tensor) -> Tensor:
        if x.data_ptr() in replaced:
            return replaced[x.data_ptr()]
        if x.shape == (shape[0], shape[2], shape[1], shape[3]):  # the output
            return stored(x.transpose(1, 2).contiguous(), fmt)
        return x  # log-sum-exp

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), unpack):
        out = attention(*given)
    out.backward(gradient.transpose(1, 2))
    return error({"q": given[0].grad}, {"q": exact[0].grad})  # type: ignore[dict-item]


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """PyTorch's fused attention, causal."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def model_rows(names: list[str], seeds: int) -> Iterator[tuple[str, ...]]:
    """A row for each model and format."""
    for name in names:
        for fmt in tqdm(FORMATS, desc=name):
            found = [of_model(name, fmt, seed) for seed in range(seeds)]
            totals = [total for total, _ in found]
            medians = [statistics.median(units) for _, units in found]
            largest = [max(units) for _, units in found]
            yield (name, fmt.label, *(f"{statistics.fmean(v):.4f}" for v in (totals, medians, largest)))


def attention_rows(seeds: int) -> Iterator[tuple[str, ...]]:
    """A row for each format and way to store query and key."""
    for fmt in FORMATS:
        for bits in (0, *(more for more in (4, 8) if more > (fmt.bits or 0))):
            values = [statistics.fmean(of_attention(fmt, s, bits, seed) for seed in range(seeds)) for s in SCALES]
            how = f"query, key in int{bits}" if bits else "everything so"
            yield (fmt.label, how, *(f"{v:.3g}" for v in values))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS, metavar="MODEL")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    for noisy in ("torchao", "torch.utils._pytree", "transformers"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    if arguments.models:
        headers = ("model", "format", "whole gradient", "unit, median", "unit, largest")
        print(tabulate(model_rows(arguments.models, arguments.seeds), headers, disable_numparse=True))
    columns = ("format", "stored", *(f"deviation {s}" for s in SCALES))
    print(f"\n{tabulate(attention_rows(arguments.seeds), columns, disable_numparse=True)}")


if __name__ == "__main__":
    main()
