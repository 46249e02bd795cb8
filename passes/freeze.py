"""Passes ``admit`` and ``freeze``: what a recipe for frozen weights needs of a model, and which projections are units.

Both do nothing under any other recipe. ``admit`` runs before everything else, and refuses weights that another library
quantized, and a model that trains nothing. ``freeze`` keeps those units that are projections with a frozen weight, and
finds what each one's signal is.

A unit's adapters are the trainable parameters below the nearest module that holds its weight and any trainable one
(PEFT's ``LoraLayer``, or a module that holds weight and adapters itself). Where that is the whole model, a container,
or a module that holds other units as well, they are not this unit's own, and its signal is the gradient of its output.

Invariants: no unit has a trainable weight; no parameter is an adapter of two units; what was a unit before is a unit or
in ``left_alone``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor, fx, nn

from gnmr_fx import frozen
from gnmr_fx.distributed import is_distributed
from gnmr_fx.errors import AdapterError, QuantizedWeightError
from gnmr_fx.passes.find import matches
from gnmr_fx.passes.plan import Plan
from gnmr_fx.passes.trace import graph_calls, unfit, weight_of
from gnmr_fx.projections import Call
from gnmr_fx.units import LeftAlone, UnitSpec

TRAINABLE = "trainable: this recipe is for frozen weights"
ADAPTER = "an adapter"
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def admit(plan: Plan) -> Plan:
    """Return ``plan`` unchanged.

    Raises:
        AdapterError: where no parameter of the model is trainable.
        QuantizedWeightError: where a weight is quantized already, or no floating-point tensor.
    """
    if plan.recipe.frozen is None:
        return plan
    parameters = dict(plan.model.named_parameters())
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise AdapterError(
            f"expected a model with adapters that train, for {plan.recipe}, found {len(parameters)} parameters in "
            f"{type(plan.model).__name__} and none of them trainable; wrap it first (peft.get_peft_model), and load "
            "adapters with is_trainable=True"
        )
    for name, parameter in parameters.items():
        reason = unfit(parameter)
        if reason and parameter.dim() >= 2 and _is_wanted(plan, name.removesuffix(".weight")):
            raise QuantizedWeightError(
                f"expected plain floating-point weights to quantize, for {plan.recipe}, found that of {name!r}: it is "
                f"a {_class_name(parameter)} of {parameter.dtype} ({reason}); load the model without that library's "
                "quantization, or leave the operator alone with exclude=[...]"
            )
    return plan


def freeze(plan: Plan) -> Plan:
    """Keep the units whose weight is frozen and can be stored; fill in their ``signal`` and ``adapters``.

    Raises:
        AdapterError: where none is left.
        QuantizedWeightError: where one is sharded.
    """
    if plan.recipe.frozen is None:
        return plan
    units: list[UnitSpec] = []
    left: list[LeftAlone] = []
    for unit in plan.units:
        reason = _why_not(plan, unit, plan.recipe.frozen.spec)
        if reason:
            left.append(LeftAlone(unit.name, unit.operator, unit.shape, reason))
        else:
            units.append(unit)
    if not units:
        trainable = sum(item.reason == TRAINABLE for item in left)
        raise AdapterError(
            f"expected frozen projections under adapters that train, for {plan.recipe}, found {trainable} trainable "
            f"projections and no frozen one that can be stored{_first_reason(left)}; wrap the model first "
            "(peft.get_peft_model), or freeze its base weights (requires_grad_(False))"
        )
    held = Counter(path for unit in units for path in _outwards(unit.owner))  # units below each module
    return replace(
        plan, units=tuple(_with_signal(plan.model, u, held) for u in units), left_alone=(*plan.left_alone, *left)
    )


def _with_signal(model: nn.Module, unit: UnitSpec, held: Counter[str]) -> UnitSpec:
    for path in _outwards(unit.owner):
        module = model.get_submodule(path)
        if any(parameter.requires_grad for parameter in module.parameters()):
            own = path == unit.owner or (path and not isinstance(module, _CONTAINERS))
            return replace(unit, signal="adapters", adapters=path) if own and held[path] == 1 else _by_output(unit)
    return _by_output(unit)


def _by_output(unit: UnitSpec) -> UnitSpec:
    return replace(unit, signal="output")


def _why_not(plan: Plan, unit: UnitSpec, spec: str) -> str:
    weight = plan.model.get_submodule(unit.owner).get_parameter(unit.parameter)
    if weight.requires_grad:
        return TRAINABLE
    if _is_adapter(plan.model, unit.owner):
        return ADAPTER
    if is_distributed(weight):
        raise QuantizedWeightError(
            f"expected plain weights to quantize, for {plan.recipe}, found that of {unit.name!r} sharded (a "
            f"{type(weight.data).__name__}); call gnmr_fx.instrument first, and then fully_shard with the frozen "
            "weights as ignored_params"
        )
    if any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module, _ in holders_of(plan.model, weight)):
        return "an embedding reads it too"
    if _reads_a_part(plan, unit, weight):
        return "a view or slice of the weight is read, not the whole"
    return frozen.unfit(weight, spec)


def holders_of(model: nn.Module, weight: Tensor) -> list[tuple[nn.Module, str]]:
    """The modules that hold ``weight``, and its names there."""
    return [(module, name) for module in model.modules() for name, own in module._parameters.items() if own is weight]


def _is_adapter(model: nn.Module, path: str) -> bool:
    """Whether the module at ``path`` is part of an adapter, as PEFT's layers name them; inactive ones are frozen."""
    module, inside = model, False
    for name in filter(None, path.split(".")):
        inside = inside or name in getattr(module, "adapter_layer_names", ())
        module = getattr(module, name)
    return inside


