"""Operations for long sequences: exact, in memory linear in tokens, aware of documents."""

from mtfunc.ops._tiled import tile
from mtfunc.ops.loss import linear_cross_entropy

__all__ = ["linear_cross_entropy", "tile"]
