"""The one loop that runs operations: forward, gradients and training, on every device.

``run`` feeds the lowered queues to a backend, which decides whose turn it is; ``issue`` handles
one item; ``_perform`` says what each kind of operation does. There is no second loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from mtfunc import _tree
from mtfunc._base import Batch, Key, Leaves, Optimizer
from mtfunc.backends import Backend
from mtfunc.loss import Mean
from mtfunc.pullback import Linearized, linearize
from mtfunc.recompute import pullback
from mtfunc.schedule import Schedule
from mtfunc.schedule.operation import COPIES, Buffer, Lowered, Operation, Record, Run, Wait


class NonFiniteError(RuntimeError):
    """The loss is infinite or NaN; no parameter was changed."""


@dataclass(kw_only=True)
class Step:
    """What one pass through the queues works on.

    Attributes:
        number: counts the steps that the backend runs together, from 0.
        schedule: what is run.
        batches: one pytree for each micro-batch, on the host.
        key: the step's random key.
        external: the caller's tensors by buffer name: parameters, batches, results.
        optimizer: who updates, when training.
        moments: the optimizer's state by unit.
        count: the optimizer's step number.
        observe: called with every operation that has run, its start and its end in seconds.
        watch: called with a forward operation and its outputs.
        spend: called before the first parameter is changed, unless the step then succeeds the
            caller's state is lost.
        audit: whether draws from the global generator are looked for.
    """

    number: int = 0
    schedule: Schedule
    batches: Sequence[Batch]
    key: Key | None
    external: dict[str, Tensor]
    optimizer: Optimizer | None = None
    moments: Mapping[str, dict[str, Leaves]] = field(default_factory=dict)
    count: int = 0
    observe: Callable[[Operation, float, float], None] | None = None
    watch: Callable[[Operation, list[Tensor]], None] | None = None
    spend: Callable[[], None] | None = None
    audit: bool = False
    kept: dict[tuple[int, int], Linearized] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    """Cotangents and sums that hold zeros because nothing took part: no terms of a sum."""
    updated: bool = False
    """Whether some parameter has been changed."""

    def passed(self, wait: Wait, recorded: set[Any]) -> bool:
        """Whether a wait is over; what lies before the first step is."""
        step = self.number - wait.lag
        return step < 0 or (step, wait.event) in recorded


def run(lowered: Lowered, backend: Backend, steps: Sequence[Step]) -> None:
    """Runs consecutive steps through the queues.

    Raises:
        Exception: what an operation raised, with a note that names it.
    """
    queues = {
        stream: [(step, item) for step in steps for item in queue]
        for stream, queue in lowered.queues.items()
    }

    def issue(stream: str, entry: tuple[Step, Any]) -> bool:
        step, item = entry
        if isinstance(item, Wait):
            event = (step.number - item.lag, item.event)
            return event[0] < 0 or backend.ready(stream, event)
        if isinstance(item, Record):
            backend.record(stream, (step.number, item.event))
            return True
        assert isinstance(item, Run)
        operation = step.schedule.operations[item.operation]
        start = perf_counter()
        try:
            _perform(operation, step, backend)
        except Exception as error:
            state = "partly updated, and the state is spent" if step.updated else "unchanged"
            error.add_note(f"mtfunc: in operation {operation}; parameters are {state}")
            raise
        if step.observe is not None:
            step.observe(operation, start, perf_counter())
        return True

    backend.drive(queues, issue)


def _perform(op: Operation, step: Step, backend: Backend) -> None:
    if op.kind in COPIES:
        for target, source in zip(op.writes["target"], op.reads["source"]):
            there = step.external.get(target.name, target)
            backend.copy(op.stream, there, step.external.get(source.name, source))
    else:
        _KINDS[op.kind](op, step, backend)


def _read(buffers: Sequence[Buffer], step: Step, backend: Backend) -> list[Tensor]:
    return [step.external[b.name] if b.name in step.external else backend.read(b) for b in buffers]


def _write(buffers: Sequence[Buffer], tensors: Sequence[Tensor], backend: Backend) -> None:
    for buffer, tensor in zip(buffers, tensors, strict=True):
        backend.write(buffer, tensor)


def _site(op: Operation, step: Step, backend: Backend) -> tuple[Any, list[Tensor], Any]:
    """The stage, its flat inputs and its batch."""
    assert op.stage is not None and op.micro is not None
    inputs = _read([*op.reads["params"], *op.reads["carry"]], step, backend)
    leaves, spec = _tree.flatten(step.batches[op.micro])
    tensors = iter(_read(op.reads["batch"], step, backend))
    placed = [next(tensors) if isinstance(x, Tensor) else x for x in leaves.values()]
    return step.schedule.traced[op.micro][op.stage], inputs, _tree.unflatten(spec, placed)


def _forward(op: Operation, step: Step, backend: Backend) -> None:
    traced, inputs, batch = _site(op, step, backend)
    assert op.stage is not None and op.micro is not None
    before = torch.get_rng_state() if step.audit else None
    if op.keep:
        assert op.wanted is not None
        kept = linearize(traced, inputs, batch, step.key, op.micro, op.wanted)
        step.kept[op.stage, op.micro] = kept
        outputs, aux = kept.outputs, kept.aux
    else:
        # Grad mode as in the recomputation, so that no kernel is chosen differently; nothing
        # requires grad, so no graph is recorded.
        with torch.enable_grad():
            outputs, aux = traced.flat(batch, step.key, op.micro)(inputs)
    if before is not None and not torch.equal(before, torch.get_rng_state()):
        raise ValueError(
            f"stage {traced.stage.name!r} draws from torch's global generator, so its "
            "recomputation would draw other numbers; expected a pure function. Give the stage "
            "rng=True and draw with mt.random from its key="
        )
    if step.optimizer is not None:
        outputs, aux = _unshared(outputs, inputs), _unshared(aux, inputs)
    if step.watch is not None:
        step.watch(op, outputs)
    _write(op.writes["outputs"], outputs, backend)
    _write(op.writes["aux"], aux, backend)


def _unshared(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The same tensors in the same layout, none in memory that an update may change."""
    taken = {leaf.untyped_storage().data_ptr() for leaf in inputs}

    def apart(leaf: Tensor) -> Tensor:
        if leaf.untyped_storage().data_ptr() not in taken:
            return leaf
        storage = leaf.untyped_storage().clone()
        empty = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        return empty.set_(storage, leaf.storage_offset(), leaf.shape, leaf.stride())

    return [apart(leaf) for leaf in outputs]


