"""What occurs in a case, by name: so that a search can say what it covered."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping

from mtfunc.testing.strategies.blocks import BLOCKS, ODD_CARRY, ODD_PARAMS
from mtfunc.testing.strategies.case import Block, Case

KINDS = (
    *("1 stage", *(f"{n} stages" for n in range(2, 9))),
    *("linear", "normed", "attention", "gated MLP", "experts, one starved", "recurrent"),
    *("convolutional", "alternating functions", "encoder and decoder"),
    *("skip across the whole stack", "tied by two", "tied by three", "shared block"),
    *(*ODD_PARAMS, *ODD_CARRY, "odd leaves in the batch", "two dtypes in a stage"),
    *("frozen subset", "keyed dropout", "aux", "mixed losses", "aliases in the carry"),
    *("a carry leaf of infinite slope, unused", "scan", "torch.func.vjp", "torch.autograd.grad"),
    *("1 micro-batch", "2 micro-batches", "3 micro-batches", "no label counts"),
    *(
        "carries on the device",
        "carries on the host",
        "kept pullbacks",
        "float32",
        "float64",
        "bfloat16",
    ),
)
"""What :func:`kinds` may find in a case of the library's own blocks."""

_WAYS = {"memory": "encoder and decoder", "alias": "aliases in the carry"}
"""What it is called when a stage uses in the carry what an earlier one made."""


def kinds(case: Case, blocks: Mapping[str, Block] = BLOCKS) -> frozenset[str]:
    """The kinds of stages, carries, ties, leaves and batches that occur in a case.

    Args:
        case: the case.
        blocks: the blocks that its parts name.
    """
    return frozenset(
        (
            *(kind for part in case.parts for name in part.blocks for kind in blocks[name].kinds),
            *_of_parts(case, blocks),
            *_of_ties(case),
            *_of_the_carry(case, blocks),
            *_of_the_rest(case),
        )
    )


def _of_parts(case: Case, blocks: Mapping[str, Block]) -> Iterator[str]:
    yield "1 stage" if case.stages == 1 else f"{case.stages} stages"
    for part in case.parts:
        yield "torch.func.vjp" if part.vjp == "func" else "torch.autograd.grad"
        used = [blocks[name] for name in part.blocks]
        if part.scan:
            yield "scan"
        if len(part.keys) > 1 and len(used) > 1:
            yield "shared block"
        pairs = list(itertools.pairwise(used))
        if any(a.init is b.init and (a.fn, a.static) != (b.fn, b.static) for a, b in pairs):
            yield "alternating functions"


def _of_ties(case: Case) -> Iterator[str]:
    readers: Counter[str] = Counter()
    for part in case.parts:
        own, keys = part.keys[: part.scan], part.keys[part.scan :]
        for first in own:
            readers.update(f"{first}/{entry}" for entry in range(len(part.blocks)))
        readers.update(dict.fromkeys(keys, len(part.blocks)))
    if 2 in readers.values():
        yield "tied by two"
    if any(stages >= 3 for stages in readers.values()):
        yield "tied by three"


def _of_the_carry(case: Case, blocks: Mapping[str, Block]) -> Iterator[str]:
    names = [name for part in case.parts for name in part.blocks]
    made: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        block = blocks[name]
        if block.drops:
            made.clear()
        if made.get(block.uses):
            since = made[block.uses]
            maker = since.pop() if block.uses == "skips" else since[-1]
            whole = maker <= 1 and place == len(names) - 2 and place - maker > 1
            if block.uses == "skips" and whole:
                yield "skip across the whole stack"
            elif block.uses in _WAYS:
                yield _WAYS[block.uses]
        if block.makes:
            made.setdefault(block.makes, []).append(place)


def _of_the_rest(case: Case) -> Iterator[str]:
    yield f"{len(case.micros)} micro-batch{'es' if len(case.micros) > 1 else ''}"
    yield f"carries on the {case.config.carries}"
    yield str(case.dtype).removeprefix("torch.")
    if case.config.residuals != "recompute":
        yield "kept pullbacks"
    if case.frozen:
        yield "frozen subset"
    if case.odd:
        yield "odd leaves in the batch"
    if all(micro.ignored == micro.rows * micro.tokens for micro in case.micros):
        yield "no label counts"
