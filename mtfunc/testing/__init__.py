"""Tests for programs: whether streaming leaves their gradients exactly as they are.

:func:`check` looks at a program that you have. :mod:`mtfunc.testing.strategies` draws programs with
hypothesis, which is imported when a name of that module is first used.
"""

from __future__ import annotations

from typing import Any

from mtfunc.testing.check import check
from mtfunc.testing.report import CheckError, Report, StageReport

__all__ = ["CheckError", "Report", "StageReport", "check"]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'mtfunc.testing' has no attribute {name!r}")
    import importlib

    try:
        strategies = importlib.import_module("mtfunc.testing.strategies")
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ImportError(
            f"mtfunc.testing.{name} needs hypothesis, which is not installed; "
            "pip install hypothesis brings it"
        ) from error
    if name == "strategies":
        return strategies
    if name not in strategies.__all__:
        raise AttributeError(f"module 'mtfunc.testing' has no attribute {name!r}")
    return getattr(strategies, name)
