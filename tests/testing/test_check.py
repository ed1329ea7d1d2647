"""mt.testing.check: what it refuses, in which words, and that it can fail at all."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import mtfunc as mt
import mtfunc.run
from mtfunc.testing import CheckError, Report, check
from tests.toys import LM, clone, lm_batch, lm_params, same

ROOT = Path(__file__).parent.parent.parent
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
BATCH = {"x": X}
PARAMS = {"a": {"w": torch.randn(4, 4, generator=torch.Generator().manual_seed(1))}}


def linear(p, x, batch):
    return torch.tanh((batch["x"] if x is None else x) @ p["w"])


def square(x, batch):
    return (x**2).sum()


def program_of(fn, *keys, **options):
    start = mt.stage(linear, "a")
    return mt.chain(start, mt.stage(fn, *keys, name="culprit", **options), mt.stage(square))


def refused(program, params=PARAMS, batch=BATCH, **options):
    """The message of a check that fails, which changes nothing of the caller's."""
    before = clone([params, batch])
    states = torch.get_rng_state(), random.getstate()
    with pytest.raises(CheckError) as caught:
        check(program, params, batch, **{"seeds": 1, **options})
    assert same([params, batch], before)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    return caught.value


def passed(program, params=PARAMS, batch=BATCH, **options):
    before = clone([params, batch])
    report = check(program, params, batch, **{"seeds": 2, **options})
    assert same([params, batch], before)
    return report


def test_a_sound_program_and_its_report():
    report = passed(LM, lm_params(), [lm_batch(), lm_batch(3, seed=2, ignored=4)], seeds=3)
    assert isinstance(report, Report) and not report.warnings
    assert report.seeds == (0, 1, 2) and report.devices == ("cpu", "sim:0", "sim:1", "sim:2")
    assert len(report.configurations) == 14 and report.gradients == 17 and report.steps == 5
    assert [s.name for s in report.stages] == ["embed", *(f"layers/{i}" for i in range(3)), "head"]
    assert len(report.leaves) == 10 and report.micro_batches == 2
    lines = str(report).splitlines()
    assert re.match(r"layers/1\s+layers/1\s+3\s+float32\[2,5,8\]\s+func", lines[3])
    assert "10 gradients in 17 streamed passes" in lines[-1]


def test_progress_counts_up():
    seen = []
    check(LM, lm_params(), lm_batch(), seeds=1, progress=lambda *told: seen.append(told))
    assert [done for done, _, _ in seen] == list(range(18)) and {t for _, t, _ in seen} == {17}


def test_a_key_is_made_where_a_stage_draws():
    def noisy(p, x, batch, *, key):
        return mt.random.dropout(key, 0.5, linear(p, x, batch))

    program = mt.chain(mt.stage(noisy, "a", rng=True), mt.stage(square))
    assert passed(program).gradients == 16
    assert passed(program, key=mt.random.key(3)).steps == 4


# In-place changes -------------------------------------------------------------------------------


def mul_param(p, x, batch):
    p["w"].mul_(2)
    return linear(p, x, batch)


def mul_param_data(p, x, batch):
    p["w"].data.mul_(2)
    return linear(p, x, batch)


def mul_carry(p, x, batch):
    return linear(p, x.mul_(2), batch)


def add_batch(p, x, batch):
    batch["x"].data += 1
    return linear(p, x, batch)


def assign_batch(p, x, batch):
    batch["mask"] = x > 0
    return linear(p, x, batch)


@pytest.mark.parametrize(
    "fn, message",
    [
        (mul_param, r"'culprit' changes its parameters in place, at 'a/w'.*clone\(\) first"),
        (mul_param_data, r"'culprit' changes its parameters in place, at 'a/w'.*clone\(\) first"),
        (mul_carry, r"'culprit' changes its carry in place, at 'the top'.*clone\(\) first"),
        (add_batch, r"'culprit' changes its batch in place, at 'x'.*clone\(\) first"),
        (assign_batch, r"'culprit' assigns to its batch at 'mask'.*\{\*\*batch, \.\.\.\}"),
    ],
)
def test_in_place_changes(fn, message):
    error = refused(program_of(fn, "a"))
    assert re.search(message, str(error)) and (error.kind, error.stage) == ("in-place", "culprit")


