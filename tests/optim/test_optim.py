"""Every optimizer through every check, against torch.optim or the paper's own lines."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils._python_dispatch import TorchDispatchMode

from mtfunc import optim, random
from mtfunc.optim import _leaves

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of the paper, a whole leaf at a time."""

    def __init__(self, params, lr, b1, b2, weight_decay):
        super().__init__(params, dict(lr=lr, b1=b1, b2=b2, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                mu = self.state[p].setdefault("mu", torch.zeros_like(p))
                update = torch.lerp(mu, p.grad, 1 - group["b1"]).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
                mu.copy_(torch.lerp(mu, p.grad, 1 - group["b2"]))


def adamw(rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01):
    ours = optim.adamw(rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    return (
        rate,
        ours,
        lambda params: torch.optim.AdamW(
            params, betas=(b1, b2), eps=eps, weight_decay=weight_decay, fused=True
        ),
    )


def sgd(rate, **options):
    return (
        rate,
        optim.sgd(rate, **options),
        lambda params: torch.optim.SGD(params, fused=params[0].dtype in (F32, F64), **options),
    )


def lion(rate, b1=0.9, b2=0.99, weight_decay=0.01):
    options = dict(b1=b1, b2=b2, weight_decay=weight_decay)
    return rate, optim.lion(rate, **options), lambda params: Lion(params, lr=1.0, **options)


OPTIMIZERS = {
    "adamw": adamw(1e-2),
    "adamw-options": adamw(1e-1, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1),
    "adamw-no-decay": adamw(1e-2, weight_decay=0.0),
    "adamw-schedule": adamw(optim.cosine(1e-2, 5, warmup=2)),
    "sgd": sgd(1e-1),
    "sgd-decay": sgd(1e-1, weight_decay=0.1),
    "sgd-momentum": sgd(1e-1, momentum=0.9),
    "sgd-momentum-decay": sgd(1e-1, momentum=0.9, weight_decay=0.1),
    "sgd-nesterov": sgd(1e-1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd-schedule": sgd(optim.linear(1e-1, 1e-2, 4), momentum=0.9),
    "lion": lion(1e-2),
    "lion-schedule": lion(lambda step: 1e-2 / (step + 1), b1=0.95, weight_decay=0.1),
}
"""Name: the learning rate, our optimizer, and a function from parameters to the reference."""

SHAPES = {"scalar": (), "empty": (0, 3), "one": (1,), "odd": (33,), "matrix": (24, 17)}


def draw(seed, path, shape, dtype, scale=1.0):
    key = random.fold_in(random.key(seed), path)
    return (scale * random.normal(key, shape, F64)).to(dtype)


def draws(seed, shapes, dtype):
    return {path: draw(seed, path, shape, dtype) for path, shape in shapes.items()}


def clone(leaves):
    return {path: leaf.clone() for path, leaf in leaves.items()}


def run(name, params, grads):
    """Updates a copy of the parameters by each of the gradients in turn."""
    _, optimizer, _ = OPTIMIZERS[name]
    params = clone(params)
    state = optimizer.init(params)
    for step, grad in enumerate(grads):
        optimizer.update_(params, grad, state, step)
    return params


def reference(name, params, grads):
    """The same by the reference, which sees one leaf at a time and gradients converted before."""
    rate, _, make = OPTIMIZERS[name]
    updated = {}
    for path, param in params.items():
        leaf = param.clone().requires_grad_()
        optimizer = make([leaf])
        for step, grad in enumerate(grads):
            leaf.grad = grad[path].to(leaf.dtype)
            optimizer.param_groups[0]["lr"] = rate(step) if callable(rate) else rate
            optimizer.step()
        updated[path] = leaf.detach()
    return updated


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for path in actual:
        assert torch.equal(actual[path], expected[path]), path


every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


@every_optimizer
@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16])
def test_bitwise_equal_to_the_reference(name, dtype):
    params, grads = draws(0, SHAPES, dtype), [draws(1 + i, SHAPES, dtype) for i in range(5)]
    assert_equal(run(name, params, grads), reference(name, params, grads))


@every_optimizer
@pytest.mark.parametrize("param_dtype, grad_dtype", [(F32, BF16), (BF16, F32), (F64, F32)])
def test_gradients_of_another_dtype_are_converted_first(name, param_dtype, grad_dtype):
    params = draws(0, SHAPES, param_dtype)
    grads = [draws(1 + i, SHAPES, grad_dtype) for i in range(3)]
    assert_equal(run(name, params, grads), reference(name, params, grads))


@every_optimizer
@pytest.mark.parametrize("grad_dtype", [F32, BF16])
def test_blocks_round_as_the_whole_leaf(name, grad_dtype, monkeypatch):
    monkeypatch.setattr(_leaves, "_BLOCK", 1024)
    shapes = {"w": (70_001,), "block": (1024,), "more": (1025,)}
    params, grads = draws(0, shapes, F32), [draws(1 + i, shapes, grad_dtype) for i in range(2)]
    assert_equal(run(name, params, grads), reference(name, params, grads))


LAYOUTS = {
    "plain": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:1].expand_as(x),
}


@every_optimizer
@pytest.mark.parametrize(
    "param_layout, grad_layout",
    [pair for pair in itertools.product(LAYOUTS, LAYOUTS) if pair[0] != "expanded"],
)
def test_strides_do_not_matter(name, param_layout, grad_layout):
    w, gradients = draw(0, "w", (8, 5), F32), [draw(1 + i, "g", (8, 5), F32) for i in range(3)]
    gradients = [LAYOUTS[grad_layout](grad) for grad in gradients]
    leaf = LAYOUTS[param_layout](w.clone())
    optimizer = OPTIMIZERS[name][1]
    state = optimizer.init({"w": leaf})
    for step, grad in enumerate(gradients):
        optimizer.update_({"w": leaf}, {"w": grad}, state, step)
    plain = [{"w": grad.contiguous()} for grad in gradients]
    assert_equal({"w": leaf}, run(name, {"w": w}, plain))


@every_optimizer
@given(data=st.data())
def test_any_unit_of_leaves(name, data):
    count = data.draw(st.integers(0, 4))
    shape = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    dtypes = st.sampled_from([F32, F64, BF16])
    shapes = {f"layers/{i}": data.draw(shape) for i in range(count)}
    params = {path: draw(0, path, shape, data.draw(dtypes)) for path, shape in shapes.items()}
    order = data.draw(st.permutations(list(shapes)))
    grads = [
        {path: draw(1 + i, path, shapes[path], data.draw(dtypes)) for path in order}
        for i in range(2)
    ]
    assert_equal(run(name, params, grads), reference(name, params, grads))


@every_optimizer
def test_only_parameters_and_state_change_and_in_place(name):
    optimizer = OPTIMIZERS[name][1]
    params, grads = draws(0, SHAPES, F32), draws(1, SHAPES, BF16)
    grads["matrix"] = grads["matrix"].float()
    state = optimizer.init(params)
    everything = [params, *state.values()]
    before = [{p: leaf.data_ptr() for p, leaf in leaves.items()} for leaves in everything]
    kept = clone(grads)
    optimizer.update_(params, grads, state, 0)
    assert_equal(grads, kept)
    assert [{p: x.data_ptr() for p, x in leaves.items()} for leaves in everything] == before
    assert all((leaves["odd"] != 0).all() for leaves in state.values())


@every_optimizer
def test_moments_are_fresh_zeros_like_the_parameters(name):
    optimizer = OPTIMIZERS[name][1]
    params = {"a": draw(0, "a", (3, 4), BF16).t(), "b": draw(0, "b", (), F64)}
    state, again = optimizer.init(params), optimizer.init(params)
    kinds = {"adamw": {"mu", "nu"}, "lion": {"mu"}, "sgd": {"mu"}}[name.split("-")[0]]
    assert set(state) == (set() if name in ("sgd", "sgd-decay") else kinds)
    for kind, path in itertools.product(state, params):
        moment, param = state[kind][path], params[path]
        assert (moment.shape, moment.dtype) == (param.shape, param.dtype)
        assert moment.is_contiguous() and not moment.any()
        assert moment.data_ptr() != again[kind][path].data_ptr()


@every_optimizer
def test_the_state_is_all_that_a_run_remembers(name):
    params, grads = draws(0, SHAPES, F32), [draws(1 + i, SHAPES, F32) for i in range(4)]
    optimizer, resumed = OPTIMIZERS[name][1], clone(params)
    state = optimizer.init(resumed)
    for step in (0, 1):
        optimizer.update_(resumed, grads[step], state, step)
    resumed, state = clone(resumed), {kind: clone(leaves) for kind, leaves in state.items()}
    for step in (2, 3):
        optimizer.update_(resumed, grads[step], state, step)
    assert_equal(resumed, run(name, params, grads))


@every_optimizer
def test_leaves_that_require_grad_record_nothing(name):
    params = {"w": torch.ones(4, requires_grad=True)}
    optimizer = OPTIMIZERS[name][1]
    state = optimizer.init(params)
    optimizer.update_(params, {"w": torch.ones(4)}, state, 0)
    assert params["w"].is_leaf and params["w"].grad_fn is None
    assert not any(leaves["w"].requires_grad for leaves in state.values())


@every_optimizer
def test_meta_leaves(name):
    optimizer, params = OPTIMIZERS[name][1], {"w": torch.ones(3, 2, device="meta")}
    for dtype in (F32, BF16):
        grads = {"w": torch.ones(3, 2, device="meta", dtype=dtype)}
        optimizer.update_(params, grads, optimizer.init(params), 0)


class LargestResult(TorchDispatchMode):
    """Records the most elements of a new tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and func._schema.returns[0].alias_info is None:
            self.elements = max(self.elements, out.numel())
        return out


@every_optimizer
def test_converting_gradients_takes_the_memory_of_a_block(name, monkeypatch):
    monkeypatch.setattr(_leaves, "_BLOCK", 64)
    optimizer = OPTIMIZERS[name][1]
    params, grads = {"w": torch.ones(10, 100)}, {"w": torch.ones(10, 100, dtype=BF16)}
    state = optimizer.init(params)
    with LargestResult() as largest:
        optimizer.update_(params, grads, state, 0)
    assert largest.elements <= 4 * 64


@every_optimizer
def test_names_tell_optimizers_apart(name):
    ours = {other: optimizer.name for other, (_, optimizer, _) in OPTIMIZERS.items()}
    assert list(ours.values()).count(ours[name]) == 1
    assert ours[name].startswith(name.split("-")[0] + "(") and " at 0x" not in ours[name]


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_16_bit_descent_moves_every_element(dtype):
    """torch's fused kernel moves none of the full vectors (pytorch issue 191763)."""
    params = {"w": torch.zeros(100, dtype=dtype)}
    optim.sgd(1.0).update_(params, {"w": torch.ones(100, dtype=dtype)}, {}, 0)
    assert (params["w"] == -1).all()


def test_a_quadratic_is_minimised():
    rates = (optim.linear(0.1, 0.0, 200), 0.1, optim.linear(0.1, 0.0, 200))
    for make, rate in zip((optim.adamw, optim.sgd, optim.lion), rates):
        optimizer, params = make(rate, weight_decay=0.0), {"x": torch.tensor([3.0, -2.0])}
        state = optimizer.init(params)
        for step in range(200):
            optimizer.update_(params, {"x": 2 * (params["x"] - 1)}, state, step)
        assert (params["x"] - 1).abs().max() < 0.02, optimizer.name


def test_lion_is_the_papers_formula():
    p, g, mu = (draw(0, name, (50,), F64) for name in ("p", "g", "mu"))
    params, state = {"w": p.clone()}, {"mu": {"w": mu.clone()}}
    optim.lion(0.1, b1=0.9, b2=0.6, weight_decay=0.5).update_(params, {"w": g}, state, 7)
    expected = p - 0.1 * (torch.sign(0.9 * mu + 0.1 * g) + 0.5 * p)
    torch.testing.assert_close(params["w"], expected)
    torch.testing.assert_close(state["mu"]["w"], 0.6 * mu + 0.4 * g)


ONE = {"w": torch.ones(3)}

MISMATCHES = {
    "no gradient": ({}, {}, KeyError, r"grads\['w'\]: .*got none; leave frozen"),
    "None": ({"w": None}, {}, KeyError, r"grads\['w'\]: .*got none"),
    "shape": ({"w": torch.ones(2)}, {}, ValueError, r"grads\['w'\]: .*\(3,\), got \(2,\)"),
    "moment": (ONE, {"w": torch.ones(2)}, ValueError, r"mu\['w'\]: .*\(3,\), got \(2,\)"),
    "no moment": (ONE, {"v": torch.ones(3)}, KeyError, r"mu\['w'\]: .*got none"),
    "dtype": (ONE, {"w": torch.ones(3).double()}, TypeError, r"mu\['w'\]: .*got torch.float64"),
}


@pytest.mark.parametrize("mismatch", MISMATCHES)
@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "lion"])
def test_mismatched_leaves_are_named(name, mismatch):
    grads, mu, error, match = MISMATCHES[mismatch]
    optimizer, params = OPTIMIZERS[name][1], {"w": torch.zeros(3)}
    state = optimizer.init(params)
    state["mu"] = mu or state["mu"]
    with pytest.raises(error, match=rf"mt\.{name.split('-')[0]}: {match}"):
        optimizer.update_(params, grads, state, 0)
    assert not params["w"].any()


