"""Streams a case and compares it with the standard graph, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mtfunc import _tree, random, reference
from mtfunc._base import Leaves, Params
from mtfunc.api import value_and_grad
from mtfunc.optim import adamw
from mtfunc.testing.compare import differences
from mtfunc.testing.strategies.blocks import BLOCKS
from mtfunc.testing.strategies.case import Block, Built, Case, build
from mtfunc.trace import is_active
from mtfunc.train import init, train_step


def assert_streamed(case: Case, blocks: Mapping[str, Block] = BLOCKS, *, steps: int = 0) -> None:
    """Compares a case streamed on ``"cpu"`` and on its simulated device with the standard graph.

    Args:
        case: what :func:`cases` draws, or a printed one.
        blocks: the blocks that it names.
        steps: how many steps of AdamW are compared too, with ``torch.optim.AdamW`` on the standard
            graph's gradients.

    Raises:
        AssertionError: a bit of the loss, an aux value, a gradient or a parameter differs. The
            message ends with the case as the call that makes it.
    """
    devices = ("cpu", f"sim:{case.sim}")
    built = build(case, blocks)
    want = _reference(case, built, built.params, built.key)
    for device in devices:
        ask: dict[str, Any] = {"has_aux": True, "trainable": case.trainable}
        f = value_and_grad(built.program, device=device, config=case.config, **ask)
        (loss, aux), grads = f(built.params, built.batch, built.key)
        _compare(case, device, {"loss": loss, "aux": aux, "grads": grads}, want)
    if not steps:
        return
    expected, metrics = _train_plainly(case, build(case, blocks), steps)
    for device in devices:
        fresh = build(case, blocks)
        optimizer = adamw(_rate, weight_decay=0.1)
        options: dict[str, Any] = {"trainable": case.trainable}
        state = init(fresh.program, fresh.params, optimizer, fresh.key, **options)
        step = train_step(fresh.program, optimizer, device=device, config=case.config, **options)
        for number in range(steps):
            state, got = step(state, fresh.batch)
            got = {"loss": got["loss"], "aux": got["aux"]}
            _compare(case, f"{device}, step {number}", got, metrics[number])
        _compare(case, f"{device}, after {steps} steps", state.params, expected)


def _rate(step: int) -> float:
    return 0.01 / (step + 1)


def _reference(case: Case, built: Built, params: Params, key: Any) -> dict[str, Any]:
    f = reference.value_and_grad(built.program, has_aux=True, trainable=case.trainable)
    (loss, aux), grads = f(params, built.batch, key)
    return {"loss": loss, "aux": aux, "grads": grads}


def _train_plainly(case: Case, built: Built, steps: int) -> tuple[Params, list[dict[str, Any]]]:
    leaves: Leaves = _tree.flatten(built.params)[0]
    active = {path: x for path, x in leaves.items() if is_active(path, x, case.trainable)}
    groups: Sequence[Any] = list(active.values())
    adam = torch.optim.AdamW(groups, lr=1.0, weight_decay=0.1, fused=True) if active else None
    metrics = []
    for number in range(steps):
        made = _reference(case, built, built.params, random.fold_in(built.key, number))
        grads = _tree.flatten(made.pop("grads"))[0]
        metrics.append(made)
        for path, leaf in active.items():
            leaf.grad = grads[path]
        if adam is not None:
            adam.param_groups[0]["lr"] = _rate(number)
            adam.step()
    return built.params, metrics


def _compare(case: Case, where: str, got: Any, expected: Any) -> None:
    found = differences(got, expected)
    if found:
        lines = [f"  {path} {difference}" for path, difference in found.items()]
        raise AssertionError(
            f"on {where}, streamed is not the standard graph:\n"
            + "\n".join(lines[:8])
            + f"\nreproduce: assert_streamed({case!r})"
        )
