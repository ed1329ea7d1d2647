"""One arm of bench.py in a process of its own: takes an order a line, answers with figures.

The process sleeps in ``read`` between orders, so that the arm whose turn it is has the cores to
itself. Nothing here imports torch or jax before the process is pinned: thread pools size
themselves by the cores that they find.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Batch = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A training step with its state inside.

    Attributes:
        step: runs one step and returns the loss; when it returns, the update is done.
        leaves: the parameters as they are now, in the order of the parameter file.
        flops: floating-point operations of one step, which it may run to count them; ``None``
            where they cannot be counted.
    """

    step: Callable[[Batch], float]
    leaves: Callable[[], Iterable[np.ndarray]]
    flops: Callable[[Batch], int | None]


def make_batch(setup: dict[str, Any], index: int) -> Batch:
    """The batch of one step, the same in every process: ids drawn evenly, labels shifted."""
    shape = (setup["batch"], setup["context"] + 1)
    text = np.random.default_rng([setup["seed"], index]).integers(setup["vocab"], size=shape)
    return {"tokens": text[:, :-1].copy(), "labels": text[:, 1:].copy()}


def resident(field: str = "VmRSS") -> int | None:
    """Bytes of this process in memory now, or with ``VmHWM`` at most since the last reset."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if field in line)


def reset_peak() -> bool:
    """Set the high-water mark of resident memory back to what is resident now (proc(5))."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def trim() -> None:
    """Hand freed memory back to the system, so that resident means in use."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def timed(step: Callable[[], float]) -> dict[str, Any]:
    """One step with its cost: seconds, processor seconds, page faults and peak memory."""
    measured = reset_peak()
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    loss = step()
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "loss": loss,
        "seconds": seconds,
        "user": after.ru_utime - before.ru_utime,
        "system": after.ru_stime - before.ru_stime,
        "faults": after.ru_minflt - before.ru_minflt,
        "preempted": after.ru_nivcsw - before.ru_nivcsw,
        "peak": resident("VmHWM") if measured else None,
    }


def build(setup: dict[str, Any]) -> tuple[Arm, dict[str, Any]]:
    """The arm, and what its state holds; libraries are warmed up by a small model first."""
    module = importlib.import_module(
        "scripts._bench_jax" if setup["arm"] == "jax" else "scripts._bench_torch"
    )
    # Compiling takes memory that a step does not: it comes before the first reading.
    prepared = module.prepare(setup)
    small = setup["small"]
    arm = module.build(small, module.prepare(small))
    for index in range(2):
        arm.step(make_batch(small, index))
    del arm
    trim()
    empty = resident()
    arm = module.build(setup, prepared)
    digest = 0
    for leaf in arm.leaves():
        digest = zlib.crc32(np.ascontiguousarray(leaf), digest)
    trim()
    held = resident()
    return arm, {
        "digest": digest,
        "baseline": held,
        "held": None if held is None or empty is None else held - empty,
        "versions": module.versions(),
    }


def main() -> None:
    """Answers orders until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not look like an answer
    setup = json.loads(sys.stdin.readline())
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, setup["cpus"])
    arm, answer = build(setup)
    print(json.dumps(answer), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        batch = make_batch(setup, order["index"])
        if order["do"] == "step":
            answer = timed(lambda batch=batch: arm.step(batch))
        else:
            answer = {"flops": arm.flops(batch)}
        print(json.dumps(answer), file=answers, flush=True)
