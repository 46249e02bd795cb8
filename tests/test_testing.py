"""Transients on purpose: they happen when they should, leave nothing behind, and are counted right."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gnmr_fx
from gnmr_fx import testing
from gnmr_fx.runtime import Event
from tests.loops import chain, readable_kernels
from tests.toys import OwnParameters

EXACT = gnmr_fx.Recipe(gnmr_fx.Format("none"), gnmr_fx.Format("none"))


@pytest.fixture(autouse=True, scope="module")
def _readable_kernels() -> Iterator[None]:
    with readable_kernels():
        yield


def losses(model: nn.Module, transients: list[Any], steps: int, lr: float = 0.0, call: Any = None) -> tuple[Any, ...]:
    """Loss of each step on one batch, learning rate that each step was made with, and the injection."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(0))
    found, rates = [], []
    original = optimizer.step

    def step() -> None:
        rates.append(optimizer.param_groups[0]["lr"])
        original()

    with testing.inject(model, transients, optimizer) as injected:
        for at in range(steps):
            with injected.at(at):
                loss = (call or model)(injected.batch(x)).square().mean()
                loss.backward()
                step()
                optimizer.zero_grad()
            found.append(round(loss.item(), 6))
    return found, rates, injected


@pytest.mark.parametrize(
    "transient",
    [
        testing.Outliers(["1"], 2, 4),
        testing.ShiftedData(2, 4),
        testing.DamagedWeight("1", 2, 4, share=0.1),
    ],
    ids=lambda t: type(t).__name__,
)
def test_a_transient_lasts_its_span_and_leaves_nothing(transient: Any) -> None:
    model = gnmr_fx.instrument(chain(3), EXACT)
    before = copy.deepcopy(model.state_dict())
    found, _, injected = losses(model, [transient], 6)
    assert len({*found[:2], *found[4:]}) == 1
    assert found[2] == found[3] != found[0]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    (span,) = injected.spans
    assert (span.start, span.stop) == (3, 5), "steps of the controller count from 1"
    assert span.units == (None if isinstance(transient, testing.ShiftedData) else ("1",))
    again, _, _ = losses(model, [transient], 6)
    assert again == found, "seeded"


def test_a_spike_of_the_learning_rate() -> None:
    model = gnmr_fx.instrument(chain(2), EXACT)
    _, rates, injected = losses(model, [testing.LearningRateSpike(1, 3, factor=10.0)], 4, lr=0.5)
    assert rates == [0.5, 5.0, 5.0, 0.5]
    assert injected.spans[0].units is None


def test_a_scheduler_that_runs_inside_a_spike_has_the_last_word() -> None:
    model = gnmr_fx.instrument(chain(2), EXACT)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with testing.inject(model, [testing.LearningRateSpike(0, 1)], optimizer) as injected, injected.at(0):
        assert optimizer.param_groups[0]["lr"] == 10.0
        optimizer.param_groups[0]["lr"] = 0.25
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_an_error_inside_puts_everything_back() -> None:
    model = gnmr_fx.instrument(chain(2), EXACT)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    transients = [testing.DamagedWeight("0", 0, 9), testing.LearningRateSpike(0, 9), testing.Outliers(["1"], 0, 9)]
    with (
        pytest.raises(ZeroDivisionError),
        testing.inject(model, transients, optimizer) as injected,
        injected.at(0),
    ):
        raise ZeroDivisionError
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_outliers_come_and_go_without_a_recompilation() -> None:
    model = gnmr_fx.instrument(chain(3), EXACT)
    transient = testing.Outliers(["1"], 2, 4, channels=3)
    expected, _, _ = losses(model, [transient], 6)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        found, _, _ = losses(model, [transient], 6, call=call)
    assert found == pytest.approx(expected, rel=1e-4)


def test_token_batches_get_other_names() -> None:
    model = gnmr_fx.instrument(chain(2), EXACT)
    ids = torch.tensor([[1, 2, 3, -100], [1, 1, 7, 8]])
    with testing.inject(model, [testing.ShiftedData(1, 2, vocabulary=9, seed=3)]) as injected:
        with injected.at(0):
            assert injected.batch(ids) is ids
        with injected.at(1):
            batch = injected.batch({"ids": ids, "parts": (ids, 5), "mask": ids > 1})
    other = batch["ids"]
    assert not torch.equal(other, ids)
    assert torch.equal(other == -100, ids == -100)
    assert ((other[ids > 0] >= 0) & (other[ids > 0] < 9)).all()
    assert other[1, 0] == other[1, 1] == other[0, 0]
    assert torch.equal(batch["parts"][0], other)
    assert batch["parts"][1] == 5
    assert torch.equal(batch["mask"], ids > 1)


