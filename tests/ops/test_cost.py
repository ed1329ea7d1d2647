"""Bytes and floating-point operations of the recurrences, as docs/ops.md states them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mtfunc import ops
from tests.ops.tools import ENGINES, Alive

B, H, G, K, V, C = 2, 4, 2, 16, 32, 8
TILE = 16 * C


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def delta(tokens):
    inputs = [empty(B, G, tokens, K), empty(B, G, tokens, K), empty(B, H, tokens, V)]
    inputs += [empty(B, H, tokens), empty(B, H, tokens)]
    return inputs, lambda *x: ops.gated_delta_rule(*x, chunk=C)


def ssd(tokens):
    inputs = [empty(B, H, tokens, V), empty(B, H, tokens), empty(H)]
    inputs += [empty(B, G, tokens, K), empty(B, G, tokens, K)]
    return inputs, lambda *x: ops.ssd(*x, chunk=C)


def conv(tokens):
    inputs = [empty(B, tokens, V), empty(V, 4), empty(V)]
    return inputs, lambda *x: ops.causal_conv1d(*x, activation="silu")


RECURRENCES = {"delta": delta, "ssd": ssd}


def nbytes(inputs):
    return sum(x.nbytes for x in inputs)


@pytest.mark.parametrize("tokens", [TILE, 8 * TILE, 8 * TILE + 1])
@pytest.mark.parametrize("make", RECURRENCES.values(), ids=RECURRENCES)
def test_a_state_for_every_sixteen_chunks_lives_between_the_passes(make, tokens):
    inputs, fn = make(tokens)
    with Alive() as alive:
        out = fn(*(x.requires_grad_() for x in inputs))
    tiles = -(-tokens // TILE)
    state, starts = 4 * B * H * K * V, B * tokens
    assert alive.now() == nbytes(inputs) + out.nbytes + (tiles + 1) * state + starts


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize(("make", "tile"), [(delta, TILE), (ssd, TILE), (conv, 1024)])
def test_the_working_set_is_one_tiles(make, tile, engine):
    """More tokens cost inputs, outputs, their gradients and a state a tile, nothing else."""

    def peak(tokens):
        inputs, fn = make(tokens)
        seeds = [torch.empty_like(fn(*inputs))]
        with Alive() as alive:
            engine(fn, *inputs, cotangents=seeds)
        return alive.peak

    (few, _), (many, fn) = make(2 * tile), make(4 * tile)
    given, out = nbytes(many) - nbytes(few), fn(*many).nbytes // 2
    state = 2 * B * 3 * V if make is conv else 4 * B * H * K * V
    index = 8 if make is conv else 1
    copies = 3  # the engines of these tests clone what they are given
    expected = copies * given + 2 * out + 2 * state + index * B * 2 * tile
    assert peak(4 * tile) - peak(2 * tile) == expected


def test_floating_point_operations():
    """Of matrix products, for a token and a head; the triangular solve is not counted."""
    tokens = 4 * TILE

    def counted(make):
        inputs, fn = make(tokens)
        with FlopCounterMode(display=False) as counter:
            fn(*inputs)
        return counter.get_total_flops() / (B * H * tokens)

    assert counted(delta) == 4 * C * K + 2 * C * V + 6 * K * V
    assert counted(ssd) == 2 * C * (K + V) + 4 * K * V
