"""Rooflines: the roofs, and the pictures in which names do not overlap."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from matplotlib.text import Text

from bench.__main__ import main
from bench.rows import store
from bench.show import roofline_chart
from bench.show.roofline import roofline

from .report_rows import CPU, SHIPPED, full_rows, measured


def test_roofs_are_measured_ones_where_there_are_any():
    # That of the tensor cores is the best product of all, be it a ceiling of its own or one of the rows.
    for of_rows, best in ((800.0, 800.0), (700.0, 789.0)):
        found = [dataclasses.replace(r, ceiling_tflops=r.ceiling_tflops and of_rows) for r in full_rows()]
        assert [(roof.name, roof.gbs or roof.tflops) for roof in roofline(found, "bfloat16")] == [
            ("memory, by a copy", 4321.0),
            ("L2 cache", 9876.0),
            ("tensor cores, bfloat16", best),
            ("CUDA cores, bfloat16", 123.0),
        ]
    carried = measured()
    memory, matrix = roofline(carried, "float32")
    assert memory.gbs == max(row.ceiling_gbs for row in carried if row.ceiling_gbs)
    assert matrix.tflops == max(r.ceiling_tflops for r in carried if r.ceiling_tflops and r.dtype == "float32")
    assert memory.at(2.0) == memory.gbs * 2 / 1e3
    assert matrix.at(2.0) == matrix.tflops


@pytest.mark.parametrize("source", ["full", "cpu"])
def test_rooflines_are_drawn_and_the_same_again(source, tmp_path):
    path = tmp_path / "rows.jsonl"
    few = ("matmul", "softmax", "ceiling")  # every operation's are drawn by the test below
    store.write(path, [r for r in full_rows() if r.op in few] if source == "full" else store.read(CPU))
    ops = {row.op for row in store.read(path)} - {"ceiling"}
    drawn = roofline_chart.draw(path)
    assert {p.name for p in drawn} == {"roofline-rows.svg", *(f"roofline-{op}-rows.svg" for op in ops)}
    before = [p.read_bytes() for p in drawn]
    assert all(b"<svg" in content for content in before)
    roofline_chart.draw(path)
    assert [p.read_bytes() for p in drawn] == before


def test_names_on_rooflines_do_not_overlap(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(roofline_chart.plt, "close", figures.append)
    path = tmp_path / "rows.jsonl"
    store.write(path, full_rows())
    roofline_chart.draw(path)
    assert len(figures) == 1 + len({row.op for row in store.read(path)} - {"ceiling"})
    for figure in figures:
        for axes in figure.axes:
            # A rotated name's box is far larger than the name.
            level = [text for text in axes.texts if text.get_rotation() == 0]
            assert len(level) >= 3
            boxes = [(text.get_text(), Text.get_window_extent(text)) for text in level]  # without its leader
            for (a, box), (b, other) in itertools.combinations(boxes, 2):
                across = min(box.x1, other.x1) - max(box.x0, other.x0)
                down = min(box.y1, other.y1) - max(box.y0, other.y0)
                assert across <= 0 or down <= 1.5, f"{a} lies on {b}"
    monkeypatch.undo()
    roofline_chart.plt.close("all")


def test_roofline_of_no_rows(tmp_path):
    store.write(tmp_path / "rows.jsonl", [])
    assert roofline_chart.draw(tmp_path / "rows.jsonl") == []


def test_readme_links_rooflines(tmp_path, capsys):
    file = tmp_path / "README.md"
    names = ("roofline", "roofline gelu")
    file.write_text("\n".join(f"<!-- results:begin {n} -->\n<!-- results:end {n} -->" for n in names) + "\n")
    assert main(["readme", str(file), "--results", str(SHIPPED)]) == 0
    text = file.read_text()
    for name in (f"roofline-{SHIPPED.stem}.svg", f"roofline-gelu-{SHIPPED.stem}.svg"):
        assert f"pictures/{name})" in text
