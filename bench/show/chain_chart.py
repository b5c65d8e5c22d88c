"""The picture of each chain: two bars a rung, for the time that each pass takes over the least possible.

Beside a rung stand the kernels of a call and the bytes that these moved over the least, where they were counted. The
width is that of a phone's page: 400 pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.rows.store import Row, latest, of_one_machine, picture_file, read
from bench.show import climb_counters
from bench.show.climb import OTHER
from bench.show.fusion import CHAINS, Calls, call_of, chosen, counted, picture_of
from bench.show.ladders import TEXT, blank
from bench.show.panels import source_of
from bench.show.pictures import shade
from bench.show.table import microseconds

WIDTH_INCHES = 400 / 96
HEAD_INCHES = 0.72
NAME_INCHES = 0.2
BAR_INCHES = 0.17
GAP_INCHES = 0.1
#: Share of the width that the longest bar takes; its time stands beside it.
FULL = 0.68
#: How strong the colours of the passes are.
STRENGTHS = (1.0, 0.45)


def draw(results: Path, gpu: str | None = None) -> list[Path]:
    """Draw a picture for each chain that has times and a least time. Returns the files."""
    found = of_one_machine(latest(read(results)), gpu)
    profiled = counted(results)
    paths = []
    for op in CHAINS:
        passes = chosen(op, found)
        timed = {pass_: {name: row for name, row in rows.items() if row.least_us} for pass_, rows in passes.items()}
        if any(timed.values()):
            paths.append(picture_file(results, picture_of(op)))
            paths[-1].parent.mkdir(exist_ok=True)
            with plt.rc_context({"font.size": 9, "svg.hashsalt": "kernel_ladder", "svg.fonttype": "none"}):
                _picture(op, timed, profiled, paths[-1])
    return paths


def over_least(row: Row) -> float:
    """The time of a row over the least possible, at least 1: a part of the input may stay in the L2 cache."""
    return max((row.us or 0.0) / (row.least_us or 1.0), 1.0)


def _picture(op: str, passes: Mapping[str, Mapping[str, Row]], profiled: Calls, path: Path) -> None:
    names = list(dict.fromkeys(name for rows in passes.values() for name in rows))
    every = [row for rows in passes.values() for row in rows.values()]
    bars = sum(sum(name in rows for rows in passes.values()) for name in names)
    inches = HEAD_INCHES + len(names) * (NAME_INCHES + GAP_INCHES) + bars * BAR_INCHES
    longest = max(math.log(over_least(row)) for row in every) or 1.0
    figure, axes = blank(WIDTH_INCHES, inches)
    _title(axes, op, every, sorted({gpu for row in every if (gpu := _elsewhere(row, profiled))}))
    at = HEAD_INCHES
    for name in names:
        middle = at + NAME_INCHES / 2
        axes.text(0, middle, name, va="center", color=TEXT, fontweight="bold")
        calls = [call_of(rows[name], profiled) for rows in passes.values() if name in rows]
        mark = OTHER if any(_elsewhere(rows[name], profiled) for rows in passes.values() if name in rows) else ""
        axes.text(1, middle, f"{_traffic(calls)}{mark}", va="center", ha="right", color=TEXT, fontsize=8)
        at += NAME_INCHES
        for rows, strength in zip(passes.values(), STRENGTHS, strict=True):
            if (row := rows.get(name)) is None or row.us is None:
                continue
            length = max(FULL * math.log(over_least(row)) / longest, 0.005)
            colour = shade(row.level, strength)
            axes.barh(at + BAR_INCHES / 2, length, height=0.85 * BAR_INCHES, color=colour)
            said = f"{microseconds(row.us)}, {row.us / (row.least_us or 1.0):.3g} ×"
            axes.text(length + 0.01, at + BAR_INCHES / 2, said, va="center", color=TEXT, fontsize=8)
            at += BAR_INCHES
        at += GAP_INCHES
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)


def _elsewhere(row: Row, profiled: Calls) -> str | None:
    """The GPU on which a row's call was counted, where that is another than the one that timed it."""
    return climb_counters.of(row, profiled).get(climb_counters.GPU)


def _title(axes: Axes, op: str, rows: list[Row], elsewhere: list[str]) -> None:
    first = rows[0]
    axes.text(0, 0.12, f"{op} {first.shape}, {first.dtype}", color=TEXT, va="center", fontsize=10, fontweight="bold")
    axes.text(0, 0.32, source_of(rows), color=TEXT, va="center", fontsize=8)
    said = "time over the least possible (log); full: forward, pale: backward"
    if elsewhere:
        said += f"; {OTHER} counted on {', '.join(elsewhere)}"
    axes.text(0, 0.5, said, color=TEXT, va="center", fontsize=8)


def _traffic(calls: list[tuple[int, float | None] | None]) -> str:
    """Kernels and bytes of the passes, one after the other; a dash for a pass that was not counted."""
    if not any(calls):
        return ""
    kernels = " / ".join("–" if call is None else str(call[0]) for call in calls)
    moved = " / ".join("–" if call is None or call[1] is None else f"{call[1]:.2f}" for call in calls)
    return f"kernels {kernels}, bytes {moved} × least"
