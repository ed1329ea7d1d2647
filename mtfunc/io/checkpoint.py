"""Checkpoints: a directory for each saved step, whole or not there at all.

``save(state, "checkpoints")`` makes::

    checkpoints/step-000100/
      manifest.json                  step, key, shapes, dtypes, SHA-256 of the files, meta
      0000-embed.safetensors         parameters and moments of one unit
      0001-layers-0.safetensors
      ...

It is written under another name beside it, flushed to the disk and renamed, so that a reader and
a crash see the old checkpoint or the new one. ``restore`` looks at everything before it changes
anything.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import mtfunc
from mtfunc import _tree
from mtfunc.host.pack import pack_, pack_unit
from mtfunc.host.units import units
from mtfunc.train import TrainState

FORMAT = 1
MANIFEST = "manifest.json"
NAME = re.compile(r"step-(\d{6,})|\.step-(\d{6,})\.old")
"""A whole checkpoint; one that stepped aside for its heir counts until that is in place."""
DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
SHOWN = 4


def save(
    state: TrainState, directory: str | os.PathLike[str], *, keep: int = 2, **meta: Any
) -> Path:
    """Writes a training state to ``directory/step-NNNNNN``, then drops all but the newest few.

    Args:
        state: what :func:`mtfunc.init` and a train step return; it is read and not changed.
        directory: where the checkpoints of a run are; made if need be.
        keep: how many checkpoints stay.
        meta: what else to write into the manifest, as JSON: the model's name, its configuration,
            ``program=str(program)``. :func:`restore` can insist on any of it.

    Returns:
        The directory of this checkpoint.

    Raises:
        ValueError: ``keep`` is less than 1.
        TypeError: some ``meta`` is no JSON.
        OSError: the disk is full or cannot be written; what was there before still is.
    """
    if keep < 1:
        raise ValueError(f"save: keep is {keep}; expected 1 or more checkpoints to stay")
    step = state.step
    head = {
        "format": FORMAT,
        "step": step,
        "key": int(state.key),
        "versions": {"mtfunc": mtfunc.__version__, "torch": torch.__version__},
        "meta": json.loads(json.dumps(meta)),
        "structure": _structure(state.params),
        "moments": list(state.opt_state),
    }
    parent, name = Path(directory), f"step-{step:06d}"
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(".step-*.partial"):
        shutil.rmtree(left)
    partial = parent / f".{name}.partial"
    partial.mkdir()
    try:
        head["files"] = _write_units(state, partial)
        with open(partial / MANIFEST, "w") as file:
            json.dump(head, file, indent=1)
            file.write("\n")
        mode = (partial / MANIFEST).stat().st_mode
        for path in partial.iterdir():
            path.chmod(mode)  # The writer of safetensors lets nobody else read them.
            _flush(path)
        _flush(partial)
        _rename(partial, parent / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _flush(parent)
    others = [path for path in checkpoints(parent) if path.name != name]
    for old in others[: max(0, len(others) + 1 - keep)]:
        shutil.rmtree(old)
    return parent / name


def restore(
    directory: str | os.PathLike[str], *, like: TrainState | None = None, **expected: Any
) -> TrainState:
    """Reads a training state back.

    Args:
        directory: a checkpoint, or a directory of them, of which the newest is taken.
        like: a state with the same structure, shapes and dtypes, whose buffers are filled: it is
            donated. Without it the buffers are new, and the pytree must be made of dicts with
            text keys, lists and ``None``.
        expected: what the manifest's meta must hold, such as ``model="llama-tiny"``.

    Returns:
        The state, equal to the saved one to the last bit.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: the checkpoint is damaged, of another format or of another model: what
            differs, where, expected and got. ``like`` is then as it was.
    """
    path = _newest(Path(directory))
    head = manifest(path)
    _check_meta(path, head["meta"], expected)
    if like is not None:
        _check_leaves(path, head, _leaves(like))
    elif head["structure"] is None:
        raise ValueError(
            f"checkpoint {path}: its pytree holds other containers than dicts with text keys and "
            "lists; expected a state to fill. Give like=mt.init(...)"
        )
    for name, file in head["files"].items():
        _check_file(path / name, file)
    state = _fresh(head) if like is None else like
    targets = _leaves(state)
    for name in head["files"]:
        with safe_open(path / name, framework="pt") as file:
            for leaf in file.keys():  # noqa: SIM118
                targets[leaf].copy_(file.get_tensor(leaf))
    restored = TrainState(state.params, state._moments, head["step"], torch.tensor(head["key"]))
    state._spent = "mt.restore filled it; use the state that it returned"
    return restored


def checkpoints(directory: str | os.PathLike[str]) -> list[Path]:
    """The whole checkpoints in a directory, oldest first; none where there is no directory."""
    parent = Path(directory)
    found: dict[int, Path] = {}
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        named = NAME.fullmatch(path.name)
        if named:
            found[int(named[1] or named[2])] = path
    return [found[step] for step in sorted(found)]


def manifest(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a checkpoint, or of the newest one in a directory of them.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: the manifest cannot be read.
    """
    path = _newest(Path(directory)) / MANIFEST
    try:
        head = json.loads(path.read_text())
        found = head["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"checkpoint {path.parent}: {MANIFEST} cannot be read "
            f"({type(error).__name__}: {error}); expected what mt.save wrote. Restore an older one"
        ) from error
    if found != FORMAT:
        raise ValueError(
            f"checkpoint {path.parent}: its format is {found!r}; expected {FORMAT}. Restore it "
            f"with mtfunc {head.get('versions', {}).get('mtfunc', 'of the version that wrote it')}"
        )
    return head


