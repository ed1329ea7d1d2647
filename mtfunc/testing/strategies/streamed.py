"""Streams a case and compares it with the standard graph, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mtfunc import _tree, random, reference
from mtfunc._base import Params
from mtfunc.api import value_and_grad
from mtfunc.optim import adamw
from mtfunc.testing.compare import differences
from mtfunc.testing.strategies.blocks import BLOCKS
from mtfunc.testing.strategies.case import Block, Case
from mtfunc.testing.strategies.make import build
from mtfunc.trace import is_active
from mtfunc.train import init, train_step

DECAY = 0.1


def assert_streamed(case: Case, blocks: Mapping[str, Block] = BLOCKS, *, steps: int = 0) -> None:
    """Compares a case streamed on ``"cpu"`` and on its simulated device with the standard graph.

    Args:
        case: what :func:`mtfunc.testing.strategies.cases` draws, or a printed one.
        blocks: the blocks that it names.
        steps: how many steps of AdamW are compared too, with ``torch.optim.AdamW`` on the standard
            graph's gradients. There is no step where the loss is not finite.

    Raises:
        AssertionError: a bit of the loss, an aux value, a gradient or a parameter differs. This
            and any other error has a note: code that makes it again.
    """
    try:
        wanted, trained = _plainly(case, blocks, steps)
        for device in ("cpu", f"sim:{case.sim}"):
            _compare_gradients(case, blocks, device, wanted[0])
            if trained is not None:
                _compare_training(case, blocks, device, wanted, trained)
    except Exception as error:
        own = [name for name, block in blocks.items() if BLOCKS.get(name) is not block]
        error.add_note("reproduce:\n\n" + case.code(steps=steps, own=own))
        raise


def _plainly(
    case: Case, blocks: Mapping[str, Block], steps: int
) -> tuple[list[dict[str, Any]], Params | None]:
    """Loss, aux and gradients of each step by plain torch, and the parameters at the end.

    There is no end where a loss is not finite.
    """
    program, params, batch, key = build(case, blocks)
    f = reference.value_and_grad(program, has_aux=True, trainable=case.trainable)
    leaves = _tree.flatten(params)[0]
    active = {path: x for path, x in leaves.items() if is_active(path, x, case.trainable)}
    # It refuses to have nothing to update.
    groups = [*active.values(), torch.zeros(1)]
    adam = torch.optim.AdamW(groups, lr=1.0, weight_decay=DECAY, fused=True)
    made: list[dict[str, Any]] = []
    for number in range(max(steps, 1)):
        (loss, aux), grads = f(params, batch, random.fold_in(key, number))
        made.append({"loss": loss, "aux": aux, "grads": grads})
        if number == steps or not bool(loss.isfinite()):
            return made, None
        by_path = _tree.flatten(grads)[0]
        for path, leaf in active.items():
            # The fused kernel walks the memory of both, so they need the same layout.
            leaf.grad = torch.empty_like(leaf).copy_(by_path[path])
        adam.param_groups[0]["lr"] = _rate(number)
        adam.step()
    return made, params


def _rate(step: int) -> float:
    return 0.01 / (step + 1)


def _compare_gradients(
    case: Case, blocks: Mapping[str, Block], device: str, wanted: dict[str, Any]
) -> None:
    program, params, batch, key = build(case, blocks)
    ask: dict[str, Any] = {"has_aux": True, "trainable": case.trainable}
    f = value_and_grad(program, device=device, config=case.config, **ask)
    (loss, aux), grads = f(params, batch, random.fold_in(key, 0))
    _compare(device, {"loss": loss, "aux": aux, "grads": grads}, wanted)


def _compare_training(
    case: Case,
    blocks: Mapping[str, Block],
    device: str,
    wanted: list[dict[str, Any]],
    trained: Params,
) -> None:
    program, params, batch, key = build(case, blocks)
    optimizer = adamw(_rate, weight_decay=DECAY)
    ask: dict[str, Any] = {"trainable": case.trainable}
    state = init(program, params, optimizer, key, **ask)
    step = train_step(program, optimizer, device=device, config=case.config, **ask)
    for number, expected in enumerate(wanted):
        state, metrics = step(state, batch)
        where = f"{device}, in step {number}"
        _compare(where, {of: metrics[of] for of in ("loss", "aux")}, expected | {"grads": None})
    _compare(f"{device}, after {len(wanted)} steps", state.params, trained)


def _compare(where: str, got: Any, expected: Any) -> None:
    found = differences(got, expected)
    if found:
        lines = [f"  {path} {difference}" for path, difference in found.items()]
        raise AssertionError(
            f"on {where}, streamed is not the standard graph:\n" + "\n".join(lines[:8])
        )
