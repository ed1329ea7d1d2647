"""Hyper-connections: several residual streams, mixed anew by every layer instead of one sum.

Zhu et al. (arXiv 2409.19606), dynamic form, equations 1, 2 and 10 to 13. A layer reads a mixture
of the streams, the streams are mixed among themselves, and each takes a share of the layer's
output. With both scales at 0 a network begins as the plain pre-norm one. Shape suffixes:

    B batch    T tokens    D width    N streams    H heads    C head width    V vocabulary
"""

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat

import mtfunc as mt


def embed(p, carry, batch, *, streams):
    x_BTD = F.embedding(batch["tokens"], p["weight"])
    return repeat(x_BTD, "B T D -> B T N D", N=streams).contiguous()


def hyper(p, x_BTND, batch, *, layer):
    h_BTND = norm(x_BTND)
    read_BTN = p["read"] + p["read_scale"] * torch.tanh(h_BTND @ p["read_dynamic"])
    mix_BTNN = p["mix"] + p["read_scale"] * torch.tanh(h_BTND @ p["mix_dynamic"])
    write_BTN = p["write"] + p["write_scale"] * torch.tanh(h_BTND @ p["write_dynamic"])
    y_BTD = layer(p, norm(einsum(read_BTN, x_BTND, "B T N, B T N D -> B T D")))
    mixed_BTND = einsum(mix_BTNN, x_BTND, "B T N M, B T N D -> B T M D")
    return mixed_BTND + einsum(write_BTN, y_BTD, "B T N, B T D -> B T N D")


def attention(p, x_BTD):
    q, k, v = rearrange(x_BTD @ p["qkv"], "B T (S H C) -> S B H T C", S=3, H=2)
    y_BHTC = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return rearrange(y_BHTC, "B H T C -> B T (H C)") @ p["out"]


def mlp(p, x_BTD):
    return F.silu(x_BTD @ p["up"]) @ p["down"]


def norm(x):
    return F.rms_norm(x, x.shape[-1:])


def loss(emb, x_BTND, batch):
    logits_BTV = norm(x_BTND.sum(2)) @ emb["weight"].T
    total = F.cross_entropy(logits_BTV.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return mt.Mean(total, batch["labels"].numel())


def make(D=16, N=3, V=29, depth=2):
    keys = iter(mt.random.split(mt.random.key(0), 99))

    def normal(*shape):
        return mt.random.normal(next(keys), shape) * shape[0] ** -0.5

    def connection(i):
        fixed = {"read": F.one_hot(torch.tensor(i % N), N) + 0.0, "mix": torch.eye(N)}
        scales = {"read_scale": torch.tensor(0.1), "write_scale": torch.tensor(0.1)}
        dynamic = {"read_dynamic": normal(D), "mix_dynamic": normal(D, N)}
        return {"write": torch.ones(N), "write_dynamic": normal(D)} | fixed | scales | dynamic

    shapes = [{"qkv": (D, 3 * D), "out": (D, D)}, {"up": (D, 2 * D), "down": (2 * D, D)}] * depth
    layers = [
        connection(i) | {name: normal(*shape) for name, shape in entry.items()}
        for i, entry in enumerate(shapes)
    ]
    params = {"embed": {"weight": normal(V, D)}, "layers": layers}
    program = mt.chain(
        mt.stage(embed, "embed", static={"streams": N}),
        mt.scan(hyper, "layers", static=[{"layer": attention}, {"layer": mlp}] * depth),
        mt.stage(loss, "embed"),
    )
    text = mt.random.categorical(next(keys), torch.zeros(2, 11, V))
    return program, params, {"tokens": text[:, :-1], "labels": text[:, 1:]}, None
