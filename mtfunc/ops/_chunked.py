"""What recurrences in chunks share: documents, decays, the walk over tiles."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtfunc.ops._checks import expect_integers, expect_shape, wide

CHUNKS_IN_TILE = 16
"""A state is kept for each so many chunks; the backward pass runs a tile's chunks again."""


def document_starts(where: str, segments: Tensor | None, like: Tensor, dim: int) -> Tensor:
    """``(batch, tokens)``, true where a token's document is not its predecessor's.

    The first token is false: it continues the state that is passed in.
    """
    shape = (like.shape[0], like.shape[dim])
    if segments is None:
        return torch.zeros(shape, dtype=torch.bool, device=like.device)
    expect_integers(where, "segments", segments)
    expect_shape(where, "segments", segments, shape, "(batch, tokens)")
    return torch.cat([torch.zeros_like(segments[:, :1]), segments.diff(dim=1)], 1) != 0


def first_state(
    where: str, state: Tensor | None, shape: tuple[int, ...], meaning: str, like: Tensor
) -> Tensor:
    """The state in the dtype that it is carried in; zeros where none is given."""
    if state is None:
        return torch.zeros(shape, dtype=wide(like.dtype), device=like.device)
    expect_shape(where, "state", state, shape, meaning)
    return state.to(wide(like.dtype))


def expect_chunk(where: str, chunk: int) -> None:
    """Raises ``ValueError`` unless the chunk is a number of tokens."""
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(
            f"mt.ops.{where}: chunk is {chunk!r}; expected a number of tokens, at least 1"
        )


def expect_heads(where: str, name: str, heads: int, of: int) -> None:
    """Raises ``ValueError`` unless each of the ``heads`` serves as many of the ``of``."""
    if heads < 1 or of % heads:
        raise ValueError(
            f"mt.ops.{where}: {name} has {heads} heads; expected a number that divides {of}"
        )


def in_chunks(x: Tensor, size: int) -> Tensor:
    """``(B, H, T, ...)`` as ``(B, H, chunks, size, ...)``, filled up with zeros; at least one."""
    missing = -x.shape[2] % size if x.shape[2] else size
    if missing:
        x = F.pad(x, (0, 0) * (x.ndim - 3) + (0, missing))
    return x.unflatten(2, (-1, size))


def decays(g: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """How much of token j's write is left at token i, and of the state before the chunk.

    Each is the exponential of a sum over just the tokens between. A difference of two cumulative
    sums would cost digits and let gradients leak through g of other documents.

    Args:
        g: ``(B, H, N, C)``, logarithms of decays.
        starts: ``(B, 1, N, C)``, whether a token begins a document.

    Returns:
        ``(B, H, N, C, C)``, zero where j is after i or in another document, and ``(B, H, N, C)``.
    """
    runs = starts.cumsum(-1)
    seen = (runs[..., :, None] == runs[..., None, :]).tril()
    between = g[..., :, None].masked_fill(~seen.tril(-1), 0).cumsum(-2)
    from_state = g.masked_fill(runs > 0, 0).cumsum(-1)
    return (
        between.masked_fill(~seen, -torch.inf).exp(),
        from_state.masked_fill(runs > 0, -torch.inf).exp(),
    )
