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
    segments: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
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
        segments: ``(batch, tokens)`` integer document ids; a document begins where the id changes.
        activation: ``None`` or ``"silu"``.

    Returns:
        ``(batch, tokens, channels)`` in the dtype of x.

    Raises:
        TypeError, ValueError: dtypes, shapes or options are not as above.

    Example:
        >>> import torch
        >>> from mtfunc import ops
        >>> ops.causal_conv1d(torch.ones(1, 5, 1), torch.ones(1, 3))[0, :, 0]
        tensor([1., 2., 3., 3., 3.])
    """
    where = "causal_conv1d"
    expect_floating(where, x=x, weight=weight, bias=bias)
    expect_ndim(where, "x", x, 3, "(batch, tokens, channels)")
    expect_ndim(where, "weight", weight, 2, "(channels, width)")
    batch, tokens, channels = x.shape
    width = weight.shape[1]
    expect_shape(where, "weight", weight, (channels, max(width, 1)), "(channels, width)")
    if bias is not None:
        expect_shape(where, "bias", bias, (channels,), "(channels,)")
    if activation not in (None, "silu"):
        raise ValueError(f"mt.ops.{where}: activation {activation!r}; expected None or 'silu'")
    index = torch.arange(tokens, device=x.device)
    starts = torch.where(document_starts(where, segments, x, 1), index, 0)
    age = index - starts.cummax(1).values
    before = x.new_zeros(batch, width - 1, channels)
    params = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}

    def tile(params: Any, before: Tensor, x: Any) -> tuple[Tensor, Tensor]:
        return _tile(params, before, x, activation)

    return run_tiled(tile, params, before, {"x": x, "age": age}, size=_TILE, dim=1, where=where)[1]


def _tile(
    params: dict[str, Tensor], before: Tensor, x: dict[str, Tensor], activation: str | None
) -> tuple[Tensor, Tensor]:
    """The last ``width - 1`` tokens and a tile's outputs."""
    past, tokens = before.shape[1], x["x"].shape[1]
    seen = torch.cat([before, x["x"]], 1)
    weight = params["weight"].to(wide(seen.dtype))
    out = x["x"] * weight[:, past]
    for j in range(1, past + 1):
        near = seen.narrow(1, past - j, tokens).masked_fill((x["age"] < j)[..., None], 0)
        out = out + near * weight[:, past - j]
    if "bias" in params:
        out = out + params["bias"].to(out.dtype)
    if activation == "silu":
        out = F.silu(out)
    return seen.narrow(1, tokens, past), out.to(seen.dtype)
