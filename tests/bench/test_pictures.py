"""Pictures of rows: places of shapes, panels, memory against length."""

from __future__ import annotations

import pytest

from bench.measure import lengths
from bench.rows import store
from bench.rows.published import published
from bench.rows.store import Row
from bench.show import ladders, memory, panels, pictures

from ..conftest import a_row


def test_lines_join_shapes_whose_options_only_repeat_them(tmp_path):
    norms = [
        Row(op="layer_norm", backend="torch.naive", level="torch", pass_="forward", dtype="bfloat16", shape=f"4x{n}",
            shapes=[[4, n], [n], None], options={"normalized_shape": [n], "eps": eps})
        for eps, n in ((1e-5, 8), (1e-5, 16), (1e-3, 32))
    ]  # fmt: skip
    first, second, other = (place for _, place in panels.places(norms))
    assert (first, second) == (0, 1)
    assert other - second > 1


def test_what_memory_holds_far_below_has_panels_of_its_own():
    def timed(shape: str, pass_: str, dtype: str, flops: float) -> Row:
        return Row(
            op="attention", backend="torch.naive", level="torch", pass_=pass_, dtype=dtype, shape=shape, us=2000.0,
            flops=flops, bytes=1e8, ceiling_gbs=4000.0, ceiling_tflops=1000.0,
        )  # fmt: skip

    found = [
        timed(shape, pass_, dtype, flops)
        for dtype in ("float32", "bfloat16")
        for pass_ in ("backward", "forward")
        for shape, flops in (("full", 1e12), ("causal", 5e11), ("decode", 1e9))
    ]
    panels = pictures._panels([row for row in found if (row.shape, row.pass_) != ("decode", "backward")])
    assert [(panel.title, panel.bytes_bound) for panel in panels] == [
        ("forward, bfloat16", False),
        ("backward, bfloat16", False),
        ("forward, float32", False),
        ("backward, float32", False),
        ("forward, bfloat16, bound by memory", True),
        ("forward, float32, bound by memory", True),
    ]
    # What memory binds all of needs no second kind.
    panels = pictures._panels([row for row in found if row.shape == "decode"])
    assert [panel.title for panel in panels][:2] == ["forward, bfloat16", "backward, bfloat16"]
    assert all(panel.bytes_bound for panel in panels)


@pytest.mark.parametrize(
    ("shapes", "lines"),
    [
        ((3, 3, 2, 2), [[0, 1], [2, 3]]),  # both passes of a dtype together
        ((12, 6), [[0], [1]]),  # too wide for both
        ((39, 19, 3, 3, 4), [[0], [1], [2, 3], [4]]),
    ],
)
def test_panels_stand_side_by_side(shapes, lines):
    panels = []
    for i, count in enumerate(shapes):
        of_kind = {"op": "gelu", "backend": "torch.naive", "level": "torch", "pass_": "forward", "dtype": str(i // 2)}
        members = [Row(shape=str(n), **of_kind) for n in range(count)]
        panels.append(pictures.Panel(str(i), members, False))
    assert [[int(panel.title) for panel in line] for line in pictures._lines(panels)] == lines


def test_memory_is_drawn_against_the_length_at_the_headline_setting(tmp_path):
    shipped = store.read(published())
    chosen = lengths.family(shipped)
    assert len({r.shapes[0][2] for r in chosen}) > 2
    assert len({(r.dtype, str(r.options), r.shapes[0][0] * r.shapes[0][2], r.shapes[0][3]) for r in chosen}) == 1
    path = tmp_path / "here.jsonl"
    store.write(path, chosen)
    (picture,) = memory.draw(path)
    drawn = picture.read_text()
    assert all(row.backend in drawn for row in chosen)
    memory.draw(path)
    assert picture.read_text() == drawn
    store.write(path, [r for r in chosen if r.shapes[0][2] == 4096])
    assert memory.draw(path) == []


@pytest.mark.parametrize(
    ("backend", "said"), [("torch.builtin", "other library's"), ("torch.naive", "naive formula's")]
)
@pytest.mark.parametrize("times", [(100.0, 95.0), (1500.0, 100.0), (20000.0, 90.0)])
def test_every_bar_of_a_ladder_and_its_label_fit(backend, said, times, tmp_path, monkeypatch):
    """A rung may be a hundred times as fast as what there is to compare with. Bars stay in proportion."""
    seen, texts = [], []
    draw, write = ladders.Axes.barh, ladders.Axes.text
    monkeypatch.setattr(ladders.Axes, "barh", lambda *a, **k: seen.append((a[2], k["left"])) or draw(*a, **k))
    monkeypatch.setattr(ladders.Axes, "text", lambda *a, **k: texts.append(a[3]) or write(*a, **k))
    names = backend, "cuda.vectorized"
    rows = [
        a_row(op="rope", backend=name, level=name.partition(".")[0], us=us)
        for name, us in zip(names, times, strict=True)
    ]
    bars = [(row, times[0] / row.us) for row in rows]
    ladders._picture("rope", bars, tmp_path / "ladder.svg")
    (first, _), (last, left) = seen
    assert last / first == pytest.approx(times[0] / times[1])
    assert left + last <= 0.9
    assert any(said in text for text in texts)
