"""Committed rows, as the figures and the pages of the documentation read them."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.rows.published import published  # noqa: E402

#: The rows that pages quote.
ROWS = published()


@functools.cache
def rows() -> tuple[dict[str, Any], ...]:
    """Every row that has a time."""
    found = (json.loads(line) for line in ROWS.read_text().splitlines())
    return tuple(row for row in found if row.get("us") is not None)


def best_ceiling(backend: str, field: str, dtype: str | None = None) -> float:
    """The highest measured ceiling of a kind: GB/s or TFLOP/s, by `field`.

    That of tensor cores is the one that rows are held to: the best product of the dtype, by whomever.
    """
    found = [r[field] for r in rows() if r["backend"] == backend and dtype in (None, r["dtype"]) and r[field]]
    if backend == "ceiling.tensor":
        found += [r["ceiling_tflops"] for r in rows() if r["dtype"] == dtype and r["ceiling_tflops"]]
    if not found:
        raise LookupError(f"no row of {backend} in {ROWS.name}")
    return max(found)


def gpu() -> str:
    return rows()[0]["gpu"]


def best(op: str, shape: str, dtype: str = "bfloat16", pass_: str = "forward") -> dict[str, Any]:
    """The row of the fastest rung for a call, peers left out."""
    found = [r for r in rows() if (r["op"], r["shape"], r["dtype"], r["pass"]) == (op, shape, dtype, pass_)]
    found = [r for r in found if r["level"] != "peer"]
    if not found:
        raise LookupError(f"no row of {op} {shape} {dtype} {pass_} in {ROWS.name}")
    return min(found, key=lambda r: r["us"])
