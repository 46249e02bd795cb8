"""Pass ``find``: the recoverable operators, and the operators that are left alone with the reason.

Every module that holds a weight, or whose code reaches for a child's weight, is looked at on its own. Its forward is
traced with FX where that is sound (:func:`trace_site`); elsewhere its weights are candidates, and which of them a
projection reads is known from the captured graph, or is seen at run time.

Invariants: every projection call in the captured graph ends up in ``Plan.units`` or in ``Plan.left_alone``; so does
every weight of two or more dimensions that a module's own code may multiply with; one parameter is one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from gnmr_fx.errors import LazyParameterError, NoRecoverableOperatorError, PatternError
from gnmr_fx.passes.plan import Finding, Plan, weight_paths
from gnmr_fx.passes.trace import children_weights_in_code, graph_calls, operator_name_of, trace_site, unfit, weight_of
from gnmr_fx.projections import Call, is_projection
from gnmr_fx.units import LeftAlone, UnitSpec

HEAD_NAMES = frozenset({
    "lm_head", "head", "output_head", "output_projection", "embed_out", "unembed", "classifier", "score", "qa_outputs",
})  # fmt: skip
"""Last path components taken for an output head, outside of numbered layers."""
OUTPUT_HEAD = "output head (left alone unless include names it)"

_NOT_PROJECTIONS: tuple[tuple[type | tuple[type, ...], str, str], ...] = (
    (torch.nn.modules.conv._ConvNd, "convolution", "a convolution is not a projection"),
    (nn.RNNBase, "rnn", "recurrent layers run as one fused kernel"),
    (nn.RNNCellBase, "rnn cell", "recurrent cells run as one fused kernel"),
    (nn.Bilinear, "bilinear", "two activations are multiplied by one weight"),
    (torch.jit.ScriptModule, "scripted", "a scripted module's forward cannot be replaced"),
)
_SILENT = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, parametrize.ParametrizationList)
"""Modules whose weights are not multiplied with at all."""
_CONTAINERS = (nn.ParameterList, nn.ParameterDict)
"""Modules that have no forward: what they hold is used by the module that holds them."""


def find(plan: Plan) -> Plan:
    """Collect the findings, merge them into units, apply the user's patterns and leave the output head alone.

    Raises:
        LazyParameterError: where a parameter has no shape yet.
        NoRecoverableOperatorError: where nothing is left.
        PatternError: where a pattern matches nothing.
    """
    _refuse_lazy(plan.model)
    findings, left = _look(plan.model)
    findings, more_left = _merge_captured(plan, findings)
    found = _units(plan, findings)
    units, chosen_out = _select(plan, found)
    left_alone = [*chosen_out, *left, *more_left]
    if not units:
        raise NoRecoverableOperatorError(_nothing_found(plan, left_alone))
    names = {unit.name for unit in units}
    left_alone = [item for item in left_alone if item.name not in names]
    is_head = _head_test(plan.model)
    heads = tuple(unit for unit in found if unit.name not in names and is_head(unit))
    return replace(
        plan,
        findings=tuple(findings),
        units=tuple(units),
        left_alone=tuple(dict.fromkeys(left_alone)),
        heads=heads,
    )


def _refuse_lazy(model: nn.Module) -> None:
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(value):
            raise LazyParameterError(
                f"expected a model whose parameters have shapes, found the lazy parameter {name!r}; "
                "run one forward with example data (under torch.no_grad) before gnmr_fx.instrument"
            )


def _look(model: nn.Module) -> tuple[list[Finding], list[LeftAlone]]:
    """What each module's own code does with weights."""
    findings: list[Finding] = []
    left: list[LeftAlone] = []
    sites: list[tuple[str, nn.Module, list[str], fx.Graph | None]] = []
    for path, module in model.named_modules():
        if isinstance(module, _SILENT):
            continue
        kind = next((entry for entry in _NOT_PROJECTIONS if isinstance(module, entry[0])), None)
        if kind is not None:
            weights = [(n, p) for n, p in module.named_parameters(recurse=False) if p.dim() >= 2]
            left += [
                LeftAlone(_join(path, n.removesuffix("weight")), kind[1], tuple(p.shape), kind[2])
                for n, p in weights[:1]
            ]
            continue
        if parametrize.is_parametrized(module):
            left += [
                LeftAlone(_join(path, name), "parametrized", (), "the weight is computed by a parametrization")
                for name in module.parametrizations
            ]
            continue
        for name, parameter in module.named_parameters(recurse=False):
            reason = unfit(parameter) or _computed(module, name)
            if parameter.dim() >= 2 and reason:
                left.append(LeftAlone(_unit_name(path, name), "", tuple(parameter.shape), reason))
        if not isinstance(module, _CONTAINERS):
            own = [n for n, p in _own_parameters(module) if p.dim() >= 2 and not unfit(p) and not _computed(module, n)]
            sites.append((path, module, own, trace_site(module) if own else None))
    handed = {id(module.get_parameter(n)) for _, module, own, graph in sites for n in _handed(own, graph)}
    for path, module, own, graph in sites:
        findings += _look_at(path, module, own, graph, handed)
    return findings, left


