"""The order between operations: derived from byte ranges, lowered to waits, and proved.

Two operations conflict where their byte ranges overlap and one of them writes; the one that comes
first in the schedule must finish first. Nothing else orders streams. ``verify`` does not trust
``lower``: it executes the queues with vector clocks (Mattern 1989) and looks at every pair.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mtfunc.schedule.operation import STREAMS, Item, Lowered, Operation, Record, Run, Wait


def conflicts(operations: Sequence[Operation]) -> list[list[int]]:
    """For each operation, the earlier ones on other streams that it must follow.

    An access that a later write covers whole is left out: whoever conflicts with it conflicts
    with that write too, and the write already follows it.
    """
    live: dict[str, list[tuple[int, int, int, bool]]] = defaultdict(list)
    found: list[list[int]] = []
    for index, operation in enumerate(operations):
        before: set[int] = set()
        accesses = list(operation.accesses())
        for buffer, write in accesses:
            for start, stop, other, wrote in live[buffer.arena]:
                if (write or wrote) and start < buffer.stop and buffer.start < stop:
                    before.add(other)
        for buffer, write in accesses:
            entries = live[buffer.arena]
            if write:
                entries[:] = [
                    e for e in entries if not (buffer.start <= e[0] and e[1] <= buffer.stop)
                ]
            entries.append((buffer.start, buffer.stop, index, write))
        found.append([j for j in sorted(before) if operations[j].stream != operation.stream])
    return found


def lower(operations: Sequence[Operation]) -> Lowered:
    """Per-stream queues of waits, runs and records, with no wait that another implies.

    Two consecutive steps are laid one after the other and the second is kept, so that the
    queues also wait for what the step before may still be doing (``Wait.lag == 1``).
    """
    n = len(operations)
    twice = [*operations, *operations]
    knows: dict[str, dict[str, int]] = {stream: {} for stream in STREAMS}
    at_end: list[dict[str, int]] = []
    waits: list[list[int]] = []
    for index, (operation, before) in enumerate(zip(twice, conflicts(twice))):
        mine = knows[operation.stream]
        needed = []
        for other in reversed(before):
            if mine.get(twice[other].stream, -1) < other:
                needed.append(other)
                for stream, seen in at_end[other].items():
                    mine[stream] = max(mine.get(stream, -1), seen)
        waits.append(needed)
        mine[operation.stream] = index
        at_end.append(dict(mine))
    awaited = {other % n for needed in waits[n:] for other in needed}
    queues: dict[str, list[Item]] = {stream: [] for stream in STREAMS}
    for index, operation in enumerate(operations):
        queue = queues[operation.stream]
        queue += [Wait(other % n, 1 - other // n) for other in waits[n + index]]
        queue.append(Run(index))
        if index in awaited:
            queue.append(Record(index))
    return Lowered({stream: tuple(queue) for stream, queue in queues.items()})


class Hazard(NamedTuple):
    """Two conflicting operations that nothing orders, or a queue that cannot go on."""

    message: str
    first: int
    second: int


def verify(operations: Sequence[Operation], lowered: Lowered) -> list[Hazard]:
    """Proves that queues order every conflicting pair within and across two consecutive steps.

    Returns:
        The hazards; an empty list is a proof.
    """
    ends, hazards = _execute(operations, lowered)
    if hazards:
        return hazards
    n = len(operations)
    lanes = np.array([STREAMS.index(op.stream) for op in operations] * 2)
    table: dict[str, list[tuple[int, int, int, bool, str]]] = defaultdict(list)
    for step in range(2):
        for operation in operations:
            for buffer, write in operation.accesses():
                row = (buffer.start, buffer.stop, operation.index + step * n, write, buffer.name)
                table[buffer.arena].append(row)
    seen: set[tuple[int, int]] = set()
    for arena, rows in table.items():
        starts, stops, indices, writes = (np.array([row[i] for row in rows]) for i in range(4))
        for k, row in enumerate(rows):
            hit = (starts[:k] < row[1]) & (row[0] < stops[:k]) & (indices[:k] < row[2])
            others = indices[:k][hit & (writes[:k] | row[3])]
            lost = others[ends[row[2], lanes[others]] < others]
            for other in lost:
                pair = (int(other), row[2])
                if pair not in seen:
                    seen.add(pair)
                    hazards.append(_race(operations, arena, row[4], *pair))
    return hazards


def _execute(operations: Sequence[Operation], lowered: Lowered) -> tuple[np.ndarray, list[Hazard]]:
    """For every operation of two steps, the last one of each stream that it surely follows."""
    n = len(operations)
    ends = np.full((2 * n, len(STREAMS)), -1)
    clocks = {stream: np.full(len(STREAMS), -1) for stream in STREAMS}
    recorded: dict[int, np.ndarray] = {}
    todo = {
        stream: [(step, item) for step in range(2) for item in queue][::-1]
        for stream, queue in lowered.queues.items()
    }
    moved = True
    while moved:
        moved = False
        for stream, rest in todo.items():
            while rest:
                step, item = rest[-1]
                if isinstance(item, Wait):
                    event = item.event + (step - item.lag) * n
                    if event >= 0 and event not in recorded:
                        break
                    if event >= 0:
                        np.maximum(clocks[stream], recorded[event], out=clocks[stream])
                elif isinstance(item, Run):
                    ends[item.operation + step * n] = clocks[stream]
                    clocks[stream][STREAMS.index(stream)] = item.operation + step * n
                    ends[item.operation + step * n, STREAMS.index(stream)] = (
                        item.operation + step * n
                    )
                elif isinstance(item, Record):
                    recorded[item.event + step * n] = clocks[stream].copy()
                rest.pop()
                moved = True
    stuck = [(stream, rest[-1]) for stream, rest in todo.items() if rest]
    hazards = [
        Hazard(
            f"stream {stream} waits for operation {operations[item.event]}, which is never "
            "recorded before it: the queues cannot go on",
            item.event,
            -1,
        )
        for stream, (_, item) in stuck
        if isinstance(item, Wait)
    ]
    return ends, hazards


def _race(
    operations: Sequence[Operation], arena: str, name: str, first: int, second: int
) -> Hazard:
    n = len(operations)
    steps = "" if first // n == second // n else " of the next step"
    a, b = operations[first % n], operations[second % n]
    return Hazard(
        f"nothing orders operation {b}{steps} after {a}, though both touch {name} in arena "
        f"{arena} and one writes it",
        first % n,
        second % n,
    )
