"""Fused kernels against the readable formats, bit for bit, and what building them must not disturb."""

import itertools
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnmr_fx import formats, kernels
from gnmr_fx.errors import FormatError, GnmrWarning, MissingDependencyError
from gnmr_fx.recipe import Format

# A covering few, since each costs seconds of C++: every dtype, granularity, rounding and width of code.
FEW = [
    ("int4/group128/nearest", torch.float32),
    ("int8/token/nearest", torch.bfloat16),
    ("int2/tensor/nearest", torch.float32),
    ("int3/tensor/nearest", torch.float32),
    ("fp8_e4m3/tensor/stochastic", torch.float32),
    ("int4/group128/stochastic", torch.float16),
]
# Every format, each with another dtype than its neighbours.
SWEEP = [
    (f"{dtype}/{where}/{rounding}", input_dtype)
    for (dtype, where, rounding), input_dtype in zip(
        itertools.product(
            ("int2", "int3", "int4", "int8", "fp8_e4m3", "fp8_e5m2"),
            ("tensor", "token", "group32"),
            ("nearest", "stochastic"),
        ),
        itertools.cycle((torch.float32, torch.bfloat16, torch.float16, torch.float64)),
        strict=False,
    )
]
CASES = [
    *(pytest.param(Format.parse(spec), dtype, id=f"{spec}-{dtype}") for spec, dtype in FEW),
    *(pytest.param(Format.parse(spec), dtype, id=f"{spec}-{dtype}", marks=pytest.mark.slow) for spec, dtype in SWEEP),
]
FIRST, FIRST_DTYPE = Format.parse(FEW[0][0]), FEW[0][1]


def same(a: Tensor, b: Tensor) -> bool:
    """Same dtype, shape and bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def assert_fused_is_readable(x: Tensor, fmt: Format, seed: int = 5) -> None:
    fused = kernels.encode(x, fmt, seed, backend="inductor")
    readable = formats.encode(x, fmt, seed)
    assert same(fused.payload, readable.payload)
    assert same(fused.scales, readable.scales)
    stored = sum(part.untyped_storage().nbytes() for part in fused)
    assert stored == formats.nbytes(x.shape, fmt, x.dtype)
    decoded = kernels.decode(fused, fmt, x.shape, x.dtype, backend="inductor")
    assert same(decoded, formats.decode(readable, fmt, x.shape, x.dtype))
    assert decoded.is_contiguous()


# The formats of GEMMs, whose round trip is one kernel.
GEMM_CASES = [
    ("fp6_e3m2/group128/nearest/fp32", torch.bfloat16),
    pytest.param("fp8_e4m3/block128/nearest/fp32", torch.float32, marks=pytest.mark.slow),
    pytest.param("fp8_e4m3/group128/nearest/fp32", torch.bfloat16, marks=pytest.mark.slow),
    pytest.param("fp6_e2m3/group32/stochastic/e8m0", torch.float32, marks=pytest.mark.slow),
    pytest.param("fp6_e2m3/tensor/nearest/fp32", torch.float16, marks=pytest.mark.slow),
    pytest.param("int8/token/stochastic/fp32/symmetric", torch.bfloat16, marks=pytest.mark.slow),
    pytest.param("int4/group128/nearest/fp32", torch.bfloat16, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("spec", "dtype"), GEMM_CASES)
def test_round_trip_is_encode_and_decode(spec: str, dtype: torch.dtype) -> None:
    fmt = Format.parse(spec)
    for shape in ((130, 128), (2, 3, 256), (0, 128)):
        x = torch.randn(shape).to(dtype)
        assert_fused_is_readable(x, fmt)
        expected = formats.decode(formats.encode(x, fmt, 5), fmt, x.shape, dtype)
        assert same(kernels.roundtrip(x, fmt, 5, backend="inductor"), expected)
        assert same(kernels.roundtrip(x, fmt, 5, backend="eager"), expected)


def test_rows_of_any_length_are_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    fmt, built, compile_ = Format("int8", "token", scale="fp32", symmetric=True), [], kernels._compile
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(kernels, "_compile", lambda key: (built.append(key), compile_(key))[1])
    for shape in ((3, 70), (5, 200), (1, 1), (4, 3)):
        x = torch.randn(shape)
        fused, readable = kernels.encode(x, fmt, dynamic=True), formats.encode(x, fmt)
        assert same(fused.payload, readable.payload)
        assert same(fused.scales, readable.scales)
        sums = torch.randint(-(2**20), 2**20, shape, dtype=torch.int32)
        rows, columns = torch.rand(shape[0], 1), torch.rand(1, shape[1])
        scaled = kernels.rescale(sums, rows, columns, torch.bfloat16)
        assert same(scaled, formats.rescaled(sums, rows, columns, torch.bfloat16))
    assert len(built) == 2


@pytest.fixture
def rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the kernels of this process; building them again takes tenths of a second, from Inductor's cache."""
    assert_fused_is_readable(torch.randn(4, 128, dtype=FIRST_DTYPE), FIRST)
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(kernels, "_causes", {})
    monkeypatch.setattr(kernels, "_warned", False)


