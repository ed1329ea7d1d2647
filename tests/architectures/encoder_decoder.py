"""The transformer with an encoder and a decoder, for translation.

Vaswani et al. (arXiv 1706.03762), sections 3.1 to 3.5: norms after the residual sum, and one
embedding for source, target and logits. Padding (token 0) is masked in the source and not
counted in the loss. Every decoder layer reads the encoder's last state. Shape suffixes:

    B batch    S source tokens    T target tokens    D width    H heads    C head width
"""

import torch
import torch.nn.functional as F
from einops import rearrange

import mtfunc as mt


def embed(emb, memory_BSD, batch, *, side):
    """The source begins the carry; the target joins the encoder's last state in it."""
    T, D = batch[side].shape[1], emb["weight"].shape[1]
    turn = 10_000.0 ** (-torch.arange(0, D, 2, device=batch[side].device) / D)
    angle = torch.arange(T, device=batch[side].device)[:, None] * turn
    where = rearrange(torch.stack([angle.sin(), angle.cos()], -1), "T D two -> T (D two)")
    x_BTD = F.embedding(batch[side], emb["weight"]) * D**0.5 + where.to(emb["weight"].dtype)
    return x_BTD if memory_BSD is None else (memory_BSD, x_BTD)


def encode(p, x_BSD, batch):
    x_BSD = norm(x_BSD + attention(p["own"], x_BSD, x_BSD, attn_mask=visible(batch)))
    return norm(x_BSD + F.relu(x_BSD @ p["up"]) @ p["down"])


def decode(p, carry, batch):
    memory_BSD, x_BTD = carry
    x_BTD = norm(x_BTD + attention(p["own"], x_BTD, x_BTD, is_causal=True))
    x_BTD = norm(x_BTD + attention(p["cross"], x_BTD, memory_BSD, attn_mask=visible(batch)))
    return memory_BSD, norm(x_BTD + F.relu(x_BTD @ p["up"]) @ p["down"])


def loss(emb, carry, batch):
    logits_BTV, labels = carry[1] @ emb["weight"].T, batch["labels"].flatten()
    total = F.cross_entropy(logits_BTV.flatten(0, 1), labels, ignore_index=0, reduction="sum")
    return mt.Mean(total, (labels != 0).sum())


def visible(batch):
    return rearrange(batch["source"] != 0, "B S -> B 1 1 S")


def attention(p, x_BTD, y_BSD, **mask):
    given = zip((x_BTD, y_BSD, y_BSD), (p["q"], p["k"], p["v"]))
    q, k, v = (rearrange(z @ weight, "B T (H C) -> B H T C", H=2) for z, weight in given)
    out = F.scaled_dot_product_attention(q, k, v, **mask)
    return rearrange(out, "B H T C -> B T (H C)") @ p["out"]


def norm(x):
    return F.layer_norm(x, x.shape[-1:])


def make(D=16, V=29, depth=2):
    keys = iter(mt.random.split(mt.random.key(0), 99))

    def normal(*shape):
        return mt.random.normal(next(keys), shape) * shape[0] ** -0.5

    def layer(*kinds):
        attentions = {kind: {n: normal(D, D) for n in ("q", "k", "v", "out")} for kind in kinds}
        return attentions | {"up": normal(D, 2 * D), "down": normal(2 * D, D)}

    params = {"embed": {"weight": normal(V, D)}, "encoder": [layer("own") for _ in range(depth)]}
    params["decoder"] = [layer("own", "cross") for _ in range(depth)]
    encoder = mt.stage(embed, "embed", static={"side": "source"}), mt.scan(encode, "encoder")
    decoder = mt.stage(embed, "embed", static={"side": "target"}), mt.scan(decode, "decoder")
    program = mt.chain(*encoder, *decoder, mt.stage(loss, "embed"))
    source, text = mt.random.categorical(next(keys), torch.zeros(2, 2, 12, V - 1)) + 1
    source[0, 7:], text[1, 9:] = 0, 0
    return program, params, {"source": source, "target": text[:, :-1], "labels": text[:, 1:]}, None
