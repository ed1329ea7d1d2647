"""One numerical setting for forward, recomputation and oracle; autocast is refused around them."""

from __future__ import annotations

import time
from dataclasses import fields, replace

import pytest
import torch

import mtfunc as mt
from mtfunc import numerics
from tests.toys import same

BATCH = {"x": torch.ones(2, 4)}


def params():
    return {"a": {"w": torch.eye(4)}, "layers": [{"w": torch.eye(4) * 2} for _ in range(2)]}


def linear(p, x, batch):
    return (batch["x"] if x is None else x) @ p["w"]


def total(x, batch):
    return x.sum()


def program_of(block=linear, **options):
    return mt.chain(mt.stage(linear, "a"), mt.scan(block, "layers", **options), mt.stage(total))


@pytest.fixture(autouse=True)
def restored():
    with numerics.recorded():
        yield


OTHER = {
    "default_dtype": torch.float64,
    "float32_matmul": "medium",
    "precision": "ieee",
    "cuda_matmul": "tf32",
    "cudnn_conv": "ieee",
    "cudnn_rnn": "ieee",
    "mkldnn_matmul": "bf16",
    "mkldnn_conv": "bf16",
    "mkldnn_rnn": "bf16",
    "bf16_reduction": (False, True),
    "fp16_reduction": (False, False),
    "fp16_accumulation": True,
    "sdpa_flash": False,
    "sdpa_efficient": False,
    "sdpa_math": False,
    "sdpa_cudnn": False,
    "sdpa_reduction": True,
    "deterministic": 1,
    "cudnn_deterministic": True,
    "cudnn_benchmark": True,
    "flush_denormal": True,
    "threads": 2,
}


def test_every_field_is_tried():
    assert list(OTHER) == [f.name for f in fields(numerics.Setting)]


@pytest.mark.parametrize("name", OTHER)
def test_each_setting_is_applied_read_and_put_back(name):
    before = numerics.current()
    assert getattr(before, name) != OTHER[name]
    wanted = replace(before, **{name: OTHER[name]})
    with numerics.recorded(wanted) as setting:
        assert setting is wanted
        assert getattr(numerics.current(), name) == OTHER[name]
        assert name in before.changes(numerics.current())
    assert numerics.current() == before


def test_a_setting_is_put_back_after_an_error_and_however_it_was_changed():
    before = numerics.current()
    with pytest.raises(ZeroDivisionError), numerics.recorded():
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # torch's two ways, mixed
        assert numerics.current().float32_matmul == "mixed"
        torch.set_default_dtype(torch.float64)
        raise ZeroDivisionError
    assert numerics.current() == before
    assert torch.get_float32_matmul_precision() == "highest"  # which torch refuses where mixed


def test_they_are_torchs():
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True)
    torch.set_flush_denormal(True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = numerics.current()
    assert (found.float32_matmul, found.cuda_matmul, found.deterministic) == ("high", "tf32", 2)
    assert (found.sdpa_math, found.sdpa_flash, found.sdpa_efficient) == (True, False, False)
    assert found.flush_denormal and torch.tensor(1e-300).double().mul(1e-10).item() == 0


def test_it_is_printable_and_a_record_of_another_kind_is_refused():
    assert "threads              1" in str(numerics.current())
    with (
        pytest.raises(TypeError, match=r"setting is a dict; expected what numerics.current\(\)"),
        numerics.recorded({"threads": 1}),
    ):
        pass


def run_all(program):
    """Every way to stream a program, by name."""
    state = mt.init(program, params(), mt.sgd(0.1))
    return {
        "a streamed value_and_grad": lambda: mt.value_and_grad(program)(params(), BATCH),
        "a streamed forward pass": lambda: mt.forward(program)(params(), BATCH),
        "a streamed training step": lambda: mt.train_step(program, mt.sgd(0.1))(state, BATCH),
        "mt.reference.value_and_grad": lambda: mt.reference.value_and_grad(program)(
            params(), BATCH
        ),
    }


@pytest.mark.parametrize("where", run_all(program_of()))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_around_a_step_is_refused(where, device, monkeypatch):
    call = run_all(program_of())[where]
    if device == "cpu":
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(
                numerics.NumericsError,
                match=rf"^{where}: torch.autocast\('cpu', dtype=torch.bfloat16\) is active around "
                r"it; expected none.*Call it outside.*\.to\(torch.bfloat16\)",
            ),
        ):
            call()
    else:  # torch turns the context off where there is no CUDA device
        torch.set_autocast_enabled("cuda", True)
        try:
            with pytest.raises(numerics.NumericsError, match=r"torch.autocast\('cuda'"):
                call()
        finally:
            torch.set_autocast_enabled("cuda", False)
    call()  # the state is not spent
    with torch.autocast("cpu", enabled=False):
        run_all(program_of())[where]()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_stage_that_changes_a_setting_is_named(device):
    def block(p, x, batch):
        torch.set_float32_matmul_precision("high")
        return x @ p["w"]

    program = program_of(block)
    for _ in range(2):
        with pytest.raises(
            numerics.NumericsError,
            match=r"^forward of 'layers/0': numerical settings were changed while it ran; "
            r"float32_matmul: expected highest, got high; .*set it before the call.*with block",
        ):
            mt.value_and_grad(program, device=device)(params(), BATCH)
        assert torch.get_float32_matmul_precision() == "highest"


