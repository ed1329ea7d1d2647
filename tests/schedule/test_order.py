"""The derived order: proved by ``verify``, and each wait of it needed."""

from __future__ import annotations

import pytest
import torch

import mtfunc as mt
from mtfunc import _tree
from mtfunc.backends.cpu import Cpu
from mtfunc.backends.sim import Sim
from mtfunc.engine import Engine, bind
from mtfunc.run import run
from mtfunc.schedule.order import conflicts
from tests.toys import LM, clone, lm_batch, lm_params, momentum, same

CONFIGS = [
    mt.StreamConfig(),
    mt.StreamConfig(slots=1, grad_slots=1),
    mt.StreamConfig(slots=3, grad_slots=3, carries="host"),
    mt.StreamConfig(slots=2, grad_slots=1, carries="host"),
]
BATCHES = [lm_batch(2, seed=1), lm_batch(3, seed=2, ignored=4)]
STEPS = 2


def two_steps(schedule, lowered, backend):
    """The state after two steps that run through the queues with nothing between them."""
    optimizer = momentum()
    params = clone(lm_params(torch.float64))
    leaves = _tree.flatten(params)[0]
    moments = {
        unit: optimizer.init({p: x for p, x in leaves.items() if p.startswith(unit)})
        for unit in ("embed", "layers/0", "layers/1", "layers/2")
    }
    backend.open(schedule.sizes)
    steps = [
        bind(
            schedule,
            params,
            BATCHES,
            None,
            number=number,
            count=number,
            optimizer=optimizer,
            moments=moments,
        )
        for number in range(STEPS)
    ]
    for step in steps:
        for name, leaf in step.external.items():
            if name.startswith("out/"):
                leaf.fill_(torch.nan)
    run(lowered, backend, steps)
    return params, list(moments.values())


@pytest.fixture(scope="module")
def expected():
    engine = Engine(LM, mode="train", device="cpu")
    schedule = engine.plan(lm_params(torch.float64), BATCHES, None)
    return two_steps(schedule, schedule.lower(), Cpu())


def schedule_for(config, mode="train", device="sim"):
    return mt.schedule(LM, lm_params(torch.float64), BATCHES, config, mode=mode, device=device)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("mode", ["train", "grad", "forward"])
@pytest.mark.parametrize("device", ["sim", "cpu"])
def test_every_lowered_schedule_is_proved(config, mode, device):
    assert schedule_for(config, mode, device).verify() == []


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_two_steps_without_a_barrier_equal_the_cpu(config, expected):
    schedule = schedule_for(config)
    for seed in range(25):
        got = two_steps(schedule, schedule.lower(), Sim(seed))
        assert same(got, expected), seed


def test_each_wait_is_needed_verify_names_it_and_the_simulator_catches_it(expected, capsys):
    seeds = 80
    total = caught = 0
    missed = []
    for config in CONFIGS:
        schedule = schedule_for(config)
        lowered = schedule.lower()
        for stream, position in lowered.waits():
            total += 1
            wait = lowered.queues[stream][position]
            cut = lowered.without(stream, position)
            hazards = schedule.verify(cut)
            after = next(i for i in lowered.queues[stream][position:] if hasattr(i, "operation"))
            assert any(h.second == after.operation and h.first == wait.event for h in hazards), (
                f"verify does not name {wait} before {after}: {hazards}"
            )
            for seed in range(seeds):
                try:
                    if not same(two_steps(schedule, cut, Sim(seed)), expected):
                        break
                except (RuntimeError, KeyError):
                    break
            else:
                missed.append(f"{config}: {wait} on {stream} before {after}")
                continue
            caught += 1
    with capsys.disabled():
        print(f"\nwaits removed: {total}; named by verify: {total}; caught by sim: {caught}")
        print("\n".join(missed))
    assert total > 100
    assert caught >= 0.95 * total, missed


def test_edges_are_between_streams_and_forward():
    schedule = schedule_for(CONFIGS[2])
    ops = schedule.operations
    assert schedule.edges
    for first, second in schedule.edges:
        assert first < second
        assert ops[first].stream != ops[second].stream


def test_covered_accesses_are_implied():
    """Against every pair, written plainly: what pruning leaves out follows from the rest."""
    schedule = schedule_for(CONFIGS[3])
    ops = schedule.operations
    kept = conflicts(ops)
    reach: list[set[int]] = []
    last = {}
    for i, op in enumerate(ops):
        before = set(kept[i])
        if op.stream in last:
            before.add(last[op.stream])
        last[op.stream] = i
        reach.append(before.union(*(reach[j] for j in before)) if before else set())
    for i, a in enumerate(ops):
        for j, b in enumerate(ops[:i]):
            clash = any(
                (w or v) and x.arena == y.arena and x.start < y.stop and y.start < x.stop
                for x, w in a.accesses()
                for y, v in b.accesses()
            )
            assert not clash or j in reach[i], (str(b), str(a))
