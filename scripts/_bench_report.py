"""What bench.py makes of its figures: paired ratios, memory, tables and a page of the docs."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

Answers = dict[str, dict[str, Any]]
"""What each arm answered in one round."""
WIDEST = 0.1
"""An interval of a ratio wider than this says nothing worth printing."""
FEWEST = 20
"""Rounds below which a bootstrap of their median is not to be trusted."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where the figures were taken, and how busy it was with other things.

    Attributes:
        processor: its name.
        cpus: the cores that all arms were pinned to.
        load: the load average before the first step.
        began: the clock, and the seconds that those cores had been busy, at the start.
        others: cores of ``cpus`` taken by other programs and the hypervisor, on average;
            ``None`` where that cannot be known.
    """

    processor: str
    cpus: list[int]
    load: float
    began: tuple[float, float | None]
    others: float | None = None

    @classmethod
    def watch(cls, cpus: list[int]) -> Machine:
        """Starts to watch these cores."""
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        began = (time.perf_counter(), _busy(cpus))
        return cls(processor=_processor(), cpus=cpus, load=load, began=began)

    def seen(self, own: float) -> Machine:
        """The same with ``others`` known, where the arms used ``own`` processor seconds."""
        busy, (clock, before) = _busy(self.cpus), self.began
        if busy is None or before is None:
            return self
        others = (busy - before - own) / (time.perf_counter() - clock)
        return replace(self, others=max(0.0, others))

    def __str__(self) -> str:
        shared = (
            ""
            if self.others is None
            else (
                f" Other programs and the hypervisor took {self.others:.2f} of them on average"
                + (": a noisy machine." if self.others > 0.1 else ".")
            )
        )
        return (
            f"{self.processor}, {len(self.cpus)} cores shared by all arms, {platform.system()}, "
            f"Python {platform.python_version()}.{shared}{_allocator()}"
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """Everything that one run of bench.py saw.

    Attributes:
        setup: the model and its batches.
        machine: where.
        check: the line on equal starts.
        ready: what each arm said when it was built.
        warm: answers in the warm-up.
        rounds: answers in the measured rounds.
        flops: floating-point operations of a step by arm, ``None`` where not counted.
    """

    setup: dict[str, Any]
    machine: Machine
    check: str
    ready: Answers
    warm: list[Answers]
    rounds: list[Answers]
    flops: dict[str, int | None]

    def records(self) -> list[dict[str, Any]]:
        """One record for the run and one for every step."""
        run = {"kind": "run", **self.setup, "processor": self.machine.processor}
        run |= {"others": self.machine.others, "check": self.check}
        steps = [
            {"kind": "step", "round": number, "arm": arm, **answer}
            for number, answers in enumerate(self.rounds)
            for arm, answer in answers.items()
        ]
        return [run, *steps]


def interval(ratios: Sequence[float], seed: int, draws: int = 10_000) -> tuple[float, float]:
    """A 95% bootstrap interval of the median of paired ratios, rounds drawn with replacement.

    Args:
        ratios: one for each round.
        seed: of the draws.
        draws: how many times the rounds are drawn again.

    Returns:
        The 2.5% and 97.5% quantiles of the medians.
    """
    values = np.asarray(ratios)
    picked = np.random.default_rng(seed).integers(len(values), size=(draws, len(values)))
    low, high = np.quantile(np.median(values[picked], axis=1), [0.025, 0.975])
    return float(low), float(high)


def summary(ready: dict[str, Any], answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """An arm's memory and medians.

    ``transient`` is the highest resident memory of any step less what was resident when
    parameters, moments and batch were in place and libraries warm; ``held`` is what those took.
    """
    peaks = [answer["peak"] for answer in answers]
    known = None not in peaks and ready["baseline"] is not None
    return {
        "transient": max(peaks) - ready["baseline"] if known else None,
        "held": ready["held"],
        "seconds": median(answer["seconds"] for answer in answers),
        "user": median(answer["user"] for answer in answers),
        "system": median(answer["system"] for answer in answers),
        "faults": median(answer["faults"] for answer in answers),
    }


def compare(result: Result) -> list[dict[str, Any]]:
    """One row for each arm; ratios are those of the first arm to this one, within rounds."""
    first, *_ = result.ready
    rows = []
    for arm, ready in result.ready.items():
        steps = [answers[arm] for answers in result.rounds]
        row = {"kind": "arm", "arm": arm, "first": first, "versions": ready["versions"]}
        row |= summary(ready, [answers[arm] for answers in result.warm] + steps)
        row |= summary(ready, steps) | {"transient": row["transient"]}
        row["flops"], row["parameters"] = result.flops[arm], result.setup["size"]
        if arm != first:
            ratios = [a[first]["seconds"] / a[arm]["seconds"] for a in result.rounds]
            low, high = interval(ratios, result.setup["seed"])
            row |= {"ratio": median(ratios), "low": low, "high": high, "rounds": len(ratios)}
            row["measured"] = high - low <= WIDEST and len(ratios) >= FEWEST
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as aligned text."""
    cells = _cells(rows)
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in cells
    )


