"""Diffusion transformer: layers whose scale, shift and gate are told by the time and the class.

Peebles and Xie (arXiv 2212.09748), adaLN-Zero of figure 3, trained to predict the noise with the
cosine schedule of Nichol and Dhariwal (arXiv 2102.09672) without its offset. Time and noise are
drawn from the key, so that recomputation draws the same. Shape suffixes:

    B batch    T patches    D width    P pixels of a patch    H heads    C head width
"""

import math

import torch
import torch.nn.functional as F
from einops import rearrange

import mtfunc as mt


def noise(p, carry, batch, *, key, patch):
    """Draws a time and noise, and embeds the noisy patches and the condition."""
    image_BTP = rearrange(batch["image"], "B (X a) (Y b) -> B (X Y) (a b)", a=patch, b=patch)
    time_key, noise_key = mt.random.split(key)
    like = {"dtype": image_BTP.dtype, "device": image_BTP.device}
    time_B = mt.random.uniform(time_key, (len(image_BTP),), **like)
    noise_BTP = mt.random.normal(noise_key, image_BTP.shape, **like)
    angle_B11 = rearrange(time_B * math.pi / 2, "B -> B 1 1")
    noisy_BTP = angle_B11.cos() * image_BTP + angle_B11.sin() * noise_BTP
    turn = 1000 * 10_000.0 ** (-torch.linspace(0, 1, p["time"].shape[0] // 2, **like))
    waves = torch.cat([(time_B[:, None] * turn).sin(), (time_B[:, None] * turn).cos()], -1)
    condition_BD = F.silu(waves @ p["time"]) + F.embedding(batch["class"], p["class"])
    x_BTD = noisy_BTP @ p["patch"] + p["position"]
    return {"x": x_BTD, "condition": condition_BD, "noise": noise_BTP}


def block(p, carry, batch):
    x_BTD = carry["x"]
    modulation = (F.silu(carry["condition"]) @ p["modulation"])[:, None].chunk(6, -1)
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation
    x_BTD = x_BTD + gate * attention(p, norm(x_BTD) * (1 + scale) + shift)
    h_BTD = (norm(x_BTD) * (1 + mlp_scale) + mlp_shift) @ p["up"]
    x_BTD = x_BTD + mlp_gate * (F.gelu(h_BTD, approximate="tanh") @ p["down"])
    return carry | {"x": x_BTD}


def loss(p, carry, batch):
    shift, scale = (F.silu(carry["condition"]) @ p["modulation"])[:, None].chunk(2, -1)
    guess_BTP = (norm(carry["x"]) * (1 + scale) + shift) @ p["out"]
    return mt.Mean(((guess_BTP - carry["noise"]) ** 2).sum(), guess_BTP.numel())


def attention(p, x_BTD):
    q, k, v = rearrange(x_BTD @ p["qkv"], "B T (S H C) -> S B H T C", S=3, H=2)
    y_BHTC = F.scaled_dot_product_attention(q, k, v)
    return rearrange(y_BHTC, "B H T C -> B T (H C)") @ p["project"]


def norm(x):
    return F.layer_norm(x, x.shape[-1:])


def make(D=16, T=16, P=4, depth=2, classes=3, zero=0.02):
    """``zero`` scales the modulation: 0 as in the paper, which also makes most gradients 0."""
    keys = iter(mt.random.split(mt.random.key(0), 99))

    def normal(*shape):
        return mt.random.normal(next(keys), shape) * shape[0] ** -0.5

    shapes = {"qkv": (D, 3 * D), "project": (D, D), "up": (D, 4 * D), "down": (4 * D, D)}
    first = {"time": (D, D), "class": (classes, D), "patch": (P, D), "position": (T, D)}
    params = {"in": {name: normal(*shape) for name, shape in first.items()}}
    layers = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(depth)]
    params["layers"] = [p | {"modulation": zero * normal(D, 6 * D)} for p in layers]
    params["out"] = {"modulation": zero * normal(D, 2 * D), "out": normal(D, P)}
    draw = mt.stage(noise, "in", rng=True, static={"patch": math.isqrt(P)})
    program = mt.chain(draw, mt.scan(block, "layers"), mt.stage(loss, "out"))
    batch = {"image": mt.random.normal(next(keys), (2, 8, 8)), "class": torch.tensor([0, 2])}
    return program, params, batch, mt.random.key(1)
