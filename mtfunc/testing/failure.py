"""Says where streamed results begin to differ, by how much, why most likely, and how to see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from mtfunc import _tree
from mtfunc._base import Params, Path
from mtfunc.config import StreamConfig
from mtfunc.program import Stage
from mtfunc.testing.compare import Difference, differences, likely_cause
from mtfunc.testing.purity import Visit
from mtfunc.testing.report import CheckError


class Run(NamedTuple):
    """One way to stream, and whether an optimizer step is taken too."""

    device: str
    config: StreamConfig
    step: bool


class Results(NamedTuple):
    """What a pass gives; ``params`` after an optimizer step, or ``None`` where none was taken."""

    loss: Tensor
    aux: Any
    grads: Params
    params: Params | None


class Failure(NamedTuple):
    """Compares runs with what is expected and raises."""

    params: Params
    stages: Sequence[Stage]
    visits: Sequence[Visit]
    expected: Results

    def compare(self, run: Run, got: Results) -> None:
        """Insists on equal bits.

        Raises:
            CheckError: something differs.
        """
        for what, ours, theirs in (
            ("the loss", got.loss, self.expected.loss),
            ("aux values", got.aux, self.expected.aux),
        ):
            if found := differences(ours, theirs):
                self._forward(run, what, found)
        if found := differences(got.grads, self.expected.grads):
            self._backward(run, "gradients", found)
        if got.params is not None and (found := differences(got.params, self.expected.params)):
            self._backward(run, "parameters after one step of mt.adamw", found)

    def _forward(self, run: Run, what: str, found: dict[Path, Difference]) -> None:
        path, difference = next(iter(found.items()))
        stage = self.stages[-1].name
        if what == "aux values":
            names = [n for s in self.stages for n in (s.name, s.scan) if n]
            stage = next((n for n in names if path.startswith(n) or f"/{n}" in path), stage)
        lines = [
            f"check: {what} of the streamed forward pass and of the standard graph differ"
            f"{f', first at {path!r}' if path else ''}",
            f"  by how much   {difference}",
            f"  seen at       stage {stage!r}; the passes agree up to the values that it is given, "
            "or a stage before it rounds differently when it is streamed",
            "  likely cause  a stage whose numbers depend on the layout or the address of its "
            "inputs, or on whether gradients are recorded",
        ]
        raise self._error(run, lines, stage, path or "loss", what, path)

    def _backward(self, run: Run, what: str, found: dict[Path, Difference]) -> None:
        place = self._begins(found)
        at, path = max(((place(path), path) for path in found), key=lambda pair: pair[0])
        path = next(path for path in found if place(path) == at)
        stage = self.stages[at].name
        readers = [self.stages[i].name for i in self._readers(path)]
        also = [p for p in found if p != path]
        facts = {
            "seeds": run.device.startswith("sim"),
            "shared": any(s.what == "parameters" for v in self.visits for s in v.shared),
        }
        leaves = _tree.flatten(self.expected.grads)[0]
        cause = likely_cause(found[path], leaves, facts) if what == "gradients" else OPTIMIZER
        total = len(leaves)
        lines = [
            f"check: {what} of the streamed pass and of the standard graph differ; in backward "
            f"order the difference begins at stage {stage!r}, leaf {path!r}",
            f"  by how much   {found[path]}",
        ]
        if len(readers) > 1:
            lines.append(f"  read by       {', '.join(map(repr, readers))}")
        if at + 1 < len(self.stages):
            after = self.stages[at + 1].name
            lines.append(f"  cotangent     handed back by stage {after!r}, whose own leaves agree")
        shown = ", ".join(map(repr, also[:6])) + ", …" * (len(also) > 6)
        lines.append(
            f"  also          {len(found)} of {total} leaves differ: {shown or 'no other'}"
        )
        lines.append(f"  likely cause  {cause}")
        raise self._error(run, lines, stage, path, what, path)

    def _begins(self, found: dict[Path, Difference]) -> Callable[[Path], int]:
        """The stage at which a leaf counts: one that several stages read, behind all others."""
        alone = any(len(self._readers(path)) == 1 for path in found)
        return lambda path: self._readers(path)[0 if alone else -1]

    def _readers(self, path: Path) -> list[int]:
        return [
            i
            for i, stage in enumerate(self.stages)
            if any(path == key or path.startswith(key + "/") for key in stage.keys)
        ] or [0]

    def raised(self, run: Run, error: Exception) -> CheckError:
        """The failed check that an exception of the engine is."""
        notes = getattr(error, "__notes__", [])
        text = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
        told = " ".join(notes)
        names = sorted((s.name for s in self.stages), key=len, reverse=True)
        stage = next((n for n in names if f"stage {n!r}" in f"{error} {told}"), None) or next(
            (n for n in names if f" {n} " in told), None
        )
        if "vjp='autograd'" in told:
            lines = [
                f"check: stage {stage!r} cannot be differentiated by torch.func.vjp, as "
                "vjp='func' does",
                f"  got           {type(error).__name__}: {text}",
                "  expected      kernels that functorch can trace, such as an autograd.Function "
                "with setup_context",
                "  mend          give the stage vjp='autograd', which takes every kernel that the "
                "standard graph takes",
            ]
        else:
            lines = [
                f"check: streaming fails where the standard graph does not, in stage {stage!r}",
                f"  got           {type(error).__name__}: {text}",
                *(f"  note          {note}" for note in notes),
            ]
        return self._error(run, lines, stage, None, "stream", "")

    def _error(
        self,
        run: Run,
        lines: list[str],
        stage: str | None,
        leaf: Path | None,
        what: str,
        path: Path,
    ) -> CheckError:
        where = f"device {run.device!r}, {short(run.config)}"
        text = "\n".join([*lines, f"  streamed on   {where}", "", self._paste(run, what, path)])
        kind = "stream" if what == "stream" else "differs"
        return CheckError(
            text, kind=kind, stage=stage, leaf=leaf, device=run.device, config=run.config
        )

    def _paste(self, run: Run, what: str, path: Path) -> str:
        """Lines that show it again, given the same program, params, batch and key."""
        begin = [
            "To see it again with the same program, params, batch and key:",
            "",
            "    import mtfunc as mt",
            f"    how = dict(device={run.device!r}, config=mt.{run.config!r})",
        ]
        if what.startswith("parameters"):
            return "\n".join(
                [
                    *begin,
                    "    optimizer = mt.adamw(1e-2, weight_decay=0.1)",
                    "    state = mt.init(program, params, optimizer, key)",
                    "    state, metrics = mt.train_step(program, optimizer, **how)(state, batch)",
                    f"    print(state.params{index(self.params, path)})",
                ]
            )
        first, value = "(loss, aux), grads", "loss"
        if what == "gradients":
            value = f"grads{index(self.params, path)}"
        elif what == "aux values":
            value = f"aux{index(self.expected.aux, path)}"
        got = ["    f = mt.value_and_grad(program, has_aux=True, **how)"]
        got += [f"    {first} = f(params, batch, key)", f"    print({value})"]
        expected = ["    f = mt.reference.value_and_grad(program, has_aux=True)"]
        expected += [f"    {first} = f(params, batch, key)", f"    print({value})"]
        return "\n".join([*begin, *got, *(expected if what != "stream" else [])])


OPTIMIZER = (
    "gradients agree, so the update does not: an optimizer that rounds differently from "
    "torch.optim.AdamW, or an update that ran before a recomputation that reads the parameter"
)


def short(config: StreamConfig) -> str:
    """A configuration in a few words."""
    kept = "" if config.residuals == "recompute" else f", residuals={config.residuals}"
    return f"slots={config.slots}, grad_slots={config.grad_slots}, carries={config.carries!r}{kept}"


def index(tree: Any, path: Path) -> str:
    """The Python expression for a leaf: ``["layers"][1]["up"]``."""
    text, node = "", tree
    for part in path.split("/") if path else ():
        parts = _tree.children_of(node)
        assert parts is not None
        key, node = next((k, child) for k, child in zip(parts[0], parts[1]) if str(k) == part)
        named = isinstance(tree, tuple) and hasattr(tree, "_fields")
        text, tree = f"{text}.{key}" if named else f"{text}[{key!r}]", node
    return text
