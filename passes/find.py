"""Pass ``find``: the recoverable operators, and the operators that are left alone with the reason.

Every module that holds a weight, or whose code reaches for a child's weight, is looked at on its own. Its forward is
traced with FX where that is sound (:func:`trace_site`); elsewhere its weights are candidates, and which of them a
projection reads is known from the captured graph, or is seen at run time.

Invariants: every projection call in the captured graph ends up in ``Plan.units`` or in ``Plan.left_alone``; so does
every weight of two or more dimensions that a module's own code may multiply with; one parameter is one unit.
"""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from gnmr_fx.errors import LazyParameterError, NoRecoverableOperatorError, PatternError
from gnmr_fx.passes.capture import VIEWS, operator_name
from gnmr_fx.passes.plan import Finding, Plan, weight_paths
from gnmr_fx.projections import UNKNOWN, Call, match
from gnmr_fx.units import LeftAlone, UnitSpec

HEAD_NAMES = frozenset({
    "lm_head", "head", "output_head", "output_projection", "embed_out", "unembed", "classifier", "score", "qa_outputs",
})  # fmt: skip
"""Last path components taken for an output head, outside of numbered layers."""

_NOT_PROJECTIONS: tuple[tuple[type | tuple[type, ...], str, str], ...] = (
    (torch.nn.modules.conv._ConvNd, "convolution", "a convolution is not a projection"),
    (nn.RNNBase, "rnn", "recurrent layers run as one fused kernel"),
    (nn.RNNCellBase, "rnn cell", "recurrent cells run as one fused kernel"),
    (nn.Bilinear, "bilinear", "two activations are multiplied by one weight"),
    (torch.jit.ScriptModule, "scripted", "a scripted module's forward cannot be replaced"),
)
_SILENT = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, parametrize.ParametrizationList)
"""Modules whose weights are not multiplied with at all."""

_PRODUCTS = frozenset({
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "grouped_mm", "_grouped_mm",
    "multi_head_attention_forward",
})  # fmt: skip


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
    units = _units(plan, findings)
    units, chosen_out = _select(plan, units)
    left_alone = [*chosen_out, *left, *more_left]
    if not units:
        raise NoRecoverableOperatorError(_nothing_found(plan, left_alone))
    names = {unit.name for unit in units}
    left_alone = [item for item in left_alone if item.name not in names]
    return replace(plan, findings=tuple(findings), units=tuple(units), left_alone=tuple(dict.fromkeys(left_alone)))


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
            reason = _unfit(parameter) or _computed(module, name)
            if parameter.dim() >= 2 and reason:
                left.append(LeftAlone(_unit_name(path, name), "", tuple(parameter.shape), reason))
        findings += _look_at(path, module)
    return findings, left


def _unfit(parameter: Tensor) -> str:
    if not parameter.is_floating_point():
        return f"the weight is stored as {str(parameter.dtype).removeprefix('torch.')}, not as floating point"
    plain = type(parameter) is nn.Parameter and type(parameter.data) is Tensor
    from torch.distributed.tensor import DTensor  # only here: it is slow to import

    if not plain and not isinstance(parameter.data, DTensor):
        return f"the weight is a {type(parameter.data).__name__}, a tensor subclass this recipe does not know"
    return ""


def _computed(module: nn.Module, parameter: str) -> str:
    """Whether a hook computes the weight from ``parameter`` (pruning, weight and spectral norm), as a reason."""
    weight = parameter.rpartition("_")[0]
    return f"{weight} is computed from it before each forward" if isinstance(vars(module).get(weight), Tensor) else ""


def _look_at(path: str, module: nn.Module) -> list[Finding]:
    own = [
        name
        for name, p in module.named_parameters(recurse=False)
        if p.dim() >= 2 and not _unfit(p) and not _computed(module, name)
    ]
    if own:
        graph = trace_site(module)
        if graph is not None:
            return list(_findings_in(path, module, graph))
    reached = [*own, *(w for w in children_weights_in_code(module) if w not in own)]
    return [Finding(path, weight, "") for weight in reached]


