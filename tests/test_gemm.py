"""Low-precision GEMMs against plain references, float64, the un-instrumented model, and across guard states."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gnmr_fx
from gnmr_fx import formats, gemm
from gnmr_fx.errors import (
    DoubleBackwardError,
    NativeKernelError,
    NoRecoverableOperatorError,
    RecipeError,
    UnsupportedInputError,
    UnsupportedTransformError,
)
from gnmr_fx.ops import guarded_projection
from gnmr_fx.projections import KINDS
from gnmr_fx.recipe import FULL, RECIPES, Format, GemmPaths, GemmRecipe, Operands, Recipe, dsv3, dynamic_gemm
from gnmr_fx.units import Handle, Memo, Observation
from tests.loops import readable_kernels
from tests.models import CASES, instrument_options
from tests.toys import Decoder

GEMM_RECIPES = sorted(name for name, recipe in RECIPES.items() if recipe.gemm is not None)
INT8 = Format("int8", "token", scale="fp32", symmetric=True)
FP8_ROW = Format("fp8_e4m3", "token", scale="fp32")


@pytest.fixture(autouse=True)
def _anywhere() -> Iterator[None]:
    """The readable code, which gives the same bits and builds nothing; and a CPU that multiplies int8, whatever this
    one does: torch's kernel gives the same numbers slowly."""
    with readable_kernels(), int8_cpu(True):
        yield


@contextlib.contextmanager
def int8_cpu(multiplies: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm, "cpu_multiplies_int8", lambda: multiplies)
        gemm.native_kernel.cache_clear()
        gemm._backend.cache_clear()
        yield
    gemm.native_kernel.cache_clear()
    gemm._backend.cache_clear()


def handle(recipe: Recipe, active: bool = False) -> Handle:
    assert recipe.gemm is not None
    gemms = (gemm.Spec.of(recipe.gemm), gemm.Spec.of_eval(recipe.gemm))
    formats_of = (str(recipe.low), str(recipe.high))
    return Handle(torch.tensor(active), torch.tensor(7), *formats_of, Memo(), Observation(), gemms=gemms)


def run(
    recipe: Recipe, x: Tensor, w: Tensor, b: Tensor | None, g: Tensor, active: bool = False, kind: str = "linear"
) -> list[Tensor]:
    """Output and gradients of x, w and b."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, w, b) if t is not None]
    bias = leaves[2] if b is not None else None
    out = guarded_projection(kind, "", leaves[0], leaves[1], bias, None, handle(recipe, active), True)
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


# A plain reference ----------------------------------------------------------------------------------------------------


def tile(t: Tensor, tall: int, wide: int) -> Tensor:
    """fp8 e4m3 with one fp32 scale for each ``tall`` by ``wide`` tile of a matrix, as the dtype of ``t`` has it."""
    out = torch.empty_like(t)
    for i, j in itertools.product(range(0, t.shape[0], tall), range(0, t.shape[1], wide)):
        part = t[i : i + tall, j : j + wide].float()
        scale = (part.abs().max() / 448.0).clamp(min=torch.finfo(torch.float32).tiny)
        codes = (part / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        out[i : i + tall, j : j + wide] = (codes.float() * scale).to(t.dtype)
    return out


def reference(x: Tensor, w: Tensor, b: Tensor | None, g: Tensor) -> list[Tensor]:
    """Output and gradients of DeepSeek-V3's linear layer, written down as the report tells it.

    In each product what is summed over lies together in memory: GEMMs of other strides sum in another order.
    """
    rows, grads = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    saved = tile(rows, 1, 128)
    out = F.linear(saved.view(x.shape), tile(w, 128, 128), b)
    grad_x = torch.mm(tile(grads, 1, 128), tile(w.t().contiguous(), 128, 128).t()).view(x.shape)
    grad_w = torch.mm(tile(grads.t().contiguous(), 1, 128), tile(saved.t().contiguous(), 1, 128).t())
    return [out, grad_x, grad_w, *([] if b is None else [g.sum_to_size(b.shape)])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [(256,), (3, 50), (2, 2, 64), (1,)])
def test_dsv3_fp8_is_the_plain_reference_bit_for_bit(dtype: torch.dtype, tokens: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(*tokens, 256).to(dtype), (torch.randn(384, 256) / 16).to(dtype)
    b, g = torch.randn(384).to(dtype), torch.randn(*tokens, 384).to(dtype)
    x[0, ..., :128], w[:128, 128:] = 0.0, 0.0  # tiles and a block of zeros
    x[-1, ..., 7], g[-1, ..., 3] = 1e4, -4.0  # outliers
    found = run(dsv3("fp8_e4m3", "fp8_e4m3", backend="emulated"), x, w, b, g)
    for ours, theirs in zip(found, reference(x, w, b, g), strict=True):
        assert torch.equal(ours, theirs)


def test_dsv3_fp8_operands_are_torchaos() -> None:
    """torchao's float8 primitives on the tiles and blocks that the recipe names."""
    ao = formats.torchao_primitives()
    recipe = dsv3("fp8_e4m3", "fp8_e4m3").gemm
    assert recipe is not None
    t = torch.randn(256, 384)
    for fmt, block in ((recipe.output.low.left, (1, 128)), (recipe.output.low.right, (128, 128))):
        scale = ao._choose_scale_float8(t, block, torch.float8_e4m3fn)
        codes = ao._quantize_affine_float8(t, scale, torch.float8_e4m3fn)
        assert torch.equal(gemm.quantized(t, (-1,), fmt, None), ao._dequantize_affine_float8(codes, scale, t.dtype))
    by_tokens = gemm.quantized(t, (0,), recipe.grad_weight.low.left, None)
    assert torch.equal(by_tokens, gemm.quantized(t.t().contiguous(), (-1,), recipe.output.low.left, None).t())


