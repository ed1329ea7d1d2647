"""Kept pullbacks: the same bits as recomputation, fewer forward passes and loads, a kept budget."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mtfunc as mt
from mtfunc.engine import Engine
from tests.toys import LM, assert_same, clone, embed, head, lm_batch, lm_params, momentum

BUDGETS = [0, 3_000, 20_000, 10**9]
CONFIGS = [{}, {"slots": 1, "grad_slots": 1, "carries": "host"}, {"slots": 3, "carries": "host"}]
MICROS = [lm_batch(2, 5, seed=1, ignored=3), lm_batch(3, 4, seed=2, ignored=-1), lm_batch(seed=3)]


def attend(p, x, batch, *, key):
    """Attention, dropout and a complex product, so that kept graphs hold all kinds of things."""
    q, k, v = (x @ p["qkv"]).unflatten(-1, (3, 2, -1)).movedim(-3, 0).transpose(-2, -3)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2)
    turned = torch.view_as_complex(mixed.unflatten(-1, (-1, 2)).contiguous()) * p["turn"]
    return x + mt.random.dropout(key, 0.25, torch.view_as_real(turned).flatten(-2))


def odd(vjp):
    """A program of attention with dropout under a tied head, and its parameters."""
    program = mt.chain(
        mt.stage(embed, "embed", vjp=vjp),
        mt.scan(attend, "mix", rng=True, vjp=vjp),
        mt.stage(head, "embed", vjp=vjp),
    )
    g = torch.Generator().manual_seed(5)
    mix = [
        {
            "qkv": torch.randn(8, 24, generator=g) * 0.3,
            "turn": torch.randn(4, generator=g, dtype=torch.complex64),
        }
        for _ in range(3)
    ]
    return program, {"embed": lm_params()["embed"], "mix": mix}


@pytest.mark.parametrize("vjp", ["func", "autograd"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("device", ["cpu", "sim:1", "sim:2"])
def test_kept_residuals_change_no_bit(device, budget, vjp):
    program, params = odd(vjp)
    key = mt.random.key(7)
    for micros in (MICROS[:1], MICROS):
        expected = mt.reference.value_and_grad(program)(params, micros, key)
        for options in CONFIGS:
            config = mt.StreamConfig(residuals=budget, **options)
            got = mt.value_and_grad(program, device=device, config=config)(params, micros, key)
            assert_same(got, expected, f"{budget} {options} {len(micros)}")


@pytest.mark.parametrize("device", ["cpu", "sim:3"])
def test_training_with_kept_residuals_is_training_without(device):
    ends = []
    for budget in BUDGETS:
        config = mt.StreamConfig(residuals=budget)
        state = mt.init(LM, clone(lm_params(layers=4)), momentum())
        step = mt.train_step(LM, momentum(), device=device, config=config)
        for _ in range(3):
            state, _ = step(state, MICROS)
        ends.append(clone(state.params))
    for end in ends[1:]:
        assert_same(end, ends[0])


def plan(budget, micros, device="sim", layers=6):
    engine = Engine(LM, mode="grad", device=device, config=mt.StreamConfig(residuals=budget))
    return engine.plan(lm_params(layers=layers), micros, None)


def counts(schedule):
    """How often each layer is loaded, run forward and recomputed."""
    found = {}
    for i in range(6):
        ops = [op for op in schedule.operations if op.label == f"layers/{i}"]
        found[i] = (
            sum(op.kind == "load" for op in ops),
            sum(op.kind == "forward" for op in ops),
            sum(op.kind == "pullback" and not op.keep for op in ops),
        )
    return found


def test_kept_stages_are_loaded_once_and_run_once():
    none, some, every = (plan(budget, MICROS[2:]) for budget in (0, 9_000, 10**9))
    assert set(counts(none).values()) == {(2, 1, 1)}
    assert set(counts(every).values()) == {(1, 1, 0)}
    lean = [found == (1, 1, 0) for found in counts(some).values()]
    assert 0 < sum(lean) < 6 and lean == sorted(lean), "the last layers are kept, not the first"
    assert none.residuals == 0 < some.residuals <= 9_000 < every.residuals
    for schedule in (none, some, every):
        assert schedule.verify() == []
    assert ", kept" in str(some) and "residuals" in str(some)


def test_the_function_runs_as_often_as_the_schedule_says():
    calls = []

    def block(p, x, batch):
        calls.append(not x.is_meta and type(x) is torch.Tensor)
        return x + torch.tanh(x @ p["up"]) @ p["down"]

    def loss(p, x, batch):
        return (x * p["scale"]).square().mean()

    program = mt.chain(
        mt.stage(lambda w, c, batch: batch @ w, "w"),
        mt.scan(block, "layers"),
        mt.stage(loss, "end"),
    )
    layers = [{"up": x["up"], "down": x["down"]} for x in lm_params()["layers"]]
    params = {"w": torch.eye(8), "layers": layers, "end": {"scale": torch.ones(8)}}
    f = mt.value_and_grad(program, config=mt.StreamConfig(residuals=10**6))
    f(params, torch.ones(2, 8))
    calls.clear()
    f(params, torch.ones(2, 8))
    assert calls == [True] * 3


def held_by(block, p, x, **options):
    """Bytes of the tensors that plain autograd saves for a block, each storage once."""
    sizes = {}

    def pack(leaf):
        storage = leaf.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return leaf

    leaves = [leaf.requires_grad_() for leaf in p.values()]
    x = x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda leaf: leaf):
        out = block(p, x, None, **options)
    given = {leaf.untyped_storage().data_ptr() for leaf in (*leaves, x, out)}
    return sum(n for place, n in sizes.items() if place not in given)


def test_the_count_is_what_plain_autograd_saves():
    """A feed-forward block and attention of 256 tokens, whose 256 × 256 weights nobody keeps."""
    width, tokens = 32, 256

    def block(p, x, batch):
        q, k, v = (x @ p["qkv"]).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return x + F.silu(x @ p["up"]) @ p["down"]

    def params():
        g = torch.Generator().manual_seed(0)
        sizes = {"qkv": (width, 3 * width), "up": (width, 64), "down": (64, width)}
        return {name: torch.randn(size, generator=g) for name, size in sizes.items()}

    program = mt.chain(
        mt.stage(lambda w, c, batch: batch * w, "w"),
        mt.scan(block, "layers"),
        mt.stage(lambda w, x, batch: (x * w).mean(), "w"),
    )
    tree = {"w": torch.ones(width), "layers": [params() for _ in range(2)]}
    batch = torch.randn(2, tokens, width)
    config = mt.StreamConfig(residuals=10**9)
    schedule = Engine(program, mode="grad", config=config).plan(tree, [batch], None)
    first = schedule.operations[0]
    assert first.keep and schedule.residuals > 0
    expected = 2 * held_by(block, params(), batch.clone())
    # The first stage keeps batch * w's nothing; both layers keep the same.
    assert schedule.residuals == pytest.approx(expected, rel=0.02)


def test_what_cannot_be_counted_is_recomputed():
    def choose(p, x, batch):
        return x * p["a"] if bool(x.sum() > -1e9) else x

    program = mt.chain(
        mt.stage(lambda w, c, batch: batch * w, "w"),
        mt.scan(choose, "layers"),
        mt.stage(lambda w, x, batch: (x * w).mean(), "w"),
    )
    params = {"w": torch.ones(3), "layers": [{"a": torch.full((3,), 2.0)}] * 1}
    config = mt.StreamConfig(residuals=10**9)
    engine = Engine(program, mode="grad", config=config)
    schedule = engine.plan(params, [torch.ones(2, 3)], None)
    kept = {op.label for op in schedule.operations if op.kind == "pullback" and op.keep}
    assert "layers/0" not in kept
    got = mt.value_and_grad(program, config=config)(params, torch.ones(2, 3))
    assert_same(got, mt.reference.value_and_grad(program)(params, torch.ones(2, 3)))


@pytest.mark.parametrize("residuals", [-1, True, 1.5, "all", None])
def test_residuals_out_of_range(residuals):
    with pytest.raises(ValueError, match=r"residuals is .*; expected 'recompute' or a whole"):
        mt.StreamConfig(residuals=residuals)