@every_optimizer
def test_integer_leaves_are_refused_by_name(name):
    with pytest.raises(TypeError, match=r"params\['count'\]: .*torch.int64; leave integer"):
        OPTIMIZERS[name][1].init({"w": torch.ones(2), "count": torch.arange(3)})


RANGES = [
    (lambda: optim.adamw(-1.0), ValueError, "adamw: learning_rate: .*at least 0"),
    (lambda: optim.adamw(1e-3, b1=1.0), ValueError, r"adamw: b1: .*\[0, 1\), got 1.0"),
    (lambda: optim.adamw(1e-3, b2=-0.1), ValueError, "adamw: b2: "),
    (lambda: optim.adamw(1e-3, eps=-1.0), ValueError, "adamw: eps: "),
    (lambda: optim.adamw(1e-3, weight_decay=float("nan")), ValueError, "adamw: weight_decay: "),
    (lambda: optim.adamw(torch.tensor(1e-3)), TypeError, r"adamw: learning_rate: .*\.item\(\)"),
    (lambda: optim.sgd(float("inf")), ValueError, "sgd: learning_rate: .*finite"),
    (lambda: optim.sgd(0.1, momentum=1.0), ValueError, "sgd: momentum: "),
    (lambda: optim.sgd(0.1, weight_decay=-1), ValueError, "sgd: weight_decay: "),
    (lambda: optim.sgd(0.1, nesterov=True), ValueError, "sgd: nesterov: .*momentum above 0"),
    (lambda: optim.lion(1e-4, b1=2), ValueError, "lion: b1: "),
    (lambda: optim.lion(1e-4, b2=1), ValueError, "lion: b2: "),
    (lambda: optim.lion(1e-4, weight_decay=-1), ValueError, "lion: weight_decay: "),
    (lambda: optim.constant(-1), ValueError, "optim.constant: value: "),
    (lambda: optim.linear(1, 0, 0), ValueError, "optim.linear: steps: .*at least 1"),
    (lambda: optim.linear(1, -1, 5), ValueError, "optim.linear: end: "),
    (lambda: optim.cosine(-1, 5), ValueError, "optim.cosine: peak: "),
    (lambda: optim.cosine(1, 5, warmup=5), ValueError, r"optim.cosine: warmup: .*\[0, 5\)"),
    (lambda: optim.cosine(1, 5, final=-1), ValueError, "optim.cosine: final: "),
    (lambda: optim.wsd(1, 5, decay=0), ValueError, "optim.wsd: decay: "),
    (lambda: optim.wsd(1, 5, decay=3, warmup=3), ValueError, "optim.wsd: steps: .*at least 6"),
    (lambda: optim.warmup(optim.constant(1), -1), ValueError, "optim.warmup: steps: "),
]