def _findings_in(path: str, module: nn.Module, graph: fx.Graph) -> Iterator[Finding]:
    for _, call in graph_calls(module, graph):
        assert isinstance(call, Call)
        yield Finding(path, weight_of(call.weight), operator_name_of(call), graph)


def operator_name_of(call: Call) -> str:
    """The table's name of a call found in a traced graph."""
    return operator_name(call.weight.meta["read_by"])


def graph_calls(module: nn.Module, graph: fx.Graph) -> Iterator[tuple[fx.Node, Call | str]]:
    """The projections against a weight in the traced graph of ``module``; a reason where one is not covered."""
    weights: set[fx.Node] = set()
    dims: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            value = _attribute(module, str(node.target))
            if isinstance(value, nn.Parameter) and value.dim() >= 2:
                weights.add(node)
                dims[node] = value.dim()
            continue
        if node.op not in ("call_function", "call_method"):
            continue
        call = match(
            node.target,
            node.args,
            node.kwargs,
            lambda v: isinstance(v, fx.Node) and v in weights,
            lambda v: dims.get(v, UNKNOWN),
        )
        if call is not None:
            if isinstance(call, Call):
                call.weight.meta["read_by"] = node.target
            yield node, call
        elif operator_name(node.target) in VIEWS and node.args and node.args[0] in weights:
            weights.add(node)
            node.meta["weight"] = node.args[0]


def weight_of(node: fx.Node) -> str:
    """Path of the weight that ``node`` is, or is a view of."""
    while node.op != "get_attr":
        node = node.meta["weight"]
    return str(node.target)


# Tracing one module's forward ----------------------------------------------------------------------------------------


