"""An ``nn.Module`` as a pure function over a pytree of parameters."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from mtfunc import _tree
from mtfunc._base import Params

_DRAWS: tuple[tuple[type[nn.Module], str | None], ...] = (
    (_DropoutNd, "p"),
    (nn.MultiheadAttention, "dropout"),
    (nn.RNNBase, "dropout"),
    (nn.RReLU, None),
    (nn.FractionalMaxPool2d, None),
    (nn.FractionalMaxPool3d, None),
)
"""Modules that draw from torch's global generator in training mode, and the attribute that is
the rate."""


def functional(module: nn.Module) -> tuple[Functional, Params]:
    """A module as a pure function over a pytree of its parameters.

    It means ``torch.func.functional_call(module, params, args, kwargs)`` with nested parameters::

        fn, params = mt.functional(module)
        fn(params, *args, **kwargs) == module(*args, **kwargs)

    Args:
        module: any module, with parameters on any device, ``"meta"`` included. Neither it nor
            its mode changes; later changes of its mode or its buffers do not reach ``fn``.

    Returns:
        ``fn``, a :class:`Functional`, and ``params``: a nested dict whose path ``"attn/wq"`` is
        the module's ``"attn.wq"``. Where the names are ``0, 1, ...`` (``nn.Sequential``,
        ``nn.ModuleList``, ``nn.ParameterList``) there is a list, with ``None`` for an element
        without parameters, so that :func:`mtfunc.scan` can run over it. Leaves are plain tensors
        in the parameters' own memory that do not require grad. A tied parameter is one leaf,
        under the first of its names in ``module.named_parameters()``.

    Raises:
        TypeError: ``module`` is no ``nn.Module``.
        ValueError: the module is no pure function: it draws from the global generator or counts
            running statistics in its mode, holds a tensor that requires grad and is no parameter,
            or has hooks on gradients; or a parameter is not initialized.

    Example:
        >>> import torch, mtfunc as mt
        >>> from mtfunc.functional import functional
        >>> fn, params = functional(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 1)))
        >>> [None if p is None else sorted(p) for p in params]
        [None, ['bias', 'weight']]
        >>> fn([None, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}], torch.ones(3, 2))
        tensor([[2.],
                [2.],
                [2.]])
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"functional: module is a {type(module).__name__}; expected an nn.Module. A function "
            "over a parameter pytree is a stage already"
        )
    for path, part in module.named_modules():
        _refuse_impure(f"functional: {path or 'the module'!r} ({type(part).__name__})", part)
    fn = Functional(_skeleton(module))
    return fn, _nest(module, set()) or {}


