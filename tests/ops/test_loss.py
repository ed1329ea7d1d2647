"""Cross entropy without the logits, against cross entropy with them."""

import pytest
import torch
import torch.nn.functional as F

import mtfunc as mt
from mtfunc import ops
from mtfunc.ops import reference
from tests import toys
from tests.ops.tools import ENGINES, Alive, agree, by_autograd, by_func, close, normal

N, D, V = 7, 5, 11
TILES = [1, 2, 3, 7, 100, None]


def case(rows=1, tokens=N, dtype=torch.float64):
    x, weight = normal(rows, tokens, D, dtype=dtype), normal(V, D, seed=1, dtype=dtype)
    labels = torch.randint(0, V, (rows, tokens), generator=torch.Generator().manual_seed(2))
    return x, weight, labels


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_equals_torch(tile, reduction, smoothing):
    x, weight, labels = case(rows=2)
    labels[0, 2] = labels[1, 5] = labels[1, 6] = -100

    def dense(x, weight):
        losses = F.cross_entropy(
            (x @ weight.T).flatten(0, 1),
            labels.flatten(),
            reduction=reduction,
            label_smoothing=smoothing,
        )
        return losses.view(labels.shape) if reduction == "none" else losses

    agree(
        lambda x, w: ops.linear_cross_entropy(
            x, w, labels, reduction=reduction, label_smoothing=smoothing, tile=tile
        ),
        dense,
        x,
        weight,
    )


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize(
    "options",
    [{"softcap": 2.0}, {"z_loss": 0.3}, {"softcap": 1.5, "z_loss": 0.2, "label_smoothing": 0.2}],
    ids=str,
)
def test_equals_the_reference(tile, reduction, options):
    x, weight, labels = case(rows=2)
    labels[0, :3] = 4
    options = options | {"reduction": reduction, "ignore_index": 4}
    factors = normal(2, N, seed=3).abs()

    def tiled(x, w, f):
        return ops.linear_cross_entropy(x, w, labels, weights=f, tile=tile, **options)

    def dense(x, w, f):
        return reference.linear_cross_entropy(x, w, labels, weights=f, **options)

    agree(tiled, dense, x, weight, factors)


def test_gradcheck():
    x, weight, labels = case()
    assert torch.autograd.gradcheck(
        lambda x, w: ops.linear_cross_entropy(x, w, labels, softcap=3.0, z_loss=0.1, tile=2),
        (x.requires_grad_(), weight.requires_grad_()),
    )


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_all_labels_of_one_tile_ignored(engine):
    x, weight, labels = case()
    labels[0, 2:4] = -100

    def run(rows, tile):
        chosen = labels[:, rows]
        return engine(
            lambda x, w: ops.linear_cross_entropy(
                x[:, rows], w, chosen, reduction="sum", tile=tile
            ),
            x,
            weight,
        )

    got = run(slice(None), 2)
    others = run(torch.tensor([0, 1, 4, 5, 6]), 100)
    close(got, others, 1e-12)
    assert not got[1][0][0, 2:4].any()


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_all_labels_ignored(engine):
    x, weight, _ = case()
    labels = torch.full((1, N), -100)
    (total,), grads = engine(
        lambda x, w: ops.linear_cross_entropy(x, w, labels, reduction="sum", tile=2), x, weight
    )
    assert total == 0 and not any(grad.any() for grad in grads)
    assert ops.linear_cross_entropy(x, weight, labels).isnan()
    assert F.cross_entropy((x @ weight.T)[0], labels[0]).isnan()


def test_an_ignored_token_adds_nothing_though_its_logits_overflow():
    x, weight, labels = case()
    x[0, 3], labels[0, 3] = torch.finfo(torch.float64).max, -100
    (total,), (gx, gw) = by_func(
        lambda x, w: ops.linear_cross_entropy(x, w, labels, reduction="sum", tile=2), x, weight
    )
    assert total.isfinite() and not gx[0, 3].any() and gw.isfinite().all()


def test_labels_shifted_by_one_at_a_tiles_edge_would_show():
    """One label in the vocabulary's corner per token: each token's loss is its own."""
    x, weight, labels = case(rows=2)
    whole = F.cross_entropy((x @ weight.T).mT, labels, reduction="none")
    for tile in range(1, 2 * N + 1):
        got = ops.linear_cross_entropy(x, weight, labels, reduction="none", tile=tile)
        torch.testing.assert_close(got, whole)


def test_low_precision_accumulates_in_float32():
    x, weight, labels = case(tokens=4096, dtype=torch.bfloat16)
    wide = [leaf.float() for leaf in (x, weight)]
    _, (_, got) = by_autograd(
        lambda x, w: ops.linear_cross_entropy(x, w, labels, reduction="sum", tile=4),
        x,
        weight,
        cotangents=[torch.ones(())],
    )
    logits = (x @ weight.T).float().requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    (pulled,) = torch.autograd.grad(loss, logits)
    exact = pulled.flatten(0, 1).T @ wide[0].flatten(0, 1)
    assert got.dtype == torch.bfloat16
    assert (got.float() - exact).abs().max() < 2**-7 * exact.abs().max()
    loss = ops.linear_cross_entropy(x, weight, labels)
    assert loss.dtype == torch.float32


