"""Kinds of stage that models are built of: rows of the conformance matrix.

Each is a function of its parameters and a carry ``x`` of shape ``(B, T, D) = (2, 6, 8)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mtfunc as mt
from scripts._conformance import B, D, Kind, T

KINDS: list[Kind] = [
    Kind(group="Models", name="GPT-2, each layer", model="gpt2-tiny"),
    Kind(group="Models", name="Llama, each layer", model="llama-tiny"),
]

Fn = Callable[..., Any]


def kinds_of(kinds: list[Kind]) -> Callable[..., Callable[[Fn], Fn]]:
    """A decorator that adds a function to ``kinds``."""

    def kind(group: str, name: str, **options: Any) -> Callable[[Fn], Fn]:
        known = ("enter", "leave", "rule", "plain", "rng")
        rest = {k: options.pop(k) for k in known if k in options}

        def add(fn: Fn) -> Fn:
            kinds.append(Kind(group=group, name=name, fn=fn, params=options, **rest))
            return fn

        return add

    return kind


kind = kinds_of(KINDS)


@kind("Dense", "matrix product, norm, SiLU, residual", scale=(D,), up=(D, 16), down=(16, D))
def block(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x + F.silu(F.layer_norm(x, (D,), p["scale"]) @ p["up"]) @ p["down"]


@kind("Dense", "embedding with a padding index", w=(5, D))
def embedding(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x + F.embedding(batch["tokens"], p["w"], padding_idx=0)


@kind("Dense", "embedding that renormalizes its weight (`max_norm`)", w=(5, D))
def renormalized(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x + F.embedding(batch["tokens"], p["w"], max_norm=0.5)


@kind("Dense", "embedding bag", w=(5, D))
def bag(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x + F.embedding_bag(batch["tokens"], p["w"], mode="mean")[:, None]


@kind("Dense", "batch norm over the batch", w=(D,), b=(D,))
def batch_norm(p: Any, x: Tensor, batch: Any) -> Tensor:
    return F.batch_norm(x.mT, None, None, p["w"], p["b"], training=True).mT


@kind("Dense", "batch norm that updates running statistics", mean=torch.zeros(D), var=torch.ones(D))
def running(p: Any, x: Tensor, batch: Any) -> Tensor:
    return F.batch_norm(x.mT, p["mean"], p["var"], training=True).mT


@kind("Dense", "group norm and RMS norm", w=(T,), r=(D,))
def norms(p: Any, x: Tensor, batch: Any) -> Tensor:
    return F.rms_norm(F.group_norm(x, 3, p["w"]), (D,), p["r"])


@kind("Dense", "upcast to float32 inside", w=(D, D))
def upcast(p: Any, x: Tensor, batch: Any) -> Tensor:
    return (x.float() @ p["w"].float()).softmax(-1).to(x.dtype)


@kind(
    "Dense",
    "8-bit base weight under a trained scale",
    q=torch.arange(-32, 32, dtype=torch.int8).reshape(D, D),
    scale=(D,),
)
def quantized(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x @ (p["q"].to(x.dtype) * p["scale"])


@kind(
    "Dense",
    "a module by `torch.func.functional_call`: LSTM",
    weight_ih_l0=(4 * D, D),
    weight_hh_l0=(4 * D, D),
    bias_ih_l0=(4 * D,),
    bias_hh_l0=(4 * D,),
)
def lstm(p: Any, x: Tensor, batch: Any) -> Tensor:
    return torch.func.functional_call(LSTM, p, (x,))[0]


LSTM = torch.nn.LSTM(D, D, batch_first=True, device="meta")


def _heads(x: Tensor, width: int = 4) -> Tensor:
    return rearrange(x, "B T (H C) -> B H T C", C=width)


def _joined(x: Tensor) -> Tensor:
    return rearrange(x, "B H T C -> B T (H C)")


@kind("Attention", "SDPA, causal", q=(D, D), k=(D, D), v=(D, D))
def causal(p: Any, x: Tensor, batch: Any) -> Tensor:
    q, k, v = (_heads(x @ p[n]) for n in "qkv")
    return _joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))


@kind("Attention", "SDPA with a boolean mask of packed documents", q=(D, D), k=(D, D), v=(D, D))
def packed(p: Any, x: Tensor, batch: Any) -> Tensor:
    q, k, v = (_heads(x @ p[n]) for n in "qkv")
    segments = (batch["tokens"] == 0).cumsum(1)
    mask = (segments[:, None, :, None] == segments[:, None, None]).tril()
    return _joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


@kind("Attention", "SDPA with a mask that learns", q=(D, D), k=(D, D), v=(D, D), bias=(2, T, T))
def biased(p: Any, x: Tensor, batch: Any) -> Tensor:
    q, k, v = (_heads(x @ p[n]) for n in "qkv")
    return _joined(F.scaled_dot_product_attention(q, k, v, attn_mask=p["bias"]))


@kind("Attention", "SDPA with a sliding window", q=(D, D), k=(D, D), v=(D, D))
def window(p: Any, x: Tensor, batch: Any) -> Tensor:
    q, k, v = (_heads(x @ p[n]) for n in "qkv")
    mask = torch.ones(T, T, dtype=torch.bool, device=x.device).tril().triu(-2)
    return _joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


@kind("Attention", "SDPA with grouped queries", q=(D, D), k=(D, 4), v=(D, 4))
def grouped_queries(p: Any, x: Tensor, batch: Any) -> Tensor:
    q, k, v = (_heads(x @ p[n]) for n in "qkv")
    return _joined(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


@kind(
    "Attention",
    "written out, with soft capping and a sink",
    q=(D, D),
    k=(D, D),
    v=(D, D),
    sink=(2,),
)
def capped(p: Any, x: Tensor, batch: Any) -> Tensor:
    q, k, v = (_heads(x @ p[n]) for n in "qkv")
    scores = 5 * torch.tanh(q @ k.mT / 10)
    later = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
    sink = p["sink"][:, None, None].expand(B, 2, T, 1)
    weights = torch.cat([scores.masked_fill(later, float("-inf")), sink], -1).softmax(-1)
    return _joined(weights[..., :-1] @ v)


class Apart(torch.autograd.Function):
    """Multiplies, the functorch way."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum((0, 1))


