"""What a run checks: its first gradients against the standard graph, its numbers being finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mtfunc as mt
from mtfunc import _tree


def first_difference(
    program: mt.Program,
    params: Any,
    batches: list[Any],
    key: Tensor,
    *,
    device: str,
) -> str | None:
    """Compares loss and gradients of one step, bit for bit.

    Args:
        program: the model.
        params: its parameters.
        batches: the micro-batches of a step.
        key: that the step uses.
        device: that streams.

    Returns:
        ``None`` where all bits agree, or what differs first: the loss or a leaf, and by how much.
    """
    loss, grads = mt.value_and_grad(program, device=device)(params, batches, key)
    expected_loss, expected = mt.reference.value_and_grad(program)(params, batches, key)
    pairs = {"the loss": (loss, expected_loss)}
    leaves = _tree.flatten(expected)[0]
    pairs |= {f"the gradient of {p!r}": (_tree.get(grads, p), leaf) for p, leaf in leaves.items()}
    for where, (got, wanted) in pairs.items():
        if not same_bits(got, wanted):
            apart = (got.double() - wanted.double()).abs().max().item()
            return f"{where} differs, by {apart:.3g} at most"
    return None


def check_finite(what: str, tree: Any) -> None:
    """Insists on finite numbers.

    Raises:
        mtfunc.NonFiniteError: some leaf holds an infinite number or NaN; the first is named.
    """
    for path, leaf in _tree.flatten(tree)[0].items():
        if not bool(torch.isfinite(leaf).all()):
            raise mt.NonFiniteError(f"{what} not finite{f', first at {path!r}' if path else ''}")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes: NaN equals itself, and 0 is not -0."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(
        *(x.detach().reshape(-1).contiguous().view(torch.uint8) for x in (one, other))
    )
