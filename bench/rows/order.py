"""Rows in the order in which the table holds their variants: level by level, step by step, and peers after them."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import kernel_ladder
from bench import peers
from bench.rows.store import Row
from kernel_ladder import table


@functools.cache
def _places(op: str) -> dict[str, int]:
    known = [v.name for v in (*table.variants(op), *peers.variants(op))] if op in kernel_ladder.OPS else []
    return {name: i for i, name in enumerate(known)}


@functools.cache
def _cases(op: str) -> dict[str, int]:
    known = [case.id for case in kernel_ladder.spec(op).sweep] if op in kernel_ladder.OPS else []
    return {name: i for i, name in enumerate(known)}


def by_climb(rows: Iterable[Row]) -> list[Row]:
    """Sorted by operation, case of the sweep and place in the climb; unknown rows come last, in their own order."""
    levels = [*table.LEVELS, peers.LEVEL]
    ops = list(kernel_ladder.OPS)

    def place(row: Row) -> tuple[int, ...]:
        return (
            ops.index(row.op) if row.op in ops else len(ops),
            _cases(row.op).get(row.shape, len(_cases(row.op))),
            levels.index(row.level) if row.level in levels else len(levels),
            _places(row.op).get(row.backend, len(_places(row.op))),
        )

    return sorted(rows, key=place)
