"""A simulated device that is as unkind as a real one may be.

It executes the lowered queues over real arenas, in one thread and from a seed. Streams take turns
as far as their waits allow, for a while mostly in one random order of precedence, so that some
run far ahead and others starve, then in another; a copy lands piece by
piece while other streams run on; freed bytes and bytes not yet written hold NaN (all bits set);
and freed memory is used again at once, since addresses are the schedule's. A wait that is missing
shows as a wrong number, a NaN or a read of a buffer that holds nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mtfunc.schedule.operation import Buffer, Wait

POISON = 0xFF
"""All bits set: NaN in every floating-point type, -1 in integers."""


class Sim:
    """A device in host memory whose streams run in a random order.

    Args:
        seed: decides every interleaving.
    """

    unified = False

    def __init__(self, seed: int = 0):
        self.random = random.Random(seed)
        self.arenas: dict[str, Tensor] = {}
        self.layouts: dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = {}
        self.recorded: set[Any] = set()
        self.landing: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def open(self, sizes: Mapping[str, int]) -> None:
        """Allocates the arenas, full of NaN."""
        self.arenas = {
            name: torch.full((size,), POISON, dtype=torch.uint8) for name, size in sizes.items()
        }

    def read(self, buffer: Buffer) -> Tensor:
        """A view of the arena, in the layout in which it was written last.

        Raises:
            RuntimeError: the buffer was never written, or freed.
        """
        if buffer.name not in self.layouts:
            raise RuntimeError(f"buffer {buffer.name!r} is read and holds nothing")
        # With a version counter of its own: autograd must not take a write anywhere else in the
        # arena for a change of what a kept pullback has saved.
        return self._view(buffer).data

    def write(self, buffer: Buffer, tensor: Tensor) -> None:
        """Copies a tensor into the arena."""
        self._lay_out(buffer, tensor)
        for target, source in _pieces(self._view(buffer), tensor, 1):
            target.copy_(source)

    def copy(self, stream: str, target: Tensor | Buffer, source: Tensor | Buffer) -> None:
        """Issues a copy, which lands in pieces before the stream's next item."""
        given = source if isinstance(source, Tensor) else self.read(source)
        if isinstance(target, Buffer):
            self._lay_out(target, given)
            target = self._view(target)
        self.landing.setdefault(stream, []).extend(_pieces(target, given, 2))

    def free(self, buffer: Buffer) -> None:
        """Poisons the bytes."""
        self.layouts.pop(buffer.name, None)
        self.arenas[buffer.arena][buffer.start : buffer.start + buffer.nbytes].fill_(POISON)

    def record(self, stream: str, event: Any) -> None:
        """It has happened: the stream's copies have landed by now."""
        self.recorded.add(event)

    def ready(self, stream: str, event: Any) -> bool:
        """Whether it has happened."""
        return event in self.recorded

    def drive(self, queues: Mapping[str, list[Any]], issue: Callable[[str, Any], bool]) -> None:
        """Streams take turns, some far ahead of others.

        Raises:
            RuntimeError: every stream waits for another.
        """
        self.recorded.clear()
        self.landing.clear()
        rest = {stream: list(reversed(queue)) for stream, queue in queues.items()}
        order, turns = list(rest), 0
        while any(rest.values()) or any(self.landing.values()):
            able = [s for s in rest if self.landing.get(s) or self._able(rest[s])]
            if not able:
                stuck = ", ".join(f"{s} for {queue[-1][1]}" for s, queue in rest.items() if queue)
                raise RuntimeError(f"every stream waits: {stuck}")
            if turns == 0:
                self.random.shuffle(order)
                turns = self.random.choice([5, 50, 500])
            turns -= 1
            hasty = self.random.random() < 0.9
            stream = min(able, key=order.index) if hasty else self.random.choice(able)
            if self.landing.get(stream):
                target, source = self.landing[stream].pop(0)
                target.copy_(source)
            else:
                issue(stream, rest[stream].pop())

    def close(self) -> None:
        """Lets go of the arenas."""
        self.arenas.clear()
        self.layouts.clear()

    def _able(self, queue: list[Any]) -> bool:
        if not queue:
            return False
        step, item = queue[-1]
        return not isinstance(item, Wait) or step.passed(item, self.recorded)

    def _lay_out(self, buffer: Buffer, tensor: Tensor) -> None:
        stride = tensor.stride()
        if _extent(tensor.shape, stride) * tensor.element_size() > buffer.nbytes:
            stride = torch.empty(tensor.shape, device="meta").stride()
        nbytes = _extent(tensor.shape, stride) * tensor.element_size()
        assert nbytes <= buffer.nbytes, f"{buffer.name} takes {buffer.nbytes} bytes, given {nbytes}"
        self.layouts[buffer.name] = (tuple(tensor.shape), stride, tensor.dtype)

    def _view(self, buffer: Buffer) -> Tensor:
        shape, stride, dtype = self.layouts[buffer.name]
        bytes_ = self.arenas[buffer.arena][buffer.start : buffer.start + buffer.nbytes]
        whole = bytes_[: buffer.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
        return whole.as_strided(shape, stride, whole.storage_offset())


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last of a strided layout."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride))


def _pieces(target: Tensor, source: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    """The same copy in up to ``count`` pieces; dimensions that are repeats are copied once."""
    for dim, step in enumerate(target.stride()):
        if step == 0 and target.shape[dim] > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    if count == 1 or target.dim() == 0 or target.shape[0] < 2:
        return [(target, source)]
    half = target.shape[0] // 2
    return [(target[:half], source[:half]), (target[half:], source[half:])]