# Per format, shapes that share one group size (128 for groups and tokens, anything for tensors): one build.
SHAPES = [(4, 128), (1, 128), (128,), (2, 3, 128), (0, 128), (5, 0), (17, 128)]
RAGGED = [(3, 255), (2, 256), (2, 2, 1023)]
ANY = [(), (1,), (7,), (3, 5), (0, 5)]


@pytest.mark.parametrize(("fmt", "dtype"), CASES)
def test_fused_is_readable_bit_for_bit(fmt: Format, dtype: torch.dtype) -> None:
    group = 128 if fmt.granularity != "group" else fmt.group_size
    shapes = [tuple(group if n == 128 else n for n in shape) for shape in SHAPES]
    if fmt.granularity == "tensor":
        shapes += RAGGED + ANY
    elif fmt.granularity == "group":
        shapes += [(3, 2 * group - 1), (2, 2 * group), (2, 2, 8 * group - 1)]
    built = len(kernels._kernels)
    for shape in shapes:
        x = torch.randn(shape).to(dtype)
        for y in (x, x.relu(), torch.zeros_like(x), x * 1e-4):
            assert_fused_is_readable(y, fmt)
    assert len(kernels._kernels) - built <= 2
    # Many steps of very different sizes, and values that are not finite.
    wide = torch.randn(9, group, dtype=torch.float64).pow(9).clamp(-3e4, 3e4).to(dtype)
    assert_fused_is_readable(wide, fmt)
    wide = wide.clone()
    wide[2, 3], wide[4, 5], wide[6, 7] = torch.inf, -torch.inf, torch.nan
    fused = kernels.encode(wide, fmt, 5, backend="inductor")
    readable = formats.encode(wide, fmt, 5)
    assert same(fused.payload.float(), readable.payload.float()) or fmt.is_fp8  # nan has many bit patterns
    assert torch.equal(fused.payload.float().nan_to_num(99), readable.payload.float().nan_to_num(99))
    assert torch.equal(fused.scales.float().nan_to_num(99), readable.scales.float().nan_to_num(99))
    decoded = kernels.decode(fused, fmt, wide.shape, dtype, backend="inductor")
    assert torch.equal(decoded.nan_to_num(99), formats.decode(readable, fmt, wide.shape, dtype).nan_to_num(99))
    assert decoded[~wide.isfinite()].isnan().all()


@pytest.mark.parametrize(
    "spec",
    [
        "fp6_e3m2/group128/nearest/fp32",
        pytest.param("fp8_e4m3/block128/nearest/fp32", marks=pytest.mark.slow),
        pytest.param("fp6_e2m3/group32/nearest/e8m0", marks=pytest.mark.slow),
        pytest.param("fp8_e5m2/token/stochastic/bf16", marks=pytest.mark.slow),
        pytest.param("int8/token/nearest/fp32/symmetric", marks=pytest.mark.slow),
    ],
)
def test_fused_roundtrip_is_readable_bit_for_bit(spec: str) -> None:
    fmt = Format.parse(spec)
    x = torch.randn(256, 128, dtype=torch.float64).pow(9).clamp(-3e30, 3e30).float()
    for y in (x, x.relu(), torch.zeros_like(x), x * 1e-4, -x.relu() * 1e-30):
        readable = formats.decode(formats.encode(y, fmt, 5), fmt, y.shape, y.dtype)
        assert same(kernels.roundtrip(y, fmt, 5, backend="inductor"), readable)
    x[2, 3], x[4, 5], x[6, 7] = torch.inf, -torch.inf, torch.nan
    fused = kernels.roundtrip(x, fmt, 5, backend="inductor")
    readable = formats.decode(formats.encode(x, fmt, 5), fmt, x.shape, x.dtype)
    assert torch.equal(fused.nan_to_num(99), readable.nan_to_num(99))
    assert fused[~x.isfinite()].isnan().all()


def test_strides_offsets_and_gradients_do_not_matter() -> None:
    base = torch.randn(130, 3, 256)
    for view in (
        base[1:129, :, 3:131],
        base.transpose(0, 2)[..., :128],
        base[:, 0, :128],
        base[0, 0, 0].expand(2, 128),
    ):
        assert_fused_is_readable(view, FIRST)
    x = torch.nn.Parameter(torch.randn(4, 128))
    encoded = kernels.encode(x, FIRST, backend="inductor")
    assert same(encoded.payload, formats.encode(x, FIRST).payload)
    assert not any(part.requires_grad for part in encoded)
    wider = formats.Encoded(encoded.payload.repeat(1, 2)[:, :64], encoded.scales.t().contiguous().t())
    assert same(kernels.decode(wider, FIRST, x.shape, x.dtype), kernels.decode(encoded, FIRST, x.shape, x.dtype))


