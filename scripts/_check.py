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
        device: that streams; on CUDA the standard graph is computed there as well.

    Returns:
        ``None`` where all bits agree, or what differs first: the loss or a leaf, and by how much.
    """
    loss, grads = mt.value_and_grad(program, device=device)(params, batches, key)
    home = torch.device(device) if device.startswith("cuda") else torch.device("cpu")
    there = _tree.map_leaves(lambda _, leaf: _to(leaf, home), (params, batches))
    expected_loss, expected = mt.reference.value_and_grad(program)(*there, key)
    pairs = {"the loss": (loss, expected_loss)}
    leaves = _tree.flatten(expected)[0]
    pairs |= {f"the gradient of {p!r}": (_tree.get(grads, p), leaf) for p, leaf in leaves.items()}
    for where, (got, wanted) in pairs.items():
        wanted = wanted.to(got.device)
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


def _to(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf
