"""Each projection's gradients against autograd's, and the sorting out of operands."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gnmr_fx.projections import KINDS, UNKNOWN, Call, is_projection, match, normalize_einsum

D = torch.float64

CASES = {
    "linear 2d bias": ("linear", "", (5, 4), (3, 4), (3,)),
    "linear 3d": ("linear", "", (2, 5, 4), (3, 4), None),
    "linear 1d": ("linear", "", (4,), (3, 4), (3,)),
    "linear empty": ("linear", "", (0, 4), (3, 4), (3,)),
    "mm": ("right", "", (5, 4), (4, 3), None),
    "matmul 3d x 2d": ("right", "", (2, 5, 4), (4, 3), None),
    "matmul 1d x 2d": ("right", "", (4,), (4, 3), None),
    "matmul 1d x 3d": ("right", "", (4,), (2, 4, 3), None),
    "bmm": ("right", "", (2, 5, 4), (2, 4, 3), None),
    "matmul broadcast x": ("right", "", (5, 4), (2, 4, 3), None),
    "matmul broadcast w": ("right", "", (6, 2, 5, 4), (2, 4, 3), None),
    "addmm": ("right", "", (5, 4), (4, 3), (3,)),
    "addmm full bias": ("right", "", (5, 4), (4, 3), (5, 3)),
    "baddbmm": ("right", "", (2, 5, 4), (2, 4, 3), (2, 1, 3)),
    "w @ 2d": ("left", "", (4, 5), (3, 4), None),
    "w @ 3d": ("left", "", (2, 4, 5), (3, 4), None),
    "w @ 1d": ("left", "", (4,), (3, 4), None),
    "w 3d @ 2d": ("left", "", (4, 5), (2, 3, 4), None),
    "w 3d @ 3d": ("left", "", (2, 4, 5), (2, 3, 4), None),
    "w 3d @ 1d": ("left", "", (4,), (2, 3, 4), None),
    "einsum": ("einsum", "bti,io->bto", (2, 5, 4), (4, 3), None),
    "einsum heads": ("einsum", "bti,hid->bhtd", (2, 5, 4), (3, 4, 6), None),
    "einsum outer": ("einsum", "a,b->ab", (5,), (3,), None),
}


@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradients_are_autograds(case):
    kind, extra, x_shape, w_shape, b_shape = CASES[case]
    torch.manual_seed(0)
    x = torch.randn(x_shape, dtype=D, requires_grad=True)
    w = torch.randn(w_shape, dtype=D, requires_grad=True)
    b = None if b_shape is None else torch.randn(b_shape, dtype=D, requires_grad=True)
    out = KINDS[kind].forward(x, w, b, None, extra)
    g = torch.randn_like(out)
    expected = torch.autograd.grad(out, (x, w), g)
    with torch.no_grad():
        found = (
            KINDS[kind].grad_input(g, w, None, extra, x.shape),
            KINDS[kind].grad_weight(g, x, None, extra, w.shape),
        )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["grouped", "hf_grouped"])
def test_grouped_gemm(kind):
    if kind == "hf_grouped":
        pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    offs = torch.tensor([3, 3, 10], dtype=torch.int32)  # the second expert has no rows
    x = torch.randn(10, 8, requires_grad=True)
    w = torch.randn(3, 8, 16, requires_grad=True)
    starts = [0, *offs.tolist()[:-1]]
    out = torch.cat([x[a:b] @ w[e] for e, (a, b) in enumerate(zip(starts, offs.tolist(), strict=True))])
    g = torch.randn_like(out)
    expected = torch.autograd.grad(out, (x, w), g)
    with torch.no_grad():
        assert torch.allclose(KINDS[kind].forward(x, w, None, offs, ""), out, atol=1e-5)
        assert torch.allclose(KINDS[kind].grad_input(g, w, offs, "", x.shape), expected[0], atol=1e-5)
        assert torch.allclose(KINDS[kind].grad_weight(g, x, offs, "", w.shape), expected[1], atol=1e-5)


@pytest.mark.parametrize(
    ("equation", "dims", "at", "expected"),
    [
        ("bi,io->bo", (2, 2), 1, "bi,io->bo"),
        ("io, bi -> bo", (2, 2), 0, "bi,io->bo"),
        ("bi,io", (2, 2), 1, "bi,io->bo"),
        ("...i,io->...o", (4, 2), 1, "abci,io->abco"),
        ("...i,io->...o", (1, 2), 1, "i,io->o"),
        ("...i,io->...o", (UNKNOWN, 2), 1, None),
        ("bi,...io->...bo", (2, 3), 1, None),
        ("bii,io->bo", (3, 2), 1, None),
        ("bix,io->bo", (3, 2), 1, None),
        ("bi,iox->bo", (2, 3), 1, None),
        ("bi,io,o->b", (2, 2), 1, None),
    ],
)
def test_normal_form_of_einsum(equation, dims, at, expected):
    assert normalize_einsum(equation, dims, at) == expected


def found(func, *args, **kwargs):  # type: ignore[no-untyped-def]
    """Match with the strings that begin with w as weights."""
    return match(
        func, args, kwargs, lambda v: isinstance(v, str) and v.startswith("w"), lambda v: 3 if v == "w3" else 2
    )


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (found(F.linear, "x", "w"), Call("linear", "", "x", "w")),
        (found(F.linear, "x", weight="w", bias="b"), Call("linear", "", "x", "w", "b")),
        (found(F.linear, "w", "x"), None),
        (found(torch.matmul, "x", "w"), Call("right", "", "x", "w")),
        (found(torch.matmul, "w", "x"), Call("left", "", "x", "w")),
        (found(torch.matmul, "x", "y"), None),
        (found(torch.matmul, "w", "w"), "product of two weights"),
        (found(Tensor.__rmatmul__, "w", "x"), Call("right", "", "x", "w")),
        (found(torch.mm, "x", mat2="w"), Call("right", "", "x", "w")),
        (found("matmul", "x", "w"), Call("right", "", "x", "w")),
        (found(torch.addmm, "b", "x", "w"), Call("right", "", "x", "w", "b")),
        (found(torch.addmm, "b", "x", "w", beta=0.5), "addmm with alpha or beta other than 1"),
        (found(torch.addmm, "b", "w", "x"), "addmm with the weight as its first factor"),
        (found(torch.baddbmm, "b", batch1="x", batch2="w"), Call("right", "", "x", "w", "b")),
        (found(torch.einsum, "bi,io->bo", "x", "w"), Call("einsum", "bi,io->bo", "x", "w")),
        (found(torch.einsum, "bi,io->bo", ["x", "w"]), Call("einsum", "bi,io->bo", "x", "w")),
        (found(torch._grouped_mm, "x", "w3", offs="o"), Call("grouped", "", "x", "w3", None, "o")),
        (found(torch.relu, "x"), None),
        (found("relu", "x"), None),
    ],
)
def test_operands_are_sorted_out(call, expected):
    assert call == expected


def test_uncovered_forms_have_a_reason():
    assert isinstance(found(torch.einsum, "bii,io->bo", "x", "w"), str)
    assert isinstance(found(torch.einsum, "bi,io,oj->bj", "x", "w", "w"), str)
    assert isinstance(found(torch._grouped_mm, "x", "w", offs="o"), str)


def test_what_is_a_projection():
    assert is_projection(F.linear)
    assert is_projection("addmm")
    assert not is_projection("relu")
    assert not is_projection(torch.ops.aten.relu.default)
