"""Bad input: each message says where, what was expected, what was got, and the mend."""

from __future__ import annotations

import pytest
import torch

import mtfunc as mt
from tests.toys import LM, clone, lm_batch, lm_params, momentum, same


def linear(p, x, batch):
    return (batch["x"] if x is None else x) @ p["w"]


def total(x, batch):
    return x.sum()


PARAMS = {"a": {"w": torch.eye(4)}, "layers": [{"w": torch.eye(4)} for _ in range(2)]}
BATCH = {"x": torch.ones(2, 4)}
START = mt.stage(linear, "a")
END = mt.stage(total)


def grad(program, params=PARAMS, batch=BATCH, **options):
    return mt.value_and_grad(program, **options)(params, batch)


def program_of(fn, **options):
    return mt.chain(START, mt.stage(fn, name="culprit", **options), END)


@pytest.mark.parametrize(
    "key, message",
    [
        ("b", r"part 'linear'.*no 'b' at the top.*there is 'a', 'layers'"),
        ("layer/0", r"no 'layer' at the top.*Did you mean 'layers'\?"),
        ("layers/7", r"no '7' under 'layers'.*there is '0', '1'"),
        ("a/W", r"no 'W' under 'a'.*there is 'w'"),
    ],
)
def test_missing_keys(key, message):
    with pytest.raises(KeyError, match=message):
        grad(mt.chain(mt.stage(linear, key), END))


def test_unread_keys():
    with pytest.raises(KeyError, match=r"no stage reads 'layers/0/w', 'layers/1/w'; stages read"):
        grad(mt.chain(START, END))
    program = mt.chain(START, mt.scan(linear, "layers"), END)
    with pytest.raises(KeyError, match=r"no stage reads 'extra'"):
        mt.init(program, {**PARAMS, "extra": torch.ones(2)}, mt.sgd(0.1))
    assert torch.equal(mt.forward(program[:1])(PARAMS, BATCH), BATCH["x"])


def test_scan_over_something_that_is_no_list():
    with pytest.raises(TypeError, match=r"params\['a'\] is a dict; expected a list"):
        grad(mt.chain(START, mt.scan(linear, "a"), END))
    with pytest.raises(ValueError, match=r"3 functions for the 2 entries.*expected one for all"):
        grad(mt.chain(START, mt.scan([linear] * 3, "layers"), END))
    with pytest.raises(ValueError, match=r"3 static arguments for the 2 entries"):
        grad(mt.chain(START, mt.scan(linear, "layers", static=[{}] * 3), END))


@pytest.mark.parametrize(
    "fn, message",
    [
        (
            lambda p, x, b: x[:, :2],
            r"'layers/0' changes the carry at 'the top': took float32\[2,4\], "
            r"returned float32\[2,2\]",
        ),
        (lambda p, x, b: x.double(), r"took float32\[2,4\], returned float64\[2,4\]"),
        (lambda p, x, b: (x, x * 2), r"at '0': took nothing, returned float32\[2,4\]|at 'the top'"),
    ],
)
def test_a_scan_entry_that_changes_its_carry(fn, message):
    with pytest.raises(ValueError, match=message):
        grad(mt.chain(START, mt.scan(fn, "layers"), END))


@pytest.mark.parametrize("value, name", [(3, "int"), ("x", "str"), (object(), "object")])
def test_a_stage_that_returns_no_tensor(value, name):
    with pytest.raises(TypeError, match=rf"stage 'culprit' returned a {name} at 'y' of its carry"):
        grad(program_of(lambda x, b: {"x": x, "y": value}), {"a": PARAMS["a"]})


@pytest.mark.parametrize(
    "fn, got",
    [
        (lambda x, b: x.sum(0), r"a tensor of shape \(4,\) and dtype torch.float32"),
        (lambda x, b: (x.sum(), x), r"a tuple"),
        (lambda x, b: (x > 0).sum(), r"a tensor of shape \(\) and dtype torch.int64"),
        (lambda x, b: None, r"a NoneType"),
    ],
)
def test_a_final_stage_that_returns_no_scalar(fn, got):
    program = mt.chain(START, mt.stage(fn, name="end"))
    with pytest.raises(ValueError, match=rf"final stage 'end' returned {got}; expected the loss"):
        grad(program, {"a": PARAMS["a"]})
    with pytest.raises(ValueError, match=rf"final stage 'end' returned {got}; expected the loss"):
        mt.reference.value_and_grad(program)({"a": PARAMS["a"]}, BATCH)