# Numerics against float64 ---------------------------------------------------------------------------------------------


def smallest_step(dtype: torch.dtype) -> float:
    """Between subnormal numbers."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def operand_error(fmt: Format, amax: Tensor, t: Tensor) -> Tensor:
    """How far quantizing ``t`` may be off (float64), where ``amax`` is the largest magnitude that shares its scale.

    Half a step: of the scale for int8; of the value's own binade for floats, at least that of the subnormals. A scale
    that is a power of two is up to twice amax / max. Casting back to the dtype of ``t`` rounds once more.
    """
    cast = torch.finfo(t.dtype).eps * t.double().abs() + smallest_step(t.dtype)
    if fmt == Format("none"):
        return torch.zeros_like(cast)
    if fmt.symmetric:
        return amax / 127 * 0.5 * (1 + 1e-6) + cast
    smallest, mantissa, top = formats._GRID[fmt.dtype]
    scale = amax / top * (2 if fmt.scale == "e8m0" else 1)
    return (t.double().abs() * 2.0**-mantissa + scale * 2.0 ** (smallest - mantissa)) * 0.5 * (1 + 1e-6) + cast


def product_bound(left: Tensor, right: Tensor, operands: Operands, dtype: torch.dtype) -> Tensor:
    """Of each element of ``left [M, C] @ right [P, C].T``: errors of the operands, of sums in fp32, and of the cast."""

    def parts(t: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
        # Upper bounds hold for the largest magnitude of the whole row or block row: no tile has a larger scale.
        amax = t.double().abs().amax(dim=1, keepdim=True)
        if fmt.granularity in ("block", "tensor"):
            amax = amax.amax().expand_as(amax)
        return t.double().abs(), operand_error(fmt, amax, t)

    (a, da), (b, db) = parts(left, operands.left), parts(right, operands.right)
    sums = (a + da) @ (b + db).t()
    return (
        da @ b.t()
        + a @ db.t()
        + da @ db.t()
        + sums * (left.shape[1] * 2.0**-23 + torch.finfo(dtype).eps)
        + smallest_step(dtype)
    )


NUMERIC = {
    "int8 rows": Operands(INT8, INT8),
    "fp8 rows": Operands(FP8_ROW, FP8_ROW),
    "fp8 tensor": Operands(Format("fp8_e4m3", "tensor", scale="fp32"), Format("fp8_e4m3", "tensor", scale="fp32")),
    "fp8 tiles": dsv3("fp8_e4m3").gemm.output.high,  # type: ignore[union-attr]
    "fp6 e3m2 tiles": dsv3("fp6_e3m2").gemm.output.low,  # type: ignore[union-attr]
    "fp6 e2m3 tiles": dsv3("fp6_e2m3").gemm.output.low,  # type: ignore[union-attr]
    "mxfp6 e2m3": dsv3("fp6_e2m3", mx=True).gemm.output.low,  # type: ignore[union-attr]
    "e5m2 by e4m3": Operands(Format("fp8_e5m2", scale="fp32"), Format("fp8_e4m3", "block", scale="fp32")),
    "one side": Operands(INT8, Format("none")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NUMERIC)
def test_each_gemm_is_within_the_steps_of_its_formats(name: str, dtype: torch.dtype) -> None:
    operands = NUMERIC[name]
    paths = GemmPaths(operands, operands)
    recipe = Recipe(Format("none"), Format("none"), gemm=GemmRecipe(paths, paths, paths))
    torch.manual_seed(0)
    for tokens, inputs, outputs, outlier in (((2, 67), 200, 72, 1.0), ((128,), 256, 130, 1e4), ((5,), 33, 1, 1.0)):
        x, w = torch.randn(*tokens, inputs), torch.randn(outputs, inputs) / inputs**0.5
        g = torch.randn(*tokens, outputs) * 0.1
        x[0, ..., 0] *= outlier
        x, w, g = x.to(dtype), w.to(dtype), g.to(dtype)
        found = run(recipe, x, w, None, g)
        rows, grads = x.reshape(-1, inputs), g.reshape(-1, outputs)
        for made, left, right in (
            (found[0], rows, w),
            (found[1], grads, w.t()),
            (found[2], grads.t(), rows.t()),
        ):
            exact = left.double() @ right.double().t()
            error = (made.reshape(exact.shape).double() - exact).abs()
            assert (error <= product_bound(left, right, operands, dtype)).all()


@pytest.mark.parametrize(
    ("name", "decibels"),
    # A uniform error of a step s has the power s^2 / 12. int8: s = amax / 127, amax of 256 normal numbers about 3
    # sigma, so 10 log10(12 * 127^2 / 9) = 43 dB an operand, 40 dB for two. A float of m mantissa bits has steps of 2^-m
    # to 2^-(m+1) of the value: 10 log10(12) + 6.02 (m + 0.5) = 32 dB for m = 3, 26 dB for m = 2; less 3 dB for two
    # operands, and what falls below the smallest normal value loses up to 2 dB more.
    [("int8 rows", 40), ("fp8 rows", 29), ("fp8 tiles", 29), ("fp6 e2m3 tiles", 28), ("fp6 e3m2 tiles", 23)],
)
def test_signal_to_quantization_noise(name: str, decibels: float) -> None:
    operands = NUMERIC[name]
    paths = GemmPaths(operands, operands)
    recipe = Recipe(Format("none"), Format("none"), gemm=GemmRecipe(paths, paths, paths))
    torch.manual_seed(0)
    x, w, g = torch.randn(256, 256), torch.randn(256, 256) / 16, torch.randn(256, 256)
    exact = (x.double() @ w.double().t(), g.double() @ w.double(), g.double().t() @ x.double())
    for made, expected in zip(run(recipe, x, w, None, g), exact, strict=True):
        sqnr = 20 * torch.log10(expected.norm() / (made.double() - expected).norm())
        assert abs(sqnr - decibels) < 2.5


@pytest.mark.parametrize("name", GEMM_RECIPES)
def test_zeros_and_empty_batches(name: str) -> None:
    recipe, w = RECIPES[name], torch.randn(24, 40)
    for active in (False, True):
        out, grad_x, grad_w = run(recipe, torch.zeros(3, 40), w, None, torch.zeros(3, 24), active)
        assert not out.any()
        assert not grad_x.any()
        assert not grad_w.any()
        out, grad_x, grad_w = run(recipe, torch.randn(2, 0, 40), w, None, torch.randn(2, 0, 24), active)
        assert (out.shape, grad_x.shape) == ((2, 0, 24), (2, 0, 40))
        assert torch.equal(grad_w, torch.zeros(24, 40))
    for value in (torch.inf, torch.nan):
        x = torch.randn(3, 40)
        x[1, 5] = value
        out, _, grad_w = run(recipe, x, w, None, torch.randn(3, 24))
        assert not out[1].isfinite().any()
        assert not grad_w.isfinite().all()


@pytest.mark.parametrize("rows", [(0,), (2, 0)])
def test_empty_batches_are_native_where_others_are(rows: tuple[int, ...]) -> None:
    recipe = dynamic_gemm(INT8, backend="native")
    assert recipe.gemm is not None
    w = torch.randn(24, 40)
    found = gemm.backends("linear", gemm.Spec.of(recipe.gemm), (*rows, 40), w, torch.float32)
    assert found == (("native", "full"),) * 3
    out, grad_x, grad_w = run(recipe, torch.randn(*rows, 40), w, None, torch.randn(*rows, 24))
    assert (out.shape, grad_x.shape) == ((*rows, 24), (*rows, 40))
    assert torch.equal(grad_w, torch.zeros(24, 40))


# Along which dimension ------------------------------------------------------------------------------------------------

KIND_SHAPES = {  # kind, extra, shapes of x and w
    "linear": ("linear", "", (2, 3, 8), (5, 8)),
    "x @ w": ("right", "", (2, 3, 8), (8, 5)),
    "batched x @ w": ("right", "", (4, 3, 8), (4, 8, 5)),
    "w @ x": ("left", "", (2, 8, 3), (5, 8)),
    "batched w @ x": ("left", "", (2, 8, 3), (2, 5, 8)),
    "einsum": ("einsum", "bti,hid->bthd", (2, 3, 8), (4, 8, 5)),
    "grouped": ("grouped", "", (12, 16), (3, 16, 8)),
}


@pytest.mark.parametrize("name", KIND_SHAPES)
@pytest.mark.parametrize("which", gemm.GEMMS)
def test_operands_share_scales_along_the_summed_dimension(name: str, which: gemm.Gemm) -> None:
    """Scaling what is not summed over by powers of two scales the result by them, exactly; and only then."""
    kind, extra, x_shape, w_shape = KIND_SHAPES[name]
    paths = GemmPaths(Operands(INT8, INT8), FULL)
    spec = gemm.Spec.of(GemmRecipe(**{which: paths}, backend="emulated"))
    torch.manual_seed(0)
    dtype = torch.bfloat16 if kind == "grouped" else torch.float32
    offs = torch.tensor([4, 4, 12], dtype=torch.int32) if kind == "grouped" else None
    x, w = torch.randn(x_shape).to(dtype), torch.randn(w_shape).to(dtype)
    g = torch.randn_like(KINDS[kind].forward(x, w, None, offs, extra))

    def product(left: Tensor, right: Tensor) -> Tensor:
        if which == "output":
            return gemm.output(left, right, None, offs, False, None, kind, extra, spec)
        if which == "grad_input":
            return gemm.grad_input(left, right, offs, False, None, kind, extra, spec, x.shape)
        return gemm.grad_weight(left, right, w, offs, False, None, kind, extra, spec)

    operands = {"output": (x, w), "grad_input": (g, w), "grad_weight": (g, x)}[which]
    dims = gemm.summed(kind, extra, which, (operands[0].dim(), operands[1].dim()), w.dim())
    plain = product(*operands)
    for at in (0, 1):
        t, own = operands[at], {d % operands[at].dim() for d in dims[at]}
        for dim in range(t.dim()):
            powers = torch.tensor([2.0 ** (i % 3) for i in range(t.shape[dim])], dtype=dtype)
            view = [-1 if d == dim else 1 for d in range(t.dim())]
            quantize = lambda value, own=own: gemm.quantized(value, tuple(sorted(own)), INT8, None)  # noqa: E731
            scaled = t * powers.view(view)
            exact = torch.equal(quantize(scaled), quantize(t) * powers.view(view))
            assert exact == (dim not in own)
    # And the GEMM is that of the quantized operands.
    left, right = (gemm.quantized(t, d, INT8, None) for t, d in zip(operands, dims, strict=True))
    stock = {
        "output": lambda: KINDS[kind].forward(left, right, None, offs, extra),
        "grad_input": lambda: KINDS[kind].grad_input(left, right, offs, extra, x.shape),
        "grad_weight": lambda: KINDS[kind].grad_weight(left, right, offs, extra, w.shape),
    }[which]()
    assert torch.equal(plain, stock)


@pytest.mark.parametrize("name", KIND_SHAPES)
def test_a_stored_activation_is_multiplied_only_if_it_is_the_operand(name: str) -> None:
    kind, extra, x_shape, w_shape = KIND_SHAPES[name]
    torch.manual_seed(0)
    dtype = torch.bfloat16 if kind == "grouped" else torch.float32
    offs = torch.tensor([4, 4, 12], dtype=torch.int32) if kind == "grouped" else None
    x, w = torch.randn(x_shape).to(dtype), torch.randn(w_shape).to(dtype)
    recipe = dsv3("fp8_e4m3", "fp8_e4m3")
    assert recipe.gemm is not None
    operands = recipe.gemm.output.low
    of_x, of_w = gemm.summed(kind, extra, "output", (x.dim(), w.dim()), w.dim())
    expected = KINDS[kind].forward(
        gemm.quantized(x, of_x, operands.left, None), gemm.quantized(w, of_w, operands.right, None), None, offs, extra
    )
    call = lambda x, w: guarded_projection(kind, extra, x, w, None, offs, own, True)  # noqa: E731
    for compiled in (False, True):
        own = handle(recipe)
        out = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(x, w.requires_grad_())
        assert torch.equal(out, expected)


@pytest.mark.parametrize("case", ["functional", "branching", "encoder", "mixtral-grouped", "gpt2"])
def test_whole_models(case: str) -> None:
    """The recovery path is the stock model bit for bit, the low-cost one close to it, in every kind of projection."""
    built = CASES[case].build()
    built.model.requires_grad_(True)

    def gradients() -> dict[str, Tensor]:
        built.model.zero_grad()
        built.loss(built.model(*built.args, **built.kwargs)).backward()
        return {name: p.grad.clone() for name, p in built.model.named_parameters() if p.grad is not None}

    stock = gradients()
    options = instrument_options(CASES[case], built)
    gnmr_fx.instrument(built.model, dynamic_gemm(FP8_ROW), **options)
    controller = gnmr_fx.controller(built.model)
    controller.force("high")
    for name, gradient in gradients().items():
        assert torch.equal(gradient, stock[name]), name
    controller.force("low")
    low = gradients()
    error = sum(float((low[n] - stock[n]).double().square().sum()) for n in stock)
    whole = sum(float(g.double().square().sum()) for g in stock.values())
    # fp8 has errors of 3% an operand (rms); dozens of products in a row add up, and wrong scales would be off by 100%.
    assert 0.005 < (error / whole) ** 0.5 < 0.3
    assert all(unit.observation.backends for unit in controller.units)
    gnmr_fx.uninstrument(built.model)
    for name, gradient in gradients().items():
        assert torch.equal(gradient, stock[name]), name


# Guards, compiled graphs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dsv3-fp6-fp8", "gemm-int8-bf16"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_random_guards_compile_once_and_are_eager(name: str, backend: str) -> None:
    torch.manual_seed(0)
    model = gnmr_fx.instrument(Decoder(blocks=1).train(), name)
    controller = gnmr_fx.controller(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    chance, names = random.Random(0), [unit.name for unit in controller.units]
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(100):
            controller.force([unit for unit in names if chance.random() < 0.3])
            tokens = torch.randint(0, 48, (2, 8))
            compiled(tokens).backward()
            if step % 25 == 0:
                found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
                model.zero_grad()
                model(tokens).backward()
                for n, p in model.named_parameters():
                    torch.testing.assert_close(found[n], p.grad, rtol=1e-4, atol=1e-5)
            optimizer.step()
            optimizer.zero_grad()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert all(unit.observation.backends for unit in controller.units)


def test_a_guard_that_changes_in_between_does_not_change_the_backward() -> None:
    torch.manual_seed(0)
    x, w, g = torch.randn(4, 32), torch.randn(16, 32), torch.randn(4, 16)
    for backend in ("eager", "aot_eager"):
        own = handle(RECIPES["dsv3-fp6-fp8"])
        step = lambda x, w, own=own: guarded_projection("linear", "", x, w, None, None, own, True)  # noqa: E731
        torch._dynamo.reset()
        call = step if backend == "eager" else torch.compile(step, backend=backend, fullgraph=True)
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = call(*leaves)
        own.guard.fill_(True)
        found = torch.autograd.grad(out, leaves, g)
        for ours, expected in zip(found, run(RECIPES["dsv3-fp6-fp8"], x, w, None, g)[1:], strict=True):
            assert torch.equal(ours, expected)
        noisy = Format("fp8_e4m3", "token", rounding="stochastic", scale="fp32")
        recipe = dynamic_gemm(noisy)
        own = handle(recipe)
        step = lambda x, w, own=own: guarded_projection("linear", "", x, w, None, None, own, True)  # noqa: E731
        call = step if backend == "eager" else torch.compile(step, backend=backend, fullgraph=True)
        out = call(*leaves)
        assert own.seed is not None
        own.seed.add_(1)
        found = torch.autograd.grad(out, leaves, g)
        for ours, expected in zip(found, run(recipe, x, w, None, g)[1:], strict=True):
            assert torch.equal(ours, expected)


def test_dynamic_lengths_build_no_kernels_and_no_graphs() -> None:
    model = gnmr_fx.instrument(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), "gemm-int8-bf16")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (7, 12, 300):
        x = torch.randn(2, length, 32)
        model.zero_grad()
        compiled(x).square().sum().backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        model(x).square().sum().backward()
        for gradient, p in zip(found, model.parameters(), strict=True):
            assert torch.equal(gradient, p.grad)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


def test_nothing_but_the_quantized_operand_is_kept() -> None:
    """No copy of the weight, and no activation but the stored one; in eager mode and in a compiled graph."""
    torch.manual_seed(0)
    x, w = torch.randn(64, 256).bfloat16(), torch.randn(128, 256).bfloat16().requires_grad_()
    recipe = dsv3("fp6_e3m2", "fp8_e4m3")
    own = handle(recipe)

    def call(x: Tensor, w: Tensor) -> Tensor:
        return guarded_projection("linear", "", x, w, None, None, own, True)

    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        call(x, w)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    held.pop(w.untyped_storage().data_ptr())
    held.pop(own.seed.untyped_storage().data_ptr(), None)  # type: ignore[union-attr]
    assert sum(held.values()) == formats.nbytes(x.shape, recipe.low, x.dtype) == 64 * 256 * 6 // 8 + 64 * 2 * 4

    out = torch.compile(call, backend="aot_eager", fullgraph=True)(x, w)
    (node,) = {node for node, _ in [(out.grad_fn, 0)]}
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in node.saved_tensors}
    sizes.pop(w.untyped_storage().data_ptr())
    extras = own.guard.untyped_storage().nbytes() + own.seed.untyped_storage().nbytes()  # type: ignore[union-attr]
    assert sum(sizes.values()) <= formats.nbytes(x.shape, recipe.low, x.dtype) + extras


# Native kernels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [((5, 64), 32), ((2, 33, 50), 7), ((1, 3), 1)])
def test_native_int8_is_the_integer_product(dtype: torch.dtype, shape: tuple[tuple[int, ...], int]) -> None:
    (x_shape, outputs), cpu = shape, torch.device("cpu")
    torch.manual_seed(0)
    x, w = torch.randn(x_shape).to(dtype), torch.randn(outputs, x_shape[-1]).to(dtype)
    g = torch.randn(*x_shape[:-1], outputs).to(dtype)
    recipe = dynamic_gemm(INT8, backend="native")
    found = run(recipe, x, w, None, g)
    rows, grads = x.reshape(-1, x.shape[-1]), g.reshape(-1, outputs)
    for made, left, right in ((found[0], rows, w), (found[1], grads, w.t()), (found[2], grads.t(), rows.t())):
        (a, sa), (b, sb) = (formats.encode(t, INT8) for t in (left, right))
        exact = (a.double() @ b.double().t()) * sa.double() * sb.double().t()
        # Sums are exact; two fp32 products and one cast round.
        bound = (3 * 2.0**-24 + torch.finfo(dtype).eps / 2 * 1.01) * exact.abs() + 1e-30
        assert ((made.reshape(exact.shape).double() - exact).abs() <= bound).all()
    assert gemm.native_kernel(Operands(INT8, INT8), cpu)[0] is not None


def test_the_table_shows_what_runs() -> None:
    expected = {
        "gemm-int8-bf16": ("native", "full"),
        "gemm-fp8-bf16": ("emulated", "full"),
        "dsv3-fp6-fp8": ("emulated", "emulated"),
    }
    for name, backends in expected.items():
        model = gnmr_fx.instrument(nn.Sequential(nn.Linear(32, 16)), name)
        assert "not run yet" in str(gnmr_fx.table(model))
        model(torch.randn(4, 32)).sum().backward()
        table = gnmr_fx.table(model)
        assert table.rows[0]["backends"] == [list(backends)] * 3
        assert backends[0] in str(table)
        assert "int8 token sym" in str(table) or "g128 x b128" in str(table) or "fp8_e4m3 token" in str(table)
    model = gnmr_fx.instrument(nn.Sequential(nn.Linear(32, 16)), dynamic_gemm(INT8, backend="emulated"))
    model(torch.randn(4, 32)).sum().backward()
    assert gnmr_fx.table(model).rows[0]["backends"] == [["emulated", "full"]] * 3


def test_a_slow_reference_is_no_native_kernel() -> None:
    """On a CPU without instructions for it torch's int8 product is a loop, much slower than a product of floats."""
    with int8_cpu(False):
        model = gnmr_fx.instrument(nn.Sequential(nn.Linear(32, 16)), "gemm-int8-bf16")
        model(torch.randn(4, 32)).sum().backward()
        assert gnmr_fx.table(model).rows[0]["backends"] == [["emulated", "full"]] * 3
        gnmr_fx.uninstrument(model)
        with pytest.raises(NativeKernelError, match="slow reference"):
            gnmr_fx.instrument(model, dynamic_gemm(INT8, backend="native"))


