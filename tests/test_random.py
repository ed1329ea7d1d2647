"""Explicit keys: exactness against big integers, equality of tiles, and the look of chance."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mtfunc import random

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
N = 100_000

DRAWS = {
    **{
        f"uniform-{dtype}": lambda key, shape, dtype=dtype, **o: random.uniform(
            key, shape, dtype, **o
        )
        for dtype in DTYPES
    },
    **{
        f"normal-{dtype}": lambda key, shape, dtype=dtype, **o: random.normal(
            key, shape, dtype, **o
        )
        for dtype in DTYPES
    },
    "shifted": lambda key, shape, **o: random.uniform(key, shape, low=-3.0, high=5.0, **o),
    "bernoulli": lambda key, shape, **o: random.bernoulli(key, 0.3, shape, **o),
    "dropout": lambda key, shape, device=None, **o: random.dropout(
        key, 0.3, torch.ones(shape, device=device or key.device), **o
    ),
}
"""Every draw that has a shape and an offset, as ``draw(key, shape, offset=0, device=None)``."""

FUNCTIONS = {
    **DRAWS,
    "categorical": lambda key, shape: random.categorical(
        key, torch.zeros(shape, device=key.device)
    ),
    "permutation": lambda key, shape: random.permutation(key, shape[0]),
    "split": lambda key, shape: random.split(key, shape[0]),
    "fold_in": lambda key, shape: random.fold_in(key, shape[0]),
    "fold_in-str": lambda key, shape: random.fold_in(key, "layers/3"),
}

MASK = 2**64 - 1


def mix64(z):
    """SplitMix64's output function on unbounded integers, as published."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def signed(z):
    return z - 2**64 if z >= 2**63 else z


def bits(key, n, offset=0):
    """The signed bits of a key's elements, on unbounded integers."""
    start = key.item() & MASK
    gamma = mix64(start ^ (random._GAMMA & MASK)) | 1
    return [signed(mix64((start + (offset + i + 1) * gamma) & MASK)) for i in range(n)]


def test_mix64_is_the_published_one():
    golden = 0x9E3779B97F4A7C15
    counters = torch.tensor([signed(i * golden & MASK) for i in (1, 2, 3)])
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [z & MASK for z in random._mix(counters).tolist()] == published


@given(seed=st.integers(-(2**63), 2**64 - 1), offset=st.integers(0, 2**62))
def test_draws_are_those_of_unbounded_integers(seed, offset):
    key = random.key(seed)
    z = bits(key, 5, offset)
    narrow, wide = (
        random.uniform(key, (5,), dtype, offset=offset).tolist()
        for dtype in (torch.float32, torch.float64)
    )
    assert narrow == [((b + 2**63) >> 40) / 2**24 for b in z]
    assert wide == [((b + 2**63) >> 11) / 2**53 for b in z]


def test_numbers_never_change():
    """Resuming a run relies on these; a change of them is a change of every run."""
    key = random.key(0)
    assert key.item() == 7988268426454585367
    assert random.split(key).tolist() == [4017348223936016071, 6880596296905078590]
    assert random.fold_in(key, 3).item() == -24246330271215521
    assert random.fold_in(key, "layers/3").item() == 4494918106356167496
    assert random.permutation(key, 6).tolist() == [3, 5, 4, 1, 2, 0]
    assert (random.uniform(key, (3,)) * 2**24).tolist() == [13860034.0, 5743138.0, 10213180.0]
    torch.testing.assert_close(
        random.normal(key, (3,), torch.float64),
        torch.tensor(
            [0.938952458937758, -0.4061458323823558, 0.2760703458278118], dtype=torch.float64
        ),
    )


