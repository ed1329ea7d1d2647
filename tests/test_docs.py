"""The documentation says what is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mtfunc as mt
from tests.toys import assert_same, flat

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


def test_the_code_in_the_readme_runs_and_learns(capsys, tmp_path, monkeypatch):
    code, around = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
    scope: dict[str, Any] = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), scope)
    before, after = map(float, re.findall(r"[\d.]+", capsys.readouterr().out))
    assert after < 0.75 * before

    trained = {path: x.clone() for path, x in flat(scope["state"].params).items()}
    monkeypatch.chdir(tmp_path)
    exec(compile(around, "README.md", "exec"), scope)
    assert scope["state"].step == 20
    assert_same(flat(scope["state"].params), trained)
    assert scope["hidden"].shape == (16, 64, 64)
    assert float(re.findall(r"[\d.]+", capsys.readouterr().out)[0]) < before
    program, batch, key = scope["with_dropout"](0.1), scope["batch"], mt.random.key(1)
    f = mt.reference.value_and_grad(program, has_aux=True)
    expected = f(scope["state"].params, batch, key)
    assert_same([scope["loss"], scope["aux"], scope["grads"]], [*expected[0], expected[1]])


def test_the_library_does_not_import_what_users_fork():
    for file in (ROOT / "mtfunc").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) (models|scripts)\b", file.read_text(), re.M), file
