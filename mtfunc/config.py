"""How a program is streamed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig:
    """How a program is streamed; validated once, never changed.

    None of these changes a result: they trade memory for overlap.

    Attributes:
        slots: how many consecutive stages' parameters the device holds at once: the one that
            runs and those being loaded ahead. 1 loads nothing ahead.
        grad_slots: how many stages' gradients the device holds at once: the one being computed
            and those being stored. 1 computes no gradient while one is copied out.
        carries: where the carries that the backward pass needs are kept: ``"device"``,
            ``"host"`` (device memory then does not grow with depth), or ``"auto"``, which is
            ``"device"``.
        residuals: what of the forward pass the backward pass finds ready. ``"recompute"``: only
            carries, and every stage is run again. A number of bytes: the pullbacks of the last
            stages are kept, as many as hold no more than that, with the parameters that they
            read; those stages then are loaded once and run forward once.

    Raises:
        ValueError: a value out of range.

    Example:
        >>> from mtfunc.config import StreamConfig
        >>> StreamConfig(slots=3).carries
        'auto'
    """

    slots: int = 2
    grad_slots: int = 2
    carries: str = "auto"
    residuals: str | int = "recompute"

    def __post_init__(self) -> None:
        for name in ("slots", "grad_slots"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"StreamConfig: {name} is {value!r}; expected a whole number >= 1")
        if self.carries not in ("device", "host", "auto"):
            raise ValueError(
                f"StreamConfig: carries is {self.carries!r}; expected 'device', 'host' or 'auto'"
            )
        count = isinstance(self.residuals, int) and not isinstance(self.residuals, bool)
        if self.residuals != "recompute" and not (count and int(self.residuals) >= 0):
            raise ValueError(
                f"StreamConfig: residuals is {self.residuals!r}; expected 'recompute' or a whole "
                "number of bytes"
            )
