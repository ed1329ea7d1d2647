"""Units: how a parameter pytree is divided for packing, streaming and updating."""

from __future__ import annotations

from mtfunc import _tree
from mtfunc._base import Params, Path


def units(params: Params) -> dict[str, tuple[Path, ...]]:
    """The leaf paths of each unit, in order.

    A unit is an element of the outermost list on a leaf's path (``layers/3``), or else a
    top-level entry (``embed``). Nothing that is loaded, stored or updated is smaller in memory
    than it is here, and nothing larger is ever needed at once.

    Example:
        >>> from mtfunc.host.units import units
        >>> units({"embed": {"w": 1}, "layers": [{"a": 2, "b": 3}]})
        {'embed': ('embed/w',), 'layers/0': ('layers/0/a', 'layers/0/b')}
    """
    found: dict[str, list[Path]] = {}

    def walk(node: object, path: Path, unit: str | None) -> None:
        if node is None:
            return
        parts = _tree.children_of(node)
        if parts is None:
            found.setdefault(unit or path.split("/")[0], []).append(path)
            return
        for key, child in zip(parts[0], parts[1]):
            inner = _tree.join(path, key)
            element = unit is None and type(node) in (list, tuple)
            walk(child, inner, inner if element else unit)

    walk(params, "", None)
    return {unit: tuple(paths) for unit, paths in found.items()}
