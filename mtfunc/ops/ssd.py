"""Mamba-2's state-space duality in chunks."""

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


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    state: Tensor | None = None,
    segments: Tensor | None = None,
    chunk: int = 64,
    return_state: bool = False,
) -> Any:
    """Mamba-2's recurrence (arXiv 2405.21060).

    For each head, with ``h`` of shape ``(state_dim, head_dim)``::

        for t in range(tokens):
            h = exp(dt[t] * A) * h + outer(B[t], dt[t] * x[t])
            out[t] = C[t] @ h + D * x[t]

    A chunk is matrix products. Memory is linear in tokens: between the passes live the inputs and
    the state before every sixteenth chunk; the backward pass runs those sixteen again. It computes
    in float32 (float64 for float64). The backward pass is not differentiable again.

    Args:
        x: ``(batch, heads, tokens, head_dim)``.
        dt: ``(batch, heads, tokens)``, step sizes after bias and softplus; any floating dtype.
        A: ``(heads,)``, negative; any floating dtype.
        B: ``(batch, groups, tokens, state_dim)``; each group serves ``heads / groups`` heads.
        C: of the same shape.
        D: ``(heads,)``, the skip connection; any floating dtype.
        state: ``(batch, heads, state_dim, head_dim)``, the first state; by default zeros.
        segments: ``(batch, tokens)`` integer document ids. Where the id changes a document begins
            with a state of zeros; the first document continues ``state``.
        chunk: tokens in a chunk.
        return_state: whether to return the last state too, in float32 (float64 for float64).

    Returns:
        ``(batch, heads, tokens, head_dim)`` in the dtype of x, or that and the last state.

    Raises:
        TypeError, ValueError: dtypes, shapes or options are not as above.

    Example:
        >>> import torch
        >>> from mtfunc import ops
        >>> x, dt, A = torch.ones(1, 4, 100, 8), torch.ones(1, 4, 100), -torch.ones(4)
        >>> B = C = torch.ones(1, 1, 100, 16)
        >>> ops.ssd(x, dt, A, B, C).shape
        torch.Size([1, 4, 100, 8])
    """
    where = "ssd"
    expect_floating(where, x=x, B=B, C=C)
    for name, given in (("dt", dt), ("A", A), ("D", D), ("state", state)):
        if given is not None:
            expect_floating(where, **{name: given})
    expect_ndim(where, "x", x, 4, "(batch, heads, tokens, head_dim)")
    expect_ndim(where, "B", B, 4, "(batch, groups, tokens, state_dim)")
    expect_shape(where, "C", C, tuple(B.shape), "as B")
    batch, heads, tokens, head_dim = x.shape
    expect_heads(where, "B", B.shape[1], heads)
    expected = (batch, B.shape[1], tokens, B.shape[3])
    expect_shape(where, "B", B, expected, "batch and tokens as in x")
    expect_shape(where, "dt", dt, (batch, heads, tokens), "(batch, heads, tokens)")
    expect_shape(where, "A", A, (heads,), "(heads,)")
    if D is not None:
        expect_shape(where, "D", D, (heads,), "(heads,)")
    expect_chunk(where, chunk)
    shape = (batch, heads, B.shape[3], head_dim)
    state = first_state(where, state, shape, "(batch, heads, state_dim, head_dim)", x)
    size = max(1, min(chunk, tokens))

    def tile(params: Any, state: Tensor, x: Any) -> tuple[Tensor, Tensor]:
        return _tile(params, state, x, size)

    starts = document_starts(where, segments, x, 2)[:, None]
    inputs = {"x": x, "dt": dt, "B": B, "C": C, "starts": starts}
    params = {"A": A} if D is None else {"A": A, "D": D}
    tile_size = size * CHUNKS_IN_TILE
    last, out = run_tiled(tile, params, state, inputs, size=tile_size, dim=2, where=where)
    return (out, last) if return_state else out


def _tile(
    params: dict[str, Tensor], h: Tensor, x: dict[str, Tensor], size: int
) -> tuple[Tensor, Tensor]:
    """A tile's last state and outputs; what does not need the state, for all chunks at once."""
    dtype, tokens = wide(x["x"].dtype), x["x"].shape[2]
    v, dt, B, C = (in_chunks(x[n].to(dtype), size) for n in ("x", "dt", "B", "C"))
    share = v.shape[1] // B.shape[1]
    if share > 1:
        B, C = B.repeat_interleave(share, 1), C.repeat_interleave(share, 1)
    g = dt * params["A"].to(dtype)[:, None, None]
    decay, from_state = decays(g, in_chunks(x["starts"], size))
    written = dt[..., None] * v
    out = (C @ B.mT * decay) @ written
    if "D" in params:
        out = out + params["D"].to(dtype)[:, None, None, None] * v
    from_state = from_state[..., None]
    ends = (B * decay[..., -1, :, None]).mT @ written
    befores = []
    for i in range(v.shape[2]):
        befores.append(h)
        h = from_state[:, :, i, -1:] * h + ends[:, :, i]
    out = out + C * from_state @ torch.stack(befores, 2)
    return h, out.flatten(2, 3)[:, :, :tokens].to(x["x"].dtype)
