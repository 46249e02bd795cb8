"""What Dynamo shows to function modes, as far as interception needs it: what eager mode shows them.

Dynamo keeps two things from a :class:`~torch.overrides.TorchFunctionMode` that eager mode hands to it:

* Grouped GEMMs. Dynamo shows what ``torch.overrides`` lists as overridable, and nothing that these call; that list has
  neither ``F.grouped_mm`` nor ``torch._grouped_mm``.
* Views that are read as attributes (``x @ weight.T``). The mode meets a product with a tensor that it has never seen.

Either way the product would run unguarded. Dynamo's list and its class of tensors are one each for the whole process,
so they are changed only while a model is instrumented whose forwards are intercepted; for modes of others that makes
compiled code what eager code is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gnmr_fx.projections import GROUPED

ATTRIBUTES = ("T", "mT")
"""Views that are attributes."""

_listed: set[Any] = set()
"""What Dynamo's list has from here."""
_replaced: dict[str, Any] = {}
"""Methods of Dynamo's class of tensors that are from here, each with what was there before; None where nothing was."""


def _dynamos_list() -> set[Any]:
    from torch._dynamo.variables.torch import get_overridable_functions  # only here: it is slow to import

    return get_overridable_functions()


def _dynamos_tensor() -> Any:
    from torch._dynamo.variables.tensor import TensorVariable  # only here: it is slow to import

    return TensorVariable


def _reader(attribute: str, before: Callable[[Any, Any], Any] | None) -> Callable[[Any, Any], Any]:
    """What Dynamo calls, by the name ``method_attr_<attribute>``, where a tensor's attribute is read.

    Args:
        attribute: its name.
        before: what it has called so far (from torch 2.14 on, it has methods of its own for these).
    """
    getter = getattr(Tensor, attribute).__get__

    def read(tensor: Any, tx: Any) -> Any:
        from torch._dynamo.variables.base import VariableTracker
        from torch._dynamo.variables.torch_function import can_dispatch_torch_function, dispatch_torch_function

        if can_dispatch_torch_function(tx, (tensor,), {}):
            return dispatch_torch_function(tx, VariableTracker.build(tx, getter), (tensor,), {})
        return None if before is None else before(tensor, tx)  # no mode is active: Dynamo's own way

    return read


def show() -> None:
    """Have Dynamo show grouped GEMMs and reads of :data:`ATTRIBUTES` to function modes."""
    hidden = GROUPED - _dynamos_list()
    _dynamos_list().update(hidden)
    _listed.update(hidden)
    dynamos = _dynamos_tensor()
    for attribute in ATTRIBUTES:
        name = f"method_attr_{attribute}"
        if name not in _replaced:
            _replaced[name] = vars(dynamos).get(name)
            setattr(dynamos, name, _reader(attribute, getattr(dynamos, name, None)))


def hide() -> None:
    """Undo :func:`show`."""
    if _listed:
        _dynamos_list().difference_update(_listed)
        _listed.clear()
    while _replaced:
        name, before = _replaced.popitem()
        if before is None:
            delattr(_dynamos_tensor(), name)
        else:
            setattr(_dynamos_tensor(), name, before)
