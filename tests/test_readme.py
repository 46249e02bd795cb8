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


def test_snippets_of_the_docs_run() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        scope: dict[str, Any] = {"gnmr_fx": gnmr_fx, "model": llama().model.train()}
        for snippet in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
            exec(snippet, scope)
        table = gnmr_fx.table(scope["model"])
        if page.stem == "saved-activations":
            assert table.scope == gnmr_fx.AllSaved()
        if page.stem == "lora":
            assert table.recipe == gnmr_fx.RECIPES["lora-int8-bf16"]
