"""Every kind of model, against the same model without gnmr-fx.

In eager mode a unit on a lossless recovery path is the stock operator, and a unit on a lossy path changes its own
weight gradient and nothing else. The oracle for that gradient is autograd itself, in :class:`RoundTrip`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gnmr_fx
from gnmr_fx import formats
from gnmr_fx.instrument import ModelController
from tests.models import BATCH, CASES, LENGTH, Built, Case, cast, instrument_options

LOSSLESS, LOSSY = "saved-int4-bf16", "saved-int4-int8"

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


class Pair(NamedTuple):
    """A stock model and its instrumented copy, with what to run them on."""

    case: Case
    stock: Built
    built: Built
    controller: ModelController


class Run(NamedTuple):
    """What one forward and backward gave."""

    outputs: list[Tensor]
    grads: dict[str, Tensor]


@functools.cache
def make(name: str, recipe: str, dtype: torch.dtype = torch.float32) -> Pair:
    """Made once per process, with the capture that it takes: tests set guards, and leave all else as it is."""
    torch.manual_seed(0)
    case = CASES[name]
    stock = cast(case.build(), dtype)
    model = copy.deepcopy(stock.model)
    gnmr_fx.instrument(model, recipe, **instrument_options(case, stock))
    return Pair(case, stock, stock._replace(model=model), gnmr_fx.controller(model))


@pytest.fixture(scope="module", autouse=True)
def _drop_models() -> Iterator[None]:
    """The controllers of models that live on would see the optimizer steps of other tests."""
    yield
    make.cache_clear()
    gc.collect()


def run(built: Built, call: Callable[..., Any] | None = None, *, autocast: bool = False) -> Run:
    """One forward and backward of ``call``, by default the model itself; gradients of its parameters by name."""
    built.model.zero_grad(set_to_none=True)
    # A context of its own: it keeps the weights it has cast, which changes the order in which gradients are summed.
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        out = (built.model if call is None else call)(*built.args, **built.kwargs)
        loss = built.loss(out)
    loss.backward()
    outputs = [t.detach().clone() for t in (*tree_leaves(out), loss) if isinstance(t, Tensor)]
    return Run(outputs, {n: p.grad.clone() for n, p in built.model.named_parameters() if p.grad is not None})


def assert_bitwise(found: Run, expected: Run) -> None:
    assert found.grads.keys() == expected.grads.keys()
    assert len(found.outputs) == len(expected.outputs)
    for index, (ours, theirs) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        assert torch.equal(ours, theirs), f"output {index}"
    different = [name for name in expected.grads if not torch.equal(found.grads[name], expected.grads[name])]
    assert not different


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Every gradient within ``tolerance`` times the largest element of any."""
    assert found.keys() == expected.keys()
    largest = max((g.abs().max().item() for g in expected.values()), default=0.0)
    errors = {name: (found[name] - expected[name]).abs().max().item() / largest for name in expected}
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong


ROUNDING = 64 * torch.finfo(torch.float32).eps
"""fp32 gradients are sums of 16 to 64 products; two orders of summation differ by less than one eps per term."""


def unit_weights(pair: Pair) -> dict[int, int]:
    """Storage of each unit's weight in the stock model -> index of the unit."""
    stock = pair.stock.model
    return {
        _storage(stock.get_submodule(unit.spec.owner).get_parameter(unit.spec.parameter)): unit.index
        for unit in pair.controller.units
    }


def unit_parameters(pair: Pair) -> set[str]:
    """Names of the trainable parameters that are the weight of a unit."""
    weights = unit_weights(pair)
    return {n for n, p in pair.stock.model.named_parameters() if _storage(p) in weights and p.requires_grad}


def mixed(controller: ModelController, phase: int = 0) -> list[str]:
    """Every second unit."""
    return [unit.name for unit in controller.units if unit.index % 2 == phase]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _source(tensor: Tensor) -> int:
    """Storage of what ``tensor`` is a view, a cast or a selection of."""
    node = tensor.grad_fn
    while node is not None and re.fullmatch(
        r"(Index|Select|Slice|T|Transpose|View|UnsafeView|ToCopy)Backward\d", node.name()
    ):
        node = node.next_functions[0][0]
    return _storage(node.variable) if node is not None and hasattr(node, "variable") else _storage(tensor)


# The oracle -----------------------------------------------------------------------------------------------------------

