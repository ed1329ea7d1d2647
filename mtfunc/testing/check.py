"""Streams a program in many ways and compares every bit with the standard graph."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtfunc import _tree, api, optim, random, reference, train
from mtfunc._base import Batch, Key, Params, Path
from mtfunc.backends import check_device
from mtfunc.config import StreamConfig
from mtfunc.engine import as_batches, check_params
from mtfunc.program import Program, Stage
from mtfunc.schedule import Schedule
from mtfunc.testing import advice
from mtfunc.testing.failure import Failure, Results, Run, short
from mtfunc.testing.purity import Visit, copies, visit
from mtfunc.testing.report import CheckError, Report
from mtfunc.testing.surroundings import generators_kept
from mtfunc.trace import is_active

EVERY = 2**62
"""Bytes: no pullback holds more, so all of them are kept."""
CONFIGS = (
    *(
        StreamConfig(slots=slots, grad_slots=grad_slots, carries=carries)
        for slots in (1, 2, 3)
        for grad_slots in (1, 2)
        for carries in ("device", "host")
    ),
    StreamConfig(residuals=EVERY),
    StreamConfig(slots=1, carries="host", residuals=EVERY),
)
RATE, DECAY = 1e-2, 0.1
STEPS_EVERY = 4
"""One streamed pass in so many is followed by an optimizer step."""

Progress = Callable[[int, int, str], None]
Trainable = Callable[[Path, Tensor], bool]


class Task(NamedTuple):
    """What is checked; everything is a copy of the caller's."""

    program: Program
    params: Params
    batch: Batch
    key: Key | None
    trainable: Trainable | None
    surrogate: tuple[str, ...]


def check(
    program: Program,
    params: Params,
    batch: Batch,
    *,
    key: Key | None = None,
    devices: Sequence[str] = ("cpu", "sim"),
    seeds: int = 20,
    trainable: Trainable | None = None,
    surrogate: Sequence[str] = (),
    progress: Progress | None = None,
) -> Report:
    """Whether streaming and recomputation leave a program's gradients exactly as they are.

    Stages are first looked at one by one: whether they are pure functions, and whether their
    hand-written backwards agree with finite differences. Then it means::

        (loss, aux), grads = mt.reference.value_and_grad(program, has_aux=True)(params, batch, key)
        for device, config in ways_to_stream:
            f = mt.value_and_grad(program, device=device, config=config, has_aux=True)
            assert f(params, batch, key) == ((loss, aux), grads)  # in every bit; NaN equals NaN
            # and one step of mt.adamw against torch.optim.AdamW, now and then

    Args:
        program: what ``mt.chain`` returns; its last stage returns the loss.
        params: its parameters; nothing of the caller's is changed.
        batch: one batch, or a list of micro-batches.
        key: for stages that draw random numbers; ``mt.random.key(0)`` unless given.
        devices: ``"sim"`` stands for ``seeds`` simulated interleavings, ``"sim:7"`` for one.
        seeds: how many.
        trainable: as in :func:`mtfunc.value_and_grad`.
        surrogate: names of stages, scans or ``torch.autograd.Function`` classes whose backward is
            on purpose not the derivative, such as a straight-through estimator.
        progress: called as ``progress(done, total, what)`` before each part.

    Returns:
        What was checked, and warnings; ``print`` shows one line a stage.

    Raises:
        CheckError: streaming would change a gradient, or a stage is not what it must be.
        KeyError: ``params`` lacks a key, or holds one that no stage reads.
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of range.

    Example:
        >>> import torch, mtfunc as mt
        >>> from mtfunc.testing import check
        >>> def model(p, x, batch):
        ...     return ((batch["x"] * p["w"]) ** 2).mean()
        >>> program = mt.chain(mt.stage(model, "model"))
        >>> params, batch = {"model": {"w": torch.ones(3)}}, {"x": torch.ones(3)}
        >>> report = check(program, params, batch, seeds=2)
        >>> report.leaves, report.seeds
        (('model/w',), (0, 1))
    """
    runs = _runs(devices, seeds)
    stages = _stages(program, params, batch)
    if key is None and any(stage.rng for stage in stages):
        key = random.key(0)
    task = Task(program, copies(params), copies(batch), key, trainable, tuple(surrogate))
    with generators_kept():
        return _check(task, stages, runs, progress or (lambda done, total, what: None))


def _check(task: Task, stages: Sequence[Stage], runs: Sequence[Run], report: Progress) -> Report:
    started, total = time.perf_counter(), len(runs) + 2
    report(0, total, "the stages, one by one")
    schedule, refused = _trace(task)
    visits = list(_visit(task, stages, refused))
    if refused is not None:
        raise _refusal(refused) from refused
    assert schedule is not None
    backwards = advice.backwards(visits, task.surrogate, task.trainable)
    report(1, total, "the standard graph")
    expected = _expect(task)
    failure = Failure(task.params, stages, visits, expected)
    for number, run in enumerate(runs):
        report(2 + number, total, f"{run.device}, {short(run.config)}")
        failure.compare(run, _stream(task, run, failure, expected.params is not None))
    report(total, total, "done")
    return Report(
        stages=tuple(advice.rows(schedule, backwards)),
        leaves=tuple(_tree.flatten(expected.grads)[0]),
        configurations=tuple(dict.fromkeys(run.config for run in runs)),
        devices=tuple(dict.fromkeys(run.device for run in runs)),
        micro_batches=len(as_batches(task.batch)),
        gradients=len(runs),
        steps=sum(run.step for run in runs) if expected.params is not None else 0,
        warnings=tuple(advice.warnings(schedule, visits, expected, backwards)),
        seconds=time.perf_counter() - started,
    )


