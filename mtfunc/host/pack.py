"""Packing: each unit's leaves side by side in one flat buffer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mtfunc import _tree
from mtfunc._base import Leaves, Params
from mtfunc.host.units import units

ALIGN = 64
"""Bytes: a cache line; every leaf starts at one."""


def pack(params: Params, *, pin: bool = False) -> Params:
    """The same pytree, each unit's leaves being views of one flat aligned host buffer.

    Args:
        params: a pytree of tensors; dtypes may be mixed, leaves 0-dim, zero-size or strided.
        pin: whether the buffers are page-locked, for copies that run beside computation.

    Returns:
        New containers and contiguous leaves that are equal to the old, detached from any graph.

    Raises:
        RuntimeError: ``pin`` without a CUDA device.

    Example:
        >>> import torch, mtfunc as mt
        >>> packed = mt.pack({"a": {"w": torch.ones(3), "b": torch.zeros(2)}})
        >>> packed["a"]["w"].untyped_storage().data_ptr() == (
        ...     packed["a"]["b"].untyped_storage().data_ptr())
        True
    """
    leaves, spec = _tree.flatten(params)
    packed: Leaves = {}
    for paths in units(params).values():
        packed.update(pack_unit({path: leaves[path] for path in paths}, pin=pin))
    return _tree.unflatten(spec, [packed[path] for path in leaves])


def pack_(params: Params, *, pin: bool = False) -> Params:
    """Packs in place: leaves are replaced in the caller's dicts and lists, unit by unit.

    The originals are let go as it proceeds, so at most one unit exists twice where nobody else
    holds them. A pytree that holds a tuple, or one container in two places, is packed anew.
    """
    if not _is_mutable(params):
        return pack(params, pin=pin)
    for paths in units(params).values():
        leaves = {path: _tree.get(params, path) for path in paths}
        for path, leaf in pack_unit(leaves, pin=pin).items():
            _replace(params, path, leaf)
    return params


def pack_unit(leaves: Leaves, *, pin: bool = False) -> Leaves:
    """The same leaves as views of one flat buffer."""
    sizes = [-(-leaf.numel() * leaf.itemsize // ALIGN) * ALIGN for leaf in leaves.values()]
    flat = torch.empty(sum(sizes) + ALIGN, dtype=torch.uint8, pin_memory=pin)
    start = -flat.data_ptr() % ALIGN
    packed: Leaves = {}
    for (path, leaf), size in zip(leaves.items(), sizes):
        nbytes = leaf.numel() * leaf.itemsize
        view = flat[start : start + nbytes].view(leaf.dtype).view(leaf.shape)
        packed[path] = view.copy_(leaf.detach())
        start += size
    return packed


def _is_mutable(node: Any, seen: set[int] | None = None) -> bool:
    """Whether leaves can be replaced in place: dicts and lists only, each of them once."""
    seen = set() if seen is None else seen
    parts = _tree.children_of(node) if node is not None else None
    if parts is None:
        return True
    if type(node) not in (dict, list) or id(node) in seen:
        return False
    seen.add(id(node))
    return all(_is_mutable(child, seen) for child in parts[1])


def _replace(params: Any, path: str, leaf: Tensor) -> None:
    *way, last = path.split("/")
    node = _tree.get(params, "/".join(way)) if way else params
    if isinstance(node, list):
        node[int(last)] = leaf
    else:
        node[next(key for key in node if str(key) == last)] = leaf


def nbytes(trees: Iterable[Any]) -> int:
    """Bytes of all tensors in some pytrees."""
    return sum(
        leaf.numel() * leaf.itemsize for tree in trees for leaf in _tree.flatten(tree)[0].values()
    )