def test_native_where_there_is_no_kernel() -> None:
    model = nn.Sequential(nn.Linear(32, 16))
    before = dict(model[0].__dict__)
    with pytest.raises(NativeKernelError, match=r"output GEMM .* fp8_e4m3 .* cpu"):
        gnmr_fx.instrument(model, dynamic_gemm(FP8_ROW, backend="native"))
    assert model[0].__dict__ == before
    # A kernel that is there, and an operator that is no product of two matrices.
    built = CASES["functional"].build()
    options = instrument_options(CASES["functional"], built)
    model = gnmr_fx.instrument(built.model, dynamic_gemm(INT8, backend="native"), **options)
    with pytest.raises(NativeKernelError, match="not a product of two matrices"):
        model(*built.args)
    gnmr_fx.uninstrument(model)
    gnmr_fx.instrument(model, dynamic_gemm(INT8), **options)
    built.loss(model(*built.args)).backward()
    rows = {row["unit"]: row["backends"][0][0] for row in gnmr_fx.table(model).rows}
    assert rows["linear_weight"] == rows["right_weight"] == "native"
    assert rows["left_weight"] == rows["einsum_weight"] == "emulated"


# Modes ----------------------------------------------------------------------------------------------------------------


def test_eval_runs_the_recovery_path_unless_asked_otherwise() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 16)), torch.randn(4, 32)
    stock = model(x)
    for recipe, same in ((dynamic_gemm(INT8), "stock"), (dsv3(), "high")):
        gnmr_fx.instrument(model, recipe)
        controller = gnmr_fx.controller(model)
        outputs = {}
        for which in ("low", "high"):
            controller.force(which)
            outputs[which] = model.train()(x).detach()
        controller.force("low")
        before = dict(controller.units[0].observation.current)
        found = model.eval()(x)
        assert torch.equal(found, stock if same == "stock" else outputs["high"])
        found.sum().backward()  # gradients in eval mode, too
        assert controller.units[0].observation.current == before
        model.zero_grad()
        gnmr_fx.uninstrument(model)
        paths = {name: getattr(recipe.gemm, name) for name in gemm.GEMMS}
        gnmr_fx.instrument(model, Recipe(recipe.low, recipe.high, gemm=GemmRecipe(**paths, evaluate="low")))
        assert torch.equal(model(x), outputs["low"])
        gnmr_fx.uninstrument(model)
    assert torch.equal(model(x), stock)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["dsv3-fp6-fp8", "gemm-int8-bf16"])
