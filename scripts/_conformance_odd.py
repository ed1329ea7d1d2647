"""Odd kinds of stage, that a library of gradients may get wrong: rows of the conformance matrix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts._conformance import B, D, Kind, T
from scripts._conformance_kinds import kinds_of

KINDS: list[Kind] = []
kind = kinds_of(KINDS)


@kind("Order and indices", "sort", w=(D, D))
def sorted_(p: Any, x: Tensor, batch: Any) -> Tensor:
    return (x @ p["w"]).sort(1, descending=True).values


@kind("Order and indices", "top-k, gather, scatter-add", w=(D, D))
def top_k(p: Any, x: Tensor, batch: Any) -> Tensor:
    where = (x @ p["w"]).topk(3, 1).indices
    return x.scatter_add(1, where, torch.tanh(x.gather(1, where)))


@kind("Order and indices", "`index_put` that accumulates, repeated indices", w=(D, D))
def index_put(p: Any, x: Tensor, batch: Any) -> Tensor:
    rows = torch.tensor([0, 1, 1, 0], device=x.device)
    columns = torch.tensor([2, 3, 3, 2], device=x.device)
    return x.index_put((rows, columns), (x @ p["w"])[:, :2].reshape(4, D), accumulate=True)


@kind("Order and indices", "`index_add`, `index_copy`, `index_fill`", w=(D, D))
def index_add(p: Any, x: Tensor, batch: Any) -> Tensor:
    where = torch.tensor([1, 4], device=x.device)
    y = x.index_add(1, where, (x @ p["w"])[:, :2])
    return y.index_copy(1, where + 1, torch.sin(x[:, :2])).index_fill(1, where[:1] - 1, 0.5)


@kind("Order and indices", "cumulative sum, product, maximum, logsumexp", w=(D,))
def cumulative(p: Any, x: Tensor, batch: Any) -> Tensor:
    y = x * p["w"]
    return y.cumsum(1) + y.cumprod(2) + y.cummax(1).values + y.logcumsumexp(2)


@kind("Order and indices", "a recurrence, token by token", a=(D,), w=(D, D))
def recurrence(p: Any, x: Tensor, batch: Any) -> Tensor:
    decay, state, out = torch.sigmoid(p["a"]), torch.zeros_like(x[:, 0]), []
    for token in (x @ p["w"]).unbind(1):
        state = decay * state + token
        out.append(state)
    return torch.stack(out, 1)


@kind("Order and indices", "shapes that depend on values", w=(D,))
def masked(p: Any, x: Tensor, batch: Any) -> Tensor:
    chosen = x[x > 0] * 2
    return torch.zeros_like(x).masked_scatter(x > 0, chosen) + x * p["w"]


@kind("Order and indices", "a Python branch on a value", w=(D, D))
def branch(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x @ p["w"] if x.sum() > 0 else torch.tanh(x @ p["w"])


@kind("Order and indices", "`item()`", w=(D, D))
def item(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x @ p["w"] / max(x.detach().abs().max().item(), 1.0)


@kind("Order and indices", "windows by `unfold`, `roll`, `flip`", w=(3,))
def windows(p: Any, x: Tensor, batch: Any) -> Tensor:
    return F.pad(x, (1, 1)).unfold(2, 3, 1) @ p["w"] + x.roll(1, 1) - x.flip(2)


@kind("Writing in place", "on a tensor that the stage made", w=(D, D))
def inplace(p: Any, x: Tensor, batch: Any) -> Tensor:
    y = x @ p["w"]
    return y.mul_(2).add_(x)


@kind("Writing in place", "through a view of one", w=(D,))
def through_view(p: Any, x: Tensor, batch: Any) -> Tensor:
    y = x * p["w"]
    y[:, 0] = 1.0
    y[:, 1:3] *= x[:, :2]
    y.view(B, T * D)[:, -3:].sin_()
    return y


@kind("Writing in place", "on the carry", w=(D,))
def on_the_carry(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x.mul_(2) * p["w"]


@kind("Writing in place", "on a parameter", w=(D,))
def on_a_parameter(p: Any, x: Tensor, batch: Any) -> Tensor:
    with torch.no_grad():
        p["w"].clamp_(-0.5, 0.5)
    return x * p["w"]


@kind("Writing in place", "on the batch", w=(D,))
def on_the_batch(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x * p["w"] + batch["x"].add_(1)


@kind("Complex numbers", "a filter in frequency", w=(T // 2 + 1, D))
def fft(p: Any, x: Tensor, batch: Any) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x, dim=1) * p["w"], n=T, dim=1)


@kind("Complex numbers", "rotary positions as complex products", w=(D, D))
def complex_rope(p: Any, x: Tensor, batch: Any) -> Tensor:
    angle = torch.arange(T, device=x.device, dtype=x.dtype)[:, None] / torch.arange(1, 5)
    turn = torch.polar(torch.ones_like(angle), angle)
    pairs = torch.view_as_complex((x @ p["w"]).reshape(B, T, D // 2, 2))
    return torch.view_as_real(pairs * turn).flatten(2)


@kind(
    "Complex numbers",
    "a complex parameter and a complex carry",
    w=torch.linspace(-1, 1, 2 * D).reshape(D, 2),
    enter=lambda x: torch.complex(x, x.flip(2)),
    leave=lambda z: z.real - z.imag,
)
def complex_carry(p: Any, z: Tensor, batch: Any) -> Tensor:
    return z * torch.view_as_complex(p["w"]) + z.conj() * 0.5


@kind("Linear algebra", "triangular solve, Cholesky", w=(D, D))
def solve(p: Any, x: Tensor, batch: Any) -> Tensor:
    lower = torch.linalg.cholesky(p["w"] @ p["w"].T + torch.eye(D, dtype=x.dtype, device=x.device))
    return torch.linalg.solve_triangular(lower, x.mT, upper=False).mT


@kind("Linear algebra", "QR, singular values", w=(D, D))
def decompositions(p: Any, x: Tensor, batch: Any) -> Tensor:
    q, r = torch.linalg.qr(p["w"])
    return x @ q + torch.linalg.svdvals(r)


@kind("Linear algebra", "matrix exponential, inverse", w=(D, D))
def exponential(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x @ torch.linalg.inv(torch.matrix_exp(p["w"] - p["w"].T))


@kind("Derivatives inside", "`torch.func.grad`", w=(D, D))
def func_grad(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x - torch.func.grad(lambda y: torch.tanh(y @ p["w"]).square().sum())(x)


@kind("Derivatives inside", "`torch.func.jvp`", w=(D, D))
def func_jvp(p: Any, x: Tensor, batch: Any) -> Tensor:
    out, along = torch.func.jvp(lambda y: torch.tanh(y @ p["w"]), (x,), (torch.ones_like(x),))
    return out + along


@kind("Derivatives inside", "`torch.func.vmap`", w=(D, D))
def func_vmap(p: Any, x: Tensor, batch: Any) -> Tensor:
    return torch.func.vmap(lambda row: torch.tanh(row @ p["w"]).softmax(0))(x)


@kind("Derivatives inside", "`vmap` over `torch.func.grad`: a gradient for each row", w=(D, D))
def each_row(p: Any, x: Tensor, batch: Any) -> Tensor:
    def energy(row: Tensor) -> Tensor:
        return (row @ p["w"]).logsumexp(-1).sum()

    return x - torch.func.vmap(torch.func.grad(energy))(x)


@kind("Derivatives inside", "`autograd.grad(create_graph=True)`", w=(D, D))
def create_graph(p: Any, x: Tensor, batch: Any) -> Tensor:
    with torch.enable_grad():
        y = x if x.requires_grad else x.detach().requires_grad_()
        energy = torch.tanh(y @ p["w"]).square().sum()
        (force,) = torch.autograd.grad(energy, y, create_graph=True)
    return x - force


@kind("Gradients cut", "`no_grad` around part of it", w=(D, D))
def no_grad(p: Any, x: Tensor, batch: Any) -> Tensor:
    with torch.no_grad():
        scale = (x @ p["w"]).abs().amax()
    return x / (1 + scale)


@kind("Gradients cut", "`no_grad` around all of it", w=(D, D))
def all_no_grad(p: Any, x: Tensor, batch: Any) -> Tensor:
    with torch.no_grad():
        return x @ p["w"]


@kind("Gradients cut", "`detach()` of a target", w=(D, D))
def stopped(p: Any, x: Tensor, batch: Any) -> Tensor:
    y = x @ p["w"]
    return y + (y.sign() - y).detach() + x


@kind("Gradients cut", "a parameter that is not used", w=(D, D), unused=(3,))
def unused(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x @ p["w"]


@kind("Gradients cut", "0-dim and zero-size parameters", scale=(), none=(0, D))
def zero_size(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x * p["scale"] + p["none"].sum()


@kind("Gradients cut", "a closed-over tensor that requires grad", w=(D, D))
def closed_over(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x @ p["w"] + OUTSIDE.to(x.dtype)


OUTSIDE = torch.ones(D, requires_grad=True)


@kind(
    "Carries",
    "a dict with integers and `None`",
    w=(D, D),
    enter=lambda x: {"x": x, "depth": torch.zeros((), dtype=torch.int64), "cache": None},
    leave=lambda carry: carry["x"] * carry["depth"],
)
def structured(p: Any, carry: Any, batch: Any) -> Any:
    return carry | {"x": torch.tanh(carry["x"] @ p["w"]), "depth": carry["depth"] + 1}


@kind(
    "Carries",
    "a leaf that nothing uses, infinite in its derivative",
    w=(D, D),
    enter=lambda x: {"x": x, "root": x * 0},
    leave=lambda carry: carry["x"],
)
def absent(p: Any, carry: Any, batch: Any) -> Any:
    return {"x": carry["x"] @ p["w"], "root": (carry["x"] * 0).sqrt()}


@kind(
    "Carries",
    "a residual that skips both stages",
    w=(D, D),
    enter=lambda x: (x, x.sin()),
    leave=lambda carry: carry[0] + carry[1],
)
def skipped(p: Any, carry: Any, batch: Any) -> Any:
    x, skip = carry
    return torch.tanh(x @ p["w"]), skip


@kind(
    "Carries",
    "one tensor in two places",
    w=(D, D),
    enter=lambda x: (x, x),
    leave=lambda carry: carry[0] * carry[1],
)
def twice(p: Any, carry: Any, batch: Any) -> Any:
    y = carry[0] @ p["w"] + carry[1]
    return y, y


@kind(
    "Carries",
    "expanded, with strides of 0",
    w=(D, D),
    enter=lambda x: x[:, :, None].expand(-1, -1, 3, -1),
    leave=lambda x: x.sum(2),
)
def expanded(p: Any, x: Tensor, batch: Any) -> Tensor:
    return torch.tanh(x.sum(2) @ p["w"])[:, :, None].expand(-1, -1, 3, -1)


@kind(
    "Carries",
    "transposed, with a gap in its memory",
    w=(D, D),
    enter=lambda x: x.transpose(0, 1)[::2],
    leave=lambda x: x,
)
def strided(p: Any, x: Tensor, batch: Any) -> Tensor:
    return torch.tanh(x @ p["w"]).transpose(0, 1).repeat(1, 2, 1)[:, ::2].transpose(0, 1)


@kind(
    "Carries",
    "a parameter handed on",
    w=(D, D),
    enter=lambda x: (x, x[0, 0]),
    leave=lambda c: c[0] * c[1],
)
def handed_on(p: Any, carry: Any, batch: Any) -> Any:
    return torch.tanh(carry[0] @ p["w"]) * carry[1], p["w"][0]


@kind(
    "Carries",
    "nested tensors",
    w=(D, D),
    enter=lambda x: torch.nested.nested_tensor([x[0], x[1, :3]]),
    leave=lambda x: x.to_padded_tensor(0.0),
)
def nested_carry(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x * 2


@kind(
    "Carries",
    "a sparse tensor",
    w=(D, D),
    enter=lambda x: x.to_sparse(),
    leave=lambda x: x.to_dense(),
)
def sparse_carry(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x * 2


@kind("Other layouts", "nested tensors (jagged) inside", w=(D, D))
def nested(p: Any, x: Tensor, batch: Any) -> Tensor:
    rows = torch.nested.as_nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
    return x + (rows @ p["w"]).values().sum()


@kind("Other layouts", "sparse matrix product", w=(T, T))
def sparse(p: Any, x: Tensor, batch: Any) -> Tensor:
    return torch.stack([torch.sparse.mm(p["w"].tril().to_sparse(), row) for row in x])


@kind("Other layouts", "fake quantization", w=(D, D))
def fake_quantized(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x @ torch.fake_quantize_per_tensor_affine(p["w"], 0.1, 0, -128, 127)


@kind("Other layouts", "float8 and back", w=(D, D))
def float8(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x @ p["w"].to(torch.float8_e4m3fn).to(x.dtype)


@kind("Other layouts", "`torch.autocast` inside", w=(D, D))
def autocast(p: Any, x: Tensor, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ p["w"]
    return y.to(x.dtype)


@kind("Losses", "cross entropy with smoothing and ignored labels", w=(D, 5))
def cross_entropy(p: Any, x: Tensor, batch: Any) -> Tensor:
    labels = batch["tokens"].masked_fill(batch["tokens"] == 0, -100)
    loss = F.cross_entropy(
        (x @ p["w"]).flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=0.1
    )
    return x + loss


@kind("Losses", "CTC", w=(D, 5))
def ctc(p: Any, x: Tensor, batch: Any) -> Tensor:
    scores = (x @ p["w"]).log_softmax(-1).transpose(0, 1)
    targets = torch.tensor([[1, 2], [3, 3]], device=x.device)
    return x + F.ctc_loss(scores, targets, (T, T), (2, 2))


@kind("Losses", "contrastive, with `cdist`", w=(D, D))
def contrastive(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x - torch.cdist(x, x @ p["w"]).softmax(-1) @ x
