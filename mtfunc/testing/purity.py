"""What makes a stage impure, looked for by running it on private copies of real values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtfunc import _tree
from mtfunc._base import Batch, Carry, Key, Leaves, Params, Path
from mtfunc.program import Stage
from mtfunc.testing.backward import Call, functions, recorded
from mtfunc.testing.compare import Difference, differences, same
from mtfunc.testing.report import CheckError
from mtfunc.testing.surroundings import closed_over, generators, generators_kept
from mtfunc.trace import bind, is_differentiable

_DRAW = "Give the stage rng=True and draw with mt.random from its key="
_GENERATORS = {
    "torch's": _DRAW,
    "Python's": f"{_DRAW}, or draw outside and pass the value in the batch",
    "numpy's": f"{_DRAW}, or draw outside and pass a tensor in the batch",
}


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One stage, run on one micro-batch.

    Attributes:
        stage: the stage.
        micro: the micro-batch's number.
        params: copies of the parameter leaves that it read, by path.
        subtrees: the same by key, as the stage takes them.
        carry: the carry that it took, a copy.
        batch: the micro-batch, a copy.
        key: the step's key.
        out: the carry that it returned.
        calls: the calls of ``torch.autograd.Function`` in it.
        shared: what it returned that lies in its inputs' memory.
    """

    stage: Stage
    micro: int
    params: Leaves
    subtrees: dict[Path, Any]
    carry: Carry
    batch: Batch
    key: Key | None
    out: Carry
    calls: tuple[Call, ...]
    shared: tuple[Shared, ...]


@dataclass(frozen=True)
class Shared:
    """A carry leaf in the memory of a leaf of the ``"parameters"`` or the ``"batch"``."""

    leaf: Path
    what: str
    source: Path


def copy(leaf: Any) -> Any:
    """A tensor of the same values and layout in memory of its own; anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.detach().resolve_conj()
    if leaf.numel() == 0:
        return leaf.clone()
    extent = 1 + sum((n - 1) * step for n, step in zip(leaf.shape, leaf.stride()))
    flat = leaf.as_strided((extent,), (1,)).clone()
    return flat.as_strided(leaf.shape, leaf.stride())


def once(place: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same function of a leaf, which a leaf that occurs twice passes through once."""
    made: dict[int, tuple[Any, Any]] = {}

    def placed(leaf: Any) -> Any:
        if id(leaf) not in made:
            made[id(leaf)] = (place(leaf), leaf)
        return made[id(leaf)][0]

    return placed


def copies(tree: Any) -> Any:
    """The pytree with each distinct tensor copied once."""
    place = once(copy)
    return _tree.map_leaves(lambda _, leaf: place(leaf), tree)


def visit(
    stage: Stage, params: Params, carry: Carry, batch: Batch, key: Key | None, micro: int
) -> Visit:
    """Runs a stage on copies: as it is, with gradients recorded, and as it is again if they differ.

    Raises:
        CheckError: the stage is not a pure function.
    """
    binding = bind(stage, params)
    leaves = {path: copy(_tree.get(params, path)) for path in binding.paths}
    carry, batch = copies(carry), copies(batch)
    given = {"parameters": leaves, "carry": tensors(carry), "batch": tensors(batch)}

    def run(place: Callable[[Any], Any] = lambda leaf: leaf) -> tuple[Carry, Any]:
        own = [place(leaf) for leaf in leaves.values()]
        trees = [_tree.unflatten(spec, [own[i] for i in at]) for spec, at in binding.subtrees]
        taken = _tree.map_leaves(lambda _, leaf: place(leaf), carry)
        fresh = _tree.map_leaves(lambda _, leaf: leaf, batch)
        before, states = [_tree.flatten(tree)[0] for tree in (*trees, fresh)], generators()
        with torch.enable_grad(), generators_kept():
            out = stage.apply(trees, taken, fresh, key, micro)
            drawn = [whose for whose, state in generators().items() if states[whose] != state]
        _refuse_draws(stage.name, drawn)
        _refuse_assignments(stage.name, before, [*trees, fresh])
        return out

    with _naming(stage, micro):
        out = _watched(stage, given, run)
        again = run() if callable(stage.vjp) else run(once(_recording))
        if found := _apart(again, out):
            _refuse_difference(stage.name, found, _apart(run(), out))
        calls: list[Call] = []
        if classes := functions(tensors(again[0]).values()):
            with recorded(classes) as calls:
                run(once(_recording))
    return Visit(
        stage=stage,
        micro=micro,
        params=leaves,
        subtrees={name: _tree.get(params, name) for name in stage.keys},
        carry=carry,
        batch=batch,
        key=key,
        out=out[0],
        calls=tuple(calls),
        shared=tuple(_shared(given, out[0])),
    )


def tensors(tree: Any) -> Leaves:
    """The tensors of a pytree by path."""
    return {path: x for path, x in _tree.flatten(tree)[0].items() if isinstance(x, Tensor)}


