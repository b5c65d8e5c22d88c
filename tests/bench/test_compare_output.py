"""What `bench compare` prints, as text, Markdown and JSON, and what it refuses."""

from __future__ import annotations

import re

import pytest

from bench.__main__ import main
from bench.rows import store

from .compare_rows import BACKENDS, SHAPES, json_of, run_of, timed_row


def test_plain_text_is_stable(compare):
    """In a pipe: no colour, no box, no trailing space, nothing wrapped or cut; the same each time."""
    before, after = run_of(seed=1), run_of(seed=2, slow={"cuda.naive": 1.5})
    code, text = compare(before, after, "--all")
    assert code == 1
    assert text == compare(before, after, "--all")[1]
    assert not re.search(r"[\x1b│─╭…]|[ \t]$", text, re.MULTILINE)
    for row in after:
        assert re.search(rf"^gelu +{row.backend} +forward +bfloat16 +{row.shape} ", text, re.MULTILINE)


def test_markdown(compare):
    before = [*run_of(seed=1), timed_row("cuda.naive", op="softmax")]
    broken = timed_row("cuda.naive", us=None, op="softmax", wrong="a | b\nin <two> lines")
    code, text = compare(before, [*run_of(seed=2), broken], "--markdown")
    assert code == 1
    assert text.startswith("**FAIL: 1 became wrong")
    assert "a \\| b in &lt;two> lines |" in text
    lines = text.splitlines()
    tables = [i for i, line in enumerate(lines) if line.startswith("|--")]
    assert tables
    for i in tables:
        cells = lines[i].count("|")
        while i < len(lines) and lines[i].startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", lines[i])) == cells
            i += 1
    assert text.count("<details>") == text.count("</details>")


def test_markdown_fits_a_comment(compare):
    shapes = [f"{i}x4096" for i in range(2000)]
    before = [timed_row(shape=shape) for shape in shapes]
    after = [timed_row(shape=shape, us=150.0 + i) for i, shape in enumerate(shapes)]
    text = compare(before, after, "--markdown", "--all")[1]
    assert "and 1960 more" in text
    assert len(text) < 65_536


def test_json(compare):
    found = json_of(compare, run_of(seed=1), run_of(seed=2, slow={"cuda.naive": 1.1}))
    assert not found["passed"]
    assert found["failures"] == [f"{len(SHAPES)} slower past 5 %"]
    assert len(found["changes"]) == len(SHAPES) * len(BACKENDS)
    for change in found["changes"]:
        low, value, high = (change["corrected"][name] for name in ("low", "value", "high"))
        assert low <= value <= high
        assert change["past_threshold"] == (change["backend"] == "cuda.naive")
        assert (change["direction"] == "slower") >= change["past_threshold"]
        assert change["control"] == (change["backend"] == "torch.builtin") != change["judged"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: text[:-30], "not a whole JSON object"),
        (lambda text: text[:-1], "has no end"),
        (lambda text: '{"kernel": "saxpy"}\n', "not a row of this benchmark: it lacks 'op'"),
        (lambda text: "", "holds no rows"),
        (lambda text: text.replace('"us": 100.0', '"us": -1.0'), "'us' must be above zero, got -1.0"),
        (lambda text: text.replace('"us": 100.0', '"us": "fast"'), "'us' must be a number or null, got 'fast'"),
        (lambda text: text.replace('"us": 100.0', '"us": null'), "neither a time nor a reason"),
    ],
    ids=["truncated", "no-end", "foreign", "empty", "negative", "text", "no-time"],
)
def test_spoiled_files(spoil, message, tmp_path, capsys):
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    store.write(good, [timed_row()])
    bad.write_text(spoil(good.read_text()))
    for pair in ((good, bad), (bad, good)):
        assert main(["compare", *map(str, pair)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--op", "gelo"], "unknown op 'gelo'; did you mean 'gelu'?"),
        (["--backend", "cuda.vectorised"], "did you mean 'cuda.vectorized'"),
        (["--pass", "sideways"], "unknown pass 'sideways'"),
        (["--dtype", "float8"], "Known are bfloat16"),
        (["--backend", ""], "--backend: no name in ''; known are cuda, cuda.vectorized"),
        (["--pass", ","], "--pass: no name in ','; known are forward"),
    ],
)
def test_unknown_names(options, message, compare):
    code, text = compare([timed_row()], [timed_row()], *options)
    assert code == 2
    assert message in text


@pytest.mark.parametrize("threshold", ["5", "-0.1", "nan", "five"])
def test_bad_thresholds(threshold, compare, capsys):
    with pytest.raises(SystemExit, match="2"):
        compare([timed_row()], [timed_row()], "--threshold", threshold)
    assert "expected a share from 0 up to 1" in capsys.readouterr().err


def test_missing_files_and_nothing_in_common(tmp_path, compare, capsys):
    assert main(["compare", str(tmp_path / "no.jsonl"), str(tmp_path / "no.jsonl")]) == 2
    assert "no.jsonl does not exist" in capsys.readouterr().err
    assert "nothing to compare" in compare([timed_row()], [timed_row("cuda.naive")])[1]


def test_the_clocks_difference_is_shown(compare):
    before, after = ([timed_row(clock_mhz=mhz)] for mhz in (1980.0, 1755.0))
    assert "median clock: 1,980 MHz → 1,755 MHz" in compare(before, after)[1]


def test_notes(compare):
    before = timed_row(peak_mib=96.0, graph=True)
    after = timed_row(us=150.0, peak_mib=224.0, graph=False, clocks_moved=True)
    text = compare([before], [after])[1]
    assert "launch gaps in B alone, clock moved, peak memory 96 → 224 MiB" in text
