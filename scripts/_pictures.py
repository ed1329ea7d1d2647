"""Pictures of a run: its losses, and what ran on which stream during one step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {
    "load": "#4477aa",
    "fetch": "#66ccee",
    "forward": "#228833",
    "pullback": "#ccbb44",
    "loss": "#ee6677",
    "check": "#ee6677",
    "save": "#aa3377",
    "store": "#aa3377",
    "update": "#ee8866",
    "free": "#bbbbbb",
}
"""Paul Tol's bright scheme, which colour-blind readers can tell apart."""
OTHER = "#777777"
LANES = ("h2d", "compute", "d2h", "host")


def losses(path: Path, rows: Sequence[Mapping[str, Any]], *, bigram: float, title: str) -> None:
    """Draws training and held-out loss over the steps, and the bigram model's line.

    Args:
        path: the PNG to write.
        rows: of the metrics file: ``"step"`` with ``"loss"``, ``"heldout"`` or both, in nats.
        bigram: the bigram model's held-out loss in nats.
        title: of the picture.
    """
    figure, axes = _figure(8, 4.8)
    train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    heldout = [(row["step"], row["heldout"]) for row in rows if "heldout" in row]
    if train:
        steps, values = zip(*train)
        axes.plot(steps, values, color=COLOURS["fetch"], linewidth=0.6, alpha=0.7)
        axes.plot(steps, _smooth(values), color=COLOURS["load"], label="training, smoothed")
    if heldout:
        steps, values = zip(*heldout)
        axes.plot(steps, values, "o-", markersize=4, color=COLOURS["loss"], label="held out")
        axes.annotate(
            f"{values[-1]:.3f}",
            (steps[-1], values[-1]),
            textcoords="offset points",
            xytext=(0, 8),
            ha="right",
            color=COLOURS["loss"],
        )
    axes.axhline(bigram, color="#333333", linestyle="--", linewidth=1)
    axes.annotate(
        f"byte bigrams, held out: {bigram:.3f}",
        (1, bigram),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        xytext=(-6, 5),
        ha="right",
    )
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=title)
    axes.set_ylim(0, 1.05 * max([bigram, *(value for _, value in train + heldout)]))
    axes.secondary_yaxis(
        "right", functions=(lambda nats: nats / math.log(2), lambda bits: bits * math.log(2))
    ).set_ylabel("bits per byte")
    axes.grid(alpha=0.25)
    axes.legend(loc="upper center", frameon=False)
    figure.savefig(path)


def timeline(
    path: Path, records: Iterable[tuple[str, str, float, float, str]], *, title: str
) -> None:
    """Draws one step: a lane a stream, a bar an operation, coloured by its kind.

    Args:
        path: the PNG to write.
        records: ``(stream, name, start_seconds, stop_seconds, kind)`` of every operation.
        title: of the picture.
    """
    records = sorted(records, key=lambda record: record[2])
    figure, axes = _figure(13, 3.6)
    lanes = [*LANES, *dict.fromkeys(r[0] for r in records if r[0] not in LANES)]
    origin = min((record[2] for record in records), default=0.0)
    whole = max((record[3] for record in records), default=1.0) - origin
    kinds: dict[str, Any] = {}
    for stream, name, start, stop, kind in records:
        left, width = (start - origin) * 1e3, (stop - start) * 1e3
        colour = COLOURS.get(kind, OTHER)
        bars = axes.barh(
            lanes.index(stream),
            width,
            left=left,
            height=0.72,
            color=colour,
            edgecolor="white" if stop - start > 0.004 * whole else colour,
            linewidth=0.5,
        )
        kinds.setdefault(kind, bars)
        _label(axes, name.removeprefix(kind).strip(), left, width, lanes.index(stream), whole * 1e3)
    for idle in set(lanes) - {record[0] for record in records}:
        axes.text(0, lanes.index(idle), " idle", va="center", color=OTHER, fontsize=8)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, whole * 1e3)
    axes.set(xlabel="milliseconds", title=title)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.tick_params(left=False)
    axes.legend(kinds.values(), kinds, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path)


def _label(axes: Axes, name: str, left: float, width: float, lane: int, whole: float) -> None:
    """The operation's name, upright in its bar where it fits, or else along the height."""
    share = width / whole
    if share > 0.008 * len(name):
        axes.text(left + width / 2, lane, name, ha="center", va="center", fontsize=7)
    elif share > 0.011:
        axes.text(
            left + width / 2, lane, name[:12], ha="center", va="center", fontsize=6, rotation=90
        )


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    with matplotlib.rc_context({"font.size": 9, "axes.titlesize": 10}):
        figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
        return figure, figure.add_subplot()


def _smooth(values: Sequence[float], share: float = 0.02) -> list[float]:
    """The mean of each value and those around it, over about that share of the run each way."""
    sums, reach = [0.0, *accumulate(values)], round(share * len(values))
    spans = [(max(0, i - reach), min(len(values), i + reach + 1)) for i in range(len(values))]
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in spans]
