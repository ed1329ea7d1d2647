"""Optimizers, each a pair of functions over the leaves of one unit, and learning-rate schedules."""

from mtfunc.optim.adamw import adamw
from mtfunc.optim.lion import lion
from mtfunc.optim.schedules import constant, cosine, linear, warmup, wsd
from mtfunc.optim.sgd import sgd

__all__ = ["adamw", "constant", "cosine", "linear", "lion", "sgd", "warmup", "wsd"]
