"""The gated delta rule and Mamba-2's duality in chunks, against one token after the other."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, vmap

from mtfunc import ops
from tests import toys
from tests.ops.recurrences import (
    OPS,
    B,
    H,
    K,
    V,
    cut,
    delta,
    delta_by_token,
    delta_inputs,
    documents,
    ssd_by_token,
    ssd_inputs,
)
from tests.ops.tools import agree, by_autograd, close, near, normal

TOKENS = [1, 2, 16, 37, 67]
CHUNKS = [1, 2, 3, 64]
each_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("tokens", TOKENS)
@each_op
def test_equals_the_recurrence(op, tokens, chunk):
    """Also the last state, and gradients of all inputs and of the first state."""
    inputs = op.inputs(tokens)
    agree(lambda *x: op.fn(*x, chunk=chunk), op.by_token, *inputs, tolerance=1e-12)


@pytest.mark.parametrize("groups", [1, 4])
@each_op
def test_heads_in_groups(op, groups):
    inputs = op.inputs(9, groups)
    agree(lambda *x: op.fn(*x, chunk=4), op.by_token, *inputs, tolerance=1e-12)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("seed", [0, 1])
@each_op
def test_documents(op, seed, chunk):
    segments = documents(37, seed=seed)
    agree(
        lambda *x: op.fn(*x, chunk=chunk, segments=segments),
        lambda *x: op.by_token(*x, segments=segments),
        *op.inputs(37),
        tolerance=1e-12,
    )


@each_op
def test_a_document_sees_nothing_of_another(op):
    """The second document is bitwise the same after any other, and sends nothing back to it."""
    segments = (torch.arange(20) >= 9).long()[None]
    inputs, others = op.inputs(20, rows=1), op.inputs(20, rows=1, seed=1)
    mixed = [
        torch.cat([1e3 * y[:, :, :9], x[:, :, 9:]], 2) if i in op.timed else x
        for i, (x, y) in enumerate(zip(inputs[:-1], others))
    ]

    def second(*x):
        out, last = op.fn(*x, chunk=4, segments=segments)
        return out[:, :, 9:], last

    outs, grads = by_autograd(second, *inputs)
    mixed_outs, mixed_grads = by_autograd(second, *mixed, others[-1])
    toys.assert_same(mixed_outs, outs)
    for i in op.timed:
        assert torch.equal(grads[i][:, :, 9:], mixed_grads[i][:, :, 9:]), i
        assert grads[i][:, :, 9:].any() and not mixed_grads[i][:, :, :9].any(), i
    assert not mixed_grads[-1].any()
    alone = [*cut(op, inputs, 9, 20)[:-1], torch.zeros_like(inputs[-1])]
    close(outs, list(op.by_token(*alone)), 1e-12)


@pytest.mark.parametrize("at", [0, 1, 16, 30, 36, 37])
@each_op
def test_two_calls_equal_one(op, at):
    inputs, segments = op.inputs(37), documents(37, chance=0.05)
    segments[:, at:] += 0 if at in (0, 37) else segments[:, at - 1 : at] - segments[:, at : at + 1]

    def halves(*x):
        first, state = op.fn(*cut(op, x, 0, at), chunk=2, segments=segments[:, :at])
        second, last = op.fn(*cut(op, x, at, 37)[:-1], state, chunk=3, segments=segments[:, at:])
        return torch.cat([first, second], 2), last

    whole = lambda *x: op.fn(*x, chunk=2, segments=segments)  # noqa: E731
    agree(halves, whole, *inputs, tolerance=1e-12)


@each_op
def test_no_tokens(op):
    """The state passes through, and so does its cotangent."""
    inputs = op.inputs(0)
    (out, last), grads = by_autograd(op.fn, *inputs)
    assert out.shape == (B, H, 0, V) and torch.equal(last, inputs[-1])
    (_, _), (*_, through) = by_autograd(
        op.fn, *inputs, cotangents=[torch.zeros(B, H, 0, V).double(), torch.ones_like(last)]
    )
    assert torch.equal(through, torch.ones_like(last))
    assert [x.shape for x in grads] == [x.shape for x in inputs]


@each_op
def test_without_a_state_it_begins_with_zeros(op):
    inputs = op.inputs(9)
    zeros = [*inputs[:-1], torch.zeros_like(inputs[-1])]
    out, last = op.fn(*inputs[:-1], None)
    close((out, last), op.by_token(*zeros), 1e-12)


def test_results_without_return_state_and_without_a_skip():
    q, k, v, g, beta, _ = delta_inputs(9)
    zeros = torch.zeros(B, H, K, V).double()
    got = ops.gated_delta_rule(q, k, v, g, beta, scale=2.0)
    close(got, delta_by_token(q, k, v, g, beta, zeros, scale=2.0)[0], 1e-12)
    x, dt, A, Bs, C, D, _ = ssd_inputs(9)
    close(ops.ssd(x, dt, A, Bs, C), ssd_by_token(x, dt, A, Bs, C, 0 * D, zeros)[0], 1e-12)


@each_op
def test_strided_and_expanded_inputs(op):
    """One row expanded to three, with tokens before heads in memory, as models have them."""
    inputs = op.inputs(21, rows=1)

    def laid_out(fn):
        def of(*x):
            x = [
                z.transpose(1, 2).contiguous().mT.mT.transpose(1, 2) if i in op.timed else z
                for i, z in enumerate(x)
            ]
            return fn(*(z.expand(3, *z.shape[1:]) if z.shape[0] == 1 else z for z in x))

        return of

    agree(laid_out(lambda *x: op.fn(*x, chunk=4)), laid_out(op.by_token), *inputs, tolerance=1e-12)


def with_gates(op, tokens, value):
    """Inputs whose logarithms of decays are all ``value``."""
    inputs = op.inputs(tokens)
    if op is OPS["delta"]:
        inputs[3] = torch.full_like(inputs[3], value)
    else:
        inputs[1], inputs[2] = torch.ones_like(inputs[1]), torch.full_like(inputs[2], value)
    return inputs


@pytest.mark.parametrize("value", [0.0, -1e-6, -3.0, -50.0, -1e4, -1e30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@each_op
def test_gates_at_extremes(op, dtype, value):
    """From nothing forgotten to everything, over chunks whose sums of logarithms are huge."""
    inputs = with_gates(op, 150, value)
    expected = by_autograd(op.by_token, *inputs)
    got = by_autograd(lambda *x: op.fn(*x, chunk=64), *(x.to(dtype) for x in inputs))
    near(got, expected, 1e-12 if dtype == torch.float64 else 2e-5)


def test_a_gate_of_minus_infinity_forgets_all():
    inputs = delta_inputs(37)
    inputs[3] = torch.full_like(inputs[3], -torch.inf)
    got, expected = (by_autograd(fn, *inputs) for fn in (delta, delta_by_token))
    near(got, expected, 1e-12)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_writing_nothing_and_everything(value):
    inputs = delta_inputs(37)
    inputs[4] = torch.full_like(inputs[4], value)
    got, expected = (by_autograd(fn, *inputs) for fn in (delta, delta_by_token))
    near(got, expected, 1e-12)
    if value == 0:
        decay = inputs[3].sum(2)[..., None, None].exp()
        near(got[0][1], decay * inputs[-1], 1e-12)


@each_op
def test_a_long_mix_of_gates_keeps_its_digits(op):
    """Tokens that forget everything among tokens that forget nothing, in float32."""
    inputs = op.inputs(300)
    gates = -(10.0 ** normal(B, H, 300, seed=9).mul(3).clamp(-9, 4))
    if op is OPS["delta"]:
        inputs[3] = gates
    else:
        inputs[1], inputs[2] = -gates.clamp(min=-50), -torch.ones_like(inputs[2])
    expected = by_autograd(op.by_token, *inputs)
    got = by_autograd(op.fn, *(x.float() for x in inputs))
    near(got, expected, 1e-5)


@each_op
def test_float32(op):
    inputs = op.inputs(67)
    expected = by_autograd(op.by_token, *inputs)
    near(by_autograd(lambda *x: op.fn(*x, chunk=16), *(x.float() for x in inputs)), expected, 1e-5)


@each_op
def test_bfloat16_is_float32_inside(op):
    """Bitwise what float32 computes from the same numbers, rounded once."""
    low = [x.bfloat16() for x in op.inputs(37)]
    if op is OPS["ssd"]:  # gradients of A and D are sums of tiles, each in the dtype of A and D
        low[2], low[5] = low[2].float(), low[5].float()
    seeds = [normal(B, H, 37, V, dtype=torch.bfloat16), normal(B, H, K, V, dtype=torch.float32)]

    def run(inputs, seeds):
        return by_autograd(lambda *x: op.fn(*x, chunk=2), *inputs, cotangents=seeds)

    (out, last), grads = run(low, seeds)
    (wide, wide_last), wide_grads = run([x.float() for x in low], [x.float() for x in seeds])
    assert out.dtype == torch.bfloat16 and last.dtype == torch.float32
    assert torch.equal(out, wide.bfloat16()) and torch.equal(last, wide_last)
    for x, got, expected in zip(low, grads, wide_grads):
        assert got.dtype == x.dtype and torch.equal(got, expected.to(x.dtype))


@each_op
def test_gradcheck(op):
    inputs = [x.requires_grad_() for x in op.inputs(5, rows=1)]
    assert torch.autograd.gradcheck(lambda *x: op.fn(*x, chunk=2), inputs, fast_mode=True)


@each_op
def test_vmap_and_grad_in_either_order(op):
    several = [op.inputs(37, seed=seed, rows=1) for seed in range(3)]
    stacked = [torch.stack(x) for x in zip(*several)]
    segments = documents(37, rows=1)

    def loss(*x):
        out, last = op.fn(*x, chunk=2, segments=segments)
        return out.square().sum() + last.sum()

    every = tuple(range(len(stacked)))
    expected = [torch.stack(x) for x in zip(*(grad(loss, every)(*x) for x in several))]
    close(vmap(loss)(*stacked), torch.stack([loss(*x) for x in several]), 1e-12)
    close(list(vmap(grad(loss, every))(*stacked)), expected, 1e-12)
    close(list(grad(lambda *x: vmap(loss)(*x).sum(), every)(*stacked)), expected, 1e-12)


@pytest.mark.parametrize("mapped", range(7))
@each_op
def test_vmap_over_one_input(op, mapped):
    """The others are shared: their gradients are sums, or come per example."""
    inputs = op.inputs(37, rows=1)
    mapped = min(mapped, len(inputs) - 1)
    several = torch.stack([inputs[mapped], op.inputs(37, seed=1, rows=1)[mapped]])
    every = tuple(range(len(inputs)))

    def loss(*x):
        out, last = op.fn(*x, chunk=2)
        return out.square().sum() + last.sum()

    def placed(x):
        return [x if i == mapped else y for i, y in enumerate(inputs)]

    expected = [torch.stack(x) for x in zip(*(grad(loss, every)(*placed(x)) for x in several))]
    dims = tuple(0 if i == mapped else None for i in every)
    close(list(vmap(grad(loss, every), in_dims=dims)(*placed(several))), expected, 1e-12)
    summed = grad(lambda *x: vmap(loss, in_dims=dims)(*x).sum(), every)(*placed(several))
    for i, (got, wanted) in enumerate(zip(summed, expected)):
        close(got, wanted if i == mapped else wanted.sum(0), 1e-12)


@each_op
def test_per_call_grad_mode_does_not_change_the_result(op):
    inputs = op.inputs(37)
    with torch.no_grad():
        alone = op.fn(*inputs, chunk=2)
    outs, _ = by_autograd(lambda *x: op.fn(*x, chunk=2), *inputs)
    toys.assert_same(list(alone), list(outs))
