"""Norms and decisions over the ranks of a distributed run. Nothing here runs in a process without one.

Two things tell that ranks train one model together: a forward inside ``DistributedDataParallel``, and weights that are
DTensors (FSDP2, hybrid sharding, tensor parallelism). Ranks that hold other parts of a model (pipeline stages) share no
such group and do not talk.

One sum over the ranks gives the norms everywhere. A rank contributes ``shards * n**2`` for a unit, ``n`` being the norm
of the part of the gradient that it holds and ``shards`` the number of such parts, and the count of one; the sum by the
count is then the squared norm of the whole gradient, whatever replicas there are, and where only some of the ranks have
a gradient (DDP's unused parameters). Every rank gets the same numbers, bit for bit, and so decides the same.
"""

from __future__ import annotations

import datetime
import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gnmr_fx.errors import RankMismatchError

ProcessGroup: TypeAlias = Any  # torch.distributed may be absent from a build of torch
AGREEMENT_TIMEOUT = datetime.timedelta(minutes=5)
"""How long a rank waits for the others at the first step, in which all of them compare what they run."""
_IS_AVAILABLE = torch.distributed.is_available()
_DIGEST_BITS = 40  # a sum over 2**13 ranks is exact in float64


def is_running() -> bool:
    """Whether this process is one of several, or could be."""
    return _IS_AVAILABLE and torch.distributed.is_initialized()


def data_parallel_group() -> ProcessGroup | None:
    """The process group of the ``DistributedDataParallel`` whose forward is running; None outside of one."""
    if not is_running():
        return None
    running = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
    return None if running is None else running.process_group


def is_distributed(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    if not torch.compiler.is_compiling():
        return hasattr(tensor, "placements") and hasattr(tensor, "to_local")
    from torch.distributed.tensor import DTensor  # Dynamo knows the class of a traced tensor, but not what it has

    return isinstance(tensor, DTensor)


@dataclass(frozen=True)
class Layout:
    """How a DTensor lies on its mesh, to make one of a local tensor again.

    Attributes:
        mesh, placements: of the DTensor.
        shape, stride: of the whole of it.
        local_shape: of what this rank holds.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    local_shape: torch.Size

    def whole(self, local: Tensor) -> Tensor:
        """The DTensor of which ``local`` is what this rank holds."""
        from torch.distributed.tensor import DTensor

        made: Tensor = DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return made


def layout_of(x: Tensor) -> Layout | None:
    """The layout of a DTensor; None for any other tensor."""
    if not is_distributed(x):
        return None
    spread: Any = x
    return Layout(spread.device_mesh, spread.placements, x.shape, x.stride(), spread.to_local().shape)


def local_value(x: Tensor) -> Tensor:
    """What this rank holds of a DTensor; any other tensor as it is."""
    return x.to_local() if is_distributed(x) else x  # type: ignore[attr-defined]


def local_part(gradient: Tensor) -> tuple[Tensor, int]:
    """What this rank holds of a gradient, and in how many such parts the whole of it lies (1 = all of it is here)."""
    if not is_distributed(gradient):
        return gradient, 1
    spread: Any = gradient
    if any(placement.is_partial() for placement in spread.placements):  # terms of a sum: their norms do not add up
        from torch.distributed.tensor import Replicate

        whole = [Replicate() if placement.is_partial() else placement for placement in spread.placements]
        spread = spread.redistribute(placements=whole)
    sizes = zip(spread.device_mesh.shape, spread.placements, strict=True)
    return spread.to_local(), math.prod(size for size, placement in sizes if not placement.is_replicate())


def groups_of(weights: Iterable[Tensor], data_parallel: ProcessGroup | None = None) -> tuple[ProcessGroup, ...]:
    """Process groups that together reach every rank that trains the same units; empty where this one is alone.

    One for plain data parallelism or a one-dimensional mesh, and for a mesh of all ranks; else one for each dimension.
    Groups inside another one are left out. The order is that of ``weights``, the same on all ranks.
    """
    meshes: list[Any] = []
    for weight in weights:
        if is_distributed(weight) and weight.device_mesh not in meshes:  # type: ignore[attr-defined]
            meshes.append(weight.device_mesh)  # type: ignore[attr-defined]
    if data_parallel is None and not meshes:
        return ()
    found = [] if data_parallel is None else [data_parallel]
    for mesh in meshes:
        if mesh.size() == torch.distributed.get_world_size():
            found.append(torch.distributed.group.WORLD)
        else:
            found += [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
    ranks = [frozenset(torch.distributed.get_process_group_ranks(group)) for group in found]
    kept = [
        group
        for at, (group, own) in enumerate(zip(found, ranks, strict=True))
        if len(own) > 1 and not any(own < other or (own == other and at > i) for i, other in enumerate(ranks))
    ]
    return tuple(kept)


def device_for(groups: Iterable[ProcessGroup], preferred: torch.device) -> torch.device:
    """``preferred`` where the groups can communicate from it (gradients that are offloaded may lie on the CPU)."""
    for group in groups:
        types = {device.type for device in getattr(group, "_device_types", ())}
        if types and preferred.type not in types:
            return torch.device(sorted(types)[-1])
    return preferred


def sum_over(groups: Iterable[ProcessGroup], values: Tensor) -> Tensor:
    """``values`` summed over the ranks of ``groups``, in place."""
    for group in groups:
        torch.distributed.all_reduce(values, group=group)
    return values


@dataclass(frozen=True)
class Fingerprint:
    """What ranks that decide together have to have in common.

    Attributes:
        parts: name of each part (units, recipe, ...) to a text that is equal where the part is. One named ``state`` is
            told of only where it alone differs: a state of other units cannot be the same.
    """

    parts: Mapping[str, str]

    def digests(self) -> list[int]:
        """One number below 2**40 for each part."""
        return [digest(text.encode()) for text in self.parts.values()]


def digest(data: bytes) -> int:
    """A number below 2**40 that differs where ``data`` does."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") >> (64 - _DIGEST_BITS)


