"""One picture per operation: rate against size, a line per variant, the measured ceiling drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

import kernel_ladder
from bench.roofs import operations
from bench.rows import Row, latest, picture_file, read

# Okabe and Ito's colours, told apart by colour-blind eyes: a hue for each level, a marker for each step of its climb.
# Peers are dashed, too.
COLOURS = {
    "torch": "#555555",
    "compile": "#E69F00",
    "triton": "#0072B2",
    "cuda": "#009E73",
    "xla": "#CC79A7",
    "peer": "#D55E00",
}
OTHER = "#56B4E9"
MARKERS = "osD^vPX*<>"
#: Earlier steps are paler, so that the end of each climb stands out.
PALEST = 0.45
#: Panels with more shapes than this stand below each other.
WIDE = 12

STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "svg.hashsalt": "kernel_ladder",  # the same rows make the same file
}


def draw(results: Path) -> list[Path]:
    """Draw every operation that has times in a file of rows; returns the pictures' files."""
    timed = [row for row in operations(latest(read(results))) if row.us is not None]
    paths = []
    for op in dict.fromkeys(row.op for row in timed):
        paths.append(picture_file(results, op))
        paths[-1].parent.mkdir(exist_ok=True)
        again = _in_other_layouts(op)
        mine = [row for row in timed if row.op == op]
        _picture([row for row in mine if row.shape not in again] or mine, paths[-1])
    return paths


def _in_other_layouts(op: str) -> set[str]:
    """Cases that have the shapes of others, a layout for each operand, and no climb: they would fill the picture."""
    sweep = kernel_ladder.spec(op).sweep if op in kernel_ladder.OPS else ()
    return {case.id for case in sweep if not isinstance(case.layout, str)}


def _picture(rows: list[Row], path: Path) -> None:
    # Float32 beside bfloat16 would hide the one or the other: a row of panels for each, a column for each pass.
    dtypes = sorted({row.dtype for row in rows}, key=lambda d: (d != "bfloat16", d))
    passes = ("forward", "backward")
    bytes_bound = 2 * sum(row.bytes_bound for row in rows) >= len(rows)
    widest = max(len({r.shape for r in rows if r.dtype == d}) for d in dtypes)
    panels = [
        (dtype, pass_)
        for dtype in dtypes
        for pass_ in passes
        if any(row.dtype == dtype and row.pass_ == pass_ for row in rows)
    ]
    columns = 1 if widest > WIDE else len(passes)
    lines = math.ceil(len(panels) / columns)
    size = (columns * max(4.5, 0.55 * widest + 2.6) + 0.4, lines * 4.4 + 0.5)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for axes, (dtype, pass_) in zip(grid.flat, panels, strict=False):
            members = [row for row in rows if row.dtype == dtype and row.pass_ == pass_]
            axes.set_title(f"{pass_}, {dtype}", loc="left", fontsize=10, fontweight="bold")
            _panel(axes, members, bytes_bound)
        for axes in grid[:, 0]:
            axes.set_ylabel("GB/s of the least bytes" if bytes_bound else "TFLOP/s of the least operations")
        figure.suptitle(f"{rows[0].op} on {rows[0].gpu}", x=0.01, ha="left", fontsize=12)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
        plt.close(figure)


def _panel(axes: Axes, rows: list[Row], bytes_bound: bool) -> None:
    shapes = _shapes(rows)
    places = dict(shapes)
    backends = list(dict.fromkeys(row.backend for row in rows))
    peak = 0.0
    ends: list[tuple[float, str, str]] = []
    last = max(places.values())
    for backend in backends:
        mine = {row.shape: row for row in rows if row.backend == backend}
        colour, marker = look(backend, backends)
        xs, ys = [], []
        for shape, place in shapes:
            if xs and place - xs[-1] > 1:  # another set of options: no line across
                xs, ys = [*xs, place - 0.5], [*ys, math.nan]
            row = mine.get(shape)
            xs.append(place)
            ys.append(math.nan if row is None else row.gbs if bytes_bound else row.tflops)
        peak = max(peak, *(y for y in ys if not math.isnan(y)))
        interpreted = any(row.interpreted for row in mine.values())
        style = ":" if interpreted else "--" if backend.startswith("peer.") else "-"
        axes.plot(xs, ys, color=colour, marker=marker, markersize=5, linewidth=1.6, ls=style)
        shown = [y for y in ys if not math.isnan(y)]
        ends.append((shown[-1], f"{backend} (interpreted)" if interpreted else backend, colour))
    roof = _roof(axes, rows, shapes, bytes_bound)
    # A line from zero is the honest scale; only interpreted kernels, thousands of times slower, ask for another.
    log = any(row.interpreted for row in rows)
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.08 * max(peak, max(roof.values(), default=0)))
    if roof:
        ends.append((list(roof.values())[-1], "measured ceiling", "black"))
    axes.set_xticks([place for _, place in shapes], [shape for shape, _ in shapes], rotation=40, ha="right", fontsize=8)
    axes.set_xlim(-0.4, last + 0.4)
    _label_ends(axes, ends, log)


