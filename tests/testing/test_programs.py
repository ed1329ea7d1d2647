"""Random programs: streamed is the standard graph, every kind occurs, failures print as code."""

import subprocess
import sys
from collections import Counter

import pytest
import torch
from hypothesis import Phase, find, given, seed, settings
from hypothesis import strategies as st

import mtfunc as mt
from mtfunc import pullback
from mtfunc.testing import strategies
from mtfunc.testing.strategies import BLOCKS, KINDS, Block, Case, Micro, Part, assert_streamed
from tests.toys import assert_same, flat

QUIET = settings(
    deadline=None, database=None, report_multiple_bugs=False, phases=(Phase.generate, Phase.shrink)
)


@settings(QUIET, derandomize=True, max_examples=300)
@given(strategies.cases())
def test_streamed_is_the_standard_graph(case):
    assert_streamed(case, steps=1)


@settings(QUIET, derandomize=True, max_examples=12)
@given(strategies.cases(stages=5))
def test_two_steps(case):
    assert_streamed(case, steps=2)


def test_every_kind_occurs():
    seen = Counter()

    @seed(0)
    @settings(QUIET, max_examples=1000)
    @given(strategies.cases())
    def draw(case):
        seen.update(strategies.kinds(case))

    draw()
    assert not set(seen) - set(KINDS)
    assert not {kind: seen[kind] for kind in KINDS if seen[kind] < 5}


def around(name):
    """A program with one block, after one that makes what it uses; a scan of two if that may be."""
    block = BLOCKS[name]
    makers = [n for n, b in BLOCKS.items() if b.makes and b.makes == block.uses]
    names = [name] if block.role else ["project", *makers, name, "mean_square"]
    if block.role == "start":
        names = [name, "mean_square"]
    if block.role == "loss":
        names = ["project", *makers, name]
    parts = []
    for place, one in enumerate(names):
        scan = one == name and not block.role and block.keeps and block.subtrees > 0
        keys = tuple(f"{place}.{i}" for i in range(BLOCKS[one].subtrees))
        parts.append(Part((one,) * (1 + scan), keys, scan))
    return Case(tuple(parts), micros=(Micro(2, 3, 1), Micro(1, 4)), config=host(), sim=3)


def host():
    return mt.StreamConfig(slots=1, grad_slots=1, carries="host")


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_on_its_own(name):
    case = around(name)
    assert set(BLOCKS[name].kinds) <= strategies.kinds(case)
    assert_streamed(case, steps=1)


def test_odd_leaves_are_there():
    """What the blocks say of their leaves is so."""

    def odd(tree):
        leaves = list(flat(tree).values())
        return {
            "integer": any(x.dtype == torch.int64 for x in leaves),
            "bool": any(x.dtype == torch.bool for x in leaves),
            "None": None in tree.values(),
            "0-dim": any(x.dim() == 0 for x in leaves),
            "zero-size": any(x.numel() == 0 for x in leaves),
        }

    params = strategies.make_params(Case((Part(("odd_leaves",), ("a",)),)))["a"]
    carry = BLOCKS["extras"].fn({"x": torch.ones(1, 2, 4)}, None)
    for tree, where in ((params, "parameters"), (carry, "carry")):
        assert all(odd(tree).values())
        assert {f"{leaf} leaf in the {where}" for leaf in odd(tree)} <= set(KINDS)


def test_one_expert_starves():
    case = around("experts")
    program, params, batch, key = strategies.build(case)
    _, grads = mt.reference.value_and_grad(program)(params, batch, key)
    for entry in grads["1.0"]:
        assert entry["w"][:2].any() and not entry["w"][2].any()
    program, params, batch, key = strategies.build(around("routed"))
    _, grads = mt.reference.value_and_grad(program)(params, batch, key)
    assert grads["1.0"][0]["experts"][0]["w"].any()
    assert not grads["1.0"][0]["experts"][2]["w"].any()


