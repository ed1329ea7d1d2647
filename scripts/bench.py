"""How long a streamed training step takes beside its peers, and how much memory it needs.

Five ways to train one Llama from the same parameters on the same batches, each in a process of
its own, all pinned to the same cores:

    streamed    mtfunc: one layer's vector-Jacobian product at a time, updated at once; the last
                layers' are kept instead of computed again, within --residuals bytes
    checkpoint  torch.utils.checkpoint around each layer, then fused AdamW
    hooked      the same, each parameter updated by a hook as soon as its gradient is there
    plain       plain autograd, which keeps every activation, then fused AdamW
    jax         lax.scan over stacked layers, jax.checkpoint, optax; one compiled step

The arms take turns step by step in a new random order each round, and all but one sleep, so that
whatever else the machine does falls on all alike. What is compared is therefore the ratio within
a round: its median over rounds and a bootstrap interval of that median. An interval wider than
0.1, or fewer than 20 rounds, is no measurement and is called that.

    make bench                                    # all arms at 97.5M parameters, about 15 minutes
    make bench ARGS="--quick"                     # a rehearsal: a toy model and three rounds
    make bench ARGS="--arms streamed,hooked --rounds 40"
    make bench ARGS="--depths 6,12,24"            # does memory grow with depth?
    make bench ARGS="--markdown docs/bench.md --json bench.jsonl"
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

import mtfunc as mt
from models import llama
from scripts import _flags
from scripts._bench_report import Machine, Result, compare, depth_table, markdown, summary, table
from scripts._bench_torch import flatten

ARMS = ("streamed", "checkpoint", "hooked", "plain", "jax")
RESIDUALS = 200_000_000
"""Bytes: three of the twelve layers, which leaves the streamed arm below the hooked one."""
WARM_UP = 3
TOLERANCE = 1e-5
"""Of the loss, relative: float32 sums in another order, through three steps of Adam."""
ADAMW = {"lr": 3e-4, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "decay": 0.1}
WITHOUT_JAX = "jax or optax cannot be imported; pip install -e '.[bench]' brings both"


class Child:
    """An arm in its own process, asleep until it is asked for something."""

    def __init__(self, setup: dict[str, Any]):
        self.arm = setup["arm"]
        threads = str(setup["threads"])
        # Threads that spin while they wait would take the cores of the arm whose turn it is.
        waiting = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
        counts = {name: threads for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from scripts import _bench_child; _bench_child.main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | waiting | counts | {"JAX_PLATFORMS": "cpu"},
        )
        self._send(setup)

    @functools.cached_property
    def ready(self) -> dict[str, Any]:
        """What the arm says once it is built; several are built side by side."""
        return self._receive()

    def ask(self, do: str, index: int) -> dict[str, Any]:
        """What the arm answers to an order: ``step`` or ``flops`` on batch ``index``."""
        assert self.ready, "answers come in the order of orders, and being built is the first"
        self._send({"do": do, "index": index})
        return self._receive()

    def _send(self, order: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        # A process that has ended breaks the pipe; what it said is known when its answer is read.
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(order), file=self.process.stdin, flush=True)

    def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise SystemExit(
                f"bench: arm {self.arm!r} ended with status {code}; its own message is above "
                "(-9 with none is often memory running out). Leave it out with --arms"
            )
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.terminate()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, its defaults filled in and checked."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, count = parser.add_argument, {"type": _flags.count, "metavar": "N"}
    add("--arms", type=arms, metavar="A,B", help="which arms, the first compared with the others")
    add("--rounds", **count, help="steps of each arm after warm-up (20)")
    add("--threads", **count, default=2, help="cores that all arms share (2)")
    add("--model", default="llama-bench", choices=llama.CONFIGS, help="the Llama (llama-bench)")
    add("--layers", **count, help="another depth")
    add("--width", **count, help="another width, in heads of 64 and 8/3 of it in the middle")
    add("--vocab", **count, help="another vocabulary")
    add("--batch", **count, help="rows a step (2)")
    add("--context", **count, help="tokens a row (512)")
    add("--depths", type=depths, metavar="6,12,24", help="transient memory by depth, nothing else")
    add(
        "--residuals",
        type=_flags.whole,
        metavar="BYTES",
        default=RESIDUALS,
        help=f"what the streamed arm may keep of its forward pass ({RESIDUALS:,})",
    )
    add("--seed", type=_flags.seed, default=0, metavar="N", help="of weights, data and order (0)")
    add("--json", type=Path, metavar="FILE", help="every step and the summary as JSON lines")
    add("--markdown", type=Path, metavar="FILE", help="the results as a page of the docs")
    add("--quick", action="store_true", help="a toy model and three rounds, to see it work")
    args = parser.parse_args(argv)

    quick = {"layers": 2, "width": 64, "vocab": 256, "batch": 2, "context": 32, "rounds": 3}
    usual = {"layers": None, "width": None, "vocab": None, "batch": 2, "context": 512, "rounds": 20}
    for name, value in (quick if args.quick else usual).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if not args.arms:
        args.arms = ["streamed"] if args.depths else available(ARMS)
    elif missing := set(args.arms) - set(available(args.arms)):
        parser.error(f"--arms {missing.pop()}: {WITHOUT_JAX}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if args.threads > (cores or 1):
        parser.error(f"--threads {args.threads}: this machine gives {cores}. Ask for fewer")
    return args


def arms(text: str) -> list[str]:
    """Names of arms, each once."""
    names = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in ARMS]:
        raise argparse.ArgumentTypeError(
            f"unknown arms {', '.join(unknown)}; expected some of {', '.join(ARMS)}"
        )
    return names


def depths(text: str) -> list[int]:
    """Numbers of layers."""
    try:
        return sorted({_flags.count(depth) for depth in text.split(",")})
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r}; expected depths such as 6,12,24") from None


def available(names: Sequence[str]) -> list[str]:
    """Those arms whose libraries are installed."""
    found = all(importlib.util.find_spec(library) for library in ("jax", "optax"))
    return [name for name in names if found or name != "jax"]


def config_of(args: argparse.Namespace, depth: int | None = None) -> llama.Config:
    """The model that the command line asks for."""
    config = llama.CONFIGS[args.model]
    if args.width:
        heads = max(1, args.width // 64)
        ffn = round(args.width * 8 / 3 / 64) * 64
        config = dataclasses.replace(config, width=args.width, heads=heads, kv_heads=heads, ffn=ffn)
    changes = {"depth": depth or args.layers, "vocab": args.vocab}
    return dataclasses.replace(config, **{k: v for k, v in changes.items() if v})


def setup_of(
    args: argparse.Namespace, config: llama.Config, folder: Path, *, batch: int, context: int
) -> dict[str, Any]:
    """What a child needs to know of a model, whose parameters are drawn and written here."""
    params = flatten(llama.init(config, mt.random.key(args.seed)))
    file = folder / f"{config.depth}x{config.width}.safetensors"
    save_file(params, file)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(args.threads)
    return {
        "config": dataclasses.asdict(config),
        "params": str(file),
        "paths": list(params),
        "size": sum(leaf.numel() for leaf in params.values()),
        "vocab": config.vocab,
        "batch": batch,
        "context": context,
        "seed": args.seed,
        "threads": args.threads,
        "cpus": sorted(cores)[: args.threads],
        "adamw": ADAMW,
        "residuals": args.residuals,
    }


@contextlib.contextmanager
def setups(args: argparse.Namespace, depth: int | None = None) -> Iterator[dict[str, Any]]:
    """The setup of the model and, inside it, of the small one that warms libraries up."""
    config = config_of(args, depth)
    # Wide enough to start every thread pool, small enough to leave no mark on memory.
    tiny = dataclasses.replace(config, depth=2, width=256, heads=4, kv_heads=4, ffn=512, vocab=256)
    with tempfile.TemporaryDirectory(prefix="mtfunc-bench-") as folder:
        small = setup_of(args, tiny, Path(folder), batch=2, context=64)
        setup = setup_of(args, config, Path(folder), batch=args.batch, context=args.context)
        yield setup | {"small": small}


def start(stack: contextlib.ExitStack, setup: dict[str, Any], arm: str) -> Child:
    """A child that has built its arm."""
    small = setup["small"] | {"arm": arm}
    child = Child(setup | {"arm": arm, "small": small})
    stack.callback(child.close)
    return child


def same_start(children: Sequence[Child], steps: list[dict[str, dict[str, Any]]]) -> str:
    """A line on how far the arms' losses lie apart.

    Raises:
        SystemExit: they do not start from the same parameters, or train differently.
    """
    digests = {child.arm: child.ready["digest"] for child in children}
    if len(set(digests.values())) > 1:
        raise SystemExit(f"bench: the arms hold different parameters at the start: {digests}")
    apart = 0.0
    for index, answers in enumerate(steps):
        losses = {arm: answer["loss"] for arm, answer in answers.items()}
        # numpy's extremes are NaN where one value is; Python's depend on the order.
        spread = float(np.ptp(list(losses.values())) / abs(next(iter(losses.values()))))
        if not spread <= TOLERANCE:
            raise SystemExit(
                f"bench: losses of step {index} lie {spread:.1e} apart, expected {TOLERANCE:g} at "
                f"most: {losses}. The arms do not train the same model"
            )
        apart = max(apart, spread)
    shown = ", ".join(f"{next(iter(answers.values()))['loss']:.5f}" for answers in steps)
    return (
        f"{len(digests)} arms start from the same parameters; their losses in the first "
        f"{len(steps)} steps ({shown}) lie {apart:.1e} apart, relative (allowed {TOLERANCE:g})"
    )


def measure(args: argparse.Namespace) -> Result:
    """All arms, in turns."""
    order = np.random.default_rng(args.seed)
    with setups(args) as setup, contextlib.ExitStack() as stack:
        say(f"starting {', '.join(args.arms)}; all at once, so their builds share the cores …")
        children = [start(stack, setup, arm) for arm in args.arms]
        for child in children:
            say(f"{child.arm} is ready ({child.ready['versions']})")
        # One batch again and again, so that the loss shows the updates and not only the forward.
        warm = [{c.arm: turn(c, "warm-up", 0) for c in children} for _ in range(WARM_UP)]
        check = same_start(children, warm)
        say(check)
        machine, rounds = Machine.watch(setup["cpus"]), []
        began = time.perf_counter()
        for number in range(args.rounds):
            name = f"round {number + 1}/{args.rounds}"
            turns = [children[i] for i in order.permutation(len(children))]
            answers = {c.arm: turn(c, name, WARM_UP + number) for c in turns}
            rounds.append({arm: answers[arm] for arm in args.arms})
            took = (time.perf_counter() - began) / (number + 1)
            left = took * (args.rounds - number - 1)
            times = "  ".join(f"{arm} {a['seconds']:.2f}" for arm, a in rounds[-1].items())
            say(f"{name}  {times}  (about {left / 60:.1f} min left)")
        machine = machine.seen(
            sum(a["user"] + a["system"] for answers in rounds for a in answers.values())
        )
        say("counting floating-point operations …")
        flops = {c.arm: c.ask("flops", WARM_UP + args.rounds)["flops"] for c in children}
    return Result(
        setup={
            k: setup[k]
            for k in ("config", "size", "batch", "context", "threads", "seed", "residuals")
        },
        machine=machine,
        check=check,
        ready={child.arm: child.ready for child in children},
        warm=warm,
        rounds=rounds,
        flops=flops,
    )


def turn(child: Child, name: str, index: int) -> dict[str, Any]:
    """One step of one arm, announced on a terminal while it runs."""
    if sys.stderr.isatty():
        print(f"\r\033[K{name}: {child.arm} …", end="", file=sys.stderr, flush=True)
    return child.ask("step", index)


def say(line: str) -> None:
    """A line of progress, over whatever a terminal shows on the last one."""
    print(f"\r\033[K{line}" if sys.stderr.isatty() else line, file=sys.stderr, flush=True)


def measure_depths(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Transient bytes of each arm at each depth, one process at a time."""
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in args.arms}
    for depth in args.depths:
        with setups(args, depth) as setup:
            for arm in args.arms:
                with contextlib.ExitStack() as stack:
                    child = start(stack, setup, arm)
                    steps = [turn(child, f"{arm}, {depth} layers", i) for i in range(WARM_UP + 2)]
                    row = {"arm": arm, "depth": depth, "size": setup["size"]}
                    row |= summary(child.ready, steps)
                    row["carry"] = 4 * args.batch * args.context * setup["config"]["width"]
                    found[arm].append(row)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what the command line asks for and prints what was found."""
    args = parse(argv)
    left_out = args.arms == list(ARMS[:-1]) and available(ARMS) == args.arms
    notes = [f"There is no jax arm here, since {WITHOUT_JAX}."] if left_out else []
    command = "python scripts/bench.py " + " ".join(sys.argv[1:] if argv is None else argv)
    if args.depths:
        rows = measure_depths(args)
        page = text = depth_table(rows)
        records = [row for found in rows.values() for row in found]
    else:
        result = measure(args)
        rows = compare(result)
        text = "\n".join([table(rows), "", str(result.machine), *notes])
        page = markdown(result, rows, command.strip(), notes)
        records = result.records() + rows
    print(text)
    if args.markdown:
        args.markdown.write_text(page + "\n", encoding="utf-8")
    if args.json:
        lines = [json.dumps(record) + "\n" for record in records]
        args.json.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
