"""The guides' code runs, top to bottom, and prints what they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mtfunc import numerics

DOCS = Path(__file__).parent.parent / "docs"
GUIDES = ("determinism",)
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.S)
"""A block of code, and what it prints if that follows."""


@pytest.mark.parametrize("guide", GUIDES)
def test_code_runs_and_prints_what_is_shown(guide, capsys):
    text = (DOCS / f"{guide}.md").read_text()
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count("```python") > 1
    names = {"__name__": guide}
    with torch.random.fork_rng(), numerics.recorded():
        torch.manual_seed(0)
        for number, (code, shown) in enumerate(blocks):
            exec(compile(code, f"docs/{guide}.md, block {number}", "exec"), names)
            printed = capsys.readouterr().out
            assert printed == shown or not shown, f"block {number}"
