"""``python -m bench distribution FILE…``: what the choices are worth over all calls of a set, and where they are worst.

Speedups are those of the rung that a level's name stood for. Of the set `lengths` its rate over that of a copy of as
many bytes is told too. Regret is its time over that of the fastest rung measured
beside it: of its level, or for "auto" of all levels but compile.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.measure import environment, sets
from bench.rows import regret, store
from bench.rows.store import Row
from bench.usage import known, split
from kernel_ladder import table

#: The shares of calls below and above which the tails lie.
LOW = 0.05
HIGH = 0.95


@dataclass(frozen=True)
class Value:
    """A ratio, and the call that it is of."""

    ratio: float
    call: str


@dataclass(frozen=True)
class Distribution:
    """Speedups, regrets and rates of one backend's name, over the calls of a set in one pass and dtype."""

    set: str
    op: str
    dtype: str
    pass_: str
    backend: str
    speedups: tuple[Value, ...]  # lowest first
    regrets: tuple[Value, ...]  # lowest first
    rates: tuple[Value, ...] = ()  # over the rate of a copy of as many bytes; lowest first


def mean(values: Sequence[Value]) -> float:
    """The geometric mean."""
    return math.exp(sum(math.log(value.ratio) for value in values) / len(values))


def quantile(values: Sequence[Value], share: float) -> Value:
    """The value with `share` of the sorted ones up to it."""
    return values[min(max(math.ceil(share * len(values)) - 1, 0), len(values) - 1)]


def distributions(rows: Iterable[Row], wanted: Sequence[str]) -> list[Distribution]:
    """The distributions of rows that say which names stood for their rungs, in the order of the rows.

    `wanted` are sets, without the seed of random calls; none means all.
    """
    calls: dict[tuple[str, str, str, str], dict[str, list[Row]]] = {}
    for row in store.latest(rows):
        if row.us is None or row.wrong or row.interpreted or row.level not in table.LEVELS:
            continue
        if wanted and row.set.partition(":")[0] not in wanted:
            continue
        calls.setdefault((row.set, row.op, row.dtype, row.pass_), {}).setdefault(row.shape, []).append(row)
    found = []
    for kind, by_call in calls.items():
        for backend in ("auto", *table.LEVELS):
            chosen = [(rows, row) for rows in by_call.values() for row in rows if backend in row.chosen]
            if chosen:
                speedups = [Value(row.speedup, _name(row)) for _, row in chosen if row.speedup is not None]
                costs = [(regret.of_row(row, rows, backend), row) for rows, row in chosen]
                regrets = [Value(cost, _name(row)) for cost, row in costs if cost is not None]
                rates = [
                    Value(row.gbs / row.ceiling_gbs, _name(row)) for _, row in chosen if row.gbs and row.ceiling_gbs
                ]
                found.append(Distribution(*kind, backend, *map(_sorted, (speedups, regrets, rates))))
    return found


def _sorted(values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(sorted(values, key=lambda value: value.ratio))


def _name(row: Row) -> str:
    """A call's shape, and the first of those who make it."""
    if not row.names:
        return row.shape
    more = f" and {len(row.names) - 1} more" if len(row.names) > 1 else ""
    return f"{row.shape} ({row.names[0]}{more})"


def show(found: Sequence[Distribution], console: Console) -> None:
    """One table for each set, operation, dtype and pass."""
    kinds = dict.fromkeys((d.set, d.op, d.dtype, d.pass_) for d in found)
    for kind in kinds:
        shown = Table(title=", ".join((f"{kind[0]}: {kind[1]}", *kind[2:])), title_justify="left")
        for name in ("backend", "calls", "speedup", "5th percentile", "worst", "at", "regret", "95th", "worst", "at"):
            shown.add_column(name, justify="left" if name in ("backend", "at") else "right")
        for d in found:
            if (d.set, d.op, d.dtype, d.pass_) == kind:
                shown.add_row(d.backend, str(len(d.regrets)), *_cells(d.speedups, LOW, 0), *_cells(d.regrets, HIGH, -1))
        console.print(shown)
    show_rates([d for d in found if d.set == sets.LENGTHS and d.rates], console)


def show_rates(found: Sequence[Distribution], console: Console) -> None:
    """One table: rates over that of a copy of as many bytes, for each operation, dtype, pass and name."""
    if not found:
        return
    shown = Table(title=f"{sets.LENGTHS}: rate over the rate of a copy", title_justify="left")
    for name in ("operation", "pass", "dtype", "backend", "calls", "mean", "worst", "at"):
        shown.add_column(name, justify="right" if name in ("calls", "mean", "worst") else "left")
    for d in found:
        least = d.rates[0]
        cells = (d.op, d.pass_, d.dtype, d.backend, str(len(d.rates)))
        shown.add_row(*cells, f"{mean(d.rates):.3f}", f"{least.ratio:.3f}", least.call)
    console.print(shown)


def _cells(values: Sequence[Value], share: float, worst: int) -> tuple[str, ...]:
    if not values:
        return "", "", "", ""
    tail = quantile(values, share)
    return f"{mean(values):.3f}", f"{tail.ratio:.3f}", f"{values[worst].ratio:.3f}", values[worst].call


def main(argv: Sequence[str], console: Console) -> int:
    """Print speedups and regret of each set of calls. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench distribution", description=main.__doc__.partition(".")[0] + "."
    )
    parser.add_argument(
        "files", type=Path, nargs="*", metavar="FILE", help="rows (default: this machine's, of each set)"
    )
    parser.add_argument("--set", action="append", metavar="SET[,SET]", help=f"only of {', '.join(sets.SETS)}")
    args = parser.parse_args(argv)
    wanted = [known("set", name, list(sets.SETS)) for name in split("--set", args.set, sets.SETS)]
    own = [path for name in sets.SETS if (path := environment.results_file(name)).exists()]
    if not args.files and not own:
        raise store.ResultsError("this machine has no rows yet: `python -m bench --set models` writes some")
    found = distributions([row for path in args.files or own for row in store.read_given(path)], wanted)
    if not found:
        raise store.ResultsError(
            "no row says which backend's name stood for its rung: rows from before 2026-11-26, or interpreted ones; "
            "`python -m bench` on a GPU writes others"
        )
    show(found, console)
    return 0
