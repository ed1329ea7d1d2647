"""The library of blocks that random programs are made of.

A token block maps ``x``, a float tensor ``(rows, tokens, width)``, to another of the same shape
and dtype. A whole-carry block maps a dict that holds ``"x"`` and what earlier blocks put there; it
copes with what is absent, so that blocks may stand in any order. Batches have ``tokens``,
``labels`` and ``route``, int64 ``(rows, tokens)``, and ``x``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtfunc import random
from mtfunc.loss import Mean
from mtfunc.testing.strategies.case import VOCABULARY, Block, Normal

EXPERTS = 3
"""How many experts a mixture has; no token goes to the last of them."""


# Parameters: init(normal, width)


def vocabulary(normal: Normal, width: int) -> Any:
    return {"weight": normal(VOCABULARY, width)}


def square(normal: Normal, width: int) -> Any:
    return {"w": normal(width, width)}


def affine(normal: Normal, width: int) -> Any:
    return {"scale": 1 + normal(width), "w": normal(width, width), "shift": normal(width)}


def projections(normal: Normal, width: int) -> Any:
    return {name: normal(width, width) for name in ("q", "k", "v", "o")}


def grouped_projections(normal: Normal, width: int) -> Any:
    half = width // 2
    return {
        "q": normal(width, width),
        "k": normal(width, half),
        "v": normal(width, half),
        "o": normal(width, width),
    }


def gates(normal: Normal, width: int) -> Any:
    return {"in": normal(width, 4 * width), "out": normal(2 * width, width)}


def stacked_experts(normal: Normal, width: int) -> Any:
    bias = torch.tensor([0.0, 0.0, -1e4]).to(normal(1).dtype)
    return {"router": normal(width, EXPERTS), "bias": bias, "w": normal(EXPERTS, width, width)}


def listed_experts(normal: Normal, width: int) -> Any:
    return {"experts": [{"w": normal(width, width)} for _ in range(EXPERTS)]}


def kernels(normal: Normal, width: int) -> Any:
    return {"depthwise": normal(width, 1, 3), "pointwise": normal(width, width, 1)}


def odd(normal: Normal, width: int) -> Any:
    return {
        "gain": 1 + normal(),
        "empty": normal(0, 3),
        "table": torch.tensor([2, 1, 3]),
        "flag": torch.tensor(True),
        "nothing": None,
        "unused": normal(5),
        "w": normal(width, width),
    }


def two_dtypes(normal: Normal, width: int) -> Any:
    return {"scale": torch.linspace(0.5, 1.5, width), "w": normal(width, width)}


def zeros(normal: Normal, width: int) -> Any:
    return {"zero": normal(2) * 0, "w": normal(width)}


# First stages: the carry is None


def embed(p: Any, carry: None, batch: Any) -> Tensor:
    return F.embedding(batch["tokens"], p["weight"])


def project(p: Any, carry: None, batch: Any) -> Tensor:
    return batch["x"] @ p["w"]


def take(carry: None, batch: Any) -> Tensor:
    return batch["x"]


# Token blocks


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
    gate, value = (x @ p["in"]).chunk(2, -1)
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


# Whole-carry blocks


def remember(p: Any, c: Any, batch: Any) -> Any:
    """The end of an encoder: its output stays in the carry and the decoder starts anew."""
    return c | {"memory": c["x"], "x": batch["x"] @ p["w"]}


def cross(p: Any, c: Any, batch: Any) -> Any:
    memory = c.get("memory", c["x"])
    weights = torch.softmax(c["x"] @ memory.transpose(1, 2), -1)
    return c | {"x": torch.tanh(c["x"] @ p["w"] + weights @ memory)}


def forget(c: Any, batch: Any) -> Any:
    return {name: leaf for name, leaf in c.items() if name in ("x", "penalty")}


def push(p: Any, c: Any, batch: Any) -> Any:
    """One stage on the way down of a U: the carry grows by a skip."""
    return c | {"x": torch.tanh(c["x"] @ p["w"]), "skips": (c["x"], *c.get("skips", ()))}


def pop(p: Any, c: Any, batch: Any) -> Any:
    """One stage on the way up of a U: the newest skip is taken off and added."""
    skip, *rest = c.get("skips", ()) or (c["x"],)
    return c | {"x": torch.tanh(c["x"] @ p["w"]) + skip, "skips": tuple(rest)}


def extras(c: Any, batch: Any) -> Any:
    x = c["x"]
    return c | {
        "count": torch.ones((), dtype=torch.int64, device=x.device),
        "mask": x > 0,
        "nothing": None,
        "total": x.sum(),
        "empty": x[:, :0],
    }


def tick(p: Any, c: Any, batch: Any) -> Any:
    x = torch.tanh(c["x"] @ p["w"])
    if "count" not in c:
        return c | {"x": x}
    x = torch.where(c["mask"], x * c["count"], x + c["empty"].sum())
    return c | {"x": x, "count": c["count"] + 1, "mask": ~c["mask"], "total": c["total"] + x.mean()}


def totalled(c: Any, batch: Any) -> Any:
    return c | {"x": c["x"] * c["total"].tanh() if "total" in c else c["x"]}


def alias(c: Any, batch: Any) -> Any:
    """One tensor twice, and views of it in other layouts."""
    x = c["x"]
    return c | {"again": x, "turned": x.transpose(1, 2), "last": x[:, -1:].expand_as(x)}


def merge(p: Any, c: Any, batch: Any) -> Any:
    x = torch.tanh(c["x"] @ p["w"])
    if "again" in c:
        x = x + c["again"].exp() * c["last"] + c["turned"].transpose(1, 2).sin()
    return c | {"x": x}


def penalize(p: Any, c: Any, batch: Any) -> Any:
    x = torch.tanh(c["x"] @ p["w"])
    return c | {"x": x, "penalty": c.get("penalty", 0) + (x**2).sum()}


def abandon(p: Any, c: Any, batch: Any) -> Any:
    """A leaf that nothing uses and whose derivative is infinite."""
    return c | {"x": c["x"] * p["w"], "unused": torch.sqrt(p["zero"]).sum()}


# Losses


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


BLOCKS: dict[str, Block] = {
    "embed": Block(embed, vocabulary, role="start"),
    "project": Block(project, square, role="start"),
    "take": Block(take, role="start"),
    "linear": Block(linear, square),
    "layer_norm": Block(layer_norm, affine, group="norms"),
    "rms_norm": Block(rms_norm, affine, group="norms"),
    "attention": Block(attention, projections, group="attention"),
    "windowed": Block(attention, projections, static={"window": 2}, group="attention"),
    "grouped": Block(attention, grouped_projections, static={"kv_heads": 1}, group="attention"),
    "gated": Block(gated, gates),
    "experts": Block(experts, stacked_experts),
    "routed": Block(routed, listed_experts, by_value=True),
    "recurrent": Block(recurrent, square),
    "convolution": Block(convolution, kernels),
    "odd_leaves": Block(odd_leaves, odd),
    "mixed_dtypes": Block(mixed_dtypes, two_dtypes),
    "bilinear": Block(bilinear, square, reads=2),
    "identity": Block(identity),
    "dropout": Block(dropout, square, rng=True),
    "monitored": Block(monitored, square, aux="report", group="aux"),
    "noisy": Block(noisy, square, rng=True, aux="report", group="aux"),
    "remember": Block(remember, square, whole=True, keeps=False, group="memory"),
    "cross": Block(cross, square, whole=True, group="memory"),
    "forget": Block(forget, whole=True, keeps=False, group="memory"),
    "push": Block(push, square, whole=True, keeps=False, group="skips"),
    "pop": Block(pop, square, whole=True, keeps=False, group="skips"),
    "extras": Block(extras, whole=True, keeps=False, group="extras"),
    "tick": Block(tick, square, whole=True, group="extras"),
    "totalled": Block(totalled, whole=True, group="extras"),
    "alias": Block(alias, whole=True, keeps=False, group="alias"),
    "merge": Block(merge, square, whole=True, group="alias"),
    "penalize": Block(penalize, square, whole=True, keeps=False),
    "abandon": Block(abandon, zeros, whole=True, keeps=False, absent=True),
    "cross_entropy": Block(cross_entropy, vocabulary, role="loss"),
    "mean_square": Block(mean_square, role="loss"),
    "counted": Block(counted, role="loss"),
    "mixed": Block(mixed, vocabulary, role="loss", whole=True),
}
"""Blocks by name, in the order in which a failure shrinks: the plainest first."""
