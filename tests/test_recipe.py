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
    FULL,
    RECIPES,
    Format,
    FormatDtype,
    GemmPaths,
    GemmRecipe,
    Granularity,
    Operands,
    Recipe,
    Rounding,
    ScaleDtype,
    dsv3,
    get_recipe,
)

ALL_FORMATS = [
    Format(dtype, granularity, size, rounding, scale, symmetric)
    for dtype, granularity, size, rounding, scale, symmetric in itertools.product(
        get_args(FormatDtype), get_args(Granularity), (1, 128), get_args(Rounding), get_args(ScaleDtype), (False, True)
    )
    if (rounding == "nearest" or dtype not in ("bf16", "none"))
    and (not symmetric or dtype == "int8")
    and (scale != "e8m0" or not dtype.startswith("int"))
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
        ("fp6_e3m2/group32/nearest/e8m0", "fp6_e3m2/group32/nearest/e8m0", "fp6_e3m2 g32 e8m0", 6),
        ("fp8_e4m3/block", "fp8_e4m3/block128/nearest", "fp8_e4m3 b128", 8),
        ("fp8_e4m3/group128/nearest/fp32", "fp8_e4m3/group128/nearest/fp32", "fp8_e4m3 g128", 8),
        ("int8/token/nearest/fp32/symmetric", "int8/token/nearest/fp32/symmetric", "int8 token sym", 8),
        ("none/token/nearest", "none", "none", None),
    ],
)
def test_parse(spec: str, canonical: str, label: str, bits: int | None) -> None:
    fmt = Format.parse(spec)
    assert (str(fmt), fmt.label, fmt.bits) == (canonical, label, bits)


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "int5",
        "int4/row",
        "int4/token64",
        "int4/group0",
        "int4/group128/up",
        "int4/nearest",
        "none/x",
        "int4/token/nearest/fp32/x",
        "int4/token/nearest/fp64",
        "int4/token/nearest/e8m0",
        "int4/token/nearest/fp32/symmetric",
    ],
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
        {"dtype": "int4", "scale": "fp8"},
        {"dtype": "int8", "scale": "e8m0"},
        {"dtype": "int4", "symmetric": True},
        {"dtype": "fp8_e4m3", "symmetric": True},
        {"dtype": "int8", "symmetric": 1},
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
        "dsv3-fp6-fp8": "dsv3-fp6-fp8 (GEMMs fp6_e3m2 g128 x b128 -> fp8_e4m3 g128 x b128, "
        "saved fp6_e3m2 g128 -> fp8_e4m3 g128)",
        "dsv3-fp6": "dsv3-fp6 (GEMMs fp6_e3m2 g128 x b128, saved fp6_e3m2 g128)",
        "dsv3-fp8": "dsv3-fp8 (GEMMs fp8_e4m3 g128 x b128, saved fp8_e4m3 g128)",
        "gemm-int8-bf16": "gemm-int8-bf16 (GEMMs int8 token sym x token sym -> full, saved none)",
        "gemm-fp8-bf16": "gemm-fp8-bf16 (GEMMs fp8_e4m3 token x token -> full, saved none)",
        "gemm-fp8-tensor-bf16": "gemm-fp8-tensor-bf16 (GEMMs fp8_e4m3 tensor x tensor -> full, saved none)",
        "lora-int8-bf16": "lora-int8-bf16 (weights int8 token -> exact, which are on the host)",
        "lora-nf4-bf16": "lora-nf4-bf16 (weights nf4 -> exact, which are on the host)",
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
    [("saved-int4-int9", "saved-int4-int8"), ("saved-bf16", "saved-fp8-bf16"), ("???", None)],
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
    assert Format("int4").__reduce__() == (Format, ("int4", "group", 128, "nearest", "bf16", False))


def test_gemm_recipes() -> None:
    fp6, fp8 = (Format(dtype, "group", 128, scale="fp32") for dtype in ("fp6_e2m3", "fp8_e4m3"))
    recipe = dsv3("fp6_e2m3")
    assert (recipe.low, recipe.high) == (fp6, fp8)
    assert recipe.gemm is not None
    assert recipe.gemm.output == recipe.gemm.grad_input
    assert recipe.gemm.output.low == Operands(fp6, dataclasses.replace(fp6, granularity="block"))
    assert recipe.gemm.grad_weight == GemmPaths(Operands(fp6, fp6), Operands(fp8, fp8))
    mx = dsv3(mx=True)
    assert mx.gemm is not None
    assert mx.low == mx.gemm.output.low.right == Format("fp6_e3m2", "group", 32, scale="e8m0")
    assert mx.high == fp8
    assert Operands.parse(str(recipe.gemm.output.low)) == recipe.gemm.output.low
    assert GemmRecipe().output == GemmPaths(FULL, FULL)
    assert hash(recipe) == hash(dsv3("fp6_e2m3"))


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: Operands(Format("int8"), "int8"), "Operands.right"),
        (lambda: GemmPaths(low=Format("int8")), "GemmPaths.low"),
        (lambda: GemmRecipe(output=FULL), "GemmRecipe.output"),
        (lambda: GemmRecipe(backend="fast"), "'fast'"),
        (lambda: GemmRecipe(evaluate="guard"), "'guard'"),
        (lambda: Recipe(Format("none"), Format("none"), gemm=FULL), "Recipe.gemm"),
        (lambda: Recipe(Format("int4", "block"), Format("none")), "blocks are for weights"),
        (lambda: dsv3("fp6"), "'fp6'"),
    ],
)
def test_gemm_recipe_rejects(make: Any, found: str) -> None:
    with pytest.raises(FormatError, match=found):
        make()
