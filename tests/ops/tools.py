"""Gradients by two engines, and bytes alive."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def by_autograd(fn, *leaves, cotangents=None):
    """Outputs and gradients by ``torch.autograd.grad``; zeros where there is no path."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    out = fn(*leaves)
    outs = out if isinstance(out, tuple) else (out,)
    seeds = cotangents or [seeded(o) for o in outs]
    grads = torch.autograd.grad(outs, leaves, seeds, materialize_grads=True, allow_unused=True)
    return [o.detach() for o in outs], list(grads)


def by_func(fn, *leaves, cotangents=None):
    """The same by ``torch.func.vjp``, pulled as the engine does."""
    leaves = [leaf.detach().clone() for leaf in leaves]
    out, pull = torch.func.vjp(fn, *leaves)
    outs = out if isinstance(out, tuple) else (out,)
    seeds = cotangents or [seeded(o) for o in outs]
    with torch.no_grad():
        grads = pull(tuple(seeds) if isinstance(out, tuple) else seeds[0], retain_graph=False)
    return list(outs), list(grads)


ENGINES = {"autograd": by_autograd, "func": by_func}


def seeded(like, seed=0):
    """A fixed cotangent with no structure."""
    g = torch.Generator().manual_seed(seed + 17)
    return torch.randn(like.shape, generator=g, dtype=torch.float64).to(like.dtype)


def normal(*shape, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def close(got, expected, tolerance=1e-10):
    """Outputs and gradients of two calls agree."""
    for a, b in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def agree(fn, dense, *leaves, tolerance=1e-10):
    """Outputs and gradients equal the dense ones under both engines."""
    expected = by_autograd(dense, *leaves)
    for name, engine in ENGINES.items():
        got = engine(fn, *leaves)
        try:
            close(got, expected, tolerance)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


class Alive(TorchDispatchMode):
    """The most bytes of storages alive at once, among those made or seen inside."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak, self.largest = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, self.now())
        return out

    def now(self):
        """Bytes alive at this moment."""
        self.storages = {k: v for k, v in self.storages.items() if not v[0].expired()}
        return sum(size for _, size in self.storages.values())


def near(got, expected, tolerance):
    """Outputs and gradients agree relative to each tensor's largest entry."""
    for i, (a, b) in enumerate(zip(tree_leaves(got), tree_leaves(expected), strict=True)):
        assert a.isfinite().all() and a.shape == b.shape, i
        if a.numel():
            off = (a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30)
            assert off <= tolerance, f"{i}: off by {off:.2e} of its largest entry"
