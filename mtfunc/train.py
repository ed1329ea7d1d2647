"""Training: the state in host memory and the step that streams, differentiates and updates it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtfunc import _tree, random
from mtfunc._base import Batch, Key, Leaves, Optimizer, Params, Path
from mtfunc.config import StreamConfig
from mtfunc.engine import Engine, as_batches, check_params
from mtfunc.host.pack import pack_, pack_unit
from mtfunc.host.units import units
from mtfunc.program import Program
from mtfunc.run import NonFiniteError
from mtfunc.schedule.operation import Operation
from mtfunc.trace import is_active


class TrainState:
    """Everything that training changes: parameters, the optimizer's state, step and key.

    A step takes the state over: its buffers are updated in place and belong to the state that
    the step returns. The old one then is *spent*, and says so when it is read.
    """

    __slots__ = ("_key", "_moments", "_params", "_spent", "_step")

    def __init__(self, params: Params, moments: dict[str, dict[str, Leaves]], step: int, key: Key):
        self._params, self._moments, self._step, self._key = params, moments, step, key
        self._spent = ""

    @property
    def params(self) -> Params:
        """The parameters, a pytree of tensors in host memory.

        Raises:
            RuntimeError: the state is spent.
        """
        return self._alive()._params

    @property
    def opt_state(self) -> dict[str, Params]:
        """The optimizer's state: for each kind of moment a pytree like the parameters."""
        kinds = dict.fromkeys(kind for unit in self._alive()._moments.values() for kind in unit)
        leaves: dict[str, Leaves] = {kind: {} for kind in kinds}
        for unit in self._moments.values():
            for kind, moments in unit.items():
                leaves[kind].update(moments)
        paths, spec = _tree.flatten(self._params)
        return {kind: _tree.unflatten(spec, map(of.get, paths)) for kind, of in leaves.items()}

    @property
    def step(self) -> int:
        """How many steps were taken."""
        return self._alive()._step

    @property
    def key(self) -> Key:
        """The run's random key; each step folds its number into it."""
        return self._alive()._key

    def _alive(self) -> TrainState:
        if self._spent:
            raise RuntimeError(f"this training state is spent: {self._spent}")
        return self

    def __repr__(self) -> str:
        return (
            f"TrainState(spent: {self._spent})" if self._spent else f"TrainState(step={self._step})"
        )


def init(
    program: Program,
    params: Params,
    optimizer: Optimizer,
    key: Key | None = None,
    *,
    trainable: Callable[[Path, Tensor], bool] | None = None,
) -> TrainState:
    """The state at the start of training.

    Parameters are taken over: the caller's dicts and lists are filled with packed leaves unit by
    unit, so that memory does not double where nobody else holds the originals.

    Args:
        program: what will be trained; its keys are checked against ``params``.
        params: a pytree of tensors.
        optimizer: what :func:`mtfunc.adamw` and its like return.
        key: the run's random key; ``mt.random.key(0)`` unless given.
        trainable: the predicate that :func:`train_step` will get; other leaves have no moments.

    Raises:
        KeyError: ``params`` lacks a key, or holds one that no stage reads.
        TypeError: a leaf is no tensor.

    Warns:
        UserWarning: one tensor lies at two paths. Leaves are known by path, as in JAX, so
            training sets them apart.
    """
    program.stages(params)
    check_params(params)
    _warn_tied(params)
    leaves, spec = _tree.flatten(pack_(params))
    # Containers of its own: a second state from the same dicts is packed into other memory.
    packed = _tree.unflatten(spec, leaves.values())
    moments: dict[str, dict[str, Leaves]] = {}
    for unit, paths in units(packed).items():
        active = {p: leaves[p] for p in paths if is_active(p, leaves[p], trainable)}
        moments[unit] = {kind: pack_unit(m) for kind, m in optimizer.init(active).items()}
    return TrainState(packed, moments, 0, random.key(0) if key is None else key)


def _warn_tied(params: Params) -> None:
    """Warns where one tensor lies at two paths, as tied modules have it."""
    seen: dict[Any, Path] = {}
    for path, leaf in _tree.flatten(params)[0].items():
        if not leaf.numel() or leaf.is_meta:
            continue
        where = (leaf.data_ptr(), tuple(leaf.shape), leaf.stride(), leaf.dtype)
        first = seen.setdefault(where, path)
        if first != path:
            warnings.warn(
                f"params: {first!r} and {path!r} are one tensor, and training sets them apart. "
                "To tie them, keep one and name its key in both stages; else clone() one",
                stacklevel=3,
            )
            return


class Span(NamedTuple):
    """When one operation ran, in seconds from the start of its step."""

    stream: str
    name: str
    start: float
    stop: float
    kind: str


