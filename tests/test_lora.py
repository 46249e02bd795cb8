"""The recipes for frozen weights under adapters, on whole models: numerics, one graph, bytes, signals, PEFT, errors."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gnmr_fx
from gnmr_fx import errors
from gnmr_fx.frozen import FrozenWeight, decode
from gnmr_fx.instrument import ModelController
from tests.loops import decoder, gradients, readable_kernels
from tests.models import Built, cast, gpt2, llama, transformer_encoder
from tests.ranks import on_ranks, own_part
from tests.test_guarantees import assert_same, compiled_saved, optimizer_hooks, refused, storages, trace
from tests.toys import WithAdapter

INT8, NF4 = "lora-int8-bf16", "lora-nf4-bf16"
BLIND = gnmr_fx.GnmrConfig(warmup_steps=10_000)  # decides nothing


@pytest.fixture(autouse=True)
def _readable() -> Iterator[None]:
    with readable_kernels():
        yield


def adapted(built: Built, targets: Any = ("q_proj", "v_proj"), rank: int = 4, **options: Any) -> Built:
    """With PEFT's adapters, which are not zero."""
    from peft import LoraConfig, get_peft_model

    targets = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(r=rank, lora_alpha=8, lora_dropout=0.0, target_modules=targets, **options)
    model = get_peft_model(built.model, config).train()
    randomize(model)
    return built._replace(model=model)


def randomize(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)


def small(blocks: int = 1) -> Built:
    """A model that is quick to compile."""
    return adapted(decoder(blocks), ("q", "v"))


def instrumented(recipe: Any = INT8, built: Built | None = None, **options: Any) -> tuple[Built, ModelController]:
    built = built or small()
    gnmr_fx.instrument(built.model, recipe, **options)
    return built, gnmr_fx.controller(built.model)


def loss(built: Built) -> Tensor:
    return built.loss(built.model(*built.args, **built.kwargs))


def base(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if "lora_" not in name}


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def quantized(built: Built, controller: ModelController) -> Built:
    """A copy of the stock model whose frozen weights are what the low-cost path computes with."""
    twin = copy.deepcopy(built.model)
    gnmr_fx.uninstrument(twin)
    for unit in controller.units:
        weight: Any = unit.weight
        exact = twin.get_submodule(unit.spec.owner).get_parameter(unit.spec.parameter)
        exact.data = decode(weight.store.low, weight.store.spec, weight.shape, weight.dtype)
    return built._replace(model=twin)


# Numerics -------------------------------------------------------------------------------------------------------------

MODELS: dict[str, Callable[[], Built]] = {
    "decoder": lambda: small(),
    "llama": lambda: adapted(llama(1), "all-linear"),
    "gpt2": lambda: adapted(gpt2(), ("c_attn", "c_fc"), fan_in_fan_out=True),
    "encoder": lambda: frozen_encoder(),
}


def frozen_encoder() -> Built:
    """Intercepted projections, biases, and norms that train in place of adapters."""
    built = transformer_encoder(True)
    for name, parameter in built.model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return built


@pytest.mark.parametrize(
    ("kind", "recipe", "dtype"),
    [
        ("decoder", INT8, torch.float32),
        ("decoder", NF4, torch.float32),
        ("decoder", INT8, torch.float16),
        ("llama", INT8, torch.bfloat16),
        ("llama", NF4, torch.bfloat16),
        ("gpt2", INT8, torch.float32),
        ("encoder", INT8, torch.float32),
        ("encoder", NF4, torch.bfloat16),
    ],
)
def test_both_paths_compute_what_they_should(kind: str, recipe: str, dtype: torch.dtype) -> None:
    built = cast(MODELS[kind](), dtype)
    stock_loss, stock = loss(built).detach(), gradients(built)
    _, controller = instrumented(recipe, built)
    controller.force("high")  # bit for bit the un-instrumented model
    assert torch.equal(loss(built), stock_loss)
    assert equal(gradients(built), stock)
    controller.force("low")  # bit for bit the model with the quantized weights in place
    reference = quantized(built, controller)
    assert torch.equal(loss(built), loss(reference))
    low = gradients(built)
    assert equal(low, gradients(reference))
    assert not equal(low, stock)
    controller.force([controller.units[0].name])
    assert not equal(gradients(built), low)


