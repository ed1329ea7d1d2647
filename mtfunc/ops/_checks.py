"""Checks that several operations share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute and accumulate in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def expect_shape(where: str, name: str, x: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """Raises ``ValueError`` unless ``x`` has this shape."""
    if tuple(x.shape) != shape:
        raise ValueError(
            f"mt.ops.{where}: {name} has shape {tuple(x.shape)}; expected {shape}, {meaning}"
        )


def expect_ndim(where: str, name: str, x: Tensor, ndim: int, meaning: str) -> None:
    """Raises ``ValueError`` unless ``x`` has so many axes."""
    if x.ndim != ndim:
        raise ValueError(
            f"mt.ops.{where}: {name} has shape {tuple(x.shape)}; expected {ndim} axes, {meaning}"
        )


def expect_floating(where: str, **tensors: Tensor | None) -> None:
    """Raises ``TypeError`` unless all have one floating dtype."""
    given = {name: x.dtype for name, x in tensors.items() if x is not None}
    dtypes = set(given.values())
    if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
        got = ", ".join(f"{name} {dtype}" for name, dtype in given.items())
        raise TypeError(f"mt.ops.{where}: got {got}; expected one floating dtype. Convert with .to")


def expect_integers(where: str, name: str, x: Tensor) -> None:
    """Raises ``TypeError`` unless ``x`` holds signed integers."""
    if x.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8):
        raise TypeError(
            f"mt.ops.{where}: {name} is {x.dtype}; expected int64. Convert it with .long()"
        )


def expect_positive(where: str, **numbers: float | None) -> None:
    """Raises ``ValueError`` unless each number is ``None`` or above 0."""
    for name, number in numbers.items():
        if number is not None and not number > 0:
            raise ValueError(
                f"mt.ops.{where}: {name} is {number}; expected a number above 0, or None"
            )


def expect_tokens(leaves: dict[str, Any], dim: int, where: str) -> int:
    """How many tokens the leaves of x have; raises ``ValueError`` where they differ."""
    sizes = {}
    for path, leaf in leaves.items():
        if not isinstance(leaf, Tensor) or leaf.ndim <= dim:
            got = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise ValueError(
                f"mt.ops.{where}: x at {path or 'the top'!r} has {got}; expected a tensor whose "
                f"dim {dim} is the tokens. What has no tokens belongs in params"
            )
        sizes[path] = leaf.shape[dim]
    if len(set(sizes.values())) != 1:
        got = ", ".join(f"{path or 'the top'!r} {n}" for path, n in sizes.items()) or "nothing"
        raise ValueError(
            f"mt.ops.{where}: x has on dim {dim}, the tokens: {got}; expected one number. What has "
            "no tokens belongs in params"
        )
    return next(iter(sizes.values()))


def expect_tile(where: str, part: Any, dim: int, length: int) -> None:
    """Raises ``ValueError`` unless a tile's function returned a plain tensor of its tokens."""
    if not isinstance(part, Tensor) or part.ndim <= dim or part.shape[dim] != length:
        got = f"shape {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
        raise ValueError(
            f"mt.ops.{where}: fn returned {got} for a tile of {length} tokens; expected dim "
            f"{dim} to be the tokens. fn must act on each token alone, without sums over them"
        )
    if part.requires_grad:
        raise ValueError(
            f"mt.ops.{where}: fn closes over a tensor that requires grad, whose gradient "
            "would be lost; pass it in params, or detach() it"
        )
