"""LoRA: a frozen model, and a trained matrix of low rank beside each of its own.

Hu et al. (arXiv 2106.09685), equation 3: ``h = W x + (alpha / rank) B A x``. Frozen and trained
leaves lie side by side in a layer, and ``trainable`` tells them apart::

    mt.value_and_grad(program, trainable=trainable)

    B batch    T tokens    D width    H heads    C head width    R rank    V vocabulary
"""

import torch
import torch.nn.functional as F
from einops import rearrange

import mtfunc as mt


def trainable(path, leaf):
    """Only the low-rank pairs learn."""
    return path.endswith(("/A", "/B"))


def embed(p, carry, batch):
    return F.embedding(batch["tokens"], p["weight"])


def block(p, x_BTD, batch, *, alpha):
    x_BTD = x_BTD + attention(p, norm(x_BTD), alpha)
    h_BTF = F.silu(linear(p["up"], norm(x_BTD), alpha))
    return x_BTD + linear(p["down"], h_BTF, alpha)


def linear(p, x, alpha):
    rank = p["A"].shape[1]
    return x @ p["W"] + (alpha / rank) * (x @ p["A"] @ p["B"])


def merge(p, alpha):
    """One matrix that does the same, for use after training."""
    return p["W"] + (alpha / p["A"].shape[1]) * (p["A"] @ p["B"])


def attention(p, x_BTD, alpha):
    qkv = linear(p["qkv"], x_BTD, alpha)
    q, k, v = rearrange(qkv, "B T (S H C) -> S B H T C", S=3, H=2)
    y_BHTC = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return linear(p["out"], rearrange(y_BHTC, "B H T C -> B T (H C)"), alpha)


def norm(x):
    return F.rms_norm(x, x.shape[-1:])


def loss(emb, x_BTD, batch):
    logits_BTV = norm(x_BTD) @ emb["weight"].T
    total = F.cross_entropy(logits_BTV.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return mt.Mean(total, batch["labels"].numel())


def make(D=16, R=2, V=29, depth=2, alpha=4.0, start=0.1):
    """``start`` scales ``B``: 0 in the paper, which makes the first gradient of ``A`` 0."""
    keys = iter(mt.random.split(mt.random.key(0), 99))

    def normal(*shape):
        return mt.random.normal(next(keys), shape) * shape[0] ** -0.5

    def adapted(rows, columns):
        return {"W": normal(rows, columns), "A": normal(rows, R), "B": start * normal(R, columns)}

    shapes = {"qkv": (D, 3 * D), "out": (D, D), "up": (D, 2 * D), "down": (2 * D, D)}
    layers = [{name: adapted(*shape) for name, shape in shapes.items()} for _ in range(depth)]
    params = {"embed": {"weight": normal(V, D)}, "layers": layers}
    scan = mt.scan(block, "layers", static={"alpha": alpha})
    program = mt.chain(mt.stage(embed, "embed"), scan, mt.stage(loss, "embed"))
    text = mt.random.categorical(next(keys), torch.zeros(2, 11, V))
    return program, params, {"tokens": text[:, :-1], "labels": text[:, 1:]}, None
