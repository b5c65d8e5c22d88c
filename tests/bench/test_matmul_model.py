"""The block `matmul model`: predicted over measured times of the cost model, from rows of any machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.show import matmul_model
from kernel_ladder.selection import matmul

from ..conftest import TIMED, a_row

MHZ = 1500.0
#: Blocks at once by the estimate, in clusters of 1, 2, 4 and 8, of 132 multiprocessors.
AT_ONCE = (132, 132, 132, 128)


def cycles(m: int, n: int, k: int) -> matmul.Costs:
    return matmul.costs_of(m, n, k, 1, 1, 1, 2, False, AT_ONCE)


def row(rung: str, us: float, size: int = 4096, **fields):
    times = {**TIMED, "us": us, "us_q1": us, "us_q3": us, "gpu": "NVIDIA H100 80GB HBM3", "driver": "1"}
    shapes = {"op": "matmul", "shape": f"{size}x{size}x{size}", "shapes": [[size, size]] * 2, "dtype": "bfloat16"}
    made = {"clock_mhz": MHZ, "when": "2026-11-27T09:00:00"}
    return a_row(**{**times, **shapes, **made, "backend": rung, "level": "cuda", **fields})


def rows_of(size: int, off: float = 1.0):
    """The three rungs at a square product, each taking `off` times what the model says."""
    costs = cycles(size, size, size)
    found = {"persistent": costs.persistent, "stream_k": costs.stream_k, "split_k": costs.split_k}
    return [row(f"cuda.{name}", off * count / MHZ, size) for name, count in found.items()]


def test_a_row_that_takes_the_predicted_time_has_no_error():
    found = matmul_model.predictions(rows_of(4096))
    assert [each.rung for each in found] == ["cuda.persistent", "cuda.stream_k", "cuda.split_k"]
    assert [each.ratio for each in found] == pytest.approx([1.0] * 3)
    assert {each.chosen for each in found} == {cycles(4096, 4096, 4096).plan.rung}
    assert all(each.aligned for each in found)
    assert [each.error for each in matmul_model.predictions(rows_of(4096, 1.25))] == pytest.approx([0.2] * 3)


def test_other_rungs_passes_and_dtypes_are_no_rows_of_the_model():
    others = [row("cuda.mma", 1.0), row("cuda.split_k", 1.0, pass_="backward"), row("cuda.split_k", 1.0, op="linear")]
    others += [row("cuda.split_k", 1.0, dtype="float32"), row("cuda.split_k", 1.0, clock_mhz=None)]
    assert matmul_model.predictions(others) == []
    assert matmul_model.write(Path("gpu.jsonl"), others) == ""
    assert matmul_model.write(Path("gpu.jsonl"), [row("cuda.split_k", 1.0, gpu="Some GPU")]) == ""


def test_a_choice_costs_its_time_over_the_fastest():
    """The model takes `persistent` at 4096; here `split_k` is made 1.25 times as fast."""
    rows = rows_of(4096)
    assert matmul_model.choices(matmul_model.predictions(rows)) == [1.0]
    persistent = rows[0].us
    rows[2] = row("cuda.split_k", persistent / 1.25)
    assert matmul_model.choices(matmul_model.predictions(rows)) == pytest.approx([1.25])
    assert matmul_model.choices(matmul_model.predictions(rows[:1])) == []  # nothing to choose among


def test_the_block_keeps_unaligned_products_apart():
    rows = [*rows_of(4096, 1.25), row("cuda.split_k", 1e4, 4099)]
    said = matmul_model.write(Path("gpu.jsonl"), rows)
    assert "4 rows" in said
    assert "timed at 1 of the products. The one of fewest cycles is within 3 % of the fastest at 1;" in said
    assert "| aligned | together | 3 | 0.80 | 20% | 20% |" in said
    assert "| unaligned | `cuda.split_k` | 1 |" in said
