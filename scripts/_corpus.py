"""Text files as bytes: what is read, what is held out, and which bytes a step sees.

A batch is a pure function of the seed and the step, so that a resumed run draws the same data.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import mtfunc as mt
from scripts._flags import Refusal

TEXT = (
    "c cc cfg cpp css csv go h hpp html ini java jl js json lua md py pyi r rs rst scala sh sql "
    "tex toml ts txt xml yaml yml"
)
SUFFIXES = frozenset(f".{suffix}" for suffix in TEXT.split(" "))
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
HELD_OUT = 20
"""One file in so many is held out, or the last such part of a single file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Bytes to train on and bytes held out, both uint8, shape ``(bytes,)``."""

    name: str
    files: int
    train: Tensor
    heldout: Tensor
    digest: str
    """SHA-256 of both splits: a resumed run insists on the same bytes."""

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.files:,} file{'s' * (self.files != 1)}, "
            f"{len(self.train):,} bytes to train on, {len(self.heldout):,} held out"
        )


def load(path: str | Path | None, *, context: int) -> Corpus:
    """The corpus at a path, split.

    Several files are split by file: they are ranked by the SHA-256 of their relative path and
    the first twentieth is held out. A single file is cut at 95%.

    Args:
        path: a file, or a directory of which every text file is taken; ``None`` is the source of
            the running Python's standard library, without its tests.
        context: tokens of a window; both splits need one more byte than that.

    Raises:
        Refusal: the path cannot be read, holds no text, or is too short.
    """
    root = Path(sysconfig.get_path("stdlib") if path is None else path)
    name = "Python's standard library" if path is None else str(path)
    files = _files(root, *((frozenset({".py"}), NOT_LIBRARY) if path is None else (SUFFIXES,)))
    texts = {file.relative_to(root).as_posix(): _read(file) for file in files}
    if not any(texts.values()):
        raise Refusal(
            f"corpus {name}: {len(texts)} text files with 0 bytes; expected some text. "
            "Name a file, or a directory with files such as *.py, *.txt or *.md"
        )
    train, heldout = _split(texts)
    for split, data in (("training", train), ("held-out", heldout)):
        if len(data) < context + 1:
            raise Refusal(
                f"corpus {name}: the {split} split has {len(data):,} bytes; expected at least "
                f"{context + 1:,}, a context of {context:,} and the byte after it. Take more "
                "text or a smaller --context"
            )
    digest = hashlib.sha256(hashlib.sha256(train).digest() + hashlib.sha256(heldout).digest())
    return Corpus(
        name=name,
        files=len(texts),
        train=_bytes(train),
        heldout=_bytes(heldout),
        digest=digest.hexdigest(),
    )


def check_vocabulary(corpus: Corpus, model: str, vocabulary: int) -> None:
    """Refuses text that the model has no tokens for.

    Raises:
        Refusal: some byte, and so some token and label, is out of the model's range.
    """
    highest = max(int(corpus.train.max()), int(corpus.heldout.max()))
    if highest >= vocabulary:
        raise Refusal(
            f"corpus {corpus.name}: it holds the byte {highest}, a label out of range; {model} "
            f"knows 0 to {vocabulary - 1}. Take a --model with a vocabulary of 256 or more"
        )


def _files(
    root: Path, suffixes: frozenset[str], skipped: frozenset[str] = frozenset()
) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = sorted(
            f for f in folders if f not in skipped and not f.startswith((".", "__"))
        )
        for name in sorted(names):
            if Path(name).suffix.lower() in suffixes:
                yield Path(folder, name)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        _refuse(error)
        raise


def _refuse(error: OSError) -> None:
    raise Refusal(
        f"corpus {error.filename}: cannot be read ({error.strerror}); expected a readable file "
        "or directory. Check --corpus"
    ) from error


def _split(texts: dict[str, bytes]) -> tuple[bytes, bytes]:
    if len(texts) == 1:
        (text,) = texts.values()
        cut = len(text) - len(text) // HELD_OUT
        return text[:cut], text[cut:]
    ranked = sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest())
    heldout = set(ranked[: -(-len(ranked) // HELD_OUT)])
    train = b"".join(text for name, text in texts.items() if name not in heldout)
    return train, b"".join(texts[name] for name in texts if name in heldout)


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batches(
    data: Tensor, step: int, *, seed: int, context: int, batch: int, micro_batches: int = 1
) -> list[dict[str, Tensor]]:
    """The micro-batches of one step, drawn at random places.

    Args:
        data: a split, uint8 of shape ``(bytes,)``.
        step: counts from 0; any step can be asked for in any order.
        seed: of the run.
        context: tokens of a sequence.
        batch: sequences of a step.
        micro_batches: how many equal parts they are handed out in.

    Returns:
        One ``{"tokens", "labels"}`` a micro-batch, int64 of shape ``(batch / micro_batches,
        context)``; the labels are the tokens shifted by one.
    """
    key = mt.random.fold_in(mt.random.fold_in(mt.random.key(seed), "data"), step)
    drawn = mt.random.uniform(key, (batch,), torch.float64)
    starts = (drawn * (len(data) - context)).long()
    return [_windows(data, part, context) for part in starts.split(batch // micro_batches)]


def heldout(data: Tensor, *, context: int, batch: int, limit: int) -> list[dict[str, Tensor]]:
    """Windows of a split that do not overlap, evenly spread, about ``limit`` tokens of them."""
    fitting = (len(data) - 1) // context
    wanted = max(1, min(fitting, limit // context))
    starts = torch.arange(wanted) * fitting // wanted * context
    return [_windows(data, part, context) for part in starts.split(batch)]


def _windows(data: Tensor, starts: Tensor, context: int) -> dict[str, Tensor]:
    rows = data[starts[:, None] + torch.arange(context + 1)].long()
    return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
