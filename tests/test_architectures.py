"""benchmarks/architectures.py: what it finds, what it does with a crash or a hang, and a sample of its table."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

import gnmr_fx

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module: its folder is on the path, as when it is run."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import architectures

        return architectures
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def tiny(script: ModuleType) -> ModuleType:
    return sys.modules["tiny_configs"]


def named(script: ModuleType, name: str) -> Any:
    """The architecture of ``task/model_type``."""
    return next(a for a in script.architectures() if f"{a.task}/{a.model_type}" == name)


# Shrunken configurations ----------------------------------------------------------------------------------------------


def test_every_kind_of_layer_is_kept_once(tiny: ModuleType) -> None:
    default = transformers.Gemma3TextConfig()
    small = tiny.shrink(default)
    assert len(default.layer_types) == default.num_hidden_layers == 26
    assert small.layer_types == list(dict.fromkeys(default.layer_types))
    assert small.num_hidden_layers == 2


def test_special_tokens_stay_apart_and_inside_the_vocabulary(tiny: ModuleType) -> None:
    small = tiny.shrink(transformers.Gemma3Config())
    ids = [small.image_token_index, small.boi_token_index, small.eoi_token_index]
    assert len(set(ids)) == 3
    assert all(tiny.LAST_TOKEN <= i < tiny.VOCABULARY for i in ids)
    assert small.text_config.vocab_size == tiny.VOCABULARY


def test_configurations_inside_are_shrunk(tiny: ModuleType) -> None:
    small = tiny.shrink(transformers.CLIPConfig())
    assert small.vision_config.hidden_size == small.text_config.hidden_size == tiny.HIDDEN
    assert small.vision_config.image_size == tiny.IMAGE


def test_nothing_is_random_in_training(tiny: ModuleType) -> None:
    model = tiny.build("masked-lm", "bert", "BertForMaskedLM")
    assert model.training
    assert all(m.p == 0.0 for m in model.modules() if isinstance(m, torch.nn.Dropout))
    assert sum(p.numel() for p in model.parameters()) < 200_000


# One row --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["causal-lm/gpt_neo", "masked-lm/albert", "image-classification/vit"])
def test_architectures(script: ModuleType, name: str) -> None:
    row = script.measure(named(script, name), "aot_eager")
    assert (row.status, row.stage, row.reason) == ("pass", "", "")
    assert 0 < row.ran == row.units < row.weights  # the output head, and the patches' convolution, are left alone
    assert row.ran + sum(row.left_alone.values()) == row.weights


@pytest.mark.parametrize(
    ("stage", "patch"),
    [
        ("gradients", {"RECIPE": "saved-int4-int8"}),
        ("uninstrument", {"gnmr_fx.uninstrument": lambda model: model}),
    ],
)
def test_what_is_wrong_is_found(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, stage: str, patch: dict[str, Any]
) -> None:
    monkeypatch.setattr(script.Check, "compile", lambda self: None)
    for name, value in patch.items():
        monkeypatch.setattr(f"{script.__name__}.{name}", value)
    row = script.measure(named(script, "masked-lm/bert"), "aot_eager")
    assert (row.status, row.stage) == ("fail", stage)
    assert "differ" in row.reason


def test_a_weight_that_is_in_no_table_is_found(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.Check, "compile", lambda self: None)
    instrument = gnmr_fx.instrument

    def forgetful(model: Any, *args: Any, **options: Any) -> Any:
        instrument(model, *args, exclude=["*.query"], **options)
        controller = gnmr_fx.controller(model)
        controller.left_alone = tuple(item for item in controller.left_alone if item.reason != "in exclude")
        return model

    monkeypatch.setattr(script.gnmr_fx, "instrument", forgetful)
    row = script.measure(named(script, "masked-lm/bert"), "aot_eager")
    assert (row.status, row.stage) == ("fail", "coverage")
    assert row.reason.startswith("1 of ")
    assert "query" in row.reason


def test_a_model_without_projections_says_so(script: ModuleType) -> None:
    row = script.measure(named(script, "image-classification/mobilenet_v2"), "aot_eager")
    assert (row.status, row.stage) == ("no projection", "instrument")
    assert "a convolution is not a projection" in row.reason


def test_a_model_that_does_not_train_is_excluded(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: Any) -> Any:
        raise ImportError("needs another library\nand a long story")

    monkeypatch.setattr(script, "build", build)
    row = script.measure(named(script, "masked-lm/bert"), "aot_eager")
    assert (row.status, row.stage, row.reason) == ("excluded", "stock", "ImportError: needs another library")


# All rows -------------------------------------------------------------------------------------------------------------


def test_a_crash_and_a_hang_are_rows(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(architecture: Any, backend: str) -> Any:
        if architecture.model_type == "gpt2":
            os._exit(3)
        if architecture.model_type == "llama":
            time.sleep(60)
        return script.Row(**script.asdict(architecture), status="pass", stage="", ran=5, units=6)

    monkeypatch.setattr(script, "_warm_up", lambda backend: None)
    monkeypatch.setattr(script, "measure", measure)
    path = tmp_path / "rows.jsonl"
    chosen = ["causal-lm/gpt2", "causal-lm/llama", "causal-lm/opt"]
    script.main(["--json", str(path), "--limit", "2", "--jobs", "2", "--only", *chosen])
    rows = {row.model_type: row for row in script.read(path).values()}
    assert rows["gpt2"].reason == "the process ended with code 3"
    assert rows["llama"].reason == "no result within 2 s"
    assert {name: row.status for name, row in rows.items()} == {"gpt2": "fail", "llama": "fail", "opt": "pass"}

    lines = path.read_text().splitlines()
    script.main(["--json", str(path), "--only", *chosen])  # nothing is left to do
    assert path.read_text().splitlines() == lines
    script.main(["--json", str(path), "--failed", "--limit", "2", "--only", "causal-lm/gpt2", "causal-lm/opt"])
    assert [json.loads(line)["model_type"] for line in path.read_text().splitlines()[3:]] == ["gpt2"]

    capsys.readouterr()
    script.main(["--json", str(path), "--show"])
    shown = capsys.readouterr().out
    assert "| all | 3 | 0 | 3 | 1 | 0 | 2 | 33.3% |" in shown
    assert "opt 5 of 6." in shown
    assert "| causal-lm/gpt2 |  | the process ended with code 3 |" in shown


SAMPLE = (
    "causal-lm/gpt2", "causal-lm/mamba2", "causal-lm/jamba", "causal-lm/qwen3_moe", "causal-lm/deepseek_v3",
    "causal-lm/gemma3n_text", "causal-lm/bloom", "causal-lm/rwkv", "masked-lm/deberta-v2", "masked-lm/longformer",
    "masked-lm/convbert", "masked-lm/funnel", "seq2seq/t5", "seq2seq/bart", "seq2seq/switch_transformers",
    "image-classification/swin", "image-classification/convnext", "image-classification/levit",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_sample(script: ModuleType, name: str) -> None:
    row = script.measure(named(script, name), "aot_eager")
    assert (row.status, row.reason) == ("pass", "")
