"""The numbers of one optimizer step, for whatever logs numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from gnmr_fx.controller import capacity
from gnmr_fx.instrument import ModelController, controller
from gnmr_fx.operator_rows import unit_rows

__all__ = ["KeptBytes", "Meter", "kept_bytes", "numbers", "step_metrics"]


class KeptBytes(NamedTuple):
    """What one forward-backward pass keeps for the backward, in bytes: sums of the table's columns.

    Attributes:
        full: as PyTorch keeps it.
        low: on the low-cost path.
        high: what recovery adds, of each unit.
    """

    full: int
    low: int
    high: tuple[int, ...]


def kept_bytes(installed: ModelController) -> KeptBytes | None:
    """Bytes of the last pass, over the units that have run; None before the first one."""
    rows = unit_rows(installed)
    if all(row.bytes_full is None for row in rows):
        return None
    return KeptBytes(
        full=sum(row.bytes_full or 0 for row in rows),
        low=sum(row.bytes_low or 0 for row in rows),
        high=tuple(row.bytes_high or 0 for row in rows),
    )


def step_metrics(installed: ModelController, kept: KeptBytes | None = None) -> dict[str, float | int | str]:
    """What the controller of an instrumented model did in its last step. Changes nothing.

    Args:
        installed: the controller, ``gnmr_fx.controller(model)``.
        kept: bytes that are known already; :func:`kept_bytes` if not given.

    Returns:
        A flat dictionary. Always there: ``active_units`` (units on the recovery path now), ``budget`` (at most as many
        units; for a budget in bytes or operations as given) and ``budget_use`` (the share of it that is in use; 0 for a
        budget of 0). After a pass in training mode: ``bytes_saved`` (what the low-cost path keeps less than PyTorch
        does) and ``bytes_recovered`` (what the active units keep in addition). After a step: ``over_threshold``,
        ``refused`` (units in this step), ``over_threshold_share`` (share of all unit-steps so far); and, unless no unit
        had a gradient, ``highest_gnmr`` and ``highest_delta_gnmr`` (dimensionless, ``inf`` for a norm that is not
        finite; under another signal its level and its change) with the units' names, ``highest_gnmr_unit`` and
        ``highest_delta_gnmr_unit``.
    """
    active = installed.flags.tolist()
    budget, use = _budget(installed, active)
    found: dict[str, float | int | str] = {"active_units": sum(active), "budget": budget, "budget_use": use}
    kept = kept_bytes(installed) if kept is None else kept
    if kept is not None:
        found["bytes_saved"] = kept.full - kept.low
        found["bytes_recovered"] = sum(size for size, on in zip(kept.high, active, strict=True) if on)
    decision = installed.decision
    if decision is None:
        return found
    stats = installed.stats
    found["over_threshold"] = sum(unit.risky for unit in decision.units)
    found["refused"] = sum(unit.refused for unit in decision.units)
    found["over_threshold_share"] = stats["risky"] / stats["unit_steps"]
    judged = zip(decision.units, installed.units, strict=True)
    heard = [(verdict, unit.name) for verdict, unit in judged if not verdict.missing]
    if heard:
        verdict, found["highest_gnmr_unit"] = max(heard, key=lambda pair: pair[0].gnmr)
        found["highest_gnmr"] = verdict.gnmr
        verdict, found["highest_delta_gnmr_unit"] = max(heard, key=lambda pair: pair[0].delta_gnmr)
        found["highest_delta_gnmr"] = verdict.delta_gnmr
    return found


def _budget(installed: ModelController, active: list[bool]) -> tuple[float | int, float]:
    """The budget, and the share of it that is in use."""
    if installed.config.budget_unit == "units":
        units = min(int(installed.max_active), len(active))
        return units, sum(active) / units if units else 0.0
    costs = installed.costs()
    limit = capacity(installed.max_active, costs)
    spent = math.fsum(max(cost, 0.0) for cost, on in zip(costs, active, strict=True) if on)
    return installed.max_active, spent / limit if limit else 0.0


def numbers(metrics: Mapping[str, float | int | str], prefix: str = "gnmr_fx/") -> dict[str, float | int]:
    """The numeric ones of :func:`step_metrics`, under a prefix: trackers that plot take no names."""
    return {f"{prefix}{name}": value for name, value in metrics.items() if not isinstance(value, str)}


class Meter:
    """Reads :func:`step_metrics` of one model step by step, and counts bytes anew only where they have changed."""

    def __init__(self, model: nn.Module | ModelController) -> None:
        self.controller = model if isinstance(model, ModelController) else controller(model)
        self._key: list[Any] | None = None
        self._kept: KeptBytes | None = None

    def read(self) -> dict[str, float | int | str]:
        """The metrics of the last step."""
        key = [
            (unit.trainable, unit.observation.scope, dict(unit.observation.current)) for unit in self.controller.units
        ]
        if key != self._key:
            self._key, self._kept = key, kept_bytes(self.controller)
        return step_metrics(self.controller, self._kept)