LINEAR, LOSS = Part(("linear",), ("a",)), Part(("mean_square",))
TAKE = Part(("take",))


@pytest.mark.parametrize(
    "parts, expected, absent",
    [
        ((TAKE, LINEAR, LINEAR, LOSS), {"4 stages", "tied by two"}, {"tied by three", "scan"}),
        ((TAKE, LINEAR, LINEAR, LINEAR, LOSS), {"tied by three"}, {"tied by two", "shared block"}),
        (
            (TAKE, Part(("bilinear",) * 2, ("a", "b"), True), LOSS),
            {"shared block", "tied by two", "scan"},
            {"alternating functions"},
        ),
        (
            (TAKE, Part(("layer_norm", "rms_norm"), ("a",), True), LOSS),
            {"alternating functions", "normed"},
            {"tied by two"},
        ),
        (
            (TAKE, Part(("push",), ("a",)), LINEAR, Part(("pop",), ("b",)), LOSS),
            {"skip across the whole stack"},
            {"encoder and decoder"},
        ),
        (
            (TAKE, Part(("push",), ("a",)), LINEAR, Part(("pop",), ("b",)), LINEAR, LOSS),
            {"6 stages"},
            {"skip across the whole stack"},
        ),
        (
            (TAKE, Part(("remember",), ("a",)), Part(("forget",)), Part(("cross",), ("b",)), LOSS),
            {"5 stages"},
            {"encoder and decoder"},
        ),
    ],
)
def test_kinds(parts, expected, absent):
    found = strategies.kinds(Case(parts))
    assert expected <= found and not absent & found


def wrap(monkeypatch, engine, change):
    """Passes what a pullback returns, or takes, through ``change``."""
    real = getattr(pullback, engine)

    def wrapped(flat, inputs, wanted):
        done = real(flat, inputs, wanted)
        return done._replace(pull=lambda cotangents, sums: change(done.pull, cotangents, sums))

    monkeypatch.setattr(pullback, engine, wrapped)


def double(pull, cotangents, sums):
    first, *rest = pull(cotangents, sums)
    return [None if first is None else 2 * first, *rest]


def forget(pull, cotangents, sums):
    return pull(cotangents, [torch.zeros_like(total) for total in sums])


def crash(pull, cotangents, sums):
    raise RuntimeError("nobody pulls")


