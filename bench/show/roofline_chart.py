"""Rooflines: arithmetic intensity against rate, the measured ceilings drawn, each level's climb joined by a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.rows.store import Row, latest, of_one_machine, picture_file, read
from bench.show.headline import headline
from bench.show.panels import LEGEND, source_of, spread
from bench.show.pictures import COLOURS, OTHER, STYLE, look
from bench.show.roofline import CAPTION, Roof, intensity, operations, roofline
from kernel_ladder.spec import PASSES

#: Levels stand side by side around the intensity of their operation, a step of this factor apart, or their lines would
#: lie on each other. The step is wide under a flat roof, and small under a slope, which they must not seem to pass.
ASIDE = 1.6
ASIDE_ON_SLOPE = 1.07
#: Names stand to the right of their points, and the axis goes on this far beyond the last of them.
ROOM = 3000


def draw(results: Path, gpu: str | None = None) -> list[Path]:
    """Draw the roofline of every operation that has times in a file of rows, and one of all; returns their files.

    Of one machine, as :func:`bench.show.pictures.draw`.
    """
    found = of_one_machine(latest(read(results)), gpu)
    shown = {op: _standing(op, found) for op in dict.fromkeys(row.op for row in operations(found))}
    shown = {op: rows for op, rows in shown.items() if rows}
    pictures = [(f"roofline-{op}", rows, True) for op, rows in shown.items()]
    if shown:
        pictures.append(("roofline", [row for rows in shown.values() for row in rows], False))
    for name, rows, every in pictures:
        path = picture_file(results, name)
        path.parent.mkdir(exist_ok=True)
        _picture(rows, found, path, every)
    return [picture_file(results, name) for name, _, _ in pictures]


def _standing(op: str, found: Sequence[Row]) -> list[Row]:
    """The rows that represent an operation: those of its headline shape; a pass not timed there at its own."""
    rows: list[Row] = []
    for pass_ in PASSES:
        timed = [row for row in found if row.op == op and row.pass_ == pass_ and row.us and intensity(row)]
        at = headline(op, timed)
        rows += [row for row in timed if (row.shape, row.dtype) == at]
    return rows


def _picture(rows: Sequence[Row], found: Sequence[Row], path: Path, every: bool) -> None:
    """One panel a pass; names at every point, or at the fastest of each operation alone."""
    passes = [pass_ for pass_ in PASSES if any(row.pass_ == pass_ for row in rows)]
    with plt.rc_context({**STYLE, "axes.grid.axis": "both"}):
        size = (7.2 * len(passes) + 0.3, 5.6)
        figure, grid = plt.subplots(1, len(passes), figsize=size, squeeze=False, layout="constrained")
        panels = [
            (axes, _panel(axes, [row for row in rows if row.pass_ == pass_], found, every))
            for axes, pass_ in zip(grid.flat, passes, strict=True)
        ]
        title = f"{rows[0].op if every else 'every operation'}: {source_of(rows)}; {LEGEND}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        note = CAPTION.replace(", whatever", ",\nwhatever") + " Levels stand side by side."
        figure.supxlabel(note, x=0.01, ha="left", fontsize=8, color="#555555")
        figure.draw_without_rendering()  # settles the layout, and with it how steep a slope looks
        figure.set_layout_engine("none")  # once is enough: layout takes longer than all else
        for axes, limits in panels:
            _name_slopes(axes, limits)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
        plt.close(figure)


def _panel(axes: Axes, rows: Sequence[Row], found: Sequence[Row], every: bool) -> list[Roof]:
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    here = [row for row in found if row.gpu == rows[0].gpu]
    limits = list(dict.fromkeys(roof for dtype in dtypes for roof in roofline(here, dtype)))
    shape = f" {rows[0].shape}" if every else ""
    axes.set_title(f"{rows[0].pass_}{shape}, {' and '.join(dtypes)}", loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel("least operations per least byte")
    axes.set_ylabel("TFLOP/s of the least operations")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()
    _frame(axes, rows, limits)
    _draw_roofs(axes, limits)
    points = [point for op in dict.fromkeys(row.op for row in rows) for point in _climbs(axes, op, rows, every)]
    _label(axes, points, limits, every)
    if not every:
        levels = dict.fromkeys(row.level for row in rows)
        handles = [Line2D([], [], color=COLOURS.get(level, OTHER), marker="o", label=level) for level in levels]
        axes.legend(handles=handles, loc="upper left", fontsize=8.5, frameon=False)
    return limits


def _frame(axes: Axes, rows: Sequence[Row], limits: Sequence[Roof]) -> None:
    """Room for every point and its name, and for the ridges where slopes meet the highest flat roof."""
    xs = [x for row in rows if (x := intensity(row))]
    flats = [roof.tflops for roof in limits if roof.tflops]
    ridges = [max(flats) * 1e3 / roof.gbs for roof in limits if roof.gbs and flats]
    axes.set_xlim(min([1.0, *xs, *ridges]) / 4, max([ROOM * max(xs), *(6 * ridge for ridge in ridges)]))
    ys = [row.tflops for row in rows if row.tflops]
    under = [roof.at(min(xs)) for roof in limits]
    axes.set_ylim(min([*ys, *under]) / 4, max([*ys, *flats]) * 2.5)


def _draw_roofs(axes: Axes, limits: Sequence[Roof]) -> None:
    left, right = axes.get_xlim()
    flats = [roof.tflops for roof in limits if roof.tflops]
    slopes = [roof for roof in limits if roof.gbs]
    steepest = max((roof.gbs for roof in slopes), default=None)
    line = {"color": "black", "linewidth": 1.3}
    for i, roof in enumerate(slopes):
        end = max(flats) * 1e3 / roof.gbs if flats else right
        axes.plot([left, end], [roof.at(left), roof.at(end)], **line, ls="-" if i == 0 else (0, (5, 2)))
    for roof in limits:
        if roof.tflops:
            start = roof.tflops * 1e3 / steepest if steepest else left
            dashed = "-" if roof.tflops == max(flats) else (0, (3, 1.5))
            axes.plot([start, right], [roof.tflops, roof.tflops], **line, ls=dashed)
    named = sorted((roof for roof in limits if roof.tflops), key=lambda roof: roof.tflops)
    for roof, height in zip(named, spread([_height(axes, roof.tflops) for roof in named], gap=0.075), strict=True):
        axes.text(
            1.01, height, f"{roof.name}\n{roof.tflops:.3g} TFLOP/s", transform=axes.transAxes, fontsize=8, va="center"
        )


def _name_slopes(axes: Axes, limits: Sequence[Roof]) -> None:
    """Name each slope along its line: the lowest under it, beyond the points that it bounds, the others above."""
    left, right = axes.get_xlim()
    flats = [roof.tflops for roof in limits if roof.tflops]
    slopes = sorted((roof for roof in limits if roof.gbs), key=lambda roof: roof.gbs)
    for i, roof in enumerate(slopes):
        end = max(flats) * 1e3 / roof.gbs if flats else right
        share = 0.5 if i else 0.75
        place = left ** (1 - share) * end**share
        (x0, y0), (x1, y1) = axes.transData.transform([(left, roof.at(left)), (end, roof.at(end))])
        axes.annotate(
            f"{roof.name}, {roof.gbs:,.0f} GB/s",
            xy=(place, roof.at(place)),
            xytext=(-4, 4) if i else (4, -4),
            textcoords="offset points",
            fontsize=8,
            ha="center",
            va="bottom" if i else "top",
            rotation=math.degrees(math.atan2(y1 - y0, x1 - x0)),
            rotation_mode="anchor",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.3},
        )


def _height(axes: Axes, y: float) -> float:
    """A rate as a share of the logarithmic axis."""
    low, high = axes.get_ylim()
    return math.log(y / low) / math.log(high / low)


LEADER = {"arrowstyle": "-", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3, "relpos": (0, 0.5)}

#: Place, row and colour.
Point = tuple[float, float, Row, tuple[float, ...]]


def _climbs(axes: Axes, op: str, rows: Sequence[Row], every: bool) -> list[Point]:
    """Draw the climb of each level of an operation in the order of the table; returns its points."""
    mine = [row for row in rows if row.op == op]
    backends = [row.backend for row in mine]
    levels = list(dict.fromkeys(row.level for row in mine))
    points: list[Point] = []
    for i, level in enumerate(levels):
        climb = [row for row in mine if row.level == level]
        apart = ASIDE_ON_SLOPE if mine[0].bytes_bound or not every else ASIDE
        xs = [intensity(row) * apart ** (i - (len(levels) - 1) / 2) for row in climb]
        if level != "peer":  # peers are no steps of each other
            axes.plot(xs, [row.tflops for row in climb], color=COLOURS.get(level, OTHER), linewidth=1.2, alpha=0.7)
        for x, row in zip(xs, climb, strict=True):
            colour, marker = look(row.backend, backends)
            axes.plot(x, row.tflops, ls="", marker=marker, color=colour, markersize=7, mec="white", mew=0.6)
            points.append((x, row.tflops, row, colour))
    return points


def _fastest(points: Sequence[Point]) -> list[Point]:
    ops = dict.fromkeys(row.op for _, _, row, _ in points)
    return [min((p for p in points if p[2].op == op), key=lambda p: p[2].us) for op in ops]


def _label(axes: Axes, points: Sequence[Point], limits: Sequence[Roof], every: bool) -> None:
    """Name every point, or the fastest of each operation: right of the points, under the roofs, none on another."""
    left, right = map(math.log, axes.get_xlim())
    highest = max((roof.tflops for roof in limits if roof.tflops), default=math.inf)
    for bytes_bound in (True, False):
        near = [p for p in points if p[2].bytes_bound == bytes_bound]
        if not near:
            continue
        pile = sorted(near if every else _fastest(near), key=lambda p: p[1])
        top = _height(axes, min(pile[-1][1], highest / 1.25))
        heights = spread([_height(axes, y) for _, y, _, _ in pile], gap=0.042, top=top)
        at = (math.log(max(x for x, _, _, _ in near)) - left) / (right - left) + 0.045
        for (x, y, row, colour), height in zip(pile, heights, strict=True):
            name = row.backend if every else f"{row.op} {row.backend}"
            axes.annotate(
                f"{name} (interpreted)" if row.interpreted else name,
                xy=(x, y),
                xytext=(at, height),
                textcoords="axes fraction",
                fontsize=8.5,
                va="center",
                color=COLOURS.get(row.level, OTHER),
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6},
                arrowprops=LEADER | {"color": colour},
            )
