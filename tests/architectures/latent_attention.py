"""Multi-head latent attention: keys and values are made from one narrow vector for each token.

DeepSeek-V2 (arXiv 2405.04434), equations 37 to 47. Only the latent vector and one rotary key,
shared by the heads, would have to be kept for generating text. Shape suffixes:

    B batch    T tokens    D width    H heads    C head width    R rotary width    V vocabulary
    Q latent width of the queries     L latent width of keys and values
"""

import torch
import torch.nn.functional as F
from einops import rearrange

import mtfunc as mt


def embed(p, carry, batch):
    return F.embedding(batch["tokens"], p["weight"])


def block(p, x_BTD, batch, *, heads):
    x_BTD = x_BTD + attention(p, norm(x_BTD), heads)
    return x_BTD + F.silu(norm(x_BTD) @ p["up"]) @ p["down"]


def attention(p, x_BTD, heads):
    c_BTQ = norm(x_BTD @ p["q_down"])
    c_BTL = norm(x_BTD @ p["kv_down"])
    q_BHTC = split(c_BTQ @ p["q_up"], heads)
    k_BHTC = split(c_BTL @ p["k_up"], heads)
    v_BHTC = split(c_BTL @ p["v_up"], heads)
    q_BHTR = rotate(split(c_BTQ @ p["q_rope"], heads))
    k_BHTR = rotate(split(x_BTD @ p["k_rope"], 1)).expand_as(q_BHTR)
    q, k = torch.cat([q_BHTC, q_BHTR], -1), torch.cat([k_BHTC, k_BHTR], -1)
    y_BHTC = F.scaled_dot_product_attention(q, k, v_BHTC, is_causal=True)
    return rearrange(y_BHTC, "B H T C -> B T (H C)") @ p["out"]


def split(x, heads):
    return rearrange(x, "B T (H C) -> B H T C", H=heads)


def rotate(x_BHTR):
    """Turns the pairs ``(x[i], x[i + R/2])`` by angles that grow with the position."""
    T, R = x_BHTR.shape[-2:]
    turn = 10_000.0 ** (-torch.arange(0, R, 2, device=x_BHTR.device) / R)
    angle = (torch.arange(T, device=x_BHTR.device)[:, None] * turn).to(x_BHTR.dtype)
    a, b = x_BHTR.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def norm(x):
    return F.rms_norm(x, x.shape[-1:])


def loss(emb, x_BTD, batch):
    logits_BTV = norm(x_BTD) @ emb["weight"].T
    total = F.cross_entropy(logits_BTV.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return mt.Mean(total, batch["labels"].numel())


def make(D=16, H=4, C=4, R=2, Q=8, L=6, V=29, depth=2):
    keys = iter(mt.random.split(mt.random.key(0), 99))

    def normal(*shape):
        return mt.random.normal(next(keys), shape) * shape[0] ** -0.5

    shapes = {"q_down": (D, Q), "q_up": (Q, H * C), "q_rope": (Q, H * R), "kv_down": (D, L)}
    shapes |= {"k_up": (L, H * C), "v_up": (L, H * C), "k_rope": (D, R), "out": (H * C, D)}
    shapes |= {"up": (D, 2 * D), "down": (2 * D, D)}
    layers = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(depth)]
    params = {"embed": {"weight": normal(V, D)}, "layers": layers}
    scan = mt.scan(block, "layers", static={"heads": H})
    program = mt.chain(mt.stage(embed, "embed"), scan, mt.stage(loss, "embed"))
    text = mt.random.categorical(next(keys), torch.zeros(2, 13, V))
    return program, params, {"tokens": text[:, :-1], "labels": text[:, 1:]}, None
