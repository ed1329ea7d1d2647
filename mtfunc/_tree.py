"""Pytrees as JAX has them: ``None`` is an empty subtree and leaves are known by their key path.

``torch.utils._pytree`` counts ``None`` as a leaf and calls dicts with the same keys in another
order unequal, so the walk is our own. Node types that a user registered with it are understood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch.utils._pytree as torch_pytree


class Spec(NamedTuple):
    """The structure of a pytree without its leaves.

    ``kind`` is ``"leaf"``, ``"none"`` or the container's type; ``keys`` name the children in
    insertion order; ``context`` rebuilds containers registered with torch.
    """

    kind: Any
    keys: tuple[Any, ...] = ()
    children: tuple[Spec, ...] = ()
    context: Any = None

    def canonical(self) -> Spec:
        """The structure with dict keys sorted: equal for equal pytrees whatever their order."""
        pairs = list(zip(self.keys, (c.canonical() for c in self.children)))
        if isinstance(self.kind, type) and issubclass(self.kind, dict):
            pairs.sort(key=lambda pair: str(pair[0]))
        return Spec(self.kind, tuple(k for k, _ in pairs), tuple(c for _, c in pairs), self.context)

    def paths(self, prefix: str = "") -> Iterator[str]:
        """The path of every leaf, in the order of ``flatten``."""
        if self.kind == "leaf":
            yield prefix
        for key, child in zip(self.keys, self.children):
            yield from child.paths(join(prefix, key))

    def __str__(self) -> str:
        if self.kind in ("leaf", "none"):
            return "*" if self.kind == "leaf" else "None"
        if isinstance(self.kind, type) and issubclass(self.kind, dict):
            return "{" + ", ".join(f"{k}: {c}" for k, c in zip(self.keys, self.children)) + "}"
        body = ", ".join(str(child) for child in self.children)
        return f"[{body}]" if self.kind is list else f"{self.kind.__name__}({body})"


LEAF = Spec("leaf")
NONE = Spec("none")


def join(prefix: str, key: Any) -> str:
    """One path from two parts, either of which may be empty."""
    return f"{prefix}/{key}" if prefix and str(key) else prefix or str(key)


def children_of(node: Any) -> tuple[tuple[Any, ...], list[Any], Any] | None:
    """Keys, children and context of a container; ``None`` for a leaf."""
    if isinstance(node, dict):
        return tuple(node), list(node.values()), None
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return tuple(node._fields), list(node), None
    if type(node) in (list, tuple):
        return tuple(range(len(node))), list(node), None
    registered = torch_pytree.SUPPORTED_NODES.get(type(node))
    if registered is not None:
        children, context = registered.flatten_fn(node)
        return tuple(range(len(children))), list(children), context
    return None


def flatten(tree: Any, prefix: str = "") -> tuple[dict[str, Any], Spec]:
    """Leaves by path, in insertion order, and the structure that ``unflatten`` rebuilds.

    Raises:
        ValueError: two leaves have the same path, or a key holds a ``/``.
    """
    leaves: dict[str, Any] = {}
    return leaves, _flatten(tree, prefix, leaves)


def _flatten(node: Any, path: str, leaves: dict[str, Any]) -> Spec:
    if node is None:
        return NONE
    parts = children_of(node)
    if parts is None:
        if path in leaves:
            raise ValueError(f"pytree: two leaves at {path!r}; expected keys that differ as text")
        leaves[path] = node
        return LEAF
    keys, children, context = parts
    for key in keys:
        if "/" in str(key) or str(key) == "":
            raise ValueError(
                f"pytree: key {key!r} under {path!r}; expected non-empty keys without '/', "
                "since '/' separates the parts of a path. Rename it or nest a dict"
            )
    specs = tuple(_flatten(c, join(path, k), leaves) for k, c in zip(keys, children))
    return Spec(type(node), keys, specs, context)


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Any:
    """The pytree of this structure with these leaves, in the order of ``flatten``."""
    return _unflatten(spec, iter(leaves))


def _unflatten(spec: Spec, leaves: Iterator[Any]) -> Any:
    if spec.kind == "leaf":
        return next(leaves)
    if spec.kind == "none":
        return None
    children = [_unflatten(child, leaves) for child in spec.children]
    if issubclass(spec.kind, dict):
        pairs = zip(spec.keys, children)
        return dict(pairs) if spec.kind is dict else _rebuild_dict(spec.kind, pairs)
    if hasattr(spec.kind, "_fields"):
        return spec.kind(*children)
    if spec.kind in (list, tuple):
        return spec.kind(children)
    return torch_pytree.SUPPORTED_NODES[spec.kind].unflatten_fn(children, spec.context)


def _rebuild_dict(kind: type, pairs: Iterable[tuple[Any, Any]]) -> Any:
    made = kind()
    made.update(pairs)
    return made


def map_leaves(fn: Callable[[str, Any], Any], tree: Any) -> Any:
    """The same structure with ``fn(path, leaf)`` for every leaf."""
    leaves, spec = flatten(tree)
    return unflatten(spec, [fn(path, leaf) for path, leaf in leaves.items()])


def get(tree: Any, path: str) -> Any:
    """The subtree at a path such as ``"layers/3"``.

    Raises:
        KeyError: nothing is there; the error says what is.
    """
    node, walked = tree, ""
    for part in path.split("/"):
        parts = children_of(node) if node is not None else None
        names = {str(key): child for key, child in zip(parts[0], parts[1])} if parts else {}
        if part not in names:
            where = f"under {walked!r}" if walked else "at the top"
            there = ", ".join(map(repr, names)) or "nothing"
            raise KeyError(f"no {part!r} {where} (path {path!r}); there is {there}")
        node, walked = names[part], join(walked, part)
    return node
