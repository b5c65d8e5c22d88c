"""The headline shape and dtype of an operation: the one that summaries show."""

from __future__ import annotations

from collections.abc import Iterable

import kernel_ladder
from bench.rows.store import Row


def headline(op: str, rows: Iterable[Row]) -> tuple[str, str] | None:
    """Shape and dtype: the last quick case that was measured, in bfloat16 where that was; None where nothing was."""
    mine = [row for row in rows if row.op == op]
    if not mine:
        return None
    dtype = "bfloat16" if any(row.dtype == "bfloat16" for row in mine) else mine[0].dtype
    return headline_shape(op, (row for row in mine if row.dtype == dtype)), dtype


def headline_shape(op: str, rows: Iterable[Row]) -> str:
    """The last quick case among rows of one operation, of which there must be one; the last of all if none is quick.

    A case that measures both passes in one time stands back behind any other quick one.
    """
    measured = list(dict.fromkeys(row.shape for row in rows))
    sweep = kernel_ladder.spec(op).sweep if op in kernel_ladder.OPS else ()
    quick = [case for case in sweep if case.quick and case.id in measured]
    return [*measured, *(case.id for case in sorted(quick, key=lambda case: not case.together))][-1]
