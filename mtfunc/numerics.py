"""The global settings of torch that decide how it rounds: read, applied, and held during a step.

A stage runs twice, and the oracle runs it a third time. The three agree to the last bit only under
one setting, so a step records it when it begins and sees at its end that it is unchanged.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

DEVICES = ("cpu", "cuda")
"""Devices whose autocast is looked for."""

TINY = sys.float_info.min
"""The smallest normal float64; half of it is denormal."""


class NumericsError(ValueError):
    """Numerical settings changed during a step, or ``torch.autocast`` was active around it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The global settings that decide how torch rounds, and which kernels it takes.

    Those of CUDA can be read and set where there is no CUDA device. Precisions are ``"ieee"``,
    ``"tf32"``, ``"bf16"`` or ``"none"``, which is as the setting above it says.

    Attributes:
        default_dtype: what ``torch.zeros(3)`` has.
        float32_matmul: ``torch.get_float32_matmul_precision()``; ``"mixed"`` where the precisions
            below were set one by one, so that no word says them all.
        precision: ``torch.backends.fp32_precision``.
        cuda_matmul: precision of float32 products on CUDA.
        cudnn_conv: of convolutions on CUDA.
        cudnn_rnn: of recurrent layers on CUDA.
        mkldnn_matmul: of products on the processor.
        mkldnn_conv: of convolutions on the processor.
        mkldnn_rnn: of recurrent layers on the processor.
        bf16_reduction: whether products of bfloat16 may be summed in bfloat16, and split along
            the sum.
        fp16_reduction: the same for float16.
        fp16_accumulation: whether products of float16 may be accumulated in float16.
        sdpa_flash: whether scaled dot product attention may take the flash kernel.
        sdpa_efficient: whether it may take the memory-efficient one.
        sdpa_math: whether it may take the composed one.
        sdpa_cudnn: whether it may take cuDNN's.
        sdpa_reduction: whether the composed one may sum in less than float32.
        deterministic: ``torch.get_deterministic_debug_mode()``: 0, 1 (warns) or 2 (raises).
        cudnn_deterministic: whether cuDNN takes deterministic kernels only.
        cudnn_benchmark: whether it chooses kernels by timing them.
        flush_denormal: whether denormal numbers count as zero in this thread.
        threads: how many threads an operation on the processor uses; sums are split among them.
    """

    default_dtype: torch.dtype
    float32_matmul: str
    precision: str
    cuda_matmul: str
    cudnn_conv: str
    cudnn_rnn: str
    mkldnn_matmul: str
    mkldnn_conv: str
    mkldnn_rnn: str
    bf16_reduction: tuple[bool, bool]
    fp16_reduction: tuple[bool, bool]
    fp16_accumulation: bool
    sdpa_flash: bool
    sdpa_efficient: bool
    sdpa_math: bool
    sdpa_cudnn: bool
    sdpa_reduction: bool
    deterministic: int
    cudnn_deterministic: bool
    cudnn_benchmark: bool
    flush_denormal: bool
    threads: int

    def changes(self, other: Setting) -> dict[str, tuple[Any, Any]]:
        """What differs in ``other``: this one's value and its, by name."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def __str__(self) -> str:
        width = max(len(f.name) for f in fields(self))
        return "\n".join(f"{f.name:{width}}  {getattr(self, f.name)}" for f in fields(self))


def current() -> Setting:
    """The setting as it is now.

    Example:
        >>> from mtfunc import numerics
        >>> numerics.current().default_dtype
        torch.float32
    """
    return Setting(**{name: read() for name, (read, _) in _KNOBS.items()})


@contextlib.contextmanager
def recorded(setting: Setting | None = None) -> Iterator[Setting]:
    """Runs a block under a setting, and puts back what was there before.

    Args:
        setting: what :func:`current` returned, here or in another process; as it is now, if none
            is given.

    Yields:
        The setting.

    Raises:
        TypeError: ``setting`` is something else.
        RuntimeError: torch does not take it here, such as flushing denormals on some processors.

    Example:
        >>> import torch
        >>> from dataclasses import replace
        >>> from mtfunc import numerics
        >>> wide = replace(numerics.current(), default_dtype=torch.float64)
        >>> with numerics.recorded(wide):
        ...     torch.zeros(1).dtype
        torch.float64
        >>> torch.zeros(1).dtype
        torch.float32
    """
    if setting is not None and not isinstance(setting, Setting):
        raise TypeError(
            f"numerics.recorded: setting is a {type(setting).__name__}; expected what "
            "numerics.current() returns. dataclasses.replace changes some of its fields"
        )
    before = current()
    setting = before if setting is None else setting
    try:
        apply(setting)
        yield setting
    finally:
        apply(before)


def apply(setting: Setting) -> None:
    """Makes the current setting this one; only what differs is set."""
    for name, (read, write) in _KNOBS.items():
        wanted = getattr(setting, name)
        if read() != wanted:
            write(wanted)


