"""One cell of the conformance matrix: a kind of stage, streamed, against plain autograd.

A kind is a function of parameters and a carry. It runs twice with the same parameters, between a
first stage that makes the carry and a last one that makes the loss, so that gradients flow into
it, through it and, by two ways, into what it reads::

    plain   loss = last(kind(kind(first(batch)))); loss.backward()
    streamed   the same four functions as stages, the kind's with vjp="func", "autograd" or a rule
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

import mtfunc as mt

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
ENGINES = ("func", "autograd", "rule")
DEVICES = {
    "cpu": mt.StreamConfig(),
    "sim": mt.StreamConfig(slots=1, grad_slots=1, carries="host"),
}
"""Where stages run; the simulated device keeps as little as it can."""

B, T, D = 2, 6, 8
"""The carry of most kinds is ``(B, T, D)``."""

KEY = 7


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A row of the matrix.

    Attributes:
        group: the heading that it stands under.
        name: what it is, in words.
        fn: the stage, ``fn(p, carry, batch) -> carry``, or ``fn(p, carry, batch, key=)``.
        params: a shape for each parameter that is drawn, or a tensor.
        enter: makes the first carry from ``(B, T, D)``.
        leave: makes something real to square and sum from the last carry.
        rule: a pullback rule of its own; else the derivative of ``fn``, by ``torch.autograd.grad``.
        plain: what ``fn`` with that rule means, in plain torch.
        rng: whether ``fn`` takes a key.
        model: a model of ``models/`` instead of all this.
    """

    group: str
    name: str
    fn: Callable[..., Any] | None = None
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    enter: Callable[[Tensor], Any] = lambda x: x
    leave: Callable[[Any], Tensor] = lambda x: x
    rule: Callable[..., Any] | None = None
    plain: Callable[..., Any] | None = None
    rng: bool = False
    model: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What a cell says: ``equal``, ``refused`` by an error, or ``wrong``, which must never be.

    Attributes:
        outcome: one of the three.
        text: the error's type and message, or what differs.
        plain: whether plain torch refuses it too.
    """

    outcome: str
    text: str = ""
    plain: bool = False


Drawn = tuple[dict[str, Any], dict[str, Tensor]]


def draw(kind: Kind, dtype: torch.dtype) -> Drawn:
    """Parameters and a batch of a kind, from a seed."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).mul(0.4).to(dtype)

    def leaf(given: Any) -> Tensor:
        if not isinstance(given, Tensor):
            return normal(*given)
        return given.to(dtype if given.is_floating_point() else given.dtype, copy=True)

    params = {
        "first": {"w": normal(D, D)},
        "kind": {name: leaf(given) for name, given in kind.params.items()},
        "last": {"w": normal(D)},
    }
    tokens = torch.randint(0, 5, (B, T), generator=generator)
    tokens[0, :2] = 0
    return params, {"x": normal(B, T, D), "tokens": tokens}


def plain(kind: Kind, dtype: torch.dtype, by_rule: bool) -> tuple[Tensor, dict[str, Any]]:
    """The loss and the gradients by plain autograd, without this library."""
    assert kind.fn is not None
    params, batch = draw(kind, dtype)
    fn = kind.fn
    if by_rule:
        fn = kind.plain or as_node(kind.fn)
    leaves = [x for x in pytree.tree_leaves(params) if _differentiable(x)]
    for leaf in leaves:
        leaf.requires_grad_()
    carry = first(kind)(params["first"], None, batch)
    for name in ("one", "two"):
        options = {"key": _key(name)} if kind.rng else {}
        carry = fn(params["kind"], carry, batch, **options)
    loss = last(kind)(params["last"], carry, batch)
    loss.backward()
    grads = pytree.tree_map(_gradient, params)
    return loss.detach(), grads


