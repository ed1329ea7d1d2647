"""How every optimizer walks the leaves of a unit: matched by path, then flat, in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from mtfunc._base import Leaves

Row = tuple[Tensor, ...]
"""One leaf's ``(param, grad, *moments)``."""

Tensors = list[Tensor]
"""What a fused kernel takes: many leaves' parameters, or gradients, or moments of one kind."""

_BLOCK = 2**20
"""Elements of a block: small enough for its scratch to stay in cache, large enough for threads to
wait for each other seldom. A multiple of every vector width, so that blocks round as the whole
leaf does."""


def zeros(where: str, params: Leaves, *kinds: str) -> dict[str, Leaves]:
    """Fresh moments of each kind: zeros, contiguous, in each parameter's shape and dtype.

    Raises:
        TypeError: a parameter is not floating.
    """
    for path, param in params.items():
        if not param.is_floating_point():
            raise TypeError(
                f"mt.{where}: params[{path!r}]: expected a floating tensor, got {param.dtype}; "
                "leave integer leaves out, they have no gradient"
            )
    return {
        kind: {
            path: torch.zeros(param.shape, dtype=param.dtype, device=param.device)
            for path, param in params.items()
        }
        for kind in kinds
    }


def match(where: str, params: Leaves, **others: Mapping[str, Tensor | None]) -> list[Row]:
    """Matches leaves by path: the gradients come first, then the moments.

    Raises:
        KeyError: a leaf has no gradient or no moment.
        ValueError: a gradient or a moment has another shape than its parameter.
        TypeError: a moment has another dtype than its parameter.
    """
    return [
        (param, *(_matched(where, path, param, name, others[name]) for name in others))
        for path, param in params.items()
    ]


def _matched(
    where: str, path: str, param: Tensor, name: str, leaves: Mapping[str, Tensor | None]
) -> Tensor:
    leaf = leaves.get(path)
    if leaf is None:
        raise KeyError(
            f"mt.{where}: {name}[{path!r}]: expected a tensor for every path of params, got none; "
            "leave frozen leaves out of params, as of init's"
        )
    if leaf.shape != param.shape:
        raise ValueError(
            f"mt.{where}: {name}[{path!r}]: expected the parameter's shape {tuple(param.shape)}, "
            f"got {tuple(leaf.shape)}"
        )
    if name != "grads" and leaf.dtype != param.dtype:
        raise TypeError(
            f"mt.{where}: {name}[{path!r}]: expected the parameter's dtype {param.dtype}, got "
            f"{leaf.dtype}; convert the moments with the parameters, or begin with init's"
        )
    return leaf


def update_(rows: Iterable[Row], kernel: Callable[..., None]) -> None:
    """Calls a fused kernel on many leaves at a time: ``kernel(params, grads, *moments)``, in lists.

    A kernel takes lists of contiguous tensors of one dtype and device. Leaves that are not so go
    to it block by block.
    """
    together: dict[tuple[torch.dtype, torch.device], list[Row]] = {}
    apart = []
    for row in rows:
        if _alike(row):
            together.setdefault((row[0].dtype, row[0].device), []).append(row)
        else:
            apart.append(row)
    for group in together.values():
        kernel(*(list(column) for column in zip(*group)))
    # The kernel makes a single pass over its scratch, so that blocks may outgrow the cache: on a
    # busy machine fewer of them, after which threads wait for each other, are worth more.
    for block in blocks(apart, times=4):
        kernel(*([leaf] for leaf in block))


def blocks(rows: Iterable[Row], times: int = 1) -> Iterator[Row]:
    """Yields flat blocks of one dtype: all but the gradient, which is for reading, are views.

    Converting gradients block by block through one scratch keeps the update near memory bandwidth.
    Leaves that are not contiguous are updated in a copy and written back.

    Args:
        rows: the leaves.
        times: the length of a block in units of ``_BLOCK``.
    """
    size, scratch = times * _BLOCK, torch.empty(0)
    for row in rows:
        param, grad, *moments = row
        owned, convert = (param, *moments), not _alike(row)
        flat = [leaf.contiguous().view(-1) for leaf in owned]
        source = grad.reshape(-1)
        need = min(param.numel(), size) if convert else 0
        if (scratch.dtype, scratch.device) != (param.dtype, param.device) or len(scratch) < need:
            scratch = torch.empty(need, dtype=param.dtype, device=param.device)
        for start in range(0, param.numel(), size):
            first, *rest = (leaf[start : start + size] for leaf in flat)
            piece = source[start : start + size]
            yield first, scratch[: len(first)].copy_(piece) if convert else piece, *rest
        for leaf, updated in zip(owned, flat):
            if not leaf.is_contiguous():
                leaf.copy_(updated.view(leaf.shape))


def _alike(row: Row) -> bool:
    """Whether all are contiguous, of one dtype and on one device."""
    param = row[0]
    return all(
        leaf.is_contiguous() and leaf.dtype == param.dtype and leaf.device == param.device
        for leaf in row
    )
