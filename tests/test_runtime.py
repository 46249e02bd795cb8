"""The controller's glue: which norms it sees, when a step ends, and what it leaves behind.

Every norm test would fail if the norm were taken clipped, scaled, per micro-batch or from a stale gradient.
"""

from __future__ import annotations

import copy
import gc
import math
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizer_module

import gnmr_fx
from gnmr_fx import runtime
from gnmr_fx.controller import MISSING
from gnmr_fx.gradients import gradient_norms


def model(width: int = 8, layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).train()


def spy(m: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The norms handed to the decision rules, step by step."""
    seen: list[Tensor] = []
    original = runtime.update

    def update(state, norms, config, **others):  # type: ignore[no-untyped-def]
        seen.append(torch.tensor(norms, dtype=torch.float64))
        return original(state, norms, config, **others)

    monkeypatch.setattr(runtime, "update", update)
    return seen


def stock_norms(m: nn.Module, batches: list[Tensor]) -> Tensor:
    """Norms of the weights' gradients, summed over ``batches``, as an un-instrumented copy has them."""
    twin = copy.deepcopy(m)
    for x in batches:
        twin(x).square().mean().backward()
    return torch.tensor([layer.weight.grad.double().norm() for layer in twin])  # type: ignore[union-attr]


RECIPE = gnmr_fx.Recipe(gnmr_fx.Format("none"), gnmr_fx.Format("none"))  # exact gradients: only the glue is tested


def instrumented(m: nn.Module, **kwargs):  # type: ignore[no-untyped-def]
    gnmr_fx.instrument(m, RECIPE, **kwargs)
    return gnmr_fx.controller(m)


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-6, atol=0)


def test_norms_are_those_before_clipping(monkeypatch):
    m, x = model(), torch.randn(4, 8)
    expected = stock_norms(m, [x])
    instrumented(m)
    seen = spy(m, monkeypatch)
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    m(x).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-3)
    optimizer.step()
    assert len(seen) == 1
    assert close(seen[0], expected)
    clipped = torch.tensor([layer.weight.grad.double().norm() for layer in m])
    assert not close(seen[0], clipped)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulated_micro_batches_count_as_one_gradient(monkeypatch, set_to_none):
    m = model()
    batches = [torch.randn(4, 8) for _ in range(4)]
    expected = stock_norms(m, batches)
    c = instrumented(m)
    seen = spy(m, monkeypatch)
    optimizer = torch.optim.SGD(m.parameters(), 0.0)
    for _ in range(2):
        for x in batches:
            m(x).square().mean().backward()
        assert c.step_count == len(seen)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    assert len(seen) == 2
    assert all(close(norms, expected) for norms in seen)


def test_guards_change_only_after_the_optimizer_step():
    m, x = model(), torch.randn(4, 8)
    c = instrumented(m, config=gnmr_fx.GnmrConfig(alpha=1e-6, warmup_steps=0))
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    for step in range(4):
        before = c.flags.clone()
        for _ in range(3):
            m(x).square().mean().backward()
            assert torch.equal(c.flags, before)
        optimizer.step()
        optimizer.zero_grad()
        assert c.flags.all()
        assert c.step_count == step + 1