def markdown(
    result: Result, rows: Sequence[dict[str, Any]], command: str, notes: Sequence[str]
) -> str:
    """The result as a page of the docs: what, where, the table, and what its columns mean."""
    setup, config = result.setup, result.setup["config"]
    head, *body = _cells(rows)
    lines = [
        "# A streamed step beside its peers",
        "",
        f"A Llama of {setup['size'] / 1e6:.1f}M parameters ({config['depth']} layers, width "
        f"{config['width']}, vocabulary {config['vocab']:,}), {setup['batch']} × "
        f"{setup['context']} tokens a step, float32, AdamW, {len(result.rounds)} rounds. "
        f"{'; '.join(dict.fromkeys(row['versions'] for row in rows))}.",
        "",
        str(result.machine),
        "",
        f"    {command}",
        "",
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * 2 + " ---: |" * (len(head) - 2),
        *("| " + " | ".join(row) + " |" for row in body),
        "",
        f"{result.check}.",
        "",
        f"The streamed arm may keep {setup['residuals'] / 1e6:,.0f} MB of its last layers' forward "
        "pass (`StreamConfig(residuals=)`, the script's `--residuals`).",
        "",
        f"- **{head[1]}**: median over rounds of the seconds of `{rows[0]['arm']}` divided by "
        "those of this arm in the same round, with a 95% bootstrap interval of that median. "
        f"Wider than {WIDEST:g}, or from fewer than {FEWEST} rounds, is *not measured*.",
        "- **seconds**: median of a step. **cpu**: processor seconds of a step over all threads; "
        "**kernel**: the part of them spent in the kernel, most of it on page faults.",
        "- **GFLOP**: floating-point operations of the matrix products and attention of one step "
        "(`torch.utils.flop_counter`, or the products in the jaxpr), attention counted in full. "
        "It counts what is asked for; the jax arm's attention is not a fused one.",
        "- **transient MB**: the highest resident memory of any step, warm-up included, less what "
        "was resident before the first, when parameters, moments and batch were in place and a "
        "small model had warmed the libraries up. **held MB**: what those took; 12 bytes a "
        f"parameter are {12 * setup['size'] / 1e6:,.0f} MB. Resident memory holds what the "
        "allocator keeps after it was freed: with MALLOC_MMAP_THRESHOLD_=1048576 in the "
        "environment freed tensors go back at once, at the price of page faults.",
        *(f"- {note}" for note in notes),
    ]
    return "\n".join(lines)


def depth_table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Transient memory by depth as a markdown table, growth in units of one layer's carry."""
    lines = [
        "| arm | layers | parameters | transient MB | growth a layer, MB | in carries |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for arm, rows in found.items():
        for before, row in zip([None, *rows], rows):
            growth = carries = "—"
            if before is not None and None not in (row["transient"], before["transient"]):
                more = row["transient"] - before["transient"]
                each = more / (row["depth"] - before["depth"])
                growth, carries = f"{each / 1e6:.2f}", f"{each / row['carry']:.2f}"
            lines.append(
                f"| {arm} | {row['depth']} | {row['size'] / 1e6:.1f}M | "
                f"{_megabytes(row['transient'])} | {growth} | {carries} |"
            )
    carry = next(iter(found.values()))[0]["carry"]
    return "\n".join([*lines, "", f"One layer's carry is {carry / 1e6:.2f} MB."])


def _cells(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    head = ("arm", f"{rows[0]['arm']} / arm", "seconds", "cpu", "kernel", "GFLOP", "GFLOP/s")
    cells: list[tuple[str, ...]] = [(*head, "transient MB", "held MB")]
    for row in rows:
        flops = row["flops"]
        cells.append(
            (
                row["arm"],
                _ratio(row),
                f"{row['seconds']:.3f}",
                f"{row['user'] + row['system']:.2f}",
                f"{row['system']:.2f}",
                "—" if flops is None else f"{flops / 1e9:,.1f}",
                "—" if flops is None else f"{flops / row['seconds'] / 1e9:,.0f}",
                _megabytes(row["transient"]),
                _megabytes(row["held"]),
            )
        )
    return cells


def _ratio(row: dict[str, Any]) -> str:
    if "ratio" not in row:
        return "1"
    if row["measured"]:
        return f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
    if row["rounds"] < FEWEST:
        return f"not measured ({row['rounds']} rounds)"
    return f"not measured (interval {row['high'] - row['low']:.2f} wide)"


def _megabytes(count: int | None) -> str:
    return "not measured" if count is None else f"{count / 1e6:,.0f}"


def _allocator() -> str:
    """What was set for the C library's allocator, which decides what freed memory goes back."""
    found = {k: v for k, v in os.environ.items() if k.startswith("MALLOC_") or k == "LD_PRELOAD"}
    return "".join(f" {name}={value} was set." for name, value in sorted(found.items()))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _busy(cpus: Sequence[int]) -> float | None:
    """Seconds that these cores have been anything but idle since the machine started."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    ticks = 0
    for line in lines:
        name, *fields = line.split()
        if name in {f"cpu{cpu}" for cpu in cpus}:
            # proc(5): user nice system idle iowait irq softirq steal; guests are in user.
            ticks += sum(int(field) for i, field in enumerate(fields[:8]) if i not in (3, 4))
    return ticks / os.sysconf("SC_CLK_TCK")
