"""The README's Python runs as it is written."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
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


PAGES = sorted(page.name for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_snippets_of_the_docs_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, in one namespace with a model in training mode and some data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    ids = torch.randint(0, 64, (2, 8))
    data = [{"input_ids": ids, "labels": ids}] * 2
    scope: dict[str, Any] = {"gnmr_fx": gnmr_fx, "model": llama().model.train(), "data": data}
    for snippet in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL):
        exec(snippet, scope)


def test_links_of_the_docs_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"
