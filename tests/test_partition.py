"""Pass ``partition``: what a compiled graph keeps in scope "all", and that it is put back.

Most tests run the pass in AOTAutograd with graphs that are interpreted: quick, and the same pass. ``test_inductor_*``
compile for real.
"""

from __future__ import annotations

import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import gnmr_fx
from gnmr_fx import Format, Recipe, units
from gnmr_fx.passes.partition import Partitioner
from tests.loops import decoder, gradients, readable_kernels, relative_error, roles
from tests.models import CASES, Built, instrument_options
from tests.test_guarantees import compiled_saved
from tests.toys import FirstToken

EVERYTHING = gnmr_fx.AllSaved(min_bytes=0)
LOSSLESS = Recipe(Format("none"), Format("bf16"))
LOW = Recipe(Format("int4"), Format("int8"))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    before = inductor_config.custom_partitioner_fn
    with readable_kernels():
        yield
    inductor_config.custom_partitioner_fn = before  # models that a test leaves to the garbage collector
    torch._dynamo.reset()


def interpreted(partitioner: Any = None) -> Callable[..., Any]:
    """A backend that partitions as Inductor does, and interprets the graphs; it notes them in ``.graphs``."""
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    chosen = Partitioner(None) if partitioner is None else partitioner

    def partition(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        return chosen(gm, inputs, **kwargs)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)

    def compile_(gm: fx.GraphModule, inputs: Any) -> Any:
        return backend(gm, inputs)

    compile_.graphs = graphs  # type: ignore[attr-defined]
    return compile_


def saved_bytes(built: Built, call: Callable[..., Any]) -> int:
    exclude = [*built.model.parameters(), *built.model.buffers(), *built.args]
    loss = built.loss(call(*built.args, **built.kwargs))
    found = sum(t.untyped_storage().nbytes() for t in compiled_saved(loss, exclude))
    loss.backward()
    return found


def left(model: nn.Module) -> dict[tuple[str, str], str]:
    """(role, dtype) of what is kept as it is -> why."""
    return {(item["role"], item["dtype"]): item["reason"] for item in gnmr_fx.table(model).kept_as_it_is}


# What is stored, and for whom -------------------------------------------------------------------------------------


def test_every_saved_activation_is_stored_and_belongs_to_a_unit() -> None:
    built = decoder()
    stock = saved_bytes(built, torch.compile(built.model, backend=interpreted(min_cut_rematerialization_partition)))
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
    torch._dynamo.reset()
    low = saved_bytes(built, torch.compile(built.model, backend=interpreted()))
    found = {name.removeprefix("blocks.0."): sorted(own) for name, own in roles(built.model).items()}
    assert found == {
        "q": ["embedding", "input", "query"],
        "k": ["key"],
        "v": ["value"],
        "o": ["input", "output"],  # its output in place of the residual, which is recomputed from it
        "gate": ["input", "output"],
        "up": ["output"],
        "down": ["add", "input", "mul"],  # the residual that the last norm reads, and what lm_head reads
    }
    totals = gnmr_fx.table(built.model).totals
    kept = sum(item["bytes"] for item in gnmr_fx.table(built.model).kept_as_it_is if item["unit"] is not None)
    # What the table says is what autograd holds: low payloads, and what is kept as it is.
    assert totals["bytes_low"] < low <= totals["bytes_low"] + kept
    assert totals["bytes_full"] / totals["bytes_low"] > 6  # fp32 in 4 bits, query and key in 8
    assert low < 0.3 * stock


def test_what_must_not_be_stored_is_kept_and_listed() -> None:
    built = decoder()
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
    gradients(built, torch.compile(built.model, backend=interpreted()))
    reasons = left(built.model)
    assert reasons["rsqrt", "float32"] == "statistics of a softmax or a norm"
    assert reasons["scaled_dot_product_flash_attention_for_cpu", "float32"] == "statistics of a softmax or a norm"
    assert reasons["log_softmax", "float32"] == "loss head"
    assert not any(reason == "a parameter or a buffer" for reason in reasons.values())


