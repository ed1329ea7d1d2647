"""What each operation means, in plain dense torch: the oracles of the tests, and reading matter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """:func:`mtfunc.ops.linear_cross_entropy` with all logits alive."""
    logits = x @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    counted = labels != ignore_index
    lse, label = logits.logsumexp(-1), torch.where(counted, labels, 0)
    picked = logits.gather(-1, label[..., None])[..., 0]
    smooth = (1 - label_smoothing) * picked + label_smoothing * logits.mean(-1)
    factors = counted.to(x.dtype) if weights is None else torch.where(counted, weights, 0)
    losses = (lse - smooth + z_loss * lse**2) * factors
    total = losses if reduction == "none" else losses.sum()
    return total / factors.sum() if reduction == "mean" else total


def tile(fn: Any, size: int) -> Any:
    """:func:`mtfunc.ops.tile`, for an ``x`` and a ``y`` that are tensors."""
    return lambda params, x: torch.cat([fn(params, part) for part in x.split(size, 1)], 1)
