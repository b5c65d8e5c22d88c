"""README.md's one table: an operation a line, PyTorch beside the best rung of each level and the best peer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import kernel_ladder
from bench.rows.store import Row
from bench.show import markdown
from bench.show.headline import headline
from bench.show.table import microseconds
from kernel_ladder.spec import PASSES

OURS = ("triton", "cuda")
HEADER = ["operation", "PyTorch", "best Triton", "best CUDA", "best peer", "of ceiling"]


def write(path: Path, found: Sequence[Row]) -> str:
    """A Markdown table of :func:`lines`; empty where nothing was timed."""
    told = [[f"`{op}` {shape}", *cells] for op, shape, *cells in lines(found)]
    return markdown.grid(HEADER, told, [False, *[True] * (len(HEADER) - 1)]) if told else ""


def lines(found: Sequence[Row]) -> list[list[str]]:
    """For each timed operation its name, its headline shape, and times forward · backward there.

    The last cell is the share of the measured ceiling that the best of our rungs reaches.
    """
    told = []
    for op in kernel_ladder.OPS:
        standing = headline(op, found)
        if standing is None:
            continue
        mine = [r for r in found if (r.op, r.shape, r.dtype) == (op, *standing) and r.us is not None]
        if not mine:
            continue
        told.append(
            [
                op,
                standing[0],
                _times(mine, lambda row, op=op: row.backend == kernel_ladder.spec(op).baseline),
                *(_times(mine, lambda row, level=level: row.level == level) for level in (*OURS, "peer")),
                _cells(mine, lambda row: row.level in OURS, _ceiling),
            ]
        )
    return told


def _times(rows: Sequence[Row], which: Callable[[Row], bool]) -> str:
    return _cells(rows, which, lambda row: microseconds(row.us))


def _ceiling(row: Row) -> str:
    return f"{row.of_ceiling:.2f}" if row.of_ceiling is not None else "–"


def _cells(rows: Sequence[Row], which: Callable[[Row], bool], text: Callable[[Row], str]) -> str:
    cells = []
    for pass_ in PASSES:
        best = min((row for row in rows if row.pass_ == pass_ and which(row)), key=lambda row: row.us, default=None)
        cells.append("–" if best is None else text(best))
    return " · ".join(cells)
