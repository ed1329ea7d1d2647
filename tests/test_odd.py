"""Odd carries, parameters and stages: streamed equals the standard graph, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mtfunc as mt
from tests.toys import assert_same, flat, lm_batch, lm_params

DEVICES = ["cpu", *(f"sim:{seed}" for seed in range(6))]
CONFIGS = [
    mt.StreamConfig(),
    mt.StreamConfig(slots=1, grad_slots=1, carries="host"),
    mt.StreamConfig(slots=4, carries="host"),
]


def check(program, params, batch, key=None, trainable=None, plain=None):
    """Streams a program every way and compares with the oracle, and with ``plain`` torch."""
    ask = {"has_aux": True, "trainable": trainable}
    (loss, aux), grads = mt.reference.value_and_grad(program, **ask)(params, batch, key)
    if plain is not None:
        assert_same([loss, grads], list(plain), "reference against plain torch")
    for device in DEVICES:
        for config in CONFIGS:
            f = mt.value_and_grad(program, device=device, config=config, **ask)
            (got, got_aux), got_grads = f(params, batch, key)
            where = f"{device} {config}"
            assert_same(got, loss, where)
            assert_same(got_aux, aux, where)
            assert_same(got_grads, grads, where)
    return loss, grads


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def square(x, batch):
    return (x**2).sum()


def linear(p, x, batch):
    return torch.tanh((batch["x"] if x is None else x) @ p["w"])


BATCH = {"x": randn(3, 4, seed=9)}


def linears(n, *keys):
    return {key: {"w": randn(4, 4, seed=i)} for i, key in enumerate(keys[:n])}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("micros", [1, 3])
def test_tied_language_model(dtype, micros):
    from tests.toys import LM

    batches = [lm_batch(2, seed=1), lm_batch(3, seed=2, ignored=4), lm_batch(1, seed=3, ignored=-1)]
    check(LM, lm_params(dtype), batches[:micros] if micros > 1 else batches[0])


def test_tied_by_three_stages_and_read_twice_in_one():
    def twice(p, q, x, batch):
        x = batch["x"] if x is None else x
        return torch.tanh(x @ p["w"] @ q["w"] + x @ p["w"].T)

    stage = mt.stage(twice, "a", "a")
    program = mt.chain(stage, mt.stage(linear, "b"), stage, stage, mt.stage(square))
    params = linears(2, "a", "b")

    w, v = (params[k]["w"].clone().requires_grad_() for k in "ab")
    x = twice({"w": w}, {"w": w}, None, BATCH)
    x = linear({"w": v}, x, BATCH)
    x = twice({"w": w}, {"w": w}, twice({"w": w}, {"w": w}, x, BATCH), BATCH)
    loss = square(x, BATCH)
    dw, dv = torch.autograd.grad(loss, [w, v])
    plain = (loss.detach(), {"a": {"w": dw}, "b": {"w": dv}})
    check(program, params, BATCH, plain=plain)
    check(program, params, [BATCH, {"x": randn(2, 4, seed=8)}])


def test_shared_block_is_loaded_once_for_each_pass():
    def shared(p, block, x, batch):
        return linear(block, x, batch) * p["gain"]

    params = {"layers": [{"gain": randn(4, seed=i)} for i in range(4)], "block": {"w": randn(4, 4)}}
    program = mt.chain(mt.scan(shared, "layers", "block", name="s"), mt.stage(square))
    with pytest.raises(ValueError, match="scan entry 's/0' changes the carry"):
        check(program, params, BATCH)

    def start(x, batch):
        return batch["x"]

    program = mt.chain(mt.stage(start), mt.scan(shared, "layers", "block"), mt.stage(square))
    check(program, params, BATCH)
    schedule = mt.schedule(program, params, BATCH)
    loads = [op.label for op in schedule.operations if op.kind == "load"]
    assert loads.count("block") == 2


def test_carry_with_none_integers_bools_and_dict_order():
    def first(p, carry, batch):
        h = batch["x"] @ p["w"]
        return {"z": h, "step": torch.tensor(3), "none": None, "mask": h > 0, "a": h.sin()}

    def second(p, c, batch):
        values = list(c.values())  # a stage may lean on the order in which the dict was made
        h = torch.where(c["mask"], values[0] @ p["w"], values[4])
        return {"z": h, "a": c["a"], "step": c["step"] + 1, "none": None, "mask": ~c["mask"]}

    def last(c, batch):
        return (c["z"] * c["step"] + c["a"]).sum()

    program = mt.chain(mt.stage(first, "a"), mt.stage(second, "b"), mt.stage(last))
    check(program, linears(2, "a", "b"), BATCH)


def test_skips_across_the_stack_are_saved_once():
    def down(p, c, batch):
        x = batch["x"] if c is None else c[0]
        kept = () if c is None else c[1:]
        return (linear(p, x, batch), *kept, x)

    def up(p, c, batch):
        x, *kept, skip = c
        return (linear(p, x, batch) + skip, *kept)

    keys = ["d0", "d1", "d2", "u2", "u1", "u0"]
    stages = [mt.stage(down if key[0] == "d" else up, key) for key in keys]
    program = mt.chain(*stages, mt.stage(lambda c, batch: (c[0] ** 2).sum(), name="loss"))
    params = linears(6, *keys)
    check(program, params, BATCH)
    config = mt.StreamConfig(carries="host")
    schedule = mt.schedule(program, params, BATCH, config)
    saved = [b.name for op in schedule.operations if op.kind == "save" for b in op.reads["source"]]
    assert len(saved) == len(set(saved))
    assert all("carry/down" in name or "carry/up" in name for name in saved)


def test_encoder_decoder_memory_that_every_layer_reads():
    def start(enc, c, batch):
        return linear(enc, None, batch), batch["x"] * 2

    def decode(p, c, batch):
        memory, y = c
        return memory, torch.tanh(y @ p["w"] + F.softmax(y @ memory.T, -1) @ memory)

    def end(c, batch):
        return (c[0].sum() + c[1] ** 2).sum()

    params = {"enc": {"w": randn(4, 4)}, "dec": [{"w": randn(4, 4, seed=i)} for i in range(4)]}
    program = mt.chain(mt.stage(start, "enc"), mt.scan(decode, "dec"), mt.stage(end))
    check(program, params, BATCH)
    check(program, params, [BATCH, {"x": randn(2, 4)}, {"x": randn(5, 4)}])


def test_absent_is_not_zero():
    """An unused output whose derivative is infinite must leave no NaN behind."""

    def first(p, c, batch):
        h = batch["x"] * p["w"]
        return {"h": h, "unused": torch.sqrt(p["zero"]).sum()}

    def second(p, c, batch):
        return {"h": c["h"] * p["w"], "unused": c["unused"]}

    def last(c, batch):
        return c["h"].sum()

    params = {"a": {"w": randn(4), "zero": torch.zeros(2)}, "b": {"w": randn(4)}}
    program = mt.chain(mt.stage(first, "a"), mt.stage(second, "b"), mt.stage(last))
    for vjp in ("func", "autograd"):
        program = mt.chain(
            mt.stage(first, "a", vjp=vjp), mt.stage(second, "b", vjp=vjp), mt.stage(last, vjp=vjp)
        )
        _, grads = check(program, params, BATCH)
        assert torch.equal(grads["a"]["zero"], torch.zeros(2))
        assert not any(leaf.isnan().any() for leaf in flat(grads).values())


def test_unused_zero_dim_zero_size_integer_and_frozen_leaves():
    def first(p, c, batch):
        return (batch["x"] @ p["w"]) * p["scale"] + p["empty"].sum() + p["table"][1]

    params = {
        "a": {
            "w": randn(4, 4),
            "scale": torch.tensor(1.5),
            "empty": torch.zeros(0, 3),
            "table": torch.tensor([1, 2, 3]),
            "flag": torch.tensor(True),
            "nothing": None,
            "unused": randn(5),
        },
        "b": {"w": randn(4, 4, seed=1)},
    }
    program = mt.chain(mt.stage(first, "a"), mt.stage(linear, "b"), mt.stage(square))
    _, grads = check(program, params, BATCH)
    assert grads["a"]["table"] is None and grads["a"]["flag"] is None
    assert grads["a"]["empty"].shape == (0, 3)
    assert torch.equal(grads["a"]["unused"], torch.zeros(5))
    _, grads = check(program, params, BATCH, trainable=lambda path, leaf: path != "a/w")
    assert grads["a"]["w"] is None and grads["b"]["w"] is not None
    _, grads = check(program, params, BATCH, trainable=lambda path, leaf: path.startswith("b"))
    schedule = mt.schedule(program, params, BATCH, mode="grad")
    assert any(op.kind == "pullback" and op.label == "first" for op in schedule.operations)


def test_carries_of_odd_layout_and_outputs_that_share_memory():
    def first(p, c, batch):
        h = batch["x"] @ p["w"]
        return {
            "t": h.T,
            "part": (h @ p["w"])[:, 1:3],
            "wide": h.sum(1, keepdim=True).expand(3, 4),
            "same": h,
            "view": h.view(-1),
            "param": p["w"],
            "row": p["w"][1],
            "batch": batch["x"],
        }

    def second(p, c, batch):
        y = c["t"].T.exp() @ p["w"] + c["part"].exp().sum() * c["wide"]
        return y * c["same"] + c["view"].view(3, 4) + c["batch"] @ c["param"] + c["row"]

    program = mt.chain(mt.stage(first, "a"), mt.stage(second, "b"), mt.stage(square))
    check(program, linears(2, "a", "b"), BATCH)
    check(program, linears(2, "a", "b"), [BATCH, {"x": randn(3, 4, seed=4)}])


def test_parameters_of_odd_layout():
    params = {"a": {"w": randn(4, 4).T}, "b": {"w": randn(8, 8)[::2, ::2]}}
    program = mt.chain(mt.stage(linear, "a"), mt.stage(linear, "b"), mt.stage(square))
    check(program, params, BATCH)


def test_mixed_losses_and_aux():
    def first(p, x, batch):
        h = linear(p, None, batch)
        return (h, h.abs().sum()), {"mean": h.mean(), "count": 3}

    def layer(p, c, batch):
        h = linear(p, c[0], batch)
        return (h, c[1] + h.abs().sum()), h.mean()

    def last(c, batch):
        h, penalty = c
        return mt.Mean((h**2).sum(), h.numel()) + 0.1 * mt.Mean(penalty, 7) + 2.0 * h.mean()

    params = {"a": {"w": randn(4, 4)}, "l": [{"w": randn(4, 4, seed=i)} for i in range(3)]}
    program = mt.chain(
        mt.stage(first, "a", has_aux=True), mt.scan(layer, "l", has_aux=True), mt.stage(last)
    )
    check(program, params, BATCH)
    check(program, params, [BATCH, {"x": randn(7, 4)}])
    (_, aux), _ = mt.value_and_grad(program, has_aux=True)(params, BATCH)
    assert aux["l"].shape == (3,) and int(aux["first"]["count"]) == 3


def test_keys_fold_the_stage_name_and_the_micro_batch():
    def noisy(p, x, batch, *, key, rate):
        return mt.random.dropout(key, rate, linear(p, x, batch))

    params = {"a": {"w": randn(4, 4)}, "b": {"w": randn(4, 4, seed=1)}}
    stages = [mt.stage(noisy, k, rng=True, static={"rate": 0.5}, name=k) for k in "ab"]
    program = mt.chain(*stages, mt.stage(square))
    key = mt.random.key(7)
    check(program, params, BATCH, key)
    check(program, params, [BATCH, BATCH], key)
    f = mt.value_and_grad(program)
    assert f(params, BATCH, key)[0] != f(params, BATCH, mt.random.key(8))[0]
    with pytest.raises(ValueError, match=r"stage 'a' draws random numbers .* key is None"):
        f(params, BATCH)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_each_stage_micro_batch_step_and_entry_draws_numbers_of_its_own(device):
    def noisy(p, x, batch, *, key):
        noise = mt.random.uniform(key, (4,))
        return (batch["x"] if x is None else x) * p["w"][0], noise

    params = {"a": {"w": randn(4, 4)}, "l": [{"w": randn(4, 4)} for _ in range(3)]}
    options = {"rng": True, "has_aux": True}
    program = mt.chain(
        mt.stage(noisy, "a", **options), mt.scan(noisy, "l", **options), mt.stage(square)
    )
    f = mt.value_and_grad(program, has_aux=True, device=device)
    (_, auxes), _ = f(params, [BATCH, BATCH], mt.random.key(1))
    draws = [row for aux in auxes for row in (aux["noisy"], *aux["l"])]
    optimizer = mt.sgd(0.1)
    state, step = mt.init(program, params, optimizer), mt.train_step(program, optimizer)
    for _ in range(2):
        state, metrics = step(state, BATCH)
        draws += [metrics["aux"]["noisy"], *metrics["aux"]["l"]]
    assert len({tuple(row.tolist()) for row in draws}) == len(draws) == 16


def test_functions_and_statics_of_each_entry():
    def wide(p, x, batch, *, gain):
        return torch.tanh(x @ p["w"]) * gain

    def start(x, batch):
        return batch["x"]

    fns = [wide, lambda p, x, batch, *, gain: torch.sin(x @ p["w"]) + gain, wide]
    statics = [{"gain": 1.0}, {"gain": 2.0}, {"gain": 3.0}]
    program = mt.chain(mt.stage(start), mt.scan(fns, "l", static=statics), mt.stage(square))
    params = {"l": [{"w": randn(4, 4, seed=i)} for i in range(3)]}
    ws = [p["w"].clone().requires_grad_() for p in params["l"]]
    x = BATCH["x"]
    for fn, w, static in zip(fns, ws, statics):
        x = fn({"w": w}, x, BATCH, **static)
    loss = square(x, BATCH)
    grads = torch.autograd.grad(loss, ws)
    check(program, params, BATCH, plain=(loss.detach(), {"l": [{"w": g} for g in grads]}))


@pytest.mark.parametrize("vjp", ["func", "autograd"])
def test_shapes_that_depend_on_data_inside_a_stage(vjp):
    """A mixture of experts in which one expert gets no token."""

    def experts(p, x, batch):
        x = batch["x"] if x is None else x
        out = torch.zeros_like(x)
        for i, w in enumerate(p["experts"]):
            rows = (batch["route"] == i).nonzero().squeeze(1)
            if rows.numel():
                out = out.index_add(0, rows, torch.tanh(x[rows] @ w))
        return x + out

    params = {"a": {"experts": [randn(4, 4, seed=i) for i in range(3)]}, "b": {"w": randn(4, 4)}}
    program = mt.chain(mt.stage(experts, "a", vjp=vjp), mt.stage(linear, "b"), mt.stage(square))
    batch = {**BATCH, "route": torch.tensor([0, 2, 2])}
    _, grads = check(program, params, batch)
    assert torch.equal(grads["a"]["experts"][1], torch.zeros(4, 4))
    check(program, params, [batch, {**batch, "route": torch.tensor([1, 1, 1])}])


def test_kernels_that_functorch_cannot_trace():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            return grad * 3 * ctx.saved_tensors[0] ** 2

    def cubed(p, x, batch):
        return Cube.apply(linear(p, x, batch))

    params = linears(1, "a")
    program = mt.chain(mt.stage(cubed, "a", vjp="autograd"), mt.stage(square))
    check(program, params, BATCH)
    program = mt.chain(mt.stage(cubed, "a"), mt.stage(square))
    with pytest.raises(RuntimeError) as caught:
        mt.value_and_grad(program)(params, BATCH)
    assert any("vjp='autograd'" in note for note in caught.value.__notes__)


def test_a_pullback_rule_of_ones_own():
    def sign(p, x, batch):
        return torch.sign(x * p["scale"]), x

    def straight_through(p, x, batch, cotangent):
        grad, passed = cotangent
        assert passed is None
        return {"scale": (grad * x).sum(0)}, grad * p["scale"]

    params = {"a": {"w": randn(4, 4)}, "s": {"scale": randn(4, seed=2)}, "b": {"w": randn(4, 4)}}
    program = mt.chain(
        mt.stage(linear, "a"),
        mt.stage(sign, "s", vjp=straight_through),
        mt.stage(lambda p, c, batch: linear(p, c[0], batch) + c[1], "b", name="mix"),
        mt.stage(square),
    )
    check(program, params, BATCH)
    check(program, params, [BATCH, {"x": randn(2, 4)}])


def test_complex_parameters():
    def turn(p, x, batch):
        return (batch["x"].to(torch.complex64) * p["z"]).abs()

    params = {"a": {"z": torch.complex(randn(4), randn(4, seed=1))}, "b": {"w": randn(4, 4)}}
    check(mt.chain(mt.stage(turn, "a"), mt.stage(linear, "b"), mt.stage(square)), params, BATCH)


def test_a_loss_without_parameters_and_a_part_without_gradient():
    def mask(x, batch):
        return {"bias": batch["x"].exp(), "x": batch["x"]}

    def use(p, c, batch):
        return {"bias": c["bias"], "x": linear(p, c["x"] + c["bias"], batch)}

    program = mt.chain(
        mt.stage(mask),
        mt.stage(use, "a"),
        mt.stage(lambda c, batch: (c["x"] * c["bias"]).sum(), name="end"),
    )
    check(program, linears(1, "a"), BATCH)
    schedule = mt.schedule(program, linears(1, "a"), BATCH)
    assert not any(op.kind == "pullback" and op.label == "mask" for op in schedule.operations)
    program = mt.chain(mt.stage(lambda p, c, batch: p["w"].detach().sum(), "a", name="none"))
    _, grads = check(program, linears(1, "a"), BATCH)
    assert torch.equal(grads["a"]["w"], torch.zeros(4, 4))


def test_nested_keys_and_units():
    params = {
        "vision": {
            "patch": {"w": randn(4, 4)},
            "blocks": [{"w": randn(4, 4, seed=i)} for i in (1, 2)],
        },
        "text": [{"w": randn(4, 4, seed=3)}],
        "out": {"w": randn(4, 4, seed=4)},
    }
    program = mt.chain(
        mt.stage(linear, "vision/patch"),
        mt.scan(linear, "vision/blocks"),
        mt.stage(linear, "text/0"),
        mt.stage(
            lambda whole, out, x, batch: linear(out, linear(whole["patch"], x, batch), batch),
            "vision",
            "out",
            name="both",
        ),
        mt.stage(square),
    )
    check(program, params, BATCH)


@pytest.mark.parametrize("device", ["cpu", *(f"sim:{seed}" for seed in range(4))])
def test_a_leaf_is_not_updated_before_the_last_recomputation_that_reads_it(device):
    """The middle stage reads ``a`` and adds nothing to its gradient; ``unused`` has none at all."""

    def start(e, x, batch):
        return batch["x"] @ e["w"]

    def middle(a, b, x, batch):
        return torch.tanh(x * a["w"].detach().sum() * b["w"] + a["unused"].detach().sum())

    def end(a, x, batch):
        return ((x @ a["w"]) ** 2).sum()

    program = mt.chain(mt.stage(start, "e"), mt.stage(middle, "a", "b"), mt.stage(end, "a"))
    params = {
        "a": {"w": randn(4, 4, seed=1), "unused": randn(2, seed=2)},
        "b": {"w": randn(4, seed=3)},
        "e": {"w": randn(4, 4, seed=4)},
    }
    _, grads = mt.reference.value_and_grad(program)(params, BATCH)
    expected = {
        unit: {name: leaf - 0.5 * (grads[unit][name] + leaf) for name, leaf in leaves.items()}
        for unit, leaves in params.items()
    }

    def update_(params, grads, state, step):
        for path, leaf in params.items():
            leaf.sub_(0.5 * (grads[path] + leaf))

    optimizer = mt.Optimizer(init=lambda params: {}, update_=update_, name="decay")
    state = mt.init(program, params, optimizer)
    state, _ = mt.train_step(program, optimizer, device=device)(state, BATCH)
    assert_same(state.params, expected)


def test_a_rule_where_autograd_sees_no_gradient():
    """A straight-through estimator: the forward function alone has no derivative at all."""

    def sign(x, batch):
        return torch.where(x > 0, 1.0, -1.0)

    def straight_through(x, batch, cotangent):
        return (cotangent,)

    program = mt.chain(
        mt.stage(linear, "a"),
        mt.stage(sign, vjp=straight_through),
        mt.stage(lambda x, batch: (x * batch["x"]).sum(), name="end"),
    )
    _, grads = check(program, linears(1, "a"), BATCH)
    w = linears(1, "a")["a"]["w"].requires_grad_()
    expected = torch.autograd.grad(linear({"w": w}, None, BATCH), w, BATCH["x"])[0]
    assert torch.equal(grads["a"]["w"], expected)


def test_mixed_dtypes_of_losses():
    for total, count in [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
        (torch.float16, torch.int64),
    ]:

        def end(x, batch, total=total, count=count):
            return mt.Mean(x.sum().to(total), torch.tensor(3, dtype=count)) + x.mean()

        check(mt.chain(mt.stage(linear, "a"), mt.stage(end)), linears(1, "a"), BATCH)


def test_equal_statics_of_different_types_are_different_programs():
    def scaled(p, x, batch, *, s):
        return p["w"].sum() * (100 if isinstance(s, bool) else s)

    losses = []
    for s in (1, True, 1.0, 2):
        program = mt.chain(mt.stage(scaled, "a", static={"s": s}))
        losses.append(float(mt.value_and_grad(program)({"a": {"w": torch.ones(3)}}, BATCH)[0]))
    assert losses == [3.0, 300.0, 3.0, 6.0]


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_carries_aux_and_batches_that_share_a_parameters_memory_keep_their_values(device):
    def first(p, x, batch):
        return (p["w"].detach(), batch["x"]), {"row": p["w"][0], "all": p["w"]}

    def second(p, c, batch):
        return torch.tanh(c[1] @ c[0] @ p["w"]) @ batch["again"]

    def third(p, x, batch):
        return (x * p["w"].sum()).sum()

    program = mt.chain(
        mt.stage(first, "a", has_aux=True), mt.stage(second, "b"), mt.stage(third, "a")
    )
    optimizer = mt.adamw(0.1, weight_decay=0.5)
    state = mt.init(program, linears(2, "a", "b"), optimizer)
    batch = {**BATCH, "again": state.params["a"]["w"]}
    before = state.params["a"]["w"].clone()
    (_, aux), grads = mt.reference.value_and_grad(program, has_aux=True)(state.params, batch)
    aux = {name: leaf.clone() for name, leaf in aux["first"].items()}
    plain = [state.params[k]["w"].clone().requires_grad_() for k in "ab"]
    for leaf, key in zip(plain, "ab"):
        leaf.grad = grads[key]["w"].contiguous()
    torch.optim.AdamW(plain, lr=0.1, weight_decay=0.5, fused=True).step()
    state, metrics = mt.train_step(program, optimizer, device=device)(state, batch)
    assert_same([state.params[k]["w"] for k in "ab"], plain)
    assert_same(metrics["aux"]["first"], aux)
    assert not torch.equal(state.params["a"]["w"], before)


def test_one_container_in_two_places_is_not_tied():
    layer = {"w": torch.eye(4)}
    params = {"a": {"w": randn(4, 4)}, "l": [layer] * 3}
    program = mt.chain(mt.stage(linear, "a"), mt.scan(linear, "l"), mt.stage(square))
    _, grads = mt.reference.value_and_grad(program)(params, BATCH)
    expected = [layer["w"] - 0.1 * p["w"] for p in grads["l"]]
    optimizer = mt.sgd(0.1)
    with pytest.warns(UserWarning, match=r"'l/0/w' and 'l/1/w' are one tensor.*name its key"):
        state = mt.init(program, params, optimizer)
    state, _ = mt.train_step(program, optimizer)(state, BATCH)
    for got, leaf in zip(state.params["l"], expected):
        assert torch.allclose(got["w"], leaf)


def test_two_threads_share_one_function():
    from concurrent.futures import ThreadPoolExecutor

    from tests.toys import LM

    f, params = mt.value_and_grad(LM), lm_params()
    batches = [lm_batch(2, seed=i) for i in range(8)]
    expected = [mt.reference.value_and_grad(LM)(params, batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: f(params, batches[i % 8]), range(64)))
    for i, got in enumerate(found):
        assert_same(list(got), list(expected[i % 8]), str(i))


def gapped():
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1))[:, ::2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "leaf",
    [torch.ones(1, 3).expand(400, 3), torch.ones(()).expand(30), gapped(), gapped().T],
    ids=["rows", "scalar", "gaps", "transposed"],
)
def test_a_parameter_whose_elements_share_memory(device, leaf):
    """Its gradient has an element of its own for each, and overwrites no other buffer."""

    def scale(p, x, batch):
        return {"x": batch * p["w"], "p": p["b"].expand(batch.shape)}

    def loss(p, x, batch):
        return (x["x"] * x["p"]).sum() * p["w"].sum()

    program = mt.chain(mt.stage(scale, "a"), mt.stage(loss, "a"))
    params = {"a": {"w": leaf, "b": torch.ones(1).expand(leaf.shape[-1])}}
    batch = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(0))
    expected = mt.reference.value_and_grad(program)(params, batch)
    assert_same(mt.value_and_grad(program, device=device)(params, batch), expected)
    micros = [batch, batch * 2]
    expected = mt.reference.value_and_grad(program)(params, micros)
    assert_same(mt.value_and_grad(program, device=device)(params, micros), expected)
