"""Would a fault be seen? Breaks the library in many small ways and runs a compact suite each time.

Random mutants change one node of the syntax tree of the schedule, the loop and the backward pass:
a statement dropped, two arguments swapped, a condition negated, off by one. Faults of meaning are
written by hand in tests/faults.py: dropout drawn anew in the recomputation, a tied weight updated
twice. Each is killed if a check of tests/test_engine.py fails, or hangs. No file is written: each
child is forked from a process that has imported torch, and imports the changed source.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from scripts._mutants import ROOT, Mutant, everything, sample
from scripts._mutants_equivalent import EQUIVALENT

EXAMPLES = """examples:
  make mutants                                             200 random mutants and every fault
  make mutants ARGS="--count 30 --seed 7"                  other mutants, fewer
  .venv/bin/python scripts/mutants.py --faults --count 0   only the faults
  .venv/bin/python scripts/mutants.py --all                every mutant that there is (hours)

A survivor is printed as a diff. Either no test sees it, and tests/test_engine.py wants a general
property more; or it changes nothing, and scripts/_mutants_equivalent.py says why."""


class Verdict(NamedTuple):
    """What became of one mutant or fault."""

    name: str
    killed: bool
    by: str
    """The check that failed, and with what; ``"hang"``, ``"death"``, or ``""``."""
    seconds: float


class _Finder(importlib.abc.MetaPathFinder):
    """Imports one module from changed source, and all others as they are."""

    def __init__(self, mutant: Mutant):
        self.mutant = mutant

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.mutant.module:
            return None
        file = str(ROOT / self.mutant.file)
        return importlib.util.spec_from_file_location(name, file, loader=_Loader(name, file, self))


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, file: str, finder: _Finder):
        super().__init__(name, file)
        self.source = finder.mutant.source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, self.path, "exec", dont_inherit=True)


def suite(module: ModuleType) -> Iterator[tuple[str, Callable[[], None]]]:
    """The checks of tests/test_engine.py in the order of the file, the cheapest first."""
    for name, check in vars(module).items():
        if name.startswith("test_"):
            yield name, check


def run_suite() -> str:
    """The first check that fails and its error, or nothing."""
    try:
        import tests.test_engine as engine
    except Exception as error:
        return f"import: {type(error).__name__}: {error}"
    for name, check in suite(engine):
        try:
            check()
        except Exception as error:
            return f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[:1]}"
    return ""


def run_mutant(mutant: Mutant) -> str:
    """Runs in a child, where mtfunc is not imported yet."""
    sys.meta_path.insert(0, _Finder(mutant))
    return run_suite()


def run_fault(name: str) -> str:
    """Runs in a child: the suite under one fault of meaning."""
    import tests.test_engine  # noqa: F401 (what it computes once, it computes without the fault)
    from tests.faults import FAULTS

    with FAULTS[name]():
        return run_suite()


class _Child(NamedTuple):
    name: str
    pid: int
    pipe: int
    start: float


def _fork(name: str, work: Callable[[], str]) -> _Child:
    receive, send = os.pipe()
    pid = os.fork()
    if pid:
        os.close(send)
        return _Child(name, pid, receive, time.perf_counter())
    status = 1
    try:
        os.close(receive)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(null, stream)
        warnings.simplefilter("error")
        try:
            said = work()
        except BaseException:
            said = "death: " + traceback.format_exc().strip().splitlines()[-1]
        os.write(send, (said or "survived").encode()[:4000])
        status = 0
    finally:
        os._exit(status)


def _reap(child: _Child, limit: float) -> Verdict | None:
    """The child's verdict, if it has one by now."""
    seconds = time.perf_counter() - child.start
    ready = bool(select.select([child.pipe], [], [], 0)[0])
    if not ready and seconds < limit:
        return None
    said = os.read(child.pipe, 4000).decode(errors="replace") or "death" if ready else "hang"
    if not ready:
        os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
    os.close(child.pipe)
    survived = said == "survived"
    return Verdict(child.name, not survived, "" if survived else said, seconds)


