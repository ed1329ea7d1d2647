"""The engine's contract in a few seconds: programs × configs × devices, the cheapest first.

``scripts/mutants.py`` runs these checks on mutated sources, so each states a general property:
what a schedule may do, what it costs, and that what it computes is what one graph computes.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F

import mtfunc as mt
from mtfunc import _tree
from mtfunc.backends.cpu import Cpu
from mtfunc.backends.sim import Sim
from mtfunc.engine import bind
from mtfunc.run import run
from mtfunc.schedule.operation import STREAMS, Record, Run, Wait
from tests.toys import LM, assert_same, clone, flat, lm_batch, lm_params, momentum, same

KEY = mt.random.key(3)
MICROS = [lm_batch(2, seed=1), lm_batch(3, seed=2, ignored=4)]
CONFIGS = [
    mt.StreamConfig(),
    mt.StreamConfig(slots=1, grad_slots=1, carries="host"),
    mt.StreamConfig(slots=3, grad_slots=2, carries="host"),
    mt.StreamConfig(slots=2, grad_slots=3, residuals=4000),
    mt.StreamConfig(slots=2, grad_slots=2, carries="host", residuals=10**6),
]
MODES = ("forward", "grad", "train")


def begin(p, carry, batch, key):
    x = mt.random.dropout(key, 0.4, batch["x"] @ p["w"])
    return {"x": x, "first": x, "n": batch["n"]}


def middle(p, shared, carry, batch, key):
    x = torch.tanh(carry["x"] @ p["w"] * shared["gain"]) + p["empty"].sum()
    x = mt.random.dropout(key, 0.3, x)
    return {**carry, "x": x + carry["x"]}, {"mean": x.mean(), "n": carry["n"] + 1}


def last(shared, carry, batch):
    x = (carry["x"] * carry["first"]).sum(-1) * shared["gain"].sum()
    return mt.Mean((x * batch["m"]).sum(), batch["m"].sum()) + 0.5 * x.square().mean()


ODD = mt.chain(
    mt.stage(begin, "begin", rng=True),
    mt.scan(middle, "layers", "shared", rng=True, has_aux=True),
    mt.stage(last, "shared"),
)
"""Dropout, aux, a carry passed through, a shared leaf, an empty, an unused, a 0-dim leaf."""


def odd_params(dtype=torch.float32):
    g = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    layers = [{"w": normal(4, 4), "empty": normal(0, 2)} for _ in range(3)]
    shared = {"gain": normal(), "unused": normal(3)}
    return {"begin": {"w": normal(3, 4)}, "layers": layers, "shared": shared}


def odd_batch(rows, seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=g, dtype=torch.float64).to(dtype)
    return {"x": x, "m": (torch.arange(rows) < rows - 1).to(dtype), "n": torch.tensor(seed)}


ODD_MICROS = [odd_batch(3, 1), odd_batch(2, 2)]
TOYS = {
    "lm": (LM, lm_params(), MICROS, None),
    "one": (LM, lm_params(), lm_batch(2, seed=4), None),
    "odd": (ODD, odd_params(), ODD_MICROS, KEY),
}
CASES = {
    (name, device, number): (*TOYS[name], device, config)
    for name in TOYS
    for device in ("cpu", f"sim:{len(name)}")
    for number, config in enumerate(CONFIGS)
}


@cache
def schedules():
    """Schedules by program, device, config and mode; a few of each that differ in kind."""
    return {
        (*where, mode): mt.schedule(program, params, batch, config, mode=mode, device=device, key=k)
        for where, (program, params, batch, k, device, config) in CASES.items()
        for mode in MODES
        if where[0] != "one" and (mode == "train" or where[2] == 1)
        if device != "cpu" or where[2] in (1, 4)
    }


def follows(schedule, lowered):
    """For every operation of two steps the set, as bits, of those that surely finish before it."""
    n = len(schedule.operations)
    known = dict.fromkeys(STREAMS, 0)
    events, before = {}, {}
    todo = {s: [(k, i) for k in range(2) for i in q] for s, q in lowered.queues.items()}
    while any(todo.values()):
        moved = False
        for stream, rest in todo.items():
            while rest:
                step, item = rest[0]
                if isinstance(item, Wait):
                    event = item.event + (step - item.lag) * n
                    if event >= 0 and event not in events:
                        break
                    known[stream] |= events.get(event, 0)
                elif isinstance(item, Run):
                    before[item.operation + step * n] = known[stream]
                    known[stream] |= 1 << (item.operation + step * n)
                elif isinstance(item, Record):
                    events[item.event + step * n] = known[stream]
                rest.pop(0)
                moved = True
        assert moved, "the queues cannot go on"
    return before


def test_queues_order_every_conflict_and_verify_knows():
    for where, schedule in schedules().items():
        assert schedule.verify() == [], where
        lowered, n = schedule.lower(), len(schedule.operations)
        before = follows(schedule, lowered)
        assert len(before) == 2 * n, where
        touched = defaultdict(list)
        for step in range(2):
            for op in schedule.operations:
                for buffer, write in op.accesses():
                    span = (buffer.start, buffer.start + max(buffer.nbytes, 1))
                    row = (*span, op.index + step * n, write)
                    for start, stop, other, wrote in touched[buffer.arena]:
                        clash = start < span[1] and span[0] < stop and (write or wrote)
                        if clash and other < row[2]:
                            assert before[row[2]] >> other & 1, (where, other, row)
                    touched[buffer.arena].append(row)


def test_each_wait_is_needed():
    for number in (0, 1, 2):
        program, params, batch, _, device, config = CASES["lm", "sim:2", number]
        schedule = mt.schedule(program, params, batch, config, mode="train", device=device)
        lowered = schedule.lower()
        recorded = {i.event for q in lowered.queues.values() for i in q if isinstance(i, Record)}
        waits = lowered.waits()
        assert recorded == {lowered.queues[s][i].event for s, i in waits}
        for stream, position in waits:
            wait = lowered.queues[stream][position]
            after = next(i for i in lowered.queues[stream][position:] if isinstance(i, Run))
            hazards = schedule.verify(lowered.without(stream, position))
            pairs = [(h.first, h.second) for h in hazards]
            assert (wait.event, after.operation) in pairs


def test_buffers_do_not_overlap_while_they_live_and_the_arena_is_no_larger_than_needed():
    for where, schedule in schedules().items():
        lives, freed = {}, {}
        for op in schedule.operations:
            for buffer, _ in op.accesses():
                assert buffer == schedule.buffers[buffer.name]
                if buffer.arena in ("device", "host"):
                    assert buffer.name not in freed, (where, buffer.name)
                    lives.setdefault(buffer.name, op.index)
                    if op.kind == "free":
                        freed[buffer.name] = op.index
        if not schedule.unified:
            # What is not handed to the caller is freed, once; where host and device are one,
            # results stay.
            assert freed.keys() == lives.keys(), (where, lives.keys() - freed.keys())
        top = defaultdict(int)
        rows = [(schedule.buffers[n], lives[n], freed.get(n, 10**9)) for n in lives]
        for i, (a, born, died) in enumerate(rows):
            assert a.start % 256 == 0 and a.nbytes == (a.aval.nbytes if a.aval else 1)
            top[a.arena] = max(top[a.arena], -(-a.stop // 256) * 256)
            for b, other_born, other_died in rows[:i]:
                if a.arena == b.arena and born <= other_died and other_born <= died:
                    assert a.stop <= b.start or b.stop <= a.start, (where, a.name, b.name)
        assert dict(top) == {k: v for k, v in schedule.sizes.items() if v}, where


def test_each_unit_is_loaded_twice_run_twice_and_updated_once():
    for name, (program, params, batch, key) in TOYS.items():
        micros = len(batch) if isinstance(batch, list) else 1
        for config in CONFIGS:
            schedule = mt.schedule(
                program, params, batch, config, mode="train", device="sim", key=key
            )
            ops = [op for op in schedule.operations if op.kind != "free"]
            kinds = defaultdict(list)
            for op in ops:
                kinds[op.kind].append(op)
            stages = len(schedule.traced[0])
            order = [(s, m) for s in range(stages) for m in range(micros)]
            back = [(s, m) for s in reversed(range(stages)) for m in range(micros)]
            assert [(op.stage, op.micro) for op in kinds["forward"]] == order
            assert [(op.stage, op.micro) for op in kinds["pullback"]] == back
            kept = {(op.stage, op.micro) for op in kinds["forward"] if op.keep}
            assert kept == {(op.stage, op.micro) for op in kinds["pullback"] if op.keep}
            all_kept = config.residuals == 10**6
            assert len(kept) == (len(order) if all_kept else len(kept))
            if config.residuals == "recompute":
                assert kept == ({(stages - 1, 0)} if micros == 1 else set())
                assert schedule.residuals == 0
            else:
                assert schedule.residuals <= config.residuals
            updated = [b.name for op in kinds["update"] for b in op.writes["params"]]
            assert sorted(updated) == sorted(f"params{p}" for p in flat(params))
            loads = [b.name for op in kinds["load"] for b in op.reads["source"]]
            for path in flat(params):
                readers = [s for s in range(stages) if path[1:] in paths_of(schedule, s)]
                visits = [*readers, *(2 * stages - 1 - s for s in reversed(readers))]
                near = max(config.slots - 1, 1)
                groups = 1 if visits else 0
                for a, b in pairwise(visits):
                    stage = min(a, 2 * stages - 1 - a)
                    held = (stage, 0) in kept and b == 2 * stages - 1 - a
                    groups += b - a > near and not held and not all_kept
                if config.residuals == "recompute" or all_kept:
                    assert loads.count(f"params{path}") == groups, (name, config, path)
            for op in ops:
                if op.kind in ("load", "fetch", "save", "store"):
                    assert op.stream == ("h2d" if op.kind in ("load", "fetch") else "d2h")
                    sizes = [[b.aval for b in v] for v in (*op.reads.values(), *op.writes.values())]
                    assert [(a.shape, a.dtype) for a in sizes[0]] == [
                        (a.shape, a.dtype) for a in sizes[1]
                    ]


def paths_of(schedule, stage):
    return schedule.traced[0][stage].binding.paths


def test_loads_run_ahead_as_far_as_slots_say():
    for slots in (1, 2, 3, 4):
        config = mt.StreamConfig(slots=slots, grad_slots=1, carries="host")
        schedule = mt.schedule(LM, lm_params(layers=6), MICROS, config, mode="grad", device="sim")
        visit, most, resident, seen = -1, 0, set(), []
        for op in schedule.operations:
            if op.kind in ("forward", "pullback") and op.micro == 0:
                visit += 1
            if op.kind == "load" and op.label.startswith("layers"):
                seen.append((op.label, visit))
                resident.add((op.label, op.writes["target"][0].name))
                most = max(most, len(resident))
            if op.kind == "free":
                gone = {b.name for b in op.writes["freed"]}
                resident = {r for r in resident if r[1] not in gone}
        assert most == slots, (slots, most)
        # Layer i is read in visit i + 1, and its load is issued slots visits before that ends.
        assert seen[:6] == [(f"layers/{i}", max(-1, i + 1 - slots)) for i in range(6)]


def test_carries_on_the_host_leave_a_device_whose_size_does_not_grow_with_depth():
    def sizes(layers, **options):
        config = mt.StreamConfig(**options)
        args = (lm_params(layers=layers), MICROS, config)
        return mt.schedule(LM, *args, mode="train", device="sim").sizes

    host = [sizes(n, carries="host") for n in (6, 9)]
    assert host[0]["device"] == host[1]["device"]
    assert host[0]["host"] < host[1]["host"]
    device = [sizes(n, carries="device") for n in (6, 9)]
    assert device[0]["device"] < device[1]["device"]
    for name in ("slots", "grad_slots"):
        grown = [sizes(6, carries="host", **{name: n})["device"] for n in (1, 2, 3)]
        assert grown[0] < grown[2] and grown == sorted(grown), (name, grown)
    assert host[0]["host"] < sum(x.nbytes for x in flat(lm_params(layers=6)).values()) * 4


def test_gradients_are_those_of_one_graph():
    expected = {}
    for where, (program, params, batch, key, device, config) in CASES.items():
        if where[0] not in expected:
            reference = mt.reference.value_and_grad(program, has_aux=True)
            expected[where[0]] = reference(params, batch, key)
        before = clone(params)
        streamed = mt.value_and_grad(program, has_aux=True, device=device, config=config)
        for _ in range(2):  # the second run finds what the first one left
            got = streamed(params, batch, key)
            assert_same(list(got), list(expected[where[0]]), where)
        assert_same(params, before, "parameters")


def test_losses_are_those_of_plain_torch():
    params = clone(lm_params(torch.float64))
    leaves = [x.requires_grad_() for x in flat(params).values()]
    total = count = 0
    for batch in MICROS:
        x = F.embedding(batch["tokens"], params["embed"]["weight"])
        for p in params["layers"]:
            x = x + F.silu(F.layer_norm(x, x.shape[-1:], p["scale"]) @ p["up"]) @ p["down"]
        logits = (x @ params["embed"]["weight"].T).flatten(0, 1)
        labels = batch["labels"].flatten()
        total = total + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        count = count + (labels != -100).sum()
    plain = torch.autograd.grad(total / count, leaves)
    for device in ("cpu", "sim:1"):
        loss, grads = mt.value_and_grad(LM, device=device)(lm_params(torch.float64), MICROS)
        torch.testing.assert_close(loss, (total / count).detach())
        for got, leaf in zip(flat(grads).values(), plain):
            torch.testing.assert_close(got, leaf, rtol=1e-10, atol=1e-12)


def test_training_is_torch_adamw_fed_by_one_graph():
    rates = [1e-2, 5e-3, 2e-3]
    for name, (program, params, batch, key) in TOYS.items():
        runs = [(d, c) for n, d, c in ((k[0], v[4], v[5]) for k, v in CASES.items()) if n == name]
        optimizer = mt.adamw(rates.__getitem__, weight_decay=0.1)
        leaves, losses, auxes = clone(params), [], []
        adam = torch.optim.AdamW(list(flat(leaves).values()), lr=1.0, weight_decay=0.1, fused=True)
        reference = mt.reference.value_and_grad(program, has_aux=True)
        for number, rate in enumerate(rates):
            step_key = mt.random.fold_in(mt.random.key(0) if key is None else key, number)
            (loss, aux), grads = reference(leaves, batch, step_key)
            losses.append(loss)
            auxes.append(aux)
            for path, leaf in flat(leaves).items():
                leaf.grad = flat(grads)[path]
            adam.param_groups[0]["lr"] = rate
            adam.step()
        for device, config in runs:
            state = mt.init(program, clone(params), optimizer, key=key)
            step = mt.train_step(program, optimizer, device=device, config=config)
            for loss, aux in zip(losses, auxes):
                state, metrics = step(state, batch, record=True)
                assert_same(metrics["loss"], loss, (name, device))
                assert_same(metrics["aux"], aux, (name, device))
                assert {"forward", "pullback", "update"} <= {s.kind for s in step.timeline}
                assert all(0 <= s.start <= s.stop for s in step.timeline)
            assert_same(state.params, leaves, (name, device, config))


def two_steps(schedule, backend):
    """The state after two steps that run through the queues with nothing between them."""
    optimizer, params = momentum(), clone(lm_params())
    leaves = _tree.flatten(params)[0]
    moments = {
        unit: optimizer.init({p: x for p, x in leaves.items() if p.startswith(unit)})
        for unit in ("embed", "layers/0", "layers/1", "layers/2")
    }
    backend.open(schedule.sizes)
    options = dict(optimizer=optimizer, moments=moments)
    steps = [bind(schedule, params, MICROS, None, number=n, count=n, **options) for n in range(2)]
    run(schedule.lower(), backend, steps)
    return params, list(moments.values()), [s.external.get("out/loss") for s in steps]


def test_two_steps_without_a_barrier():
    plain = mt.schedule(LM, lm_params(), MICROS, mode="train", device="cpu")
    expected = two_steps(plain, Cpu())[:2]
    for seed, config in enumerate(CONFIGS[:3] * 3):
        schedule = mt.schedule(LM, lm_params(), MICROS, config, mode="train", device="sim")
        assert same(two_steps(schedule, Sim(seed))[:2], expected), (seed, config)
    cut = schedule.lower().without(*schedule.lower().waits()[0])
    assert schedule.verify(cut)


def test_forward_is_the_composition():
    for name, (program, params, batch, key) in TOYS.items():
        batches = batch if isinstance(batch, list) else [batch]
        for device in ("cpu", "sim:2"):
            for config in CONFIGS[:2]:
                part = program[:2]
                streamed = mt.forward(part, device=device, config=config)
                for m, one in enumerate(batches[:1]):
                    carry = None
                    for stage in part.stages(params, partial=True):
                        subtrees = [_tree.get(params, path) for path in stage.keys]
                        carry, _ = stage.apply(subtrees, carry, one, key, m)
                    assert_same(streamed(params, one, key), carry, (name, device))


def dense(p, x, batch):
    return (batch["x"] if x is None else x) @ p["w"].sin()


def dense_rule(p, x, batch, cotangent):
    given = batch["x"] if x is None else x
    grad = (given.T @ cotangent) * p["w"].cos()
    return {"w": grad}, None if x is None else cotangent @ p["w"].sin().T


def total(p, x, batch):
    return (x @ p["w"]).square().sum()


def test_every_engine_of_pullbacks():
    params = {n: {"w": torch.randn(3, 3, generator=torch.Generator().manual_seed(7))} for n in "ab"}
    for vjp in ("func", "autograd", dense_rule):
        program = mt.chain(
            mt.stage(dense, "a", vjp=vjp, name="1"),
            mt.stage(dense, "b", vjp=vjp, name="2"),
            mt.stage(dense, "a", vjp=vjp, name="3"),
            mt.stage(total, "b"),
        )
        expected = mt.reference.value_and_grad(program)(params, ODD_MICROS)
        for device, config in (("cpu", CONFIGS[0]), ("sim:3", CONFIGS[2]), ("sim", CONFIGS[4])):
            streamed = mt.value_and_grad(program, device=device, config=config)
            assert_same(list(streamed(params, ODD_MICROS)), list(expected), (vjp, device))
