"""The block `claims`: what is compared with other libraries, over which calls."""

from __future__ import annotations

from pathlib import Path

from bench.show import claims

from .test_climb import _row

FA4, CUDNN = "peer.flash-attn-4", "torch.cudnn"


def attention(backend: str, us: float | None, shape: str = "a", pass_: str = "forward", dtype: str = "bfloat16"):
    return _row(backend, us, pass_, op="attention", shape=shape, dtype=dtype)


ROWS = [
    attention(FA4, 100.0),
    attention("cuda.naive", 400.0),
    attention("cuda.persistent", 50.0),
    attention("triton.flash", 200.0),
    attention(FA4, 100.0, "b"),
    attention("cuda.persistent", 200.0, "b"),
    attention(FA4, None, "c"),
    attention("cuda.persistent", 1.0, "c"),
    attention(FA4, 100.0, "a", "backward"),
    attention("cuda.flash", 125.0, "a", "backward"),
    attention(FA4, 100.0, "d", dtype="float32"),
    attention("cuda.persistent", 1.0, "d", dtype="float32"),
]


def test_each_call_is_compared_with_the_best_rung_of_a_level():
    """Calls that both have, in 16 bits: the mean of 2 and 0.5 is 1."""
    (line,) = claims.lines(ROWS)
    assert line == [
        "`attention`",
        "flash-attn-4",
        "0.50 (0.50 – 0.50; 1)",
        "–",
        "1.00 (0.50 – 2.00; 2)",
        "0.80 (0.80 – 0.80; 1)",
    ]


def test_another_library_is_another_line_and_none_without_rows():
    told = claims.lines([*ROWS, attention(CUDNN, 75.0)])
    assert [line[1] for line in told] == ["flash-attn-4", "cuDNN, in PyTorch"]
    assert told[1][4] == "1.50 (1.50 – 1.50; 1)"
    assert claims.write(Path("gpu.jsonl"), []) == ""
    assert claims.write(Path("gpu.jsonl"), ROWS).count("\n") == 2