def run_all(
    work: list[tuple[str, Callable[[], str]]],
    jobs: int,
    limit: float,
    until: float,
    tell: Callable[[Verdict], None],
) -> list[Verdict]:
    """Verdicts in the order in which they come; what does not begin before ``until`` is left."""
    waiting, running, done = list(reversed(work)), [], []
    while running or (waiting and time.perf_counter() < until):
        while waiting and len(running) < jobs and time.perf_counter() < until:
            running.append(_fork(*waiting.pop()))
        select.select([child.pipe for child in running], [], [], 0.2)
        for child in list(running):
            verdict = _reap(child, limit)
            if verdict is not None:
                running.remove(child)
                done.append(verdict)
                tell(verdict)
    return done


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="random mutants (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which of them (%(default)s)")
    parser.add_argument("--all", action="store_true", help="every mutant, not a sample")
    parser.add_argument("--faults", action="store_true", help="the faults of tests/faults.py too")
    parser.add_argument("--jobs", type=int, default=2, help="children at a time (%(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=30, help="begin nothing after so long (%(default)s)"
    )
    parser.add_argument(
        "--limit", type=float, help="seconds until a child hangs (5 and 4 times an unchanged run)"
    )
    parser.add_argument("--out", type=Path, help="a JSON file for the verdicts")
    return parser.parse_args()


def main() -> int:
    """Returns 0 if every fault and at least nine mutants in ten that are not equivalent died."""
    flags = _flags()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    begun = time.perf_counter()
    import torch

    torch.set_num_threads(1)
    assert "mtfunc" not in sys.modules, "mtfunc is imported, so no child can change it"
    (plain,) = run_all([("unchanged", run_suite)], 1, 300, begun + 300, lambda verdict: None)
    if plain.killed:
        print(f"the unchanged library fails: {plain.by}")
        return 2
    limit = flags.limit or 5 + 4 * plain.seconds * flags.jobs
    print(f"unchanged: passes in {plain.seconds:.1f} s; a child hangs after {limit:.0f} s")

    whole = everything()
    drawn = whole if flags.all else sample(whole, flags.count, flags.seed)
    named = {f"{m.file}:{m.line} {m.operator} #{i}": m for i, m in enumerate(drawn)}
    reasons = {(file, function, line): why for file, function, line, why in EQUIVALENT}
    argued = {n for n, m in named.items() if (m.file, m.function, m.after) in reasons}
    work: list[tuple[str, Callable[[], str]]] = []
    faults = _fault_names() if flags.faults else []
    for name in faults:
        work.append((f"fault {name}", lambda name=name: run_fault(name)))
    for name, mutant in named.items():
        if name not in argued:
            work.append((name, lambda mutant=mutant: run_mutant(mutant)))
    count = 0

    def tell(verdict: Verdict) -> None:
        nonlocal count
        count += 1
        if not verdict.killed or count % 20 == 0:
            what = f"killed by {verdict.by[:80]}" if verdict.killed else "SURVIVED"
            print(f"{count:4} of {len(work)}  {verdict.seconds:5.1f} s  {verdict.name}  {what}")
            sys.stdout.flush()

    done = run_all(work, flags.jobs, limit, begun + 60 * flags.minutes, tell)
    for verdict in done:
        if not verdict.killed and verdict.name in named:
            print(
                f"\n{verdict.name} in {named[verdict.name].function}\n{named[verdict.name].diff()}"
            )
    hand = [v for v in done if v.name not in named]
    rand = [v for v in done if v.name in named]
    dead, hung = sum(v.killed for v in rand), sum(v.by == "hang" for v in done)
    print(
        f"\nfaults: {sum(v.killed for v in hand)} of {len(hand)} killed"
        f"\nrandom mutants: {dead} of {len(rand)} killed ({100 * dead / max(len(rand), 1):.1f} %); "
        f"{len(argued)} more are equivalent; {len(whole)} sites"
        f"\n{hung} hung; {len(work) - len(done)} not begun; "
        f"{time.perf_counter() - begun:.0f} s in all"
    )
    if flags.out:
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "seed": flags.seed,
            "sites": len(whole),
            "equivalent": sorted(argued),
            "verdicts": [v._asdict() for v in done],
        }
        flags.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(not all(v.killed for v in hand) or dead < 0.9 * len(rand) or len(done) < len(work))


def _fault_names() -> list[str]:
    """Read in a child, since they import mtfunc."""

    def names() -> str:
        from tests.faults import FAULTS

        return "\n".join(FAULTS)

    (said,) = run_all([("names", names)], 1, 60, time.perf_counter() + 60, lambda verdict: None)
    return said.by.splitlines()


if __name__ == "__main__":
    sys.exit(main())
