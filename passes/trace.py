"""What one module's own code does with weights: traced with FX where that is sound, else read from its bytecode."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from gnmr_fx.passes.capture import VIEWS, name_of, operator_name
from gnmr_fx.projections import UNKNOWN, Call, match

_PRODUCTS = frozenset({
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "grouped_mm", "_grouped_mm",
    "multi_head_attention_forward",
})  # fmt: skip
"""Names that multiply, in code."""


def unfit(parameter: Tensor) -> str:
    """Why a weight cannot be guarded, or ""."""
    if not parameter.is_floating_point():
        return f"the weight is stored as {str(parameter.dtype).removeprefix('torch.')}, not as floating point"
    # A fake parameter has the class FakeTensor: torch makes no nn.Parameter of a tensor subclass.
    plain = type(parameter) in (nn.Parameter, FakeTensor) and type(parameter.data) in (Tensor, FakeTensor)
    from torch.distributed.tensor import DTensor  # only here: it is slow to import

    if not plain and not isinstance(parameter.data, DTensor):
        return f"the weight is a {type(parameter.data).__name__}, a tensor subclass this recipe does not know"
    return ""


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
        elif name_of(node) in VIEWS and node.args and node.args[0] in weights:
            weights.add(node)
            node.meta["weight"] = node.args[0]


def weight_of(node: fx.Node) -> str:
    """Path of the weight that ``node`` is, or is a view of."""
    while node.op != "get_attr":
        node = node.meta["weight"]
    return str(node.target)


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


def children_weights_in_code(module: nn.Module, handed: Container[int] = ()) -> list[str]:
    """Weights of descendants that the module's own code reads directly, such as ``self.dt_proj.weight``.

    Found in the bytecode of ``forward`` and of the methods it calls on ``self``, where that code multiplies at all.

    Args:
        module: whose code is read.
        handed: ids of parameters that their own modules get as arguments: who reads these passes them on.
    """
    found: list[str] = []
    multiplies = False
    for code, takes_self in _own_code(module):
        instructions = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "NOP")]
        multiplies |= bool(_PRODUCTS & set(code.co_names)) or any(
            i.opname == "BINARY_OP" and i.argrepr == "@" for i in instructions
        )
        own_name = code.co_varnames[0] if takes_self and code.co_varnames else ""
        for index, instruction in enumerate(instructions):
            if _names(instruction)[-1:] == (own_name,):
                path = _attribute_chain(module, instructions[index + 1 :])
                if path is not None and path not in found:
                    found.append(path)
    return [path for path in found if multiplies or id(module.get_parameter(path)) in handed]


def _attribute_chain(module: nn.Module, instructions: Sequence[dis.Instruction]) -> str | None:
    value: Any = module
    names: list[str] = []
    for at, instruction in enumerate(instructions):
        if instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD") or not isinstance(value, nn.Module):
            break
        names.append(str(instruction.argval))
        holder = value
        value = getattr(value, names[-1], None)
        if isinstance(value, nn.Parameter):
            after = instructions[at + 1] if at + 1 < len(instructions) else None
            reads_metadata = (
                after is not None and after.opname == "LOAD_ATTR" and after.argval in ("dtype", "device", "shape")
            )
            fit = len(names) > 1 and value.dim() >= 2 and not unfit(value) and not reads_metadata
            fit = fit and not isinstance(holder, torch.nn.modules.conv._ConvNd)  # read to be convolved with
            return ".".join(names) if fit else None
    return None


def _own_code(module: nn.Module) -> Iterator[tuple[types.CodeType, bool]]:
    """The code of ``forward`` and of the methods that it names, and whether each takes the module first."""
    todo: list[Any] = [type(module).forward]
    seen: set[types.CodeType] = set()
    while todo:
        function = todo.pop()
        takes_self = not isinstance(function, staticmethod | classmethod)
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        yield code, takes_self
        members = (inspect.getattr_static(type(module), name, None) for name in code.co_names)
        todo += [member for member in members if isinstance(member, types.FunctionType | staticmethod | classmethod)]


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name, None)
    return value
