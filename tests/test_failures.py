"""Failures: they surface with their own traceback, name the operation, and tell the state."""

from __future__ import annotations

import time

import pytest
import torch

import mtfunc as mt
from mtfunc import run as loop
from mtfunc.schedule.operation import COPIES
from tests.toys import LM, block, clone, embed, head, lm_batch, lm_params, momentum, same

BATCHES = [lm_batch(2, seed=1), lm_batch(1, seed=2)]
CONFIG = mt.StreamConfig(carries="host")


class Injected(Exception):
    """What a failing operation raises."""


def kinds(device):
    schedule = mt.schedule(LM, lm_params(), BATCHES, CONFIG, device=device)
    return list(dict.fromkeys((op.kind, op.stream) for op in schedule.operations))


@pytest.mark.parametrize("device", ["cpu", "sim:3"])
def test_an_exception_in_any_operation_of_any_stream(device, monkeypatch):
    expected = mt.init(LM, lm_params(), momentum())
    step = mt.train_step(LM, momentum(), device=device, config=CONFIG)
    for _ in range(2):
        expected, _ = step(expected, BATCHES)
    seen = kinds(device)
    assert {stream for _, stream in seen} >= (
        {"compute", "host"} if device == "cpu" else {"h2d", "compute", "d2h", "host"}
    )
    for kind, stream in seen:
        perform = loop._perform
        for nth in (1, 2):
            left = [nth]

            def failing(op, *rest, kind=kind, stream=stream, perform=perform, left=left):
                if (op.kind, op.stream) == (kind, stream):
                    left[0] -= 1
                    if left[0] == 0:
                        raise Injected(f"{kind} on {stream}")
                perform(op, *rest)

            state = mt.init(LM, lm_params(), momentum())
            before = clone(state.params)
            step = mt.train_step(LM, momentum(), device=device, config=CONFIG)
            monkeypatch.setattr(loop, "_perform", failing)
            started = time.monotonic()
            try:
                step(state, BATCHES)
            except Injected as error:
                note = " ".join(error.__notes__)
            else:
                assert nth == 2, f"{kind} on {stream} never ran"
                continue
            finally:
                monkeypatch.setattr(loop, "_perform", perform)
            assert time.monotonic() - started < 5
            assert kind in note and stream in note
            if "parameters are unchanged" in note:
                assert same(state.params, before)
                state, _ = step(state, BATCHES)
                state, _ = step(state, BATCHES)
                assert same(state.params, expected.params), (kind, stream)
            else:
                assert "spent" in note
                with pytest.raises(RuntimeError, match=r"spent: step 0 failed half-way"):
                    _ = state.params


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("where", ["embed", "layers/1", "head"])
def test_a_loss_that_is_not_finite_names_the_first_stage_and_changes_nothing(device, where):
    def spoil(fn, name, at):
        def spoilt(*args, number=0):
            out = fn(*args)
            factor = torch.where(args[-1]["spoil"] & (number == at), torch.inf, 1.0)
            return mt.Mean(out.terms[0].total * factor, 1) if name == "head" else out * factor

        return spoilt

    at = {"embed": (0, None, None), "layers/1": (None, 1, None), "head": (None, None, 0)}[where]
    program = mt.chain(
        mt.stage(spoil(embed, "embed", at[0]), "embed", name="embed"),
        mt.scan(spoil(block, "layers", at[1]), "layers", static=[{"number": i} for i in range(3)]),
        mt.stage(spoil(head, "head", at[2]), "embed", name="head"),
    )
    optimizer = mt.adamw(1e-2)
    state, step = (
        mt.init(program, lm_params(), optimizer),
        mt.train_step(program, optimizer, device=device),
    )
    good, bad = ({**lm_batch(), "spoil": torch.tensor(flag)} for flag in (False, True))
    state, _ = step(state, good)
    before = clone([state.params, state.opt_state])
    with pytest.raises(mt.NonFiniteError, match=rf"step 1: the loss is .*first stage .*'{where}'"):
        step(state, bad)
    with pytest.raises(mt.NonFiniteError, match=r"'" + where + r"' of micro-batch 1"):
        step(state, [good, bad])
    assert same([state.params, state.opt_state], before)
    state, metrics = step(state, good)
    assert bool(torch.isfinite(metrics["loss"])) and state.step == 2


def test_parameters_that_are_not_finite_are_named():
    params = lm_params()
    params["layers"][1]["up"][0, 0] = torch.nan
    state = mt.init(LM, params, mt.sgd(0.1))
    with pytest.raises(
        mt.NonFiniteError,
        match=r"'layers/1'; parameters are not finite at "
        r"'layers/1/up'",
    ):
        mt.train_step(LM, mt.sgd(0.1))(state, lm_batch())


def test_a_state_that_was_handed_over_says_so():
    state = mt.init(LM, lm_params(), mt.sgd(0.1))
    step = mt.train_step(LM, mt.sgd(0.1))
    after, _ = step(state, lm_batch())
    for read in (lambda: state.params, lambda: state.opt_state, lambda: step(state, lm_batch())):
        with pytest.raises(RuntimeError, match=r"spent: step 0 took it over; use the state that"):
            read()
    assert after.step == 1 and "spent" in repr(state)


def test_labels_out_of_range():
    batch = lm_batch()
    batch["labels"][0, 0] = 99
    with pytest.raises((IndexError, RuntimeError)) as caught:
        mt.value_and_grad(LM)(lm_params(), batch)
    assert any("forward head" in note for note in caught.value.__notes__)


def test_every_copy_kind_is_covered():
    assert {kind for kind, _ in kinds("sim")} >= set(COPIES)
