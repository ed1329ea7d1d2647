"""Tiled maps against the whole."""

import pytest
import torch
import torch.nn.functional as F

import mtfunc as mt
from mtfunc import ops
from mtfunc.ops import reference
from tests.ops.tools import ENGINES, Alive, agree, by_autograd, by_func, normal

SIZES = [1, 2, 3, 5, 7, 64]


def mlp(p, x):
    return F.silu(F.rms_norm(x, x.shape[-1:]) @ p["up"]) @ p["down"] + p["bias"]


def make(x, up, down, bias):
    return {"up": up, "down": down, "bias": bias}, x


LEAVES = [normal(2, 7, 4), normal(4, 6, seed=1), normal(6, 4, seed=2), normal(4, seed=3)]


@pytest.mark.parametrize("size", SIZES)
def test_equals_the_whole(size):
    g = ops.tile(mlp, size)
    agree(lambda *leaves: g(*make(*leaves)), lambda *leaves: mlp(*make(*leaves)), *LEAVES)
    dense = reference.tile(mlp, size)
    agree(lambda *leaves: g(*make(*leaves)), lambda *leaves: dense(*make(*leaves)), *LEAVES)


@pytest.mark.parametrize("size", [2, 3])
def test_pytrees_integers_and_unused_leaves(size):
    positions = torch.arange(14).view(2, 7)

    def fn(p, x):
        h = x["h"] * p["scale"] + x["at"][..., None]
        return {"y": h, "two": [h.square(), x["at"] + p["shift"]]}

    def run(apply):
        def of(h, scale, unused):
            params = {"scale": scale, "unused": unused, "shift": torch.tensor(3), "none": None}
            out = apply(params, {"h": h, "at": positions})
            assert torch.equal(out["two"][1], positions + 3)
            return out["y"], out["two"][0]

        return of

    agree(run(ops.tile(fn, size)), run(fn), normal(2, 7, 4), normal(4, seed=1), normal(3))


def test_only_one_output_has_a_cotangent():
    def fn(p, x):
        return x * p, torch.sqrt(x - x)

    tiled = ops.tile(fn, 2)
    agree(lambda p, x: tiled(p, x)[0], lambda p, x: x * p, normal(4), normal(1, 5, 4, seed=1))


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_nested(engine):
    inner = ops.tile(mlp, 2)
    outer = ops.tile(lambda p, x: inner(p, x) + x, 5)
    agree(
        lambda *leaves: outer(*make(*leaves)),
        lambda *leaves: mlp(*make(*leaves)) + leaves[0],
        *LEAVES,
    )


def test_composes_with_func_grad():
    g = ops.tile(mlp, 3)
    got = torch.func.grad(lambda x: g(*make(x, *LEAVES[1:])).square().sum())(LEAVES[0])
    expected = torch.func.grad(lambda x: mlp(*make(x, *LEAVES[1:])).square().sum())(LEAVES[0])
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("size", SIZES)
def test_keyed_dropout_draws_what_the_whole_draws(size):
    key = mt.random.key(5)
    index = torch.arange(14).view(2, 7)

    def drop(i, h):
        return mt.random.dropout(mt.random.fold_in(key, i), 0.5, h)

    def fn(p, x):
        return torch.func.vmap(torch.func.vmap(drop))(x["index"], x["h"]) * p

    tiled = ops.tile(fn, size)
    agree(
        lambda p, h: tiled(p, {"h": h, "index": index}),
        lambda p, h: fn(p, {"h": h, "index": index}),
        normal(8),
        normal(2, 7, 8, seed=1).abs() + 1,
    )
    dropped = fn(1.0, {"h": torch.ones(2, 7, 8), "index": index}) == 0
    assert 0.3 < dropped.double().mean() < 0.7
    assert len({tuple(row.tolist()) for row in dropped.flatten(0, 1)}) > 10


def test_parameter_gradients_accumulate_in_float32():
    x = torch.ones(1, 4096, 1, dtype=torch.bfloat16)
    scale = torch.ones(1, dtype=torch.bfloat16)
    ones = [torch.ones(1, 4096, 1, dtype=torch.bfloat16)]
    _, (grad, _) = by_autograd(ops.tile(lambda p, x: x * p, 1), scale, x, cotangents=ones)
    assert grad.dtype == torch.bfloat16 and grad.item() == 4096  # bfloat16 alone stops at 256


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_memory_is_one_tiles(engine):
    tokens, width, ffn = 8192, 16, 1024
    x = torch.empty(1, tokens, width, device="meta")
    up = torch.empty(width, ffn, device="meta")
    down = torch.empty(ffn, width, device="meta")

    def peak(fn):
        seeds = [torch.empty_like(x)]
        with Alive() as alive:
            engine(
                lambda x, up, down: fn({"up": up, "down": down, "bias": 0}, x),
                x,
                up,
                down,
                cotangents=seeds,
            )
        return alive.peak

    whole = 4 * tokens * ffn
    assert peak(mlp) > 2 * whole
    assert peak(ops.tile(mlp, 128)) < whole / 4


def test_errors():
    with pytest.raises(ValueError, match="size is 0; expected a number of tokens"):
        ops.tile(mlp, 0)
    x = torch.ones(2, 7, 4)
    with pytest.raises(ValueError, match="for a tile of 3 tokens; expected dim 1"):
        ops.tile(lambda p, x: x.sum(1), 3)(None, x)
    with pytest.raises(ValueError, match="'a' 7, 'b' 6; expected one number"):
        ops.tile(lambda p, x: x["a"], 3)(None, {"a": x, "b": x[:, 1:]})
    with pytest.raises(ValueError, match=r"x at 'b' has shape \(2,\)"):
        ops.tile(lambda p, x: x["a"], 3)(None, {"a": x, "b": torch.ones(2)})
    weight = torch.ones(4, requires_grad=True)
    with pytest.raises(ValueError, match="closes over a tensor that requires grad"):
        ops.tile(lambda p, x: x * weight, 3)(None, x)


def test_without_gradients_and_without_tokens():
    g = ops.tile(mlp, 3)
    params, x = make(*LEAVES)
    with torch.no_grad():
        torch.testing.assert_close(g(params, x), mlp(params, x))
    _, grads = by_func(lambda *leaves: g(*make(*leaves)), x[:, :0], *LEAVES[1:])
    assert [grad.shape for grad in grads] == [x[:, :0].shape, *(leaf.shape for leaf in LEAVES[1:])]
