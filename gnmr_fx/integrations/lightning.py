"""Lightning: a callback that instruments the model, logs, and goes through its checkpoints.

from gnmr_fx.integrations.lightning import GnmrCallback

trainer = lightning.Trainer(callbacks=[GnmrCallback(recipe="saved-int4-int8", max_active=5, submodule="model")])
trainer.fit(module, data)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from gnmr_fx.config import GnmrConfig
from gnmr_fx.errors import ConfigError, MissingDependencyError
from gnmr_fx.instrument import ModelController, controller, uninstrument
from gnmr_fx.integrations.metrics import Meter, numbers
from gnmr_fx.integrations.setup import MissingState, Setup, StepLogger, check_missing_state, no_state, open_loggers
from gnmr_fx.recipe import DEFAULT_RECIPE, Recipe
from gnmr_fx.scope import AllSaved


def _callback_class() -> Any:
    """``Callback`` of ``lightning.pytorch`` or of ``pytorch_lightning``, two packages whose classes do not mix.

    The one that the program has imported already; where that is both or none, the first.
    """
    import importlib

    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    raise MissingDependencyError(
        "expected the package lightning or pytorch_lightning, found neither; pip install 'gnmr-fx[lightning]'"
    )


Callback: Any = _callback_class()

__all__ = ["GnmrCallback"]


class GnmrCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Budgeted recovery in a Lightning Trainer.

    The model is instrumented when ``fit`` starts, after ``configure_model`` and the strategy's wrapping. A model that
    is instrumented already, as a whole or in part, is used as it is.

    Args:
        recipe, max_active, scope, config, include, exclude, example_inputs: as for :func:`gnmr_fx.instrument`.
        submodule: path of the module to instrument in the LightningModule; ``""`` for that itself. Name the model
            that ``training_step`` calls: which operators share an input can only be seen in that one's forward, and
            scope "all" works in that one's forward.
        jsonl: a file that gets one line per optimizer step (:class:`gnmr_fx.integrations.jsonl.JsonlLogger`).
        tensorboard: a folder for :class:`gnmr_fx.integrations.tensorboard.TensorBoardLogger`: every step, with names.
        uninstrument: whether the model is as it was before once ``fit`` ends. A model that was instrumented already
            stays instrumented.
        missing_state: what happens on resuming from a checkpoint without a controller state: ``"raise"``, or
            ``"start"`` anew.

    The numbers are logged with ``log_dict``, under ``gnmr_fx/``, to the Trainer's loggers. The controller's state is
    this callback's state in the checkpoint; a resumed run goes on exactly as the one before would have.

    Raises:
        UnknownRecipeError, BudgetError, ConfigError: as :func:`gnmr_fx.instrument` does.
    """

    def __init__(
        self,
        recipe: str | Recipe = DEFAULT_RECIPE,
        *,
        max_active: int | float = 5,
        scope: str | AllSaved = "projections",
        config: GnmrConfig | None = None,
        include: Iterable[str] | str | None = None,
        exclude: Iterable[str] | str | None = None,
        example_inputs: Any = None,
        submodule: str = "",
        jsonl: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        uninstrument: bool = False,
        missing_state: MissingState = "raise",
    ) -> None:
        super().__init__()
        check_missing_state(missing_state)
        self.options = Setup(recipe, max_active, scope, config, include, exclude, example_inputs)
        self.submodule = submodule
        self.jsonl, self.tensorboard = jsonl, tensorboard
        self.uninstrument = uninstrument
        self.missing_state = missing_state
        self.model: nn.Module | None = None
        self._instrumented_here = False
        self._restored: Mapping[str, Any] | None = None
        self._meter: Meter | None = None
        self._logged = 0
        self._loggers: list[StepLogger] = []

    @property
    def controller(self) -> ModelController:
        """The controller of the model in training.

        Raises:
            ConfigError: before ``fit`` has started.
        """
        if self.model is None:
            raise ConfigError("expected a callback whose training has begun, found one that was not called yet")
        return controller(self.model)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Instrument the model."""
        try:
            target = pl_module.get_submodule(self.submodule)
        except AttributeError as error:
            raise ConfigError(
                f"submodule: expected the path of a module in {type(pl_module).__name__}, found {self.submodule!r} "
                f"({error})"
            ) from error
        found, here = self.options.apply(target)
        self._instrumented_here = here or (self._instrumented_here and found is self.model)
        self.model = found

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take up the checkpoint's state, which Lightning has loaded by now, and open the logs."""
        if self._restored:
            self.controller.load_state_dict(self._restored)
            self._restored = None
        self._meter = Meter(self.controller)
        self._logged = self.controller.step_count
        self._close()
        if trainer.is_global_zero:
            self._loggers = open_loggers(self.controller, self.jsonl, self.tensorboard)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the step, if the optimizer has made one."""
        if self._meter is None or self.controller.step_count == self._logged:
            return
        self._logged = self.controller.step_count
        for logger in self._loggers:
            logger.log()
        found = {name: float(value) for name, value in numbers(self._meter.read()).items()}
        pl_module.log_dict(found, on_step=True, on_epoch=False, batch_size=1)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the logs; give the model back as it was, if asked to."""
        self._close()
        self._meter = None
        if self.uninstrument and self._instrumented_here and self.model is not None:
            uninstrument(self.model)
            self._instrumented_here, self.model = False, None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the logs."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """The controller's state, for the checkpoint."""
        return {} if self.model is None else {"controller": self.controller.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the controller's state for when the model is there."""
        self._restored = state_dict.get("controller")

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Check that a checkpoint to resume from holds a controller state."""
        fitting = trainer.state.fn == "fit"
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if fitting and not state and self.missing_state == "raise":
            raise no_state(f"under {self.state_key!r} in {trainer.ckpt_path}")

    def _close(self) -> None:
        for logger in self._loggers:
            logger.close()
        self._loggers = []
