"""The examples run, and give what they say."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import gnmr_fx
from tests.loops import readable_kernels

EXAMPLES = Path(__file__).parents[1] / "examples"
NANO = ["--size", "nano", "--batch", "2", "--seq", "32", "--no-compile", "--device", "cpu"]


def load(name: str) -> ModuleType:
    """An example as a module."""
    if str(EXAMPLES) not in sys.path:  # one example may import another, as when it is run as a script
        sys.path.append(str(EXAMPLES))
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture
def llama() -> ModuleType:
    return load("pretrain_tiny_llama")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file of a few kilobytes."""
    path = tmp_path / "text.txt"
    path.write_text("All work and no play makes Jack a dull boy.\n" * 200)
    return path


def test_single_run(llama: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--steps", "8", "--warmup", "2", "--alpha", "0.5", "--budget", "3", "--out", str(tmp_path)]
    result = llama.main([*NANO, *arguments])

    assert not result.interrupted
    (run,) = result.runs
    assert len(run.trace.losses) == 8
    assert math.isfinite(run.perplexity)
    assert 1 < run.perplexity < 2 * llama.VOCABULARY
    assert len(run.table.units) == 14
    assert run.report.steps == 8
    assert max(run.trace.active) == 3  # the budget is used, and never exceeded
    low, most = run.table.totals["bytes_low"], run.table.totals["bytes_recovery_max"]
    assert low < run.saved_bytes <= low + most
    assert result.plot is not None
    assert result.plot.parent == tmp_path
    assert result.plot.stat().st_size > 0
    printed = capsys.readouterr().out
    for part in (str(run.table), str(run.report), str(result.plot), f"{run.perplexity:.3f} per byte"):
        assert part in printed


def test_compare(llama: ModuleType, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--compare", "--steps", "4", "--warmup", "1", "--lock", "2", "--alpha", "0.5", "--budget", "0.25"]
    result = llama.main([*NANO, *arguments, "--text", str(text), "--out", str(tmp_path)])

    full, high, low, gnmr, chance = result.runs
    assert full.table is None
    assert len({run.trace.losses[0] for run in result.runs}) == 1  # same weights, same batch; the forward is exact
    assert [max(run.trace.active) for run in (full, high, low, gnmr, chance)] == [0, 0, 0, 3, 3]
    assert chance.trace.active == [3, 3, 3, 3]
    assert low.saved_bytes < gnmr.saved_bytes < high.saved_bytes < high.table.totals["bytes_full"]
    assert all(math.isfinite(run.perplexity) for run in result.runs)
    printed = capsys.readouterr().out
    assert llama.comparison(result.runs) in printed
    assert all(run.policy in printed for run in result.runs)


def test_interrupt_reports_what_was_done(
    llama: ModuleType, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: Callable[..., Any] = llama.batches

    def two_batches(*args: Any) -> Any:
        for step, batch in enumerate(batches(*args)):
            if step == 2:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(llama, "batches", two_batches)
    result = llama.main([*NANO, "--steps", "8", "--text", str(text), "--out", str(tmp_path)])
    assert result.interrupted
    assert len(result.runs[0].trace.losses) == 2
    assert result.runs[0].report.steps == 2
    assert "after 2 steps" in capsys.readouterr().out


def test_text_is_split_by_file(llama: ModuleType, tmp_path: Path) -> None:
    for index in range(100):
        (tmp_path / f"{index}.txt").write_bytes(bytes([index]) * 50 if index else b"\0")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "skipped.txt").write_bytes(bytes([200]) * 50)
    text = llama.load_text(tmp_path, 50)
    train, validation = set(text.train.tolist()), set(text.validation.tolist())
    assert not train & validation
    assert train | validation == set(range(1, 100))
    assert 3 <= len(validation) <= 20
    again = llama.load_text(tmp_path, 50)
    assert torch.equal(again.train, text.train)
    assert torch.equal(again.validation, text.validation)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "whole number of at least 1"),
        (["--seq", "x"], "whole number of at least 2"),
        (["--lr", "-1"], "positive number"),
        (["--budget", "1.5"], "share of the units"),
        (["--recipe", "saved-int4"], "saved-int4-int8"),
        (["--recipe", "int5:int8"], "int5"),
        (["--alpha", "0"], "alpha: expected a positive number"),
        (["--lock", "0"], "lock_steps"),
        (["--device", "nowhere"], "cannot use 'nowhere'"),
        (["--text", "/no/such/file"], "found nothing"),
        (["--size", "huge"], "invalid choice"),
    ],
)
def test_bad_flags(llama: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        llama.main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_too_little_text(llama: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(SystemExit, match="expected at least 128 bytes"):
        llama.main(["--text", str(tmp_path)])


def test_flags_become_settings(llama: ModuleType) -> None:
    settings = llama.parse(["--budget", "0.2", "--recipe", "int2/tensor:int8/token", "--device", "cpu"])
    assert settings.budget == 0.2
    assert settings.recipe == gnmr_fx.Recipe(gnmr_fx.Format("int2", "tensor"), gnmr_fx.Format("int8", "token"))
    assert (settings.steps, settings.dtype) == (llama.STEPS, "fp32")
    assert settings.config == gnmr_fx.GnmrConfig.recommended(settings.recipe)
    assert llama.parse([]).config == gnmr_fx.GnmrConfig()
    given = llama.parse(["--signal", "gap", "--alpha", "0.1", "--beta", "3", "--lock", "7"])
    assert given.config == gnmr_fx.GnmrConfig(signal="gap", alpha=0.1, beta=3.0, lock_steps=7)
    assert llama.parse(["--compare"]).steps == llama.STEPS_COMPARE


def test_learning_rate_rises_and_falls(llama: ModuleType) -> None:
    shares = [llama.lr_share(step, 100) for step in range(101)]
    peak = shares.index(max(shares))
    assert shares[0] > 0
    assert max(shares) == pytest.approx(1)
    assert shares[: peak + 1] == sorted(shares[: peak + 1])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
    assert shares[-1] == pytest.approx(llama.LR_FLOOR_SHARE)
    assert 0 < llama.lr_share(0, 1) <= 1


@pytest.fixture
def dsv3(llama: ModuleType) -> Iterator[ModuleType]:
    with readable_kernels():
        yield load("pretrain_dsv3_recipe")


DSV3 = ["--size", "nano", "--batch", "2", "--seq", "32", "--steps", "4", "--warmup", "1", "--lock", "2"]


def test_dsv3(dsv3: ModuleType, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs" / "out.json"
    lines = dsv3.main([*DSV3, "--alpha", "0.5", "--budget", "3", "--text", str(text), "--out", str(out)])
    full, low, high, gnmr, chance = lines
    assert [line["gemms"] for line in lines] == ["full", *["emulated"] * 4]
    assert full["validation_loss"] == full["validation_loss_in_eval"]
    # Every policy starts from the same weights, and its GEMMs are its own.
    assert len({round(line["train_loss"], 1) for line in lines}) == 1
    assert len({line["train_loss"] for line in (full, low, high, gnmr)}) == 4
    assert low["recovered"] == high["recovered"] == 0
    assert 0 < gnmr["recovered"] == chance["recovered"] <= 3 * 4
    assert all(line["unit_steps"] == 14 * 4 for line in (low, high, gnmr, chance))
    assert low["bytes"] < gnmr["bytes"] < low["bytes_full"]
    assert low["bytes"] < high["bytes"] < low["bytes_full"]
    printed = capsys.readouterr().out
    assert dsv3.summary(lines) in printed
    assert "±" not in dsv3.summary(lines)
    assert dsv3.main(["--show", str(out), str(out)]) == [*lines, *lines]
    assert "+0.0000 ± 0.0000" in capsys.readouterr().out


def test_dsv3_policies(dsv3: ModuleType) -> None:
    settings = load("pretrain_tiny_llama").Settings()
    full, low, high, gnmr, chance = dsv3.Options("fp6_e2m3", True, "emulated").policies(settings)
    assert full.recipe is None
    assert gnmr.recipe == chance.recipe == gnmr_fx.dsv3("fp6_e2m3", mx=True, backend="emulated")
    assert low.recipe.gemm.output.low == low.recipe.gemm.output.high == gnmr.recipe.gemm.output.low
    assert high.recipe.gemm.output.low == high.recipe.gemm.output.high == gnmr.recipe.gemm.output.high
    assert (low.budget, high.budget, gnmr.budget, chance.budget) == (0, 0, settings.budget, settings.budget)


def test_dsv3_chooses_as_many_and_keeps_them(dsv3: ModuleType) -> None:
    units, counts = [f"u{i}" for i in range(6)], [0, 2, 2, 3, 1, 0, 4, 4]
    choices = dsv3.random_choices(units, counts, 0)
    assert [len(set(choice)) for choice in choices] == counts
    assert choices[1] == choices[2]
    assert set(choices[2]) < set(choices[3])
    assert set(choices[4]) < set(choices[3])
    assert choices == dsv3.random_choices(units, counts, 0) != dsv3.random_choices(units, counts, 1)


def test_dsv3_on_a_local_model(dsv3: ModuleType, tmp_path: Path, text: Path) -> None:
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    made = dsv3.source(tmp_path, load("pretrain_tiny_llama").Settings(seq=32, text=text))
    assert type(made.build()).__name__ == "Qwen3ForCausalLM"
    assert (made.unit, made.text.train.dtype) == ("byte", torch.uint8)
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "work": 1, "play": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    arguments = ["--text", str(text), "--out", str(tmp_path / "out.json"), "--model", str(tmp_path)]
    lines = dsv3.main([*DSV3, *arguments, "--steps", "1", "--low", "fp6_e2m3", "--mx", "--backend", "emulated"])
    assert {line["unit"] for line in lines} == {"token"}
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--low", "fp8_e4m3"], "invalid choice"),
        (["--backend", "fast"], "invalid choice"),
        (["--model", "/no/such/folder"], "found nothing"),
        (["--show", "/no/such/file"], "found nothing"),
        (["--seeds", "-1"], "whole number of at least 0"),
    ],
)
def test_dsv3_bad_flags(
    dsv3: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        dsv3.main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_dsv3_native_where_there_is_none(dsv3: ModuleType, tmp_path: Path, text: Path) -> None:
    arguments = ["--backend", "native", "--text", str(text), "--out", str(tmp_path / "out.json")]
    with pytest.raises(SystemExit, match=r"error: expected a native kernel .* found none"):
        dsv3.main([*DSV3, *arguments])


@pytest.fixture
def tuning() -> ModuleType:
    return load("finetune_lora")


TUNING = ["--size", "nano", "--batch", "2", "--seq", "32", "--device", "cpu", "--pretrain-steps", "2", "--steps", "6"]


@pytest.mark.parametrize("low_formats", [["int8/token"], pytest.param(["int8/token", "nf4"], marks=pytest.mark.slow)])
def test_lora_compares_policies(
    tuning: ModuleType, text: Path, capsys: pytest.CaptureFixture[str], low_formats: list[str]
) -> None:
    arguments = ["--low", *low_formats, "--alpha", "0.5", "--warmup", "1", "--lock", "2", "--budget", "3"]
    with readable_kernels():
        runs = tuning.main([*TUNING, *arguments, "--text", str(text), "--seeds", "0", "1"])
    names = [name.replace("/", " ") for name in low_formats]
    policies = ["fp32", *(kind.format(name) for name in names for kind in ("{}", "GNMR {} / fp32", "random {} / fp32"))]
    assert [run.policy for run in runs] == policies * 2
    exact, low, gnmr, chance = runs[:4]
    assert all(math.isfinite(loss) for run in runs for loss in (run.tuned, run.first, *run.losses))
    assert len(exact.losses) == 6
    assert math.isnan(exact.stored)
    assert low.stored != low.tuned
    assert exact.recovered == low.recovered == 0
    assert 0 < gnmr.recovered <= 3 * 6
    assert chance.recovered == 3 * 6
    assert low.device_mib < gnmr.device_mib == chance.device_mib < exact.device_mib
    assert "nf4" not in low_formats or runs[4].device_mib < low.device_mib
    assert low.losses != exact.losses
    printed = capsys.readouterr().out
    assert all(run.policy in printed for run in runs)
    assert "±" in printed


def test_lora_of_a_local_model(tuning: ModuleType, tmp_path: Path, text: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    model = load("pretrain_tiny_llama").build_model(tuning.SIZES["nano"], 32)
    model.save_pretrained(tmp_path / "model")
    letters = {chr(code): code for code in range(256)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(letters, [], unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(tmp_path / "model")
    with readable_kernels():
        runs = tuning.main(
            [*TUNING, "--model", str(tmp_path / "model"), "--text", str(text), "--tune-text", str(text), "--low", "nf4"]
        )
    assert len(runs) == 4
    assert all(math.isfinite(run.tuned) for run in runs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--low", "int5"], "int5"),
        (["--low", "bf16"], "Format with scales"),
        (["--model", "/no/such/folder"], "found nothing"),
        (["--beta", "-1"], "beta: expected a positive number"),
    ],
)
def test_bad_flags_of_lora(
    tuning: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tuning.main(arguments)
    assert message in capsys.readouterr().err


def test_own_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("own_model").main(steps=20) < 1
    assert "6 units" in capsys.readouterr().out
