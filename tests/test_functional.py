"""Modules as pure functions: against the modules' own autograd gradients, to the last bit."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import mtfunc as mt
from mtfunc.functional import functional
from mtfunc.testing import check
from tests.toys import assert_same, clone, flat

WIDTH, VOCAB = 8, 11


class Block(nn.Module):
    """Pre-norm attention and a feed-forward part, with a mask as a buffer and a list of heads."""

    def __init__(self, window: int = 3):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))
        self.mix = nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.gain = nn.Parameter(torch.tensor(0.7))
        distance = torch.arange(16)[:, None] - torch.arange(16)
        self.register_buffer("mask", (distance >= 0) & (distance < window), persistent=False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x, *, shift=0.0):
        h = self.norm(x)
        mask = self.mask[: x.shape[1], : x.shape[1]]
        scores = (h @ h.mT * self.scale).masked_fill(~mask, -1e4)
        value = torch.cat([head(h) for head in self.heads], -1)
        return x + self.gain * self.mix(scores.softmax(-1) @ value) + shift


class Model(nn.Module):
    """A language model with a tied head."""

    def __init__(self, depth: int = 3):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make(dtype=torch.float32, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Model().to(dtype)


def batch_of(seed=0, rows=2):
    g = torch.Generator().manual_seed(seed)
    data = torch.randint(0, VOCAB, (rows, 6), generator=g)
    return {"tokens": data[:, :-1].clone(), "labels": data[:, 1:].clone()}


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def program_of(model):
    """The stages of a model: its parts as functions, bound to the keys of its parameters."""
    embed, _ = functional(model.embed)
    block, _ = functional(model.layers[0])
    norm, _ = functional(model.norm)
    head, _ = functional(model.head)

    def end(p_norm, p_embed, x, batch):
        return loss_of(head(p_embed, norm(p_norm, x)), batch["labels"])

    return mt.chain(
        mt.stage(lambda p, carry, batch: embed(p, batch["tokens"]), "embed", name="embed"),
        mt.scan(lambda p, x, batch: block(p, x), "layers"),
        mt.stage(end, "norm", "embed"),
    )


def own_gradients(model, batch):
    """Loss and gradients by dotted name, as the module itself computes them."""
    loss = loss_of(model(batch["tokens"]), batch["labels"])
    grads = torch.autograd.grad(loss, [leaf for _, leaf in model.named_parameters()])
    return loss.detach(), dict(zip((name for name, _ in model.named_parameters()), grads))


def dotted(tree):
    return {path.strip("/").replace("/", "."): leaf for path, leaf in flat(tree).items()}


def test_parameters_are_nested_by_dots_with_lists_for_numbers():
    model = make()
    _, params = functional(model)
    assert sorted(params) == ["embed", "layers", "norm"], "the tied head has no entry of its own"
    assert isinstance(params["layers"], list) and len(params["layers"]) == 3
    layer = params["layers"][0]
    assert [sorted(head) for head in layer["heads"]] == [["weight"], ["weight"]]
    assert layer["mix"][0] is None and sorted(layer["mix"][1]) == ["bias", "weight"]
    assert layer["gain"].shape == ()
    assert list(dotted(params)) == [name for name, _ in model.named_parameters()]
    for name, leaf in dotted(params).items():
        original = model.get_parameter(name)
        assert type(leaf) is torch.Tensor and not leaf.requires_grad
        assert leaf.data_ptr() == original.data_ptr(), "no copy"


@pytest.mark.parametrize(
    "module, expected",
    [
        (nn.Linear(2, 3), {"weight": (3, 2), "bias": (3,)}),
        (nn.ReLU(), {}),
        (nn.Sequential(nn.ReLU(), nn.Linear(2, 1, bias=False)), [None, {"weight": (1, 2)}]),
        (nn.ParameterList([torch.ones(2), torch.ones(3)]), [(2,), (3,)]),
        (nn.ParameterDict({"0": torch.ones(2), "a": torch.ones(3)}), {"0": (2,), "a": (3,)}),
        (nn.ModuleDict({"1": nn.Linear(1, 1, bias=False)}), {"1": {"weight": (1, 1)}}),
    ],
)
def test_structures(module, expected):
    _, params = functional(module)
    assert torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: tuple(x.shape), params) == (
        expected
    )


MODULES = {
    "block": (Block, (2, 5, WIDTH)),
    "lstm": (lambda: nn.Sequential(nn.LSTM(WIDTH, 4, 2, bidirectional=True)), (2, 5, WIDTH)),
    # One row, since torch multiplies strided rows otherwise where weights require grad.
    "attention": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True).eval(),
        (1, 5, WIDTH),
    ),
    "norm in eval mode": (lambda: nn.BatchNorm1d(5).eval(), (2, 5, WIDTH)),
    "norm without statistics": (lambda: nn.BatchNorm1d(5, track_running_stats=False), (2, 5, 8)),
    "weight norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3)),
        (2, 5, WIDTH),
    ),
    "convolution": (lambda: nn.Conv1d(5, 3, 3), (2, 5, WIDTH)),
    "shared": (lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH), nn.GELU()] * 2), (2, 5, WIDTH)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_streamed_gradients_are_the_modules_own(name, dtype, device):
    make_module, shape = MODULES[name]
    torch.manual_seed(0)
    module = make_module().to(dtype)
    fn, params = functional(module)
    x = torch.randn(*shape).to(dtype)

    def total(out):
        return (out[0] if isinstance(out, tuple) else out).square().sum()

    expected = total(module(x))
    grads = torch.autograd.grad(expected, list(module.parameters()))
    program = mt.chain(
        mt.stage(lambda p, carry, x: fn(p, x), "m", name="m"),
        mt.stage(lambda out, x: total(out), name="end"),
    )
    loss, found = mt.value_and_grad(program, device=device)({"m": params}, x)
    assert_same(loss, expected.detach())
    assert_same(dotted(found["m"]), dict(zip((n for n, _ in module.named_parameters()), grads)))
    # Kernels are chosen by what requires grad.
    learning = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda leaf: leaf.detach().requires_grad_(), params
    )
    assert_same(total(fn(learning, x)).detach(), expected.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "sim:1", "sim:2"])
@pytest.mark.parametrize("carries", ["device", "host"])
def test_a_stack_of_blocks_as_a_scan(dtype, device, carries):
    model, batch = make(dtype), batch_of()
    _, params = functional(model)
    config = mt.StreamConfig(carries=carries)
    loss, grads = mt.value_and_grad(program_of(model), device=device, config=config)(params, batch)
    expected, own = own_gradients(model, batch)
    assert_same(loss, expected)
    assert_same(dotted(grads), own)


def test_blocks_with_constants_of_their_own():
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(window) for window in (1, 2, 4))
    fns = [functional(block)[0] for block in blocks]
    program = mt.chain(
        mt.stage(lambda carry, batch: batch.clone(), name="first"),
        mt.scan([lambda p, x, batch, fn=fn: fn(p, x) for fn in fns], "layers"),
        mt.stage(lambda x, batch: x.square().sum(), name="end"),
    )
    x = torch.randn(2, 5, WIDTH)
    loss, grads = mt.value_and_grad(program, device="sim")({"layers": functional(blocks)[1]}, x)
    y = x
    for block in blocks:
        y = block(y)
    expected = y.square().sum()
    own = torch.autograd.grad(expected, list(blocks.parameters()))
    assert_same(loss, expected.detach())
    assert_same(list(flat(grads).values()), list(own))


def test_training_and_back_into_the_module():
    model, twin = make(), make()
    fn, params = functional(model)
    program, optimizer = program_of(model), mt.adamw(1e-2, weight_decay=0.1)
    state, step = mt.init(program, params, optimizer), mt.train_step(program, optimizer)
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for number in range(3):
        state, metrics = step(state, batch_of(number))
        batch = batch_of(number)
        loss = loss_of(twin(batch["tokens"]), batch["labels"])
        other.zero_grad()
        loss.backward()
        other.step()
        assert_same(metrics["loss"], loss.detach())
    assert_same(dict(twin.state_dict()), fn.state_dict(state.params))
    assert_same(dict(model.state_dict()), dict(make().state_dict()), "the module stays as it was")
    model.load_state_dict(fn.state_dict(state.params))
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))
    tokens = batch_of()["tokens"]
    assert_same(model(tokens).detach(), fn(state.params, tokens))


def test_the_check_and_a_schedule_on_meta_take_such_programs():
    model = make()
    _, params = functional(model)
    program = program_of(model)
    assert not check(program, params, batch_of(), seeds=2).warnings
    with torch.device("meta"):
        _, metas = functional(Model())
    assert all(leaf.is_meta for leaf in flat(metas).values())
    mt.schedule(program, metas, batch_of()).verify()
    fn, _ = functional(model.layers[0])
    assert fn(metas["layers"][0], torch.empty(2, 5, WIDTH, device="meta")).is_meta


def test_keyword_arguments_transforms_and_the_order_of_entries():
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 5, WIDTH)
    fn, params = functional(block)
    assert torch.equal(fn(params, x, shift=1.0), block(x, shift=1.0))
    turned = dict(reversed(params.items()))
    assert torch.equal(fn(turned, x), block(x))
    doubled = torch.func.vmap(fn, (None, 0))(params, torch.stack([x, x + 1]))
    assert torch.allclose(doubled[1], block(x + 1), atol=1e-6)
    assert repr(fn) == "Functional(Block, 7 leaves)" and fn.__name__ == "Block"


def test_nothing_holds_the_parameters_and_nothing_reaches_the_function_later():
    model = make()
    fn, params = functional(model)
    tokens = batch_of()["tokens"]
    before = fn(params, tokens)
    with torch.no_grad():
        for layer in model.layers:
            layer.scale.zero_()
            layer.mask.zero_()
    model.eval()
    assert torch.equal(fn(params, tokens), before)
    held = StorageWeakRef(model.embed.weight.untyped_storage())
    del model, params, layer
    gc.collect()
    assert held.expired(), "the function holds none of the parameters' memory"


def test_buffers_keep_their_dtype_under_parameters_of_another():
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 5, WIDTH)
    fn, params = functional(block)
    low = {path: leaf.bfloat16() for path, leaf in dotted(params).items()}
    expected = torch.func.functional_call(block, low, x.bfloat16())
    cast = torch.utils._pytree.tree_map_only(torch.Tensor, lambda p: p.bfloat16(), params)
    assert_same(fn(cast, x.bfloat16()), expected.detach())


def test_inference_mode_and_threads():
    model = make()
    fn, params = functional(model)
    other = clone(params)
    other["embed"]["weight"].mul_(2)
    tokens = batch_of()["tokens"]
    with torch.inference_mode():
        expected = [fn(params, tokens).clone(), fn(other, tokens).clone()]
    wrong = []

    def work(which):
        for _ in range(50):
            if not torch.equal(fn([params, other][which], tokens), expected[which]):
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Counts(nn.Module):
    """Counts its calls in a buffer, in one of two ways, or draws, or fails."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x, harm=True):
        if not harm:
            return x * self.weight + self.seen
        if self.how == "in place":
            self.seen.add_(1)
        elif self.how == "assign":
            self.seen = self.seen + 1
        elif self.how == "fail":
            self.seen.add_(1)
            raise RuntimeError("of its own")
        return x * self.weight


