"""Is my gradient right? Streams a program in many ways and compares every bit with plain autograd.

The program is named by MODULE:NAME, where MODULE is a file or what `import` takes, and NAME is a
function without arguments that returns (program, params, batch) or (program, params, batch, key),
or such a tuple itself. A list as the batch is a list of micro-batches.

    # block.py
    def small():
        program = mt.chain(mt.stage(embed, "embed"), mt.scan(block, "layers"), mt.stage(loss))
        return program, init(mt.random.key(0)), {"tokens": torch.zeros(2, 8, dtype=torch.int64)}
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TextIO

# Threads that spin while they wait slow each other down where cores are shared: up to tenfold.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

import models
import mtfunc as mt
from mtfunc.testing import CheckError, Report, check
from scripts import _flags
from scripts._flags import Refusal

EXAMPLES = """\
examples:
  .venv/bin/python scripts/check.py block.py:small
      a program of your own; say what you call small, a few layers and tokens suffice

  .venv/bin/python scripts/check.py mylab.models.block:small --devices sim --seeds 200
      more simulated interleavings, no processor

  .venv/bin/python scripts/check.py --model llama-tiny --micro-batches 3
      a model of models/ on random tokens

  .venv/bin/python scripts/check.py block.py:small --surrogate quantize
      the stage or Function "quantize" has a backward that is on purpose not the derivative

exit status: 0 where all bits agree, 1 where they do not or a stage is impure, 2 for bad input.
docs/gradients.md says what each message means and what mends it.
"""


class Given(NamedTuple):
    """What is checked."""

    program: mt.Program
    params: Any
    batch: Any
    key: Any = None


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    group = made.add_argument_group("what to check")
    group.add_argument("program", nargs="?", metavar="MODULE:NAME", help="such as block.py:small")
    group.add_argument("--model", metavar="NAME", help="a name in models/, on random tokens")
    group.add_argument(
        "--context", type=_flags.count, default=16, metavar="N", help="of --model (%(default)s)"
    )
    group.add_argument(
        "--batch", type=_flags.count, default=2, metavar="N", help="of --model (%(default)s)"
    )
    group.add_argument(
        "--micro-batches",
        type=_flags.count,
        default=1,
        metavar="N",
        help="of --model, each of --batch sequences (%(default)s)",
    )
    group.add_argument(
        "--seed", type=_flags.seed, default=0, metavar="N", help="of --model (%(default)s)"
    )
    group = made.add_argument_group("how")
    group.add_argument(
        "--devices",
        default="cpu,sim",
        metavar="NAMES",
        help="sim is --seeds interleavings, sim:7 is one (%(default)s)",
    )
    group.add_argument(
        "--seeds",
        type=_flags.count,
        default=20,
        metavar="N",
        help="simulated interleavings (%(default)s)",
    )
    group.add_argument(
        "--surrogate",
        default="",
        metavar="NAMES",
        help="stages or Functions whose backward is on purpose not the derivative",
    )
    group.add_argument(
        "--json", action="store_true", help="print one JSON object, and all else on stderr"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
        The exit status: 0 when all bits agree, 1 when not. Bad input leaves with 2.
    """
    made = parser()
    flags = made.parse_args(arguments)
    stream = sys.stderr if flags.json else sys.stdout
    with _flags.telling(made):
        if flags.program is not None and flags.model is not None:
            raise Refusal("MODULE:NAME and --model: expected one of them")
        given = model(flags) if flags.program is None else load(flags.program)
        try:
            report = run(flags, given, stream)
        except CheckError as error:
            print(error, file=stream)
            if flags.json:
                print(json.dumps(failed(error)))
            return 1
        except (KeyError, TypeError, ValueError) as error:
            # A KeyError's text is its message in quotes.
            text = error.args[0] if isinstance(error, KeyError) else error
            notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
            raise Refusal(f"{flags.program or flags.model}: {text}{notes}") from error
    show(report, stream)
    if flags.json:
        print(json.dumps({"sound": True, **asdict(report), "stages": rows(report)}))
    return 0


def model(flags: argparse.Namespace) -> Given:
    """A model of models/ with random tokens.

    Raises:
        Refusal: no model is named, or there is none of that name.
    """
    if flags.model is None:
        raise Refusal("nothing to check; expected MODULE:NAME or --model NAME, see --help")
    with _flags.refusing(KeyError):
        module, config = models.get(flags.model)
    if flags.context > config.context:
        raise Refusal(
            f"--context {flags.context}: {flags.model} was made for {config.context} tokens at "
            "most. Take a smaller --context"
        )
    generator = torch.Generator().manual_seed(flags.seed % 2**63)
    shape = (flags.batch, flags.context + 1)
    batches = []
    for _ in range(flags.micro_batches):
        rows = torch.randint(0, config.vocab, shape, generator=generator)
        batches.append({"tokens": rows[:, :-1].clone(), "labels": rows[:, 1:].clone()})
    params = module.init(config, mt.random.key(flags.seed))
    return Given(module.program(config), params, batches if flags.micro_batches > 1 else batches[0])


