"""The gated delta rule in chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtfunc.ops._checks import expect_floating, expect_ndim, expect_shape, wide
from mtfunc.ops._chunked import (
    CHUNKS_IN_TILE,
    decays,
    document_starts,
    expect_chunk,
    expect_heads,
    first_state,
    in_chunks,
)
from mtfunc.ops._tiled import run_tiled


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    state: Tensor | None = None,
    segments: Tensor | None = None,
    scale: float | None = None,
    chunk: int = 64,
    return_state: bool = False,
) -> Any:
    """Gated DeltaNet's recurrence (arXiv 2412.06464); with ``g = 0`` the delta rule (2406.06484).

    For each head, with ``S`` of shape ``(key_dim, value_dim)``::

        for t in range(tokens):
            S = exp(g[t]) * S
            S = S + outer(k[t], beta[t] * (v[t] - k[t] @ S))
            out[t] = scale * q[t] @ S

    A chunk's writes solve one triangular system (the WY representation), so that chunks are
    matrix products. Memory is linear in tokens: between the passes live the inputs and the state
    before every sixteenth chunk; the backward pass runs those sixteen again. It computes in
    float32 (float64 for float64). The backward pass is not differentiable again.

    Args:
        q: ``(batch, key_heads, tokens, key_dim)``.
        k: of the same shape; normalise it beforehand, as the paper does.
        v: ``(batch, heads, tokens, value_dim)``; each key head serves ``heads / key_heads``.
        g: ``(batch, heads, tokens)``, logarithm of the decay, at most 0; any floating dtype.
        beta: ``(batch, heads, tokens)``, in [0, 1]; any floating dtype.
        state: ``(batch, heads, key_dim, value_dim)``, the first state; by default zeros.
        segments: ``(batch, tokens)`` integer document ids. Where the id changes a document begins
            with a state of zeros; the first document continues ``state``.
        scale: factor of q; by default ``key_dim**-0.5``.
        chunk: tokens in a chunk.
        return_state: whether to return the last state too, in float32 (float64 for float64).

    Returns:
        ``(batch, heads, tokens, value_dim)`` in the dtype of v, or that and the last state.

    Raises:
        TypeError, ValueError: dtypes, shapes or options are not as above.

    Example:
        >>> import torch
        >>> from mtfunc import ops
        >>> q = k = torch.ones(1, 2, 100, 4) / 2
        >>> v, zeros = torch.ones(1, 2, 100, 8), torch.zeros(1, 2, 100)
        >>> ops.gated_delta_rule(q, k, v, zeros, zeros + 1).shape
        torch.Size([1, 2, 100, 8])
    """
    where = "gated_delta_rule"
    expect_floating(where, q=q, k=k, v=v)
    for name, given in (("g", g), ("beta", beta), ("state", state)):
        if given is not None:
            expect_floating(where, **{name: given})
    expect_ndim(where, "q", q, 4, "(batch, key_heads, tokens, key_dim)")
    expect_ndim(where, "v", v, 4, "(batch, heads, tokens, value_dim)")
    expect_shape(where, "k", k, tuple(q.shape), "as q")
    batch, heads, tokens, value_dim = v.shape
    key_dim = q.shape[-1]
    expect_heads(where, "q", q.shape[1], heads)
    expect_shape(where, "q", q, (batch, q.shape[1], tokens, key_dim), "batch and tokens as in v")
    expect_shape(where, "g", g, (batch, heads, tokens), "(batch, heads, tokens)")
    expect_shape(where, "beta", beta, (batch, heads, tokens), "(batch, heads, tokens)")
    expect_chunk(where, chunk)
    shape = (batch, heads, key_dim, value_dim)
    state = first_state(where, state, shape, "(batch, heads, key_dim, value_dim)", v)
    factor = key_dim**-0.5 if scale is None else scale
    size = max(1, min(chunk, tokens))

    def tile(_: Any, state: Tensor, x: Any) -> tuple[Tensor, Tensor]:
        return _tile(state, x, factor, size)

    starts = document_starts(where, segments, v, 2)[:, None]
    x = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "starts": starts}
    last, out = run_tiled(tile, None, state, x, size=size * CHUNKS_IN_TILE, dim=2, where=where)
    return (out, last) if return_state else out


def _tile(S: Tensor, x: dict[str, Tensor], scale: float, size: int) -> tuple[Tensor, Tensor]:
    """A tile's last state and outputs; what does not need the state, for all chunks at once."""
    dtype, tokens = wide(x["v"].dtype), x["v"].shape[2]
    q, k, v, g, beta = (in_chunks(x[n].to(dtype), size) for n in ("q", "k", "v", "g", "beta"))
    share = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(share, 1) if share > 1 else x for x in (q * scale, k))
    decay, from_state = decays(g, in_chunks(x["starts"], size))
    beta, from_state = beta[..., None], from_state[..., None]
    system = (k @ k.mT * decay * beta).tril(-1)
    given = torch.cat([beta * v, beta * from_state * k], -1)
    solved = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
    fresh, erased = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores = q @ k.mT * decay
    reads, writes = q * from_state, (k * decay[..., -1, :, None]).mT
    outs = []
    for i in range(v.shape[2]):
        written = fresh[:, :, i] - erased[:, :, i] @ S
        outs.append(reads[:, :, i] @ S + scores[:, :, i] @ written)
        S = from_state[:, :, i, -1:] * S + writes[:, :, i] @ written
    return S, torch.cat(outs, 2)[:, :, :tokens].to(x["v"].dtype)
