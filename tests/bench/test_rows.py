"""Files of rows: what a row may hold, spoiled lines, places that cannot be read or written."""

from __future__ import annotations

import errno
import json
import math
import re

import pytest

from bench import sweep
from bench.__main__ import main
from bench.bridge import rows as bridge_rows
from bench.dynamic import rows as dynamic_rows
from bench.measure import lengths
from bench.measure.environment import ROOT
from bench.patched import rows as patched_rows
from bench.profile import counters
from bench.rows import store
from bench.scaling import rows as scaling_rows

from ..conftest import TIMED, a_row


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: text[:-20] + "\n", "not a whole JSON object"),
        (lambda text: text[:-20], "not a whole JSON object"),
        (lambda text: text[:-1], "has no end"),
        (lambda text: text + '{"kernel": "saxpy"}\n', "not a row of this benchmark: it lacks 'op'"),
        (lambda text: text + "[1, 2]\n", "expected a JSON object, got list"),
        (lambda text: text.replace('"us":', '"ms":'), "unknown fields 'ms'"),
    ],
    ids=["truncated", "truncated-last", "no-end", "foreign", "list", "unknown-field"],
)
def test_spoiled_files(spoil, message, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    store.append(path, a_row(**TIMED))
    path.write_text(spoil(path.read_text()))
    with pytest.raises(store.ResultsError, match=message) as raised:
        store.read(path)
    assert str(path) in str(raised.value)
    before = path.read_text()
    assert main(["--op", "gelu", "--quick", "--no-ceilings", "--output", str(path)]) == 2
    assert message in capsys.readouterr().err
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"us": "fast"}, "'us' must be a number or null, got 'fast'"),
        ({"us": True}, "'us' must be a number or null, got True"),
        ({"us": 0}, "'us' must be above zero, got 0"),
        ({"us": -1.0}, "'us' must be above zero, got -1.0"),
        ({"us": math.nan}, "'us' must be a finite number, got nan"),
        ({"us_q1": None}, "a timed row of an operation lacks 'us_q1'"),
        ({"us_q3": None, "gbs": None, "tflops": None}, "lacks 'us_q3', 'gbs', 'tflops'"),
        ({"bytes": None}, "lacks 'bytes'"),
        ({"bytes": 1.5}, "'bytes' must be a whole number or null, got 1.5"),
        ({"bytes": 10**400}, "'bytes' must be a finite number, got 1000"),
        ({"flops": -1}, "'flops' must be 0 or more, got -1"),
        ({"tflops": 0.0}, "'tflops' must be above zero where 'flops' is, got 0.0"),
        ({"gbs": -1.0}, "'gbs' must be 0 or more, got -1.0"),
        ({"us_low": 1.0}, "'us_low' and 'us_high' come together, got 'us_low' alone"),
        ({"when": None}, "'when' must be text, got None"),
        ({"when": 20260101}, "'when' must be text, got 20260101"),
        ({"options": None}, "'options' must be an object, got None"),
        ({"shapes": None}, "'shapes' must be a list, got None"),
        ({"shapes": [[2, "2"]]}, "'shapes' must be a list of lists of whole numbers"),
        ({"op": None}, "'op' must be text, got None"),
        ({"backend": ["torch"]}, "'backend' must be text, got ['torch']"),
        ({"pass": 1}, "'pass' must be text, got 1"),
        ({"commit": 7}, "'commit' must be text or null, got 7"),
        ({"dirty": 0}, "'dirty' must be true or false or null, got 0"),
        ({"error": [0.0] * 100}, "'error' must be a number or null, got [0.0, 0.0"),
    ],
    ids=str,
)
def test_a_field_of_another_type_is_named(changes, message, tmp_path, capsys):
    path, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    path.write_text(json.dumps(json.loads(store.to_json(a_row(**TIMED))) | changes) + "\n")
    page.write_text("<!-- results:begin gelu -->\n<!-- results:end gelu -->\n")
    readers = (
        ["table", str(path)],
        ["pictures", str(path)],
        ["report", str(path), "--output", str(tmp_path / "report.html")],
        ["readme", str(page), "--results", str(path)],
        ["merge", str(path), "--into", str(tmp_path / "into.jsonl")],
        ["compare", str(path), str(path)],
    )
    for argv in readers:
        assert main(argv) == 2
        said = capsys.readouterr().err
        assert f"{path}:1: " in said
        assert message in said
        assert len(said) < 300


