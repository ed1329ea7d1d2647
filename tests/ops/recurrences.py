"""The recurrences one token after the other, and inputs for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from mtfunc import ops
from tests.ops.tools import normal

B, H, K, V = 2, 4, 3, 5


def forget(S, t, segments):
    """The state before token t, zero where a document begins there."""
    if segments is None or t == 0:
        return S
    begins = segments[:, t] != segments[:, t - 1]
    return S.masked_fill(begins[:, None, None, None], 0)


def delta_by_token(q, k, v, g, beta, state, *, segments=None, scale=None):
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    S, outs = state, []
    for t in range(v.shape[2]):
        S = g[:, :, t, None, None].exp() * forget(S, t, segments)
        error = v[:, :, t] - torch.einsum("bhk,bhkv->bhv", k[:, :, t], S)
        S = S + k[:, :, t, :, None] * (beta[:, :, t, None] * error)[:, :, None, :]
        outs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, :, t], S))
    return torch.stack(outs, 2), S


def ssd_by_token(x, dt, A, B, C, D, state, *, segments=None):
    B, C = (z.repeat_interleave(x.shape[1] // z.shape[1], 1) for z in (B, C))
    h, outs = state, []
    for t in range(x.shape[2]):
        h = (dt[:, :, t] * A).exp()[..., None, None] * forget(h, t, segments)
        h = h + B[:, :, t, :, None] * (dt[:, :, t, None] * x[:, :, t])[:, :, None, :]
        out = torch.einsum("bhn,bhnp->bhp", C[:, :, t], h)
        outs.append(out + D[:, None] * x[:, :, t])
    return torch.stack(outs, 2), h


def delta(q, k, v, g, beta, state, **options):
    return ops.gated_delta_rule(q, k, v, g, beta, state=state, return_state=True, **options)


def ssd(x, dt, A, B, C, D, state, **options):
    return ops.ssd(x, dt, A, B, C, D=D, state=state, return_state=True, **options)


def delta_inputs(tokens, groups=2, seed=0, rows=B):
    def draw(*shape, i):
        return normal(rows, *shape, seed=10 * seed + i)

    return [
        draw(groups, tokens, K, i=0),
        F.normalize(draw(groups, tokens, K, i=1), dim=-1),
        draw(H, tokens, V, i=2),
        -draw(H, tokens, i=3).abs(),
        draw(H, tokens, i=4).sigmoid(),
        draw(H, K, V, i=5),
    ]


def ssd_inputs(tokens, groups=2, seed=0, rows=B):
    def draw(*shape, i):
        return normal(*shape, seed=10 * seed + i)

    return [
        draw(rows, H, tokens, V, i=0),
        F.softplus(draw(rows, H, tokens, i=1)),
        -draw(H, i=2).exp(),
        draw(rows, groups, tokens, K, i=3),
        draw(rows, groups, tokens, K, i=4),
        draw(H, i=5),
        draw(rows, H, K, V, i=6),
    ]


@dataclass
class Op:
    """One operation: in chunks, by token, its inputs; which of them have tokens on dim 2."""

    fn: Any
    by_token: Any
    inputs: Any
    timed: tuple[int, ...]


OPS = {
    "delta": Op(delta, delta_by_token, delta_inputs, (0, 1, 2, 3, 4)),
    "ssd": Op(ssd, ssd_by_token, ssd_inputs, (0, 1, 3, 4)),
}


def cut(op, inputs, start, stop):
    """The inputs of some tokens."""
    return [x[:, :, start:stop] if i in op.timed else x for i, x in enumerate(inputs)]


def documents(tokens, rows=B, seed=0, chance=0.3):
    """Document ids that change at random places, differently in each row."""
    g = torch.Generator().manual_seed(seed)
    return (torch.rand(rows, tokens, generator=g) < chance).cumsum(1)
