"""Small programs, written in plain torch, that tests stream in odd ways."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import mtfunc as mt
from mtfunc import _tree


def embed(p, carry, batch):
    return F.embedding(batch["tokens"], p["weight"])


def block(p, x, batch):
    h = F.layer_norm(x, x.shape[-1:], p["scale"])
    return x + F.silu(h @ p["up"]) @ p["down"]


def head(emb, x, batch):
    logits = (x @ emb["weight"].T).flatten(0, 1)
    labels = batch["labels"].flatten()
    total = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return mt.Mean(total, (labels != -100).sum())


LM = mt.chain(mt.stage(embed, "embed"), mt.scan(block, "layers"), mt.stage(head, "embed"))
"""A tied language model: the embedding is read first and last."""


def lm_params(dtype=torch.float32, layers=3, width=8, vocab=11, seed=0):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=g) * 0.3).to(dtype)

    return {
        "embed": {"weight": normal(vocab, width)},
        "layers": [
            {
                "scale": normal(width) + 1,
                "up": normal(width, 2 * width),
                "down": normal(2 * width, width),
            }
            for _ in range(layers)
        ],
    }


def lm_batch(rows=2, tokens=5, vocab=11, seed=0, ignored=0):
    """A batch whose last ``ignored`` labels are not counted; -1 ignores all of them."""
    g = torch.Generator().manual_seed(seed)
    data = torch.randint(0, vocab, (rows, tokens + 1), generator=g)
    labels = data[:, 1:].clone()
    if ignored:
        labels.flatten()[0 if ignored < 0 else -ignored :] = -100
    return {"tokens": data[:, :-1].clone(), "labels": labels}


def momentum(rate=0.1, decay=0.5):
    """An optimizer with state, written here so that tests do not lean on the library's own."""

    def init(params):
        return {"velocity": {path: torch.zeros_like(leaf) for path, leaf in params.items()}}

    def update_(params, grads, state, step):
        for path, leaf in params.items():
            velocity = state["velocity"][path].mul_(decay).add_(grads[path])
            leaf.sub_(velocity * rate)

    return mt.Optimizer(init=init, update_=update_, name=f"momentum({rate}, {decay})")


def clone(tree):
    return _tree.map_leaves(lambda path, leaf: leaf.clone(), tree)


def flat(tree, path=""):
    """Leaves by path, written here so that tests do not lean on the library's own walk."""
    if isinstance(tree, dict | list | tuple):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {k: v for key, child in pairs for k, v in flat(child, f"{path}/{key}").items()}
    return {} if tree is None else {path: tree}


def bits(leaf):
    """The shape and the bytes of a tensor."""
    return (
        leaf.detach()
        .clone(memory_format=torch.contiguous_format)
        .reshape(*leaf.shape, 1)
        .view(torch.uint8)
    )


def assert_same(got, expected, what=""):
    """Bitwise equality of two pytrees, by path."""
    a, b = flat(got), flat(expected)
    assert a.keys() == b.keys(), f"{what}: {a.keys() ^ b.keys()}"
    for path, leaf in b.items():
        if a[path].dtype != leaf.dtype or not torch.equal(bits(a[path]), bits(leaf)):
            off = (a[path].double() - leaf.double()).abs().max()
            raise AssertionError(f"{what}: {path} differs by up to {off}")


def same(got, expected) -> bool:
    """Whether two pytrees are bitwise equal."""
    try:
        assert_same(got, expected)
    except AssertionError:
        return False
    return True