def test_more_than_two_to_the_31_logits():
    """2^20 words and 2,050 tokens; the last two tokens lie beyond 2^31 in the flat logits."""
    vocabulary, tokens = 2**20, 2050
    weight = torch.zeros(vocabulary, 1)
    weight[-1], weight[0] = 3.0, 1.0
    x = torch.linspace(-1, 1, tokens)[:, None]
    labels = torch.zeros(tokens, dtype=torch.int64)
    labels[-2:] = vocabulary - 1
    kept = torch.tensor([0, 1, 2047, 2048, 2049])
    losses = ops.linear_cross_entropy(x, weight, labels, reduction="none", tile=64)
    z = x.double()[kept, 0]
    lse = (z.exp() + (3 * z).exp() + vocabulary - 2).log()
    expected = lse - torch.where(labels[kept] == 0, z, 3 * z)
    torch.testing.assert_close(losses[kept].double(), expected, rtol=1e-5, atol=1e-5)

    some = torch.full_like(labels, -100)
    some[-3:] = labels[-3:]

    def total(x, w):
        return ops.linear_cross_entropy(x, w, some[-3:], reduction="sum", tile=2)

    _, (gx, gw) = by_autograd(total, x[-3:], weight, cotangents=[torch.ones(())])
    z = x.double()[-3:, 0]
    lse = (z.exp() + (3 * z).exp() + vocabulary - 2).log()
    p0, p1 = (z - lse).exp(), (3 * z - lse).exp()
    at0, at1 = torch.tensor([1.0, 0, 0]), torch.tensor([0, 1.0, 1])
    pulled = (p0 - at0) + 3 * (p1 - at1)
    torch.testing.assert_close(gx[:, 0].double(), pulled, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gw[0, 0].double(), ((p0 - at0) * z).sum(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gw[-1, 0].double(), ((p1 - at1) * z).sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0, "z_loss": 1e-4, "label_smoothing": 0.1}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_at_most_two_tiles_of_logits(engine, dtype, options):
    tokens, vocabulary, width, tile = 65_536, 151_936, 16, 1024
    x = torch.empty(1, tokens, width, dtype=dtype, device="meta")
    weight = torch.empty(vocabulary, width, dtype=dtype, device="meta")
    labels = torch.empty(1, tokens, dtype=torch.int64, device="meta")

    def loss(x, weight):
        return ops.linear_cross_entropy(x, weight, labels, reduction="sum", tile=tile, **options)

    seed = [torch.ones((), device="meta")]
    with Alive() as alive:
        engine(loss, x, weight, cotangents=seed)
    logits = 4 * tile * vocabulary
    inputs = 3 * (tokens + vocabulary) * width * 4 * 2 + 16 * 8 * tokens
    assert logits <= alive.peak < 2 * logits + inputs < 2.2 * logits


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"labels": torch.tensor([[1, 11, 0, 0, 0, 0, 0]])}, ValueError, "label 1 of 7"),
        ({"labels": torch.tensor([[1, 0, -1, 0, 0, 0, 0]])}, ValueError, "is -1; expected 0 to 10"),
        ({"labels": torch.zeros(1, 6, dtype=torch.int64)}, ValueError, "labels has shape"),
        ({"labels": torch.zeros(1, 7)}, TypeError, "labels is torch.float32"),
        ({"weight": torch.zeros(V, D)}, TypeError, "one floating dtype"),
        ({"weight": torch.zeros(D, V).double()}, ValueError, r"weight has shape \(5, 11\)"),
        ({"reduction": "avg"}, ValueError, "expected 'none', 'sum' or 'mean'"),
        ({"label_smoothing": 2.0}, ValueError, "label_smoothing is 2.0"),
        ({"softcap": 0.0}, ValueError, "softcap is 0.0"),
        ({"tile": 0}, ValueError, "tile is 0"),
        ({"weights": torch.ones(7)}, ValueError, "weights has shape"),
    ],
)
def test_errors(change, error, message):
    x, weight, labels = case()
    given = {"x": x, "weight": weight, "labels": labels} | change
    with pytest.raises(error, match=message):
        ops.linear_cross_entropy(given.pop("x"), given.pop("weight"), given.pop("labels"), **given)


def head(emb, x, batch):
    labels = batch["labels"]
    total = ops.linear_cross_entropy(x, emb["weight"], labels, reduction="sum", tile=3)
    return mt.Mean(total, (labels != -100).sum())


def mlp(p, x):
    h = F.layer_norm(x, x.shape[-1:], p["scale"])
    return x + F.silu(h @ p["up"]) @ p["down"]


def block(p, x, batch):
    return ops.tile(mlp, 2)(p, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "sim:0", "sim:3"])
def test_streamed_in_a_program(device, dtype):
    program = mt.chain(
        mt.stage(toys.embed, "embed"), mt.scan(block, "layers"), mt.stage(head, "embed")
    )
    params, batches = toys.lm_params(dtype), [toys.lm_batch(), toys.lm_batch(seed=1, ignored=4)]
    got = mt.value_and_grad(program, device=device)(params, batches)
    toys.assert_same(got, mt.reference.value_and_grad(program)(params, batches))
    plain = mt.reference.value_and_grad(toys.LM)(params, batches)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for path, leaf in toys.flat(plain).items():
        off = toys.flat(got)[path].float() - leaf.float()
        assert off.abs().max() <= tolerance * max(leaf.float().abs().max(), 1), path
