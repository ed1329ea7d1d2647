"""Cross entropy of a linear head without the logits.

The backward pass computes each tile's logits again instead of keeping gradients from the forward
pass: that is one matrix product more (four instead of three), but exact for every reduction and
cotangent, and what lives between the passes is one number a token instead of a float32 gradient
of the whole head. Where a forward pass is run again just before its backward pass, the loss and
log-sum-exp of the first can be handed to the second (``_residuals``), which saves that product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtfunc.ops import _residuals
from mtfunc.ops._checks import expect_floating, expect_integers, expect_positive, expect_shape, wide


class _Options(NamedTuple):
    ignore_index: int
    smoothing: float
    softcap: float | None
    z_loss: float
    tile: int


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    weights: Tensor | None = None,
    tile: int | None = None,
) -> Tensor:
    """``F.cross_entropy(x @ weight.T, labels)``, never holding more than two tiles of logits.

    The dense form is :func:`mtfunc.ops.reference.linear_cross_entropy`. With
    ``c = softcap * tanh(x @ weight.T / softcap)`` and ``lse = logsumexp(c)``, a token's loss is
    ``(1 - s) * (lse - c[label]) + s * (lse - mean(c)) + z_loss * lse**2``, where ``s`` is the
    label smoothing (Szegedy et al., arXiv 1512.00567); softcap after Gemma 2 (arXiv 2408.00118),
    z-loss after PaLM (arXiv 2204.02311, section 5).

    For ``mt.Mean``, take ``reduction="sum"`` and count the labels: a step's mean divides once, by
    the labels of all micro-batches.

    Args:
        x: ``(..., width)``, floating.
        weight: ``(vocabulary, width)``, of the same dtype.
        labels: ``(...)``, integers; already shifted.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``: over the labels that count, weighted by
            ``weights``. If none counts, the sum is 0 with zero gradients and the mean is NaN, as
            that of ``F.cross_entropy`` is.
        ignore_index: the label of a token that has no loss.
        label_smoothing: in [0, 1].
        softcap: bound of the logits.
        z_loss: weight of ``lse**2``.
        weights: ``(...)``, a factor for each token's loss; differentiable.
        tile: tokens in a tile; by default up to 1,024, or as many as make 2^22 logits.

    Returns:
        A scalar, or for ``"none"`` shape ``(...)``; float32, or float64 for float64.

    Raises:
        TypeError: dtypes are not as above.
        ValueError: shapes or options are not as above; or, on the processor, a label is neither
            ``ignore_index`` nor in the vocabulary. Elsewhere, where a check would wait for the
            device, such a token's loss is NaN.

    Example:
        >>> import torch
        >>> from mtfunc import ops
        >>> x, weight = torch.ones(2, 3, 4), torch.zeros(8, 4)
        >>> ops.linear_cross_entropy(x, weight, torch.zeros(2, 3, dtype=torch.int64))
        tensor(2.0794)
    """
    where = "linear_cross_entropy"
    expect_floating(where, x=x, weight=weight)
    expect_integers(where, "labels", labels)
    expect_shape(where, "labels", labels, tuple(x.shape[:-1]), "one for each token of x")
    expect_shape(where, "weight", weight, (weight.shape[0], x.shape[-1]), "(vocabulary, width)")
    expect_positive(where, softcap=softcap, tile=tile)
    if weights is not None:
        expect_shape(where, "weights", weights, tuple(labels.shape), "one for each label")
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(
            f"mt.ops.{where}: reduction {reduction!r}; expected 'none', 'sum' or 'mean'"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(
            f"mt.ops.{where}: label_smoothing is {label_smoothing}; expected it in [0, 1]"
        )
    size = tile or _tile(weight.shape[0])
    options = _Options(ignore_index, label_smoothing, softcap, z_loss, size)
    rows = x.reshape(-1, x.shape[-1])
    losses, _ = _LinearCrossEntropy.apply(rows, weight, labels.reshape(-1).long(), options)
    losses = losses.view(labels.shape)
    counted = labels != ignore_index
    if weights is not None:
        factors = torch.where(counted, weights.to(losses.dtype), 0)
        losses = losses * factors
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (counted if weights is None else factors).sum()


def _tile(vocabulary: int) -> int:
    return max(1, 2**22 // vocabulary, min(1024, 2**28 // vocabulary))


class _LinearCrossEntropy(torch.autograd.Function):
    """Losses and log-sum-exps of tokens, both ``(N,)``."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, labels: Tensor, options: _Options) -> tuple[Tensor, ...]:
        if labels.device.type == "cpu":
            _check_labels(labels, weight.shape[0], options.ignore_index)
        name = f"linear_cross_entropy {tuple(x.shape)} {tuple(weight.shape)}"
        return _residuals.take(name, lambda: _losses(x, weight, labels, options))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, labels, ctx.options = inputs
        ctx.save_for_backward(x, weight, labels, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        x, weight, labels, lse = ctx.saved_tensors
        want_x, want_weight = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x) if want_x else None
        total = torch.zeros_like(weight, dtype=wide(weight.dtype)) if want_weight else None
        for start in range(0, len(x), ctx.options.tile):
            rows = slice(start, start + ctx.options.tile)
            part = x[rows]
            pulled = _pull_logits(
                part, weight, labels[rows], lse[rows], cotangent[rows], ctx.options
            )
            if grad_x is not None:
                grad_x[rows] = pulled @ weight
            if total is not None:
                if total.dtype == weight.dtype:
                    total.addmm_(pulled.T, part)
                else:
                    total.add_(pulled.T @ part)
            del pulled  # or it would live beside the next tile's
        return grad_x, None if total is None else total.to(weight.dtype), None, None


