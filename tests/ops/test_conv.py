"""The causal convolution against sums over each token's predecessors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from mtfunc import ops
from mtfunc.ops import conv
from tests import toys
from tests.ops.recurrences import documents
from tests.ops.tools import agree, by_autograd, close, near, normal

ROWS, CHANNELS = 2, 3


def by_token(x, weight, bias, state, *, segments=None, activation=None):
    """Outputs, and the last ``width - 1`` tokens of the last document."""
    past = weight.shape[1] - 1
    longer = torch.cat([state, x], 1)
    if segments is None:
        segments = torch.zeros(x.shape[:2], dtype=torch.int64)
    runs = F.pad(segments[:, 1:] != segments[:, :-1], (1 + past, 0))[:, : longer.shape[1]].cumsum(1)
    outs = []
    for t in range(past, longer.shape[1]):
        out = torch.zeros_like(x[:, 0])
        for j in range(past + 1):
            same = (runs[:, t - j] == runs[:, t])[:, None]
            out = out + torch.where(same, weight[:, past - j] * longer[:, t - j], 0)
        outs.append(out + bias)
    out = torch.stack(outs, 1)
    end = longer.shape[1] - past
    last = torch.where((runs[:, end:] == runs[:, -1:])[..., None], longer[:, end:], 0)
    return F.silu(out) if activation else out, last


def conv1d(x, weight, bias, state, **options):
    return ops.causal_conv1d(x, weight, bias, state=state, return_state=True, **options)


def case(tokens, width=4, rows=ROWS):
    return [
        normal(rows, tokens, CHANNELS),
        normal(CHANNELS, width, seed=1),
        normal(CHANNELS, seed=2),
        normal(rows, width - 1, CHANNELS, seed=3),
    ]


@pytest.fixture(params=[1, 2, 5, 1024])
def tile(request, monkeypatch):
    """The number of tokens in a tile."""
    monkeypatch.setattr(conv, "_TILE", request.param)
    return request.param


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_equals_the_sum(tile, tokens, width, activation):
    """Also the last state, and gradients of all inputs and of the first state."""
    agree(
        lambda *x: conv1d(*x, activation=activation),
        lambda *x: by_token(*x, activation=activation),
        *case(tokens, width),
        tolerance=1e-12,
    )


@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("seed", [0, 1])
def test_documents(tile, seed, width):
    segments = documents(17, ROWS, seed=seed)
    agree(
        lambda *x: conv1d(*x, segments=segments),
        lambda *x: by_token(*x, segments=segments),
        *case(17, width),
        tolerance=1e-12,
    )


def test_equals_torchs_convolution():
    x, weight, bias, _ = case(17)
    expected = F.conv1d(F.pad(x.mT, (3, 0)), weight[:, None], bias, groups=CHANNELS).mT
    close(ops.causal_conv1d(x, weight, bias), expected, 1e-12)
    close(ops.causal_conv1d(x, weight), expected - bias, 1e-12)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_another_documents_infinity_stays_there(value):
    x, weight, bias, state = case(8)
    x[:, 3] = value
    segments = (torch.arange(8) >= 4).long().expand(ROWS, 8)
    (out, last), (gx, _, _, gstate) = by_autograd(
        lambda *z: tuple(y[:, -3:] for y in conv1d(*z, segments=segments)), x, weight, bias, state
    )
    alone, _ = conv1d(x[:, 4:], weight, bias, torch.zeros_like(state))
    assert torch.equal(out, alone[:, -3:]) and last.isfinite().all()
    assert gx.isfinite().all() and not gx[:, :4].any() and not gstate.any()


@pytest.mark.parametrize("at", [0, 1, 2, 5, 16, 17])
def test_two_calls_equal_one(tile, at):
    inputs, segments = case(17), documents(17, ROWS, chance=0.1)
    if 0 < at < 17:
        segments[:, at:] += segments[:, at - 1 : at] - segments[:, at : at + 1]

    def halves(x, weight, bias, state):
        first, state = conv1d(x[:, :at], weight, bias, state, segments=segments[:, :at])
        second, last = conv1d(x[:, at:], weight, bias, state, segments=segments[:, at:])
        return torch.cat([first, second], 1), last

    agree(halves, lambda *x: conv1d(*x, segments=segments), *inputs, tolerance=1e-12)


def test_no_tokens():
    x, weight, bias, state = case(0)
    (out, last), grads = by_autograd(conv1d, x, weight, bias, state)
    assert out.shape == x.shape and torch.equal(last, state)
    assert not grads[1].any() and not grads[2].any() and grads[3].all()


def test_float32(tile):
    inputs = case(37)
    expected = by_autograd(by_token, *inputs)
    near(by_autograd(conv1d, *(x.float() for x in inputs)), expected, 1e-5)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_bfloat16_is_float32_inside(activation):
    """Bitwise what float32 computes from the same numbers, rounded once."""
    low = [x.bfloat16() for x in case(37)]
    seeds = [normal(ROWS, 37, CHANNELS, dtype=torch.bfloat16), torch.zeros_like(low[3])]

    def run(inputs, seeds):
        return by_autograd(lambda *x: conv1d(*x, activation=activation), *inputs, cotangents=seeds)

    (out, last), grads = run(low, seeds)
    (wide, _), wide_grads = run([x.float() for x in low], [x.float() for x in seeds])
    assert out.dtype == last.dtype == torch.bfloat16 and torch.equal(out, wide.bfloat16())
    for got, expected in zip(grads, wide_grads):
        assert got.dtype == torch.bfloat16 and torch.equal(got, expected.bfloat16())


def test_strided_and_expanded_inputs(tile):
    def laid_out(fn):
        return lambda x, weight, bias, state: fn(
            x.mT.contiguous().mT.expand(3, -1, -1), weight, bias, state.expand(3, -1, -1)
        )

    agree(laid_out(conv1d), laid_out(by_token), *case(17, rows=1), tolerance=1e-12)


def test_gradcheck(tile):
    inputs = [x.requires_grad_() for x in case(5)]
    assert torch.autograd.gradcheck(lambda *x: conv1d(*x, activation="silu"), inputs)


@pytest.mark.parametrize(
    "dims",
    [
        (0, 0, 0, 0),
        (0, None, None, None),
        (None, 0, None, None),
        (None, None, 0, None),
        (None, None, None, 0),
    ],
)
def test_vmap_and_grad_in_either_order(tile, dims):
    several = [normal(3, *x.shape, seed=i) for i, x in enumerate(case(17))]
    given = [x if dim == 0 else x[0] for x, dim in zip(several, dims)]
    segments, every = documents(17, ROWS), (0, 1, 2, 3)

    def loss(*x):
        out, last = conv1d(*x, segments=segments, activation="silu")
        return out.square().sum() + last.sum()

    def one(i):
        return [x[i] if dim == 0 else x for x, dim in zip(given, dims)]

    expected = [torch.stack(x) for x in zip(*(grad(loss, every)(*one(i)) for i in range(3)))]
    close(list(vmap(grad(loss, every), in_dims=dims)(*given)), expected, 1e-12)
    summed = grad(lambda *x: vmap(loss, in_dims=dims)(*x).sum(), every)(*given)
    for got, wanted, dim in zip(summed, expected, dims):
        close(got, wanted if dim == 0 else wanted.sum(0), 1e-12)


def test_grad_mode_does_not_change_the_result(tile):
    inputs = case(17)
    with torch.no_grad():
        alone = conv1d(*inputs)
    toys.assert_same(list(alone), by_autograd(conv1d, *inputs)[0])
