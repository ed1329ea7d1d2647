"""The backward pass of one stage: its forward again, without what nobody reads, then its pullback.

A recomputed forward pass makes some values that no backward formula uses: the last projection
of a residual block, for instance, whose product only fed the next stage. Which ones is learnt
the first time, by watching which operations' results are read, and proved at once: with NaN in
every value left out, the gradients must come out the same to the last bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mtfunc._base import Batch, Key
from mtfunc.pullback import Wanted, linearize, pull_rule
from mtfunc.trace import Traced

Mode = AbstractContextManager[Any]
PLAIN: Mode = nullcontext()

LEARN = 2**18
"""Stages with fewer elements in their inputs are recomputed whole: watching costs more."""


class Unread(NamedTuple):
    """A recomputation's operations in order, and which of them nothing reads."""

    ops: tuple[tuple[Any, tuple[Any, ...]], ...] = ()
    """Each operation and the layout of its results."""
    skip: frozenset[int] = frozenset()


NOTHING = Unread()


def pullback(
    traced: Traced,
    inputs: Sequence[Tensor],
    batch: Batch,
    key: Key | None,
    micro: int,
    wanted: Wanted,
    cotangents: Sequence[Tensor],
    sums: Sequence[Tensor],
) -> list[Tensor | None]:
    """Runs a stage forward once more and pulls cotangents back through it.

    Args:
        traced: the stage.
        inputs: parameter leaves, then carry leaves.
        batch: the micro-batch.
        key: the step's key.
        micro: the micro-batch's number.
        wanted: what takes part.
        cotangents: a tensor for each of ``wanted.outputs``.
        sums: a tensor for each of ``wanted.running``.

    Returns:
        A tensor for each of ``wanted.inputs``, ``None`` where it did not take part.
    """
    if callable(traced.stage.vjp):
        rule = traced.stage.vjp
        return pull_rule(traced, rule, inputs, batch, key, micro, wanted, cotangents, sums)

    def run(forward: Mode = PLAIN, backward: Mode = PLAIN) -> list[Tensor | None]:
        with forward:
            done = linearize(traced, inputs, batch, key, micro, wanted)
        with backward:
            return done.pull(cotangents, sums)

    if sum(leaf.numel() for leaf in inputs) < LEARN:
        return run()
    if ("unread", wanted) not in traced.learnt:
        traced.learnt["unread", wanted] = NOTHING
        # Watching is optional: some tensors have no storage, some code refuses to be watched. An
        # error of the stage's own comes again.
        with suppress(Exception):
            traced.learnt["unread", wanted] = _learn(run)
        return run()
    unread = traced.learnt["unread", wanted]
    if not unread.skip:
        return run()
    try:
        return run(_Skip(unread))
    except Exception:
        # It went another way than before: compute all of it. An error of its own comes again.
        traced.learnt["unread", wanted] = NOTHING
        return run()


def _learn(run: Callable[..., list[Tensor | None]]) -> Unread:
    """What can be left out of a run; nothing unless proved.

    One run's results are in memory at a time, so learning needs no more of it than a run does.
    """
    watch = _Watch()
    results = run(watch.forward, watch.backward)
    unread = watch.unread(results)
    del results, watch
    if unread.skip and _digest(run(_Skip(unread, fill=float("nan")))) == _digest(run()):
        return unread
    return NOTHING


def _digest(tensors: Sequence[Tensor | None]) -> str:
    digest = hashlib.blake2b()
    for leaf in tensors:
        if leaf is None:
            digest.update(b"none")
        else:
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _place(leaf: Tensor) -> int:
    return leaf.untyped_storage()._cdata


def _layouts(out: Any) -> tuple[Any, ...]:
    return tuple((tuple(x.shape), x.stride(), x.dtype, x.device) for x in _tensors(out))


class _Watch:
    """Records the operations of a forward pass, and whose results are read after it."""

    def __init__(self) -> None:
        self.ops: list[tuple[Any, tuple[Any, ...]]] = []
        self.sources: list[set[int]] = []
        """For each operation, those whose results it reads."""
        self.makers: dict[int, int] = {}
        """Which operation filled a storage; the newest, since freed memory is used again."""
        self.needed: set[int] = set()
        self.optional: set[int] = set()
        """Operations that only make new floats: no views, no changes in place, no choices."""
        self.forward, self.backward = _Each(self._forward), _Each(self._backward)

    def _note(self, number: int, given: list[Tensor], made: list[Tensor]) -> tuple[set[int], int]:
        """Whose results were read, and how many of the results lie in new storages."""
        places = {_place(leaf) for leaf in given}
        read = {self.makers[place] for place in places if place in self.makers}
        fresh = [_place(leaf) for leaf in made if _place(leaf) not in places]
        self.makers.update(dict.fromkeys(fresh, number))
        return read, len(fresh)

    def _forward(self, func: Any, given: list[Tensor], out: Any) -> None:
        number, made = len(self.ops), _tensors(out)
        read, fresh = self._note(number, given, made)
        self.ops.append((func, _layouts(out)))
        self.sources.append(read)
        if func._schema.is_mutable or not made or 0 < fresh < len(made):
            self.needed.add(number)
        elif fresh:
            kind = self.optional if all(x.is_floating_point() for x in made) else self.needed
            kind.add(number)

    def _backward(self, func: Any, given: list[Tensor], out: Any) -> None:
        self.needed |= self._note(-1, given, _tensors(out))[0]

    def unread(self, results: Sequence[Tensor | None]) -> Unread:
        """What can be left out when these are the results of the backward pass."""
        needed = self.needed | {self.makers.get(_place(x), -1) for x in results if x is not None}
        for number in reversed(range(len(self.ops))):
            if number in needed:
                needed |= self.sources[number]
        skip = frozenset(self.optional - needed)
        # A Python call for every operation is worth it only where a large one goes.
        large = any(self.ops[number][0].overloadpacket in flop_registry for number in skip)
        return Unread(tuple(self.ops), skip) if large else NOTHING


class _Each(TorchDispatchMode):
    """Calls ``note(operation, tensors given, result)`` after each operation."""

    def __init__(self, note: Callable[[Any, list[Tensor], Any], None]):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.note(func, _tensors((args, kwargs or {})), out)
        return out


class _Diverged(Exception):
    """The operations are not those that were recorded."""


class _Skip(TorchDispatchMode):
    """Leaves out what nothing reads; the results have the layout, and any content."""

    def __init__(self, unread: Unread, fill: float | None = None):
        super().__init__()
        self.rest = enumerate(unread.ops)
        self.skip, self.fill = unread.skip, fill

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number, (expected, layouts) = next(self.rest, (-1, (func, ())))
        if number < 0 or func is not expected:
            raise _Diverged
        if number not in self.skip:
            out = func(*args, **(kwargs or {}))
            if _layouts(out) != layouts:
                raise _Diverged
            return out
        made = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for shape, stride, dtype, device in layouts
        ]
        if self.fill is not None:
            for leaf in made:
                leaf.fill_(self.fill)
        return made[0] if len(func._schema.returns) == 1 else tuple(made)