class TrainStep:
    """The step that :func:`train_step` returns; call it.

    Attributes:
        timeline: when each operation of the last step ran, if that step was recorded.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer):
        self.engine, self.optimizer = engine, optimizer
        self.timeline: list[Span] = []

    def __call__(
        self, state: TrainState, batches: Batch | list[Batch], *, record: bool = False
    ) -> tuple[TrainState, dict[str, Any]]:
        """Takes one step.

        Args:
            state: the state so far; it is spent afterwards.
            batches: one batch, or a list of micro-batches.
            record: whether to fill ``timeline``.

        Returns:
            The new state, and the metrics: ``"loss"`` (a scalar tensor), ``"aux"`` (by stage
            name; a list of them where ``batches`` is one) and ``"step"``.

        Raises:
            NonFiniteError: the loss is infinite or NaN. The state is as it was.
            RuntimeError: ``state`` is spent.
        """
        if not isinstance(state, TrainState):
            raise TypeError(
                f"train_step: state is a {type(state).__name__}; expected a TrainState, which "
                "mt.init(program, params, optimizer) makes"
            )
        params, number = state.params, state.step
        self._check_moments(state)
        key = random.fold_in(state.key, number)
        spans: list[tuple[Operation, float, float]] = []
        try:
            done = self.engine.step(
                params,
                as_batches(batches),
                key,
                optimizer=self.optimizer,
                moments=state._moments,
                count=number,
                observe=(lambda *span: spans.append(span)) if record else None,
                spend=lambda: setattr(state, "_spent", f"step {number} failed half-way"),
            )
        except NonFiniteError as error:
            raise NonFiniteError(
                f"step {number}: {error}. {self._culprit(params, as_batches(batches), key)}"
            ) from error
        state._spent = f"step {number} took it over; use the state that the step returned"
        origin = spans[0][1] if spans else 0.0
        self.timeline = [
            Span(op.stream, f"{op.kind} {op.label}", start - origin, stop - origin, op.kind)
            for op, start, stop in spans
        ]
        aux = done.aux if isinstance(batches, list) else done.aux[0]
        metrics = {"loss": done.loss, "aux": aux, "step": number}
        return TrainState(params, state._moments, number + 1, state._key), metrics

    def _check_moments(self, state: TrainState) -> None:
        """The state was made with this optimizer and this choice of trained leaves."""
        wanted = set(self.optimizer.init({"probe": torch.zeros(1)}))
        for unit, paths in units(state.params).items():
            leaves = {path: _tree.get(state.params, path) for path in paths}
            active = {p for p, x in leaves.items() if is_active(p, x, self.engine.trainable)}
            unused = set(state._moments.get(unit, {})) - wanted
            if active and unused:
                raise ValueError(
                    f"train_step: the state holds {min(unused)!r}, which {self.optimizer.name} "
                    "does not use; expected a state from mt.init with the same optimizer. To "
                    "change it, mt.init(program, state.params, optimizer)"
                )
            for kind in wanted if active else ():
                held = set(state._moments.get(unit, {}).get(kind, {}))
                if not active <= held:
                    raise ValueError(
                        f"train_step: the state holds no {kind!r} for "
                        f"{min(active - held)!r}, which {self.optimizer.name} needs; expected "
                        "a state from mt.init with the same optimizer and the same trainable"
                    )

    def _culprit(self, params: Params, batches: list[Batch], key: Key) -> str:
        """Which stage first returns a value that is not finite, found by a forward pass."""
        found: list[str] = []

        def watch(op: Operation, outputs: list[Tensor]) -> None:
            if not found and not all(bool(torch.isfinite(out).all()) for out in outputs):
                of = f" of micro-batch {op.micro}" if len(batches) > 1 else ""
                found.append(f"{op.label!r}{of}")

        engine = Engine(
            self.engine.program,
            mode="forward",
            device=self.engine.device,
            config=self.engine.config,
        )
        engine.step(params, batches, key, watch=watch)
        if not found:
            return "Every stage is finite; the mean over the micro-batches is not"
        bad = [p for p, x in _tree.flatten(params)[0].items() if not bool(torch.isfinite(x).all())]
        why = f"; parameters are not finite at {', '.join(map(repr, bad[:4]))}" if bad else ""
        return f"The first stage with a value that is not finite is {found[0]}{why}"


def train_step(
    program: Program,
    optimizer: Optimizer,
    *,
    device: str = "cpu",
    config: StreamConfig | None = None,
    trainable: Callable[[Path, Tensor], bool] | None = None,
) -> TrainStep:
    """A training step: forward, backward and update, one stage at a time.

    Each unit is updated on the host as soon as its gradient is complete, while the backward pass
    goes on, so no gradient outlives its unit. It means::

        loss, grads = mt.value_and_grad(program)(state.params, batches, key)
        optimizer.update_(state.params, grads, state.opt_state, state.step)

    Args:
        program: its last stage returns a scalar or an :class:`mtfunc.Mean`.
        optimizer: what the state was made with.
        device: as in :func:`mtfunc.value_and_grad`.
        config: as in :func:`mtfunc.value_and_grad`.
        trainable: as in :func:`mtfunc.value_and_grad`.

    Returns:
        ``step(state, batches) -> (state, metrics)``; see :class:`TrainStep`.

    Example:
        >>> import torch, mtfunc as mt
        >>> def model(p, x, batch):
        ...     return ((batch["x"] * p["w"] - batch["y"]) ** 2).mean()
        >>> program = mt.chain(mt.stage(model, "model"))
        >>> state = mt.init(program, {"model": {"w": torch.zeros(1)}}, mt.sgd(0.1))
        >>> step = mt.train_step(program, mt.sgd(0.1))
        >>> state, metrics = step(state, {"x": torch.ones(4), "y": torch.ones(4)})
        >>> metrics["loss"], state.params["model"]["w"]
        (tensor(1.), tensor([0.2000]))
    """
    engine = Engine(program, mode="train", device=device, config=config, trainable=trainable)
    return TrainStep(engine, optimizer)
