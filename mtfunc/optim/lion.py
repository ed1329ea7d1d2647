"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

import math

import torch

from mtfunc._base import Leaves, Optimizer, Schedule1D
from mtfunc.optim import _leaves
from mtfunc.optim._checks import check_ranges
from mtfunc.optim.schedules import as_schedule, describe


def lion(
    learning_rate: float | Schedule1D,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.01,
) -> Optimizer:
    """Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023, algorithm 2).

    With ``a = learning_rate(step)``, in each parameter's dtype::

        update = sign(b1 * mu + (1 - b1) * g)
        p -= a * (update + weight_decay * p)
        mu = b2 * mu + (1 - b2) * g

    It keeps one moment; the paper advises a learning rate 3 to 10 times below AdamW's, and a
    weight decay as many times above.

    Args:
        learning_rate: a float, or a function of the steps already taken.
        b1: the weight of the momentum in the update, in [0, 1).
        b2: the decay of the momentum, in [0, 1).
        weight_decay: the fraction that a parameter loses at a learning rate of 1.

    Returns:
        An optimizer with the moment ``"mu"`` in the parameters' dtypes.

    Raises:
        TypeError: a hyperparameter is not a number.
        ValueError: a hyperparameter is outside its range.

    Example:
        >>> import torch
        >>> from mtfunc.optim import lion
        >>> optimizer, params = lion(0.1, weight_decay=0.0), {"w": torch.ones(2)}
        >>> optimizer.update_(params, {"w": torch.tensor([5.0, -5.0])}, optimizer.init(params), 0)
        >>> params["w"]
        tensor([0.9000, 1.1000])
    """
    schedule = as_schedule("lion", learning_rate)
    check_ranges("lion", b1=(b1, 0, 1), b2=(b2, 0, 1), weight_decay=(weight_decay, 0, math.inf))

    def init(params: Leaves) -> dict[str, Leaves]:
        return _leaves.zeros("lion", params, "mu")

    @torch.no_grad()
    def update_(params: Leaves, grads: Leaves, state: dict[str, Leaves], step: int) -> None:
        rate = float(schedule(step))
        rows = _leaves.match("lion", params, grads=grads, mu=state["mu"])
        for param, grad, mu in _leaves.blocks(rows):
            update = mu.lerp(grad, 1 - b1).sign_()
            param.mul_(1 - rate * weight_decay).add_(update, alpha=-rate)
            mu.lerp_(grad, 1 - b2)

    name = f"lion({describe(learning_rate)}, b1={b1}, b2={b2}, weight_decay={weight_decay})"
    return Optimizer(init=init, update_=update_, name=name)
