"""What a check says of sound programs: hand-written backwards, warnings, a row for each stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mtfunc import _tree
from mtfunc._base import Params, Path
from mtfunc.program import Program, Stage
from mtfunc.reference import with_rule
from mtfunc.schedule import Schedule
from mtfunc.schedule.flow import flow
from mtfunc.testing.backward import Gap, check_call, gaps
from mtfunc.testing.compare import differences, kind
from mtfunc.testing.failure import Results
from mtfunc.testing.purity import Visit, tensors
from mtfunc.testing.report import CheckError, StageReport
from mtfunc.trace import Traced

Verdicts = dict[str, list[str]]
"""What is said of the hand-written backwards of each stage."""


def backwards(
    visits: Sequence[Visit],
    surrogate: Sequence[str],
    trainable: Callable[[Path, Tensor], bool] | None,
) -> Verdicts:
    """Compares every hand-written backward with a finite difference, each distinct one once.

    Raises:
        CheckError: one disagrees and is not named in ``surrogate``.
    """
    said: Verdicts = {}
    known: dict[Any, str] = {}
    for seen in visits:
        stage = seen.stage
        lines = said.setdefault(stage.name, [])
        for call in seen.calls:
            label = call.cls.__name__
            if call.signature not in known:
                excused = bool({label, stage.name, stage.scan} & set(surrogate))
                found = {} if excused else check_call(call)
                _refuse_gaps(
                    stage,
                    f"the backward of {label!r}, a torch.autograd.Function,",
                    {f"argument {i}, {kind(call.args[i])}": gap for i, gap in found.items()},
                )
                known[call.signature] = _outcome(label, excused, found)
            lines.append(known[call.signature])
        if callable(stage.vjp):
            what = (stage.fn, stage.vjp, repr(stage.static), repr(_kinds(seen)))
            if what not in known:
                excused = bool({stage.name, stage.scan} & set(surrogate))
                rule = {} if excused else _check_rule(seen, trainable)
                _refuse_gaps(stage, "its pullback rule", rule)
                known[what] = _outcome("rule", excused, rule)
            lines.append(known[what])
    return {name: list(dict.fromkeys(lines)) for name, lines in said.items()}


def _kinds(seen: Visit) -> Any:
    return [kind(x) for x in (*seen.params.values(), *tensors(seen.carry).values())]


def _outcome(label: str, excused: bool, found: dict[Any, Any]) -> str:
    if excused:
        return f"{label} is a surrogate"
    reason = next(iter(found.values()), None)
    return f"{label} agrees" if reason is None else f"{label} not checked: {reason}"


def _refuse_gaps(stage: Stage, what: str, found: dict[str, Any]) -> None:
    for where, gap in found.items():
        if isinstance(gap, Gap):
            raise CheckError(
                f"stage {stage.name!r}: {what} disagrees with a finite difference in {where}: "
                f"along a random direction it gives {gap.got:.6g}; expected {gap.expected:.6g}, "
                f"the central difference of its forward in float64 with a step of {gap.step:g}. "
                "Mend the backward; if it is on purpose not the derivative, as in a "
                f"straight-through estimator, say so: check(..., surrogate=({stage.name!r},))",
                kind="backward",
                stage=stage.name,
                leaf=where,
            )


def _check_rule(
    seen: Visit, trainable: Callable[[Path, Tensor], bool] | None
) -> dict[str, Gap | str]:
    """What is wrong with a stage's pullback rule, by input; one that equals autograd is right."""
    stage, n = seen.stage, len(seen.params)
    carried = list({id(x): (p, x) for p, x in tensors(seen.carry).items()}.values())
    names = [f"parameter {path!r}" for path in seen.params]
    names += [f"carry leaf {path or 'the top'!r}" for path, _ in carried]
    inputs = [*seen.params.values(), *(leaf for _, leaf in carried)]
    batch = _tree.map_leaves(lambda _, x: _double(x), seen.batch)
    by_path = list(seen.params)

    def under(apply: Callable[..., Any]) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        def f(leaves: Sequence[Tensor]) -> list[Tensor]:
            own = dict(zip(by_path, leaves))
            trees = [_subtree(own, key) for key in stage.keys]
            given = {id(x): leaf for (_, x), leaf in zip(carried, leaves[n:])}
            carry = _tree.map_leaves(lambda _, x: given.get(id(x), x), seen.carry)
            out, _ = apply(trees, carry, batch, seen_key, seen.micro)
            return list(tensors(out).values())

        return f

    def _subtree(own: dict[Path, Tensor], key: Path) -> Any:
        return _tree.map_leaves(lambda path, _: own[_tree.join(key, path)], seen.subtrees[key])

    seen_key = seen.key
    wanted = [
        i
        for i, x in enumerate(inputs)
        if x.is_floating_point() and (i >= n or trainable is None or trainable(by_path[i], x))
    ]
    found = gaps(under(with_rule(stage)), inputs, wanted, autograd=under(stage.apply))
    return {names[i]: gap for i, gap in found.items()}