@pytest.mark.parametrize("how", ["in place", "assign", "fail"])
def test_changes_of_buffers_are_refused_and_leave_everything_as_it_was(how):
    module = Counts(how)
    fn, params = functional(module)
    message = r"functional Counts: the module changes its buffers 'seen'; expected a pure.*as aux"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            fn(params, torch.ones(2))
    with torch.inference_mode(), pytest.raises(ValueError, match=message):
        fn(params, torch.ones(2))
    program = mt.chain(mt.stage(lambda p, carry, x: fn(p, x).sum(), "m", name="m"))
    with pytest.raises(ValueError, match=message):
        mt.value_and_grad(program)({"m": params}, torch.ones(2))
    assert torch.equal(fn(params, torch.ones(2), harm=False), torch.ones(2))
    assert torch.equal(module.seen, torch.zeros(2))
    assert torch.equal(fn.state_dict(params)["seen"], torch.zeros(2))


def dropped(module):
    return nn.Sequential(nn.Identity(), module)


@pytest.mark.parametrize(
    "module, message",
    [
        (dropped(nn.Dropout(0.1)), r"'1' \(Dropout\) draws from.*rng=True and mt.random.dropout"),
        (dropped(nn.AlphaDropout(0.1)), r"'1' \(AlphaDropout\) draws"),
        (dropped(nn.MultiheadAttention(4, 2, 0.1)), r"'1' \(MultiheadAttention\) draws"),
        (dropped(nn.LSTM(4, 4, 2, dropout=0.1)), r"'1' \(LSTM\) draws"),
        (dropped(nn.RReLU()), r"'1' \(RReLU\) draws"),
        (nn.BatchNorm2d(3), r"'the module' \(BatchNorm2d\) counts running statistics.*eval\(\)"),
        (nn.InstanceNorm1d(3, track_running_stats=True), r"\(InstanceNorm1d\) counts running"),
        (nn.LazyLinear(3), r"\(LazyLinear\): parameter 'weight' is not initialized.*Run the"),
        (nn.ModuleDict({"a/b": nn.ReLU()}), r"name 'a/b'; expected one without '/'.*Rename it"),
    ],
)
def test_modules_that_are_refused(module, message):
    with pytest.raises(ValueError, match=message):
        functional(module)


