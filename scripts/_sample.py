"""Text from a model, byte by byte, through the streamed forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mtfunc as mt


def sample(
    logits: Callable[[Any, Any], Tensor],
    params: Any,
    key: Tensor,
    *,
    prompt: bytes,
    length: int,
    window: int,
    temperature: float,
) -> bytes:
    """Continues a prompt.

    Tokens stand at the left of a window of a fixed size, whose rest a causal model does not look
    at: so the program is prepared for one shape only. When it is full it slides by a quarter.

    Args:
        logits: ``f(params, batch)``, the scores of the next byte at each place of the window,
            ``(1, window, vocabulary)``; see :func:`mtfunc.forward`.
        params: of the model.
        key: folded with the number of each byte.
        prompt: at least one byte.
        length: bytes to add.
        window: tokens that the model sees.
        temperature: above 0; below 1 prefers the likely.

    Returns:
        The prompt and its continuation.
    """
    text, start = bytearray(prompt), 0
    for i in range(length):
        if len(text) - start > window:
            start = len(text) - window + window // 4
        seen = torch.tensor([list(text[start:])])
        tokens = torch.nn.functional.pad(seen, (0, window - seen.shape[1]))
        scores = logits(params, {"tokens": tokens})[0, seen.shape[1] - 1, :256]
        text.append(int(mt.random.categorical(mt.random.fold_in(key, i), scores / temperature)))
    return bytes(text)


def readable(text: bytes) -> str:
    """Bytes as text, whatever they are."""
    return text.decode("utf-8", errors="replace")
