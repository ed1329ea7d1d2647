"""The main job, on the real text of Python's ``json`` package."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import models
import mtfunc as mt
from mtfunc.io import manifest
from scripts import train

ROOT = Path(__file__).parents[2]
CORPUS = Path(json.__file__).parent
TINY = replace(models.llama.CONFIGS["llama-tiny"], depth=2, width=32, ffn=48, context=64)
SMALL = "--context 32 --batch 4 --micro-batches 2 --heldout-tokens 256 --evaluate-every 3"
SMALL += " --steps 6 --save-every 2 --sample-bytes 8"


@pytest.fixture(autouse=True, scope="module")
def tiny():
    """A smaller model, and one thread: two would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.llama.CONFIGS, "llama-tiny", TINY)
        patch.setitem(models.llama.CONFIGS, "llama-ascii", replace(TINY, vocab=100))
        yield
    torch.set_num_threads(threads)


def run(out, *arguments, corpus=CORPUS):
    flags = [*SMALL.split(), "--corpus", str(corpus), "--out", str(out), *map(str, arguments)]
    return train.main(flags)


def go_on(out, *arguments):
    return train.main(["--resume", "--out", str(out), "--sample-bytes", "8", *arguments])


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as left:
        train.main([str(argument) for argument in arguments])
    assert left.value.code == 2
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run of six steps, to look at and to compare with."""
    out = tmp_path_factory.mktemp("runs") / "unbroken"
    assert run(out, "--no-check") == 0
    return out


def results(out):
    """All that must not depend on where a run was broken."""
    head = manifest(out / "checkpoints")
    files = {name: file["sha256"] for name, file in head["files"].items()}
    return (
        (out / "metrics.jsonl").read_text(),
        (out / "sample.txt").read_bytes(),
        (head["step"], head["key"], files),
    )


def test_a_run_leaves_everything(unbroken):
    names = "checkpoints loss.png metrics.jsonl run.json sample.txt summary.json timeline.png"
    assert sorted(p.name for p in unbroken.iterdir()) == [*names.split(), "timings.jsonl"]
    for picture in ("loss.png", "timeline.png"):
        assert (unbroken / picture).read_bytes().startswith(b"\x89PNG")
    steps = [p.name for p in sorted((unbroken / "checkpoints").iterdir())]
    assert steps == ["step-000004", "step-000006"]
    rows = [json.loads(line) for line in (unbroken / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(7))
    assert [row["step"] for row in rows if "heldout" in row] == [0, 3, 6]
    assert rows[0]["heldout"] == pytest.approx(5.5, abs=0.4)
    sample = (unbroken / "sample.txt").read_bytes()
    assert sample.startswith(b"def ") and len(sample) == 12


def test_summary_is_on_the_same_bytes(unbroken):
    summary = json.loads((unbroken / "summary.json").read_text())
    assert summary["heldout_bytes"] == 256
    assert summary["tokens"] == 6 * 4 * 32
    assert summary["parameters"] == models.count_params(TINY)
    for name in ("heldout", "bigram"):
        assert summary[name]["bits"] == pytest.approx(summary[name]["nats"] / 0.6931471805599453)
    assert 2 < summary["bigram"]["nats"] < 4


def test_json_prints_one_object_and_all_else_on_stderr(tmp_path, capsys):
    assert run(tmp_path / "out", "--json") == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == json.loads((tmp_path / "out" / "summary.json").read_text())
    for line in (
        "llama-tiny: 23,712 parameters on cpu",
        "loss and gradients equal the standard autograd graph's, bitwise",
        "step 6 of 6  loss",
        "on 256 held-out bytes, per byte:",
        "byte bigrams",
    ):
        assert line in told.err


def test_training_lowers_the_loss(tmp_path):
    flags = "--steps 60 --context 64 --batch 8 --micro-batches 1 --learning-rate 1e-2 --no-check"
    assert run(tmp_path / "out", *flags.split(), "--evaluate-every", 60) == 0
    rows = [json.loads(x) for x in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["heldout"] < 3.4 < rows[0]["heldout"]


def steps_that(monkeypatch, act):
    """Train steps that call ``act(state)`` after each step."""
    make = mt.train_step

    def train_step(*arguments, **options):
        step = make(*arguments, **options)

        class Step:
            timeline = property(lambda self: step.timeline)

            def __call__(self, state, *arguments, **options):
                state, metrics = step(state, *arguments, **options)
                act(state)
                return state, metrics

        return Step()

    monkeypatch.setattr(mt, "train_step", train_step)


def test_ctrl_c_saves_and_the_resumed_run_is_bitwise_the_unbroken_one(
    tmp_path, monkeypatch, capsys, unbroken
):
    with monkeypatch.context() as patch:
        steps_that(patch, lambda state: state.step == 3 and os.kill(os.getpid(), signal.SIGINT))
        assert run(tmp_path / "out", "--no-check") == 130
    assert manifest(tmp_path / "out" / "checkpoints")["step"] == 3
    said = capsys.readouterr().out
    script = os.path.relpath(train.__file__)
    command = f"{sys.orig_argv[0]} {script} --resume --out {tmp_path / 'out'}"
    assert f"stopped after step 3; go on with\n  {command}\n" in said
    assert go_on(tmp_path / "out") == 0
    assert f"resuming {tmp_path / 'out'} at step 3 of 6" in capsys.readouterr().out
    assert results(tmp_path / "out") == results(unbroken)


def test_second_ctrl_c_stops_at_once_and_the_run_goes_on_from_the_last_checkpoint(
    tmp_path, monkeypatch, capsys, unbroken
):
    def twice(state):
        if state.step == 5:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        steps_that(patch, twice)
        assert run(tmp_path / "out", "--no-check") == 130
    assert re.search(r"stopped at once\. .*step-000004 is kept; go on", capsys.readouterr().out)
    assert go_on(tmp_path / "out") == 0
    assert results(tmp_path / "out") == results(unbroken)


def test_a_crash_after_the_row_and_before_the_checkpoint(tmp_path, monkeypatch, unbroken):
    def crash(state, *arguments, **meta):
        if state.step == 4:
            raise RuntimeError("power cut")
        return save(state, *arguments, **meta)

    save = mt.save
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(mt, "save", crash)
        run(tmp_path / "out", "--no-check")
    assert '"step": 4' in (tmp_path / "out" / "metrics.jsonl").read_text()
    assert go_on(tmp_path / "out") == 0
    assert results(tmp_path / "out") == results(unbroken)


def test_a_run_without_a_checkpoint_starts_from_the_beginning(
    tmp_path, monkeypatch, capsys, unbroken
):
    def stop(state):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        steps_that(patch, stop)
        assert run(tmp_path / "out", "--no-check") == 130
    assert "There is no checkpoint yet; start from the beginning" in capsys.readouterr().out
    assert go_on(tmp_path / "out") == 0
    assert results(tmp_path / "out") == results(unbroken)


def test_a_resumed_run_keeps_what_it_was_asked_for(tmp_path, monkeypatch, capsys):
    asked = ["--no-check", "--prompt", "zebra", "--temperature", "0.5", "--sample-bytes", "3"]
    with monkeypatch.context() as patch:
        steps_that(patch, lambda state: state.step == 3 and os.kill(os.getpid(), signal.SIGINT))
        assert run(tmp_path / "out", *asked, "--json") == 130
    assert f"--resume --out {tmp_path / 'out'} --json\n" in capsys.readouterr().err
    monkeypatch.setattr(train, "gradients_agree", None)
    assert train.main(["--resume", "--out", str(tmp_path / "out")]) == 0
    sample = (tmp_path / "out" / "sample.txt").read_bytes()
    assert sample.startswith(b"zebra") and len(sample) == 8


def test_the_simulated_device_gives_the_same_run(tmp_path, unbroken):
    assert run(tmp_path / "out", "--device", "sim:5", "--no-check") == 0
    assert results(tmp_path / "out") == results(unbroken)


def test_a_finished_run_can_be_prolonged(tmp_path, capsys, unbroken):
    shutil.copytree(unbroken, tmp_path / "out")
    assert go_on(tmp_path / "out") == 0
    assert "it is finished, and --steps N takes it further" in capsys.readouterr().out
    assert go_on(tmp_path / "out", "--steps", "7") == 0
    assert manifest(tmp_path / "out" / "checkpoints")["step"] == 7
    assert "--steps 5: the run in" in refused(
        capsys, "--resume", "--out", tmp_path / "out", "--steps", "5"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT")
def test_ctrl_c_in_a_process_of_its_own(tmp_path):
    flags = [*SMALL.split(), "--steps", "5000", "--save-every", "5000", "--no-check"]
    flags += ["--corpus", str(CORPUS), "--out", str(tmp_path / "out")]
    with subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "train.py"), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        said = process.stdout.readline()
        while '"step": 2' not in _text(tmp_path / "out" / "metrics.jsonl"):
            assert process.poll() is None, said + process.stdout.read()
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said += process.stdout.read()
    assert process.returncode == 130
    assert "finishing this step, then saving; once more stops at once" in said
    step = int(re.search(r"stopped after step (\d+); go on with", said)[1])
    assert manifest(tmp_path / "out" / "checkpoints")["step"] == step


def _text(path):
    return path.read_text() if path.exists() else ""


def test_wrong_gradients_are_named_and_nothing_is_trained(tmp_path, monkeypatch, capsys):
    make = mt.value_and_grad

    def wrong(*arguments, **options):
        f = make(*arguments, **options)

        def g(*arguments):
            loss, grads = f(*arguments)
            grads["layers"][1]["mlp"]["up"][0, 0] += 1e-3
            return loss, grads

        return g

    monkeypatch.setattr(mt, "value_and_grad", wrong)
    assert run(tmp_path / "out") == 1
    assert re.search(
        r"check: the gradient of 'layers/1/mlp/up' differs, by 0\.001 at most between the streamed",
        capsys.readouterr().out,
    )
    assert not (tmp_path / "out" / "checkpoints").exists()
    assert not (tmp_path / "out" / "metrics.jsonl").read_text()


def test_not_a_number_names_the_stage_and_keeps_the_last_good_checkpoint(
    tmp_path, monkeypatch, capsys
):
    def poison(state):
        if state.step == 4:
            monkeypatch.setattr(mt, "save", poison_after(mt.save))

    def poison_after(save):
        def saved(state, *arguments, **meta):
            save(state, *arguments, **meta)
            state.params["layers"][1]["mlp"]["down"][0, 0] = float("nan")

        return saved

    steps_that(monkeypatch, poison)
    assert run(tmp_path / "out", "--no-check", "--evaluate-every", 100) == 1
    said = capsys.readouterr().out
    assert "step 4: the loss is nan; no parameter was changed" in said
    assert "The first stage with a value that is not finite is 'layers/1' of micro-batch" in said
    assert re.search(r"step-000004 is kept; go on from it with\n  .*train\.py --resume", said)
    assert "start another run with a lower --learning-rate" in said
    assert manifest(tmp_path / "out" / "checkpoints")["step"] == 4


def test_parameters_that_are_not_finite_are_not_saved(tmp_path, monkeypatch, capsys):
    def poison(state):
        if state.step == 4:
            state.params["layers"][1]["mlp"]["down"][0, 0] = float("inf")

    steps_that(monkeypatch, poison)
    assert run(tmp_path / "out", "--no-check") == 1
    said = capsys.readouterr().out
    assert (
        "step 4 is not saved: its parameters are not finite, first at 'layers/1/mlp/down'" in said
    )
    assert re.search(r"step-000002 is kept; go on from it with\n", said)


def test_a_held_out_loss_that_is_not_finite_stops(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mt.Mean, "pool", lambda means: torch.tensor(float("nan")))
    assert run(tmp_path / "out", "--no-check") == 1
    assert "step 0: the held-out loss is nan, not finite\n" in capsys.readouterr().out


def test_a_learning_rate_out_of_all_bounds_stops(tmp_path, capsys):
    assert run(tmp_path / "out", "--learning-rate", "1e38", "--no-check") == 1
    assert "The first stage with a value that is not finite is" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "lama-tiny"], r"unknown model 'lama-tiny'; expected .* Did you mean 'llama-t"),
        (["--device", "abacus"], r"argument --device: .*'abacus'; expected 'cpu'"),
        (["--context", "65"], "--context 65: llama-tiny was made for 64 tokens at most. Take a sm"),
        (["--batch", "3"], "--batch 3 --micro-batches 2: expected a batch that splits"),
        (["--corpus", "nowhere"], "corpus nowhere: cannot be read"),
        (["--model", "llama-ascii"], r"corpus .*: it holds the byte \d+, a label out of range; ll"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(tmp_path, capsys, arguments, message):
    told = refused(
        capsys, *SMALL.split(), "--corpus", CORPUS, "--out", tmp_path / "out", *arguments
    )
    assert re.search(message, told) and "Traceback" not in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [(b"", "0 bytes; expected some text"), (b"short", "expected at least 33, a context of 32")],
)
def test_bad_corpus_is_refused(tmp_path, capsys, text, message):
    (tmp_path / "a.txt").write_bytes(text)
    told = refused(capsys, *SMALL.split(), "--corpus", tmp_path / "a.txt", "--out", tmp_path / "o")
    assert message in told


def test_the_directory_of_another_run_is_refused(capsys, unbroken):
    told = refused(capsys, "--out", unbroken)
    assert "it holds a run already; expected a free directory. Add --resume" in told


def test_other_settings_are_refused_on_resume(tmp_path, capsys, unbroken):
    told = refused(capsys, "--resume", "--out", unbroken, "--model", "gpt2-tiny", "--seed", "1")
    assert "--model gpt2-tiny (it was llama-tiny), --seed 1 (it was 0). Leave these" in told
    told = refused(capsys, "--resume", "--out", unbroken, "--corpus", CORPUS.parent / "email")
    assert "its bytes are not those that the run in" in told


@pytest.mark.parametrize("change", ["another model's", "damaged"])
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, monkeypatch, capsys, unbroken, change):
    out = shutil.copytree(unbroken, tmp_path / "out")
    before = (out / "metrics.jsonl").read_text()
    if change == "damaged":
        os.truncate(out / "checkpoints" / "step-000006" / "0000-embed.safetensors", 100)
        expected = r"checkpoint .*0000-embed\.safetensors is damaged: 100 bytes; expected"
    else:
        monkeypatch.setitem(models.llama.CONFIGS, "llama-tiny", replace(TINY, ffn=64))
        expected = r"is of another model or run: config/ffn is 48, expected 64"
    assert re.search(expected, refused(capsys, "--resume", "--out", out))
    assert (out / "metrics.jsonl").read_text() == before


def test_help_teaches(capsys):
    with pytest.raises(SystemExit, match="0"):
        train.main(["--help"])
    told = capsys.readouterr().out
    assert "examples:" in told and "--resume --out runs/notes" in told