def test_query_and_key_take_8_bits_at_least_unless_asked_otherwise() -> None:
    for attention, expected in (("int8", "int8 g128"), ("int4", "int4 g128"), ("low", "int2 g128")):
        torch._dynamo.reset()
        built = decoder()
        scope = gnmr_fx.AllSaved(min_bytes=0, attention=attention)
        gnmr_fx.instrument(built.model, Recipe(Format("int2"), Format("int8")), scope=scope)
        gradients(built, torch.compile(built.model, backend=interpreted()))
        formats = {a["role"]: a["low_format"] for row in gnmr_fx.table(built.model).units for a in row.activations}
        assert (formats["query"], formats["key"]) == (expected, expected)
        assert formats["value"] == formats["output"] == formats["input"] == "int2 g128"


class Scores(nn.Module):
    """Attention by hand, with a mask of infinities before the softmax and one after a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        causal = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).triu(1)
        masked = (q @ q.transpose(-1, -2)).masked_fill(causal, float("-inf"))
        weights = torch.softmax(masked, -1)
        return self.out(weights @ q)


def test_masks_with_infinities_do_not_reach_the_gradients() -> None:
    torch.manual_seed(0)
    built = Built(Scores().train(), (torch.randn(2, 16, 32),), {}, lambda out: out.square().mean())
    expected = gradients(built, built.model)
    gnmr_fx.instrument(built.model, Recipe(Format("int8"), Format("int8")), scope=EVERYTHING)
    for call in (built.model, torch.compile(built.model, backend=interpreted())):
        assert relative_error(gradients(built, call), expected) < 0.05  # nan would fail


def test_a_returned_activation_is_kept_as_it_is() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.tanh(self.a(x))
            return self.b(hidden), hidden

    torch.manual_seed(0)
    model = gnmr_fx.instrument(Returns().train(), LOW, scope=EVERYTHING)
    out, hidden = torch.compile(model, backend=interpreted())(torch.randn(4, 32))
    (out.sum() + hidden.square().sum()).backward()
    assert "returned to the caller" in {item["reason"] for item in gnmr_fx.table(model).kept_as_it_is}
    assert "input" not in roles(model)["b"]


def test_the_loss_head_is_stored_only_if_asked() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.lm_head = nn.Linear(32, 32), nn.Linear(32, 48)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(self.lm_head(torch.tanh(self.body(x))).float(), target)

    def stored(loss_head: bool) -> bool:
        torch._dynamo.reset()
        torch.manual_seed(0)
        scope = gnmr_fx.AllSaved(min_bytes=0, loss_head=loss_head)
        model = gnmr_fx.instrument(Model().train(), LOW, scope=scope)
        torch.compile(model, backend=interpreted())(torch.randn(8, 32), torch.arange(8)).backward()
        return "log_softmax" in roles(model)["body"]

    assert not stored(False)
    assert stored(True)


class Kernel(nn.Module):
    """A weight by another name than ``weight``."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(32, 48) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel


class Language(nn.Module):
    """A body of which nothing but ``query`` is to be a unit, and a head; returns its loss."""

    def __init__(self, head: nn.Module, calls_head: bool = True) -> None:
        super().__init__()
        self.query, self.inner, self.lm_head, self.calls_head = nn.Linear(32, 32), nn.Linear(32, 40), head, calls_head
        self.back = nn.Linear(40, 32)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.back(torch.tanh(self.inner(torch.tanh(self.query(x)))))
        logits = self.lm_head(torch.tanh(x)) if self.calls_head else F.linear(torch.tanh(x), self.lm_head.weight)
        return F.cross_entropy(logits.float(), target)


