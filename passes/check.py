"""Pass ``check``: the invariants of the plan, before anything is installed.

Checks that every site's forward is there once, that traced graphs lint and keep their outputs, that each guarded node
has a handle, each handle a unit, each unit a site, and that nothing outside the table is guarded.
"""

from __future__ import annotations

from torch import fx

from gnmr_fx.errors import InvariantError
from gnmr_fx.ops import guarded_projection
from gnmr_fx.passes.plan import Forward, Plan


def check(plan: Plan) -> Plan:
    """Return ``plan`` unchanged.

    Raises:
        InvariantError: naming the invariant and the site.
    """
    names = [unit.name for unit in plan.units]
    _require(len(set(names)) == len(names), "unit names are unique", ", ".join(names))
    _require(not set(names) & {item.name for item in plan.left_alone}, "no unit is also left alone", "the table")
    sites = [forward.site for forward in plan.forwards]
    _require(len(set(sites)) == len(sites), "one forward per site", ", ".join(sites))
    guarded = {name for forward in plan.forwards for name in forward.handles.values()}
    _require(guarded == set(names), "exactly the units of the table are guarded", ", ".join(guarded ^ set(names)))
    traced = {finding.site: finding.traced for finding in plan.findings if finding.traced is not None}
    for forward in plan.forwards:
        if forward.graph is not None:
            _check_graph(forward, forward.graph, traced[forward.site])
    for unit in plan.units:
        missing = set(unit.sites) - {(f.site, f.weight) for f in plan.findings}
        _require(not missing, "every site of a unit was found", unit.name)
    _require(set(plan.dataflow.nodes) == set(names), "every unit is in the dataflow graph", "group")
    return plan


def _check_graph(forward: Forward, graph: fx.Graph, original: fx.Graph) -> None:
    graph.lint()
    nodes = [node for node in graph.nodes if node.target is guarded_projection]
    handles = [str(node.meta.get("gnmr_handle")) for node in nodes]
    known = {*forward.handles, *forward.heads}
    _require(set(handles) == known, "each guarded node has the handle of a unit", forward.site)
    before, after = _inputs(original), _inputs(graph)
    _require(before == after, "a rewritten forward takes the same inputs", forward.site)
    outputs = [[n for n in g.nodes if n.op == "output"] for g in (original, graph)]
    same = len(outputs[0]) == len(outputs[1]) == 1 and _structure(outputs[0][0]) == _structure(outputs[1][0])
    _require(same, "a rewritten forward returns the same structure", forward.site)


def _inputs(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "placeholder"]


def _structure(output: fx.Node) -> str:
    return str(fx.node.map_arg(output.args[0], lambda _: "*"))


def _require(condition: bool, invariant: str, where: str) -> None:
    if not condition:
        raise InvariantError(f"expected that {invariant}, found otherwise at {where}; please report this as a bug")
