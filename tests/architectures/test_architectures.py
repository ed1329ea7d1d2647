"""Every architecture of this folder, streamed: the standard graph's own bits."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch

import mtfunc as mt
import tests.architectures as folder
from mtfunc import _tree
from tests.toys import assert_same, flat

NAMES = [m.name for m in pkgutil.iter_modules(folder.__path__) if not m.name.startswith("test_")]
MODULES = {name: importlib.import_module(f"tests.architectures.{name}") for name in NAMES}
DEVICES = ["cpu", *(f"sim:{seed}" for seed in range(4))]
CONFIGS = [
    mt.StreamConfig(),
    mt.StreamConfig(slots=1, grad_slots=1, carries="host"),
    mt.StreamConfig(slots=3, carries="host"),
]


def build(name, dtype=torch.float64):
    """What ``make`` returns, in another dtype, and which leaves learn."""
    program, params, batch, key = MODULES[name].make()

    def cast(_, leaf):
        return leaf.to(dtype) if leaf.is_floating_point() else leaf

    params, batch = _tree.map_leaves(cast, params), _tree.map_leaves(cast, batch)
    return program, params, batch, key, getattr(MODULES[name], "trainable", None)


def other(batch):
    """A second micro-batch: one row, in another order of its last axis where that is allowed."""
    return _tree.map_leaves(lambda _, leaf: leaf[1:].flip(-1), batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_streamed_equals_the_standard_graph(name, dtype):
    program, params, batch, key, trainable = build(name, dtype)
    ask = {"has_aux": True, "trainable": trainable}
    for given in (batch, [batch, other(batch)]):
        expected, grads = mt.reference.value_and_grad(program, **ask)(params, given, key)
        assert expected[0].dtype == dtype
        for path, leaf in flat(grads).items():
            assert leaf.isfinite().all() and leaf.any(), f"the gradient of {path} says nothing"
        for number, device in enumerate(DEVICES):
            config = CONFIGS[number % len(CONFIGS)]
            f = mt.value_and_grad(program, device=device, config=config, **ask)
            assert_same(list(f(params, given, key)), [expected, grads], f"{device} {config}")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_complete_and_short(name):
    with open(MODULES[name].__file__) as file:
        text = file.read()
    assert len(text.splitlines()) < 80
    assert "arXiv" in MODULES[name].__doc__
