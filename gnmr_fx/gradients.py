"""Hooks on gradients and optimizers, and what is read of them: norms and the loss scale."""

from __future__ import annotations

import collections
import sys
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils.weak import TensorWeakRef

_MAX_FRAMES_TO_SCALER = 16
NO_BACKWARD = -1
"""Autograd's id of the backward under way, where there is none."""
_HOOKS_PER_WEIGHT = 2
"""FSDP2 has two parameters for one weight, its shard and the whole: gradients may arrive at either."""


class Listener(Protocol):
    """What hooks report to."""

    def gradient_arrived(self, index: int, weight: Tensor) -> None:
        """The gradient of unit ``index`` was accumulated in ``weight.grad``."""

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Some optimizer is about to make a step."""

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Some optimizer has made a step."""


class GradientHook:
    """Notes that a weight's gradient was accumulated. Holds the controller weakly: hooks live as long as weights do."""

    __slots__ = ("controller", "index")

    def __init__(self, controller: weakref.ref[Listener], index: int) -> None:
        self.controller, self.index = controller, index

    def __call__(self, weight: Tensor) -> None:
        controller = self.controller()
        if controller is not None:
            controller.gradient_arrived(self.index, weight)


class OptimizerHook:
    """Notes the steps of every optimizer in the process, before or after them. Holds the controller weakly."""

    __slots__ = ("before", "controller")

    def __init__(self, controller: weakref.ref[Listener], before: bool) -> None:
        self.controller, self.before = controller, before

    @_disable_dynamo  # a compiled optimizer step breaks its graph here: what is heard is for the run, not for the trace
    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        controller = self.controller()
        if controller is not None:
            (controller.optimizer_steps if self.before else controller.optimizer_stepped)(optimizer)


class HookedWeight(NamedTuple):
    """A weight with a hook on it: the weight, its ``id``, the unit it belongs to, and the hook's handle."""

    weight: TensorWeakRef
    key: int
    unit: int
    handle: Any


class WeightHooks:
    """The hooks on what one model's units listen to: their weights, or their adapters' parameters, at most two hooks
    for each of those. Keeps none of them alive."""

    def __init__(self, num_units: int) -> None:
        self._of_unit: list[collections.deque[HookedWeight]] = [collections.deque() for _ in range(num_units)]
        self._by_id: dict[int, list[HookedWeight]] = {}
        self.version = 0

    def latest(self, index: int) -> Tensor | None:
        """The weight that was hooked last for unit ``index``; None if there is none, or no longer."""
        of_unit = self._of_unit[index]
        return of_unit[-1].weight() if of_unit else None

    def covers(self, index: int, weight: Tensor) -> bool:
        """Whether ``weight`` carries the hook of unit ``index``."""
        return any(hooked.weight() is weight for hooked in self._of_unit[index])

    def attach(self, index: int, weight: Tensor, controller: weakref.ref[Listener], weights: int = 1) -> None:
        """Hook ``weight`` for unit ``index``, which listens to so many weights; the oldest of its hooks goes if there
        are two for each already."""
        handle = weight.register_post_accumulate_grad_hook(GradientHook(controller, index))
        hooked = HookedWeight(TensorWeakRef(weight), id(weight), index, handle)
        self._of_unit[index].append(hooked)
        self._by_id.setdefault(hooked.key, []).append(hooked)
        self.version += 1
        if len(self._of_unit[index]) > _HOOKS_PER_WEIGHT * weights:
            self._remove(self._of_unit[index].popleft())

    def units_of(self, parameter: Tensor) -> list[int]:
        """The units that listen to ``parameter``."""
        return [hooked.unit for hooked in self._by_id.get(id(parameter), ()) if hooked.weight() is parameter]

    def weights(self) -> Iterator[Tensor]:
        """All hooked weights that are alive, unit by unit."""
        for of_unit in self._of_unit:
            for hooked in of_unit:
                weight = hooked.weight()
                if weight is not None:
                    yield weight

    def remove(self) -> None:
        """Take all hooks off."""
        for of_unit in self._of_unit:
            while of_unit:
                self._remove(of_unit.pop())

    def _remove(self, gone: HookedWeight) -> None:
        left = [hooked for hooked in self._by_id.pop(gone.key, ()) if hooked is not gone]
        if left:
            self._by_id[gone.key] = left
        weight = gone.weight()
        if weight is not None:
            gone.handle.remove()
            if not weight._post_accumulate_grad_hooks:
                weight._post_accumulate_grad_hooks = None  # not the empty dict that is left


def in_backward() -> bool:
    """Whether this runs inside a backward: a hook, or a forward that is recomputed there."""
    return torch._C._current_graph_task_id() != NO_BACKWARD


def gradient_norms(gradients: list[Tensor]) -> Sequence[Tensor]:
    """L2 norms, in at least fp32, of tensors of one device and dtype; 0-dim on that device, in one fused call."""
    narrow = gradients[0].dtype.itemsize < torch.float32.itemsize
    with torch.no_grad():
        norms: Sequence[Tensor] = torch._foreach_norm(gradients, 2, torch.float32 if narrow else None)
        return norms


def active_grad_scale() -> float:
    """The loss scale of the ``torch.amp.GradScaler`` whose ``step`` is on the call stack; 1.0 where there is none.

    A scaler does not make itself known to the optimizer it drives, and norms are taken before it unscales; the stack is
    the one place where the two meet.
    """
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES_TO_SCALER):
        if frame is None:
            break
        if frame.f_code.co_name == "step":  # to read a frame's locals copies them all
            owner = frame.f_locals.get("self")
            if isinstance(owner, torch.amp.GradScaler):
                return float(owner.get_scale())
        frame = frame.f_back
    return 1.0
