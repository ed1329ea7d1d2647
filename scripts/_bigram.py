"""The byte-bigram model: the line that a trained model must end well below."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def log_probabilities(data: Tensor, *, smoothing: float = 1.0) -> Tensor:
    """The bigram model of some text.

    ``p(next | last) = (n(last, next) + a p(next)) / (n(last) + a)``, where ``p(next)`` is the
    unigram model with add-one smoothing: a pair that was never seen falls back to how frequent
    its second byte is (Jelinek and Mercer's interpolation with a Dirichlet prior).

    Args:
        data: the training split, uint8 of shape ``(bytes,)``.
        smoothing: the ``a`` above, in pairs.

    Returns:
        float64, shape ``(256, 256)``: the logarithm of ``p``, indexed by last and next.
    """
    pairs = data[:-1].long() * 256 + data[1:].long()
    counts = torch.bincount(pairs, minlength=256 * 256).reshape(256, 256).double()
    unigram = torch.bincount(data.long(), minlength=256).double() + 1
    unigram /= unigram.sum()
    return ((counts + smoothing * unigram) / (counts.sum(1, keepdim=True) + smoothing)).log()


def loss(model: Tensor, windows: Iterable[dict[str, Tensor]]) -> float:
    """The mean of ``-log p(label | token)`` over some batches, in nats a byte."""
    losses = [-model[batch["tokens"], batch["labels"]] for batch in windows]
    return float(torch.cat([part.flatten() for part in losses]).mean())
