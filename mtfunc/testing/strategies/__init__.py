"""Random programs for property tests with Hypothesis.

A case is data, so a failure prints as code that makes it again::

    from hypothesis import given
    from mtfunc.testing import strategies

    MINE = strategies.BLOCKS | {"mine": strategies.Block(fn, init)}

    @given(strategies.cases(MINE))
    def test_streamed_is_the_standard_graph(case):
        strategies.assert_streamed(case, MINE)

Hypothesis is imported when one of the strategies (``programs``, ``params``, ``batches``,
``configs``, ``micros``, ``cases``) is first used; printed cases run without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mtfunc.testing.strategies.blocks import BLOCKS
from mtfunc.testing.strategies.case import Block, Case, Micro, Part
from mtfunc.testing.strategies.kinds import KINDS, kinds
from mtfunc.testing.strategies.make import Built, build, make_batch, make_params
from mtfunc.testing.strategies.streamed import assert_streamed

if TYPE_CHECKING:
    from mtfunc.testing.strategies.draw import batches, cases, configs, micros, params, programs

__all__ = [
    "BLOCKS",
    "KINDS",
    "Block",
    "Built",
    "Case",
    "Micro",
    "Part",
    "assert_streamed",
    "batches",
    "build",
    "cases",
    "configs",
    "kinds",
    "make_batch",
    "make_params",
    "micros",
    "params",
    "programs",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mtfunc.testing.strategies' has no attribute {name!r}")
    try:
        from mtfunc.testing.strategies import draw
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ImportError(
            f"mtfunc.testing.strategies.{name} draws with hypothesis, which is not installed; "
            "expected pip install hypothesis, or mtfunc[test]"
        ) from error
    return getattr(draw, name)