def _leaves(state: TrainState) -> dict[str, Tensor]:
    """All leaves by the name that they have on disk."""
    return _tree.flatten({"params": state.params, "opt_state": state.opt_state})[0]


def _write_units(state: TrainState, directory: Path) -> dict[str, Any]:
    """One file a unit, with its parameters and all their moments."""
    leaves, kinds, files = _leaves(state), list(state.opt_state), {}
    for i, (unit, paths) in enumerate(units(state.params).items()):
        prefixes = ["params", *(f"opt_state/{kind}" for kind in kinds)]
        names = [_tree.join(prefix, path) for prefix in prefixes for path in paths]
        held = {name: leaves[name].detach().contiguous() for name in names if name in leaves}
        file = f"{i:04d}-{re.sub(r'[^A-Za-z0-9_.]+', '-', unit)}.safetensors"
        save_file(held, directory / file)
        files[file] = {
            "unit": unit,
            "bytes": (directory / file).stat().st_size,
            "sha256": _digest(directory / file),
            "leaves": {name: _kind(leaf) for name, leaf in held.items()},
        }
    return files


def _kind(leaf: Tensor) -> dict[str, Any]:
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def _structure(node: Any) -> Any:
    """The containers as JSON, ``"*"`` for a leaf; ``None`` at the top where JSON has no such.

    An empty subtree, which is ``None`` in Python, is ``null`` further down.
    """
    try:
        return _described(node)
    except TypeError:
        return None


def _described(node: Any) -> Any:
    if node is None:
        return None
    if isinstance(node, Tensor):
        return "*"
    if type(node) is list:
        return [_described(child) for child in node]
    if type(node) is dict and all(isinstance(key, str) for key in node):
        return {key: _described(child) for key, child in node.items()}
    raise TypeError(type(node).__name__)


def _fresh(head: dict[str, Any]) -> TrainState:
    """A state of the manifest's structure, with room for its leaves."""
    leaves: dict[str, Tensor] = {}
    moments: dict[str, dict[str, dict[str, Tensor]]] = {}
    for file in head["files"].values():
        kinds: dict[str, dict[str, Tensor]] = {kind: {} for kind in head["moments"]}
        for name, kind in file["leaves"].items():
            leaf = torch.empty(kind["shape"], dtype=DTYPES[kind["dtype"]])
            tree, _, path = name.partition("/")
            if tree == "params":
                leaves[path] = leaf
            else:
                moment, _, path = path.partition("/")
                kinds[moment][path] = leaf
        moments[file["unit"]] = {kind: pack_unit(held) for kind, held in kinds.items()}

    def build(node: Any, path: str) -> Any:
        if isinstance(node, list):
            return [build(child, _tree.join(path, i)) for i, child in enumerate(node)]
        if isinstance(node, dict):
            return {key: build(child, _tree.join(path, key)) for key, child in node.items()}
        return None if node is None else leaves[path]

    return TrainState(pack_(build(head["structure"], "")), moments, 0, torch.zeros(()))


def _check_meta(path: Path, got: dict[str, Any], expected: dict[str, Any]) -> None:
    wanted = json.loads(json.dumps(expected))
    _refuse(path, [d for name in wanted for d in _apart(name, got.get(name), wanted[name])])


def _apart(name: str, got: Any, wanted: Any) -> Iterator[str]:
    if isinstance(got, dict) and isinstance(wanted, dict):
        for key in {**wanted, **got}:
            yield from _apart(f"{name}/{key}", got.get(key), wanted.get(key))
    elif got != wanted:
        yield f"{name} is {_short(got)}, expected {_short(wanted)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "…"


def _check_leaves(path: Path, head: dict[str, Any], like: dict[str, Tensor]) -> None:
    files = head["files"].values()
    got = {name: kind for file in files for name, kind in file["leaves"].items()}
    expected = {name: _kind(leaf) for name, leaf in like.items()}
    _refuse(
        path,
        [f"{name} is missing" for name in expected if name not in got]
        + [f"{name} is there and not expected" for name in got if name not in expected]
        + [
            f"{name} has {_said(got[name])}, expected {_said(kind)}"
            for name, kind in expected.items()
            if name in got and got[name] != kind
        ],
    )


def _said(kind: dict[str, Any]) -> str:
    return f"shape {tuple(kind['shape'])} and dtype {kind['dtype'].removeprefix('torch.')}"


def _refuse(path: Path, differences: list[str]) -> None:
    if differences:
        more = len(differences) - SHOWN
        shown = "; ".join(differences[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(
            f"checkpoint {path} is of another model or run: {shown}. Restore into the model that "
            "it was saved from, or name another directory"
        )


def _check_file(path: Path, file: dict[str, Any]) -> None:
    got = f"{path.stat().st_size} bytes" if path.exists() else "no file"
    if got != f"{file['bytes']} bytes" or _digest(path) != file["sha256"]:
        raise ValueError(
            f"checkpoint {path.parent}: {path.name} is damaged: {got}; expected "
            f"{file['bytes']} bytes with SHA-256 {file['sha256'][:12]}…. Restore an older one"
        )


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _newest(directory: Path) -> Path:
    if (directory / MANIFEST).exists():
        return directory
    found = checkpoints(directory)
    if not found:
        raise FileNotFoundError(
            f"checkpoint {directory}: there is none; expected a directory that mt.save wrote, or "
            "one that holds such directories"
        )
    return found[-1]


def _rename(partial: Path, target: Path) -> None:
    """Puts a whole checkpoint in place; one of the same step steps aside first."""
    aside = target.with_name(f".{target.name}.old")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    partial.rename(target)
    shutil.rmtree(aside, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
