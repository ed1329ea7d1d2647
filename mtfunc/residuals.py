"""What a pullback would hold if it were kept from the forward pass instead of computed again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mtfunc import _tree
from mtfunc._base import Batch, Key
from mtfunc.pullback import Wanted, linearize
from mtfunc.trace import Traced


def residual_bytes(
    traced: Traced, batch: Batch, key: Key | None, micro: int, wanted: Wanted
) -> int | None:
    """Bytes that are still in memory when a stage has run forward and its pullback is kept.

    Counted by running the stage on tensors without data, which choose the kernels that real ones
    would; what the stage was given and what it returns is not counted, since that is kept anyway.

    Args:
        traced: the stage.
        batch: the micro-batch; only shapes are used.
        key: the step's key.
        micro: the micro-batch's number.
        wanted: what takes part in the pullback.

    Returns:
        Bytes; ``None`` where they cannot be known without data, or where keeping spares nothing.
    """
    if callable(traced.stage.vjp):
        return None  # a rule computes what it needs by itself
    if ("residuals", wanted) not in traced.learnt:
        traced.learnt["residuals", wanted] = _count(traced, batch, key, micro, wanted)
    return traced.learnt["residuals", wanted]


def _count(traced: Traced, batch: Batch, key: Key | None, micro: int, wanted: Wanted) -> int | None:
    # An import of seconds, which only those who keep residuals pay for.
    from torch._subclasses.fake_tensor import FakeTensorMode

    watch = _Storages()
    try:
        with torch.inference_mode(False), FakeTensorMode(allow_non_fake_inputs=True) as fake:

            def placed(_: str, leaf: Any) -> Any:
                return fake.from_tensor(leaf.detach()) if isinstance(leaf, Tensor) else leaf

            inputs = [
                torch.empty_strided(aval.shape, aval.stride, dtype=aval.dtype)
                for aval in traced.inputs
            ]
            there = _tree.map_leaves(placed, batch)
            step_key = None if key is None else fake.from_tensor(key.detach())
            with watch:
                done = linearize(traced, inputs, there, step_key, micro, wanted)
            given = {x.untyped_storage()._cdata for x in (*done.outputs, *done.aux)}
            return watch.alive(given)
    except Exception:
        # Data decides what it does, or a kernel of its own says nothing about shapes.
        return None


class _Storages(TorchDispatchMode):
    """Every storage that operations fill."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        taken = {_place(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and _place(leaf) not in taken:
                storage = leaf.untyped_storage()
                self.seen[_place(leaf)] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def alive(self, others: set[int]) -> int:
        """Bytes of the storages that still exist and are none of ``others``."""
        return sum(
            nbytes
            for place, (ref, nbytes) in self.seen.items()
            if place not in others and not ref.expired()
        )


def _place(leaf: Tensor) -> int:
    return leaf.untyped_storage()._cdata
