"""Two layers with the operations inside, streamed: bitwise the standard graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mtfunc as mt
from mtfunc import ops
from tests import toys
from tests.ops.recurrences import documents
from tests.ops.tools import normal

WIDTH, HEADS, TOKENS, VOCAB = 8, 2, 37, 11


def heads(x):
    """``(batch, tokens, width)`` as ``(batch, heads, tokens, head_dim)``."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def mixed(p, x, batch):
    """Three streams of the layer's normalised input after the convolution, and two gates."""
    h = F.layer_norm(x, x.shape[-1:])
    h = ops.causal_conv1d(h, p["conv"], segments=batch["segments"], activation="silu")
    q, k, v = (h @ p["in"]).chunk(3, -1)
    return heads(q), F.normalize(heads(k), dim=-1), heads(v), (h @ p["gates"]).mT.chunk(2, 1)


def delta(p, x, batch):
    q, k, v, (g, beta) = mixed(p, x, batch)
    g, beta = F.logsigmoid(g), beta.sigmoid()
    out = ops.gated_delta_rule(q, k, v, g, beta, segments=batch["segments"], chunk=2)
    return x + out.transpose(1, 2).flatten(2) @ p["out"]


def mamba(p, x, batch):
    C, B, v, (dt, gate) = mixed(p, x, batch)
    A, segments = -p["A"].exp(), batch["segments"]
    out = ops.ssd(v, F.softplus(dt), A, B, C, D=p["D"], segments=segments, chunk=2)
    return x + (out * gate[..., None].sigmoid()).transpose(1, 2).flatten(2) @ p["out"]


def head(emb, x, batch):
    labels = batch["labels"]
    total = ops.linear_cross_entropy(x, emb["weight"], labels, reduction="sum", tile=8)
    return mt.Mean(total, (labels != -100).sum())


def layer(seed, dtype):
    shapes = {"conv": (WIDTH, 4), "in": (WIDTH, 3 * WIDTH), "gates": (WIDTH, 2 * HEADS)}
    shapes |= {"out": (WIDTH, WIDTH), "A": (HEADS,), "D": (HEADS,)}
    return {
        name: normal(*shape, seed=10 * seed + i, dtype=dtype) * 0.5
        for i, (name, shape) in enumerate(shapes.items())
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "sim:0", "sim:1"])
@pytest.mark.parametrize("block", [delta, mamba])
def test_streamed_equals_the_standard_graph(block, device, dtype):
    program = mt.chain(
        mt.stage(toys.embed, "embed"), mt.scan(block, "layers"), mt.stage(head, "embed")
    )
    params = {
        "embed": {"weight": normal(VOCAB, WIDTH, dtype=dtype)},
        "layers": [layer(1, dtype), layer(2, dtype)],
    }
    batches = [
        toys.lm_batch(2, TOKENS, seed=seed, ignored=seed) | {"segments": documents(TOKENS, 2, seed)}
        for seed in (0, 1)
    ]
    got = mt.value_and_grad(program, device=device)(params, batches)
    toys.assert_same(got, mt.reference.value_and_grad(program)(params, batches))
    unread = {"A", "D"} if block is delta else set()
    for path, leaf in toys.flat(got[1]).items():
        assert leaf.isfinite().all() and leaf.any() == (path.split("/")[-1] not in unread), path


@pytest.mark.parametrize("block", [delta, mamba])
def test_no_document_of_a_packed_batch_moves_another(block):
    """Gradients of one document's loss reach the embeddings of its own tokens only."""
    params, tokens = layer(1, torch.float64), torch.arange(TOKENS) % VOCAB
    segments = (torch.arange(TOKENS) >= 20).long()[None]
    x = F.embedding(tokens, normal(VOCAB, WIDTH))[None].requires_grad_()
    out = block(params, block(params, x, {"segments": segments}), {"segments": segments})
    (grad,) = torch.autograd.grad(out[:, 20:].square().sum(), x)
    assert not grad[:, :20].any() and grad[:, 20:].any(-1).all()
