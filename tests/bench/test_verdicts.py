"""The block `compiler claims`: what is often said of compilers, and the verdict of the rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.rows.store import Row
from bench.show import verdicts

from .test_climb import _row

NOWHERE = Path("no file is read")


def rows_of(naive: float = 800.0, builtin: float = 64.0, compiled: float = 64.0, xla: float = 128.0) -> list[Row]:
    times = {"torch.naive": naive, "torch.builtin": builtin, "compile.default": compiled, "xla.jit": xla}
    return [_row(rung, us) for rung, us in times.items()]


def told(rows: list[Row]) -> dict[str, tuple[str, str]]:
    """Of each sentence, what was measured and the verdict."""
    head, ruler, *lines = verdicts.write(NOWHERE, rows).splitlines()
    assert head == "| it is said that | measured | verdict |"
    assert ruler == "|---|---|---|"
    cells = [line.strip("| ").split(" | ") for line in lines]
    return {said: (measured, verdict) for said, measured, verdict in cells}


@pytest.mark.parametrize(
    ("compiled", "measured", "verdict"),
    [(64.0, "1.00 × its time", "holds"), (67.0, "1.05 × its time", "holds"), (96.0, "1.50 × its time", "off by 50 %")],
)
def test_a_fused_gelu_is_held_to_pytorchs_own(compiled, measured, verdict):
    found = told(rows_of(compiled=compiled))
    assert found["gelu by torch.compile is near PyTorch's own"] == (measured, verdict)
    assert found["gelu by XLA is near PyTorch's own"] == ("2.00 × its time", "off by 100 %")
    assert "gelu by Triton is near PyTorch's own" not in found, "no row of triton.fused"


@pytest.mark.parametrize(("naive", "measured", "verdict"), [
    (800.0, "6.25 to 12.5 × faster", "holds"),
    (256.0, "2 to 4 × faster", "holds"),
    (192.0, "1.5 to 3 × faster", "does not hold"),
])  # fmt: skip
def test_the_slowest_fused_gelu_decides_whether_all_are_far_from_the_formula(naive, measured, verdict):
    assert told(rows_of(naive))["every fused gelu is far from the formula"] == (measured, verdict)


@pytest.mark.parametrize(
    ("compiled", "verdict"),
    [
        (320.0, "holds for 1 of 1"),
        (100.0, "holds for 0 of 1, 1 gain more"),
        (640.0, "holds for 0 of 1, 1 gain less"),
    ],
)
def test_a_gain_is_counted_over_chains(compiled, verdict):
    found = told(rows_of(compiled=compiled))
    (measured, counted) = found["torch.compile makes chains 1.5 to 3 × faster than the formula call by call"]
    assert measured == f"{800 / compiled:.3g} × (gelu) to {800 / compiled:.3g} × (gelu)"
    assert counted == verdict


def test_rows_of_other_calls_are_no_evidence():
    rows = rows_of()
    assert told([*rows, _row("torch.builtin", 1.0, "backward")]) == told(rows)
    assert verdicts.write(NOWHERE, []) == ""


def test_only_sentences_with_both_times_are_judged():
    rows = [row for row in rows_of() if row.backend != "torch.naive"]
    assert not [said for said in told(rows) if "formula" in said]