HEADS = {
    "module": lambda: Language(nn.Linear(32, 48)),
    "parameter": lambda: Language(Kernel()),
    "weight": lambda: Language(nn.Linear(32, 48), calls_head=False),
    "frozen": lambda: Language(nn.Linear(32, 48).requires_grad_(False)),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", HEADS)
def test_only_what_follows_the_output_head_is_the_loss_head(kind: str, compiled: bool) -> None:
    torch.manual_seed(0)
    model = HEADS[kind]().train()
    built = Built(model, (torch.randn(8, 32), torch.arange(8)), {}, lambda loss: loss)
    gnmr_fx.instrument(model, LOW, include=["query"], scope=EVERYTHING)
    names = set(model.state_dict())
    gnmr_fx.controller(model).force("low")
    gradients(built, torch.compile(model, backend=interpreted()) if compiled else model)
    # The body's last layers hold no unit, and belong to the one there is.
    (row,) = gnmr_fx.table(model).units
    assert sum(activation["calls"] for activation in row.activations if activation["role"] == "tanh") == 3
    head = [item["shape"] for item in gnmr_fx.table(model).kept_as_it_is if item["reason"] == "loss head"]
    assert {shape[-1] for shape in head if shape} == {48}
    gnmr_fx.uninstrument(model)
    assert set(model.state_dict()) == names
    assert not any(key.startswith("_gnmr") for module in model.modules() for key in vars(module))


def test_small_tensors_stay() -> None:
    built = decoder()
    gnmr_fx.instrument(built.model, LOW, scope=gnmr_fx.AllSaved(min_bytes=8000))  # the mlp's inner ones are larger
    gradients(built, torch.compile(built.model, backend=interpreted()))
    stored = {role for own in roles(built.model).values() for role in own}
    assert stored == {"input", "output"}
    assert "small" in left(built.model).values()
    controller = gnmr_fx.controller(built.model)
    assert all(unit.observation.seen for unit in controller.units)  # those that store nothing are heard all the same


@pytest.mark.parametrize("backend", ["interpreted", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_small_piece_does_not_keep_the_large_tensor_alive(backend: str) -> None:
    torch.manual_seed(0)
    built = Built(FirstToken().train(), (torch.randn(8, 64, 32),), {}, lambda out: out.square().mean())
    expected = gradients(built)
    gnmr_fx.instrument(built.model, LOSSLESS, scope=gnmr_fx.AllSaved(min_bytes=4096))  # the piece has 1024 bytes
    controller = gnmr_fx.controller(built.model)
    controller.force("low")
    call = torch.compile(built.model, backend=interpreted() if backend == "interpreted" else backend)
    exclude = [*built.model.parameters(), *built.args]
    loss = built.loss(call(*built.args))
    sizes = sorted(t.untyped_storage().nbytes() for t in compiled_saved(loss, exclude) if t.numel())
    loss.backward()
    assert sizes[0] == 1024, sizes  # the piece, on its own
    assert "small" in {item["reason"] for item in gnmr_fx.table(built.model).kept_as_it_is}
    assert relative_error(gradients(built, call), expected) < 1e-6
    gnmr_fx.uninstrument(built.model)


def test_a_tensor_that_several_units_read_is_recovered_with_any_of_them() -> None:
    built = decoder()
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
    controller, call = gnmr_fx.controller(built.model), torch.compile(built.model, backend=interpreted())
    controller.force("low")
    low = saved_bytes(built, call)
    sizes = {}
    for name in "qkv":
        controller.force([f"blocks.0.{name}"])
        sizes[name] = saved_bytes(built, call) - low
    controller.force(["blocks.0.up"])
    sizes["up"] = saved_bytes(built, call) - low
    x = gnmr_fx.formats.nbytes((1024,), Format("int8"), torch.float32)  # 2 by 8 by 64
    assert sizes["k"] == x  # the input it shares; its own key has 8 bits anyway
    assert sizes["q"] == 2 * x  # and the embedding
    assert sizes["v"] == 2 * x  # and its value
    assert sizes["up"] == x + 2 * x  # the input it shares with gate, and its output, twice as wide


# Numerics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "encoder",
        "branching",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("bert", "vit", "gpt2", "functional", "lora", "mixtral-grouped")
        ),
    ],
)
def test_lossless_formats_change_nothing(name: str) -> None:
    """Decoded tensors have the shape, the order and the values of what was saved."""
    torch.manual_seed(0)
    built = CASES[name].build()
    expected = gradients(built, torch.compile(built.model, backend=interpreted(min_cut_rematerialization_partition)))
    torch._dynamo.reset()
    gnmr_fx.instrument(built.model, LOSSLESS, scope=EVERYTHING, **instrument_options(CASES[name], built))
    found = gradients(built, torch.compile(built.model, backend=interpreted()))
    assert not {key for key in expected if not torch.equal(found[key], expected[key])}
    assert any(row.activations for row in gnmr_fx.table(built.model).units)


