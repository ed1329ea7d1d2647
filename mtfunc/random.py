"""Random numbers from explicit keys: the same key draws the same numbers, wherever and whenever.

A key is an int64 tensor of shape ``()`` in host memory. No function here reads or changes torch's
global generator, and nothing is consumed: drawing twice from one key gives the same numbers twice.
Take new keys with :func:`split` and :func:`fold_in`.

Draws are counter-based: element ``i`` of a draw in row-major order is a pure function of the key
and of ``offset + i``. So recomputing, tiling and resuming draw the same numbers, and
``uniform(key, (n,))[:k]`` equals ``uniform(key, (k,))``. Integers are exact, so ``uniform``,
``bernoulli``, ``dropout``, ``permutation`` and keys agree on every device; ``normal`` and
``categorical`` pass through the device's own ``erfinv`` and ``log``.

The generator is SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014. The 64 bits of element ``i`` are ``mix64(key + (i + 1) * gamma)``, where
each key has its own odd ``gamma`` (their section 4), so that two keys never share a run of numbers.
``mix64`` is Stafford's variant 13. It is fast and statistically sound, and not fit for secrets.

Every function works under ``torch.func.vmap`` over keys, and on meta tensors.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mtfunc._base import Key

_BLOCK = 2**15
"""Elements drawn at a time on a CPU; no draw depends on it. Each operation on a block runs on one
thread, with its int64 scratch in that core's cache: two threads and larger blocks are twice as fast
on an idle machine, and up to 20 times slower where other work makes them wait for each other."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def key(seed: int) -> Key:
    """Makes a key.

    Args:
        seed: any integer of 64 bits, signed or unsigned; neighbouring seeds give unrelated keys.

    Returns:
        A key: an int64 tensor of shape ``()`` in host memory.

    Raises:
        ValueError: the seed does not fit into 64 bits.

    Example:
        >>> from mtfunc import random
        >>> random.uniform(random.key(0), (3,))
        tensor([0.8261, 0.3423, 0.6088])
    """
    return _mix(torch.tensor(_int64("key", "seed", seed), device="cpu") ^ _SEED)


def split(key: Key, n: int = 2) -> Tensor:
    """Makes ``n`` new keys, unrelated to each other and to what ``key`` itself draws.

    Args:
        key: the key to derive from.
        n: how many keys.

    Returns:
        An int64 tensor of shape ``(n,)``, which iterates to keys; the first keys do not depend
        on ``n``.

    Raises:
        TypeError: ``key`` is not a key.
        ValueError: ``n`` is negative.

    Example:
        >>> from mtfunc import random
        >>> first, second = random.split(random.key(0))
    """
    _check_key("split", key)
    return _draw("split", _mix(key ^ _SPLIT), (n,), torch.int64, None, 0, lambda bits: bits)


def fold_in(key: Key, data: int | str | Tensor) -> Key:
    """Makes the key that belongs to ``data``: a layer's name, the index of a micro-batch, a step.

    Args:
        key: the key to derive from.
        data: an integer of 64 bits, an integer tensor of shape ``()``, or a string. A string
            counts through BLAKE2b of its UTF-8 bytes, so that it means the same in each process.

    Returns:
        A new key. Different integers give different keys; integers and strings do not mix.

    Raises:
        TypeError: ``key`` is not a key, or ``data`` is none of the above.
        ValueError: the integer does not fit into 64 bits.

    Example:
        >>> from mtfunc import random
        >>> root = random.key(0)
        >>> random.fold_in(root, "layers/3").equal(random.fold_in(root, "layers/4"))
        False
    """
    _check_key("fold_in", key)
    if isinstance(data, str):
        word = torch.tensor(_digest(data), device=key.device)
    elif isinstance(data, Tensor):
        if data.ndim or data.is_floating_point() or data.is_complex() or data.dtype == torch.bool:
            raise TypeError(
                f"mt.random.fold_in: data: expected an integer tensor of shape (), got "
                f"{data.dtype} of shape {tuple(data.shape)}; fold in one number at a time"
            )
        word = _mix(data.to(device=key.device, dtype=torch.int64) ^ _FOLD)
    else:
        word = _mix(torch.tensor(_int64("fold_in", "data", data), device=key.device) ^ _FOLD)
    return _mix(_mix(key ^ _FOLD) + word)


