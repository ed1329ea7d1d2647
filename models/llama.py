"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

Touvron et al., "Llama 2" (arXiv 2307.09288); "The Llama 3 Herd of Models" (arXiv 2407.21783).
Shape suffixes:

    B batch    T tokens    D width    H query heads    K key and value heads    C head width
    F feed-forward width   V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

import mtfunc as mt
from models import common
from models.common import Leaf, RopeScaling, ones


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The size and settings of a Llama.

    Attributes:
        vocab: tokens that the model knows.
        depth: layers.
        width: of the residual stream.
        heads: query heads; they divide ``width``.
        kv_heads: key and value heads; they divide ``heads``.
        ffn: width inside the feed-forward network.
        context: tokens that it was made for; rotary positions themselves have no end.
        theta: base of the rotary wavelengths.
        scaling: how they are stretched, if they are.
        tied: whether the head is the embedding, transposed.
        eps: added to the mean square in RMSNorm.
        std: standard deviation of initial weights.
    """

    vocab: int
    depth: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    context: int
    theta: float = 10_000.0
    scaling: RopeScaling | None = None
    tied: bool = False
    eps: float = 1e-5
    std: float = 0.02

    def __post_init__(self) -> None:
        if self.width % self.heads or self.heads % self.kv_heads or self.head_width % 2:
            raise ValueError(
                f"llama.Config: width {self.width}, {self.heads} heads, {self.kv_heads} kv_heads; "
                "expected kv_heads to divide heads, heads to divide the width, and an even width "
                "of each head. Change one of them"
            )

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads


_LLAMA_3_8B = Config(
    vocab=128_256,
    depth=32,
    width=4096,
    heads=32,
    kv_heads=8,
    ffn=14_336,
    context=8192,
    theta=500_000.0,
)
CONFIGS = {
    "llama-tiny": Config(
        vocab=256,
        depth=4,
        width=128,
        heads=4,
        kv_heads=2,
        ffn=384,
        context=256,
        tied=True,
        std=0.05,
    ),
    "llama-bench": Config(
        vocab=8192, depth=12, width=768, heads=12, kv_heads=12, ffn=2048, context=2048
    ),
    "llama-2-7b": Config(
        vocab=32_000, depth=32, width=4096, heads=32, kv_heads=32, ffn=11_008, context=4096
    ),
    "llama-3-8b": _LLAMA_3_8B,
    "llama-3.1-8b": replace(_LLAMA_3_8B, context=131_072, scaling=RopeScaling(factor=8.0)),
    "llama-3.2-1b": Config(
        vocab=128_256,
        depth=16,
        width=2048,
        heads=32,
        kv_heads=8,
        ffn=8192,
        context=131_072,
        theta=500_000.0,
        scaling=RopeScaling(factor=32.0),
        tied=True,
    ),
}


def layout(config: Config) -> common.Layout:
    """Shapes and initial distributions of the parameters.

    The papers leave initial values open; as in GPT-2, projections back into the residual stream
    start smaller by ``sqrt(2 * depth)``.
    """
    D, C, std = config.width, config.head_width, config.std
    residual = std / sqrt(2 * config.depth)
    layer = {
        "attention": {
            "norm": ones(D),
            "q": Leaf(shape=(config.heads * C, D), std=std),
            "k": Leaf(shape=(config.kv_heads * C, D), std=std),
            "v": Leaf(shape=(config.kv_heads * C, D), std=std),
            "out": Leaf(shape=(D, config.heads * C), std=residual),
        },
        "mlp": {
            "norm": ones(D),
            "gate": Leaf(shape=(config.ffn, D), std=std),
            "up": Leaf(shape=(config.ffn, D), std=std),
            "down": Leaf(shape=(D, config.ffn), std=residual),
        },
    }
    head = {} if config.tied else {"head": {"weight": Leaf(shape=(config.vocab, D), std=std)}}
    return {
        "embed": {"weight": Leaf(shape=(config.vocab, D), std=std)},
        "layers": [layer] * config.depth,
        "norm": {"weight": ones(D)},
        **head,
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
    head = "embed" if config.tied else "head"
    last = {
        "loss": lambda: mt.stage(loss, "norm", head, static=static),
        "logits": lambda: mt.stage(logits, "norm", head, static=static),
        "hidden": lambda: mt.stage(hidden, "norm", static=static),
    }
    return mt.chain(
        mt.stage(embed, "embed"),
        mt.scan(block, "layers", static=static),
        common.lookup("output", output, last, ValueError)(),
        check=common.batch_check(config.vocab, labels=output == "loss"),
    )


def embed(tokens: Any, carry: None, batch: Mapping[str, Tensor]) -> Tensor:
    """Token embedding, ``(B, T, D)``."""
    return F.embedding(batch["tokens"], tokens["weight"])


def block(p: Any, x_BTD: Tensor, batch: Mapping[str, Tensor], *, config: Config) -> Tensor:
    """One layer: attention, then the feed-forward network, each added to its input."""
    x_BTD = x_BTD + attention(p["attention"], x_BTD, batch, config)
    return x_BTD + swiglu(p["mlp"], x_BTD, config)


def attention(p: Any, x_BTD: Tensor, batch: Mapping[str, Tensor], config: Config) -> Tensor:
    """Causal attention of the normed input with rotary positions, projected to the width.

    The angles are worked out anew in each layer: that is cheap beside the matrix products, and
    a carry would hold them, or fetch them from the host, as long as the layers run.
    """
    h_BTD = rms_norm(p["norm"], x_BTD, config)
    C = config.head_width
    q_BHTC = rearrange(F.linear(h_BTD, p["q"]), "B T (H C) -> B H T C", C=C)
    k_BKTC = rearrange(F.linear(h_BTD, p["k"]), "B T (K C) -> B K T C", C=C)
    v_BKTC = rearrange(F.linear(h_BTD, p["v"]), "B T (K C) -> B K T C", C=C)
    turn_R = common.rope_frequencies(C, config.theta, config.scaling, x_BTD.device)
    cos, sin = common.rope_angles(common.positions_of(batch), turn_R, x_BTD.dtype)
    q_BHTC, k_BKTC = common.rotate(q_BHTC, cos, sin), common.rotate(k_BKTC, cos, sin)
    y_BHTC = common.attend(q_BHTC, k_BKTC, v_BKTC, batch.get("segments"))
    return F.linear(rearrange(y_BHTC, "B H T C -> B T (H C)"), p["out"])


def swiglu(p: Any, x_BTD: Tensor, config: Config) -> Tensor:
    """The gated feed-forward network of the normed input (Shazeer, arXiv 2002.05202, eq. 6)."""
    h_BTD = rms_norm(p["norm"], x_BTD, config)
    h_BTF = F.silu(F.linear(h_BTD, p["gate"])) * F.linear(h_BTD, p["up"])
    return F.linear(h_BTF, p["down"])


def hidden(norm: Any, x_BTD: Tensor, batch: Mapping[str, Tensor], *, config: Config) -> Tensor:
    """The states after the last norm."""
    return rms_norm(norm["weight"], x_BTD, config)


def logits(
    norm: Any, head: Any, x_BTD: Tensor, batch: Mapping[str, Tensor], *, config: Config
) -> Tensor:
    """Scores of the next token, ``(B, T, V)``."""
    return F.linear(rms_norm(norm["weight"], x_BTD, config), head["weight"])


def loss(
    norm: Any, head: Any, x_BTD: Tensor, batch: Mapping[str, Tensor], *, config: Config
) -> mt.Mean:
    """Cross entropy against ``batch["labels"]``."""
    logits_BTV = logits(norm, head, x_BTD, batch, config=config)
    return common.next_token_loss(logits_BTV, batch["labels"])


def rms_norm(weight_D: Tensor, x_BTD: Tensor, config: Config) -> Tensor:
    """Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467) of the last axis."""
    return F.rms_norm(x_BTD, (config.width,), weight_D, config.eps)
