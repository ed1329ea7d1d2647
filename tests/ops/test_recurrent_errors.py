"""What the recurrences and the convolution refuse, and what they say."""

from __future__ import annotations

import re

import pytest
import torch

from mtfunc import ops
from tests.ops.recurrences import delta_inputs, documents, ssd_inputs
from tests.ops.test_conv import case

DELTA = dict(zip(("q", "k", "v", "g", "beta", "state"), delta_inputs(6)))
SSD = dict(zip(("x", "dt", "A", "B", "C", "D", "state"), ssd_inputs(6)))
CONV = dict(zip(("x", "weight", "bias", "state"), case(6)))
OPS = {
    "gated_delta_rule": (ops.gated_delta_rule, DELTA),
    "ssd": (ops.ssd, SSD),
    "causal_conv1d": (ops.causal_conv1d, CONV),
}
INTEGERS = torch.zeros(2, 4, 6, dtype=torch.int64)
ids = documents(6)


@pytest.mark.parametrize(
    ("op", "change", "error", "message"),
    [
        ("gated_delta_rule", {"q": DELTA["q"][0]}, ValueError, "q has shape (2, 6, 3); expected 4"),
        ("gated_delta_rule", {"v": DELTA["v"][0]}, ValueError, "v has shape (4, 6, 5); expected 4"),
        (
            "gated_delta_rule",
            {"k": DELTA["k"][..., :2]},
            ValueError,
            "k has shape (2, 2, 6, 2); expected (2, 2, 6, 3), as q",
        ),
        (
            "gated_delta_rule",
            {"q": DELTA["q"].repeat(1, 2, 1, 1)[:, :3], "k": DELTA["k"].repeat(1, 2, 1, 1)[:, :3]},
            ValueError,
            "q has 3 heads; expected a number that divides 4",
        ),
        (
            "gated_delta_rule",
            {"q": DELTA["q"][:, :, :5], "k": DELTA["k"][:, :, :5]},
            ValueError,
            "q has shape (2, 2, 5, 3); expected (2, 2, 6, 3), batch and tokens as in v",
        ),
        ("gated_delta_rule", {"g": DELTA["g"].mT}, ValueError, "g has shape (2, 6, 4); expected"),
        (
            "gated_delta_rule",
            {"beta": DELTA["beta"][..., None]},
            ValueError,
            "beta has shape (2, 4, 6, 1); expected (2, 4, 6), (batch, heads, tokens)",
        ),
        (
            "gated_delta_rule",
            {"state": DELTA["state"].mT},
            ValueError,
            "state has shape (2, 4, 5, 3); expected (2, 4, 3, 5), (batch, heads, key_dim,",
        ),
        (
            "gated_delta_rule",
            {"q": DELTA["q"].float()},
            TypeError,
            "got q torch.float32, k torch.float64, v torch.float64; expected one floating dtype",
        ),
        (
            "gated_delta_rule",
            {"g": INTEGERS},
            TypeError,
            "got g torch.int64; expected one floating",
        ),
        ("gated_delta_rule", {"beta": INTEGERS}, TypeError, "got beta torch.int64"),
        ("gated_delta_rule", {"state": INTEGERS}, TypeError, "got state torch.int64"),
        ("gated_delta_rule", {"chunk": 0}, ValueError, "chunk is 0; expected a number of tokens"),
        ("gated_delta_rule", {"chunk": 2.0}, ValueError, "chunk is 2.0; expected a number of"),
        ("gated_delta_rule", {"segments": ids[:, 1:]}, ValueError, "segments has shape (2, 5)"),
        ("gated_delta_rule", {"segments": ids.float()}, TypeError, "segments is torch.float32"),
        ("ssd", {"x": SSD["x"][0]}, ValueError, "x has shape (4, 6, 5); expected 4 axes"),
        ("ssd", {"B": SSD["B"][0]}, ValueError, "B has shape (2, 6, 3); expected 4 axes"),
        ("ssd", {"C": SSD["C"][:1]}, ValueError, "C has shape (1, 2, 6, 3); expected (2, 2, 6, 3)"),
        (
            "ssd",
            {"B": SSD["B"].repeat(1, 2, 1, 1)[:, :3], "C": SSD["C"].repeat(1, 2, 1, 1)[:, :3]},
            ValueError,
            "B has 3 heads; expected a number that divides 4",
        ),
        (
            "ssd",
            {"B": SSD["B"][:, :, :5], "C": SSD["C"][:, :, :5]},
            ValueError,
            "B has shape (2, 2, 5, 3); expected (2, 2, 6, 3), batch and tokens as in x",
        ),
        ("ssd", {"dt": SSD["dt"].mT}, ValueError, "dt has shape (2, 6, 4); expected (2, 4, 6)"),
        ("ssd", {"A": SSD["A"][:3]}, ValueError, "A has shape (3,); expected (4,), (heads,)"),
        ("ssd", {"D": SSD["D"][None]}, ValueError, "D has shape (1, 4); expected (4,), (heads,)"),
        ("ssd", {"state": SSD["state"].mT}, ValueError, "state has shape (2, 4, 5, 3); expected"),
        ("ssd", {"x": SSD["x"].bfloat16()}, TypeError, "got x torch.bfloat16, B torch.float64"),
        ("ssd", {"dt": INTEGERS}, TypeError, "got dt torch.int64; expected one floating dtype"),
        ("ssd", {"A": INTEGERS}, TypeError, "got A torch.int64"),
        ("ssd", {"D": INTEGERS}, TypeError, "got D torch.int64"),
        ("ssd", {"state": INTEGERS}, TypeError, "got state torch.int64"),
        ("ssd", {"chunk": -1}, ValueError, "chunk is -1; expected a number of tokens, at least 1"),
        ("ssd", {"segments": ids[:1]}, ValueError, "segments has shape (1, 6); expected (2, 6)"),
        ("ssd", {"segments": ids.bool()}, TypeError, "segments is torch.bool; expected int64"),
        ("causal_conv1d", {"x": CONV["x"][0]}, ValueError, "x has shape (6, 3); expected 3 axes"),
        (
            "causal_conv1d",
            {"weight": CONV["weight"][:, None]},
            ValueError,
            "weight has shape (3, 1, 4); expected 2 axes, (channels, width)",
        ),
        (
            "causal_conv1d",
            {"weight": CONV["weight"].mT},
            ValueError,
            "weight has shape (4, 3); expected (3, 3), (channels, width)",
        ),
        (
            "causal_conv1d",
            {"weight": CONV["weight"][:, :0]},
            ValueError,
            "weight has shape (3, 0); expected (3, 1), (channels, width)",
        ),
        ("causal_conv1d", {"bias": CONV["bias"][:2]}, ValueError, "bias has shape (2,); expected"),
        (
            "causal_conv1d",
            {"state": CONV["state"][:, 1:]},
            ValueError,
            "state has shape (2, 2, 3); expected (2, 3, 3), (batch, width - 1, channels)",
        ),
        ("causal_conv1d", {"bias": CONV["bias"].float()}, TypeError, "bias torch.float32"),
        ("causal_conv1d", {"state": CONV["state"].float()}, TypeError, "state torch.float32"),
        (
            "causal_conv1d",
            {"activation": "relu"},
            ValueError,
            "activation 'relu'; expected None or 'silu'",
        ),
        ("causal_conv1d", {"segments": ids[0]}, ValueError, "segments has shape (6,); expected"),
    ],
)
def test_errors(op, change, error, message):
    fn, inputs = OPS[op]
    fn(**inputs, segments=ids)
    with pytest.raises(error, match=rf"^mt\.ops\.{op}: .*{re.escape(message)}"):
        fn(**(inputs | change))
