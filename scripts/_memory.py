"""How much memory this process takes, in bytes."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path
from typing import NamedTuple

import torch


class Memory(NamedTuple):
    """Resident memory of the process and memory allocated on the device, in bytes."""

    now: int
    peak: int
    device: int = 0
    device_peak: int = 0

    def __str__(self) -> str:
        host = f"{size(self.now)} (peak {size(self.peak)})"
        return host + (f", device {size(self.device)}" if self.device_peak else "")


def memory(device: str = "cpu") -> Memory:
    """What the process takes now and took at most; on CUDA also what its tensors take there."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak *= 1 if sys.platform == "darwin" else 1024
    status = Path("/proc/self/status")
    found = re.search(r"VmRSS:\s*(\d+) kB", status.read_text()) if status.exists() else None
    now = int(found[1]) * 1024 if found else peak
    if not device.startswith("cuda"):
        return Memory(now, peak)
    on_device = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return Memory(now, peak, *on_device)


def size(count: float) -> str:
    """A number of bytes for people: ``1.2 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            break
        count /= 1000
    else:
        unit = "TB"
    return f"{count:.3g} {unit}"
