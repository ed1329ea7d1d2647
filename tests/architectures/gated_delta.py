"""Gated delta rule: a linear recurrence that decays its memory and overwrites what a key holds.

Gated DeltaNet (arXiv 2412.06464), equation 10, for each head and with the state transposed::

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T        o_t = S_t^T q_t

Within a chunk the writes ``u_t = b_t (v_t - a_t S_{t-1}^T k_t)`` solve one triangular system
(section 3.3), so that only whole chunks run one after the other. Shape suffixes:

    B batch    T tokens    D width    H heads    C head width    N tokens of a chunk
"""

import torch
import torch.nn.functional as F
from einops import rearrange

import mtfunc as mt


def embed(p, carry, batch):
    return F.embedding(batch["tokens"], p["weight"])


def block(p, x_BTD, batch, *, heads, chunk):
    h_BTD = norm(x_BTD)
    q, k, v = (split(F.silu(conv(p[n + "_conv"], h_BTD @ p[n])), heads) for n in "qkv")
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    log_a_BHT = -rearrange(p["decay"].exp() * F.softplus(h_BTD @ p["a"] + p["bias"]), "B T H->B H T")
    b_BHT = rearrange(torch.sigmoid(h_BTD @ p["b"]), "B T H -> B H T")
    y_BHTC = delta_rule(q, k, v, log_a_BHT, b_BHT, chunk)
    y_BTD = rearrange(norm(y_BHTC), "B H T C -> B T (H C)") * F.silu(h_BTD @ p["gate"])
    return x_BTD + y_BTD @ p["out"]


def delta_rule(q_BHTC, k_BHTC, v_BHTC, log_a_BHT, b_BHT, chunk):
    B, H, _, C = q_BHTC.shape
    state = q_BHTC.new_zeros(B, H, C, C)
    outputs = []
    pieces = (x.split(chunk, 2) for x in (q_BHTC, k_BHTC, v_BHTC, log_a_BHT, b_BHT))
    for q, k, v, log_a, b in zip(*pieces):
        g = log_a.cumsum(-1)  # the logarithm of the decay since the chunk began
        decay = torch.exp((g[..., :, None] - g[..., None, :]).tril()).tril()
        b, since = b[..., None], g.exp()[..., None]
        lower = (b * (k @ k.mT) * decay).tril(-1)
        writes = b * (v - since * (k @ state))
        u = torch.linalg.solve_triangular(lower, writes, upper=False, unitriangular=True)
        outputs.append(since * (q @ state) + (q @ k.mT * decay) @ u)
        left = (g[..., -1:] - g).exp()[..., None]
        state = since[..., -1:, :] * state + (left * k).mT @ u
    return torch.cat(outputs, 2)


def conv(weight, x_BTD):
    """A short causal convolution of each channel; ``weight`` is ``(D, 1, width)``."""
    past = F.pad(x_BTD.mT, (weight.shape[-1] - 1, 0))
    return F.conv1d(past, weight, groups=weight.shape[0]).mT


def split(x, heads):
    return rearrange(x, "B T (H C) -> B H T C", H=heads)


def norm(x):
    return F.rms_norm(x, x.shape[-1:])


def loss(emb, x_BTD, batch):
    logits_BTV = norm(x_BTD) @ emb["weight"].T
    total = F.cross_entropy(logits_BTV.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return mt.Mean(total, batch["labels"].numel())


def make(D=16, H=2, V=29, depth=2, chunk=4):
    keys = iter(mt.random.split(mt.random.key(0), 99))

    def normal(*shape):
        return mt.random.normal(next(keys), shape) * shape[0] ** -0.5

    shapes = {name: (D, D) for name in ("q", "k", "v", "gate", "out")} | {"a": (D, H), "b": (D, H)}
    shapes |= {"q_conv": (D, 1, 3), "k_conv": (D, 1, 3), "v_conv": (D, 1, 3)}
    shapes |= {"decay": (H,), "bias": (H,)}
    layers = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(depth)]
    params = {"embed": {"weight": normal(V, D)}, "layers": layers}
    scan = mt.scan(block, "layers", static={"heads": H, "chunk": chunk})
    program = mt.chain(mt.stage(embed, "embed"), scan, mt.stage(loss, "embed"))
    text = mt.random.categorical(next(keys), torch.zeros(2, 11, V))
    return program, params, {"tokens": text[:, :-1], "labels": text[:, 1:]}, None
