"""Rows and helpers of the report's tests."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

from bench.__main__ import main
from bench.measure import environment
from bench.rows import store
from bench.rows.published import published
from bench.rows.store import Row
from bench.show import climb
from bench.show.roofline import operations

SHIPPED = published()
#: The GPU of these rows.
with SHIPPED.open() as _rows:
    GPU = json.loads(next(_rows))["gpu"]
CPU = environment.ROOT / "bench" / "results" / "cpu.jsonl"


def _ceiling(backend: str, **fields) -> Row:
    place = {"op": "ceiling", "level": "ceiling", "pass_": "forward", "dtype": "bfloat16", "gpu": GPU}
    return Row(**place, backend=f"ceiling.{backend}", when="2026-01-01T00:00:00+00:00", **fields)


CEILINGS = [
    _ceiling("copy", shape="256 MiB", bytes=2**28, gbs=4321.0, us=62.0),
    _ceiling("l2", shape="16 MiB", bytes=2**24, gbs=9876.0, us=1.7),
    _ceiling("launch", shape="empty kernel", us=2.1),
    _ceiling("tensor", shape="8192x8192x8192", flops=2 * 8192**3, tflops=789.0, us=1400.0),
    _ceiling("cuda_core", shape="fma", flops=2**40, tflops=123.0, us=9000.0),
]


def measured() -> list[Row]:
    """Rows of operations from a GPU, without the ceilings beside them, which the tests set themselves."""
    return operations(store.read(SHIPPED))


def full_rows() -> list[Row]:
    """Measured rows, with intervals, clocks, a peer and ceilings."""
    found: list[Row] = []
    for i, row in enumerate(store.latest(measured())):
        if row.us is not None:
            row.us_low, row.us_high = 0.99 * row.us, 1.01 * row.us
            if row.speedup is not None:
                row.speedup_low, row.speedup_high = 0.99 * row.speedup, 1.01 * row.speedup
            row.clock_mhz, row.power_w, row.temperature_c, row.clocks_moved = 1980.0, 650.0, 61.0, i % 50 == 3
        found.append(row)
        if row.backend == "torch.builtin":
            found.append(dataclasses.replace(row, backend="peer.example", level="peer"))
    return [*found, *CEILINGS]


def shown(*view: str) -> list[Row]:
    """The rows of an operation, dtype and pass in the page's order: level by level, peers last."""
    climbs = climb.by_call(r for r in full_rows() if (r.op, r.dtype, r.pass_) == view)
    return [row for steps in climbs for row in steps]


def written(tmp: Path, found: list[Row]) -> Path:
    """The report of rows, in a folder."""
    store.write(tmp / "rows.jsonl", found)
    assert main(["report", str(tmp / "rows.jsonl"), "--output", str(tmp / "report.html")]) == 0
    return tmp / "report.html"


def embedded(path: Path) -> dict[str, Any]:
    """The data that a report's scripts show."""
    text = path.read_text()
    start = text.index('id="packed">') + len('id="packed">')
    packed = base64.b64decode(text[start : text.index("</script>", start)], validate=True)
    return json.loads(gzip.decompress(packed))["data"]
