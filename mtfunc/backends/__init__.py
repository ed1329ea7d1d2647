"""Backends: the dozen calls that run a lowered schedule on a device.

A backend keeps the bytes of buffers, moves them, and decides whose turn it is. It knows nothing
of programs: :mod:`mtfunc.run` tells it what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from mtfunc.schedule.operation import Buffer, Item


class Backend(Protocol):
    """What a device has to offer.

    Attributes:
        unified: whether the host is the device, so that parameters are used where they lie.
    """

    unified: bool

    def open(self, sizes: Mapping[str, int]) -> None:
        """Provides the planned arenas, ``"device"`` and ``"host"``, of these sizes in bytes."""

    def read(self, buffer: Buffer) -> Tensor:
        """The tensor that a buffer of a planned arena holds now."""

    def write(self, buffer: Buffer, tensor: Tensor) -> None:
        """Puts a tensor, layout included, where the buffer is, or takes it over."""

    def copy(self, stream: str, target: Tensor | Buffer, source: Tensor | Buffer) -> None:
        """Copies on a stream; tensors are the caller's, buffers lie in planned arenas."""

    def free(self, buffer: Buffer) -> None:
        """Nothing may read the buffer any more."""

    def record(self, stream: str, event: Any) -> None:
        """The event happens when the stream has done all that was issued to it before."""

    def ready(self, stream: str, event: Any) -> bool:
        """Whether the stream may go on; a device may make the stream itself wait and say yes."""

    def drive(self, queues: Mapping[str, list[Any]], issue: Callable[[str, Any], bool]) -> None:
        """Issues every item of every queue, in an order of its choice between streams.

        ``issue(stream, item)`` is false where the item is a wait that is not over.
        """

    def close(self) -> None:
        """Lets go of all memory."""


def open_backend(device: str) -> Backend:
    """The backend for a device string.

    Raises:
        ValueError: there is no such device.
    """
    from mtfunc.backends.cpu import Cpu
    from mtfunc.backends.sim import Sim

    if device == "cpu":
        return Cpu()
    name, _, seed = device.partition(":") if isinstance(device, str) else (device, "", "")
    if name == "sim" and (not seed or seed.isdecimal()):
        return Sim(int(seed or 0))
    raise ValueError(f"device {device!r}; expected 'cpu', 'sim' (a simulated device) or 'sim:SEED'")


def check_device(device: str) -> str:
    """The device string, if there is such a device."""
    open_backend(device).close()
    return device


__all__ = ["Backend", "Item", "check_device", "open_backend"]
