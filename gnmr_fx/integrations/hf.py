"""The Hugging Face Trainer: a callback that instruments the model, logs, and goes through its checkpoints.

from gnmr_fx.integrations.hf import GnmrCallback

trainer = Trainer(model, args, train_dataset=data, callbacks=[GnmrCallback(recipe="saved-int4-int8", max_active=5)])
trainer.train()
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from gnmr_fx.config import GnmrConfig
from gnmr_fx.errors import ConfigError, GnmrWarning, MissingDependencyError, MissingStateError, StateMismatchError
from gnmr_fx.instrument import ModelController, controller, uninstrument, unwrap
from gnmr_fx.integrations.metrics import Meter, numbers
from gnmr_fx.integrations.setup import (
    MissingState,
    Setup,
    StepLogger,
    check_missing_state,
    no_state,
    open_loggers,
)
from gnmr_fx.recipe import DEFAULT_RECIPE, Recipe
from gnmr_fx.scope import AllSaved

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise MissingDependencyError(
        "expected the package transformers, found none; pip install 'gnmr-fx[transformers]'"
    ) from error

__all__ = ["STATE_FILE", "GnmrCallback"]

STATE_FILE = "gnmr_fx.pt"
"""Name of the controller's state in a checkpoint's folder."""
_TRAINER_STATE = "trainer_state.json"


class GnmrCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Budgeted recovery in a Trainer.

    The model is instrumented when training begins, whatever the Trainer has wrapped it in by then (``torch.compile``,
    DDP, FSDP2, autocast): nothing is traced before the first forward. A model that is instrumented already is used as
    it is.

    Args:
        recipe, max_active, scope, config, include, exclude, example_inputs: as for :func:`gnmr_fx.instrument`.
        jsonl: a file that gets one line per optimizer step (:class:`gnmr_fx.integrations.jsonl.JsonlLogger`).
        tensorboard: a folder for :class:`gnmr_fx.integrations.tensorboard.TensorBoardLogger`: every step, with names.
        uninstrument: whether the model is as it was before once training ends. A model that was instrumented already
            stays instrumented.
        resume_from: the checkpoint's folder, where the Trainer resumes from one that lies outside ``output_dir``.
        missing_state: what happens on resuming from a checkpoint without a controller state: ``"raise"``, or
            ``"start"`` anew.

    The numbers join what the Trainer logs, at the steps at which it does, under ``gnmr_fx/``. Trackers (``report_to``)
    are called before callbacks; :meth:`attach` puts this one before them. Each checkpoint folder gets the controller's
    state as ``gnmr_fx.pt``; a resumed run goes on exactly as the one before would have.

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
        jsonl: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        uninstrument: bool = False,
        resume_from: str | os.PathLike[str] | None = None,
        missing_state: MissingState = "raise",
    ) -> None:
        check_missing_state(missing_state)
        self.options = Setup(recipe, max_active, scope, config, include, exclude, example_inputs)
        self.jsonl, self.tensorboard = jsonl, tensorboard
        self.uninstrument = uninstrument
        self.resume_from = resume_from
        self.missing_state = missing_state
        self.model: nn.Module | None = None
        self._instrumented_here = False
        self._meter: Meter | None = None
        self._loggers: list[StepLogger] = []
        self._is_first = False

    @property
    def controller(self) -> ModelController:
        """The controller of the model in training.

        Raises:
            NotInstrumentedError, ConfigError: before training has begun.
        """
        if self.model is None:
            raise ConfigError("expected a callback whose training has begun, found one that was not called yet")
        return controller(self.model)

    def attach(self, trainer: Any) -> Self:
        """Become ``trainer``'s first callback, so that trackers such as wandb and TensorBoard get the numbers too."""
        callbacks = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)
        self._is_first = True
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Instrument the model, take up the checkpoint's state, open the logs."""
        model = unwrap(kwargs["model"])
        found, here = self.options.apply(model)
        self._instrumented_here = here or (self._instrumented_here and found is self.model)
        self.model = found
        if state.global_step:
            self._restore(args, state)
        self._meter = Meter(self.controller)
        self._close()
        if state.is_world_process_zero:
            self._loggers = open_loggers(self.controller, self.jsonl, self.tensorboard)
        if args.report_to and not self._is_first:
            warnings.warn(
                f"expected gnmr-fx's callback before those of report_to={args.report_to}, found it behind them, so "
                "they do not get its numbers: call GnmrCallback(...).attach(trainer) instead of callbacks=[...]",
                GnmrWarning,
                stacklevel=2,
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the step to the callback's own logs."""
        for logger in self._loggers:
            logger.log()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the numbers to what the Trainer logs of a training step."""
        if self._meter is None or logs is None or "loss" not in logs:
            return
        found = numbers(self._meter.read())
        logs.update(found)
        state.log_history[-1].update(found)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save the controller's state in the checkpoint's folder."""
        if self.model is None or not args.should_save:
            return
        folder = _checkpoint(args, state)
        if not folder.is_dir():  # a hyperparameter search saves elsewhere, and resumes from nothing
            return
        torch.save(self.controller.state_dict(), folder / f"{STATE_FILE}.new")
        os.replace(folder / f"{STATE_FILE}.new", folder / STATE_FILE)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the logs; give the model back as it was, if asked to."""
        self._close()
        self._meter = None
        if self.uninstrument and self._instrumented_here and self.model is not None:
            uninstrument(self.model)
            self._instrumented_here, self.model = False, None

    def _close(self) -> None:
        for logger in self._loggers:
            logger.close()
        self._loggers = []

    def _restore(self, args: TrainingArguments, state: TrainerState) -> None:
        folder = self._resumed_from(args, state)
        file = folder / STATE_FILE if folder is not None else None
        if file is None or not file.is_file():
            if self.missing_state == "start":
                return
            if folder is None:
                raise MissingStateError(
                    f"expected the checkpoint of step {state.global_step} that the Trainer resumes from at "
                    f"{_checkpoint(args, state)}, found another or none there, and a callback is not told its place; "
                    "pass GnmrCallback(resume_from=the checkpoint's folder)"
                )
            raise no_state(f"in {folder} ({STATE_FILE})")
        try:
            saved = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # zip, pickle and storage errors of many types
            raise StateMismatchError(
                f"expected a controller state at {file}, found a file that does not load "
                f"({type(error).__name__}: {error})"
            ) from error
        if not isinstance(saved, dict):
            raise StateMismatchError(f"expected a controller state at {file}, found a {type(saved).__name__}")
        self.controller.load_state_dict(saved)

    def _resumed_from(self, args: TrainingArguments, state: TrainerState) -> Path | None:
        """The folder that the Trainer resumes from; None where that is not known.

        Callbacks are not told. A folder at a place where it is likely to be is the one if its record of the run is the
        one that the Trainer has loaded.
        """
        if self.resume_from is not None:
            return Path(self.resume_from)
        given = args.resume_from_checkpoint
        places = [Path(given)] if isinstance(given, str) else []
        for folder in (*places, _checkpoint(args, state)):
            record = folder / _TRAINER_STATE
            if record.is_file():
                saved = TrainerState.load_from_json(os.fspath(record))
                if (saved.global_step, _as_text(saved.log_history)) == (state.global_step, _as_text(state.log_history)):
                    return folder
        return None


def _as_text(log_history: list[dict[str, Any]]) -> str:
    """For a comparison in which NaN equals NaN."""
    return json.dumps(log_history, sort_keys=True)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