@pytest.mark.parametrize(("guards", "bound"), [("low", 0.2), ("high", 0.02)])
def test_gradient_error(guards: str, bound: float) -> None:
    built = decoder(2)
    expected = gradients(built, built.model)
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
    gnmr_fx.controller(built.model).force(guards)
    found = gradients(built, torch.compile(built.model, backend=interpreted()))
    assert 0 < relative_error(found, expected) < bound


def test_stochastic_rounding_differs_from_step_to_step_alone() -> None:
    built = decoder()
    recipe = Recipe(Format("int4", rounding="stochastic"), Format("int8"))
    gnmr_fx.instrument(built.model, recipe, scope=EVERYTHING)
    controller, call = gnmr_fx.controller(built.model), torch.compile(built.model, backend=interpreted())
    first, again = gradients(built, call), gradients(built, call)
    assert all(torch.equal(first[key], again[key]) for key in first)
    controller.step()
    assert 0 < relative_error(gradients(built, call), first) < 0.5


# One graph --------------------------------------------------------------------------------------------------------


def test_guards_flip_without_a_recompilation() -> None:
    built = decoder(2)
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
    controller, counter = gnmr_fx.controller(built.model), CompileCounterWithBackend("eager")
    backend = interpreted()

    def counting(gm: fx.GraphModule, inputs: Any) -> Any:
        counter.frame_count += 1
        return backend(gm, inputs)

    call = torch.compile(built.model, backend=counting, fullgraph=True)
    names, draw = [unit.name for unit in controller.units], random.Random(0)
    errors = set()
    for _ in range(20):
        controller.force(draw.sample(names, draw.randrange(len(names) + 1)))
        errors.add(sum(float(g.sum()) for g in gradients(built, call).values()))
    assert counter.frame_count == 1
    assert len(errors) > 10


def test_blocks_compiled_one_by_one_share_a_graph() -> None:
    built = decoder(3)
    expected = gradients(built, built.model)
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
    backend = interpreted()
    for block in built.model.blocks:
        block.compile(backend=backend, fullgraph=True)
    controller = gnmr_fx.controller(built.model)
    for guards in ("high", "low"):
        controller.force(guards)
        found = gradients(built, built.model)
        assert relative_error(found, expected) < (0.02 if guards == "high" else 0.2)
    assert len(backend.graphs) == 2  # a forward and its backward
    # The block's own input, the residual stream, is an activation: no block keeps it as it is.
    assert "add" not in {role for role, _ in left(built.model)}


@pytest.mark.parametrize("automatic", [False, True])
def test_dynamic_sequence_length(automatic: bool) -> None:
    built = decoder()
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
    backend = interpreted()
    call = torch.compile(built.model, backend=backend, fullgraph=True)
    gnmr_fx.controller(built.model).force("high")
    for length in (8, 12, 16, 20):
        ids = torch.randint(0, 48, (2, length))
        if not automatic:
            torch._dynamo.mark_dynamic(ids, 1)
        sized = built._replace(args=(ids,))
        found = gradients(sized, call)
        assert relative_error(found, gradients(sized, built.model)) < 0.02
    assert len(backend.graphs) == (4 if automatic else 2)
    assert gnmr_fx.table(built.model).totals["bytes_full"] > 0


