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
_read: set[str] = set()
"""What Dynamo's class of tensors has from here."""


def _dynamos_list() -> set[Any]:
    from torch._dynamo.variables.torch import get_overridable_functions  # only here: it is slow to import

    return get_overridable_functions()


def _dynamos_tensor() -> Any:
    from torch._dynamo.variables.tensor import TensorVariable  # only here: it is slow to import

    return TensorVariable


def _reader(attribute: str) -> Callable[[Any, Any], Any]:
    """What Dynamo calls, by the name ``method_attr_<attribute>``, where a tensor's attribute is read."""
    getter = getattr(Tensor, attribute).__get__

    def read(tensor: Any, tx: Any) -> Any:
        from torch._dynamo.variables.base import VariableTracker
        from torch._dynamo.variables.torch_function import can_dispatch_torch_function, dispatch_torch_function

        if not can_dispatch_torch_function(tx, (tensor,), {}):
            return None  # no mode is active: Dynamo's own way
        return dispatch_torch_function(tx, VariableTracker.build(tx, getter), (tensor,), {})

    return read


_READERS = {f"method_attr_{attribute}": _reader(attribute) for attribute in ATTRIBUTES}


def show() -> None:
    """Have Dynamo show grouped GEMMs and reads of :data:`ATTRIBUTES` to function modes."""
    hidden = GROUPED - _dynamos_list()
    _dynamos_list().update(hidden)
    _listed.update(hidden)
    for name, reader in _READERS.items():
        if not hasattr(_dynamos_tensor(), name):
            setattr(_dynamos_tensor(), name, reader)
            _read.add(name)


def hide() -> None:
    """Undo :func:`show`."""
    if _listed:
        _dynamos_list().difference_update(_listed)
        _listed.clear()
    while _read:
        delattr(_dynamos_tensor(), _read.pop())
