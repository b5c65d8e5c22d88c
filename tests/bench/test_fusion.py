"""The blocks `fusion` and `fusion picture`: what compilers and kernels by hand make of each chain."""

from __future__ import annotations

import json

import pytest

from bench.profile import counters
from bench.rows import store
from bench.rows.store import Row
from bench.show import chain_chart, fusion, fusion_chart

from .test_climb import LEAST, SHAPE, _row


def rows_of(compiled: float, **changes) -> list[Row]:
    return [
        _row("torch.naive", 800.0),
        _row("torch.builtin", 70.0),
        _row("compile.default", compiled),
        _row("xla.jit", 128.0, graph=False),
        _row("triton.fused", 66.0),
        _row("cuda.naive", 320.0),
        _row("cuda.vectorized", 64.0),
        _row("torch.naive", 900.0, "backward"),
        _row("cuda.vectorized", 90.0, "backward"),
    ]


@pytest.mark.parametrize(
    ("compiled", "told"),
    [
        (1600.0, "torch.compile hurts, at 2 × the naive time"),
        (128.0, "torch.compile takes 2 × the best by hand, 6.25 × faster than naive"),
        (67.0, "torch.compile equals the kernels by hand, 11.9 × faster than naive"),
        (32.0, "torch.compile is ahead of the kernels by hand, at 0.50 of their time, 25 × faster than naive"),
    ],
)
def test_a_sentence_says_when_a_compiler_helps(compiled, told):
    said = fusion.sentences(fusion.chosen("gelu", rows_of(compiled)))
    assert said == f"Forward: {told}; XLA takes 2 × the best by hand, 6.25 × faster than naive."


def test_a_chain_without_the_naive_formula_is_held_to_kernels_by_hand():
    rows = [row for row in rows_of(128.0) if row.backend != "torch.naive"]
    assert "Forward: torch.compile takes 2 × the best by hand;" in fusion.sentences(fusion.chosen("gelu", rows))


def test_a_table_has_the_fastest_rung_of_a_level_its_kernels_and_bytes(tmp_path):
    path = tmp_path / "gpu.jsonl"
    key = {"op": "gelu", "pass": "forward", "dtype": "bfloat16", "shape": SHAPE, "gpu": "GPU 1"}
    counted = {"counters": {"least_bytes": LEAST, "dram_bytes": 5 * LEAST}, "kernels": [{}, {}, {}]}
    counters.file_beside(path).write_text(json.dumps({**key, **counted, "backend": "torch.naive"}) + "\n")
    written = fusion.write(path, rows_of(67.0))
    assert written.startswith(f"### gelu\n\n{SHAPE}, bfloat16, GPU 1. Forward: torch.compile equals")
    assert "rung and pass](pictures/fusion-gelu-gpu.svg)" in written
    assert "](../pictures/fusion-gelu-gpu.svg)" in fusion.write(path, rows_of(67.0), tmp_path / "docs")
    lines = {line.split("`")[1]: line for line in written.splitlines() if line.startswith("| `")}
    assert list(lines) == ["torch.naive", "compile.default", "xla.jit", "triton.fused", "cuda.vectorized"]
    assert lines["torch.naive"] == "| `torch.naive` | 800 µs | 1 | 3 | 5.00 | 900 µs | 1 | – |  |"
    assert lines["xla.jit"] == "| `xla.jit` | 128 µs‡ | 6.25 | – |  |  |  |  |  |"
    assert lines["cuda.vectorized"] == "| `cuda.vectorized` | 64 µs | 12.5 | – |  | 90 µs | 10 | – |  |"
    assert "launched call by call" in written
    assert written.endswith("– not counted yet.")
    elsewhere = {**key, "gpu": "GPU 2", "pass": "forward", **counted, "backend": "xla.jit"}
    counters.file_beside(tmp_path / "gpu-2.jsonl").write_text(json.dumps(elsewhere) + "\n")
    written = fusion.write(path, rows_of(67.0))
    assert "| `xla.jit` | 128 µs‡ | 6.25 | 3§ | 5.00 |" in written
    assert written.endswith("§ counted on GPU 2; – not counted yet.")
    assert fusion.write(path, []) == ""


def test_the_picture_has_a_mark_for_every_time(tmp_path):
    path = tmp_path / "gpu.jsonl"
    assert fusion_chart.draw(path) == []
    store.write(path, rows_of(67.0))
    (picture,) = fusion_chart.draw(path)
    text = picture.read_text()
    assert picture.name == "fusion-gpu.svg"
    for word in ("gelu", "GPU 1", "filled: forward, open: backward", "torch", "compile", "xla", "triton", "cuda"):
        assert f">{word}" in text or word in text, word
    assert fusion_chart.draw(path)[0].read_text() == text, "the same bytes from the same rows"


def test_each_chain_has_a_picture_of_its_rungs_whose_texts_fit(tmp_path, monkeypatch):
    path = tmp_path / "gpu.jsonl"
    assert chain_chart.draw(path) == []
    rows = [*rows_of(67.0), _row("cuda.warp_specialized_persistent", 70.0)]
    key = {"op": "gelu", "pass": "forward", "dtype": "bfloat16", "shape": SHAPE, "gpu": "GPU 1"}
    counts = {"counters": {"least_bytes": LEAST, "dram_bytes": 5 * LEAST}, "kernels": [{}, {}, {}]}
    counters.file_beside(path).write_text(json.dumps({**key, **counts, "backend": "cuda.vectorized"}) + "\n")
    store.write(path, rows)
    figures = []
    monkeypatch.setattr(chain_chart.plt, "close", figures.append)
    (picture,) = chain_chart.draw(path)
    text = picture.read_text()
    assert picture.name == "fusion-gelu-gpu.svg"
    for word in (
        "torch.naive",
        "compile.default",
        "xla.jit",
        "cuda.vectorized",
        "kernels 3 / –, bytes 5.00 / – × least",
    ):
        assert f">{word}<" in text, word
    assert "cuda.naive" not in text, "the fastest rung stands for its level"
    assert "800 µs, " in text
    (figure,) = figures
    (axes,) = figure.axes
    for shown in axes.texts:
        assert shown.get_window_extent().x1 <= figure.bbox.x1, shown.get_text()
        assert shown.get_fontsize() >= 8
    assert figure.get_size_inches()[0] * 96 == pytest.approx(400)
    assert chain_chart.draw(path)[0].read_text() == text, "the same bytes from the same rows"
