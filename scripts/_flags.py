"""The flags that scripts share, and how bad input is told.

A script adds the flags it wants and sets its own defaults::

    parser = _flags.parser(description, examples, steps=400)
    with _flags.telling(parser):
        ...
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mtfunc.backends import check_device


class Refusal(ValueError):
    """Bad input; a script tells it without a traceback and leaves with status 2."""


def count(text: str) -> int:
    """A whole number of at least 1."""
    return _number(text, int, lambda n: n >= 1, "a whole number, 1 or more")


def whole(text: str) -> int:
    """A whole number of at least 0."""
    return _number(text, int, lambda n: n >= 0, "a whole number, 0 or more")


def seed(text: str) -> int:
    """Any whole number that 64 bits hold."""
    return _number(text, int, lambda n: -(2**63) <= n < 2**63, "a whole number of 64 bits")


def positive(text: str) -> float:
    """A number above 0."""
    return _number(text, float, lambda x: x > 0, "a number above 0")


def not_negative(text: str) -> float:
    """A number of at least 0."""
    return _number(text, float, lambda x: x >= 0, "a number, 0 or more")


def _number(text: str, kind: Callable[[str], Any], fits: Callable[[Any], bool], what: str) -> Any:
    try:
        number = kind(text)
    except ValueError:
        number = None
    if number is None or not fits(number):
        raise argparse.ArgumentTypeError(f"{text!r}; expected {what}")
    return number


def device(text: str) -> str:
    """A device that there is: ``cpu``, ``sim``, ``sim:7``."""
    try:
        return check_device(text)
    except (ValueError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parser(description: str, examples: str, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with the shared flags.

    Args:
        description: what the script does.
        examples: shown as they are at the end of ``--help``.
        defaults: of the script, by flag: ``steps=400``.
    """
    made = argparse.ArgumentParser(
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    group = made.add_argument_group("what to train")
    group.add_argument("--model", metavar="NAME", help="a name in models/ (%(default)s)")
    group.add_argument(
        "--corpus",
        metavar="PATH",
        help="a text file, or a directory of them; the source text of Python's standard library "
        "unless given",
    )
    group.add_argument(
        "--device", type=device, metavar="NAME", help="cpu, sim or sim:SEED (%(default)s)"
    )
    group = made.add_argument_group("how much")
    group.add_argument("--steps", type=count, metavar="N", help="optimizer steps (%(default)s)")
    group.add_argument(
        "--context", type=count, metavar="N", help="tokens of a sequence (%(default)s)"
    )
    group.add_argument("--batch", type=count, metavar="N", help="sequences of a step (%(default)s)")
    group.add_argument(
        "--micro-batches",
        type=count,
        metavar="N",
        help="equal parts that a step's batch passes through the model in (%(default)s)",
    )
    group.add_argument("--seed", type=seed, metavar="N", help="of weights and data (%(default)s)")
    group = made.add_argument_group("what is kept")
    group.add_argument(
        "--out", type=Path, metavar="DIR", help="where the run is kept (runs/MODEL, numbered)"
    )
    group.add_argument("--resume", action="store_true", help="continue the run in --out")
    group.add_argument(
        "--save-every", type=count, metavar="N", help="steps between checkpoints (%(default)s)"
    )
    group.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object at the end, and all else on stderr",
    )
    made.set_defaults(
        **dict(model="llama-tiny", device="cpu", micro_batches=1, seed=0, save_every=100) | defaults
    )
    return made


def check(flags: argparse.Namespace) -> None:
    """What one flag alone cannot tell.

    Raises:
        Refusal: the batch cannot be split into so many micro-batches.
    """
    if flags.batch % flags.micro_batches:
        raise Refusal(
            f"--batch {flags.batch} --micro-batches {flags.micro_batches}: expected a batch that "
            "splits into equal micro-batches. Take a --batch that is a multiple of --micro-batches"
        )


@contextmanager
def refusing(*kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds come from bad input: they are told without a traceback."""
    try:
        yield
    except kinds as error:
        # The text of a KeyError is its message in quotes.
        raise Refusal(error.args[0] if isinstance(error, KeyError) else str(error)) from error


@contextmanager
def telling(made: argparse.ArgumentParser) -> Iterator[None]:
    """A :class:`Refusal` ends the script with its message and status 2, Ctrl-C with 130."""
    try:
        yield
    except Refusal as error:
        made.exit(2, f"{made.prog}: {error}\n")
    except KeyboardInterrupt:
        made.exit(130, f"{made.prog}: interrupted before anything was trained\n")
