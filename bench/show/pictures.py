"""One picture per operation: rate against size, a line per variant, the measured ceiling drawn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

import kernel_ladder
from bench.rows.store import Row, latest, of_one_machine, picture_file, read
from bench.show import panels
from bench.show.roofline import operations
from kernel_ladder.spec import PASSES

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
#: Width in inches up to which panels stand side by side; the widest panel may exceed it. A page shows a picture at some
#: 880 pixels, where this leaves texts their size.
LINE = 9.6
#: Inches for the names of the lines, for each shape, and for all shapes of a panel until names of shapes stand upright.
NAMES = 2.6
SHAPE = 0.55
SHAPES = 6.6
UPRIGHT = 0.2

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


def draw(results: Path, gpu: str | None = None) -> list[Path]:
    """Draw every operation that has times in a file of rows, of the machine `gpu` or that of the newest row.

    Returns the pictures' files.
    """
    timed = [row for row in operations(of_one_machine(latest(read(results)), gpu)) if row.us is not None]
    paths = []
    for op in dict.fromkeys(row.op for row in timed):
        paths.append(picture_file(results, op))
        paths[-1].parent.mkdir(exist_ok=True)
        again = _in_other_layouts(op)
        mine = [row for row in timed if row.op == op]
        _picture([row for row in mine if row.shape not in again] or mine, paths[-1])
    return paths


def _in_other_layouts(op: str) -> set[str]:
    """Cases that repeat other shapes with a layout per operand and have no climb: they would crowd the picture."""
    sweep = kernel_ladder.spec(op).sweep if op in kernel_ladder.OPS else ()
    return {case.id for case in sweep if not isinstance(case.layout, str)}


def _picture(rows: list[Row], path: Path) -> None:
    lines = _lines(_panels(rows))
    width = max(sum(panel.inches for panel in line) for line in lines)
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(width + 0.4, 4.4 * len(lines) + 0.5), layout="constrained")
        grid = figure.add_gridspec(len(lines), 1)
        for i, line in enumerate(lines):
            shares = [panel.inches for panel in line]
            rest = [width - sum(shares)] if width - sum(shares) > 0.1 else []
            places = grid[i].subgridspec(1, len(line) + len(rest), width_ratios=[*shares, *rest])
            for k, panel in enumerate(line):
                axes = figure.add_subplot(places[k])
                axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
                _panel(axes, panel.rows, panel.bytes_bound)
                if k == 0 or panel.bytes_bound != line[k - 1].bytes_bound:
                    unit = "GB/s of the least bytes" if panel.bytes_bound else "TFLOP/s of the least operations"
                    axes.set_ylabel(unit)
        figure.suptitle(f"{rows[0].op}: {panels.source_of(rows)}; {panels.LEGEND}", x=0.01, ha="left", fontsize=12)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
        plt.close(figure)


@dataclasses.dataclass(frozen=True)
class Panel:
    """What one pair of axes shows: one dtype, one pass, one unit. Panels of a kind differ in the pass alone."""

    title: str
    rows: list[Row]
    bytes_bound: bool

    @property
    def kind(self) -> tuple[str, bool]:
        return self.rows[0].dtype, self.bytes_bound

    @property
    def inches(self) -> float:
        count = len({row.shape for row in self.rows})
        return max(4.5, NAMES + max(min(SHAPE * count, SHAPES), UPRIGHT * count))


def _lines(given: list[Panel]) -> list[list[Panel]]:
    """Panels side by side as far as there is room, in their order; both passes of a dtype on one line if they fit."""
    room = max([LINE, *(panel.inches for panel in given)])
    lines: list[list[Panel]] = [[]]
    for i, panel in enumerate(given):
        ahead = [other for other in given[i:] if other.kind == panel.kind]
        wanted = sum(other.inches for other in ahead)
        wanted = wanted if wanted <= room else panel.inches
        if sum(other.inches for other in lines[-1]) + wanted > room:
            lines.append([])
        lines[-1].append(panel)
    return lines


def _panels(rows: list[Row]) -> list[Panel]:
    """A panel for each dtype and pass: float32 beside bfloat16 would hide the one or the other.

    Where most shapes are compute-bound, memory-bound shapes far below the others have panels in bytes per second:
    otherwise they would lie on the axis.
    """
    mostly_bytes = panels.mostly_bytes(rows)
    apart = set() if mostly_bytes else panels.far_below([row for row in rows if row.pass_ == "forward"])
    dtypes = sorted({row.dtype for row in rows}, key=lambda d: (d != "bfloat16", d))
    found = []
    for bound, note in ((False, ""), (True, ", bound by memory")):
        for dtype in dtypes:
            for pass_ in PASSES:
                mine = [r for r in rows if (r.dtype, r.pass_, r.shape in apart) == (dtype, pass_, bound)]
                if mine:
                    found.append(Panel(f"{pass_}, {dtype}{note}", mine, mostly_bytes or bound))
    return found


def _panel(axes: Axes, rows: list[Row], bytes_bound: bool) -> None:
    shapes = panels.places(rows)
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
    # The honest scale starts at zero. Interpreted kernels are thousands of times slower and need a logarithmic one.
    log = any(row.interpreted for row in rows)
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.08 * max(peak, max(roof.values(), default=0)))
    if roof:
        ends.append((list(roof.values())[-1], "measured ceiling", "black"))
    crowded = UPRIGHT * len(shapes) > SHAPES / 2
    turned = {"rotation": 90, "ha": "center"} if crowded else {"rotation": 40, "ha": "right"}
    axes.set_xticks([place for _, place in shapes], [shape for shape, _ in shapes], fontsize=8, **turned)
    axes.set_xlim(-0.4, last + 0.4)
    _label_ends(axes, ends, log)


def shade(level: str, strength: float) -> tuple[float, ...]:
    """The colour of a level; paler where `strength` is below 1."""
    return tuple(1 - strength * (1 - c) for c in mpl.colors.to_rgb(COLOURS.get(level, OTHER)))


def look(backend: str, backends: Sequence[str]) -> tuple[tuple[float, ...], str]:
    """Colour and marker of a variant among those of its picture."""
    level, step, strength = panels.step_of(backend, backends)
    return shade(level, strength), MARKERS[step % len(MARKERS)]


def _roof(axes: Axes, rows: list[Row], shapes: list[tuple[str, float]], bytes_bound: bool) -> dict[str, float]:
    """Draw, for each shape, the rate at the least time that the measured ceilings allow."""
    known = {row.shape: roof for row in rows if (roof := panels.ceiling_of(row, bytes_bound))}
    roof = {shape: known[shape] for shape, _ in shapes if shape in known}
    for shape, place in shapes:
        if shape in roof:
            axes.hlines(roof[shape], place - 0.4, place + 0.4, color="black", linewidth=1.4, linestyle=(0, (3, 1.5)))
    return roof


def _label_ends(axes: Axes, ends: list[tuple[float, str, str]], log: bool) -> None:
    """Name each line at its right end, moved apart where names would overlap."""
    low, high = axes.get_ylim()

    def height(y: float) -> float:  # as a share of the axis
        return math.log(y / low) / math.log(high / low) if log else (y - low) / (high - low)

    ends = sorted(ends, key=lambda end: end[0])
    gap = max(0.046, min(0.055, 1 / max(len(ends) - 1, 1)))  # as near as can be read, before they pass the top
    at = panels.spread([height(y) for y, _, _ in ends], gap)
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
