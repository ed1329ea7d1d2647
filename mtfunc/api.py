"""The functions that stream a program: gradients, forward passes and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from mtfunc import _tree
from mtfunc._base import Batch, Carry, Key, Params, Path
from mtfunc.config import StreamConfig
from mtfunc.engine import Engine, as_batches
from mtfunc.loss import Mean
from mtfunc.program import Program
from mtfunc.schedule import Schedule


def value_and_grad(
    program: Program,
    *,
    device: str = "cpu",
    config: StreamConfig | None = None,
    has_aux: bool = False,
    trainable: Callable[[Path, Tensor], bool] | None = None,
) -> Callable[..., Any]:
    """The loss of a program and its gradients, streamed one stage at a time.

    It returns what :func:`mtfunc.reference.value_and_grad` does, bit for bit::

        loss = Mean.pool([program(params, micro) for micro in batch])
        grads = torch.autograd.grad(loss, params)

    Args:
        program: its last stage returns a scalar or an :class:`mtfunc.Mean`.
        device: ``"cpu"``, ``"sim"`` or ``"sim:SEED"``.
        config: how to stream; it does not change results.
        has_aux: whether aux values are returned.
        trainable: ``trainable(path, leaf)`` says which leaves get a gradient.

    Returns:
        ``f(params, batch, key=None) -> (loss, grads)``, or ``((loss, aux), grads)``. ``batch`` is
        one batch, or a list of micro-batches that pass through each stage together; aux is then a
        list too. ``loss`` is a scalar tensor. ``grads`` has the structure of ``params``, in host
        memory: zeros for leaves that the loss does not depend on, ``None`` for frozen ones and
        those whose dtype has no gradient.

    Raises:
        KeyError: ``params`` lacks a key, or holds one that no stage reads.
        ValueError: a stage is not pure, or does not fit the next.

    Example:
        >>> import torch, mtfunc as mt
        >>> def double(p, x, batch):
        ...     return batch["x"] * p["w"]
        >>> def total(x, batch):
        ...     return x.sum()
        >>> program = mt.chain(mt.stage(double, "a"), mt.stage(total))
        >>> f = mt.value_and_grad(program)
        >>> f({"a": {"w": torch.ones(2)}}, {"x": torch.tensor([1.0, 2.0])})
        (tensor(3.), {'a': {'w': tensor([1., 2.])}})
    """
    engine = Engine(program, mode="grad", device=device, config=config, trainable=trainable)

    def f(params: Params, batch: Batch, key: Key | None = None) -> Any:
        done = engine.step(params, as_batches(batch), key)

        def grad(path: Path, leaf: Tensor) -> Tensor | None:
            return done.grads.get(path)

        grads = _tree.map_leaves(grad, params)
        aux = done.aux if isinstance(batch, list) else done.aux[0]
        return ((done.loss, aux), grads) if has_aux else (done.loss, grads)

    return f


def forward(
    program: Program, *, device: str = "cpu", config: StreamConfig | None = None
) -> Callable[..., Carry]:
    """The carry at a program's end, streamed, without gradients.

    Args:
        program: often a slice, such as ``program[:-1]``; parameters that it does not read are
            left alone.
        device: as in :func:`value_and_grad`.
        config: as in :func:`value_and_grad`.

    Returns:
        ``f(params, batch, key=None) -> carry``, in host memory; a list of carries where ``batch``
        is a list of micro-batches.
    """
    engine = Engine(program, mode="forward", loss=False, device=device, config=config)

    def f(params: Params, batch: Batch, key: Key | None = None) -> Carry:
        with torch.no_grad():
            carries = engine.step(params, as_batches(batch), key).carries
        return carries if isinstance(batch, list) else carries[0]

    return f


def evaluate(
    program: Program, *, device: str = "cpu", config: StreamConfig | None = None
) -> Callable[..., list[Mean]]:
    """Losses of batches, streamed, without gradients.

    Args:
        program: its last stage returns a scalar or an :class:`mtfunc.Mean`.
        device: as in :func:`value_and_grad`.
        config: as in :func:`value_and_grad`.

    Returns:
        ``f(params, batches, key=None) -> means``, one :class:`mtfunc.Mean` for each batch of the
        iterable; ``Mean.pool(means)`` is the loss over all of them, ``means[0].value()`` that of
        the first.
    """
    engine = Engine(program, mode="forward", device=device, config=config)

    def f(params: Params, batches: Iterable[Batch], key: Key | None = None) -> list[Mean]:
        return [engine.step(params, [batch], key).carries[0] for batch in batches]

    return f


def schedule(
    program: Program,
    params: Params,
    batch: Batch,
    config: StreamConfig | None = None,
    *,
    device: str = "sim",
    mode: str = "train",
    key: Key | None = None,
) -> Schedule:
    """Everything that one step does, as data: nothing is allocated or run.

    Args:
        program: the model.
        params: its parameters; meta tensors will do.
        batch: one batch, or a list of micro-batches; meta tensors will do.
        config: how to stream.
        device: ``"sim"`` stands for a device with memory of its own; on ``"cpu"`` nothing is
            copied.
        mode: ``"train"``, ``"grad"`` or ``"forward"``.
        key: needed where a stage draws random numbers.

    Returns:
        The schedule; ``print`` shows it as a table, ``verify()`` proves it.
    """
    if mode not in ("train", "grad", "forward"):
        raise ValueError(f"schedule: mode {mode!r}; expected 'train', 'grad' or 'forward'")
    engine = Engine(program, mode=mode, device=device, config=config)
    return engine.plan(params, as_batches(batch), key)
