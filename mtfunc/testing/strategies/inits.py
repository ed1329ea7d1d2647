"""The parameters of blocks: ``init(normal, width)`` makes one subtree."""

from __future__ import annotations

from typing import Any

import torch

from mtfunc.testing.strategies.case import EXPERTS, VOCABULARY, Normal


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
