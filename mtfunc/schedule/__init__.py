"""A program as data: operations, the order between them, and its proof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mtfunc._base import Batch, Path
from mtfunc.config import StreamConfig
from mtfunc.schedule import order
from mtfunc.schedule.build import Builder, Cost, Results
from mtfunc.schedule.operation import Buffer, Lowered, Operation
from mtfunc.schedule.order import Hazard
from mtfunc.schedule.place import place
from mtfunc.trace import Aval, Traced

__all__ = ["Buffer", "Hazard", "Lowered", "Operation", "Schedule", "plan_step"]


@dataclass(frozen=True, eq=False)
class Schedule:
    """Everything that one step does, in an order that is right by itself.

    Attributes:
        operations: the steps, each with the buffers that it reads and writes.
        buffers: every buffer by name.
        sizes: bytes of the arenas whose addresses are planned, ``"device"`` and ``"host"``.
        results: the names of what the step leaves to its caller.
        traced: the stages of each micro-batch, ``traced[micro][stage]``.
        unified: whether the host is the device, so that nothing is copied between them.
        residuals: bytes that kept pullbacks hold, beside the planned arenas.
    """

    operations: tuple[Operation, ...]
    buffers: Mapping[str, Buffer]
    sizes: Mapping[str, int]
    results: Results
    traced: Sequence[Sequence[Traced]] = field(repr=False)
    unified: bool = False
    residuals: int = 0

    @cached_property
    def edges(self) -> list[tuple[int, int]]:
        """Pairs of operations on different streams, the first of which must finish first.

        They are derived from byte ranges; pairs that others imply through a covering write are
        left out.
        """
        before = order.conflicts(self.operations)
        return [(first, second) for second, firsts in enumerate(before) for first in firsts]

    def lower(self) -> Lowered:
        """The queues of each stream: what a backend executes."""
        return self._lowered

    @cached_property
    def _lowered(self) -> Lowered:
        return order.lower(self.operations)

    def verify(self, lowered: Lowered | None = None) -> list[Hazard]:
        """Proves that the queues order every conflicting pair of two consecutive steps.

        Returns:
            The hazards, each naming two operations and what they share; none is a proof.
        """
        return order.verify(self.operations, self.lower() if lowered is None else lowered)

    def __str__(self) -> str:
        waits: dict[int, list[str]] = {}
        for queue in self.lower().queues.values():
            pending: list[str] = []
            for item in queue:
                if isinstance(item, order.Wait):
                    pending.append(f"{item.event}{'*' * item.lag}")
                elif isinstance(item, order.Run):
                    waits[item.operation], pending = pending, []
        rows = [["#", "stream", "operation", "micro", "reads", "writes", "waits for"]]
        for op in self.operations:
            moved = [sum(b.nbytes for bs in r.values() for b in bs) for r in (op.reads, op.writes)]
            micro = "" if op.micro is None else op.micro
            kept = ", kept" if op.keep else ""
            row = (op.index, op.stream, f"{op.kind} {op.label}{kept}", micro)
            rows.append([*map(str, row), *map(_bytes, moved), " ".join(waits[op.index])])
        widths = [max(len(row[i]) for row in rows) for i in range(7)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows]
        arenas = ", ".join(f"{name} {_bytes(size)}" for name, size in self.sizes.items())
        kept = f"; residuals {_bytes(self.residuals)}" if self.residuals else ""
        return "\n".join([*lines, f"arenas: {arenas or 'none'}{kept}; * of the step before"])


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def plan_step(
    traced: Sequence[Sequence[Traced]],
    units: Mapping[str, tuple[Path, ...]],
    params: Mapping[Path, Aval],
    batches: Sequence[Batch],
    config: StreamConfig,
    *,
    mode: str,
    unified: bool,
    cost: Cost,
) -> Schedule:
    """The schedule of one step; arguments as :class:`mtfunc.schedule.build.Builder` takes them."""
    built = Builder(traced, units, params, batches, config, mode=mode, unified=unified, cost=cost)
    results = built.results
    keep = {name for names in (*results.carry, *results.aux.values()) for name in names}
    keep |= {*results.grads.values(), *results.loss}
    placed = place(built.drafts, built.values, keep, built.visit_ends)
    return Schedule(*placed, results, traced, unified, built.residuals)