def test_aux_that_is_missing():
    with pytest.raises(ValueError, match=r"'culprit' has has_aux=True and returned a Tensor"):
        grad(program_of(lambda x, b: x, has_aux=True), {"a": PARAMS["a"]})


def impure_params(p, x, batch):
    p["w"].mul_(2)
    return linear(p, x, batch)


@pytest.mark.parametrize(
    "stage, what",
    [
        (mt.stage(impure_params, "a", name="culprit"), "parameters"),
        (
            mt.stage(lambda p, x, b: linear(p, x, {"x": b["x"].add_(1)}), "a", name="culprit"),
            "batch",
        ),
    ],
)
def test_in_place_changes_of_parameters_and_batch(stage, what):
    before = clone([PARAMS, BATCH])
    with pytest.raises(ValueError, match=rf"stage 'culprit' changes its {what} in place"):
        grad(mt.chain(stage, END), {"a": PARAMS["a"]})
    assert same([PARAMS, BATCH], before), "the check itself changed nothing"


def test_in_place_changes_of_the_carry():
    program = program_of(lambda x, b: x.mul_(2))
    with pytest.raises(ValueError, match=r"stage 'culprit' changes its carry in place"):
        grad(program, {"a": PARAMS["a"]})


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_draws_from_the_global_generator(device):
    program = program_of(lambda x, b: x * torch.rand(4))
    with pytest.raises(ValueError, match=r"stage 'culprit' draws from torch's global generator"):
        grad(program, {"a": PARAMS["a"]}, device=device)
    program = program_of(lambda x, b: torch.nn.functional.dropout(x))
    with pytest.raises(ValueError, match=r"give the stage rng=True|Give the stage"):
        grad(program, {"a": PARAMS["a"]}, device=device)


def test_closing_over_a_tensor_that_requires_grad():
    secret = torch.ones(4, requires_grad=True)
    with pytest.raises(
        ValueError, match=r"stage 'culprit' closes over a tensor that requires grad"
    ):
        grad(program_of(lambda x, b: x * secret), {"a": PARAMS["a"]})
    constant = torch.full((4,), 2.0)
    loss, _ = grad(program_of(lambda x, b: x * constant), {"a": PARAMS["a"]})
    assert loss == 16


def test_errors_in_a_stage_keep_their_traceback_and_name_the_stage():
    def culprit(x, batch):
        return x @ torch.ones(3, 3, device=x.device)

    with pytest.raises(RuntimeError) as caught:
        grad(program_of(culprit), {"a": PARAMS["a"]})
    assert any("in stage 'culprit'" in note for note in caught.value.__notes__)
    assert "culprit" in [frame.name for frame in caught.traceback]


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "sim:x", "", "CPU", 3, "mps"], ids=repr)
def test_unknown_devices(device):
    with pytest.raises(ValueError, match=r"device .*; expected 'cpu', 'sim'"):
        mt.value_and_grad(LM, device=device)


def test_configurations_programs_and_stages():
    for bad in ({"slots": 0}, {"slots": True}, {"grad_slots": 1.5}):
        with pytest.raises(ValueError, match=r"expected a whole number >= 1"):
            mt.StreamConfig(**bad)
    with pytest.raises(ValueError, match=r"carries is 'disk'; expected 'device', 'host' or 'auto'"):
        mt.StreamConfig(carries="disk")
    with pytest.raises(TypeError, match=r"program is a function; expected what mt.chain returns"):
        mt.value_and_grad(linear)
    with pytest.raises(TypeError, match=r"chain: part 1 is a Program.*joins as \*program"):
        mt.chain(START, LM)
    with pytest.raises(ValueError, match=r"no parts"):
        mt.chain()
    with pytest.raises(TypeError, match=r"key \('a', 'b'\); expected a path"):
        mt.stage(linear, ("a", "b"))
    with pytest.raises(TypeError, match=r"fn is a str"):
        mt.stage("linear", "a")
    with pytest.raises(
        ValueError, match=r"vjp is 'jvp'; expected 'func', 'autograd' or a function"
    ):
        mt.stage(linear, "a", vjp="jvp")
    with pytest.raises(TypeError, match=r"static argument 'w' is a list, which does not hash"):
        mt.stage(linear, "a", static={"w": [1]})
    with pytest.raises(ValueError, match=r"no functions"):
        mt.scan([], "layers")


