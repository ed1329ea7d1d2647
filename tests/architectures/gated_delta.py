"""Gated delta rule: a linear recurrence that decays its memory and overwrites what a key holds.

Gated DeltaNet (arXiv 2412.06464), equation 10, for each head and with the state transposed::

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T        o_t = S_t^T q_t

Within a chunk the writes ``u_t = b_t (v_t - a_t S_{t-1}^T k_t)`` solve one triangular system
(section 3.3), so that only whole chunks run one after the other. Shape suffixes:

    B batch    T tokens    D width    H heads    C head width    E = 3 H C
"""

import torch
import torch.nn.functional as F
from einops import rearrange

import mtfunc as mt


def embed(p, carry, batch):
    return F.embedding(batch["tokens"], p["weight"])


def block(p, x_BTD, batch, *, chunk):
    h_BTD = norm(x_BTD)
    mixed_BTE = F.silu(conv(p["conv"], h_BTD @ p["qkv"]))
    q, k, v = rearrange(mixed_BTE, "B T (S H C) -> S B H T C", S=3, H=len(p["decay"]))
    log_a_BTH = -p["decay"].exp() * F.softplus(h_BTD @ p["a"] + p["bias"])
    log_a_BHT, b_BHT = log_a_BTH.mT, torch.sigmoid(h_BTD @ p["b"]).mT
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    y_BHTC = norm(delta_rule(q, k, v, log_a_BHT, b_BHT, chunk))
    y_BTD = rearrange(y_BHTC, "B H T C -> B T (H C)") * F.silu(h_BTD @ p["gate"])
    return x_BTD + y_BTD @ p["out"]


def delta_rule(q_BHTC, k_BHTC, v_BHTC, log_a_BHT, b_BHT, chunk):
    state, outputs = torch.zeros_like(k_BHTC[:, :, 0, :, None] * v_BHTC[:, :, 0, None]), []
    given = (x.split(chunk, 2) for x in (q_BHTC, k_BHTC, v_BHTC, log_a_BHT, b_BHT))
    for q, k, v, log_a, b in zip(*given):
        g = log_a.cumsum(-1)  # the logarithm of the decay since the chunk began
        decay = torch.exp((g[..., :, None] - g[..., None, :]).tril()).tril()
        b, since, left = b[..., None], g.exp()[..., None], (g[..., -1:] - g).exp()[..., None]
        lower, writes = b * (k @ k.mT) * decay, b * (v - since * (k @ state))
        u = torch.linalg.solve_triangular(lower, writes, upper=False, unitriangular=True)
        outputs.append(since * (q @ state) + (q @ k.mT * decay) @ u)
        state = since[..., -1:, :] * state + (left * k).mT @ u
    return torch.cat(outputs, 2)


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


def make(D=16, H=2, V=29, depth=2, chunk=4):
    keys = iter(mt.random.split(mt.random.key(0), 99))

    def normal(*shape):
        return mt.random.normal(next(keys), shape) * shape[0] ** -0.5

    shapes = {"qkv": (D, 3 * D), "conv": (3 * D, 1, 3), "gate": (D, D), "out": (D, D)}
    shapes |= {"a": (D, H), "b": (D, H), "decay": (H,), "bias": (H,)}
    layers = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(depth)]
    params = {"embed": {"weight": normal(V, D)}, "layers": layers}
    repeated = mt.scan(block, "layers", static={"chunk": chunk})
    program = mt.chain(mt.stage(embed, "embed"), repeated, mt.stage(loss, "embed"))
    text = mt.random.categorical(next(keys), torch.zeros(2, 11, V))
    return program, params, {"tokens": text[:, :-1], "labels": text[:, 1:]}, None
