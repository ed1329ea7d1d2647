"""What is read, what is held out, and that a step's data depends on the seed and step alone."""

import errno
import json
from pathlib import Path

import pytest
import torch

from scripts import _bigram, _corpus
from scripts._flags import Refusal

JSON = Path(json.__file__).parent


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text)
    return root


def test_default_is_the_library_without_its_tests():
    files = list(_corpus._files(JSON.parent, frozenset({".py"}), _corpus.NOT_LIBRARY))
    parts = {part for file in files for part in file.relative_to(JSON.parent).parts}
    assert {"json", "typing.py"} <= parts
    assert not parts & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    corpus = _corpus.load(None, context=256)
    assert corpus.files == len(files)
    assert len(corpus.train) + len(corpus.heldout) == sum(file.stat().st_size for file in files)
    assert 0.02 < len(corpus.heldout) / len(corpus.train) < 0.2


def test_directory_is_split_by_file_and_takes_text_only(tmp_path):
    files = {f"d{i % 3}/{i}.txt": bytes([65 + i]) * 10 for i in range(25)}
    write(tmp_path, files | {"no.bin": b"z" * 99, ".git/no.txt": b"z" * 99})
    corpus = _corpus.load(tmp_path, context=4)
    assert corpus.files == 25
    train, heldout = (bytes(data.tolist()) for data in (corpus.train, corpus.heldout))
    assert len(set(heldout)) == 2 and len(heldout) == 20
    assert not set(train) & set(heldout)
    order = [text[:1] for _, text in sorted(files.items())]
    assert train == b"".join(10 * byte for byte in order if byte[0] not in heldout)
    again = _corpus.load(tmp_path, context=4)
    assert again.digest == corpus.digest and torch.equal(again.heldout, corpus.heldout)


def test_single_file_is_cut_at_95_percent(tmp_path):
    text = bytes(range(256)) * 4
    write(tmp_path, {"a.bin": text})
    corpus = _corpus.load(tmp_path / "a.bin", context=16)
    assert bytes(corpus.train.tolist()) == text[: 1024 - 51]
    assert bytes(corpus.heldout.tolist()) == text[1024 - 51 :]
    assert str(corpus).endswith("a.bin: 1 file, 973 bytes to train on, 51 held out")


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ({}, "", r"corpus .*: 0 text files with 0 bytes; expected some text. Name a file, or"),
        ({"a.txt": b""}, "a.txt", "1 text files with 0 bytes; expected some text"),
        ({"a.bin": b"x" * 9000}, "", "0 text files with 0 bytes"),
        (
            {"a.txt": b"x" * 100},
            "a.txt",
            "the held-out split has 5 bytes; expected at least 17, a context of 16 and the byte "
            "after it. Take more text or a smaller --context",
        ),
        ({"a.txt": b"x" * 9, "b.txt": b"y" * 9}, "", "the training split has 9 bytes; expected"),
        ({}, "nowhere", r"corpus .*nowhere: cannot be read \(No such file or directory\)"),
    ],
)
def test_bad_corpus_is_refused(tmp_path, files, name, message):
    write(tmp_path, files)
    with pytest.raises(Refusal, match=message):
        _corpus.load(tmp_path / name, context=16)


def test_unreadable_file_is_named(tmp_path, monkeypatch):
    write(tmp_path, {"a.txt": b"x"})

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(Refusal, match=r"a\.txt: cannot be read \(Permission denied\); expected"):
        _corpus.load(tmp_path, context=4)


def test_bytes_that_a_model_has_no_tokens_for_are_refused(tmp_path):
    write(tmp_path, {"a.txt": b"ab" * 100 + "é".encode() + b"ab" * 100})
    corpus = _corpus.load(tmp_path, context=4)
    _corpus.check_vocabulary(corpus, "m", 256)
    with pytest.raises(Refusal, match="the byte 195, a label out of range; m knows 0 to 194"):
        _corpus.check_vocabulary(corpus, "m", 195)


