"""What the model families share: parameter layouts, rotary angles, attention, the loss, checks.

Shape suffixes, here and in every family:

    B batch        D width                       V vocabulary
    T tokens       H query heads                 F width inside the feed-forward layer
    C head width   K key and value heads         R half a head: the pairs that rotary turns
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

import mtfunc as mt

IGNORED = -100
"""The label of a token that the loss leaves out."""

Entry = TypeVar("Entry")


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One parameter before it exists: its shape and the normal distribution it starts from.

    Attributes:
        shape: the parameter's shape; matrices are ``(out, in)``, as ``F.linear`` takes them.
        std: the standard deviation; 0 fills the parameter with ``mean``.
        mean: the mean.
    """

    shape: tuple[int, ...]
    std: float = 0.0
    mean: float = 0.0


Layout = Any
"""A pytree of dicts and lists with :class:`Leaf` as leaves."""


def ones(*shape: int) -> Leaf:
    """A scale, starting at one."""
    return Leaf(shape=shape, mean=1.0)


def zeros(*shape: int) -> Leaf:
    """A bias, starting at zero."""
    return Leaf(shape=shape)


def draw(layout: Layout, key: Tensor, dtype: torch.dtype = torch.float32) -> Any:
    """The parameters of a layout, drawn with ``mtfunc.random``.

    Each leaf has its own key, folded from the names on the way to it, so that adding or
    reordering parameters leaves all others as they were.

    Args:
        layout: what to draw.
        key: a key of ``mtfunc.random``.
        dtype: the dtype of every parameter.

    Returns:
        The layout with a tensor for each leaf.

    Example:
        >>> params = draw({"scale": ones(2), "w": Leaf(shape=(3, 2), std=0.02)}, mt.random.key(0))
        >>> params["scale"], params["w"].shape
        (tensor([1., 1.]), torch.Size([3, 2]))
    """
    if isinstance(layout, Leaf):
        if layout.std == 0:
            return torch.full(layout.shape, layout.mean, dtype=dtype)
        return mt.random.normal(key, layout.shape, dtype).mul_(layout.std).add_(layout.mean)
    if isinstance(layout, list):
        return [draw(child, mt.random.fold_in(key, i), dtype) for i, child in enumerate(layout)]
    return {name: draw(c, mt.random.fold_in(key, name), dtype) for name, c in layout.items()}


def meta(layout: Layout, dtype: torch.dtype = torch.float32) -> Any:
    """The parameters of a layout as meta tensors, which take no memory.

    Example:
        >>> meta([ones(2**20, 2**20)])[0].device
        device(type='meta')
    """
    if isinstance(layout, Leaf):
        return torch.empty(layout.shape, dtype=dtype, device="meta")
    if isinstance(layout, list):
        return [meta(child, dtype) for child in layout]
    return {name: meta(child, dtype) for name, child in layout.items()}


def count(layout: Layout) -> int:
    """The number of parameters in a layout.

    Example:
        >>> count({"scale": ones(2), "layers": [zeros(3, 2), zeros(3, 2)]})
        14
    """
    if isinstance(layout, Leaf):
        return math.prod(layout.shape)
    return sum(map(count, layout if isinstance(layout, list) else layout.values()))


