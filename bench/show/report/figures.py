"""The report's charts as Plotly figures: rate against size, roofline, climb.

A figure is a dictionary: `view` says which choice of the page it belongs to, `data` and `layout` are Plotly's. Three
things are left to ``charts.js``, which knows the page. A colour is a name of the style sheet with a strength (``"cuda
0.7"``, ``"ink"``), `customdata` holds indices of rows, and text is plain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from bench.rows.ratio import Estimate, baseline_of
from bench.rows.store import Row
from bench.show import panels
from bench.show.climb import in_order
from bench.show.roofline import Roof, intensity
from bench.show.table import microseconds, rate

Figure = dict[str, Any]
#: By the key of a row: the step before it in its ladder, and the gain over that step.
Gains = Mapping[tuple[Any, ...], tuple[Row, Estimate]]

ALL = "all"
DASHES = {"torch": "solid", "compile": "dashdot", "triton": "dash", "cuda": "solid", "xla": "dot", "peer": "4px,2px"}
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "star", "hexagon")
CEILING_LINE = {"color": "ink", "dash": "dash", "width": 1.6}
# Characters.
LONGEST_SHAPE = 30
LONGEST_REASON = 120
MANY_SHAPES = 36  # the names of more stand upright
# CSS pixels.
LEGEND_LINE = 19
BAR = 26
NAME = 16
#: A climb of more than this factor hides its first steps on a linear scale.
STEEP = 50
#: Factor between the levels of one operation on a roofline: their lines would otherwise lie on each other.
ASIDE = 1.07


def figures(
    rows: Sequence[Row],
    headlines: Sequence[Mapping[str, Any]],
    roofs: Mapping[tuple[str | None, str], Sequence[Roof]],
    gained: Gains,
) -> list[Figure]:
    """Every chart of the page over rows, which stand level by level in the order of the table.

    `headlines` name the shape that stands for each operation where several are shown; `roofs` are those of a machine
    and dtype.
    """
    index = {id(row): i for i, row in enumerate(rows)}
    standing = {tuple(headline.values()) for headline in headlines}
    found: list[Figure] = []
    for (gpu, dtype, pass_), mine in _grouped(rows, "gpu", "dtype", "pass_").items():
        view = {"gpu": gpu, "dtype": dtype, "pass": pass_}
        limits = roofs[gpu, dtype]
        for (op, shape), steps in _grouped(mine, "op", "shape").items():
            here = view | {"op": op, "shape": shape}
            title = f"{op} {shape}, {pass_}, {dtype}"
            found.append(here | {"section": "climb"} | _climb(steps, title, index, gained))
            found.append(here | {"section": "roofline"} | _roofline(steps, title, limits, index))
        by_op = _grouped(mine, "op")
        for (op,), of_op in by_op.items():
            drawn = _rates(of_op, f"{op} {pass_}, {dtype}", index)
            found += [view | {"section": "rates", "op": op} | figure for figure in drawn]
        if len(by_op) > 1:
            shown = [row for row in mine if (gpu, row.op, dtype, pass_, row.shape) in standing]
            title = f"every operation, {pass_}, {dtype}"
            found.append(view | {"section": "roofline", "op": ALL} | _roofline(shown, title, limits, index))
    return found


def _grouped(rows: Sequence[Row], *fields: str) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, field) for field in fields), []).append(row)
    return groups


def _named(row: Row) -> str:
    return f"{row.backend} (interpreted)" if row.interpreted else row.backend


def _shortened(text: str, length: int) -> str:
    return f"{text[: length - 1]}…" if len(text) > length else text


def _line(backend: str, backends: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Line and symbol of a variant: colour and dash of its level, strength and symbol of its step."""
    level, step, strength = panels.step_of(backend, backends)
    colour = f"{level if level in DASHES else 'other'} {strength:.2f}"
    return {"color": colour, "dash": DASHES.get(level, "1px,2px"), "width": 1.8}, SYMBOLS[step % len(SYMBOLS)]


def _error_bars(rows: Sequence[Row | None], bytes_bound: bool, colour: str) -> dict[str, Any]:
    """From each rate to the rates at the ends of the time's interval, or of its quartiles."""
    bars: dict[str, Any] = {"type": "data", "symmetric": False, "color": colour, "thickness": 1.3, "width": 4}
    above, below = [], []
    for row in rows:
        ends = [(row.us_low, row.us_high), (row.us_q1, row.us_q3)] if row else []
        low, high = next((pair for pair in ends if None not in pair), (None, None))
        value = panels.rate_of(row, bytes_bound) if row else None
        above.append(value * row.us / low - value if value and low else 0)
        below.append(value - value * row.us / high if value and high else 0)
    return bars | {"array": above, "arrayminus": below}


