"""What flows between the stages of each architecture, against the plainest way to write it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import mtfunc as mt
from tests.architectures import (
    diffusion_transformer,
    hyper_connections,
    lora,
    multi_token,
    unet,
    universal_transformer,
)
from tests.architectures.test_architectures import build
from tests.conftest import TOLERANCE
from tests.toys import assert_same, clone, flat

TOL = TOLERANCE[torch.float64]


def close(got, expected):
    torch.testing.assert_close(got, expected, atol=TOL, rtol=TOL)


def norm(x):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def hidden(program, params, batch, key=None):
    """The carry before the loss."""
    return mt.forward(program[:-1])(params, batch, key)


def test_hyper_connections_without_their_dynamic_part_are_residual_ones():
    program, params, batch, _, _ = build("hyper_connections")
    assert not torch.allclose(
        hidden(program, params, batch)[:, :, 0], hidden(program, params, batch)[:, :, 1]
    )
    for p in params["layers"]:
        p["read_scale"].zero_(), p["write_scale"].zero_()
    x = params["embed"]["weight"][batch["tokens"]]
    for i, p in enumerate(params["layers"]):
        layer = hyper_connections.mlp if i % 2 else hyper_connections.attention
        x = x + layer(p, norm(x))
    for stream in hidden(program, params, batch).unbind(2):
        close(stream, x)


def test_the_gradient_of_the_repeated_layer_is_the_sum_over_its_repetitions():
    program, params, batch, _, _ = build("universal_transformer")
    _, grads = mt.value_and_grad(program)(params, batch)
    apart = {"embed": params["embed"], "steps": [clone(params["shared"]) for _ in range(4)]}
    untied = mt.chain(
        mt.stage(universal_transformer.embed, "embed"),
        *(
            mt.stage(universal_transformer.step, f"steps/{t - 1}", static={"number": t})
            for t in range(1, 5)
        ),
        mt.stage(universal_transformer.loss, "embed"),
    )
    _, each = mt.value_and_grad(untied)(apart, batch)
    for name, grad in grads["shared"].items():
        close(grad, sum(entry[name] for entry in each["steps"]))


def test_unet_is_its_figure():
    program, params, batch, _, _ = build("unet")
    x = unet.twice(params["start"], batch["image"])
    seen = []
    for p in params["down"]:
        seen.append(x)
        x = unet.twice(p, F.max_pool2d(x, 2))
    for p in params["up"]:
        x = F.conv_transpose2d(x, p["expand"], stride=2)
        x = unet.twice(p, torch.cat([seen.pop(), x], 1))
    assert_same(hidden(program, params, batch), (x,))


def test_what_skips_levels_is_copied_out_once():
    program, params, batch, _, _ = build("unet")
    config = mt.StreamConfig(slots=1, grad_slots=1, carries="host")
    schedule = mt.schedule(program, params, batch, config)
    saved = [b.name for op in schedule.operations if op.kind == "save" for b in op.reads["source"]]
    assert len(saved) == len(set(saved)) and len(saved) >= 3


def test_padding_of_the_source_changes_nothing():
    program, params, batch, _, _ = build("encoder_decoder")
    first = {name: leaf[:1] for name, leaf in batch.items()}
    _, whole = hidden(program, params, first)
    _, short = hidden(program, params, first | {"source": first["source"][:, :7]})
    close(short, whole)
    loss, _ = mt.value_and_grad(program)(params, batch)
    logits = hidden(program, params, batch)[1] @ params["embed"]["weight"].T
    labels = batch["labels"]
    each = [
        -logits[b, t].log_softmax(-1)[labels[b, t]]
        for b in range(2)
        for t in range(labels.shape[1])
        if labels[b, t] != 0
    ]
    close(loss, torch.stack(each).mean())


def test_a_decoder_sees_no_later_target_and_all_of_the_source():
    program, params, batch, _, _ = build("encoder_decoder")
    _, before = hidden(program, params, batch)
    target = batch["target"].clone()
    target[0, 6] = target[0, 6] % 28 + 1
    _, after = hidden(program, params, batch | {"target": target})
    assert_same(after[:, :6], before[:, :6])
    assert not torch.equal(after[0, 6], before[0, 6])
    source = batch["source"].clone()
    source[0, 6] = source[0, 6] % 28 + 1
    _, after = hidden(program, params, batch | {"source": source})
    assert (after[0] != before[0]).any(-1).all() and torch.equal(after[1], before[1])


def test_a_diffusion_transformer_that_starts_at_zero_passes_everything_on():
    program, params, batch, key = diffusion_transformer.make(zero=0.0)
    start = mt.forward(program[:1])(params, batch, key)
    assert_same(hidden(program, params, batch, key), start)
    loss, _ = mt.value_and_grad(program)(params, batch, key)
    guess = F.layer_norm(start["x"], (16,)) @ params["out"]["out"]
    assert_same(loss, F.mse_loss(guess, start["noise"], reduction="sum") / guess.numel())


def test_merged_adapters_do_the_same():
    program, params, batch, _, _ = build("lora")
    merged = clone(params)
    for layer in merged["layers"]:
        for p in layer.values():
            p["W"] = lora.merge(p, 4.0)
            p["B"].zero_()
    close(hidden(program, merged, batch), hidden(program, params, batch))


def test_adapters_learn_and_the_rest_is_frozen():
    """By the chain rule the gradients of A and B are projections of the frozen matrix's."""
    program, params, batch, _, trainable = build("lora")
    _, grads = mt.value_and_grad(program, trainable=trainable)(params, batch)
    assert {path.rsplit("/", 1)[-1] for path in flat(grads)} == {"A", "B"}
    _, full = mt.value_and_grad(program)(params, batch)
    for layer, own, whole in zip(params["layers"], grads["layers"], full["layers"]):
        for name, p in layer.items():
            close(own[name]["A"], 2.0 * whole[name]["W"] @ p["B"].T)
            close(own[name]["B"], 2.0 * p["A"].T @ whole[name]["W"])


def test_each_head_predicts_one_token_further_on():
    program, params, batch, _, _ = build("multi_token")
    (loss, aux), _ = mt.value_and_grad(program, has_aux=True)(params, batch)
    x = mt.forward(program[:2])(params, batch)
    losses = []
    for ahead, p in enumerate(params["heads"]):
        logits = norm(multi_token.block(p, x, batch)) @ params["embed"]["weight"].T
        own = [
            -logits[b, t].log_softmax(-1)[batch["labels"][b, t + ahead]]
            for b in range(2)
            for t in range(10)
        ]
        losses.append(torch.stack(own).mean())
    close(aux["heads"], torch.stack(losses))
    close(loss, torch.stack(losses).sum())