class _SiteTracer(fx.Tracer):
    """Children stay calls: their hooks and their own forwards are theirs."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def trace_site(module: nn.Module) -> fx.Graph | None:
    """The graph of the module's own forward, or None where a trace could bake in a choice.

    A trace is sound where the forward is straight-line code that takes its inputs by position, reads nothing of
    ``self`` but parameters, buffers and submodules, and calls nothing of its own but functions of torch. Anything else
    (a branch, a loop, ``self.training``, an optional argument, a helper function) may take another way on another
    call, so it is not traced.
    """
    if "forward" in module.__dict__ or not _is_straight_line(module):
        return None
    try:
        graph = _SiteTracer().trace(module)
    except Exception:  # FX gives up on what it cannot trace in many ways; the site is covered by interception
        return None
    if any(isinstance(call, str) for _, call in graph_calls(module, graph)):
        return None  # covered only once the operands' shapes are known
    _restore_optional_bias(module, graph)
    graph.lint()
    return graph


def _restore_optional_bias(module: nn.Module, graph: fx.Graph) -> None:
    """A bias registered as None was traced as the constant None: read it from the module again."""
    import torch.nn.functional as F

    if "bias" not in module._parameters or module._parameters["bias"] is not None:
        return
    for node in list(graph.nodes):
        if node.target is F.linear and len(node.args) == 3 and node.args[2] is None:
            with graph.inserting_before(node):
                node.update_arg(2, graph.create_node("get_attr", "bias"))


def _is_straight_line(module: nn.Module) -> bool:
    forward = type(module).forward
    if not isinstance(forward, types.FunctionType):
        return False
    code = forward.__code__
    flags = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE
    if code.co_flags & flags or code.co_kwonlyargcount or forward.__defaults__ or forward.__closure__:
        return False
    if code.co_exceptiontable or code.co_argcount < 2:
        return False
    own_name = code.co_varnames[0]
    instructions = [
        i for i in dis.get_instructions(forward) if i.opname not in ("CACHE", "RESUME", "NOP", "PUSH_NULL", "PRECALL")
    ]
    if any(
        i.opcode in _JUMPS or i.opname in ("MAKE_FUNCTION", "STORE_ATTR", "STORE_GLOBAL", "IMPORT_NAME")
        for i in instructions
    ):
        return False
    if any(i.opname == "LOAD_GLOBAL" and not _is_torch(forward.__globals__.get(str(i.argval))) for i in instructions):
        return False
    followers = zip(instructions, [*instructions[1:], None], strict=True)
    for this, after in followers:
        loads_self = this.opname.startswith("LOAD_FAST") and _names(this)[-1:] == (own_name,)
        if own_name in _names(this) and not loads_self:
            return False
        if loads_self and not (after is not None and _reads_tensor_or_module(module, after)):
            return False
    return True


_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)


def _names(instruction: dis.Instruction) -> tuple[str, ...]:
    value = instruction.argval
    if not instruction.opname.startswith(("LOAD_FAST", "STORE_FAST", "DELETE_FAST")):
        return ()
    return value if isinstance(value, tuple) else (str(value),)


def _is_torch(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] == "torch"
    return (
        callable(value) and str(getattr(value, "__module__", "")).partition(".")[0] in ("torch", "_operator")
    ) or value is torch.einsum


def _reads_tensor_or_module(module: nn.Module, instruction: dis.Instruction) -> bool:
    if instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
        return False
    name = str(instruction.argval)
    return name in module._parameters or name in module._buffers or name in module._modules


def children_weights_in_code(module: nn.Module) -> list[str]:
    """Weights of descendants that the module's own code reads directly, such as ``self.dt_proj.weight``.

    Found in the bytecode of ``forward`` and of the methods it calls on ``self``, where that code multiplies at all.
    """
    found: list[str] = []
    multiplies = False
    for code in _own_code(module):
        instructions = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "NOP")]
        multiplies |= bool(_PRODUCTS & set(code.co_names)) or any(
            i.opname == "BINARY_OP" and i.argrepr == "@" for i in instructions
        )
        own_name = code.co_varnames[0] if code.co_varnames else ""
        for index, instruction in enumerate(instructions):
            if _names(instruction)[-1:] == (own_name,):
                path = _attribute_chain(module, instructions[index + 1 :])
                if path is not None and path not in found:
                    found.append(path)
    return found if multiplies else []


def _attribute_chain(module: nn.Module, instructions: Sequence[dis.Instruction]) -> str | None:
    value: Any = module
    names: list[str] = []
    for at, instruction in enumerate(instructions):
        if instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD") or not isinstance(value, nn.Module):
            break
        names.append(str(instruction.argval))
        value = getattr(value, names[-1], None)
        if isinstance(value, nn.Parameter):
            after = instructions[at + 1] if at + 1 < len(instructions) else None
            reads_metadata = (
                after is not None and after.opname == "LOAD_ATTR" and after.argval in ("dtype", "device", "shape")
            )
            fit = len(names) > 1 and value.dim() >= 2 and not _unfit(value) and not reads_metadata
            return ".".join(names) if fit else None
    return None


def _own_code(module: nn.Module) -> Iterator[types.CodeType]:
    todo: list[Any] = [type(module).forward]
    seen: set[types.CodeType] = set()
    while todo:
        function = inspect.unwrap(todo.pop())
        code = getattr(function, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        yield code
        todo += [
            m
            for name in code.co_names
            if isinstance(m := inspect.getattr_static(type(module), name, None), types.FunctionType)
        ]


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


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
        elif "." not in finding.weight:
            name = _unit_name(finding.site, finding.weight)
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
    heads = _output_heads(plan.model) if include is None else frozenset()
    kept, left = [], []
    for unit in units:
        if include is not None and not any(matches(unit.name, p) for p in include):
            reason = "not in include"
        elif any(matches(unit.name, p) for p in exclude or ()):
            reason = "in exclude"
        elif unit.owner in heads or any(site in heads for site, _ in unit.sites) or _is_head_name(unit.owner):
            reason = "output head (left alone unless include names it)" if include is None else ""
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


def _output_heads(model: nn.Module) -> frozenset[str]:
    """Paths of the module that a Hugging Face model names as its output embeddings."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    return frozenset(path for path, module in model.named_modules() if head is not None and module is head)


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
