"""GPT-2: learned positions, pre-LayerNorm, GELU, biases everywhere, and a tied head.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), with the sizes and
initial values of the released code. Shape suffixes:

    B batch    T tokens    D width    H heads    C head width    F feed-forward    V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

import mtfunc as mt
from models import common
from models.common import Leaf, ones, zeros


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The size of a GPT-2.

    Attributes:
        depth: layers.
        width: of the residual stream.
        heads: attention heads; they divide ``width``.
        vocab: tokens that the model knows.
        context: positions that it has learnt.
        eps: added to the variance in LayerNorm.
        std: standard deviation of initial weights.
    """

    depth: int
    width: int
    heads: int
    vocab: int = 50257
    context: int = 1024
    eps: float = 1e-5
    std: float = 0.02

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"gpt2.Config: width {self.width} and {self.heads} heads; expected heads to "
                "divide the width. Change one of them"
            )


CONFIGS = {
    "gpt2-tiny": Config(depth=4, width=128, heads=4, vocab=256, context=256, std=0.05),
    "gpt2": Config(depth=12, width=768, heads=12),
    "gpt2-medium": Config(depth=24, width=1024, heads=16),
    "gpt2-large": Config(depth=36, width=1280, heads=20),
    "gpt2-xl": Config(depth=48, width=1600, heads=25),
}


def layout(config: Config) -> common.Layout:
    """Shapes and initial distributions of the parameters.

    Projections back into the residual stream start smaller by ``sqrt(2 * depth)``, the square
    root of the number of terms that it sums (section 2.3 of the paper).
    """
    D, std = config.width, config.std
    residual = std / sqrt(2 * config.depth)
    layer = {
        "attention": {
            "norm": {"weight": ones(D), "bias": zeros(D)},
            "qkv": {"weight": Leaf(shape=(3 * D, D), std=std), "bias": zeros(3 * D)},
            "out": {"weight": Leaf(shape=(D, D), std=residual), "bias": zeros(D)},
        },
        "mlp": {
            "norm": {"weight": ones(D), "bias": zeros(D)},
            "up": {"weight": Leaf(shape=(4 * D, D), std=std), "bias": zeros(4 * D)},
            "down": {"weight": Leaf(shape=(D, 4 * D), std=residual), "bias": zeros(D)},
        },
    }
    return {
        "embed": {"weight": Leaf(shape=(config.vocab, D), std=std)},
        "positions": {"weight": Leaf(shape=(config.context, D), std=std / 2)},
        "layers": [layer] * config.depth,
        "norm": {"weight": ones(D), "bias": zeros(D)},
    }


def init(config: Config, key: Tensor, *, dtype: torch.dtype = torch.float32) -> Any:
    """Fresh parameters, drawn with a key of ``mtfunc.random``."""
    return common.draw(layout(config), key, dtype)


def spec(config: Config, *, dtype: torch.dtype = torch.float32) -> Any:
    """The parameters as meta tensors: structure, shapes and dtypes of ``init``, no memory."""
    return common.meta(layout(config), dtype)


def program(config: Config, output: str = "loss") -> mt.Program:
    """The model as stages.

    Args:
        config: the size.
        output: what the last stage returns: ``"loss"``, an ``mt.Mean`` over the labels that
            count; ``"logits"`` ``(B, T, V)``; or ``"hidden"`` ``(B, T, D)``, the states after
            the last norm.

    Raises:
        ValueError: ``output`` is something else.
    """
    static = {"config": config}
    last = {
        "loss": lambda: mt.stage(loss, "norm", "embed", static=static),
        "logits": lambda: mt.stage(logits, "norm", "embed", static=static),
        "hidden": lambda: mt.stage(hidden, "norm", static=static),
    }
    return mt.chain(
        mt.stage(embed, "embed", "positions"),
        mt.scan(block, "layers", static=static),
        common.lookup("output", output, last, ValueError)(),
        check=common.batch_check(config.vocab, context=config.context, labels=output == "loss"),
    )


def embed(tokens: Any, positions: Any, carry: None, batch: Mapping[str, Tensor]) -> Tensor:
    """Token embedding plus the embedding of its position, ``(B, T, D)``."""
    x_BTD = F.embedding(batch["tokens"], tokens["weight"])
    return x_BTD + F.embedding(common.positions_of(batch), positions["weight"])


def block(p: Any, x_BTD: Tensor, batch: Mapping[str, Tensor], *, config: Config) -> Tensor:
    """One layer: attention, then the feed-forward network, each added to its input."""
    x_BTD = x_BTD + attention(p["attention"], x_BTD, batch, config)
    return x_BTD + mlp(p["mlp"], x_BTD, config)


def attention(p: Any, x_BTD: Tensor, batch: Mapping[str, Tensor], config: Config) -> Tensor:
    """Causal attention of the normed input, projected back to the width."""
    qkv = linear(p["qkv"], layer_norm(p["norm"], x_BTD, config))
    q_BHTC, k_BHTC, v_BHTC = rearrange(qkv, "B T (n H C) -> n B H T C", n=3, H=config.heads)
    y_BHTC = common.attend(q_BHTC, k_BHTC, v_BHTC, batch.get("segments"))
    return linear(p["out"], rearrange(y_BHTC, "B H T C -> B T (H C)"))


def mlp(p: Any, x_BTD: Tensor, config: Config) -> Tensor:
    """The feed-forward network of the normed input; GELU in its tanh form, as released."""
    h_BTF = linear(p["up"], layer_norm(p["norm"], x_BTD, config))
    return linear(p["down"], F.gelu(h_BTF, approximate="tanh"))


def hidden(norm: Any, x_BTD: Tensor, batch: Mapping[str, Tensor], *, config: Config) -> Tensor:
    """The states after the last norm."""
    return layer_norm(norm, x_BTD, config)


def logits(
    norm: Any, tokens: Any, x_BTD: Tensor, batch: Mapping[str, Tensor], *, config: Config
) -> Tensor:
    """Scores of the next token, ``(B, T, V)``, by the transposed embedding."""
    return F.linear(layer_norm(norm, x_BTD, config), tokens["weight"])


def loss(
    norm: Any, tokens: Any, x_BTD: Tensor, batch: Mapping[str, Tensor], *, config: Config
) -> mt.Mean:
    """Cross entropy against ``batch["labels"]``."""
    logits_BTV = logits(norm, tokens, x_BTD, batch, config=config)
    return common.next_token_loss(logits_BTV, batch["labels"])


def linear(p: Any, x: Tensor) -> Tensor:
    """An affine map of the last axis."""
    return F.linear(x, p["weight"], p["bias"])


def layer_norm(p: Any, x_BTD: Tensor, config: Config) -> Tensor:
    """Layer normalisation (Ba et al., arXiv 1607.06450) of the last axis."""
    return F.layer_norm(x_BTD, (config.width,), p["weight"], p["bias"], config.eps)
