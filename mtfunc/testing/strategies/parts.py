"""Draws the parts of a program: which blocks, in which order, and which share parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

from mtfunc._base import Path
from mtfunc.testing.strategies.case import Block, Part

Draw = Callable[[Any], Any]


def draw_parts(
    draw: Draw, blocks: Mapping[str, Block], before: int
) -> tuple[tuple[Part, ...], list[Path]]:
    """A loss after up to ``before`` stages, and the paths of its parameters' subtrees."""
    drawn = _Parts(draw, blocks)
    if before:
        drawn.add([draw(st.sampled_from(_named(blocks, "start")))])
        drawn.middle(before - 1, drawn.pool())
    drawn.add([draw(st.sampled_from(_named(blocks, "loss")))])
    return tuple(drawn.parts), [*drawn.subtrees, *drawn.scans]


def _named(blocks: Mapping[str, Block], role: str) -> list[str]:
    return [name for name, block in blocks.items() if block.role == role]


class _Parts:
    """The parts drawn so far, and who made which parameters."""

    def __init__(self, draw: Draw, blocks: Mapping[str, Block]):
        self.draw, self.blocks = draw, blocks
        self.parts: list[Part] = []
        self.subtrees: dict[Path, Any] = {}
        """The ``init`` of every subtree, by its path."""
        self.scans: dict[Path, tuple[Any, ...]] = {}
        """The ``init`` of every entry of a scan, by the list's path."""

    def middle(self, left: int, pool: list[str]) -> None:
        """Draws ``left`` stages from a pool of blocks, some in pairs around what is between."""
        arcs = [
            (maker, user)
            for maker in pool
            for user in pool
            if self.blocks[maker].makes and self.blocks[maker].makes == self.blocks[user].uses
        ]
        if left > 1 and arcs and self.draw(st.booleans()):
            maker, user = self.draw(st.sampled_from(arcs))
            self.add([maker])
            self.middle(left - 2, pool)
            self.add([user])
            return
        while pool and left:
            left -= self._one(left, pool)

    def _one(self, left: int, pool: list[str]) -> int:
        """Adds a stage or a scan of at most ``left``, and says how many that are."""
        name = self.draw(st.sampled_from(pool))
        alike = [other for other in pool if self._alike(name, other)]
        kin = [other for other in alike if self.blocks[other].init is self.blocks[name].init]
        shares = self.blocks[name].reads > 1
        if name not in alike or left < 2 or not (shares or self.draw(st.booleans())):
            self.add([name])
            return 1
        others = st.sampled_from(alike if len(kin) < 2 else kin)
        rest = self.draw(st.lists(others, min_size=shares, max_size=min(left, 4) - 1))
        self.add([name, *rest], scan=True)
        return 1 + len(rest)

    def pool(self) -> list[str]:
        """The blocks of a few groups."""
        groups: dict[str, list[str]] = {}
        for name in _named(self.blocks, ""):
            groups.setdefault(self.blocks[name].group or name, []).append(name)
        chosen = st.lists(st.sampled_from(list(groups)), min_size=1, max_size=6, unique=True)
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
            and (a.rng, a.aux) == (b.rng, b.aux)
        )

    def add(self, names: list[str], *, scan: bool = False) -> None:
        """Adds a stage, or a scan of these blocks, with keys of its own or tied ones."""
        block = self.blocks[names[0]]
        keys = [self._key(block.init) for _ in range(block.subtrees - scan)]
        if scan:
            keys.insert(0, self._scan_key(tuple(self.blocks[name].init for name in names)))
        vjp = self.draw(st.sampled_from(["func", "autograd"]))
        self.parts.append(Part(tuple(names), tuple(keys), scan, vjp))

    def _key(self, init: Any) -> Path:
        key = self._fresh([path for path, other in self.subtrees.items() if other is init])
        self.subtrees[key] = init
        return key

    def _scan_key(self, inits: tuple[Any, ...]) -> Path:
        key = self._fresh([path for path, other in self.scans.items() if other == inits])
        self.scans[key] = inits
        self.subtrees.update({f"{key}/{i}": init for i, init in enumerate(inits)})
        return key

    def _fresh(self, made: list[Path]) -> Path:
        """A new path, at the top or below a shared entry, or sometimes one of these."""
        if made and self.draw(st.booleans()):
            return self.draw(st.sampled_from(made))
        name = f"p{len(self.subtrees) + len(self.scans)}"
        return f"deep/{name}" if self.draw(st.booleans()) else name
