"""What a check found: the report of a sound program, the error of another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mtfunc._base import Path
from mtfunc.config import StreamConfig


class CheckError(AssertionError):
    """Streaming would not leave the gradients as they are; the message says where and why.

    Attributes:
        kind: what is wrong: ``"in-place"``, ``"generator"``, ``"repeat"``, ``"closure"``,
            ``"backward"``, ``"trace"``, ``"stream"`` or ``"differs"``.
        stage: the stage, where one is known.
        leaf: the path of the leaf, where one is known.
        device: what was streamed on, where streaming had begun.
        config: how it was streamed.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str,
        stage: str | None = None,
        leaf: Path | None = None,
        device: str | None = None,
        config: StreamConfig | None = None,
    ):
        super().__init__(message)
        self.kind, self.stage, self.leaf = kind, stage, leaf
        self.device, self.config = device, config


class StageReport(NamedTuple):
    """What was checked of one stage.

    Attributes:
        name: the stage.
        reads: the keys that it reads.
        leaves: parameter leaves with a gradient.
        carry: the carry that it returns, such as ``"float32[2,8]"``.
        pullback: ``"func"``, ``"autograd"`` or ``"rule"``.
        backward: hand-written backwards that agree with a finite difference, or were not checked.
    """

    name: str
    reads: tuple[Path, ...]
    leaves: int
    carry: str
    pullback: str
    backward: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was checked and found sound; ``str(report)`` is a table of one line a stage.

    Attributes:
        stages: the stages in order.
        leaves: the paths of all gradients that were compared.
        configurations: how the program was streamed.
        devices: where, each simulated interleaving by its seed.
        micro_batches: how many micro-batches a step had.
        gradients: how many streamed gradients were compared.
        steps: how many optimizer steps were compared.
        warnings: what is no fault and yet worth a look.
        seconds: how long it took.
    """

    stages: tuple[StageReport, ...]
    leaves: tuple[Path, ...]
    configurations: tuple[StreamConfig, ...]
    devices: tuple[str, ...]
    micro_batches: int
    gradients: int
    steps: int
    warnings: tuple[str, ...]
    seconds: float

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the simulated interleavings."""
        return tuple(
            int(device.partition(":")[2] or 0)
            for device in self.devices
            if device.startswith("sim")
        )

    def __str__(self) -> str:
        head = ("stage", "reads", "leaves", "carry", "pullback", "hand-written backward")
        rows = [head, *(_cells(stage) for stage in self.stages)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", self.summary, *(f"warning: {w}" for w in self.warnings)])

    @property
    def summary(self) -> str:
        """One sentence."""
        where = [device for device in self.devices if not device.startswith("sim")]
        if self.seeds:
            where.append(f"{len(self.seeds)} simulated interleavings")
        micro = f"{self.micro_batches} micro-batches, " * (self.micro_batches > 1)
        return (
            f"equal to the standard graph, bit for bit: loss, aux and {len(self.leaves)} gradients "
            f"in {self.gradients} streamed passes, parameters in {self.steps} optimizer steps "
            f"({micro}{len(self.configurations)} configurations, {' and '.join(where)}; "
            f"{self.seconds:.1f} s)"
        )


def _cells(stage: StageReport) -> tuple[str, ...]:
    reads = ", ".join(stage.reads) or "-"
    backward = stage.backward or "-"
    return stage.name, reads, str(stage.leaves), stage.carry, stage.pullback, backward
