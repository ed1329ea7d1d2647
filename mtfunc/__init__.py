"""Train models that do not fit on the accelerator, written as pure functions on PyTorch."""

from mtfunc import numerics, ops, optim, random, reference, testing
from mtfunc._base import Aux, Batch, Carry, Key, Optimizer, Params
from mtfunc.api import evaluate, forward, schedule, value_and_grad
from mtfunc.config import StreamConfig
from mtfunc.functional import functional
from mtfunc.host.pack import pack
from mtfunc.host.transfer import Transfer, device_get, device_put
from mtfunc.io import restore, save
from mtfunc.loss import Mean
from mtfunc.optim import adamw, lion, sgd
from mtfunc.per_example import per_example_grad_norms
from mtfunc.program import Program, chain, scan, stage
from mtfunc.run import NonFiniteError
from mtfunc.train import TrainState, init, train_step

__version__ = "0.1.0"

__all__ = [
    "Aux",
    "Batch",
    "Carry",
    "Key",
    "Mean",
    "NonFiniteError",
    "Optimizer",
    "Params",
    "Program",
    "StreamConfig",
    "TrainState",
    "Transfer",
    "adamw",
    "chain",
    "device_get",
    "device_put",
    "evaluate",
    "forward",
    "functional",
    "init",
    "lion",
    "numerics",
    "ops",
    "optim",
    "pack",
    "per_example_grad_norms",
    "random",
    "reference",
    "restore",
    "save",
    "scan",
    "schedule",
    "sgd",
    "stage",
    "testing",
    "train_step",
    "value_and_grad",
]