def test_a_backward_that_changes_a_setting_is_named():
    class Loud(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            torch.backends.cuda.enable_flash_sdp(False)
            return grad

    program = program_of(lambda p, x, batch: Loud.apply(x @ p["w"]), vjp="autograd")
    with pytest.raises(numerics.NumericsError, match=r"^pullback of 'layers/1'.*sdpa_flash"):
        mt.value_and_grad(program)(params(), BATCH)
    assert torch.backends.cuda.flash_sdp_enabled()


def test_a_change_in_a_later_step_is_told_and_put_back():
    calls = []

    def block(p, x, batch):
        calls.append(0)
        if batch["late"].item() if not batch["late"].is_meta else False:
            torch.set_num_threads(2)
        return x @ p["w"]

    f = mt.value_and_grad(program_of(block))
    f(params(), {**BATCH, "late": torch.tensor(False)})
    with pytest.raises(numerics.NumericsError, match=r"^a streamed value_and_grad: .*threads"):
        f(params(), {**BATCH, "late": torch.tensor(True)})
    assert torch.get_num_threads() == 1


def test_a_setting_changed_before_an_error_is_put_back():
    def block(p, x, batch):
        torch.set_default_dtype(torch.float64)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        mt.value_and_grad(program_of(block))(params(), BATCH)
    assert torch.get_default_dtype() == torch.float32


def test_a_stage_may_choose_for_a_part_of_itself():
    def block(p, x, batch):
        q = (x @ p["w"]).view(1, 2, 4)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(q, q, q).view(2, 4)

    program = program_of(block)
    streamed = mt.value_and_grad(program, device="sim")(params(), BATCH)
    assert same(streamed, mt.reference.value_and_grad(program)(params(), BATCH))


def test_a_program_is_traced_again_under_another_default_dtype():
    def block(p, x, batch):
        return (x @ p["w"]).to(torch.zeros(()).dtype) + torch.zeros(4)

    program = mt.chain(mt.stage(linear, "a"), mt.stage(block, "b"), mt.stage(total))
    given = {"a": {"w": torch.eye(4)}, "b": {"w": torch.eye(4)}}
    f = mt.value_and_grad(program, device="sim")
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        found = f(given, BATCH)
        assert found[0].dtype == dtype
        assert same(found, mt.reference.value_and_grad(program)(given, BATCH))


@pytest.mark.parametrize("name", ["float32_matmul", "threads", "deterministic"])
def test_one_setting_gives_one_result(name):
    f = mt.value_and_grad(program_of())
    with numerics.recorded(replace(numerics.current(), **{name: OTHER[name]})) as setting:
        assert same(f(params(), BATCH), mt.reference.value_and_grad(program_of())(params(), BATCH))
    with numerics.recorded(setting):
        assert same(f(params(), BATCH), mt.reference.value_and_grad(program_of())(params(), BATCH))


def test_holding_costs_little():
    def once():
        start = time.perf_counter()
        with numerics.held("a step"):
            pass
        return time.perf_counter() - start

    # 40 µs on the machine of docs/bench.md; the least of many, since others share the cores.
    assert min(once() for _ in range(300)) < 200e-6