def uniform(
    key: Key,
    shape: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    *,
    low: float = 0.0,
    high: float = 1.0,
    offset: int = 0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draws uniform numbers from ``[low, high)``.

    float32 takes the top 24 of an element's 64 bits, float64 the top 53; float16 and bfloat16
    round the float32 number, and what would round up to ``high`` becomes the number before it.

    Args:
        key: the key to draw from.
        shape: the shape of the result.
        dtype: float16, bfloat16, float32 or float64.
        low: the least number, included.
        high: the upper bound, excluded in every dtype.
        offset: the index of the first element in the flattened whole, to draw one tile of it.
        device: where to draw; the default is the key's own device.

    Returns:
        A tensor of ``shape`` and ``dtype``.

    Raises:
        TypeError: ``key`` is not a key, or ``dtype`` is another one.
        ValueError: ``low`` is not below ``high``, or ``offset`` or a size is negative.

    Example:
        >>> from mtfunc import random
        >>> whole = random.uniform(random.key(0), (10,))
        >>> whole[4:].equal(random.uniform(random.key(0), (6,), offset=4))
        True
    """
    _check_key("uniform", key)
    if not low < high:
        raise ValueError(f"mt.random.uniform: expected low < high, got low={low} and high={high}")
    wide = _wide("uniform", dtype)
    shift, last = (11 if wide == torch.float64 else 40), _below(high, dtype)

    def numbers(bits: Tensor) -> Tensor:
        unit = _scaled(bits.bitwise_right_shift_(shift), wide, shift - 64).add_(0.5)
        if (low, high) != (0, 1):
            unit.mul_(high - low).add_(low)
        return unit.to(dtype).clamp(max=last)

    return _draw("uniform", key, shape, dtype, device, offset, numbers)


def normal(
    key: Key,
    shape: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    *,
    offset: int = 0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draws from the normal distribution of mean 0 and variance 1.

    By inversion, ``sqrt(2) * erfinv(v)``, where ``v`` lies on a grid in (-1, 1) that is symmetric
    about 0 and has 2^24 points in float32 (also for the 16-bit dtypes) and 2^53 in float64: the
    farthest numbers are ±5.4 and ±8.3.

    Args:
        key: the key to draw from.
        shape: the shape of the result.
        dtype: float16, bfloat16, float32 or float64.
        offset: the index of the first element in the flattened whole.
        device: where to draw; the default is the key's own device.

    Returns:
        A tensor of ``shape`` and ``dtype``.

    Raises:
        TypeError: ``key`` is not a key, or ``dtype`` is another one.
        ValueError: ``offset`` or a size is negative.

    Example:
        >>> from mtfunc import random
        >>> weight = 0.02 * random.normal(random.key(0), (512, 256))
    """
    _check_key("normal", key)
    wide = _wide("normal", dtype)
    shift = 10 if wide == torch.float64 else 39

    def numbers(bits: Tensor) -> Tensor:
        odd = bits.bitwise_right_shift_(shift).bitwise_or_(1)
        return _scaled(odd, wide, shift - 63).erfinv_().mul_(math.sqrt(2))

    return _draw("normal", key, shape, dtype, device, offset, numbers)


def bernoulli(
    key: Key,
    p: float,
    shape: Sequence[int] = (),
    *,
    offset: int = 0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draws ``True`` with probability ``p``: ``uniform(key, shape, torch.float64) < p``.

    Args:
        key: the key to draw from.
        p: a probability, exact to 2^-53.
        shape: the shape of the result.
        offset: the index of the first element in the flattened whole.
        device: where to draw; the default is the key's own device.

    Returns:
        A bool tensor of ``shape``.

    Raises:
        TypeError: ``key`` is not a key.
        ValueError: ``p`` is outside [0, 1], or ``offset`` or a size is negative.

    Example:
        >>> from mtfunc import random
        >>> int(random.bernoulli(random.key(0), 0.25, (1000,)).sum())
        253
    """
    _check_key("bernoulli", key)
    if not 0 <= p <= 1:
        raise ValueError(f"mt.random.bernoulli: expected a probability p in [0, 1], got {p}")
    bound = math.ceil(p * 2**53) - 2**52

    def numbers(bits: Tensor) -> Tensor:
        return bits.bitwise_right_shift_(11) < bound

    return _draw("bernoulli", key, shape, torch.bool, device, offset, numbers)


def categorical(key: Key, logits: Tensor, dim: int = -1, *, offset: int = 0) -> Tensor:
    """Draws an index along ``dim`` with probability ``softmax(logits, dim)``.

    By the Gumbel-max trick (Maddison, Tarlow and Minka, "A* sampling", NeurIPS 2014): the argmax
    of ``logits - log(-log(u))``. The noise is computed in float64, since float32's grid near
    ``u = 1`` is too coarse for vocabularies of 10^5 entries.

    Args:
        key: the key to draw from.
        logits: unnormalised log-probabilities of any shape; ``-inf`` is never drawn.
        dim: the dimension of the categories.
        offset: the index of the first logit in the flattened whole.

    Returns:
        An int64 tensor of the logits' shape without ``dim``.

    Raises:
        TypeError: ``key`` is not a key.
        ValueError: ``offset`` is negative.

    Example:
        >>> import torch
        >>> from mtfunc import random
        >>> random.categorical(random.key(0), torch.tensor([[0.0, 9.0], [9.0, 0.0]]))
        tensor([1, 0])
    """
    _check_key("categorical", key)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32

    def gumbel(bits: Tensor) -> Tensor:
        odd = bits.bitwise_right_shift_(11).bitwise_or_(1)
        return _scaled(odd, torch.float64, -53).add_(0.5).log_().neg_().log_().neg_()

    noise = _draw("categorical", key, logits.shape, dtype, logits.device, offset, gumbel)
    return noise.add(logits.detach()).argmax(dim)


def permutation(key: Key, n: int, *, device: torch.device | str | None = None) -> Tensor:
    """Draws an order of ``range(n)``, all orders being equally likely.

    Args:
        key: the key to draw from.
        n: how many indices.
        device: where to draw; the default is the key's own device.

    Returns:
        An int64 tensor of shape ``(n,)``: the ranks of ``n`` draws, which have no ties since the
        64 bits of a key's elements all differ.

    Raises:
        TypeError: ``key`` is not a key.
        ValueError: ``n`` is negative.

    Example:
        >>> from mtfunc import random
        >>> random.permutation(random.key(0), 5)
        tensor([3, 4, 1, 2, 0])
    """
    _check_key("permutation", key)
    return _draw("permutation", key, (n,), torch.int64, device, 0, lambda bits: bits).argsort()


def dropout(key: Key, rate: float, x: Tensor, *, offset: int = 0) -> Tensor:
    """Zeroes each element with probability ``rate`` and divides the others by ``1 - rate``.

    As Srivastava et al., "Dropout", JMLR 2014. The mask is redrawn from the key rather than
    remembered, so a recomputed forward has the same one. Differentiable in ``x``.

    Args:
        key: the key to draw from; a fresh one for each place that drops.
        rate: the probability of dropping an element, in [0, 1).
        x: a floating tensor of any shape.
        offset: the index of the first element of ``x`` in the flattened whole.

    Returns:
        A tensor like ``x``; ``x`` itself where ``rate`` is 0.

    Raises:
        TypeError: ``key`` is not a key, or ``x`` is not floating.
        ValueError: ``rate`` is outside [0, 1), or ``offset`` is negative.

    Example:
        >>> import torch
        >>> from mtfunc import random
        >>> random.dropout(random.key(0), 0.5, torch.ones(4))
        tensor([0., 2., 0., 2.])
    """
    _check_key("dropout", key)
    if isinstance(rate, Tensor) or not isinstance(x, Tensor):
        raise TypeError(
            f"mt.random.dropout: got a rate that is a {type(rate).__name__} and an x that is a "
            f"{type(x).__name__}; expected dropout(key, rate, x), a number and then a tensor"
        )
    if not 0 <= rate < 1:
        raise ValueError(
            f"mt.random.dropout: expected a rate in [0, 1), got {rate}; the rate is the "
            "probability of dropping an element, not of keeping it"
        )
    if not x.is_floating_point():
        raise TypeError(
            f"mt.random.dropout: expected a floating x, got {x.dtype}; convert it first"
        )
    if rate == 0:
        return x
    keep = bernoulli(key, 1 - rate, x.shape, offset=offset, device=x.device)
    return torch.where(keep, x, 0).mul_(1 / (1 - rate))


def _draw(
    where: str,
    key: Key,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str | None,
    offset: int,
    numbers: Callable[[Tensor], Tensor],
) -> Tensor:
    """Fills a tensor with ``numbers(bits)``, block by block; ``numbers`` may change its bits."""
    if offset < 0 or min(shape, default=0) < 0:
        raise ValueError(
            f"mt.random.{where}: expected sizes and an offset of at least 0, got shape "
            f"{tuple(shape)} and offset {offset}"
        )
    gamma = _mix(key ^ _GAMMA).bitwise_or_(1)
    size = math.prod(shape)
    out = key.new_empty((size,), dtype=dtype, device=device)
    block = _BLOCK if out.device.type == "cpu" else 64 * _BLOCK
    for start in range(0, size, block):
        stop = min(start + block, size)
        counter = torch.arange(offset + start + 1, offset + stop + 1, device=out.device)
        out[start:stop] = numbers(_mix(counter.mul(gamma).add_(key)))
    return out.view(tuple(shape))


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's ``mix64``, a bijection of 64 bits, in place; masks make the shifts logical."""
    x ^= (x >> 30).bitwise_and_(2**34 - 1)
    x *= 0xBF58476D1CE4E5B9 - 2**64
    x ^= (x >> 27).bitwise_and_(2**37 - 1)
    x *= 0x94D049BB133111EB - 2**64
    x ^= (x >> 31).bitwise_and_(2**33 - 1)
    return x


def _scaled(integers: Tensor, dtype: torch.dtype, exponent: int) -> Tensor:
    return integers.to(dtype).mul_(2.0**exponent)


def _below(high: float, dtype: torch.dtype) -> float:
    """The largest number of ``dtype`` below ``high``."""
    info = torch.finfo(dtype)
    mantissa, exponent = math.frexp(high or info.smallest_normal)
    step = math.ldexp(info.eps, exponent - (2 if mantissa == 0.5 else 1))
    step = max(step, info.smallest_normal * info.eps)
    return (math.ceil(high / step) - 1) * step


def _wide(where: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in."""
    if dtype not in _FLOATS:
        names = ", ".join(str(known) for known in _FLOATS)
        raise TypeError(f"mt.random.{where}: dtype: expected one of {names}, got {dtype}")
    return torch.float64 if dtype == torch.float64 else torch.float32


def _int64(where: str, name: str, number: int) -> int:
    """The signed integer that has the same 64 bits."""
    try:
        number = operator.index(number)
    except TypeError:
        raise TypeError(
            f"mt.random.{where}: {name}: expected an integer, got {type(number).__name__}"
        ) from None
    if not -(2**63) <= number < 2**64:
        raise ValueError(
            f"mt.random.{where}: {name}: expected an integer of 64 bits, got {number}; "
            "take it modulo 2**64"
        )
    return number - 2**64 if number >= 2**63 else number


def _digest(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"mtfunc").digest()
    return int.from_bytes(digest, "little", signed=True)


def _check_key(where: str, key: Key) -> None:
    expected = f"mt.random.{where}: key: expected an int64 tensor of shape () in host memory"
    mend = "mt.random.key(0) makes one"
    if not isinstance(key, Tensor):
        raise TypeError(f"{expected}, got {type(key).__name__}; {mend}")
    if key.dtype != torch.int64 or key.ndim or key.device.type not in ("cpu", "meta"):
        many = ", and mt.random.split's result iterates to some" if key.ndim == 1 else ""
        raise TypeError(
            f"{expected}, got {key.dtype} of shape {tuple(key.shape)} on {key.device}; {mend}{many}"
        )


_SEED, _SPLIT, _FOLD, _GAMMA = map(_digest, ("seed", "split", "fold_in", "gamma"))
"""Words that keep the uses of one key apart."""
