"""What goes into the report: rows, figures, gains, the fastest, and what it refuses."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from bench.__main__ import main
from bench.rows import store
from bench.show import climb, report
from bench.show.roofline import operations
from bench.show.table import fastest
from kernel_ladder import table

from .report_rows import CEILINGS, SHIPPED, embedded, full_rows


def test_data_survives_the_page(full):
    text = full.read_text()
    data = embedded(full)
    found = store.latest(full_rows())
    assert len(data["rows"]) + len(data["ceilings"]) == len(found)
    assert {row["backend"] for row in data["ceilings"]} == {row.backend for row in CEILINGS}
    again = store.read(full.parent / "rows.jsonl")
    assert report.page(again) == text, "the same rows must make the same page"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b'{"kernel": "saxpy"}\n', "not a row of this benchmark"),
        (b'{"op": "gelu", ', "not a whole JSON object"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
    ids=["missing", "foreign", "truncated", "binary"],
)
def test_bad_files(content, message, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert main(["report", str(path), "--output", str(tmp_path / "report.html")]) == 2
    assert message in (said := capsys.readouterr().err)
    assert str(path) in said
    assert not (tmp_path / "report.html").exists()


def test_gains_and_baselines_are_those_of_the_log(full):
    """The climbs' gains and the page's are of the same rows: what one shows, the other must."""
    data = embedded(full)
    climbs = climb.by_call(operations(store.read(full.parent / "rows.jsonl")))
    expected = {
        row.key: (before.backend, climb.gain(row, before))
        for steps in climbs
        for row, before in climb.with_step_before(steps)
        if before and row.us is not None
    }
    shown = {
        tuple(row.get(name) for name in ("op", "backend", "pass", "dtype", "shape", "gpu")): row
        for row in data["rows"]
        if "gain" in row
    }
    order = [row["backend"] for row in data["rows"]]
    assert order == [row.backend for steps in climbs for row in steps], "whoever was measured first"
    assert shown.keys() == expected.keys()
    for key, (before, gain) in expected.items():
        row = shown[key]
        assert row["step_before"] == before
        assert (row["gain"], row["gain_low"], row["gain_high"]) == (gain.value, gain.low, gain.high)
    of_torch = {row["step_before"] for row in shown.values() if row["level"] == "torch"}
    assert of_torch == {"torch.naive"}
    assert {row["level"] for row in shown.values()} == set(table.LEVELS), "peers are no steps"
    assert data["baselines"]["gelu"] == "torch.builtin"
    assert data["baselines"]["dropout"] == "torch.naive"


def test_the_fastest_are_those_of_the_tables(page, full):
    shown = {row["shape"]: set() for row in embedded(full)["rows"]}
    wanted = {"op": "softmax", "pass": "forward", "dtype": "bfloat16"}
    mine = [row for row in embedded(full)["rows"] if all(row[name] == value for name, value in wanted.items())]
    for row in mine:
        shown[row["shape"]] |= {row["backend"]} if row.get("fastest") else set()
    found = [
        r for r in store.latest(store.read(full.parent / "rows.jsonl")) if (r.op, r.pass_) == ("softmax", "forward")
    ]
    for shape in {row["shape"] for row in mine}:
        assert shown[shape] == fastest(r for r in found if (r.shape, r.dtype) == (shape, "bfloat16"))
    page.open(full, "op=softmax&dtype=bfloat16&pass=forward")
    marked = [text for text in page.texts("#peers td") if "◀" in text]
    # Of a level's variants the fastest alone has a cell.
    assert len({row["shape"] for row in mine}) <= len(marked) <= sum(map(len, shown.values()))
    page.clean()


def test_bad_places(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path} is no regular file" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["report", str(SHIPPED), "--output", str(tmp_path / "file" / "report.html")]) == 2
    assert "--output: cannot write" in capsys.readouterr().err


def test_a_figure_for_each_view(full):
    data = embedded(full)
    rows = data["rows"]
    fields = ("gpu", "dtype", "pass")
    of_view = {tuple(row[name] for name in (*fields, "op")) for row in rows}
    ops = Counter(key[:3] for key in of_view)
    several = {view for view, count in ops.items() if count > 1}
    drawn = {
        section: [figure for figure in data["figures"] if figure["section"] == section]
        for section in ("rates", "climb", "roofline")
    }
    calls = {tuple(row[name] for name in (*fields, "op", "shape")) for row in rows}
    assert {tuple(f[name] for name in (*fields, "op", "shape")) for f in drawn["climb"]} == calls
    single = [figure for figure in drawn["roofline"] if figure["op"] != "all"]
    assert {tuple(f[name] for name in (*fields, "op", "shape")) for f in single} == calls
    assert {tuple(f[name] for name in fields) for f in drawn["roofline"] if f["op"] == "all"} == several
    points = [i for f in drawn["rates"] for trace in f.get("data", ()) for i in trace.get("customdata", ())]
    assert sorted(i for i in points if i is not None) == [i for i, row in enumerate(rows) if "us" in row]


def test_error_bars_end_at_the_interval(full):
    data = embedded(full)
    figure = next(f for f in data["figures"] if f["section"] == "rates" and f["op"] == "gelu")
    traces = [trace for trace in figure["data"] if "customdata" in trace]
    assert traces
    for trace in traces:
        bars = trace["error_y"]
        ends = zip(trace["customdata"], trace["y"], bars["array"], bars["arrayminus"], strict=True)
        for i, value, above, below in ends:
            if i is None:
                assert value is None
                continue
            row = data["rows"][i]
            assert value == row["gbs"]
            assert value + above == pytest.approx(row["gbs"] * row["us"] / row["us_low"])
            assert value - below == pytest.approx(row["gbs"] * row["us"] / row["us_high"])


def test_without_plotly_there_is_a_sentence(full, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    output = tmp_path / "report.html"
    assert main(["report", str(full.parent / "rows.jsonl"), "--output", str(output)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m bench: the report needs plotly")
    assert "`pip install plotly`" in said
    assert said.count("\n") == 1
    assert not output.exists()