@pytest.mark.parametrize("recipe", [INT8, NF4])
def test_autocast(recipe: str) -> None:
    built = small()
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(built)
        _, controller = instrumented(recipe, built)
        controller.force("high")
        assert equal(gradients(built), expected)
        controller.force("low")
        assert not equal(gradients(built), expected)


def test_the_backward_takes_the_path_of_its_forward() -> None:
    built, controller = instrumented()
    controller.force("low")
    expected = gradients(built)
    built.model.zero_grad()
    out = loss(built)
    controller.force("high")
    out.backward()
    assert equal({n: p.grad for n, p in built.model.named_parameters() if p.grad is not None}, expected)


@pytest.mark.parametrize("evaluate", ["high", "low"])
def test_eval_mode_takes_the_path_that_the_recipe_names(evaluate: Any) -> None:
    built = small()
    built.model.eval()
    exact = loss(built)
    recipe = gnmr_fx.Recipe.for_frozen(gnmr_fx.FrozenRecipe(evaluate=evaluate))
    _, controller = instrumented(recipe, built)
    for guards in ("low", "high"):
        controller.force(guards)
        assert torch.equal(loss(built), exact) == (evaluate == "high")
        with torch.no_grad():
            assert torch.equal(loss(built), exact) == (evaluate == "high")
    loss(built).backward()  # eval is not no_grad


