"""Compiles a program for given shapes once, and runs steps through the one loop."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtfunc import _tree, numerics
from mtfunc._base import Batch, Key, Params, Path
from mtfunc.backends import Backend, check_device, open_backend
from mtfunc.config import StreamConfig
from mtfunc.host.units import units
from mtfunc.program import Program, collect_aux
from mtfunc.pullback import Wanted
from mtfunc.residuals import residual_bytes
from mtfunc.run import Step, run
from mtfunc.schedule import Schedule, plan_step
from mtfunc.schedule.operation import Lowered
from mtfunc.trace import Aval, Tracer, is_active

CACHED = 8
"""How many shapes an engine stays compiled for, and keeps device memory for."""

PLANNED = 64
"""How many schedules are remembered; they are data, and the same on every discrete device."""

_CALLED = {"forward": "forward pass", "grad": "value_and_grad", "train": "training step"}

_planned: OrderedDict[Any, tuple[Schedule, Lowered]] = OrderedDict()


@dataclass(kw_only=True, slots=True)
class Compiled:
    """A program for given shapes: its schedule, its queues, and the device that runs them."""

    schedule: Schedule
    lowered: Lowered
    backend: Backend
    fresh: bool = True
    """Whether it has not run yet, so that impure stages are still looked for."""


class Outcome(NamedTuple):
    """What a step leaves: final carries and aux by micro-batch, gradients by path, the loss."""

    carries: list[Any]
    aux: list[dict[str, Any]]
    grads: dict[Path, Tensor]
    loss: Tensor | None


class Engine:
    """A program on a device; ``compile`` and ``step`` are all there is.

    Args:
        program: what is run.
        mode: ``"forward"``, ``"grad"`` or ``"train"``.
        loss: whether the last stage returns the loss.
        device: where.
        config: how.
        trainable: which parameter leaves get gradients; all of them unless given.
    """

    def __init__(
        self,
        program: Program,
        *,
        mode: str,
        loss: bool = True,
        device: str = "cpu",
        config: StreamConfig | None = None,
        trainable: Callable[[Path, Tensor], bool] | None = None,
    ):
        if not isinstance(program, Program):
            raise TypeError(
                f"program is a {type(program).__name__}; expected what mt.chain returns"
            )
        self.program, self.mode, self.loss = program, mode, loss
        self.device, self.config = check_device(device), config or StreamConfig()
        self.trainable = trainable
        self.cache: OrderedDict[Any, Compiled] = OrderedDict()
        self.lock = threading.RLock()

    def compile(self, params: Params, batches: Sequence[Batch], key: Key | None) -> Compiled:
        """The schedule for these shapes, made the first time.

        Raises:
            KeyError: parameters are missing, or no stage reads them.
            TypeError: a parameter leaf is no tensor, or a stage returns no pytree of tensors.
            ValueError: what :class:`mtfunc.trace.Tracer` finds.
        """
        avals, spec = self._avals(params)
        # What a stage makes has the default dtype.
        dtype = torch.get_default_dtype()
        signature = (dtype, spec, *avals.values(), *map(_batch_signature, batches))
        if signature in self.cache:
            self.cache.move_to_end(signature)
            return self.cache[signature]
        backend = open_backend(self.device)
        # Programs by their text too: statics 1, 1.0 and True are equal and mean different things.
        program = (self.program, repr(self.program))
        what = (program, self.mode, self.loss, self.config, backend.unified, key is None)
        if (what, signature) not in _planned:
            schedule = self.plan(params, batches, key)
            _planned[what, signature] = (schedule, schedule.lower())
        _planned.move_to_end((what, signature))
        schedule, lowered = _planned[what, signature]
        backend.open(schedule.sizes)
        made = Compiled(schedule=schedule, lowered=lowered, backend=backend)
        self.cache[signature] = made
        while len(self.cache) > CACHED:
            self.cache.popitem(last=False)[1].backend.close()
        while len(_planned) > PLANNED:
            _planned.popitem(last=False)
        return made

    def plan(self, params: Params, batches: Sequence[Batch], key: Key | None) -> Schedule:
        """The schedule for these shapes; nothing is allocated."""
        stages = self.program.stages(params, partial=self.mode == "forward")
        avals, _ = self._avals(params)
        tracer = Tracer(params, lambda path: avals[path].active, key)
        traced = [tracer.program(stages, batch, self.loss) for batch in batches]

        def cost(stage: int, m: int, wanted: Wanted) -> int | None:
            return residual_bytes(traced[m][stage], batches[m], key, m, wanted)

        return plan_step(
            traced,
            units(params),
            avals,
            batches,
            self.config,
            mode=self.mode,
            unified=open_backend(self.device).unified,
            cost=cost,
        )

    def _avals(self, params: Params) -> tuple[dict[Path, Aval], _tree.Spec]:
        leaves, spec = _tree.flatten(params)
        check_params(params)
        learns = self.mode != "forward"
        avals = {
            path: Aval.of(leaf, learns and is_active(path, leaf, self.trainable))
            for path, leaf in leaves.items()
        }
        return avals, spec

    def step(
        self, params: Params, batches: Sequence[Batch], key: Key | None, **options: Any
    ) -> Outcome:
        """Runs one step; ``options`` are fields of :class:`mtfunc.run.Step`."""
        if not batches:
            raise ValueError("batch is an empty list; expected at least one micro-batch")
        if self.program.check is not None:
            for batch in batches:
                self.program.check(batch)
        where = f"a streamed {_CALLED[self.mode]}"
        with self.lock, torch.inference_mode(False), numerics.held(where) as setting:
            try:
                compiled = self.compile(params, batches, key)
            except Exception as error:
                if len(batches) > 1:
                    error.add_note(
                        f"mtfunc: batch is a list of {len(batches)}, which are as many "
                        "micro-batches; a batch that is a pair of things is a tuple"
                    )
                raise
            if compiled.fresh:
                # What a stage changed as it was traced, it changes again when it runs.
                numerics.apply(setting)
                options["observe"] = numerics.watching(setting, options.get("observe"))
            step = bind(compiled.schedule, params, batches, key, audit=compiled.fresh, **options)
            run(compiled.lowered, compiled.backend, [step])
            compiled.fresh = False
            return collect(compiled, step)


def bind(
    schedule: Schedule, params: Params, batches: Sequence[Batch], key: Key | None, **options: Any
) -> Step:
    """A step of a schedule on these tensors, with room for what it leaves to the caller."""
    external = {f"params/{p}": leaf.detach() for p, leaf in _tree.flatten(params)[0].items()}
    changed = {leaf.untyped_storage().data_ptr() for leaf in external.values()}
    for m, batch in enumerate(batches):
        for path, leaf in _tree.flatten(batch)[0].items():
            if isinstance(leaf, Tensor):
                shared = leaf.untyped_storage().data_ptr() in changed
                external[f"batch/{path}#{m}"] = leaf.detach().clone() if shared else leaf.detach()
    for buffer in schedule.buffers.values():
        if buffer.arena == "out":
            assert buffer.aval is not None
            external[buffer.name] = torch.empty(buffer.aval.shape, dtype=buffer.aval.dtype)
    return Step(schedule=schedule, batches=batches, key=key, external=external, **options)


def collect(compiled: Compiled, step: Step) -> Outcome:
    """What a finished step leaves to its caller."""
    schedule, results = compiled.schedule, compiled.schedule.results
    borrowed = {leaf.untyped_storage().data_ptr() for leaf in step.external.values()}

    def take(name: str) -> Tensor:
        if name in step.external:
            return step.external[name]
        buffer = schedule.buffers[name]
        leaf = compiled.backend.read(buffer)
        compiled.backend.free(buffer)
        return leaf.clone() if leaf.untyped_storage().data_ptr() in borrowed else leaf

    carries = [
        stages[-1].carry_out.build([take(name) for name in names])
        for stages, names in zip(schedule.traced, results.carry)
    ]
    aux = []
    for m, stages in enumerate(schedule.traced):
        reports = [
            (one.stage, _tree.unflatten(one.aux_spec, map(take, results.aux.get((s, m), ()))))
            for s, one in enumerate(stages)
        ]
        aux.append(collect_aux(reports))
    grads = {path: take(name) for path, name in results.grads.items()}
    loss = take(results.loss[0]) if results.loss else None
    return Outcome(carries, aux, grads, loss)


def check_params(params: Params) -> None:
    """Every parameter leaf is a tensor.

    Raises:
        TypeError: one is something else.
    """
    for path, leaf in _tree.flatten(params)[0].items():
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"params: {path or 'the top'!r} is a {type(leaf).__name__}; expected a tensor or "
                "None. torch.as_tensor makes one of numbers and numpy arrays"
            )


def as_batches(batch: Batch | list[Batch]) -> list[Batch]:
    """A list of micro-batches; anything but a list is one."""
    return batch if isinstance(batch, list) else [batch]


def _batch_signature(batch: Batch) -> Any:
    leaves, spec = _tree.flatten(batch)
    return spec, *(Aval.of(x) if isinstance(x, Tensor) else repr(x) for x in leaves.values())