def _unit(bytes_bound: bool) -> str:
    return "GB/s" if bytes_bound else "TFLOP/s"


def _ordered_kinds(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row], bool]]:
    """Rows of one chart with its note and unit.

    Where most shapes are compute-bound, memory-bound shapes far below the others have a chart in bytes per second:
    otherwise they would lie on the axis.
    """
    mostly_bytes = panels.mostly_bytes(rows)
    apart = set() if mostly_bytes else panels.far_below(rows)
    for note, far, bytes_bound in (("", False, mostly_bytes), (", memory-bound", True, True)):
        mine = [row for row in rows if (row.shape in apart) == far and panels.rate_of(row, bytes_bound)]
        if mine:
            yield note, mine, bytes_bound


def _rates(rows: Sequence[Row], title: str, index: Mapping[int, int]) -> list[Figure]:
    timed = in_order([row for row in rows if row.us is not None])
    if not timed:
        return [{"title": title, "empty": "Nothing has a time."}]
    drawn = [_rate_chart(mine, title + note, bound, index) for note, mine, bound in _ordered_kinds(timed)]
    return drawn or [{"title": title, "empty": "Nothing has a rate."}]


def _rate_chart(rows: Sequence[Row], title: str, bytes_bound: bool, index: Mapping[int, int]) -> Figure:
    placed = panels.places(rows)
    many = len(placed) > MANY_SHAPES
    backends = [row.backend for row in rows]
    data = _ceiling_lines(rows, placed, bytes_bound)
    for backend, mine in _grouped(rows, "backend").items():
        data.append(_rate_line(mine, dict(placed), _line(backend[0], backends), bytes_bound, index))
    layout = {
        "xaxis": {
            "tickvals": [place for _, place in placed],
            "ticktext": [_shortened(shape, LONGEST_SHAPE) for shape, _ in placed],
            "tickangle": -90 if many else -40,
            "tickfont": {"size": 9 if many else 12},
            "range": [-0.5, placed[-1][1] + 0.5],
            "automargin": True,
            "showgrid": False,
        },
        "yaxis": {"title": {"text": f"{_unit(bytes_bound)} of the least {'bytes' if bytes_bound else 'operations'}"}},
        "height": max(430, len(data) * LEGEND_LINE + 190),
    }
    # The honest scale starts at zero. Interpreted kernels are thousands of times slower and need a logarithmic one.
    scales = {"linear": {"rangemode": "tozero"}, "log": {"type": "log", "dtick": 1}}
    suits = "log" if any(row.interpreted for row in rows) else "linear"
    return _figure(title, data, layout, {"axis": "yaxis", **scales, "suits": suits})


def _figure(title: str, data: Sequence[Any], layout: Mapping[str, Any], scale: Mapping[str, Any] | None) -> Figure:
    return {"title": title, "data": data, "layout": layout, "scale": scale}


def _ceiling_lines(rows: Sequence[Row], placed: Sequence[tuple[str, float]], bytes_bound: bool) -> list[Any]:
    known = {row.shape: ceiling for row in rows if (ceiling := panels.ceiling_of(row, bytes_bound))}
    places = [(place, known[shape]) for shape, place in placed if shape in known]
    if not places:
        return []
    return [
        {
            "name": "measured ceiling",
            "mode": "lines",
            "line": CEILING_LINE,
            "x": [x for place, _ in places for x in (place - 0.4, place + 0.4, None)],
            "y": [y for _, ceiling in places for y in (ceiling, ceiling, None)],
            "hovertext": [f"measured ceiling: {y:,.4g} {_unit(bytes_bound)}" for _, y in places for _ in range(3)],
        }
    ]


def _rate_line(
    rows: Sequence[Row], places: Mapping[str, float], look: Any, bytes_bound: bool, index: Mapping[int, int]
) -> dict[str, Any]:
    line, symbol = look
    ordered: list[Row | None] = sorted(rows, key=lambda row: places[row.shape])
    # No line across a shape without a time, nor to another set of options: None breaks it.
    gaps = [i for i, (a, b) in enumerate(pairwise(ordered), 1) if places[b.shape] - places[a.shape] != 1]
    for i in reversed(gaps):
        ordered.insert(i, None)
    return {
        "name": _named(rows[0]),
        "mode": "lines+markers",
        "line": line,
        "x": [row and places[row.shape] for row in ordered],
        "y": [row and panels.rate_of(row, bytes_bound) for row in ordered],
        "error_y": _error_bars(ordered, bytes_bound, line["color"]),
        "marker": {"size": 8, "color": line["color"], "symbol": [_symbol(row, symbol) for row in ordered]},
        "customdata": [row and index[id(row)] for row in ordered],
    }