FAULTS = {
    "doubled": ("_by_func", double, "func", "streamed is not the standard graph"),
    "doubled by autograd": ("_by_autograd", double, "autograd", "is not the standard graph"),
    "sums lost": ("_by_func", forget, "func", "streamed is not the standard graph"),
    "crashed": ("_by_autograd", crash, "autograd", "nobody pulls"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_shrinks_to_code(fault, monkeypatch):
    engine, change, vjp, message = FAULTS[fault]
    failed = []

    @seed(1)
    @settings(QUIET, max_examples=100)
    @given(strategies.cases())
    def search(case):
        try:
            assert_streamed(case)
        except Exception:
            failed.append(case)
            raise

    with monkeypatch.context() as planted:
        wrap(planted, engine, change)
        with pytest.raises((AssertionError, RuntimeError), match=message) as caught:
            search()
        notes = "\n".join(caught.value.__notes__)
        code = notes.split("reproduce:\n\n")[1].split("\nassert_streamed(case)")[0]
        code += "\nassert_streamed(case)"
        with pytest.raises(type(caught.value), match=message) as again:
            exec(code, {})
        assert str(again.value) == str(caught.value)
    exec(code, {})

    case = failed[-1]
    assert case.stages <= 2 and case.width == 4 and case.dtype == torch.float32
    assert (case.frozen, case.odd, case.seed, case.sim) == ((), False, 0, 0)
    assert any(part.vjp == vjp for part in case.parts)
    scope = {}
    exec(code.replace("assert_streamed(case)", ""), scope)
    assert scope["case"] == case == eval(repr(case), vars(strategies) | vars(mt) | {"torch": torch})


@pytest.mark.parametrize("kind, stages", [("tied by three", 4), ("encoder and decoder", 4)])
def test_what_is_found_is_small(kind, stages):
    case = find(
        strategies.cases(),
        lambda case: kind in strategies.kinds(case),
        settings=settings(QUIET, derandomize=True, max_examples=2000),
    )
    assert case.stages <= stages and len(case.micros) == 1


def own(p, x, batch):
    return torch.cos(x * p["own"])


MINE = BLOCKS | {"mine": Block(own, lambda normal, width: {"own": normal(width)})}


def test_blocks_of_ones_own(monkeypatch):
    seen = set()

    @seed(0)
    @settings(QUIET, max_examples=40)
    @given(strategies.cases({name: MINE[name] for name in ("take", "mine", "mean_square")}))
    def stream(case):
        seen.update(part.blocks[0] for part in case.parts)
        assert_streamed(case, MINE)

    stream()
    assert seen == {"take", "mine", "mean_square"}
    case = Case((TAKE, Part(("mine",), ("a",)), LOSS))
    with pytest.raises(KeyError, match=r"names the block 'mine'; expected one of .*your own"):
        strategies.build(case)
    wrap(monkeypatch, "_by_func", double)
    with pytest.raises(AssertionError) as caught:
        assert_streamed(case, MINE, steps=1)
    code = caught.value.__notes__[-1].partition("reproduce:\n\n")[2]
    assert "# blocks is BLOCKS with your own mine\nassert_streamed(case, blocks, steps=1)" in code
    with pytest.raises(AssertionError, match="standard graph"):
        exec(code, {"blocks": MINE})


@settings(QUIET, derandomize=True, max_examples=25)
@given(st.data())
def test_parameters_and_batches_for_a_given_program(data):
    program = data.draw(strategies.programs(stages=4))
    assert program == Case(program.parts, (Micro(),), program.width, program.dtype, program.frozen)
    params = data.draw(strategies.params(program))
    batch = data.draw(strategies.batches(program))
    built = strategies.build(program)
    assert flat(params).keys() == flat(built.params).keys()
    for path, leaf in flat(params).items():
        assert (leaf.shape, leaf.dtype) == (flat(built.params)[path].shape, leaf.dtype)
    f, key = mt.value_and_grad(built.program, device="sim:1"), mt.random.key(0)
    expected = mt.reference.value_and_grad(built.program)(params, batch, key)
    assert_same(list(f(params, batch, key)), list(expected))


def test_streams_are_drawn_with_every_choice():
    seen = {"slots": set(), "grad_slots": set(), "carries": set(), "residuals": set()}

    @seed(0)
    @settings(QUIET, max_examples=100)
    @given(strategies.configs())
    def draw(config):
        for name, values in seen.items():
            values.add(getattr(config, name))

    draw()
    assert seen["slots"] == {1, 2, 3, 4} and seen["grad_slots"] == {1, 2, 3}
    assert seen["carries"] == {"device", "host"} and "recompute" in seen["residuals"]
    assert len(seen["residuals"]) == 4


WITHOUT = """
import sys
sys.modules["hypothesis"] = None
import mtfunc.testing
from mtfunc.testing.strategies import Case, Part, assert_streamed
assert_streamed(Case((Part(("mean_square",)),)))
for ask in (lambda: mtfunc.testing.cases, lambda: mtfunc.testing.strategies.configs):
    try:
        ask()
    except ImportError as error:
        print(error)
print(sorted(name for name in sys.modules if name.startswith("hypothesis.")))
"""


def test_without_hypothesis_all_but_the_draws_is_there():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    cases, configs, loaded = done.stdout.splitlines() or [done.stderr] * 3
    assert "cases draws with hypothesis, which is not installed; expected pip install" in cases
    assert "strategies.configs draws with hypothesis" in configs and loaded == "[]"


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="strategies' has no attribute 'casess'"):
        _ = strategies.casess
