"""Random programs for property tests with Hypothesis.

A case is data, so a failure prints as code that makes it again::

    from hypothesis import given
    from mtfunc.testing import strategies

    MINE = strategies.BLOCKS | {"mine": strategies.Block(fn, init)}

    @given(strategies.cases(MINE))
    def test_streamed_is_the_standard_graph(case):
        strategies.assert_streamed(case, MINE)
"""

from mtfunc.testing.strategies.blocks import BLOCKS
from mtfunc.testing.strategies.case import Block, Built, Case, Micro, Part, build
from mtfunc.testing.strategies.draw import cases, configs, micros
from mtfunc.testing.strategies.streamed import assert_streamed

__all__ = [
    "BLOCKS",
    "Block",
    "Built",
    "Case",
    "Micro",
    "Part",
    "assert_streamed",
    "build",
    "cases",
    "configs",
    "micros",
]
