"""Stochastic gradient descent with momentum."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mtfunc._base import Leaves, Optimizer, Schedule1D
from mtfunc.optim import _leaves
from mtfunc.optim._checks import check_ranges
from mtfunc.optim._leaves import Tensors
from mtfunc.optim.schedules import as_schedule, describe


def sgd(
    learning_rate: float | Schedule1D,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Gradient descent (Sutskever et al., ICML 2013, in the form of ``torch.optim.SGD``).

    With ``a = learning_rate(step)``, in each parameter's dtype::

        g += weight_decay * p
        mu = momentum * mu + g
        p -= a * (g + momentum * mu if nesterov else mu)

    Bitwise equal to ``torch.optim.SGD(fused=True)`` in float32 and float64. On CPUs that kernel
    leaves 16-bit parameters unchanged (pytorch issue 191763, versions up to 2.13), so these follow
    the plain ``torch.optim.SGD``, whose own last bits depend on where it cuts a leaf of more than
    32,768 elements between threads.

    Args:
        learning_rate: a float, or a function of the steps already taken.
        momentum: the decay of the sum of gradients, in [0, 1); 0 keeps no moments.
        nesterov: whether to look ahead by the momentum.
        weight_decay: the factor of the L2 penalty, which is part of the gradient.

    Returns:
        An optimizer with the moment ``"mu"`` in the parameters' dtypes, or none without momentum.

    Raises:
        TypeError: a hyperparameter is not a number.
        ValueError: a hyperparameter is outside its range, or ``nesterov`` comes without momentum.

    Example:
        >>> import torch
        >>> from mtfunc.optim import sgd
        >>> optimizer, params = sgd(0.1), {"w": torch.ones(2)}
        >>> optimizer.update_(params, {"w": torch.tensor([5.0, -5.0])}, optimizer.init(params), 0)
        >>> params["w"]
        tensor([0.5000, 1.5000])
    """
    schedule = as_schedule("sgd", learning_rate)
    check_ranges("sgd", momentum=(momentum, 0, 1), weight_decay=(weight_decay, 0, math.inf))
    if nesterov and not momentum:
        raise ValueError("mt.sgd: nesterov: expected a momentum above 0 with it, got momentum=0")
    kinds = ("mu",) if momentum else ()

    def init(params: Leaves) -> dict[str, Leaves]:
        return _leaves.zeros("sgd", params, *kinds)

    @torch.no_grad()
    def update_(params: Leaves, grads: Leaves, state: dict[str, Leaves], step: int) -> None:
        rate = float(schedule(step))
        moments = {kind: state[kind] for kind in kinds}
        rows = _leaves.match("sgd", params, grads=grads, **moments)

        def kernel(first: Tensors, grads: Tensors, mu: Tensors | None = None) -> None:
            torch._fused_sgd_(
                first,
                grads,
                mu or [],
                weight_decay=weight_decay,
                momentum=momentum,
                lr=rate,
                dampening=0.0,
                nesterov=nesterov,
                maximize=False,
                is_first_step=False,
            )

        _leaves.update_((row for row in rows if _is_fusable(row[0])), kernel)
        for param, grad, *mu in _leaves.blocks(row for row in rows if not _is_fusable(row[0])):
            if weight_decay:
                grad = grad.add(param, alpha=weight_decay)
            if mu:
                mu[0].mul_(momentum).add_(grad)
                grad = grad.add(mu[0], alpha=momentum) if nesterov else mu[0]
            param.add_(grad, alpha=-rate)

    name = (
        f"sgd({describe(learning_rate)}, momentum={momentum}, nesterov={nesterov}, "
        f"weight_decay={weight_decay})"
    )
    return Optimizer(init=init, update_=update_, name=name)


def _is_fusable(param: Tensor) -> bool:
    return param.dtype in (torch.float32, torch.float64) and not param.is_meta
