"""Frozen weights in 8 or 4 bits, with their exact values kept elsewhere.

A :class:`FrozenWeight` takes the place of a frozen parameter. On its device it holds the weight in the low-cost format
only; the exact values, its *residual*, lie on the host (pinned where the device is a GPU) or on the device. Guarded
projections compute with either (:mod:`gnmr_fx.frozen_ops`). To everything else it is the weight it stands for: any
operation reads the exact values, bit for bit, and a write (``copy_``, ``weight.data += delta``, ``load_state_dict``)
changes them and stores the low-cost format anew.
"""

from __future__ import annotations

import copy
import functools
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from gnmr_fx import formats, kernels
from gnmr_fx.formats import Encoded
from gnmr_fx.recipe import NF4, Residual, parse_format

__all__ = ["FrozenWeight", "decode", "encode", "nbytes", "unfit"]

_NF4_BLOCK, _NF4_SCALER_BLOCK, _NF4_VALUES = 64, 256, 16


# --- formats --------------------------------------------------------------------------------------------------------


def encode(weight: Tensor, spec: str) -> Encoded:
    """``weight`` in the low-cost format of that spec.

    NF4 is torchao's: the payload is its codes, two a byte, and then its 8-bit scalers, one per 64 elements; the scales,
    in the dtype of the weight, are the mean of the scalers, the 16 values of the codes, and one factor per 256 scalers.
    """
    weight = weight.detach()
    if spec != NF4:
        return kernels.encode(weight.contiguous(), parse_format(spec))
    blocks = weight.numel() // _NF4_BLOCK
    stored = _torchao().to_nf4(weight.reshape(-1), _NF4_BLOCK, math.gcd(blocks, _NF4_SCALER_BLOCK))
    payload = torch.cat((stored.quantized_data, stored.quantized_scalers.view(torch.uint8)))
    return Encoded(payload, torch.cat((stored.scaler_mean.view(1), stored.nf4, stored.quantization_factor)))


def decode(encoded: Encoded, spec: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The weight of that shape, as ``encoded`` stores it, in ``dtype``; contiguous."""
    if spec != NF4:
        return kernels.decode(encoded, parse_format(spec), shape, dtype)
    count = math.prod(shape)
    codes, scalers = encoded.payload[: count // 2], encoded.payload[count // 2 :].view(torch.int8)
    mean, values, factors = encoded.scales.split((1, _NF4_VALUES, encoded.scales.numel() - 1 - _NF4_VALUES))
    meta = _torchao().SubclassTensorArgs(torch.Size(shape), (), 0, values.dtype, codes.device, False)
    block = scalers.numel() // factors.numel()
    meta = replace(meta, original_strides=torch._prims_common.make_contiguous_strides_for(tuple(shape)))
    stored = _torchao().NF4Tensor(meta, _NF4_BLOCK, scalers.numel(), block, scalers, factors, mean, codes, values)
    weight: Tensor = stored.get_original_weight()
    return weight.to(dtype)


@functools.cache
def _torchao() -> Any:
    """The module of torchao's NF4 tensor, imported on first use."""
    formats.torchao_primitives()  # quietly
    return importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")


def nbytes(shape: Sequence[int], spec: str, dtype: torch.dtype) -> int:
    """Bytes of a weight of that shape and dtype in the low-cost format, scales included."""
    if spec != NF4:
        return formats.nbytes(shape, parse_format(spec), dtype)
    count = math.prod(shape)
    blocks = count // _NF4_BLOCK
    factors = blocks // math.gcd(blocks, _NF4_SCALER_BLOCK)
    return count // 2 + blocks + (1 + _NF4_VALUES + factors) * dtype.itemsize


def unfit(weight: Tensor, spec: str) -> str:
    """Why a weight cannot be stored in that format, or ""."""
    if spec == NF4 and (weight.numel() == 0 or weight.numel() % _NF4_BLOCK):
        return f"NF4 stores multiples of {_NF4_BLOCK} elements, found {weight.numel()}"
    return ""


# --- the weight -----------------------------------------------------------------------------------------------------


class Store:
    """What a :class:`FrozenWeight` and its aliases hold in common.

    Attributes:
        low: the weight in the low-cost format, on the weight's device.
        residual: its exact values, on the host or on that device.
        spec: of the low-cost format.
        place: where the residual is kept.
        recovered: the exact values on the weight's device, while its unit is on the recovery path; else None.
    """

    __slots__ = ("low", "place", "recovered", "residual", "spec")

    def __init__(self, low: Encoded, residual: Tensor, spec: str, place: Residual) -> None:
        self.low = low
        self.residual = residual
        self.spec = spec
        self.place: Residual = place
        self.recovered: Tensor | None = None

    @classmethod
    def of(cls, values: Tensor, spec: str, place: Residual) -> Store:
        """Store the exact ``values`` of a weight. Where they lie as they should already, they are kept, not copied."""
        residual = values if place == "device" else _pinned(values.to("cpu"), values.device)
        return cls(encode(values, spec), residual, spec, place)

    @property
    def device(self) -> torch.device:
        """Of the weight."""
        return self.low.payload.device

    def exact(self) -> Tensor:
        """The exact values on the weight's device."""
        if self.recovered is not None:
            return self.recovered
        return self.residual.to(self.device, non_blocking=True)

    def recover(self) -> None:
        """Bring the exact values to the weight's device, for as long as the unit is on the recovery path."""
        if self.recovered is None:
            self.recovered = self.exact()

    def release(self) -> None:
        """Let go of them there."""
        self.recovered = None

    def write(self, values: Tensor) -> None:
        """Take over other exact values of the same shape."""
        if values is not self.residual:
            self.residual.copy_(values)
        if self.recovered is not None and self.recovered is not values:
            self.recovered.copy_(values)
        new = encode(values.to(self.device, self.residual.dtype), self.spec)
        self.low.payload.copy_(new.payload)
        self.low.scales.copy_(new.scales)

    def moved(self, device: torch.device | None, dtype: torch.dtype | None) -> Store:
        """The same weight on another device or in another dtype, which is stored anew."""
        device, dtype = device or self.device, dtype or self.residual.dtype
        if dtype != self.residual.dtype:
            return Store.of(self.residual.to(device, dtype), self.spec, self.place)
        low = Encoded(self.low.payload.to(device), self.low.scales.to(device))
        residual = self.residual if self.place == "host" else self.residual.to(device)
        return Store(low, _pinned(residual, device), self.spec, self.place)

    def copy(self) -> Store:
        """One of its own, with memory of its own."""
        low = Encoded(self.low.payload.clone(), self.low.scales.clone())
        return Store(low, self.residual.clone(), self.spec, self.place)

    def __deepcopy__(self, memo: dict[int, Any]) -> Store:
        low, residual = copy.deepcopy((self.low, self.residual), memo)
        return Store(low, residual, self.spec, self.place)

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.low, self.residual, self.spec, self.place)


