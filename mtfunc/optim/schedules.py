"""Learning-rate schedules: frozen values that are pure functions of the number of steps taken.

Their names are lower-case because they read as functions, and their ``repr`` is the call that
makes them, so that a checkpoint can say which schedule it was written under. Any other function
``int -> float`` serves as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtfunc._base import Schedule1D
from mtfunc.optim._checks import check_ranges


@dataclass(frozen=True, slots=True)
class constant:
    """The same learning rate at every step.

    Attributes:
        value: the learning rate.

    Raises:
        ValueError: the value is negative or not finite.

    Example:
        >>> from mtfunc.optim import constant
        >>> constant(0.1)(1000)
        0.1
    """

    value: float

    def __post_init__(self) -> None:
        check_ranges("optim.constant", value=(self.value, 0, math.inf))

    def __call__(self, step: int) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class linear:
    """A straight line from ``start`` at step 0 to ``end`` at step ``steps``, and ``end`` after.

    Attributes:
        start: the first learning rate.
        end: the last learning rate.
        steps: the length of the line in steps.

    Raises:
        ValueError: a rate is negative or not finite, or ``steps`` is below 1.

    Example:
        >>> from mtfunc.optim import linear
        >>> linear(1.0, 0.0, 4)(3)
        0.25
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        check_ranges(
            "optim.linear",
            start=(self.start, 0, math.inf),
            end=(self.end, 0, math.inf),
            steps=(self.steps, 1, math.inf),
        )

    def __call__(self, step: int) -> float:
        done = min(step / self.steps, 1.0)
        return self.start * (1 - done) + self.end * done


@dataclass(frozen=True, slots=True)
class cosine:
    """Half a cosine from ``peak`` down to ``final``, after a linear warm-up.

    As Loshchilov and Hutter, "SGDR", ICLR 2017, equation 5, without restarts.

    Attributes:
        peak: the highest learning rate, reached at step ``warmup``.
        steps: the steps of the whole run, warm-up included; ``final`` holds from there on.
        warmup: the steps of the warm-up, as :class:`warmup` counts them.
        final: the last learning rate.

    Raises:
        ValueError: a rate is negative or not finite, or ``warmup`` is not in ``[0, steps)``.

    Example:
        >>> from mtfunc.optim import cosine
        >>> schedule = cosine(3e-4, 1000, warmup=10, final=3e-5)
        >>> [f"{schedule(step):.1e}" for step in (0, 10, 505, 1000)]
        ['3.0e-05', '3.0e-04', '1.6e-04', '3.0e-05']
    """

    peak: float
    steps: int
    warmup: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        check_ranges(
            "optim.cosine",
            peak=(self.peak, 0, math.inf),
            final=(self.final, 0, math.inf),
            warmup=(self.warmup, 0, self.steps),
        )

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = min((step - self.warmup) / (self.steps - self.warmup), 1.0)
        return self.final + (self.peak - self.final) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True, slots=True)
class wsd:
    """Warm-up, stable, decay: a plateau between two straight lines.

    As Hu et al., "MiniCPM", arXiv 2404.06395, section 4, with a linear decay (Hägele et al.,
    arXiv 2405.18392). A run can be prolonged from any checkpoint of the plateau.

    Attributes:
        peak: the learning rate of the plateau.
        steps: the steps of the whole run; ``final`` holds from there on.
        decay: the steps of the decay, the last ones of the run.
        warmup: the steps of the warm-up, as :class:`warmup` counts them.
        final: the last learning rate.

    Raises:
        ValueError: a rate is negative or not finite, ``decay`` is below 1, ``warmup`` is negative,
            or both together exceed ``steps``.

    Example:
        >>> from mtfunc.optim import wsd
        >>> schedule = wsd(1.0, 100, decay=20, warmup=10)
        >>> [schedule(step) for step in (0, 9, 50, 80, 90, 100)]
        [0.1, 1.0, 1.0, 1.0, 0.5, 0.0]
    """

    peak: float
    steps: int
    decay: int
    warmup: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        check_ranges(
            "optim.wsd",
            peak=(self.peak, 0, math.inf),
            final=(self.final, 0, math.inf),
            warmup=(self.warmup, 0, math.inf),
            decay=(self.decay, 1, math.inf),
            steps=(self.steps, self.warmup + self.decay, math.inf),
        )

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        left = min(max(self.steps - step, 0) / self.decay, 1.0)
        return self.final + (self.peak - self.final) * left


@dataclass(frozen=True, slots=True)
class warmup:
    """A linear warm-up before any schedule.

    Step ``s`` of the first ``steps`` runs at ``(s + 1) / steps`` of the schedule's first value, so
    that no step is spent at a learning rate of 0; the schedule itself counts from there on.

    Attributes:
        schedule: what follows: a function of the step.
        steps: the length of the warm-up in steps; 0 for none.

    Raises:
        ValueError: ``steps`` is negative.

    Example:
        >>> from mtfunc.optim import linear, warmup
        >>> schedule = warmup(linear(1.0, 0.0, 4), 2)
        >>> [schedule(step) for step in range(7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    schedule: Schedule1D
    steps: int

    def __post_init__(self) -> None:
        check_ranges("optim.warmup", steps=(self.steps, 0, math.inf))

    def __repr__(self) -> str:
        return f"warmup(schedule={describe(self.schedule)}, steps={self.steps})"

    def __call__(self, step: int) -> float:
        if step < self.steps:
            return self.schedule(0) * (step + 1) / self.steps
        return self.schedule(step - self.steps)


def as_schedule(where: str, learning_rate: float | Schedule1D) -> Schedule1D:
    """The schedule that an optimizer's ``learning_rate`` means."""
    if callable(learning_rate):
        return learning_rate
    check_ranges(where, learning_rate=(learning_rate, 0, math.inf))
    return constant(learning_rate)


def describe(learning_rate: float | Schedule1D) -> str:
    """The text of a learning rate in an optimizer's name; a function counts by its name."""
    return getattr(learning_rate, "__qualname__", repr(learning_rate))
