"""Per-example gradient norms against torch.func on the standard graph, and row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mtfunc as mt
from models import llama
from tests.toys import LM, block, embed, flat, head, lm_batch, lm_params

DEVICES = ["cpu", "sim:0", "sim:5"]


def row_losses(program, params, batch, key=None):
    """The composed functions as one torch.func program: gradients of all rows at once."""

    def loss(params, row):
        carry = None
        for stage in program.stages(params):
            subtrees = [mt._tree.get(params, path) for path in stage.keys]
            carry, _ = stage.apply(subtrees, carry, row, key, 0)
        return carry.value() if isinstance(carry, mt.Mean) else carry

    rows = {name: x.unsqueeze(1) for name, x in batch.items()}
    grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, rows)
    squares = [g.double().flatten(1).square().sum(1) for g in flat(grads).values()]
    return sum(squares).sqrt()


def by_hand(program, params, batch, key=None, trainable=None):
    """One standard graph for each row."""
    rows = next(x for x in batch.values() if x.dim()).shape[0]
    norms = []
    for i in range(rows):
        row = {name: x[i : i + 1] if x.dim() else x for name, x in batch.items()}
        f = mt.reference.value_and_grad(program, trainable=trainable)
        _, grads = f(params, row, key)
        norms.append(sum(g.abs().double().square().sum() for g in flat(grads).values()).sqrt())
    return torch.stack(norms)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tied_language_model(device, dtype):
    params, batch = lm_params(dtype), lm_batch(4, 6, ignored=8)
    got = mt.per_example_grad_norms(LM, device=device)(params, batch)
    assert got.shape == (4,) and got.dtype == torch.float64
    rtol = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(got, by_hand(LM, params, batch), rtol=rtol, atol=0)
    torch.testing.assert_close(got, row_losses(LM, params, batch), rtol=rtol, atol=0)
    assert got[3] == 0 and len(set(got.tolist())) == 4, "the last row counts no label"


def test_llama_streamed_by_two_slots_with_carries_on_the_host():
    config = llama.Config(vocab=31, depth=3, width=24, heads=6, kv_heads=2, ffn=20, context=12)
    program, params = llama.program(config), llama.init(config, mt.random.key(0))
    batch = lm_batch(3, 12, 31)
    how = mt.StreamConfig(slots=2, carries="host")
    got = mt.per_example_grad_norms(program, device="sim:1", config=how)(params, batch)
    torch.testing.assert_close(got, by_hand(program, params, batch), rtol=1e-5, atol=0)
    assert torch.equal(got, mt.per_example_grad_norms(program)(params, batch))


def test_frozen_leaves_do_not_count():
    def trainable(path, leaf):
        return leaf.dim() == 2 and path != "embed/weight"

    params, batch = lm_params(torch.float64), lm_batch(3)
    got = mt.per_example_grad_norms(LM, trainable=trainable)(params, batch)
    expected = by_hand(LM, params, batch, trainable=trainable)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    assert (got < by_hand(LM, params, batch)).all()


def start(p, carry, batch):
    return {"x": batch["x"] @ p["w"], "mask": batch["x"] > 0, "none": None}


def turn(p, shared, c, batch, *, key):
    x = mt.random.dropout(key, 0.25, c["x"]) * batch["scale"]
    z = torch.view_as_complex(x.unflatten(-1, (2, 2))) * p["z"]
    x = torch.view_as_real(z).flatten(-2)
    return {**c, "x": torch.where(c["mask"], x, c["x"]) + shared["b"]}, x.mean()


def end(p, c, batch):
    return mt.Mean(c["x"].square().sum(), 3) + 0.5 * mt.Mean((c["x"] * p["w"][0]).sum(), 7)


def double(p, x, batch):
    return x * p["s"]


def double_rule(p, x, batch, cotangent):
    return {"s": (cotangent * x).sum()}, cotangent * p["s"]


def test_keys_aux_masks_complex_numbers_tied_weights_and_scalars_of_the_batch():
    program = mt.chain(
        mt.stage(start, "a"),
        mt.scan(turn, "turns", "b", rng=True, has_aux=True),
        mt.stage(end, "a"),
    )
    g = torch.Generator().manual_seed(0)

    def normal(*shape, dtype=torch.float64):
        return torch.randn(*shape, generator=g, dtype=dtype)

    turns = [{"z": normal(2, dtype=torch.complex128)} for _ in range(3)]
    params = {"a": {"w": normal(4, 4)}, "turns": turns, "b": {"b": normal(4), "n": None}}
    batch = {"x": normal(5, 4), "scale": torch.tensor(0.7, dtype=torch.float64)}
    key = mt.random.key(3)
    for device in DEVICES:
        got = mt.per_example_grad_norms(program, device=device)(params, batch, key)
        torch.testing.assert_close(got, by_hand(program, params, batch, key), rtol=1e-12, atol=0)


def test_a_pullback_rule_is_used_for_each_row():
    def wrong(p, x, batch, cotangent):
        grads, back = double_rule(p, x, batch, cotangent)
        return {"s": 2 * grads["s"]}, back

    params = {"a": {"w": torch.eye(4)}, "d": {"s": torch.tensor(3.0)}}
    batch = {"x": torch.arange(8.0).view(2, 4)}

    def chain(rule):
        first = mt.stage(lambda p, c, batch: batch["x"] @ p["w"], "a")
        last = mt.stage(lambda x, batch: x.square().sum(), name="end")
        return mt.chain(first, mt.stage(double, "d", vjp=rule), last)

    right = mt.per_example_grad_norms(chain(double_rule))(params, batch)
    torch.testing.assert_close(right, by_hand(chain("func"), params, batch), rtol=1e-6, atol=0)
    assert (mt.per_example_grad_norms(chain(wrong))(params, batch) > right).all()
    ending = mt.chain(mt.stage(lambda p, c, b: (b["x"] @ p["w"]).sum(), "a", vjp=double_rule))
    with pytest.raises(ValueError, match=r"the last stage, '<lambda>', has a pullback rule"):
        mt.per_example_grad_norms(ending)


def test_a_list_of_micro_batches_gives_a_list():
    params, micros = lm_params(), [lm_batch(2, 5, seed=1), lm_batch(3, 4, seed=2)]
    f = mt.per_example_grad_norms(LM)
    assert [norms.shape for norms in f(params, micros)] == [(2,), (3,)]
    assert torch.equal(f(params, micros)[1], f(params, micros[1]))


def test_parameters_are_left_alone_and_memory_is_that_of_one_unit():
    params = lm_params(layers=6)
    before = [x.clone() for x in flat(params).values()]
    seen: list[int] = []
    plain = torch.linalg.vector_norm

    def watch(x: Tensor, *args, **options):
        seen.append(x.numel())
        return plain(x, *args, **options)

    torch.linalg.vector_norm = watch
    try:
        mt.per_example_grad_norms(LM)(params, lm_batch(2))
    finally:
        torch.linalg.vector_norm = plain
    assert all(torch.equal(x, y) for x, y in zip(before, flat(params).values()))
    assert sorted(seen) == sorted(2 * x.numel() for x in before), "each leaf once"


@pytest.mark.parametrize(
    "batch, message",
    [
        ({"x": torch.ones(2, 3), "y": torch.ones(3)}, r"the same for all.*'x' has 2, 'y' has 3"),
        ({"x": torch.ones(())}, r"there is none"),
        ({"x": torch.ones(0, 3)}, r"at least 1; 'x' has 0"),
    ],
)
def test_rows_that_do_not_agree(batch, message):
    program = mt.chain(mt.stage(lambda p, c, b: (b["x"] * p["w"]).sum(), "a"))
    with pytest.raises(ValueError, match=message):
        mt.per_example_grad_norms(program)({"a": {"w": torch.ones(3)}}, batch)


def test_layers_are_traced_once():
    calls = []

    def counted(p, x, batch):
        calls.append(x.is_meta)
        return block(p, x, batch)

    program = mt.chain(
        mt.stage(embed, "embed"), mt.scan(counted, "layers"), mt.stage(head, "embed")
    )
    mt.per_example_grad_norms(program)(lm_params(layers=8), lm_batch())
    assert sum(calls) < 8
