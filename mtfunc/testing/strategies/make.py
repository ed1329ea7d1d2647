"""Makes a case real: its program, parameters, batch and key, the same ones every time."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from mtfunc import random
from mtfunc._base import Batch, Key, Params, Path, StageFn
from mtfunc.program import Program, Scan, Stage, chain, scan, stage
from mtfunc.testing.strategies.blocks import BLOCKS
from mtfunc.testing.strategies.case import VOCABULARY, Block, Case, Normal, Part


class Built(NamedTuple):
    """What :func:`build` makes of a case, ready for :func:`mtfunc.value_and_grad`."""

    program: Program
    params: Params
    batch: Batch
    key: Key


def build(case: Case, blocks: Mapping[str, Block] = BLOCKS) -> Built:
    """The program, fresh parameters, the batch and the key of a case.

    Args:
        case: the case.
        blocks: the blocks that its parts name.

    Raises:
        KeyError: a part names a block that ``blocks`` lacks.
    """
    _check(case, blocks)
    whole = any(blocks[name].whole for part in case.parts for name in part.blocks)
    parts = [_part(number, part, blocks, whole) for number, part in enumerate(case.parts)]
    return Built(chain(*parts), make_params(case, blocks), make_batch(case), random.key(case.seed))


def make_params(case: Case, blocks: Mapping[str, Block] = BLOCKS) -> Params:
    """Fresh parameters of a case, by its seed.

    Args:
        case: the case.
        blocks: the blocks that its parts name.

    Raises:
        KeyError: a part names a block that ``blocks`` lacks.
    """
    _check(case, blocks)
    params: dict[str, Any] = {}

    def subtree(name: str, path: Path) -> Any:
        return blocks[name].init(_normal(case, path), case.width)

    for part in case.parts:
        own, keys = part.keys[: part.scan], part.keys[part.scan :]
        for first in own:
            _put(params, first, [subtree(n, f"{first}/{i}") for i, n in enumerate(part.blocks)])
        for key in keys:
            _put(params, key, subtree(part.blocks[0], key))
    return params


def make_batch(case: Case) -> Batch:
    """The batch of a case, by its seed: a list of micro-batches if there are several."""
    batches = [_micro(case, number) for number in range(len(case.micros))]
    return batches if len(batches) > 1 else batches[0]


def _check(case: Case, blocks: Mapping[str, Block]) -> None:
    for part in case.parts:
        for name in part.blocks:
            if name not in blocks:
                raise KeyError(
                    f"{part} names the block {name!r}; expected one of {', '.join(sorted(blocks))}."
                    " Pass your own blocks as well"
                )


def _part(number: int, part: Part, blocks: Mapping[str, Block], whole: bool) -> Stage | Scan:
    used = [blocks[name] for name in part.blocks]
    fns = [
        _on_carry(one.fn, one.role, bool(one.aux)) if whole and not one.whole else one.fn
        for one in used
    ]
    options: dict[str, Any] = {
        "name": f"{number}.{part.blocks[0]}",
        "vjp": part.vjp,
        "rng": used[0].rng,
        "has_aux": bool(used[0].aux),
    }
    if not part.scan:
        return stage(fns[0], *part.keys, static=used[0].static, **options)
    one_fn = all(fn is fns[0] for fn in fns)
    statics = [one.static for one in used]
    return scan(fns[0] if one_fn else fns, *part.keys, static=statics, **options)


@functools.cache
def _on_carry(fn: StageFn, role: str, aux: bool) -> StageFn:
    """A token block's function on a carry that is a dict; the same one each time it is asked."""

    @functools.wraps(fn)
    def on_carry(*args: Any, **options: Any) -> Any:
        *subtrees, carry, batch = args
        out = fn(*subtrees, None if carry is None else carry["x"], batch, **options)
        if role == "loss":
            return out
        x, report = out if aux else (out, None)
        after = {"x": x} if carry is None else carry | {"x": x}
        return (after, report) if aux else after

    return on_carry


def _normal(case: Case, what: str) -> Normal:
    """A source of its own for each subtree, so that leaving one out changes no other."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case.seed} {what}".encode()))

    def normal(*shape: int) -> torch.Tensor:
        return (0.4 * torch.randn(shape, generator=generator)).to(case.dtype)

    return normal


def _put(params: dict[str, Any], path: Path, value: Any) -> None:
    """Sets what is at a path, unless something is: a tied subtree, or the entry of a list."""
    node: Any = params
    *above, last = path.split("/")
    for name in above:
        node = node[int(name)] if isinstance(node, list) else node.setdefault(name, {})
    if isinstance(node, dict):
        node.setdefault(last, value)


def _micro(case: Case, number: int) -> Batch:
    rows, tokens, ignored = case.micros[number]
    shape = (rows, tokens)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case.seed} #{number}".encode()))
    labels = torch.randint(0, VOCABULARY, shape, generator=generator)
    labels.view(-1)[rows * tokens - ignored :] = -100
    batch = {
        "tokens": torch.randint(0, VOCABULARY, shape, generator=generator),
        "labels": labels,
        "route": torch.randint(0, 2, shape, generator=generator),
        "x": torch.randn(*shape, case.width, generator=generator).to(case.dtype),
    }
    leaves = {
        "nothing": None,
        "number": 3,
        "flag": torch.tensor(True),
        "scale": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
    }
    return batch | {"odd": leaves} if case.odd else batch