@pytest.mark.usefixtures("rebuilt")
def test_new_sizes_build_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fused_is_readable(torch.randn(8, 128), FIRST)
    monkeypatch.setattr(kernels, "_compile", lambda key: pytest.fail(f"built {key}"))
    for rows in (1, 2, 3, 31, 1000):
        assert_fused_is_readable(torch.randn(rows, 384), FIRST)


@pytest.mark.usefixtures("rebuilt")
def test_other_code_is_served_from_the_disk_cache() -> None:
    counters = torch._dynamo.utils.counters["inductor"]
    hits, misses = counters["fxgraph_cache_hit"], counters["fxgraph_cache_miss"]
    assert_fused_is_readable(torch.randn(8, 128), FIRST)
    assert (counters["fxgraph_cache_hit"] - hits, counters["fxgraph_cache_miss"] - misses) == (2, 0)


@pytest.mark.usefixtures("rebuilt")
def test_dynamo_takes_no_part() -> None:
    counters = torch._dynamo.utils.counters
    before = {name: dict(counters[name]) for name in ("frames", "stats", "graph_break")}
    with torch._dynamo.config.patch(error_on_recompile=True, recompile_limit=1):
        for rows in (1, 2, 8):
            assert_fused_is_readable(torch.randn(rows, 128), FIRST)
    assert {name: dict(counters[name]) for name in before} == before


