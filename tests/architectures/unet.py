"""U-Net: halve the image on the way down, double it on the way up, and join what was seen before.

Ronneberger, Fischer and Brox (arXiv 1505.04597), figure 1, with padded convolutions: a label for
every pixel. A carry grows by one tensor for each level on the way down and gives it back on the
way up; each is saved once, however many stages it crosses. Shape suffixes:

    B batch    D channels    X rows    Y columns
"""

import itertools
import math

import torch
import torch.nn.functional as F
from einops import rearrange, reduce

import mtfunc as mt


def start(p, carry, batch):
    return (twice(p, batch["image"]),)


def down(p, carry, batch):
    *above, x_BDXY = carry
    half = reduce(x_BDXY, "B D (X two) (Y pair) -> B D X Y", "max", two=2, pair=2)
    return (*above, x_BDXY, twice(p, half))


def up(p, carry, batch):
    *above, skip_BDXY, x_BDXY = carry
    wide = F.conv_transpose2d(x_BDXY, p["expand"], stride=2)
    return (*above, twice(p, torch.cat([skip_BDXY, wide], 1)))


def twice(p, x_BDXY):
    x_BDXY = F.relu(F.conv2d(x_BDXY, p["first"], padding=1))
    return F.relu(F.conv2d(x_BDXY, p["second"], padding=1))


def loss(p, carry, batch):
    (x_BDXY,) = carry
    logits = rearrange(F.conv2d(x_BDXY, p["weight"]), "B D X Y -> (B X Y) D")
    total = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
    return mt.Mean(total, batch["labels"].numel())


def make(D=6, levels=2, size=8, classes=3):
    keys = iter(mt.random.split(mt.random.key(0), 99))

    def normal(*shape):
        return mt.random.normal(next(keys), shape) * (2 / math.prod(shape[1:])) ** 0.5

    def convolutions(inside, outside):
        return {"first": normal(outside, inside, 3, 3), "second": normal(outside, outside, 3, 3)}

    pairs = list(itertools.pairwise(D * 2**i for i in range(levels + 1)))
    params = {"start": convolutions(1, D), "out": {"weight": normal(classes, D, 1, 1)}}
    params["down"] = [convolutions(a, b) for a, b in pairs]
    params["up"] = [convolutions(b, a) | {"expand": normal(b, a, 2, 2)} for a, b in pairs[::-1]]
    program = mt.chain(
        mt.stage(start, "start"),
        *(mt.stage(down, f"down/{i}") for i in range(levels)),
        *(mt.stage(up, f"up/{i}") for i in range(levels)),
        mt.stage(loss, "out"),
    )
    image = mt.random.normal(next(keys), (2, 1, size, size))
    labels = mt.random.categorical(next(keys), torch.zeros(2, size, size, classes))
    return program, params, {"image": image, "labels": labels}, None