def _symbol(row: Row | None, symbol: str) -> str:
    """Hollow where the clock moved."""
    return f"{symbol}-open" if row and row.clocks_moved else symbol


def _climb(rows: Sequence[Row], title: str, index: Mapping[int, int], gained: Gains) -> Figure:
    timed = [row for row in rows if row.us is not None]
    if not timed:
        return {"title": title, "empty": "Nothing has a time."}
    bytes_bound = panels.mostly_bytes(timed)
    rated = {i: row for i, row in enumerate(rows) if panels.rate_of(row, bytes_bound)}
    if not rated:
        return {"title": title, "empty": "Nothing has a rate."}
    backends = [row.backend for row in rows]
    values = [panels.rate_of(row, bytes_bound) for row in rated.values()]
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": values,
        "y": [*rated],
        "width": 0.62,
        "error_x": _error_bars([*rated.values()], bytes_bound, "ink"),
        "marker": {"color": [_line(row.backend, backends)[0]["color"] for row in rated.values()]},
        "customdata": [index[id(row)] for row in rated.values()],
    }
    ceiling = next(filter(None, (panels.ceiling_of(row, bytes_bound) for row in rated.values())), None)
    rules = [
        {"xref": "paper", "x0": 0, "x1": 1, "y0": i - 0.5, "y1": i - 0.5, "line": {"color": "rule", "width": 1}}
        for i, (before, row) in enumerate(pairwise(rows), 1)
        if before.level != row.level
    ]
    if ceiling:
        rules.append({"yref": "paper", "y0": 0, "y1": 1, "x0": ceiling, "x1": ceiling, "line": CEILING_LINE})
    high = max([*values, *filter(None, [ceiling])]) * 1.04
    layout = {
        "margin": {"l": 180, "r": 350, "t": 40, "b": 10},
        "xaxis": {"title": {"text": _unit(bytes_bound)}, "side": "top", "nticks": 6},
        "yaxis": {
            "range": [len(rows) - 0.5, -0.5],
            "tickvals": [*range(len(rows))],
            "ticktext": [_named(row) for row in rows],
            "showgrid": False,
            "fixedrange": True,
        },
        "shapes": rules,
        "annotations": [_words(row, i, i in rated, bytes_bound, gained) for i, row in enumerate(rows)],
        "height": 50 + BAR * len(rows),
    }
    decades = [math.floor(math.log10(min(values) * 0.8)), math.log10(high)]
    scales = {"linear": {"range": [0, high]}, "log": {"type": "log", "dtick": 1, "range": decades}}
    suits = "log" if high / min(values) > STEEP else "linear"
    return _figure(title, [bars], layout, {"axis": "xaxis", **scales, "suits": suits})


