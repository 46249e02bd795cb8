"""torchtitan: a model converter.

torchtitan calls ``convert(model)`` on the whole model on the meta device, before it is parallelized and compiled, and
``post_optimizer_hook`` after every optimizer step. Written for the protocol of
``torchtitan/protocols/model_converter.py`` as published in 2026, and tested against that, not in torchtitan itself,
which is not needed to import this.

from gnmr_fx.integrations.torchtitan import GnmrConverter

ModelConvertersContainer.Config(converters=[GnmrConverter.Config(recipe="saved-int4-int8", max_active=5)])
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import distributed, nn

from gnmr_fx.config import GnmrConfig
from gnmr_fx.errors import ConfigError
from gnmr_fx.instrument import ModelController, controller
from gnmr_fx.integrations.setup import Setup, StepLogger, instrumented_parts, open_loggers
from gnmr_fx.recipe import DEFAULT_RECIPE, Recipe
from gnmr_fx.scope import AllSaved

__all__ = ["GnmrConverter"]


class GnmrConverter:
    """Instruments the model that torchtitan trains, and logs.

    The controller is a ``torch.distributed.checkpoint`` stateful: add it to the states of torchtitan's checkpointer to
    resume from it (``checkpointer.states["gnmr_fx"] = converter.controller``).

    Pipeline parallelism cuts the model into copies, which this does not follow: it is refused.

    Args:
        config: what to instrument with, and where to log.
    """

    @dataclass(kw_only=True)
    class Config:
        """Arguments of :func:`gnmr_fx.instrument`; ``jsonl`` and ``tensorboard`` are paths of logs, by rank 0."""

        recipe: str | Recipe = DEFAULT_RECIPE
        max_active: int | float = 5
        scope: str | AllSaved = "projections"
        config: GnmrConfig | None = None
        include: Iterable[str] | str | None = None
        exclude: Iterable[str] | str | None = None
        example_inputs: Any = None
        jsonl: str | os.PathLike[str] | None = None
        tensorboard: str | os.PathLike[str] | None = None

        def build(self, **torchtitan: Any) -> GnmrConverter:
            """The converter. Of what torchtitan hands over, only ``parallel_dims`` is looked at.

            Raises:
                ConfigError: under pipeline parallelism.
            """
            if getattr(torchtitan.get("parallel_dims"), "pp_enabled", False):
                raise ConfigError(
                    "expected a model in one piece, found pipeline parallelism, which cuts it into copies; call "
                    "gnmr_fx.instrument on each stage instead"
                )
            return GnmrConverter(self)

    def __init__(self, config: Config) -> None:
        self._options = Setup(
            config.recipe,
            config.max_active,
            config.scope,
            config.config,
            config.include,
            config.exclude,
            config.example_inputs,
        )
        self._jsonl, self._tensorboard = config.jsonl, config.tensorboard
        self._model: nn.Module | None = None
        self._loggers: list[StepLogger] | None = None

    @property
    def controller(self) -> ModelController:
        """The controller of the converted model.

        Raises:
            ConfigError: before :meth:`convert`.
        """
        if self._model is None:
            raise ConfigError("expected a converter that torchtitan has applied, found one before convert(model)")
        return controller(self._model)

    def convert(self, model: nn.Module) -> None:
        """Instrument ``model`` in place."""
        self._model, _ = self._options.apply(model)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Log the step that the controller has just made by itself.

        Raises:
            ConfigError: where the model in training is not the one that was converted.
        """
        parts = model if isinstance(model, list) else [model]
        if [part for whole in parts for part in instrumented_parts(whole)] != [self._model]:
            raise ConfigError(
                "expected the model that was converted in training, found a copy or a part of it; pipeline parallelism "
                "is not supported"
            )
        if self._loggers is None:  # a checkpoint may have been loaded since convert, and the logs go on from there
            first = not distributed.is_initialized() or distributed.get_rank() == 0
            paths = (self._jsonl, self._tensorboard)
            self._loggers = open_loggers(self.controller, *paths, with_last=True) if first else []
        for logger in self._loggers:
            logger.log()

    def key_filter(self) -> None:
        """No key of the state dict is this converter's."""

    def state_dict_transform(self) -> None:
        """The state dict is the model's own."""

    def format_adapter(self) -> None:
        """No external format is needed."""
