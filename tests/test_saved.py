"""The eager twin of the partition pass: what eager mode keeps in scope "all"."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import gnmr_fx
from gnmr_fx import Format, Recipe, formats, saved
from tests.loops import autograd_nodes, decoder, gradients, readable_kernels, relative_error, roles
from tests.models import CASES, Built, cast, instrument_options
from tests.toys import FirstToken

EVERYTHING = gnmr_fx.AllSaved(min_bytes=0)
LOW = Recipe(Format("int4"), Format("int8"))


@pytest.fixture(autouse=True)
def _readable() -> Iterator[None]:
    with readable_kernels():
        yield


def held(built: Built) -> dict[int, int]:
    """Address -> bytes of the storages that the autograd graph holds after a forward, parameters and inputs apart.

    Read from the graph itself, where a saved variable gives what its hook has made of it.
    """
    loss = built.loss(built.model(*built.args, **built.kwargs))
    kept: list[Tensor] = []
    for node in autograd_nodes(loss):
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                raw = getattr(node, name)
                kept += [t for one in (raw if isinstance(raw, tuple | list) else [raw]) for t in _tensors(one)]
        if type(node).__name__ == "_GuardedBackward":
            kept += node.saved_tensors
    own = {t.untyped_storage().data_ptr() for t in (*built.model.parameters(), *built.model.buffers(), *built.args)}
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    loss.backward()
    return {at: size for at, size in found.items() if at not in own}


def _tensors(raw: Any) -> list[Tensor]:
    """What a saved variable holds: what its hook has made of the tensor, or the tensor itself."""
    kept = raw.data if hasattr(raw, "data") else raw
    if isinstance(kept, saved.AsItIs):
        return [kept.tensor]
    return list(kept.encoded) if isinstance(kept, saved.Packed) else [kept] if isinstance(kept, Tensor) else []


def test_every_saved_activation_is_stored_and_belongs_to_a_unit() -> None:
    built = decoder()
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING, example_inputs=built.args)
    gradients(built)
    found = {name.removeprefix("blocks.0."): own for name, own in roles(built.model).items()}
    assert found["q"] == ["embedding", "input", "mul", "query"]  # mul: what the first norm saves
    assert found["k"] == ["key"]
    assert found["v"] == ["attention output", "output"]
    assert {"output", "silu"} <= set(found["gate"])
    assert {"input"} <= set(found["down"])
    formats_ = {a["role"]: a["low_format"] for row in gnmr_fx.table(built.model).units for a in row.activations}
    assert formats_["query"] == formats_["key"] == "int8 g128"
    assert {formats_[role] for role in ("input", "output", "silu", "attention output", "embedding")} == {"int4 g128"}
    left = {item["reason"] for item in gnmr_fx.table(built.model).kept_as_it_is}
    assert left == {"loss head"}


@pytest.mark.parametrize("name", [n for n in CASES if n != "mamba"])
def test_lossless_formats_change_nothing(name: str) -> None:
    """In bf16, a copy in bf16 holds every value: decoded tensors have the shape and order of what was saved."""
    torch.manual_seed(0)
    built = cast(CASES[name].build(), torch.bfloat16)
    expected = gradients(built)
    recipe = Recipe(Format("bf16"), Format("bf16"))
    gnmr_fx.instrument(
        built.model,
        recipe,
        scope=gnmr_fx.AllSaved(min_bytes=1 << 10, attention="low"),
        **instrument_options(CASES[name], built),
    )
    with pytest.MonkeyPatch.context() as patch:  # statistics in fp32 would lose bits
        worth = saved.Saver.is_worth_it
        patch.setattr(saved.Saver, "is_worth_it", lambda self, x: worth(self, x) and x.dtype == torch.bfloat16)
        found = gradients(built)
    assert not {key for key in expected if not torch.equal(found[key], expected[key])}


def test_the_table_says_what_is_held() -> None:
    built = decoder()
    stock = sum(held(built).values())
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING, example_inputs=built.args)
    controller = gnmr_fx.controller(built.model)
    controller.force("low")
    low = held(built)
    table = gnmr_fx.table(built.model)
    assert table.totals["bytes_low"] <= sum(low.values())
    assert table.totals["ratio"] > 6
    assert stock > 0
    controller.force("high")
    assert sum(held(built).values()) > sum(low.values())


@pytest.mark.parametrize(("guards", "bound"), [("low", 0.2), ("high", 0.02)])
def test_gradient_error(guards: str, bound: float) -> None:
    built = decoder(2)
    expected = gradients(built)
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING, example_inputs=built.args)
    gnmr_fx.controller(built.model).force(guards)
    assert 0 < relative_error(gradients(built), expected) < bound


def test_memory_that_several_operators_save_is_stored_once() -> None:
    built = decoder()
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING, example_inputs=built.args)
    made = []
    encode = formats.encode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved.kernels, "encode", lambda x, *a: made.append(x.untyped_storage()._cdata) or encode(x, *a))
        gradients(built)
    assert len(set(made)) == len(made)


def test_memory_with_gaps_is_not_taken_for_other_memory_of_its_size() -> None:
    class Overlapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 32), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)  # each of these has 128 elements and starts where y does
            left, even, top = y[:, :16].sin(), y[:, ::2].sin(), y[:4].sin().view(8, 16)
            return self.b(left) + self.b(even) + self.b(top)

    torch.manual_seed(0)
    built = Built(Overlapping().train(), (torch.randn(8, 16),), {}, lambda out: out.square().sum())
    expected = gradients(built)
    gnmr_fx.instrument(built.model, Recipe(Format("int8"), Format("int8")), scope=EVERYTHING)
    assert relative_error(gradients(built), expected) < 0.02


def test_what_checkpointing_drops_is_not_kept() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(3)
            )
            self.use = True

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + (checkpoint(block, x, use_reentrant=False) if self.use else block(x))
            return x

    torch.manual_seed(0)
    built = Built(Blocks().train(), (torch.randn(4, 32),), {}, lambda out: out.square().mean())
    expected = gradients(built)
    built.model.zero_grad()
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
    alive: list[weakref.ref[Tensor]] = []
    encode = formats.encode

    def recording(x: Tensor, *rest: Any) -> Any:
        encoded = encode(x, *rest)
        alive.extend((weakref.ref(encoded.payload),))
        return encoded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved.kernels, "encode", recording)
        loss = built.loss(built.model(*built.args))
        kept = [reference() for reference in alive]
    # The inputs of the second and the third region: the first one's is the caller's. Nothing from inside is alive.
    assert sum(payload is not None for payload in kept) == 2
    loss.backward()
    found = {name: p.grad for name, p in built.model.named_parameters()}
    assert relative_error(found, expected) < 0.2


def test_a_checkpoint_around_the_whole_model_keeps_nothing() -> None:
    built = decoder()
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
    loss = checkpoint(built.model, *built.args, use_reentrant=False)
    assert not gnmr_fx.controller(built.model).saver.blocks._entries
    loss.backward()
    assert all("input" in own or not own for own in roles(built.model).values())


def test_hooks_of_the_users_own_are_left_in_charge() -> None:
    built, packed = decoder(), []
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x.detach(), lambda x: x):
        loss = built.model(*built.args)
    loss.backward()
    assert packed
    assert any("the projection's input alone" in note for row in gnmr_fx.table(built.model).units for note in row.notes)


def test_parameters_in_another_dtype_are_not_stored() -> None:
    torch.manual_seed(0)
    model = gnmr_fx.instrument(
        nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)).train(), LOW, scope=EVERYTHING
    )
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.randn(4, 32))
    out.float().sum().backward()
    assert {role for own in roles(model).values() for role in own} <= {"input", "output", "tanh", "to_copy"}
    assert not any((a["rows"], a["width"]) == (32, 32) for row in gnmr_fx.table(model).units for a in row.activations)


def test_computed_weights_are_not_stored() -> None:
    class Weights(nn.Module):
        """By weight normalization, of a projection and of a convolution."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(24, 24), weight_norm(nn.Linear(24, 24))
            self.conv, self.c = weight_norm(nn.Conv1d(8, 8, 5)), nn.Linear(20, 24)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.c(self.conv(self.b(torch.tanh(self.a(x))))))

    torch.manual_seed(0)
    built = Built(Weights().train(), (torch.randn(4, 8, 24),), {}, lambda out: out.square().mean())
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
    gradients(built)
    stored = {a["rows"] * a["width"] for row in gnmr_fx.table(built.model).units for a in row.activations}
    assert {4 * 8 * 24, 4 * 8 * 20} <= stored
    assert not stored & {p.numel() for p in built.model.parameters()}