def _words(row: Row, place: int, rated: bool, bytes_bound: bool, gained: Gains) -> dict[str, Any]:
    """Right of a bar: rate and gains; in its place: why there is none."""
    if rated:
        parts = [rate(row, bytes_bound)]
        if row.key in gained:
            parts.append(f"{_times(gained[row.key][1].value)} step before")
        if row.speedup is not None:
            parts.append(f"{_times(row.speedup)} {baseline_of(row.op)}")
        fields: dict[str, Any] = {"x": 1, "xshift": 10, "text": " · ".join(parts)}
    else:
        reason = f"wrong: {row.wrong}" if row.wrong else row.unsupported
        reason = reason or ("no time" if row.us is None else microseconds(row.us))
        fields = {"x": 0, "text": f"— {_shortened(reason, LONGEST_REASON)}"}
        fields["font"] = {"color": "bad" if row.wrong else "soft"}
    return {"xref": "paper", "y": place, "xanchor": "left", "align": "left", "showarrow": False} | fields


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}×" if ratio >= 100 else f"{ratio:#.3g}×" if ratio >= 1 else f"{ratio:#.2g}×"


def _roofline(rows: Sequence[Row], title: str, limits: Sequence[Roof], index: Mapping[int, int]) -> Figure:
    points = [row for row in rows if row.us is not None and intensity(row) and row.tflops]
    if not points:
        return {"title": title, "empty": "Nothing has a time here."}
    by_op = _grouped(points, "op")
    single = len(by_op) == 1
    across, up = _frame(points, limits, room=6 if single else 40)
    data = _roof_lines(limits, across)
    for mine in by_op.values():
        data += _ladders(mine, index)
    # The symbols of several operations differ: their legend names levels alone.
    names = [row.backend if single else row.backend.partition(".")[0] for row in points]
    for name in dict.fromkeys(names):
        line, symbol = _line(name, names)
        shown = next(_named(row) for row in points if row.backend == name) if single else name
        marker = {"color": line["color"], "symbol": symbol, "size": 9}
        data.append({"name": shown, "mode": "lines+markers", "line": line, "marker": marker, "x": [None], "y": [None]})
    logarithmic = {"type": "log", "dtick": 1}
    layout = {
        "xaxis": logarithmic | {"range": across, "title": {"text": "least operations per least byte"}},
        "yaxis": logarithmic | {"range": up, "title": {"text": "TFLOP/s of the least operations"}},
        "annotations": [] if single else _names(points, up),
        "height": 480,
    }
    return _figure(title, data, layout, None)


def _frame(rows: Sequence[Row], limits: Sequence[Roof], room: float) -> tuple[list[float], list[float]]:
    """Decimal logarithms of the axes' ends. The first axis passes the last point by the factor `room`, for names."""
    xs = [intensity(row) for row in rows]
    flats = [roof.tflops for roof in limits if roof.tflops]
    slopes = [roof.gbs for roof in limits if roof.gbs]
    ridges = [max(flats) * 1e3 / gbs for gbs in slopes if flats]
    ys = [row.tflops for row in rows]
    across = [min([1.0, *xs, *ridges]) / 3, max([room * max(xs), *(6 * ridge for ridge in ridges)])]
    up = [min([*ys, *(gbs * min(xs) / 1e3 for gbs in slopes)]) / 3, max([*ys, *flats]) * 2]
    return [math.log10(x) for x in across], [math.log10(y) for y in up]


def _roof_lines(limits: Sequence[Roof], across: Sequence[float]) -> list[dict[str, Any]]:
    """Slopes rise to the highest flat roof; flat roofs start at the steepest slope."""
    left, right = (10**end for end in across)
    highest = max((roof.tflops for roof in limits if roof.tflops), default=None)
    steepest = max((roof.gbs for roof in limits if roof.gbs), default=None)
    lines = []
    for i, roof in enumerate(limits):
        if roof.gbs:
            ends = [left, highest * 1e3 / roof.gbs if highest else right]
        else:
            ends = [roof.tflops * 1e3 / steepest if steepest else left, right]
        first = next(k for k, other in enumerate(limits) if bool(other.gbs) == bool(roof.gbs))
        value = f"{roof.gbs:,.0f} GB/s" if roof.gbs else f"{roof.tflops:,.4g} TFLOP/s"
        name = f"{roof.name}: {value}"
        line = CEILING_LINE | {"dash": "solid"} if i == first else CEILING_LINE
        heights = [roof.at(end) for end in ends]
        lines.append({"name": name, "mode": "lines", "line": line, "x": ends, "y": heights, "hovertext": [name] * 2})
    return lines


def _ladders(rows: Sequence[Row], index: Mapping[int, int]) -> list[dict[str, Any]]:
    """A line for each level of one operation, in the order of the table. Peers are no steps of each other."""
    backends = [row.backend for row in rows]
    levels = _grouped(rows, "level")
    lines = []
    for i, ((level,), ladder) in enumerate(levels.items()):
        looks = [_line(row.backend, backends) for row in ladder]
        lines.append(
            {
                "mode": "markers" if level == "peer" else "lines+markers",
                "showlegend": False,
                "line": looks[-1][0],
                "x": [intensity(row) * ASIDE ** (i - (len(levels) - 1) / 2) for row in ladder],
                "y": [row.tflops for row in ladder],
                "marker": {
                    "size": 9,
                    "color": [line["color"] for line, _ in looks],
                    "symbol": [_symbol(row, symbol) for row, (_, symbol) in zip(ladder, looks, strict=True)],
                },
                "customdata": [index[id(row)] for row in ladder],
            }
        )
    return lines


def _names(rows: Sequence[Row], up: Sequence[float]) -> list[dict[str, Any]]:
    """The fastest point of each operation, named right of the points of about its intensity, none on another."""
    low, high = up
    names = []
    for bytes_bound in (True, False):
        fastest = [min(mine, key=lambda row: row.us) for mine in _grouped(rows, "op").values()]
        pile = sorted((row for row in fastest if row.bytes_bound == bytes_bound), key=lambda row: row.tflops)
        if not pile:
            continue
        beyond = math.log10(max(intensity(row) for row in pile)) + 0.12
        shares = [(math.log10(row.tflops) - low) / (high - low) for row in pile]
        heights = panels.spread(shares, gap=NAME / 400, top=shares[-1])  # no name above the highest point, on a roof
        for row, height in zip(pile, heights, strict=True):
            place = {"x": math.log10(intensity(row)), "y": math.log10(row.tflops), "axref": "x", "ayref": "y"}
            arrow = {"arrowhead": 0, "arrowwidth": 0.7, "standoff": 6, "font": {"size": 11}, "xanchor": "left"}
            text = f"{row.op} {_named(row)}"
            names.append(place | arrow | {"ax": beyond, "ay": low + height * (high - low), "text": text})
    return names