def test_in_place_changes_of_a_closed_over_tensor():
    seen = torch.zeros(4)

    def counts(x, batch):
        seen.add_(x.detach().sum(0))
        return x * 2

    error = refused(program_of(counts))
    assert re.search(r"changes 'seen' in place, a tensor that it closes over.*has_aux", str(error))


# Generators, repetition, closures -----------------------------------------------------------------


@pytest.mark.parametrize(
    "draw, whose",
    [
        (lambda: torch.rand(()), "torch's"),
        (random.random, "Python's"),
        (lambda: float(np.random.rand()), "numpy's"),
    ],
)
def test_draws_from_global_generators(draw, whose):
    error = refused(program_of(lambda x, batch: x * draw()))
    assert f"'culprit' draws from {whose} global generator" in str(error)
    assert "rng=True" in str(error) and error.kind == "generator"


def test_results_that_differ_between_two_runs():
    calls = []

    def counter(x, batch):
        calls.append(1)
        return {"h": x * len(calls)}

    program = mt.chain(
        mt.stage(linear, "a"),
        mt.stage(counter, name="culprit"),
        mt.stage(lambda c, batch: c["h"].sum(), name="end"),
    )
    error = refused(program)
    assert re.search(r"'culprit' gives other results when it runs again.*'carry/h'", str(error))
    assert "Look for a counter" in str(error) and error.kind == "repeat"


def test_results_that_depend_on_recording_gradients():
    error = refused(program_of(lambda x, batch: x * (2.0 if x.requires_grad else 1.0)))
    assert "'culprit' gives other results when gradients are recorded" in str(error)


def test_a_backward_that_does_not_repeat_itself():
    calls = []

    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            calls.append(1)
            return grad * len(calls)

    program = program_of(lambda x, batch: Odd.apply(x), vjp="autograd")
    error = refused(program, surrogate=("Odd",))
    assert "the standard graph gives another gradient at 'a/w'" in str(error)


def test_closing_over_a_tensor_that_requires_grad():
    secret = torch.ones(4, requires_grad=True)
    error = refused(program_of(lambda x, batch: x * secret))
    assert re.search(r"'culprit' closes over .* requires grad: 'secret'.*parameters", str(error))
    layer = torch.nn.Linear(4, 4)
    error = refused(program_of(lambda x, batch: layer(x)))
    assert "'layer.weight', 'layer.bias'" in str(error) and error.kind == "closure"


# Warnings ---------------------------------------------------------------------------------------


def warned(report, pattern):
    return any(re.search(pattern, warning) for warning in report.warnings)


def test_carry_leaves_in_the_memory_of_parameters_and_batch():
    def start(p, carry, batch):
        return batch["x"][:, :2], p["w"]

    def end(c, batch):
        return (c[0] @ c[1][:2]).sum()

    report = passed(mt.chain(mt.stage(start, "a"), mt.stage(end)))
    assert warned(report, r"'start' returns '0' in its carry, in the memory of the batch's 'x'")
    report = passed(mt.chain(mt.stage(lambda p, c, b: p["w"][1], "a", name="s"), mt.stage(square)))
    assert warned(report, r"'s' returns 'the top' in its carry, in the memory of parameter 'a/w'")
    assert "warning: stage 's' returns" in str(report)


def test_unused_and_zero_gradients():
    params = {"a": {**PARAMS["a"], "unused": torch.ones(2), "off": torch.ones(4)}}

    def half(p, x, batch):
        return linear(p, x, batch) + p["off"] * 0

    report = passed(mt.chain(mt.stage(half, "a"), mt.stage(square)), params)
    assert warned(report, r"no output .* uses 'a/unused': the gradient is zero.*leave it out")
    assert warned(report, r"the gradient of 'a/off' is zero everywhere")
    assert len(report.warnings) == 2


