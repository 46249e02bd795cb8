"""How a tensor lies in memory: what is stored is its memory, in order, whatever view of it was asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gnmr_fx.recipe import Format


def hint(size: Any) -> int:
    """A size as a number: for a symbolic one, the value it was first seen with."""
    if isinstance(size, int):
        return size
    found = size.node.hint
    return int(found) if found is not None else 0


@dataclass(frozen=True)
class Physical:
    """A tensor as it lies in memory.

    Attributes:
        expanded: dimensions that repeat one slice.
        order: its dimensions from the outermost in memory to the innermost.
        rows: how many of the first of these stay; the others are merged into one, of static size.
    """

    expanded: tuple[int, ...]
    order: tuple[int, ...]
    rows: int

    @classmethod
    def of(cls, value: Tensor, fmt: Format) -> Physical:
        """How to store ``value``: small inner dimensions are merged, or each row of them had scales of its own."""
        sizes, strides = [hint(n) for n in value.shape], [hint(n) for n in value.stride()]
        expanded = tuple(d for d in range(value.dim()) if strides[d] == 0 and sizes[d] != 1)
        order = tuple(sorted(range(value.dim()), key=lambda d: (d not in expanded and sizes[d] != 1, -strides[d])))
        rows = max(len(order) - 1, 0)
        width = sizes[order[-1]] if order else 1
        while fmt.granularity == "group" and rows and width < fmt.group_size:
            outer, inner = order[rows - 1], order[rows]
            static = all(isinstance(value.shape[d], int) for d in order[rows - 1 :])
            if not static or outer in expanded or strides[outer] != strides[inner] * sizes[inner]:
                break
            rows, width = rows - 1, width * sizes[outer]
        return cls(expanded, order, rows)

    @property
    def is_permuted(self) -> bool:
        """Whether the dimensions lie in another order in memory."""
        return self.order != tuple(range(len(self.order)))

    @property
    def inverse(self) -> list[int]:
        """The permutation that undoes ``order``."""
        return sorted(range(len(self.order)), key=self.order.__getitem__)

    def block(self, x: Tensor) -> Tensor:
        """The memory of ``x`` [..., width], what is stored; a view of it where it has no gaps."""
        for dim in self.expanded:
            x = x.narrow(dim, 0, 1)
        x = x.permute(self.order)
        return x.reshape(*x.shape[: self.rows], math.prod(x.shape[self.rows :]))

    def view(self, block: Tensor, size: tuple[int, ...]) -> Tensor:
        """The inverse of :meth:`block`: a tensor of shape ``size`` on the memory of a contiguous ``block``."""
        narrow = [1 if dim in self.expanded else n for dim, n in enumerate(size)]
        placed = block.view([narrow[dim] for dim in self.order]).permute(self.inverse)
        return placed.expand(size) if self.expanded else placed