@pytest.mark.parametrize("name", DRAWS)
@given(data=st.data())
def test_tiles_are_cuts_of_the_whole(name, data):
    draw, key = DRAWS[name], random.key(data.draw(st.integers(0, 99)))
    n = data.draw(st.integers(1, 300))
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    whole = draw(key, (n,))
    assert torch.equal(whole[start:stop], draw(key, (stop - start,), offset=start))
    assert torch.equal(whole, draw(key, (n, 1, 1)).flatten())


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("block", [1, 7, 1000])
def test_blocks_do_not_show(name, block, monkeypatch):
    whole = DRAWS[name](random.key(5), (1003,))
    monkeypatch.setattr(random, "_BLOCK", block)
    assert torch.equal(DRAWS[name](random.key(5), (1003,)), whole)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_over_keys_is_a_loop(name):
    keys, fn = random.split(random.key(2), 3), FUNCTIONS[name]
    mapped = torch.func.vmap(lambda key: fn(key, (4,)))(keys)
    assert torch.equal(mapped, torch.stack([fn(key, (4,)) for key in keys]))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_meta_tensors_have_the_same_shape_and_dtype(name):
    real = FUNCTIONS[name](random.key(0), (4,))
    meta = FUNCTIONS[name](random.key(0).to("meta"), (4,))
    assert (meta.device.type, meta.shape, meta.dtype) == ("meta", real.shape, real.dtype)


