"""The benchmark runs, its arms train one model, and it refuses to print what it did not measure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import _bench_report as report
from scripts import bench

ON_LINUX = sys.platform == "linux"


def answer(seconds: float, loss: float = 1.0, peak: int = 150_000_000) -> dict:
    """What a child says about one step."""
    cost = {"user": seconds, "system": 0.0, "faults": 0, "preempted": 0}
    return {"seconds": seconds, "loss": loss, "peak": peak, **cost}


def result(ours: list[float], theirs: list[float]) -> report.Result:
    """A run of two arms with these seconds."""
    ready = {"baseline": 100_000_000, "held": 90_000_000, "versions": "torch 0", "digest": 1}
    config = {"depth": 2, "width": 64, "vocab": 256}
    return report.Result(
        setup={"config": config, "size": 1000, "batch": 2, "context": 32, "seed": 0},
        machine=report.Machine(processor="abacus", cpus=[0, 1], load=0.0, began=(0.0, None)),
        check="equal",
        ready={"streamed": ready, "hooked": ready},
        warm=[{"streamed": answer(9.0, peak=160_000_000), "hooked": answer(9.0)}],
        rounds=[{"streamed": answer(a), "hooked": answer(b)} for a, b in zip(ours, theirs)],
        flops={"streamed": 4_000_000_000, "hooked": None},
    )


def test_quick_run_of_the_torch_arms(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines, page = tmp_path / "bench.jsonl", tmp_path / "bench.md"
    flags = ["--quick", "--residuals", "0", "--arms", "streamed,checkpoint,hooked,plain"]
    bench.main([*flags, "--json", str(lines), "--markdown", str(page)])
    out, err = capfd.readouterr()
    assert "not measured (3 rounds)" in out and "round 3/3" in err
    assert "4 arms start from the same parameters" in page.read_text()

    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert sum(record["kind"] == "step" for record in records) == 12
    arms = {record["arm"]: record for record in records if record["kind"] == "arm"}
    if ON_LINUX:
        assert all(arm["transient"] > 0 and arm["held"] > 0 for arm in arms.values())

    depth, width, ffn, vocab, tokens, context = 2, 64, 192, 256, 64, 32
    head = 2 * tokens * vocab * width
    down = 2 * tokens * width * ffn
    attention = 4 * tokens * context * width
    layer = 2 * tokens * 4 * width * width + 3 * down + attention
    # Fused attention computes its scores again in the backward pass: 5 products, not 4.
    plain = 3 * (depth * layer + head) + depth * attention // 2
    assert arms["plain"]["flops"] == plain
    # Torch stops recomputing a layer before its last product, which no pullback reads.
    assert arms["checkpoint"]["flops"] == plain + depth * (layer - down)
    assert arms["hooked"]["flops"] == arms["checkpoint"]["flops"]
    assert plain < arms["streamed"]["flops"] <= plain + depth * layer


def test_quick_run_of_the_jax_arm(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="make bench installs jax")
    pytest.importorskip("optax", reason="make bench installs optax")
    lines = tmp_path / "bench.jsonl"
    bench.main(["--quick", "--arms", "plain,jax", "--json", str(lines)])
    arms = [json.loads(line) for line in lines.read_text().splitlines()][-2:]
    assert [arm["arm"] for arm in arms] == ["plain", "jax"]
    assert arms[1]["flops"] > arms[0]["flops"]


def test_narrow_interval_is_printed() -> None:
    rows = report.compare(result([1.0, 2.0] * 10, [2.0, 4.0] * 10))
    assert (rows[1]["ratio"], rows[1]["low"], rows[1]["high"]) == (0.5, 0.5, 0.5)
    assert rows[1]["measured"] and "0.500 [0.500, 0.500]" in report.table(rows)


def test_wide_interval_is_no_measurement() -> None:
    rows = report.compare(result([1.0, 2.0] * 10, [2.0] * 20))
    assert not rows[1]["measured"]
    assert "not measured (interval 0.50 wide)" in report.table(rows)


def test_few_rounds_are_no_measurement() -> None:
    rows = report.compare(result([1.0] * 19, [2.0] * 19))
    assert rows[1]["high"] - rows[1]["low"] == 0 and not rows[1]["measured"]


def test_interval_is_of_the_median_and_seeded() -> None:
    ratios = [1.0] * 15 + [9.0] * 5
    assert report.interval(ratios, seed=0) == (1.0, 1.0)
    mixed = [0.9 + 0.01 * i for i in range(20)]
    low, high = report.interval(mixed, seed=3)
    assert 0.9 < low < 0.995 < high < 1.1
    assert report.interval(mixed, seed=3) == (low, high)


def test_transient_memory_counts_the_warm_up() -> None:
    row = report.compare(result([1.0], [1.0]))[0]
    assert row["transient"] == 60_000_000
    assert row["seconds"] == 1.0


def test_quick_run_of_two_depths(capfd: pytest.CaptureFixture[str]) -> None:
    bench.main(["--quick", "--depths", "1,2"])
    rows = [line.split("|") for line in capfd.readouterr().out.splitlines() if "| streamed" in line]
    assert [row[2].strip() for row in rows] == ["1", "2"]
    if ON_LINUX:
        assert rows[0][5].strip() == "—" and float(rows[1][5])


def test_growth_is_told_in_carries() -> None:
    rows = [
        {"arm": "streamed", "depth": d, "size": d * 10**6, "transient": t, "carry": 3 * 10**6}
        for d, t in ((6, 100 * 10**6), (12, 118 * 10**6))
    ]
    text = report.depth_table({"streamed": rows})
    assert "| 3.00 | 1.00 |" in text and "One layer's carry is 3.00 MB." in text


def test_allocator_settings_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = result([1.0], [1.0]).machine
    assert "MALLOC_ARENA_MAX" not in str(machine)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert str(machine).endswith("MALLOC_ARENA_MAX=1 was set.")


def test_arms_that_start_apart_are_refused() -> None:
    children = [SimpleNamespace(arm=arm, ready={"digest": arm}) for arm in ("streamed", "jax")]
    with pytest.raises(SystemExit, match="different parameters at the start"):
        bench.same_start(children, [])


@pytest.mark.parametrize("loss", [1.001, float("nan")])
def test_arms_that_train_apart_are_refused(loss: float) -> None:
    children = [SimpleNamespace(arm=arm, ready={"digest": 1}) for arm in ("streamed", "jax")]
    steps = [{"streamed": answer(1.0), "jax": answer(1.0, loss=loss)}]
    with pytest.raises(SystemExit, match="do not train the same model"):
        bench.same_start(children, steps)


def test_a_dead_arm_is_named() -> None:
    child = bench.Child({"arm": "hooked", "threads": 1})
    try:
        with pytest.raises(SystemExit, match=r"arm 'hooked' ended with status 1; .* --arms"):
            assert child.ready
    finally:
        child.close()


def test_missing_jax_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert bench.parse([]).arms == ["streamed", "checkpoint", "hooked", "plain"]
    with pytest.raises(SystemExit):
        bench.parse(["--arms", "streamed,jax"])
    assert "--arms jax: jax or optax cannot be imported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--arms", "streamed,tensorflow"], "unknown arms tensorflow; expected some of streamed"),
        (["--threads", "4096"], "--threads 4096: this machine gives"),
        (["--rounds", "0"], "expected a whole number, 1 or more"),
        (["--depths", "6,many"], "expected depths such as 6,12,24"),
    ],
)
def test_bad_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse(flags)
    assert message in capsys.readouterr().err