def test_modes_in_which_they_are_taken():
    for module in (nn.Dropout(0.0), nn.Dropout(0.5).eval(), nn.RReLU().eval()):
        fn, params = functional(module)
        assert params == {} and torch.equal(fn(params, torch.ones(2)), torch.ones(2))
        assert module.training or fn._skeleton.training is False


def test_hooks_and_hidden_tensors_are_refused():
    linear = nn.Linear(2, 2)
    handle = linear.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"\(Linear\) has backward hooks.*expected none"):
        functional(linear)
    handle.remove()
    handle = linear.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(ValueError, match=r"parameter 'weight' has hooks on its gradient"):
        functional(linear)
    handle.remove()
    handle = linear.bias.register_hook(lambda _: None)
    with pytest.raises(ValueError, match=r"parameter 'bias' has hooks on its gradient"):
        functional(linear)
    handle.remove()
    linear.scale = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"attribute 'scale' is a tensor that requires grad"):
        functional(linear)
    del linear.scale
    functional(linear)


def test_forward_hooks_run():
    linear = nn.Linear(2, 2)
    linear.register_forward_hook(lambda module, args, out: out * 2)
    fn, params = functional(linear)
    x = torch.ones(1, 2)
    assert torch.equal(fn(params, x), F.linear(x, linear.weight, linear.bias) * 2)


