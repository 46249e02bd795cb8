"""The table of a model that is not run: bytes from shapes, whatever the model's size.

The model is built on the meta device and given fake parameters; its forward then runs on fake tensors, which have
shapes and dtypes and no values or memory. What each projection reads, and in scope "all" what autograd would keep in
eager mode, is counted as it is in a real run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gnmr_fx.config import GnmrConfig
from gnmr_fx.instrument import ModelController, check_gemms, install, remove
from gnmr_fx.operator_table import Table, table
from gnmr_fx.ops import stored_shape
from gnmr_fx.passes import pipeline
from gnmr_fx.passes.capture import capture, example, inputs_from_config, split_inputs
from gnmr_fx.passes.check import check
from gnmr_fx.passes.plan import Plan, Selection, weight_paths
from gnmr_fx.passes.record import record
from gnmr_fx.passes.rewrite import rewrite
from gnmr_fx.recipe import Recipe, get_recipe
from gnmr_fx.scope import AllSaved, get_scope
from gnmr_fx.units import Handle, Kept

__all__ = ["faked", "inputs_of", "predict"]

LOOKED_AT: tuple[pipeline.Pass, ...] = tuple(
    record if step is capture else step for step in pipeline.PASSES if step not in (rewrite, check)
)
"""The passes that tell what there is, with a run on fake tensors in place of Dynamo."""


def predict(
    model: nn.Module,
    recipe: str | Recipe,
    *,
    inputs: Any,
    max_active: int | float = 5,
    scope: str | AllSaved = "projections",
    include: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
) -> Table:
    """The table that :func:`gnmr_fx.table` would give after a forward in training mode.

    Args:
        model: built on the meta device (or any). Its parameters become fake ones: it is of no use afterwards.
        recipe, max_active, scope, include, exclude: as for :func:`gnmr_fx.instrument`.
        inputs: arguments of the model's forward: a tuple, a mapping of keyword arguments, or one tensor; only their
            shapes and dtypes matter. None where none are known: then bytes are not known either.

    Returns:
        A :class:`Table` whose ``predicted`` says what its bytes are for. In scope ``"all"`` they are those of eager
        mode: under torch.compile, Inductor's partitioner decides what is kept. What computes a recipe's GEMMs is known
        where they run, not here.

    Raises:
        NoRecoverableOperatorError, PatternError, BudgetError, ...: as :func:`gnmr_fx.instrument` does.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = faked(model, mode).train()
    everything = get_scope(scope)
    selection = Selection(None if include is None else tuple(include), None if exclude is None else tuple(exclude))
    args, kwargs = split_inputs(inputs) if inputs is not None else ((), {})
    arguments = (tuple(_fake(a, mode) for a in args), {name: _fake(a, mode) for name, a in kwargs.items()})
    given = None if inputs is None else arguments[0] or arguments[1]
    plan = Plan(model, get_recipe(recipe), selection, given, marks_heads=everything is not None)
    with mode:
        plan = pipeline.run(plan, LOOKED_AT)
        hidden = any(call.input is None and not call.reason for call in plan.calls)  # inside nn.MultiheadAttention
        stores = plan.recipe.gemm is None and plan.recipe.frozen is None
        runs = everything is not None or (hidden and stores)
        if runs:
            plan = pipeline.run(plan, (rewrite, check))
    check_gemms(model, plan, everything)
    installed = install(model, plan, GnmrConfig.recommended(plan.recipe), max_active, everything)
    try:
        known = inputs is not None and not plan.capture_note
        if known and not runs:
            _count_projections(plan, installed)
        elif known:
            with mode, _low(installed), torch.enable_grad():
                model(*arguments[0], **arguments[1])
        return replace(table(model), predicted=_what_for(arguments, everything) if known else "")
    finally:
        remove(model, installed)


def _what_for(arguments: tuple[tuple[Any, ...], Mapping[str, Any]], scope: AllSaved | None) -> str:
    shapes = [f"{'×'.join(map(str, value.shape))}" for value in arguments[0] if isinstance(value, Tensor)]
    shapes += [
        f"{n} {'×'.join(map(str, value.shape))}" for n, value in arguments[1].items() if isinstance(value, Tensor)
    ]
    how = "" if scope is None else ", for eager mode: under torch.compile its partitioner decides what is kept"
    return f"from shapes, without a run; inputs {', '.join(shapes)}{how}"


def _count_projections(plan: Plan, installed: ModelController) -> None:
    """Enter what each captured projection reads as if it had run guarded (:func:`gnmr_fx.ops.guarded_projection`)."""
    paths = weight_paths(plan.model)
    unit_of = {paths[id(unit.parameter)]: unit for unit in installed.units}
    for call in plan.calls:
        unit = unit_of.get(call.weight)
        if unit is not None and plan.recipe.frozen is not None:
            unit.observation.was_seen = True
        if unit is None or call.input is None:
            continue
        x = example(call.input)
        if x.is_floating_point() and unit.trainable:
            unit.observation.add(Kept(tuple(stored_shape(x.shape)), x.dtype))


class _NeverSet:
    """Stands for a guard that is low, and that is no controller's."""

    def __bool__(self) -> bool:
        return False

    def item(self) -> bool:
        return False

    def storage_offset(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return 0

    def element_size(self) -> int:
        return 1


@contextmanager
def _low(installed: ModelController) -> Iterator[None]:
    """Fake tensors cannot read a flag: for as long as this lasts, handles have guards that are plainly low."""
    handles: list[tuple[Handle, Tensor]] = []
    for site in installed.sites:
        handle = getattr(site.module, site.attribute)
        handles.append((handle, handle.guard))
    if installed.saver is not None:
        handles.append((installed.saver.first, installed.saver.first.guard))
    for handle, _ in handles:
        handle.guard = _NeverSet()  # type: ignore[assignment]
    try:
        yield
    finally:
        for handle, guard in handles:
            handle.guard = guard


def faked(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """``model`` with fake CPU tensors for its parameters and buffers, in place; what shared one still does."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for values in (module._parameters, module._buffers):
            for name, value in values.items():
                if value is not None:
                    if id(value) not in made:
                        made[id(value)] = (value, _fake(value, mode))
                    values[name] = made[id(value)][1]
    return model


def _fake(value: Any, mode: FakeTensorMode) -> Any:
    """A fake tensor of the shape, strides and dtype of ``value``, on the CPU; anything but a tensor as it is."""
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        return value
    if value.device.type != "meta" and not isinstance(value, nn.Parameter):
        return mode.from_tensor(value)  # a buffer with values, some of which may be known constants
    with mode:
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return nn.Parameter(fake, value.requires_grad) if isinstance(value, nn.Parameter) else fake


def inputs_of(model: nn.Module, batch: int, sequence: int) -> dict[str, Tensor] | None:
    """Inputs of a Hugging Face model on the meta device: token ids ``[batch, sequence]``, or ``batch`` images.

    Returns:
        None where the model has no configuration to make them from.
    """
    found = inputs_from_config(model)
    if found is None:
        return None
    sizes = {name: value.shape[1:] if value.is_floating_point() else (sequence,) for name, value in found.items()}
    return {name: torch.empty((batch, *sizes[name]), dtype=value.dtype, device="meta") for name, value in found.items()}
