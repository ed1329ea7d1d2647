"""The vocabulary of schedules: buffers, operations, and the queues they are lowered to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mtfunc.pullback import Wanted
from mtfunc.trace import Aval

STREAMS = ("h2d", "compute", "d2h", "host")
"""Where operations run: copies to the device, the device, copies from it, the processor."""

COPIES = ("load", "save", "fetch", "store")
"""Kinds that copy ``reads["source"]`` to ``writes["target"]``, leaf by leaf."""


class Buffer(NamedTuple):
    """One leaf's bytes in an arena.

    Attributes:
        name: unique in its schedule, such as ``"slot/layers/3/wq@5"``.
        arena: ``"device"`` and ``"host"`` are planned, with fixed addresses; the others are the
            caller's tensors, bound at each step: ``"params/UNIT"``, ``"moments/UNIT"``,
            ``"batch"``, ``"out"``.
        start: the first byte in the arena.
        nbytes: how many bytes; accesses conflict where byte ranges overlap.
        category: what the ledger counts it as.
        aval: its shape, dtype and layout; ``None`` for a whole unit's moments.
    """

    name: str
    arena: str
    start: int
    nbytes: int
    category: str
    aval: Aval | None

    @property
    def stop(self) -> int:
        """One past the last byte. A zero-size leaf counts as one byte, to be ordered as others."""
        return self.start + max(self.nbytes, 1)


Roles = Mapping[str, tuple[Buffer, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One thing to do, with every buffer that it may touch.

    Attributes:
        index: its place in the schedule.
        kind: load, forward, save, loss, check, fetch, pullback, store, update or free.
        stream: one of ``STREAMS``; operations of a stream run one after the other.
        stage: the stage's number, where it has one.
        micro: the micro-batch's number, where it has one.
        label: what it is about, for people.
        reads: the buffers that it reads, by role.
        writes: the buffers that it writes, by role; one that grows in place is in both.
        keep: a forward that keeps its pullback, or the pullback that was kept.
        wanted: what takes part in a pullback.
    """

    index: int
    kind: str
    stream: str
    label: str
    stage: int | None = None
    micro: int | None = None
    reads: Roles = field(default_factory=dict)
    writes: Roles = field(default_factory=dict)
    keep: bool = False
    wanted: Wanted | None = None

    def accesses(self) -> Iterator[tuple[Buffer, bool]]:
        """Every buffer that it touches, with whether it writes it."""
        for roles, write in ((self.reads, False), (self.writes, True)):
            for buffers in roles.values():
                for buffer in buffers:
                    yield buffer, write

    def __str__(self) -> str:
        micro = "" if self.micro is None else f" micro {self.micro}"
        return f"{self.index} {self.kind} {self.label}{micro} ({self.stream})"


class Wait(NamedTuple):
    """Go no further until that operation's event is recorded, ``lag`` steps ago."""

    event: int
    lag: int


class Run(NamedTuple):
    """Run the operation with this index."""

    operation: int


class Record(NamedTuple):
    """Record that the operation with this index, and all before it in the queue, have run."""

    event: int


Item = Wait | Run | Record


class Lowered(NamedTuple):
    """Per-stream queues: what a backend executes, step after step."""

    queues: Mapping[str, tuple[Item, ...]]

    def waits(self) -> list[tuple[str, int]]:
        """The place of every wait: its stream and its position in the queue."""
        return [
            (stream, i)
            for stream, queue in self.queues.items()
            for i, item in enumerate(queue)
            if isinstance(item, Wait)
        ]

    def without(self, stream: str, position: int) -> Lowered:
        """The same queues less one item: a sabotage for tests."""
        queue = self.queues[stream]
        return Lowered({**self.queues, stream: queue[:position] + queue[position + 1 :]})
