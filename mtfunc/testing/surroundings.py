"""What a function reaches besides its arguments: closed-over tensors and global generators."""

from __future__ import annotations

import contextlib
import functools
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtfunc._base import Leaves

MOST = 10_000
"""Objects that are looked at before a search for tensors ends."""


def closed_over(fn: Any) -> Leaves:
    """Tensors that a function reaches other than by its arguments, by the name it has for them.

    Closures, globals, defaults, bound objects, modules and partial arguments are followed, and
    functions outside of torch.
    """
    found: Leaves = {}
    seen: set[int] = set()

    def look(name: str, value: Any) -> None:
        if id(value) in seen or len(seen) > MOST:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, torch.nn.Module):
            for path, leaf in (*value.named_parameters(), *value.named_buffers()):
                found[f"{name}.{path}"] = leaf
        elif isinstance(value, dict | list | tuple):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, child in list(pairs):
                look(f"{name}[{key!r}]", child)
        else:
            for part, child in _parts(name, value):
                look(part, child)

    for name, value in _parts("fn", fn):
        look(name, value)
    return found


def _parts(name: str, value: Any) -> list[tuple[str, Any]]:
    """What a function or a callable object holds, by name."""
    if isinstance(value, functools.partial):
        return [(name, value.func), (name, value.args), (name, value.keywords)]
    if isinstance(value, types.MethodType):
        held = getattr(value.__self__, "__dict__", {})
        own = [(f"self.{key}", child) for key, child in held.items()]
        return [(name, value.__func__), ("self", value.__self__), *own]
    if isinstance(value, types.FunctionType):
        if (value.__module__ or "").partition(".")[0] in ("torch", "mtfunc", "einops"):
            return []
        parts = [("defaults", value.__defaults__), ("defaults", value.__kwdefaults__)]
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            with contextlib.suppress(ValueError):  # a cell that is not filled yet
                parts.append((variable, cell.cell_contents))
        reads = [key for key in _names(value.__code__) if key in value.__globals__]
        return parts + [(key, value.__globals__[key]) for key in reads]
    if callable(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        held = [(f"{name}.{key}", child) for key, child in vars(value).items()]
        return [(name, type(value).__call__), *held]
    return []


def _names(code: types.CodeType) -> list[str]:
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return [*code.co_names, *(name for const in inner for name in _names(const))]


def generators() -> dict[str, Any]:
    """The states of the global generators, comparable with ``==``."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch's": torch.get_rng_state().numpy().tobytes(),
        "Python's": random.getstate(),
        "numpy's": (name, np.asarray(keys).tobytes(), *rest),
    }


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Puts the global generators back at the end."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