def _double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def refuse_unsteady(program: Program, params: Params, once_: Any, again: Any) -> None:
    """The standard graph must equal itself.

    Raises:
        CheckError: it gives other gradients when it is built again.
    """
    for part, one, other in zip(("loss", "aux", "gradient"), once_, again):
        for path, difference in differences(other, one).items():
            keys = [s for s in program.stages(params) if any(path.startswith(k) for k in s.keys)]
            name = keys[-1].name if keys else program.stages(params)[-1].name
            raise CheckError(
                f"stage {name!r}: the standard graph gives another {part} at {path or 'the top'!r} "
                f"when it runs again on the same inputs: {difference}. Expected a pure function; "
                "its forward repeats itself, so look for a backward that draws, counts or sums "
                "without an order",
                kind="repeat",
                stage=name,
                leaf=path,
            )


def warnings(
    schedule: Schedule, visits: Sequence[Visit], expected: Results, said: Verdicts
) -> Iterator[str]:
    """What is no fault and yet worth a look."""
    yield from dict.fromkeys(_sharing(seen) for seen in visits if seen.shared)
    grads = _tree.flatten(expected.grads)[0]
    read = flow(schedule.traced, True).writers
    unused = [path for path in grads if path not in read]
    if unused:
        yield (
            f"no output that the loss depends on uses {_some(unused)}: the gradient is zero, and "
            "weight decay still acts on it. Use it or leave it out of the parameters"
        )
    zero = [p for p, g in grads.items() if p not in unused and g.numel() and not bool(g.any())]
    if zero:
        yield (
            f"the gradient of {_some(zero)} is zero everywhere: a detach(), a saturated or dead "
            "unit, or a factor that is zero at the start"
        )
    bad = [path for path, grad in grads.items() if not bool(torch.isfinite(grad).all())]
    if bad:
        yield f"the gradient of {_some(bad)} is not finite; it was compared place by place"
    if expected.params is None:
        yield ("no optimizer step was compared: the loss is not finite, or a complex leaf learns")
    yield from _dtypes(schedule.traced[0])
    for name, lines in said.items():
        for line in lines:
            if " not checked: " in line:
                yield f"stage {name!r}: the hand-written backward of {line}"


def _sharing(seen: Visit) -> str:
    one = seen.shared[0]
    where = f"stage {seen.stage.name!r} returns {one.leaf or 'the top'!r} in its carry"
    if one.what == "batch":
        return f"{where}, in the memory of the batch's {one.source!r}; it must not be changed later"
    return (
        f"{where}, in the memory of parameter {one.source!r}: gradients are right, but their last "
        "bit may depend on the order of additions. Read the key where the parameter is needed"
    )


def _some(paths: Sequence[Path]) -> str:
    return ", ".join(map(repr, paths[:8])) + ", …" * (len(paths) > 8)


def _dtypes(traced: Sequence[Traced]) -> Iterator[str]:
    for stage in traced:
        took = _carry(stage, out=False)
        for path, aval in _carry(stage, out=True).items():
            before = took.get(path)
            if stage.final or before is None or before.dtype == aval.dtype:
                continue
            if before.dtype.is_floating_point and aval.dtype.is_floating_point:
                yield (
                    f"stage {stage.stage.name!r} takes {before} and returns {aval} at "
                    f"{path or 'the top'!r} of its carry; if that is not meant, cast back with "
                    f".to({before.dtype})"
                )


def _carry(stage: Traced, out: bool) -> dict[Path, Any]:
    fresh = iter(stage.outputs)
    given = stage.inputs[stage.n_params :]
    if not out:
        return dict(zip(stage.carry_in.spec.paths(), (given[i] for i in stage.carry_in.places)))
    distinct = [next(fresh) if s is None else stage.inputs[s] for s in stage.sources]
    return dict(zip(stage.carry_out.spec.paths(), (distinct[i] for i in stage.carry_out.places)))


def rows(schedule: Schedule, said: Verdicts) -> Iterator[StageReport]:
    """One row for each stage."""
    for traced in schedule.traced[0]:
        stage = traced.stage
        carry = ", ".join(f"{p}: {a}" if p else str(a) for p, a in _carry(traced, True).items())
        yield StageReport(
            name=stage.name,
            reads=stage.keys,
            leaves=sum(aval.active for aval in traced.inputs[: traced.n_params]),
            carry="the loss" if traced.final else carry[:47] + "…" * (len(carry) > 47),
            pullback="rule" if callable(stage.vjp) else stage.vjp,
            backward=", ".join(said.get(stage.name, [])),
        )
