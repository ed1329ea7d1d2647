"""AdamW, by torch's fused kernel."""

from __future__ import annotations

import math

import torch

from mtfunc._base import Leaves, Optimizer, Schedule1D
from mtfunc.optim import _leaves
from mtfunc.optim._checks import check_ranges
from mtfunc.optim._leaves import Tensors
from mtfunc.optim.schedules import as_schedule, describe


def adamw(
    learning_rate: float | Schedule1D,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019, algorithm 2).

    With ``t = step + 1`` and ``a = learning_rate(step)``, in each parameter's dtype::

        p *= 1 - a * weight_decay
        mu = b1 * mu + (1 - b1) * g
        nu = b2 * nu + (1 - b2) * g**2
        p -= a * mu / (1 - b1**t) / (sqrt(nu / (1 - b2**t)) + eps)

    Bitwise equal to ``torch.optim.AdamW(fused=True)``. Gradients of another dtype are converted
    block by block through a small scratch, which rounds as converting them first would.

    Args:
        learning_rate: a float, or a function of the steps already taken.
        b1: the decay of the mean of gradients, in [0, 1).
        b2: the decay of the mean of squared gradients, in [0, 1).
        eps: what keeps the quotient finite.
        weight_decay: the fraction that a parameter loses at a learning rate of 1.

    Returns:
        An optimizer with the moments ``"mu"`` and ``"nu"`` in the parameters' dtypes.

    Raises:
        TypeError: a hyperparameter is not a number.
        ValueError: a hyperparameter is outside its range.

    Example:
        >>> import torch
        >>> from mtfunc.optim import adamw
        >>> optimizer = adamw(0.1, weight_decay=0.0)
        >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([5.0, -5.0])}
        >>> state = optimizer.init(params)
        >>> optimizer.update_(params, grads, state, 0)
        >>> params["w"]
        tensor([0.9000, 1.1000])
    """
    schedule = as_schedule("adamw", learning_rate)
    check_ranges(
        "adamw",
        b1=(b1, 0, 1),
        b2=(b2, 0, 1),
        eps=(eps, 0, math.inf),
        weight_decay=(weight_decay, 0, math.inf),
    )

    def init(params: Leaves) -> dict[str, Leaves]:
        return _leaves.zeros("adamw", params, "mu", "nu")

    @torch.no_grad()
    def update_(params: Leaves, grads: Leaves, state: dict[str, Leaves], step: int) -> None:
        rate = float(schedule(step))

        def kernel(first: Tensors, grads: Tensors, mu: Tensors, nu: Tensors) -> None:
            counts = [torch.tensor(float(step + 1), device=first[0].device)] * len(first)
            torch._fused_adamw_(
                first,
                grads,
                mu,
                nu,
                [],
                counts,
                lr=rate,
                beta1=b1,
                beta2=b2,
                weight_decay=weight_decay,
                eps=eps,
                amsgrad=False,
                maximize=False,
            )

        rows = _leaves.match("adamw", params, grads=grads, mu=state["mu"], nu=state["nu"])
        _leaves.update_(rows, kernel)

    name = (
        f"adamw({describe(learning_rate)}, b1={b1}, b2={b2}, eps={eps}, "
        f"weight_decay={weight_decay})"
    )
    return Optimizer(init=init, update_=update_, name=name)
