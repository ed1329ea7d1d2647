"""Universal transformer: one block applied again and again, told the position and the step.

Dehghani et al. (arXiv 1807.03819), equations 2 to 5, with a fixed number of steps. Every step
reads the same key, so the block is stored once and its gradients are summed. Shape suffixes:

    B batch    T tokens    D width    H heads    C head width    V vocabulary
"""

import torch
import torch.nn.functional as F
from einops import rearrange

import mtfunc as mt


def embed(p, carry, batch):
    return F.embedding(batch["tokens"], p["weight"])


def step(p, x_BTD, batch, *, number):
    x_BTD = x_BTD + coordinates(x_BTD, number)
    x_BTD = norm(x_BTD + attention(p, x_BTD))
    return norm(x_BTD + F.relu(x_BTD @ p["up"]) @ p["down"])


def coordinates(x_BTD, number):
    """Sines and cosines of the position, plus those of the step: equations 4 and 5."""
    T, D = x_BTD.shape[1:]
    turn = 10_000.0 ** (-torch.arange(0, D, 2, device=x_BTD.device) / D)
    where = torch.arange(T, device=x_BTD.device)[:, None] * turn
    when = number * turn
    pairs = torch.stack([where.sin() + when.sin(), where.cos() + when.cos()], -1)
    return rearrange(pairs, "T D two -> T (D two)").to(x_BTD.dtype)


def attention(p, x_BTD):
    q, k, v = rearrange(x_BTD @ p["qkv"], "B T (S H C) -> S B H T C", S=3, H=2)
    y_BHTC = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return rearrange(y_BHTC, "B H T C -> B T (H C)") @ p["out"]


def norm(x):
    return F.layer_norm(x, x.shape[-1:])


def loss(emb, x_BTD, batch):
    logits_BTV = x_BTD @ emb["weight"].T
    total = F.cross_entropy(logits_BTV.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return mt.Mean(total, batch["labels"].numel())


def make(D=16, V=29, steps=4):
    keys = iter(mt.random.split(mt.random.key(0), 99))

    def normal(*shape):
        return mt.random.normal(next(keys), shape) * shape[0] ** -0.5

    shapes = {"qkv": (D, 3 * D), "out": (D, D), "up": (D, 2 * D), "down": (2 * D, D)}
    shared = {name: normal(*shape) for name, shape in shapes.items()}
    params = {"embed": {"weight": normal(V, D)}, "shared": shared}
    program = mt.chain(
        mt.stage(embed, "embed"),
        *(mt.stage(step, "shared", static={"number": t}) for t in range(1, steps + 1)),
        mt.stage(loss, "embed"),
    )
    text = mt.random.categorical(next(keys), torch.zeros(2, 11, V))
    return program, params, {"tokens": text[:, :-1], "labels": text[:, 1:]}, None
