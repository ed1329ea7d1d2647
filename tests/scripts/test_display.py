"""The progress display, the pictures, the memory that is told, Ctrl-C."""

import io
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from scripts import _pictures, _progress
from scripts._interrupt import interruptible
from scripts._memory import Memory, memory, size


@pytest.fixture
def clockwork(monkeypatch):
    """A clock that the test sets."""
    now = [0.0]
    monkeypatch.setattr(_progress.time, "perf_counter", lambda: now[0])
    return now


def test_plain_lines_every_few_seconds(clockwork):
    stream = io.StringIO()
    with _progress.Display(100, done=10, tokens=64, stream=stream) as display:
        for step in range(11, 21):
            clockwork[0] += 2
            display.update(step, 1.5)
        display.say("[brackets] stay")
    lines = stream.getvalue().splitlines()
    assert [
        re.match(r"step (\d+) of 100  loss 1\.500  32 tokens/s  memory", x)[1] for x in lines[:-1]
    ]
    assert [line.split()[1] for line in lines[:-1]] == ["13", "16", "19"]
    assert lines[0].endswith("2:54 left") and lines[-1] == "[brackets] stay"


def test_the_last_step_has_a_line(clockwork):
    stream = io.StringIO()
    with _progress.Display(2, done=0, tokens=64, stream=stream) as display:
        for step in (1, 2):
            clockwork[0] += 0.001
            display.update(step, 2.0)
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("step 2 of 2  loss 2.000  64,000 tokens/s") and "0:00 left" in line


def test_a_terminal_gets_a_bar(clockwork):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with _progress.Display(4, done=0, tokens=64, stream=stream) as display:
        clockwork[0] += 1
        display.update(1, 2.5)
        display.bar.refresh()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "step 1 of 4" in shown and "loss 2.500  64 tokens/s" in shown and "━" in shown


def test_clock():
    assert [_progress.clock(s) for s in (0, 59.6, 125, 3723)] == ["0:00", "1:00", "2:05", "1:02:03"]


def test_memory_is_seen():
    before = memory()
    block = torch.ones(2**24)
    after = memory()
    assert after.now - before.now > 0.8 * block.nbytes
    assert after.peak >= after.now > 0
    assert str(Memory(1_234_000_000, 2 * 10**9)) == "1.23 GB (peak 2 GB)"


def test_sizes():
    assert [size(n) for n in (0, 999, 1000, 25_500_000, 5 * 10**15)] == [
        "0 B",
        "999 B",
        "1 kB",
        "25.5 MB",
        "5e+03 TB",
    ]


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_loss_picture_draws_all_three_lines(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        _pictures.Figure, "savefig", lambda figure, path: drawn.append(figure.axes[0])
    )
    rows = [{"step": 0, "heldout": 5.0}, {"step": 1, "loss": 5.5}, {"step": 2, "loss": 4.0}]
    rows.append({"step": 3, "loss": 3.0, "heldout": 3.5})
    _pictures.losses(tmp_path / "loss.png", rows, bigram=2.5, title="t")
    raw, smooth, heldout, bigram = (line.get_xydata().tolist() for line in drawn[0].lines)
    assert raw == [[1, 5.5], [2, 4.0], [3, 3.0]] and len(smooth) == 3
    assert heldout == [[0, 5.0], [3, 3.5]]
    assert [y for _, y in bigram] == [2.5, 2.5]
    assert [t.get_text() for t in drawn[0].texts] == ["3.500", "byte bigrams, held out: 2.500"]


def test_smoothing_is_centred():
    assert _pictures._smooth([1.0, 2.0, 6.0], share=0.4) == [1.5, 3.0, 4.0]
    assert _pictures._smooth([5.0]) == [5.0]


def test_pictures_are_written(tmp_path):
    _pictures.losses(tmp_path / "loss.png", [{"step": 0, "heldout": 5.0}], bigram=2.5, title="t")
    _pictures.timeline(tmp_path / "none.png", [], title="nothing")
    assert is_png(tmp_path / "loss.png") and is_png(tmp_path / "none.png")


def test_timeline_has_a_lane_a_stream_and_a_colour_a_kind(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        _pictures.Figure, "savefig", lambda figure, path: drawn.append(figure.axes[0])
    )
    records = [
        ("compute", "forward layers/0", 1.010, 1.040, "forward"),
        ("h2d", "load layers/1", 1.000, 1.020, "load"),
        ("comm", "gather layers/1", 1.000, 1.001, "gather"),
    ]
    _pictures.timeline(tmp_path / "t.png", records, title="t")
    (axes,) = drawn
    assert [label.get_text() for label in axes.get_yticklabels()] == [*_pictures.LANES, "comm"]
    bars = {
        (bar.get_x(), bar.get_width(), bar.get_y() + bar.get_height() / 2) for bar in axes.patches
    }
    expected = {(0, 20, 0), (0, 1, 4), (10, 30, 1)}
    assert {tuple(round(x, 6) for x in bar) for bar in bars} == expected
    assert sorted(text.get_text() for text in axes.get_legend().get_texts()) == [
        "forward",
        "gather",
        "load",
    ]
    assert {"layers/0", "layers/1", " idle"} <= {text.get_text() for text in axes.texts}


def test_first_ctrl_c_asks_and_second_stops(capfd):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible() as asked:
        assert not asked()
        os.kill(os.getpid(), signal.SIGINT)
        assert asked()
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert "once more stops at once" in capfd.readouterr().err
