"""What every chart of rows needs, whichever library draws it: places of shapes, strength of a step, names apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.rows.store import Row

#: Strength of the first step of a ladder; the last one has the level's full colour.
PALEST = 0.45


#: What the colours of a chart say.
LEGEND = "hue: level; darker: higher on its ladder"


def source_of(rows: Sequence[Row]) -> str:
    """The GPU and the commit of a chart's rows, or how many commits they are of."""
    commits = sorted({(row.commit or "")[:7] for row in rows} - {""})
    told = f"commit {commits[0]}" if len(commits) == 1 else f"{len(commits)} commits"
    return f"{rows[0].gpu}, {told}" if commits else str(rows[0].gpu)


def step_of(backend: str, backends: Sequence[str]) -> tuple[str, int, float]:
    """Level, place in the level's ladder, and strength of colour of a variant among those of its chart."""
    level = backend.partition(".")[0]
    ladder = [b for b in dict.fromkeys(backends) if b.partition(".")[0] == level]
    step = ladder.index(backend)
    # Peers are no ladder.
    strength = 1.0 if len(ladder) == 1 or level == "peer" else PALEST + (1 - PALEST) * step / (len(ladder) - 1)
    return level, step, strength


def rate_of(row: Row, bytes_bound: bool) -> float | None:
    """GB/s or TFLOP/s of a row; None without a time."""
    return None if row.us is None else row.gbs if bytes_bound else row.tflops


def ceiling_of(row: Row, bytes_bound: bool) -> float | None:
    """The rate at the least time that the measured ceilings allow."""
    if not row.least_us:
        return None
    work = row.bytes if bytes_bound else row.flops
    return work / row.least_us / (1e3 if bytes_bound else 1e6) if work else None


def places(rows: Sequence[Row]) -> list[tuple[str, float]]:
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
    """The options, without one that repeats the sizes of the first tensor, as normalized_shape does."""
    first = (row.shapes or [None])[0] or []
    options = row.options or {}
    return {k: v for k, v in options.items() if not (isinstance(v, list | tuple) and [*v] == first[-len(v) :])}


def mostly_bytes(rows: Sequence[Row]) -> bool:
    """Whether moving the least bytes takes longest for at least half of the rows."""
    return 2 * sum(row.bytes_bound for row in rows) >= len(rows)


def far_below(rows: Sequence[Row]) -> set[str]:
    """Memory-bound shapes whose ceiling is below a tenth of the highest that any shape of their dtype has."""
    known = [row for row in rows if row.least_us and row.flops]
    peaks: dict[str, float] = {}
    for row in known:
        peaks[row.dtype] = max(peaks.get(row.dtype, 0.0), row.flops / row.least_us)
    return {row.shape for row in known if row.bytes_bound and row.flops / row.least_us < peaks[row.dtype] / 10}


def spread(heights: Sequence[float], gap: float, top: float = 1.0) -> list[float]:
    """Rising heights, as shares of an axis, moved apart until no two are nearer than `gap`; their order stays."""
    at: list[float] = []
    for height in heights:
        at.append(max(height, at[-1] + gap) if at else max(height, 0.0))
    # Pushed past the top: move the pile down again and keep its order.
    ceiling = max(top, gap * (len(at) - 1))
    for i in range(len(at) - 1, -1, -1):
        at[i] = min(at[i], ceiling)
        ceiling = at[i] - gap
    return at