def test_no_grad_and_checkpointing_compute_the_same(name: str, reentrant: bool) -> None:
    torch.manual_seed(0)
    model = gnmr_fx.instrument(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16)), name)
    gnmr_fx.controller(model).force(["0"])
    x = torch.randn(4, 32, requires_grad=True)
    out = model(x)
    out.square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    with torch.no_grad():
        assert torch.equal(model(x), out)
    model.zero_grad()
    again = checkpoint(model, x, use_reentrant=reentrant)
    assert torch.equal(again, out)
    again.square().sum().backward()
    assert all(map(torch.equal, [p.grad for p in model.parameters()], expected))


@pytest.mark.parametrize("name", GEMM_RECIPES)
def test_outputs_may_be_changed_in_place(name: str) -> None:
    torch.manual_seed(0)
    model, x = gnmr_fx.instrument(nn.Sequential(nn.Linear(16, 8)), name), torch.randn(2, 3, 16)
    for which in ("low", "high"):
        gnmr_fx.controller(model).force(which)
        model(x).mul_(2.0).sum().backward()
        changed = model[0].weight.grad.clone()
        model.zero_grad()
        (model(x) * 2.0).sum().backward()
        assert torch.equal(changed, model[0].weight.grad)
        model.zero_grad()


def test_autocast() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 32), torch.randn(4, 64)
    for name in ("dsv3-fp8", "gemm-int8-bf16"):
        model = gnmr_fx.instrument(nn.Sequential(layer), name)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        g = torch.randn_like(out)
        (found,) = torch.autograd.grad(out, [layer.weight], g)
        plain = run(RECIPES[name], x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16(), g)
        assert torch.equal(out, plain[0])
        assert found.dtype == torch.float32
        assert torch.equal(found, plain[2].float())
        gnmr_fx.uninstrument(model)


