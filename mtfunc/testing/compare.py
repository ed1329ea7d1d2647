"""Bitwise comparison of pytrees, and what a difference looks like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtfunc import _tree
from mtfunc._base import Leaves, Path

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Difference(NamedTuple):
    """Two leaves of one path that are not the same."""

    path: Path
    got: Tensor | None
    expected: Tensor | None

    def __str__(self) -> str:
        if self.got is None or self.expected is None:
            missing = "missing" if self.got is None else "there"
            return f"is {missing}; expected {'none' if self.expected is None else 'a tensor'}"
        if kind(self.got) != kind(self.expected):
            return f"is {kind(self.got)}; expected {kind(self.expected)}"
        where = unequal(self.got, self.expected)
        first = tuple(where.nonzero()[0].tolist())
        got, expected = self.got[first].item(), self.expected[first].item()
        most = (wide(self.got) - wide(self.expected)).abs()[where].max().item()
        return (
            f"{int(where.sum())} of {where.numel()} elements differ, by {most:.3g} at most; first "
            f"at {list(first)}: got {got!r}, expected {expected!r}"
        )


def kind(leaf: Tensor) -> str:
    """The dtype and shape of a leaf: ``float32[2,3]``."""
    return f"{str(leaf.dtype).removeprefix('torch.')}[{','.join(map(str, leaf.shape))}]"


def wide(leaf: Tensor) -> Tensor:
    """The leaf in the widest type of its kind."""
    return leaf.detach().to(torch.complex128 if leaf.is_complex() else torch.float64)


def unequal(got: Tensor, expected: Tensor) -> Tensor:
    """Where two leaves of one shape and dtype differ in some bit; NaN equals NaN."""
    if got.is_complex():
        parts = unequal(torch.view_as_real(got.resolve_conj()), torch.view_as_real(expected))
        return parts.any(-1)
    bits = _BITS[got.element_size()]
    differ = got.detach().view(bits) != expected.detach().view(bits)
    if got.is_floating_point():
        differ &= ~(got.isnan() & expected.isnan())
    return differ


def same(got: Tensor, expected: Tensor) -> bool:
    """Whether shape, dtype and all bits agree."""
    return kind(got) == kind(expected) and not bool(unequal(got, expected).any())


def differences(got: Any, expected: Any) -> dict[Path, Difference]:
    """The leaves of two pytrees that differ, by path, in the order of ``expected``."""
    ours, theirs = (
        {path: torch.as_tensor(leaf) for path, leaf in _tree.flatten(tree)[0].items()}
        for tree in (got, expected)
    )
    found = {}
    for path in dict.fromkeys((*theirs, *ours)):
        a, b = ours.get(path), theirs.get(path)
        if a is None or b is None or not same(a, b):
            found[path] = Difference(path, a, b)
    return found


def likely_cause(difference: Difference, expected: Leaves, facts: Mapping[str, bool]) -> str:
    """What most often makes a gradient differ in this way.

    Args:
        difference: a leaf whose streamed gradient is wrong.
        expected: the standard graph's gradients by path.
        facts: ``"seeds"``, that it happens on the simulated device only; ``"shared"``, that a
            carry leaf lies in the parameters' memory.
    """
    got, wanted = difference.got, difference.expected
    if got is None or wanted is None or kind(got) != kind(wanted):
        return "the engine returned another structure than the standard graph"
    a, b = wide(got), wide(wanted)
    if facts.get("seeds"):
        return "an operation ran before one that it needs: it happens on the simulated device only"
    if a.isnan().any() and not b.isnan().any():
        return "a term that the standard graph leaves out, such as 0 * inf of an unused output"
    if not a.any():
        return "the gradient was lost on its way: every element is zero"
    if torch.equal(a, 2 * b):
        return "the gradient was added twice, as for a leaf that two stages read"
    for path, leaf in expected.items():
        if path != difference.path and leaf is not None and same(got, leaf):
            return f"gradients were mixed up: this is the gradient of {path!r}"
    if torch.allclose(a, b, rtol=64 * torch.finfo(got.dtype).eps, atol=0.0) or _rounding(a, b, got):
        why = (
            "a stage hands a parameter on as a carry leaf"
            if facts.get("shared")
            else "a kernel rounds differently in another layout, or sums in another order"
        )
        return f"rounding: only last bits differ. {why[0].upper()}{why[1:]}"
    return (
        "the forward that the pullback runs again did not compute what the first one did, or a "
        "stage's pullback is not a function of its inputs"
    )


def _rounding(a: Tensor, b: Tensor, leaf: Tensor) -> bool:
    return bool((a - b).abs().max() <= 16 * torch.finfo(leaf.dtype).eps * b.abs().max())
