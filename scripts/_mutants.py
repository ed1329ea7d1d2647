"""Mutation operators: one small change at one node of a module's syntax tree.

A change is spliced into the source text at the node's place, so that a survivor reads as a diff of
the file. Sites are found in the order of the text, hence a seed draws the same mutants everywhere.
"""

from __future__ import annotations

import ast
import difflib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

TARGETS = (
    "mtfunc/schedule/*.py",
    "mtfunc/backends/*.py",
    "mtfunc/run.py",
    "mtfunc/pullback.py",
    "mtfunc/recompute.py",
    "mtfunc/residuals.py",
)
"""What is mutated: the schedule, the loop that runs it, and the backward pass."""

ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "reversed": "list"}
"""A function, and the one that is called instead."""

FOR_PEOPLE = ("__str__", "__repr__", "_bytes")
"""Functions that only make text; so do raise, assert and f-strings. None of it is mutated."""


class Mutant(NamedTuple):
    """One change.

    Attributes:
        file: the path from the repository's root.
        function: the innermost function or class around it, ``""`` at the top.
        operator: what was done, such as ``"negate"``.
        line: the number of the first changed line, from 1.
        before: that line, stripped.
        after: the line in its place, stripped.
        source: the whole module as it is after the change.
    """

    file: str
    function: str
    operator: str
    line: int
    before: str
    after: str
    source: str

    @property
    def module(self) -> str:
        """The dotted name under which the file is imported."""
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def diff(self) -> str:
        """The change as a unified diff."""
        old = (ROOT / self.file).read_text().splitlines()
        return "\n".join(
            difflib.unified_diff(
                old, self.source.splitlines(), self.file, self.operator, lineterm="", n=2
            )
        )


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """Every mutant of a module, in the order of its text."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw = source.encode()
    for node, function, top in _nodes(ast.parse(source), "", True):
        for operator, text in _changes(node, top):
            start = starts[node.lineno - 1] + node.col_offset
            stop = starts[node.end_lineno - 1] + node.end_col_offset
            made = (raw[:start] + text.encode() + raw[stop:]).decode()
            pairs = enumerate(zip(lines, made.splitlines(keepends=True)), 1)
            found = next(((n, a, b) for n, (a, b) in pairs if a != b), None)
            if found is not None:
                number, before, after = found
                yield Mutant(file, function, operator, number, before.strip(), after.strip(), made)


def everything() -> list[Mutant]:
    """Every mutant of the targets."""
    files = [path for pattern in TARGETS for path in sorted(ROOT.glob(pattern))]
    return [
        mutant
        for path in files
        for mutant in mutants_of(path.relative_to(ROOT).as_posix(), path.read_text())
    ]


def sample(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """As many of them, drawn without replacement."""
    return random.Random(seed).sample(mutants, min(count, len(mutants)))


def _nodes(
    node: ast.AST, function: str, top: bool
) -> Iterator[tuple[ast.expr | ast.stmt, str, bool]]:
    """Nodes that may be changed, with the function around them and whether there is none."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        if node.name in FOR_PEOPLE:
            return
        function, top = node.name, top and isinstance(node, ast.ClassDef)
    elif isinstance(node, ast.expr | ast.stmt):
        yield node, function, top
        if isinstance(node, ast.If | ast.While):
            # Spliced in place of the condition, not of the whole statement.
            negated = ast.UnaryOp(ast.Not(), node.test)
            yield ast.copy_location(ast.Expr(negated), node.test), function, top
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _nodes(child, function, top)


def _changes(node: ast.expr | ast.stmt, top: bool) -> Iterator[tuple[str, str]]:
    """What may stand in a node's place: the operator's name and the text."""
    yield from _dropped(node)
    if isinstance(node, ast.IfExp):
        swapped = ast.IfExp(node.test, node.orelse, node.body)
        yield "negate", f"({ast.unparse(swapped)})"
    elif isinstance(node, ast.Call):
        yield from _calls(node)
    elif isinstance(node, ast.Constant):
        yield from _constants(node)
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        if not (top and isinstance(node.op, ast.BitOr)):  # a union of types
            made = ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
            yield "arithmetic", f"({ast.unparse(made)})"
    elif isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            ops = [*node.ops[:i], COMPARISONS[type(op)](), *node.ops[i + 1 :]]
            yield "compare", f"({ast.unparse(ast.Compare(node.left, ops, node.comparators))})"
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and-or", f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.UnaryOp):
        yield "unary", f"({ast.unparse(node.operand)})"


def _dropped(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Expr) and not hasattr(node.value, "lineno"):
        yield "negate", ast.unparse(node.value)
        return
    called = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant | ast.Yield)
    stored = isinstance(node, ast.Assign) and isinstance(
        node.targets[0], ast.Attribute | ast.Subscript
    )
    if called or stored or isinstance(node, ast.AugAssign | ast.Continue | ast.Break):
        yield "drop", "pass"


def _calls(node: ast.Call) -> Iterator[tuple[str, str]]:
    args = node.args
    for i in range(len(args) - 1):
        pair = args[i : i + 2]
        if not any(isinstance(arg, ast.Starred) for arg in pair):
            swapped = [*args[:i], *reversed(pair), *args[i + 2 :]]
            yield "swap", ast.unparse(ast.Call(node.func, swapped, node.keywords))
    if isinstance(node.func, ast.Name) and node.func.id in CALLS:
        other = ast.Name(CALLS[node.func.id])
        yield "call", ast.unparse(ast.Call(other, args, node.keywords))


def _constants(node: ast.Constant) -> Iterator[tuple[str, str]]:
    if isinstance(node.value, bool):
        yield "flip", repr(not node.value)
    elif isinstance(node.value, int):
        yield "off by one", repr(node.value + 1)
        yield "off by one", f"({node.value - 1})"
