"""Measures optimizers beside a plain copy: parameters a second, bytes a second."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from mtfunc import optim
from mtfunc._base import Leaves, Optimizer

EPILOG = """
An update does little arithmetic on much data, so memory bandwidth bounds it. Bytes are those that
the algorithm must move: each parameter and moment is read and written, each gradient is read. With
float32 parameters and gradients that is 28 bytes a parameter for adamw, 20 for lion and for sgd
with momentum; 2 fewer with bfloat16 gradients. The yardstick, copy_, moves 8 bytes an element.
(What a processor fetches in order to overwrite it is not counted; copy_ pays for that, an update in
place does not, so a fraction may exceed 1.)

The rows run in turn, round after round, so that a busy moment hits all of them alike; each figure
is the median over the rounds, and "of copy_" is the median of the ratios within a round. Choose a
size far above the last-level cache: 64M float32 numbers are 256 MB.

  python scripts/bench_optim.py                        the default: 64M parameters in 12 leaves
  python scripts/bench_optim.py --leaves 5000          what many small leaves cost
  python scripts/bench_optim.py --only adamw copy --json | jq .of_copy
"""

PREFIXES = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    grads: str
    params: int
    seconds: float
    gparams_per_second: float
    gigabytes_per_second: float
    of_copy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """Something to time: a function that touches ``bytes_each`` for every parameter."""

    name: str
    grads: str
    bytes_each: int
    run: Callable[[], object]


def size(text: str) -> int:
    """Reads ``64M`` as 64 * 2**20."""
    factor = PREFIXES.get(text[-1:].upper(), 1)
    return int(text[:-1] if factor > 1 else text) * factor


def leaves(total: int, count: int, dtype: torch.dtype, seed: int) -> Leaves:
    """Views of one buffer of small normal numbers, of nearly equal sizes."""
    flat = torch.empty(total).normal_(0, 0.01, generator=torch.Generator().manual_seed(seed))
    return {f"leaf/{i}": part for i, part in enumerate(flat.to(dtype).tensor_split(count))}


def contender(name: str, optimizer: Optimizer, params: Leaves, grads: Leaves) -> Contender:
    """Our optimizer, updating ``params`` with moments of its own."""
    state = optimizer.init(params)
    gradient = next(iter(grads.values()))
    bytes_each = 8 * (1 + len(state)) + gradient.itemsize
    step = iter(range(10**9))
    return Contender(
        name=name,
        grads=str(gradient.dtype).removeprefix("torch."),
        bytes_each=bytes_each,
        run=lambda: optimizer.update_(params, grads, state, next(step)),
    )


def torch_adamw(name: str, params: Leaves, grads: Leaves) -> Contender:
    """torch's fused AdamW; gradients of another dtype are converted before each step."""
    tensors = [leaf.detach().requires_grad_() for leaf in params.values()]
    optimizer = torch.optim.AdamW(tensors, lr=1e-5, fused=True)
    gradient = next(iter(grads.values()))

    def run() -> None:
        for tensor, grad in zip(tensors, grads.values()):
            tensor.grad = grad.to(tensor.dtype)
        optimizer.step()

    return Contender(
        name=name,
        grads=str(gradient.dtype).removeprefix("torch."),
        bytes_each=24 + gradient.itemsize,
        run=run,
    )


def contenders(total: int, count: int, seed: int) -> list[Contender]:
    """Everything that can be timed, over the same parameters and gradients."""
    params = leaves(total, count, torch.float32, seed)
    narrow, wide = (leaves(total, count, d, seed + 1) for d in (torch.bfloat16, torch.float32))
    source, target = torch.zeros(total), torch.ones(total)
    ours = {
        "adamw": optim.adamw(1e-5),
        "sgd": optim.sgd(1e-5),
        "sgd, momentum": optim.sgd(1e-5, momentum=0.9),
        "lion": optim.lion(1e-5),
    }
    return [
        Contender(name="copy_", grads="", bytes_each=8, run=lambda: target.copy_(source)),
        *(
            contender(name, o, params, grads)
            for name, o in ours.items()
            for grads in (wide, narrow)
        ),
        *(torch_adamw("torch AdamW", params, grads) for grads in (wide, narrow)),
    ]


def measure(rows: list[Contender], total: int, rounds: int) -> list[Row]:
    """Runs all in turn, ``rounds`` times after a warm-up."""
    seconds: list[list[float]] = [[] for _ in rows]
    for number in range(rounds + 1):
        for row, times in zip(rows, seconds):
            start = time.perf_counter()
            row.run()
            if number:
                times.append(time.perf_counter() - start)
    copy = next(times for row, times in zip(rows, seconds) if row.name == "copy_")
    return [
        Row(
            name=row.name,
            grads=row.grads,
            params=total,
            seconds=(median := statistics.median(times)),
            gparams_per_second=total / median / 1e9,
            gigabytes_per_second=total * row.bytes_each / median / 1e9,
            of_copy=statistics.median(row.bytes_each * c / t / 8 for c, t in zip(copy, times)),
        )
        for row, times in zip(rows, seconds)
    ]


def main() -> None:
    """Parses the command line, measures, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=size, default=size("64M"), help="how many (default 64M)")
    parser.add_argument("--leaves", type=int, default=12, help="split into so many (default 12)")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds (default 9)")
    parser.add_argument("--threads", type=int, help="torch's threads (default: its own choice)")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="rows whose name contains one")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters (default 0)")
    parser.add_argument("--json", action="store_true", help="a JSON line for each row, no table")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = contenders(options.params, options.leaves, options.seed)
    if options.only is not None:
        wanted = ("copy_", *options.only)
        rows = [row for row in rows if any(name in row.name for name in wanted)]
    results = measure(rows, options.params, options.rounds)
    if options.json:
        for row in results:
            print(json.dumps(asdict(row)))
        return
    print(
        f"{options.params / 1e6:.1f} million float32 parameters in {options.leaves} leaves, "
        f"{torch.get_num_threads()} threads, medians of {options.rounds} rounds\n"
    )
    print(f"{'':16}{'gradients':>10}{'ms':>10}{'Gparam/s':>10}{'GB/s':>8}{'of copy_':>10}")
    for row in results:
        print(
            f"{row.name:16}{row.grads:>10}{row.seconds * 1e3:10.1f}{row.gparams_per_second:10.2f}"
            f"{row.gigabytes_per_second:8.1f}{row.of_copy:10.2f}"
        )


if __name__ == "__main__":
    main()