def _losses(x: Tensor, weight: Tensor, labels: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    losses = torch.empty(len(x), dtype=wide(x.dtype), device=x.device)
    lse = torch.empty_like(losses)
    for start in range(0, len(x), options.tile):
        rows = slice(start, start + options.tile)
        losses[rows], lse[rows] = _tile_losses(x[rows], weight, labels[rows], options)
    return losses, lse


def _tile_losses(
    x: Tensor, weight: Tensor, labels: Tensor, options: _Options
) -> tuple[Tensor, Tensor]:
    logits = _logits(x, weight, options)
    vocabulary = weight.shape[0]
    picked = logits.gather(1, labels.clamp(0, vocabulary - 1)[:, None])[:, 0]
    if options.smoothing:
        picked = (1 - options.smoothing) * picked + options.smoothing * logits.mean(1)
    top = logits.amax(1)
    lse = logits.sub_(top[:, None]).exp_().sum(1).log_().add_(top)
    losses = lse - picked
    if options.z_loss:
        losses = losses + options.z_loss * lse.square()
    counted = labels != options.ignore_index
    wrong = counted & ((labels < 0) | (labels >= vocabulary))
    losses = torch.where(counted, losses.masked_fill(wrong, torch.nan), 0)
    return losses, lse.masked_fill(wrong, torch.nan)


def _pull_logits(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    lse: Tensor,
    cotangent: Tensor,
    options: _Options,
) -> Tensor:
    """The cotangent of one tile of ``x @ weight.T``, in the dtype of ``x``."""
    logits = _logits(x, weight, options)
    vocabulary, smoothing = weight.shape[0], options.smoothing
    # Where logits are capped, they are still needed; otherwise their memory is reused.
    pulled = logits - lse[:, None] if options.softcap else logits.sub_(lse[:, None])
    scale = cotangent
    if options.z_loss:
        scale = cotangent * (1 + 2 * options.z_loss * lse)
    pulled.exp_().mul_(scale[:, None])
    if smoothing:
        pulled.sub_((cotangent * (smoothing / vocabulary))[:, None])
    at = labels.clamp(0, vocabulary - 1)[:, None]
    pulled.scatter_add_(1, at, (cotangent * (smoothing - 1))[:, None])
    if options.softcap:
        pulled.mul_(logits.div_(options.softcap).square_().neg_().add_(1))
    del logits  # before the copy below in another dtype
    pulled.masked_fill_((labels == options.ignore_index)[:, None], 0)
    return pulled.to(x.dtype)


def _logits(x: Tensor, weight: Tensor, options: _Options) -> Tensor:
    logits = (x @ weight.T).to(wide(x.dtype))
    if options.softcap:
        logits.div_(options.softcap).tanh_().mul_(options.softcap)
    return logits


def _check_labels(labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    wrong = (labels != ignore_index) & ((labels < 0) | (labels >= vocabulary))
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise ValueError(
            f"mt.ops.linear_cross_entropy: label {at} of {len(labels)} (flattened) is "
            f"{int(labels[at])}; expected 0 to {vocabulary - 1}, or {ignore_index} to ignore it "
            f"({int(wrong.sum())} are out of range). Use the tokenizer that the head was made for"
        )
