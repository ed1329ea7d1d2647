"""Ctrl-C: the first asks, the second stops at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ASKED = b"\nCtrl-C: finishing this step, then saving; once more stops at once\n"


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether Ctrl-C was pressed.

    A second Ctrl-C raises :class:`KeyboardInterrupt` wherever the program is.
    """
    asked = False
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Past Python's buffers: the signal may have come while they were being written.
        os.write(2, ASKED)

    signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