def test_a_controller_that_watches_errors_sees_outliers_where_they_are() -> None:
    config = gnmr_fx.GnmrConfig(
        signal="error", signal_every=1, alpha=math.inf, beta=1.5, warmup_steps=2, lock_steps=1, window=4
    )
    recipe = gnmr_fx.Recipe(gnmr_fx.Format("int4", "tensor"), gnmr_fx.Format("int8"))
    model = gnmr_fx.instrument(chain(4), recipe, config=config, max_active=1)
    _, _, injected = losses(model, [testing.Outliers(["2"], 6, 9, factor=10.0)], 14)
    found = testing.score(gnmr_fx.controller(model), injected.spans)
    assert (found.pairs, found.hits, found.recovered, found.delays) == (1, 1, 1, (0,))
    assert found.quiet == 12 * 4 - 3
    assert found.false_alarms <= 3, "the outliers' own echo in what follows"


# Counting -------------------------------------------------------------------------------------------------------------


def event(step: int, unit: str, risky: bool = True, outcome: Any = "chosen") -> Event:
    return Event(step, unit, 1.0, 9.0, 1.0, 3.0, risky, outcome, 1, True, False)


def test_hits_delays_and_false_alarms() -> None:
    one = testing.Outliers(["a"], 9, 12)
    every = testing.LearningRateSpike(19, 20)
    spans = [testing.Span(one, ("a",), 10, 13), testing.Span(every, None, 20, 21)]
    events = [
        event(2, "a"),  # in the warm-up: not counted
        event(6, "b"),  # false
        event(11, "a", outcome="refused"),  # hit, one step late
        event(12, "a"),
        event(12, "b"),  # false
        event(14, "a"),  # false, unless the two steps after count as the transient's own
        event(20, "b", risky=False),  # recovered by a lock: no hit
    ]
    found = testing.score_events(events, spans, ["a", "b"], first=5, last=24)
    assert found == testing.Detection(pairs=3, hits=1, recovered=2, delays=(1,), false_alarms=3, quiet=2 * 20 - 3 - 2)
    assert found.hit_rate == 1 / 3
    assert found.recovered_rate == 2 / 3
    assert found.mean_delay == 1.0
    assert found.false_alarms_per_1000 == 3000 / 35
    later = testing.score_events(events, spans, ["a", "b"], first=5, last=24, after=2)
    assert (later.false_alarms, later.quiet) == (2, 2 * 20 - 5 - 6)
    assert "1 of 3" in str(found)


def test_nothing_to_count() -> None:
    found = testing.score_events([], [], ["a"], first=5, last=4)
    assert found == testing.Detection(0, 0, 0, (), 0, 0)
    assert all(math.isnan(v) for v in (found.hit_rate, found.mean_delay, found.false_alarms_per_1000))


# Errors ---------------------------------------------------------------------------------------------------------------


def test_bad_transients_are_refused() -> None:
    for make in (
        lambda: testing.Outliers(["a"], 5, 5),
        lambda: testing.Outliers([], 1, 2),
        lambda: testing.Outliers(["a"], 1, 2, channels=0),
        lambda: testing.LearningRateSpike(-1, 2),
        lambda: testing.DamagedWeight("a", 0, 1, share=0.0),
    ):
        with pytest.raises(gnmr_fx.ConfigError, match="expected"):
            make()


def test_transients_that_do_not_fit_the_model() -> None:
    model = gnmr_fx.instrument(chain(2), EXACT)
    for transient in (testing.Outliers(["9"], 0, 1), testing.DamagedWeight("9", 0, 1)):
        with pytest.raises(gnmr_fx.UnknownUnitError, match="found '9'"), testing.inject(model, [transient]):
            pass
    with (
        pytest.raises(gnmr_fx.ConfigError, match="expected an optimizer"),
        testing.inject(model, [testing.LearningRateSpike(0, 1)]),
    ):
        pass
    with pytest.raises(gnmr_fx.NotInstrumentedError), testing.inject(chain(2), []):
        pass
    other = gnmr_fx.instrument(OwnParameters(), EXACT)
    with (
        pytest.raises(gnmr_fx.ConfigError, match=r"expected a unit whose weight an nn\.Linear holds"),
        testing.inject(other, [testing.Outliers(["a"], 0, 1)]),
    ):
        pass


def test_dropped_records_are_no_basis() -> None:
    config = gnmr_fx.GnmrConfig(alpha=1e-6, warmup_steps=0, max_events=2)
    model = gnmr_fx.instrument(chain(3), config=config)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        x: Tensor = torch.randn(4, 40)
        model(x).square().mean().backward()
        optimizer.step()
    with pytest.raises(gnmr_fx.ConfigError, match=r"found \d+ dropped"):
        testing.score(gnmr_fx.controller(model), [])