def _runs(devices: Sequence[str], seeds: int) -> list[Run]:
    if isinstance(devices, str) or not devices:
        raise TypeError(f"check: devices is {devices!r}; expected a tuple such as ('cpu', 'sim')")
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
        raise ValueError(f"check: seeds is {seeds!r}; expected a whole number >= 1")
    ways: list[tuple[str, StreamConfig]] = []
    for device in map(check_device, devices):
        if device == "sim":
            # 5 and 14 have no common divisor, so few seeds meet configurations of all kinds.
            ways += [(f"sim:{i}", CONFIGS[5 * i % len(CONFIGS)]) for i in range(seeds)]
        else:
            ways += [(device, config) for config in CONFIGS]
    return [Run(*way, step=number % STEPS_EVERY == 0) for number, way in enumerate(ways)]


def _stages(program: Program, params: Params, batch: Batch) -> tuple[Stage, ...]:
    if not isinstance(program, Program):
        raise TypeError(
            f"check: program is a {type(program).__name__}; expected what mt.chain returns"
        )
    check_params(params)
    if isinstance(batch, list) and not batch:
        raise ValueError("batch is an empty list; expected at least one micro-batch")
    return program.stages(params)


def _trace(task: Task) -> tuple[Schedule | None, Exception | None]:
    """The engine's own look at the program on meta tensors, and what it refuses."""
    params, batch = copies(task.params), copies(task.batch)
    try:
        return api.schedule(task.program, params, batch, mode="grad", key=task.key), None
    except Exception as error:
        return None, error


def _visit(task: Task, stages: Sequence[Stage], refused: Exception | None) -> list[Visit]:
    """Every stage on every micro-batch; purity's words come before the engine's."""
    visits = []
    try:
        for micro, batch in enumerate(as_batches(task.batch)):
            carry = None
            for stage in stages:
                visits.append(visit(stage, task.params, carry, batch, task.key, micro))
                carry = visits[-1].out
    except CheckError:
        raise
    except Exception:
        if refused is None:
            raise
    return visits


def _refusal(error: Exception) -> Exception:
    """What the engine refuses when it traces, as a failed check; other errors as they are."""
    named = re.search(r"(?:stage|scan entry) '([^']+)'", str(error))
    if isinstance(error, ValueError | TypeError) and named:
        return CheckError(str(error), kind="trace", stage=named[1])
    return error


def _expect(task: Task) -> Results:
    """What the standard graph gives, and one step of torch's own AdamW from there."""
    f = reference.value_and_grad(task.program, has_aux=True, trainable=task.trainable)

    def graph(key: Key | None) -> Any:
        try:
            return f(task.params, task.batch, key)
        except Exception as error:
            error.add_note("mtfunc: in the standard graph of all stages, mt.reference")
            raise

    (loss, aux), grads = graph(task.key)
    (again, reported), repeated = graph(task.key)
    advice.refuse_unsteady(
        task.program, task.params, (loss, aux, grads), (again, reported, repeated)
    )
    leaves = _tree.flatten(task.params)[0]
    learn = {path for path, leaf in leaves.items() if is_active(path, leaf, task.trainable)}
    if not bool(torch.isfinite(loss)) or not all(leaves[p].is_floating_point() for p in learn):
        return Results(loss, aux, grads, None)
    if task.key is not None:
        _, stepped = graph(random.fold_in(task.key, 0))
    else:
        stepped = grads
    after = {
        path: leaf.clone(memory_format=torch.contiguous_format) for path, leaf in leaves.items()
    }
    for path in learn:
        after[path].grad = _tree.get(stepped, path).contiguous()
    if learn:
        torch.optim.AdamW(
            [after[path] for path in leaves if path in learn],
            lr=RATE,
            weight_decay=DECAY,
            fused=True,
        ).step()
    params = _tree.map_leaves(lambda path, leaf: after[path].detach(), task.params)
    return Results(loss, aux, grads, params)


def _stream(task: Task, run: Run, failure: Failure, steps: bool) -> Results:
    """What streaming gives; ``mt.init`` takes copies over."""
    program = task.program
    where: dict[str, Any] = {"device": run.device, "config": run.config}
    params = None
    try:
        f = api.value_and_grad(program, has_aux=True, trainable=task.trainable, **where)
        (loss, aux), grads = f(task.params, task.batch, task.key)
        if run.step and steps:
            optimizer = optim.adamw(RATE, weight_decay=DECAY)
            learn: dict[str, Any] = {"trainable": task.trainable}
            state = train.init(program, copies(task.params), optimizer, task.key, **learn)
            step = train.train_step(program, optimizer, **where, **learn)
            params = step(state, task.batch)[0].params
    except Exception as error:
        raise failure.raised(run, error) from error
    return Results(loss, aux, grads, params)