def test_parameters_and_batches():
    with pytest.raises(TypeError, match=r"params: 'a/w' is a float; expected a tensor or None"):
        grad(mt.chain(START, END), {"a": {"w": 1.0}})
    with pytest.raises(ValueError, match=r"batch is an empty list"):
        grad(mt.chain(START, END), {"a": PARAMS["a"]}, [])
    with pytest.raises(ValueError, match=r"key 'x/y' under ''.*without '/'"):
        grad(mt.chain(START, END), {"a": PARAMS["a"], "x/y": torch.ones(1)})
    with pytest.raises(ValueError, match=r"Mean: total has shape \(2,\); expected a scalar"):
        mt.Mean(torch.ones(2), 1)
    with pytest.raises(TypeError, match=r"the weight is a Tensor; expected a number"):
        mt.Mean(torch.ones(()), 1) * torch.ones(())


def test_the_programs_own_check_runs_before_anything_else():
    def check(batch):
        raise ValueError("tokens: 300 is out of range")

    program = mt.chain(*LM, check=check)
    optimizer = momentum()
    state = mt.init(program, lm_params(), optimizer)
    before = clone(state.params)
    with pytest.raises(ValueError, match="300 is out of range"):
        mt.train_step(program, optimizer)(state, lm_batch())
    assert same(state.params, before)


def test_a_pullback_rule_that_returns_the_wrong_thing():
    rules = {
        r"returned a Tensor; expected a tuple of 1 parameter": lambda p, x, b, ct: ct,
        r"returned torch.float32 of shape \(2, 2\) at 'w' of value 0": lambda p, x, b, ct: (
            {"w": torch.ones(2, 2)},
            ct,
        ),
        r"returned \['v'\] in value 0": lambda p, x, b, ct: ({"v": torch.ones(2, 2)}, ct),
    }
    for message, rule in rules.items():
        program = mt.chain(START, mt.stage(linear, "b", vjp=rule, name="culprit"), END)
        with pytest.raises(ValueError, match=message):
            grad(program, {"a": PARAMS["a"], "b": {"w": torch.eye(4)}})


def test_what_a_stage_returns_cannot_depend_on_values():
    def moody(x, batch):
        return x if x.sum() > 0 else x[:1]

    def fickle(x, batch):
        return x * 2 if x.sum() > 0 else x[:1]

    def fidgety(x, batch):
        return (x * 2, None) if x.sum() > 0 else (x, x)

    for fn in (moody, fickle, fidgety):
        f = mt.forward(program_of(fn)[:2])
        f({"a": PARAMS["a"]}, BATCH)
        with pytest.raises(ValueError, match=r"'culprit' returned .*when it first ran"):
            f({"a": PARAMS["a"]}, {"x": -torch.ones(2, 4)})


def test_two_stages_of_one_name():
    program = mt.chain(START, mt.scan(linear, "layers"), mt.stage(total, name="layers/0"))
    with pytest.raises(ValueError, match=r"two stages are named 'layers/0'"):
        grad(program)


def test_aux_values_that_cannot_be_stacked():
    def layer(p, x, batch, *, rows):
        return x, x[:rows].sum(1)

    statics = [{"rows": 1}, {"rows": 2}]
    program = mt.chain(START, mt.scan(layer, "layers", static=statics, has_aux=True), END)
    with pytest.raises(ValueError, match=r"'layers/1' reports aux .*\(2,\).*expected .*\(1,\)"):
        grad(program)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_aux_whose_shape_depends_on_values(device):
    def picky(x, batch):
        return x, x[x > 0]

    f = mt.value_and_grad(program_of(picky, has_aux=True), device=device)
    f({"a": PARAMS["a"]}, BATCH)
    with pytest.raises(ValueError, match=r"'culprit' reported aux float32\[0\]; expected"):
        f({"a": PARAMS["a"]}, {"x": -torch.ones(2, 4)})


def test_a_state_of_another_optimizer_is_refused_and_stays_whole():
    state = mt.init(LM, lm_params(), mt.sgd(0.1))
    with pytest.raises(ValueError, match=r"holds no '(mu|nu)' for 'embed/weight', which adamw"):
        mt.train_step(LM, mt.adamw(0.1))(state, lm_batch())
    only = {"trainable": lambda path, leaf: path.startswith("layers")}
    frozen = mt.init(LM, lm_params(), mt.adamw(0.1), **only)
    with pytest.raises(ValueError, match=r"same trainable"):
        mt.train_step(LM, mt.adamw(0.1))(frozen, lm_batch())
    frozen, _ = mt.train_step(LM, mt.adamw(0.1), **only)(frozen, lm_batch())
    assert frozen.step == 1 and state.step == 0