def test_dtypes_of_the_carry():
    program = program_of(lambda x, batch: x.bfloat16())
    warning = r"'culprit' takes float32\[3,4\] and returns bfloat16\[3,4\] at 'the top'.*cast back"
    assert warned(passed(program), warning)
    drift = mt.scan(lambda p, x, batch: linear(p, x, batch).double(), "l", name="l")
    program = mt.chain(mt.stage(linear, "a"), drift, mt.stage(square))
    error = refused(program, {**PARAMS, "l": [PARAMS["a"]] * 2})
    assert "'l/0' changes the carry at 'the top': took float32[3,4], returned float64" in str(error)
    assert (error.kind, error.stage) == ("trace", "l/0")


def test_a_loss_that_is_not_finite_is_compared_place_by_place():
    report = passed(program_of(lambda x, batch: x.abs().log().neg().sqrt().where(x > 9, x / 0)))
    assert report.steps == 0 and warned(report, "no optimizer step was compared")
    assert warned(report, "'a/w' is not finite")


# Hand-written backwards ------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x**3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3 * ctx.scale * ctx.saved_tensors[0] ** 2, None


class WrongCube(Cube):
    @staticmethod
    def backward(ctx, grad):
        return grad * 3 * ctx.saved_tensors[0] ** 2, None


