"""The library of blocks that random programs are made of.

A token block maps ``x``, a float tensor ``(rows, tokens, width)``, to another of the same shape
and dtype. A whole-carry block maps a dict that holds ``"x"`` and what earlier blocks put there.
Batches have ``tokens``, ``labels`` and ``route``, int64 ``(rows, tokens)``, and ``x``.
"""

from __future__ import annotations

from mtfunc.testing.strategies import carries, inits, losses, tokens
from mtfunc.testing.strategies.case import Block

_LEAVES = ("integer", "bool", "None", "0-dim", "zero-size")
ODD_PARAMS = tuple(f"{leaf} leaf in the parameters" for leaf in _LEAVES)
ODD_CARRY = tuple(f"{leaf} leaf in the carry" for leaf in _LEAVES)

BLOCKS: dict[str, Block] = {
    "embed": Block(tokens.embed, inits.vocabulary, role="start"),
    "project": Block(tokens.project, inits.square, role="start"),
    "take": Block(tokens.take, role="start"),
    "linear": Block(tokens.linear, inits.square, kinds=("linear",)),
    "layer_norm": Block(tokens.layer_norm, inits.affine, group="norms", kinds=("normed",)),
    "rms_norm": Block(tokens.rms_norm, inits.affine, group="norms", kinds=("normed",)),
    "attention": Block(
        tokens.attention, inits.projections, group="attention", kinds=("attention",)
    ),
    "windowed": Block(
        tokens.attention,
        inits.projections,
        static={"window": 2},
        group="attention",
        kinds=("attention",),
    ),
    "grouped": Block(
        tokens.attention,
        inits.grouped_projections,
        static={"kv_heads": 1},
        group="attention",
        kinds=("attention",),
    ),
    "gated": Block(tokens.gated, inits.gates, kinds=("gated MLP",)),
    "experts": Block(tokens.experts, inits.stacked_experts, kinds=("experts, one starved",)),
    "routed": Block(
        tokens.routed, inits.listed_experts, by_value=True, kinds=("experts, one starved",)
    ),
    "recurrent": Block(tokens.recurrent, inits.square, kinds=("recurrent",)),
    "convolution": Block(tokens.convolution, inits.kernels, kinds=("convolutional",)),
    "odd_leaves": Block(tokens.odd_leaves, inits.odd, kinds=ODD_PARAMS),
    "mixed_dtypes": Block(tokens.mixed_dtypes, inits.two_dtypes, kinds=("two dtypes in a stage",)),
    "bilinear": Block(tokens.bilinear, inits.square, reads=2),
    "identity": Block(tokens.identity),
    "dropout": Block(tokens.dropout, inits.square, rng=True, kinds=("keyed dropout",)),
    "monitored": Block(tokens.monitored, inits.square, aux="report", group="aux", kinds=("aux",)),
    "noisy": Block(tokens.noisy, inits.square, rng=True, aux="report", group="aux", kinds=("aux",)),
    "remember": Block(
        carries.remember, inits.square, whole=True, keeps=False, group="memory", makes="memory"
    ),
    "cross": Block(carries.cross, inits.square, whole=True, group="memory", uses="memory"),
    "forget": Block(carries.forget, whole=True, keeps=False, group="memory", drops=True),
    "push": Block(
        carries.push, inits.square, whole=True, keeps=False, group="skips", makes="skips"
    ),
    "pop": Block(carries.pop, inits.square, whole=True, keeps=False, group="skips", uses="skips"),
    "extras": Block(
        carries.extras, whole=True, keeps=False, group="extras", makes="extras", kinds=ODD_CARRY
    ),
    "tick": Block(carries.tick, inits.square, whole=True, group="extras", uses="extras"),
    "totalled": Block(carries.totalled, whole=True, group="extras", uses="extras"),
    "alias": Block(carries.alias, whole=True, keeps=False, group="alias", makes="alias"),
    "merge": Block(carries.merge, inits.square, whole=True, group="alias", uses="alias"),
    "penalize": Block(carries.penalize, inits.square, whole=True, keeps=False, makes="penalty"),
    "abandon": Block(
        carries.abandon,
        inits.zeros,
        whole=True,
        keeps=False,
        absent=True,
        kinds=("a carry leaf of infinite slope, unused",),
    ),
    "cross_entropy": Block(losses.cross_entropy, inits.vocabulary, role="loss"),
    "mean_square": Block(losses.mean_square, role="loss"),
    "counted": Block(losses.counted, role="loss"),
    "mixed": Block(
        losses.mixed,
        inits.vocabulary,
        role="loss",
        whole=True,
        uses="penalty",
        kinds=("mixed losses",),
    ),
}
"""Blocks by name, in the order in which a failure shrinks: the plainest first."""
