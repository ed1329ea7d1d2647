"""Programs: a model as data, a tuple of stages that name a pure function and what it reads."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mtfunc import _tree, random
from mtfunc._base import Batch, Carry, Key, Params, Path, StageFn

Static = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pure function and the parameter keys that it reads; made by :func:`stage`."""

    fn: StageFn
    keys: tuple[Path, ...]
    name: str
    static: Static = ()
    vjp: str | Callable[..., Any] = "func"
    rng: bool = False
    has_aux: bool = False
    scan: str | None = None
    """The name of the scan that this stage is an entry of."""

    def options(self, key: Key | None, micro: int) -> dict[str, Any]:
        """The keyword arguments of the function: statics, and its key if it draws.

        Raises:
            ValueError: the stage draws random numbers and there is no key.
        """
        options = dict(self.static)
        if self.rng:
            if key is None:
                raise ValueError(
                    f"stage {self.name!r} draws random numbers (rng=True) and key is None; "
                    "expected a key, such as mt.random.key(0)"
                )
            options["key"] = random.fold_in(random.fold_in(key, self.name), micro)
        return options

    def apply(
        self, subtrees: Sequence[Any], carry: Carry, batch: Batch, key: Key | None, micro: int
    ) -> tuple[Carry, Any]:
        """What the stage means: its function on its subtrees, with key and statics bound.

        Returns:
            The next carry, and the aux value or ``None``.

        Raises:
            ValueError: there is no key to draw with, or the stage should return ``(carry, aux)``
                and does not.
        """
        out = self.fn(*subtrees, carry, batch, **self.options(key, micro))
        if not self.has_aux:
            return out, None
        if not isinstance(out, tuple) or len(out) != 2:
            raise ValueError(
                f"stage {self.name!r} has has_aux=True and returned a {type(out).__name__}; "
                "expected a pair (carry, aux)"
            )
        return out


@dataclass(frozen=True, kw_only=True)
class Scan:
    """One stage for every entry of a list in the parameters; made by :func:`scan`."""

    fns: tuple[StageFn, ...]
    """One function for all entries, or one for each."""
    key: Path
    consts: tuple[Path, ...]
    name: str
    statics: tuple[Static, ...] = ((),)
    """One set of keyword arguments for all entries, or one for each."""
    vjp: str | Callable[..., Any] = "func"
    rng: bool = False
    has_aux: bool = False

    def entries(self, params: Params) -> Iterator[Stage]:
        """The stages, one for every entry of ``params[key]``."""
        entries = _tree.get(params, self.key)
        if not isinstance(entries, list | tuple):
            raise TypeError(
                f"scan {self.name!r}: params[{self.key!r}] is a {type(entries).__name__}; "
                "expected a list with one subtree for each entry"
            )
        for what, given in (("functions", self.fns), ("static arguments", self.statics)):
            if len(given) not in (1, len(entries)):
                raise ValueError(
                    f"scan {self.name!r}: {len(given)} {what} for the {len(entries)} entries of "
                    f"params[{self.key!r}]; expected one for all, or {len(entries)}"
                )
        for i in range(len(entries)):
            yield Stage(
                fn=self.fns[i % len(self.fns)],
                keys=(f"{self.key}/{i}", *self.consts),
                name=f"{self.name}/{i}",
                static=self.statics[i % len(self.statics)],
                vjp=self.vjp,
                rng=self.rng,
                has_aux=self.has_aux,
                scan=self.name,
            )


