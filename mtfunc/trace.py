"""What a stage takes and returns: shapes, dtypes, identities and what depends on what.

Each distinct stage runs once on meta tensors, which cost nothing. A stage whose shapes depend on
data cannot run there; then the whole program runs forward once on the real leaves.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtfunc import _tree
from mtfunc._base import Batch, Carry, Key, Params, Path
from mtfunc.loss import as_mean
from mtfunc.program import Stage

Flat = Callable[[Sequence[Tensor]], tuple[list[Tensor], list[Tensor]]]
"""``flat(inputs) -> (fresh outputs, aux leaves)`` with batch and key bound."""


class Aval(NamedTuple):
    """The shape of an array without its values; ``active`` says that gradients flow into it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    active: bool = False

    @classmethod
    def of(cls, leaf: Tensor, active: bool = False) -> Aval:
        """The abstract value of a tensor."""
        return cls(tuple(leaf.shape), leaf.dtype, leaf.stride(), active)

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the last, gaps of a strided layout included."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride))
        return (last + 1) * self.dtype.itemsize

    def dense(self) -> Aval:
        """The same with memory of its own for each element, as gradients have it."""
        if self.nbytes >= math.prod(self.shape) * self.dtype.itemsize:
            return self
        stride = torch.empty(self.shape, device="meta").stride()
        return self._replace(stride=stride)

    def meta(self) -> Tensor:
        """A meta tensor of this shape, dtype and layout."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return made.requires_grad_(self.active)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{','.join(map(str, self.shape))}]"


class Binding(NamedTuple):
    """The parameter leaves that a stage reads, each once, and how its subtrees hold them."""

    paths: tuple[Path, ...]
    subtrees: tuple[tuple[_tree.Spec, tuple[int, ...]], ...]


def bind(stage: Stage, params: Params) -> Binding:
    """Which leaves of ``params`` a stage reads; one that two keys name is one leaf."""
    paths: dict[Path, int] = {}
    subtrees = []
    for key in stage.keys:
        leaves, spec = _tree.flatten(_tree.get(params, key), key)
        places = tuple(paths.setdefault(path, len(paths)) for path in leaves)
        subtrees.append((spec, places))
    return Binding(tuple(paths), tuple(subtrees))


class CarrySpec(NamedTuple):
    """The structure of a carry, and for each leaf position which of the distinct leaves it is."""

    spec: _tree.Spec
    places: tuple[int, ...]

    @property
    def width(self) -> int:
        """How many distinct leaves there are."""
        return max(self.places, default=-1) + 1

    def build(self, leaves: Sequence[Tensor | None]) -> Carry:
        """The carry with these distinct leaves."""
        return _tree.unflatten(self.spec, [leaves[i] for i in self.places])


EMPTY = CarrySpec(_tree.NONE, ())


@dataclass(frozen=True, eq=False, kw_only=True)
class Traced:
    """One stage at given shapes.

    Its flat inputs are its parameter leaves, then the distinct leaves of its carry.

    Attributes:
        stage: the stage.
        binding: its parameter leaves.
        carry_in: the structure of the carry that it takes.
        final: whether it returns the loss.
        inputs: the abstract values of the flat inputs.
        carry_out: the structure of the carry that it returns.
        sources: for each distinct leaf of ``carry_out`` the flat input that it is, passed on
            unchanged, or ``None`` for a fresh output.
        outputs: the abstract values of the fresh outputs.
        aux_spec: the structure of the aux value.
        aux: the abstract values of its leaves.
        connect: which active inputs the given fresh outputs depend on.
        learnt: what :mod:`mtfunc.recompute` and :mod:`mtfunc.residuals` learnt by running it,
            shared by stages with one trace.
    """

    stage: Stage
    binding: Binding
    carry_in: CarrySpec
    final: bool
    inputs: tuple[Aval, ...]
    carry_out: CarrySpec = EMPTY
    sources: tuple[int | None, ...] = ()
    outputs: tuple[Aval, ...] = ()
    aux_spec: _tree.Spec = _tree.NONE
    aux: tuple[Aval, ...] = ()
    connect: Callable[[tuple[int, ...]], tuple[int, ...]] = field(default=lambda outputs: ())
    learnt: dict[Any, Any] = field(default_factory=dict)

    @property
    def n_params(self) -> int:
        """How many of the flat inputs are parameter leaves."""
        return len(self.binding.paths)

    @property
    def active(self) -> tuple[int, ...]:
        """The inputs that gradients flow into."""
        return tuple(i for i, aval in enumerate(self.inputs) if aval.active)

    def subtrees(self, inputs: Sequence[Any]) -> list[Any]:
        """The parameter subtrees with these flat inputs."""
        return [
            _tree.unflatten(spec, [inputs[i] for i in places])
            for spec, places in self.binding.subtrees
        ]

    def carry(self, inputs: Sequence[Any]) -> Carry:
        """The carry that the stage takes with these flat inputs."""
        return self.carry_in.build(inputs[self.n_params :])

    def apply(
        self, inputs: Sequence[Tensor], batch: Batch, key: Key | None, micro: int
    ) -> tuple[dict[str, Any], _tree.Spec, dict[str, Any], _tree.Spec]:
        """Runs the stage: carry leaves and structure, aux leaves and structure."""
        out, aux = self.stage.apply(self.subtrees(inputs), self.carry(inputs), batch, key, micro)
        if self.final:
            out = as_mean(self.stage.name, out)
        return *_tree.flatten(out), *_tree.flatten(aux)

    def flat(self, batch: Batch, key: Key | None, micro: int) -> Flat:
        """The stage as a function of its flat inputs: fresh outputs and aux leaves.

        Raises:
            ValueError: it returns another structure or other shapes than when it was traced.
        """

        def run(inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            leaves, spec, aux, aux_spec = self.apply(inputs, batch, key, micro)
            if spec != self.carry_out.spec or aux_spec != self.aux_spec:
                raise ValueError(
                    f"stage {self.stage.name!r} returned {spec} and aux {aux_spec}; expected "
                    f"{self.carry_out.spec} and {self.aux_spec}, as when it first ran with these "
                    "shapes. What a stage returns cannot depend on values"
                )
            distinct = dict(zip(self.carry_out.places, leaves.values()))
            fresh = [distinct[i] for i, source in enumerate(self.sources) if source is None]
            for i, source in enumerate(self.sources):
                if source is not None and distinct[i] is not inputs[source]:
                    raise ValueError(
                        f"stage {self.stage.name!r} returned another tensor where it passed on a "
                        "leaf of its carry when it first ran with these shapes. What a stage "
                        "returns cannot depend on values: use torch.where"
                    )
            for leaf, aval in zip(fresh, self.outputs):
                if tuple(leaf.shape) != aval.shape or leaf.dtype != aval.dtype:
                    raise ValueError(
                        f"stage {self.stage.name!r} returned {Aval.of(leaf)}; expected {aval}, "
                        "as when it first ran with these shapes. Shapes inside a stage may "
                        "depend on values, but not those that it returns"
                    )
            reported = [as_tensor(leaf) for leaf in aux.values()]
            for leaf, aval in zip(reported, self.aux):
                if tuple(leaf.shape) != aval.shape or leaf.dtype != aval.dtype:
                    raise ValueError(
                        f"stage {self.stage.name!r} reported aux {Aval.of(leaf)}; expected {aval}, "
                        "as when it first ran with these shapes. Shapes of aux values cannot "
                        "depend on values"
                    )
            return fresh, reported

        return run


class Tracer:
    """Traces the stages of one program, each distinct one once.

    Args:
        params: the parameter pytree, real or meta.
        active: whether gradients flow into the parameter leaf at a path.
        key: the step's key.
    """

    def __init__(self, params: Params, active: Callable[[Path], bool], key: Key | None):
        self.params, self.active, self.key = params, active, key
        # What is drawn from a meta key is meta, as all else that a stage works on.
        self.meta_key = None if key is None else key.to("meta")
        self.leaves = _tree.flatten(params)[0]
        self.cache: dict[Any, Traced] = {}

    def program(self, stages: Sequence[Stage], batch: Batch, loss: bool) -> list[Traced]:
        """Every stage for one micro-batch.

        Args:
            stages: the program's stages in order.
            batch: one micro-batch; its values are read only if a stage's shapes depend on them.
            loss: whether the last stage returns the loss.

        Raises:
            TypeError: a stage returns something that is no pytree of tensors.
            ValueError: an entry of a scan changes its carry, or a stage changes its arguments.
        """
        try:
            return self._run(stages, _tree.map_leaves(_to_meta, batch), loss, real=False)
        except Exception as error:
            if not _is_about_meta(error) or any(leaf.is_meta for leaf in self.leaves.values()):
                raise
        values = _tree.map_leaves(lambda _, x: x.detach() if isinstance(x, Tensor) else x, batch)
        return self._run(stages, values, loss, real=True)

    def _run(self, stages: Sequence[Stage], batch: Batch, loss: bool, real: bool) -> list[Traced]:
        traced: list[Traced] = []
        carry_in = EMPTY
        avals: tuple[Aval, ...] = ()
        carried: list[Tensor] = []
        for i, stage in enumerate(stages):
            binding = bind(stage, self.params)
            params = tuple(Aval.of(self.leaves[p], self.active(p)) for p in binding.paths)
            site = Traced(
                stage=stage,
                binding=binding,
                carry_in=carry_in,
                final=loss and i == len(stages) - 1,
                inputs=params + avals,
            )
            maker = stages[i - 1].name if i else ""
            if real:
                inputs = [self.leaves[path] for path in binding.paths] + carried
                done, outputs = _trace(site, batch, self.key, inputs, maker)
                fresh = iter(outputs)
                carried = [next(fresh) if s is None else inputs[s] for s in done.sources]
            else:
                done = self._cached(site, batch, maker)
            if stage.scan is not None:
                _check_scan(done)
                _check_aux(done, traced[-1] if traced else None)
            carry_in, avals = done.carry_out, _carry_avals(done)
            traced.append(done)
        return traced

    def _cached(self, site: Traced, batch: Batch, maker: str) -> Traced:
        stage = site.stage
        leaves, spec = _tree.flatten(batch)
        values = tuple(Aval.of(x) if isinstance(x, Tensor) else repr(x) for x in leaves.values())
        # Statics by their text too: 1, 1.0 and True are equal and mean different things.
        static = (stage.static, repr(stage.static))
        what = (stage.fn, static, stage.vjp, stage.rng, stage.has_aux, spec, values)
        where = (site.binding.subtrees, site.carry_in, site.final, site.inputs)
        if (what, where) not in self.cache:
            metas = [aval._replace(active=False).meta() for aval in site.inputs]
            self.cache[what, where] = _trace(site, batch, self.meta_key, metas, maker)[0]
        return replace(self.cache[what, where], stage=stage, binding=site.binding)


def _trace(
    site: Traced, batch: Batch, key: Key | None, inputs: Sequence[Tensor], maker: str
) -> tuple[Traced, list[Tensor]]:
    """Runs a stage on these inputs; returns what was learnt, and its fresh outputs detached.

    ``maker`` is the stage that the carry comes from, for people.
    """
    name = site.stage.name
    leaves = [leaf.detach() for leaf in inputs]
    watched = {"parameters": leaves[: site.n_params], "carry": leaves[site.n_params :]}
    watched["batch"] = [x for x in _tree.flatten(batch)[0].values() if isinstance(x, Tensor)]
    before = {what: [x._version for x in group] for what, group in watched.items()}
    with torch.enable_grad(), _named(site, maker):
        out, _, _, _ = site.apply(leaves, batch, key, 0)
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in out.values()):
        raise ValueError(
            f"stage {name!r} closes over a tensor that requires grad, whose gradient would be "
            "lost; expected a pure function. Put the tensor in the parameters, or detach() it"
        )
    for what, group in watched.items():
        if before[what] != [leaf._version for leaf in group]:
            raise ValueError(
                f"stage {name!r} changes its {what} in place; expected a pure function. Use the "
                "operation without the trailing underscore, or clone() first"
            )

    leaves = [x.detach().requires_grad_(aval.active) for x, aval in zip(inputs, site.inputs)]
    with torch.enable_grad(), _named(site, maker):
        carry, spec, aux, aux_spec = site.apply(leaves, batch, key, 0)
    for path, leaf in carry.items():
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"stage {name!r} returned a {type(leaf).__name__} at {path or 'the top'!r} of its "
                "carry; expected a pytree of tensors and None. Pass numbers as static arguments "
                "or in the batch"
            )
    known = {id(leaf): i for i, leaf in enumerate(leaves) if i >= site.n_params}
    places: dict[int, int] = {}
    for leaf in carry.values():
        places.setdefault(id(leaf), len(places))
    distinct = {id(leaf): leaf for leaf in carry.values()}
    sources = tuple(known.get(i) for i in distinct)
    fresh = [leaf for i, leaf in distinct.items() if i not in known]
    done = replace(
        site,
        carry_out=CarrySpec(spec, tuple(places[id(leaf)] for leaf in carry.values())),
        sources=sources,
        outputs=tuple(Aval.of(leaf, _learns(site, leaf)) for leaf in fresh),
        aux_spec=aux_spec,
        aux=tuple(Aval.of(as_tensor(leaf)) for leaf in aux.values()),
        connect=_connections(site, leaves, fresh),
    )
    return done, [leaf.detach() for leaf in fresh]


def _learns(site: Traced, leaf: Tensor) -> bool:
    """Whether gradients flow through an output; a rule knows ways that autograd does not."""
    if callable(site.stage.vjp):
        return bool(site.active) and is_differentiable(leaf)
    return leaf.requires_grad


def _connections(
    site: Traced, inputs: list[Tensor], outputs: list[Tensor]
) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    every = site.active
    if callable(site.stage.vjp) or any(not leaf.is_meta for leaf in inputs):
        return lambda wanted: every if wanted else ()

    @functools.cache
    def connect(wanted: tuple[int, ...]) -> tuple[int, ...]:
        if not wanted or not every:
            return ()
        roots = [outputs[i] for i in wanted]
        zeros = [torch.zeros_like(root) for root in roots]
        leaves = [inputs[i] for i in every]
        try:
            found = torch.autograd.grad(roots, leaves, zeros, allow_unused=True, retain_graph=True)
        except Exception as error:
            if not _is_about_meta(error):
                raise
            return every
        return tuple(i for i, grad in zip(every, found) if grad is not None)

    return connect


def _carry_avals(done: Traced) -> tuple[Aval, ...]:
    fresh = iter(done.outputs)
    return tuple(next(fresh) if s is None else done.inputs[s] for s in done.sources)


def _check_scan(done: Traced) -> None:
    def leaves(spec: CarrySpec, avals: Sequence[Aval]) -> dict[str, str]:
        return dict(zip(spec.spec.paths(), (str(avals[i]) for i in spec.places)))

    took = leaves(done.carry_in, done.inputs[done.n_params :])
    gave = leaves(done.carry_out, _carry_avals(done))
    for path in sorted({*took, *gave}):
        if took.get(path) != gave.get(path):
            pair = done.carry_out.spec.kind is tuple and done.carry_in.spec.kind is not tuple
            raise ValueError(
                f"scan entry {done.stage.name!r} changes the carry at {path or 'the top'!r}: took "
                f"{took.get(path, 'nothing')}, returned {gave.get(path, 'nothing')}; expected the "
                "same structure, shapes and dtypes. A stage of its own (mt.stage) may change them"
                + ". Did you mean has_aux=True, for a pair (carry, aux)?"
                * pair
            )
    if done.carry_in.spec.canonical() != done.carry_out.spec.canonical():
        raise ValueError(
            f"scan entry {done.stage.name!r} took a carry {done.carry_in.spec} and returned "
            f"{done.carry_out.spec}; expected the same structure"
        )


def _check_aux(done: Traced, before: Traced | None) -> None:
    if before is None or before.stage.scan != done.stage.scan:
        return
    shapes = [[aval.shape for aval in one.aux] for one in (before, done)]
    if before.aux_spec.canonical() != done.aux_spec.canonical() or shapes[0] != shapes[1]:
        raise ValueError(
            f"scan entry {done.stage.name!r} reports aux {done.aux_spec} of shapes {shapes[1]}; "
            f"expected {before.aux_spec} of shapes {shapes[0]}, as the entry before, since the "
            "entries' aux values are stacked"
        )


@contextlib.contextmanager
def _named(site: Traced, maker: str) -> Iterator[None]:
    """Errors raised inside say which stage they come from, and what it was given."""
    try:
        yield
    except Exception as error:
        if not any("in stage" in note for note in getattr(error, "__notes__", ())):
            error.add_note(
                f"mtfunc: in stage {site.stage.name!r}, when it first ran with these shapes; it "
                f"was given {_given(site, maker)}"
            )
        raise


def _given(site: Traced, maker: str) -> str:
    """A stage's arguments by their shapes."""

    def shown(spec: _tree.Spec, places: Sequence[int], inputs: Sequence[Aval]) -> str:
        pairs = [f"{path} {inputs[i]}".strip() for path, i in zip(spec.paths(), places)]
        return "{" + ", ".join(pairs[:12]) + ", …" * (len(pairs) > 12) + "}"

    parts = [
        f"{key} = {shown(spec, places, site.inputs)}"
        for key, (spec, places) in zip(site.stage.keys, site.binding.subtrees)
    ]
    carry = shown(site.carry_in.spec, site.carry_in.places, site.inputs[site.n_params :])
    parts.append(f"the carry {carry} of {maker!r}" if maker else "no carry, as the first")
    return "; ".join(parts)


def _is_about_meta(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or "meta" in str(error).lower()


def _to_meta(path: str, leaf: Any) -> Any:
    return Aval.of(leaf).meta() if isinstance(leaf, Tensor) else leaf


def as_tensor(leaf: Any) -> Tensor:
    """An aux leaf as a detached tensor; numbers become scalars."""
    return leaf.detach() if isinstance(leaf, Tensor) else torch.tensor(leaf)


def is_differentiable(leaf: Tensor) -> bool:
    """Whether a leaf's dtype has gradients."""
    return leaf.is_floating_point() or leaf.is_complex()


def is_active(path: Path, leaf: Tensor, trainable: Callable[[Path, Tensor], bool] | None) -> bool:
    """Whether a parameter leaf gets a gradient: by its dtype and by the user's predicate."""
    return is_differentiable(leaf) and (trainable is None or bool(trainable(path, leaf)))
