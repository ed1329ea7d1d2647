"""How much memory this process takes, in bytes."""

from __future__ import annotations

import math
import re
import resource
from pathlib import Path
from typing import NamedTuple


class Memory(NamedTuple):
    """Resident memory of the process, in bytes."""

    now: int
    peak: int

    def __str__(self) -> str:
        return f"{size(self.now)} (peak {size(self.peak)})"


def memory() -> Memory:
    """What the process takes now and took at most."""
    status = Path("/proc/self/status")
    if status.exists():
        found = dict(re.findall(r"(VmRSS|VmHWM):\s*(\d+) kB", status.read_text()))
        now, peak = int(found["VmRSS"]) * 1024, int(found["VmHWM"]) * 1024
    else:
        now = peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = max(now, peak)  # The kernel counts them at different moments.
    return Memory(now, peak)


def size(count: float) -> str:
    """A number of bytes for people: ``1.2 GB``."""
    power = min(int(math.log(max(count, 1), 1000)), 4)
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
