"""Blocks on tokens: first stages, and functions of a float tensor ``(rows, tokens, width)``.

They return one of the same shape and dtype, so that they may stand in any order and in a scan.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtfunc import random
from mtfunc.testing.strategies.case import EXPERTS


def embed(p: Any, carry: None, batch: Any) -> Tensor:
    return F.embedding(batch["tokens"], p["weight"])


def project(p: Any, carry: None, batch: Any) -> Tensor:
    return batch["x"] @ p["w"]


def take(carry: None, batch: Any) -> Tensor:
    return batch["x"]


def linear(p: Any, x: Tensor, batch: Any) -> Tensor:
    return torch.tanh(x @ p["w"])


def layer_norm(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x + F.gelu(F.layer_norm(x, x.shape[-1:], p["scale"], p["shift"]) @ p["w"])


def rms_norm(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x + (F.rms_norm(x, x.shape[-1:], p["scale"]) @ p["w"]).sin() + p["shift"]


def _heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def attention(
    p: Any, x: Tensor, batch: Any, *, window: int | None = None, kv_heads: int = 2
) -> Tensor:
    """Causal attention of two heads; ``window`` counts keys seen, the token itself included."""
    q, k, v = _heads(x @ p["q"], 2), _heads(x @ p["k"], kv_heads), _heads(x @ p["v"], kv_heads)
    place = torch.arange(x.shape[1], device=x.device)
    back = place[:, None] - place
    seen = None if window is None else (back >= 0) & (back < window)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, is_causal=window is None, enable_gqa=kv_heads < 2
    )
    return x + out.transpose(1, 2).flatten(2) @ p["o"]


def gated(p: Any, x: Tensor, batch: Any) -> Tensor:
    # Without a norm it squares what it gets, and a few of them overflow.
    gate, value = (F.rms_norm(x, x.shape[-1:]) @ p["in"]).chunk(2, -1)
    return x + (F.silu(gate) * value) @ p["out"]


def experts(p: Any, x: Tensor, batch: Any) -> Tensor:
    scores = (x @ p["router"] + p["bias"]).softmax(-1)
    weights = scores * F.one_hot(scores.argmax(-1), EXPERTS).to(x.dtype)
    return x + torch.einsum("rte,rtd,edf->rtf", weights, x, p["w"])


def routed(p: Any, x: Tensor, batch: Any) -> Tensor:
    """Tokens are gathered by expert, so shapes inside depend on values."""
    flat, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
    for number, expert in enumerate(p["experts"]):
        rows = (batch["route"].flatten() == number).nonzero().squeeze(1)
        out = out.index_add(0, rows, torch.tanh(flat[rows] @ expert["w"]))
    return x + out.view_as(x)


def recurrent(p: Any, x: Tensor, batch: Any) -> Tensor:
    state, states = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        state = torch.tanh(token + state @ p["w"])
        states.append(state)
    return torch.stack(states, 1)


def convolution(p: Any, x: Tensor, batch: Any) -> Tensor:
    past = F.pad(x.transpose(1, 2), (2, 0))
    mixed = F.conv1d(past, p["depthwise"], groups=x.shape[-1])
    return x + F.conv1d(mixed, p["pointwise"]).transpose(1, 2)


def odd_leaves(p: Any, x: Tensor, batch: Any) -> Tensor:
    factor = p["gain"] + p["empty"].sum() + p["table"][1] * p["flag"]
    return torch.tanh(x @ p["w"] * factor)


def mixed_dtypes(p: Any, x: Tensor, batch: Any) -> Tensor:
    return ((x @ p["w"]).float() * p["scale"]).sin().to(x.dtype)


def bilinear(p: Any, q: Any, x: Tensor, batch: Any) -> Tensor:
    return torch.tanh(x @ p["w"] @ q["w"]) + x @ p["w"].T


def identity(x: Tensor, batch: Any) -> Tensor:
    return x


def dropout(p: Any, x: Tensor, batch: Any, *, key: Tensor) -> Tensor:
    return random.dropout(key, 0.3, torch.tanh(x @ p["w"]))


def _report(x: Tensor) -> dict[str, Any]:
    return {"mean": x.abs().mean(), "rows": x.shape[0]}


def monitored(p: Any, x: Tensor, batch: Any) -> tuple[Tensor, Any]:
    return torch.sin(x @ p["w"]), _report(x)


def noisy(p: Any, x: Tensor, batch: Any, *, key: Tensor) -> tuple[Tensor, Any]:
    x = torch.sin(x @ p["w"]) + random.normal(key, x.shape, dtype=x.dtype)
    return x, _report(x)
