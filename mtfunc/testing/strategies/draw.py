"""Hypothesis strategies: they draw the structure of programs, never arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mtfunc.config import StreamConfig
from mtfunc.testing.strategies.blocks import BLOCKS
from mtfunc.testing.strategies.case import Block, Case, Micro, Part

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "mtfunc.testing.strategies draws programs with hypothesis, which is not installed; "
        "expected pip install hypothesis, or mtfunc[test]"
    ) from error

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
WIDTHS = (4, 6, 16)

Draw = Callable[[Any], Any]


def configs() -> st.SearchStrategy[StreamConfig]:
    """How a program is streamed; shrinks to one slot of each kind and carries on the device."""
    return st.builds(
        StreamConfig,
        slots=st.integers(1, 4),
        grad_slots=st.integers(1, 3),
        carries=st.sampled_from(["device", "host"]),
    )


def micros(most: int = 3) -> st.SearchStrategy[tuple[Micro, ...]]:
    """One to ``most`` micro-batches of unequal shapes; some count no label."""
    return st.lists(_micro(), min_size=1, max_size=most).map(tuple)


@st.composite
def _micro(draw: Draw) -> Micro:
    rows, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    every = rows * tokens
    return Micro(rows, tokens, draw(st.one_of(st.integers(0, every), st.just(every))))


@st.composite
def cases(
    draw: Draw,
    blocks: Mapping[str, Block] = BLOCKS,
    *,
    stages: int = 8,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> Case:
    """A program of 1 to ``stages`` stages with its parameters, batch and way of streaming.

    A few groups of blocks are drawn first and then parts from them, so that blocks that belong
    together meet. Parts are stages, scans, and ties to earlier parts of the same parameters.

    Args:
        blocks: by name, the plainest first; ``BLOCKS | {"mine": Block(fn, init)}`` mixes in your
            own. There must be a loss, and a start where there is anything else.
        stages: how many stages a program has at most, its first and its loss included.
        dtypes: which dtypes are drawn.

    Example:
        >>> import hypothesis
        >>> from mtfunc.testing import strategies
        >>> @hypothesis.given(strategies.cases(stages=3))
        ... @hypothesis.settings(max_examples=2, derandomize=True, database=None, deadline=None)
        ... def test_streamed_is_the_standard_graph(case):
        ...     strategies.assert_streamed(case)
        >>> test_streamed_is_the_standard_graph()
    """
    drawn = _Parts(draw, blocks)
    length = draw(st.integers(0, stages - 1))
    if length:
        drawn.add([draw(st.sampled_from(_named(blocks, "start")))], scan=False)
        drawn.middle(length - 1)
    drawn.add([draw(st.sampled_from(_named(blocks, "loss")))], scan=False)
    return Case(
        parts=tuple(drawn.parts),
        micros=draw(micros()),
        width=draw(st.sampled_from(WIDTHS)),
        dtype=draw(st.sampled_from(list(dtypes))),
        frozen=tuple(draw(st.lists(st.sampled_from(drawn.paths), unique=True, max_size=2)))
        if drawn.paths
        else (),
        odd=draw(st.booleans()),
        config=draw(configs()),
        seed=draw(st.integers(0, 99)),
        sim=draw(st.integers(0, 999)),
    )


def _named(blocks: Mapping[str, Block], role: str) -> list[str]:
    return [name for name, block in blocks.items() if block.role == role]


class _Parts:
    """The parts drawn so far, and who made which parameters."""

    def __init__(self, draw: Draw, blocks: Mapping[str, Block]):
        self.draw, self.blocks = draw, blocks
        self.parts: list[Part] = []
        self.subtrees: dict[str, Any] = {}
        """The ``init`` of every subtree, by its path."""
        self.scans: dict[str, tuple[Any, ...]] = {}
        """The ``init`` of every entry of a scan, by the list's path."""

    @property
    def paths(self) -> list[str]:
        """What may be frozen."""
        return [*self.subtrees, *self.scans]

    def middle(self, left: int) -> None:
        """Draws up to ``left`` stages between the first one and the loss."""
        pool = self._pool()
        while pool and left:
            name = self.draw(st.sampled_from(pool))
            names = [name]
            alike = [other for other in pool if self._alike(name, other)]
            if name in alike and left > 1 and self.draw(st.booleans()):
                rest = st.lists(st.sampled_from(alike), max_size=min(left, 4) - 1)
                self.add(names := [name, *self.draw(rest)], scan=True)
            else:
                self.add(names, scan=False)
            left -= len(names)

    def _pool(self) -> list[str]:
        """The blocks of one to three groups."""
        groups: dict[str, list[str]] = {}
        for name in _named(self.blocks, ""):
            groups.setdefault(self.blocks[name].group or name, []).append(name)
        chosen = st.lists(st.sampled_from(list(groups)), min_size=1, max_size=3, unique=True)
        pool = [name for group in self.draw(chosen) for name in groups[group]] if groups else []
        # Where shapes depend on values, an absent cotangent is a documented limit.
        if any(self.blocks[name].by_value for name in pool):
            pool = [name for name in pool if not self.blocks[name].absent]
        return pool

    def _alike(self, name: str, other: str) -> bool:
        """Whether two blocks may be entries of one scan."""
        a, b = self.blocks[name], self.blocks[other]
        consts = max(a.subtrees - 1, 0), max(b.subtrees - 1, 0)
        same_consts = consts[0] == consts[1] and (not consts[0] or a.init is b.init)
        return (
            b.keeps
            and bool(a.subtrees and b.subtrees)
            and same_consts
            and ((a.rng, a.aux) == (b.rng, b.aux))
        )

    def add(self, names: list[str], *, scan: bool) -> None:
        """Adds one part, with keys of its own or tied ones."""
        block = self.blocks[names[0]]
        inits = tuple(self.blocks[name].init for name in names)
        scan = scan and block.subtrees > 0
        keys = [self._key(block.init) for _ in range(block.subtrees - scan)]
        if scan:
            keys.insert(0, self._scan_key(inits))
        vjp = self.draw(st.sampled_from(["func", "autograd"]))
        self.parts.append(Part(tuple(names[: None if scan else 1]), tuple(keys), scan, vjp))

    def _key(self, init: Any) -> str:
        made = [path for path, other in self.subtrees.items() if other is init]
        key = self._fresh(made)
        self.subtrees[key] = init
        return key

    def _scan_key(self, inits: tuple[Any, ...]) -> str:
        key = self._fresh([path for path, other in self.scans.items() if other == inits])
        self.scans[key] = inits
        self.subtrees.update({f"{key}/{i}": init for i, init in enumerate(inits)})
        return key

    def _fresh(self, made: list[str]) -> str:
        """A new path, at the top or below a shared entry, or sometimes one of these."""
        if made and self.draw(st.booleans()):
            return self.draw(st.sampled_from(made))
        name = f"p{len(self.subtrees) + len(self.scans)}"
        return f"deep/{name}" if self.draw(st.booleans()) else name