# Together with others ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.__version__ < "2.12", reason="compiled checkpoints of torch 2.11 keep what Functions make")
def test_what_checkpointing_drops_is_not_kept() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            return x

    torch.manual_seed(0)
    built = Built(Blocks().train(), (torch.randn(4, 32),), {}, lambda out: out.square().mean())
    expected = gradients(built, built.model)
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
    found = gradients(built, torch.compile(built.model, backend=interpreted()))
    assert 0 < relative_error(found, expected) < 0.2
    kept = [a for row in gnmr_fx.table(built.model).units for a in row.activations]
    assert {a["width"] for a in kept} == {32 * 4}  # the inputs of the blocks, and nothing from inside: that is 64 wide


def test_a_partitioner_of_the_users_own_runs_inside() -> None:
    class Own(CustomPartitionerFn):
        calls = 0

        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            type(self).calls += 1
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

        def uuid(self) -> Any:
            return "own"

    built = decoder()
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
    gradients(built, torch.compile(built.model, backend=interpreted(Partitioner(Own()))))
    assert Own.calls == 1
    assert roles(built.model)["blocks.0.k"] == ["key"]
    assert Partitioner(Own()).uuid() != Partitioner(None).uuid()


def test_graphs_of_others_are_handed_on_untouched() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    x = torch.randn(4, 32)
    texts = []
    for partitioner in (min_cut_rematerialization_partition, Partitioner(None)):
        torch._dynamo.reset()
        backend = interpreted(partitioner)
        torch.compile(model, backend=backend)(x).sum().backward()
        texts.append([str(graph.graph) for graph in backend.graphs])
    assert texts[0] == texts[1]


# Several models, and what is no activation ------------------------------------------------------------------------


def chain(seed: int, depth: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(32, 32), nn.Tanh()))).train()


def in_one_graph(first: nn.Module, second: nn.Module, follows: bool = True) -> Built:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: Tensor) -> Tensor:
            made = self.first(x)
            return self.second(made) if follows else self.second(x) + made

    torch.manual_seed(0)
    return Built(Both().train(), (torch.randn(8, 32),), {}, lambda out: out.square().mean())


@pytest.mark.parametrize("follows", [False, True])
def test_another_models_projections_in_the_graph_stay_as_they_are(follows: bool) -> None:
    everything, projections = chain(0), chain(1)
    built = in_one_graph(everything, projections, follows)
    expected = gradients(built, built.model)
    gnmr_fx.instrument(everything, Recipe(Format("int8"), Format("int8")), scope=EVERYTHING)
    gnmr_fx.instrument(projections, Recipe(Format("int8"), Format("int8")))
    found = gradients(built, torch.compile(built.model, backend=interpreted()))
    assert relative_error(found, expected) < 0.01  # an encoding that is encoded again, with its scales, is far off
    assert {role for own in roles(projections).values() for role in own} == {"input"}
    assert all(row.seen for row in gnmr_fx.table(projections).units)
    assert not any("save_" in role for own in roles(everything).values() for role in own)
    assert not any("save_" in role for role, _ in left(everything))


def test_two_models_in_one_graph_have_options_and_tables_of_their_own() -> None:
    first, second = chain(0), chain(1, depth=5)
    built = in_one_graph(first, second)
    expected = gradients(built, built.model)
    gnmr_fx.instrument(first, Recipe(Format("int8"), Format("int8")), scope=EVERYTHING)
    gnmr_fx.instrument(second, LOW, scope=gnmr_fx.AllSaved(min_bytes=1 << 20))
    found = gradients(built, torch.compile(built.model, backend=interpreted()))
    assert 0 < relative_error(found, expected) < 0.01
    assert all(unit.observation.scope == "all" for m in (first, second) for unit in gnmr_fx.controller(m).units)
    assert all(roles(first)[name] == ["input"] for name in ("2", "4"))
    assert not any(roles(second).values())
    assert "small" in left(second).values()
    assert "small" not in left(first).values()