def test_what_rows_may_lack():
    for row in (
        a_row(**TIMED | {"us": 2}),  # a whole number is a number
        a_row(unsupported="only on Sundays", shapes=[[2, 2], None, []]),
        a_row(op=store.CEILING, us=2.0, bytes=8, gbs=0.004),
        a_row(op=store.CEILING, us=2.0, flops=8, tflops=4e-6),
        a_row(op=store.CEILING, us=2.0),
    ):
        assert store.from_json(store.to_json(row), "here") == row


def _reading(path: str, page: str) -> list[list[str]]:
    """Every command that reads rows from a path."""
    swept = ["--op", "gelu", "--backend", "torch", "--quick", "--output", path]
    commands = [swept, [*swept, "--resume"], ["readme", page, "--results", path]]
    commands += [
        ["merge", path, "--into", f"{page}.jsonl"],
        ["merge", str(ROOT / "bench/results/cpu.jsonl"), "--into", path],
    ]
    return commands + [[name, path] for name in ("table", "pictures", "report")] + [["compare", path, path]]


@pytest.mark.parametrize("place", ["folder", "/dev/full"])
def test_what_is_no_file_is_not_read(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "run", lambda *args: pytest.fail("nothing must be measured"))
    (tmp_path / "page.md").write_text("")
    path = str(tmp_path) if place == "folder" else place
    for argv in _reading(path, str(tmp_path / "page.md")):
        assert main(argv) == 2
        assert f"{path} is no regular file; expected rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "reason"), [("/proc/x.jsonl", ""), ("file/x.jsonl", "file is no folder"), ("file/x/y", "Not a directory")]
)
def test_rows_that_cannot_be_written_are_not_measured(place, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "run", lambda *args: pytest.fail("nothing must be measured"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    for argv in (
        ["--op", "gelu", "--output", place],
        ["merge", str(ROOT / "bench/results/cpu.jsonl"), "--into", place],
    ):
        assert main(argv) == 2
        assert re.search(f"{place}: cannot be written: .*{reason}", capsys.readouterr().err)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_is_one_line(monkeypatch, tmp_path, capsys):
    def full(path, row):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(store, "append", full)
    path = tmp_path / "rows.jsonl"
    argv = ["--op", "gelu", "--backend", "torch", "--quick", "--no-ceilings", "--time", "0.02", "--no-pictures"]
    assert main([*argv, "--output", str(path)]) == 2
    assert capsys.readouterr().err == f"python -m bench: {path}: No space left on device\n"
    assert list(tmp_path.iterdir()) == [], "finding out leaves nothing behind"


@pytest.mark.parametrize("path", sorted((ROOT / "bench" / "results").rglob("*.jsonl")), ids=lambda path: path.stem)
def test_every_row_that_is_kept_is_whole(path):
    if path.parent.name == "scaling":
        assert scaling_rows.read(path)
    elif path.parent.name == "dynamic":
        assert dynamic_rows.read(path)
    elif path.parent.name == "patched":
        assert patched_rows.read(path)
    elif path.parent.name == "bridge":
        assert bridge_rows.read(path)
    elif not path.name.endswith(counters.SUFFIX):
        assert store.read(path)


def test_attention_of_unknown_shapes_has_no_length():
    for shapes in ([], [[2, 2]], [None, None, None], [[2], [2]]):
        assert lengths.setting(a_row(op="attention", shapes=shapes)) == ()


def test_rows_survive_the_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = a_row(**TIMED, options={"approximate": "tanh"}, shapes=[[2, 2]], unsupported="a “reason”\nin two lines")
    store.append(path, row)
    store.append(path, a_row(error=float("inf"), gpu="there"))
    assert store.read(path) == [row, a_row(error=None, gpu="there")]
