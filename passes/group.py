"""Pass ``group``: how the units hang together in the captured dataflow.

Builds a networkx graph of the units (an edge where data flows from one to the next through no third one) and tells
which units read one and the same tensor (q, k and v; gate and up), which is then stored once.

Invariants: every unit is a node; sharing is symmetric; without a captured graph there are no edges and no sharing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import networkx as nx
from torch import fx

from gnmr_fx.passes.capture import VIEWS, name_of, operator_name
from gnmr_fx.passes.plan import Plan, weight_paths

_ALIASES = VIEWS - {"index_select", "chunk", "split", "unbind", "getitem", "__getitem__", "select", "narrow"}


def group(plan: Plan) -> Plan:
    """Fill in ``Plan.dataflow`` and each unit's ``shares_input_with`` and ``note``."""
    paths = weight_paths(plan.model)
    unit_of = {}
    for unit in plan.units:
        weight = plan.model.get_submodule(unit.owner).get_parameter(unit.parameter)
        unit_of[paths[id(weight)]] = unit.name
    covered = [call for call in plan.calls if call.weight in unit_of and not call.reason]
    calls = [(call.node, unit_of[call.weight]) for call in covered]
    shown = [(call.node, unit_of[call.weight]) for call in covered if call.input is not None]
    inputs = {call.node: _undo_views(call.input) for call in covered if call.input is not None}
    readers: dict[fx.Node, set[str]] = defaultdict(set)
    for node, name in shown:
        readers[inputs[node]].add(name)
    shares: dict[str, set[str]] = defaultdict(set)
    kept_by_attention = set()
    for node, name in shown:
        shares[name] |= readers[inputs[node]] - {name}
        if _is_attention_output(inputs[node]):
            kept_by_attention.add(name)
    units = tuple(
        replace(
            unit,
            shares_input_with=tuple(other.name for other in plan.units if other.name in shares[unit.name]),
            note="attention keeps its output, this unit's input, as well"
            if unit.name in kept_by_attention
            else unit.note,
        )
        for unit in plan.units
    )
    return replace(plan, units=units, dataflow=_dataflow(plan, calls))


def _undo_views(node: fx.Node) -> fx.Node:
    while node.op in ("call_function", "call_method") and name_of(node) in _ALIASES:
        first = node.args[0]
        if not isinstance(first, fx.Node):
            break
        node = first
    return node


def _is_attention_output(node: fx.Node) -> bool:
    return node.op == "call_function" and operator_name(node.target) == "scaled_dot_product_attention"


def _dataflow(plan: Plan, calls: list[tuple[fx.Node, str]]) -> nx.DiGraph:
    graph = nx.DiGraph()
    for order, unit in enumerate(plan.units):
        graph.add_node(unit.name, order=order)
    if plan.graph is None:
        return graph
    units_at: dict[fx.Node, list[str]] = defaultdict(list)
    for node, name in calls:
        units_at[node].append(name)
    reached: dict[fx.Node, frozenset[str]] = {}  # the units whose output a node's value depends on directly
    for node in plan.graph.nodes:
        sources = (
            frozenset().union(*(reached[n] for n in node.all_input_nodes)) if node.all_input_nodes else frozenset()
        )
        if node in units_at:
            *first, last = units_at[node]  # several in an attention call, where all others feed the last
            graph.add_edges_from((source, name) for source in sources for name in first or [last] if source != name)
            graph.add_edges_from((name, last) for name in first)
            sources = frozenset({last})
        reached[node] = sources
    return graph
