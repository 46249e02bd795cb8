"""TensorBoard: the numbers of each step as scalars, the units' names as text."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self

from torch import nn

from gnmr_fx.errors import MissingDependencyError
from gnmr_fx.instrument import ModelController
from gnmr_fx.integrations.metrics import Meter, numbers

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise MissingDependencyError(
        "expected the package tensorboard, which torch.utils.tensorboard needs, found none; "
        "pip install 'gnmr-fx[tensorboard]'"
    ) from error

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger:
    """Writes :func:`~gnmr_fx.integrations.metrics.step_metrics` of an instrumented model for TensorBoard.

    Tags are the metrics' names below ``gnmr_fx/``; a unit's name is written as text where it is another than in the
    step before. A resumed run hides what was written for later steps.

    Args:
        log_dir: the folder that TensorBoard is to read.
        model: the instrumented model, or its controller.
        with_last: whether the step that the controller has just made is the first to be logged, not the next one.
    """

    def __init__(
        self, log_dir: str | os.PathLike[str], model: nn.Module | ModelController, *, with_last: bool = False
    ) -> None:
        self._meter = Meter(model)
        self._step = self._meter.controller.step_count - with_last
        self._writer = SummaryWriter(os.fspath(log_dir), purge_step=self._step + 1 if self._step else None)
        self._names: dict[str, str] = {}

    def log(self) -> bool:
        """Write the controller's last step; nothing, and False, where that is written already."""
        step = self._meter.controller.step_count
        if step == self._step:
            return False
        self._step = step
        metrics = self._meter.read()
        for tag, number in numbers(metrics).items():
            self._writer.add_scalar(tag, number, step)
        for name, value in metrics.items():
            if isinstance(value, str) and self._names.get(name) != value:
                self._names[name] = value
                self._writer.add_text(f"gnmr_fx/{name}", value, step)
        return True

    def close(self) -> None:
        """Write what is buffered, and close the file."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