def _handed(own: Sequence[str], graph: fx.Graph | None) -> set[str]:
    """Weights among ``own`` that a traced forward with products does not read: if at all, it gets them as arguments."""
    if graph is None or not any(
        n.op in ("call_function", "call_method") and is_projection(n.target) for n in graph.nodes
    ):
        return set()
    return set(own) - {str(node.target) for node in graph.nodes if node.op == "get_attr"}


def _computed(module: nn.Module, parameter: str) -> str:
    """Whether a hook computes the weight from ``parameter`` (pruning, weight and spectral norm), as a reason."""
    weight = parameter.rpartition("_")[0]
    return f"{weight} is computed from it before each forward" if isinstance(vars(module).get(weight), Tensor) else ""


def _look_at(
    path: str, module: nn.Module, own: Sequence[str], graph: fx.Graph | None, handed: set[int]
) -> list[Finding]:
    reached = children_weights_in_code(module, handed)
    passes_on = any(id(module.get_parameter(weight)) in handed for weight in reached)
    if graph is not None and not passes_on:
        return list(_findings_in(path, module, graph))
    return [Finding(path, weight, "") for weight in (*own, *(w for w in reached if w not in own))]


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that ``module`` holds itself, or in a list or mapping of parameters, with their paths."""
    yield from module.named_parameters(recurse=False)
    for name, child in module.named_children():
        if isinstance(child, _CONTAINERS):
            yield from child.named_parameters(prefix=name, recurse=False)


def _findings_in(path: str, module: nn.Module, graph: fx.Graph) -> Iterator[Finding]:
    for _, call in graph_calls(module, graph):
        assert isinstance(call, Call)
        yield Finding(path, weight_of(call.weight), operator_name_of(call), graph)


# Findings to units ---------------------------------------------------------------------------------------------------


def _merge_captured(plan: Plan, findings: list[Finding]) -> tuple[list[Finding], list[LeftAlone]]:
    """Let the captured graph confirm, drop and add findings."""
    if plan.graph is None:
        return findings, []
    paths = weight_paths(plan.model)
    operators = {(call.site, call.weight): call.operator for call in plan.calls if not call.reason}
    confirmed: list[Finding] = []
    left = [
        LeftAlone(call.weight.removesuffix(".weight"), call.operator, (), call.reason)
        for call in plan.calls
        if call.reason
    ]
    for finding in findings:
        weight = plan.model.get_submodule(finding.site).get_parameter(finding.weight)
        operator = operators.pop((finding.site, paths[id(weight)]), None)
        if operator is not None or finding.traced is not None:
            confirmed.append(replace(finding, operator=operator or finding.operator))
        elif any(finding.weight == own for own, _ in _own_parameters(plan.model.get_submodule(finding.site))):
            name = _join(finding.site, finding.weight).removesuffix(".weight")
            left.append(LeftAlone(name, "", tuple(weight.shape), "no projection reads it in the captured forward"))
    for (site, weight_path), operator in operators.items():
        below = weight_path.removeprefix(f"{site}.") if site else weight_path
        if site and below == weight_path and not weight_path.startswith(f"{site}."):
            left.append(LeftAlone(weight_path, operator, (), f"read by {site!r}, which does not hold it"))
        else:
            confirmed.append(Finding(site, below, operator))
    return confirmed, left


def _units(plan: Plan, findings: list[Finding]) -> list[UnitSpec]:
    """One unit per parameter, in the order the model runs them where that is known, else in module order."""
    by_weight: dict[int, list[Finding]] = {}
    for finding in findings:
        weight = plan.model.get_submodule(finding.site).get_parameter(finding.weight)
        by_weight.setdefault(id(weight), []).append(finding)
    first_path = weight_paths(plan.model)
    order: dict[str, int] = {}
    examples: dict[str, tuple[int, ...]] = {}
    for call in plan.calls:
        order.setdefault(call.weight, len(order))
        if call.input is not None:
            examples.setdefault(call.weight, call.shape)
    units = []
    for key, group in by_weight.items():
        holder = next((f for f in group if "." not in f.weight), group[0])
        owner, _, parameter = _join(holder.site, holder.weight).rpartition(".")
        weight = plan.model.get_submodule(holder.site).get_parameter(holder.weight)
        unit = UnitSpec(
            name=_unit_name(owner, parameter),
            operator="/".join(dict.fromkeys(f.operator for f in group if f.operator)),
            owner=owner,
            parameter=parameter,
            shape=tuple(weight.shape),
            sites=tuple((f.site, f.weight) for f in group),
            example_shape=examples.get(first_path[key]),
        )
        units.append((order.get(first_path[key], len(order)), unit))
    return [unit for _, unit in sorted(units, key=lambda pair: pair[0])]


def _select(plan: Plan, units: list[UnitSpec]) -> tuple[list[UnitSpec], list[LeftAlone]]:
    include, exclude = plan.selection.include, plan.selection.exclude
    for option, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns or ():
            if not any(matches(unit.name, pattern) for unit in units):
                known = ", ".join(unit.name for unit in units[:5])
                raise PatternError(
                    f"expected every {option} pattern to match a recoverable operator, found none for {pattern!r}; "
                    f"patterns are globs on module paths such as '*.q_proj' or 'model.layers.0.*'; found are {known}"
                    f"{', ...' if len(units) > 5 else ''}"
                )
    is_head = _head_test(plan.model)
    kept, left = [], []
    for unit in units:
        if include is not None and not any(matches(unit.name, p) for p in include):
            reason = "not in include"
        elif any(matches(unit.name, p) for p in exclude or ()):
            reason = "in exclude"
        elif include is None and is_head(unit):
            reason = OUTPUT_HEAD
        else:
            reason = ""
        if reason:
            left.append(LeftAlone(unit.name, unit.operator, unit.shape, reason))
        else:
            kept.append(unit)
    return kept, left


def matches(name: str, pattern: str) -> bool:
    """Whether a glob matches a module path, or the path of a module that contains it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(len(parts), 0, -1))


