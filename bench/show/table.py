"""Rows as tables to read in a terminal: by operation, pass and shape, the fastest marked; at the end what it comes to.

Reasons stand below each table, numbered; a level that could run nothing has one line before all tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from bench.rows import regret
from bench.rows.order import by_climb
from bench.rows.store import CEILING, Row
from bench.show.headline import headline
from kernel_ladder.cli.columns import Column, Footnotes, LeftOut, Line, fit, say

#: The columns of a call's rows, the first three always shown.
COLUMNS = (
    Column("shape"),
    Column("backend"),
    Column("time", right=True),
    Column("speedup", right=True, spare=1),
    Column("rate", right=True, spare=3),
    Column("of ceiling", right=True, spare=2),
    Column("quartiles", right=True, spare=7),
    Column("95 % of speedup", right=True, spare=9),
    Column("regret", spare=4),
    Column("host", right=True, spare=5),
    Column("first call", right=True, spare=6),
    Column("error / bound", right=True, spare=8),
)


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

    The speedups over the baseline, each paired with it round by round. Times of different runs would also hold the
    machine's state of that day. One over the times where a row has no speedup.
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


#: Conditions under which a row was timed and its neighbours were not.
MARKS = {"†": "its SM clock was not that of the rungs beside it", "‡": "launched call by call, with the gaps between"}


def mark(row: Row) -> str:
    return ("†" if row.clocks_moved else "") + ("‡" if row.graph is False else "")


def with_legend(written: str) -> str:
    """A table, and under it what the marks in it mean."""
    used = [f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in written]
    return f"{written}\n\n{'; '.join(used)}." if used else written


def show(rows: Iterable[Row], console: Console) -> None:
    """Print the ceilings, one table for each operation, pass and dtype, and a summary."""
    rows = list(rows)
    left_out = LeftOut()
    if measured := [row for row in rows if row.op == CEILING and row.us is not None]:
        console.print(_ceilings(measured, console, left_out))

    def group(row: Row) -> tuple[str, ...]:
        return (row.op, row.pass_, row.dtype, row.gpu or "")

    rows = by_climb(row for row in rows if row.op != CEILING)
    absent = idle_levels(rows)
    for (level, gpu), reason in absent.items():
        count = sum((row.level, row.gpu) == (level, gpu) for row in rows)
        say(console, f"{level}: {reason} (on {gpu}; {count} rows)")
    shown = [row for row in rows if (row.level, row.gpu) not in absent]
    order = {key: i for i, key in reversed(list(enumerate(map(group, shown))))}
    for (op, pass_, dtype, gpu), members in groupby(sorted(shown, key=lambda r: order[group(r)]), group):
        notes = Footnotes()
        table = _table(f"{op} {pass_}, {dtype}, on {gpu}", list(members), console, left_out, notes)
        console.print(table)
        notes.show(console)
    for gpu in dict.fromkeys(row.gpu for row in shown if row.us is not None):
        console.print(_summary([row for row in shown if row.gpu == gpu], console))
    if rows:
        say(console, _counts(rows))
    left_out.show(console, "; so does `python -m bench report`")


def idle_levels(rows: Sequence[Row]) -> dict[tuple[str, str | None], str]:
    """Levels that ran nothing on a machine, all for one reason: ``(level, machine) -> reason``."""
    reasons: dict[tuple[str, str | None], set[str | None]] = {}
    for row in rows:
        refused = row.unsupported if row.us is None and not row.wrong else None
        reasons.setdefault((row.level, row.gpu), set()).add(refused)
    counts = {key: sum((row.level, row.gpu) == key for row in rows) for key in reasons}
    idle = {key: next(iter(found)) for key, found in reasons.items() if len(found) == 1 and counts[key] > 1}
    return {key: reason for key, reason in idle.items() if reason is not None}


def _ceilings(rows: list[Row], console: Console, left_out: LeftOut) -> Table:
    columns = [
        Column("ceiling"),
        Column("dtype"),
        Column("shape", spare=1),
        Column("time", right=True),
        Column("rate", right=True),
        Column("reached by", spare=2, folds=True),
    ]
    lines = []
    for row in rows:
        speed = rate(row, row.gbs is not None) if row.gbs is not None or row.tflops is not None else ""
        name = row.backend.removeprefix(f"{CEILING}.")
        lines.append(Line([name, row.dtype, row.shape, microseconds(row.us), speed, str(row.options.get("by", ""))]))
    title = f"what {rows[0].gpu} can do at most"
    return fit(console, columns, lines, left_out, title=title, box=box.HEAVY_HEAD)


def _table(title: str, rows: list[Row], console: Console, left_out: LeftOut, notes: Footnotes) -> Table:
    by_shape: dict[str, list[Row]] = {}
    for row in rows:
        by_shape.setdefault(row.shape, []).append(row)
    lines = []
    for shape, members in by_shape.items():
        best = fastest(members)
        for i, row in enumerate(members):
            marked = row.backend in best
            style = "bold green" if marked else "red" if row.wrong else "dim" if row.us is None else ""
            cells = [shape if i == 0 else "", f"{row.backend}{' ◀' if marked else ''}", *_cells(row, members, notes)]
            lines.append(Line(cells, style, ends_section=i == len(members) - 1))
    return fit(console, COLUMNS, lines, left_out, title=title, box=box.HEAVY_HEAD)


def _speedup(row: Row) -> str:
    return f"{row.speedup:.2f}×" if row.speedup is not None else ""


def _speedup_interval(row: Row) -> str:
    if row.speedup_low is None or row.speedup_low == row.speedup_high:
        return ""
    return f"{row.speedup_low:.3f} – {row.speedup_high:.3f}"


def _regret(row: Row, members: Sequence[Row]) -> str:
    """Of each name that stood for the row's rung its time over that of the best: ``1.04 auto, 1.00 cuda``."""
    found = ((regret.of_row(row, members, name), name) for name in row.chosen)
    return ", ".join(f"{value:.2f} {name}" for value, name in found if value is not None)


