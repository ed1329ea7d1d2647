"""Every architecture of this folder, streamed: the standard graph's own bits."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch

import mtfunc as mt
import tests.architectures as folder
from mtfunc import _tree
from mtfunc.testing import check
from tests.toys import assert_same, flat

NAMES = [m.name for m in pkgutil.iter_modules(folder.__path__) if not m.name.startswith("test_")]
MODULES = {name: importlib.import_module(f"tests.architectures.{name}") for name in NAMES}
DEVICES = ["cpu", "sim:0", "sim:1"]
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


@pytest.mark.parametrize("name", NAMES)
def test_streamed_equals_the_standard_graph(name):
    program, params, batch, key, trainable = build(name)
    ask = {"has_aux": True, "trainable": trainable}
    for given in (batch, [batch, other(batch)]):
        expected, grads = mt.reference.value_and_grad(program, **ask)(params, given, key)
        assert expected[0].dtype == torch.float64
        for path, leaf in flat(grads).items():
            assert leaf.isfinite().all() and leaf.any(), f"the gradient of {path} says nothing"
        for device, config in zip(DEVICES, CONFIGS, strict=True):
            f = mt.value_and_grad(program, device=device, config=config, **ask)
            assert_same(list(f(params, given, key)), [expected, grads], f"{device} {config}")


@pytest.mark.parametrize("name", NAMES)
def test_the_check_finds_nothing(name):
    program, params, batch, key, trainable = build(name, torch.float32)
    given = {"key": key, "trainable": trainable, "devices": ("sim",), "seeds": 5}
    report = check(program, params, [batch, other(batch)], **given)
    assert report.gradients == 5 and report.steps >= 1 and not report.warnings


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_short_and_names_its_paper(name):
    with open(MODULES[name].__file__) as file:
        assert len(file.readlines()) < 80
    assert "arXiv" in MODULES[name].__doc__
