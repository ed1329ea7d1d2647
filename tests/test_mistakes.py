"""What people new to the library get wrong, and what they are told."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import mtfunc as mt
from tests.toys import LM, assert_same, clone, lm_batch, lm_params, momentum


def notes(error):
    return " ".join(getattr(error.value, "__notes__", []))


def double(p, x, batch):
    return batch["x"] * p["w"]


def total(x, batch):
    return x.sum()


PARAMS = {"a": {"w": torch.ones(3)}}
BATCH = {"x": torch.arange(3.0)}
PROGRAM = mt.chain(mt.stage(double, "a"), mt.stage(total))


def test_two_states_from_one_dict_share_nothing():
    params = lm_params()
    first = mt.init(LM, params, momentum())
    second = mt.init(LM, params, momentum())
    before = clone(second.params)
    first, _ = mt.train_step(LM, momentum())(first, lm_batch())
    assert_same(second.params, before)
    alone = mt.init(LM, lm_params(), momentum())
    alone, _ = mt.train_step(LM, momentum())(alone, lm_batch())
    assert_same(first.params, alone.params)


def test_numpy_parameters():
    params = {"a": {"w": np.ones(3)}}
    message = r"params: 'a/w' is a ndarray; expected a tensor or None. torch.as_tensor makes"
    with pytest.raises(TypeError, match=message):
        mt.init(PROGRAM, params, mt.sgd(0.1))
    with pytest.raises(TypeError, match=message):
        mt.value_and_grad(PROGRAM)(params, BATCH)
    assert isinstance(params["a"]["w"], np.ndarray)


def test_a_step_on_bare_parameters():
    with pytest.raises(TypeError, match=r"state is a dict; expected a TrainState, which mt.init"):
        mt.train_step(PROGRAM, mt.sgd(0.1))(PARAMS, BATCH)


def test_dropout_with_its_arguments_the_wrong_way_round():
    key, x = mt.random.key(0), torch.ones(3)
    with pytest.raises(TypeError, match=r"expected dropout\(key, rate, x\)"):
        mt.random.dropout(key, x, 0.1)


def test_another_optimizer_than_the_state_was_made_with():
    state = mt.init(PROGRAM, clone(PARAMS), mt.adamw(0.1))
    with pytest.raises(ValueError, match=r"holds '.*', which sgd.* does not use; .* mt.init\("):
        mt.train_step(PROGRAM, mt.sgd(0.1))(state, BATCH)
    again = mt.init(PROGRAM, state.params, mt.sgd(0.1))
    again, _ = mt.train_step(PROGRAM, mt.sgd(0.1))(again, BATCH)
    assert again.step == 1


def test_a_pair_without_has_aux():
    def pair(p, x, batch):
        return x * p["w"], x.sum()

    program = mt.chain(*PROGRAM[:1], mt.scan(pair, "layers"), mt.stage(total))
    with pytest.raises(ValueError, match=r"Did you mean has_aux=True, for a pair \(carry, aux\)"):
        mt.value_and_grad(program)({**PARAMS, "layers": [{"w": torch.ones(3)}]}, BATCH)
    program = mt.chain(*PROGRAM[:1], mt.stage(lambda x, batch: (x.sum(), x.mean()), name="end"))
    with pytest.raises(ValueError, match=r"Did you mean has_aux=True, for a pair \(loss, aux\)"):
        mt.value_and_grad(program)(PARAMS, BATCH)


def test_an_error_inside_a_stage_says_what_the_stage_was_given():
    def misspelt(p, x, batch):
        return x * p["weight"]

    program = mt.chain(*PROGRAM[:1], mt.stage(misspelt, "b"), mt.stage(total))
    with pytest.raises(KeyError) as error:
        mt.value_and_grad(program)({**PARAMS, "b": {"w": torch.ones(3)}}, BATCH)
    assert "in stage 'misspelt'" in notes(error) and "b = {w float32[3]}" in notes(error)
    assert "the carry {float32[3]} of 'double'" in notes(error)
    with pytest.raises(TypeError) as error:
        mt.value_and_grad(mt.chain(mt.stage(lambda p, x, batch: x + 1, "a")))(PARAMS, BATCH)
    assert "no carry, as the first" in notes(error)


def test_a_list_that_was_meant_as_one_batch():
    program = mt.chain(
        mt.stage(lambda p, x, batch: batch[0] @ p["w"] - batch[1], "a"), mt.stage(total)
    )
    xy = [torch.ones(2, 3), torch.ones(())]
    with pytest.raises((RuntimeError, IndexError)) as error:
        mt.value_and_grad(program)(PARAMS, xy)
    assert "a list of 2, which are as many micro-batches; a batch that is a pair" in notes(error)
    mt.value_and_grad(program)(PARAMS, tuple(xy))


def test_advice_on_functorch_only_where_it_is_about_functorch():
    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def kernel(x, batch):
        return Kernel.apply(x)

    def wrong(x, batch):
        if not x.is_meta:
            raise RuntimeError("the weather is bad")
        return x

    for fn, advised in ((kernel, True), (wrong, False)):
        program = mt.chain(*PROGRAM[:1], mt.stage(fn), mt.stage(total))
        with pytest.raises(RuntimeError) as error:
            mt.value_and_grad(program)(PARAMS, BATCH)
        assert ("vjp='autograd'" in notes(error)) == advised
        assert "parameters are unchanged" in notes(error)


def test_evaluation_reads_what_it_needs():
    params = {**PARAMS, "other": {"w": torch.ones(2)}}
    (mean,) = mt.evaluate(PROGRAM)(params, [BATCH])
    assert mean.value() == 3
    with pytest.raises(KeyError, match=re.escape("no stage reads 'other/w'")):
        mt.value_and_grad(PROGRAM)(params, BATCH)
