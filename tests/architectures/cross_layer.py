"""Cross-layer attention: two layers share one set of keys and values.

Brandon et al. (arXiv 2405.12981), section 3, with grouped queries. The first layer of a pair
makes keys and values and hands them on in the carry; the second has queries only. Shape suffixes:

    B batch    T tokens    D width    H query heads    K key heads    C head width    V vocabulary
"""

import torch
import torch.nn.functional as F
from einops import rearrange

import mtfunc as mt


def embed(p, carry, batch):
    return F.embedding(batch["tokens"], p["weight"])


def owner(p, x_BTD, batch, *, width):
    h_BTD = norm(x_BTD)
    k_BKTC, v_BKTC = split(h_BTD @ p["k"], width), split(h_BTD @ p["v"], width)
    return layer(p, x_BTD, k_BKTC, v_BKTC), k_BKTC, v_BKTC


def borrower(p, carry, batch):
    return layer(p, *carry)


def layer(p, x_BTD, k_BKTC, v_BKTC):
    q_BHTC = split(norm(x_BTD) @ p["q"], k_BKTC.shape[-1])
    y_BHTC = F.scaled_dot_product_attention(q_BHTC, k_BKTC, v_BKTC, is_causal=True, enable_gqa=True)
    x_BTD = x_BTD + rearrange(y_BHTC, "B H T C -> B T (H C)") @ p["out"]
    return x_BTD + F.silu(norm(x_BTD) @ p["up"]) @ p["down"]


def split(x, width):
    return rearrange(x, "B T (H C) -> B H T C", C=width)


def norm(x):
    return F.rms_norm(x, x.shape[-1:])


def loss(emb, x_BTD, batch):
    logits_BTV = norm(x_BTD) @ emb["weight"].T
    total = F.cross_entropy(logits_BTV.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return mt.Mean(total, batch["labels"].numel())


def make(D=16, C=4, K=2, V=29, pairs=2):
    keys = iter(mt.random.split(mt.random.key(0), 99))

    def normal(*shape):
        return mt.random.normal(next(keys), shape) * shape[0] ** -0.5

    shapes = {"q": (D, D), "out": (D, D), "up": (D, 2 * D), "down": (2 * D, D)}
    layers = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(2 * pairs)]
    for entry in layers[::2]:
        entry |= {"k": normal(D, K * C), "v": normal(D, K * C)}
    params = {"embed": {"weight": normal(V, D)}, "layers": layers}
    stages = [
        stage
        for i in range(0, 2 * pairs, 2)
        for stage in (
            mt.stage(owner, f"layers/{i}", static={"width": C}),
            mt.stage(borrower, f"layers/{i + 1}"),
        )
    ]
    program = mt.chain(mt.stage(embed, "embed"), *stages, mt.stage(loss, "embed"))
    text = mt.random.categorical(next(keys), torch.zeros(2, 11, V))
    return program, params, {"tokens": text[:, :-1], "labels": text[:, 1:]}, None
