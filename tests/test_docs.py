"""The documentation says what is there."""

from __future__ import annotations

import re
from pathlib import Path

import mtfunc as mt

ROOT = Path(__file__).parent.parent


def test_the_public_names_are_those_of_the_docs():
    told = set(re.findall(r"`mt\.(\w+)`", (ROOT / "docs/api.md").read_text().split("Devices")[0]))
    assert told == set(mt.__all__)
    assert len((ROOT / "mtfunc/__init__.py").read_text().splitlines()) <= 70


def test_every_public_name_is_documented():
    for name in mt.__all__:
        thing = getattr(mt, name)
        if getattr(thing, "__module__", "").startswith("mtfunc."):
            assert thing.__doc__ and len(thing.__doc__) > 40, name


def test_the_architecture_in_the_readme_runs_and_learns(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    before, after = map(float, re.findall(r"[\d.]+", capsys.readouterr().out))
    assert after < 0.75 * before


def test_the_library_does_not_import_what_users_fork():
    for file in (ROOT / "mtfunc").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) (models|scripts)\b", file.read_text(), re.M), file
