"""``instrument`` and ``uninstrument``."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from gnmr_fx import function_modes
from gnmr_fx.config import GnmrConfig, check_max_active
from gnmr_fx.errors import (
    AlreadyInstrumentedError,
    ConfigError,
    NotInstrumentedError,
    PatternError,
    RecipeError,
)
from gnmr_fx.frozen import FrozenWeight
from gnmr_fx.gemm import check_native
from gnmr_fx.passes import pipeline
from gnmr_fx.passes.freeze import holders_of
from gnmr_fx.passes.plan import Forward, Plan, Selection
from gnmr_fx.passes.rewrite import ORIGINAL_FORWARD, compile_forward
from gnmr_fx.recipe import FrozenRecipe, Recipe, get_recipe
from gnmr_fx.runtime import Controller, Site
from gnmr_fx.saved import Saver
from gnmr_fx.scope import AllSaved, get_scope
from gnmr_fx.units import HANDLE_PREFIX, LeftAlone, Marker, Unit, observers

CONTROLLER = f"{HANDLE_PREFIX}controller"
SAVER = f"{HANDLE_PREFIX}saver"
_SEED_MASK = (1 << 62) - 1  # room to count up in an int64
ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass
class InstalledForward:
    """A generated forward on a live module, and what was in its place on the instance (None = nothing)."""

    module: nn.Module
    forward: Forward
    replaced: Any

    def install(self) -> None:
        """Put it on the module instance; the class is untouched."""
        if self.replaced is not None:
            object.__setattr__(self.module, ORIGINAL_FORWARD, self.replaced)
        for attribute in self.forward.heads:
            object.__setattr__(self.module, attribute, Marker.LOSS_HEAD)
        function = compile_forward(self.forward, type(self.module).forward)
        object.__setattr__(self.module, "forward", types.MethodType(function, self.module))

    def remove(self) -> None:
        """Undo :meth:`install`."""
        for attribute in self.forward.heads:
            self.module.__dict__.pop(attribute, None)
        self.module.__dict__.pop("forward", None)
        self.module.__dict__.pop(ORIGINAL_FORWARD, None)
        if self.replaced is not None:
            object.__setattr__(self.module, "forward", self.replaced)


@dataclass
class RootForward:
    """The forward of the whole model, run under its saver in eager mode.

    Installed after all other generated forwards, and removed before them.

    Attributes:
        module: the model.
        saver: its saver.
        is_site: whether the model's own forward is a generated one, which runs inside this.
        replaced: else, what was in its place on the instance (None = nothing).
    """

    module: nn.Module
    saver: Saver
    is_site: bool
    replaced: Any

    def install(self) -> None:
        """Put it on the instance; the class is untouched."""
        module, names = self.module, {"is_compiling": torch.compiler.is_compiling, "partial": functools.partial}
        inner = "partial(type(self).forward, self)"
        if self.is_site:
            names["inner"], inner = module.__dict__["forward"].__func__, "partial(inner, self)"
        elif self.replaced is not None:
            object.__setattr__(module, ORIGINAL_FORWARD, self.replaced)
            inner = f"self.{ORIGINAL_FORWARD}"
        source = (
            "\ndef forward(self, *args, **kwargs):\n"
            "    if is_compiling():\n"
            f"        return {inner}(*args, **kwargs)\n"
            f"    return self.{SAVER}.run(self.training, {inner}, *args, **kwargs)\n"
        )
        function = compile_forward(Forward("", source, names, {}, "root"), type(module).forward)
        object.__setattr__(module, SAVER, self.saver)
        object.__setattr__(module, "forward", types.MethodType(function, module))

    def remove(self) -> None:
        """Undo :meth:`install`."""
        attributes = self.module.__dict__
        attributes.pop(SAVER, None)
        if not self.is_site:
            attributes.pop("forward", None)
            attributes.pop(ORIGINAL_FORWARD, None)
            if self.replaced is not None:
                object.__setattr__(self.module, "forward", self.replaced)


class FrozenParameter(NamedTuple):
    """A frozen parameter that is stored in another format, and where: ``(module, name)`` of all that hold it."""

    parameter: nn.Parameter
    holders: tuple[tuple[nn.Module, str], ...]

    def store(self, recipe: FrozenRecipe) -> None:
        """Put a :class:`FrozenWeight` in its place. With the residual on the host, the parameter moves there."""
        stored: Any = FrozenWeight.parameter(self.parameter, recipe.spec, recipe.residual)
        self.parameter.data = stored.plain()
        for module, name in self.holders:
            module._parameters[name] = stored
            if plain_weights not in module._state_dict_hooks.values():
                module.register_state_dict_post_hook(plain_weights)

    def restore(self) -> None:
        """Put it back, with the values that the weight has now, where it was not replaced since."""
        for module, name in self.holders:
            stored = FrozenWeight.held_by(module, name)
            if stored is not None:
                self.parameter.data = stored.plain().to(stored.device)
                module._parameters[name] = self.parameter
            for key in [key for key, hook in module._state_dict_hooks.items() if hook is plain_weights]:
                del module._state_dict_hooks[key]


def plain_weights(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Hook of ``state_dict``: frozen weights as plain tensors of their exact values, where those are kept."""
    for name in module._parameters:
        stored = FrozenWeight.held_by(module, name)
        if stored is not None and prefix + name in state:
            state[prefix + name] = stored.plain()


