"""Formats and recipes: what a tensor is stored as, on the low-cost and on the recovery path.

Plain frozen data, validated when built; nothing here touches a tensor. :mod:`gnmr_fx.formats` gives a
:class:`Format` its meaning.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, get_args

from gnmr_fx.errors import FormatError, UnknownRecipeError

__all__ = [
    "DEFAULT_RECIPE",
    "RECIPES",
    "Format",
    "FormatDtype",
    "Granularity",
    "Recipe",
    "Rounding",
    "get_recipe",
]

FormatDtype = Literal["int2", "int4", "int8", "fp8_e4m3", "fp8_e5m2", "bf16", "none"]
Granularity = Literal["tensor", "token", "group"]
Rounding = Literal["nearest", "stochastic"]

_BITS: Mapping[str, int | None] = MappingProxyType(
    {"int2": 2, "int4": 4, "int8": 8, "fp8_e4m3": 8, "fp8_e5m2": 8, "bf16": 16, "none": None}
)
_UNSCALED = ("bf16", "none")


@dataclass(frozen=True)
class Format:
    """How one tensor is stored.

    Args:
        dtype: ``"int2"``, ``"int4"``, ``"int8"`` (affine, zero kept exactly), ``"fp8_e4m3"``, ``"fp8_e5m2"``
            (symmetric), ``"bf16"`` (a plain cast) or ``"none"`` (kept as it is, in its own dtype, lossless).
        granularity: what shares one scale: the whole ``"tensor"``, a ``"token"`` (a row of the last
            dimension), or a ``"group"`` of at most ``group_size`` neighbours in a row.
        group_size: elements per group, at least 1; only for ``"group"``, otherwise set to 0.
        rounding: ``"nearest"`` (ties to even), or ``"stochastic"`` (unbiased; int and fp8 dtypes only).

    ``"bf16"`` and ``"none"`` have no scales: their granularity and group size are set to ``"token"`` and 0,
    so that equal formats compare equal.

    Raises:
        FormatError: for a value outside these.
    """

    dtype: FormatDtype
    granularity: Granularity = "group"
    group_size: int = 128
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, get_args(FormatDtype))
        _check_choice("granularity", self.granularity, get_args(Granularity))
        _check_choice("rounding", self.rounding, get_args(Rounding))
        if self.dtype in _UNSCALED:
            if self.rounding == "stochastic":
                raise FormatError(
                    f"expected rounding='nearest' for dtype {self.dtype!r}, found 'stochastic'; "
                    "stochastic rounding exists for the int and fp8 dtypes"
                )
            object.__setattr__(self, "granularity", "token")
        if self.granularity != "group":
            object.__setattr__(self, "group_size", 0)
        elif isinstance(self.group_size, bool) or not isinstance(self.group_size, int) or self.group_size < 1:
            raise FormatError(f"expected group_size to be an int from 1, found {self.group_size!r}; 128 is the default")
        # Hashed on every kernel call: computed once.
        fields = (self.dtype, self.granularity, self.group_size, self.rounding)
        object.__setattr__(self, "_hash", hash(fields))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return, unused-ignore]

    def __reduce__(self) -> tuple[object, ...]:
        # String hashes differ between processes, so the cached one must not travel in a pickle.
        return type(self), (self.dtype, self.granularity, self.group_size, self.rounding)

    @property
    def bits(self) -> int | None:
        """Bits per stored element, scales left out; None for ``"none"`` (the tensor's own width)."""
        return _BITS[self.dtype]

    @property
    def is_integer(self) -> bool:
        """Whether elements are stored as packed integer codes."""
        return self.dtype in ("int2", "int4", "int8")

    @property
    def is_fp8(self) -> bool:
        """Whether elements are stored as 8-bit floats."""
        return self.dtype in ("fp8_e4m3", "fp8_e5m2")

    @property
    def is_scaled(self) -> bool:
        """Whether groups carry scales (the int and fp8 dtypes)."""
        return self.dtype not in _UNSCALED

    @property
    def is_stochastic(self) -> bool:
        """Whether encoding draws random numbers and so needs a seed."""
        return self.rounding == "stochastic"

    @property
    def label(self) -> str:
        """Short text for a table: ``"int4 g128"``, ``"int8 token"``, ``"fp8_e4m3 tensor sr"``, ``"bf16"``."""
        if not self.is_scaled:
            return self.dtype
        where = f"g{self.group_size}" if self.granularity == "group" else self.granularity
        return f"{self.dtype} {where}{' sr' if self.is_stochastic else ''}"

    def __str__(self) -> str:
        """The canonical spec, read back by :meth:`parse`: ``"int4/group128/nearest"``, ``"none"``."""
        if not self.is_scaled:
            return self.dtype
        where = f"group{self.group_size}" if self.granularity == "group" else self.granularity
        return f"{self.dtype}/{where}/{self.rounding}"

    @classmethod
    def parse(cls, spec: str) -> Format:
        """The format that ``spec`` names: ``dtype[/granularity[/rounding]]``, defaults where left out.

        ``Format.parse(str(fmt)) == fmt`` for every format.

        Raises:
            FormatError: where ``spec`` does not have that form or names an invalid format.
        """
        match = re.fullmatch(r"(\w+)(?:/(tensor|token|group)(\d*)(?:/(\w+))?)?", spec)
        if match is None or (match[3] and match[2] != "group"):
            raise FormatError(
                f"expected a format spec such as 'int4/group128/nearest', 'int8/token' or 'none', found {spec!r}"
            )
        dtype, granularity, size, rounding = match.groups()
        options: dict[str, object] = {"granularity": granularity, "rounding": rounding}
        options = {name: value for name, value in options.items() if value is not None}
        if size:
            options["group_size"] = int(size)
        return cls(dtype, **options)  # type: ignore[arg-type]


def at_least(fmt: Format, bits: int) -> Format:
    """``fmt``, or where it has fewer than ``bits`` (8, 4, or 0 for no such bound) the integer format that has them."""
    fewer = fmt.bits is not None and fmt.bits < bits
    return replace(fmt, dtype="int8" if bits == 8 else "int4") if fewer else fmt


def _check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise FormatError(f"expected {field} to be one of {', '.join(map(repr, choices))}, found {value!r}")


@dataclass(frozen=True)
class Recipe:
    """The formats of the two paths of a recoverable unit.

    Args:
        low: how its saved activations are stored on the low-cost path.
        high: how they are stored on the recovery path.
        name: a name for tables and reports; None for a recipe of one's own.

    Raises:
        FormatError: where ``low`` or ``high`` is not a :class:`Format`.
    """

    low: Format
    high: Format
    name: str | None = None

    def __post_init__(self) -> None:
        for field in ("low", "high"):
            value = getattr(self, field)
            if not isinstance(value, Format):
                raise FormatError(
                    f"expected Recipe.{field} to be a gnmr_fx.Format, found {value!r}; "
                    "Format.parse('int4/group128') makes one from text"
                )

    def __str__(self) -> str:
        """``"saved-int4-int8 (int4 g128 -> int8 g128)"``."""
        formats = f"{self.low.label} -> {self.high.label}"
        return f"{self.name} ({formats})" if self.name else formats


def _named(*recipes: Recipe) -> Mapping[str, Recipe]:
    return MappingProxyType({recipe.name: recipe for recipe in recipes if recipe.name is not None})


#: The named recipes, read-only. A high path named "bf16" keeps the tensor as it is, bit for bit
#: (``Format("none")``): in a bf16 run that is bf16, in an fp32 run it is fp32.
RECIPES: Mapping[str, Recipe] = _named(
    Recipe(low=Format("int4"), high=Format("int8"), name="saved-int4-int8"),
    Recipe(low=Format("int2"), high=Format("int8"), name="saved-int2-int8"),
    Recipe(low=Format("int4"), high=Format("none"), name="saved-int4-bf16"),
    Recipe(low=Format("fp8_e4m3"), high=Format("none"), name="saved-fp8-bf16"),
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
