"""README.md's one table: an operation a line, PyTorch beside the best rung of each level and the best peer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import kernel_ladder
from bench.rows.store import Row
from bench.show import markdown
from bench.show.headline import headline
from bench.show.table import microseconds
from kernel_ladder.inspection.heads import ladder
from kernel_ladder.spec import PASSES

OURS = ("triton", "cuda")
FORMULA = "torch.naive"
NOT_TIMED = "not timed"
HEADER = ["operation", "PyTorch", "best Triton", "best CUDA", "best peer", "of ceiling"]


def write(path: Path, found: Sequence[Row]) -> str:
    """A Markdown table of :func:`lines`; empty where nothing was timed."""
    told = [[f"`{op}` {shape}", *cells] for op, shape, *cells in lines(found)]
    return markdown.grid(HEADER, told, [False, *[True] * (len(HEADER) - 1)]) if told else ""


def lines(found: Sequence[Row]) -> list[list[str]]:
    """For each timed operation its name, its headline shape, and times forward · backward there.

    PyTorch's is the best of its own functions, or that of the formula, which the cell says. A level with rungs but no
    row of them is "not timed". The last cell is the share of the measured ceiling that the best of our rungs reaches.
    """
    told = []
    for op in kernel_ladder.OPS:
        standing = headline(op, found)
        if standing is None:
            continue
        here = [r for r in found if (r.op, r.shape, r.dtype) == (op, *standing)]
        mine = [row for row in here if row.us is not None]
        if not mine:
            continue
        told.append(
            [
                op,
                standing[0],
                _of_torch(mine),
                *(_of_level(op, level, here) for level in OURS),
                _times(mine, lambda row: row.level == "peer"),
                _cells(mine, lambda row: row.level in OURS, _ceiling),
            ]
        )
    return told


def _of_torch(timed: Sequence[Row]) -> str:
    """The best of PyTorch's own functions; the formula where it has none."""
    own = [row for row in timed if row.level == "torch" and row.backend != FORMULA]
    if own:
        return _times(own, lambda row: True)
    cell = _times(timed, lambda row: row.backend == FORMULA)
    return f"{cell} (formula)" if any(row.backend == FORMULA for row in timed) else cell


def _of_level(op: str, level: str, here: Sequence[Row]) -> str:
    """The best rungs of a level; "not timed" for a pass that others were measured in and none of its rungs."""
    cells = []
    for pass_ in PASSES:
        rows = [row for row in here if row.pass_ == pass_]
        mine = [row for row in rows if row.level == level and row.backend != level]  # else of a level without rungs
        best = min((row for row in mine if row.us is not None), key=lambda row: row.us, default=None)
        lacking = rows and not mine and ladder(op, level)
        cells.append(microseconds(best.us) if best else NOT_TIMED if lacking else "–")
    return " · ".join(dict.fromkeys(cells) if set(cells) == {NOT_TIMED} else cells)


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
