"""How values flow through a program: the names of carries, and what each pullback takes and gives.

Every carry leaf has one name from the stage that made it to the last that reads it, however many
stages pass it on. Reverse-mode differentiation then is a tape over whole stages: a leaf has at
most one cotangent, which later stages add to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtfunc._base import Path
from mtfunc.pullback import Wanted
from mtfunc.trace import Aval, Traced

Site = tuple[int, int]
"""A stage's number and a micro-batch's number."""


@dataclass(frozen=True)
class Flow:
    """The data flow of a step; carry leaves are known by name.

    Attributes:
        takes: the distinct leaves of the carry that a stage takes.
        makes: its fresh outputs.
        final: for each micro-batch the distinct leaves of the carry at the end.
        avals: the abstract value of every name.
        wanted: what each pullback takes part in; sites without a gradient are absent.
        writers: for each parameter path the stages that add to its gradient, in running order.
    """

    takes: dict[Site, tuple[str, ...]]
    makes: dict[Site, tuple[str, ...]]
    final: tuple[tuple[str, ...], ...]
    avals: dict[str, Aval]
    wanted: dict[Site, Wanted]
    writers: dict[Path, list[int]]


def flow(traced: Sequence[Sequence[Traced]], gradients: bool) -> Flow:
    """Names every carry leaf and finds every pullback.

    Args:
        traced: the stages of each micro-batch, ``traced[micro][stage]``.
        gradients: whether there is a backward pass; else nothing is wanted.
    """
    takes: dict[Site, tuple[str, ...]] = {}
    makes: dict[Site, tuple[str, ...]] = {}
    final: list[tuple[str, ...]] = []
    avals: dict[str, Aval] = {}
    for m, stages in enumerate(traced):
        carry: tuple[str, ...] = ()
        for s, stage in enumerate(stages):
            takes[s, m] = carry
            makes[s, m] = tuple(
                f"carry/{stage.stage.name}.{j}#{m}" for j in range(len(stage.outputs))
            )
            avals.update(zip(makes[s, m], stage.outputs))
            fresh = iter(makes[s, m])
            carry = tuple(
                next(fresh) if source is None else carry[source - stage.n_params]
                for source in stage.sources
            )
        final.append(carry)
    named = Flow(takes, makes, tuple(final), avals, {}, {})
    if gradients:
        _differentiate(traced, named)
    return named


def _differentiate(traced: Sequence[Sequence[Traced]], named: Flow) -> None:
    started = {name for carry in named.final for name in carry if named.avals[name].active}
    for s in reversed(range(len(traced[0]))):
        for m, stages in enumerate(traced):
            stage = stages[s]
            paths = stage.binding.paths
            inputs = (*paths, *named.takes[s, m])
            seeded = tuple(j for j, name in enumerate(named.makes[s, m]) if name in started)
            connected = stage.connect(seeded)
            if not connected:
                continue
            running = tuple(i for i in connected if inputs[i] in started)
            named.wanted[s, m] = Wanted(connected, seeded, running)
            started.update(inputs[i] for i in connected)
            for i in connected:
                if i < len(paths):
                    stages_so_far = named.writers.setdefault(paths[i], [])
                    if s not in stages_so_far:
                        stages_so_far.append(s)