class Functional:
    """What :func:`functional` returns: ``fn(params, *args, **kwargs)``.

    It holds the module without its parameters, and a copy of its buffers, which are constants: they
    follow the parameters to their device and keep their dtype.
    """

    def __init__(self, skeleton: nn.Module):
        self.__name__ = type(skeleton).__name__
        self._skeleton = skeleton
        self._paths = {name.replace(".", "/"): name for name, _ in skeleton.named_parameters()}
        self._constants: dict[torch.device, dict[str, Tensor]] = {}
        self._lock = threading.RLock()

    def __call__(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        """What the module returns with these parameters.

        Args:
            params: a pytree with the structure that :func:`functional` returned.
            args: what the module takes.
            kwargs: what it takes by name.

        Raises:
            KeyError: ``params`` has other leaves.
            ValueError: the module changes its buffers, or keeps a parameter elsewhere as well.
        """
        leaves = self._named(params)
        tensors = [*leaves.values(), *torch_pytree.tree_leaves((args, kwargs))]
        device = next((x.device for x in tensors if isinstance(x, Tensor)), torch.device("cpu"))
        # The skeleton holds the tensors of one call at a time.
        with self._lock:
            buffers = self._buffers(device)
            given, versions = {**leaves, **buffers}, [x._version for x in buffers.values()]
            try:
                return torch.func.functional_call(self._skeleton, given, args, kwargs)
            finally:
                # functional_call leaves in ``given`` what the module assigned.
                changed = [
                    name
                    for (name, leaf), version in zip(buffers.items(), versions)
                    if given[name] is not leaf or leaf._version != version
                ]
                if changed:
                    del self._constants[device]
                    raise self._impure(changed)

    def state_dict(self, params: Params) -> dict[str, Any]:
        """What ``module.load_state_dict`` takes: dotted names, tied ones too, and buffers.

        Args:
            params: a pytree with the structure that :func:`functional` returned.

        Raises:
            KeyError: ``params`` has other leaves.
        """
        leaves = self._named(params)
        names = {id(leaf): name for name, leaf in self._skeleton.named_parameters()}
        state = self._skeleton.state_dict(keep_vars=True)
        return {k: leaves[names[id(x)]] if id(x) in names else x for k, x in state.items()}

    def _named(self, params: Params) -> dict[str, Tensor]:
        """The leaves by the module's own names."""
        leaves = _tree.flatten(params)[0]
        if leaves.keys() != self._paths.keys():
            lacks = ", ".join(map(repr, sorted(self._paths.keys() - leaves.keys())[:4]))
            more = ", ".join(map(repr, sorted(leaves.keys() - self._paths.keys())[:4]))
            raise KeyError(
                f"functional {self.__name__}: params lack {lacks or 'nothing'} and hold "
                f"{more or 'nothing'} besides; expected the structure that mt.functional "
                "returned. In a stage, name the key under which that pytree lies"
            )
        return {self._paths[path]: leaf for path, leaf in leaves.items()}

    def _buffers(self, device: torch.device) -> dict[str, Tensor]:
        """The constants on a device."""
        if device not in self._constants:
            # A tensor made in inference mode would have no version to compare.
            with torch.inference_mode(False):
                self._constants[device] = {
                    name: leaf.to(device, copy=True)
                    for name, leaf in self._skeleton.named_buffers()
                }
        return self._constants[device]

    def _impure(self, changed: list[str]) -> ValueError:
        return ValueError(
            f"functional {self.__name__}: the module changes its buffers "
            f"{', '.join(map(repr, changed[:4]))}; expected a pure function, since the backward "
            "pass runs it again. Call module.eval() first if that stops it, or let the module "
            "return the new values, and the stage report them as aux (has_aux=True)"
        )

    def __repr__(self) -> str:
        return f"Functional({self.__name__}, {len(self._paths)} leaves)"


class _Absent(nn.Parameter):
    """Stands in the skeleton for a parameter, with its shape and no memory; refuses to be used.

    Plain meta tensors would not do: multiplied with a tensor on the processor, some operations
    return memory that nobody filled.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            return super().__torch_function__(func, types, args, kwargs or {})
        raise ValueError(
            "functional: the module reaches a parameter other than by its name while it runs; "
            "expected an attribute, such as self.weight. Read it so rather than through a list "
            "or a hook, and leave torch.utils.checkpoint out: stages are recomputed anyway"
        )


def _refuse_impure(where: str, part: nn.Module) -> None:
    """Raises ValueError for what is known to make a module impure, or would be lost."""
    for kind, rate in _DRAWS:
        if part.training and isinstance(part, kind) and (rate is None or getattr(part, rate) > 0):
            raise ValueError(
                f"{where} draws from torch's global generator in training mode, so its "
                "recomputation would draw other numbers; expected a pure function. Call "
                "module.eval(), or leave it out, and draw in the stage: rng=True and "
                "mt.random.dropout(key, rate, x)"
            )
    if isinstance(part, _NormBase) and part.training and part.track_running_stats:
        raise ValueError(
            f"{where} counts running statistics in training mode, and the backward pass runs it "
            "again; expected a pure function. Call its eval(), or make it with "
            "track_running_stats=False, or use a norm without statistics over the batch"
        )
    if part._backward_hooks or part._backward_pre_hooks:
        raise ValueError(
            f"{where} has backward hooks, which torch.func does not run as autograd does; expected "
            "none. Remove them; what they looked at is in the gradients and in aux values"
        )
    for name in (*part._parameters, *part._modules):
        if "/" in name:
            raise ValueError(
                f"{where}: name {name!r}; expected one without '/', which separates the parts of "
                "a path. Rename it"
            )
    for name, leaf in part._parameters.items():
        if leaf is None:
            continue
        if nn.parameter.is_lazy(leaf):
            raise ValueError(
                f"{where}: parameter {name!r} is not initialized; expected a shape. Run the "
                "module once before"
            )
        if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
            raise ValueError(
                f"{where}: parameter {name!r} has hooks on its gradient, which would never run; "
                "expected none. Change gradients between mt.value_and_grad and the update"
            )
    for name, value in {**vars(part), **part._buffers}.items():
        if isinstance(value, Tensor) and value.requires_grad:
            raise ValueError(
                f"{where}: attribute {name!r} is a tensor that requires grad and no parameter, so "
                "its gradient would be lost; expected an nn.Parameter. If it is computed from "
                "one, compute it in forward"
            )


def _skeleton(module: nn.Module) -> nn.Module:
    """A copy of the module without its parameters: it holds none of their memory."""
    memo: dict[int, Any] = {
        id(leaf): _Absent(leaf.detach().to("meta"), requires_grad=False)
        for leaf in module.parameters()
    }
    try:
        skeleton = copy.deepcopy(module, memo)
    except Exception as error:
        error.add_note(
            "mtfunc: in functional, which copies the module without its parameters; "
            "expected attributes that copy.deepcopy takes"
        )
        raise
    for part in skeleton.modules():
        # In eval mode these use another kernel where no gradient is recorded, which rounds
        # differently; their training mode differs from it by dropout alone.
        if isinstance(part, nn.MultiheadAttention | nn.TransformerEncoderLayer):
            if isinstance(part, nn.MultiheadAttention) and not part.training:
                part.dropout = 0.0
            part.training = True
    return skeleton


def _nest(part: nn.Module, seen: set[int]) -> Params:
    """The parameters under a module, each the first time it is met; ``None`` if there are none."""
    entries: dict[str, Any] = {}
    for name, leaf in part._parameters.items():
        entries[name] = None if leaf is None or id(leaf) in seen else leaf.detach()
        seen.add(id(leaf))
    for name, child in part._modules.items():
        entries[name] = None if child is None else _nest(child, seen)
    if all(entry is None for entry in entries.values()):
        return None
    if list(entries) == [str(i) for i in range(len(entries))]:
        return list(entries.values())
    return {name: entry for name, entry in entries.items() if entry is not None}
