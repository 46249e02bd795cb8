"""Training loops of every shape: the norms are those of the whole, unscaled, unclipped gradient, once per step.

Every loop is compared with an oracle: a stock copy with the same weights, and the whole batch in one backward. Norms
that were clipped, scaled, of one micro-batch, or left over from another step would be far off.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gnmr_fx
from gnmr_fx import runtime
from gnmr_fx.controller import MISSING
from tests.loops import readable_kernels
from tests.models import llama
from tests.ranks import CONFIG, EXACT, WIDTH, chain, inputs, recorded

STEPS = 4
PIECES = 4
UNITS = 3


def loss_of(call: Callable[..., Tensor], x: Tensor) -> Tensor:
    return call(x).square().mean()


class Oracle:
    """What the norms have to be: call it with the batch of each step, before that step."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.stock, self.norms = model, chain(), []

    def __call__(self, x: Tensor) -> Tensor:
        self.stock.load_state_dict(self.model.state_dict())
        self.stock.zero_grad()
        loss_of(self.stock, x).backward()
        self.norms.append([float(block[0].weight.grad.norm()) for block in self.stock])
        return x


Loop = Callable[[nn.Module, Callable[[Tensor], Tensor]], None]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def accumulated(model: nn.Module, oracle: Callable[[Tensor], Tensor]) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        for piece in oracle(inputs(step)).chunk(PIECES):
            (loss_of(model, piece) / PIECES).backward()
        optimizer.step()
        optimizer.zero_grad()


