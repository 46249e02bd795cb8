"""Pass ``rewrite``: a forward with guarded dual-path nodes for every site.

A site that traces soundly gets its own traced graph back with each projection replaced by
:func:`gnmr_fx.ops.guarded_projection`. Any other site keeps its forward, which then runs inside
:class:`gnmr_fx.intercept.Intercept`, where its projection calls are diverted one by one.

Nothing is installed here: the pass makes source text and says which unit's handle goes where. Forwards of equal source
share one function (:func:`compile_forward`), so that Dynamo compiles equal blocks once.

Invariants: every site of every unit has exactly one forward; a traced forward holds one guarded node per projection of
a unit and every other node unchanged; user outputs are those of the original forward.
"""

from __future__ import annotations

import copy
import functools
import keyword
import re
import types
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import fx, nn

from gnmr_fx.intercept import Intercept
from gnmr_fx.ops import guarded_projection
from gnmr_fx.passes.plan import Finding, Forward, Plan
from gnmr_fx.passes.trace import graph_calls, weight_of
from gnmr_fx.projections import Call
from gnmr_fx.units import HANDLE_PREFIX

ORIGINAL_FORWARD = f"{HANDLE_PREFIX}original_forward"
"""Where a forward set on the instance itself (by another library) is kept."""


def rewrite(plan: Plan) -> Plan:
    """Generate the forwards of all sites of ``plan.units``, and of its output heads if those are to be marked."""
    heads = plan.heads if plan.marks_heads else ()
    unit_of = {site: unit.name for unit in (*plan.units, *heads) for site in unit.sites}
    by_site: dict[str, list[Finding]] = defaultdict(list)
    for finding in plan.findings:
        if (finding.site, finding.weight) in unit_of:
            by_site[finding.site].append(finding)
    forwards = []
    for site, findings in by_site.items():
        module = plan.model.get_submodule(site)
        handles = {handle_name(f.weight): unit_of[site, f.weight] for f in findings}
        traced = findings[0].traced
        if traced is not None:
            forwards.append(_traced_forward(site, module, traced, handles))
        else:
            forwards.append(_intercepted_forward(site, module, [f.weight for f in findings], handles))
    names = {unit.name for unit in heads}
    return replace(plan, forwards=tuple(_part_heads(forward, names) for forward in forwards))


def _part_heads(forward: Forward, heads: set[str]) -> Forward:
    """Tell the attributes that take the marker of an output head from those that take a unit's handle."""
    marked = tuple(attribute for attribute, name in forward.handles.items() if name in heads)
    handles = {attribute: name for attribute, name in forward.handles.items() if name not in heads}
    return replace(forward, handles=handles, heads=marked)


def handle_name(weight: str) -> str:
    """Attribute that carries the handle of ``weight`` (a path from the site) on the site's module."""
    return HANDLE_PREFIX + re.sub(r"\W", "_", weight)


def _traced_forward(site: str, module: nn.Module, traced: fx.Graph, handles: Mapping[str, str]) -> Forward:
    graph = guard_projections(module, copy.deepcopy(traced), handles)
    code = graph.python_code("self")
    names = {name: value for name, value in code.globals.items() if name in code.src}
    return Forward(site, code.src, names, handles, "traced", graph)


def guard_projections(module: nn.Module, graph: fx.Graph, handles: Mapping[str, str]) -> fx.Graph:
    """Replace, in place, each projection in ``graph`` whose handle is in ``handles`` by its guarded node."""
    replaced: dict[fx.Node, fx.Node] = {}  # operands of later calls that were calls themselves
    for node, call in list(graph_calls(module, graph)):
        if not isinstance(call, Call) or handle_name(weight_of(call.weight)) not in handles:
            continue
        with graph.inserting_before(node):
            handle = graph.create_node("get_attr", handle_name(weight_of(call.weight)))
            training = graph.create_node("get_attr", "training")
            guarded = graph.call_function(
                guarded_projection,
                (
                    call.kind,
                    call.extra,
                    replaced.get(call.x, call.x),
                    call.weight,
                    call.bias,
                    call.offs,
                    handle,
                    training,
                ),
            )
        guarded.meta = {**node.meta, "gnmr_handle": handle.target}
        replaced[node] = guarded
        node.replace_all_uses_with(guarded)
        graph.erase_node(node)
    return graph


def _intercepted_forward(site: str, module: nn.Module, weights: list[str], handles: Mapping[str, str]) -> Forward:
    pairs = ", ".join(f"({_expression(weight)}, self.{handle_name(weight)})" for weight in weights)
    original = f"self.{ORIGINAL_FORWARD}(" if "forward" in module.__dict__ else "type(self).forward(self, "
    source = (
        "\ndef forward(self, *args, **kwargs):\n"
        f"    with Intercept(({pairs},), self.training):\n"
        f"        return {original}*args, **kwargs)\n"
    )
    return Forward(site, source, {"Intercept": Intercept}, handles, "intercepted")


def _expression(path: str) -> str:
    """Code that reads the attribute at ``path`` of ``self``, where names may be numbers (``experts.0.weight``)."""
    code = "self"
    for name in path.split("."):
        code = f"{code}.{name}" if name.isidentifier() and not keyword.iskeyword(name) else f"getattr({code}, {name!r})"
    return code


def compile_forward(forward: Forward, original: Callable[..., Any]) -> Callable[..., Any]:
    """The function that ``forward`` describes, with the name, docstring and signature of ``original``.

    Equal arguments give the same object: forwards of equal blocks must not differ, or Dynamo compiles each anew.
    """
    return _compile(forward.source, _Globals(forward.globals), original)


class _Globals:
    """A mapping compared by the identity of its values, to be part of a cache key."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        self._key = tuple(sorted((name, id(value)) for name, value in values.items()))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Globals) and self._key == other._key


@functools.cache
def _compile(source: str, values: _Globals, original: Callable[..., Any]) -> Callable[..., Any]:
    import linecache

    filename = f"<gnmr_fx forward {abs(hash((source, values))):x}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)  # for tracebacks
    scope = dict(values.values)
    exec(compile(source, filename, "exec"), scope)
    function = scope["forward"]
    assert isinstance(function, types.FunctionType)
    return functools.update_wrapper(function, original)
