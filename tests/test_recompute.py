"""Recomputation leaves out what no gradient reads, and nothing else."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import mtfunc as mt
from mtfunc import _tree, recompute

WIDTH = 16


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(recompute, "LEARN", 0)


def residual(p, x, batch):
    return x + torch.tanh(x @ p["up"]) @ p["down"]


def first(p, batch):
    return batch["x"] @ p["w"]


def last(p, x, batch):
    return ((x @ p["w"] - batch["y"]) ** 2).mean()


def case(block=residual, vjp="func", depth=3):
    draw = torch.Generator().manual_seed(0)

    def matrix():
        return torch.randn(WIDTH, WIDTH, generator=draw) / WIDTH**0.5

    program = mt.chain(
        mt.stage(lambda p, x, batch: first(p, batch), "first"),
        mt.scan(block, "layers", vjp=vjp),
        mt.stage(last, "last"),
    )
    params = {
        "first": {"w": matrix()},
        "layers": [{"up": matrix(), "down": matrix()} for _ in range(depth)],
        "last": {"w": matrix()},
    }
    batch = {k: torch.randn(8, WIDTH, generator=draw) for k in "xy"}
    return program, params, batch


def same(program, params, batch, device="cpu", steps=3):
    f = mt.value_and_grad(program, device=device)
    loss, grads = mt.reference.value_and_grad(program)(params, batch)
    for _ in range(steps):
        got, found = f(params, batch)
        assert torch.equal(got, loss)
        for path, leaf in _tree.flatten(grads)[0].items():
            assert torch.equal(_tree.flatten(found)[0][path], leaf), path


def flops(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("vjp", ["func", "autograd"])
def test_the_last_projection_is_not_computed_twice(vjp):
    program, params, batch = case(vjp=vjp)
    f = mt.value_and_grad(program)
    f(params, batch)
    product = 2 * 8 * WIDTH * WIDTH
    # One forward and two products of the pullback for each of the 8 matrices, less the gradient
    # of the input, and the first product of each of 3 layers again: neither the second one's,
    # nor that of "first", is read. The last stage keeps its pullback.
    assert flops(lambda: f(params, batch)) == product * (3 * 8 - 1 + 3)
    same(program, params, batch)
    same(program, params, batch, "sim:3")


def watched(monkeypatch):
    learnt = []
    learn = recompute._learn

    def noting(run):
        unread = learn(run)
        learnt.append([str(unread.ops[i][0]) for i in sorted(unread.skip)])
        return unread

    monkeypatch.setattr(recompute, "_learn", noting)
    return learnt


def test_one_trace_is_watched_once(monkeypatch):
    learnt = watched(monkeypatch)
    program, params, batch = case()
    same(program, params, batch)
    assert learnt == [["aten.mm.default", "aten.add.Tensor"], ["aten.mm.default"]]


class Hidden(torch.autograd.Function):
    """Its backward reads what it kept in ways that no dispatcher sees."""

    @staticmethod
    def forward(x, y):
        return x + y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.kept = inputs[1].detach().numpy()

    @staticmethod
    def backward(ctx, grad):
        seen = float(ctx.kept.sum())
        return grad * seen, grad


def test_a_hidden_read_is_noticed_and_nothing_is_left_out(monkeypatch):
    learnt = watched(monkeypatch)

    def block(p, x, batch):
        return Hidden.apply(x, torch.tanh(x @ p["up"]) @ p["down"])

    program, params, batch = case(block, vjp="autograd")
    same(program, params, batch)
    assert learnt[:3] == [[]] * 3


def test_a_saved_tensor_that_is_the_gradient_is_computed():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(a, b):
            return (a * b).sum()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            return b, a

    def block(p, x, batch):
        return x + 0 * Product.apply(p["up"] @ p["down"], p["down"] @ p["up"]) + x @ p["up"]

    same(*case(block))


def test_going_another_way_than_before_computes_all_of_it():
    calls = []

    def block(p, x, batch):
        calls.append(0)
        hidden = torch.tanh(x @ p["up"])
        # The same values by other operations, from some call on.
        out = hidden @ p["down"] if len(calls) < 60 else (hidden.clone() @ p["down"])
        return x + out

    program, params, batch = case(block)
    same(program, params, batch, steps=12)
    assert len(calls) > 60


def test_an_error_of_the_stage_is_its_own():
    calls = []

    def block(p, x, batch):
        calls.append(0)
        if len(calls) > 40:
            raise ArithmeticError("by the user")
        return residual(p, x, batch)

    program, params, batch = case(block)
    with pytest.raises(ArithmeticError, match="by the user"):
        same(program, params, batch, steps=12)


def test_choices_by_value_and_views_of_what_is_left_out():
    def block(p, x, batch):
        out = torch.tanh(x @ p["up"]) @ p["down"]
        top = (x @ p["up"]).argmax(-1)
        return (out.view(-1, 2).reshape(x.shape) + F.one_hot(top, WIDTH)).T.contiguous().T

    same(*case(block))


def test_rules_do_not_run_their_forward_again():
    calls = []

    def block(p, x, batch):
        calls.append("forward")
        return residual(p, x, batch)

    def rule(p, x, batch, cotangent):
        hidden = torch.tanh(x @ p["up"])
        inner = (cotangent @ p["down"].T) * (1 - hidden**2)
        return {"up": x.T @ inner, "down": hidden.T @ cotangent}, cotangent + inner @ p["up"].T

    program, params, batch = case(block, vjp=rule)
    f = mt.value_and_grad(program)
    f(params, batch)
    calls.clear()
    f(params, batch)
    assert len(calls) == 3
    same(program, params, batch)
