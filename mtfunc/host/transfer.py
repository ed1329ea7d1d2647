"""Moving pytrees by hand between the host and a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtfunc import _tree
from mtfunc.backends import check_device


@dataclass(frozen=True, slots=True)
class Transfer:
    """A move under way on a stream.

    Attributes:
        stream: the stream that it was issued on.
    """

    stream: str
    _tree: Any

    def wait(self) -> Any:
        """The moved pytree, once it has arrived."""
        return self._tree


def device_put(tree: Any, device: str, *, stream: str = "h2d") -> Transfer:
    """Moves a pytree of tensors to a device.

    Args:
        tree: any pytree; ``None`` is an empty subtree.
        device: ``"cpu"``, where the leaves already are and stay, or ``"sim"``, whose memory is
            apart.
        stream: the name of the stream that copies.

    Returns:
        A :class:`Transfer`; its ``wait()`` gives the pytree with detached leaves.

    Raises:
        ValueError: there is no such device.

    Example:
        >>> import torch, mtfunc as mt
        >>> mt.device_put({"x": torch.ones(2)}, "sim").wait()
        {'x': tensor([1., 1.])}
    """
    apart = check_device(device) != "cpu"
    moved = _tree.map_leaves(lambda _, x: x.detach().clone() if apart else x.detach(), tree)
    return Transfer(stream, moved)


def device_get(tree: Any, *, stream: str = "d2h") -> Transfer:
    """Moves a pytree of tensors to host memory; leaves that are there already stay.

    Args:
        tree: any pytree.
        stream: the name of the stream that copies.

    Returns:
        A :class:`Transfer`; its ``wait()`` gives the pytree with detached leaves.
    """
    return Transfer(stream, _tree.map_leaves(lambda _, leaf: leaf.detach().cpu(), tree))
