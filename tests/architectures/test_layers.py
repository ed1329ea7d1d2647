"""Layers of each architecture against their papers' equations, one token or head at a time."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import mtfunc as mt
from tests.architectures import (
    diffusion_transformer,
    gated_delta,
    hyper_connections,
    latent_attention,
    mixture_of_depths,
    state_space,
    universal_transformer,
)
from tests.architectures.test_architectures import build
from tests.conftest import TOLERANCE
from tests.toys import assert_same

TOL = TOLERANCE[torch.float64]


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def close(got, expected):
    torch.testing.assert_close(got, expected, atol=TOL, rtol=TOL)


def norm(x):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def attend(q_TC, k_SC, v_SC):
    """Causal attention of one head of one row, one query at a time."""
    out = []
    for t, q in enumerate(q_TC):
        weights = torch.softmax(k_SC[: t + 1] @ q / q.shape[-1] ** 0.5, 0)
        out.append(weights @ v_SC[: t + 1])
    return torch.stack(out)


def hidden(program, params, batch, key=None):
    """The carry before the loss."""
    return mt.forward(program[:-1])(params, batch, key)


@pytest.mark.parametrize("chunk", [1, 3, 4, 10])
def test_gated_delta_rule_is_its_recurrence(chunk):
    q, k, v = draw(3, 2, 3, 10, 5).unbind()
    k = F.normalize(k, dim=-1)
    log_a, b = -draw(2, 3, 10, seed=1).exp(), torch.sigmoid(draw(2, 3, 10, seed=2))
    state, outputs = torch.zeros(2, 3, 5, 5, dtype=torch.float64), []
    for t in range(10):
        a, write, key = (
            log_a[:, :, t, None, None].exp(),
            b[:, :, t, None, None],
            k[:, :, t, :, None],
        )
        state = a * (state - write * key @ (key.mT @ state)) + write * key @ v[:, :, t, None]
        outputs.append((state.mT @ q[:, :, t, :, None])[..., 0])
    close(gated_delta.delta_rule(q, k, v, log_a, b, chunk), torch.stack(outputs, 2))


@pytest.mark.parametrize("chunk", [1, 3, 12])
def test_state_space_scan_is_its_recurrence(chunk):
    u, log_a = draw(2, 12, 3, 5), -draw(2, 12, 3, seed=1).exp()
    b, c = draw(2, 2, 12, 4, seed=2).unbind()
    state, outputs = torch.zeros(2, 3, 4, 5, dtype=torch.float64), []
    for t in range(12):
        decayed = log_a[:, t, :, None, None].exp() * state
        state = decayed + b[:, t, None, :, None] * u[:, t, :, None]
        outputs.append((state.mT @ c[:, t, None, :, None])[..., 0])
    close(state_space.scan(u, log_a, b, c, chunk), torch.stack(outputs, 1))


@pytest.mark.parametrize("module", [gated_delta, state_space])
def test_convolutions_look_back_only(module):
    weight, x = draw(4, 1, 3), draw(2, 6, 4)
    padded = torch.cat([torch.zeros(2, 2, 4, dtype=torch.float64), x], 1)
    expected = sum(padded[:, j : j + 6] * weight[:, 0, j] for j in range(3))
    close(module.conv(weight, x), expected)


def test_latent_attention_needs_only_the_latents_and_one_rotary_key():
    """Keys and values are never made: their matrices move over to the query and the output."""
    _, params, _, _, _ = build("latent_attention")
    p, x, heads, C, R = params["layers"][0], draw(2, 7, 16), 4, 4, 2
    latent, q_latent = norm(x @ p["kv_down"]), norm(x @ p["q_down"])

    def rotated(pair, t):
        a, b = pair
        return torch.stack([a * math.cos(t) - b * math.sin(t), b * math.cos(t) + a * math.sin(t)])

    out = torch.zeros(2, 7, 16, dtype=torch.float64)
    for row in range(2):
        shared = torch.stack([rotated(x[row, t] @ p["k_rope"], t) for t in range(7)])
        for h in range(heads):
            own = slice(h * C, h * C + C)
            q = q_latent[row] @ p["q_up"][:, own] @ p["k_up"][:, own].T
            turned = q_latent[row] @ p["q_rope"][:, h * R : h * R + R]
            q_rope = torch.stack([rotated(turned[t], t) for t in range(7)])
            whole = torch.cat([q, q_rope], -1) * (q.shape[-1] + R) ** 0.5 / (C + R) ** 0.5
            mixed = attend(whole, torch.cat([latent[row], shared], -1), latent[row])
            out[row] += mixed @ p["v_up"][:, own] @ p["out"][own]
    close(latent_attention.attention(p, x, heads), out)


def test_layers_of_a_pair_attend_to_the_same_keys():
    program, params, batch, _, _ = build("cross_layer")
    close(hidden(program, params, batch)[0, 3], _cross_layer(params, batch)[3])


def _cross_layer(params, batch, H=4, K=2, C=4):
    x = params["embed"]["weight"][batch["tokens"][0]]
    for i, p in enumerate(params["layers"]):
        h = norm(x)
        if i % 2 == 0:
            keys, values = h @ p["k"], h @ p["v"]
        q, heads = h @ p["q"], []
        for head in range(H):
            group = slice(head * K // H * C, head * K // H * C + C)
            own = slice(head * C, head * C + C)
            heads.append(attend(q[:, own], keys[:, group], values[:, group]))
        x = x + torch.cat(heads, -1) @ p["out"]
        x = x + F.silu(norm(x) @ p["up"]) @ p["down"]
    return x


def test_hyper_connections_mix_as_their_equations_say():
    _, params, _, _, _ = build("hyper_connections")
    p, x = params["layers"][0], draw(1, 2, 3, 16)
    got = hyper_connections.hyper(p, x, None, layer=lambda _, h: 2 * h)
    for t in range(2):
        H, H_ = x[0, t], norm(x[0, t])
        B = p["write_scale"] * torch.tanh(H_ @ p["write_dynamic"]) + p["write"]
        A_m = p["read_scale"] * torch.tanh(H_ @ p["read_dynamic"]) + p["read"]
        A_r = p["read_scale"] * torch.tanh(H_ @ p["mix_dynamic"]) + p["mix"]
        close(got[0, t], torch.outer(B, 2 * norm(A_m @ H)) + A_r.T @ H)


def test_mixture_of_depths_works_on_the_chosen_tokens_alone():
    _, params, _, _, _ = build("mixture_of_depths")
    p, x = params["layers"][1], draw(2, 9, 16)
    got, aux = mixture_of_depths.routed(p, x, None, capacity=3)
    for row in range(2):
        scores = x[row] @ p["router"]
        chosen = [t for t in range(9) if (scores > scores[t]).sum() < 3]
        assert aux["chosen"][row].tolist() == chosen
        alone = mixture_of_depths.delta(p, x[row : row + 1, chosen])[0]
        expected = x[row].clone()
        for place, t in enumerate(chosen):
            expected[t] += scores[t] * alone[place]
        close(got[row], expected)
    rest = [t for t in range(9) if t not in aux["chosen"][1].tolist()]
    assert_same(got[1, rest], x[1, rest])


def test_a_diffusion_layer_is_shifted_scaled_and_gated_by_its_condition():
    _, params, _, _, _ = build("diffusion_transformer")
    p, x, condition = params["layers"][0], draw(2, 5, 16), draw(2, 16, seed=1)
    carry = {"x": x, "condition": condition}
    got = diffusion_transformer.block(p, carry, None)["x"]
    for row in range(2):
        shift, scale, gate, shift_, scale_, gate_ = (
            F.silu(condition[row]) @ p["modulation"][:, 16 * i : 16 * i + 16] for i in range(6)
        )
        h = F.layer_norm(x[row], (16,)) * (1 + scale) + shift
        y = x[row] + gate * diffusion_transformer.attention(p, h[None])[0]
        h = F.layer_norm(y, (16,)) * (1 + scale_) + shift_
        close(got[row], y + gate_ * (F.gelu(h @ p["up"], approximate="tanh") @ p["down"]))


def test_diffusion_mixes_image_and_noise_with_unit_power():
    _, params, batch, key, _ = build("diffusion_transformer")
    p = params["in"] | {"patch": torch.eye(4, 16, dtype=torch.float64)}
    carry = diffusion_transformer.noise(p, None, batch, key=key, patch=2)
    x = (carry["x"] - p["position"])[..., :4]
    for row in range(2):
        rest = []
        for patch in range(16):
            i, j = patch // 4 * 2, patch % 4 * 2
            pixels = batch["image"][row, i : i + 2, j : j + 2].flatten()
            rest.append(torch.stack([x[row, patch], pixels, carry["noise"][row, patch]], 1))
        mixed, pixels, noise = torch.cat(rest).unbind(1)
        both = torch.stack([pixels, noise], 1)
        solved = torch.linalg.lstsq(both, mixed[:, None]).solution[:, 0]
        close(both @ solved, mixed)
        close(solved.square().sum(), torch.ones((), dtype=torch.float64))


def test_the_universal_transformer_is_told_position_and_step():
    got = universal_transformer.coordinates(draw(1, 5, 16), 3)
    for i in range(5):
        for j in range(8):
            turn = 10_000.0 ** (-2 * j / 16)
            assert got[i, 2 * j] == pytest.approx(math.sin(i * turn) + math.sin(3 * turn), abs=1e-6)
            assert got[i, 2 * j + 1] == pytest.approx(
                math.cos(i * turn) + math.cos(3 * turn), abs=1e-6
            )
