"""What the passes hand on to each other: one immutable plan, extended by each pass."""

from __future__ import annotations

import importlib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx
from torch import fx, nn

from gnmr_fx.recipe import Recipe
from gnmr_fx.units import LeftAlone, UnitSpec


@dataclass(frozen=True)
class Selection:
    """Which operators the user wants: glob patterns on unit names; None = no wish."""

    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Finding:
    """One way in which one module's code uses one weight.

    Attributes:
        site: path of the calling module.
        weight: path of the weight from there, such as ``weight`` or ``dt_proj.weight``.
        operator: the operator that reads it; ``""`` where the code could not be traced to see it.
        traced: the traced graph of the site's forward, where tracing is sound.
        reason: why it is to be left alone; ``""`` if it is not.
    """

    site: str
    weight: str
    operator: str
    traced: fx.Graph | None = None
    reason: str = ""


@dataclass(frozen=True)
class CapturedCall:
    """One projection call in the captured whole-model graph.

    Attributes:
        site: path of the module whose code makes the call.
        weight: path of the weight from the model.
        operator: short name of the operator.
        node: the call; ``input`` is the activation it reads and ``shape`` that one's shape, where the graph shows it.
        reason: why the call is not covered; ``""`` if it is.
    """

    site: str
    weight: str
    operator: str
    node: fx.Node
    input: fx.Node | None = None
    shape: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Forward:
    """A generated forward for the module at ``site``: its source and the globals that source refers to.

    Attributes:
        handles: attribute name on the module -> name of the unit whose handle goes there.
        heads: attribute names on the module where the marker of an output head goes.
        kind: ``"traced"`` (from the site's own graph) or ``"intercepted"``.
    """

    site: str
    source: str
    globals: Mapping[str, Any]
    handles: Mapping[str, str]
    kind: str
    graph: fx.Graph | None = None
    heads: tuple[str, ...] = ()

    def without_graph(self) -> Forward:
        """The same forward, fit to be kept and pickled with the model."""
        return replace(self, graph=None)

    def __getstate__(self) -> dict[str, Any]:
        names = {
            name: _ModuleName(value.__name__) if isinstance(value, types.ModuleType) else value
            for name, value in self.globals.items()
        }
        return {**self.__dict__, "globals": names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = {
            name: importlib.import_module(value.name) if isinstance(value, _ModuleName) else value
            for name, value in state["globals"].items()
        }
        self.__dict__.update(state, globals=names)


@dataclass(frozen=True)
class _ModuleName:
    """A Python module in a pickle."""

    name: str


@dataclass(frozen=True)
class Plan:
    """The state of the pipeline.

    Attributes:
        model: the model; passes read it and never change it.
        recipe, selection, example_inputs: as given to ``instrument``.
        graph: the captured whole-model graph, if there is one; ``capture_note`` says why not.
        calls: the projection calls in that graph.
        findings: every use of a weight by a projection, from the modules' own code and from ``calls``.
        units, left_alone: the outcome of ``find``; ``heads``, those left alone that are output heads.
        marks_heads: whether the projections of output heads are to be marked as such when they run.
        dataflow: networkx graph of the units: an edge (u, v) where data flows from u to v through no other unit;
            node attribute ``order`` is the order they run in.
        forwards: the generated forwards.
    """

    model: nn.Module
    recipe: Recipe
    selection: Selection = field(default_factory=Selection)
    example_inputs: Any = None
    marks_heads: bool = False
    graph: fx.Graph | None = None
    capture_note: str = ""
    calls: tuple[CapturedCall, ...] = ()
    findings: tuple[Finding, ...] = ()
    units: tuple[UnitSpec, ...] = ()
    left_alone: tuple[LeftAlone, ...] = ()
    heads: tuple[UnitSpec, ...] = ()
    dataflow: nx.DiGraph = field(default_factory=nx.DiGraph)
    forwards: tuple[Forward, ...] = ()


def weight_paths(model: nn.Module) -> dict[int, str]:
    """``id(parameter) -> its first path`` for every parameter of ``model``."""
    return {id(p): name for name, p in model.named_parameters(remove_duplicate=True)}