def test_gemms_and_saved_activations_compose() -> None:
    """An operand in a format of its own, the activation stored in another: each is what the recipe says."""
    torch.manual_seed(0)
    saved = Format("int4")
    recipe = Recipe(saved, Format("none"), gemm=GemmRecipe(output=GemmPaths(Operands(INT8, INT8), FULL)))
    x, w, g = torch.randn(6, 64), torch.randn(32, 64), torch.randn(6, 32)
    out, grad_x, grad_w = run(recipe, x, w, None, g)
    assert torch.equal(out, run(dynamic_gemm(INT8), x, w, None, g)[0])
    assert torch.equal(grad_x, g @ w)
    stored = formats.decode(formats.encode(x, saved), saved, x.shape, x.dtype)
    assert torch.equal(grad_w, g.t() @ stored)
    assert torch.equal(run(recipe, x, w, None, g, active=True)[2], g.t() @ x)


def test_stochastic_gradients_are_unbiased_and_change_every_step() -> None:
    noisy = Format("fp8_e4m3", "token", rounding="stochastic", scale="fp32")
    paths = GemmPaths(Operands(noisy, Format("none")), FULL)
    recipe = Recipe(Format("none"), Format("none"), gemm=GemmRecipe(grad_input=paths))
    assert recipe.is_stochastic
    model = gnmr_fx.instrument(nn.Sequential(nn.Linear(8, 8)), recipe)
    controller, seen = gnmr_fx.controller(model), []
    torch.manual_seed(0)
    x, g = torch.randn(2, 8, requires_grad=True), torch.randn(2, 8)
    for _ in range(400):
        (gradient,) = torch.autograd.grad(model(x), [x], g)
        seen.append(gradient)
        controller.seed.add_(1)
    assert not torch.equal(seen[0], seen[1])
    exact = g @ model[0].weight.detach()
    mean = torch.stack(seen).mean(dim=0)
    step = g.abs().amax() * 2.0**-3  # of the largest binade; a mean of n is within 5 steps / 2 / sqrt(n)
    bound = 5 * step / 2 / 400**0.5 * model[0].weight.detach().norm(dim=0)
    assert ((mean - exact).abs() <= bound).all()


