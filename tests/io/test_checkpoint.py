"""Checkpoints: equal to the last bit, whole or not there, refused when they do not fit."""

import hashlib
import json
import os

import pytest
import torch

import mtfunc as mt
from mtfunc.io import checkpoint, manifest, restore, save
from tests.toys import LM, assert_same, clone, lm_batch, lm_params, momentum


def odd_params():
    """Every kind of leaf that a pytree may hold."""
    return {
        "embed": {"weight": torch.randn(5, 3), "scale": torch.tensor(0.5)},
        "layers": [
            {"w": torch.randn(3, 2).T, "half": torch.randn(4).bfloat16()},
            {"w": torch.randn(2, 2, dtype=torch.float64), "none": None, "ids": torch.arange(3)},
        ],
        "empty": {"of": torch.zeros(0, 4), "float": torch.tensor([float("nan"), -0.0])},
    }


def read(*subtrees):
    return subtrees[-2]


PROGRAM = mt.chain(mt.stage(read, "embed"), mt.scan(read, "layers"), mt.stage(read, "empty"))


def odd_state(steps=7):
    """A state after some steps, with moments that are not zero."""
    params = odd_params()
    state = mt.init(PROGRAM, params, momentum(), mt.random.key(3))
    state._step = steps
    for leaf in checkpoint._leaves(state).values():
        if leaf.is_floating_point():
            leaf.add_(torch.randn(leaf.shape).to(leaf.dtype))
    return state


def contents(state):
    return clone({"params": state.params, "opt_state": state.opt_state})


@pytest.mark.parametrize("into", ["new buffers", "a state to fill"])
def test_restored_equals_saved(tmp_path, into):
    state = odd_state()
    save(state, tmp_path)
    like = None if into == "new buffers" else odd_state(steps=0)
    back = restore(tmp_path, like=like)
    assert_same(contents(back), contents(state))
    assert (back.step, back.key.item()) == (7, mt.random.key(3).item())
    assert back.params["layers"][1]["none"] is None
    assert back.opt_state["velocity"]["layers"][1]["ids"] is None
    if like is not None:
        with pytest.raises(RuntimeError, match=r"spent: mt\.restore filled it"):
            _ = like.params


def test_restored_run_goes_on_as_if_unbroken(tmp_path):
    def go(state, first, last):
        step = mt.train_step(LM, momentum())
        for i in range(first, last):
            state, _ = step(state, lm_batch(seed=i))
        return state

    def start():
        return mt.init(LM, lm_params(), momentum(), mt.random.key(1))

    unbroken = go(start(), 0, 5)
    save(go(start(), 0, 3), tmp_path)
    for like in (None, start()):
        broken = go(restore(tmp_path, like=like), 3, 5)
        assert broken.step == unbroken.step
        assert_same(contents(broken), contents(unbroken))


