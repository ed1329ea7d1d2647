"""Functions applied tile by tile along the tokens, recomputed tile by tile in the backward pass.

One autograd function serves both kinds: a map, where each token stands alone, and a scan, which
carries a state from tile to tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtfunc import _tree
from mtfunc.ops import _residuals
from mtfunc.ops._checks import expect_tile, expect_tokens, wide

TiledFn = Callable[[Any, Any, Any], tuple[Any, Any]]
"""``fn(params, state, x) -> (state, y)``."""


def tile(fn: Callable[[Any, Any], Any], size: int) -> Callable[[Any, Any], Any]:
    """``g(params, x) == fn(params, x)`` for an ``fn`` that acts on each token alone.

    Memory holds ``fn``'s intermediate values for one tile instead of all tokens::

        def g(params, x):
            return torch.cat([fn(params, part) for part in x.split(size, dim=1)], dim=1)

    and the backward pass runs ``fn`` again, one tile at a time. The tiles' gradients of a
    parameter, in its dtype, are summed in float32 (float64 for float64). Where there are at most
    ``size`` tokens, ``fn`` is called as it is and nothing is recomputed.

    It works under ``torch.func.vjp`` and ``torch.autograd``, in stages, and inside itself. Its
    backward pass is not differentiable again. ``fn`` may close over integer tensors and keys, not
    over tensors that gradients flow into: those belong in ``params``.

    Dropout: ``mt.random`` draws by the index of an element, which a tile does not know. Pass the
    tokens' indices in ``x`` and fold them into the key, so that tiling draws what the whole does::

        def fn(p, x):  # x = {"h": (B, T, D), "index": torch.arange(B * T).view(B, T)}
            drop = lambda i, h: mt.random.dropout(mt.random.fold_in(key, i), 0.1, h)
            return torch.func.vmap(torch.func.vmap(drop))(x["index"], x["h"])

    Args:
        fn: ``fn(params, x) -> y``; ``y`` is a pytree of tensors whose dim 1 is the tokens.
        size: tokens in a tile.

    Returns:
        ``g``; its ``x`` is a tensor or a pytree of tensors ``(batch, tokens, ...)``.

    Raises:
        ValueError: ``size`` is below 1; or, when called, the leaves of ``x`` differ in their
            tokens, ``y`` has others than ``x``, or ``fn`` closes over a tensor that requires grad.

    Example:
        >>> import torch
        >>> from mtfunc import ops
        >>> mlp = ops.tile(lambda p, x: torch.relu(x @ p["up"]) @ p["down"], size=128)
        >>> mlp({"up": torch.ones(2, 8), "down": torch.ones(8, 2)}, torch.ones(1, 300, 2)).shape
        torch.Size([1, 300, 2])
    """
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"mt.ops.tile: size is {size!r}; expected a number of tokens, at least 1")

    def stateless(params: Any, state: Any, x: Any) -> tuple[Any, Any]:
        return None, fn(params, x)

    def g(params: Any, x: Any) -> Any:
        if expect_tokens(_tree.flatten(x)[0], dim=1, where="tile") <= size:
            return fn(params, x)
        return run_tiled(stateless, params, None, x, size=size, dim=1, where="tile")[1]

    return g


def run_tiled(
    fn: TiledFn, params: Any, state: Any, x: Any, *, size: int, dim: int, where: str
) -> tuple[Any, Any]:
    """Carries a state through tiles of the tokens.

    ::

        ys = []
        for part in x.split(size, dim):
            state, y = fn(params, state, part)
            ys.append(y)
        return state, torch.cat(ys, dim)

    The forward pass keeps the state before each tile, the backward pass runs each tile again.

    Args:
        fn: what a tile does; the state keeps its structure, shapes and dtypes.
        params: a pytree that every tile reads.
        state: the first state, a pytree of floating tensors, or ``None``.
        x: a pytree of tensors, split along ``dim``.
        size: tokens in a tile.
        dim: the axis of the tokens in every leaf of ``x`` and ``y``.
        where: the operation's name, for errors.

    Returns:
        The last state, and ``y``.
    """
    trees = [_tree.flatten(tree) for tree in (params, state, x)]
    plan = _Plan(
        fn=fn,
        specs=tuple(spec for _, spec in trees),
        counts=tuple(len(found) for found, _ in trees),
        tokens=expect_tokens(trees[2][0], dim, where),
        size=size,
        dim=dim,
        where=where,
        # Whether a leaf requires grad does not show where torch.func.vmap is around it.
        keep=torch.is_grad_enabled(),
    )
    outputs = _Tiled.apply(plan, *(leaf for found, _ in trees for leaf in found.values()))
    n_y, n_state = plan.n_y, plan.counts[1]
    y = _tree.unflatten(plan.y_spec, outputs[:n_y])
    return _tree.unflatten(trees[1][1], outputs[n_y : n_y + n_state]), y


@dataclass(eq=False, kw_only=True)
class _Plan:
    """What is not a tensor; ``y_spec`` is known once the first tile has run.

    ``mapped`` is the plan of one example and the axes of examples, under ``torch.func.vmap``.
    """

    fn: TiledFn
    specs: tuple[_tree.Spec, ...]
    counts: tuple[int, ...]
    tokens: int
    size: int
    dim: int
    where: str
    keep: bool
    mapped: tuple[_Plan, tuple[int | None, ...]] | None = None
    y_spec: _tree.Spec = _tree.NONE

    @property
    def n_y(self) -> int:
        """How many leaves y has."""
        return len(list(self.y_spec.paths()))

    def tiles(self) -> list[tuple[int, int]]:
        """Start and length of each tile."""
        starts = range(0, max(self.tokens, 1), self.size)
        return [(start, min(self.size, self.tokens - start)) for start in starts]

    def at(self, leaves: Sequence[Any], start: int, length: int) -> list[Any]:
        """Params and state as they are, the leaves of x cut to one tile."""
        first = self.counts[0] + self.counts[1]
        return [*leaves[:first], *(x.narrow(self.dim, start, length) for x in leaves[first:])]

    def apply(self, leaves: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Runs the function on one tile: leaves of the state and of y."""
        if self.mapped is not None:
            plan, in_dims = self.mapped
            return torch.func.vmap(lambda *of_one: plan.apply(of_one), in_dims=in_dims)(*leaves)
        rest = iter(leaves)
        params, state, x = (_tree.unflatten(spec, rest) for spec in self.specs)
        with _residuals.off():
            state, y = self.fn(params, state, x)
        ys, self.y_spec = _tree.flatten(y)
        return list(_tree.flatten(state)[0].values()), list(ys.values())