def _loss(op: Operation, step: Step, backend: Backend) -> None:
    leaves = _read(op.reads["means"], step, backend)
    roots: dict[str, Tensor] = {}
    placed = []
    for buffer, leaf in zip(op.reads["means"], leaves):
        learns = buffer.aval is not None and buffer.aval.active
        placed.append(roots.setdefault(buffer.name, leaf.detach().requires_grad_(learns)))
    means, rest = [], iter(placed)
    for stages in step.schedule.traced:
        spec = stages[-1].carry_out
        means.append(spec.build([next(rest) for _ in range(spec.width)]))
    with torch.enable_grad():
        loss = Mean.pool(means)
    active = [root for root in roots.values() if root.requires_grad]
    seeds = torch.autograd.grad(loss, active) if active else ()
    _write(op.writes["seeds"], seeds, backend)
    _write(op.writes["loss"], [loss.detach()], backend)


def _pullback(op: Operation, step: Step, backend: Backend) -> None:
    assert op.stage is not None and op.micro is not None and op.wanted is not None
    traced, inputs, batch = _site(op, step, backend)
    kept = step.kept.pop((op.stage, op.micro)) if op.keep else None
    # What takes part may depend on data or be up to a rule: then the plan says what may.
    seeds, outputs = _present(op.reads["cotangents"], op.wanted.outputs, step)
    grown, running = _present(op.reads["sums"], op.wanted.running, step)
    wanted = op.wanted._replace(outputs=outputs, running=running)
    cotangents, sums = _read(seeds, step, backend), _read(grown, step, backend)
    if not cotangents and not sums:
        found: list[Tensor | None] = [None] * len(wanted.inputs)
    elif kept is not None and wanted == op.wanted:
        found = kept.pull(cotangents, sums)
    else:
        kept = None  # before the stage's activations are in memory once more
        found = pullback(traced, inputs, batch, step.key, op.micro, wanted, cotangents, sums)
    for buffer, grad in zip(op.writes["results"], found):
        (step.absent.add if grad is None else step.absent.discard)(buffer.name)
    results = [
        torch.zeros_like(inputs[i]) if grad is None else grad
        for i, grad in zip(wanted.inputs, found)
    ]
    _write(op.writes["results"], _apart(results, inputs), backend)


def _present(
    buffers: Sequence[Buffer], indices: Sequence[int], step: Step
) -> tuple[list[Buffer], tuple[int, ...]]:
    """The buffers that hold a term, and their indices."""
    pairs = [(b, i) for b, i in zip(buffers, indices) if b.name not in step.absent]
    return [b for b, _ in pairs], tuple(i for _, i in pairs)


def _apart(results: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """The same tensors, none of which shares memory with another or with an input."""
    taken = {leaf.untyped_storage().data_ptr() for leaf in others}
    apart = []
    for leaf in results:
        place = leaf.untyped_storage().data_ptr()
        shared = place in taken or leaf.untyped_storage().nbytes() < leaf.numel() * leaf.itemsize
        apart.append(leaf.clone(memory_format=torch.contiguous_format) if shared else leaf)
        taken.add(place)
    return apart


def _zero(op: Operation, step: Step, backend: Backend) -> None:
    for buffer in op.writes["zeros"]:
        assert buffer.aval is not None
        backend.write(buffer, torch.zeros(buffer.aval.shape, dtype=buffer.aval.dtype))


def _check(op: Operation, step: Step, backend: Backend) -> None:
    (loss,) = _read(op.reads["loss"], step, backend)
    if not bool(torch.isfinite(loss)):
        raise NonFiniteError(f"the loss is {loss.item()}; no parameter was changed")
    _write(op.writes["verdict"], [torch.ones((), dtype=torch.uint8)], backend)


def _update(op: Operation, step: Step, backend: Backend) -> None:
    assert step.optimizer is not None
    params = _read(op.writes["params"], step, backend)
    grads = _read(op.reads["grads"], step, backend)
    paths = [buffer.name.removeprefix("params/") for buffer in op.writes["params"]]
    step.updated = True
    if step.spend is not None:
        step.spend()
    step.optimizer.update_(
        dict(zip(paths, params)), dict(zip(paths, grads)), step.moments[op.label], step.count
    )


def _free(op: Operation, step: Step, backend: Backend) -> None:
    for buffer in op.writes["freed"]:
        backend.free(buffer)


_KINDS = {
    "forward": _forward,
    "loss": _loss,
    "check": _check,
    "pullback": _pullback,
    "zero": _zero,
    "update": _update,
    "free": _free,
}
