"""Pass ``record``: what ``capture`` learns, from one forward on fake tensors instead of Dynamo.

For a model that is looked at and not trained here, of any size: the forward runs as Python runs it, on tensors that
have shapes and no values, and every torch function that it calls becomes a node of the graph. It takes a fraction of
the time that Dynamo takes, and does not stop at what Dynamo cannot trace; a forward that reads values (data-dependent
control flow) it cannot run.

Invariant: the model is unchanged. Its parameters and buffers have to be fake tensors (:func:`gnmr_fx.predict.faked`).
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from gnmr_fx.passes.capture import find_calls, split_inputs
from gnmr_fx.passes.plan import Plan, weight_paths

log = logging.getLogger(__name__)


def record(plan: Plan) -> Plan:
    """Run ``plan.model`` on its example inputs; ``Plan.capture_note`` says why it could not be run."""
    if plan.example_inputs is None:
        return replace(plan, capture_note="no example inputs, and no Hugging Face configuration to make them from")
    args, kwargs = split_inputs(plan.example_inputs)
    recorder = Recorder(plan.model)
    noise = logging.getLogger("torch._subclasses.fake_tensor")  # says with a traceback what is said here in a line
    level = noise.level
    noise.setLevel(logging.CRITICAL)
    try:
        with recorder.in_modules(), recorder, torch.enable_grad():
            plan.model(*args, **kwargs)
    except Exception as error:  # any failure inside a third party's forward: reported, and only the dataflow is lost
        log.debug("record failed", exc_info=True)
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
        return replace(plan, capture_note=f"{type(error).__name__}: {reason}")
    finally:
        noise.setLevel(level)
    return replace(plan, graph=recorder.graph, calls=tuple(find_calls(recorder.graph, recorder.weights)))


class Recorder(TorchFunctionMode):
    """Writes the torch functions that are called inside it into a graph, as Dynamo would.

    Attributes:
        graph: of the calls so far. A node's ``meta`` has its value as ``example_value``, and the module that made the
            call as ``nn_module_stack``.
        weights: names of the placeholders that are parameters -> their paths.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.weights: dict[str, str] = {}
        self._paths = weight_paths(model)
        self._modules = {id(module): path for path, module in model.named_modules()}
        self._stack = [""]
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Any] = []  # an id is one tensor's only as long as that lives

    @contextlib.contextmanager
    def in_modules(self) -> Iterator[None]:
        """Follow which module's forward runs."""

        def enter(module: nn.Module, args: Any) -> None:
            self._stack.append(self._modules.get(id(module), self._stack[-1]))

        def leave(module: nn.Module, args: Any, out: Any) -> None:
            self._stack.pop()

        hooks = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) or (isinstance(out, tuple | list) and any(isinstance(o, Tensor) for o in out)):
            # An attribute that is a tensor, such as T, is read through its descriptor.
            read = getattr(func, "__self__", None) if getattr(func, "__name__", "") == "__get__" else None
            node = (
                self._node("call_function", func, self._mapped(args), self._mapped(kwargs), out)
                if read is None
                else self._node("call_method", read.__name__, self._mapped(args), {}, out)
            )
            if not isinstance(out, Tensor):
                for index, part in enumerate(out):
                    if isinstance(part, Tensor):
                        self._node("call_function", operator.getitem, (node, index), {}, part)
        return out

    def _node(self, kind: str, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        node = self.graph.create_node(kind, target, args, kwargs)
        node.meta["example_value"] = value
        node.meta["nn_module_stack"] = {"": (self._stack[-1], None)}
        self._nodes[id(value)] = node
        self._alive.append(value)
        return node

    def _mapped(self, value: Any) -> Any:
        return fx.node.map_aggregate(value, self._node_of)

    def _node_of(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._nodes:
            node = self._node("placeholder", f"input_{len(self._nodes)}", (), {}, value)
            if id(value) in self._paths:
                self.weights[node.name] = self._paths[id(value)]
        return self._nodes[id(value)]