@pytest.mark.parametrize("name", DRAWS)
def test_a_key_in_host_memory_draws_elsewhere(name):
    assert DRAWS[name](random.key(0), (3, 2), device="meta").shape == (3, 2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_global_generator_is_left_alone(name):
    before = torch.get_rng_state()
    FUNCTIONS[name](random.key(0), (4,))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_shape_is_too_small(name):
    for shape in [(0,), (1,)] if name != "categorical" else [(1,)]:
        FUNCTIONS[name](random.key(0), shape)
    if name in DRAWS:
        assert DRAWS[name](random.key(0), ()).shape == ()


class LargestInteger(TorchDispatchMode):
    """Records the most elements of an int64 tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.int64:
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("name", DRAWS)
def test_integers_of_a_large_draw_stay_in_one_block(name, monkeypatch):
    monkeypatch.setattr(random, "_BLOCK", 64)
    with LargestInteger() as largest:
        DRAWS[name](random.key(0), (1000,))
    assert largest.elements == 64


def ks(sample, cdf):
    """The Kolmogorov-Smirnov statistic, scaled: above 1.95 in one of a thousand fair samples."""
    x = sample.double().sort().values
    steps = torch.arange(len(x) + 1) / len(x)
    gap = torch.maximum((cdf(x) - steps[:-1]).abs(), (cdf(x) - steps[1:]).abs()).max()
    return gap.item() * math.sqrt(len(x))


def correlation(x, y):
    """The correlation in standard errors."""
    return torch.corrcoef(torch.stack([x, y]).double())[0, 1].item() * math.sqrt(len(x))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_is_uniform(seed, dtype):
    x = random.uniform(random.key(seed), (N,), dtype, low=-2.0, high=1.0)
    assert ks(x, lambda t: (t + 2) / 3) < 1.95
    assert abs(x.double().mean().item() + 0.5) < 4 * math.sqrt(9 / 12 / N)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_is_normal(seed, dtype):
    x = random.normal(random.key(seed), (N,), dtype)
    assert ks(x, torch.special.ndtr) < 1.95
    assert abs(x.double().mean().item()) < 4 / math.sqrt(N)
    assert abs(x.double().var().item() - 1) < 4 * math.sqrt(2 / N)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_round_the_float32_draw(dtype):
    key = random.key(1)
    assert torch.equal(random.normal(key, (N,), dtype), random.normal(key, (N,)).to(dtype))
    x, wide = random.uniform(key, (N,), dtype), random.uniform(key, (N,)).to(dtype)
    assert wide.max() == 1 and x.max() == 1 - torch.finfo(dtype).eps / 2
    assert torch.equal(x[wide < 1], wide[wide < 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("low, high", [(0, 1), (0, 3), (-1, 1), (-1, 0), (-8, -4), (0.1, 0.3)])
@pytest.mark.parametrize("extreme", [-(2**63), 2**63 - 1])
def test_uniform_never_reaches_high(dtype, low, high, extreme, monkeypatch):
    monkeypatch.setattr(random, "_mix", lambda x: x.fill_(extreme))
    x = random.uniform(random.key(0), (1,), dtype, low=low, high=high).double()
    if extreme < 0:
        assert x == torch.tensor(low, dtype=dtype)
    else:
        assert high - 0.02 * (high - low) < x < high


@given(st.floats(-1e4, 1e4), st.sampled_from(DTYPES))
@example(0.0, torch.float32)
@example(1e-5, torch.float16)
@example(5e-324, torch.float64)
def test_the_number_below(high, dtype):
    below = torch.tensor(random._below(high, dtype), dtype=dtype)
    above = torch.nextafter(below, torch.tensor(math.inf, dtype=dtype))
    assert below.item() == random._below(high, dtype) < high <= above.item()


@pytest.mark.parametrize("extreme", [-(2**63), 0, 2**63 - 1])
def test_the_farthest_draws_are_finite(extreme, monkeypatch):
    monkeypatch.setattr(random, "_mix", lambda x: x.fill_(extreme))
    for dtype, farthest in ((torch.float32, 5.42), (torch.float64, 8.29)):
        x = random.normal(random.key(0), (1,), dtype).abs().item()
        assert x < 1e-6 if extreme == 0 else abs(x - farthest) < 0.05
    noisy = torch.tensor([-math.inf, 0.0])
    assert random.categorical(random.key(0), noisy) == 1


@given(st.floats(0, 1), st.integers(0, 9))
def test_bernoulli_is_a_uniform_below_p(p, seed):
    key = random.key(seed)
    below = random.uniform(key, (500,), torch.float64) < p
    assert torch.equal(random.bernoulli(key, p, (500,)), below)


@pytest.mark.parametrize("p", [0.0, 2.0**-60, 0.5, 1 - 2.0**-53, 1.0])
@pytest.mark.parametrize("extreme", [-(2**63), 2**63 - 1])
def test_bernoulli_at_the_ends(p, extreme, monkeypatch):
    monkeypatch.setattr(random, "_mix", lambda x: x.fill_(extreme))
    assert random.bernoulli(random.key(0), p) == (p > 0 if extreme < 0 else p == 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_categorical_is_a_softmax(dtype):
    logits = torch.tensor([0.0, 1.0, -math.inf, 2.0, -1.0, 0.5], dtype=dtype)
    drawn = random.categorical(random.key(4), logits.expand(N // 4, 6))
    counts = torch.bincount(drawn, minlength=6)
    expected = N // 4 * logits.double().softmax(0)
    fair = expected > 0
    assert counts[~fair] == 0
    chi2 = ((counts - expected)[fair] ** 2 / expected[fair]).sum().item()
    assert chi2 < 18.5  # 4 degrees of freedom: one of a thousand


def test_categorical_takes_any_dimension():
    logits = torch.zeros(3, 4, 5)
    key = random.key(0)
    assert random.categorical(key, logits, dim=1).shape == (3, 5)
    tile = random.categorical(key, logits[1:], offset=20)
    assert torch.equal(random.categorical(key, logits)[1:], tile)


def test_categorical_tells_large_noise_apart(monkeypatch):
    """On the grid of float32 uniforms these two tie, as many do among 10^5 entries."""
    largest = torch.tensor([2**63 - 2**30, 2**63 - 1])
    monkeypatch.setattr(random, "_mix", lambda x: x.copy_(largest) if x.ndim else x)
    assert random.categorical(torch.tensor(0), torch.zeros(2)) == 1


def test_every_order_is_as_likely():
    orders = torch.func.vmap(lambda key: random.permutation(key, 4))(random.split(random.key(0), N))
    assert torch.equal(orders.sort(1).values, torch.arange(4).expand(N, 4))
    counts = torch.bincount((orders * torch.tensor([64, 16, 4, 1])).sum(1))
    counts = counts[counts > 0].double()
    assert len(counts) == 24
    chi2 = ((counts - N / 24) ** 2 / (N / 24)).sum().item()
    assert chi2 < 49.7  # 23 degrees of freedom: one of a thousand


def generations(n):
    keys = [random.key(0)]
    for _ in range(n - 1):
        keys.append(random.split(keys[-1])[0])
    return keys


KIN = {
    "neighbouring seeds": lambda n: [random.key(i) for i in range(n)],
    "distant seeds": lambda n: [random.key(i * 0x9E3779B97F4A7C15 % 2**64) for i in range(n)],
    "neighbouring words": lambda n: list(torch.arange(n)),
    "split": lambda n: list(random.split(random.key(0), n)),
    "generations": generations,
    "folded integers": lambda n: [random.fold_in(random.key(0), i) for i in range(n)],
    "folded strings": lambda n: [random.fold_in(random.key(0), f"layers/{i}") for i in range(n)],
}


@pytest.mark.parametrize("name", KIN)
def test_kindred_keys_draw_unrelated_numbers(name):
    first, second = (random.uniform(key, (N,)) for key in KIN[name](2))
    for lag in (0, 1, 2, 17):
        assert abs(correlation(first[lag:], second[: N - lag])) < 4
        assert abs(correlation(second[lag:], first[: N - lag])) < 4
        assert lag == 0 or abs(correlation(first[lag:], first[: N - lag])) < 4
    assert ks((first - second) % 1, lambda t: t) < 1.95


@pytest.mark.parametrize("name", KIN)
def test_one_element_over_kindred_keys_is_uniform(name):
    keys = torch.stack(KIN[name](1000))
    x = torch.func.vmap(lambda key: random.uniform(key, (3,)))(keys)
    for column in x.T:
        assert ks(column, lambda t: t) < 1.95
        assert abs(correlation(column[1:], column[:-1])) < 4


def test_keys_that_differ_by_a_counter_share_no_run():
    """With one gamma for all keys, a key that is a few counters ahead would repeat another's."""
    key = random.key(0)
    gamma = random._mix(key ^ random._GAMMA) | 1
    ahead = key + 3 * gamma
    assert not torch.isin(random.uniform(ahead, (50,)), random.uniform(key, (60,))).any()


def test_fold_in_keeps_apart_what_differs():
    key = random.key(0)
    data = [0, 1, -1, 2**63 - 1, "", "0", "1", "ab", "a/b", "b/a"]
    folded = [random.fold_in(key, datum).item() for datum in data]
    folded += [
        random.fold_in(random.fold_in(key, *a), *b).item() for a, b in [((1,), (2,)), ((2,), (1,))]
    ]
    folded += [*random.split(key, 3).tolist(), key.item()]
    assert len(set(folded)) == len(folded)


@given(st.integers(-(2**31), 2**31 - 1))
def test_fold_in_takes_a_number_in_any_form(number):
    key = random.key(7)
    expected = random.fold_in(key, number)
    for same in (np.int64(number), torch.tensor(number), torch.tensor(number, dtype=torch.int32)):
        assert torch.equal(random.fold_in(key, same), expected)


def test_split_does_not_depend_on_n():
    key = random.key(3)
    assert torch.equal(random.split(key, 5)[:2], random.split(key))
    assert [k.shape for k in random.split(key, 2)] == [(), ()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_scales_what_it_keeps(dtype):
    key, x = random.key(0), random.normal(random.key(1), (1000,), dtype)
    keep = random.bernoulli(key, 1 - 0.25, (1000,))
    expected = torch.where(keep, (x.double() / 0.75), 0.0)
    y = random.dropout(key, 0.25, x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_dropped_elements_are_zero_whatever_they_were():
    x = torch.full((100,), math.inf)
    assert set(random.dropout(random.key(0), 0.5, x).tolist()) == {0.0, math.inf}


def test_dropout_keeps_its_share():
    kept = (random.dropout(random.key(0), 0.1, torch.ones(N)) != 0).sum().item()
    assert abs(kept - 0.9 * N) < 4 * math.sqrt(0.09 * N)


def test_dropout_at_rate_zero_is_the_identity():
    x = torch.randn(3)
    assert random.dropout(random.key(0), 0.0, x) is x


def test_dropout_pulls_back_through_its_mask():
    key, x = random.key(0), torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    mask = random.dropout(key, 0.5, torch.ones_like(x)).detach()
    cotangent = torch.randn_like(x)
    (grad,) = torch.autograd.grad(random.dropout(key, 0.5, x), x, cotangent)
    y, pullback = torch.func.vjp(lambda x: random.dropout(key, 0.5, x), x.detach())
    assert torch.equal(y, x.detach() * mask)
    assert torch.equal(grad, cotangent * mask) and torch.equal(pullback(cotangent)[0], grad)


def test_dropout_under_vmap_follows_its_key():
    key, x = random.key(0), torch.randn(3, 8)
    one = torch.func.vmap(lambda x: random.dropout(key, 0.5, x))(x)
    assert torch.equal(one, torch.stack([random.dropout(key, 0.5, row) for row in x]))
    keys = random.split(key, 3)
    each = torch.func.vmap(lambda k, x: random.dropout(k, 0.5, x))(keys, x)
    assert torch.equal(each, torch.stack([random.dropout(k, 0.5, r) for k, r in zip(keys, x)]))


KEY = random.key(0)

ERRORS = [
    (lambda: random.uniform(0, (2,)), TypeError, r"uniform: key: .*got int; mt.random.key\(0\)"),
    (lambda: random.dropout(None, 0.1, torch.ones(2)), TypeError, "dropout: key: .*NoneType"),
    (lambda: random.normal(torch.tensor(0.0), (2,)), TypeError, "normal: key: .*got torch.float32"),
    (lambda: random.split(random.split(KEY, 3)), TypeError, r"split: .*\(3,\).*iterates"),
    (lambda: random.key(2**64), ValueError, "key: seed: expected an integer of 64 bits"),
    (lambda: random.key(0.5), TypeError, "key: seed: expected an integer, got float"),
    (lambda: random.split(KEY, -1), ValueError, "split: expected sizes"),
    (lambda: random.permutation(KEY, -1), ValueError, "permutation: expected sizes"),
    (lambda: random.fold_in(KEY, 0.5), TypeError, "fold_in: data: expected an integer, got float"),
    (lambda: random.fold_in(KEY, 2**64), ValueError, r"fold_in: data: .*modulo 2\*\*64"),
    (lambda: random.fold_in(KEY, torch.zeros(2).long()), TypeError, r"fold_in: data: .*\(2,\)"),
    (lambda: random.fold_in(KEY, torch.tensor(0.5)), TypeError, "fold_in: data: .*float32"),
    (lambda: random.uniform(KEY, (2,), torch.int64), TypeError, "uniform: dtype: .*torch.int64"),
    (lambda: random.normal(KEY, (2,), torch.int64), TypeError, "normal: dtype: .*torch.int64"),
    (lambda: random.uniform(KEY, (2,), low=1.0), ValueError, "expected low < high"),
    (lambda: random.uniform(KEY, (-2,)), ValueError, r"uniform: expected sizes.*\(-2,\)"),
    (lambda: random.normal(KEY, (2,), offset=-1), ValueError, "normal: .*offset -1"),
    (lambda: random.bernoulli(KEY, 1.5, (2,)), ValueError, r"bernoulli: .*\[0, 1\], got 1.5"),
    (lambda: random.dropout(KEY, 1.0, torch.ones(2)), ValueError, r"rate in \[0, 1\), got 1.0"),
    (lambda: random.dropout(KEY, -0.1, torch.ones(2)), ValueError, "not of keeping"),
    (lambda: random.dropout(KEY, 0.1, torch.arange(2)), TypeError, "floating x, got torch.int64"),
]


@pytest.mark.parametrize("call, error, match", ERRORS, ids=[e[2][:24] for e in ERRORS])
def test_errors_say_where_and_the_mend(call, error, match):
    with pytest.raises(error, match=r"mt\.random\..*" + match):
        call()
