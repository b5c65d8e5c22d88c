"""Rooflines: the measured limits of a machine's memory and arithmetic.

After Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
architectures", Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bench.rows.store import CEILING, Row

#: The note below every roofline.
CAPTION = (
    "Each point stands at its operation's least intensity, least operations over least bytes, whatever the "
    "implementation moves: one that moves more bytes than it must stands lower, not further left."
)


@dataclass(frozen=True)
class Roof:
    """One limit: a slope, `gbs` GB/s times the intensity; or flat, at `tflops`."""

    name: str
    gbs: float | None = None
    tflops: float | None = None

    def at(self, intensity: float) -> float:
        """TFLOP/s that the limit allows at an intensity in operations per byte."""
        return self.tflops if self.gbs is None else self.gbs * intensity / 1e3


def intensity(row: Row) -> float | None:
    """Least operations per least byte of a row; None where it has no such work."""
    return row.flops / row.bytes if row.flops and row.bytes else None


def operations(rows: Iterable[Row]) -> list[Row]:
    """Without the rows that measure the machine."""
    return [row for row in rows if row.op != CEILING]


def roofline(rows: Iterable[Row], dtype: str) -> list[Roof]:
    """The roofs over work in `dtype`, slopes first.

    Rows of ceilings count first. Without them, the ceilings stored in each row give the slope of the copy. The tensor
    cores' rate is that of the best matrix product anywhere, which may be a variant's.
    """
    rows = list(rows)
    slopes = [
        ("memory, by a copy", _best(rows, "ceiling.copy", "gbs") or _carried(rows, "ceiling_gbs")),
        ("L2 cache", _best(rows, "ceiling.l2", "gbs")),
    ]
    matrix = _carried([row for row in rows if row.dtype == dtype], "ceiling_tflops")
    tensor = _best(rows, "ceiling.tensor", "tflops", dtype)
    flats = [
        (f"{'tensor cores' if tensor else 'best matrix product'}, {dtype}", max(tensor or 0, matrix or 0)),
        # Kernels without tensor cores mostly accumulate in float32, whatever dtype they read.
        *((f"CUDA cores, {d}", _best(rows, "ceiling.cuda_core", "tflops", d)) for d in {dtype: 0, "float32": 0}),
    ]
    return [
        *(Roof(name, gbs=value) for name, value in slopes if value),
        *(Roof(name, tflops=value) for name, value in flats if value),
    ]


def _best(rows: Iterable[Row], backend: str, field: str, dtype: str | None = None) -> float | None:
    found = (getattr(row, field) for row in rows if row.backend == backend and dtype in (None, row.dtype))
    return max(filter(None, found), default=None)


def _carried(rows: Iterable[Row], field: str) -> float | None:
    return max(filter(None, (getattr(row, field) for row in rows)), default=None)
