"""The guarded projection against a readable oracle: autograd with the decoded activation in the weight gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gnmr_fx
from gnmr_fx import kernels
from gnmr_fx.ops import guarded_projection
from gnmr_fx.projections import KINDS
from gnmr_fx.recipe import Format, Recipe
from gnmr_fx.units import Handle, Memo, Observation

FORMATS = [
    "int2",
    "int3",
    "int4",
    "int8",
    "fp8_e4m3",
    "fp8_e5m2",
    "bf16",
    "none",
    "int4/token",
    "int8/tensor",
    "int4/group32/stochastic",
]


def handle(low: str, high: str, active: bool) -> Handle:
    low, high = str(Format.parse(low)), str(Format.parse(high))
    return Handle(torch.tensor(active), torch.tensor(7), low, high, Memo(), Observation())


CALLS = {
    "linear": ("linear", "", (2, 5, 96), (32, 96), (32,)),
    "addmm": ("right", "", (10, 96), (96, 32), (32,)),
    "w @ x": ("left", "", (2, 96, 10), (32, 96), None),
    "einsum": ("einsum", "bti,hid->bthd", (2, 5, 96), (4, 96, 8), None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_weight_gradient_is_that_of_the_decoded_activation(call, active, dtype):
    kind, extra, x_shape, w_shape, b_shape = CALLS[call]
    torch.manual_seed(0)
    x = torch.randn(x_shape).to(dtype).requires_grad_()
    w = (torch.randn(w_shape) / 8).to(dtype).requires_grad_()
    b = None if b_shape is None else torch.randn(b_shape).to(dtype).requires_grad_()
    out = guarded_projection(kind, extra, x, w, b, None, handle("int4", "int8", active), True)
    stock = KINDS[kind].forward(x, w, b, None, extra)
    assert torch.equal(out, stock)
    g = torch.randn_like(out)
    inputs = [t for t in (x, w, b) if t is not None]
    found = torch.autograd.grad(out, inputs, g)
    expected = list(torch.autograd.grad(stock, inputs, g))
    fmt = Format.parse("int8" if active else "int4")
    decoded = kernels.decode(kernels.encode(x.detach(), fmt), fmt, x.shape, dtype)
    assert not torch.equal(decoded, x)
    expected[1] = KINDS[kind].grad_weight(g, decoded, None, extra, w.shape)
    assert torch.equal(found[1], expected[1])
    # The input and bias gradients do not depend on the format. They are sums of at most 40 products, whose order may
    # differ from autograd's for all but linear.
    for ours, theirs in zip(found[:1] + found[2:], expected[:1] + expected[2:], strict=True):
        bound = 0 if kind == "linear" else 40 * torch.finfo(dtype).eps * float(theirs.abs().max())
        assert float((ours - theirs).abs().max()) <= bound


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_is_eager_for_every_format(backend):
    torch.manual_seed(0)
    x, w, b = torch.randn(3, 5, 96), torch.randn(32, 96), torch.randn(32)

    def gradients(function, h: Handle) -> list[Tensor]:  # type: ignore[no-untyped-def]
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        function(*leaves, h).square().sum().backward()
        return [leaf.grad for leaf in leaves]  # type: ignore[misc]

    def call(x: Tensor, w: Tensor, b: Tensor, h: Handle) -> Tensor:
        return guarded_projection("linear", "", x, w, b, None, h, True)

    compiled = torch.compile(call, backend=backend, fullgraph=True)
    for fmt in FORMATS[:: 1 if backend == "aot_eager" else 3]:
        torch._dynamo.reset()
        h = handle(fmt, "none", False)
        for guard in (False, True, False):
            h.guard.fill_(guard)
            for ours, theirs in zip(gradients(compiled, h), gradients(call, h), strict=True):
                assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max())), (fmt, guard)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("call", CALLS)
def test_the_output_may_be_changed_in_place(call, backend):
    """As that of the stock operator may: products of more than two dimensions end in a view."""
    kind, extra, x_shape, w_shape, b_shape = CALLS[call]
    torch.manual_seed(0)
    tensors = [torch.randn(shape).requires_grad_() for shape in (x_shape, w_shape)]
    b = None if b_shape is None else torch.randn(b_shape)
    h = handle("none", "int8", True)

    def guarded(x: Tensor, w: Tensor) -> Tensor:
        out = guarded_projection(kind, extra, x, w, b, None, h, True)
        out += 1
        out.mul_(x.sum())
        return out.square().sum()

    def readable(x: Tensor, w: Tensor) -> Tensor:
        out = guarded_projection(kind, extra, x, w, b, None, h, True)
        return ((out + 1) * x.sum()).square().sum()

    function = guarded if backend is None else torch.compile(guarded, backend=backend, fullgraph=True)
    expected = torch.autograd.grad(readable(*tensors), tensors)
    for ours, theirs in zip(torch.autograd.grad(function(*tensors), tensors), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("fmt", FORMATS)
def test_non_finite_activations_are_not_hidden(fmt):
    for bad in (float("inf"), -float("inf"), float("nan")):
        x = torch.randn(4, 300)
        x[2, 7] = bad
        w = torch.randn(8, 300, requires_grad=True)
        stock = torch.autograd.grad(F.linear(x, w).sum(), w)[0]
        ours = torch.autograd.grad(
            guarded_projection("linear", "", x, w, None, None, handle(fmt, "none", False), True).sum(), w
        )[0]
        assert not ours[~stock.isfinite()].isfinite().any()


def test_nothing_is_kept_where_nothing_is_needed():
    h = handle("int4", "int8", False)
    x, w = torch.randn(4, 8), torch.randn(8, 8)

    def call(training: bool = True) -> Tensor:
        return guarded_projection("linear", "", x, w, None, None, h, training)

    call()  # a weight without gradient
    w.requires_grad_()
    call(training=False)
    with torch.no_grad():
        call()
    with torch.inference_mode():
        call()
    assert not h.observation.seen
    call()
    assert h.observation.seen


def test_no_input_gradient_is_made_for_an_input_that_needs_none(monkeypatch):
    from dataclasses import replace

    from gnmr_fx import ops

    def refuse(*_):  # type: ignore[no-untyped-def]
        raise AssertionError("an input gradient was computed")

    monkeypatch.setattr(ops, "KINDS", {"linear": replace(KINDS["linear"], grad_input=refuse)})
    w = torch.randn(8, 8, requires_grad=True)
    guarded_projection(
        "linear", "", torch.randn(4, 8), w, None, None, handle("int4", "int8", False), True
    ).sum().backward()
    assert w.grad is not None


def kept_bytes(*functions) -> int:  # type: ignore[no-untyped-def]
    """Bytes of distinct storages that autograd keeps for these calls."""
    storages = {}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        outputs = [function() for function in functions]
    del outputs
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(
    ("low", "per_element"), [("int2", 0.25), ("int3", 0.375), ("int4", 0.5), ("int8", 1.0), ("fp8_e4m3", 1.0)]
)
def test_bytes_are_really_packed(low, per_element):
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    w = torch.randn(1, 256, dtype=torch.bfloat16, requires_grad=True)
    h = handle(low, "none", False)
    kept = (
        kept_bytes(lambda: guarded_projection("linear", "", x, w, None, None, h, True)) - w.untyped_storage().nbytes()
    )
    scales = 64 * 2 * (4 if low.startswith("int") else 2)
    assert kept == 64 * 256 * per_element + scales


def test_one_tensor_is_stored_once():
    x, memo = torch.randn(64, 256), Memo()
    weights = [torch.randn(8, 256, requires_grad=True) for _ in range(3)]
    handles = [handle("int4", "int8", False) for _ in weights]
    for h in handles:
        h.memo = memo

    def calls(views):  # type: ignore[no-untyped-def]
        return [
            lambda v=v, w=w, h=h: guarded_projection("linear", "", v, w, None, None, h, True)
            for v, w, h in zip(views, weights, handles, strict=True)
        ]

    weight_bytes = sum(w.untyped_storage().nbytes() for w in weights)
    one = kept_bytes(calls([x] * 3)[0]) - weights[0].untyped_storage().nbytes()
    assert kept_bytes(*calls([x] * 3)) - weight_bytes == one
    assert kept_bytes(*calls([x, x.view(8, 8, 256), x[:]])) - weight_bytes == one
    assert kept_bytes(*calls([x, x.clone(), x.clone()])) - weight_bytes == 3 * one


def test_a_tensor_changed_in_place_is_stored_again():
    x, h = torch.randn(8, 128), handle("int8", "int8", False)
    w = torch.randn(4, 128, requires_grad=True)
    first = guarded_projection("linear", "", x, w, None, None, h, True)
    x.mul_(-3)
    second = guarded_projection("linear", "", x, w, None, None, h, True)
    (a,), (b,) = torch.autograd.grad(first.sum(), w), torch.autograd.grad(second.sum(), w)
    assert torch.allclose(b, -3 * a, rtol=0.05, atol=0.05 * float(a.abs().max()))


def test_the_memo_keeps_nothing_alive():
    import gc
    import weakref

    x, h = torch.randn(64, 256), handle("int4", "int8", False)
    w = torch.randn(8, 256, requires_grad=True)
    out = guarded_projection("linear", "", x, w, None, None, h, True)
    payload = weakref.ref(out.grad_fn.saved_tensors[1])
    storage = weakref.ref(x)
    del out, x
    gc.collect()
    assert storage() is None
    assert payload() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_the_stock_operator_does(dtype):
    torch.manual_seed(0)
    x, w, b = torch.randn(4, 64), torch.randn(8, 64, requires_grad=True), torch.randn(8, requires_grad=True)
    x.requires_grad_()
    with torch.autocast("cpu", dtype):
        stock = F.linear(x, w, b)
        ours = guarded_projection("linear", "", x, w, b, None, handle("int4", "int8", False), True)
    assert ours.dtype == stock.dtype == dtype
    assert torch.equal(ours, stock)
    g = torch.randn_like(ours)
    found, expected = (torch.autograd.grad(out, (x, w, b), g) for out in (ours, stock))
    assert all(a.dtype == torch.float32 for a in found)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2], expected[2])


def test_autocast_readers_of_one_tensor_store_one_cast():
    x, memo = torch.randn(64, 256), Memo()
    weights = [torch.randn(8, 256, requires_grad=True) for _ in range(2)]
    handles = [handle("int4", "int8", False) for _ in weights]
    for h in handles:
        h.memo = memo
    with torch.autocast("cpu", torch.bfloat16):
        outs = [
            guarded_projection("linear", "", x, w, None, None, h, True) for w, h in zip(weights, handles, strict=True)
        ]
    first, second = (out.grad_fn.saved_tensors[1] for out in outs)
    assert first.data_ptr() == second.data_ptr()


def test_a_second_derivative_is_refused():
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    out = guarded_projection("linear", "", x, w, None, None, handle("int4", "int8", False), True)
    with pytest.raises(gnmr_fx.DoubleBackwardError, match="create_graph=True"):
        torch.autograd.grad(out.sum(), w, create_graph=True)


def test_functional_transforms_are_refused():
    module = gnmr_fx.instrument(torch.nn.Linear(8, 8).train())
    x = torch.randn(3, 2, 8)
    with pytest.raises(gnmr_fx.UnsupportedTransformError, match=r"torch\.func"):
        torch.vmap(module)(x)
    assert torch.equal(torch.vmap(module.eval())(x), torch.vmap(gnmr_fx.uninstrument(module))(x))


def test_a_recipe_of_two_exact_formats_is_the_stock_operator():
    module = torch.nn.Linear(8, 8).train()
    gnmr_fx.instrument(module, Recipe(Format("none"), Format("none")))
    out = module(torch.randn(2, 8))
    assert type(out.grad_fn).__name__ == type(F.linear(torch.randn(2, 8), module.weight, module.bias).grad_fn).__name__


def test_schemas_and_fakes_of_the_operators():
    x, guard = torch.randn(6, 200), torch.tensor(True)
    for fmt in FORMATS:
        spec = str(Format.parse(fmt))
        seed = torch.tensor(3)
        tests = ("test_faketensor",) if spec.startswith("fp8") else ("test_schema", "test_faketensor")  # no fp8 compare
        torch.library.opcheck(torch.ops.gnmr_fx.save_low.default, (x, seed, spec), test_utils=tests)
        low = torch.ops.gnmr_fx.save_low(x, seed, spec)
        high = torch.ops.gnmr_fx.save_high(x, guard, seed, spec)
        none = torch.ops.gnmr_fx.save_high(x, ~guard, seed, spec)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(low, high, strict=True))
        assert [t.shape[1:] for t in none] == [t.shape[1:] for t in high]
        assert all(t.shape[0] == 0 for t in none)
        arguments = (*low, *none, spec, spec, list(x.shape), x.dtype)
        torch.library.opcheck(torch.ops.gnmr_fx.restore.default, arguments, test_utils=tests)
