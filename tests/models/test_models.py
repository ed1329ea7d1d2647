"""Model families against plain torch modules written here, from the papers, in float64."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
import mtfunc as mt
from models import common, gpt2, llama
from tests.conftest import TOLERANCE

CLOSE = {"rtol": TOLERANCE[torch.float64], "atol": TOLERANCE[torch.float64]}
TOKENS = 24
GPT2 = gpt2.Config(depth=2, width=16, heads=4, vocab=31, context=TOKENS, std=0.3)
LLAMA = llama.Config(
    vocab=31, depth=2, width=24, heads=6, kv_heads=2, ffn=20, context=TOKENS, std=0.3
)
STRETCHED = common.RopeScaling(factor=8.0, low=1.0, high=4.0, original_context=32)
CASES = {
    "gpt2": (gpt2, GPT2),
    "llama-untied": (llama, LLAMA),
    "llama-tied": (llama, dataclasses.replace(LLAMA, tied=True)),
    "llama-ungrouped": (llama, dataclasses.replace(LLAMA, kv_heads=6)),
    "llama-one-kv-head": (llama, dataclasses.replace(LLAMA, kv_heads=1, theta=500.0)),
    "llama-stretched": (llama, dataclasses.replace(LLAMA, scaling=STRETCHED, theta=100.0)),
}
every_case = pytest.mark.parametrize("module, config", CASES.values(), ids=CASES)
every_extra = pytest.mark.parametrize("extra", [(), ("positions",), ("segments", "positions")])


class CausalSelfAttention(nn.Module):
    """The textbook formula with every score spelt out, for heads of ``(tokens, C)``."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Tensor) -> Tensor:
        allowed = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
        allowed = allowed & (segments[:, :, None] == segments[:, None, :])
        heads = []
        for h in range(q.shape[2]):
            g = h * k.shape[2] // q.shape[2]
            scores = q[:, :, h] @ k[:, :, g].transpose(1, 2) / math.sqrt(q.shape[3])
            heads.append(scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v[:, :, g])
        return torch.cat(heads, -1)


class GPT2Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attend = CausalSelfAttention()

    def forward(self, x: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.ln_1(x)).split(x.shape[-1], -1)
        q, k, v = (a.unflatten(-1, (self.heads, -1)) for a in (q, k, v))
        x = x + self.c_proj(self.attend(q, k, v, segments))
        h = self.c_fc(self.ln_2(x))
        gelu = h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))) / 2
        return x + self.c_out(gelu)


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / ((x * x).mean(-1, keepdim=True) + 1e-5).sqrt()


