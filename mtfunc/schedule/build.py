"""From a traced program to a schedule: which operations there are, in which order.

The list that is built here is one order that is right by itself; streams only relax it. Every
operation names its buffers, so nothing is said here about waiting, and little about freeing:
``place`` sees where a buffer is used last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from mtfunc import _tree
from mtfunc._base import Batch, Path
from mtfunc.config import StreamConfig
from mtfunc.loss import Mean
from mtfunc.pullback import Wanted
from mtfunc.schedule.flow import Flow, flow
from mtfunc.schedule.place import Draft, Value
from mtfunc.trace import Aval, Traced

MODES = ("forward", "grad", "train")


class Visit(NamedTuple):
    """All micro-batches passing through one stage while its parameters are resident."""

    number: int
    stage: int
    backward: bool


class Results(NamedTuple):
    """The names of the buffers that a step leaves to the caller."""

    carry: list[tuple[str, ...]]
    """The distinct leaves of the final carry of each micro-batch."""
    aux: dict[tuple[int, int], tuple[str, ...]]
    """The aux leaves by stage and micro-batch."""
    grads: dict[Path, str]
    """The gradients, by path; empty when training."""
    loss: list[str]
    """The loss, unless forward only."""


Cost = Callable[[int, int, Wanted], int | None]
"""Bytes that the pullback of a stage and micro-batch holds, where they are known."""


class Builder:
    """Emits the operations of one step as drafts.

    Args:
        traced: the stages of each micro-batch, ``traced[micro][stage]``.
        units: the parameter paths of each unit.
        params: the abstract value of every parameter leaf; active ones are trained.
        batches: one pytree for each micro-batch; only shapes are used.
        config: how to stream.
        mode: ``"forward"``, ``"grad"`` (gradients go to the caller) or ``"train"`` (each unit is
            updated as soon as its gradient is complete).
        unified: whether the host is the device, so that nothing is copied between them.
        cost: what keeping a pullback would take.
    """

    def __init__(
        self,
        traced: Sequence[Sequence[Traced]],
        units: Mapping[str, tuple[Path, ...]],
        params: Mapping[Path, Aval],
        batches: Sequence[Batch],
        config: StreamConfig,
        *,
        mode: str,
        unified: bool,
        cost: Cost,
    ):
        assert mode in MODES, mode
        self.traced, self.units, self.params = traced, units, params
        self.config, self.mode, self.unified = config, mode, unified
        self.micros = range(len(traced))
        self.last = len(traced[0]) - 1
        self.unit_of = {path: unit for unit, paths in units.items() for path in paths}
        self.flow: Flow = flow(traced, gradients=mode != "forward")
        self.drafts: list[Draft] = []
        self.values: dict[str, Value] = {}
        self.results = Results([], {}, {}, [])
        self.visits = self._visits()
        self.visit_ends: list[int] = []
        """For each visit, how many drafts there were when it ended."""
        self.here: dict[str, str] = {}
        """Carry leaves that lie under another name since they were fetched."""
        self.complete: set[Path] = set()
        """Parameters whose gradient is final."""
        self.slots: dict[tuple[Path, int], str] = {}
        """The device name of a parameter leaf during a visit."""
        self.kept, self.residuals = self._plan_kept(cost)
        self._declare_params()
        self.batches = [self._declare_batch(m, batch) for m, batch in enumerate(batches)]
        self.loads = {} if unified else self._plan_loads()
        self.saved, self.fetches = self._plan_carries()
        self._emit()

    # What there is

    def _value(
        self,
        name: str,
        category: str,
        aval: Aval | None,
        arena: str = "device",
        block: str = "",
        lag: int = 0,
    ) -> str:
        nbytes = aval.nbytes if aval is not None else 1
        self.values[name] = Value(name, category, aval, nbytes, arena, block or name, lag)
        return name

    def _visits(self) -> list[Visit]:
        forward = [(s, False) for s in range(self.last + 1)]
        stages = sorted({s for s, _ in self.flow.wanted}, reverse=True)
        both = forward + [(s, True) for s in stages]
        return [Visit(number, s, backward) for number, (s, backward) in enumerate(both)]

    def _declare_params(self) -> None:
        for unit, paths in self.units.items():
            for path in paths:
                self._value(f"params/{path}", "parameters", self.params[path], f"params/{unit}")

    def _declare_batch(self, m: int, batch: Batch) -> dict[Path, str]:
        leaves = _tree.flatten(batch)[0]
        tensors = {path: Aval.of(x) for path, x in leaves.items() if isinstance(x, Tensor)}
        names = {p: self._value(f"batch/{p}#{m}", "batch", a, "batch") for p, a in tensors.items()}
        if self.unified:
            return names
        there = {p: self._value(f"device/{names[p]}", "batch", a) for p, a in tensors.items()}
        if names:
            self._copy("load", "h2d", "batch", names.values(), there.values(), micro=m)
        return there

    def _plan_kept(self, cost: Cost) -> tuple[dict[int, tuple[int, int]], int]:
        """The stages whose pullbacks are kept, each from which visit to which; what they hold.

        A last stage with one micro-batch is pulled back at once, so keeping takes no more memory.
        """
        forward, kept, held = {v.stage: v.number for v in self.visits if not v.backward}, {}, 0
        budget = self.config.residuals if isinstance(self.config.residuals, int) else 0
        for visit in self.visits:
            if not visit.backward:
                continue
            sites = [(m, self.flow.wanted.get((visit.stage, m))) for m in self.micros]
            if visit.stage == self.last and len(sites) == 1:
                need: int | None = 0
            elif held < budget:
                found = [cost(visit.stage, m, wanted) for m, wanted in sites if wanted]
                paths = () if self.unified else self.traced[0][visit.stage].binding.paths
                stay = sum(self.params[path].nbytes for path in paths)
                need = None if None in found else stay + sum(n for n in found if n is not None)
            else:
                need = None
            if need is not None and held + need <= budget:
                kept[visit.stage] = (forward[visit.stage], visit.number)
                held += need
        return kept, held

    def _plan_loads(self) -> dict[int, list[tuple[int, str, list[Path]]]]:
        """The loads to issue at the start of each visit: for which visit, the unit, the leaves.

        Leaves of a unit that the same visits read move together. They stay between two visits
        that are near enough for a second load to be in flight during the first of them.
        """
        readers: dict[Path, list[int]] = defaultdict(list)
        for visit in self.visits:
            for path in self.traced[0][visit.stage].binding.paths:
                readers[path].append(visit.number)
        near = max(self.config.slots - 1, 1)
        loads: dict[int, list[tuple[int, str, list[Path]]]] = defaultdict(list)
        for unit, paths in self.units.items():
            groups: dict[tuple[int, ...], list[Path]] = defaultdict(list)
            for path in paths:
                groups[tuple(readers[path])].append(path)
            for numbers, group in groups.items():
                first = -1
                for before, number in zip((-1, *numbers), numbers):
                    stays = any(
                        start <= before and number <= stop and {start, stop} <= {*numbers}
                        for start, stop in self.kept.values()
                    )
                    if first < 0 or (number - before > near and not stays):
                        first = number
                        loads[max(0, number - self.config.slots + 1)].append((number, unit, group))
                    for path in group:
                        name, block = f"slot/{path}@{first}", f"slot/{group[0]}@{first}"
                        self.slots[path, number] = self._value(
                            name, "slots", self.params[path], block=block
                        )
        return loads

    def _plan_carries(self) -> tuple[set[str], dict[int, list[str]]]:
        """Which carry leaves go to the host, and the item before which each is fetched.

        An item is one micro-batch in one visit. What the next visit needs again stays.
        """
        if self.unified or self.config.carries != "host":
            return set(), {}
        stay = {name for m in self.micros for s in self.kept for name in self.flow.takes[s, m]}
        used: dict[str, int] = {}
        again: dict[str, int] = {}
        saved: set[str] = set()
        fetches: dict[int, list[str]] = defaultdict(list)
        count = len(self.micros)
        for visit in self.visits:
            for m in self.micros:
                if visit.backward and (visit.stage, m) not in self.flow.wanted:
                    continue
                for name in self.flow.takes[visit.stage, m]:
                    if not visit.backward:
                        used[name] = visit.number
                    elif name not in again:
                        again[name] = visit.number
                        if visit.number - used[name] > 1 and name not in stay:
                            saved.add(name)
                            fetches[visit.number * count + m - 1].append(name)
        return saved, fetches

    # The order of a step

    def _emit(self) -> None:
        turn = sum(not visit.backward for visit in self.visits)
        for visit in self.visits[:turn]:
            self._visit(visit)
        if self.mode == "forward":
            self._finish_forward()
            return
        self._loss()
        # A leaf may be read again by a stage that adds nothing to its gradient: not before the
        # last recomputation that reads it may it be updated.
        last = dict.fromkeys(path for path, aval in self.params.items() if aval.active)
        for visit in self.visits[turn:]:
            read = self.traced[0][visit.stage].binding.paths
            last.update({path: visit.number for path in read if path in last})
        self._complete([path for path, number in last.items() if number is None])
        for visit in self.visits[turn:]:
            self._visit(visit)
            self._complete([path for path, number in last.items() if number == visit.number])

    def _visit(self, visit: Visit) -> None:
        for needed, unit, paths in sorted(self.loads.get(visit.number, ())):
            targets = [self.slots[path, needed] for path in paths]
            self._copy("load", "h2d", unit, [f"params/{path}" for path in paths], targets)
        for m in self.micros:
            self._fetch(visit.number * len(self.micros) + m)
            (self._pullback if visit.backward else self._forward)(visit, m)
        self.visit_ends.append(len(self.drafts))

    def _reads(self, visit: Visit, m: int) -> dict[str, list[str]]:
        paths = self.traced[m][visit.stage].binding.paths
        params = [self.slots.get((path, visit.number), f"params/{path}") for path in paths]
        carry = [self.here.get(name, name) for name in self.flow.takes[visit.stage, m]]
        return {"params": params, "carry": carry, "batch": list(self.batches[m].values())}

    def _forward(self, visit: Visit, m: int) -> None:
        stage = self.traced[m][visit.stage]
        category = "loss" if stage.final else "carries"
        made = list(self.flow.makes[visit.stage, m])
        for name in made:
            lag = 1 if name in self.saved else 0
            self._value(name, category, self.flow.avals[name], lag=lag)
        aux = [
            self._value(f"aux/{stage.stage.name}.{k}#{m}", "aux", aval)
            for k, aval in enumerate(stage.aux)
        ]
        keep = visit.stage in self.kept and (visit.stage, m) in self.flow.wanted
        self.drafts.append(
            Draft(
                "forward",
                "compute",
                stage.stage.name,
                visit.stage,
                m,
                reads=self._reads(visit, m),
                writes={"outputs": made, "aux": aux},
                keep=keep,
                wanted=self.flow.wanted[visit.stage, m] if keep else None,
            )
        )
        if aux:
            self.results.aux[visit.stage, m] = self._hand_over(stage.stage.name, aux, m)
        saved = [name for name in made if name in self.saved]
        if saved:
            host = [self._value(f"host/{n}", "carries", self.flow.avals[n], "host") for n in saved]
            self._copy("save", "d2h", stage.stage.name, saved, host, visit.stage, m)

    def _fetch(self, item: int) -> None:
        names = self.fetches.get(item, ())
        for name in names:
            self.here[name] = self._value(f"again/{name}", "carries", self.flow.avals[name])
        if names:
            host = [f"host/{name}" for name in names]
            label = names[0].removeprefix("carry/").rsplit(".", 1)[0]
            self._copy("fetch", "h2d", label, host, [self.here[name] for name in names])

    def _loss(self) -> None:
        names = [name for carry in self.flow.final for name in carry]
        active = list(dict.fromkeys(n for n in names if self.flow.avals[n].active))
        seeds = [self._cotangent(name) for name in active]
        avals = [[self.flow.avals[name].meta() for name in carry] for carry in self.flow.final]
        means = [t[-1].carry_out.build(leaves) for t, leaves in zip(self.traced, avals)]
        scalar = Aval((), Mean.pool(means).dtype, ())
        loss = [self._value("loss", "loss", scalar)]
        self.drafts.append(
            Draft(
                "loss",
                "compute",
                "loss",
                self.last,
                reads={"means": names},
                writes={"seeds": seeds, "loss": loss},
            )
        )
        self.results.loss.extend(self._hand_over("loss", loss))
        if self.mode == "train":
            verdict = self._value("verdict", "loss", None, "host")
            self.drafts.append(
                Draft(
                    "check",
                    "host",
                    "loss",
                    reads={"loss": list(self.results.loss)},
                    writes={"verdict": [verdict]},
                )
            )

    def _cotangent(self, name: str) -> str:
        cotangent = f"cotangent/{name.removeprefix('carry/')}"
        return self._value(cotangent, "cotangents", self.flow.avals[name].dense())

    def _pullback(self, visit: Visit, m: int) -> None:
        wanted = self.flow.wanted.get((visit.stage, m))
        if wanted is None:
            return
        stage = self.traced[m][visit.stage]
        paths = stage.binding.paths
        names = (*paths, *self.flow.takes[visit.stage, m])

        def cotangent(i: int) -> str:
            return self._grad(names[i]) if i < len(paths) else self._cotangent(names[i])

        self.drafts.append(
            Draft(
                "pullback",
                "compute",
                stage.stage.name,
                visit.stage,
                m,
                reads={
                    **self._reads(visit, m),
                    "cotangents": [
                        self._cotangent(self.flow.makes[visit.stage, m][j]) for j in wanted.outputs
                    ],
                    "sums": [cotangent(i) for i in wanted.running],
                },
                writes={"results": [cotangent(i) for i in wanted.inputs]},
                keep=visit.stage in self.kept,
                wanted=wanted,
            )
        )

    def _grad(self, path: Path) -> str:
        stages = self.flow.writers.get(path, [-1])
        block = f"grads/{self.unit_of[path]}:{stages[0]}-{stages[-1]}"
        lag = 0 if self.unified else self.config.grad_slots - 1
        aval = self.params[path].dense()
        return self._value(f"grads/{path}", "gradients", aval, block=block, lag=lag)

    # Handing over

    def _complete(self, paths: list[Path]) -> None:
        """The gradients at these paths are final: give them to the caller or the optimizer."""
        by_unit: dict[str, list[Path]] = defaultdict(list)
        for path in paths:
            by_unit[self.unit_of[path]].append(path)
        for unit, done in by_unit.items():
            names = [self._grad(path) for path in done]
            zeros = [n for n, p in zip(names, done) if p not in self.flow.writers]
            if zeros:
                self.drafts.append(Draft("zero", "compute", unit, writes={"zeros": zeros}))
            if self.mode == "grad":
                self.results.grads.update(zip(done, self._hand_over(unit, names)))
                continue
            if not self.unified:
                staged = [
                    self._value(
                        f"staged/{path}",
                        "gradients",
                        self.values[name].aval,
                        "host",
                        self.values[name].block.replace("grads/", "staged/", 1),
                        lag=self.config.grad_slots - 1,
                    )
                    for path, name in zip(done, names)
                ]
                self._copy("store", "d2h", unit, names, staged)
            self.complete.update(done)
            active = [path for path in self.units[unit] if self.params[path].active]
            if self.complete.issuperset(active):
                self._update(unit, active)

    def _update(self, unit: str, active: list[Path]) -> None:
        grads = [f"{'grads' if self.unified else 'staged'}/{path}" for path in active]
        moments = self._value(f"moments/{unit}", "moments", None, f"moments/{unit}")
        self.drafts.append(
            Draft(
                "update",
                "host",
                unit,
                reads={"grads": grads, "verdict": ["verdict"]},
                writes={"params": [f"params/{path}" for path in active], "moments": [moments]},
            )
        )

    def _hand_over(self, label: str, names: Iterable[str], m: int | None = None) -> tuple[str, ...]:
        """Copies values to the caller; where the host is the device they are the caller's."""
        names = tuple(names)
        if self.unified:
            return names
        out = tuple(
            self._value(f"out/{n}", self.values[n].category, self.values[n].aval, "out")
            for n in names
        )
        self._copy("store", "d2h", label, names, out, micro=m)
        return out

    def _finish_forward(self) -> None:
        for m in self.micros:
            carry = tuple(dict.fromkeys(self.flow.final[m]))
            self.results.carry.append(self._hand_over("carry", carry, m) if carry else ())

    def _copy(
        self,
        kind: str,
        stream: str,
        label: str,
        source: Iterable[str],
        target: Iterable[str],
        stage: int | None = None,
        micro: int | None = None,
    ) -> None:
        reads, writes = {"source": list(source)}, {"target": list(target)}
        self.drafts.append(Draft(kind, stream, label, stage, micro, reads, writes))
