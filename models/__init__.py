"""Language models as programs: a family is a module, a size is an entry of its ``CONFIGS``.

    module, config = models.get("llama-tiny")
    params = module.init(config, mt.random.key(0))
    program = module.program(config)

The library never imports this package: read it, use it from a checkout, fork it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from models import common, gpt2, llama
from models.common import check_batch

__all__ = ["FAMILIES", "check_batch", "count_params", "get", "gpt2", "llama"]

FAMILIES = (gpt2, llama)
"""Every family; a module with ``CONFIGS``, ``init``, ``spec``, ``layout`` and ``program``."""


def get(name: str) -> tuple[ModuleType, Any]:
    """The family module and the config of a named size.

    Args:
        name: such as ``"llama-tiny"``.

    Returns:
        ``(module, config)``.

    Raises:
        KeyError: there is no such size; the message lists those there are.

    Example:
        >>> module, config = get("gpt2")
        >>> module.__name__, config.depth
        ('models.gpt2', 12)
    """
    sizes = {size: (module, cfg) for module in FAMILIES for size, cfg in module.CONFIGS.items()}
    return common.lookup("model", name, sizes)


def count_params(config: Any) -> int:
    """The number of parameters of a model; a tied head counts once.

    Args:
        config: a config of any family.

    Raises:
        TypeError: no family has such a config.

    Example:
        >>> count_params(get("gpt2")[1])
        124439808
    """
    for module in FAMILIES:
        if isinstance(config, module.Config):
            return common.count(module.layout(config))
    raise TypeError(
        f"count_params: got {type(config).__name__}; expected a Config of "
        f"{', '.join(module.__name__ for module in FAMILIES)}. Take one from models.get"
    )
