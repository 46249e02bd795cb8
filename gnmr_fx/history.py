"""What the records of a controller tell of one unit: when it was recovered, why, and how far its ratios went."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from gnmr_fx.config import GnmrConfig, Threshold, is_auto, threshold
from gnmr_fx.controller import MISSING
from gnmr_fx.runtime import Event

SIGNAL_NAMES = {"gnmr": "GNMR", "error": "error", "gap": "gap"}
"""How the level of each signal is called in text."""


class Period(NamedTuple):
    """A unit in steps ``start`` to ``stop - 1``: on the recovery path, or off it."""

    start: int
    stop: int
    on: bool


def periods(events: Sequence[Event], start: int, stop: int, now: bool) -> list[Period]:
    """One unit's way through steps ``start`` to ``stop - 1``, from its events, oldest first.

    Every change of a guard is an event, so what it was before the oldest one kept is known as well. ``now`` is the
    guard after all of them. A change by hand counts from the step before it: like a decision of that step, it holds
    from the forward after it.
    """
    changes = [(max(start, event.step), event.outcome == "chosen") for event in events if event.changed]
    before = not changes[0][1] if changes else now
    states = {start: before, **dict(changes)}  # of two changes in one step the later one counts
    runs = [next(run) for _, run in itertools.groupby(states.items(), key=itemgetter(1))]
    stops = [*(step for step, _ in runs[1:]), stop]
    return [Period(begin, end, on) for (begin, on), end in zip(runs, stops, strict=True) if begin < end]


def fired(event: Event, config: GnmrConfig) -> tuple[str, ...]:
    """Why a unit was risky: ``"gnmr"``, ``"delta_gnmr"``, or ``"non_finite"`` alone; empty if it was not."""
    if not event.risky:
        return ()
    if not math.isfinite(event.norm):
        return ("non_finite",)
    alpha, beta = in_force(event, config)
    bounds = (("gnmr", event.gnmr, alpha), ("delta_gnmr", event.delta_gnmr, beta))
    return tuple(name for name, value, bound in bounds if value > bound)


def in_force(event: Event, config: GnmrConfig) -> tuple[float, float]:
    """Alpha and beta at the step of an event."""

    def at(bound: Threshold, calibrated: float, name: str) -> float:
        return calibrated if is_auto(bound) else threshold(bound, event.step, name)

    return at(config.alpha, event.alpha, "alpha"), at(config.beta, event.beta, "beta")


def told(event: Event, config: GnmrConfig) -> tuple[str, str]:
    """What happened, and why, in words: ``("recovered", "GNMR 5.21 > 3; lock 50")``."""
    name = SIGNAL_NAMES[config.signal]
    alpha, beta = in_force(event, config)
    digits = ".2f" if config.signal == "gnmr" else ".4g"
    words = {
        "gnmr": lambda: f"{name} {event.gnmr:{digits}} > {alpha:.4g}",
        "delta_gnmr": lambda: f"Δ{name} {event.delta_gnmr:.2f} > {beta:.4g}",
        "non_finite": lambda: "norm not finite" + (", the first to go so" if event.first_non_finite else ""),
    }
    over = ", ".join(words[reason]() for reason in fired(event, config))
    on = event.outcome == "chosen"
    if event.forced:
        return "pinned high" if on else "pinned low", "; ".join(filter(None, ("by hand", over)))
    if event.outcome == "released":
        return "released", "neither over a threshold nor locked"
    if event.outcome == "refused":
        return "displaced" if event.changed else "refused", f"{over or 'locked'}; the budget went to others"
    return "recovered" if event.changed else "stays on", f"{over or 'locked'}; lock {event.lock}"


@dataclass(frozen=True)
class UnitSummary:
    """One unit over the whole run.

    Attributes:
        unit: its name.
        times, steps: how often and in how many steps it was on the recovery path.
        risky: records in which it was over a threshold.
        refused: records in which it was a candidate and the budget went to others.
        gnmr, gnmr_step: highest recorded GNMR (dimensionless) and its step; None without a record of a norm.
        delta_gnmr, delta_gnmr_step: the same of Δ-GNMR.
    """

    unit: str
    times: int
    steps: int
    risky: int
    refused: int
    gnmr: float | None
    gnmr_step: int | None
    delta_gnmr: float | None
    delta_gnmr_step: int | None


def summary(unit: str, times: int, steps: int, events: Sequence[Event]) -> UnitSummary:
    """The summary of a unit from its counts and its records."""
    measured = [event for event in events if event.norm != MISSING]
    by_gnmr = max(measured, key=lambda event: event.gnmr, default=None)
    by_delta = max(measured, key=lambda event: event.delta_gnmr, default=None)
    return UnitSummary(
        unit=unit,
        times=times,
        steps=steps,
        risky=sum(event.risky for event in events),
        refused=sum(event.outcome == "refused" and not event.forced for event in events),
        gnmr=by_gnmr.gnmr if by_gnmr else None,
        gnmr_step=by_gnmr.step if by_gnmr else None,
        delta_gnmr=by_delta.delta_gnmr if by_delta else None,
        delta_gnmr_step=by_delta.step if by_delta else None,
    )