class ModelController(Controller):
    """A :class:`Controller` that also knows the generated forwards and the operators left alone."""

    frozen: list[FrozenParameter]

    forwards: list[InstalledForward]
    left_alone: tuple[LeftAlone, ...]
    capture_note: str
    root: RootForward | None = None

    @property
    def intercepts(self) -> bool:
        """Whether a forward meets its projections in a function mode."""
        return any(installed.forward.kind == "intercepted" for installed in self.forwards)

    def reinstall(self) -> None:
        """Put the generated forwards in place."""
        if self.intercepts:
            function_modes.show()
        for installed in self.forwards:
            installed.install()
        if self.root is not None:
            self.root.install()

    def remove_forwards(self) -> None:
        """Undo :meth:`reinstall`."""
        if self.root is not None:
            self.root.remove()
        for installed in self.forwards:
            installed.remove()


def instrument(
    model: ModelT,
    recipe: str | Recipe = "saved-int4-int8",
    *,
    max_active: int | float = 5,
    scope: str | AllSaved = "projections",
    config: GnmrConfig | None = None,
    include: Iterable[str] | str | None = None,
    exclude: Iterable[str] | str | None = None,
    example_inputs: Any = None,
) -> ModelT:
    """Give ``model`` budgeted recovery, in place; returns the same object.

    Projections (``F.linear``, ``addmm``, ``matmul``, ``einsum``, grouped GEMM against a parameter) keep the activation
    they need for the backward in the low-cost format of ``recipe``, or, for at most ``max_active`` of them at a time,
    in its recovery format. Outputs do not change at all, unless the recipe says how GEMMs are computed
    (``Recipe.gemm``): then outputs and gradients are those of the path in force, and in ``eval()`` those of the
    recovery path. Parameters, ``state_dict()``, class and training loop stay as they are; with the other recipes, so
    does everything in ``eval()`` and under ``no_grad``.

    Args:
        model: any module. Compile it, wrap it (DDP), move it before or after.
        recipe: a name in :data:`gnmr_fx.RECIPES`, or a :class:`gnmr_fx.Recipe`.
        max_active: the budget: a number of units (int, at least 0), or a share of them (float in (0, 1]). With
            ``config.budget_unit`` of ``"bytes"`` or ``"flops"`` a number of these, or a share of what all units cost.
        scope: ``"projections"``: what projections read is stored in another format. ``"all"``: whatever autograd keeps
            is, each tensor under the guard of the unit it belongs to; under torch.compile this needs its Inductor
            backend. :class:`gnmr_fx.AllSaved` is ``"all"`` with options.
        config: signal, thresholds, window, lock, warm-up and kind of budget of the controller. None:
            :meth:`gnmr_fx.GnmrConfig.recommended` for the recipe.
        include: globs on module paths: only units they match, the output head among them if they match it. By default
            all units but the output head.
        exclude: globs on module paths: not these.
        example_inputs: arguments of the model's forward (tuple, mapping of keyword arguments, or one tensor), to learn
            which operators share an input. Made from the configuration of a Hugging Face model if not given.

    Raises:
        AlreadyInstrumentedError, NoRecoverableOperatorError, LazyParameterError, PatternError, UnknownRecipeError,
        BudgetError, ConfigError, NativeKernelError, RecipeError: see each; the model is then as it was.
    """
    target = unwrap(model)
    _refuse_instrumented(target)
    chosen, everything = get_recipe(recipe), get_scope(scope)
    if config is not None and not isinstance(config, GnmrConfig):
        raise ConfigError(f"config: expected a GnmrConfig or None, found {config!r}. Build one with GnmrConfig(...).")
    settings = config or GnmrConfig.recommended(chosen)
    check_max_active(max_active, settings)
    _check_fit(chosen, everything, settings)
    selection = Selection(_patterns("include", include), _patterns("exclude", exclude))
    plan = pipeline.run(Plan(target, chosen, selection, example_inputs, marks_heads=everything is not None))
    check_gemms(target, plan, everything)
    install(target, plan, settings, max_active, everything)
    return model


def _check_fit(recipe: Recipe, scope: AllSaved | None, config: GnmrConfig) -> None:
    """Refuse settings that would have no effect under a recipe."""
    if recipe.frozen is not None and scope is not None:
        raise RecipeError(
            f"scope: expected 'projections' with a recipe for frozen weights, found 'all' with {recipe}; such a recipe "
            "says how weights are stored and no saved activation, so there is nothing to store for scope 'all'"
        )
    if recipe.frozen is not None and config.measures_errors:
        raise RecipeError(
            f"signal: expected 'gnmr' with a recipe for frozen weights, found {config.signal!r} with {recipe}; the "
            "error of a frozen weight is the same in every step"
        )
    if recipe.frozen is not None and config.budget_unit == "flops":
        raise RecipeError(
            f"budget_unit: expected 'units' or 'bytes' with a recipe for frozen weights, found 'flops' with {recipe}; "
            "both paths make the same GEMMs"
        )
    if recipe.frozen is None and recipe.low == recipe.high and config.budget_unit == "bytes":
        raise RecipeError(
            f"budget_unit: expected 'units' or 'flops' with a recipe that stores the same on both paths, found 'bytes' "
            f"with {recipe}; recovery takes no bytes, so such a budget would be no limit"
        )


