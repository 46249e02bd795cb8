"""The README's Python runs as it is written."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import torch

import gnmr_fx
from tests.models import llama

ROOT = Path(__file__).resolve().parent.parent


def test_snippets_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
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


def test_snippets_of_the_docs_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for page in sorted((ROOT / "docs").glob("*.md")):
        ids = torch.randint(0, 64, (2, 8))
        model = llama().model.train()
        scope: dict[str, Any] = {
            "gnmr_fx": gnmr_fx,
            "model": model,
            "step_model": model,
            "optimizer": torch.optim.SGD(model.parameters(), 0.1),
            "batch": {"input_ids": ids, "labels": ids},
            "batches": [{"input_ids": ids, "labels": ids}] * 2,
        }
        for at, snippet in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)):
            if at and "gnmr_fx.instrument(" in snippet:
                gnmr_fx.uninstrument(model)
            exec(snippet, scope)
        if page.stem == "saved-activations":
            assert gnmr_fx.table(scope["model"]).scope == gnmr_fx.AllSaved()
    assert scope["found"].units
    assert (tmp_path / "audit.png").exists()
