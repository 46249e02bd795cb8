"""What a controller hears between two of its steps: norms of gradients as each backward leaves them, by device."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gnmr_fx import distributed
from gnmr_fx.controller import MISSING
from gnmr_fx.gradients import gradient_norms


class Heard(NamedTuple):
    """What one step's decision rests on, the same on all ranks; of each unit, a negative value = none.

    Attributes:
        norms: gradient norms.
        errors: relative errors measured in this step; None where none were.
        costs: on the recovery path; None for a budget in units.
    """

    norms: list[float]
    errors: list[float] | None = None
    costs: list[float] | None = None


class Measured(NamedTuple):
    """Norms of gradients on one device: units [n], L2 norms [n], and in how many parts each gradient lies on ranks.

    On the CPU the norms are floats from the start: nothing is waited for, and they are at hand.
    """

    indices: list[int]
    found: Tensor | list[float]
    shards: list[int]

    @classmethod
    def of(cls, indices: list[int], norms: Sequence[Tensor], shards: list[int]) -> Measured:
        """Of 0-dim norms."""
        on_cpu = norms[0].device.type == "cpu"
        return cls(indices, [norm.item() for norm in norms] if on_cpu else torch.stack(tuple(norms)), shards)

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self.found.device if isinstance(self.found, Tensor) else torch.device("cpu")

    @property
    def norms(self) -> Tensor:
        """The norms on the device, in at least fp32."""
        return self.found if isinstance(self.found, Tensor) else torch.tensor(self.found, dtype=torch.float64)

    def on_host(self) -> list[float]:
        """The norms; waits for the device."""
        return self.found.tolist() if isinstance(self.found, Tensor) else self.found


@dataclass(eq=False)
class Round:
    """What was heard since the last step of the controller.

    Attributes:
        calls: forwards in which each unit ran guarded (calls, where a unit runs several times in one).
        arrived: unit -> the weight at which its gradient arrived last.
        pending: norms as of the last backward.
        early: norms of units whose optimizer steps inside the backward, as it found them, by unit and parameter.
        outputs: on each device, the sums of the squared norms of output gradients, of the units in ``passed``.
        went_bad: on each device, the backward (from 1) in which each unit's norm was first not finite, 0 = none; the
            last backward is not entered yet.
        backwards: number of backwards that have ended.
        open_in: autograd's id of the backward whose end is waited for.
        stepped_inside: an optimizer of units has made a step inside a backward.
        due: the controller's step waits for the next forward or, where that keeps nothing (reentrant checkpointing),
            for the first recomputation in the next backward.
        recomputed_in: autograd's id of the backward that recomputed a unit last.
        group: the process group of the DDP that a forward ran in.
    """

    calls: list[int]
    arrived: dict[int, Tensor] = field(default_factory=dict)
    pending: list[Measured] = field(default_factory=list)
    early: dict[tuple[int, int], Measured] = field(default_factory=dict)
    outputs: dict[torch.device, Tensor] = field(default_factory=dict)
    passed: dict[torch.device, set[int]] = field(default_factory=dict)
    went_bad: dict[torch.device, Tensor] = field(default_factory=dict)
    backwards: int = 0
    open_in: int | None = None
    stepped_inside: bool = False
    due: bool = False
    recomputed_in: int = -1
    group: distributed.ProcessGroup | None = None

    def output_gradient(self, index: int, gradient: Tensor) -> None:
        """Add the gradient of the output of unit ``index``."""
        device = gradient.device
        if device not in self.outputs:
            self.outputs[device] = torch.zeros(len(self.calls), dtype=torch.float64, device=device)
        self.outputs[device][index] += gradient_norms([gradient])[0].double().square()
        self.passed.setdefault(device, set()).add(index)

    def backward_ended(self, gradients: Iterable[tuple[int, Tensor]]) -> None:
        """Put the norms of the accumulated ``gradients``, by unit, in the place of the last backward's."""
        self._enter_non_finite()
        self.backwards += 1
        self.pending = [*measured(gradients), *self.early.values(), *self._of_outputs()]

    def _enter_non_finite(self) -> None:
        """Note which of the pending norms, about to be replaced, are not finite. Nothing is read from the device."""
        for found in self.pending:
            indices, norms = found.indices, found.norms
            none = torch.zeros(len(self.calls), dtype=torch.int32, device=found.device)
            bad = self.went_bad.setdefault(found.device, none)
            bad[indices] = torch.where((bad[indices] == 0) & ~norms.isfinite(), self.backwards, bad[indices])

    def _of_outputs(self) -> Iterator[Measured]:
        """Norms of the output gradients so far."""
        for device, squares in self.outputs.items():
            indices = sorted(self.passed[device])
            yield Measured(indices, squares[indices].sqrt(), [1] * len(indices))

    def norms(self) -> list[float]:
        """Norm of each unit as the last backward left it, on the host: ``MISSING`` where there is none, ``inf`` where
        it, or one since the last step, is not finite."""
        found = [MISSING] * len(self.calls)
        for last in self.pending:
            for index, norm in zip(last.indices, last.on_host(), strict=True):
                found[index] = norm if found[index] == MISSING else math.hypot(found[index], norm)
        found = [norm if math.isfinite(norm) else math.inf for norm in found]
        for bad in self.went_bad.values():
            found = [math.inf if ever else norm for ever, norm in zip(bad.tolist(), found, strict=True)]
        return found

    def first_bad(self) -> Tensor:
        """Int [units] on the host: the backward, from 1, in which each unit first was not finite; 0 = none."""
        found = torch.zeros(len(self.calls), dtype=torch.int32)
        for bad in self.went_bad.values():
            found = torch.maximum(found, bad.cpu())
        for last in self.pending:
            for index, norm in zip(last.indices, last.on_host(), strict=True):
                if not math.isfinite(norm) and not found[index]:
                    found[index] = self.backwards
        return found


def means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Sums (at least 0) by numbers, for each unit; ``inf`` for NaN, ``MISSING`` where there was nothing to sum."""
    return [
        MISSING if not number else math.inf if math.isnan(value) else value / number
        for value, number in zip(*rows, strict=True)
    ]


def root_means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Roots of the :func:`means` of squares."""
    return [mean if mean == MISSING else math.sqrt(mean) for mean in means(rows)]


def measured(gradients: Iterable[tuple[int, Tensor]]) -> list[Measured]:
    """Norms of what this rank holds of the gradients of units, in one fused call for each device and dtype."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor, int]]] = collections.defaultdict(list)
    for index, gradient in gradients:
        part, shards = distributed.local_part(gradient)
        by_kind[part.device, part.dtype].append((index, part, shards))
    return [
        _joined(Measured.of([i for i, _, _ in kind], gradient_norms([p for _, p, _ in kind]), [n for _, _, n in kind]))
        for kind in by_kind.values()
    ]


def _joined(found: Measured) -> Measured:
    """One norm for each unit: where it listens to several gradients, that of all of them together."""
    if len(set(found.indices)) == len(found.indices):
        return found
    units = list(dict.fromkeys(found.indices))
    at = torch.tensor([units.index(index) for index in found.indices], device=found.device)
    shards = torch.tensor(found.shards, device=found.device)  # a part of n counts n times: see distributed
    squares = found.norms.double().square() * shards
    joined = squares.new_zeros(len(units)).index_add_(0, at, squares).sqrt()
    return Measured(units, joined, [1] * len(units))
