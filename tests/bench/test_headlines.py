"""README.md's table of headlines: whose time stands in a cell, and what stands where there is none."""

from __future__ import annotations

from bench.show import headlines

from .test_climb import SHAPE, _row


def cells(rows, op: str = "gelu") -> list[str]:
    (line,) = headlines.lines(rows)
    assert line[:2] == [op, SHAPE]
    return line[2:6]


def test_pytorchs_time_is_that_of_its_best_function():
    own = [_row("torch.naive", 50.0), _row("torch.builtin", 90.0), _row("torch.cudnn", 80.0)]
    back = _row("torch.builtin", 100.0, "backward")
    assert cells([*own, back])[0] == "80 µs · 100 µs"


def test_where_pytorch_has_no_function_its_time_is_the_formulas_and_says_so():
    assert cells([_row("torch.naive", 800.0)])[0] == "800 µs · – (formula)"


def test_a_level_with_rungs_and_no_row_is_not_timed():
    rows = [_row("torch.builtin", 90.0), _row("torch.builtin", 100.0, "backward"), _row("cuda.naive", 200.0)]
    assert cells(rows) == ["90 µs · 100 µs", "not timed", "200 µs · not timed", "– · –"]
    refused = _row("triton.fused", None, unsupported="not today")
    assert cells([*rows, refused])[1] == "– · not timed"
    without = _row("triton", None, level="triton", unsupported="the triton level has no rung of gelu")
    assert cells([*rows, without])[1] == "not timed", "a row of a level that had no rung when it was swept"