class Gate(torch.autograd.Function):
    """A relu by hand: its kink at zero is no fault."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.saved_tensors[0] > 0)


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x.float() * 2).to(torch.float32)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_functions_whose_backward_is_right():
    program = program_of(lambda x, batch: Cube.apply(x, 2.0), vjp="autograd")
    report = passed(program)
    assert report.stages[1].backward == "Cube agrees" and not report.warnings
    zeros = {"a": {"w": torch.zeros(4, 4)}}
    report = passed(program_of(lambda x, batch: Gate.apply(x) + x, vjp="autograd"), zeros)
    assert report.stages[1].backward == "Gate agrees"


def test_functions_with_setup_context_called_by_an_apply_that_was_kept():
    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(x, scale):
            return torch.sin(x) * scale

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0])
            ctx.scale = inputs[1]

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.scale * torch.cos(ctx.saved_tensors[0]), None

    class Wrong(Sine):
        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.scale, None

    forward, apply, wrong = Sine.forward, Sine.apply, Wrong.apply
    report = passed(program_of(lambda x, batch: apply(x, 2.0)))
    assert report.stages[1].backward == "Sine agrees" and Sine.forward is forward
    assert "'Wrong', a torch.autograd" in str(refused(program_of(lambda x, b: wrong(x, 2.0))))
    assert "forward" not in Wrong.__dict__


def test_functions_whose_backward_is_wrong():
    program = program_of(lambda x, batch: WrongCube.apply(x, 2.0), vjp="autograd")
    error = refused(program)
    assert re.search(
        r"stage 'culprit': the backward of 'WrongCube'.*disagrees with a finite difference in "
        r"argument 0, float32\[3,4\].*surrogate=\('culprit',\)",
        str(error),
    )
    got, expected = map(float, re.findall(r"gives (\S+); expected (\S+),", str(error))[0])
    assert expected == pytest.approx(2 * got, rel=1e-4) and error.kind == "backward"
    for name in ("culprit", "WrongCube"):
        report = passed(program, surrogate=(name,))
        assert report.stages[1].backward == "WrongCube is a surrogate"


def test_functions_that_cannot_be_checked_are_named():
    report = passed(program_of(lambda x, batch: Half.apply(x), vjp="autograd"))
    assert report.stages[1].backward.startswith("Half not checked: ")
    assert warned(report, r"stage 'culprit': the hand-written backward of Half not checked")


def scaled(p, x, batch):
    return torch.sin(x * p["scale"])


def rule(p, x, batch, cotangent):
    inner = cotangent * torch.cos(x * p["scale"])
    return {"scale": (inner * x).sum(0)}, inner * p["scale"]


def lost(p, x, batch, cotangent):
    return None, rule(p, x, batch, cotangent)[1]


def off(p, x, batch, cotangent):
    return rule(p, x, batch, cotangent)[0], 1.01 * rule(p, x, batch, cotangent)[1]


def test_pullback_rules():
    params = {**PARAMS, "s": {"scale": torch.tensor([0.5, 1.0, -2.0, 3.0])}}
    report = passed(program_of(scaled, "s", vjp=rule), params)
    assert report.stages[1].pullback == "rule" and report.stages[1].backward == "rule agrees"
    for wrong, where in ((lost, "parameter 's/scale'"), (off, "carry leaf 'the top'")):
        error = refused(program_of(scaled, "s", vjp=wrong), params)
        assert f"its pullback rule disagrees with a finite difference in {where}" in str(error)


def test_a_rule_that_equals_autograd_is_right_though_it_is_no_derivative():
    def stopped(x, batch):
        return x + (x**2).detach()

    program = program_of(stopped, vjp=lambda x, batch, cotangent: (cotangent,))
    assert passed(program).stages[1].backward == "rule agrees"


def test_a_kernel_that_functorch_cannot_trace():
    error = refused(program_of(lambda x, batch: Cube.apply(x, 2.0)))
    assert "stage 'culprit' cannot be differentiated by torch.func.vjp" in str(error)
    assert "mend          give the stage vjp='autograd'" in str(error)
    assert (error.kind, error.stage, error.device) == ("stream", "culprit", "cpu")


# That it can fail ------------------------------------------------------------------------------


def break_pullback(monkeypatch, change, label):
    """Results of the pullbacks of one stage go through ``change``, in the engine."""
    true = mtfunc.run._KINDS["pullback"]

    def broken(op, step, backend):
        true(op, step, backend)
        if op.label == label:
            for number, buffer in enumerate(op.writes["results"]):
                leaf = backend.read(buffer)
                backend.write(buffer, change(number, leaf.clone(), buffer.name))

    monkeypatch.setitem(mtfunc.run._KINDS, "pullback", broken)


def up(name):
    return "layers/1/up" in name


@pytest.mark.parametrize(
    "change, cause",
    [
        (lambda n, x, name: x * 0 if up(name) else x, "lost on its way: every element is zero"),
        (lambda n, x, name: x * 2 if up(name) else x, "added twice"),
        (lambda n, x, name: x * (1 + 2e-7) if up(name) else x, "rounding: only last bits differ"),
        (lambda n, x, name: x / 0 * 0 if up(name) else x, "a term that the standard graph leaves"),
        (lambda n, x, name: x + 1 if up(name) else x, "the forward that the pullback runs again"),
    ],
)
def test_a_gradient_that_is_wrong_names_stage_leaf_and_cause(monkeypatch, change, cause):
    break_pullback(monkeypatch, change, "layers/1")
    error = refused(LM, lm_params(), lm_batch(), devices=("cpu",))
    assert (error.stage, error.leaf, error.kind) == ("layers/1", "layers/1/up", "differs")
    assert "begins at stage 'layers/1', leaf 'layers/1/up'" in str(error)
    assert "1 of 10 leaves differ" in str(error) and cause in str(error)
    assert "grads['layers'][1]['up']" in str(error)


def test_a_wrong_cotangent_is_traced_to_where_it_begins(monkeypatch):
    def change(number, leaf, name):
        return leaf * 1.5 if leaf.shape == (2, 5, 8) else leaf

    break_pullback(monkeypatch, change, "layers/2")
    error = refused(LM, lm_params(), lm_batch(), devices=("cpu",))
    # The cotangent leaves layers/2 wrong, so the leaves of layers/1 are the first that differ;
    # the embedding, which the head reads too, is behind it and must not be blamed.
    assert error.stage == "layers/1", str(error)


def test_the_reproduction_shows_the_failure(monkeypatch, capsys):
    break_pullback(monkeypatch, lambda n, x, name: x * 0 if up(name) else x, "layers/1")
    error = refused(LM, lm_params(), lm_batch(), devices=("sim:3",))
    assert error.device == "sim:3" and "an operation ran before one that it needs" in str(error)
    code = str(error).partition("and key:\n")[2].replace("\n    ", "\n")
    exec(code, {"program": LM, "params": lm_params(), "batch": lm_batch(), "key": None})
    got, expected = capsys.readouterr().out.split("tensor(")[1:]
    assert "0.," in got.replace("-", "") and got != expected


def test_an_optimizer_step_that_is_wrong(monkeypatch):
    true = mtfunc.run._KINDS["update"]

    def twice(op, step, backend):
        true(op, step, backend)
        true(op, step, backend)

    monkeypatch.setitem(mtfunc.run._KINDS, "update", twice)
    error = refused(LM, lm_params(), lm_batch(), devices=("cpu",))
    assert "parameters after one step of mt.adamw of the streamed pass" in str(error)
    assert "gradients agree, so the update does not" in str(error)


def test_a_forward_that_is_wrong(monkeypatch):
    true = mtfunc.run._write

    def write(buffers, tensors, backend):
        moved = [x + 1e-3 if "carry/layers/1." in b.name else x for b, x in zip(buffers, tensors)]
        true(buffers, moved, backend)

    monkeypatch.setattr(mtfunc.run, "_write", write)
    error = refused(LM, lm_params(), lm_batch(), devices=("cpu",))
    assert "check: the loss of the streamed forward pass and of the standard graph differ" in str(
        error
    )


# Bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, kind, message",
    [
        ({"program": linear}, TypeError, "program is a function; expected what mt.chain returns"),
        ({"devices": "cpu"}, TypeError, r"devices is 'cpu'; expected a tuple"),
        ({"devices": ("tpu",)}, ValueError, r"device 'tpu'; expected 'cpu', 'sim'"),
        ({"seeds": 0}, ValueError, "seeds is 0; expected a whole number >= 1"),
        ({"batch": []}, ValueError, "batch is an empty list"),
        ({"params": {"a": {"w": 1.0}}}, TypeError, "'a/w' is a float; expected a tensor"),
        ({"params": {"b": PARAMS["a"]}}, KeyError, "no 'a' at the top"),
    ],
)
def test_bad_input(arguments, kind, message):
    given = {"program": program_of(square), "params": PARAMS, "batch": BATCH, **arguments}
    with pytest.raises(kind, match=message):
        check(given.pop("program"), given.pop("params"), given.pop("batch"), **given)


def test_a_stages_own_error_names_the_stage():
    with pytest.raises(RuntimeError) as caught:
        check(program_of(lambda x, batch: x @ torch.ones(3, 3)), PARAMS, BATCH)
    assert any("in stage 'culprit'" in note for note in caught.value.__notes__)


# The documentation -----------------------------------------------------------------------------


def doc_blocks():
    text = (ROOT / "docs/gradients.md").read_text()
    return re.findall(r"```(python|text)\n(.*?)```", text, re.S)


def numbers_apart(text):
    """The text without measured times and torch's own words, and its numbers."""
    text = re.sub(r"got           RuntimeError: .*", "got           RuntimeError", text)
    text = re.sub(r"[\d.]+ s\)", "SECONDS)", text).strip()
    return re.sub(r"-?\d+\.\d+", "#", text), [float(x) for x in re.findall(r"-?\d+\.\d+", text)]


def test_the_documentation_runs_and_prints_what_it_says(capsys):
    names = {"__name__": "gradients"}
    compared = 0
    for kind, block in doc_blocks():
        if kind == "python":
            exec(compile(block, "docs/gradients.md", "exec"), names)
            printed = capsys.readouterr().out
            continue
        (got, got_numbers), (told, numbers) = numbers_apart(printed), numbers_apart(block)
        assert got == told and got_numbers == pytest.approx(numbers, rel=1e-3)
        compared += 1
    assert compared == 3
    for mark in names["test_gradients"].pytestmark:
        assert mark.name == "parametrize"
    names["test_gradients"](torch.bfloat16, 3)
    names["test_gradients"](torch.float32, 1)


def test_the_documentation_lists_every_kind():
    told = set(re.findall(r"\| `([a-z-]+)` \|", (ROOT / "docs/gradients.md").read_text()))
    source = "".join(p.read_text() for p in (ROOT / "mtfunc/testing").glob("*.py"))
    (line,) = re.findall(r"kind: what is wrong: (.*?)\.\n", source, re.S)
    assert told == set(re.findall(r"``\"([a-z-]+)\"``", line))
