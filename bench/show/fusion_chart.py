"""The picture of fusion: for each chain the time of every level over the least that the measured ceilings allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from bench.rows.store import Row, latest, of_one_machine, picture_file, read
from bench.show.fusion import CHAINS, PICTURE, chosen
from bench.show.ladders import TEXT, WIDTH_INCHES
from bench.show.panels import source_of
from bench.show.pictures import COLOURS
from kernel_ladder.spec import PASSES

LINE_INCHES = 0.36
HEAD_INCHES = 1.3
#: How far the marks of the passes stand apart, as a share of a line.
APART = 0.28


def draw(results: Path, gpu: str | None = None) -> list[Path]:
    """Draw the time of each level over the least possible, a line a chain. Returns the file, or none without rows."""
    found = of_one_machine(latest(read(results)), gpu)
    lines = [(op, rows) for op in CHAINS if (rows := chosen(op, found))[PASSES[0]]]
    if not lines:
        return []
    path = picture_file(results, PICTURE)
    path.parent.mkdir(exist_ok=True)
    with plt.rc_context({"font.size": 9.5, "svg.hashsalt": "kernel_ladder", "svg.fonttype": "none"}):
        _picture(lines, path)
    return [path]


def _picture(lines: Sequence[tuple[str, Mapping[str, Mapping[str, Row]]]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(WIDTH_INCHES, HEAD_INCHES + LINE_INCHES * len(lines)), layout="constrained")
    drawn = [
        (place + APART * (below - 0.5), below, row)
        for place, (_, rows) in enumerate(lines)
        for below, of_pass in enumerate(rows.values())
        for row in of_pass.values()
        if row.us is not None and row.least_us
    ]
    for height, below, row in drawn:
        colour = COLOURS[row.level]
        fill = "none" if below else colour
        axes.plot(row.us / row.least_us, height, "o", color=colour, markerfacecolor=fill, markersize=6)
    axes.set_yticks(range(len(lines)), [op for op, _ in lines])
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.axvline(1, color=TEXT, linewidth=0.8)
    axes.set_xlabel("time over the least possible", color=TEXT)
    source = source_of([row for _, _, row in drawn])
    figure.suptitle(f"{source}; filled: forward, open: backward", x=0.01, ha="left", color=TEXT, fontsize=9.5)
    levels = [level for level in COLOURS if any(row.level == level for _, _, row in drawn)]
    marks = [plt.Line2D([], [], marker="o", linestyle="", color=COLOURS[level], label=level) for level in levels]
    figure.legend(handles=marks, loc="outside lower left", ncols=len(levels), frameon=False, labelcolor=TEXT)
    axes.tick_params(colors=TEXT)
    axes.grid(axis="x", color=TEXT, alpha=0.25)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)