class _Tiled(torch.autograd.Function):
    """Returns the leaves of y, those of the last state, and the states before each tile.

    Where ``torch.func.vmap`` is around the backward pass, a tensor may be written into only if it
    is batched as what is written, so each buffer is made like what comes first.
    """

    @staticmethod
    def forward(plan: _Plan, *leaves: Any) -> tuple[Tensor, ...]:
        n_params, n_state, _ = plan.counts
        state = list(leaves[n_params : n_params + n_state])
        tiles = plan.tiles()
        befores: list[list[Tensor]] = [[] for _ in state]
        ys: list[Tensor] = []
        for start, length in tiles:
            for before, x in zip(befores, state):
                if plan.keep:
                    before.append(x)
            placed = plan.at(
                [*leaves[:n_params], *state, *leaves[n_params + n_state :]], start, length
            )
            # Grad mode as in the recomputation, so that no kernel is chosen differently.
            with torch.enable_grad():
                state, parts = plan.apply([_detached(leaf) for leaf in placed])
            for part in parts:
                expect_tile(plan.where, part, plan.dim, length)
            if not ys:
                ys = [_whole(part, plan) for part in parts]
            for y, part in zip(ys, parts):
                y.narrow(plan.dim, start, length).copy_(part)
        kept = [torch.stack(b) if b else x.new_empty(0, *x.shape) for b, x in zip(befores, state)]
        return (*ys, *state, *kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        plan, *leaves = inputs
        n_state = plan.counts[1]
        befores = output[len(output) - n_state :]
        fixed = [x for x in output[: len(output) - n_state] if not x.dtype.is_floating_point]
        ctx.mark_non_differentiable(*fixed, *befores)
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        ctx.statics = {i: x for i, x in enumerate(leaves) if not isinstance(x, Tensor)}
        ctx.save_for_backward(*(x for x in leaves if isinstance(x, Tensor)), *befores)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], plan: _Plan, *leaves: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        # With the rule that torch generates, cotangents of outputs that are the same for every
        # example are counted once for each. Here all outputs are batched.
        n_params, n_state, _ = plan.counts
        placed, inner = [], []
        for i, (leaf, dim) in enumerate(zip(leaves, in_dims[1:])):
            if dim is not None:
                leaf = leaf.movedim(dim, 0)
            elif i >= n_params:
                leaf = leaf.expand(info.batch_size, *leaf.shape)
            placed.append(leaf)
            inner.append(None if dim is None and i < n_params else 0)
        whole = replace(plan, dim=plan.dim + 1, mapped=(plan, tuple(inner)))
        outputs = _Tiled.apply(whole, *placed)
        return outputs, (*(0 for _ in outputs[n_state:]), *(1 for _ in range(n_state)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        n_params, n_state, _ = plan.counts
        # Under torch.func these are wrappers of a level that has ended; nested in one another they
        # break functorch, and detach() takes one off.
        saved = iter([x.detach() for x in ctx.saved_tensors])
        leaves = [
            ctx.statics[i] if i in ctx.statics else next(saved) for i in range(sum(plan.counts))
        ]
        befores = list(saved)
        n_y = len(cotangents) - 2 * n_state
        state_ct = list(cotangents[n_y : n_y + n_state])
        state_at = range(n_params, n_params + n_state)
        needed = ctx.needs_input_grad[1:]
        # The state takes part in every tile but its own gradient is wanted by none but the first.
        wanted = [i for i, need in enumerate(needed) if need or (i in state_at)]
        grads: list[Tensor | None] = [None] * len(leaves)
        for t, (start, length) in reversed(list(enumerate(plan.tiles()))):
            placed = plan.at(leaves, start, length)
            placed[n_params : n_params + n_state] = [before[t] for before in befores]
            cut = [
                None if c is None else c.narrow(plan.dim, start, length) for c in cotangents[:n_y]
            ]
            found = _pull(plan, placed, wanted, [*state_ct, *cut])
            state_ct = [found[i] for i in state_at]
            for i in wanted:
                part, total = found[i], grads[i]
                if i < n_params:
                    # The first is copied, since a pullback may return a storage twice.
                    grads[i] = (
                        part.to(wide(part.dtype), copy=True) if total is None else total.add_(part)
                    )
                elif i not in state_at:
                    total = grads[i] = _whole(part, plan) if total is None else total
                    total.narrow(plan.dim, start, length).copy_(part)
        for i in wanted:
            total = grads[i]
            if i in state_at:
                grads[i] = state_ct[i - n_params] if needed[i] else None
            elif total is not None:
                grads[i] = total.to(leaves[i].dtype)
        return None, *grads


def _pull(
    plan: _Plan, leaves: list[Any], wanted: list[int], cotangents: list[Tensor | None]
) -> dict[int, Tensor]:
    """The cotangents of the wanted leaves of one tile."""
    roots = [i for i, cotangent in enumerate(cotangents) if cotangent is not None]

    def of_wanted(*some: Tensor) -> tuple[Tensor, ...]:
        placed = list(leaves)
        for i, leaf in zip(wanted, some):
            placed[i] = leaf
        state, ys = plan.apply(placed)
        outputs = [*state, *ys]
        return tuple(outputs[i] for i in roots)

    given = [leaves[i] for i in wanted]
    if not roots:
        return {i: torch.zeros_like(leaf) for i, leaf in zip(wanted, given)}
    pulled: Any = torch.func.vjp(of_wanted, *given)
    # As is, the pullback would keep the graph and record a second one.
    with torch.no_grad():
        found = pulled[1](tuple(cotangents[i] for i in roots), retain_graph=False)
    return dict(zip(wanted, found))


def _whole(part: Tensor, plan: _Plan) -> Tensor:
    shape = list(part.shape)
    shape[plan.dim] = plan.tokens
    return part.new_empty(shape)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
