"""What takes no part in the loss has no cotangent, and zeros are none: 0 times infinity is NaN."""

from __future__ import annotations

import pytest
import torch

import mtfunc as mt
from tests.toys import assert_same

KEY = mt.random.key(0)


def some_rows(p, c, batch):
    """Rows that data choose; where it chooses none, ``aside`` is not used."""
    chosen = batch["route"].nonzero().squeeze(1)
    x = torch.sin(c["x"] @ p["w"])
    if chosen.numel():
        x = x.index_add(0, chosen, c["aside"][chosen] * p["b"])
    return {"x": x, "aside": c["aside"] + 1}


def noisy(p, c, batch, *, key):
    return c | {"x": c["x"] @ p["w"] + mt.random.normal(key, c["x"].shape)}


def by_rule(p, c, batch):
    return {"x": c["x"] * p["w"], "aside": c["aside"] + 1}


def rule(p, c, batch, cotangent):
    aside = cotangent["aside"]
    given = None if aside is None else aside.clone()
    return {"w": (c["x"] * cotangent["x"]).sum(0)}, {"x": p["w"] * cotangent["x"], "aside": given}


def loss(c, batch):
    return mt.Mean(c["x"].square().sum(), c["x"].numel())


STAGES = {
    "func": mt.stage(some_rows, "middle"),
    "autograd": mt.stage(some_rows, "middle", vjp="autograd"),
    "rule": mt.stage(by_rule, "ruled", vjp=rule),
    "rng": mt.stage(noisy, "noisy", rng=True),
}
PARAMS = {
    "first": {"w": torch.tensor([0.5, 2.0, -1.0]), "zero": torch.tensor([0.0, 0.0, 4.0, 1.0])},
    "middle": {"w": torch.linspace(-1, 1, 9).view(3, 3), "b": torch.ones(3)},
    "ruled": {"w": torch.tensor([1.5, 0.5, -2.0])},
    "noisy": {"w": torch.linspace(1, -1, 9).view(3, 3)},
}


def batch(*route):
    x = torch.arange(12.0).view(4, 3) / 7 + sum(route)
    return {"x": x, "route": torch.tensor(route)}


def first(p, carry, batch):
    return {"x": batch["x"] * p["w"], "aside": torch.sqrt(p["zero"])[:, None].expand(4, 3) * 1}


@pytest.mark.parametrize("device", ["cpu", "sim:3"])
@pytest.mark.parametrize("residuals", ["recompute", 1_000_000])
@pytest.mark.parametrize("names", [("func",), ("autograd",), ("rule",), ("rng",), tuple(STAGES)])
@pytest.mark.parametrize(
    "routes", [[(0, 0, 0, 0)], [(0, 0, 1, 1)], [(0, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 0)]]
)
def test_gradients_are_the_standard_graphs(device, residuals, names, routes):
    program = mt.chain(mt.stage(first, "first"), *(STAGES[n] for n in names), mt.stage(loss))
    read = {"first", *(STAGES[n].keys[0] for n in names)}
    params = {name: tree for name, tree in PARAMS.items() if name in read}
    batches = [batch(*route) for route in routes]
    given = batches if len(batches) > 1 else batches[0]
    config = mt.StreamConfig(slots=1, grad_slots=1, carries="host", residuals=residuals)
    f = mt.value_and_grad(program, device=device, config=config)
    # The second call is for other data than the program was first run with.
    for one in (batch(0, 0, 1, 1), given, batch(0, 0, 0, 0)):
        found = f(params, one, KEY)
        expected = mt.reference.value_and_grad(program)(params, one, KEY)
        assert_same(list(found), list(expected))
    assert torch.isfinite(found[1]["first"]["zero"]).all()


def test_a_stage_that_draws_is_traced_without_values():
    program = mt.chain(mt.stage(first, "first"), STAGES["rng"], mt.stage(loss))
    meta = {name: {k: x.to("meta") for k, x in PARAMS[name].items()} for name in ("first", "noisy")}
    assert "noisy" in str(mt.schedule(program, meta, batch(0, 0, 0, 0), key=KEY))
