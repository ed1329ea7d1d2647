"""Mamba-2's state-space scan: a decaying memory, computed chunk by chunk with matrix products.

Dao and Gu (arXiv 2405.21060), equation 7 and section 6, for each head::

    S_t = a_t S_{t-1} + d_t b_t x_t^T        y_t = S_t^T c_t + skip x_t        a_t = exp(-A d_t)

``b`` and ``c`` are shared by the heads. Shape suffixes:

    B batch    T tokens    D width    H heads    C head width    S state    K chunks of N tokens
"""

import torch
import torch.nn.functional as F
from einops import einsum, rearrange

import mtfunc as mt


def embed(p, carry, batch):
    return F.embedding(batch["tokens"], p["weight"])


def block(p, x_BTD, batch, *, chunk):
    h_BTD = norm(x_BTD)
    u_BTE, b_BTS, c_BTS = (F.silu(conv(p[n + "_conv"], h_BTD @ p[n])) for n in "xbc")
    u_BTHC = rearrange(u_BTE, "B T (H C) -> B T H C", H=len(p["a"]))
    step_BTH = F.softplus(h_BTD @ p["step"] + p["bias"])
    y_BTHC = scan(u_BTHC * step_BTH[..., None], -p["a"].exp() * step_BTH, b_BTS, c_BTS, chunk)
    y_BTE = rearrange(y_BTHC + p["skip"][:, None] * u_BTHC, "B T H C -> B T (H C)")
    return x_BTD + norm(y_BTE * F.silu(h_BTD @ p["gate"])) @ p["out"]


def scan(u_BTHC, log_a_BTH, b_BTS, c_BTS, chunk):
    """``S_t = a_t S_{t-1} + b_t u_t^T`` and ``y_t = S_t^T c_t``; ``chunk`` divides the tokens."""
    u = rearrange(u_BTHC, "B (K N) H C -> B K H N C", N=chunk)
    b, c = (rearrange(x, "B (K N) S -> B K N S", N=chunk) for x in (b_BTS, c_BTS))
    g = rearrange(log_a_BTH, "B (K N) H -> B K H N", N=chunk).cumsum(-1)
    decay = torch.exp((g[..., :, None] - g[..., None, :]).tril()).tril()
    scores = einsum(c, b, "B K N S, B K M S -> B K N M")[:, :, None] * decay
    left = (g[..., -1:] - g).exp()
    added = einsum(left, b, u, "B K H N, B K N S, B K H N C -> B K H S C")
    states = [torch.zeros_like(added[:, 0])]
    for k in range(added.shape[1] - 1):
        states.append(g[:, k, :, -1, None, None].exp() * states[-1] + added[:, k])
    past = einsum(c, torch.stack(states, 1), "B K N S, B K H S C -> B K H N C")
    return rearrange(scores @ u + g.exp()[..., None] * past, "B K H N C -> B (K N) H C")


def conv(weight, x_BTD):
    """A short causal convolution of each channel; ``weight`` is ``(D, 1, width)``."""
    past = F.pad(x_BTD.mT, (weight.shape[-1] - 1, 0))
    return F.conv1d(past, weight, groups=weight.shape[0]).mT


def norm(x):
    return F.rms_norm(x, x.shape[-1:])


def loss(emb, x_BTD, batch):
    logits_BTV = norm(x_BTD) @ emb["weight"].T
    total = F.cross_entropy(logits_BTV.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return mt.Mean(total, batch["labels"].numel())


def make(D=16, E=32, H=4, S=6, V=29, depth=2, chunk=4):
    keys = iter(mt.random.split(mt.random.key(0), 99))

    def normal(*shape):
        return mt.random.normal(next(keys), shape) * shape[0] ** -0.5

    shapes = {"x": (D, E), "b": (D, S), "c": (D, S), "gate": (D, E), "step": (D, H), "out": (E, D)}
    shapes |= {"x_conv": (E, 1, 3), "b_conv": (S, 1, 3), "c_conv": (S, 1, 3), "a": (H,)}
    shapes |= {"bias": (H,), "skip": (H,)}
    layers = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(depth)]
    params = {"embed": {"weight": normal(V, D)}, "layers": layers}
    repeated = mt.scan(block, "layers", static={"chunk": chunk})
    program = mt.chain(mt.stage(embed, "embed"), repeated, mt.stage(loss, "embed"))
    text = mt.random.categorical(next(keys), torch.zeros(2, 13, V))
    return program, params, {"tokens": text[:, :-1], "labels": text[:, 1:]}, None
