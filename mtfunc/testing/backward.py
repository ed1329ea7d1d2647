"""Hand-written backwards against finite differences, in float64.

A pullback ``v`` of ``f`` at ``x`` must satisfy ``<v, d> = <c, f(x + e d) - f(x - e d)> / 2e`` for
cotangent ``c`` and any direction ``d``, to second order in ``e`` (central differences, Nocedal and
Wright, Numerical Optimization, section 8.1). It is asked of one input at a time, so that a small
input's error is not lost beside a large one's.

A kink gives no false alarm: a difference counts only if half the step gives the same, and what
disagrees at the given point must disagree at points near it too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtfunc.testing.compare import kind

STEPS = (1e-4, 1e-3, 1e-5, 1e-6)
"""Relative to the size of the input."""
POINTS = 4
"""The given point, and others a thousandth away."""
STEADY = 1e-6
"""How well a step and half of it must agree, relative to the difference."""
TOLERANCE = 1e-5
"""How well a pullback must agree, relative to the difference."""

Function = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class Gap(NamedTuple):
    """A cotangent along a direction, and what the finite difference says."""

    got: float
    expected: float
    step: float


class Call(NamedTuple):
    """One call of a ``torch.autograd.Function``."""

    cls: Any
    args: tuple[Any, ...]
    wanted: tuple[int, ...]
    """The arguments that required grad."""

    @property
    def signature(self) -> Any:
        """Calls with the same are checked once."""
        return self.cls, *(kind(x) if isinstance(x, Tensor) else repr(x) for x in self.args)


def functions(outputs: Iterable[Tensor]) -> set[Any]:
    """The classes of hand-written ``torch.autograd.Function`` in the graph of these outputs."""
    nodes = [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen, found = set(nodes), set()
    while nodes:
        node = nodes.pop()
        cls = getattr(node, "_forward_cls", None)
        if cls is not None and cls.__module__.partition(".")[0] != "torch":
            found.add(cls)
        fresh = {next_ for next_, _ in node.next_functions if next_ is not None} - seen
        seen |= fresh
        nodes.extend(fresh)
    return found


@contextlib.contextmanager
def recorded(classes: Iterable[Any]) -> Iterator[list[Call]]:
    """Collects the calls of these classes inside.

    Their ``forward`` is replaced for a while, since an ``apply`` that somebody holds would pass by
    another one.
    """
    calls: list[Call] = []
    with contextlib.ExitStack() as stack:
        for cls in classes:
            stack.callback(_restore, cls, cls.__dict__.get("forward"))
            cls.forward = staticmethod(_recording(cls, cls.forward, calls))
        yield calls


def _recording(cls: Any, forward: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    apart = cls.setup_context is not torch.autograd.Function.setup_context

    @functools.wraps(forward)
    def record(*args: Any) -> Any:
        given = args if apart else args[1:]
        wanted = tuple(i for i, x in enumerate(given) if isinstance(x, Tensor) and x.requires_grad)
        if wanted:
            plain = tuple(x.detach() if isinstance(x, Tensor) else x for x in given)
            calls.append(Call(cls, plain, wanted))
        return forward(*args)

    return record


def _restore(cls: Any, forward: Any) -> None:
    if forward is None:
        del cls.forward
    else:
        cls.forward = forward


def check_call(call: Call) -> dict[int, Gap | str]:
    """What is wrong with a Function's backward, by argument; see :func:`gaps`."""

    def f(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        rest = iter(inputs)
        args = [next(rest) if isinstance(x, Tensor) else x for x in call.args]
        out = call.cls.apply(*args)
        return [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)]

    at = [i for i, x in enumerate(call.args) if isinstance(x, Tensor)]
    found = gaps(f, [call.args[i] for i in at], [at.index(i) for i in call.wanted])
    return {at[i]: gap for i, gap in found.items()}


def gaps(
    f: Function,
    inputs: Sequence[Tensor],
    wanted: Sequence[int],
    autograd: Function | None = None,
) -> dict[int, Gap | str]:
    """Compares the gradients that autograd finds for ``f`` with central differences.

    Args:
        f: takes and returns tensors; its backward is in question.
        inputs: where; floating ones are made float64.
        wanted: the inputs whose cotangents are checked.
        autograd: the same function differentiated by autograd, if there is one; to agree with it
            is right too, since a detach() is no derivative.

    Returns:
        A :class:`Gap` for each input that disagrees, a reason for each that could not be checked;
        nothing for those that agree.
    """
    generator = torch.Generator().manual_seed(0)
    given = [x.detach().double() if x.is_floating_point() else x.detach() for x in inputs]
    wanted = [i for i in wanted if given[i].dtype == torch.float64 and given[i].numel()]
    left: dict[int, list[Gap | str]] = {i: [] for i in wanted}
    for number in range(POINTS):
        point = given if number == 0 else [_near(x, generator) for x in given]
        try:
            pulled = _pull(f, point, wanted, generator)
            for i in list(left):
                gap = pulled(i)
                if gap is None:
                    del left[i]
                else:
                    left[i].append(gap)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
            return {i: f"it does not take float64, {reason}" for i in left}
        if not left:
            return {}
    if autograd is not None and _alike(f, autograd, given, wanted):
        return {}
    return {i: _verdict(found) for i, found in left.items()}


