"""Train a model on text, byte by byte, streamed.

``prepare`` turns flags into what a run needs, ``train`` is the loop, and ``finish`` draws the
pictures and writes the sample.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

# Threads that spin while they wait slow each other down where cores are shared: up to tenfold.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import models
import mtfunc as mt
from mtfunc.io import checkpoints
from scripts import _bigram, _corpus, _flags, _pictures, _run
from scripts._check import check_finite, first_difference
from scripts._corpus import Corpus
from scripts._flags import Refusal
from scripts._interrupt import interruptible
from scripts._memory import memory
from scripts._progress import Display, clock
from scripts._run import CHECKPOINTS, METRICS, TIMINGS
from scripts._sample import readable, sample

EXAMPLES = """\
examples:
  .venv/bin/python scripts/train.py
      llama-tiny on the source of Python's standard library: a few minutes on a CPU

  .venv/bin/python scripts/train.py --corpus notes/ --steps 4000 --out runs/notes
      every text file under notes/, longer

  .venv/bin/python scripts/train.py --batch 32 --micro-batches 4
      32 sequences a step, of which 8 at a time are worked on

  .venv/bin/python scripts/train.py --resume --out runs/notes
      go on after Ctrl-C or a crash, bit for bit; add --steps 8000 to go further

  .venv/bin/python scripts/train.py --steps 50 --json 2>log | jq .heldout
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
ASKED = ("no_check", "prompt", "sample_bytes", "temperature")
"""Settings of what is checked and sampled."""
KEPT = (*PINNED, *ASKED, "corpus", "device", "steps", "save_every")
"""Settings that a resumed run has unless told otherwise."""


def parser() -> argparse.ArgumentParser:
    """The flags, with defaults for ``llama-tiny`` on two CPU cores."""
    made = _flags.parser(__doc__.partition("\n")[0], EXAMPLES, steps=800, context=128, batch=8)
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
        help="steps until the peak, a tenth of --steps at most (%(default)s)",
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
        default=32_768,
        metavar="N",
        help="how much of it, in evenly spread windows (%(default)s)",
    )
    group.add_argument(
        "--prompt", default="def ", metavar="TEXT", help="of the sample (%(default)r)"
    )
    group.add_argument(
        "--sample-bytes",
        type=_flags.whole,
        default=400,
        metavar="N",
        help="length of it (%(default)s)",
    )
    group.add_argument(
        "--temperature", type=_flags.positive, default=0.7, metavar="X", help="of it (%(default)s)"
    )
    return made


