"""Runs a function on several processes that talk over gloo, and the small training run that tests give them."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gnmr_fx
from gnmr_fx import runtime

TIMEOUT = 240.0
PRELOADED = ["tests.ranks", "pytest", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"]
"""Imported once, not by every rank of every run."""
EXACT = gnmr_fx.Recipe(gnmr_fx.Format("none"), gnmr_fx.Format("none"))  # exact gradients: only the glue is tested
CONFIG = gnmr_fx.GnmrConfig(alpha=1.3, beta=1.3, window=4, lock_steps=3, warmup_steps=2)
WIDTH, BATCH = 10, 8  # 10 rows do not divide by 4 ranks: shards are uneven


class RankFailed(Exception):
    """A rank raised: its traceback."""


def on_ranks(world: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``job(*args)`` returns on each of ``world`` ranks.

    Raises:
        RankFailed: with the traceback of the first rank that raised, or where one gives no answer in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes, processes = [], []
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(sender, store, rank, world, job, args), daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            answers = [_answer(pipe, rank) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
    failed = [answer for ok, answer in answers if not ok]
    if failed:
        raise RankFailed(failed[0])
    return [answer for _, answer in answers]


def _answer(pipe: multiprocessing.connection.Connection, rank: int) -> tuple[bool, Any]:
    if not pipe.poll(TIMEOUT):
        return False, f"rank {rank} gave no answer within {TIMEOUT:.0f} s"
    try:
        return pipe.recv()
    except EOFError:
        return False, f"rank {rank} died"


def _rank(pipe: Any, store: str, rank: int, world: int, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        answer = (True, job(*args))
    except BaseException:
        answer = (False, f"rank {rank}: {traceback.format_exc()}")
    pipe.send(answer)
    pipe.close()
    with contextlib.suppress(BaseException):
        dist.destroy_process_group()


@dataclass
class Log:
    """What one rank saw: norms [units] and names of the active units after each step."""

    norms: list[list[float]]
    active: list[list[str]]


def chain(layers: int = 3, width: int = WIDTH) -> nn.Sequential:
    """Equal blocks with projections in them."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))).train()


def inputs(step: int, width: int = WIDTH) -> Tensor:
    """The global batch of a step [BATCH, width], now and then large."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, width, generator=generator) * (1 + 4 * (step % 5 == 4))


def own_part(batch: Tensor) -> Tensor:
    """The rows of a global batch that belong to this rank."""
    if not dist.is_initialized():
        return batch
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


@contextlib.contextmanager
def recorded() -> Iterator[list[list[float]]]:
    """The norms handed to the decision rules, step by step."""
    seen: list[list[float]] = []
    original = runtime.update

    def update(state: Any, norms: list[float], config: Any, **others: Any) -> Any:
        seen.append(norms)
        return original(state, norms, config, **others)

    runtime.update = update
    try:
        yield seen
    finally:
        runtime.update = original


Backward = Callable[[Callable[..., Tensor], Tensor], None]


def plain_backward(call: Callable[..., Tensor], x: Tensor) -> None:
    call(x).square().mean().backward()


def train(
    model: nn.Module, call: Callable[..., Tensor], steps: int, backward: Backward = plain_backward, clip: bool = True
) -> Log:
    """Train on this rank's part of each global batch; gradients are clipped before the optimizer's step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    controller, active = gnmr_fx.controller(model), []
    with recorded() as norms:
        for step in range(steps):
            backward(call, own_part(inputs(step)))
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
            active.append(controller.active)
    return Log(norms, active)


def single(steps: int, max_active: int = 1, **options: Any) -> Log:
    """The run of one process on the whole batches."""
    model = gnmr_fx.instrument(chain(), EXACT, max_active=max_active, config=CONFIG)
    return train(model, model, steps, **options)
