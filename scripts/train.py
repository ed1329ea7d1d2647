"""Train a model on text, byte by byte, streamed.

Read it top to bottom: ``prepare`` turns flags into what a run needs, ``train`` is the loop, and
``finish`` draws the pictures and writes the sample.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import models
import mtfunc as mt
from scripts import _bigram, _corpus, _flags, _pictures, _run
from scripts._check import first_difference
from scripts._flags import Refusal
from scripts._interrupt import interruptible
from scripts._memory import memory
from scripts._progress import Display, clock
from scripts._sample import readable, sample

EXAMPLES = """\
examples:
  python scripts/train.py
      llama-tiny on the source of Python's standard library: a few minutes on a CPU

  python scripts/train.py --corpus notes/ --steps 1000 --out runs/notes
      every text file under notes/, longer

  python scripts/train.py --batch 64 --micro-batches 4
      the same gradients as one batch of 64, a quarter of the activations

  python scripts/train.py --resume --out runs/notes
      go on after Ctrl-C or a crash, bit for bit; add --steps 2000 to go further

  python scripts/train.py --steps 50 --json 2>log | jq .heldout
      one JSON object on stdout, all else on stderr

OUT gets checkpoints/, metrics.jsonl, timings.jsonl, loss.png, timeline.png, sample.txt and
summary.json.
"""
PINNED = (
    "model",
    "context",
    "batch",
    "micro_batches",
    "seed",
    "learning_rate",
    "warmup",
    "weight_decay",
    "evaluate_every",
    "heldout_tokens",
)
"""Settings that the numbers of a run depend on: a resumed run keeps them."""


def parser() -> argparse.ArgumentParser:
    """The flags, with defaults for ``llama-tiny`` on two CPU cores."""
    made = _flags.parser(
        __doc__.partition("\n")[0], EXAMPLES, steps=600, context=256, batch=16, save_every=100
    )
    group = made.add_argument_group("how it learns")
    group.add_argument(
        "--learning-rate",
        type=_flags.positive,
        default=3e-3,
        metavar="X",
        help="of AdamW, at its peak; it then falls along a cosine to a tenth (%(default)s)",
    )
    group.add_argument(
        "--warmup",
        type=_flags.count,
        default=50,
        metavar="N",
        help="steps until the peak (%(default)s)",
    )
    group.add_argument(
        "--weight-decay", type=_flags.not_negative, default=0.1, metavar="X", help="(%(default)s)"
    )
    group.add_argument(
        "--no-check",
        action="store_true",
        help="do not compare the first gradients with the standard graph, which holds all "
        "activations at once",
    )
    group = made.add_argument_group("what is looked at")
    group.add_argument(
        "--evaluate-every",
        type=_flags.count,
        default=100,
        metavar="N",
        help="steps between looks at the held-out text (%(default)s)",
    )
    group.add_argument(
        "--heldout-tokens",
        type=_flags.count,
        default=65_536,
        metavar="N",
        help="how much of it, in evenly spread windows (%(default)s)",
    )
    group.add_argument("--prompt", default="def ", metavar="TEXT", help="of the sample (%(default)r)")
    group.add_argument(
        "--sample-bytes", type=int, default=400, metavar="N", help="length of it (%(default)s)"
    )
    group.add_argument(
        "--temperature", type=_flags.positive, default=0.7, metavar="X", help="of it (%(default)s)"
    )
    return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What does not change while a run goes on."""

    flags: argparse.Namespace
    out: Path
    corpus: _corpus.Corpus
    config: Any
    program: mt.Program
    logits: mt.Program
    schedule: Any
    optimizer: mt.Optimizer
    stream: mt.StreamConfig
    heldout: list[Any]
    bigram: float
    say: TextIO

    def batches(self, step: int) -> list[Any]:
        """The micro-batches of a step."""
        f = self.flags
        return _corpus.batches(
            self.corpus.train,
            step,
            seed=f.seed,
            context=f.context,
            batch=f.batch,
            micro_batches=f.micro_batches,
        )

    @property
    def meta(self) -> dict[str, Any]:
        """What a checkpoint must say to be one of this run's model."""
        return {
            "model": self.flags.model,
            "config": json.loads(json.dumps(dataclasses.asdict(self.config), default=str)),
            "program": str(self.program),
        }

    @property
    def checkpoints(self) -> Path:
        """Where they are."""
        return self.out / _run.CHECKPOINTS

    @property
    def resume(self) -> str:
        """The command that goes on with this run."""
        return shlex.join(["python", "scripts/train.py", "--resume", "--out", str(self.out)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    flags_parser = parser()
    with _flags.telling(flags_parser):
        run, state = prepare(flags_parser, arguments)
        if not run.flags.no_check and not gradients_agree(run, state):
            return 1
        try:
            return train(run, state)
        except mt.NonFiniteError as error:
            return stopped_by(run, error)
        except KeyboardInterrupt:
            say(run, f"stopped at once. Go on from the last checkpoint with:\n  {run.resume}")
            return 130