MATMULS = (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__)
PRODUCTS = frozenset(
    [F.linear, torch.addmm, torch.baddbmm, Tensor.addmm, Tensor.baddbmm, torch.einsum, Tensor.__rmatmul__, *MATMULS]
    + [getattr(module, name) for module, name in ((F, "grouped_mm"), (torch, "_grouped_mm")) if hasattr(module, name)]
)


def _is_product(func: Any) -> bool:
    return func in PRODUCTS or str(func).startswith("transformers.grouped_mm_fallback")


class InsideAttention(TorchFunctionMode):
    """A mode that also sees the calls that ``F.multi_head_attention_forward`` makes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with mock.patch.object(F, "has_torch_function", return_value=False), self:
                return func(*args, **kwargs)
        return self.visit(func, args, kwargs)

    def visit(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class RoundTrip(InsideAttention):
    """Projections whose weight gradient is that of an activation that went through a format and back.

    ``f(x, w)`` is replaced by ``f(x, detach(w)) + (y - detach(y))`` with ``y = f(decode(encode(x)), w)``: the value and
    the gradient of ``x`` are the stock ones, and autograd takes the gradient of ``w`` from the decoded activation.
    """

    def __init__(self, format_of: Mapping[int, gnmr_fx.Format]) -> None:
        super().__init__()
        self.format_of = format_of
        self.replaced = 0

    def visit(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands = [v for v in args if isinstance(v, Tensor)]
        weights = [v for v in operands if _source(v) in self.format_of and v.dim() >= 2 and v.requires_grad]
        if not _is_product(func) or not weights:
            return func(*args, **kwargs)
        (weight,) = weights
        fmt = self.format_of[_source(weight)]
        activation = next(v for v in operands if v is not weight and v.dim() >= 2 and v.is_floating_point())
        self.replaced += 1

        def approximate(value: Any) -> Any:
            if value is activation:
                rows = value.detach().transpose(-1, -2) if value.shape[-1] == 1 else value.detach()
                decoded = formats.decode(formats.encode(rows, fmt), fmt, rows.shape, rows.dtype)
                return decoded.transpose(-1, -2) if value.shape[-1] == 1 else decoded
            return value.detach() if isinstance(value, Tensor) and value is not weight else value

        exact = func(*(v.detach() if v is weight else v for v in args), **kwargs)
        decoded = func(*map(approximate, args), **kwargs)
        return exact + (decoded - decoded.detach())


def oracle(pair: Pair) -> Run:
    """The stock model, with the weight gradients that the guards in force should give."""
    recipe = pair.controller.recipe
    flags = pair.controller.flags.tolist()
    format_of = {at: recipe.high if flags[index] else recipe.low for at, index in unit_weights(pair).items()}
    with RoundTrip(format_of) as mode:
        result = run(pair.stock)
    trainable = [unit for unit in pair.controller.units if unit.trainable]
    assert mode.replaced >= len(trainable), "the oracle missed a projection"
    return result


# Eager ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_recovery_path_is_the_stock_model_bitwise(name: str) -> None:
    pair = make(name, LOSSLESS)
    pair.controller.force("high")
    assert_bitwise(run(pair.built), run(pair.stock))


@pytest.mark.parametrize("name", ["llama", "gpt2", "encoder", "functional"])
def test_recovery_path_is_the_stock_model_bitwise_in_bf16(name: str) -> None:
    pair = make(name, LOSSLESS, torch.bfloat16)
    pair.controller.force("high")
    assert_bitwise(run(pair.built), run(pair.stock))


@pytest.mark.parametrize("guards", ["low", "mixed"])
@pytest.mark.parametrize("name", CASES)
def test_only_weight_gradients_of_units_change(name: str, guards: str) -> None:
    pair = make(name, LOSSY)
    pair.controller.force("low" if guards == "low" else mixed(pair.controller))
    found, stock = run(pair.built), run(pair.stock)
    units = unit_parameters(pair)
    assert len(units) == sum(unit.trainable for unit in pair.controller.units)
    for index, (ours, theirs) in enumerate(zip(found.outputs, stock.outputs, strict=True)):
        assert torch.equal(ours, theirs), f"output {index}"
    assert found.grads.keys() == stock.grads.keys()
    changed = {n for n in stock.grads if not torch.equal(found.grads[n], stock.grads[n])}
    assert changed == units  # no other parameter, so every input gradient is exact; and no unit was missed
    assert_close(found.grads, oracle(pair).grads, ROUNDING)


@pytest.mark.parametrize("name", CASES)
def test_number_of_units(name: str) -> None:
    pair = make(name, LOSSY)
    assert len(pair.controller.units) == pair.case.units


@pytest.mark.parametrize("name", CASES)
def test_recovery_path_is_the_stock_model_bitwise_under_autocast(name: str) -> None:
    pair = make(name, LOSSLESS)
    stock = run(pair.stock, autocast=True)
    pair.controller.force("high")
    assert_bitwise(run(pair.built, autocast=True), stock)
    pair.controller.force("low")
    low = run(pair.built, autocast=True)
    for ours, theirs in zip(low.outputs, stock.outputs, strict=True):
        assert torch.equal(ours, theirs)
    assert all(g.isfinite().all() for g in low.grads.values())
    changed = {n for n in stock.grads if not torch.equal(low.grads[n], stock.grads[n])}
    # Of a module that is called twice, stock autocast sums the gradients of the bias in bf16; guarded they are fp32.
    assert changed - set(SUMMED_IN_BF16.get(name, ())) == unit_parameters(pair)


SUMMED_IN_BF16 = {"shared-module": ("inner.bias",)}


def test_excluded_projection_of_attention_is_stock() -> None:
    """``out_proj`` is called by the code of the attention module, whose packed projection is guarded."""
    stock = CASES["encoder"].build()
    model = copy.deepcopy(stock.model)
    gnmr_fx.instrument(model, LOSSY, exclude=["*.out_proj"])
    gnmr_fx.controller(model).force("low")
    found, expected = run(stock._replace(model=model)), run(stock)
    changed = {n for n in expected.grads if not torch.equal(found.grads[n], expected.grads[n])}
    assert changed == {f"layers.0.{n}" for n in ("self_attn.in_proj_weight", "linear1.weight", "linear2.weight")}


def test_branches_of_an_intercepted_forward_are_taken_anew() -> None:
    """Neither the optional argument, nor ``self.training``, nor the number of repeats is baked in."""
    pair = make.__wrapped__("branching", LOSSLESS)
    pair.controller.force("high")
    kinds = {f.module: f.forward.kind for f in pair.controller.forwards}
    assert kinds[pair.built.model.block] == "intercepted"
    for repeats in (2, 3):
        for training in (True, False):
            for built in (pair.built, pair.stock):
                built.model.block.repeats = repeats
                built.model.train(training)
            assert_bitwise(run(pair.built), run(pair.stock))


# Nothing missed -------------------------------------------------------------------------------------------------------


class WeightsMultiplied(InsideAttention):
    """Records the storages of the operands of every product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def visit(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_product(func):
            self.seen |= {_source(v) for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor) and v.dim() >= 2}
        return func(*args, **kwargs)


