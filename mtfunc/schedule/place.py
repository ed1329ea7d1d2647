"""Addresses and frees: where every buffer lies, seen from where it is first and last used.

One allocator plans every byte of the device and of host staging. Addresses are the same at each
step, so memory is never asked for while training, and reuse is one more overlap of byte ranges
that the derived order takes care of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mtfunc.pullback import Wanted
from mtfunc.schedule.operation import Buffer, Operation
from mtfunc.trace import Aval

ALIGN = 256
"""Bytes: every buffer starts at a multiple, as CUDA's allocations do."""

PLANNED = ("device", "host")
"""The arenas whose addresses are planned here; the others are the caller's tensors."""


class Value(NamedTuple):
    """A buffer before it has an address.

    Attributes:
        block: values of one block lie side by side and are freed together.
        lag: for how many visits after its last use a block's bytes are left alone, so that the
            next visits need not wait for a copy that is still under way.
    """

    name: str
    category: str
    aval: Aval | None
    nbytes: int
    arena: str
    block: str
    lag: int


@dataclass
class Draft:
    """An operation before its buffers have addresses: they are names."""

    kind: str
    stream: str
    label: str
    stage: int | None = None
    micro: int | None = None
    reads: dict[str, list[str]] = field(default_factory=dict)
    writes: dict[str, list[str]] = field(default_factory=dict)
    keep: bool = False
    wanted: Wanted | None = None

    def names(self) -> list[str]:
        """Every buffer that it touches, some of them twice."""
        return [name for names in (*self.reads.values(), *self.writes.values()) for name in names]


class Placed(NamedTuple):
    """Operations with addresses.

    Attributes:
        operations: the schedule's operations, frees among them.
        buffers: every buffer by its name.
        sizes: bytes of the planned arenas.
    """

    operations: tuple[Operation, ...]
    buffers: dict[str, Buffer]
    sizes: dict[str, int]


def place(
    drafts: Sequence[Draft],
    values: Mapping[str, Value],
    keep: set[str],
    visit_ends: Sequence[int],
) -> Placed:
    """Gives every buffer its bytes and frees it after its last use.

    Args:
        drafts: the operations in order.
        values: every buffer that they name.
        keep: buffers that outlive the step, since they are the caller's.
        visit_ends: for each visit, how many drafts there were when it ended.
    """
    users: dict[str, list[int]] = defaultdict(list)
    members: dict[str, list[Value]] = defaultdict(list)
    for index, draft in enumerate(drafts):
        for name in draft.names():
            users[values[name].block].append(index)
    for value in values.values():
        members[value.block].append(value)
    kept = {values[name].block for name in keep}

    buffers: dict[str, Buffer] = {}
    sizes: dict[str, int] = {}
    for arena in dict.fromkeys(value.arena for value in values.values()):
        blocks = [b for b, inside in members.items() if inside[0].arena == arena and users[b]]
        nbytes = [sum(aligned(value.nbytes) for value in members[b]) for b in blocks]
        if arena in PLANNED:
            lives = [
                (users[b][0], _end(users[b][-1], members[b][0].lag, visit_ends, len(drafts)))
                if b not in kept
                else (users[b][0], len(drafts))
                for b in blocks
            ]
            offsets, sizes[arena] = allocate(nbytes, lives)
        else:
            offsets = [sum(nbytes[:i]) for i in range(len(blocks))]
        for block, offset in zip(blocks, offsets):
            for value in members[block]:
                buffers[value.name] = Buffer(
                    value.name, arena, offset, value.nbytes, value.category, value.aval
                )
                offset += aligned(value.nbytes)

    frees: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for block, uses in users.items():
        if members[block][0].arena in PLANNED and block not in kept:
            streams = [drafts[i].stream for i in uses]
            # Freed where it is copied out, so that compute never waits for a copy to free memory.
            out = members[block][0].arena == "device" and "d2h" in streams
            stream = "d2h" if out else streams[-1]
            frees[uses[-1]][stream] += [value.name for value in members[block]]
    ordered: list[Draft] = []
    for index, draft in enumerate(drafts):
        ordered.append(draft)
        for stream, names in frees[index].items():
            ordered.append(Draft("free", stream, draft.label, writes={"freed": names}))
    operations = tuple(
        Operation(
            index=index,
            kind=draft.kind,
            stream=draft.stream,
            label=draft.label,
            stage=draft.stage,
            micro=draft.micro,
            reads={role: tuple(buffers[n] for n in names) for role, names in draft.reads.items()},
            writes={role: tuple(buffers[n] for n in names) for role, names in draft.writes.items()},
            keep=draft.keep,
            wanted=draft.wanted,
        )
        for index, draft in enumerate(ordered)
    )
    return Placed(operations, buffers, sizes)


def _end(last: int, lag: int, visit_ends: Sequence[int], end: int) -> int:
    """The operation until which a block's bytes are left alone."""
    if lag == 0:
        return last
    later = [stop - 1 for stop in visit_ends if stop > last]
    return later[lag] if lag < len(later) else end


def aligned(nbytes: int) -> int:
    """Bytes rounded up to the alignment; nothing takes no bytes, so that no two share a place."""
    return -(-max(nbytes, 1) // ALIGN) * ALIGN


def allocate(nbytes: Sequence[int], lives: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Offsets for blocks whose lifetimes are known, and the bytes that they need together.

    First fit in the order of first use, the larger first. Blocks that live at the same time never
    overlap.

    Args:
        nbytes: the aligned size of each block.
        lives: the first and the last operation that uses it, both included.
    """
    offsets = [0] * len(nbytes)
    live: list[tuple[int, int, int]] = []
    size = 0
    for i in sorted(range(len(nbytes)), key=lambda i: (lives[i][0], -nbytes[i])):
        first, last = lives[i]
        live = sorted(entry for entry in live if entry[2] >= first)
        offset = 0
        for start, stop, _ in live:
            if start - offset >= nbytes[i]:
                break
            offset = max(offset, stop)
        offsets[i] = offset
        live.append((offset, offset + nbytes[i], last))
        size = max(size, offset + nbytes[i])
    return offsets, size