def _pinned(residual: Tensor, device: torch.device) -> Tensor:
    """On the host, in memory that a GPU copies from by itself, if the weight is on one."""
    return residual.pin_memory() if residual.device.type == "cpu" and device.type == "cuda" else residual


class FrozenWeight(Tensor):
    """A frozen weight in a low-cost format; see :mod:`gnmr_fx.frozen`."""

    store: Store

    @staticmethod
    def __new__(cls, store: Store, requires_grad: bool = False) -> FrozenWeight:
        values = store.residual
        made: FrozenWeight = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), dtype=values.dtype, device=store.device, requires_grad=requires_grad
        )
        made.store = store
        return made

    @staticmethod
    def held_by(module: nn.Module, name: str) -> FrozenWeight | None:
        """The frozen weight that ``module`` holds under that name; None where it holds something else."""
        held: Any = module.__dict__.get("_parameters", {}).get(name)
        return held if isinstance(held, FrozenWeight) else None

    @classmethod
    def parameter(cls, values: Tensor, spec: str, place: Residual) -> nn.Parameter:
        """A parameter of the exact ``values``, stored in the format of ``spec``."""
        return nn.Parameter(cls(Store.of(values.detach(), spec, place)), requires_grad=False)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        own = _OWN.get(func)
        if own is not None and isinstance(args[0], FrozenWeight):
            return own(*args, **kwargs)
        if func._schema.is_mutable:
            return _written(func, args, kwargs)
        plain_args, plain_kwargs = tree_map_only(FrozenWeight, lambda weight: weight.store.exact(), (args, kwargs))
        out = func(*plain_args, **plain_kwargs)
        is_view = any(returned.alias_info is not None for returned in func._schema.returns)
        if is_view and type(plain_args[0]) is Tensor:  # not while it is traced
            return tree_map_only(Tensor, functools.partial(WeightView, args[0].store, plain_args[0]), out)
        return out

    # Subclass protocol of torch.compile: the inner tensors by name, and the weight around others of them.

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, Residual]]:
        return ["payload", "scales", "residual"], (self.store.spec, self.store.place)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> FrozenWeight:
        return FrozenWeight(Store(Encoded(inner["payload"], inner["scales"]), inner["residual"], *context))

    @property
    def payload(self) -> Tensor:
        """Codes of the low-cost format."""
        return self.store.low.payload

    @property
    def scales(self) -> Tensor:
        """Scales of the low-cost format."""
        return self.store.low.scales

    @property
    def residual(self) -> Tensor:
        """The exact values, where they are kept."""
        return self.store.residual

    @property
    def data(self) -> Tensor:
        """As of any tensor: an alias, without a history."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        with torch.no_grad():
            if isinstance(values, FrozenWeight):
                values = values.store.residual
            if values.shape != self.shape or values.dtype != self.dtype:
                raise TypeError(
                    f"expected new values of shape {tuple(self.shape)} and {self.dtype}, found {tuple(values.shape)} "
                    f"and {values.dtype}; to change either, call gnmr_fx.uninstrument first"
                )
            self.copy_(values)

    def tolist(self) -> Any:
        """The exact values as Python numbers."""
        return self.store.residual.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """A copy of the exact values, for there is no memory on the device to share."""
        return self.store.residual.clone().numpy(force=force)

    def plain(self) -> Tensor:
        """The exact values as a plain tensor, where they are kept."""
        return self.store.residual.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenWeight:
        if id(self) not in memo:
            memo[id(self)] = self._rebuilt(copy.deepcopy(self.store, memo))
        made: FrozenWeight = memo[id(self)]
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (self.store, self.requires_grad, getattr(self, "_is_param", False))

    def _rebuilt(self, store: Store) -> FrozenWeight:
        return _rebuild(store, self.requires_grad, getattr(self, "_is_param", False))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FrozenWeight({tuple(self.shape)}, {self.dtype}, {self.store.spec}, residual on the {self.store.place})"


class WeightView(Tensor):
    """A view of the exact values of a frozen weight. A write to it changes the weight, which is then stored anew."""

    store: Store
    exact: Tensor
    view_: Tensor

    @staticmethod
    def __new__(cls, store: Store, exact: Tensor, view: Tensor) -> WeightView:
        made: WeightView = torch.Tensor._make_wrapper_subclass(
            cls, view.shape, view.stride(), view.storage_offset(), dtype=view.dtype, device=view.device
        )
        made.store, made.exact, made.view_ = store, exact, view
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        views = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, WeightView)]
        plain_args, plain_kwargs = tree_map_only(WeightView, lambda view: view.view_, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            for view in views:
                view.store.write(view.exact)
            return tree_map_only(Tensor, lambda t: next((v for v in views if v.view_ is t), t), out)
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return tree_map_only(Tensor, functools.partial(WeightView, views[0].store, views[0].exact), out)
        return out

    def tolist(self) -> Any:
        """The exact values as Python numbers."""
        return self.view_.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """A copy of the exact values."""
        return self.view_.clone().numpy(force=force)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"WeightView({self.view_!r})"


def _rebuild(store: Store, requires_grad: bool, is_parameter: bool) -> FrozenWeight:
    made = FrozenWeight(store, requires_grad)
    if is_parameter:
        made._is_param = True  # how nn.Parameter marks a tensor subclass
    return made


def _detach(weight: FrozenWeight) -> FrozenWeight:
    return FrozenWeight(weight.store)


def _clone(weight: FrozenWeight, **_: Any) -> FrozenWeight:
    return FrozenWeight(weight.store.copy())


def _to_copy(weight: FrozenWeight, **options: Any) -> Tensor:
    dtype, device = options.get("dtype"), options.get("device")
    if dtype is not None and not dtype.is_floating_point:
        return torch.ops.aten._to_copy.default(weight.store.exact(), **options)
    return FrozenWeight(weight.store.moved(device, dtype))


def _copy(weight: FrozenWeight, source: Tensor, non_blocking: bool = False) -> FrozenWeight:
    values = source.store.residual if isinstance(source, FrozenWeight) else source
    weight.store.write(values.expand(weight.shape))
    return weight


_OWN: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.detach.default: _detach,
    torch.ops.aten.alias.default: _detach,
    torch.ops.aten.clone.default: _clone,
    torch.ops.aten._to_copy.default: _to_copy,
    torch.ops.aten.copy_.default: _copy,
}
"""Operations whose result is a frozen weight again, or that need not read the exact values."""


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation that writes to its arguments: on the exact values, which are then stored anew."""
    names = [argument.name for argument in func._schema.arguments]
    mutated = {argument.name for argument in func._schema.arguments if argument.is_write}
    exact: dict[int, Tensor] = {}

    def values(weight: FrozenWeight) -> Tensor:
        return exact.setdefault(id(weight.store), weight.store.exact())

    plain_args, plain_kwargs = tree_map_only(FrozenWeight, values, (args, kwargs))
    out = func(*plain_args, **plain_kwargs)
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    written: dict[int, FrozenWeight] = {}  # by the tensor that the operation wrote to
    for weight in tree_leaves([bound.get(name) for name in mutated]):
        if isinstance(weight, FrozenWeight):
            values_now = exact[id(weight.store)]
            weight.store.write(values_now)
            written[id(values_now)] = weight
    return tree_map_only(Tensor, lambda t: written.get(id(t), t), out)
