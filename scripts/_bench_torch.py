"""The torch arms of bench.py: the stages of one model, trained in four ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import mtfunc as mt
from models import llama
from scripts._bench_child import Arm, Batch

# The counter knows every fused attention but the one that processors run.
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, *rest, out_shape, **options: sdpa_flop_count(q, k, v)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *rest, out_shape, **options: sdpa_backward_flop_count(grad, q, k, v)
    ),
}


def prepare(setup: dict[str, Any]) -> None:
    """Sets the number of threads; nothing is compiled ahead."""
    torch.set_num_threads(setup["threads"])


def versions() -> str:
    """The library and its version."""
    return f"torch {torch.__version__}"


def build(setup: dict[str, Any], prepared: None) -> Arm:
    """The arm named in ``setup``, its parameters read and its moments allocated and touched."""
    config = llama.Config(**setup["config"])
    program = llama.program(config)
    params = read(llama.spec(config), setup["params"])
    make = _streamed if setup["arm"] == "streamed" else _standard
    step, leaves = make(program, params, setup)

    def run(batch: Batch) -> float:
        return step({name: torch.from_numpy(array) for name, array in batch.items()})

    def flops(batch: Batch) -> int | None:
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
            run(batch)
        return counter.get_total_flops() or None

    return Arm(step=run, leaves=lambda: (t.detach().numpy() for t in leaves()), flops=flops)


def flatten(tree: Any, path: str = "") -> dict[str, Any]:
    """The leaves of a pytree of dicts and lists by path, ``layers/3/mlp/up``, in its order."""
    if not isinstance(tree, dict | list):
        return {path: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found: dict[str, Any] = {}
    for name, child in items:
        found |= flatten(child, f"{path}/{name}" if path else str(name))
    return found


def read(spec: Any, file: str) -> Any:
    """The parameters in ``file``, in the structure of ``spec``, in memory of their own."""
    mapped = load_file(file)

    def fill(tree: Any, path: str) -> Any:
        if isinstance(tree, dict):
            return {name: fill(child, f"{path}{name}/") for name, child in tree.items()}
        if isinstance(tree, list):
            return [fill(child, f"{path}{i}/") for i, child in enumerate(tree)]
        return mapped[path[:-1]].clone()

    return fill(spec, "")


Built = tuple[Callable[[dict[str, Tensor]], float], Callable[[], Iterable[Tensor]]]


def _streamed(program: mt.Program, params: Any, setup: dict[str, Any]) -> Built:
    rule = setup["adamw"]
    adamw = mt.adamw(
        rule["lr"], b1=rule["b1"], b2=rule["b2"], eps=rule["eps"], weight_decay=rule["decay"]
    )
    state = mt.init(program, params, adamw)
    config = mt.StreamConfig(residuals=setup["residuals"])
    train = mt.train_step(program, adamw, device="cpu", config=config)
    for leaf in flatten({"params": state.params, "moments": state.opt_state}).values():
        if leaf is not None:
            leaf.add_(0)  # memory that was only promised would be charged to the first step

    def step(batch: dict[str, Tensor]) -> float:
        nonlocal state
        state, metrics = train(state, [batch])
        _ = state.params  # reading them completes whatever is still under way
        return metrics["loss"].item()

    return step, lambda: flatten(state.params).values()


def _standard(program: mt.Program, params: Any, setup: dict[str, Any]) -> Built:
    leaves = [leaf.requires_grad_() for leaf in flatten(params).values()]
    stages = [
        (stage, [lookup(params, key) for key in stage.keys]) for stage in program.stages(params)
    ]

    def forward(batch: dict[str, Tensor]) -> Tensor:
        carry: Any = None
        for stage, subtrees in stages:
            arguments = (subtrees, carry, batch, None, 0)
            if setup["arm"] != "plain" and stage.scan is not None:
                # No stage here draws numbers; saving the generator would be cost without use.
                carry, _ = checkpoint(
                    stage.apply, *arguments, use_reentrant=False, preserve_rng_state=False
                )
            else:
                carry, _ = stage.apply(*arguments)
        return carry.value()

    update = (_update_in_hooks if setup["arm"] == "hooked" else _update_after)(leaves, setup)

    def step(batch: dict[str, Tensor]) -> float:
        loss = forward(batch)
        loss.backward()
        update()
        return loss.item()

    return step, lambda: leaves


def lookup(params: Any, key: str) -> Any:
    """The subtree at a path."""
    for name in key.split("/"):
        params = params[int(name) if isinstance(params, list) else name]
    return params


def adamw(leaves: list[Tensor], setup: dict[str, Any]) -> AdamW:
    """Fused AdamW whose moments are there from the start, not from the first step on."""
    rule = setup["adamw"]
    optimizer = AdamW(
        leaves,
        lr=rule["lr"],
        betas=(rule["b1"], rule["b2"]),
        eps=rule["eps"],
        weight_decay=rule["decay"],
        fused=True,
    )
    for leaf in leaves:
        optimizer.state[leaf] = {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(leaf, requires_grad=False).add_(0),
            "exp_avg_sq": torch.zeros_like(leaf, requires_grad=False).add_(0),
        }
    return optimizer


def _update_after(leaves: list[Tensor], setup: dict[str, Any]) -> Callable[[], None]:
    optimizer = adamw(leaves, setup)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def _update_in_hooks(leaves: list[Tensor], setup: dict[str, Any]) -> Callable[[], None]:
    def attach(leaf: Tensor) -> None:
        optimizer = adamw([leaf], setup)

        def hook(_: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        leaf.register_post_accumulate_grad_hook(hook)

    for leaf in leaves:
        attach(leaf)
    return lambda: None
