"""gpt2 and llama, streamed on the processor and on the simulator: the standard graph's own bits."""

from __future__ import annotations

import pytest
import torch

import mtfunc as mt
from models import gpt2, llama
from tests.conftest import TOLERANCE
from tests.toys import assert_same, clone, flat, lm_batch

MODELS = {
    "gpt2": (gpt2, gpt2.Config(depth=3, width=16, heads=4, vocab=31, context=12)),
    "llama": (
        llama,
        llama.Config(vocab=31, depth=3, width=24, heads=6, kv_heads=2, ffn=20, context=12),
    ),
    "llama-tied": (
        llama,
        llama.Config(
            vocab=31, depth=2, width=24, heads=6, kv_heads=2, ffn=20, context=12, tied=True
        ),
    ),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
CONFIGS = [
    mt.StreamConfig(),
    mt.StreamConfig(slots=1, grad_slots=1, carries="host"),
    mt.StreamConfig(slots=3, carries="host"),
]
SEEDS = 200
UNEQUAL = [
    lm_batch(2, 12, 31, seed=1, ignored=5),
    lm_batch(3, 9, 31, seed=2, ignored=-1),
    lm_batch(1, 12, 31, seed=3),
]
ONE = lm_batch(2, 12, 31, seed=4, ignored=3)

each_model = pytest.mark.parametrize("name", MODELS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def build(name, dtype):
    module, config = MODELS[name]
    return (
        module.program(config),
        module.init(config, mt.random.key(0), dtype=dtype),
        module,
        config,
    )


def micro_losses(program, params, batches):
    """Plain torch: each micro-batch through all stages, one after the other."""
    for batch in batches:
        carry = None
        for stage in program.stages(params):
            subtrees = [mt._tree.get(params, key) for key in stage.keys]
            carry = stage.fn(*subtrees, carry, batch, **dict(stage.static))
        (term,) = carry.terms
        yield term.total, term.count


def plain_torch(program, params, batches):
    """A training loop's gradients: ``backward`` on each micro-batch's share of the mean."""
    params = mt._tree.map_leaves(lambda _, leaf: leaf.detach().clone().requires_grad_(), params)
    with torch.no_grad():
        count = sum(count for _, count in micro_losses(program, params, batches))
    loss = 0
    for total, _ in micro_losses(program, params, batches):
        share = total / count
        share.backward()
        loss = loss + share.detach()
    return loss, mt._tree.map_leaves(lambda _, leaf: leaf.grad, params)


@each_model
@each_dtype
def test_streamed_equals_the_standard_graph(name, dtype):
    program, params, _, _ = build(name, dtype)
    for batch in (ONE, UNEQUAL):
        expected = mt.reference.value_and_grad(program)(params, batch)
        devices = ["cpu", *(f"sim:{seed}" for seed in range(SEEDS))]
        for number, device in enumerate(devices):
            config = CONFIGS[number % len(CONFIGS)]
            if batch is UNEQUAL and number % 4:
                continue
            got = mt.value_and_grad(program, device=device, config=config)(params, batch)
            assert_same(list(got), list(expected), f"{device} {config}")


@each_model
@each_dtype
def test_streamed_equals_plain_torch(name, dtype):
    program, params, _, _ = build(name, dtype)
    loss, grads = mt.value_and_grad(program)(params, ONE)
    assert_same([loss, grads], list(plain_torch(program, params, [ONE])))
    loss, grads = mt.value_and_grad(program)(params, UNEQUAL)
    plain, plain_grads = plain_torch(program, params, UNEQUAL)
    assert torch.allclose(loss, plain, rtol=TOLERANCE[dtype])
    for path, leaf in flat(plain_grads).items():
        tied = name != "llama" and path == "/embed/weight"
        if not tied:
            assert torch.equal(flat(grads)[path], leaf), path
        else:
            atol = TOLERANCE[dtype] * leaf.abs().max()
            assert torch.allclose(flat(grads)[path], leaf, rtol=TOLERANCE[dtype], atol=atol), path


@each_model
@each_dtype
@pytest.mark.parametrize("batches", [ONE, UNEQUAL], ids=["one", "three unequal"])
def test_parameters_after_three_steps(name, dtype, batches):
    """The optimizer is torch's own, fed by the standard graph."""
    program, params, _, _ = build(name, dtype)
    rates = [1e-2, 5e-3, 1e-3]
    leaves = clone(params)
    adam = torch.optim.AdamW(list(flat(leaves).values()), lr=1.0, weight_decay=0.1, fused=True)
    losses = []
    for rate in rates:
        loss, grads = mt.reference.value_and_grad(program)(leaves, batches)
        losses.append(loss)
        for path, leaf in flat(leaves).items():
            leaf.grad = flat(grads)[path]
        adam.param_groups[0]["lr"] = rate
        adam.step()
    assert any(not torch.equal(a, b) for a, b in zip(flat(leaves).values(), flat(params).values()))
    for number, device in enumerate(["cpu", *(f"sim:{seed}" for seed in range(20))]):
        optimizer = mt.adamw(rates.__getitem__, weight_decay=0.1)
        state = mt.init(program, clone(params), optimizer)
        config = CONFIGS[number % len(CONFIGS)]
        step = mt.train_step(program, optimizer, device=device, config=config)
        for loss in losses:
            state, metrics = step(state, batches)
            assert_same(metrics["loss"], loss, device)
        assert_same(state.params, leaves, device)


def test_untied_training_equals_a_plain_torch_loop_of_micro_batches():
    program, params, _, _ = build("llama", torch.float32)
    leaves = clone(params)
    adam = torch.optim.AdamW(list(flat(leaves).values()), lr=1e-2, weight_decay=0.0, fused=True)
    optimizer = mt.adamw(1e-2, weight_decay=0.0)
    state, step = mt.init(program, clone(params), optimizer), mt.train_step(program, optimizer)
    for _ in range(3):
        _, grads = plain_torch(program, leaves, UNEQUAL)
        for path, leaf in flat(leaves).items():
            leaf.grad = flat(grads)[path]
        adam.step()
        state, _ = step(state, UNEQUAL)
    assert_same(state.params, leaves)


def test_all_labels_ignored_is_a_loss_of_zero_with_zero_gradients():
    program, params, _, _ = build("llama", torch.float32)
    batches = [lm_batch(2, 12, 31, ignored=-1), lm_batch(1, 12, 31, ignored=-1)]
    loss, grads = mt.value_and_grad(program)(params, batches)
    assert loss == 0
    assert all(torch.equal(leaf, torch.zeros_like(leaf)) for leaf in flat(grads).values())


@each_model
def test_two_threads(name):
    """Widths at which kernels split their work."""
    module, _ = MODELS[name]
    config = {"gpt2": "gpt2-tiny", "llama": "llama-tiny", "llama-tied": "llama-tiny"}[name]
    config = module.CONFIGS[config]
    program, params = module.program(config), module.init(config, mt.random.key(1))
    batch = lm_batch(4, 128, config.vocab, seed=5)
    torch.set_num_threads(2)
    try:
        expected = mt.reference.value_and_grad(program)(params, batch)
        for device in ("cpu", "sim:1", "sim:2"):
            got = mt.value_and_grad(program, device=device)(params, batch)
            assert_same(list(got), list(expected), device)
    finally:
        torch.set_num_threads(1)


def test_loads_recomputations_and_their_order():
    """Two loads of each unit, one forward and one recomputation; the turn loads nothing again."""
    program, params, _, _ = build("llama", torch.float32)
    schedule = mt.schedule(program, params, UNEQUAL)
    count = {
        kind: [op.label for op in schedule.operations if op.kind == kind]
        for kind in ("load", "forward", "pullback", "update")
    }
    layers = [f"layers/{i}" for i in range(3)]
    loads = [label for label in count["load"] if label != "batch"]
    assert loads == ["embed", *layers, "head", "norm", *reversed(layers), "embed"]
    stages = ["embed", *layers, "loss"]
    assert count["forward"] == [name for name in stages for _ in range(3)]
    assert count["pullback"] == [name for name in reversed(stages) for _ in range(3)]
    assert count["update"] == ["norm", "head", *reversed(layers), "embed"]
    one = mt.schedule(program, params, ONE)
    kept = [(op.kind, op.label) for op in one.operations if op.keep]
    assert kept == [("forward", "loss"), ("pullback", "loss")]
