"""Mixture of depths: a router chooses the tokens that a layer works on; the others pass by.

Raposo et al. (arXiv 2404.02258), equation 1: the ``capacity`` tokens of a row with the largest
router weights attend to each other and take the layer's output times that weight. As in the
paper, routed layers and full ones take turns. Shape suffixes:

    B batch    T tokens    K chosen tokens    D width    H heads    C head width    V vocabulary
"""

import torch
import torch.nn.functional as F
from einops import rearrange, repeat

import mtfunc as mt


def embed(p, carry, batch):
    return F.embedding(batch["tokens"], p["weight"]) + p["position"]


def routed(p, x_BTD, batch, *, capacity):
    weight_BT = x_BTD @ p["router"]
    chosen_BK = weight_BT.topk(capacity, dim=1).indices.sort(1).values
    at_BKD = repeat(chosen_BK, "B K -> B K D", D=x_BTD.shape[-1])
    h_BKD = x_BTD.gather(1, at_BKD)
    y_BKD = delta(p, h_BKD) * weight_BT.gather(1, chosen_BK)[..., None]
    return x_BTD.scatter_add(1, at_BKD, y_BKD), {"router": weight_BT.mean(), "chosen": chosen_BK}


def full(p, x_BTD, batch):
    return x_BTD + delta(p, x_BTD)


def delta(p, x_BTD):
    """What a pre-norm layer adds to its input."""
    a_BTD = attention(p, norm(x_BTD))
    return a_BTD + F.silu(norm(x_BTD + a_BTD) @ p["up"]) @ p["down"]


def attention(p, x_BTD):
    q, k, v = rearrange(x_BTD @ p["qkv"], "B T (S H C) -> S B H T C", S=3, H=2)
    y_BHTC = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return rearrange(y_BHTC, "B H T C -> B T (H C)") @ p["out"]


def norm(x):
    return F.rms_norm(x, x.shape[-1:])


def loss(emb, x_BTD, batch):
    logits_BTV = norm(x_BTD) @ emb["weight"].T
    total = F.cross_entropy(logits_BTV.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return mt.Mean(total, batch["labels"].numel())


def make(D=16, T=12, V=29, capacity=4):
    keys = iter(mt.random.split(mt.random.key(0), 99))

    def normal(*shape):
        return mt.random.normal(next(keys), shape) * shape[0] ** -0.5

    shapes = {"qkv": (D, 3 * D), "out": (D, D), "up": (D, 2 * D), "down": (2 * D, D)}
    layers = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(4)]
    for layer in layers[1::2]:
        layer["router"] = normal(D)
    params = {"embed": {"weight": normal(V, D), "position": normal(T, D)}, "layers": layers}
    thin = {"static": {"capacity": capacity}, "has_aux": True}
    program = mt.chain(
        mt.stage(embed, "embed"),
        mt.stage(full, "layers/0", name="0"),
        mt.stage(routed, "layers/1", name="1", **thin),
        mt.stage(full, "layers/2", name="2"),
        mt.stage(routed, "layers/3", name="3", **thin),
        mt.stage(loss, "embed"),
    )
    text = mt.random.categorical(next(keys), torch.zeros(2, T + 1, V))
    return program, params, {"tokens": text[:, :-1], "labels": text[:, 1:]}, None
