"""The ordered list of passes and the one runner for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gnmr_fx.passes.capture import capture
from gnmr_fx.passes.check import check
from gnmr_fx.passes.find import find
from gnmr_fx.passes.freeze import admit, freeze
from gnmr_fx.passes.group import group
from gnmr_fx.passes.plan import Plan
from gnmr_fx.passes.rewrite import rewrite

log = logging.getLogger(__name__)

Pass = Callable[[Plan], Plan]

PASSES: tuple[Pass, ...] = (admit, capture, find, freeze, group, rewrite, check)


def run(plan: Plan, passes: Sequence[Pass] = PASSES, dump: Path | None = None) -> Plan:
    """Run ``passes`` in order.

    Logs each pass's name, time and what it left (at level DEBUG of logger ``gnmr_fx.passes.pipeline``). With ``dump``,
    writes the plan before the first pass and after each one to ``dump/NN_name.txt``.
    """
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        (dump / "00_before.txt").write_text(describe(plan))
    for number, step in enumerate(passes, 1):
        start = time.perf_counter()
        plan = step(plan)
        log.debug("%s: %.1f ms; %s", step.__name__, 1e3 * (time.perf_counter() - start), summary(plan))
        if dump is not None:
            (dump / f"{number:02d}_{step.__name__}.txt").write_text(describe(plan))
    return plan


def summary(plan: Plan) -> str:
    """Counts, for the log."""
    nodes = len(plan.graph.nodes) if plan.graph is not None else 0
    return (
        f"{nodes} captured nodes, {len(plan.calls)} calls, {len(plan.findings)} findings, {len(plan.units)} units, "
        f"{len(plan.left_alone)} left alone, {len(plan.forwards)} forwards"
    )


def describe(plan: Plan) -> str:
    """The whole plan as text."""
    parts = [summary(plan), f"capture: {plan.capture_note or 'whole model'}"]
    if plan.graph is not None:
        parts.append(str(plan.graph))
    parts += [f"unit {unit}" for unit in plan.units]
    parts += [f"left alone {item}" for item in plan.left_alone]
    parts += [f"forward {forward.site} ({forward.kind})\n{forward.source}" for forward in plan.forwards]
    return "\n\n".join(parts) + "\n"