def _shapes(rows: list[Row]) -> list[tuple[str, float]]:
    """Shapes in the sweep's order with their places on the axis; a gap where the options change."""
    options: dict[str, str] = {}
    for row in rows:
        options.setdefault(row.shape, repr(sorted(_without_sizes(row).items())))
    placed: list[tuple[str, float]] = []
    place, before = 0.0, None
    for kind in dict.fromkeys(options.values()):
        for shape in (s for s, o in options.items() if o == kind):
            place += 0 if not placed else 1 if before == kind else 1.6
            placed.append((shape, place))
            before = kind
    return placed


def _without_sizes(row: Row) -> dict[str, Any]:
    """The options, save one that repeats the sizes of the first tensor, as normalized_shape does."""
    first = (row.shapes or [None])[0] or []
    return {k: v for k, v in row.options.items() if not (isinstance(v, list | tuple) and [*v] == first[-len(v) :])}


def look(backend: str, backends: Sequence[str]) -> tuple[tuple[float, ...], str]:
    """Colour and marker of a variant among those of its picture."""
    level = backend.partition(".")[0]
    climb = [b for b in backends if b.partition(".")[0] == level]
    step = climb.index(backend)
    # Peers are no climb.
    strength = 1.0 if len(climb) == 1 or level == "peer" else PALEST + (1 - PALEST) * step / (len(climb) - 1)
    r, g, b = mpl.colors.to_rgb(COLOURS.get(level, OTHER))
    return tuple(1 - strength * (1 - c) for c in (r, g, b)), MARKERS[step % len(MARKERS)]


def _roof(axes: Axes, rows: list[Row], shapes: list[tuple[str, float]], bytes_bound: bool) -> dict[str, float]:
    """Draw, for each shape, the rate at the least time that the measured ceilings allow."""
    roof = {}
    for row in rows:
        if row.least_us:
            roof[row.shape] = row.bytes / row.least_us / 1e3 if bytes_bound else row.flops / row.least_us / 1e6
    roof = {shape: roof[shape] for shape, _ in shapes if shape in roof}
    for shape, place in shapes:
        if shape in roof:
            axes.hlines(roof[shape], place - 0.4, place + 0.4, color="black", linewidth=1.4, linestyle=(0, (3, 1.5)))
    return roof


def spread(heights: Sequence[float], gap: float, top: float = 1.0) -> list[float]:
    """Rising heights, as shares of an axis, moved apart until no two are nearer than `gap`; their order stays."""
    at: list[float] = []
    for height in heights:
        at.append(max(height, at[-1] + gap) if at else max(height, 0.0))
    # Pushed past the top: move the pile down again, keeping its order.
    ceiling = max(top, gap * (len(at) - 1))
    for i in range(len(at) - 1, -1, -1):
        at[i] = min(at[i], ceiling)
        ceiling = at[i] - gap
    return at


def _label_ends(axes: Axes, ends: list[tuple[float, str, str]], log: bool) -> None:
    """Name each line at its right end, moved apart where names would overlap."""
    low, high = axes.get_ylim()

    def height(y: float) -> float:  # as a share of the axis
        return math.log(y / low) / math.log(high / low) if log else (y - low) / (high - low)

    ends = sorted(ends, key=lambda end: end[0])
    at = spread([height(y) for y, _, _ in ends], gap=0.055)
    line = {"arrowstyle": "-", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)}
    for (y, name, colour), where in zip(ends, at, strict=True):
        axes.annotate(
            name,
            xy=(1.0, height(y)),
            xytext=(1.05, where),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=colour,
            fontsize=9,
            va="center",
            annotation_clip=False,
            arrowprops=line | {"color": colour},
        )