@pytest.mark.parametrize("call, error, match", RANGES, ids=[row[2][:28] for row in RANGES])
def test_hyperparameters_outside_their_ranges(call, error, match):
    with pytest.raises(error, match=r"mt\." + match):
        call()


SCHEDULES = {
    "constant": optim.constant(0.5),
    "linear": optim.linear(0.0, 1.0, 8),
    "cosine": optim.cosine(1.0, 20, warmup=4, final=0.1),
    "cosine-plain": optim.cosine(1.0, 20),
    "wsd": optim.wsd(1.0, 20, decay=5, warmup=4, final=0.1),
    "wsd-no-plateau": optim.wsd(1.0, 9, decay=5, warmup=4),
    "warmup": optim.warmup(optim.cosine(1.0, 16, final=0.1), 4),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_values(name):
    schedule = SCHEDULES[name]
    assert eval(repr(schedule), vars(optim)) == schedule
    assert hash(schedule) == hash(eval(repr(schedule), vars(optim)))
    assert repr(schedule) in optim.adamw(schedule).name


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_stay_between_their_ends_and_hold_the_last(name):
    schedule = SCHEDULES[name]
    rates = [schedule(step) for step in range(40)]
    assert all(0 <= value <= 1 for value in rates)
    assert len(set(rates[20:])) == 1


@pytest.mark.parametrize("name", ["cosine", "wsd", "warmup", "wsd-no-plateau"])
def test_warm_up_rises_to_the_peak_without_a_lost_step(name):
    assert [SCHEDULES[name](step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_is_warmup_before_cosine():
    for step in range(30):
        assert SCHEDULES["cosine"](step) == SCHEDULES["warmup"](step)


def test_cosine_agrees_with_torch():
    dummy = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    theirs, ours = CosineAnnealingLR(dummy, 10, eta_min=0.1), optim.cosine(0.4, 10, final=0.1)
    for step in range(11):
        assert ours(step) == pytest.approx(theirs.get_last_lr()[0])
        dummy.step()
        theirs.step()


def test_wsd_decays_in_its_last_steps():
    schedule = SCHEDULES["wsd"]
    assert [schedule(step) for step in range(4, 16)] == [1.0] * 12
    assert [schedule(step) for step in (16, 20)] == pytest.approx([0.82, 0.1])


def test_a_function_names_itself_in_a_warm_up():
    def ramp(step: int) -> float:
        return 0.5

    assert repr(optim.warmup(ramp, 3)).endswith("ramp, steps=3)")
    assert " at 0x" not in optim.sgd(optim.warmup(ramp, 3)).name