def test_loss_scale_is_divided_out(monkeypatch):
    m, x = model(), torch.randn(4, 8)
    expected = stock_norms(m, [x])
    instrumented(m)
    seen = spy(m, monkeypatch)
    optimizer = torch.optim.SGD(m.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    for unscale in (False, True):  # the second scale is twice the first
        scaler.scale(m(x).square().mean()).backward()
        if unscale:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert len(seen) == 2
    assert all(close(norms, expected) for norms in seen)


def test_nothing_is_known_of_what_a_scale_of_zero_has_scaled():
    m, x = model(), torch.randn(4, 8)
    c = instrumented(m)
    m[:2](x).square().mean().backward()  # the last unit has no gradient
    decision = c.step(grad_scale=0.0)
    assert decision.risk.tolist() == [math.inf, math.inf, 0.0]
    assert decision.missing.tolist() == [False, False, True]


def test_skipped_step_is_a_risk_and_no_history_entry(monkeypatch):
    m, x = model(), torch.randn(4, 8)
    expected = stock_norms(m, [x])
    c = instrumented(m)
    seen = spy(m, monkeypatch)
    optimizer = torch.optim.SGD(m.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def train(factor: float) -> None:
        scaler.scale(m(x).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    train(1.0)
    train(float("inf"))  # skipped: no optimizer step, no tick
    assert c.step_count == 1
    train(1.0)
    assert c.step_count == 2
    assert close(seen[0], expected)
    assert not seen[1].isfinite().any()
    assert c.flags.all()  # max_active=5 >= 3 units, all at infinite risk
    train(1.0)
    assert close(seen[2], expected)
    assert close(torch.tensor([past.mean for past in c._state.pasts], dtype=expected.dtype), expected)
    assert c.stats["non_finite"] == 3


def test_units_without_a_gradient_are_missing(monkeypatch):
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, which: str) -> Tensor:
            return self.a(x) if which == "a" else self.b(x)

    m, x = Branches().train(), torch.randn(2, 4)
    instrumented(m)
    seen = spy(m, monkeypatch)
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    for which in "ab":
        m(x, which).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (seen[0] == MISSING).tolist() == [False, True]
    assert (seen[1] == MISSING).tolist() == [True, False]


def test_a_stale_gradient_is_no_gradient(monkeypatch):
    m, x = model(layers=2), torch.randn(4, 8)
    instrumented(m)
    seen = spy(m, monkeypatch)
    optimizer = torch.optim.SGD(m.parameters(), 0.0)
    m(x).square().mean().backward()
    optimizer.step()  # and no zero_grad: both gradients stay
    m[1](x).square().mean().backward()
    optimizer.step()
    assert seen[1][0] == MISSING
    assert seen[1][1] > 0


def test_several_optimizers_make_one_step(monkeypatch):
    m, x = model(), torch.randn(4, 8)
    c = instrumented(m)
    seen = spy(m, monkeypatch)
    optimizers = [torch.optim.SGD(m[0].parameters(), 0.1), torch.optim.AdamW(m[1:].parameters(), 1e-3)]
    for _ in range(3):
        m(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert c.step_count == len(seen) == 3
    assert all((norms > 0).all() for norms in seen)


OPTIMIZERS = [
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "RMSprop",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adadelta",
    "ASGD",
    "Rprop",
    "LBFGS",
]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_torch_optimizer_ticks_once_a_step(name):
    m, x = model(), torch.randn(4, 8)
    c = instrumented(m)
    optimizer = getattr(torch.optim, name)(m.parameters(), lr=1e-3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = m(x).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert c.step_count == 2


def test_steps_by_hand(monkeypatch):
    m, x = model(), torch.randn(4, 8)
    expected = stock_norms(m, [x])
    c = instrumented(m)
    seen = spy(m, monkeypatch)
    (m(x).square().mean() * 8).backward()
    decision = c.step(grad_scale=8.0)
    assert decision.step == c.step_count == 1
    assert close(seen[0], expected)
    c.step()
    assert (seen[1] == MISSING).all()


def test_optimizer_without_the_units_warns_once():
    m, x = model(), torch.randn(4, 8)
    c = instrumented(m)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            m(x).square().mean().backward()
            optimizer.step()
    found = [w for w in caught if issubclass(w.category, gnmr_fx.GnmrWarning)]
    assert len(found) == 1
    assert "does not tick" in str(found[0].message)
    assert c.step_count == 0


def test_an_optimizer_of_another_model_does_not_tick_or_warn():
    m, other, x = model(), model(), torch.randn(4, 8)
    c = instrumented(m)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            other(x).square().mean().backward()
            optimizer.step()
    assert c.step_count == 0


def test_a_waiting_gradient_does_not_make_other_optimizers_foreign():
    m, other, x = model(), model(), torch.randn(4, 8)
    instrumented(m)
    m(x).square().mean().backward()  # and never a step
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            other(x).square().mean().backward()
            optimizer.step()


def test_a_weight_pruned_after_instrument_is_heard_through_its_original(monkeypatch):
    from torch.nn.utils import prune

    m, x = model(), torch.randn(4, 8)
    instrumented(m)
    seen = spy(m, monkeypatch)
    prune.l1_unstructured(m[0], "weight", 0.5)
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    for _ in range(2):
        m(x).square().mean().backward()
        expected = m[0].weight_orig.grad.double().norm()
        optimizer.step()
        optimizer.zero_grad()
        assert close(seen[-1][0], expected)


def test_weights_unfrozen_after_instrument_are_heard(monkeypatch):
    m, x = model(), torch.randn(4, 8)
    m.requires_grad_(False)
    c = instrumented(m)
    seen = spy(m, monkeypatch)
    m.requires_grad_(True)
    optimizer = torch.optim.SGD(m.parameters(), 0.0)
    for _ in range(3):
        m(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert c.step_count == 3  # from the first step on: the forward finds the weights
    assert all((norms > 0).all() for norms in seen)


def test_replaced_weights_are_heard():
    m, x = model(), torch.randn(4, 8)
    c = instrumented(m)
    m[0].weight = nn.Parameter(m[0].weight.detach().clone())
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    for _ in range(2):
        m(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert c.decision is not None
    assert not c.decision.missing.any()


def test_budget_is_hard_in_a_live_run():
    m = model(layers=10)
    c = instrumented(m, max_active=3, config=gnmr_fx.GnmrConfig(alpha=0.5, beta=0.5, warmup_steps=0, lock_steps=2))
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    for _ in range(20):
        m(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert int(c.flags.sum()) <= 3
        assert len(c.active) == int(c.flags.sum())
    assert c.stats["most_active"] == 3
    assert c.stats["refused"] > 0
    assert {event.outcome for event in c.events} >= {"chosen", "refused"}


@pytest.mark.parametrize(("max_active", "expected"), [(0, 0), (2, 2), (99, 99), (0.5, 5), (1.0, 10)])
def test_budget_forms(max_active, expected):
    assert instrumented(model(layers=10), max_active=max_active).max_active == expected


def test_force_pins_and_releases():
    m = model()
    c = instrumented(m)
    c.force("high")
    assert c.active == ["0", "1", "2"]
    c.force(["1"])
    assert c.active == ["1"]
    c.force("low")
    assert c.active == []
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    c.force(["2"])
    m(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    assert c.active == ["2"]
    c.force(None)
    assert c.active == []
    with pytest.raises(gnmr_fx.UnknownUnitError, match="'7'"):
        c.force(["7"])


def run(m: nn.Module, steps: range) -> list[list[str]]:
    """Train on batches that depend on the step alone; the active units after each step."""
    optimizer = torch.optim.SGD(m.parameters(), 0.05)
    active = []
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)) * (1 + 5 * (step % 4 == 0))
        m(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        active.append(gnmr_fx.controller(m).active)
    return active


CONFIG = gnmr_fx.GnmrConfig(alpha=1.2, beta=1.2, window=3, lock_steps=2, warmup_steps=1)


def test_state_dict_resumes_with_the_same_decisions():
    whole, first, second = model(), model(), model()
    for m in (whole, first, second):
        gnmr_fx.instrument(m, "saved-int4-int8", max_active=2, config=CONFIG)
    expected = run(whole, range(30))
    assert len({tuple(names) for names in expected}) > 2, "the run must make different decisions to test anything"
    assert run(first, range(13)) == expected[:13]
    second.load_state_dict(first.state_dict())
    gnmr_fx.controller(second).load_state_dict(gnmr_fx.controller(first).state_dict())
    assert run(second, range(13, 30)) == expected[13:]
    assert gnmr_fx.controller(second).stats | {"seconds": 0} == gnmr_fx.controller(whole).stats | {
        "seconds": 0,
        "events_dropped": gnmr_fx.controller(second).stats["events_dropped"],
    }


def test_state_dict_loads_with_weights_only(tmp_path):
    m = model()
    gnmr_fx.instrument(m, config=CONFIG)
    run(m, range(5))
    c = gnmr_fx.controller(m)
    torch.save(c.state_dict(), tmp_path / "state.pt")
    c.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))


def test_state_of_another_model_is_refused_and_changes_nothing():
    m, other = model(layers=3), model(layers=4)
    c, theirs = instrumented(m), instrumented(other)
    run(other, range(3))
    run(m, range(2))
    before = copy.deepcopy(c.state_dict())
    for state in (theirs.state_dict(), {**c.state_dict(), "version": 99}, {}):
        with pytest.raises(gnmr_fx.StateMismatchError):
            c.load_state_dict(state)
    after = c.state_dict()
    assert after["units"] == before["units"]
    assert all(torch.equal(after["rules"][k], v) for k, v in before["rules"].items() if isinstance(v, Tensor))


def test_stochastic_rounding_is_seeded_and_resumes():
    fmt = gnmr_fx.Format("int2", rounding="stochastic")
    recipe = gnmr_fx.Recipe(fmt, gnmr_fx.Format("int8"))

    def gradients(m: nn.Module) -> list[Tensor]:
        m.zero_grad()
        m(torch.ones(4, 8) * torch.linspace(-1, 1, 8)).square().mean().backward()
        return [p.grad.clone() for p in m.parameters()]  # type: ignore[union-attr]

    a, b = model(), model()
    for m in (a, b):
        gnmr_fx.instrument(m, recipe)
    first = gradients(a)
    assert all(torch.equal(x, y) for x, y in zip(first, gradients(b), strict=True))
    gnmr_fx.controller(a).step()
    second = gradients(a)
    assert not all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    gnmr_fx.controller(b).load_state_dict(gnmr_fx.controller(a).state_dict())
    assert all(torch.equal(x, y) for x, y in zip(second, gradients(b), strict=True))


def test_uninstrument_and_garbage_leave_no_hooks():
    gc.collect()  # what other tests left behind
    before = len(optimizer_module._global_optimizer_post_hooks)
    m = model()
    instrumented(m)
    assert len(optimizer_module._global_optimizer_post_hooks) == before + 1
    gnmr_fx.uninstrument(m)
    assert len(optimizer_module._global_optimizer_post_hooks) == before
    assert all(p._post_accumulate_grad_hooks is None for p in m.parameters())
    c = instrumented(m)
    gone = weakref.ref(c)
    del m, c
    gc.collect()
    assert gone() is None
    assert len(optimizer_module._global_optimizer_post_hooks) == before


def test_copies_have_their_own_connected_controller():
    m = model()
    c = instrumented(m)
    twin = copy.deepcopy(m)
    theirs = gnmr_fx.controller(twin)
    assert theirs is not c
    theirs.force("high")
    assert theirs.flags.all()
    assert not c.flags.any()
    assert all(layer._gnmr_weight.guard.item() for layer in twin)
    assert not any(layer._gnmr_weight.guard.item() for layer in m)
    run(twin, range(3))
    assert (theirs.step_count, c.step_count) == (3, 0)
    gnmr_fx.uninstrument(twin)
    assert "forward" in m[0].__dict__
    assert "forward" not in twin[0].__dict__


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradient_norms_are_at_least_fp32(dtype):
    gradients = [torch.randn(64, 33).to(dtype) * s for s in (1e-3, 1.0, 300.0)]
    expected = torch.stack([g.double().norm() for g in gradients])
    found = torch.stack(tuple(gradient_norms(gradients)))
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(found.double(), expected, rtol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_units_are_seen_and_heard(reentrant):
    from torch.utils.checkpoint import checkpoint

    m, x = model(), torch.randn(4, 8, requires_grad=True)
    c = instrumented(m, config=gnmr_fx.GnmrConfig(alpha=1e-6, warmup_steps=0))
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    for _ in range(2):
        checkpoint(m, x, use_reentrant=reentrant).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert c.decision is not None
    assert not c.decision.missing.any()
    assert all(unit.observation.recomputed for unit in c.units)
    assert all(bool(unit.observation.last) != reentrant for unit in c.units)
