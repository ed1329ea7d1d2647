"""The committed matrix is what the stages do, and a wrong number would be seen."""

from __future__ import annotations

import torch

from scripts import _conformance, conformance


def test_every_cell_is_as_committed_and_none_is_wrong(capsys):
    assert conformance.main(["--check"]) == 0, capsys.readouterr().out


def test_a_wrong_rule_turns_its_cells_wrong(monkeypatch):
    def twice(fn):
        rule = derivative(fn)
        return lambda *given: torch.utils._pytree.tree_map(lambda x: 2 * x, rule(*given))

    derivative = _conformance.derivative
    monkeypatch.setattr(_conformance, "derivative", twice)
    (kind,) = [k for k in conformance.KINDS if k.name == "sort"]
    outcomes = [verdict.outcome for verdict in conformance.run(kind)]
    assert outcomes == ["equal"] * 4 + ["wrong"] * 2
    assert "wrong" in conformance.render([(kind, conformance.run(kind))])
