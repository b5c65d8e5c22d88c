"""Peak memory and time of attention against sequence length, at a constant number of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from bench.measure.lengths import OP, PICTURE, family, length, setting
from bench.rows.store import Row, latest, of_one_machine, picture_file, read
from bench.show.panels import source_of, spread
from bench.show.pictures import STYLE, look


def draw(results: Path, gpu: str | None = None) -> list[Path]:
    """Draw memory and time of the forward pass, where rows of two lengths have both; returns the picture's file.

    Of one machine, as :func:`bench.show.pictures.draw`.
    """
    rows = family(of_one_machine(latest(read(results)), gpu))
    if not rows:
        return []
    path = picture_file(results, PICTURE)
    path.parent.mkdir(exist_ok=True)
    with plt.rc_context({**STYLE, "axes.grid.axis": "both"}):
        figure, grid = plt.subplots(1, 2, figsize=(12.5, 4.8), layout="constrained")
        for axes, what, label in zip(grid, ("peak_mib", "us"), ("MiB at the peak", "µs"), strict=True):
            _panel(axes, rows, what)
            axes.set_ylabel(f"{label}, forward")
            axes.set_xlabel("length of the sequence")
        tokens, heads, _, dim = setting(rows[0])
        figure.suptitle(
            f"{OP} of {tokens} tokens, {heads} heads of {dim}, {rows[0].dtype}: {source_of(rows)}", x=0.01, ha="left"
        )
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
        plt.close(figure)
    return [path]


def _panel(axes: Axes, rows: Sequence[Row], what: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    backends = list(dict.fromkeys(row.backend for row in rows))
    ends = []
    for backend in backends:
        points = sorted((length(row), getattr(row, what)) for row in rows if row.backend == backend)
        colour, marker = look(backend, backends)
        style = "--" if backend.startswith("peer.") else "-"
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5, linewidth=1.6, ls=style)
        ends.append((points[-1], backend, colour))
    lengths = sorted({length(row) for row in rows})
    axes.set_xticks(lengths)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = map(math.log, axes.get_ylim())
    ends.sort(key=lambda end: end[0][1])
    heights = spread([(math.log(y) - low) / (high - low) for (_, y), _, _ in ends], gap=0.055)
    for (point, backend, colour), height in zip(ends, heights, strict=True):
        axes.annotate(
            backend,
            xy=point,
            xytext=(1.04, height),
            textcoords="axes fraction",
            color=colour,
            fontsize=9,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "linewidth": 0.6, "color": colour, "relpos": (0, 0.5)},
        )
