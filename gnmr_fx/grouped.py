"""Grouped GEMMs, shown to function modes by Dynamo as they are in eager mode.

In eager mode a function mode sees ``F.grouped_mm`` as the operator that it calls. Dynamo shows to modes what
``torch.overrides`` lists as overridable, and nothing that these call: that list has neither ``F.grouped_mm`` nor
``torch._grouped_mm``, so both go into the graph unseen, and expert weights would run unguarded. Dynamo's copy of the
list is one for the whole process. It has the two while models with expert weights are instrumented; for modes of others
that makes compiled code what eager code is.
"""

from __future__ import annotations

from typing import Any

from gnmr_fx.projections import GROUPED

_shown: set[Any] = set()
"""What Dynamo's list has from here."""


def _dynamos_list() -> set[Any]:
    from torch._dynamo.variables.torch import get_overridable_functions  # only here: it is slow to import

    return get_overridable_functions()


def show() -> None:
    """Have Dynamo show grouped GEMMs to function modes."""
    hidden = GROUPED - _dynamos_list()
    _dynamos_list().update(hidden)
    _shown.update(hidden)


def hide() -> None:
    """Undo :func:`show`."""
    if _shown:
        _dynamos_list().difference_update(_shown)
        _shown.clear()
