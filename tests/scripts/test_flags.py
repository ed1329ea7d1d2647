"""The shared flags and a run's directory: what is taken, what is refused and how it is told."""

import argparse
import re
from pathlib import Path

import pytest

from scripts import _flags, _run
from scripts._flags import Refusal


def parse(*arguments):
    return _flags.parser("d", "e", steps=7, context=8, batch=4).parse_args(arguments)


def test_defaults_and_all_shared_flags():
    assert vars(parse()) == dict(
        model="llama-tiny",
        corpus=None,
        device="cpu",
        steps=7,
        context=8,
        batch=4,
        micro_batches=1,
        seed=0,
        out=None,
        resume=False,
        save_every=100,
        json=False,
    )
    given = parse("--micro-batches", "2", "--save-every", "5", "--seed", "-3", "--device", "sim:4")
    assert (given.micro_batches, given.save_every, given.seed, given.device) == (2, 5, -3, "sim:4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: '0'; expected a whole number, 1 or more"),
        (["--batch", "1.5"], "argument --batch: '1.5'; expected a whole number, 1 or more"),
        (["--seed", str(2**63)], f"argument --seed: '{2**63}'; expected a whole number of 64 bits"),
        (["--device", "tpu"], r"argument --device: .*'tpu'; expected 'cpu'"),
        (["--device", "sim:x"], r"argument --device: .*'sim:x'; expected 'cpu'"),
        (["--step", "3"], "unrecognized arguments: --step 3"),
    ],
)
def test_bad_flags(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        parse(*arguments)
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("kind", "bad", "good"),
    [
        (_flags.positive, ["0", "nan", "x", "-1"], {"1e-3": 1e-3}),
        (_flags.not_negative, ["-0.1", "nan"], {"0": 0.0}),
        (_flags.whole, ["-1", "1.0"], {"0": 0}),
    ],
)
def test_numbers(kind, bad, good):
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="expected a"):
            kind(text)
    for text, number in good.items():
        assert kind(text) == number


def test_batch_must_split():
    _flags.check(parse("--micro-batches", "2"))
    with pytest.raises(Refusal, match="--batch 4 --micro-batches 3: expected a batch that splits"):
        _flags.check(parse("--micro-batches", "3"))


def test_refusals_are_told_in_one_line(capsys):
    made = argparse.ArgumentParser(prog="p.py")
    with pytest.raises(SystemExit, match="2"), _flags.telling(made), _flags.refusing(KeyError):
        raise KeyError("no 'a'; there is 'b'")
    assert capsys.readouterr().err == "p.py: no 'a'; there is 'b'\n"
    with pytest.raises(SystemExit, match="130"), _flags.telling(made):
        raise KeyboardInterrupt
    with pytest.raises(Refusal, match="No such file"), _flags.refusing(OSError):
        Path("/nowhere/at/all").read_text()
    with pytest.raises(ZeroDivisionError), _flags.telling(made), _flags.refusing(KeyError):
        _ = 1 / 0


def test_default_directory_is_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def choose(resume=False):
        return _run.choose(None, model="m", resume=resume).as_posix()

    with pytest.raises(Refusal, match=r"--out runs/m --resume: there is no run \(run\.json is mis"):
        choose(resume=True)
    for expected in ("runs/m", "runs/m-2", "runs/m-3"):
        assert choose() == expected
        _run.write_settings(tmp_path / expected, {})
        assert choose(resume=True) == expected


def test_directory_of_another_run_is_refused(tmp_path):
    _run.write_settings(tmp_path / "a", {})
    with pytest.raises(
        Refusal, match=r"it holds a run already; expected a free directory\. Add --resu"
    ):
        _run.choose(tmp_path / "a", model="m", resume=False)
    assert _run.choose(tmp_path / "a", model="m", resume=True) == tmp_path / "a"
    (tmp_path / "file").write_text("")
    with pytest.raises(Refusal, match="it is a file; expected a directory"):
        _run.choose(tmp_path / "file", model="m", resume=False)


def test_settings_must_stay(tmp_path):
    flags = argparse.Namespace(batch=8, micro_batches=2, steps=9)
    _run.check_settings(tmp_path, flags, {"batch": 8, "steps": 5}, ("batch", "micro_batches"))
    saved = {"batch": 4, "micro_batches": 1, "steps": 5}
    with pytest.raises(
        Refusal, match=r"--batch 8 \(it was 4\), --micro-batches 2 \(it was 1\)\. L"
    ):
        _run.check_settings(tmp_path, flags, saved, ("batch", "micro_batches"))


def test_broken_settings(tmp_path):
    _run.write_settings(tmp_path, {"a": 1})
    assert _run.read_settings(tmp_path) == {"a": 1}
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(Refusal, match=r"run\.json: cannot be read .* another --out"):
        _run.read_settings(tmp_path)


def test_rows_are_cut_at_a_step_and_at_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in range(4):
        _run.append(path, {"step": step, "loss": step / 3})
    with open(path, "a") as file:
        file.write('{"step": 4, "lo')
    assert [row["step"] for row in _run.rows(path)] == [0, 1, 2, 3]
    _run.truncate(path, step=2)
    assert path.read_text() == "".join(
        f'{{"step": {step}, "loss": {step / 3}}}\n' for step in range(3)
    )
    assert _run.rows(tmp_path / "none") == []
