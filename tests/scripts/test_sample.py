"""Sampling, from models whose answers are known."""

import torch

import mtfunc as mt
from scripts._sample import readable, sample


def successor(params, batch):
    """Certain that the next byte is the last one plus one; padding must not be looked at."""
    assert batch["tokens"].shape == (1, params)
    return torch.nn.functional.one_hot(batch["tokens"] + 1, 300) * 1e4


def draw(logits=successor, *, prompt=b"a", seed=0, window=4, length=11, temperature=1.0):
    options = dict(prompt=prompt, length=length, window=window, temperature=temperature)
    return sample(logits, window, mt.random.key(seed), **options)


def test_each_byte_follows_the_one_before_in_any_window():
    for window in (1, 2, 4, 64):
        assert draw(window=window) == b"abcdefghijkl"
    assert draw(prompt=b"xyzabcdefgh", length=2) == b"xyzabcdefghij"


def test_the_model_sees_as_much_as_the_window_holds():
    seen = []

    def logits(params, batch):
        seen.append(batch["tokens"][0].tolist())
        return successor(params, batch)

    draw(logits, prompt=b"\x01", length=6)
    assert seen[:4] == [[1, 0, 0, 0], [1, 2, 0, 0], [1, 2, 3, 0], [1, 2, 3, 4]]
    assert seen[4:] == [[3, 4, 5, 0], [3, 4, 5, 6]]


def even(params, batch):
    """Undecided between the bytes 0 and 1, three to one."""
    scores = torch.full((1, params, 256), -torch.inf)
    scores[..., :2] = torch.tensor([3.0, 1.0]).log()
    return scores


def test_draws_follow_the_scores_the_key_and_the_temperature():
    text = draw(even, length=400)[1:]
    assert 0.18 < sum(text) / 400 < 0.32
    assert draw(even, length=400)[1:] == text != draw(even, seed=1, length=400)[1:]
    assert sum(draw(even, length=400, temperature=0.1)[1:]) <= 1
    assert 0.4 < sum(draw(even, length=400, temperature=100.0)[1:]) / 400 < 0.6


def test_any_bytes_can_be_read():
    assert readable(b"a\xff\n") == "a\ufffd\n"
