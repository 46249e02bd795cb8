"""What the trainers' callbacks have in common: how a model is instrumented, logged, and resumed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, get_args

from torch import nn

from gnmr_fx.config import GnmrConfig, check_max_active
from gnmr_fx.errors import AlreadyInstrumentedError, ConfigError, MissingStateError
from gnmr_fx.instrument import CONTROLLER, ModelController, instrument, unwrap
from gnmr_fx.recipe import DEFAULT_RECIPE, Recipe, get_recipe
from gnmr_fx.scope import AllSaved, get_scope

__all__ = ["MissingState", "Setup", "StepLogger", "instrumented_parts", "no_state", "open_loggers"]

MissingState = Literal["raise", "start"]


@dataclass(frozen=True)
class Setup:
    """The arguments of :func:`gnmr_fx.instrument`, checked when built, for a model that comes later.

    Raises:
        UnknownRecipeError, BudgetError, ConfigError: as :func:`gnmr_fx.instrument` does.
    """

    recipe: str | Recipe = DEFAULT_RECIPE
    max_active: int | float = 5
    scope: str | AllSaved = "projections"
    config: GnmrConfig | None = None
    include: Iterable[str] | str | None = None
    exclude: Iterable[str] | str | None = None
    example_inputs: Any = None

    def __post_init__(self) -> None:
        recipe = get_recipe(self.recipe)
        get_scope(self.scope)
        if self.config is not None and not isinstance(self.config, GnmrConfig):
            raise ConfigError(f"config: expected a GnmrConfig or None, found {self.config!r}")
        check_max_active(self.max_active, self.config or GnmrConfig.recommended(recipe))

    def apply(self, model: nn.Module) -> tuple[nn.Module, bool]:
        """Instrument ``model``, unless it or a part of it is instrumented already, which is then used as it is.

        Returns:
            The instrumented module, and whether it was instrumented here.

        Raises:
            AlreadyInstrumentedError: where several parts are instrumented, each with a controller of its own.
        """
        parts = instrumented_parts(model)
        if len(parts) > 1:
            raise AlreadyInstrumentedError(
                f"expected one instrumented module in {type(unwrap(model)).__name__}, found {len(parts)}; instrument "
                "the module that holds them all"
            )
        if parts:
            return parts[0], False
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        return instrument(unwrap(model), **options), True


def instrumented_parts(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` (itself among them) that :func:`gnmr_fx.instrument` was called on."""
    return [module for module in unwrap(model).modules() if isinstance(vars(module).get(CONTROLLER), ModelController)]


class StepLogger(Protocol):
    """Writes the last step of a controller."""

    def log(self) -> bool:
        """Write it, if it is not written yet."""

    def close(self) -> None:
        """End the log."""


def open_loggers(
    installed: ModelController,
    jsonl: str | os.PathLike[str] | None,
    tensorboard: str | os.PathLike[str] | None,
    with_last: bool = False,
) -> list[StepLogger]:
    """The loggers of a controller; opened after its state is restored, since they go on from there."""
    found: list[StepLogger] = []
    if jsonl is not None:
        from gnmr_fx.integrations.jsonl import JsonlLogger

        found.append(JsonlLogger(jsonl, installed, with_last=with_last))
    if tensorboard is not None:
        from gnmr_fx.integrations.tensorboard import TensorBoardLogger

        found.append(TensorBoardLogger(tensorboard, installed, with_last=with_last))
    return found


def check_missing_state(value: object) -> None:
    """Check the callbacks' ``missing_state``.

    Raises:
        ConfigError: for anything but a :data:`MissingState`.
    """
    if not isinstance(value, str) or value not in get_args(MissingState):
        raise ConfigError(f"missing_state: expected 'raise' or 'start', found {value!r}")


def no_state(where: str) -> MissingStateError:
    """The error for a checkpoint without a controller state."""
    return MissingStateError(
        f"expected a checkpoint with the controller's state, found none {where}; was the run saved without this "
        "callback? missing_state='start' lets the controller start anew at this step"
    )