def _head_test(model: nn.Module) -> Callable[[UnitSpec], bool]:
    """Tells an output head by its name, or as the module that a Hugging Face model names as its output embeddings."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    paths = {path for path, module in model.named_modules() if head is not None and module is head}

    def is_head(unit: UnitSpec) -> bool:
        return unit.owner in paths or any(site in paths for site, _ in unit.sites) or _is_head_name(unit.owner)

    return is_head


def _is_head_name(path: str) -> bool:
    parts = path.split(".")
    return parts[-1] in HEAD_NAMES and not any(part.isdigit() for part in parts)


def _nothing_found(plan: Plan, left: list[LeftAlone]) -> str:
    if left:
        found = ", ".join(f"{item.name} ({item.reason})" for item in left[:5])
        return (
            f"expected at least one operator to guard, found only operators that are left alone: {found}; "
            "an output head is guarded if include=[...] names it"
        )
    return (
        f"expected a model with projections (linear, matmul, addmm, einsum, grouped GEMM against a parameter), found "
        f"none in {type(plan.model).__name__}; if it has one, pass example_inputs so that its forward can be captured"
    )


def _join(path: str, name: str) -> str:
    return ".".join(part for part in (path, name) if part)


def _unit_name(owner: str, parameter: str) -> str:
    return owner if parameter == "weight" and owner else _join(owner, parameter)