def check_agreement(fingerprint: Fingerprint, groups: tuple[ProcessGroup, ...], device: torch.device) -> None:
    """Compare fingerprints over the ranks of ``groups``; all ranks of which have to call this.

    Raises:
        RankMismatchError: where a part differs, on every rank; or where a rank does not answer in time.
    """
    own = torch.tensor(fingerprint.digests(), dtype=torch.int64)
    both = torch.cat((own, -own)).to(device)  # the largest of h and of -h: equal everywhere if they are one number
    rank = torch.distributed.get_rank()
    try:
        for group in groups:
            work = torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=group, async_op=True)
            work.wait(AGREEMENT_TIMEOUT)
    except RuntimeError as error:
        raise RankMismatchError(
            f"expected all ranks to compare what gnmr-fx runs on them at the first optimizer step, found no answer on "
            f"rank {rank} ({error}); call gnmr_fx.instrument on every rank, and step the optimizer on every rank"
        ) from error
    largest, smallest = both.cpu().chunk(2)
    differing = [
        part for part, same in zip(fingerprint.parts, (largest == -smallest).tolist(), strict=True) if not same
    ]
    if len(differing) > 1 and "state" in differing:
        differing.remove("state")
    if differing:
        raise RankMismatchError(
            f"expected the same {', '.join(fingerprint.parts)} on all ranks, found other {' and '.join(differing)} on "
            f"some (rank {rank} has {'; '.join(f'{part}: {_shortened(fingerprint.parts[part])}' for part in differing)}"
            "); call gnmr_fx.instrument with the same arguments on every rank, and load the same controller state on "
            "every rank"
        )


def _shortened(text: str, length: int = 300) -> str:
    return text if len(text) <= length else f"{text[:length]}..."
