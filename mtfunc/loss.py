"""Losses that are weighted means over all micro-batches of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Term:
    """One mean of a mixture: ``weight * total / count``.

    Attributes:
        weight: a number; 1 unless the mean was scaled.
        total: the summed loss, a scalar tensor.
        count: what it is divided by, a scalar tensor.
    """

    weight: float
    total: Tensor
    count: Tensor


class Mean:
    """A loss that is a weighted mean over all micro-batches: ``sum(total) / sum(count)``.

    Micro-batches of a language model hold different numbers of counted tokens, so the mean of
    their means is not the mean of the step. A final stage therefore returns the sum of its
    losses and their number apart, and the division comes after the last micro-batch. Means add
    and scale, to mix losses that count different things:
    ``Mean(ce, tokens) + 0.01 * Mean(balance, experts)``. A count of 0 over the whole step makes
    that term 0 with zero gradients.

    ``mean.terms`` holds each :class:`Term`, ``mean.value()`` is the loss of this micro-batch alone.

    Args:
        total: the summed loss, a scalar tensor; gradients flow through it.
        count: what to divide by, a number or a scalar tensor; gradients do not flow through it.

    Raises:
        ValueError: one of the two is not a scalar.

    Example:
        >>> import torch
        >>> short, long = Mean(torch.tensor(2.0), 1), Mean(torch.tensor(6.0), 3)
        >>> Mean.pool([short, long])
        tensor(2.)
        >>> (short + 0.5 * long).value()
        tensor(3.)
        >>> short + 0.5 * long
        Mean(2.0, 1) + 0.5 * Mean(6.0, 3)
    """

    __slots__ = ("terms",)
    terms: tuple[Term, ...]

    def __init__(self, total: Any, count: Any):
        total, count = _scalar("total", total), _scalar("count", count)
        self.terms = (Term(1.0, total, count.detach()),)

    @classmethod
    def of(cls, terms: Sequence[Term]) -> Mean:
        """The mixture of these terms."""
        made = cls.__new__(cls)
        made.terms = tuple(terms)
        return made

    @staticmethod
    def pool(means: Sequence[Mean]) -> Tensor:
        """The loss of several micro-batches: term by term, ``sum(total) / sum(count)``.

        Args:
            means: one for each micro-batch, all with the same terms.

        Returns:
            A scalar in the totals' dtype, through which gradients flow to every total.
        """
        loss: Tensor | None = None
        for terms in zip(*(mean.terms for mean in means), strict=True):
            total, count = terms[0].total, terms[0].count
            for term in terms[1:]:
                total, count = total + term.total, count + term.count
            empty = count == 0
            mean = torch.where(empty, 0.0, total / torch.where(empty, 1, count))
            mean = mean if terms[0].weight == 1.0 else terms[0].weight * mean
            loss = mean if loss is None else loss + mean
        assert loss is not None, "a mean has at least one term"
        return loss

    def value(self) -> Tensor:
        """The loss of this micro-batch alone, a scalar tensor."""
        return Mean.pool([self])

    def __add__(self, other: Any) -> Mean:
        other = other if isinstance(other, Mean) else Mean(other, 1)
        return Mean.of(self.terms + other.terms)

    __radd__ = __add__

    def __mul__(self, weight: float) -> Mean:
        if not isinstance(weight, int | float):
            raise TypeError(
                f"Mean: the weight is a {type(weight).__name__}; expected a number. Where it is a "
                "tensor, multiply the total by it instead"
            )
        return Mean.of([replace(term, weight=term.weight * weight) for term in self.terms])

    __rmul__ = __mul__

    def __repr__(self) -> str:
        weights = ("" if t.weight == 1 else f"{t.weight:g} * " for t in self.terms)
        return " + ".join(f"{w}Mean({t.total}, {t.count})" for w, t in zip(weights, self.terms))


def _scalar(name: str, value: Any) -> Tensor:
    tensor = value if isinstance(value, Tensor) else torch.tensor(value)
    if tensor.shape != ():
        raise ValueError(
            f"Mean: {name} has shape {tuple(tensor.shape)}; expected a scalar, shape (). "
            "Sum over tokens and batch first"
        )
    return tensor


def _flatten(mean: Mean) -> tuple[list[Tensor], tuple[float, ...]]:
    leaves = [leaf for term in mean.terms for leaf in (term.total, term.count)]
    return leaves, tuple(term.weight for term in mean.terms)


def _unflatten(leaves: Any, weights: tuple[float, ...]) -> Mean:
    leaves = list(leaves)
    return Mean.of([Term(w, *leaves[2 * i : 2 * i + 2]) for i, w in enumerate(weights)])


torch_pytree.register_pytree_node(Mean, _flatten, _unflatten, serialized_type_name="mtfunc.Mean")


def as_mean(stage: str, output: Any) -> Mean:
    """What a final stage returned as a ``Mean``: a plain scalar is a mean over one.

    Raises:
        ValueError: it is neither a ``Mean`` nor a scalar floating-point tensor.
    """
    if isinstance(output, Mean):
        return output
    if isinstance(output, Tensor) and output.shape == () and output.is_floating_point():
        return Mean(output, 1)
    got = (
        f"a tensor of shape {tuple(output.shape)} and dtype {output.dtype}"
        if isinstance(output, Tensor)
        else f"a {type(output).__name__}"
    )
    raise ValueError(
        f"final stage {stage!r} returned {got}; expected the loss, a scalar floating-point tensor "
        "or mt.Mean(total, count). Sum the losses of the tokens, and divide by mt.Mean's count"
        + ". Did you mean has_aux=True, for a pair (loss, aux)?"
        * isinstance(output, tuple)
    )
