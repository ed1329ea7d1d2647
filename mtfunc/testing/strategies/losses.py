"""Losses: a program's last stage; it gets ``None`` for the carry where it stands alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtfunc.loss import Mean


def _tokens(p: Any, x: Tensor | None, batch: Any) -> tuple[Tensor, Tensor]:
    x = batch["x"] if x is None else x
    labels = batch["labels"].flatten()
    logits = (x @ p["weight"].T).flatten(0, 1)
    return F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()


def cross_entropy(p: Any, x: Tensor | None, batch: Any) -> Mean:
    return Mean(*_tokens(p, x, batch))


def mean_square(x: Tensor | None, batch: Any) -> Tensor:
    return ((batch["x"] if x is None else x) ** 2).mean()


def counted(x: Tensor | None, batch: Any) -> Mean:
    counts = batch["labels"] != -100
    x = batch["x"] if x is None else x
    return Mean(torch.where(counts[..., None], x**3, 0).sum(), counts.sum())


def mixed(p: Any, c: Any, batch: Any) -> Mean:
    x = None if c is None else c["x"]
    penalty = c["penalty"] if c is not None and "penalty" in c else p["weight"].abs().sum()
    return Mean(*_tokens(p, x, batch)) + 0.1 * Mean(penalty, batch["x"].shape[0]) + 2.0 * penalty