def test_weights_are_not_stored() -> None:
    class Weights(nn.Module):
        """Cast by autocast, computed by weight normalization, and of a convolution."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(24, 24), weight_norm(nn.Linear(24, 24))
            self.conv, self.c = weight_norm(nn.Conv1d(8, 8, 3)), nn.Linear(22, 24)

        def forward(self, x: Tensor) -> Tensor:
            x = self.b(torch.tanh(self.a(x)))
            with torch.autocast("cpu", torch.bfloat16):
                return torch.tanh(self.c(self.conv(x))).sin()

    torch.manual_seed(0)
    model = gnmr_fx.instrument(Weights().train(), LOW, scope=EVERYTHING)
    built = Built(model, (torch.randn(4, 8, 24),), {}, lambda out: out.float().square().mean())
    sizes = {p.numel() for p in model.parameters()}
    gradients(built, torch.compile(model, backend=interpreted()))
    stored = {a["rows"] * a["width"] for row in gnmr_fx.table(model).units for a in row.activations}
    assert stored
    assert not stored & sizes
    assert "connected to no unit" not in left(model).values()


def test_a_view_that_the_backward_takes_is_stored_like_what_it_views() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x, x, x, need_weights=True)[0]))

    torch.manual_seed(0)
    model = gnmr_fx.instrument(Attention().train(), LOW, scope=EVERYTHING)
    built = Built(model, (torch.randn(2, 12, 32),), {}, lambda out: out.square().mean())
    gradients(built, torch.compile(model, backend=interpreted()))
    assert "made by the partitioner" not in left(model).values()


def test_a_sum_that_a_unit_reads_is_an_activation() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.gelu(self.a(x)).sum(1))

    torch.manual_seed(0)
    model = gnmr_fx.instrument(Pooled().train(), LOW, scope=EVERYTHING)
    built = Built(model, (torch.randn(4, 8, 32),), {}, lambda out: out.square().mean())
    gradients(built, torch.compile(model, backend=interpreted()))
    assert roles(model)["b"] == ["input"]


# Other backends ---------------------------------------------------------------------------------------------------


def test_a_backend_without_the_pass_raises_by_default() -> None:
    built = decoder()
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
    with pytest.raises(gnmr_fx.UnsupportedBackendError, match=r"backend='inductor'.*scope='projections'"):
        torch.compile(built.model, backend="aot_eager")(*built.args)
    gnmr_fx.uninstrument(built.model)


def test_a_backend_without_the_pass_stores_projections_if_asked_and_the_table_says_so() -> None:
    built = decoder()
    scope = gnmr_fx.AllSaved(min_bytes=0, unsupported_backend="projections")
    gnmr_fx.instrument(built.model, LOW, scope=scope)
    gradients(built, torch.compile(built.model, backend="aot_eager"))
    table = gnmr_fx.table(built.model)
    assert all(a["role"] == "input" for row in table.units for a in row.activations)
    assert all("the projection's input alone" in row.notes[0] for row in table.units)
    gnmr_fx.uninstrument(built.model)


def test_the_partitioner_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "_OBSERVERS", weakref.WeakValueDictionary())  # no models of other tests
    inductor_config.custom_partitioner_fn = None
    before = inductor_config.custom_partitioner_fn
    built, other = decoder(), decoder()
    for each in (built, other):
        gnmr_fx.instrument(each.model, LOW, scope=gnmr_fx.AllSaved(min_bytes=0, unsupported_backend="projections"))
        gradients(each, torch.compile(each.model, backend="aot_eager"))
    assert isinstance(inductor_config.custom_partitioner_fn, Partitioner)
    gnmr_fx.uninstrument(built.model)
    assert isinstance(inductor_config.custom_partitioner_fn, Partitioner)  # the other model is still there
    gnmr_fx.uninstrument(other.model)
    assert inductor_config.custom_partitioner_fn is before


# Inductor ---------------------------------------------------------------------------------------------------------

_TWICE = """
import sys, torch, gnmr_fx
from torch._dynamo.utils import counters
from tests.test_partition import EVERYTHING, LOW, decoder, gradients
built = decoder()
gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
controller = gnmr_fx.controller(built.model)
call = torch.compile(built.model, fullgraph=True)
for guards in ("low", "high"):
    controller.force(guards)
    print(guards, sorted((k, round(float(g.norm()), 6)) for k, g in gradients(built, call).items()))
