"""Faults of meaning: each is a context manager that makes the library wrong in one way.

They are what somebody could get wrong in a library of this kind, not slips of the pen. None has a
test of its own; ``scripts/mutants.py --faults`` asks whether the checks of test_engine.py see each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from mtfunc import engine, loss, program, random, recompute, run, train
from mtfunc.backends import sim
from mtfunc.optim import adamw as _adamw  # noqa: F401 (the package's function hides the module)
from mtfunc.schedule import build, flow, order, place

FAULTS: dict[str, Callable[[], Any]] = {}


def fault(where: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers ``wrong(right, *args, **kwargs)``, called in place of an attribute."""

    def register(wrong: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def patched() -> Iterator[None]:
            right = where[name] if isinstance(where, dict) else where.__dict__[name]
            called = right.__func__ if isinstance(right, staticmethod) else right

            def instead(*args: Any, **kwargs: Any) -> Any:
                return wrong(called, *args, **kwargs)

            put = staticmethod(instead) if isinstance(right, staticmethod) else instead
            _set(where, name, put)
            try:
                yield
            finally:
                _set(where, name, right)

        FAULTS[wrong.__name__] = patched
        return wrong

    return register


def _set(where: Any, name: str, value: Any) -> None:
    if isinstance(where, dict):
        where[name] = value
    else:
        setattr(where, name, value)


# Gradients


@fault(run, "pullback")
def gradients_shift_by_one_leaf(right, *args):
    found = right(*args)
    return found[1:] + found[:1]


@fault(run, "pullback")
def gradients_are_rounded_to_bfloat16(right, *args):
    return [x if x is None else x.bfloat16().to(x.dtype) for x in right(*args)]


@fault(recompute, "linearize")
def dropout_is_drawn_again_in_the_recomputation(right, traced, inputs, batch, key, micro, wanted):
    key = None if key is None else random.fold_in(key, 1)
    return right(traced, inputs, batch, key, micro, wanted)


@fault(recompute, "linearize")
def the_recomputation_takes_another_micro_batch(right, traced, inputs, batch, key, micro, wanted):
    return right(traced, inputs, batch, key, 0, wanted)


@fault(recompute, "linearize")
def the_recomputation_uses_stale_parameters(right, traced, inputs, *rest):
    held = _HELD.setdefault(id(traced), [leaf.clone() for leaf in inputs[: traced.n_params]])
    return right(traced, [*held, *inputs[traced.n_params :]], *rest)


_HELD: dict[int, list[torch.Tensor]] = {}


@fault(run, "pullback")
def sums_of_tied_gradients_are_lost(right, traced, inputs, batch, key, micro, wanted, given, sums):
    sums = [torch.zeros_like(x) for x in sums]
    return right(traced, inputs, batch, key, micro, wanted, given, sums)


@fault(run, "pullback")
def sums_of_tied_gradients_count_twice(right, traced, inputs, batch, key, m, wanted, given, sums):
    return right(traced, inputs, batch, key, m, wanted, given, [2 * x for x in sums])


@fault(run, "pullback")
def sums_are_added_after_the_stage(right, traced, inputs, batch, key, m, wanted, given, sums):
    zeros = [torch.zeros_like(x) for x in sums]
    found = right(traced, inputs, batch, key, m, wanted, given, zeros)
    for i, x in zip(wanted.running, sums):
        at = wanted.inputs.index(i)
        found[at] = found[at] + x * (1 + torch.finfo(x.dtype).eps)
    return found


@fault(run, "pullback")
def cotangents_are_halved_between_stages(right, traced, inputs, batch, key, m, wanted, given, sums):
    return right(traced, inputs, batch, key, m, wanted, [x / 2 for x in given], sums)


@fault(run, "pullback")
def gradients_are_clipped(right, *args):
    return [x if x is None else x.clamp(-1e-2, 1e-2) for x in right(*args)]


@fault(flow, "_differentiate")
def the_gradient_buffer_is_dirty_at_the_start(right, traced, named):
    right(traced, named)
    site = next(s for s, w in named.wanted.items() if w.inputs and not w.running)
    wanted = named.wanted[site]
    named.wanted[site] = wanted._replace(running=wanted.inputs[:1])


# Micro-batches and the loss


@fault(loss.Mean, "pool")
def micro_batches_weigh_the_same(right, means):
    return sum(right([mean]) for mean in means) / len(means)


@fault(loss.Mean, "pool")
def losses_are_summed_and_not_divided(right, means):
    ones = [loss.Mean.of([replace(t, count=torch.ones(())) for t in m.terms]) for m in means]
    return right(ones[:1]) if len(ones) == 1 else right(ones) * len(ones)


@fault(loss.Mean, "pool")
def the_second_micro_batch_is_dropped(right, means):
    return right([*means[:1], *means[2:]])


@fault(loss.Mean, "__mul__")
def weights_of_a_mixture_are_forgotten(right, mean, weight):
    return mean


@fault(engine.Engine, "step")
def micro_batches_come_in_reverse(right, self, params, batches, key, **options):
    return right(self, params, batches[::-1], key, **options)


@fault(engine, "collect_aux")
def aux_is_lost(right, reports):
    return {name: {} for name in right(reports)}


@fault(program.Stage, "options")
def every_micro_batch_draws_the_same_dropout(right, self, key, micro):
    return right(self, key, 0)


# Training


@fault(train.random, "fold_in")
def the_key_does_not_change_with_the_step(right, key, data):
    return right(key, 0 if isinstance(data, int) else data)


@fault(run._KINDS, "update")
def every_update_happens_twice(right, op, step, backend):
    right(op, step, backend)
    right(op, step, backend)


@fault(run._KINDS, "update")
def a_tied_weight_is_updated_twice(right, op, step, backend):
    right(op, step, backend)
    if op.label in ("embed", "shared"):
        right(op, step, backend)


@fault(run._KINDS, "update")
def the_last_unit_is_not_updated(right, op, step, backend):
    if op.label not in ("embed", "begin"):
        right(op, step, backend)


@fault(run._KINDS, "update")
def the_learning_rate_is_one_step_late(right, op, step, backend):
    step.count = max(step.count - 1, 0)
    right(op, step, backend)


@fault(run._KINDS, "update")
def weight_decay_is_forgotten(right, op, step, backend):
    kept, torch._fused_adamw_ = torch._fused_adamw_, _without_decay(torch._fused_adamw_)
    try:
        right(op, step, backend)
    finally:
        torch._fused_adamw_ = kept


def _without_decay(kernel: Callable[..., None]) -> Callable[..., None]:
    def call(*args: Any, **options: Any) -> None:
        kernel(*args, **{**options, "weight_decay": 0.0})

    return call


@fault(run._KINDS, "update")
def moments_are_forgotten(right, op, step, backend):
    for kind in step.moments[op.label].values():
        for leaf in kind.values():
            leaf.zero_()
    right(op, step, backend)


@fault(run._KINDS, "update")
def moments_of_two_leaves_are_swapped(right, op, step, backend):
    leaves = step.moments[op.label].get("mu", {})
    pairs = [(a, b) for a in leaves.values() for b in leaves.values() if a.shape == b.shape]
    for a, b in pairs[1:2]:
        a.copy_(b)
    for leaf in list(leaves.values())[:1]:
        leaf.neg_()
    right(op, step, backend)


@fault(run._KINDS, "check")
def a_loss_that_is_not_finite_passes(right, op, step, backend):
    loss_ = step.external.get("out/loss")
    backend.write(op.writes["verdict"][0], torch.ones((), dtype=torch.uint8))
    assert loss_ is None or loss_.shape == ()


@fault(build.Builder, "_complete")
def gradients_are_complete_one_stage_early(right, self, paths):
    right(self, paths)
    early = [p for p in self.flow.writers if p not in self.complete and p not in paths][:1]
    if early and self.drafts[-1].kind == "update":
        self.complete.update(early)


# Order and memory


@fault(order, "lower")
def one_wait_is_skipped(right, operations):
    lowered = right(operations)
    places = lowered.waits()
    return lowered.without(*places[len(places) // 2]) if places else lowered


@fault(order, "lower")
def nothing_waits_for_the_step_before(right, operations):
    lowered = right(operations)
    queues = {
        stream: tuple(i for i in queue if not (isinstance(i, order.Wait) and i.lag))
        for stream, queue in lowered.queues.items()
    }
    return order.Lowered(queues)


@fault(order, "verify")
def the_proof_proves_everything(right, operations, lowered):
    return []


@fault(place, "allocate")
def two_blocks_share_memory(right, nbytes, lives):
    offsets, size = right(nbytes, lives)
    return [0 if i == len(offsets) // 2 else x for i, x in enumerate(offsets)], size


@fault(place, "_end")
def a_leaf_is_freed_before_its_last_use(right, last, lag, visit_ends, end):
    return max(right(last, lag, visit_ends, end) - 2, 0)


@fault(place, "allocate")
def memory_is_never_used_again(right, nbytes, lives):
    return right(nbytes, [(first, 10**6) for first, _ in lives])


@fault(sim, "_pieces")
def the_end_of_a_copy_is_lost(right, target, source, count):
    pieces = right(target, source, count)
    return pieces[:1]


@fault(build.Builder, "_plan_carries")
def carries_stay_on_the_device(right, self):
    return set(), {}


@fault(build.Builder, "_plan_loads")
def every_stage_is_loaded_from_the_start(right, self):
    loads = right(self)
    return {0: [row for number in sorted(loads) for row in loads[number]]}


@fault(build.Builder, "_plan_kept")
def every_pullback_is_recomputed(right, self, cost):
    return {}, 0