def test_arguments_of_the_wrong_kind():
    with pytest.raises(TypeError, match=r"functional: module is a function; expected an nn.Module"):
        functional(flat)
    fn, params = functional(Block())
    wrong = {**params, "extra": torch.ones(1), "gain": None}
    for call in (lambda: fn(wrong, torch.ones(1, 1, WIDTH)), lambda: fn.state_dict(wrong)):
        with pytest.raises(KeyError, match=r"Block: params lack 'gain' and hold 'extra' besides"):
            call()
    module = nn.Linear(2, 2)
    module.lock = threading.Lock()
    with pytest.raises(TypeError) as caught:
        functional(module)
    assert any("copy.deepcopy takes" in note for note in caught.value.__notes__)


def test_a_parameter_reached_by_another_way_than_its_name():
    fn, params = functional(Reaches())
    message = r"functional: the module reaches a parameter other than by its name.*self\.weight"
    with pytest.raises(ValueError, match=message):
        fn(params, torch.ones(1, 2))
    assert fn._skeleton.weight.shape == (2, 2) and not fn._skeleton.weight.requires_grad


def test_checkpointing_inside_a_module_is_refused_and_not_wrong():
    fn, params = functional(Checkpointed())
    program = mt.chain(mt.stage(lambda p, carry, x: fn(p, x).sum(), "m", name="m", vjp="autograd"))
    with pytest.raises(ValueError, match=r"leave torch.utils.checkpoint out"):
        mt.value_and_grad(program)({"m": params}, torch.ones(1, 2))


class Checkpointed(nn.Linear):
    """Runs itself again in the backward pass, after the function has returned."""

    def __init__(self):
        super().__init__(2, 2, bias=False)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(
            lambda x: F.linear(x, self.weight).sin(), x, use_reentrant=False
        )


class Reaches(nn.Linear):
    """Keeps its weight in a list besides."""

    def __init__(self):
        super().__init__(2, 2, bias=False)
        self.kept = [self.weight]

    def forward(self, x):
        return x @ self.kept[0]