@dataclass(frozen=True)
class Program:
    """A model: parts in the order in which the carry passes through them; made by :func:`chain`.

    A program is a value: equal programs compare and hash equal, ``program[:-1]`` is the program
    without its last part, ``len`` counts parts and ``print`` shows them as a table.
    """

    parts: tuple[Stage | Scan, ...]
    check: Callable[[Batch], None] | None = None

    def stages(self, params: Params, *, partial: bool = False) -> tuple[Stage, ...]:
        """The stages for these parameters, every scan spelt out.

        Args:
            params: the parameter pytree; tensors are not touched.
            partial: whether parameters that no stage reads are allowed.

        Raises:
            KeyError: a key is missing, with what is there and the nearest name; or, unless
                ``partial``, a key that no stage reads.
        """
        stages: list[Stage] = []
        for part in self.parts:
            try:
                stages.extend(part.entries(params) if isinstance(part, Scan) else [part])
                for key in part.keys if isinstance(part, Stage) else part.consts:
                    _tree.get(params, key)
            except KeyError as error:
                raise KeyError(f"part {part.name!r}: {error.args[0]}{self._hint(error)}") from None
        names = Counter(stage.name for stage in stages)
        if len(names) < len(stages):
            twice = next(name for name, times in names.items() if times > 1)
            raise ValueError(
                f"two stages are named {twice!r}; expected a name of its own for each, since keys "
                "and aux values go by it. A scan's entries are named SCAN/NUMBER"
            )
        if not partial:
            self._refuse_unread(params, stages)
        return tuple(stages)

    @staticmethod
    def _hint(error: KeyError) -> str:
        wanted, there = str(error.args[0]).split("; there is ")
        near = difflib.get_close_matches(wanted.split("'")[1], there.replace("'", "").split(", "))
        return f". Did you mean {near[0]!r}?" if near else ""

    @staticmethod
    def _refuse_unread(params: Params, stages: Sequence[Stage]) -> None:
        read = {key for stage in stages for key in stage.keys}
        unread = [
            path
            for path in _tree.flatten(params)[0]
            if not any(path == key or path.startswith(key + "/") for key in read)
        ]
        if unread:
            shown = ", ".join(map(repr, unread[:8])) + (", …" if len(unread) > 8 else "")
            raise KeyError(
                f"params: no stage reads {shown}; stages read {', '.join(map(repr, sorted(read)))}"
                ". Name the key in a stage or leave it out of the parameters"
            )

    def __getitem__(self, index: int | slice) -> Program:
        parts = self.parts[index] if isinstance(index, slice) else (self.parts[index],)
        return replace(self, parts=parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Stage | Scan]:
        return iter(self.parts)

    def __str__(self) -> str:
        rows = [("part", "function", "reads", "options"), *map(_cells, self.parts)]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0])).rstrip()
            for row in rows
        )


def stage(
    fn: StageFn,
    *keys: Path,
    name: str | None = None,
    static: Mapping[str, Any] | None = None,
    vjp: str | Callable[..., Any] = "func",
    rng: bool = False,
    has_aux: bool = False,
) -> Stage:
    """One stage of a program: ``fn(*subtrees, carry, batch, **static)``.

    Args:
        fn: a pure function. It gets one subtree of the parameters for each key, then the carry
            (``None`` for the first stage) and the batch, and returns the next carry.
        keys: paths of the subtrees, such as ``"embed"`` or ``"vision/patch"``. A key that
            several stages read ties them: its gradients are summed.
        name: unique in its program; the function's name unless given.
        static: keyword arguments for ``fn``, hashable values.
        vjp: how the pullback is computed: ``"func"`` (``torch.func.vjp``), ``"autograd"``
            (``torch.autograd.grad`` on detached leaves, for kernels that functorch cannot
            trace), or a callable ``rule(*subtrees, carry, batch, cotangent, **static)`` that
            returns the cotangents of the subtrees and of the carry,
            ``(*subtree_cotangents, carry_cotangent)``; ``None`` there means zero.
        rng: whether ``fn`` also gets ``key=``, the step's key folded with the stage's name and
            the micro-batch's number.
        has_aux: whether ``fn`` returns ``(carry, aux)``.

    Raises:
        TypeError: ``fn`` is not callable, or a static value is not hashable.
        ValueError: an unknown ``vjp``.
    """
    _check(fn, vjp)
    return Stage(
        fn=fn,
        keys=_paths(keys),
        name=_part_name(name or _fn_name(fn)),
        static=_static(static),
        vjp=vjp,
        rng=rng,
        has_aux=has_aux,
    )


def scan(
    fn_or_fns: StageFn | Sequence[StageFn],
    key: Path,
    *consts: Path,
    name: str | None = None,
    static: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    rng: bool = False,
    has_aux: bool = False,
    vjp: str | Callable[..., Any] = "func",
) -> Scan:
    """One stage for every entry of the list ``params[key]``.

    It means, as ``jax.lax.scan`` over the layers does::

        for i, p in enumerate(params[key]):
            carry = fns[i](p, *(params[c] for c in consts), carry, batch, **static[i])

    so every entry returns the structure, shapes and dtypes of the carry that it took.

    Args:
        fn_or_fns: one function for all entries, or a list with one for each.
        key: the path of a list in the parameters.
        consts: keys of subtrees that every entry reads, bound after its own.
        name: unique in its program; ``key`` unless given. Entries are named ``name/0`` and so on.
        static: keyword arguments for all entries, or a list with those of each.
        rng: as in :func:`stage`.
        has_aux: as in :func:`stage`; the entries' aux values are stacked.
        vjp: as in :func:`stage`.

    Raises:
        TypeError: a function is not callable, or a static value is not hashable.
        ValueError: an unknown ``vjp``, or an empty list of functions.
    """
    fns = tuple(fn_or_fns) if isinstance(fn_or_fns, Sequence) else (fn_or_fns,)
    if not fns:
        raise ValueError(f"scan {key!r}: no functions; expected one, or one for each entry")
    for fn in fns:
        _check(fn, vjp)
    each = static if isinstance(static, Sequence) else [static]
    return Scan(
        fns=fns,
        key=_paths([key])[0],
        consts=_paths(consts),
        name=_part_name(name or key),
        statics=tuple(map(_static, each)) or ((),),
        vjp=vjp,
        rng=rng,
        has_aux=has_aux,
    )


