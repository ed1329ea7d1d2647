"""The oracle: the composed stages in one standard autograd graph.

Everything streamed is compared with this file, so it is kept short enough to argue with. It
shares with the engine what a program *means* (``Stage.apply``, ``Mean.pool``) and nothing of how
it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mtfunc import _tree, numerics
from mtfunc._base import Batch, Key, Params
from mtfunc.loss import Mean, as_mean
from mtfunc.program import Program, Stage, collect_aux
from mtfunc.trace import as_tensor, is_active, is_differentiable


def value_and_grad(
    program: Program,
    *,
    has_aux: bool = False,
    trainable: Callable[[str, torch.Tensor], bool] | None = None,
) -> Callable[..., Any]:
    """The loss of a program and its gradients through one standard autograd graph.

    The signature is that of :func:`mtfunc.value_and_grad`. Several micro-batches (a list) pass
    through each stage together; within a stage the graph is built from the last to the first, so
    that autograd, which runs the newest nodes first, sums gradients in the micro-batches' order.

    Returns:
        ``f(params, batch, key=None) -> (loss, grads)``, or ``((loss, aux), grads)``.
    """

    def f(params: Params, batch: Batch, key: Key | None = None) -> Any:
        batches = batch if isinstance(batch, list) else [batch]
        leaves, spec = _tree.flatten(params)
        leaves = {
            p: t.detach().requires_grad_(is_active(p, t, trainable)) for p, t in leaves.items()
        }
        params = _tree.unflatten(spec, leaves.values())
        carries: list[Any] = [None] * len(batches)
        reports: list[list[tuple[Stage, Any]]] = [[] for _ in batches]
        numerics.refuse_autocast("mt.reference.value_and_grad")
        with torch.enable_grad():
            for stage in program.stages(params):
                apply = with_rule(stage) if callable(stage.vjp) else stage.apply
                subtrees = [_tree.get(params, key) for key in stage.keys]
                for m in reversed(range(len(batches))):
                    carries[m], aux = apply(subtrees, carries[m], batches[m], key, m)
                    reports[m].append((stage, aux))
            loss = Mean.pool([as_mean(stage.name, carry) for carry in carries])
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        found = iter(
            torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
            if loss.requires_grad
            else map(torch.zeros_like, wanted)
        )
        grads = [next(found) if leaf.requires_grad else None for leaf in leaves.values()]
        grads = _tree.unflatten(spec, grads)
        auxes = [_tree.map_leaves(lambda _, x: as_tensor(x), collect_aux(r)) for r in reports]
        aux = auxes if isinstance(batch, list) else auxes[0]
        return ((loss.detach(), aux), grads) if has_aux else (loss.detach(), grads)

    return f


def with_rule(stage: Stage) -> Callable[..., Any]:
    """``stage.apply`` as one node of the graph, whose backward is the stage's pullback rule."""

    def apply(subtrees: Any, carry: Any, batch: Batch, key: Key | None, micro: int) -> Any:
        leaves, spec = _tree.flatten((*subtrees, carry))
        made: dict[str, Any] = {}

        class Node(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: torch.Tensor) -> Any:
                *trees, carry = _tree.unflatten(spec, inputs)
                out, made["aux"] = stage.apply(trees, carry, batch, key, micro)
                outputs, made["spec"] = _tree.flatten(out)
                made["passed"] = {
                    i: j
                    for i, x in enumerate(outputs.values())
                    for j, y in enumerate(inputs)
                    if x is y
                }
                ctx.save_for_backward(*inputs)
                fresh = [x for i, x in enumerate(outputs.values()) if i not in made["passed"]]
                ctx.mark_non_differentiable(*(x for x in fresh if not is_differentiable(x)))
                ctx.set_materialize_grads(False)
                return tuple(fresh)

            @staticmethod
            def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
                *trees, carry = _tree.unflatten(spec, ctx.saved_tensors)
                rest = iter(cotangents)
                count = len(list(made["spec"].paths()))
                placed = [None if i in made["passed"] else next(rest) for i in range(count)]
                cotangent = _tree.unflatten(made["spec"], placed)
                assert callable(stage.vjp)
                found = stage.vjp(*trees, carry, batch, cotangent, **stage.options(key, micro))
                grads = _tree.flatten(found)[0]
                return tuple(grads.get(path) for path in leaves)

        fresh = iter(Node.apply(*leaves.values()))
        given = list(leaves.values())
        count = len(list(made["spec"].paths()))
        out = [
            given[made["passed"][i]] if i in made["passed"] else next(fresh) for i in range(count)
        ]
        return _tree.unflatten(made["spec"], out), made["aux"]

    return apply