SHAPE = dict(context=8, batch=6)


def test_labels_are_the_tokens_shifted():
    data = torch.arange(200).to(torch.uint8)
    (batch,) = _corpus.batches(data, 3, seed=0, **SHAPE)
    assert batch["tokens"].dtype == batch["labels"].dtype == torch.int64
    assert batch["tokens"].shape == (6, 8)
    assert torch.equal(batch["labels"], batch["tokens"] + 1)
    assert torch.equal(batch["tokens"], batch["tokens"][:, :1] + torch.arange(8))


def test_data_depends_on_seed_and_step_alone():
    data = torch.arange(250).to(torch.uint8)

    def draw(step, seed=0):
        return _corpus.batches(data, step, seed=seed, **SHAPE)[0]["tokens"]

    assert torch.equal(draw(5), draw(5))
    drawn = [draw(step, seed) for step in range(4) for seed in (0, 1, -1)]
    assert len({tuple(x.flatten().tolist()) for x in drawn}) == len(drawn)


def test_micro_batches_are_the_batch_in_parts():
    data = torch.arange(250).to(torch.uint8)
    (whole,) = _corpus.batches(data, 5, seed=0, **SHAPE)
    parts = _corpus.batches(data, 5, seed=0, micro_batches=3, **SHAPE)
    assert [part["tokens"].shape for part in parts] == [(2, 8)] * 3
    for name in ("tokens", "labels"):
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])


def test_every_place_can_be_drawn():
    data = torch.arange(12).to(torch.uint8)
    firsts = [
        _corpus.batches(data, step, seed=0, **SHAPE)[0]["tokens"][:, 0].tolist()
        for step in range(20)
    ]
    assert {first for row in firsts for first in row} == {0, 1, 2, 3}


def test_heldout_windows_are_spread_and_do_not_overlap():
    data = torch.arange(101).to(torch.uint8)
    every = _corpus.heldout(data, context=10, batch=4, limit=10**9)
    assert [len(part["tokens"]) for part in every] == [4, 4, 2]
    assert torch.cat([part["tokens"] for part in every]).flatten().tolist() == list(range(100))
    few = _corpus.heldout(data, context=10, batch=4, limit=35)
    assert few[0]["tokens"][:, 0].tolist() == [0, 30, 60]
    assert len(_corpus.heldout(data, context=10, batch=4, limit=1)[0]["tokens"]) == 1


def test_bigram_by_hand():
    model = _bigram.log_probabilities(torch.tensor([0, 1, 0, 1, 0, 2], dtype=torch.uint8))
    assert torch.allclose(model.exp().sum(1), torch.ones(256, dtype=torch.float64))
    # 0 is followed by 1 twice and by 2 once; of six bytes, two are 1.
    assert model[0, 1].exp().item() == pytest.approx((2 + 3 / 262) / (3 + 1))
    # 2 is followed by nothing: the unigram model.
    assert model[2, 0].exp().item() == pytest.approx(4 / 262)
    windows = [{"tokens": torch.tensor([[0, 2]]), "labels": torch.tensor([[1, 0]])}]
    assert _bigram.loss(model, windows) == pytest.approx(-(model[0, 1] + model[2, 0]).item() / 2)


def test_bigram_on_its_own_text_is_near_the_empirical_entropy():
    corpus = _corpus.load(JSON, context=16)
    data = corpus.train.long()
    pairs = torch.stack([data[:-1], data[1:]]).unique(dim=1, return_counts=True)
    (firsts, _), counts = pairs
    totals = torch.zeros(256).index_add(0, firsts, counts.float())
    entropy = -(counts * (counts / totals[firsts]).log()).sum().item() / counts.sum().item()
    windows = [{"tokens": data[None, :-1], "labels": data[None, 1:]}]
    loss = _bigram.loss(_bigram.log_probabilities(corpus.train), windows)
    assert entropy < loss < entropy + 0.05
