"""The contract: the types that every public signature uses.

Nothing here imports another module of the package, so that every room may import it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Params = Any
"""A pytree of tensors in host memory; ``None`` is an empty subtree."""
Carry = Any
"""What one stage hands to the next: any pytree of tensors and ``None``."""
Batch = Any
"""What every stage may read: any pytree; several micro-batches are a *list* of them."""
Aux = dict[str, Any]
"""What stages with ``has_aux=True`` report, by stage name; detached."""
Key = Tensor
"""A random key: an int64 tensor of shape ``()``; see :mod:`mtfunc.random`."""
Path = str
"""The way to a leaf or a subtree, keys joined by ``/``: ``"layers/3/wq"``."""
Leaves = dict[Path, Tensor]
"""Some leaves of a pytree by their path."""
StageFn = Callable[..., Any]
"""``fn(*subtrees, carry, batch, **static) -> carry`` (or ``(carry, aux)``)."""
Schedule1D = Callable[[int], float]
"""A learning rate as a pure function of the number of steps already taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """A pair of functions over the leaves of one unit, in optax's manner.

    Attributes:
        init: ``init(params) -> {"mu": {path: tensor}, ...}``, one dict of fresh leaves for each
            kind of moment, shapes and dtypes as the optimizer wants them.
        update_: ``update_(params, grads, state, step)`` changes ``params`` and ``state`` in
            place; the underscore says that buffers are donated. ``grads`` has the paths of
            ``params``; ``step`` counts from 0.
        name: what the optimizer is, with its hyperparameters, for checkpoints and messages.
    """

    init: Callable[[Leaves], dict[str, Leaves]]
    update_: Callable[[Leaves, Leaves, dict[str, Leaves], int], None]
    name: str
