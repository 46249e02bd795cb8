"""Python functions whose result is still the weight that they are called on: another view, a slice, another dtype.

Passes over captured graphs know them by name, function modes by object. (What is a view of an activation is another
question, asked of aten operators in :mod:`gnmr_fx.passes.attribute` and of autograd nodes in :mod:`gnmr_fx.saved`.)
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

VIEWS = frozenset({
    "t", "transpose", "permute", "view", "reshape", "contiguous", "__getitem__", "select", "narrow", "unsqueeze",
    "squeeze", "flatten", "unflatten", "detach", "T", "mT", "swapaxes", "movedim", "expand", "index_select", "to",
    "type_as", "float", "bfloat16", "half",
})  # fmt: skip
"""Names of those that give one tensor."""
SPLITS = frozenset({"chunk", "split", "unbind"})
"""Names of those that give several."""


def functions(names: Iterable[str]) -> frozenset[Any]:
    """What a function mode is given for these names: methods, functions of torch, and the getters of properties."""
    found = [getattr(owner, name) for name in names for owner in (Tensor, torch) if hasattr(owner, name)]
    getters = [f.__get__ if isinstance(f, types.GetSetDescriptorType) else f for f in found]
    return frozenset(f for f in getters if not isinstance(f, torch.dtype))