@contextlib.contextmanager
def held(where: str) -> Iterator[Setting]:
    """Holds the setting during a block: what changed in it is put back, and told.

    Args:
        where: what runs, for messages.

    Yields:
        The setting at the start.

    Raises:
        NumericsError: ``torch.autocast`` is active, or the block changed the setting.
    """
    refuse_autocast(where)
    setting = current()
    try:
        yield setting
    except BaseException:
        apply(setting)
        raise
    expect(where, setting)


def expect(where: str, setting: Setting) -> None:
    """Raises NumericsError if the setting has changed, and puts it back."""
    changes = setting.changes(current())
    if not changes:
        return
    apply(setting)
    told = "; ".join(f"{name}: expected {was}, got {now}" for name, (was, now) in changes.items())
    raise NumericsError(
        f"{where}: numerical settings were changed while it ran; {told}. They are put back. "
        "Forward, recomputation and reference have to run under one setting: set it before the "
        "call, or for a part of a stage in a with block, which ends before the stage returns"
    )


def watching(
    setting: Setting, observe: Callable[[Any, float, float], None] | None
) -> Callable[[Any, float, float], None]:
    """An observer of operations: tells which one changes the setting, then calls ``observe``."""

    def see(op: Any, start: float, stop: float) -> None:
        expect(f"{op.kind} of {op.label!r}", setting)
        if observe is not None:
            observe(op, start, stop)

    return see


def refuse_autocast(where: str) -> None:
    """Raises NumericsError if ``torch.autocast`` is active in this thread."""
    for device in DEVICES:
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            raise NumericsError(
                f"{where}: torch.autocast({device!r}, dtype={dtype}) is active around it; expected "
                "none. It casts behind the stages' backs, and its cache of casts joins their "
                "graphs, so that gradients round otherwise than the stages say. Call it outside of "
                "autocast; keep parameters in the dtype they should compute in, or cast in the "
                f"stage: x @ p['w'].to({dtype})"
            )


def _float32_matmul() -> str:
    # Where the newer settings contradict this one, torch refuses to read it.
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "mixed"


def _set_float32_matmul(word: str) -> None:
    if word != "mixed":
        torch.set_float32_matmul_precision(word)


def _precision(module: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return _attribute(module, "fp32_precision")


def _attribute(module: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return partial(getattr, module, name), partial(setattr, module, name)


def _reduction(name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    module = torch.backends.cuda.matmul

    def read() -> tuple[bool, bool]:
        return getattr(module, name), getattr(module, f"{name}_split_k", True)

    return read, partial(setattr, module, name)


def _flushes_denormal() -> bool:
    half = 0.5
    return TINY * half == 0.0


def _set_flush_denormal(flush: bool) -> None:
    if not torch.set_flush_denormal(flush):
        raise RuntimeError(
            f"numerics: this processor does not take flush_denormal={flush}; expected that of "
            "numerics.current(). dataclasses.replace changes one field of a setting"
        )


_B: Any = torch.backends
_KNOBS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    # What sets others comes before them, so that only those are set which still differ.
    "float32_matmul": (_float32_matmul, _set_float32_matmul),
    "precision": _precision(_B),
    "cuda_matmul": _precision(_B.cuda.matmul),
    "cudnn_conv": _precision(_B.cudnn.conv),
    "cudnn_rnn": _precision(_B.cudnn.rnn),
    "mkldnn_matmul": _precision(_B.mkldnn.matmul),
    "mkldnn_conv": _precision(_B.mkldnn.conv),
    "mkldnn_rnn": _precision(_B.mkldnn.rnn),
    "bf16_reduction": _reduction("allow_bf16_reduced_precision_reduction"),
    "fp16_reduction": _reduction("allow_fp16_reduced_precision_reduction"),
    "fp16_accumulation": _attribute(_B.cuda.matmul, "allow_fp16_accumulation"),
    "sdpa_flash": (_B.cuda.flash_sdp_enabled, _B.cuda.enable_flash_sdp),
    "sdpa_efficient": (_B.cuda.mem_efficient_sdp_enabled, _B.cuda.enable_mem_efficient_sdp),
    "sdpa_math": (_B.cuda.math_sdp_enabled, _B.cuda.enable_math_sdp),
    "sdpa_cudnn": (_B.cuda.cudnn_sdp_enabled, _B.cuda.enable_cudnn_sdp),
    "sdpa_reduction": (
        _B.cuda.fp16_bf16_reduction_math_sdp_allowed,
        _B.cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "cudnn_deterministic": _attribute(_B.cudnn, "deterministic"),
    "cudnn_benchmark": _attribute(_B.cudnn, "benchmark"),
    "flush_denormal": (_flushes_denormal, _set_flush_denormal),
    "threads": (torch.get_num_threads, torch.set_num_threads),
}
