"""The README's Python runs as it is written."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import gnmr_fx
from tests.loops import readable_kernels
from tests.models import llama
from tests.test_integrations import instrumented, logged

ROOT = Path(__file__).resolve().parent.parent


INTEGRATIONS = ROOT / "docs" / "integrations.md"


def blocks(page: Path, language: str = "python") -> list[str]:
    """The blocks of code of a language."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def test_snippets_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    snippets = [code for code in blocks(ROOT / "README.md") if "integrations" not in code]
    assert len(snippets) >= 2
    ids = torch.randint(0, 64, (2, 8))
    scope: dict[str, Any] = {"model": llama().model.train(), "data": [{"input_ids": ids, "labels": ids}] * 2}
    exec(snippets[0], scope)
    assert not any("gnmr" in name or name == "forward" for m in scope["model"].modules() for name in vars(m))
    assert "2 steps" in capsys.readouterr().out
    for snippet in snippets[1:]:
        exec(snippet, scope)
    assert gnmr_fx.controller(scope["model"]).flags.all()
    assert (tmp_path / "gnmr.pt").exists()
    assert f"alpha={gnmr_fx.GnmrConfig().alpha}, beta={gnmr_fx.GnmrConfig().beta}" in snippets[1]


PAGES = sorted(page.name for page in set((ROOT / "docs").glob("*.md")) - {INTEGRATIONS})


@pytest.mark.parametrize("page", PAGES)
def test_snippets_of_the_docs_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, in one namespace with a model in training mode and some data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    ids = torch.randint(0, 64, (2, 8))
    model, data = llama().model.train(), [{"input_ids": ids, "labels": ids}] * 2
    scope: dict[str, Any] = {
        "__name__": "__main__",
        "gnmr_fx": gnmr_fx,
        "model": model,
        "step_model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "batch": data[0],
        "batches": data,
        "data": data,
    }
    for at, snippet in enumerate(blocks(ROOT / "docs" / page)):
        if at and "gnmr_fx.instrument(" in snippet and "uninstrument(" not in snippet:
            with contextlib.suppress(gnmr_fx.NotInstrumentedError):  # each instruments the model for itself
                gnmr_fx.uninstrument(model)
        exec(snippet, scope)
    if page == "saved-activations.md":
        assert gnmr_fx.table(model).scope == gnmr_fx.AllSaved()
    if page == "lora.md":
        assert gnmr_fx.table(scope["model"]).recipe == gnmr_fx.RECIPES["lora-int8-bf16"]
    if page == "signals.md":
        assert scope["found"].units
        assert (tmp_path / "audit.png").exists()


def test_links_of_the_docs_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"


TRAINER_SNIPPETS = [code for code in blocks(ROOT / "README.md") if "integrations" in code] + blocks(INTEGRATIONS)


@pytest.mark.parametrize("snippet", TRAINER_SNIPPETS, ids=range(len(TRAINER_SNIPPETS)))
def test_snippets_with_trainers_run(snippet, tmp_path, monkeypatch, capsys):
    """Each on its own, with what its reader has: a model, its data, a trainer's arguments."""
    import accelerate
    import lightning
    from transformers import Trainer, TrainingArguments

    from tests.test_trainers import Lit, Tokens

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = llama(1).model.train()
    scope: dict[str, Any] = {
        "gnmr_fx": gnmr_fx,
        "lightning": lightning,
        "Trainer": Trainer,
        "args": TrainingArguments("out", max_steps=2, use_cpu=True, disable_tqdm=True, report_to="none"),
        "dataset": Tokens(),
        "loader": DataLoader(Tokens(), batch_size=16),
        "module": Lit(),
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "accelerator": accelerate.Accelerator(cpu=True),
    }
    with readable_kernels():
        exec(snippet, scope)
    made = scope.get("adapted", scope["model"]) if "lightning.Trainer" not in snippet else scope["module"].model
    steps = 0 if "converter" in snippet else 2
    assert gnmr_fx.controller(made).step_count == steps
    assert (tmp_path / "run.jsonl").exists() == ("run.jsonl" in snippet and steps > 0)


def test_command_lines_run(tmp_path, monkeypatch, capsys):
    from gnmr_fx.cli import main
    from tests.test_cli import LLAMA

    monkeypatch.chdir(tmp_path)
    Path("Llama-3-70B").mkdir()
    Path("Llama-3-70B/config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 8192}))
    Path("mymodels.py").write_text("from torch import nn\ndef build(): return nn.Linear(8, 8)\n")
    with readable_kernels():
        logged(instrumented(), Path("run.jsonl"), range(6))
        lines = [
            line
            for page in (ROOT / "README.md", INTEGRATIONS)
            for code in blocks(page, "sh")
            for line in code.splitlines()
        ]
        assert len(lines) >= 9
        for line in lines:
            program, *argv = shlex.split(line, comments=True)
            assert (program, main(argv)) == ("gnmr-fx", 0), line
    assert Path("run.png").exists()
    sys.modules.pop("mymodels")