def clipped_by_norm(model: nn.Module, oracle: Callable[[Tensor], Tensor]) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        loss_of(model, oracle(inputs(step))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()


def clipped_by_value(model: nn.Module, oracle: Callable[[Tensor], Tensor]) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        loss_of(model, oracle(inputs(step))).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def scaled(model: nn.Module, oracle: Callable[[Tensor], Tensor], **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
    for step in range(STEPS):
        for piece in oracle(inputs(step)).chunk(PIECES):
            scaler.scale(loss_of(model, piece) / PIECES).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def scaled_fused(model: nn.Module, oracle: Callable[[Tensor], Tensor]) -> None:
    scaled(model, oracle, fused=True)  # unscales inside of its kernel


def checkpointed(model: nn.Module, oracle: Callable[[Tensor], Tensor], reentrant: bool = False) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        x = oracle(inputs(step)).clone().requires_grad_()
        for block in model:  # type: ignore[attr-defined]
            x = checkpoint(block, x, use_reentrant=reentrant)
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def checkpointed_reentrant(model: nn.Module, oracle: Callable[[Tensor], Tensor]) -> None:
    checkpointed(model, oracle, reentrant=True)


def step_in_backward(model: nn.Module, forward: Callable[..., Tensor] | None = None) -> None:
    """An optimizer for each parameter, which steps and clears the gradient inside the backward."""
    optimizers = {p: torch.optim.SGD([p], 0.01) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def in_backward(model: nn.Module, oracle: Callable[[Tensor], Tensor]) -> None:
    step_in_backward(model)
    for step in range(STEPS):
        loss_of(model, oracle(inputs(step))).backward()


def in_backward_compiled(model: nn.Module, oracle: Callable[[Tensor], Tensor]) -> None:
    step_in_backward(model)
    call = torch.compile(model, backend="aot_eager")
    for step in range(STEPS):
        loss_of(call, oracle(inputs(step))).backward()


def several_optimizers(model: nn.Module, oracle: Callable[[Tensor], Tensor]) -> None:
    """A unit set split over two: one tick for both."""
    optimizers = [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.Adam(model[1:].parameters(), 1e-3)]
    for step in range(STEPS):
        loss_of(model, oracle(inputs(step))).backward()
        for optimizer in optimizers if step % 2 else optimizers[::-1]:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def wrapped_optimizer(model: nn.Module, oracle: Callable[[Tensor], Tensor]) -> None:
    """An optimizer that calls another one: two steps of the optimizer, one of the controller."""

    class Outer(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> None:
            self.inner.step(closure)

    optimizer = Outer(sgd(model))
    for step in range(STEPS):
        loss_of(model, oracle(inputs(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def closures(model: nn.Module, oracle: Callable[[Tensor], Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, oracle(inputs(step)))
            loss.backward()
            return loss

        optimizer.step(closure)


def evaluated_in_between(model: nn.Module, oracle: Callable[[Tensor], Tensor]) -> None:
    """Evaluation, inference and a forward that nothing comes of, between forward, backward and step."""
    optimizer = sgd(model)

    def look() -> None:
        model.eval()
        with torch.no_grad():
            model(inputs(100))
        model.train()
        with torch.inference_mode():
            model(inputs(101))

    for step in range(STEPS):
        look()
        loss = loss_of(model, oracle(inputs(step)))
        look()
        loss_of(model, inputs(102))  # no backward follows
        loss.backward()
        look()
        optimizer.step()
        optimizer.zero_grad()


def two_forwards_one_backward(model: nn.Module, oracle: Callable[[Tensor], Tensor]) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        first, second = oracle(inputs(step)).chunk(2)
        one, two = loss_of(model, first), loss_of(model, second)
        ((one + two) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def two_backwards_of_two_forwards(model: nn.Module, oracle: Callable[[Tensor], Tensor]) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        first, second = oracle(inputs(step)).chunk(2)
        one, two = loss_of(model, first) / 2, loss_of(model, second) / 2
        two.backward()
        one.backward()
        optimizer.step()
        optimizer.zero_grad()


def a_backward_that_fails(model: nn.Module, oracle: Callable[[Tensor], Tensor]) -> None:
    """Gradients of the last layer arrive, then the backward breaks off; the loop drops the batch and goes on."""
    optimizer = sgd(model)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            raise ZeroDivisionError

    for step in range(STEPS):
        if step == 2:
            with pytest.raises(ZeroDivisionError):
                loss_of(model[1:], Fails.apply(model[0](inputs(step)))).backward()
            optimizer.zero_grad()
        loss_of(model, oracle(inputs(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def compiled_optimizer(model: nn.Module, oracle: Callable[[Tensor], Tensor]) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, foreach=True)
    step_once = torch.compile(optimizer.step, backend="aot_eager")
    for step in range(STEPS):
        loss_of(model, oracle(inputs(step))).backward()
        step_once()
        optimizer.zero_grad()


LOOPS: list[Loop] = [
    accumulated, clipped_by_norm, clipped_by_value, scaled, scaled_fused, checkpointed, checkpointed_reentrant,
    in_backward, in_backward_compiled, several_optimizers, wrapped_optimizer, closures, evaluated_in_between,
    two_forwards_one_backward, two_backwards_of_two_forwards, a_backward_that_fails, compiled_optimizer,
]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_norms_are_those_of_the_whole_gradient(loop):
    model = gnmr_fx.instrument(chain(), EXACT, max_active=1, config=CONFIG)
    oracle = Oracle(model)
    with recorded() as norms:
        loop(model, oracle)
    assert len(norms) == len(oracle.norms) == STEPS
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(oracle.norms), rtol=1e-5, atol=0)


@pytest.mark.parametrize("pieces", [2, 8])
def test_accumulating_gives_the_decisions_of_one_batch(pieces):
    logs = []
    for count in (1, pieces):
        model = gnmr_fx.instrument(chain(), EXACT, max_active=1, config=CONFIG)
        optimizer, controller, active = sgd(model), gnmr_fx.controller(model), []
        for step in range(40):
            for piece in inputs(step).chunk(count):
                (loss_of(model, piece) / count).backward()
            optimizer.step()
            optimizer.zero_grad()
            active.append(controller.active)
        logs.append(active)
    assert logs[0] == logs[1]
    assert len({tuple(names) for names in logs[0]}) > 2


# Optimizers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_implementations_of_an_optimizer(name, implementation):
    options = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}[implementation]
    model = gnmr_fx.instrument(chain(), EXACT)
    oracle = Oracle(model)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, **options)
    with recorded() as norms:
        for step in range(STEPS):
            loss_of(model, oracle(inputs(step))).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(oracle.norms), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["AdamW8bit", "Adam4bit", "AdamWFp8"])
def test_low_bit_optimizers_of_torchao(name):
    import torchao.optim

    model = gnmr_fx.instrument(chain(), EXACT)
    oracle = Oracle(model)
    with torch.compiler.set_stance("force_eager"):  # they compile their own step: seconds for each shape
        optimizer = getattr(torchao.optim, name)(model.parameters(), lr=1e-2)
        with recorded() as norms:
            for step in range(STEPS):
                loss_of(model, oracle(inputs(step))).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                optimizer.step()
                optimizer.zero_grad()
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(oracle.norms), rtol=1e-5, atol=0)


def test_lbfgs_counts_its_last_evaluation():
    model = gnmr_fx.instrument(chain(), EXACT)
    oracle = Oracle(model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
    controller, at_step = gnmr_fx.controller(model), []
    with recorded() as norms:
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, oracle(inputs(step)))
                loss.backward()
                assert controller.step_count == step  # guards stay as they are from one evaluation to the next
                return loss

            optimizer.step(closure)
            at_step.append(oracle.norms[-1])
    assert len(oracle.norms) == 15
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(at_step), rtol=1e-5, atol=0)


def test_optimizers_that_take_turns_each_make_a_step():
    """As in adversarial training: a backward and a step for one, then for the other."""
    model = gnmr_fx.instrument(chain(), EXACT)
    optimizers = [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.SGD(model[1:].parameters(), 0.1)]
    oracle = Oracle(model)
    with recorded() as norms:
        for step in range(STEPS):
            loss_of(model, oracle(inputs(step))).backward()
            optimizers[step % 2].step()
            model.zero_grad()
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(oracle.norms), rtol=1e-5, atol=0)


def test_a_scaler_that_skips_one_of_two_optimizers():
    model = gnmr_fx.instrument(chain(), EXACT, max_active=UNITS)
    optimizers = [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.SGD(model[1:].parameters(), 0.1)]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x = inputs(0).requires_grad_()
    hidden = model[0](x)
    hidden.register_hook(lambda g: g * float("inf"))  # the first layer alone overflows
    with recorded() as norms:
        scaler.scale(loss_of(model[1:], hidden)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert len(norms) == 1
    assert [norm == float("inf") for norm in norms[0]] == [True, False, False]
    assert gnmr_fx.controller(model).active == ["0.0"]


@pytest.mark.parametrize("order", ["optimizer first", "gnmr first"])
def test_the_step_in_the_backward_is_heard_in_either_order_of_hooks(order):
    model = chain()
    if order == "optimizer first":
        step_in_backward(model)
    gnmr_fx.instrument(model, EXACT, config=gnmr_fx.GnmrConfig(alpha=1e-6, warmup_steps=0))
    if order == "gnmr first":
        step_in_backward(model)
    controller, oracle = gnmr_fx.controller(model), Oracle(model)
    with recorded() as norms:
        for step in range(STEPS):
            assert controller.step_count == step
            loss_of(model, oracle(inputs(step))).backward()
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(oracle.norms), rtol=1e-5, atol=0)
    assert controller.flags.all()


@pytest.mark.parametrize("whole", [True, False])
def test_guards_hold_through_a_backward_in_which_optimizers_step(whole):
    """Reentrant checkpointing ends a backward for every block, inside the whole one: no guard may change there."""
    model = gnmr_fx.instrument(chain(), EXACT, config=gnmr_fx.GnmrConfig(alpha=1e-6, warmup_steps=0))
    step_in_backward(model)
    controller, seen = gnmr_fx.controller(model), []
    for step in range(3):
        x = inputs(step).requires_grad_()
        x.register_hook(lambda _: seen.append(controller.step_count))  # the last thing in the backward
        for block in model if whole else model[:-1]:
            x = checkpoint(block, x, use_reentrant=True)
        if not whole:
            x = model[-1](x)
            assert controller.step_count == step  # not later than the forward after it
        x.square().mean().backward()
    assert seen == [0, 1, 2]


# Parameters that come, go, freeze and melt ----------------------------------------------------------------------------


def test_frozen_and_unfrozen_in_the_middle():
    model = gnmr_fx.instrument(chain(), EXACT)
    optimizer, oracle = sgd(model), Oracle(model)
    with recorded() as norms:
        for step, frozen in enumerate((False, True, False)):
            model[1].requires_grad_(not frozen)
            loss_of(model, oracle(inputs(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = torch.tensor(oracle.norms)
    expected[1, 1] = MISSING
    torch.testing.assert_close(torch.tensor(norms), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("compiled", [False, True])
def test_unfrozen_weights_are_heard_from_their_first_step(compiled):
    if compiled and torch.__version__ < "2.12":
        pytest.skip("a compiled model of torch 2.11 does not notice that its weights were unfrozen")
    model = gnmr_fx.instrument(chain().requires_grad_(False), EXACT)
    call = torch.compile(model, backend="aot_eager") if compiled else model
    call(inputs(0))
    model.requires_grad_(True)
    optimizer, oracle = sgd(model), Oracle(model)
    with recorded() as norms:
        for step in range(3):
            loss_of(call, oracle(inputs(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(oracle.norms), rtol=1e-5, atol=0)


def test_parametrized_weights_are_not_computed_by_the_controller():
    """Spectral norm iterates whenever its weight is read in training mode: reading it would change the run."""
    from torch.nn.utils.parametrizations import spectral_norm

    torch.manual_seed(0)
    stock = spectral_norm(nn.Linear(WIDTH, WIDTH)).train()
    model = nn.Sequential(copy.deepcopy(stock), nn.Linear(WIDTH, WIDTH)).train()
    plain = copy.deepcopy(model)
    gnmr_fx.instrument(model, EXACT)
    for m in (plain, model):
        optimizer = sgd(m)
        for step in range(3):
            loss_of(m, inputs(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def language_steps(model: nn.Module, kwargs: dict[str, Any], steps: int = 2) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for _ in range(steps):
        model(**kwargs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_resized_token_embeddings():
    built = llama(1)
    model = gnmr_fx.instrument(built.model, EXACT, include=["*"])
    controller = gnmr_fx.controller(model)
    language_steps(model, built.kwargs)
    assert not controller.decision.missing.any()
    model.resize_token_embeddings(model.config.vocab_size + 8)
    language_steps(model, built.kwargs)
    assert controller.step_count == 4
    missing = [u.name for u, m in zip(controller.units, controller.decision.missing.tolist(), strict=True) if m]
    assert missing in ([], ["lm_head"])  # the new head is another module, and no unit
    gnmr_fx.uninstrument(model)
    language_steps(model, built.kwargs)


def test_adapters_added_and_merged_after_instrument():
    peft = pytest.importorskip("peft")
    built = llama(1)
    model = gnmr_fx.instrument(built.model, EXACT)
    controller = gnmr_fx.controller(model)
    with recorded() as norms:
        language_steps(model, built.kwargs)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
        language_steps(wrapped, built.kwargs)  # all units are frozen: nothing of theirs is stored, nothing to decide
        assert len(norms) == 2
        merged = wrapped.merge_and_unload()
        assert merged is model
        merged.requires_grad_(True)
        language_steps(merged, built.kwargs)
    assert len(norms) == 4
    assert all(norm > 0 for norm in norms[-1])
    assert gnmr_fx.controller(merged) is controller
    gnmr_fx.uninstrument(merged)


def test_adapters_are_units_where_they_are_there_first():
    peft = pytest.importorskip("peft")
    built = llama(1)
    wrapped = peft.get_peft_model(built.model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    gnmr_fx.instrument(wrapped, EXACT)
    with recorded() as norms:
        language_steps(wrapped, built.kwargs)
    names = [unit.name for unit in gnmr_fx.controller(wrapped).units]
    heard = {name for name, norm in zip(names, norms[-1], strict=True) if norm != MISSING}
    assert heard == {name for name in names if "lora_" in name}
    assert len(heard) == 2


# Copies ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["deepcopy", "averaged"])
def test_averages_of_the_weights_do_not_disturb_the_run(way):
    model = gnmr_fx.instrument(chain(), EXACT, max_active=1, config=CONFIG)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    ema = copy.deepcopy(model)
    optimizer, oracle = sgd(model), Oracle(model)
    with recorded() as norms, warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(STEPS):
            loss_of(model, oracle(inputs(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
            if way == "averaged":
                averaged.update_parameters(model)
                averaged.eval()(inputs(step))
            else:
                with torch.no_grad():
                    for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
                        mine.lerp_(theirs, 0.5)
                    ema(inputs(step))
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(oracle.norms), rtol=1e-5, atol=0)
    assert gnmr_fx.controller(ema).step_count == gnmr_fx.controller(averaged.module).step_count == 0


def test_generation_in_the_middle_of_training():
    built = llama(1)
    model = gnmr_fx.instrument(built.model, "saved-int4-int8")
    controller = gnmr_fx.controller(model)
    optimizer = sgd(model)
    with recorded() as norms, readable_kernels():
        for _ in range(3):
            loss = model(**built.kwargs).loss
            for mode in (False, True):
                model.train(mode)
                model.generate(built.kwargs["input_ids"][:1, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
            model.train()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert controller.step_count == len(norms) == 3
    assert all(norm > 0 for row in norms for norm in row)


# What goes wrong ------------------------------------------------------------------------------------------------------


def gnmr_warnings(loop: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop()
    return [str(w.message) for w in caught if issubclass(w.category, gnmr_fx.GnmrWarning)]


def own_update(model: nn.Module, call: Callable[..., Tensor]) -> Iterator[None]:
    for step in range(30):
        loss_of(call, inputs(step)).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
        model.zero_grad()
        yield


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loop_without_an_optimizer_is_told_once(monkeypatch, compiled):
    monkeypatch.setattr(runtime, "FORWARDS_BEFORE_WARNING", 10)
    model = gnmr_fx.instrument(chain(), EXACT)
    call = torch.compile(model, backend="aot_eager") if compiled else model
    (message,) = gnmr_warnings(lambda: list(own_update(model, call)))
    assert "found none in the last 10" in message
    assert "gnmr_fx.controller(model).step() after each update" in message

    def by_hand() -> None:
        for _ in own_update(model, call):
            gnmr_fx.controller(model).step()

    gnmr_fx.uninstrument(model)
    gnmr_fx.instrument(model, EXACT)
    assert gnmr_warnings(by_hand) == []


def test_a_loop_without_a_backward_is_told_once(monkeypatch):
    monkeypatch.setattr(runtime, "FORWARDS_BEFORE_WARNING", 10)
    model = gnmr_fx.instrument(chain(), EXACT)
    optimizer = sgd(model)

    def loop() -> None:
        for step in range(30):
            found = torch.autograd.grad(loss_of(model, inputs(step)), list(model.parameters()))
            for p, g in zip(model.parameters(), found, strict=True):
                p.grad = g
            optimizer.step()

    (message,) = gnmr_warnings(loop)
    assert "torch.autograd.grad" in message


def test_no_warning_where_the_controller_ticks_or_nothing_trains(monkeypatch):
    monkeypatch.setattr(runtime, "FORWARDS_BEFORE_WARNING", 10)
    model = gnmr_fx.instrument(chain(), EXACT)
    optimizer = sgd(model)

    def loop() -> None:
        for step in range(30):
            for _ in range(3):
                loss_of(model, inputs(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        for step in range(30):
            model(inputs(step))
        model.train()
        with torch.no_grad():
            for step in range(30):
                model(inputs(step))

    assert gnmr_warnings(loop) == []


def test_units_that_run_several_times_in_a_forward_count_it_once(monkeypatch):
    monkeypatch.setattr(runtime, "FORWARDS_BEFORE_WARNING", 10)
    model = gnmr_fx.instrument(chain(), EXACT)

    def loop() -> None:
        for step in range(9):
            loss_of(lambda x: model(model[0](model[0](x))), inputs(step)).backward()

    assert gnmr_warnings(loop) == []


def broken_events(model: nn.Module) -> list[tuple[int, str, bool]]:
    events = gnmr_fx.controller(model).events
    return [(e.step, e.unit, e.first_non_finite) for e in events if e.norm == float("inf")]


class Explodes(torch.autograd.Function):
    """The identity, with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * float("inf")


@pytest.mark.parametrize("compiled", [False, True])
def test_the_unit_that_went_non_finite_first_is_recorded(compiled):
    """In the backward the gradient passes 2, then 1, explodes, and passes 0."""

    class Model(nn.Sequential):
        explode = False

        def forward(self, x: Tensor) -> Tensor:
            x = self[0](x)
            return self[2](self[1](Explodes.apply(x) if self.explode else x))

    model = Model(*chain()).train()
    gnmr_fx.instrument(model, EXACT, config=CONFIG)
    call = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for step, (explode, factor) in enumerate(((False, 1.0), (True, 1.0), (False, float("nan")), (False, 1.0))):
        model.explode = explode
        (loss_of(call, inputs(step)) * factor).backward()
        for p in model.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)  # or the weights would be broken from then on
        optimizer.step()
        optimizer.zero_grad()
    assert broken_events(model) == [
        (2, "0.0", True),
        (3, "0.0", False),
        (3, "1.0", False),
        (3, "2.0", True),  # a loss that is not finite: the first of the backward
    ]
    text = str(gnmr_fx.report(model))
    assert "first to go not finite" in text
    assert "norm not finite, the first to go so" in text


def test_the_first_micro_batch_that_broke_tells_the_first_unit():
    model = gnmr_fx.instrument(chain(), EXACT, config=CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    hidden = Explodes.apply(model[0](inputs(0)))
    loss_of(model[1:], hidden).backward()  # only unit 0
    (loss_of(model, inputs(1)) * float("nan")).backward()  # all of them
    optimizer.step()
    assert [(unit, first) for _, unit, first in broken_events(model)] == [("0.0", True), ("1.0", False), ("2.0", False)]


def test_a_skipped_step_tells_the_first_unit_with_the_next():
    model = gnmr_fx.instrument(chain(), EXACT, config=CONFIG)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for explode in (True, False):
        hidden = model[1](model[0](inputs(0)))
        scaler.scale(loss_of(model[2], Explodes.apply(hidden) if explode else hidden)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert broken_events(model) == [(1, "0.0", False), (1, "1.0", True)]
    assert [past.steps for past in gnmr_fx.controller(model)._state.pasts] == [0, 0, 1]
