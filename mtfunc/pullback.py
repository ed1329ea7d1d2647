"""One stage's vector-Jacobian product, with its forward computed again.

A stage is seen here as a flat function of its differentiable inputs (parameter leaves, then
carry leaves). Three engines give its pullback: ``torch.func.vjp``, ``torch.autograd.grad`` on
detached leaves, and a rule that the user wrote.

Gradients of a leaf that several stages read are summed *inside* the engine: the leaf leaves the
stage as one more output, whose cotangent is the sum so far. The standard graph does the same
additions in the same order, so the results are equal to the last bit; adding a stage's gradient
to the sum afterwards is not.

An output without a cotangent is left out rather than seeded with zeros, since 0 × inf is NaN
where the standard graph has no term at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtfunc import _tree
from mtfunc._base import Batch, Key
from mtfunc.trace import Flat, Traced

FUNCTORCH = ("functorch", "torch.func", "vmap", "setup_context", "data pointer", "storage")
"""Words in what torch says when a kernel cannot be traced by torch.func."""


class Wanted(NamedTuple):
    """Which parts of a stage take part in one pullback; indices are static, from the schedule.

    Attributes:
        inputs: differentiable inputs whose cotangent is wanted.
        outputs: fresh outputs that have a cotangent.
        running: those of ``inputs`` that already have a sum, from later stages or micro-batches.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    running: tuple[int, ...]


class Linearized(NamedTuple):
    """A stage's outputs and its pullback at one point.

    ``pull(cotangents, sums)`` takes a tensor for each of ``Wanted.outputs`` and of
    ``Wanted.running`` and returns one for each of ``Wanted.inputs``, ``None`` where the input did
    not take part. It can be called once.
    """

    outputs: list[Tensor]
    aux: list[Tensor]
    pull: Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor | None]]


def linearize(
    traced: Traced,
    inputs: Sequence[Tensor],
    batch: Batch,
    key: Key | None,
    micro: int,
    wanted: Wanted,
) -> Linearized:
    """Runs a stage forward and returns its outputs with its pullback.

    Args:
        traced: the stage.
        inputs: parameter leaves, then carry leaves.
        batch: the micro-batch.
        key: the step's key.
        micro: the micro-batch's number.
        wanted: what takes part.

    Raises:
        RuntimeError: functorch cannot trace a kernel in the stage; the note says what to do.
    """
    flat = traced.flat(batch, key, micro)
    if traced.stage.vjp == "autograd":
        return _by_autograd(flat, inputs, wanted)
    if callable(traced.stage.vjp):
        return _by_rule(traced, traced.stage.vjp, flat, inputs, batch, key, micro, wanted)
    try:
        return _by_func(flat, inputs, wanted)
    except RuntimeError as error:
        if any(word in str(error) for word in FUNCTORCH):
            error.add_note(
                f"mtfunc: stage {traced.stage.name!r} is differentiated by torch.func.vjp. If a "
                "kernel in it has no functorch rule, give the stage vjp='autograd'"
            )
        raise


def _by_func(flat: Flat, inputs: Sequence[Tensor], wanted: Wanted) -> Linearized:
    others = [i for i in range(len(inputs)) if i not in wanted.inputs]

    def of_wanted(*leaves: Tensor) -> tuple[tuple[Tensor, ...], tuple[list[Tensor], list[Tensor]]]:
        placed = dict(zip(wanted.inputs, leaves)) | {i: inputs[i] for i in others}
        outputs, aux = flat([placed[i] for i in range(len(inputs))])
        roots = [outputs[i] for i in wanted.outputs] + [placed[i] for i in wanted.running]
        reached.update(_reached(roots, leaves))
        return tuple(roots), (outputs, aux)

    reached: set[int] = set()
    leaves = [inputs[i] for i in wanted.inputs]
    traced: Any = torch.func.vjp(of_wanted, *leaves, has_aux=True)
    _, vjp_fn, (outputs, aux) = traced

    def pull(cotangents: Sequence[Tensor], sums: Sequence[Tensor]) -> list[Tensor | None]:
        # As is, vjp_fn would keep the graph and record a second one.
        with torch.no_grad():
            found = vjp_fn((*cotangents, *sums), retain_graph=False)
        # It fills in zeros for what did not take part, which is not the same: see above.
        return [grad if i in reached else None for i, grad in enumerate(found)]

    return Linearized(outputs, aux, pull)


def _reached(roots: Sequence[Tensor], leaves: Sequence[Tensor]) -> set[int]:
    """Which of the leaves the graphs of the roots lead back to, by number."""
    numbers = {id(leaf): i for i, leaf in enumerate(leaves)}
    found = {numbers[id(root)] for root in roots if id(root) in numbers}
    nodes = {root.grad_fn for root in roots if root.grad_fn is not None}
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            found.add(numbers.get(id(node.variable), -1))
        fresh = {after for after, _ in node.next_functions if after is not None} - nodes
        nodes |= fresh
        todo += fresh
    return found


