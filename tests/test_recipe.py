"""Formats and recipes: validation, canonical specs, lookup."""

import copy
import dataclasses
import itertools
import pickle
from typing import Any, get_args

import pytest

from gnmr_fx.errors import FormatError, UnknownRecipeError
from gnmr_fx.recipe import (
    DEFAULT_RECIPE,
    RECIPES,
    Format,
    FormatDtype,
    Granularity,
    Recipe,
    Rounding,
    get_recipe,
)

ALL_FORMATS = [
    Format(dtype, granularity, size, rounding)
    for dtype, granularity, size, rounding in itertools.product(
        get_args(FormatDtype), get_args(Granularity), (1, 32, 128), get_args(Rounding)
    )
    if rounding == "nearest" or dtype not in ("bf16", "none")
]


@pytest.mark.parametrize("fmt", sorted(set(ALL_FORMATS), key=str), ids=str)
def test_spec_round_trips(fmt: Format) -> None:
    assert Format.parse(str(fmt)) == fmt
    assert hash(Format.parse(str(fmt))) == hash(fmt)
    for duplicate in (copy.deepcopy(fmt), pickle.loads(pickle.dumps(fmt)), dataclasses.replace(fmt)):
        assert duplicate == fmt
        assert hash(duplicate) == hash(fmt)


@pytest.mark.parametrize(
    ("spec", "canonical", "label", "bits"),
    [
        ("int4", "int4/group128/nearest", "int4 g128", 4),
        ("int4/group", "int4/group128/nearest", "int4 g128", 4),
        ("int2/group32/stochastic", "int2/group32/stochastic", "int2 g32 sr", 2),
        ("int3/tensor", "int3/tensor/nearest", "int3 tensor", 3),
        ("int8/token", "int8/token/nearest", "int8 token", 8),
        ("fp8_e4m3/tensor", "fp8_e4m3/tensor/nearest", "fp8_e4m3 tensor", 8),
        ("bf16", "bf16", "bf16", 16),
        ("none/token/nearest", "none", "none", None),
    ],
)
def test_parse(spec: str, canonical: str, label: str, bits: int | None) -> None:
    fmt = Format.parse(spec)
    assert (str(fmt), fmt.label, fmt.bits) == (canonical, label, bits)


@pytest.mark.parametrize(
    "spec",
    ["", "int5", "int4/row", "int4/token64", "int4/group0", "int4/group128/up", "int4/nearest", "none/x"],
)
def test_parse_rejects(spec: str) -> None:
    with pytest.raises(FormatError, match="expected"):
        Format.parse(spec)


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "int5"},
        {"dtype": None},
        {"dtype": ["int4"]},
        {"dtype": "int4", "granularity": "row"},
        {"dtype": "int4", "group_size": 0},
        {"dtype": "int4", "group_size": 1.5},
        {"dtype": "int4", "group_size": True},
        {"dtype": "int4", "rounding": "up"},
        {"dtype": "bf16", "rounding": "stochastic"},
        {"dtype": "none", "rounding": "stochastic"},
    ],
)
def test_format_rejects(arguments: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"expected .* found"):
        Format(**arguments)


def test_fields_without_a_meaning_do_not_tell_formats_apart() -> None:
    assert Format("int4", "token", group_size=7) == Format("int4", "token")
    assert Format("none", "tensor") == Format("none") == Format("none", group_size=3)
    assert Format("bf16").group_size == 0
    assert Format("int4", group_size=64) != Format("int4")


def test_formats_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Format("int4").dtype = "int8"  # type: ignore[misc]


def test_named_recipes() -> None:
    assert {name: str(recipe) for name, recipe in RECIPES.items()} == {
        "saved-int4-int8": "saved-int4-int8 (int4 g128 -> int8 g128)",
        "saved-int2-int8": "saved-int2-int8 (int2 g128 -> int8 g128)",
        "saved-int4-bf16": "saved-int4-bf16 (int4 g128 -> none)",
        "saved-fp8-bf16": "saved-fp8-bf16 (fp8_e4m3 g128 -> none)",
    }
    assert get_recipe() is RECIPES[DEFAULT_RECIPE] is get_recipe("saved-int4-int8")
    with pytest.raises(TypeError):
        RECIPES["mine"] = get_recipe()  # type: ignore[index]


def test_own_recipe() -> None:
    mine = Recipe(low=Format("int2", "token"), high=Format("none"))
    assert get_recipe(mine) is mine
    assert str(mine) == "int2 token -> none"
    with pytest.raises(FormatError, match=r"Recipe\.high .* 'int8'"):
        Recipe(low=Format("int4"), high="int8")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("saved-int4-int9", "saved-int4-int8"), ("fp8-bf16", "saved-fp8-bf16"), ("???", None)],
)
def test_unknown_recipe(name: str, suggestion: str | None) -> None:
    with pytest.raises(UnknownRecipeError) as raised:
        get_recipe(name)
    message = str(raised.value)
    assert all(repr(known) in message for known in RECIPES)
    assert ("did you mean" in message) == (suggestion is not None)
    if suggestion is not None:
        assert f"did you mean {suggestion!r}" in message
    with pytest.raises(UnknownRecipeError):
        get_recipe(4)  # type: ignore[arg-type]


def test_pickles_carry_no_hash() -> None:
    """String hashes differ from process to process, so the cached one must not travel."""
    assert Format("int4").__reduce__() == (Format, ("int4", "group", 128, "nearest"))