def lookup(
    kind: str, name: str, table: Mapping[str, Entry], error: type[Exception] = KeyError
) -> Entry:
    """``table[name]``, with an error that lists what there is.

    Raises:
        KeyError: (or ``error``) there is no such name; names that look alike are suggested.
    """
    if name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), table, n=3)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise error(f"unknown {kind} {name!r}; expected one of {', '.join(map(repr, table))}.{hint}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How Llama 3.1 and 3.2 stretch rotary wavelengths beyond the context they were trained on.

    Wavelengths shorter than ``original_context / high`` tokens stay, those longer than
    ``original_context / low`` grow by ``factor``, and those between are blended (Llama 3
    report, arXiv 2407.21783, and Meta's released ``apply_scaling``).
    """

    factor: float
    low: float = 1.0
    high: float = 4.0
    original_context: int = 8192


def rope_frequencies(
    head_width: int, theta: float, scaling: RopeScaling | None = None, device: Any = None
) -> Tensor:
    """The angle by which each pair of a head turns per position, float64 of shape ``(R,)``.

    RoFormer (arXiv 2104.09864), equation 15: ``theta ** (-2 i / head_width)``.

    Example:
        >>> rope_frequencies(4, 10_000.0)
        tensor([1.0000, 0.0100], dtype=torch.float64)
    """
    index_R = torch.arange(0, head_width, 2, dtype=torch.float64, device=device)
    turn_R = theta ** (-index_R / head_width)
    if scaling is None:
        return turn_R
    turns_R = scaling.original_context * turn_R / (2 * math.pi)
    keep_R = ((turns_R - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return keep_R * turn_R + (1 - keep_R) * turn_R / scaling.factor


def rope_angles(positions_BT: Tensor, turn_R: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every rotary angle, rounded once, to ``dtype`` but never below float32.

    Angles grow with the position, so in float32 one at 2**20 would be off by 0.03 and in
    bfloat16 one at 300 by a whole radian; here they are formed in float64.

    Args:
        positions_BT: int64 positions.
        turn_R: from :func:`rope_frequencies`.
        dtype: the dtype that the model computes in.

    Returns:
        Two tensors of shape ``(B, 1, T, R)``, to broadcast over heads.
    """
    angle_B1TR = rearrange(positions_BT.to(torch.float64), "B T -> B 1 T 1") * turn_R
    wide = torch.promote_types(dtype, torch.float32)
    return angle_B1TR.cos().to(wide), angle_B1TR.sin().to(wide)


def rotate(x_BHTC: Tensor, cos_B1TR: Tensor, sin_B1TR: Tensor) -> Tensor:
    """Turn the pairs ``(x[i], x[i + R])`` of each head, in the dtype of the angles.

    The halves of a head form the pairs, as in the Hugging Face weights; Meta's own files pair
    neighbours, which is the same model with the rows of ``q`` and ``k`` in another order.
    """
    a_BHTR, b_BHTR = x_BHTC.to(cos_B1TR.dtype).chunk(2, dim=-1)
    turned = (a_BHTR * cos_B1TR - b_BHTR * sin_B1TR, b_BHTR * cos_B1TR + a_BHTR * sin_B1TR)
    return torch.cat(turned, dim=-1).to(x_BHTC.dtype)


def positions_of(batch: Mapping[str, Tensor]) -> Tensor:
    """``batch["positions"]``, or ``arange`` over the tokens with a batch axis of 1."""
    if "positions" in batch:
        return batch["positions"]
    tokens_BT = batch["tokens"]
    return torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]


def attend(
    q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, segments_BT: Tensor | None = None
) -> Tensor:
    """Causal attention; with ``segments``, only to tokens of the same document.

    Head ``h`` reads key head ``h // (H // K)``. Attention of Vaswani et al. (arXiv 1706.03762),
    equation 1; grouped heads after Ainslie et al. (arXiv 2305.13245).

    Returns:
        Shape ``(B, H, T, C)``.
    """
    grouped = q_BHTC.shape[1] != k_BKTC.shape[1]
    if segments_BT is None:
        return F.scaled_dot_product_attention(
            q_BHTC, k_BKTC, v_BKTC, is_causal=True, enable_gqa=grouped
        )
    same_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
    mask_B1TT = rearrange(same_BTT.tril(), "B T S -> B 1 T S")
    return F.scaled_dot_product_attention(
        q_BHTC, k_BKTC, v_BKTC, attn_mask=mask_B1TT, enable_gqa=grouped
    )


def next_token_loss(logits_BTV: Tensor, labels_BT: Tensor) -> mt.Mean:
    """Cross entropy over the labels that count, in float32 or, for float64 logits, float64.

    Returns:
        The sum over tokens, and how many labels are not ``-100``.
    """
    logits_NV = rearrange(logits_BTV, "B T V -> (B T) V")
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    labels_N = rearrange(labels_BT, "B T -> (B T)")
    total = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="sum")
    return mt.Mean(total, (labels_N != IGNORED).sum())


