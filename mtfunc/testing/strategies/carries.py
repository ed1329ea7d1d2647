"""Blocks on the whole carry: a dict that holds ``"x"`` and what earlier blocks put there.

They cope with what is absent, so that they may stand in any order.
"""

from __future__ import annotations

from typing import Any

import torch


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