def test_one_file_a_unit_and_a_manifest_that_describes_them(tmp_path):
    path = save(odd_state(), tmp_path, model="odd", program=str(PROGRAM))
    assert path == tmp_path / "step-000007"
    files = ["0000-embed", "0001-layers-0", "0002-layers-1", "0003-empty"]
    names = [f"{name}.safetensors" for name in files]
    assert sorted(p.name for p in path.iterdir()) == [*names, "manifest.json"]
    assert len({p.stat().st_mode for p in path.iterdir()}) == 1
    head = manifest(tmp_path)
    assert list(head["files"]) == names
    assert head["meta"] == {"model": "odd", "program": str(PROGRAM)}
    assert head["versions"] == {"mtfunc": mt.__version__, "torch": torch.__version__}
    for name, file in head["files"].items():
        data = (path / name).read_bytes()
        assert (file["bytes"], file["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    first = head["files"][names[1]]
    assert (first["unit"], first["leaves"]["params/layers/0/half"]) == (
        "layers/0",
        {"shape": [4], "dtype": "torch.bfloat16"},
    )
    assert "opt_state/velocity/layers/0/half" in first["leaves"]


def test_the_newest_few_are_kept(tmp_path):
    for step in (100, 900, 1_000_000):
        save(odd_state(step), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000900", "step-1000000"]
    assert restore(tmp_path).step == 1_000_000
    assert restore(tmp_path / "step-000900").step == 900
    save(odd_state(2_000_000), tmp_path, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-2000000"]


def test_an_older_step_saved_last_is_kept(tmp_path):
    for step in (8, 9, 3):
        save(odd_state(step), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-000009"]


def test_the_same_step_is_replaced(tmp_path):
    save(odd_state(), tmp_path)
    state = odd_state()
    save(state, tmp_path, again=True)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000007"]
    assert_same(contents(restore(tmp_path, again=True)), contents(state))


@pytest.mark.parametrize("where", ["while writing", "between the renames", "before the rename"])
def test_a_crash_leaves_the_old_checkpoint(tmp_path, monkeypatch, where):
    old = odd_state()
    save(old, tmp_path)
    crash = OSError("no space left")

    def fail(*_):
        raise crash

    calls = []
    rename = type(tmp_path).rename

    def rename_once(self, target):
        if calls:
            raise crash
        calls.append(target)
        return rename(self, target)

    if where == "while writing":
        monkeypatch.setattr(checkpoint, "save_file", fail)
    elif where == "between the renames":
        monkeypatch.setattr(type(tmp_path), "rename", rename_once)
    else:
        monkeypatch.setattr(checkpoint, "_rename", fail)
    with pytest.raises(OSError, match="no space left"):
        save(odd_state(), tmp_path)
    monkeypatch.undo()
    assert_same(contents(restore(tmp_path)), contents(old))
    save(odd_state(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000007"]


def test_what_a_killed_writer_left_is_ignored_and_cleared(tmp_path):
    save(odd_state(1), tmp_path)
    (tmp_path / ".step-000002.partial").mkdir()
    (tmp_path / ".step-000002.partial" / "manifest.json").write_text("{}")
    assert restore(tmp_path).step == 1
    save(odd_state(3), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000003"]


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    seen = []
    fsync = os.fsync

    def spy(descriptor):
        seen.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        assert (tmp_path / "step-000007").exists() == (seen[-1] == tmp_path.name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    path = save(odd_state(), tmp_path)
    assert sorted(seen[:-2]) == sorted(p.name for p in path.iterdir())
    assert seen[-2:] == [".step-000007.partial", tmp_path.name]


def changed(change):
    params = odd_params()
    change(params)
    return mt.init(PROGRAM, params, momentum())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: p["embed"].update(bias=torch.zeros(3)),
            "params/embed/bias is missing; opt_state/velocity/embed/bias is missing",
        ),
        (lambda p: p["embed"].pop("scale"), "params/embed/scale is there and not expected"),
        (lambda p: p["layers"].pop(), "params/layers/1/w is there and not expected"),
        (
            lambda p: p["embed"].update(weight=torch.zeros(5, 4)),
            r"params/embed/weight has shape \(5, 3\) and dtype float32, "
            r"expected shape \(5, 4\) and dtype float32",
        ),
        (
            lambda p: p["layers"][0].update(half=torch.zeros(4)),
            r"params/layers/0/half has shape \(4,\) and dtype bfloat16, "
            r"expected shape \(4,\) and dtype float32",
        ),
    ],
)
def test_another_model_is_refused_and_the_state_untouched(tmp_path, change, message):
    save(odd_state(), tmp_path)
    like = changed(change)
    before = contents(like)
    with pytest.raises(ValueError, match=f"is of another model or run: .*{message}") as error:
        restore(tmp_path, like=like)
    assert "Restore into the model that it was saved from" in str(error.value)
    assert_same(contents(like), before)


def test_many_differences_are_counted(tmp_path):
    save(odd_state(), tmp_path)
    state = mt.init(LM, lm_params(), momentum())
    with pytest.raises(ValueError, match=r"; and \d+ more\. Restore into"):
        restore(tmp_path, like=state)


def test_other_meta_is_refused(tmp_path):
    save(odd_state(), tmp_path, model="llama-tiny", config={"width": 128})
    assert restore(tmp_path, model="llama-tiny", config={"width": 128}).step == 7
    with pytest.raises(ValueError, match=r'model is "llama-tiny", expected "gpt2"; seed is null'):
        restore(tmp_path, model="gpt2", seed=0)


def test_what_differs_inside_meta_is_named(tmp_path):
    save(odd_state(), tmp_path, config={"width": 128, "rope": {"factor": 8.0}, "old": 1})
    message = (
        "config/width is 128, expected 64; config/rope/factor is 8.0, expected 4.0; config/old"
    )
    with pytest.raises(ValueError, match=message):
        restore(tmp_path, config={"width": 64, "rope": {"factor": 4.0}})


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, r"0003-empty\.safetensors is damaged: \d+ bytes; expected \d+ bytes with SHA-256"),
        (lambda p: os.truncate(p, 10), r"0003-empty\.safetensors is damaged: 10 bytes; expected"),
        (lambda p: p.unlink(), r"0003-empty\.safetensors is damaged: no file; expected"),
    ],
)
def test_damage_is_found_before_anything_is_changed(tmp_path, damage, message):
    path = save(odd_state(), tmp_path)
    damage(path / "0003-empty.safetensors")
    like = odd_state(steps=0)
    before = contents(like)
    with pytest.raises(ValueError, match=message):
        restore(tmp_path, like=like)
    assert_same(contents(like), before)


@pytest.mark.parametrize("text", ["", "[]", '{"step": 7}', "\x00"])
def test_a_broken_manifest_is_refused(tmp_path, text):
    (save(odd_state(), tmp_path) / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest\.json cannot be read .* Restore an older one"):
        restore(tmp_path)


def test_another_format_is_refused(tmp_path):
    path = save(odd_state(), tmp_path) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    with pytest.raises(ValueError, match=r"its format is 2; expected 1. Restore it with mtfunc 0"):
        restore(tmp_path)


@pytest.mark.parametrize("name", ["", "missing", "step-000001"])
def test_no_checkpoint(tmp_path, name):
    with pytest.raises(FileNotFoundError, match="there is none; expected a directory that mt"):
        restore(tmp_path / name)


def test_other_containers_need_a_state_to_fill(tmp_path):
    def make():
        params = {"embed": (torch.ones(2), torch.zeros(1)), "layers": [], "empty": {}}
        return mt.init(PROGRAM, params, momentum())

    state = make()
    save(state, tmp_path)
    with pytest.raises(ValueError, match=r"expected a state to fill. Give like=mt\.init"):
        restore(tmp_path)
    assert_same(contents(restore(tmp_path, like=make())), contents(state))


def test_bad_arguments_leave_nothing_behind(tmp_path):
    with pytest.raises(ValueError, match="save: keep is 0; expected 1 or more"):
        save(odd_state(), tmp_path / "out", keep=0)
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(odd_state(), tmp_path / "out", what=torch.ones(1))
    assert not (tmp_path / "out").exists()
