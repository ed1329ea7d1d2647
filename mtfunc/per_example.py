"""Norms of per-example gradients over a streamed program.

Every stage is mapped over the rows of the batch with ``torch.func.vmap``, each row with its own
view of the parameters, so one pullback of the mapped stage gives the gradients of all rows. They
live as long as their unit's: once a unit is complete their squares are summed and they are freed.
So the same loop, schedule and streams serve, with an "optimizer" that only measures.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mtfunc import _tree
from mtfunc._base import Batch, Key, Leaves, Optimizer, Params, Path, StageFn
from mtfunc.config import StreamConfig
from mtfunc.engine import Engine, as_batches, check_params
from mtfunc.host.units import units
from mtfunc.loss import as_mean
from mtfunc.program import Program, Scan, Stage


def per_example_grad_norms(
    program: Program,
    *,
    device: str = "cpu",
    config: StreamConfig | None = None,
    trainable: Callable[[Path, Tensor], bool] | None = None,
) -> Callable[..., Any]:
    """The norm of the gradient of each example's own loss, streamed one stage at a time.

    Example ``i`` is row ``i`` of every tensor in the batch, as a batch of one row: ``f(params,
    batch)[i]`` is the 2-norm, over all trained leaves together, of the gradients that
    ``mt.value_and_grad(program)(params, row)`` returns for ``row = batch[i : i + 1]``, up to
    rounding. A loss that is a :class:`mtfunc.Mean` is divided by the row's own count. Rows draw
    from the same key. Differentially private training clips by these norms (Abadi et al., "Deep
    Learning with Differential Privacy", CCS 2016).

    Memory beyond that of a training step: the gradients of one unit times the number of rows.

    Args:
        program: its last stage returns a scalar or an :class:`mtfunc.Mean`. Stages must work
            under ``torch.func.vmap``; ``vjp="autograd"`` does not help there.
        device: as in :func:`mtfunc.value_and_grad`.
        config: as in :func:`mtfunc.value_and_grad`.
        trainable: as in :func:`mtfunc.value_and_grad`.

    Returns:
        ``f(params, batch, key=None) -> norms``, a float64 tensor of shape ``(rows,)`` in host
        memory; a list of them where ``batch`` is a list of micro-batches. Tensors of the batch
        have the rows first; those of shape ``()`` and what is no tensor belong to every row.

    Raises:
        ValueError: tensors of the batch differ in their number of rows.
        NonFiniteError: the sum of the losses is infinite or NaN.

    Example:
        >>> import torch, mtfunc as mt
        >>> def model(p, x, batch):
        ...     return (batch["x"] * p["w"]).sum()
        >>> f = mt.per_example_grad_norms(mt.chain(mt.stage(model, "a")))
        >>> f({"a": {"w": torch.ones(2)}}, {"x": torch.tensor([[3.0, 4.0], [0.0, 1.0]])})
        tensor([5., 1.], dtype=torch.float64)
    """
    original = trainable

    def trained(path: Path, leaf: Tensor) -> bool:
        return original is None or bool(original(path, leaf[0]))

    engine = Engine(
        _by_rows(program), mode="train", device=device, config=config, trainable=trained
    )

    def one(params: Params, batch: Batch, key: Key | None) -> Tensor:
        if program.check is not None:
            program.check(batch)
        rows = _rows(batch)
        expanded = _tree.map_leaves(lambda _, x: x.detach().expand(rows, *x.shape), params)
        squares = torch.zeros(rows, dtype=torch.float64)

        def measure(params: Leaves, grads: Leaves, state: Any, step: int) -> None:
            for grad in grads.values():
                wide = torch.complex128 if grad.is_complex() else torch.float64
                norm = torch.linalg.vector_norm(grad.reshape(rows, -1), dim=1, dtype=wide)
                squares.add_(norm.square())

        with warnings.catch_warnings():
            # Kernels that vmap knows no rule for run row by row, which is what was asked for.
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            engine.step(
                expanded,
                [_tree.map_leaves(_as_rows, batch)],
                key,
                optimizer=Optimizer(init=lambda leaves: {}, update_=measure, name="norms"),
                moments={unit: {} for unit in units(params)},
            )
        return squares.sqrt()

    def f(params: Params, batch: Batch, key: Key | None = None) -> Any:
        check_params(params)
        norms = [one(params, micro, key) for micro in as_batches(batch)]
        return norms if isinstance(batch, list) else norms[0]

    return f


def _rows(batch: Batch) -> int:
    leaves = _tree.flatten(batch)[0]
    sizes = {p: x.shape[0] for p, x in leaves.items() if isinstance(x, Tensor) and x.dim()}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        found = ", ".join(f"{path!r} has {rows}" for path, rows in sizes.items()) or "there is none"
        raise ValueError(
            "per_example_grad_norms: expected tensors in the batch whose first dimension is the "
            f"examples, the same for all and at least 1; {found}"
        )
    return next(iter(sizes.values()))


def _as_rows(_: Path, leaf: Any) -> Any:
    """A batch leaf as rows of batches of one; what belongs to every row stays."""
    return leaf.unsqueeze(1) if isinstance(leaf, Tensor) and leaf.dim() else leaf


def _by_rows(program: Program) -> Program:
    """The program of all rows at once, whose loss is the sum of the rows' losses."""
    # One mapped function for each, so that entries of a scan are traced once.
    mapped = cache(_map_rows)
    last = len(program) - 1

    def part(number: int, given: Stage | Scan) -> Stage | Scan:
        vjp = mapped(given.vjp) if callable(given.vjp) else given.vjp
        if isinstance(given, Scan):
            fns = tuple(mapped(fn, aux=given.has_aux) for fn in given.fns)
            return replace(given, fns=fns, vjp=vjp, has_aux=False)
        if number == last and callable(vjp):
            raise ValueError(
                f"per_example_grad_norms: the last stage, {given.name!r}, has a pullback rule, "
                "which is about the loss of all rows; expected vjp='func'. Leave the loss to a "
                "last stage of its own"
            )
        fn = mapped(given.fn, aux=given.has_aux, loss=given.name if number == last else None)
        return replace(given, fn=fn, vjp=vjp, has_aux=False)

    return Program(tuple(part(i, given) for i, given in enumerate(program)))


def _map_rows(fn: StageFn, aux: bool = False, loss: str | None = None) -> StageFn:
    """``fn`` for every row; aux values are dropped, and losses are summed.

    Rows come first in every tensor but the scalars of the batch, which belong to all rows.
    """

    def run(*trees: Any, **options: Any) -> Any:
        leaves, spec = _tree.flatten(trees)
        given = list(leaves.values())
        each = [i for i, x in enumerate(given) if isinstance(x, Tensor) and x.dim()]
        shape: dict[str, Any] = {}

        def one(*rows: Tensor) -> tuple[Tensor, ...]:
            placed = dict(zip(each, rows))
            inner = [placed.get(i, x) for i, x in enumerate(given)]
            out = fn(*_tree.unflatten(spec, inner), **options)
            out = out[0] if aux and isinstance(out, tuple) else out
            if loss is not None:
                return (as_mean(loss, out).value(),)
            found, shape["spec"] = _tree.flatten(out)
            whole = {id(x): given[i] for i, x in enumerate(inner)}
            # What a row passes on is passed on whole, with its identity.
            fresh = [isinstance(x, Tensor) and id(x) not in whole for x in found.values()]
            shape["kept"] = [
                None if new else whole.get(id(x), x) for new, x in zip(fresh, found.values())
            ]
            return tuple(x for new, x in zip(fresh, found.values()) if new)

        made: Sequence[Tensor] = torch.func.vmap(one)(*(given[i] for i in each))
        if loss is not None:
            return made[0].sum()
        rest = iter(made)
        return _tree.unflatten(
            shape["spec"], [next(rest) if x is None else x for x in shape["kept"]]
        )

    run.__name__ = getattr(fn, "__name__", type(fn).__name__)
    return run
