"""Multi-token prediction: one trunk, and a head for each of the next few tokens.

Gloeckle et al. (arXiv 2404.19737), equation 2: each head is a layer of its own, and all share the
output matrix. The heads are a scan, so that only one head's logits exist at a time, as in
section 2 of the paper. Shape suffixes:

    B batch    T tokens    D width    H heads    C head width    V vocabulary
"""

import torch
import torch.nn.functional as F
from einops import rearrange

import mtfunc as mt


def embed(p, carry, batch):
    return F.embedding(batch["tokens"], p["weight"])


def block(p, x_BTD, batch):
    x_BTD = x_BTD + attention(p, norm(x_BTD))
    return x_BTD + F.silu(norm(x_BTD) @ p["up"]) @ p["down"]


def split(x_BTD, batch):
    """The trunk's state, and the sum over heads that begins here."""
    return x_BTD, x_BTD.new_zeros(())


def predict(p, emb, carry, batch, *, ahead):
    """Adds the loss of the token ``ahead`` places on; returns it as aux too."""
    x_BTD, total = carry
    tokens = x_BTD.shape[1]
    logits_BTV = norm(block(p, x_BTD, batch)) @ emb["weight"].T
    labels_BT = batch["labels"][:, ahead : ahead + tokens]
    own = F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum")
    return (x_BTD, total + own), own / labels_BT.numel()


def loss(carry, batch):
    return mt.Mean(carry[1], batch["tokens"].numel())


def attention(p, x_BTD):
    q, k, v = rearrange(x_BTD @ p["qkv"], "B T (S H C) -> S B H T C", S=3, H=2)
    y_BHTC = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return rearrange(y_BHTC, "B H T C -> B T (H C)") @ p["out"]


def norm(x):
    return F.rms_norm(x, x.shape[-1:])


def make(D=16, V=29, depth=2, heads=3, T=10):
    keys = iter(mt.random.split(mt.random.key(0), 99))

    def normal(*shape):
        return mt.random.normal(next(keys), shape) * shape[0] ** -0.5

    def layer():
        shapes = {"qkv": (D, 3 * D), "out": (D, D), "up": (D, 2 * D), "down": (2 * D, D)}
        return {name: normal(*shape) for name, shape in shapes.items()}

    params = {"embed": {"weight": normal(V, D)}}
    params["layers"] = [layer() for _ in range(depth)]
    params["heads"] = [layer() for _ in range(heads)]
    ahead = [{"ahead": i} for i in range(heads)]
    program = mt.chain(
        *(mt.stage(embed, "embed"), mt.scan(block, "layers"), mt.stage(split)),
        mt.scan(predict, "heads", "embed", static=ahead, has_aux=True),
        mt.stage(loss),
    )
    text = mt.random.categorical(next(keys), torch.zeros(2, T + heads, V))
    return program, params, {"tokens": text[:, :T], "labels": text[:, 1:]}, None