class Together(torch.autograd.Function):
    """Multiplies, the old way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum((0, 1))


class Rounded(torch.autograd.Function):
    """Rounds; its backward passes by."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@kind("Hand-written backwards", "`autograd.Function` with `setup_context`", w=(D,))
def apart(p: Any, x: Tensor, batch: Any) -> Tensor:
    return Apart.apply(x, p["w"])


@kind("Hand-written backwards", "`autograd.Function` without `setup_context`", w=(D,))
def together(p: Any, x: Tensor, batch: Any) -> Tensor:
    return Together.apply(x, p["w"])


@kind("Hand-written backwards", "straight-through estimator", w=(D, D))
def straight_through(p: Any, x: Tensor, batch: Any) -> Tensor:
    return Rounded.apply(x @ p["w"])


def _round_rule(p: Any, x: Tensor, batch: Any, cotangent: Tensor) -> Any:
    return {"w": (cotangent * x).sum((0, 1))}, cotangent * p["w"]


@kind(
    "Hand-written backwards",
    "a rule that is on purpose not the derivative",
    w=(D,),
    rule=_round_rule,
    plain=lambda p, x, batch: Rounded.apply(x * p["w"]),
)
def rounded(p: Any, x: Tensor, batch: Any) -> Tensor:
    return (4 * (x * p["w"])).round() / 4


@torch.library.custom_op("mtfunc_conformance::scaled", mutates_args=())
def _scaled(x: Tensor, w: Tensor) -> Tensor:
    return x * w


