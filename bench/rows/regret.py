"""Regret: the time of a choice over that of the fastest rung that was measured beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bench.rows import store
from bench.rows.store import Row
from bench.select.split import is_of_other_kernels
from kernel_ladder import table
from kernel_ladder.selection import MEASURED_LEVELS

#: Names whose choice rules and tables make.
NAMES = ("auto", *(level for level in MEASURED_LEVELS if level != "torch"))
#: A choice this near the best rung's time counts as right.
NEAR = 1.03


class Regret(NamedTuple):
    """The regrets of a name's choices in an operation, lowest first, each with its call."""

    op: str
    name: str
    values: tuple[tuple[float, str], ...]

    @property
    def near(self) -> int:
        """Calls whose choice is right."""
        return sum(value <= NEAR for value, _ in self.values)

    @property
    def p95(self) -> float:
        return self.values[math.ceil(0.95 * len(self.values)) - 1][0]

    @property
    def worst(self) -> tuple[float, str]:
        return self.values[-1]


def counts(row: Row) -> bool:
    """Whether a row is the time of kernels that a level has today."""
    known = row.us is not None and not row.wrong and not row.interpreted and row.level in table.LEVELS
    return known and not is_of_other_kernels(row)


def of_row(row: Row, rows: Iterable[Row], name: str) -> float | None:
    """The regret of a name that stood for a row's rung, among the rows of its call; None where nothing was timed.

    A level's rungs are compared with each other, and what ``"auto"`` chose with those of all levels it chooses among.
    """
    levels = MEASURED_LEVELS if name == "auto" else (name,)
    times = [other.us for other in rows if other.us is not None and counts(other) and other.level in levels]
    return row.us / min(times) if row.us is not None and counts(row) and times else None


def by_name(rows: Iterable[Row], names: Sequence[str] = NAMES) -> list[Regret]:
    """One regret for each operation and name that rows of timed calls tell of, in the order of the rows."""
    calls: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in store.latest(rows):
        if row.op != store.CEILING:
            calls.setdefault((row.op, row.pass_, row.dtype, row.shape), []).append(row)
    found: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for (op, pass_, dtype, shape), members in calls.items():
        for row in members:
            for name in row.chosen:
                if name in names and (value := of_row(row, members, name)) is not None:
                    found.setdefault((op, name), []).append((value, f"{shape} {dtype} {pass_}"))
    order = {op: place for place, (op, *_) in reversed(list(enumerate(calls)))}
    ordered = sorted(found, key=lambda key: (order[key[0]], names.index(key[1])))
    return [Regret(op, name, tuple(sorted(found[op, name]))) for op, name in ordered]
