"""The JAX arm of bench.py: the same Llama by ``lax.scan``, ``jax.checkpoint`` and optax.

Shape suffixes are those of models/llama.py:

    B batch    T tokens    D width    H query heads    K key and value heads    C head width
    F feed-forward width   V vocabulary                N tokens of all rows
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file

from scripts._bench_child import Arm, Batch, make_batch

Params = dict[str, Any]


def versions() -> str:
    """The libraries and their versions."""
    return f"jax {jax.__version__}, optax {optax.__version__}"


def rms_norm(weight_D: jax.Array, x_BTD: jax.Array, eps: float) -> jax.Array:
    """Root mean square normalisation of the last axis."""
    square = jnp.mean(x_BTD * x_BTD, axis=-1, keepdims=True)
    return x_BTD * jax.lax.rsqrt(square + eps) * weight_D


def rotate(x_BTHC: jax.Array, cos_T1R: jax.Array, sin_T1R: jax.Array) -> jax.Array:
    """Turns the pairs ``(x[i], x[i + R])`` of each head."""
    a, b = jnp.split(x_BTHC, 2, axis=-1)
    return jnp.concatenate([a * cos_T1R - b * sin_T1R, b * cos_T1R + a * sin_T1R], axis=-1)


def block(config: dict[str, Any], p: Params, x_BTD: jax.Array) -> jax.Array:
    """One layer: attention, then the feed-forward network, each added to its input."""
    T, C = x_BTD.shape[1], config["width"] // config["heads"]
    # Constants of the trace, formed in float64 as models/common.py does.
    turn_R = config["theta"] ** (-np.arange(0, C, 2) / C)
    angle_T1R = np.arange(T)[:, None, None] * turn_R
    cos, sin = np.cos(angle_T1R).astype(np.float32), np.sin(angle_T1R).astype(np.float32)

    a = p["attention"]
    h_BTD = rms_norm(a["norm"], x_BTD, config["eps"])
    heads = (*x_BTD.shape[:2], -1, C)
    q_BTHC = rotate((h_BTD @ a["q"].T).reshape(heads), cos, sin)
    k_BTKC = rotate((h_BTD @ a["k"].T).reshape(heads), cos, sin)
    v_BTKC = (h_BTD @ a["v"].T).reshape(heads)
    y_BTHC = jax.nn.dot_product_attention(q_BTHC, k_BTKC, v_BTKC, is_causal=True)
    x_BTD = x_BTD + y_BTHC.reshape(x_BTD.shape) @ a["out"].T

    m = p["mlp"]
    h_BTD = rms_norm(m["norm"], x_BTD, config["eps"])
    h_BTF = jax.nn.silu(h_BTD @ m["gate"].T) * (h_BTD @ m["up"].T)
    return x_BTD + h_BTF @ m["down"].T


def loss_fn(config: dict[str, Any], params: Params, tokens: Any, labels: Any) -> jax.Array:
    """Mean cross entropy; every layer's forward is computed again in the backward pass."""

    def layer(x_BTD: jax.Array, p: Params) -> tuple[jax.Array, None]:
        # Inside a scan nothing could undo the recomputation, so its barriers are cost only.
        again = jax.checkpoint(lambda p, x: block(config, p, x), prevent_cse=False)
        return again(p, x_BTD), None

    x_BTD, _ = jax.lax.scan(layer, params["embed"]["weight"][tokens], params["layers"])
    head = params["embed" if config["tied"] else "head"]["weight"]
    logits_BTV = rms_norm(params["norm"]["weight"], x_BTD, config["eps"]) @ head.T
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, labels).mean()


def prepare(setup: dict[str, Any]) -> dict[str, Any]:
    """Traces and compiles the step for the shapes of ``setup``."""
    config, rule = setup["config"], setup["adamw"]
    if config["scaling"] is not None:
        raise ValueError("the jax arm has no rotary scaling; leave it out: --arms streamed,hooked")
    adamw = optax.adamw(
        rule["lr"], b1=rule["b1"], b2=rule["b2"], eps=rule["eps"], weight_decay=rule["decay"]
    )

    def step(state: Any, tokens: Any, labels: Any) -> Any:
        params, moments = state
        loss, grads = jax.value_and_grad(lambda p: loss_fn(config, p, tokens, labels))(params)
        updates, moments = adamw.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    shapes = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in read(setup).items()
    }
    params = nest(shapes)
    batch = make_batch(setup, 0)
    arguments = ((params, jax.eval_shape(adamw.init, params)), *narrow(batch))
    traced = jax.jit(step, donate_argnums=0).trace(*arguments)
    flops = count_dots(traced.jaxpr.jaxpr)
    return {"step": traced.lower().compile(), "flops": flops, "init": jax.jit(adamw.init)}


def build(setup: dict[str, Any], prepared: dict[str, Any]) -> Arm:
    """The arm, its parameters read and its moments allocated and touched."""
    params = nest({path: jnp.array(leaf) for path, leaf in read(setup).items()})
    state = jax.block_until_ready((params, prepared["init"](params)))
    del params

    def step(batch: Batch) -> float:
        nonlocal state
        state, loss = prepared["step"](state, *narrow(batch))
        jax.block_until_ready(state)
        return float(loss)

    def leaves() -> Iterable[np.ndarray]:
        for path in setup["paths"]:
            name, entry = place(path)
            leaf = lookup(state[0], name)
            # A view of the array itself would forbid its donation to the first step.
            yield np.asarray(jnp.copy(leaf) if entry is None else leaf[entry])

    return Arm(step=step, leaves=leaves, flops=lambda batch: prepared["flops"])


def narrow(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and labels as int32, jax's own default."""
    return batch["tokens"].astype(np.int32), batch["labels"].astype(np.int32)


def place(path: str) -> tuple[str, int | None]:
    """Where a leaf lies once layers are stacked: ``layers/3/mlp/up`` is entry 3 of one array."""
    names = path.split("/")
    if names[0] != "layers":
        return path, None
    return "/".join([names[0], *names[2:]]), int(names[1])


def read(setup: dict[str, Any]) -> dict[str, np.ndarray]:
    """The parameters by path, those of all layers stacked."""
    mapped, parts = load_file(setup["params"]), {}
    for path in setup["paths"]:
        name, entry = place(path)
        parts.setdefault((name, entry is not None), []).append(mapped[path])
    return {name: np.stack(leaves) if many else leaves[0] for (name, many), leaves in parts.items()}


def nest(flat: dict[str, Any]) -> Params:
    """A nested dict from one whose keys are paths."""
    tree: Params = {}
    for path, leaf in flat.items():
        *names, last = path.split("/")
        inner = tree
        for name in names:
            inner = inner.setdefault(name, {})
        inner[last] = leaf
    return tree


def lookup(tree: Params, path: str) -> Any:
    """The subtree at a path."""
    for name in path.split("/"):
        tree = tree[name]
    return tree


def count_dots(jaxpr: Any) -> int:
    """Floating-point operations of the matrix products in a jaxpr, scans counted by length."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * prod(equation.outvars[0].aval.shape) * prod(shape[i] for i in contracted)
        inner = sum(
            count_dots(getattr(value, "jaxpr", value))
            for value in equation.params.values()
            if hasattr(getattr(value, "jaxpr", value), "eqns")
        )
        total += inner * equation.params.get("length", 1)
    return total