def test_an_in_place_change_of_a_saved_tensor_is_an_error() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            z = torch.sigmoid(y)
            w = z * 2
            z.mul_(3)  # the backward of sigmoid needs it
            return self.b(w + z)

    model = gnmr_fx.instrument(InPlace().train(), LOW, scope=EVERYTHING)
    with pytest.raises(RuntimeError, match="in-place"):
        model(torch.randn(4, 32)).sum().backward()


@pytest.mark.parametrize("saved_is", ["activation", "parameter"])
def test_an_in_place_change_of_what_is_kept_as_it_is_is_an_error(saved_is: str) -> None:
    """As in stock PyTorch, which does not look where there are hooks."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.sigmoid(self.norm(self.a(x)))
            return y.mul_(3) if saved_is == "activation" else y

    model = InPlace().train()
    gnmr_fx.instrument(model, LOW, scope=gnmr_fx.AllSaved(min_bytes=1 << 20))
    loss = model(torch.randn(4, 32)).sum()
    if saved_is == "parameter":
        with torch.no_grad():
            model.norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="in-place"):
        loss.backward()


def test_a_forward_that_fails_leaves_the_next_one_as_it_should_be() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.how = nn.Linear(32, 32), ""

        def forward(self, x: Tensor) -> Tensor:
            y = torch.sigmoid(self.a(x))
            if self.how == "raises":
                raise KeyError(self.how)
            return y.mul_(3) if self.how == "changes what is saved" else y.sin()

    model = gnmr_fx.instrument(Fails().train(), LOW, scope=EVERYTHING)
    x = torch.randn(4, 32)
    for how, error in (("raises", KeyError), ("changes what is saved", RuntimeError)):
        model.how = how
        with pytest.raises(error):
            model(x).sum().backward()
        model.how = ""
        model(x).sum().backward()
        assert "sigmoid" in roles(model)["a"]
        assert not gnmr_fx.controller(model).saver.active


def test_evaluation_and_no_grad_are_stock() -> None:
    built = decoder()
    stock = copy.deepcopy(built.model)
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
    assert torch.equal(built.model(*built.args), stock(*built.args))
    with torch.no_grad():
        assert torch.equal(built.model(*built.args), stock(*built.args))
    built.model.eval()
    stock.eval()
    assert torch.equal(built.model(*built.args), stock(*built.args))
    expected = gradients(built._replace(model=stock))
    assert not {k for k, g in gradients(built).items() if not torch.equal(g, expected[k])}


def test_copies_and_pickles_store_for_themselves() -> None:
    built = decoder()
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
    gnmr_fx.controller(built.model).force("low")
    expected = gradients(built)
    for other in (copy.deepcopy(built.model), pickle.loads(pickle.dumps(built.model))):
        controller = gnmr_fx.controller(other)
        assert controller is not gnmr_fx.controller(built.model)
        assert controller.saver is not gnmr_fx.controller(built.model).saver
        controller.force("low")
        found = gradients(built._replace(model=other))
        assert not {k for k in expected if not torch.equal(found[k], expected[k])}
        assert all(unit.observation.scope == "all" for unit in controller.units)


def test_a_projection_that_is_the_whole_model_survives_a_pickle() -> None:
    for scope in ("projections", EVERYTHING):
        model = gnmr_fx.instrument(nn.Linear(32, 32).train(), LOW, scope=scope)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(torch.randn(4, 32)).sum().backward()
            assert gnmr_fx.controller(other).units[0].observation.seen
            assert "forward" not in gnmr_fx.uninstrument(other).__dict__


def test_a_forward_that_the_instance_had_is_run_and_put_back() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)).train()
    stock, x = copy.deepcopy(model), torch.randn(4, 32)
    original = nn.Sequential.forward.__get__(model)
    calls = []

    def own(x: Tensor) -> Tensor:
        calls.append(1)
        return original(x) * 2

    model.forward = own
    gnmr_fx.instrument(model, LOW, scope=EVERYTHING)
    assert torch.equal(model(x), stock(x) * 2)
    assert calls == [1]
    assert gnmr_fx.uninstrument(model).forward is own


def test_uninstrument_leaves_no_trace() -> None:
    built = decoder()
    stock = copy.deepcopy(built.model)
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
    gradients(built)
    gnmr_fx.uninstrument(built.model)
    for module, original in zip(built.model.modules(), stock.modules(), strict=True):
        assert module.__dict__.keys() == original.__dict__.keys()
        assert not module._forward_hooks
    expected = gradients(built._replace(model=stock))
    assert not {k for k, g in gradients(built).items() if not torch.equal(g, expected[k])}


@pytest.mark.parametrize(
    ("scope", "message"),
    [
        ("al", "did you mean 'all'"),
        (3, "expected 'projections', 'all' or a gnmr_fx.AllSaved"),
        ("everything", "expected"),
    ],
)
def test_a_bad_scope_is_refused(scope: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(gnmr_fx.ConfigError, match=message):
        gnmr_fx.instrument(model, scope=scope)
    assert "forward" not in model.__dict__


@pytest.mark.parametrize(
    "options",
    [{"min_bytes": -1}, {"min_bytes": True}, {"loss_head": 1}, {"attention": "int3"}, {"unsupported_backend": ""}],
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(gnmr_fx.ConfigError, match=next(iter(options))):
        gnmr_fx.AllSaved(**options)


def test_options_survive_as_text() -> None:
    for options in (gnmr_fx.AllSaved(), gnmr_fx.AllSaved(7, True, "low", "projections")):
        assert gnmr_fx.AllSaved.parse(str(options)) == options


def test_double_backward_is_an_error() -> None:
    built = decoder()
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
    loss = built.model(*built.args)
    with pytest.raises(gnmr_fx.DoubleBackwardError):
        torch.autograd.grad(loss, [built.model.embed.weight], create_graph=True)


def test_a_small_piece_does_not_keep_the_large_tensor_alive() -> None:
    torch.manual_seed(0)
    built = Built(FirstToken().train(), (torch.randn(8, 64, 32),), {}, lambda out: out.square().mean())
    expected = gradients(built)
    gnmr_fx.instrument(built.model, Recipe(Format("none"), Format("int8")), scope=gnmr_fx.AllSaved(min_bytes=4096))
    gnmr_fx.controller(built.model).force("low")
    assert 1024 in held(built).values()  # the piece, on its own
    found = gradients(built)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_attention_by_hand_is_stable() -> None:
    """Products of large queries and keys, masked with -inf: finite gradients, near the exact ones in 8 bits."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.o = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x) * 4
            scores = (q @ q.transpose(-1, -2)).masked_fill(torch.ones(16, 16).triu(1).bool(), float("-inf"))
            return self.o(F.softmax(scores, -1) @ q)

    torch.manual_seed(0)
    built = Built(Attention().train(), (torch.randn(2, 16, 32),), {}, lambda out: out.square().mean())
    expected = gradients(built)
    gnmr_fx.instrument(built.model, Recipe(Format("int8"), Format("int8")), scope=EVERYTHING)
    assert relative_error(gradients(built), expected) < 0.05
