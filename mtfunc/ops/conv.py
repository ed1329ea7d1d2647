"""A short causal convolution over tokens, one filter a channel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtfunc.ops._checks import expect_floating, expect_ndim, expect_shape, wide
from mtfunc.ops._chunked import document_starts
from mtfunc.ops._tiled import run_tiled

_TILE = 1024


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    state: Tensor | None = None,
    segments: Tensor | None = None,
    activation: str | None = None,
    return_state: bool = False,
) -> Any:
    """Each channel's last ``width`` tokens of its document, weighted.

    ::

        for t in range(tokens):
            for j in range(width):  # the last weight is that of the token itself
                if t - j is a token of t's document:
                    out[t] += weight[:, width - 1 - j] * x[t - j]

    and then bias and activation. It computes in float32 (float64 for float64), tile by tile, and
    keeps x for the backward pass and nothing else that grows with tokens and channels.

    Args:
        x: ``(batch, tokens, channels)``.
        weight: ``(channels, width)``, of the same dtype.
        bias: ``(channels,)``, of the same dtype.
        state: ``(batch, width - 1, channels)``, the tokens before the first, of the same dtype; by
            default zeros, as if there were none.
        segments: ``(batch, tokens)`` integer document ids. Where the id changes a document begins
            that sees nothing before it; the first document continues ``state``.
        activation: ``None`` or ``"silu"``.
        return_state: whether to return the last state too, with zeros for other documents' tokens.

    Returns:
        ``(batch, tokens, channels)`` in the dtype of x, or that and the last state.

    Raises:
        TypeError, ValueError: dtypes, shapes or options are not as above.

    Example:
        >>> import torch
        >>> from mtfunc import ops
        >>> ops.causal_conv1d(torch.ones(1, 5, 1), torch.ones(1, 3))[0, :, 0]
        tensor([1., 2., 3., 3., 3.])
    """
    where = "causal_conv1d"
    expect_floating(where, x=x, weight=weight, bias=bias, state=state)
    expect_ndim(where, "x", x, 3, "(batch, tokens, channels)")
    expect_ndim(where, "weight", weight, 2, "(channels, width)")
    batch, tokens, channels = x.shape
    width = weight.shape[1]
    expect_shape(where, "weight", weight, (channels, max(width, 1)), "(channels, width)")
    if bias is not None:
        expect_shape(where, "bias", bias, (channels,), "(channels,)")
    if activation not in (None, "silu"):
        raise ValueError(f"mt.ops.{where}: activation {activation!r}; expected None or 'silu'")
    past = width - 1
    if state is None:
        state = x.new_zeros(batch, past, channels)
    expect_shape(where, "state", state, (batch, past, channels), "(batch, width - 1, channels)")
    age = _age(document_starts(where, segments, x, 1), past)
    params = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}

    def tile(params: Any, before: Tensor, x: Any) -> tuple[Tensor, Tensor]:
        return _tile(params, before, x, activation)

    given = {"x": x, "age": age}
    last, out = run_tiled(tile, params, state, given, size=_TILE, dim=1, where=where)
    if not return_state:
        return out
    if tokens:
        back = torch.arange(past - 1, -1, -1, device=x.device)
        last = last.masked_fill((age[:, -1:] < back)[..., None], 0)
    return out, last


def _age(starts: Tensor, past: int) -> Tensor:
    """``(batch, tokens)``: how many tokens, at least up to ``past``, precede one in its document.

    The first document goes on before the first token, into the state.
    """
    index = torch.arange(starts.shape[1], device=starts.device)
    first = torch.where(starts, index, -past)
    return index - (first.cummax(1).values if starts.shape[1] else first)


def _tile(
    params: dict[str, Tensor], before: Tensor, x: dict[str, Tensor], activation: str | None
) -> tuple[Tensor, Tensor]:
    """The last ``width - 1`` tokens and a tile's outputs."""
    past, tokens = before.shape[1], x["x"].shape[1]
    seen = torch.cat([before, x["x"]], 1)
    wider = seen.to(wide(seen.dtype))
    weight = params["weight"].to(wider.dtype)
    out = wider.narrow(1, past, tokens) * weight[:, past]
    for j in range(1, past + 1):
        near = wider.narrow(1, past - j, tokens).masked_fill((x["age"] < j)[..., None], 0)
        out = out + near * weight[:, past - j]
    if "bias" in params:
        out = out + params["bias"].to(out.dtype)
    if activation == "silu":
        out = F.silu(out)
    return seen.narrow(1, tokens, past), out.to(seen.dtype)
