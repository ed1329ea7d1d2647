"""Random programs as data: a case prints as the call that makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtfunc._base import Path, StageFn
from mtfunc.config import StreamConfig

VOCABULARY = 7
"""Tokens and labels are below this."""

EXPERTS = 3
"""How many experts a mixture has; no token goes to the last of them."""

Normal = Callable[..., Tensor]
"""``normal(*shape)`` draws the next tensor in the case's dtype, with a deviation of 0.4."""


def nothing(normal: Normal, width: int) -> Any:
    """No parameters."""
    return None


@dataclass(frozen=True)
class Block:
    """What a stage of a random program does.

    Attributes:
        fn: ``fn(*subtrees, x, batch, **static) -> x`` on a float tensor ``(rows, tokens,
            width)``; with ``whole`` on the carry, a dict whose ``"x"`` is that tensor. A loss
            returns what a program's last stage does, and gets ``None`` where it is alone.
        init: ``init(normal, width)`` makes one subtree. Blocks with the same ``init`` may be tied.
        reads: how many subtrees of that kind it takes; 0 where ``init`` is not given.
        static: keyword arguments for ``fn``.
        role: ``"start"``, ``""`` or ``"loss"``.
        whole: whether ``fn`` takes and returns the whole carry.
        keeps: whether it keeps the carry's structure, shapes and dtypes, as a scan demands.
        rng: whether ``fn`` gets ``key=``.
        aux: empty, or a name for the form of the aux value that ``fn`` returns beside the carry;
            blocks of one form may share a scan.
        by_value: whether shapes inside depend on values.
        absent: whether it makes a carry leaf that must get no cotangent, not even zeros.
        makes: what it puts into the carry for a block that ``uses`` it, if anything.
        uses: what it takes from the carry, if an earlier block ``makes`` it.
        drops: whether it drops from the carry what earlier blocks made.
        group: blocks of one group are drawn together; a block alone is its own group.
        kinds: what :func:`mtfunc.testing.strategies.kinds` calls it.
    """

    fn: StageFn
    init: Callable[[Normal, int], Any] = nothing
    reads: int = 1
    static: Mapping[str, Any] = field(default_factory=dict)
    role: str = ""
    whole: bool = False
    keeps: bool = True
    rng: bool = False
    aux: str = ""
    by_value: bool = False
    absent: bool = False
    makes: str = ""
    uses: str = ""
    drops: bool = False
    group: str = ""
    kinds: tuple[str, ...] = ()

    @property
    def subtrees(self) -> int:
        """How many keys a part with this block has."""
        return 0 if self.init is nothing else self.reads


class _Short:
    """Prints as the call that makes it, without what is default."""

    def _given(self) -> dict[str, Any]:
        values = {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]
        defaults = {one.name: one.default for one in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if value != defaults[name]}

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._given().items())
        return f"{type(self).__name__}({given})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis prints a counter-example."""
        lines = str(self).splitlines()
        for line in lines[:-1]:
            printer.text(line)
            printer.break_()
        printer.text(lines[-1])


@dataclass(frozen=True, repr=False)
class Part(_Short):
    """One part of a program.

    Attributes:
        blocks: the names of its blocks: one for a stage, one for each entry of a scan.
        keys: the parameter keys that it reads; of a scan, the list's and then the consts'. A key
            that occurs twice in a case is tied.
        scan: whether it is a scan.
        vjp: ``"func"`` or ``"autograd"``.
    """

    blocks: tuple[str, ...]
    keys: tuple[Path, ...] = ()
    scan: bool = False
    vjp: str = "func"


class Micro(NamedTuple):
    """The shape of one micro-batch; the last ``ignored`` labels of all are -100."""

    rows: int = 1
    tokens: int = 1
    ignored: int = 0


PLAIN = StreamConfig()


@dataclass(frozen=True, repr=False)
class Case(_Short):
    """A program, its parameters, its batch and how to stream it, as data.

    ``repr`` is one line, ``str`` the same call with a line for each part.

    Attributes:
        parts: the program, its loss last.
        micros: the micro-batches; a single one is a batch, not a list.
        width: of ``x``; even.
        dtype: of ``x`` and of most parameters.
        frozen: paths of subtrees that are not trained.
        odd: whether batches also hold ``None``, a number, bool, 0-dim and zero-size leaves.
        config: how to stream.
        seed: of parameters, batches and the step's key.
        sim: the simulator's seed.
    """

    parts: tuple[Part, ...]
    micros: tuple[Micro, ...] = (Micro(),)
    width: int = 4
    dtype: torch.dtype = torch.float32
    frozen: tuple[Path, ...] = ()
    odd: bool = False
    config: StreamConfig = PLAIN
    seed: int = 0
    sim: int = 0

    def __str__(self) -> str:
        parts = "".join(f"        {part!r},\n" for part in self.parts)
        given = {name: repr(value) for name, value in self._given().items()}
        given["parts"] = f"(\n{parts}    )"
        lines = "".join(f"    {name}={text},\n" for name, text in given.items())
        return f"Case(\n{lines})"

    @property
    def stages(self) -> int:
        """How many stages the program has, the entries of scans counted."""
        return sum(len(part.blocks) for part in self.parts)

    def trainable(self, path: Path, leaf: Tensor) -> bool:
        """Whether a parameter leaf is trained: none of the frozen subtrees holds it."""
        return not any(path == one or path.startswith(one + "/") for one in self.frozen)

    def code(self, *, steps: int = 0, own: Sequence[str] = ()) -> str:
        """Code that streams this case and compares it, ready to be run.

        Args:
            steps: as in :func:`mtfunc.testing.strategies.assert_streamed`.
            own: the names of blocks that are not the library's; the code asks for them.

        Example:
            >>> from mtfunc.testing.strategies import Case, Part
            >>> print(Case((Part(("mean_square",)),)).code())
            from mtfunc.testing.strategies import Case, Part, assert_streamed
            <BLANKLINE>
            case = Case(
                parts=(
                    Part(blocks=('mean_square',)),
                ),
            )
            assert_streamed(case)
        """
        text = str(self)
        names = ["Case", *(["Micro"] if "Micro(" in text else []), "Part", "assert_streamed"]
        lines = [f"from mtfunc.testing.strategies import {', '.join(names)}"]
        if "StreamConfig(" in text:
            lines.insert(0, "from mtfunc import StreamConfig")
        if "torch." in text:
            lines[:0] = ["import torch", ""]
        lines += ["", f"case = {text}"]
        given = ["case", *(["blocks"] if own else []), *([f"steps={steps}"] if steps else [])]
        if own:
            lines.append(f"# blocks is BLOCKS with your own {', '.join(own)}")
        return "\n".join([*lines, f"assert_streamed({', '.join(given)})"])