def check_batch(
    batch: Mapping[str, Tensor], vocab: int, *, context: int | None = None, labels: bool = True
) -> None:
    """Refuse a batch that a model would misread, while it is still in host memory.

    A token out of range kills a CUDA context for good, so this looks before anything runs.

    Args:
        batch: int64 tensors of shape ``(B, T)``: ``"tokens"``; ``"labels"``, already shifted,
            ``-100`` where ignored; optionally ``"positions"`` and ``"segments"``.
        vocab: tokens and labels lie in ``[0, vocab)``.
        context: positions lie in ``[0, context)``; ``None`` where the model sets no limit.
        labels: whether the model reads labels.

    Raises:
        ValueError: an entry is missing, or has another dtype, shape or range.
    """
    needed = ("tokens", "labels") if labels else ("tokens",)
    for name in needed:
        if name not in batch:
            raise ValueError(
                f"batch has no {name!r}; expected {' and '.join(map(repr, needed))}, got "
                f"{', '.join(map(repr, batch)) or 'nothing'}. Add int64 {name} of shape (B, T)"
            )
    shape = tuple(batch["tokens"].shape)
    if len(shape) != 2:
        raise ValueError(
            f"batch['tokens'] has shape {shape}; expected (batch, tokens). "
            "Add a batch axis with tokens[None] or reshape it"
        )
    for name in ("tokens", "labels", "positions", "segments"):
        if name in batch:
            _check_integers(name, batch[name], shape)
    _check_range("tokens", batch["tokens"], vocab, "Use this model's tokenizer")
    if "labels" in batch:
        mend = f"Mark a label to ignore with {IGNORED}"
        _check_range("labels", batch["labels"], vocab, mend, ignored=IGNORED)
    if "positions" in batch:
        _check_range("positions", batch["positions"], context, "Count from 0 in each document")
    elif context is not None and shape[1] > context:
        raise ValueError(
            f"batch['tokens'] holds {shape[1]} tokens a row; expected at most {context}, the "
            "positions that this model has learnt. Split the rows"
        )


def _check_integers(name: str, x_BT: Tensor, shape: tuple[int, ...]) -> None:
    if x_BT.dtype != torch.int64:
        raise ValueError(
            f"batch[{name!r}] is {x_BT.dtype}; expected torch.int64. Convert it with .long()"
        )
    if tuple(x_BT.shape) != shape:
        raise ValueError(
            f"batch[{name!r}] has shape {tuple(x_BT.shape)}; expected {shape}, the shape of "
            "batch['tokens']. Cut both alike: labels = text[:, 1:], tokens = text[:, :-1]"
        )


def _check_range(
    name: str, x_BT: Tensor, stop: int | None, mend: str, ignored: int | None = None
) -> None:
    bad_BT = x_BT < 0 if stop is None else (x_BT < 0) | (x_BT >= stop)
    if ignored is not None:
        bad_BT &= x_BT != ignored
    if bad_BT.any():
        row, column = bad_BT.nonzero()[0].tolist()
        bound = "at least 0" if stop is None else f"0 to {stop - 1}"
        allowed = bound if ignored is None else f"{bound}, or {ignored}"
        raise ValueError(
            f"batch[{name!r}][{row}, {column}] is {x_BT[row, column]}; expected {allowed} "
            f"({int(bad_BT.sum())} of {x_BT.numel()} are out of range). {mend}"
        )


@functools.cache
def batch_check(
    vocab: int, *, context: int | None = None, labels: bool = True
) -> Callable[[Any], None]:
    """:func:`check_batch` for one model; the same object each time, so that programs compare."""
    return functools.partial(check_batch, vocab=vocab, context=context, labels=labels)
