"""A run's directory: which one it is, the settings it was started with, its metrics.

``run.json`` holds the settings, ``metrics.jsonl`` what a step gave and nothing that a second run
would not give again, ``timings.jsonl`` how long it took.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from scripts._flags import Refusal

SETTINGS = "run.json"
METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"
CHECKPOINTS = "checkpoints"


def choose(out: Path | None, *, model: str, resume: bool) -> Path:
    """The directory of the run.

    Without ``--out`` it is ``runs/MODEL``, or ``runs/MODEL-2`` and so on: the first that is free
    for a new run, and the last that is taken for one to resume.

    Raises:
        Refusal: it holds another run, or none to resume.
    """
    if out is None:
        names = (Path("runs", model if i == 1 else f"{model}-{i}") for i in count(1))
        taken = []
        for out in names:
            if not _taken(out):
                break
            taken.append(out)
        out = taken[-1] if resume and taken else out
    if out.exists() and not out.is_dir():
        raise Refusal(f"--out {out}: it is a file; expected a directory, or a name that is free")
    if resume and not _taken(out):
        raise Refusal(
            f"--out {out} --resume: there is no run ({SETTINGS} is missing); expected the "
            "directory of an earlier run. Leave --resume away to start one there"
        )
    if not resume and _taken(out):
        raise Refusal(
            f"--out {out}: it holds a run already; expected a free directory. Add --resume to "
            "continue that run, or name another directory"
        )
    return out


def _taken(out: Path) -> bool:
    return (out / SETTINGS).exists()


def write_settings(out: Path, settings: dict[str, Any]) -> None:
    """Writes ``run.json`` and the directory that it is in, if need be."""
    out.mkdir(parents=True, exist_ok=True)
    _replace(out / SETTINGS, json.dumps(settings, indent=1) + "\n")


def read_settings(out: Path) -> dict[str, Any]:
    """Reads ``run.json``.

    Raises:
        Refusal: it is no JSON object.
    """
    try:
        settings = json.loads((out / SETTINGS).read_text())
        return dict(settings)
    except (ValueError, TypeError, OSError) as error:
        raise Refusal(
            f"{out / SETTINGS}: cannot be read ({error}); expected what an earlier run wrote. "
            "Start another run with another --out"
        ) from error


def check_settings(
    out: Path, flags: argparse.Namespace, saved: dict[str, Any], pinned: Sequence[str]
) -> None:
    """Refuses to resume with other settings: the run would not be the one it says.

    Raises:
        Refusal: what differs, with what it was and what was asked for.
    """
    differ = [
        f"--{name.replace('_', '-')} {getattr(flags, name)} (it was {saved[name]})"
        for name in pinned
        if name in saved and getattr(flags, name) != saved[name]
    ]
    if differ:
        raise Refusal(
            f"--out {out} --resume: that run was started with other settings: {', '.join(differ)}. "
            "Leave these flags away, or start another run with another --out"
        )


def append(path: Path, row: dict[str, Any]) -> None:
    """Adds a line of JSON to a file."""
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, of which the last may have been cut by a crash."""
    return [json.loads(line) for line in _whole(path)]


def truncate(path: Path, *, step: int) -> None:
    """Drops the rows after a step, so that a resumed run can write them again."""
    _replace(path, "".join(line for line in _whole(path) if json.loads(line)["step"] <= step))


def _whole(path: Path) -> Iterable[str]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)
