"""scripts/check.py: what it takes, what it says, how it leaves."""

import json
import re
import sys

import pytest

from scripts import check

BLOCK = """
import torch
import mtfunc as mt

def model(p, x, batch):
    return ((batch["x"] @ p["w"]) ** 2).mean()

def noisy(p, x, batch):
    return ((batch["x"] @ p["w"] + torch.rand(3)) ** 2).mean()

params = {"m": {"w": torch.eye(3), "unused": torch.ones(2)}}
batch = {"x": torch.ones(2, 3)}
tuple_of_three = mt.chain(mt.stage(model, "m")), params, batch
short = mt.chain(mt.stage(model, "m")), params
wrong = params, params, batch
missing = mt.chain(mt.stage(model, "n")), params, batch
number = 3

def small():
    return *tuple_of_three, mt.random.key(1)

def micro():
    return mt.chain(mt.stage(model, "m")), params, [batch, batch]

def impure():
    return mt.chain(mt.stage(noisy, "m")), params, batch

def needs(argument):
    return tuple_of_three
"""


@pytest.fixture
def block(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    for name in ("checked_block", "checked_broken", "checked_needy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "checked_block.py").write_text(BLOCK)
    (tmp_path / "checked_broken.py").write_text("1 / 0")
    (tmp_path / "checked_needy.py").write_text("import nothing_of_that_name")
    return "checked_block.py"


@pytest.mark.parametrize("name", ["small", "tuple_of_three", "micro"])
def test_a_sound_program(block, capsys, name):
    assert check.main([f"{block}:{name}", "--seeds", "2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"model\s+m\s+2\s+the loss\s+func", out)
    assert "equal to the standard graph, bit for bit" in out and "2 simulated" in out
    assert "warning: no output that the loss depends on uses 'm/unused'" in out


def test_a_module_by_its_dotted_name(block, capsys):
    assert check.main(["checked_block:small", "--devices", "cpu"]) == 0
    assert "bit for bit" in capsys.readouterr().out


def test_an_impure_program(block, capsys):
    assert check.main([f"{block}:impure"]) == 1
    assert "stage 'noisy' draws from torch's global generator" in capsys.readouterr().out


def test_json(block, capsys):
    assert check.main([f"{block}:small", "--seeds", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["sound"] and told["leaves"] == ["m/w", "m/unused"] and "bit for bit" in err
    assert told["stages"][0]["name"] == "model" and told["configurations"][0]["slots"] == 1
    assert check.main([f"{block}:impure", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["sound"], told["kind"], told["stage"]) == (False, "generator", "noisy")


def test_a_model(capsys):
    flags = ["--model", "llama-tiny", "--devices", "cpu", "--context", "4", "--batch", "1"]
    assert check.main([*flags, "--micro-batches", "2"]) == 0
    assert "2 micro-batches" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], r"nothing to check; expected MODULE:NAME or --model NAME"),
        (["block.py"], r"'block.py'; expected MODULE:NAME"),
        (["absent.py:small"], r"absent.py: there is no such file"),
        (["checked_absent:small"], r"there is no module 'checked_absent'; expected a file"),
        (["checked_broken.py:small"], r"checked_broken.py raised ZeroDivisionError when imported"),
        (["checked_needy:small"], r"checked_needy needs 'nothing_of_that_name'"),
        (["checked_block.py:smal"], r"checked_block.py has no 'smal'; it has .*small"),
        (["checked_block.py:number"], r"gave int; expected \(program, params, batch\)"),
        (["checked_block.py:short"], r"gave a tuple of 2; expected"),
        (["checked_block.py:wrong"], r"gave dict first; expected what mt.chain returns"),
        (["checked_block.py:needs"], r"needs\(\) raised TypeError.*without arguments"),
        (["checked_block.py:missing"], r"checked_block.py:missing: part 'model': no 'n'"),
        (["checked_block.py:small", "--devices", "tpu"], r"device 'tpu'; expected 'cpu', 'sim'"),
        (["checked_block.py:small", "--seeds", "0"], r"argument --seeds: '0'; expected a whole"),
        (["checked_block.py:small", "--model", "gpt2"], r"expected one of them"),
        (["--model", "nobody"], r"nobody"),
        (["--model", "llama-tiny", "--context", "99999"], r"--context 99999: llama-tiny was made"),
    ],
)
def test_bad_input(block, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        check.main(arguments)
    assert re.search(message, capsys.readouterr().err)


def test_help_teaches(capsys):
    with pytest.raises(SystemExit, match="0"):
        check.main(["--help"])
    out = capsys.readouterr().out
    assert "MODULE:NAME" in out and "exit status: 0" in out and "docs/gradients.md" in out
