"""Operations for long sequences: exact, in memory linear in tokens, aware of documents."""

from mtfunc.ops._tiled import tile
from mtfunc.ops.conv import causal_conv1d
from mtfunc.ops.delta import gated_delta_rule
from mtfunc.ops.loss import linear_cross_entropy
from mtfunc.ops.ssd import ssd

__all__ = ["causal_conv1d", "gated_delta_rule", "linear_cross_entropy", "ssd", "tile"]