def _recording(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and is_differentiable(leaf):
        return leaf.detach().requires_grad_()
    return leaf


def _watched(stage: Stage, given: dict[str, Leaves], run: Callable[[], Any]) -> tuple[Carry, Any]:
    """Runs the stage once and looks at all that it might have changed."""
    reached = closed_over(stage.fn)
    was = {what: {path: copy(x) for path, x in group.items()} for what, group in given.items()}
    versions = {id(x): x._version for group in (*given.values(), reached) for x in group.values()}
    out = run()
    for what, group in given.items():
        for path, leaf in group.items():
            if versions[id(leaf)] != leaf._version or not same(leaf, was[what][path]):
                raise _error(
                    stage.name,
                    "in-place",
                    f"changes its {what} in place, at {path or 'the top'!r}, so its recomputation "
                    "would start from other values; expected a pure function. Use the operation "
                    "without the trailing underscore, or clone() first",
                    path,
                )
    for path, leaf in reached.items():
        if versions[id(leaf)] != leaf._version:
            raise _error(
                stage.name,
                "in-place",
                f"changes {path!r} in place, a tensor that it closes over, so its recomputation "
                "would change it again; expected a pure function. Return the new value as aux "
                "(has_aux=True) or in the carry",
                path,
            )
    if any(leaf.requires_grad for leaf in tensors(out).values()):
        names = [path for path, leaf in reached.items() if leaf.requires_grad]
        raise _error(
            stage.name,
            "closure",
            f"closes over a tensor that requires grad{': ' * bool(names)}"
            f"{', '.join(map(repr, names[:4]))}. Its gradient would be lost; expected a pure "
            "function. Put the tensor in the parameters, under a key that the stage reads, or "
            "detach() it",
            names[0] if names else None,
        )
    return out


def _refuse_draws(name: str, drawn: Sequence[str]) -> None:
    for whose in drawn:
        raise _error(
            name,
            "generator",
            f"draws from {whose} global generator, so its recomputation would draw other numbers; "
            f"expected a pure function. {_GENERATORS[whose]}",
        )


def _refuse_assignments(name: str, before: Sequence[dict[Path, Any]], trees: Sequence[Any]) -> None:
    for number, (was, tree) in enumerate(zip(before, trees)):
        what, now = "batch" if number == len(trees) - 1 else "parameters", _tree.flatten(tree)[0]
        for path in dict.fromkeys((*was, *now)):
            if path not in was or path not in now or was[path] is not now[path]:
                raise _error(
                    name,
                    "in-place",
                    f"assigns to its {what} at {path!r}, which later stages of the standard graph "
                    "would see and streamed ones would not; expected a pure function. Make a dict "
                    "of your own, {**batch, ...}, or hand the value on in the carry",
                    path,
                )


def _apart(got: tuple[Carry, Any], expected: tuple[Carry, Any]) -> dict[Path, Difference]:
    return {
        f"{part}{'/' * bool(path)}{path}": difference
        for part, a, b in zip(("carry", "aux"), got, expected)
        for path, difference in differences(a, b).items()
    }


def _refuse_difference(
    name: str, found: dict[Path, Difference], repeated: dict[Path, Difference]
) -> None:
    path, difference = next(iter((repeated or found).items()))
    if repeated:
        raise _error(
            name,
            "repeat",
            f"gives other results when it runs again on the same inputs: {path!r}: {difference}. "
            "Expected a pure function, since the backward pass runs it again. Look for a counter, "
            "a clock, a generator or a cache that it keeps, memory from torch.empty that it does "
            "not fill, and kernels that are not deterministic",
            path,
        )
    raise _error(
        name,
        "repeat",
        f"gives other results when gradients are recorded: {path!r}: {difference}. Expected the "
        "same, since its first run records none and its second does. Look for requires_grad or "
        "torch.is_grad_enabled() in a condition, and for kernels chosen by them",
        path,
    )


def _shared(given: dict[str, Leaves], out: Carry) -> Iterator[Shared]:
    places = {
        leaf.untyped_storage().data_ptr(): (what, path)
        for what in ("parameters", "batch")
        for path, leaf in given[what].items()
        if leaf.numel()
    }
    for path, leaf in tensors(out).items():
        if leaf.untyped_storage().data_ptr() in places:
            yield Shared(path, *places[leaf.untyped_storage().data_ptr()])


def _error(name: str, kind: str, what: str, leaf: Path | None = None) -> CheckError:
    return CheckError(f"stage {name!r} {what}", kind=kind, stage=name, leaf=leaf)


@contextlib.contextmanager
def _naming(stage: Stage, micro: int) -> Iterator[None]:
    """Errors raised inside say which stage they come from."""
    try:
        yield
    except CheckError:
        raise
    except Exception as error:
        error.add_note(f"mtfunc: in stage {stage.name!r} on micro-batch {micro}, run by itself")
        raise
