"""Rows of calls of changing lengths, one JSON object a line, in the folder `dynamic` beside the sweep's rows."""

from __future__ import annotations

import dataclasses

from bench.rows.own import RowsOf

FOLDER = "dynamic"


@dataclasses.dataclass(frozen=True)
class DynamicRow:
    """One way to call an operation, over all lengths in turn."""

    op: str
    way: str
    dtype: str
    lengths: list[int]
    width: int
    first_s: list[float]  # seconds of the first call of each length, in their order
    programs: int | None  # that were compiled, where the compiler tells
    later_us: float | None  # of a call of a length that was called before, mean over lengths
    gpu: str | None
    torch: str
    commit: str | None
    dirty: bool | None
    when: str
    unsupported: str | None = None


_KEPT: RowsOf[DynamicRow] = RowsOf(
    FOLDER, DynamicRow, "a row of changing lengths", ("op", "way", "dtype", "width", "gpu")
)
results_file, read, save = _KEPT.results_file, _KEPT.read, _KEPT.save