def install(
    model: nn.Module, plan: Plan, config: GnmrConfig, max_active: int | float, scope: AllSaved | None = None
) -> ModelController:
    """Put a checked plan into force on its model."""
    units = [
        Unit(
            spec,
            index,
            model.get_submodule(spec.owner),
            adapters=model.get_submodule(spec.adapters) if spec.signal == "adapters" else None,
        )
        for index, spec in enumerate(plan.units)
    ]
    controller = ModelController(
        units, plan.recipe, config, max_active, seed=torch.initial_seed() & _SEED_MASK, scope=scope
    )
    index_of = {unit.name: unit.index for unit in units}
    controller.left_alone, controller.capture_note, controller.forwards = plan.left_alone, plan.capture_note, []
    for forward in plan.forwards:
        module = model.get_submodule(forward.site)
        controller.sites += [Site(module, name, index_of[unit]) for name, unit in forward.handles.items()]
        controller.forwards.append(InstalledForward(module, forward.without_graph(), module.__dict__.get("forward")))
    if controller.saver is not None:
        is_site = any(not forward.site for forward in plan.forwards)
        replaced = None if is_site else model.__dict__.get("forward")
        controller.root = RootForward(model, controller.saver, is_site, replaced)
    if plan.recipe.frozen is not None:
        controller.trained = model
    controller.frozen = []
    try:
        # First: a pickle restores attributes in their order, and the forward has to be in place before it is looked up.
        object.__setattr__(model, CONTROLLER, controller)
        if plan.recipe.frozen is not None:
            for unit in units:
                weight = unit.parameter
                assert weight is not None
                frozen = FrozenParameter(weight, tuple(holders_of(model, weight)))
                controller.frozen.append(frozen)
                frozen.store(plan.recipe.frozen)
        controller.connect()
        controller.reinstall()
    except BaseException:
        remove(model, controller)
        raise
    return controller


def uninstrument(model: ModelT) -> ModelT:
    """Undo :func:`instrument`: the model of before, exactly. Returns the same object.

    Raises:
        NotInstrumentedError: where there is nothing to undo.
    """
    target = unwrap(model)
    remove(target, controller(target))
    return model


def remove(model: nn.Module, installed: ModelController) -> None:
    """Take a controller, its handles and its forwards off the model."""
    installed.remove_forwards()
    installed.disconnect()
    for frozen in installed.frozen:
        frozen.restore()
    if not any(getattr(other, "intercepts", False) for other in observers()):
        function_modes.hide()
    model.__dict__.pop(CONTROLLER, None)


def controller(model: nn.Module) -> ModelController:
    """The controller of an instrumented model.

    Raises:
        NotInstrumentedError: for any other model.
    """
    found = unwrap(model).__dict__.get(CONTROLLER)
    if found is None:
        raise NotInstrumentedError(
            f"expected a model that gnmr_fx.instrument was called on, found a bare {type(model).__name__}; call "
            "gnmr_fx.instrument(model) first, and pass that same object (not one of its parts or a model around it)"
        )
    assert isinstance(found, ModelController)
    return found


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile``'s and DDP's wrappers.

    Raises:
        TypeError: where ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, found {type(model).__name__}")
    while True:
        inner = model._modules.get("_orig_mod") if "_orig_mod" in model._modules else None
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def check_gemms(model: nn.Module, plan: Plan, scope: AllSaved | None) -> None:
    """Refuse what a recipe for GEMMs cannot do."""
    if plan.recipe.gemm is None:
        return
    if scope is not None:
        raise RecipeError(
            f"expected scope='projections' with recipe {plan.recipe.name or plan.recipe}, which says how GEMMs are "
            "computed, found scope='all'; choose a recipe that only stores activations (saved-*) for scope='all'"
        )
    for unit in plan.units:
        device = model.get_submodule(unit.owner).get_parameter(unit.parameter).device
        if device.type != "meta":
            check_native(plan.recipe.gemm, device)


def _refuse_instrumented(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if any(name.startswith(HANDLE_PREFIX) for name in module.__dict__):
            raise AlreadyInstrumentedError(
                f"expected a model that is not instrumented, found gnmr-fx at {path or 'its root'!r} already; call "
                "gnmr_fx.uninstrument(model) first to change the recipe, the budget or the patterns"
            )


def _patterns(option: str, patterns: Iterable[str] | str | None) -> tuple[str, ...] | None:
    if patterns is None:
        return None
    found = (patterns,) if isinstance(patterns, str) else tuple(patterns) if isinstance(patterns, Iterable) else (None,)
    if (not found and option == "include") or not all(isinstance(p, str) and p for p in found):
        raise PatternError(f"{option}: expected one or more glob patterns on module paths, found {patterns!r}")
    return found