class LlamaLayer(nn.Module):
    def __init__(self, config: llama.Config):
        super().__init__()
        D, C = config.width, config.width // config.heads
        self.config, self.width_of_head = config, C
        self.norm_1, self.norm_2 = RMSNorm(D), RMSNorm(D)
        self.wq, self.wo = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.wk = nn.Linear(D, config.kv_heads * C, bias=False)
        self.wv = nn.Linear(D, config.kv_heads * C, bias=False)
        self.w1, self.w3 = nn.Linear(D, config.ffn, bias=False), nn.Linear(D, config.ffn, False)
        self.w2 = nn.Linear(config.ffn, D, bias=False)
        self.attend = CausalSelfAttention()

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotation as a product of complex numbers, one per pair ``(x[i], x[i + C/2])``."""
        wavelengths = [wavelength(self.config, i) for i in range(self.width_of_head // 2)]
        turns = positions[:, :, None, None].to(x.dtype) / torch.tensor(wavelengths, dtype=x.dtype)
        half = self.width_of_head // 2
        pairs = torch.complex(x[..., :half], x[..., half:]) * torch.exp(2j * math.pi * turns)
        return torch.cat((pairs.real, pairs.imag), -1)

    def forward(self, x: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        h = self.norm_1(x)
        q, k, v = (
            w(h).unflatten(-1, (-1, self.width_of_head)) for w in (self.wq, self.wk, self.wv)
        )
        y = self.attend(self.turn(q, positions), self.turn(k, positions), v, segments)
        x = x + self.wo(y)
        h = self.norm_2(x)
        gate = self.w1(h)
        return x + self.w2(gate * torch.sigmoid(gate) * self.w3(h))


def wavelength(config: llama.Config, i: int) -> float:
    """Tokens that pair ``i`` takes for a whole turn, by the cases of Meta's ``apply_scaling``."""
    plain = 2 * math.pi * config.theta ** (2 * i / (config.width // config.heads))
    if (s := config.scaling) is None or plain < s.original_context / s.high:
        return plain
    if plain > s.original_context / s.low:
        return plain * s.factor
    smooth = (s.original_context / plain - s.low) / (s.high - s.low)
    return 1 / ((1 - smooth) / (plain * s.factor) + smooth / plain)


class Plain(nn.Module):
    """A language model of either family; ``forward`` returns hidden states and logits."""

    def __init__(self, config: gpt2.Config | llama.Config):
        super().__init__()
        is_gpt2 = isinstance(config, gpt2.Config)
        V, D = config.vocab, config.width
        self.wte = nn.Embedding(V, D)
        self.wpe = nn.Embedding(config.context, D) if is_gpt2 else None
        self.layers = nn.ModuleList(
            GPT2Layer(D, config.heads) if is_gpt2 else LlamaLayer(config)
            for _ in range(config.depth)
        )
        self.norm = nn.LayerNorm(D) if is_gpt2 else RMSNorm(D)
        self.lm_head = nn.Linear(D, V, bias=False)
        if is_gpt2 or config.tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        default = torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"])
        positions = batch.get("positions", default)
        x = self.wte(batch["tokens"])
        if self.wpe is not None:
            x = x + self.wpe(positions)
        for layer in self.layers:
            x = layer(x, positions, batch.get("segments", torch.zeros_like(default)))
        return self.norm(x), self.lm_head(self.norm(x))


GPT2_NAMES = {
    "embed/weight": "wte.weight",
    "positions/weight": "wpe.weight",
    "attention/norm": "ln_1",
    "attention/qkv": "c_attn",
    "attention/out": "c_proj",
    "mlp/norm": "ln_2",
    "mlp/up": "c_fc",
    "mlp/down": "c_out",
}
LLAMA_NAMES = {
    "embed/weight": "wte.weight",
    "head/weight": "lm_head.weight",
    "attention/norm": "norm_1.weight",
    "attention/q": "wq.weight",
    "attention/k": "wk.weight",
    "attention/v": "wv.weight",
    "attention/out": "wo.weight",
    "mlp/norm": "norm_2.weight",
    "mlp/gate": "w1.weight",
    "mlp/up": "w3.weight",
    "mlp/down": "w2.weight",
}


def leaves_of(tree: object, path: str = "") -> dict[str, Tensor]:
    """Leaves by path."""
    if isinstance(tree, Tensor):
        return {path: tree}
    items = enumerate(tree) if isinstance(tree, list) else tree.items()
    return {p: t for k, child in items for p, t in leaves_of(child, f"{path}/{k}").items()}


def plain_model(config: gpt2.Config | llama.Config, params: object) -> tuple[Plain, dict]:
    """The plain module with these parameters, and our path of each of its own."""
    names = GPT2_NAMES if isinstance(config, gpt2.Config) else LLAMA_NAMES
    module, theirs = Plain(config).double(), {}
    for path, leaf in leaves_of(params).items():
        name = path.lstrip("/")
        for ours, their in names.items():
            name = name.replace(ours, their)
        theirs[path] = module.get_parameter(name.replace("/", "."))
        assert theirs[path].shape == leaf.shape, path
        theirs[path].data.copy_(leaf)
    assert len(theirs) == len(list(module.parameters()))
    return module, theirs


def make_batch(seed: int, vocab: int, *extra: str, rows: int = 2) -> dict[str, Tensor]:
    """Random tokens; a third of the labels ignored; two documents of unequal length a row."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randint(vocab, (2, rows, TOKENS), generator=generator)
    ignored = torch.rand((rows, TOKENS), generator=generator) < 1 / 3
    batch = {"tokens": draw[0], "labels": draw[1].masked_fill(ignored, -100)}
    column = torch.arange(TOKENS)
    starts = torch.tensor([[7], [13]])[:rows]
    if "segments" in extra:
        batch["segments"] = (column >= starts).long()
    if "positions" in extra:
        batch["positions"] = torch.where(column >= starts, column - starts, column)
    return batch


def make_params(module: object, config: object, dtype: torch.dtype = torch.float64) -> object:
    """Initial parameters, with scales and biases moved off one and zero so that they show."""
    params = module.init(config, mt.random.key(3), dtype=dtype)
    generator = torch.Generator().manual_seed(4)
    for leaf in leaves_of(params).values():
        if leaf.ndim == 1:
            leaf.add_(0.3 * torch.randn(leaf.shape, generator=generator).to(dtype))
    return params


def stages(module: object, config: object, params: dict, output: str = "loss") -> list:
    """The program as calls ``fn(*subtrees, carry, batch)``: what its parts say, spelt out."""
    calls = []
    for stage in module.program(config, output).stages(params, partial=True):
        subtrees = []
        for key in stage.keys:
            node = params
            for part in key.split("/"):
                node = node[int(part) if isinstance(node, list) else part]
            subtrees.append(node)
        calls.append((stage.name, stage.fn, subtrees, dict(stage.static)))
    return calls


def compose(module: object, config: object, params: object, batch: dict, output: str = "loss"):
    """The stages called one after the other."""
    carry = None
    for _, fn, subtrees, static in stages(module, config, params, output):
        carry = fn(*subtrees, carry, batch, **static)
    return carry


@every_extra
@every_case
def test_loss_and_gradients_equal_a_plain_module(module, config, extra):
    params, batch = make_params(module, config), make_batch(0, config.vocab, *extra)
    ours = leaves_of(params)
    plain, theirs = plain_model(config, params)
    hidden, logits = plain(batch)
    counted = batch["labels"] != -100
    logp = logits.log_softmax(-1)[counted]
    want = -logp[torch.arange(len(logp)), batch["labels"][counted]].mean()
    want_grads = torch.autograd.grad(want, list(theirs.values()))

    for leaf in ours.values():
        leaf.requires_grad_()
    got = compose(module, config, params, batch).value()
    got_grads = torch.autograd.grad(got, list(ours.values()))

    for output, value in (("hidden", hidden), ("logits", logits)):
        got_value = compose(module, config, params, batch, output)
        torch.testing.assert_close(got_value, value, **CLOSE)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, **CLOSE)
    for path, got_grad, want_grad in zip(ours, got_grads, want_grads):
        torch.testing.assert_close(got_grad, want_grad, **CLOSE, msg=lambda m, p=path: f"{p}: {m}")


@every_case
def test_the_oracle_runs_the_program(module, config):
    params, batch = make_params(module, config), make_batch(1, config.vocab)
    loss, grads = mt.reference.value_and_grad(module.program(config))(params, batch)
    plain, theirs = plain_model(config, params)
    logits = plain(batch)[1].flatten(0, 1)
    want = F.cross_entropy(logits, batch["labels"].flatten())
    torch.testing.assert_close(loss, want, **CLOSE)
    want_grads = torch.autograd.grad(want, list(theirs.values()))
    for got, wanted in zip(leaves_of(grads).values(), want_grads):
        torch.testing.assert_close(got, wanted, **CLOSE)


@every_case
def test_a_token_sees_no_later_one_and_no_other_document(module, config):
    params, batch = make_params(module, config), make_batch(2, config.vocab, "segments")
    before = compose(module, config, params, batch, "logits")
    changed = batch["tokens"].clone()
    changed[0, 3] = (changed[0, 3] + 1) % config.vocab
    after = compose(module, config, params, batch | {"tokens": changed}, "logits")
    moved = (before != after).any(-1)
    assert moved[0, 3:7].all() and not moved[0, :3].any() and not moved[0, 7:].any()
    assert not moved[1].any()


def test_ignored_labels_leave_sum_and_count():
    batch = make_batch(0, 31)
    logits = torch.randn(2, TOKENS, 31, generator=torch.Generator().manual_seed(0))
    none = torch.full_like(batch["labels"], -100)
    assert common.next_token_loss(logits, none).value() == 0
    each = -logits.log_softmax(-1)
    picked = [
        each[b, t, label]
        for b, row in enumerate(batch["labels"].tolist())
        for t, label in enumerate(row)
        if label != -100
    ]
    got = common.next_token_loss(logits, batch["labels"])
    torch.testing.assert_close(got.value(), torch.stack(picked).mean())


def test_the_loss_is_summed_in_float32_at_least():
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(4, 512, 31, generator=generator)).bfloat16()
    labels = torch.randint(31, (4, 512), generator=generator)
    want = F.cross_entropy(logits.double().flatten(0, 1), labels.flatten())
    got = common.next_token_loss(logits, labels).value()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)
    assert common.next_token_loss(logits.double(), labels).value().dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@every_extra
@every_case
def test_stages_are_the_same_with_and_without_grad(module, config, extra, dtype):
    params, batch = make_params(module, config, dtype), make_batch(5, config.vocab, *extra)
    for output in ("loss", "logits", "hidden"):
        carry = None
        for name, fn, subtrees, static in stages(module, config, params, output):
            for leaf in leaves_of(subtrees).values():
                leaf.requires_grad_(False)
            with torch.no_grad():
                plain = fn(*subtrees, carry, batch, **static)
            for leaf in leaves_of(subtrees).values():
                leaf.requires_grad_()
            entering = None if carry is None else carry.clone().requires_grad_()
            recorded = fn(*subtrees, entering, batch, **static)
            if isinstance(plain, mt.Mean):
                plain, recorded = plain.value(), recorded.value()
            assert recorded.requires_grad and not plain.requires_grad, name
            assert torch.equal(plain, recorded), name
            carry = plain


@every_case
def test_bfloat16_stays_bfloat16_and_close(module, config):
    wide, batch = make_params(module, config, torch.float64), make_batch(6, config.vocab)
    narrow = make_params(module, config, torch.bfloat16)
    for rounded, leaf in zip(leaves_of(narrow).values(), leaves_of(wide).values()):
        rounded.copy_(leaf)
        leaf.copy_(rounded)
    hidden = compose(module, config, narrow, batch, "hidden")
    assert hidden.dtype == compose(module, config, narrow, batch, "logits").dtype == torch.bfloat16
    want = compose(module, config, wide, batch, "hidden")
    assert (hidden - want).abs().mean() < TOLERANCE[torch.bfloat16]
    loss = compose(module, config, narrow, batch).value()
    assert loss.dtype == torch.float32
    assert abs(loss - compose(module, config, wide, batch).value()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("scaling", [None, common.RopeScaling(factor=32.0)], ids=["plain", "3.2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rotary_angles_are_right_at_a_million_tokens(dtype, scaling):
    """Against numpy's long double, so that an error anywhere in forming the angles shows."""
    positions = np.array([0, 1, 65_537, 2**20, 2**20 + 1, 2**24 + 1], dtype=np.longdouble)
    turn = common.rope_frequencies(64, 500_000.0, scaling)
    got = common.rope_angles(torch.tensor(positions.astype(np.int64))[None], turn, dtype)
    pi = 4 * np.arctan(np.longdouble(1))
    length = 2 * pi * np.longdouble(500_000) ** (np.arange(32, dtype=np.longdouble) / 32)
    if scaling is not None:
        low, high, factor = scaling.low, scaling.high, scaling.factor
        share = np.clip((scaling.original_context / length - low) / (high - low), 0, 1)
        length = 1 / ((1 - share) / (length * factor) + share / length)
    angles = 2 * pi * positions[:, None] / length
    bound = 1e-8 if dtype == torch.float64 else 6.1e-8
    for part, exact in zip(got, (np.cos(angles), np.sin(angles))):
        assert part.dtype == torch.promote_types(dtype, torch.float32)
        assert np.abs(part[0, 0].double().numpy() - exact).max() < bound


def test_rotary_scores_depend_on_distance_alone():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 64, generator=generator, dtype=torch.float64)
    turn = common.rope_frequencies(64, 10_000.0)

    def score(i: int, j: int) -> Tensor:
        a, b = (common.rope_angles(torch.tensor([[p]]), turn, q.dtype) for p in (i, j))
        return (common.rotate(q, *a) * common.rotate(k, *b)).sum()

    torch.testing.assert_close(score(9, 2), score(2**20 + 7, 2**20), rtol=1e-8, atol=1e-8)
    assert abs(score(9, 2) - score(9, 3)) > 0.01


@every_case
def test_spec_is_init_without_memory(module, config):
    for dtype in (torch.float32, torch.bfloat16):
        params = module.init(config, mt.random.key(0), dtype=dtype)
        spec = module.spec(config, dtype=dtype)
        got, want = leaves_of(spec), leaves_of(params)
        assert list(got) == list(want)
        assert all(leaf.device.type == "meta" for leaf in got.values())
        assert all(got[p].shape == want[p].shape and got[p].dtype == dtype for p in got)
        assert all(leaf.dtype == dtype for leaf in want.values())
        separate = {leaf.untyped_storage().data_ptr() for leaf in want.values()}
        assert len(separate) == len(want)


@every_case
def test_init_is_a_function_of_the_key(module, config):
    first, again = (module.init(config, mt.random.key(7)) for _ in range(2))
    other = module.init(config, mt.random.key(8))
    for path, leaf in leaves_of(first).items():
        assert torch.equal(leaf, leaves_of(again)[path])
        assert leaf.ndim == 1 or not torch.equal(leaf, leaves_of(other)[path])
    matrices = [leaf for leaf in leaves_of(first).values() if leaf.ndim == 2]
    starts = {tuple(leaf.flatten()[:8].tolist()) for leaf in matrices}
    assert len(starts) == len(matrices), "two parameters were drawn with one key"


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_initial_values_are_scaled_as_the_papers_say(name):
    module, config = models.get(name)
    params = module.init(config, mt.random.key(0))
    for path, leaf in leaves_of(params).items():
        if leaf.ndim == 1:
            assert (leaf == (0.0 if path.endswith("bias") else 1.0)).all(), path
            continue
        residual = "/out" in path or "/down" in path
        std = config.std / math.sqrt(2 * config.depth) if residual else config.std
        std = std / 2 if "positions" in path else std
        error = std / math.sqrt(leaf.numel())
        assert abs(leaf.mean()) < 5 * error, path
        assert abs(leaf.std() - std) < 5 * error, path


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_the_first_loss_is_near_that_of_a_blind_guess(name):
    module, config = models.get(name)
    params, batch = module.init(config, mt.random.key(0)), make_batch(0, config.vocab)
    loss = compose(module, config, params, batch).value()
    assert abs(loss - math.log(config.vocab)) < 0.5


PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-bench": 97_536_768,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_released_sizes_have_the_published_number_of_parameters(name):
    module, config = models.get(name)
    leaves = leaves_of(module.spec(config)).values()
    assert sum(leaf.numel() for leaf in leaves) == PUBLISHED[name]
    assert models.count_params(config) == PUBLISHED[name]


def test_names_of_sizes_are_unique_and_known():
    names = [name for module in models.FAMILIES for name in module.CONFIGS]
    assert len(set(names)) == len(names)
    assert models.get("llama-tiny") == (llama, llama.CONFIGS["llama-tiny"])
    with pytest.raises(KeyError, match=r"unknown model 'llama-tinny'.*'gpt2-xl'.*Did you mean"):
        models.get("llama-tinny")
    with pytest.raises(KeyError) as error:
        models.get("zzz")
    assert "Did you mean" not in str(error.value)
    with pytest.raises(TypeError, match=r"got dict; expected a Config of models.gpt2"):
        models.count_params({})


@every_case
def test_programs_are_values(module, config):
    same = dataclasses.replace(config)
    assert module.program(config) == module.program(same, "loss")
    assert hash(module.program(config)) == hash(module.program(same))
    assert module.program(config) != module.program(config, "logits")
    assert module.program(config) != module.program(dataclasses.replace(config, eps=1e-6))
    with pytest.raises(ValueError, match=r"unknown output 'logit'.*Did you mean 'logits'"):
        module.program(config, "logit")


def test_configs_refuse_widths_that_do_not_divide():
    with pytest.raises(ValueError, match="width 16 and 3 heads; expected heads to divide"):
        dataclasses.replace(GPT2, heads=3)
    for wrong in ({"heads": 5}, {"kv_heads": 4}, {"width": 6, "heads": 2, "kv_heads": 1}):
        with pytest.raises(ValueError, match=r"llama.Config: width .* expected kv_heads"):
            dataclasses.replace(LLAMA, **wrong)


def spoil(name: str, row: int, column: int, value: int):
    def change(batch: dict[str, Tensor]) -> None:
        batch[name][row, column] = value

    return change


REFUSED = {
    "token too large": (
        spoil("tokens", 1, 5, 31),
        r"batch\['tokens'\]\[1, 5\] is 31; expected 0 to 30 \(1 of 48 are out.*tokenizer",
    ),
    "token negative": (spoil("tokens", 0, 2, -100), r"\['tokens'\]\[0, 2\] is -100; expected 0"),
    "label too large": (
        spoil("labels", 1, 23, 99),
        r"\['labels'\]\[1, 23\] is 99; expected 0 to 30, or -100 .*Mark a label to ignore",
    ),
    "label negative": (spoil("labels", 0, 0, -1), r"\['labels'\]\[0, 0\] is -1; .*or -100"),
    "position": (spoil("positions", 1, 1, 24), r"\['positions'\]\[1, 1\] is 24; expected 0 to 23"),
    "no tokens": (lambda b: b.pop("tokens"), "no 'tokens'; expected 'tokens' and 'labels', got"),
    "no labels": (lambda b: b.pop("labels"), r"no 'labels'.* Add int64 labels of shape \(B, T\)"),
    "axis": (
        lambda b: b.update(tokens=b["tokens"][0]),
        r"shape \(24,\); expected \(batch, tokens\).*tokens\[None\]",
    ),
    "shapes": (
        lambda b: b.update(labels=b["labels"][:, 1:]),
        r"\['labels'\] has shape \(2, 23\); expected \(2, 24\).*labels = text\[:, 1:\]",
    ),
    "dtype": (
        lambda b: b.update(tokens=b["tokens"].int()),
        r"\['tokens'\] is torch.int32; expected torch.int64.*\.long\(\)",
    ),
    "label dtype": (
        lambda b: b.update(labels=b["labels"].double()),
        r"\['labels'\] is torch.float64; expected torch.int64",
    ),
    "segment shape": (
        lambda b: b.update(segments=b["segments"][:1]),
        r"\['segments'\] has shape \(1, 24\); expected \(2, 24\)",
    ),
    "too long": (
        lambda b: (b.pop("positions"), b.update({k: v.repeat(1, 2) for k, v in b.items()})),
        "holds 48 tokens a row; expected at most 24, the positions.*Split the rows",
    ),
}


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_a_batch_that_would_be_misread_is_refused(change, message):
    batch = make_batch(0, 31, "positions", "segments")
    check = gpt2.program(GPT2).check
    check(batch)
    change(batch)
    with pytest.raises(ValueError, match=message):
        check(batch)


def test_a_batch_that_can_be_read_passes():
    batch = make_batch(0, 31)
    llama.program(LLAMA).check({k: v.repeat(1, 9) for k, v in batch.items()})
    llama.program(LLAMA, "logits").check({"tokens": batch["tokens"]})
    common.check_batch(batch | {"positions": batch["tokens"] + 2**40}, 31)
    with pytest.raises(ValueError, match=r"\['positions'\]\[0, 0\] is -1; expected at least 0"):
        common.check_batch(batch | {"positions": torch.full_like(batch["tokens"], -1)}, 31)
    common.check_batch({k: v[:0] for k, v in batch.items()}, 31)
