"""Hooks on gradients and optimizers, and what is read of them: norms and the loss scale."""

from __future__ import annotations

import sys
import types
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

_MAX_FRAMES_TO_SCALER = 16


class Listener(Protocol):
    """What hooks report to."""

    def gradient_arrived(self, index: int) -> None:
        """The gradient of unit ``index`` was accumulated."""

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
            controller.gradient_arrived(self.index)


class OptimizerHook:
    """Notes the steps of every optimizer in the process. Holds the controller weakly."""

    __slots__ = ("controller",)

    def __init__(self, controller: weakref.ref[Listener]) -> None:
        self.controller = controller

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        controller = self.controller()
        if controller is not None:
            controller.optimizer_stepped(optimizer)


def remove_hook(weight: Tensor | None, hook: Any) -> None:
    """Take ``hook`` off ``weight``, which is then as it was before it had any."""
    if weight is None:
        return
    hook.remove()
    if not weight._post_accumulate_grad_hooks:
        weight._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # not the empty dict that is left


def gradient_norms(gradients: list[Tensor]) -> Tensor:
    """L2 norms, in at least fp32, of tensors of one device and dtype; 1-D on that device, in one fused call."""
    narrow = gradients[0].dtype.itemsize < torch.float32.itemsize
    norms = torch.stack(torch._foreach_norm(gradients, 2, torch.float32 if narrow else None))
    gather = getattr(norms, "full_tensor", None)  # a DTensor: each rank has the norms of its own shards
    return norms if gather is None else gather()


def active_grad_scale() -> float:
    """The loss scale of the ``torch.amp.GradScaler`` whose ``step`` is on the call stack; 1.0 where there is none.

    A scaler does not make itself known to the optimizer it drives, and norms are taken before it unscales; the stack is
    the one place where the two meet.
    """
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES_TO_SCALER):
        if frame is None:
            break
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.amp.GradScaler):
            return float(owner.get_scale())
        frame = frame.f_back
    return 1.0
