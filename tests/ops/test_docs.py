"""docs/ops.md says what is there, and its code runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mtfunc import ops

TEXT = (Path(__file__).parents[2] / "docs/ops.md").read_text()
BLOCKS = re.findall(r"^## `(\w+)`.*?```python\n(.*?)```", TEXT, re.S | re.M)


def test_every_operation_is_in_the_table_and_has_a_section_with_code():
    (table,) = re.findall(r"^\| operation \| computes.*?\n\n", TEXT, re.S | re.M)
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.M)) == sorted(ops.__all__)
    assert re.findall(r"^## `(\w+)`", TEXT, re.M) == re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert [name for name, _ in BLOCKS] == re.findall(r"^## `(\w+)`", TEXT, re.M)
    assert TEXT.count("```python") == len(BLOCKS)


@pytest.mark.parametrize(("name", "code"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_code_runs(name, code):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(compile(code, f"docs/ops.md, {name}", "exec"), {"__name__": "docs"})
    assert f"ops.{name}(" in code and "assert" in code


@pytest.mark.parametrize("name", ops.__all__)
def test_docstrings_have_shapes_errors_and_an_example(name):
    doc = getattr(ops, name).__doc__
    for part in ("Args:", "Returns:", "Raises:", "Example:", "tokens"):
        assert part in doc, part