def chain(*parts: Stage | Scan, check: Callable[[Batch], None] | None = None) -> Program:
    """A program of these parts in order.

    Args:
        parts: what :func:`stage` and :func:`scan` return. Names that occur twice get a number.
        check: called with every batch on the host before a step starts; raises on bad input,
            such as labels out of range.

    Raises:
        TypeError: a part is something else.
        ValueError: there are no parts.
    """
    if not parts:
        raise ValueError("chain: no parts; expected at least one stage or scan")
    named: list[Stage | Scan] = []
    taken: Counter[str] = Counter()
    for part in parts:
        if not isinstance(part, Stage | Scan):
            raise TypeError(
                f"chain: part {len(named)} is a {type(part).__name__}; expected what mt.stage or "
                "mt.scan returns. Another program joins as *program"
            )
        name = part.name
        while name in taken:
            taken[part.name] += 1
            name = f"{part.name}.{taken[part.name]}"
        taken[name] += 1
        named.append(part if name == part.name else replace(part, name=name))
    return Program(tuple(named), check)


def _check(fn: Any, vjp: Any) -> None:
    if not callable(fn):
        raise TypeError(f"stage: fn is a {type(fn).__name__}; expected a function")
    if not callable(vjp) and vjp not in ("func", "autograd"):
        raise ValueError(
            f"stage {_fn_name(fn)!r}: vjp is {vjp!r}; expected 'func', 'autograd' or a function"
        )


def _paths(keys: Sequence[Any]) -> tuple[Path, ...]:
    for key in keys:
        if not isinstance(key, str) or not all(key.split("/")):
            raise TypeError(
                f"stage: key {key!r}; expected a path such as 'embed' or 'layers/3'. Several "
                "keys are several arguments"
            )
    return tuple(keys)


def _part_name(name: str) -> str:
    return name.strip("/") or "stage"


def _static(static: Mapping[str, Any] | None) -> Static:
    pairs = tuple(sorted((static or {}).items()))
    for name, value in pairs:
        try:
            hash(value)
        except TypeError:
            raise TypeError(
                f"stage: static argument {name!r} is a {type(value).__name__}, which does not "
                "hash; expected numbers, strings, tuples or frozen dataclasses. Tensors belong "
                "in the parameters or the batch"
            ) from None
    return pairs


def _fn_name(fn: Any) -> str:
    inner = getattr(fn, "func", fn)
    return getattr(inner, "__name__", type(inner).__name__)


def _cells(part: Stage | Scan) -> tuple[str, str, str, str]:
    if isinstance(part, Scan):
        fns = ", ".join(dict.fromkeys(map(_fn_name, part.fns)))
        reads: tuple[Path, ...] = (f"{part.key}/*", *part.consts)
    else:
        fns, reads = _fn_name(part.fn), part.keys
    vjp = "" if part.vjp == "func" else f"vjp={getattr(part.vjp, '__name__', part.vjp)}"
    options = [vjp, "rng" * part.rng, "aux" * part.has_aux]
    return part.name, fns, ", ".join(reads), " ".join(filter(None, options))


def collect_aux(reports: Sequence[tuple[Stage, Any]]) -> dict[str, Any]:
    """What stages report in one pass, by stage name; a scan's entries are stacked by its name."""
    aux: dict[str, Any] = {}
    scans: dict[str, list[Any]] = {}
    for stage, value in reports:
        if not stage.has_aux:
            continue
        if stage.scan is None:
            aux[stage.name] = value
        else:
            scans.setdefault(stage.scan, []).append(value)
            aux[stage.scan] = None
    for name, values in scans.items():
        leaves, spec = _tree.flatten(values[0])
        each = [_tree.flatten(value)[0] for value in values]
        stacked = [torch.stack([torch.as_tensor(x[path]) for x in each]) for path in leaves]
        aux[name] = _tree.unflatten(spec, stacked)
    return aux