def load(text: str) -> Given:
    """The program that ``MODULE:NAME`` names.

    Raises:
        Refusal: there is no such module or name, or it is something else.
    """
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise Refusal(
            f"{text!r}; expected MODULE:NAME, such as block.py:small or mylab.block:small"
        )
    module = load_module(where)
    if not hasattr(module, name):
        there = [key for key in vars(module) if not key.startswith("_")]
        raise Refusal(f"{where} has no {name!r}; it has {', '.join(there[:20]) or 'nothing'}")
    found = getattr(module, name)
    if callable(found) and not isinstance(found, tuple):
        try:
            found = found()
        except Exception as error:
            raise Refusal(
                f"{text}() raised {type(error).__name__}: {error}; expected a function without "
                "arguments that returns (program, params, batch)"
            ) from error
    if not isinstance(found, tuple) or len(found) not in (3, 4):
        got = f"a tuple of {len(found)}" if isinstance(found, tuple) else type(found).__name__
        raise Refusal(
            f"{text} gave {got}; expected (program, params, batch) or (program, params, batch, key)"
        )
    if not isinstance(found[0], mt.Program):
        raise Refusal(
            f"{text} gave {type(found[0]).__name__} first; expected what mt.chain returns, "
            "then params and batch"
        )
    return Given(*found)


def load_module(where: str) -> ModuleType:
    """A module by its file or by its dotted name.

    Raises:
        Refusal: there is none, or it cannot be imported.
    """
    path = Path(where)
    try:
        if path.suffix == ".py" or os.sep in where:
            if not path.is_file():
                raise Refusal(f"{where}: there is no such file")
            # Its neighbours can be imported, as when it is run.
            sys.path.insert(0, str(path.parent.resolve()))
            spec = importlib.util.spec_from_file_location(path.stem, path)
            if spec is None or spec.loader is None:
                raise Refusal(f"{where}; expected a Python file, NAME.py")
            module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = module
            spec.loader.exec_module(module)
            return module
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(where)
    except Refusal:
        raise
    except ModuleNotFoundError as error:
        if error.name and (where == error.name or where.startswith(error.name + ".")):
            raise Refusal(
                f"there is no module {error.name!r}; expected a file, block.py, or what import "
                "takes from here"
            ) from error
        raise Refusal(f"{where} needs {error.name!r}, which cannot be imported") from error
    except Exception as error:
        raise Refusal(f"{where} raised {type(error).__name__} when imported: {error}") from error


def run(flags: argparse.Namespace, given: Given, stream: TextIO) -> Report:
    """Checks, with a bar on a terminal."""
    console = Console(file=stream, highlight=False, soft_wrap=True)
    bar = Progress(
        TextColumn("check {task.completed:.0f} of {task.total:.0f}"),
        BarColumn(bar_width=24),
        TextColumn("{task.description}"),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    task = bar.add_task("")
    with bar:
        return check(
            given.program,
            given.params,
            given.batch,
            key=given.key,
            devices=tuple(flags.devices.split(",")),
            seeds=flags.seeds,
            surrogate=tuple(filter(None, flags.surrogate.split(","))),
            progress=lambda done, total, what: bar.update(
                task, completed=done, total=total, description=what
            ),
        )


def show(report: Report, stream: TextIO) -> None:
    """A table on a terminal, plain text elsewhere."""
    console = Console(file=stream, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        print(report, file=stream)
        return
    table = Table(box=None, header_style="bold")
    for name in ("stage", "reads", "leaves", "carry", "pullback", "hand-written backward"):
        table.add_column(name)
    for stage in report.stages:
        cells = (stage.name, ", ".join(stage.reads) or "-", str(stage.leaves), stage.carry)
        table.add_row(*cells, stage.pullback, stage.backward or "-")
    console.print(table)
    console.print(report.summary, markup=False, style="green")
    for warning in report.warnings:
        console.print(f"warning: {warning}", markup=False, style="yellow")


def rows(report: Report) -> list[dict[str, Any]]:
    """The stages as JSON takes them."""
    return [stage._asdict() for stage in report.stages]


def failed(error: CheckError) -> dict[str, Any]:
    """A failure as JSON takes it."""
    config = None if error.config is None else asdict(error.config)
    where = {"stage": error.stage, "leaf": error.leaf, "device": error.device, "config": config}
    return {"sound": False, "kind": error.kind, **where, "message": str(error)}


if __name__ == "__main__":
    sys.exit(main())
