"""Residuals that a forward pass keeps for its recomputation."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from mtfunc import ops
from mtfunc.ops import _residuals
from mtfunc.ops._residuals import collecting, off, replaying, take
from tests import toys
from tests.ops.tools import ENGINES, normal


def counted():
    """A computation, and how often it ran."""
    calls = []

    def compute():
        calls.append(None)
        return (torch.ones(2),)

    return compute, calls


@contextlib.contextmanager
def replaying_refused(saved, message):
    with pytest.raises(RuntimeError, match=message), replaying(saved):
        yield


def case():
    return normal(1, 7, 5), normal(11, 5, seed=1), torch.arange(7)[None]


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_the_loss_hands_back_what_it_computed(engine, monkeypatch):
    """Bitwise the same loss and gradients, and the recomputation makes no logits."""
    x, weight, labels = case()

    def fn(x, weight):
        first = ops.linear_cross_entropy(x, weight, labels, reduction="sum", tile=2)
        return first + ops.linear_cross_entropy(2 * x, weight, labels, z_loss=0.1, tile=3)

    expected = engine(fn, x, weight)
    with collecting() as saved:
        fn(x, weight)
    assert [len(entry.tensors) for entry in saved] == [2, 2]
    assert sum(t.nbytes for entry in saved for t in entry.tensors) == 2 * 2 * 7 * 8
    monkeypatch.setattr("mtfunc.ops.loss._losses", lambda *args: pytest.fail("computed again"))
    with replaying(saved):
        toys.assert_same(engine(fn, x, weight), expected)
    with replaying(saved):
        toys.assert_same(engine(fn, x, weight), expected)


def test_outside_it_computes():
    compute, calls = counted()
    take("a", compute)
    with collecting() as saved, off():
        take("a", compute)
    assert len(calls) == 2 and not saved


def test_tiles_neither_collect_nor_replay():
    compute, calls = counted()
    tiled = ops.tile(lambda p, x: x * take("a", compute)[0].sum(), 2)
    with collecting() as saved:
        tiled(None, torch.ones(1, 4))
    with replaying([]):
        tiled(None, torch.ones(1, 4))
    assert not saved and len(calls) == 4


def test_another_order_is_refused():
    compute, _ = counted()
    with collecting() as saved:
        take("a", compute), take("b", compute)
    with replaying_refused(saved, r"call 0 is 'b'; expected 'a', as in the forward"):
        take("b", compute)
    with replaying_refused(saved, r"call 2 is 'a'; expected no further call"):
        take("a", compute), take("b", compute), take("a", compute)
    with replaying_refused(saved, r"1 of 2 were asked for; expected all of them"):
        take("a", compute)


def test_an_error_inside_is_not_hidden_and_the_mode_ends():
    compute, calls = counted()
    with collecting() as saved:
        take("a", compute)
    with pytest.raises(KeyError), replaying(saved):
        raise KeyError
    take("a", compute)
    assert len(calls) == 2 and len(saved) == 1 and _residuals._mode.get() is None


def test_other_threads_do_not_see_it():
    compute, calls = counted()
    with collecting() as saved:
        thread = threading.Thread(target=take, args=("a", compute))
        thread.start()
        thread.join()
    assert len(calls) == 1 and not saved