print("graphs", counters["stats"]["unique_graphs"])
print("stored", [[a["role"] for a in row.activations] for row in gnmr_fx.table(built.model).units])
print("left", len(gnmr_fx.table(built.model).kept_as_it_is))
print("hits", counters["inductor"]["fxgraph_cache_hit"], file=sys.stderr)
"""


@pytest.mark.slow
def test_inductor_caches_serve_a_second_process(tmp_path: Path) -> None:
    def process() -> tuple[str, str]:
        import os

        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        done = subprocess.run(
            [sys.executable, "-c", _TWICE], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout, done.stderr.splitlines()[-1]

    first, second = process(), process()
    assert first[0] == second[0]
    assert first[1].split()[1] == "0"
    assert int(second[1].split()[1]) > 0, second[1]


def test_inductor_keeps_what_the_table_says() -> None:
    built = decoder()
    expected = gradients(built, built.model)
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
    controller, call = gnmr_fx.controller(built.model), torch.compile(built.model, fullgraph=True)
    sizes = {}
    for guards in ("low", "high"):
        controller.force(guards)
        sizes[guards] = saved_bytes(built, call)
        assert relative_error(gradients(built, call), expected) < (0.2 if guards == "low" else 0.02)
    table = gnmr_fx.table(built.model)
    kept = sum(item["bytes"] for item in table.kept_as_it_is)
    assert table.totals["bytes_low"] < sizes["low"] <= table.totals["bytes_low"] + kept
    assert sizes["high"] - sizes["low"] <= sum(row.bytes_high or 0 for row in table.units)
    gnmr_fx.uninstrument(built.model)


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "bound"), [("int4", 0.30), ("int2", 0.18)])
def test_inductor_keeps_a_fraction_of_stock(bits: str, bound: float) -> None:
    """In bf16, the loss head apart: what is as wide as the vocabulary."""

    def kept(call: Callable[..., Any]) -> int:
        loss = built.loss(call(*built.args))
        found = compiled_saved(loss, [*built.model.parameters(), *built.model.buffers(), *built.args])
        loss.backward()
        return sum(t.untyped_storage().nbytes() for t in found if not t.dim() or t.shape[-1] != 48)

    built = decoder(2)
    built.model.bfloat16()
    stock = kept(torch.compile(built.model))
    torch._dynamo.reset()
    gnmr_fx.instrument(built.model, Recipe(Format.parse(bits), Format("int8")), scope=EVERYTHING)
    gnmr_fx.controller(built.model).force("low")
    assert kept(torch.compile(built.model)) < bound * stock
    gnmr_fx.uninstrument(built.model)


@pytest.mark.slow
def test_inductor_guards_flip_over_100_steps_without_a_recompilation() -> None:
    built = decoder(2)
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
    controller, call = gnmr_fx.controller(built.model), torch.compile(built.model, fullgraph=True)
    names, draw = [unit.name for unit in controller.units], random.Random(0)
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(100):
            controller.force(draw.sample(names, draw.randrange(len(names) + 1)))
            gradients(built, call)
    assert counters["stats"]["unique_graphs"] == 1
    gnmr_fx.uninstrument(built.model)


@pytest.mark.slow
@pytest.mark.parametrize("automatic", [False, True])
def test_inductor_with_dynamic_sequence_length(automatic: bool) -> None:
    built = decoder()
    lengths = [8, 12, 16, 24]
    inputs = [torch.randint(0, 48, (2, length)) for length in lengths]
    expected = [gradients(built._replace(args=(ids,)), built.model) for ids in inputs]
    gnmr_fx.instrument(built.model, LOW, scope=EVERYTHING)
    gnmr_fx.controller(built.model).force("high")
    call = torch.compile(built.model, fullgraph=True)
    counters.clear()
    for ids, exact in zip(inputs, expected, strict=True):
        if not automatic:
            torch._dynamo.mark_dynamic(ids, 1)
        assert relative_error(gradients(built._replace(args=(ids,)), call), exact) < 0.02
    assert counters["stats"]["unique_graphs"] == (2 if automatic else 1)
    gnmr_fx.uninstrument(built.model)
