"""Where a run stands, live: a bar on a terminal, plain lines every few seconds elsewhere."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from scripts._memory import memory

EVERY = 5.0
"""Seconds between plain lines."""
WINDOW = 50
"""Steps that the rate is averaged over."""


class Display:
    """A context manager that shows steps as they are done.

    Args:
        total: steps of the run.
        done: steps done before, by an earlier part of the run.
        tokens: tokens of a step.
        stream: a terminal gets a bar, anything else plain lines.
    """

    def __init__(self, total: int, *, done: int, tokens: int, stream: TextIO):
        self.total, self.tokens = total, tokens
        self.stamps = deque([(done, time.perf_counter())], WINDOW + 1)
        self.printed = time.perf_counter()
        self.console = Console(file=stream, highlight=False, soft_wrap=True)
        self.bar = Progress(
            TextColumn("step {task.completed:,.0f} of {task.total:,.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task("", total=total, completed=done)

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.stop()

    @property
    def rate(self) -> float:
        """Tokens a second over the last steps; 0 before the first."""
        (first, start), (last, stop) = self.stamps[0], self.stamps[-1]
        return self.tokens * (last - first) / max(stop - start, 1e-9)

    def update(self, step: int, loss: float) -> None:
        """Shows that ``step`` steps are done, the last one with this loss in nats."""
        now = time.perf_counter()
        self.stamps.append((step, now))
        left = (self.total - step) * self.tokens / self.rate
        text = f"loss {loss:.3f}  {self.rate:,.0f} tokens/s  memory {memory()}  {clock(left)} left"
        self.bar.update(self.task, completed=step, description=text)
        if self.bar.disable and (now - self.printed >= EVERY or step == self.total):
            self.printed = now
            self.say(f"step {step:,} of {self.total:,}  {text}")

    def say(self, text: str) -> None:
        """Prints a line, above the bar where there is one."""
        self.console.print(text, markup=False)
        self.console.file.flush()


def clock(seconds: float) -> str:
    """Seconds as people read them: ``2:05``, ``1:02:03``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