def _by_autograd(flat: Flat, inputs: Sequence[Tensor], wanted: Wanted) -> Linearized:
    placed = [leaf.detach() for leaf in inputs]
    for i in wanted.inputs:
        placed[i].requires_grad_()
    with torch.enable_grad():
        outputs, aux = flat(placed)
    roots = [outputs[i] for i in wanted.outputs] + [placed[i] for i in wanted.running]
    leaves = [placed[i] for i in wanted.inputs]

    def pull(cotangents: Sequence[Tensor], sums: Sequence[Tensor]) -> list[Tensor | None]:
        return list(torch.autograd.grad(roots, leaves, [*cotangents, *sums], allow_unused=True))

    return Linearized([out.detach() for out in outputs], [a.detach() for a in aux], pull)


def _by_rule(
    traced: Traced,
    rule: Callable[..., Any],
    flat: Flat,
    inputs: Sequence[Tensor],
    batch: Batch,
    key: Key | None,
    micro: int,
    wanted: Wanted,
) -> Linearized:
    with torch.no_grad():
        outputs, aux = flat(inputs)

    def pull(cotangents: Sequence[Tensor], sums: Sequence[Tensor]) -> list[Tensor | None]:
        return pull_rule(traced, rule, inputs, batch, key, micro, wanted, cotangents, sums)

    return Linearized(outputs, aux, pull)


def pull_rule(
    traced: Traced,
    rule: Callable[..., Any],
    inputs: Sequence[Tensor],
    batch: Batch,
    key: Key | None,
    micro: int,
    wanted: Wanted,
    cotangents: Sequence[Tensor],
    sums: Sequence[Tensor],
) -> list[Tensor | None]:
    """What ``Linearized.pull`` returns, by the pullback rule that the user wrote."""
    found = apply_rule(
        traced, rule, inputs, batch, key, micro, dict(zip(wanted.outputs, cotangents))
    )
    for i, total in zip(wanted.running, sums):
        grad = found[i]
        found[i] = total if grad is None else total + grad
    return [found[i] for i in wanted.inputs]


def apply_rule(
    traced: Traced,
    rule: Callable[..., Any],
    inputs: Sequence[Tensor],
    batch: Batch,
    key: Key | None,
    micro: int,
    cotangents: Mapping[int, Tensor],
) -> list[Tensor | None]:
    """The cotangents of a stage's flat inputs by the pullback rule that the user wrote.

    Args:
        traced: the stage.
        rule: ``rule(*subtrees, carry, batch, cotangent, **options)``. Its ``cotangent`` has the
            structure of the carry that the stage returns, with ``None`` for leaves that have no
            cotangent, for those that the stage passes on unchanged, and for a leaf's repetitions.
        inputs: parameter leaves, then carry leaves.
        batch: the micro-batch.
        key: the step's key.
        micro: the micro-batch's number.
        cotangents: by the number of the fresh output.

    Raises:
        ValueError: the rule returns another structure or other shapes than its inputs'.
    """
    name = traced.stage.name
    fresh = iter(range(len(traced.outputs)))
    leaves = [None if s is not None else cotangents.get(next(fresh)) for s in traced.sources]
    places = traced.carry_out.places
    once = [leaves[i] if i not in places[:n] else None for n, i in enumerate(places)]
    cotangent = _tree.unflatten(traced.carry_out.spec, once)
    subtrees = traced.subtrees(inputs)
    with torch.no_grad():
        found = rule(
            *subtrees, traced.carry(inputs), batch, cotangent, **traced.stage.options(key, micro)
        )
    if not isinstance(found, tuple) or len(found) != len(subtrees) + 1:
        got = f"{len(found)} values" if isinstance(found, tuple) else f"a {type(found).__name__}"
        raise ValueError(
            f"stage {name!r}: its pullback rule returned {got}; expected a tuple of "
            f"{len(subtrees)} parameter cotangents and the carry's"
        )
    totals: list[Tensor | None] = [None] * len(inputs)
    carry_places = tuple(traced.n_params + i for i in traced.carry_in.places)
    where = (*traced.binding.subtrees, (traced.carry_in.spec, carry_places))
    for number, (given, (spec, places)) in enumerate(zip(found, where)):
        by_path = _tree.flatten(given)[0]
        for path, i in zip(spec.paths(), places):
            grad = by_path.pop(path, None)
            if grad is None:
                continue
            if grad.shape != inputs[i].shape or grad.dtype != inputs[i].dtype:
                raise ValueError(
                    f"stage {name!r}: its pullback rule returned {grad.dtype} of shape "
                    f"{tuple(grad.shape)} at {path!r} of value {number}; expected "
                    f"{inputs[i].dtype} of shape {tuple(inputs[i].shape)}"
                )
            before = totals[i]
            totals[i] = grad if before is None else before + grad
        if by_path:
            raise ValueError(
                f"stage {name!r}: its pullback rule returned {sorted(by_path)} in value {number}; "
                f"expected at most {list(spec.paths())}"
            )
    return totals