@pytest.mark.parametrize("guards", ["low", "high"])
def test_no_grad_in_training_mode_computes_as_with_gradients(guards: Any) -> None:
    built, controller = instrumented()
    controller.force(guards)
    expected = loss(built)
    with torch.no_grad():
        assert torch.equal(loss(built), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(reentrant: bool) -> None:
    built, controller = instrumented(INT8, adapted(llama(1)))
    controller.force([unit.name for unit in controller.units[::2]])
    expected = gradients(built)
    built.model.enable_input_require_grads()
    built.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert equal(gradients(built), expected)


def test_empty_batches_and_batch_dimensions() -> None:
    torch.manual_seed(0)
    layer = WithAdapter(nn.Linear(32, 16))
    stock = copy.deepcopy(layer)
    gnmr_fx.instrument(layer, INT8)
    gnmr_fx.controller(layer).force("high")
    for shape in ((0, 32), (2, 0, 32), (32,), (5, 32), (2, 3, 4, 32)):
        x, y = (torch.ones(shape).requires_grad_() for _ in range(2))
        assert torch.equal(layer(x), stock(y))
        layer(x).sum().backward()
        stock(y).sum().backward()
        assert torch.equal(x.grad, y.grad)


# One graph ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [INT8, NF4])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph_for_100_steps_of_random_guards(backend: str, recipe: str) -> None:
    built, controller = instrumented(recipe, config=BLIND)
    optimizer = torch.optim.SGD((p for p in built.model.parameters() if p.requires_grad), lr=1e-3)
    step = torch.compile(built.model, backend=backend, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    chance, names = random.Random(0), [unit.name for unit in controller.units]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in range(100):
            controller.force([name for name in names if chance.random() < 0.3])
            if number % 20 == 0:  # eager and compiled do not see the same weights later on
                eager = gradients(built)
                compiled = gradients(built, step)
                for name, expected in eager.items():
                    assert (compiled[name] - expected).norm() <= 1e-5 * expected.norm(), name
            else:
                built.loss(step(*built.args)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert controller.step_count == 100
    assert all(unit.observation.seen for unit in controller.units)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_on_the_recovery_path_is_the_stock_model(backend: str) -> None:
    built = small()
    expected = gradients(built)
    _, controller = instrumented(INT8, built)
    controller.force("high")
    found = gradients(built, torch.compile(built.model, backend=backend, fullgraph=True))
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm()


def test_compiled_blocks_share_one_graph() -> None:
    built, controller = instrumented(INT8, small(3))
    for block in built.model.base_model.model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    gradients(built)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for guards in ("low", "high", [controller.units[3].name]):
            controller.force(guards)
            gradients(built)
    # The first block's input needs no gradient, which is another graph, with gnmr-fx or without.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_two_compiled_models_keep_to_their_own_weights() -> None:
    first, one = instrumented()
    second = first._replace(model=copy.deepcopy(first.model))
    other = gnmr_fx.controller(second.model)
    with torch.no_grad():
        for unit in other.units:
            unit.weight.mul_(0.5)
    one.force("high")
    other.force("high")
    expected = [gradients(built) for built in (first, second)]
    assert not equal(*expected)
    for built, gradient in zip((first, second), expected, strict=True):
        found = gradients(built, torch.compile(built.model, backend="aot_eager", fullgraph=True))
        assert all(torch.allclose(found[name], gradient[name], rtol=1e-5, atol=1e-7) for name in gradient)


# Memory ---------------------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Many equal frozen projections with adapters."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WithAdapter(nn.Linear(width, width, bias=False), 1) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def device_bytes(controller: ModelController) -> int:
    """Of the unique storages that units hold on the device: their low-cost formats, and what recovery brought there."""
    held = [unit.weight.store for unit in controller.units]
    tensors = [t for store in held for t in (*store.low, store.recovered) if t is not None]
    return sum(storages(tensors).values())


@pytest.mark.parametrize(("recipe", "most"), [(INT8, 0.52), (NF4, 0.28)])
def test_bytes_on_the_device(recipe: str, most: float) -> None:
    model = Deep(depth=128, width=256).bfloat16()
    stock = sum(storages(layer.inner.weight for layer in model.layers).values())
    gnmr_fx.instrument(model, recipe, max_active=1, config=gnmr_fx.GnmrConfig(alpha=1e-3, warmup_steps=0, lock_steps=1))
    controller = gnmr_fx.controller(model)
    low = device_bytes(controller)
    model(torch.randn(1, 256, dtype=torch.bfloat16)).sum().backward()
    controller.step()
    model(torch.randn(1, 256, dtype=torch.bfloat16)).sum().backward()
    controller.step()
    assert len(controller.active) == 1  # the budget is in use, and counted
    assert low < device_bytes(controller) <= most * stock
    totals = gnmr_fx.table(model).totals
    assert totals["bytes_full"] == stock == totals["bytes_host"]
    assert totals["bytes_low"] == low
    assert totals["bytes_low"] + totals["bytes_recovery_max"] == device_bytes(controller)
    controller.force("low")
    assert device_bytes(controller) == low


def test_a_residual_on_the_device_is_counted_there() -> None:
    built, _ = instrumented(gnmr_fx.RECIPES[INT8].with_residual("device"))
    totals = gnmr_fx.table(built.model).totals
    assert totals["bytes_host"] == totals["bytes_recovery_max"] == 0
    assert totals["bytes_low"] > totals["bytes_full"]


@pytest.mark.parametrize("guards", ["low", "high"])
@pytest.mark.parametrize("compiled", [False, True])
def test_no_copy_of_a_weight_is_kept_for_the_backward(guards: str, compiled: bool) -> None:
    built = cast(small(), torch.bfloat16)
    _, controller = instrumented(INT8, built)
    controller.force(guards)
    own = [t for unit in controller.units for t in (*unit.weight.store.low, unit.weight.residual)]
    weights = [unit.weight.residual for unit in controller.units] + [
        decode(unit.weight.store.low, unit.weight.store.spec, unit.weight.shape, torch.bfloat16)
        for unit in controller.units
    ]
    held: list[Tensor] = []
    if compiled:
        out = built.loss(torch.compile(built.model, backend="aot_eager", fullgraph=True)(*built.args))
        held = compiled_saved(out, own)
    else:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (held.append(t), t)[1], lambda t: t):
            out = loss(built)
        held = [t for t in held if t.untyped_storage().data_ptr() not in storages(own)]
    assert held
    assert out.requires_grad
    for saved in held:
        assert not any(saved.numel() == w.numel() and torch.equal(saved.reshape(w.shape), w) for w in weights)


# Signals --------------------------------------------------------------------------------------------------------------


def recorded(controller: ModelController, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The norms of each step."""
    from gnmr_fx import runtime

    seen: list[Tensor] = []
    update = runtime.update

    def recording(state: Any, norms: list[float], config: Any, **rest: Any) -> Any:
        seen.append(torch.tensor(norms, dtype=torch.float64))
        return update(state, norms, config, **rest)

    monkeypatch.setattr(runtime, "update", recording)
    return seen


@pytest.mark.parametrize("compiled", [False, True])
def test_a_unit_hears_its_adapters_or_its_output(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    built = small(2)
    _, controller = instrumented(INT8, built, config=BLIND)
    seen = recorded(controller, monkeypatch)
    outputs: dict[str, float] = {}
    if not compiled:
        for unit in controller.units:
            unit.module.register_full_backward_hook(
                lambda module, _, grads, name=unit.name: outputs.__setitem__(
                    name, outputs.get(name, 0.0) + float(grads[0].double().square().sum())
                )
            )
    call = torch.compile(built.model, backend="aot_eager") if compiled else built.model
    optimizer = torch.optim.SGD((p for p in built.model.parameters() if p.requires_grad), lr=0.0)
    for micro_batches in (1, 2):
        outputs.clear()
        for _ in range(micro_batches):
            built.loss(call(*built.args)).backward()
        adapters = {
            unit.name: sum(float(p.grad.double().square().sum()) for p in unit.heard()) ** 0.5
            for unit in controller.units
        }
        optimizer.step()
        optimizer.zero_grad()
        for unit, norm in zip(controller.units, seen[-1].tolist(), strict=True):
            if unit.spec.signal == "adapters":
                assert norm == pytest.approx(adapters[unit.name], rel=1e-5)
            elif norm == -1.0:
                assert unit.name.endswith("blocks.0.k")  # no gradient reaches it
            elif not compiled:
                assert norm == pytest.approx(outputs[unit.name] ** 0.5, rel=1e-5)
    assert len(seen) == controller.step_count == 2
    assert sorted({unit.spec.signal for unit in controller.units}) == ["adapters", "output"]


def test_the_signal_follows_the_adapter_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import LoraConfig

    built = small()
    _, controller = instrumented(INT8, built, config=BLIND)
    seen = recorded(controller, monkeypatch)
    built.model.add_adapter("other", LoraConfig(r=2, target_modules=["q"]))
    randomize(built.model)
    for name in ("default", "other", "default"):
        built.model.set_adapter(name)
        optimizer = torch.optim.SGD((p for p in built.model.parameters() if p.requires_grad), lr=0.0)
        loss(built).backward()
        expected = sum(
            float(p.grad.double().square().sum())
            for n, p in built.model.named_parameters()
            if p.grad is not None and ".q." in n
        )
        optimizer.step()
        optimizer.zero_grad()
        assert float(seen[-1][0]) == pytest.approx(expected**0.5, rel=1e-5)
    assert controller.step_count == 3


def test_a_step_inside_the_backward_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    built = small()
    expected = gradients(built)
    _, controller = instrumented(INT8, built, config=BLIND)
    controller.force("high")
    seen = recorded(controller, monkeypatch)
    for parameter in (p for p in built.model.parameters() if p.requires_grad):
        optimizer = torch.optim.SGD([parameter], lr=0.0)

        def step(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    built.model.zero_grad()
    loss(built).backward()
    assert controller.step_count == 1
    total = sum(float(g.double().square().sum()) for name, g in expected.items() if ".q." in name)
    assert float(seen[0][0]) == pytest.approx(total**0.5, rel=1e-5)


def test_a_model_without_adapters_of_its_own_is_heard_by_outputs() -> None:
    built = frozen_encoder()
    _, controller = instrumented(INT8, built, config=gnmr_fx.GnmrConfig(warmup_steps=0))
    optimizer = torch.optim.SGD((p for p in built.model.parameters() if p.requires_grad), lr=1e-3)
    for _ in range(3):
        loss(built).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert controller.step_count == 3
    assert {unit.spec.signal for unit in controller.units} == {"output"}
    assert not controller.decision.missing.all()


def test_a_gradient_that_is_not_finite_is_a_risk() -> None:
    built, controller = instrumented()
    loss(built).backward()
    q_proj = controller.units[0]
    q_proj.heard()[0].grad[0, 0] = float("nan")
    controller._backward_ended()
    controller.step()
    assert controller.decision.risky.tolist()[0]


def test_the_budget_is_kept_and_weights_come_and_go() -> None:
    config = gnmr_fx.GnmrConfig(alpha=1.01, beta=1.01, warmup_steps=1, window=2, lock_steps=2)
    built, controller = instrumented(INT8, small(2), max_active=2, config=config)
    optimizer = torch.optim.SGD((p for p in built.model.parameters() if p.requires_grad), lr=0.5)
    active = []
    for _ in range(12):
        loss(built).backward()
        optimizer.step()
        optimizer.zero_grad()
        active.append(tuple(controller.active))
        brought = [unit.name for unit in controller.units if unit.weight.store.recovered is not None]
        assert brought == controller.active
    assert max(map(len, active)) == 2
    assert len(set(active)) > 1


def steps_on_ranks(steps: int, kind: str) -> tuple[list[list[float]], list[list[str]], list[list[float]]]:
    """Norms and active units of each step, and the adapters in the end, on this rank."""
    from torch.distributed.fsdp import fully_shard

    from tests.ranks import recorded as on_rank

    with readable_kernels():
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(WithAdapter(nn.Linear(32, 32)) for _ in range(3)))
        config = gnmr_fx.GnmrConfig(alpha=1.01, beta=1.01, window=2, lock_steps=2, warmup_steps=1)
        gnmr_fx.instrument(model, INT8, max_active=1, config=config)
        controller, call = gnmr_fx.controller(model), model
        if kind == "ddp":
            call = nn.parallel.DistributedDataParallel(model)
        if kind == "fsdp":
            frozen = {p for p in model.parameters() if not p.requires_grad}
            for module in (*model, model):
                fully_shard(module, ignored_params=frozen)
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.01)
        active = []
        with on_rank() as norms:
            for step in range(steps):
                batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)) * (1 + 3 * (step % 3 == 2))
                call(own_part(batch)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                active.append(controller.active)
        assert all(isinstance(unit.weight, FrozenWeight) for unit in controller.units)
        adapters = [p.full_tensor() if kind == "fsdp" else p for p in model.parameters() if p.requires_grad]
        return norms, active, [p.flatten().tolist() for p in adapters]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_decide_as_one_process(kind: str) -> None:
    norms, active, adapters = steps_on_ranks(6, "alone")
    assert any(active)
    for rank_norms, rank_active, rank_adapters in on_ranks(2, steps_on_ranks, 6, kind):
        assert torch.allclose(torch.tensor(rank_norms), torch.tensor(norms), rtol=1e-5)
        assert rank_active == active
        for found, expected in zip(rank_adapters, adapters, strict=True):
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def shards(first: bool) -> str:
    """What is raised where FSDP2 shards the frozen weights as well, before ``instrument`` or after it."""
    from torch.distributed.fsdp import fully_shard

    model: Any = nn.Sequential(WithAdapter(nn.Linear(32, 32)))
    with pytest.raises(gnmr_fx.GnmrError) as caught:  # noqa: PT012
        if first:
            fully_shard(model)
        gnmr_fx.instrument(model, INT8)
        fully_shard(model)
        model(torch.ones(2, 32))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_sharded_base_weights_are_refused() -> None:
    for first, error in ((True, "QuantizedWeightError"), (False, "FrozenWeightError")):
        for message in on_ranks(1, shards, first):
            assert message.startswith(error)
            assert "ignored_params" in message


# PEFT -----------------------------------------------------------------------------------------------------------------


def test_merge_and_unmerge() -> None:
    built = cast(small(), torch.bfloat16)
    stock = built._replace(model=copy.deepcopy(built.model))
    before = base(built.model)
    _, controller = instrumented(INT8, built)
    for safe in (False, True):
        stock.model.merge_adapter(safe_merge=safe)
        built.model.merge_adapter(safe_merge=safe)
        assert equal(base(built.model), base(stock.model))
        for model in (stock.model, built.model):
            model.eval()
        assert torch.equal(loss(built), loss(stock))
        for model in (stock.model, built.model):
            model.train()
        stock.model.unmerge_adapter()
        built.model.unmerge_adapter()
        assert equal(base(built.model), base(stock.model))
    gnmr_fx.uninstrument(built.model)
    assert equal(base(built.model), base(stock.model))
    assert before.keys() == base(stock.model).keys()
    assert controller.units


def test_merge_and_unload() -> None:
    built = cast(small(), torch.bfloat16)
    stock = copy.deepcopy(built.model).merge_and_unload()
    _, controller = instrumented(INT8, built)
    controller.force("low")
    merged = built.model.merge_and_unload()
    assert equal(dict(merged.state_dict()), dict(stock.state_dict()))
    assert all(type(value) is Tensor for value in merged.state_dict().values())
    for model in (stock, merged):
        model.eval()
    assert torch.equal(merged(*built.args), stock(*built.args))


def test_disable_adapter() -> None:
    built = small()
    with built.model.disable_adapter():
        expected = loss(built)
    _, controller = instrumented(INT8, built)
    controller.force("high")
    with built.model.disable_adapter():
        assert torch.equal(loss(built), expected)
    assert not torch.equal(loss(built), expected)


def test_save_and_load(tmp_path: Any) -> None:
    from peft import PeftModel

    torch.manual_seed(1)
    built = adapted(llama(1))
    bare = llama(1).model
    bare.load_state_dict(copy.deepcopy(built.model).unload().state_dict())
    expected = built.model.state_dict()
    _, _ = instrumented(INT8, built)
    built.model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(bare, tmp_path / "adapter", is_trainable=True).train()
    assert equal(dict(loaded.state_dict()), dict(expected))
    gnmr_fx.instrument(loaded, INT8)
    assert torch.equal(loss(built), loss(built._replace(model=loaded)))
    built.model.load_adapter(tmp_path / "adapter", adapter_name="again")
    built.model.set_adapter("again")
    built.model.train()
    assert torch.equal(loss(built), loss(built._replace(model=loaded)))
    built.model.delete_adapter("default")
    assert torch.equal(loss(built), loss(built._replace(model=loaded)))
    built.model.get_base_model().save_pretrained(tmp_path / "whole")


def test_inactive_adapters_are_left_alone() -> None:
    from peft import LoraConfig

    built = small()
    built.model.add_adapter("other", LoraConfig(r=4, target_modules=["q"]))
    _, controller = instrumented(INT8, built)
    assert not any("lora_" in unit.name for unit in controller.units)
    assert {item.reason for item in controller.left_alone if "other" in item.name} == {"an adapter"}


# Copies, moves and traces ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [INT8, gnmr_fx.RECIPES[NF4].with_residual("device")])
def test_uninstrument_leaves_no_trace(recipe: Any) -> None:
    built = small()
    expected = gradients(built)
    built.model.zero_grad()
    before, hooks, weights = trace(built.model), optimizer_hooks(), base(built.model)
    memory = {name: p.data_ptr() for name, p in built.model.named_parameters()}
    instrumented(recipe, built)
    optimizer = torch.optim.SGD((p for p in built.model.parameters() if p.requires_grad), lr=0.0)
    for _ in range(2):
        loss(built).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert equal(base(built.model), weights)
    gnmr_fx.uninstrument(built.model)
    assert_same(trace(built.model), before)
    assert optimizer_hooks() <= hooks
    assert {name: p.data_ptr() for name, p in built.model.named_parameters()} == memory
    assert not any(module._state_dict_hooks for module in built.model.modules())
    assert equal(gradients(built), expected)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_stands_on_its_own(way: Any) -> None:
    built = small()
    stock = gradients(built)
    _, controller = instrumented(INT8, built)
    controller.force("low")
    low = gradients(built)
    twin = built._replace(model=way(built.model))
    other = gnmr_fx.controller(twin.model)
    other.force("high")
    assert equal(gradients(twin), stock)
    assert equal(gradients(built), low)
    with torch.no_grad():
        other.units[0].weight.zero_()
    assert equal(gradients(built), low)
    assert not equal(gradients(twin), stock)
    optimizer = torch.optim.SGD((p for p in twin.model.parameters() if p.requires_grad), lr=0.1)
    optimizer.step()
    assert (other.step_count, controller.step_count) == (1, 0)
    gnmr_fx.uninstrument(twin.model)
    assert not any(isinstance(p, FrozenWeight) for p in twin.model.parameters())
    assert not any("gnmr" in name for module in twin.model.modules() for name in module.__dict__)


def test_a_cast_after_instrument() -> None:
    built = small()
    stock = cast(built._replace(model=copy.deepcopy(built.model)), torch.bfloat16)
    _, controller = instrumented(INT8, built)
    built = cast(built, torch.bfloat16)
    controller.force("high")
    assert equal(gradients(built), gradients(stock))
    gnmr_fx.uninstrument(built.model)
    assert {p.dtype for p in built.model.parameters()} == {torch.bfloat16}
    assert equal(gradients(built), gradients(stock))


def test_state_dicts_load() -> None:
    built = small()
    state = copy.deepcopy(built.model.state_dict())
    other = copy.deepcopy(state)
    for value in other.values():
        value.mul_(0.5)
    _, controller = instrumented(INT8, built)
    built.model.load_state_dict(other)
    assert equal(dict(built.model.state_dict()), dict(other))
    weight: Any = controller.units[0].weight
    assert torch.equal(
        weight.store.low.payload, FrozenWeight.parameter(weight + 0, "int8/token/nearest", "host").payload
    )
    controller.load_state_dict(controller.state_dict())


def test_a_weight_that_two_modules_hold_is_stored_once() -> None:
    first, second = WithAdapter(nn.Linear(32, 32, bias=False)), WithAdapter(nn.Linear(32, 32, bias=False))
    second.inner.weight = first.inner.weight
    model = nn.Sequential(first, second)
    stock, x = copy.deepcopy(model), torch.randn(3, 32)
    gnmr_fx.instrument(model, INT8)
    controller = gnmr_fx.controller(model)
    assert len(controller.units) == 1
    assert first.inner.weight is second.inner.weight
    assert isinstance(first.inner.weight, FrozenWeight)
    controller.force("high")
    assert torch.equal(model(x), stock(x))
    gnmr_fx.uninstrument(model)
    assert first.inner.weight is second.inner.weight
    assert torch.equal(model(x), stock(x))


def test_a_module_that_holds_weight_and_adapters() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 32), requires_grad=False)
            self.lora_a = nn.Linear(32, 2, bias=False)
            self.lora_b = nn.Linear(2, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight) + self.lora_b(self.lora_a(x))

    model = nn.Sequential(Whole(), nn.Tanh())
    gnmr_fx.instrument(model, INT8)
    (unit,) = gnmr_fx.controller(model).units
    assert (unit.spec.signal, unit.spec.adapters, len(unit.heard())) == ("adapters", "0", 2)


# Errors ---------------------------------------------------------------------------------------------------------------


def test_models_without_adapters() -> None:
    frozen = nn.Sequential(nn.Linear(32, 32)).requires_grad_(False)
    refused(frozen, errors.AdapterError, "get_peft_model", "none of them trainable", recipe=INT8)
    refused(nn.Sequential(nn.Linear(32, 32)), errors.AdapterError, "1 trainable", "requires_grad_(False)", recipe=INT8)


def test_trainable_projections_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(32, 32).requires_grad_(False), nn.Linear(32, 32))
    gnmr_fx.instrument(model, INT8)
    (unit,) = gnmr_fx.controller(model).units
    assert (unit.name, unit.spec.signal) == ("0", "output")  # what trains elsewhere is not its adapter
    (left,) = gnmr_fx.table(model).left_alone
    assert left["name"] == "1"
    assert left["reason"].startswith("trainable")
    assert not isinstance(model[1].weight, FrozenWeight)


def test_weights_that_are_quantized_already() -> None:
    from torchao.quantization import to_nf4

    class Params4bit(nn.Parameter):
        """As bitsandbytes has it: packed bytes in a subclass of Parameter."""

    packed = WithAdapter(nn.Linear(64, 64, bias=False))
    packed.inner.weight = Params4bit(torch.zeros(2048, 1, dtype=torch.uint8), requires_grad=False)
    refused(packed, errors.QuantizedWeightError, "Params4bit", "inner.weight", "uint8", recipe=INT8)
    nf4 = WithAdapter(nn.Linear(64, 64, bias=False))
    nf4.inner.weight = nn.Parameter(to_nf4(torch.randn(64, 64), 64, 64), requires_grad=False)
    with pytest.raises(errors.QuantizedWeightError, match="NF4Tensor"):
        gnmr_fx.instrument(nf4, INT8)
    for dtype in (torch.int8, torch.complex64):
        other = WithAdapter(nn.Linear(64, 64, bias=False))
        other.inner.weight = nn.Parameter(torch.ones(64, 64).to(dtype), requires_grad=False)
        refused(other, errors.QuantizedWeightError, str(dtype), recipe=INT8)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float64])
def test_inputs_of_another_dtype(dtype: torch.dtype) -> None:
    model = gnmr_fx.instrument(nn.Sequential(WithAdapter(nn.Linear(32, 16))), INT8)
    with pytest.raises(errors.UnsupportedInputError, match=str(dtype)):
        model(torch.ones(2, 32).to(dtype))


def test_scope_all() -> None:
    refused(WithAdapter(nn.Linear(32, 16)), errors.RecipeError, "scope", recipe=INT8, scope="all")


@pytest.mark.parametrize("options", [{"signal": "error"}, {"signal": "gap"}, {"budget_unit": "flops"}])
def test_configurations_that_rest_on_saved_activations(options: dict[str, Any]) -> None:
    config = gnmr_fx.GnmrConfig(**options)
    refused(WithAdapter(nn.Linear(32, 16)), errors.RecipeError, "frozen", recipe=INT8, config=config)


def test_a_budget_in_bytes_counts_the_weights_on_the_device() -> None:
    config = gnmr_fx.GnmrConfig(alpha=1.01, beta=1.01, warmup_steps=1, window=2, lock_steps=2, budget_unit="bytes")
    built, controller = instrumented(INT8, small(2), max_active=40_000, config=config)
    optimizer = torch.optim.SGD((p for p in built.model.parameters() if p.requires_grad), lr=0.5)
    most = 0
    for _ in range(12):
        loss(built).backward()
        optimizer.step()
        optimizer.zero_grad()
        brought = [unit.weight.store.recovered for unit in controller.units]
        most = max(most, sum(weight.nbytes for weight in brought if weight is not None))
    assert 0 < most <= 40_000


def test_nf4_leaves_alone_what_it_cannot_store() -> None:
    model = nn.Sequential(WithAdapter(nn.Linear(64, 32)), WithAdapter(nn.Linear(32, 3)))
    gnmr_fx.instrument(model, NF4)
    assert [unit.name for unit in gnmr_fx.controller(model).units] == ["0.inner"]
    assert any("multiples of 64" in item["reason"] for item in gnmr_fx.table(model).left_alone)


def test_weights_that_are_unfrozen_or_replaced_afterwards() -> None:
    model = gnmr_fx.instrument(nn.Sequential(WithAdapter(nn.Linear(32, 16))), INT8)
    model[0].inner.weight.requires_grad_(True)
    with pytest.raises(errors.FrozenWeightError, match="needs a gradient"):
        model(torch.ones(2, 32))
    model[0].inner.weight = nn.Parameter(torch.zeros(16, 32), requires_grad=False)
    with pytest.raises(errors.FrozenWeightError, match="ignored_params"):
        model(torch.ones(2, 32))
    assert any("replaced" in note for row in gnmr_fx.table(model).units for note in row.notes)
    gnmr_fx.uninstrument(model)
    model(torch.ones(2, 32))


class ReadsSlices(nn.Module):
    """A stack of frozen matrices, read one by one."""

    def __init__(self, branch: bool) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(2, 32, 32), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(32))
        self.other = nn.Linear(32, 32).requires_grad_(False)
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.stack if self.branch else (self.stack[0], self.stack[1]):
            x = F.linear(x, matrix)
        return self.other(x) * self.scale


@pytest.mark.parametrize("given", [False, True])
def test_a_weight_that_is_read_in_parts_is_left_alone(given: bool) -> None:
    model, x = ReadsSlices(branch=False), torch.randn(2, 32)
    expected = model(x)
    gnmr_fx.instrument(model, INT8, example_inputs=x if given else None)
    controller = gnmr_fx.controller(model)
    assert [unit.name for unit in controller.units] == ["other"]
    assert any("slice" in item.reason for item in controller.left_alone)
    controller.force("high")
    assert torch.equal(model(x), expected)


def test_errors_of_the_backward_and_of_transforms() -> None:
    model = gnmr_fx.instrument(nn.Sequential(WithAdapter(nn.Linear(32, 16))), INT8)
    x = torch.ones(2, 32, requires_grad=True)
    with pytest.raises(errors.DoubleBackwardError, match="create_graph"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(errors.UnsupportedTransformError, match=r"torch\.func"):
        torch.func.vmap(model)(torch.ones(3, 2, 32))


def test_checkpoint_of_a_part() -> None:
    model = nn.Sequential(WithAdapter(nn.Linear(32, 32)), WithAdapter(nn.Linear(32, 32)))
    built = Built(model, (torch.randn(3, 32),), {}, lambda out: out.square().sum())
    gnmr_fx.instrument(model, INT8)
    expected = gradients(built)
    found = gradients(built, lambda x: checkpoint(model, x, use_reentrant=False))
    assert equal(found, expected)