def _cells(row: Row, members: Sequence[Row], notes: Footnotes) -> list[str]:
    host = f"{row.host_us:.1f} µs" if row.host_us is not None else ""
    first = f"{row.compile_s:.2f} s" if row.compile_s is not None else ""
    error = f"{row.error:.1e} / {row.bound:.1e}" if row.error is not None and row.bound is not None else ""
    if row.us is None:
        found = f"WRONG: {row.wrong}" if row.wrong else row.unsupported or "not measured"
        said = f"{'wrong' if row.wrong else '—'} {notes.mark(found)}"
        return [said, *[""] * 6, host, first, error]
    remarks = [
        f"version {row.peer_version}" if row.peer_version else "",
        "interpreted" if row.interpreted else "",
        "launch gaps included" if row.graph is False else "",
        MARKS["†"] if row.clocks_moved else "",
    ]
    return [
        microseconds(row.us) + "".join(f" {notes.mark(remark)}" for remark in filter(None, remarks)),
        _speedup(row),
        rate(row),
        f"{row.of_ceiling:.2f}" if row.of_ceiling is not None else "",
        f"{microseconds(row.us_q1)} – {microseconds(row.us_q3)}",
        _speedup_interval(row),
        _regret(row, members),
        host,
        first,
        error,
    ]


def _summary(rows: Sequence[Row], console: Console) -> Table:
    """The fastest at the headline shape of each operation, pass by pass."""
    columns = [
        Column("operation"),
        Column("pass"),
        Column("shape", spare=1),
        Column("dtype", spare=4),
        Column("fastest"),
        Column("time", right=True),
        Column("speedup", right=True),
        Column("of ceiling", right=True, spare=2),
        Column("of", right=True, spare=3),
    ]
    lines = []
    timed = [row for row in rows if row.us is not None]
    for op, pass_ in dict.fromkeys((row.op, row.pass_) for row in timed):
        mine = [row for row in timed if (row.op, row.pass_) == (op, pass_)]
        at = headline(op, mine)
        steps = [row for row in mine if (row.shape, row.dtype) == at]
        known = speeds(steps)
        row = max(steps, key=lambda row: known[row.backend][0])
        share = f"{row.of_ceiling:.2f}" if row.of_ceiling is not None else ""
        cells = [op, pass_, row.shape, row.dtype, row.backend, microseconds(row.us), _speedup(row), share]
        lines.append(Line([*cells, str(len(steps))]))
    title = f"\nSummary: the fastest at each operation's headline shape, on {rows[0].gpu}"
    return fit(console, columns, lines, LeftOut(), title=title)


def _counts(rows: Sequence[Row]) -> str:
    timed = sum(row.us is not None for row in rows)
    wrong = sum(row.wrong is not None for row in rows)
    refused = len(rows) - timed - wrong
    interpreted = sum(row.interpreted and row.us is not None for row in rows)
    said = f"{timed} calls timed, {refused} not supported here, {wrong} wrong"
    return said + (f"; {interpreted} times are of interpreted kernels and say nothing of a GPU" if interpreted else "")