def as_node(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function as one node of the graph, as one with a rule is: its gradients are summed."""

    def apply(p: Any, carry: Any, batch: Any, **options: Any) -> Any:
        leaves, spec = pytree.tree_flatten((p, carry))
        made: dict[str, Any] = {}

        def run(given: Any) -> list[Any]:
            tree, carry = pytree.tree_unflatten(given, spec)
            outputs, made["spec"] = pytree.tree_flatten(fn(tree, carry, batch, **options))
            return outputs

        class Node(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *given: Any) -> Any:
                ctx.given = given
                ctx.set_materialize_grads(False)
                outputs = tuple(
                    x.clone() if isinstance(x, Tensor) and any(x is y for y in given) else x
                    for x in run(given)
                )
                fixed = [x for x in outputs if isinstance(x, Tensor) and not _differentiable(x)]
                ctx.mark_non_differentiable(*fixed)
                return outputs

            @staticmethod
            def backward(ctx: Any, *cotangents: Any) -> Any:
                inputs = [x.detach() if isinstance(x, Tensor) else x for x in ctx.given]
                wanted = [x.requires_grad_() for x in inputs if _differentiable(x)]
                with torch.enable_grad():
                    pairs = [(y, c) for y, c in zip(run(inputs), cotangents) if c is not None]
                pairs = [(y, c) for y, c in pairs if y.requires_grad]
                roots, seeds = [y for y, _ in pairs], [c for _, c in pairs]
                grads = (
                    torch.autograd.grad(roots, wanted, seeds, allow_unused=True) if roots else ()
                )
                found = dict(zip(map(id, wanted), grads))
                return tuple(found.get(id(x)) for x in inputs)

        return pytree.tree_unflatten(list(Node.apply(*leaves)), made["spec"])

    return apply


def _gradient(leaf: Tensor) -> Tensor | None:
    if not leaf.requires_grad:
        return None
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _key(name: str) -> Any:
    return mt.random.fold_in(mt.random.fold_in(mt.random.key(KEY), name), 0)


def first(kind: Kind) -> Callable[..., Any]:
    """The stage that makes the carry."""

    def make(p: Any, carry: Any, batch: Any) -> Any:
        return kind.enter(batch["x"] @ p["w"])

    return make


def last(kind: Kind) -> Callable[..., Tensor]:
    """The stage that makes the loss."""

    def square(p: Any, carry: Any, batch: Any) -> Tensor:
        return (kind.leave(carry) * p["w"]).square().sum()

    return square


def derivative(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A pullback rule that does what autograd does."""

    def rule(*given: Any, **options: Any) -> Any:
        *trees, batch, cotangent = given
        leaves, spec = pytree.tree_flatten(trees)
        leaves = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        wanted = [x.requires_grad_() for x in leaves if _differentiable(x)]
        with torch.enable_grad():
            outputs = pytree.tree_leaves(fn(*pytree.tree_unflatten(leaves, spec), batch, **options))
        pairs = [(y, c) for y, c in zip(outputs, pytree.tree_leaves(cotangent)) if c is not None]
        pairs = [(y, c) for y, c in pairs if y.requires_grad]
        roots, seeds = [y for y, _ in pairs], [c for _, c in pairs]
        grads = torch.autograd.grad(roots, wanted, seeds, allow_unused=True) if roots else ()
        found = dict(zip(map(id, wanted), grads))
        return tuple(pytree.tree_unflatten([found.get(id(x)) for x in leaves], spec))

    return rule


def program(kind: Kind, engine: str) -> mt.Program:
    """The four stages; the kind's two are differentiated by ``engine``."""
    assert kind.fn is not None
    vjp: Any = (kind.rule or derivative(kind.fn)) if engine == "rule" else engine
    return mt.chain(
        mt.stage(first(kind), "first"),
        *(mt.stage(kind.fn, "kind", name=n, vjp=vjp, rng=kind.rng) for n in ("one", "two")),
        mt.stage(last(kind), "last"),
    )


def model(name: str, engine: str) -> Callable[[torch.dtype], tuple[mt.Program, Any, Any]]:
    """A language model whose layers are differentiated by ``engine``."""
    import models

    module, config = models.get(name)
    config = dataclasses.replace(config, depth=2, width=16, vocab=29)

    def build(dtype: torch.dtype) -> tuple[mt.Program, Any, Any]:
        params = module.init(config, mt.random.key(0))
        params = pytree.tree_map(lambda x: x.to(dtype), params)
        parts = []
        for part in module.program(config):
            if hasattr(part, "fns"):
                vjp = derivative(part.fns[0]) if engine == "rule" else engine
                part = dataclasses.replace(part, vjp=vjp)
            parts.append(part)
        text = torch.randint(0, 29, (2, 7), generator=torch.Generator().manual_seed(0))
        return mt.chain(*parts), params, {"tokens": text[:, :-1], "labels": text[:, 1:]}

    return build


def cell(kind: Kind, engine: str, device: str, dtype: torch.dtype) -> Verdict:
    """Streams a kind and says how that went."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = _attempt(lambda: _plain(kind, engine, dtype))
        got = _attempt(lambda: _streamed(kind, engine, device, dtype))
    if isinstance(got, Exception):
        return Verdict("refused", message(got), isinstance(expected, Exception))
    if isinstance(expected, Exception):
        return Verdict("wrong", f"a number, where plain torch raises {message(expected)}")
    return _compare(got, expected)


def _attempt(f: Callable[[], Any]) -> Any:
    try:
        return f()
    except Exception as error:
        return error


def _plain(kind: Kind, engine: str, dtype: torch.dtype) -> Any:
    if kind.model is None:
        return plain(kind, dtype, engine == "rule")
    program, params, batch = model(kind.model, "func")(dtype)
    return mt.reference.value_and_grad(program)(params, batch)


def _streamed(kind: Kind, engine: str, device: str, dtype: torch.dtype) -> Any:
    if kind.model is not None:
        made, params, batch = model(kind.model, engine)(dtype)
    else:
        made = program(kind, engine)
        params, batch = draw(kind, dtype)
    f = mt.value_and_grad(
        made, device=f"{device}:0" if device == "sim" else device, config=DEVICES[device]
    )
    return f(params, batch, mt.random.key(KEY) if kind.rng else None)


def _compare(got: Any, expected: Any) -> Verdict:
    (loss, grads), (loss_, grads_) = got, expected
    pairs = {"the loss": (loss, loss_)}
    here, there = (dict(pytree.tree_flatten_with_path(tree)[0]) for tree in (grads, grads_))
    if here.keys() != there.keys():
        return Verdict("wrong", "the gradients have another structure")
    pairs |= {pytree.keystr(path): (here[path], there[path]) for path in there}
    for path, (a, b) in pairs.items():
        if (a is None) != (b is None) or (a is not None and _bits(a) != _bits(b)):
            return Verdict("wrong", f"{path} differs")
    return Verdict("equal")


def _bits(leaf: Tensor) -> Any:
    flat = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
    flat = flat.detach().contiguous().reshape(-1)
    return leaf.shape, leaf.dtype, flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def message(error: Exception) -> str:
    """An error's type and the first sentence of what it says."""
    text = " ".join(str(error).split()).split(". ")[0][:200]
    return f"{type(error).__name__}: {text}"
