"""What an operation's forward pass computed, kept so that a recomputation need not do it again.

An operation asks for its residual by ``take(name, compute)``. As it is, that calls ``compute()``.
Inside ``collecting()`` the result is also appended to a list; inside ``replaying(list)`` the next
entry of that list is the result and nothing is computed. Gradients are the same bit for bit,
since the backward pass reads the same numbers.

    with collecting() as saved:
        outputs = stage(inputs)                            # forward
    ...
    with replaying(saved):
        outputs, pull = torch.func.vjp(stage, inputs)      # recomputation without the kernels
    cotangents = pull(...)

Entries are known by their order, so both passes must ask alike. Backward passes that compute
something again (``mt.ops.tile``) do so under ``off()``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Residual(NamedTuple):
    """What one call computed: the operation's name and its tensors."""

    name: str
    tensors: tuple[Tensor, ...]


@dataclass
class _Replay:
    saved: Sequence[Residual]
    used: int = 0


_mode: ContextVar[list[Residual] | _Replay | None] = ContextVar("residuals", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[list[Residual]]:
    """Collects the residuals of every operation inside; yields the list that they go to."""
    saved: list[Residual] = []
    with _set(saved):
        yield saved


@contextlib.contextmanager
def replaying(saved: Sequence[Residual]) -> Iterator[None]:
    """Hands saved residuals back, in their order.

    Raises:
        RuntimeError: the operations inside ask for others than were saved, or for fewer.
    """
    replay = _Replay(saved)
    with _set(replay):
        yield
    if replay.used < len(saved):
        raise RuntimeError(
            f"residuals: {replay.used} of {len(saved)} were asked for; expected all of them. The "
            "recomputation must run the same operations as the forward pass"
        )


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Neither collects nor replays inside."""
    with _set(None):
        yield


def take(name: str, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The residual of one call: computed, or handed back.

    Args:
        name: the operation and its shapes, to notice another order of calls.
        compute: computes the tensors; runs without grad.
    """
    mode = _mode.get()
    if isinstance(mode, _Replay):
        found = mode.saved[mode.used] if mode.used < len(mode.saved) else None
        if found is None or found.name != name:
            raise RuntimeError(
                f"residuals: call {mode.used} is {name!r}; expected "
                f"{repr(found.name) if found else 'no further call'}, as in the forward pass. The "
                "recomputation must run the same operations in the same order"
            )
        mode.used += 1
        # Aliases, since autograd marks the very objects that a forward function returns.
        return tuple(tensor.detach() for tensor in found.tensors)
    tensors = compute()
    if mode is not None:
        mode.append(Residual(name, tuple(tensor.detach() for tensor in tensors)))
    return tensors


@contextlib.contextmanager
def _set(mode: list[Residual] | _Replay | None) -> Iterator[None]:
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)