def _reads_a_part(plan: Plan, unit: UnitSpec, weight: Tensor) -> bool:
    """Whether some call takes a view of the weight; where no code was seen, whether it is a stack of matrices."""
    seen = False
    for finding in plan.findings:
        if (finding.site, finding.weight) in unit.sites and finding.traced is not None:
            for _, call in graph_calls(plan.model.get_submodule(finding.site), finding.traced):
                if isinstance(call, Call) and weight_of(call.weight) == finding.weight:
                    seen = True
                    if call.weight.op != "get_attr":
                        return True
    names = {f"{module}.{name}".lstrip(".") for module, name in _paths_of(plan.model, weight)}
    for captured in plan.calls:
        if captured.weight in names:
            seen = True
            if not any(_is_whole(node, weight) for node in captured.node.all_input_nodes):
                return True
    return not seen and weight.dim() > 2


def _paths_of(model: nn.Module, weight: Tensor) -> list[tuple[str, str]]:
    return [
        (path, name)
        for path, module in model.named_modules()
        for name, own in module._parameters.items()
        if own is weight
    ]


def _is_whole(node: fx.Node, weight: Tensor) -> bool:
    value = node.meta.get("example_value")
    return node.op == "placeholder" and isinstance(value, Tensor) and value.shape == weight.shape


def _outwards(path: str) -> Iterator[str]:
    """Paths of the module at ``path`` and of those it lies in, the model itself last."""
    parts = path.split(".") if path else []
    for end in range(len(parts), -1, -1):
        yield ".".join(parts[:end])


def _is_wanted(plan: Plan, name: str) -> bool:
    include, exclude = plan.selection.include, plan.selection.exclude
    if include is not None and not any(matches(name, pattern) for pattern in include):
        return False
    return not any(matches(name, pattern) for pattern in exclude or ())


def _class_name(parameter: Tensor) -> str:
    kinds = [type(parameter), type(parameter.data)]
    return next((kind.__name__ for kind in kinds if kind not in (nn.Parameter, Tensor)), "plain parameter")


def _first_reason(left: list[LeftAlone]) -> str:
    other = [item for item in left if item.reason != TRAINABLE]
    return f" ({other[0].name}: {other[0].reason})" if other else ""