def _alike(f: Function, g: Function, point: Sequence[Tensor], wanted: Sequence[int]) -> bool:
    """Whether two functions have the same pullback at a point."""
    found = []
    for function in (f, g):
        leaves = [x.detach().clone().requires_grad_(i in wanted) for i, x in enumerate(point)]
        with torch.enable_grad():
            outputs = [x for x in function(leaves) if x.requires_grad]
        if not outputs:
            return False
        generator = torch.Generator().manual_seed(1)
        cotangents = [_like(x, generator) for x in outputs]
        own = [leaves[i] for i in wanted]
        found.append(
            torch.autograd.grad(outputs, own, cotangents, allow_unused=True, materialize_grads=True)
        )
    return all(torch.allclose(a, b, rtol=1e-6, atol=1e-12) for a, b in zip(*found))


def _verdict(found: list[Gap | str]) -> Gap | str:
    sure = [gap for gap in found if isinstance(gap, Gap)]
    if len(sure) >= 2:
        return sure[0]
    return next(gap for gap in found if isinstance(gap, str)) if len(sure) < len(found) else sure[0]


def _pull(
    f: Function, point: Sequence[Tensor], wanted: Sequence[int], generator: torch.Generator
) -> Callable[[int], Gap | str | None]:
    """The pullback at a point, as a function that compares it in one input."""
    leaves = [x.detach().clone() for x in point]
    for i in wanted:
        leaves[i].requires_grad_()
    with torch.enable_grad():
        outputs = f(leaves)
    roots = [n for n, out in enumerate(outputs) if out.requires_grad and out.is_floating_point()]
    cotangents = [_like(outputs[n], generator) for n in roots]
    grads: Sequence[Tensor | None] = [None] * len(wanted)
    if roots:
        grads = torch.autograd.grad(
            [outputs[n] for n in roots],
            [leaves[i] for i in wanted],
            cotangents,
            allow_unused=True,
        )
    noise = 1e-14 * sum(
        float((outputs[n].detach() * c).abs().sum()) for n, c in zip(roots, cotangents)
    )
    narrow = [kind(outputs[n]) for n in roots if outputs[n].dtype != torch.float64]

    def along(i: int, direction: Tensor, step: float) -> Tensor:
        with torch.no_grad():
            ends = []
            for sign in (step, -step):
                moved = [x.detach() for x in point]
                moved[i] = moved[i] + sign * direction
                out = f(moved)
                ends.append([out[n].double() for n in roots])
        parts = [((a - b) * c).sum() for a, b, c in zip(*ends, cotangents)]
        return torch.stack(parts).sum() / (2 * step)

    def compare(i: int) -> Gap | str | None:
        direction = _like(point[i], generator) * _size(point[i])
        grad = grads[list(wanted).index(i)]
        got = 0.0 if grad is None else float((grad.double() * direction).sum())
        if not roots:
            return None
        for step in STEPS:
            whole, half = (float(along(i, direction, e)) for e in (step, step / 2))
            size, rounding = max(abs(whole), abs(half), abs(got)), noise / step
            if abs(whole - half) <= STEADY * size + rounding:
                agree = abs(got - half) <= TOLERANCE * size + rounding
                return None if agree else Gap(got, half, step)
        if narrow:
            return f"it computes {narrow[0]} from float64"
        return "differences of its forward do not settle, as at a kink or in low precision"

    return compare


def _near(leaf: Tensor, generator: torch.Generator) -> Tensor:
    return leaf + 1e-3 * _size(leaf) * _like(leaf, generator) if leaf.is_floating_point() else leaf


def _like(leaf: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(leaf.shape, dtype=torch.float64, generator=generator).to(leaf.dtype)


def _size(leaf: Tensor) -> float:
    """The root mean square of a leaf, or 1."""
    size = float(leaf.detach().square().mean().sqrt()) if leaf.numel() else 1.0
    return size if 0 < size < float("inf") else 1.0
