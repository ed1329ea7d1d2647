"""Checks of hyperparameters, shared by optimizers and schedules."""

from __future__ import annotations

import math


def check_ranges(where: str, **ranges: tuple[float, float, float]) -> None:
    """Checks that each ``name=(value, low, high)`` lies in ``[low, high)``.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value lies outside its range.
    """
    for name, (value, low, high) in ranges.items():
        if not isinstance(value, int | float):
            raise TypeError(
                f"mt.{where}: {name}: expected a number, got {type(value).__name__}; "
                "take .item() of a tensor"
            )
        if not low <= value < high:
            expected = f"at least {low} and finite" if high == math.inf else f"in [{low}, {high})"
            raise ValueError(f"mt.{where}: {name}: expected a number {expected}, got {value}")
