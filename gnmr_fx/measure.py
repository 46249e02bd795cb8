"""The relative quantization error of what units store or multiply, measured where it is stored.

Every few steps the controller opens its :class:`Probe`; the operators that store a tensor for a unit (in eager mode and
in compiled graphs alike) then also send a sample of it through the low-cost format and back, and add what that did to
a buffer on the tensor's device. Nothing waits for the device; the controller moves the buffer to the host once, with
its next decision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnmr_fx import kernels
from gnmr_fx.recipe import Format, parse_format

SAMPLE = 1 << 14
"""Elements, or one row where that has more, that a measurement looks at: rows at equal distances, other ones each time.
The error of 128 groups of 128 is that of the tensor to about 2% where its rows are alike."""
MAX_TENSORS = 4
"""Tensors of one unit that one measurement looks at: its operands, in the first micro-batches."""


def sample(x: Tensor, fmt: Format, offset: int = 0) -> tuple[Tensor, int]:
    """A part of ``x`` that ``fmt`` treats as it treats the whole, and how many last elements of it do not count.

    Rows ``offset``, ``offset + r``, ... of ``x`` as a matrix, where groups lie in rows. Where the whole tensor has one
    scale, single elements and, not to be counted, the lowest and the highest of all: the scale depends on these alone.

    Args:
        x: floating point, of any shape with elements.
        fmt: the format.
        offset: from 0, taken modulo the distance r.
    """
    if fmt.granularity == "tensor" and fmt.is_scaled:
        flat = x.reshape(-1)
        distance = -(-flat.numel() // SAMPLE)
        if distance == 1:
            return flat, 0
        lowest, highest = torch.aminmax(flat)
        return torch.cat([flat[offset % distance :: distance], torch.stack([lowest, highest])]), 2
    rows = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    distance = min(-(-rows.numel() // SAMPLE), rows.shape[0])
    return rows[offset % distance :: distance], 0


def squared_error(x: Tensor, fmt: Format, seed: int | Tensor | None = None, offset: int = 0) -> Tensor:
    """``|x - q(x)|^2 / |x|^2`` of a :func:`sample` of ``x``, with q the round trip through ``fmt``.

    Args:
        x: float16, bfloat16, float32 or float64, of any shape with elements.
        fmt: the format.
        seed: of stochastic rounding, as in :func:`gnmr_fx.formats.encode`.
        offset: as in :func:`sample`.

    Returns:
        0-dim float64 on the device of ``x``; 0 for zeros, NaN or inf where ``x`` holds values that are not finite.
    """
    with torch.no_grad():
        part, extra = sample(x, fmt, offset)
        stored = kernels.decode(kernels.encode(part, fmt, seed), fmt, part.shape, part.dtype)
        counted = part.numel() - extra
        exact = part.reshape(-1)[:counted].double()
        lost = exact - stored.reshape(-1)[:counted].double()
        return lost.square().sum() / exact.square().sum().clamp(min=torch.finfo(torch.float64).tiny)


class Probe:
    """Measurements of the units of one model, between two steps of its controller.

    Attributes:
        is_open: whether operators measure now.
    """

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        self.reset(is_open=False, offset=0)

    def reset(self, is_open: bool, offset: int) -> None:
        """Forget what was measured; ``offset`` is for :func:`sample`."""
        self.is_open = is_open
        self._offset = offset
        self._taken = [0] * self.num_units
        self._sums: dict[torch.device, Tensor] = {}

    def take(self, index: int, x: Tensor, spec: str, seed: Tensor | None = None) -> None:
        """Measure what storing ``x`` in the format ``spec`` loses, for unit ``index``. Waits for nothing."""
        if self._taken[index] >= MAX_TENSORS or x.numel() == 0:
            return
        self._taken[index] += 1
        with torch.no_grad():
            sums = self._sums.get(x.device)
            if sums is None:
                sums = self._sums[x.device] = torch.zeros(2, self.num_units, dtype=torch.float64, device=x.device)
            sums[0, index] += squared_error(x, parse_format(spec), seed, self._offset)
            sums[1, index] += 1.0

    def sums(self, device: torch.device) -> Tensor:
        """Sums of squared relative errors and numbers of tensors, ``[2, units]`` float64 on ``device``."""
        found = torch.zeros(2, self.num_units, dtype=torch.float64, device=device)
        for sums in self._sums.values():
            found += sums.to(device)
        return found