@_scaled.register_fake
def _scaled_shape(x: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(x)


def _scaled_backward(ctx: Any, grad: Tensor) -> Any:
    x, w = ctx.saved_tensors
    return grad * w, (grad * x).sum((0, 1))


_scaled.register_autograd(
    _scaled_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@kind("Hand-written backwards", "`torch.library.custom_op`", w=(D,))
def custom_op(p: Any, x: Tensor, batch: Any) -> Tensor:
    return _scaled(x, p["w"])


@kind("Hand-written backwards", "`checkpoint(use_reentrant=False)`", up=(D, 16), down=(16, D))
def checkpointed(p: Any, x: Tensor, batch: Any) -> Tensor:
    return checkpoint(_mlp, x, p["up"], p["down"], use_reentrant=False)


@kind("Hand-written backwards", "`checkpoint(use_reentrant=True)`", up=(D, 16), down=(16, D))
def reentrant(p: Any, x: Tensor, batch: Any) -> Tensor:
    return checkpoint(_mlp, x, p["up"], p["down"], use_reentrant=True)


@kind("Hand-written backwards", "saved-tensor hooks", up=(D, 16), down=(16, D))
def hooks(p: Any, x: Tensor, batch: Any) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return _mlp(x, p["up"], p["down"])


@kind("Hand-written backwards", "a hook on a gradient", w=(D, D))
def hooked(p: Any, x: Tensor, batch: Any) -> Tensor:
    y = x @ p["w"]
    if y.requires_grad:
        y.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    return y


def _mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.tanh(x @ up) @ down


@kind("Compiled", '`torch.compile`, backend "eager"', up=(D, 16), down=(16, D))
def compiled(p: Any, x: Tensor, batch: Any) -> Tensor:
    return _eager(x, p["up"], p["down"])


@kind("Compiled", '`torch.compile`, backend "aot_eager"', up=(D, 16), down=(16, D))
def compiled_aot(p: Any, x: Tensor, batch: Any) -> Tensor:
    return _aot(x, p["up"], p["down"])


_eager = torch.compile(_mlp, backend="eager")
_aot = torch.compile(_mlp, backend="aot_eager")


@kind("Mixtures", "grouped matrix product (`F.grouped_mm`)", w=(2, D, D))
def grouped(p: Any, x: Tensor, batch: Any) -> Tensor:
    ends = torch.tensor([4, B * T], dtype=torch.int32, device=x.device)
    return F.grouped_mm(x.reshape(B * T, D), p["w"], offs=ends).reshape(B, T, D)


@kind("Mixtures", "experts, one of them without tokens", router=(D, 2), up=(3, D, D))
def experts(p: Any, x: Tensor, batch: Any) -> Tensor:
    flat, out = x.reshape(B * T, D), torch.zeros_like(x.reshape(B * T, D))
    weight, choice = (flat @ p["router"]).softmax(-1).max(-1)
    for i, up in enumerate(p["up"]):
        (rows,) = torch.where(choice == i)
        out = out.index_add(0, rows, torch.tanh(flat[rows] @ up) * weight[rows, None])
    return x + out.reshape(B, T, D)


@kind("Mixtures", "experts, capacity and top-2 by scatter", router=(D, 4), up=(4, D, D))
def dispatched(p: Any, x: Tensor, batch: Any) -> Tensor:
    weight, choice = (x @ p["router"]).softmax(-1).topk(2, -1)
    gates = torch.zeros(B, T, 4, dtype=x.dtype, device=x.device).scatter(-1, choice, weight)
    return torch.einsum("bte,btd,edf->btf", gates, x, p["up"])


@kind("Convolution", "causal, each channel apart", w=(D, 1, 3), b=(D,))
def causal_conv(p: Any, x: Tensor, batch: Any) -> Tensor:
    return F.conv1d(F.pad(x.mT, (2, 0)), p["w"], p["b"], groups=D).mT


@kind("Convolution", "2-d, strided down and transposed up", w=(3, 1, 3, 3), v=(3, 1, 2, 2))
def conv2d(p: Any, x: Tensor, batch: Any) -> Tensor:
    y = F.relu(F.conv2d(x[:, None], p["w"], padding=1, stride=2))
    return F.conv_transpose2d(y, p["v"], stride=2)[:, 0]


@kind("Convolution", "max pooling, and unpooling by its indices", w=(D,))
def pooled(p: Any, x: Tensor, batch: Any) -> Tensor:
    y, where = F.max_pool1d(x * p["w"], 2, return_indices=True)
    return F.max_unpool1d(y, where, 2)


@kind("Convolution", "bilinear resizing and sampling of a grid", w=(D,))
def resized(p: Any, x: Tensor, batch: Any) -> Tensor:
    image = F.interpolate((x * p["w"])[:, None], scale_factor=2, mode="bilinear")
    grid = image.mean((1, 2, 3))[:, None, None, None].expand(B, T, D, 2).tanh()
    return F.grid_sample(image, grid, align_corners=False)[:, 0]


@kind("Random", "dropout with a key", w=(D, D), rng=True)
def dropout(p: Any, x: Tensor, batch: Any, *, key: Any) -> Tensor:
    return mt.random.dropout(key, 0.3, x @ p["w"])


@kind("Random", "Gumbel noise with a key", w=(D, D), rng=True)
def gumbel(p: Any, x: Tensor, batch: Any, *, key: Any) -> Tensor:
    u = mt.random.uniform(key, x.shape, dtype=x.dtype, device=x.device)
    return (x @ p["w"] - (-(u + 0.01).log()).log()).softmax(-1)


@kind("Random", "dropout from the global generator", w=(D, D))
def global_dropout(p: Any, x: Tensor, batch: Any) -> Tensor:
    return F.dropout(x @ p["w"], 0.3)