class KernelsWithWeights(TorchDispatchMode):
    """The same below autograd, where composite operators have become matrix products and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "mm" in name or "conv" in name or name in ("linear", "mv", "addmv"):
            self.seen |= {_storage(v) for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor) and v.dim() >= 2}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CASES)
def test_no_multiplied_weight_is_missed(name: str) -> None:
    pair = make(name, LOSSY)
    with WeightsMultiplied() as functions, KernelsWithWeights() as kernels:
        pair.stock.model(*pair.stock.args, **pair.stock.kwargs)
    seen = functions.seen | kernels.seen
    names: dict[int, list[str]] = {}
    for path, parameter in pair.stock.model.named_parameters(remove_duplicate=False):
        if parameter.dim() >= 2 and _storage(parameter) in seen:
            names.setdefault(_storage(parameter), []).append(path)
    assert len(names) >= pair.case.units
    units = unit_weights(pair)
    assert units.keys() <= names.keys(), "a unit whose weight nothing multiplies with"
    reasons = {item.name: item.reason for item in pair.controller.left_alone}
    for storage, paths in names.items():
        listed = [reasons.get(path) or reasons.get(path.removesuffix(".weight")) for path in paths]
        assert storage in units or any(listed), f"{paths} is neither a unit nor left alone with a reason"


# Compiled -------------------------------------------------------------------------------------------------------------


def flip_tolerance(numel: int) -> float:
    """Relative change of a weight gradient that differently rounded activations can make through a 4-bit format.

    Inductor fuses and reorders sums: activations differ by up to about 32 fp32 roundings of their range R, that is
    32 * 2**-24 * R. A step of a 4-bit code is R / 15, so at most a share p = 2 * 15 * 32 * 2**-24 of the codes lies
    that near to the border between two of them and may flip, by one step. All codes together err by step / sqrt(12)
    in the mean square and change a gradient by about 0.1, so n flips among ``numel`` change it by
    0.1 * sqrt(12 * n / numel): here for the expected number and one more, at places where the output gradient is
    twice its usual size.
    """
    share = 2 * 15 * 32 * 2**-24
    return 2 * 0.1 * math.sqrt(12 * (1 + share * numel) / numel)


def forget_observations(controller: ModelController) -> None:
    for unit in controller.units:
        unit.observation.was_seen = False
        unit.observation.calls.clear()
        unit.observation.last.clear()


def unseen(controller: ModelController) -> list[str]:
    """Units that should have been observed and were not: a frozen weight has no gradient, so nothing is kept for it."""
    return [unit.name for unit in controller.units if unit.trainable and not unit.observation.seen]


def guard_states(controller: ModelController) -> Iterator[Any]:
    yield from ("low", "high", mixed(controller), mixed(controller, 1), "low")


def check_compiled(name: str, backend: str, *, exact_codes: bool) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    pair = make(name, LOSSY)
    controller = pair.controller
    forget_observations(controller)
    controller.force("low")
    compiled = torch.compile(pair.built.model, backend=backend, fullgraph=pair.case.fullgraph)
    run(pair.built, compiled)
    if not pair.case.fullgraph:  # sizes that depend on the data become dynamic at their second value
        run(pair.built, compiled)
    assert unseen(controller) == []
    smallest = min(math.prod(kept.shape) for unit in controller.units for kept in unit.observation.current)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 1 or not pair.case.fullgraph
    with torch._dynamo.config.patch(error_on_recompile=True):
        for guards in guard_states(controller):
            controller.force(guards)
            found, eager = run(pair.built, compiled), run(pair.built)
            for ours, theirs in zip(found.outputs, eager.outputs, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
            if exact_codes:
                assert_close(found.grads, eager.grads, ROUNDING)
                continue
            others = eager.grads.keys() - unit_parameters(pair)
            assert_close({n: found.grads[n] for n in others}, {n: eager.grads[n] for n in others}, ROUNDING)
            for parameter in unit_parameters(pair):
                error = (found.grads[parameter] - eager.grads[parameter]).norm() / eager.grads[parameter].norm()
                assert error <= flip_tolerance(smallest), parameter
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def slow_but(names: Iterable[str]) -> list[Any]:
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


SLOW_AOT_EAGER = {"gpt2", "mamba", "mixtral-loop", "mixtral-batched", "tied-head"}


@pytest.mark.parametrize("name", slow_but(CASES.keys() - SLOW_AOT_EAGER))
def test_aot_eager_equals_eager(name: str) -> None:
    check_compiled(name, "aot_eager", exact_codes=True)


@pytest.mark.parametrize("name", slow_but({"encoder"}))
def test_inductor_equals_eager(name: str) -> None:
    check_compiled(name, "inductor", exact_codes=False)


@pytest.mark.parametrize("name", CASES)
def test_eager_observes_every_unit(name: str) -> None:
    pair = make(name, LOSSY)
    forget_observations(pair.controller)
    pair.controller.force("low")
    run(pair.built)
    assert unseen(pair.controller) == []
    frozen = [unit.name for unit in pair.controller.units if not unit.trainable and unit.observation.seen]
    assert frozen == []


def test_sizes_of_the_inputs_differ() -> None:
    """Weights that are mixed up are to be seen: batch, length, hidden and inner sizes are no two alike."""
    from tests.models import HIDDEN, INNER

    assert len({BATCH, LENGTH, HIDDEN, INNER}) == 4


def test_all_kinds_of_forward_are_covered() -> None:
    """The models exercise both ways of diverting a projection, and every kind of call."""
    operators: set[str] = set()
    kinds: set[str] = set()
    for name in CASES:
        operators |= {part for unit in make(name, LOSSY).controller.units for part in unit.spec.operator.split("/")}
        kinds |= {installed.forward.kind for installed in make(name, LOSSY).controller.forwards}
    assert kinds == {"traced", "intercepted"}
    assert {"linear", "addmm", "matmul", "einsum", "grouped_mm", "bmm"} <= operators
