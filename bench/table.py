"""Rows as a table to read in a terminal: by operation, pass and shape, the fastest marked."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.order import by_climb
from bench.rows import CEILING, Row


def microseconds(us: float) -> str:
    """Three digits, with a unit that suits."""
    for limit, scale, unit in ((1e3, 1, "µs"), (1e6, 1e3, "ms")):
        if us < limit:
            return f"{us / scale:.3g} {unit}"
    return f"{us / 1e6:.3g} s"


def rate(row: Row, bytes_bound: bool | None = None) -> str:
    """GB/s where the least time goes into moving bytes, else TFLOP/s."""
    bytes_bound = row.bytes_bound if bytes_bound is None else bytes_bound
    if bytes_bound:
        return f"{row.gbs:,.0f} GB/s" if row.gbs >= 100 else f"{row.gbs:.3g} GB/s"
    return f"{row.tflops:,.0f} TFLOP/s" if row.tflops >= 100 else f"{row.tflops:.3g} TFLOP/s"


def speeds(rows: Iterable[Row]) -> dict[str, tuple[float, float, float]]:
    """Of one call's rows, by backend, a measure that is larger the faster it is, with the ends of its 95 % interval.

    The speedups over the baseline, each paired with it round by round: of times, which rows of different runs may hold,
    the machine's state that day is a part. One over the times where a row has no speedup.
    """
    timed = [row for row in rows if row.us is not None]
    if all(row.speedup is not None for row in timed):
        return {r.backend: (r.speedup, r.speedup_low or r.speedup, r.speedup_high or r.speedup) for r in timed}
    return {r.backend: (1 / r.us, 1 / (r.us_high or r.us), 1 / (r.us_low or r.us)) for r in timed}


def fastest(rows: Iterable[Row]) -> set[str]:
    """Of one call's rows, the fastest backends: the best, and those whose intervals reach into its own."""
    known = speeds(rows)
    least = max(known.values(), default=(0.0, 0.0, 0.0))[1]
    return {backend for backend, (_, _, high) in known.items() if high >= least}


#: What a row's time was measured under that its neighbours' were not.
MARKS = {"†": "its clock was not its neighbours'", "‡": "launched call by call, with the gaps between"}


def mark(row: Row) -> str:
    return ("†" if row.clocks_moved else "") + ("‡" if row.graph is False else "")


def with_legend(written: str) -> str:
    """A table, and under it what the marks in it mean."""
    used = [f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in written]
    return f"{written}\n\n{'; '.join(used)}." if used else written


def show(rows: Iterable[Row], console: Console) -> None:
    """Print the ceilings, then one table for each operation, pass and dtype."""
    rows = list(rows)
    if measured := [row for row in rows if row.op == CEILING and row.us is not None]:
        console.print(_ceilings(measured))

    def group(row: Row) -> tuple[str, ...]:
        return (row.op, row.pass_, row.dtype, row.gpu or "")

    rows = by_climb(row for row in rows if row.op != CEILING)
    order = {key: i for i, key in reversed(list(enumerate(map(group, rows))))}
    for (op, pass_, dtype, gpu), members in groupby(sorted(rows, key=lambda r: order[group(r)]), group):
        console.print(_table(f"{op} {pass_}, {dtype}, on {gpu}", list(members)))


def _ceilings(rows: list[Row]) -> Table:
    title = f"what {rows[0].gpu} can do at most"
    table = Table(title=title, title_justify="left", title_style="bold", padding=(0, 1))
    for heading in ("ceiling", "dtype", "shape"):
        table.add_column(heading, no_wrap=True)
    for heading in ("time", "rate"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("reached by", overflow="fold")
    for row in rows:
        speed = rate(row, row.gbs is not None) if row.gbs is not None or row.tflops is not None else ""
        by = str(row.options.get("by", ""))
        name = row.backend.removeprefix(f"{CEILING}.")
        table.add_row(name, row.dtype, row.shape, microseconds(row.us), speed, by)
    return table


def _table(title: str, rows: list[Row]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", padding=(0, 1))
    table.add_column("shape", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    for heading in ("time", "quartiles", "rate", "of ceiling", "speedup", "host", "first call", "error / bound"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    by_shape: dict[str, list[Row]] = {}
    for row in rows:
        by_shape.setdefault(row.shape, []).append(row)
    for shape, members in by_shape.items():
        best = fastest(members)
        for i, row in enumerate(members):
            marked = row.backend in best
            style = "bold green" if marked else "red" if row.wrong else "dim" if row.us is None else None
            cells = [shape if i == 0 else "", f"{row.backend}{' ◀' if marked else ''}", *_cells(row)]
            table.add_row(*(Text(c, style=style or "") for c in cells), end_section=i == len(members) - 1)
    return table


def _speedup(row: Row) -> str:
    if row.speedup is None:
        return ""
    if row.speedup_low is None or row.speedup_low == row.speedup_high:
        return f"{row.speedup:.2f}×"
    return f"{row.speedup:.2f}× ({row.speedup_low:.3f} – {row.speedup_high:.3f})"


def _cells(row: Row) -> list[str]:
    host = f"{row.host_us:.1f} µs" if row.host_us is not None else ""
    first = f"{row.compile_s:.2f} s" if row.compile_s is not None else ""
    error = f"{row.error:.1e} / {row.bound:.1e}" if row.error is not None and row.bound is not None else ""
    notes = [
        f"WRONG: {row.wrong}" if row.wrong else "",
        row.unsupported or "",
        f"version {row.peer_version}" if row.peer_version and row.unsupported is None else "",
        "interpreted" if row.interpreted and row.us is not None else "",
        "launch gaps included" if row.graph is False else "",
        "its clock was not its neighbours'" if row.clocks_moved else "",
    ]
    note = "; ".join(filter(None, notes))
    if row.us is None:
        return ["—", "", "", "", "", host, first, error, note]
    return [
        microseconds(row.us),
        f"{microseconds(row.us_q1)} – {microseconds(row.us_q3)}",
        rate(row),
        f"{row.of_ceiling:.2f}" if row.of_ceiling is not None else "",
        _speedup(row),
        host,
        first,
        error,
        note,
    ]
