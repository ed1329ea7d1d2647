"""The processor as the device: parameters are used where they lie and outputs are taken over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from mtfunc.schedule.operation import Buffer, Record, Run


class Cpu:
    """Runs the queues in the schedule's own order, in the calling thread.

    Two threads that compute on the same cores only get into each other's way: an update next to
    a matrix product is slower than one after the other. So streams take turns.
    """

    unified = True

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}
        self.recorded: set[Any] = set()

    def open(self, sizes: Mapping[str, int]) -> None:
        """Nothing: tensors are held where torch made them."""

    def read(self, buffer: Buffer) -> Tensor:
        """The tensor that was written."""
        return self.held[buffer.name]

    def write(self, buffer: Buffer, tensor: Tensor) -> None:
        """Takes the tensor over."""
        self.held[buffer.name] = tensor

    def copy(self, stream: str, target: Tensor | Buffer, source: Tensor | Buffer) -> None:
        """Never called: a unified schedule holds no copies."""
        raise AssertionError(f"copy on {stream} where the host is the device")

    def free(self, buffer: Buffer) -> None:
        """Lets go of the tensor."""
        self.held.pop(buffer.name, None)

    def record(self, stream: str, event: Any) -> None:
        """It has happened."""
        self.recorded.add(event)

    def ready(self, stream: str, event: Any) -> bool:
        """Whether it has happened; in the schedule's order it always has."""
        return event in self.recorded

    def drive(self, queues: Mapping[str, list[Any]], issue: Callable[[str, Any], bool]) -> None:
        """In the order of operations: each stream's waits come just before what waits."""
        self.recorded.clear()
        for stream, entry in in_order(queues):
            done = issue(stream, entry)
            assert done, f"stream {stream} is not in the schedule's order"

    def close(self) -> None:
        """Lets go of all tensors."""
        self.held.clear()


def in_order(queues: Mapping[str, list[Any]]) -> list[tuple[str, Any]]:
    """All entries ``(step, item)`` of all queues, in the order of the operations they belong to."""
    keyed = []
    for stream, queue in queues.items():
        steps = 0
        waiting: list[Any] = []
        for entry in queue:
            item = entry[1]
            waiting.append(entry)
            if isinstance(item, Run):
                place = (entry[0].number, item.operation)
            elif isinstance(item, Record):
                place = (entry[0].number, item.event)
            else:
                continue
            keyed += [(place, steps + i, stream, e) for i, e in enumerate(waiting)]
            steps, waiting = steps + len(waiting), []
    keyed.sort(key=lambda row: row[:2])
    return [(stream, entry) for _, _, stream, entry in keyed]