@dataclass(frozen=True, kw_only=True)
class Run:
    """What does not change while a run goes on."""

    flags: argparse.Namespace
    out: Path
    corpus: Corpus
    config: Any
    program: mt.Program
    logits: mt.Program
    learning_rate: Callable[[int], float]
    heldout: list[Any]
    bigram: float
    stream: TextIO

    def batches(self, step: int) -> list[Any]:
        """The micro-batches of a step."""
        shape = {name: vars(self.flags)[name] for name in ("seed", "context", "batch")}
        return _corpus.batches(
            self.corpus.train, step, micro_batches=self.flags.micro_batches, **shape
        )

    @property
    def model(self) -> dict[str, Any]:
        """What a checkpoint must say to be one of this run's model."""
        return {
            "model": self.flags.model,
            "config": json.loads(json.dumps(asdict(self.config), default=str)),
            "program": str(self.program),
        }

    def checkpoints(self) -> list[Path]:
        """Those there are, oldest first."""
        return checkpoints(self.out / CHECKPOINTS)

    def go_on(self) -> str:
        """The command that continues this run."""
        script = os.path.relpath(__file__)
        json = ["--json"] * self.flags.json
        return shlex.join([sys.orig_argv[0], script, "--resume", "--out", str(self.out), *json])

    def say(self, text: str) -> None:
        """Tells a line, on stderr where stdout is for JSON."""
        print(text, file=self.stream, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
        The exit status: 0 when trained, 1 when the numbers went wrong, 130 when interrupted. Bad
        input leaves with 2.
    """
    made = parser()
    with _flags.telling(made):
        run, state = prepare(parse(made, arguments))
    if not run.flags.no_check and not gradients_agree(run, state):
        return 1
    started = time.perf_counter()
    try:
        state, stopped = train(run, state)
        if stopped:
            run.say(f"stopped after step {state.step}; go on with\n  {run.go_on()}")
            return 130
        report(run, finish(run, state, time.perf_counter() - started))
    except mt.NonFiniteError as error:
        run.say(
            f"{error}\n{kept(run)}\nThe same settings lead there again: start another run with a "
            "lower --learning-rate or another --out"
        )
        return 1
    except KeyboardInterrupt:
        run.say(f"stopped at once. {kept(run)}")
        return 130
    return 0


def parse(made: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags; those of a run to resume count where none are given.

    Raises:
        Refusal: they do not go together, or not with that run.
    """
    flags = made.parse_args(arguments)
    out = _run.choose(flags.out, model=flags.model, resume=flags.resume)
    if flags.resume:
        saved = _run.read_settings(out)
        made.set_defaults(**{name: saved[name] for name in KEPT if name in saved})
        flags = made.parse_args(arguments)
        _run.check_settings(out, flags, saved, PINNED)
    flags.out = out
    _flags.check(flags)
    return flags


def prepare(flags: argparse.Namespace) -> tuple[Run, mt.TrainState]:
    """Reads the corpus, makes the model and starts or resumes its state.

    Raises:
        Refusal: the model, the corpus or the checkpoint is not what the flags ask for.
    """
    with _flags.refusing(KeyError):
        module, config = models.get(flags.model)
    if flags.context > config.context:
        raise Refusal(
            f"--context {flags.context}: {flags.model} was made for {config.context} tokens at "
            "most. Take a smaller --context or another --model"
        )
    corpus = _corpus.load(flags.corpus, context=flags.context)
    _corpus.check_vocabulary(corpus, flags.model, config.vocab)
    heldout = _corpus.heldout(
        corpus.heldout, context=flags.context, batch=flags.batch, limit=flags.heldout_tokens
    )
    run = Run(
        flags=flags,
        out=flags.out,
        corpus=corpus,
        config=config,
        program=module.program(config),
        logits=module.program(config, output="logits"),
        learning_rate=mt.optim.cosine(
            flags.learning_rate,
            flags.steps,
            warmup=min(flags.warmup, flags.steps // 10),
            final=flags.learning_rate / 10,
        ),
        heldout=heldout,
        bigram=_bigram.loss(_bigram.log_probabilities(corpus.train), heldout),
        stream=sys.stderr if flags.json else sys.stdout,
    )
    run.say(f"{flags.model}: {models.count_params(config):,} parameters on {flags.device}")
    run.say(str(corpus))
    key = mt.random.key(flags.seed)
    params = module.init(config, mt.random.fold_in(key, "init"))
    state = mt.init(run.program, params, optimizer(run), mt.random.fold_in(key, "train"))
    del params
    return run, begin(run, state)


def optimizer(run: Run) -> mt.Optimizer:
    """AdamW with the decay rates that language models are trained with."""
    return mt.adamw(run.learning_rate, b1=0.9, b2=0.95, weight_decay=run.flags.weight_decay)


def begin(run: Run, state: mt.TrainState) -> mt.TrainState:
    """Writes the settings of a new run, or fills the state from the checkpoint of an old one.

    Raises:
        Refusal: the corpus is not the one it was, or the checkpoint of another model or damaged.
    """
    flags = run.flags
    settings = {name: vars(flags)[name] for name in KEPT} | {"digest": run.corpus.digest}
    if flags.resume:
        was = _run.read_settings(run.out).get("digest")
        if was != run.corpus.digest:
            raise Refusal(
                f"corpus {run.corpus.name}: its bytes are not those that the run in {run.out} was "
                f"started with (SHA-256 {run.corpus.digest[:12]}…, expected {str(was)[:12]}…). "
                "Bring back the old text, or start another run with another --out"
            )
        if run.checkpoints():
            with _flags.refusing(ValueError, OSError):
                state = mt.restore(run.out / CHECKPOINTS, like=state, **run.model)
        if state.step > flags.steps:
            raise Refusal(
                f"--steps {flags.steps}: the run in {run.out} has taken {state.step} already; "
                "expected as many or more. Leave --steps away or raise it"
            )
        done = "; it is finished, and --steps N takes it further" * (state.step == flags.steps)
        run.say(f"resuming {run.out} at step {state.step:,} of {flags.steps:,}{done}")
    with _flags.refusing(OSError):
        _run.write_settings(run.out, settings)
        for name in (METRICS, TIMINGS):
            _run.truncate(run.out / name, step=state.step)
    return state


def gradients_agree(run: Run, state: mt.TrainState) -> bool:
    """Compares the first gradients with the standard graph's and says what came of it."""
    difference = first_difference(
        run.program,
        state.params,
        run.batches(state.step),
        mt.random.fold_in(state.key, state.step),
        device=run.flags.device,
    )
    if difference is None:
        run.say("check: loss and gradients equal the standard autograd graph's, bitwise")
        return True
    run.say(
        f"check: {difference} between the streamed step and the standard autograd graph; expected "
        "equal bits. Nothing was trained. --no-check goes on all the same"
    )
    return False


def train(run: Run, state: mt.TrainState) -> tuple[mt.TrainState, bool]:
    """The loop: a step, its row in the metrics, and now and then a look and a checkpoint.

    Returns:
        The last state, and whether Ctrl-C ended the run before its last step.
    """
    flags, metrics = run.flags, run.out / METRICS
    step = mt.train_step(run.program, optimizer(run), device=flags.device)
    evaluate = mt.evaluate(run.program, device=flags.device)

    def look(state: mt.TrainState) -> dict[str, float]:
        if state.step % flags.evaluate_every and state.step != flags.steps:
            return {}
        loss = mt.Mean.pool(evaluate(state.params, run.heldout))
        check_finite(f"step {state.step}: the held-out loss is {loss},", loss)
        return {"heldout": loss.item()}

    display = Display(
        flags.steps,
        done=state.step,
        tokens=flags.batch * flags.context,
        stream=run.stream,
    )
    with display, interruptible() as asked:
        if not _run.rows(metrics):
            _run.append(metrics, {"step": 0} | look(state))
        stop = asked()
        while state.step < flags.steps and not stop:
            start, rate = time.perf_counter(), run.learning_rate(state.step)
            last = state.step + 1 == flags.steps
            state, found = step(state, run.batches(state.step), record=last)
            loss, seconds = found["loss"].item(), time.perf_counter() - start
            row = {"step": state.step, "loss": loss, "learning_rate": rate}
            _run.append(metrics, row | look(state))
            _run.append(run.out / TIMINGS, {"step": state.step, "seconds": seconds})
            display.update(state.step, loss)
            stop = asked()
            if last or stop or state.step % flags.save_every == 0:
                check_finite(f"step {state.step} is not saved: its parameters are", state.params)
                mt.save(state, run.out / CHECKPOINTS, **run.model)
    if step.timeline:
        title = f"{flags.model}, one step of {flags.batch} × {flags.context} on {flags.device}"
        _pictures.timeline(run.out / "timeline.png", step.timeline, title=title)
    return state, state.step < flags.steps


def finish(run: Run, state: mt.TrainState, seconds: float) -> dict[str, Any]:
    """Draws the losses, writes the sample and sums the run up."""
    flags, rows = run.flags, _run.rows(run.out / METRICS)
    heldout = [row["heldout"] for row in rows if "heldout" in row][-1]
    title = f"{flags.model} on {run.corpus.name}"
    _pictures.losses(run.out / "loss.png", rows, bigram=run.bigram, title=title)
    text = sample(
        mt.forward(run.logits, device=flags.device),
        state.params,
        mt.random.fold_in(state.key, "sample"),
        prompt=flags.prompt.encode() or b"\n",
        length=flags.sample_bytes,
        window=flags.context,
        temperature=flags.temperature,
    )
    (run.out / "sample.txt").write_bytes(text)
    summary = {
        "model": flags.model,
        "device": flags.device,
        "parameters": models.count_params(run.config),
        "steps": state.step,
        "tokens": state.step * flags.batch * flags.context,
        "heldout": nats_and_bits(heldout),
        "bigram": nats_and_bits(run.bigram),
        "heldout_bytes": sum(batch["labels"].numel() for batch in run.heldout),
        "tokens_per_second": rate_of(run),
        "seconds": seconds,
        "memory": memory()._asdict(),
        "out": str(run.out),
        "checkpoint": str(run.checkpoints()[-1]),
        "sample": readable(text),
    }
    (run.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def nats_and_bits(nats: float) -> dict[str, float]:
    """A loss in both units, per byte."""
    return {"nats": nats, "bits": nats / math.log(2)}


def rate_of(run: Run) -> float:
    """Tokens a second of the run's steps, by their median time."""
    seconds = [row["seconds"] for row in _run.rows(run.out / TIMINGS)]
    return run.flags.batch * run.flags.context / statistics.median(seconds)


def report(run: Run, summary: dict[str, Any]) -> None:
    """Tells the summary, to people and, with ``--json``, to programs."""
    run.say(f"\n{summary['sample']}\n")
    run.say(f"on {summary['heldout_bytes']:,} held-out bytes, per byte:")
    for name, key in ((run.flags.model, "heldout"), ("byte bigrams", "bigram")):
        run.say(f"  {name:<14} {summary[key]['nats']:.3f} nats  {summary[key]['bits']:.3f} bits")
    run.say(
        f"{summary['steps']:,} steps at {summary['tokens_per_second']:,.0f} tokens/s, "
        f"{clock(summary['seconds'])} in all, memory {memory()}"
    )
    run.say(f"pictures, metrics, sample and checkpoint are in {run.out}/")
    if run.flags.json:
        print(json.dumps(summary))


def kept(run: Run) -> str:
    """What is left of a run that broke off, and what to do with it."""
    if not run.checkpoints():
        return f"There is no checkpoint yet; start from the beginning with\n  {run.go_on()}"
    return f"{run.checkpoints()[-1]} is kept; go on from it with\n  {run.go_on()}"


if __name__ == "__main__":
    sys.exit(main())
