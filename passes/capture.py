"""Pass ``capture``: the whole model as one FX graph, where inputs to trace it with are known.

Dynamo traces the model on fake tensors: no kernel runs, no module state changes, nothing is added to Dynamo's caches.
The graph tells which units read the same tensor, the order they run in, and the shapes. Nothing else depends on it: a
model that cannot be captured is instrumented all the same, and ``Plan.capture_note`` says why it was not.

Invariant: the model is unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from gnmr_fx import views
from gnmr_fx.passes.plan import CapturedCall, Plan, weight_paths
from gnmr_fx.projections import Call, match

log = logging.getLogger(__name__)

VIEWS = views.VIEWS | views.SPLITS | {"getitem"}
"""Names of operations whose result is still the weight."""


def capture(plan: Plan) -> Plan:
    """Trace ``plan.model`` with its example inputs, or with inputs made from its Hugging Face configuration."""
    inputs = plan.example_inputs
    if inputs is None:
        inputs = inputs_from_config(plan.model)
    if inputs is None:
        return replace(plan, capture_note="no example inputs, and no Hugging Face configuration to make them from")
    args, kwargs = split_inputs(inputs)
    try:
        graph, weights = capture_graph(plan.model, args, kwargs)
        calls = tuple(replace(call, site=canonical_path(plan.model, call.site)) for call in find_calls(graph, weights))
    except Exception as error:  # any failure inside a third party's forward: reported, and only the dataflow is lost
        log.debug("capture failed", exc_info=True)
        if plan.example_inputs is not None:
            log.warning("gnmr-fx could not capture the model with the given example_inputs: %s", _first_line(error))
        return replace(plan, capture_note=f"{type(error).__name__}: {_first_line(error)}")
    return replace(plan, graph=graph, calls=calls)


def canonical_path(model: nn.Module, path: str) -> str:
    """The first path of the module at ``path``: one that is registered in several places is called by any of them."""
    module = model.get_submodule(path)
    return next(name for name, other in model.named_modules() if other is module)


def split_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as (args, kwargs): a mapping is keyword, a tuple or list positional arguments, else it is one."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


def inputs_from_config(model: nn.Module) -> dict[str, Tensor] | None:
    """Small inputs for a Hugging Face model, from its configuration: token ids, or images.

    Returns:
        None where the model has no such configuration.
    """
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", None)
    if config is None or main is None:
        base = getattr(model, "get_base_model", None)  # PEFT
        return inputs_from_config(base()) if callable(base) else None
    parameter = next(model.parameters(), None)
    device = parameter.device if parameter is not None else torch.device("cpu")
    if main == "input_ids":
        ids = torch.zeros((2, 16), dtype=torch.long, device=device)
        if getattr(config, "is_encoder_decoder", False):
            return {"input_ids": ids, "decoder_input_ids": ids.clone()}
        return {"input_ids": ids}
    if main == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        size, channels = config.image_size, getattr(config, "num_channels", 3)
        dtype = parameter.dtype if parameter is not None else torch.float32
        return {"pixel_values": torch.zeros((2, channels, size, size), dtype=dtype, device=device)}
    return None


def capture_graph(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[fx.Graph, dict[str, str]]:
    """The graph of ``model(*args, **kwargs)`` with autograd on, and ``placeholder name -> weight path``.

    Raises:
        Exception: whatever stops Dynamo from tracing the whole model as one graph.
    """
    from torch._dynamo.convert_frame import fullgraph_capture
    from torch._dynamo.utils import get_metrics_context

    with _undisturbed(model), get_metrics_context(), torch.enable_grad():
        captured = fullgraph_capture(model, args, kwargs).backend_input
    if captured is None:
        raise RuntimeError("the model computes nothing with tensors")
    paths = weight_paths(model)
    graph: fx.Graph = captured.graph_module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    weights = {
        node.name: paths[id(value)]
        for node, value in zip(placeholders, captured.example_inputs, strict=True)
        if id(value) in paths
    }
    return graph, weights


@contextlib.contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Run Dynamo without leaving anything in its counters or on the weights, and without its advice."""
    from torch._dynamo.utils import counters

    before = copy.deepcopy(dict(counters))
    marks = [(value, set(value.__dict__)) for value in (*model.parameters(), *model.buffers())]
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logger.setLevel(logging.ERROR)
            yield
    finally:
        logger.setLevel(level)
        counters.clear()
        counters.update(before)
        for value, names in marks:
            for name in value.__dict__.keys() - names:
                del value.__dict__[name]


def find_calls(graph: fx.Graph, weights: Mapping[str, str]) -> Iterator[CapturedCall]:
    """The projection calls of a captured graph, in the order they run."""
    source: dict[fx.Node, str] = {node: weights[node.name] for node in graph.nodes if node.name in weights}
    taken: dict[fx.Node, str] = {}  # where a view of a weight is made
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        found = match(node.target, node.args, node.kwargs, lambda v: isinstance(v, fx.Node) and v in source, _dim)
        if node.target is F.multi_head_attention_forward:  # one call, whose own projections Dynamo does not show
            read = [source[v] for v in node.all_input_nodes if v in source and _dim(v) == 2]
            yield from (CapturedCall(_site(node), weight, "linear", node) for weight in dict.fromkeys(read))
        elif isinstance(found, Call):
            shape = tuple(example(found.x).shape)
            site = _common(taken.get(found.weight), _site(node))
            yield CapturedCall(site, source[found.weight], operator_name(node.target), node, found.x, shape)
        elif isinstance(found, str):
            weight = next(source[v] for v in node.all_input_nodes if v in source)
            yield CapturedCall(_site(node), weight, operator_name(node.target), node, reason=found)
        elif name_of(node) in VIEWS and node.args and node.args[0] in source:
            source[node] = source[node.args[0]]
            taken[node] = _common(taken.get(node.args[0]), _site(node))


def _common(first: str | None, second: str) -> str:
    """The innermost module that both paths lie in; ``None`` is in any."""
    if first is None:
        return second
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first.split("."), second.split("."), strict=False))
    return ".".join(name for name, _ in pairs)


def example(node: fx.Node) -> Tensor:
    """The fake tensor that ``node`` makes."""
    value = node.meta.get("example_value", node.meta.get("val"))
    assert isinstance(value, Tensor), f"{node} has no example value"
    return value


def _dim(value: Any) -> int:
    return example(value).dim()


def name_of(node: fx.Node) -> str:
    """What a node does to its first argument: :func:`operator_name`, or the attribute that it reads (``weight.T``)."""
    return str(node.args[1]) if node.target is getattr else operator_name(node.target)


def operator_name(target: Any) -> str:
    """A short name for the table: ``linear``, ``addmm``, ``matmul``, ``grouped_mm``."""
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    name = name.removesuffix(".default").rpartition(".")[2]
    aliases = {
        "numpy_T": "T",  # how Dynamo traces a read of the attribute from torch 2.14 on
        "_grouped_mm": "grouped_mm",
        "grouped_mm_fallback": "grouped_mm",
        "__matmul__": "matmul",
        "__rmatmul__": "matmul",
    }
    return aliases.get(name, name)


def _site(node: fx.Node) -> str:
    """Path of the module whose code made the call."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = list(stack.values())[-1][0].replace(".__dict__['_modules']", "._modules")  # a child read around __getattr__
    path = re.sub(r"^L\['\w+'\](\[\d+\])?", "", path)  # the model, whatever its forward calls it
    path = re.sub(r"(?:\._modules)+\['?([^'\]]+)'?\]|\['?([^'\]]+)'?\]", lambda m: "." + (m[1] or m[2]), path)
    return path.lstrip(".")


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