# Refusals -------------------------------------------------------------------------------------------------------------


def test_refusals() -> None:
    w = torch.randn(4, 8, requires_grad=True)
    own = handle(RECIPES["gemm-int8-bf16"])
    for x in (torch.ones(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.complex64)):
        with pytest.raises(UnsupportedInputError, match="floating-point activation"):
            guarded_projection("linear", "", x, w, None, None, own, True)
    out = guarded_projection("linear", "", torch.randn(2, 8), w, None, None, own, True)
    with pytest.raises(DoubleBackwardError, match="create_graph"):
        torch.autograd.grad(out.sum(), [w], create_graph=True)
    with pytest.raises(UnsupportedTransformError):
        torch.func.vmap(lambda x: guarded_projection("linear", "", x, w, None, None, own, True))(torch.randn(2, 8))
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(RecipeError, match="scope='projections'"):
        gnmr_fx.instrument(model, "dsv3-fp6-fp8", scope="all")
    assert "forward" not in model[0].__dict__
    complex_layer = nn.Sequential(nn.Linear(8, 8, dtype=torch.complex64))
    with pytest.raises(NoRecoverableOperatorError, match="complex64"):
        gnmr_fx.instrument(complex_layer, "gemm-int8-bf16")


def test_quantized_weights_are_left_alone() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model: Any = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    quantize_(model[0], Int8WeightOnlyConfig())
    gnmr_fx.instrument(model, "gemm-int8-bf16")
    (left,) = gnmr_fx.table(model).left_alone
    assert left["name"] == "0"
    assert "tensor subclass" in left["reason"]


def test_schemas_and_fakes() -> None:
    own = handle(RECIPES["dsv3-fp6-fp8"])
    spec = own.gemms[0]  # type: ignore[index]
    x, w, b, g = torch.randn(2, 3, 32), torch.randn(16, 32), torch.randn(16), torch.randn(2, 3, 16)
    active = torch.tensor(False)
    tests = ("test_schema", "test_faketensor")
    common = ("linear", "", *spec)
    ops = torch.ops.gnmr_fx
    torch.library.opcheck(ops.latch.default, (own.guard,), test_utils=tests)
    arguments = (x, w, b, None, active, own.guard, None, [], own.low, own.high, [2, 3, 32], True, *common)
    torch.library.opcheck(ops.gemm_output.default, arguments, test_utils=tests)
    torch.library.opcheck(
        ops.gemm_grad_input.default, (g, w, None, active, None, [2, 3, 32], *common), test_utils=tests
    )
    torch.library.opcheck(ops.gemm_grad_weight.default, (g, x, w, None, active, None, *common), test_utils=tests)
