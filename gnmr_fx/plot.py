"""The plot of a report: units × steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from gnmr_fx.errors import MissingDependencyError
from gnmr_fx.history import Period
from gnmr_fx.runtime import Event
from gnmr_fx.text import below, common_parent, counted

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

MAX_STEPS = 500
MAX_LABELS = 45
"""Columns, beyond which steps are binned, and unit names along the plot, beyond which some are left out."""

_ON, _RISKY, _REFUSED = "#9ecae8", "#0b4f8a", "#f0853f"


def bin_edges(start: int, stop: int, most: int = MAX_STEPS) -> list[int]:
    """Edges of at most ``most`` bins of equal width (but for the last one) over steps ``start`` to ``stop - 1``."""
    width = max(1, math.ceil((stop - start) / most))
    return [*range(start, stop, width), stop]


def share_of_bins(found: Iterable[Period], edges: np.ndarray) -> np.ndarray:
    """The share of each bin, in [0, 1], that lies in periods on the recovery path."""
    import numpy as np

    covered = np.zeros(len(edges) - 1)
    for period in found:
        if period.on:
            covered += np.diff(np.clip(edges, period.start, period.stop))
    return covered / np.diff(edges)


def draw_audit(
    units: Sequence[str],
    gaps: Sequence[float],
    oracle: Sequence[bool],
    recent: Sequence[float],
    gradient_norm: float,
) -> Figure:
    """The figure that :meth:`Audit.plot` writes: a bar for each unit, and next to it how often it was recovered.

    Args:
        units, gaps, oracle, recent: as :class:`gnmr_fx.audit.Audit` has them.
        gradient_norm: what gaps are shown as a share of.

    Raises:
        MissingDependencyError: without matplotlib.
    """
    try:
        import numpy as np
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise MissingDependencyError(
            "expected matplotlib, which Audit.plot draws with, found none; pip install 'gnmr-fx[plot]'"
        ) from error
    rows, parent = len(units), common_parent(list(units))
    figure = Figure(figsize=(9, min(9.0, max(1.2, 0.2 * rows)) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
    places = np.arange(rows)
    left.barh(places, 100 * np.array(gaps) / gradient_norm, color=[_RISKY if best else _ON for best in oracle])
    right.barh(places, 100 * np.array(recent), color=_REFUSED)
    shown = list(range(0, rows, math.ceil(rows / MAX_LABELS)))
    left.set_yticks(shown, [below(units[row], parent) for row in shown], fontsize=7)
    left.set_ylim(rows - 0.5, -0.5)
    left.set_xlabel("recovery gap, % of the gradient's norm", fontsize=8)
    right.set_xlabel("recovered,\n% of recent steps", fontsize=8)
    right.set_xlim(0, 100)
    left.set_title(f"gnmr-fx: recovery gaps of {counted(rows, 'unit')}", fontsize=10, loc="left")
    for axes in (left, right):
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    legend = [
        Patch(color=_RISKY, label="in the oracle's set"),
        Patch(color=_ON, label="not in it"),
        Patch(color=_REFUSED, label="the controller's choices"),
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), fontsize=8, frameon=False)
    return figure


def draw(
    tracks: Mapping[str, Sequence[Period]],
    events: Sequence[Event],
    first_step: int,
    last_step: int,
    budget: int | None,
    warmup_steps: int,
) -> Figure:
    """The figure that :meth:`Report.plot` writes. Leaves pyplot and its backend alone.

    Args:
        tracks: the periods of each unit, from top to bottom.
        events: marked where a unit was over a threshold or refused by the budget.
        first_step, last_step: the steps that the periods cover.
        budget: the most units on the recovery path at a time; None where it does not count units.
        warmup_steps: length of the warm-up.

    Raises:
        MissingDependencyError: without matplotlib.
    """
    try:
        import numpy as np
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import to_rgb
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise MissingDependencyError(
            "expected matplotlib, which Report.plot draws with, found none; pip install 'gnmr-fx[plot]'"
        ) from error

    stop = max(first_step, last_step) + 1
    edges = np.array(bin_edges(first_step, stop))
    width = int(edges[1] - edges[0])
    on = np.stack([share_of_bins(found, edges) for found in tracks.values()])

    pixels = np.ones((*on.shape, 3))
    pixels += (on[..., None] ** 0.5) * (np.array(to_rgb(_ON)) - 1)  # even a single step of a wide bin shows
    row_of = {unit: row for row, unit in enumerate(tracks)}
    recovered = [e for e in events if e.risky and e.outcome == "chosen"]
    refused = [e for e in events if e.outcome == "refused" and not e.forced]
    for marked, color in ((recovered, _RISKY), (refused, _REFUSED)):
        columns = np.searchsorted(edges, [e.step for e in marked], side="right") - 1
        pixels[[row_of[e.unit] for e in marked], np.clip(columns, 0, len(edges) - 2)] = to_rgb(color)

    rows, parent = len(tracks), common_parent(list(tracks))
    shown = list(range(0, rows, math.ceil(rows / MAX_LABELS)))
    map_height = min(9.0, max(1.2, 0.2 * rows))
    figure = Figure(figsize=(11, map_height + 2.2), layout="constrained")
    FigureCanvasAgg(figure)
    top, heatmap = figure.subplots(2, 1, sharex=True, height_ratios=[0.9, map_height])

    active = on.sum(0)
    top.stairs(active, edges - 0.5, fill=True, color=_ON)
    top.stairs(active, edges - 0.5, color=_RISKY, linewidth=0.8)
    if budget is not None:
        top.axhline(budget, color="0.35", linewidth=1, linestyle="--")
    top.set_ylim(0, 1.4 * max(1, min(budget or 0, rows), active.max()))
    top.set_ylabel("units on\nthe path", fontsize=8)
    top.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    top.set_title(
        f"gnmr-fx: recovery of {counted(rows, 'unit')} over {counted(last_step, 'step')}"
        + ("" if budget is None else f", budget {budget}")
        + (f" ({width} steps a column)" if width > 1 else ""),
        fontsize=10,
        loc="left",
    )

    heatmap.pcolormesh(edges - 0.5, np.arange(rows + 1) - 0.5, pixels, rasterized=True)
    heatmap.set_ylim(rows - 0.5, -0.5)
    heatmap.set_xlim(edges[0] - 0.5, edges[-1] - 0.5)
    heatmap.set_yticks(shown, [below(list(tracks)[row], parent) for row in shown], fontsize=7)
    heatmap.set_xlabel("step")
    heatmap.xaxis.set_major_locator(MaxNLocator(integer=True))
    if rows <= MAX_LABELS:
        heatmap.hlines(np.arange(1, rows) - 0.5, *heatmap.get_xlim(), color="0.93", linewidth=0.5)
    if parent:
        heatmap.set_ylabel(f"units below {parent}", fontsize=8)
    for axes in (top, heatmap):
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        if first_step <= warmup_steps < stop - 1:
            axes.axvline(warmup_steps + 0.5, color="0.35", linewidth=0.8, linestyle=":")

    if first_step <= warmup_steps < stop - 1:
        top.annotate(
            "warm-up ends",
            (warmup_steps + 0.5, 1),
            (3, -2),
            ("data", "axes fraction"),
            "offset points",
            fontsize=7,
            va="top",
        )

    legend = [
        Patch(color=_ON, label="on the recovery path"),
        Patch(color=_RISKY, label="over a threshold, recovered"),
        Patch(color=_REFUSED, label="refused by the budget"),
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), fontsize=8, frameon=False)
    return figure