@pytest.mark.usefixtures("rebuilt")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_builds_inside_a_running_compiled_model(backend: str) -> None:
    """First calls come from operators of a compiled model: in its forward, and in its backward."""

    @torch.library.custom_op("gnmr_fx_tests::squeeze", mutates_args=())
    def squeeze(x: Tensor) -> Tensor:
        return kernels.decode(kernels.encode(x, FIRST, backend="inductor"), FIRST, x.shape, x.dtype)

    @squeeze.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    squeeze.register_autograd(lambda ctx, grad: squeeze(grad))
    x = torch.randn(4, 128, requires_grad=True)
    compiled = torch.compile(lambda x: squeeze(x * 2).sin().sum(), backend=backend, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        compiled(x).backward()
    expected = formats.decode(formats.encode(x.detach() * 2, FIRST), FIRST, x.shape, x.dtype)
    gradient = formats.decode(formats.encode(expected.cos(), FIRST), FIRST, x.shape, x.dtype) * 2
    assert len(kernels._kernels) == 2
    torch.testing.assert_close(x.grad, gradient)


def surroundings() -> dict[str, Any]:
    return {
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "device": lambda: torch.device("meta"),
        "inference": torch.inference_mode,
        "no_grad": torch.no_grad,
        "enable_grad": torch.enable_grad,
    }


@pytest.mark.usefixtures("rebuilt")
@pytest.mark.parametrize("name", [*surroundings(), "dtype", "deterministic"])
def test_surroundings_do_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while a kernel is built nor when it runs."""
    x = torch.randn(4, 128)
    expected = formats.encode(x, FIRST)
    values = formats.decode(expected, FIRST, x.shape, x.dtype)
    try:
        if name == "dtype":
            torch.set_default_dtype(torch.float64)
        if name == "deterministic":
            torch.use_deterministic_algorithms(True)
        with surroundings().get(name, torch.no_grad)():
            for _ in range(2):
                encoded = kernels.encode(x, FIRST, backend="inductor")
                decoded = kernels.decode(encoded, FIRST, x.shape, x.dtype, backend="inductor")
                assert same(encoded.payload, expected.payload)
                assert same(encoded.scales, expected.scales)
                assert same(decoded, values)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    # What was built there works elsewhere.
    assert_fused_is_readable(torch.randn(3, 128), FIRST)


@pytest.mark.usefixtures("rebuilt")
def test_settings_and_passes_of_the_user_do_not_enter() -> None:
    from torch._inductor import config

    def fail(graph: torch.fx.Graph) -> None:
        pytest.fail("a pass of the user ran on a kernel")

    with config.patch({"post_grad_custom_post_pass": fail, "cpp.enable_floating_point_contract_flag": "fast"}):
        assert_fused_is_readable(torch.randn(3, 128), FIRST)
        assert config.post_grad_custom_post_pass is fail


@pytest.mark.usefixtures("rebuilt")
def test_threads_share_one_build(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_kernel, built, wrong = kernels._compile, [], []
    monkeypatch.setattr(kernels, "_compile", lambda key: built.append(key) or compile_kernel(key))
    x = torch.randn(64, 128)
    expected = formats.encode(x, FIRST)
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        for _ in range(20):
            encoded = kernels.encode(x, FIRST)
            if not same(encoded.payload, expected.payload):
                wrong.append(encoded)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert not wrong


@pytest.mark.usefixtures("rebuilt")
def test_number_of_threads_may_change() -> None:
    before = torch.get_num_threads()
    x = torch.randn(300, 128)
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            assert_fused_is_readable(x, FIRST)
    finally:
        torch.set_num_threads(before)


def test_formats_without_scales_and_subclasses_take_the_readable_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "_compile", lambda key: pytest.fail(f"built {key}"))
    monkeypatch.setattr(kernels, "_kernels", {})
    x = torch.randn(3, 70)
    for fmt in (Format("none"), Format("bf16")):
        encoded = kernels.encode(x, fmt, backend="inductor")
        assert same(kernels.decode(encoded, fmt, x.shape, x.dtype), formats.decode(encoded, fmt, x.shape, x.dtype))

    class Tagged(Tensor):
        pass

    assert same(
        kernels.encode(x.as_subclass(Tagged), FIRST).payload.as_subclass(Tensor),
        formats.encode(x, FIRST).payload,
    )
    with torch._subclasses.FakeTensorMode():
        fake = kernels.encode(torch.empty(4, 128), FIRST)
    assert tuple(fake.payload.shape) == (4, 64)


def test_eager_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_compile", lambda key: pytest.fail(f"built {key}"))
    monkeypatch.setattr(kernels, "_kernels", {})
    x = torch.randn(3, 70)
    encoded = kernels.encode(x, FIRST, backend="eager")
    assert same(encoded.payload, formats.encode(x, FIRST).payload)
    decoded = kernels.decode(encoded, FIRST, x.shape, x.dtype, backend="eager")
    assert same(decoded, formats.decode(encoded, FIRST, x.shape, x.dtype))


@pytest.mark.usefixtures("rebuilt")
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def fail(key: object) -> None:
        attempts.append(key)
        raise RuntimeError("no compiler\nand more lines")

    monkeypatch.setattr(kernels, "_compile", fail)
    x = torch.randn(4, 128)
    with pytest.raises(MissingDependencyError, match="no compiler") as raised:
        kernels.encode(x, FIRST, backend="inductor")
    assert isinstance(raised.value.__cause__, RuntimeError)
    with pytest.warns(GnmrWarning, match="encode kernel for int4/group128/nearest .* no compiler") as caught:
        encoded = kernels.encode(x, FIRST)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            encoded = kernels.encode(x, FIRST)
            decoded = kernels.decode(encoded, FIRST, x.shape, x.dtype)
    assert len(attempts) == 2
    assert same(encoded.payload, formats.encode(x, FIRST).payload)
    assert same(decoded, formats.decode(encoded, FIRST, x.shape, x.dtype))


@pytest.mark.slow
def test_with_a_broken_compiler(tmp_path: Path) -> None:
    program = """
import warnings, torch
from gnmr_fx import kernels
from gnmr_fx.recipe import Format
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    x = torch.randn(4, 128)
    for _ in range(2):
        encoded = kernels.encode(x, Format("int4"))
        kernels.decode(encoded, Format("int4"), x.shape, x.dtype)
print([w.category.__name__ for w in caught if "gnmr" in w.category.__module__])
"""
    environment = {**os.environ, "CXX": "/nonexistent/c++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[0] == "['GnmrWarning']"


def test_arguments_are_checked() -> None:
    x = torch.randn(4, 128)
    with pytest.raises(FormatError, match="int64"):
        kernels.encode(x.long(), FIRST)
    with pytest.raises(FormatError, match="expected a seed"):
        kernels.encode(x, Format("int4", rounding="stochastic"))
    with pytest.raises(FormatError, match="expected backend"):
        kernels.encode(x, FIRST, backend="cuda")  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="expected payload and scales of shapes"):
        kernels.decode(kernels.encode(x, FIRST), FIRST, (4, 256), x.dtype)


def test_seeds_agree() -> None:
    fmt, dtype = Format.parse(FEW[4][0]), FEW[4][1]
    x = torch.randn(4, 128).to(dtype)
    by_int, by_tensor = kernels.encode(x, fmt, 2**40 + 3), kernels.encode(x, fmt, torch.tensor(2**40 + 3))
    assert same(by_int.payload, by_tensor.payload)
    assert same(by_int.payload, formats.encode(x, fmt, 2**40 + 3).payload)
    assert not same(by_int.payload, kernels.encode(x, fmt, 3).payload)
