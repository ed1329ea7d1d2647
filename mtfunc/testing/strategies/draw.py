"""Hypothesis strategies: they draw the structure of programs, never arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from hypothesis import strategies as st

from mtfunc._base import Batch, Params
from mtfunc.config import StreamConfig
from mtfunc.testing.strategies.blocks import BLOCKS
from mtfunc.testing.strategies.case import Block, Case, Micro
from mtfunc.testing.strategies.make import make_batch, make_params
from mtfunc.testing.strategies.parts import Draw, draw_parts

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
WIDTHS = (4, 6, 16)
RESIDUALS: tuple[str | int, ...] = ("recompute", 500, 4_000, 1_000_000)
"""No pullback is kept, or those of a few stages, or all."""


def configs() -> st.SearchStrategy[StreamConfig]:
    """How a program is streamed; shrinks to one slot of each kind, and nothing kept or sent."""
    return st.builds(
        StreamConfig,
        slots=st.integers(1, 4),
        grad_slots=st.integers(1, 3),
        carries=st.sampled_from(["device", "host"]),
        residuals=st.sampled_from(RESIDUALS),
    )


def micros(most: int = 3) -> st.SearchStrategy[tuple[Micro, ...]]:
    """One to ``most`` micro-batches of unequal shapes; some count no label."""
    return st.lists(_micros(), min_size=1, max_size=most).map(tuple)


@st.composite
def _micros(draw: Draw) -> Micro:
    rows, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    every = rows * tokens
    return Micro(rows, tokens, draw(st.one_of(st.integers(0, every), st.just(every))))


def programs(
    blocks: Mapping[str, Block] = BLOCKS,
    *,
    stages: int = 8,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> st.SearchStrategy[Case]:
    """Programs of 1 to ``stages`` stages, each a :class:`Case` with the smallest of batches.

    A few groups of blocks are drawn first and then parts from them, so that blocks that belong
    together meet. Parts are stages, scans, and ties to earlier parts of the same parameters.

    Args:
        blocks: by name, the plainest first; ``BLOCKS | {"mine": Block(fn, init)}`` mixes in your
            own. There must be a loss, and a start where there is anything else.
        stages: how many stages a program has at most, its first and its loss included.
        dtypes: which dtypes are drawn.
    """
    return _programs(blocks, stages, dtypes)


@st.composite
def _programs(
    draw: Draw, blocks: Mapping[str, Block], stages: int, dtypes: Sequence[torch.dtype]
) -> Case:
    # The upper half twice: more happens in long programs.
    before = draw(st.sampled_from([*range(stages), *range(stages // 2, stages)]))
    parts, paths = draw_parts(draw, blocks, before)
    frozen = draw(st.lists(st.sampled_from(paths), unique=True, max_size=2)) if paths else []
    width, dtype = draw(st.sampled_from(WIDTHS)), draw(st.sampled_from(list(dtypes)))
    return Case(parts=parts, width=width, dtype=dtype, frozen=tuple(frozen))


def params(program: Case, blocks: Mapping[str, Block] = BLOCKS) -> st.SearchStrategy[Params]:
    """Parameters for a program that :func:`programs` drew."""
    own = {} if blocks is BLOCKS else {"blocks": st.just(blocks)}
    return st.builds(make_params, _seeded(program), **own)


def batches(program: Case) -> st.SearchStrategy[Batch]:
    """Batches for a program that :func:`programs` drew: one, or a list of micro-batches."""
    return st.builds(make_batch, _seeded(program))


def _seeded(program: Case) -> st.SearchStrategy[Case]:
    return st.builds(
        lambda micros, odd, seed: replace(program, micros=micros, odd=odd, seed=seed),
        micros(),
        st.booleans(),
        st.integers(0, 99),
    )


def cases(
    blocks: Mapping[str, Block] = BLOCKS,
    *,
    stages: int = 8,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> st.SearchStrategy[Case]:
    """Programs with their parameters, batches and ways of streaming.

    Args:
        blocks: as in :func:`programs`.
        stages: as in :func:`programs`.
        dtypes: as in :func:`programs`.

    Example:
        >>> import hypothesis
        >>> from mtfunc.testing import strategies
        >>> @hypothesis.given(strategies.cases(stages=3))
        ... @hypothesis.settings(max_examples=2, derandomize=True, database=None, deadline=None)
        ... def test_streamed_is_the_standard_graph(case):
        ...     strategies.assert_streamed(case)
        >>> test_streamed_is_the_standard_graph()
    """
    return _cases(blocks, stages, dtypes)


@st.composite
def _cases(
    draw: Draw, blocks: Mapping[str, Block], stages: int, dtypes: Sequence[torch.dtype]
) -> Case:
    return replace(
        draw(_programs(blocks, stages, dtypes)),
        micros=draw(micros()),
        odd=draw(st.booleans()),
        config=draw(configs()),
        seed=draw(st.integers(0, 99)),
        sim=draw(st.integers(0, 999)),
    )
