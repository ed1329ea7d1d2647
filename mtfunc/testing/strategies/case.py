"""Random programs as data: a case prints as the call that makes it, and ``build`` is pure."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtfunc import random
from mtfunc._base import Batch, Key, Params, Path, StageFn
from mtfunc.config import StreamConfig
from mtfunc.program import Program, Scan, Stage, chain, scan, stage

VOCABULARY = 7
"""Tokens and labels are below this."""

Normal = Callable[..., Tensor]
"""``normal(*shape)`` draws the next tensor in the case's dtype, with a deviation of 0.4."""


def nothing(normal: Normal, width: int) -> Any:
    """No parameters."""
    return None


@dataclass(frozen=True)
class Block:
    """What a stage of a random program does.

    Attributes:
        fn: ``fn(*subtrees, x, batch, **static) -> x`` on a float tensor ``(rows, tokens,
            width)``; with ``whole`` on the carry, a dict whose ``"x"`` is that tensor. A loss
            returns what a program's last stage does, and gets ``None`` where it is alone.
        init: ``init(normal, width)`` makes one subtree. Blocks with the same ``init`` may be tied.
        reads: how many subtrees of that kind it takes; 0 where ``init`` is not given.
        static: keyword arguments for ``fn``.
        role: ``"start"``, ``""`` or ``"loss"``.
        whole: whether ``fn`` takes and returns the whole carry.
        keeps: whether it keeps the carry's structure, shapes and dtypes, as a scan demands.
        rng: whether ``fn`` gets ``key=``.
        aux: empty, or a name for the form of the aux value that ``fn`` returns beside the carry;
            blocks of one form may share a scan.
        by_value: whether shapes inside depend on values.
        absent: whether it makes a carry leaf that must get no cotangent, not even zeros.
        group: blocks of one group are drawn together; a block alone is its own group.
    """

    fn: StageFn
    init: Callable[[Normal, int], Any] = nothing
    reads: int = 1
    static: Mapping[str, Any] = field(default_factory=dict)
    role: str = ""
    whole: bool = False
    keeps: bool = True
    rng: bool = False
    aux: str = ""
    by_value: bool = False
    absent: bool = False
    group: str = ""

    @property
    def subtrees(self) -> int:
        """How many keys a part with this block has."""
        return 0 if self.init is nothing else self.reads


class _Short:
    """Prints as the call that makes it, without what is default."""

    def __repr__(self) -> str:
        shown = []
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if value != one.default:
                shown.append(f"{one.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Part(_Short):
    """One part of a program.

    Attributes:
        blocks: the names of its blocks: one for a stage, one for each entry of a scan.
        keys: the parameter keys that it reads; of a scan, the list's and then the consts'. A key
            that occurs twice in a case is tied.
        scan: whether it is a scan.
        vjp: ``"func"`` or ``"autograd"``.
    """

    blocks: tuple[str, ...]
    keys: tuple[Path, ...] = ()
    scan: bool = False
    vjp: str = "func"


class Micro(NamedTuple):
    """The shape of one micro-batch; the last ``ignored`` labels of all are -100."""

    rows: int = 1
    tokens: int = 1
    ignored: int = 0


@dataclass(frozen=True, repr=False)
class Case(_Short):
    """A program, its parameters, its batch and how to stream it, as data.

    Attributes:
        parts: the program, its loss last.
        micros: the micro-batches; a single one is a batch, not a list.
        width: of ``x``; even.
        dtype: of ``x`` and of most parameters.
        frozen: paths of subtrees that are not trained.
        odd: whether batches also hold ``None``, a number, bool, 0-dim and zero-size leaves.
        config: how to stream.
        seed: of parameters, batches and the step's key.
        sim: the simulator's seed.
    """

    parts: tuple[Part, ...]
    micros: tuple[Micro, ...] = (Micro(),)
    width: int = 4
    dtype: torch.dtype = torch.float32
    frozen: tuple[Path, ...] = ()
    odd: bool = False
    config: StreamConfig = StreamConfig()
    seed: int = 0
    sim: int = 0

    def trainable(self, path: Path, leaf: Tensor) -> bool:
        """Whether a parameter leaf is trained: none of the frozen subtrees holds it."""
        return not any(path == one or path.startswith(one + "/") for one in self.frozen)


class Built(NamedTuple):
    """What :func:`build` makes of a case, ready for :func:`mtfunc.value_and_grad`."""

    program: Program
    params: Params
    batch: Batch
    key: Key


def build(case: Case, blocks: Mapping[str, Block]) -> Built:
    """The program, fresh parameters, the batch and the key of a case.

    Args:
        case: the case.
        blocks: the blocks that its parts name.

    Raises:
        KeyError: a part names a block that ``blocks`` lacks.
    """
    for part in case.parts:
        for name in part.blocks:
            if name not in blocks:
                raise KeyError(
                    f"{part} names the block {name!r}; expected one of {', '.join(sorted(blocks))}."
                    " Pass your own blocks to build as well"
                )
    whole = any(blocks[name].whole for part in case.parts for name in part.blocks)
    parts = [_part(number, part, blocks, whole) for number, part in enumerate(case.parts)]
    batches = [_batch(case, number) for number in range(len(case.micros))]
    batch = batches if len(batches) > 1 else batches[0]
    return Built(chain(*parts), _params(case, blocks), batch, random.key(case.seed))


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

    def normal(*shape: int) -> Tensor:
        return (0.4 * torch.randn(shape, generator=generator)).to(case.dtype)

    return normal


def _params(case: Case, blocks: Mapping[str, Block]) -> Params:
    params: dict[str, Any] = {}

    def put(path: Path, make: Callable[[], Any]) -> None:
        node, (*above, last) = params, path.split("/")
        for name in above:
            node = node[int(name)] if isinstance(node, list) else node.setdefault(name, {})
        if isinstance(node, dict) and last not in node:
            node[last] = make()

    def subtree(name: str, path: Path) -> Any:
        return blocks[name].init(_normal(case, path), case.width)

    for part in case.parts:
        keys = part.keys
        if part.scan:
            first, keys = part.keys[0], part.keys[1:]
            put(first, lambda: [subtree(n, f"{first}/{i}") for i, n in enumerate(part.blocks)])
        for key in keys:
            put(key, lambda: subtree(part.blocks[0], key))
    return params


def _batch(case: Case, number: int) -> Batch:
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
