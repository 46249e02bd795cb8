"""Formats and recipes: what a tensor is stored as, on the low-cost and on the recovery path.

Plain frozen data, validated when built; nothing here touches a tensor. :mod:`gnmr_fx.formats` gives a
:class:`Format` its meaning.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from gnmr_fx.errors import FormatError, UnknownRecipeError

__all__ = [
    "DEFAULT_RECIPE",
    "FULL",
    "NF4",
    "RECIPES",
    "Backend",
    "Format",
    "FormatDtype",
    "FrozenRecipe",
    "GemmPaths",
    "GemmRecipe",
    "Granularity",
    "Operands",
    "Recipe",
    "Residual",
    "Rounding",
    "ScaleDtype",
    "dsv3",
    "dynamic_gemm",
    "get_recipe",
]

FormatDtype = Literal["int2", "int3", "int4", "int8", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3", "fp8_e5m2", "bf16", "none"]
Granularity = Literal["tensor", "token", "group", "block"]
Rounding = Literal["nearest", "stochastic"]
ScaleDtype = Literal["bf16", "fp32", "e8m0"]
Backend = Literal["auto", "native", "emulated"]
Residual = Literal["device", "host"]
Path = Literal["low", "high"]

NF4 = "nf4"
"""Spec of the 4-bit NormalFloat format with double quantization (QLoRA, arXiv 2305.14314), as torchao has it."""

_BITS: Mapping[str, int | None] = MappingProxyType({
    "int2": 2, "int3": 3, "int4": 4, "int8": 8, "fp6_e2m3": 6, "fp6_e3m2": 6, "fp8_e4m3": 8, "fp8_e5m2": 8, "bf16": 16,
    "none": None,
})  # fmt: skip
_INTEGER = ("int2", "int3", "int4", "int8")
_UNSCALED = ("bf16", "none")
_SIZED = ("group", "block")
_SPEC = (
    r"(?P<dtype>\w+)(?:/(?P<granularity>tensor|token|group|block)(?P<size>\d*)"
    r"(?:/(?P<rounding>\w+)(?:/(?P<scale>\w+)(?P<symmetric>/symmetric)?)?)?)?"
)


@dataclass(frozen=True)
class Format:
    """How one tensor is stored.

    Args:
        dtype: ``"int2"``, ``"int3"``, ``"int4"``, ``"int8"`` (affine, zero kept exactly), ``"fp6_e2m3"``,
            ``"fp6_e3m2"``, ``"fp8_e4m3"``, ``"fp8_e5m2"`` (symmetric), ``"bf16"`` (a plain cast) or ``"none"`` (kept as
            it is, in its own dtype, lossless).
        granularity: what shares one scale: the whole ``"tensor"``, a ``"token"`` (a row of the last
            dimension), a ``"group"`` of at most ``group_size`` neighbours in a row, or a ``"block"`` of at most
            ``group_size`` by ``group_size`` elements of the last two dimensions.
        group_size: elements per group (per side of a block), at least 1; otherwise set to 0.
        rounding: ``"nearest"`` (ties to even), or ``"stochastic"`` (unbiased; not for ``"bf16"`` and ``"none"``).
        scale: dtype of the scales: ``"bf16"``, ``"fp32"``, or ``"e8m0"``, a power of two in one byte (float dtypes
            only; with groups of 32 that is an OCP MX format).
        symmetric: for ``"int8"``: codes from -127 to 127 without a zero point, as an integer GEMM takes them.

    ``"bf16"`` and ``"none"`` have no scales: their other fields are set to ``"token"``, 0, ``"bf16"`` and False,
    so that equal formats compare equal.

    Raises:
        FormatError: for a value outside these.
    """

    dtype: FormatDtype
    granularity: Granularity = "group"
    group_size: int = 128
    rounding: Rounding = "nearest"
    scale: ScaleDtype = "bf16"
    symmetric: bool = False

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, get_args(FormatDtype))
        _check_choice("granularity", self.granularity, get_args(Granularity))
        _check_choice("rounding", self.rounding, get_args(Rounding))
        _check_choice("scale", self.scale, get_args(ScaleDtype))
        if not isinstance(self.symmetric, bool):
            raise FormatError(f"expected symmetric to be True or False, found {self.symmetric!r}")
        if self.dtype in _UNSCALED:
            if self.rounding == "stochastic":
                raise FormatError(
                    f"expected rounding='nearest' for dtype {self.dtype!r}, found 'stochastic'; "
                    "stochastic rounding exists for the int and float dtypes that have scales"
                )
            for field, value in (("granularity", "token"), ("scale", "bf16"), ("symmetric", False)):
                object.__setattr__(self, field, value)
        if self.symmetric and self.dtype != "int8":
            raise FormatError(
                f"expected symmetric=True with dtype 'int8' only, found it with {self.dtype!r}; float dtypes are "
                "symmetric without it, and narrower integers are affine"
            )
        if self.scale == "e8m0" and self.is_integer:
            raise FormatError(
                f"expected scale 'bf16' or 'fp32' for dtype {self.dtype!r}, found 'e8m0'; a power of two would waste "
                "part of an integer's few codes, it is for the float dtypes"
            )
        if self.granularity not in _SIZED:
            object.__setattr__(self, "group_size", 0)
        elif isinstance(self.group_size, bool) or not isinstance(self.group_size, int) or self.group_size < 1:
            raise FormatError(f"expected group_size to be an int from 1, found {self.group_size!r}; 128 is the default")
        # Hashed on every kernel call: computed once.
        object.__setattr__(self, "_hash", hash(self._fields()))

    def _fields(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return, unused-ignore]

    def __reduce__(self) -> tuple[object, ...]:
        # String hashes differ between processes, so the cached one must not travel in a pickle.
        return type(self), self._fields()

    @property
    def bits(self) -> int | None:
        """Bits per stored element, scales left out; None for ``"none"`` (the tensor's own width)."""
        return _BITS[self.dtype]

    @property
    def is_integer(self) -> bool:
        """Whether elements are stored as packed integer codes."""
        return self.dtype in _INTEGER

    @property
    def is_fp8(self) -> bool:
        """Whether elements are stored as 8-bit floats."""
        return self.dtype in ("fp8_e4m3", "fp8_e5m2")

    @property
    def is_fp6(self) -> bool:
        """Whether elements are stored as 6-bit floats."""
        return self.dtype in ("fp6_e2m3", "fp6_e3m2")

    @property
    def is_scaled(self) -> bool:
        """Whether groups carry scales (the int and float dtypes other than bf16)."""
        return self.dtype not in _UNSCALED

    @property
    def is_stochastic(self) -> bool:
        """Whether encoding draws random numbers and so needs a seed."""
        return self.rounding == "stochastic"

    @property
    def label(self) -> str:
        """Short text for a table: ``"int4 g128"``, ``"int8 token sym"``, ``"fp8_e4m3 b128"``, ``"bf16"``."""
        if not self.is_scaled:
            return self.dtype
        where = f"{self.granularity[0]}{self.group_size}" if self.group_size else self.granularity
        parts = [self.dtype, where, "sym" if self.symmetric else "", "sr" if self.is_stochastic else ""]
        if self.scale == "e8m0":
            parts.insert(2, "e8m0")
        return " ".join(filter(None, parts))

    def __str__(self) -> str:
        """The canonical spec, read back by :meth:`parse`: ``"int4/group128/nearest"``, ``"none"``.

        The dtype of the scales and ``symmetric`` are named where they are not the default:
        ``"int8/token/nearest/fp32/symmetric"``.
        """
        if not self.is_scaled:
            return self.dtype
        parts = [self.dtype, f"{self.granularity}{self.group_size or ''}", self.rounding]
        parts += [self.scale] if self.scale != "bf16" or self.symmetric else []
        return "/".join([*parts, *(["symmetric"] if self.symmetric else [])])

    @classmethod
    def parse(cls, spec: str) -> Format:
        """The format that ``spec`` names: ``dtype[/granularity[/rounding[/scale[/symmetric]]]]``, defaults where left
        out.

        ``Format.parse(str(fmt)) == fmt`` for every format.

        Raises:
            FormatError: where ``spec`` does not have that form or names an invalid format.
        """
        match = re.fullmatch(_SPEC, spec)
        if match is None or (match["size"] and match["granularity"] not in _SIZED):
            raise FormatError(
                f"expected a format spec such as 'int4/group128/nearest', 'int8/token' or 'none', found {spec!r}"
            )
        options: dict[str, Any] = {
            name: match[name] for name in ("granularity", "rounding", "scale") if match[name] is not None
        }
        if match["size"]:
            options["group_size"] = int(match["size"])
        return cls(match["dtype"], symmetric=match["symmetric"] is not None, **options)  # type: ignore[arg-type]


parse_format = functools.cache(Format.parse)
""":meth:`Format.parse`, remembered: operators are given formats as text at every call."""


def at_least(fmt: Format, bits: int) -> Format:
    """``fmt``, or where it has fewer than ``bits`` (8, 4, or 0 for no such bound) the integer format that has them."""
    if fmt.bits is None or fmt.bits >= bits:
        return fmt
    scale = "bf16" if fmt.scale == "e8m0" else fmt.scale
    return replace(fmt, dtype="int8" if bits == 8 else "int4", scale=scale)


def _check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise FormatError(f"expected {field} to be one of {', '.join(map(repr, choices))}, found {value!r}")


def _check_formats(owner: Any, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, Format):
            raise FormatError(
                f"expected {type(owner).__name__}.{name} to be a gnmr_fx.Format, found {value!r}; "
                "Format.parse('int4/group128') makes one from text"
            )


@dataclass(frozen=True)
class Operands:
    """The formats in which a GEMM takes its two operands, both along the dimension that is summed over.

    Args:
        left: of the activation in the output, of the output gradient in the two gradients.
        right: of the weight in the output and the input gradient, of the activation in the weight gradient.

    A group of :attr:`Format.group_size` lies along the summed dimension, whichever that is in memory: for the weight
    gradient, along the tokens. ``Format("none")`` takes an operand as it is.

    Raises:
        FormatError: where one is not a :class:`Format`.
    """

    left: Format
    right: Format

    def __post_init__(self) -> None:
        _check_formats(self, "left", "right")

    @property
    def label(self) -> str:
        """``"fp8_e4m3 g128 x b128"``: the dtype of the second operand only where it differs; ``"full"`` for none."""
        if self == FULL:
            return "full"
        left, right = self.left.label, self.right.label
        return f"{left} x {right.removeprefix(f'{self.left.dtype} ')}"

    def __str__(self) -> str:
        """``"left x right"``, read back by :meth:`parse`."""
        return f"{self.left} x {self.right}"

    @classmethod
    def parse(cls, spec: str) -> Operands:
        """The operands that ``spec`` names, or FormatError."""
        left, _, right = spec.partition(" x ")
        return cls(Format.parse(left), Format.parse(right))


FULL = Operands(Format("none"), Format("none"))
"""Both operands as they are: the GEMM of PyTorch, bit for bit."""


@dataclass(frozen=True)
class GemmPaths:
    """One GEMM on the low-cost and on the recovery path."""

    low: Operands = FULL
    high: Operands = FULL

    def __post_init__(self) -> None:
        for field in ("low", "high"):
            if not isinstance(getattr(self, field), Operands):
                raise FormatError(
                    f"expected GemmPaths.{field} to be gnmr_fx.Operands, found {getattr(self, field)!r}; "
                    "Operands(Format(...), Format(...)) names the two operands' formats"
                )


@dataclass(frozen=True)
class GemmRecipe:
    """The three GEMMs of a projection.

    Args:
        output: ``x @ w.T``, summed over the input features.
        grad_input: ``g @ w``, summed over the output features.
        grad_weight: ``g.T @ x``, summed over the tokens.
        backend: ``"native"``: a kernel of torch that multiplies in the format itself, which raises where there is none
            for the device, formats and shapes; ``"emulated"``: operands are quantized and dequantized, and multiplied
            in the dtype of the run; ``"auto"``: native where there is a kernel. The table shows which one runs.
        evaluate: what runs in ``eval()``: the recovery path, ``"high"``, or ``"low"``.

    Raises:
        FormatError: for a value outside these.
    """

    output: GemmPaths = GemmPaths()
    grad_input: GemmPaths = GemmPaths()
    grad_weight: GemmPaths = GemmPaths()
    backend: Backend = "auto"
    evaluate: Literal["high", "low"] = "high"

    def __post_init__(self) -> None:
        for field in ("output", "grad_input", "grad_weight"):
            if not isinstance(getattr(self, field), GemmPaths):
                raise FormatError(
                    f"expected GemmRecipe.{field} to be gnmr_fx.GemmPaths, found {getattr(self, field)!r}"
                )
        _check_choice("backend", self.backend, get_args(Backend))
        _check_choice("evaluate", self.evaluate, ("high", "low"))

    @property
    def is_stochastic(self) -> bool:
        """Whether any operand is rounded stochastically."""
        paths = (self.output, self.grad_input, self.grad_weight)
        return any(
            fmt.is_stochastic for p in paths for operands in (p.low, p.high) for fmt in (operands.left, operands.right)
        )


@dataclass(frozen=True)
class FrozenRecipe:
    """How the weights of frozen projections are kept, under adapters that train.

    Args:
        low: the format they are stored in, on their device: a :class:`Format` with scales, rounded to nearest, or
            ``"nf4"``. The low-cost path computes with what it stores, the recovery path with the exact weight.
        residual: where the exact weights are kept. ``"host"``: in host memory; those of the units on the recovery path
            are brought to the device. ``"device"``: beside the low-cost ones, which saves no memory and makes a switch
            free of charge.
        evaluate: the path in eval mode: ``"high"``, with exact weights (those on the host are brought one by one, for
            one call each), or ``"low"``.

    Raises:
        FormatError: for a value outside these.
    """

    low: Format | Literal["nf4"] = Format("int8", "token")
    residual: Residual = "host"
    evaluate: Path = "high"

    def __post_init__(self) -> None:
        low: object = self.low
        if low != NF4 and not (isinstance(low, Format) and low.is_scaled and not low.is_stochastic):
            raise FormatError(
                f"expected FrozenRecipe.low to be {NF4!r} or a Format with scales that rounds to nearest, found {low!r}"
            )
        _check_choice("FrozenRecipe.residual", self.residual, get_args(Residual))
        _check_choice("FrozenRecipe.evaluate", self.evaluate, get_args(Path))

    @property
    def spec(self) -> str:
        """Of the low-cost format: ``"int8/token/nearest"``, ``"nf4"``."""
        return str(self.low)

    @property
    def label(self) -> str:
        """The low-cost format for a table: ``"int8 token"``, ``"nf4"``."""
        return self.low.label if isinstance(self.low, Format) else self.low


@dataclass(frozen=True)
class Recipe:
    """The formats of the two paths of a recoverable unit.

    Args:
        low: how its saved activations are stored on the low-cost path.
        high: how they are stored on the recovery path.
        name: a name for tables and reports; None for a recipe of one's own.
        gemm: the formats of its GEMMs; None to compute as PyTorch does. Where an activation is stored in the very
            format in which the output takes it, it is quantized once, and the stored one is multiplied.
        frozen: how frozen weights are kept. Then the units are the projections with a frozen weight, and nothing else
            changes: ``low`` and ``high`` are ``Format("none")``.

    Raises:
        FormatError: where ``low`` or ``high`` is not a :class:`Format`, or one that stores activations in blocks, or
            not "none" beside ``frozen``; and for ``gemm`` beside ``frozen``.
    """

    low: Format
    high: Format
    name: str | None = None
    gemm: GemmRecipe | None = None
    frozen: FrozenRecipe | None = None

    def __post_init__(self) -> None:
        _check_formats(self, "low", "high")
        for field in ("low", "high"):
            if getattr(self, field).granularity == "block":
                raise FormatError(
                    f"expected Recipe.{field} to store activations by tensor, token or group, found {self.low}; "
                    "blocks are for weights, in GemmRecipe"
                )
        if self.gemm is not None and not isinstance(self.gemm, GemmRecipe):
            raise FormatError(f"expected Recipe.gemm to be a gnmr_fx.GemmRecipe or None, found {self.gemm!r}")
        if self.frozen is not None:
            if self.gemm is not None:
                raise FormatError("expected a recipe for frozen weights or one for GEMMs, found both; leave one out")
            if not isinstance(self.frozen, FrozenRecipe):
                raise FormatError(f"expected Recipe.frozen to be a FrozenRecipe or None, found {self.frozen!r}")
            if (self.low.dtype, self.high.dtype) != ("none", "none"):
                raise FormatError(
                    f"expected low and high to be Format('none') in a recipe for frozen weights, found {self.low} and "
                    f"{self.high}; a frozen projection saves no activation, and others are left alone"
                )

    @classmethod
    def for_frozen(cls, frozen: FrozenRecipe, name: str | None = None) -> Recipe:
        """The recipe that keeps frozen weights like that, and changes nothing else."""
        return cls(Format("none"), Format("none"), name, frozen=frozen)

    def with_residual(self, residual: Residual) -> Recipe:
        """This recipe for frozen weights with their exact values kept on the ``"device"`` or on the ``"host"``.

        Raises:
            FormatError: for another place, or where this recipe is not one for frozen weights.
        """
        if self.frozen is None:
            raise FormatError(f"expected a recipe for frozen weights such as 'lora-int8-bf16', found {self}")
        return replace(self, frozen=replace(self.frozen, residual=residual))

    @property
    def is_stochastic(self) -> bool:
        """Whether anything is rounded stochastically."""
        return self.low.is_stochastic or self.high.is_stochastic or (self.gemm is not None and self.gemm.is_stochastic)

    def __str__(self) -> str:
        """``"saved-int4-int8 (int4 g128 -> int8 g128)"``."""
        formats = _change(self.low.label, self.high.label)
        if self.gemm is not None:
            output = self.gemm.output
            formats = f"GEMMs {_change(output.low.label, output.high.label)}, saved {formats}"
        if self.frozen is not None:
            formats = f"weights {self.frozen.label} -> exact, which are on the {self.frozen.residual}"
        return f"{self.name} ({formats})" if self.name else formats


def _change(low: str, high: str) -> str:
    return low if low == high else f"{low} -> {high}"


def dsv3(
    low: FormatDtype = "fp6_e3m2",
    high: FormatDtype = "fp8_e4m3",
    *,
    mx: bool = False,
    backend: Backend = "auto",
    name: str | None = None,
) -> Recipe:
    """The fine-grained low-precision training of DeepSeek-V3, with a cheaper low path.

    Activations and gradients have one scale for 128 neighbours along the summed dimension (1x128 tiles), weights one
    for each block of 128x128; scales are fp32, ``amax / max``, taken from the tensor itself; all three GEMMs of a
    projection take both operands in the format, sums are in high precision, and master weights, optimizer and all else
    are untouched. Activations are saved as the output took them. Source: DeepSeek-V3 Technical Report
    (arXiv 2412.19437), section 3.3. Different here: the low path has 6 bits; a row that is no multiple of 128 is cut
    into equal tiles; tokens of several experts may share a tile in the weight gradient of a grouped GEMM; activations
    after attention are not given the report's 12-bit format, nor are cached scales powers of two.

    Args:
        low, high: dtype of the low-cost and of the recovery path, ``"fp6_e3m2"``, ``"fp6_e2m3"``, ``"fp8_e4m3"`` or
            ``"fp8_e5m2"``; equal ones give a static recipe.
        mx: the low path in groups of 32 along the summed dimension with a power-of-two scale, weights too (OCP MX).
        backend: as in :class:`GemmRecipe`.
        name: of the recipe.
    """

    def formats(dtype: FormatDtype, in_mx: bool) -> tuple[Format, Format]:
        if in_mx:
            return (Format(dtype, "group", 32, scale="e8m0"),) * 2
        return Format(dtype, "group", 128, scale="fp32"), Format(dtype, "block", 128, scale="fp32")

    (low_tile, low_block), (high_tile, high_block) = formats(low, mx), formats(high, mx and low == high)
    by_weight = GemmPaths(Operands(low_tile, low_block), Operands(high_tile, high_block))
    by_tokens = GemmPaths(Operands(low_tile, low_tile), Operands(high_tile, high_tile))
    return Recipe(low_tile, high_tile, name, GemmRecipe(by_weight, by_weight, by_tokens, backend))


def dynamic_gemm(fmt: Format, *, backend: Backend = "auto", name: str | None = None) -> Recipe:
    """All three GEMMs with both operands in ``fmt``, quantized as they come; recovery in the dtype of the run.

    The saved activation is left as it is, so the weight gradient's operand is quantized along the tokens.
    """
    paths = GemmPaths(Operands(fmt, fmt), FULL)
    return Recipe(Format("none"), Format("none"), name, GemmRecipe(paths, paths, paths, backend))


def _named(*recipes: Recipe) -> Mapping[str, Recipe]:
    return MappingProxyType({recipe.name: recipe for recipe in recipes if recipe.name is not None})


#: The named recipes, read-only. A high path named "bf16" keeps the tensor as it is, bit for bit
#: (``Format("none")``): in a bf16 run that is bf16, in an fp32 run it is fp32.
RECIPES: Mapping[str, Recipe] = _named(
    Recipe(low=Format("int4"), high=Format("int8"), name="saved-int4-int8"),
    Recipe(low=Format("int2"), high=Format("int8"), name="saved-int2-int8"),
    Recipe(low=Format("int4"), high=Format("none"), name="saved-int4-bf16"),
    Recipe(low=Format("fp8_e4m3"), high=Format("none"), name="saved-fp8-bf16"),
    dsv3("fp6_e3m2", "fp8_e4m3", name="dsv3-fp6-fp8"),
    dsv3("fp6_e3m2", "fp6_e3m2", name="dsv3-fp6"),
    dsv3("fp8_e4m3", "fp8_e4m3", name="dsv3-fp8"),
    dynamic_gemm(Format("int8", "token", scale="fp32", symmetric=True), name="gemm-int8-bf16"),
    dynamic_gemm(Format("fp8_e4m3", "token", scale="fp32"), name="gemm-fp8-bf16"),
    dynamic_gemm(Format("fp8_e4m3", "tensor", scale="fp32"), name="gemm-fp8-tensor-bf16"),
    Recipe.for_frozen(FrozenRecipe(Format("int8", "token")), "lora-int8-bf16"),
    Recipe.for_frozen(FrozenRecipe("nf4"), "lora-nf4-bf16"),
)

DEFAULT_RECIPE = "saved-int4-int8"


def get_recipe(name_or_recipe: str | Recipe = DEFAULT_RECIPE) -> Recipe:
    """The recipe of that name; a :class:`Recipe` is returned as it is.

    Raises:
        UnknownRecipeError: for a name that is not in :data:`RECIPES`, or a value of another type.
    """
    if isinstance(name_or_recipe, Recipe):
        return name_or_recipe
    if isinstance(name_or_recipe, str) and name_or_recipe in RECIPES:
        return RECIPES[name_or_recipe]
    near = difflib.get_close_matches(str(name_or_recipe), RECIPES, n=1, cutoff=0.4)
    suggestion = f"; did you mean {near[0]!r}?" if near else ";"
    raise UnknownRecipeError(
        f"expected a gnmr_fx.Recipe or the name of one, found {name_or_recipe!r}{suggestion} "
        f"the named recipes are {', '.join(map(repr, RECIPES))}"
    )
