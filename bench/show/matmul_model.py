"""The block ``matmul model``: how far the cost model of matmul's CUDA rungs is from measured times.

A row has the time and the clock of its rung. `split_k` takes the tile that the model chooses, so the row is of that
tile. Predicted times are cycles over the clock, with no constant fitted to the rows.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from bench.rows import published, store
from bench.rows.regret import NEAR, counts
from bench.rows.store import Row
from bench.select import points
from bench.select.split import older_than_rung
from bench.show import markdown
from bench.usage import DTYPES
from kernel_ladder import gpu
from kernel_ladder.selection import matmul
from kernel_ladder.selection.features import FEATURES
from kernel_ladder.testing.samples import on_absent_gpu

RUNGS = ("cuda.persistent", "cuda.stream_k", "cuda.split_k")


class Predicted(NamedTuple):
    """A measured product of one rung: predicted over measured time, and what the model says of it."""

    rung: str
    call: tuple[str, str]  # shape, dtype
    us: float
    ratio: float
    aligned: bool  # else operands are copied first, which the model leaves out
    chosen: str  # the rung with the fewest cycles

    @property
    def held_out(self) -> bool:
        """Half of the sizes, in all layouts and dtypes together."""
        return zlib.crc32(self.call[0].partition(" ")[0].encode()) % 2 == 1

    @property
    def error(self) -> float:
        return abs(self.ratio - 1)


def predictions(rows: Iterable[Row]) -> list[Predicted]:
    """Of every forward row of the three rungs in 16 bits, on a GPU that rules know."""
    rows = [row for row in store.latest(rows) if _is_of_model(row)]
    if not rows:
        return []
    found = []
    # The driver's answer would make the figures depend on the machine that computes them.
    estimated = mock.patch.object(matmul, "blocks_at_once", matmul.whole_clusters)
    with gpu.pretend(points.machine_of(rows)), estimated:
        for row in rows:
            case = points.case_of(row)
            with on_absent_gpu(case, DTYPES[row.dtype], gradients=False) as (a, b):
                assert a is not None
                assert b is not None
                costs = matmul.costs(a, b)
                aligned = "unaligned" not in FEATURES["matmul"]((a, b), {}).category
            cycles = {"cuda.split_k": costs.split_k, "cuda.stream_k": costs.stream_k}.get(row.backend, costs.persistent)
            if cycles is not None and row.us and row.clock_mhz:
                ratio = cycles / row.clock_mhz / row.us
                call = row.shape, row.dtype
                found.append(Predicted(row.backend, call, row.us, ratio, aligned, costs.plan.rung))
    return found


def _is_of_model(row: Row) -> bool:
    of_rungs = row.op == "matmul" and row.pass_ == "forward" and row.backend in RUNGS
    known = counts(row) and not older_than_rung(row) and bool(row.clock_mhz)
    return of_rungs and known and row.dtype in ("bfloat16", "float16")


def choices(found: Sequence[Predicted]) -> list[float]:
    """Of every product of which several rungs were timed, the time of the model's over the fastest one's."""
    times: dict[tuple[str, str], dict[str, float]] = {}
    chosen = {}
    for each in found:
        times.setdefault(each.call, {})[each.rung] = each.us
        chosen[each.call] = each.chosen
    several = {call: by_rung for call, by_rung in times.items() if len(by_rung) > 1 and chosen[call] in by_rung}
    return [by_rung[chosen[call]] / min(by_rung.values()) for call, by_rung in several.items()]


def write(path: Path, rows: Sequence[Row]) -> str:
    """A line for each rung, aligned products and unaligned ones apart; then what the model's choices cost."""
    try:
        found = predictions(published.with_other_sets(path, rows))
    except store.ResultsError:  # a GPU without rules
        return ""
    if not found:
        return ""
    parts: list[tuple[str, Callable[[Predicted], bool]]] = [
        ("all", lambda each: True),
        ("held-out half", lambda each: each.held_out),
    ]
    lines = []
    for aligned in (True, False):
        for rung in (*RUNGS, ""):
            own = [each for each in found if each.aligned == aligned and rung in ("", each.rung)]
            if not own:
                continue
            of = "aligned" if aligned else "unaligned"
            cells = [of, f"`{rung}`" if rung else "together"]
            for _, takes in parts:
                cells += _cells([each for each in own if takes(each)])
            lines.append(cells)
    header = ["operands", "rung"]
    for name, _ in parts:
        header += [f"{name}: products", "predicted / measured", "median error", "95th percentile"]
    table = markdown.grid(header, lines, [False, False] + [True] * 8)
    costs = choices(found)
    said = f"On {rows[0].gpu}, {len(found)} rows."
    if costs:
        near = sum(cost <= NEAR for cost in costs)
        said += f" Several of these rungs were timed at {len(costs)} of the products. The one of fewest cycles is "
        said += f"within 3 % of the fastest at {near}; the worst takes {max(costs):.2f} times as long."
    return f"{said}\n\n{table}"


def _cells(found: Sequence[Predicted]) -> list[str]:
    if not found:
        return ["0", "", "", ""]
    mean = math.exp(statistics.fmean(math.log(each.ratio) for each in found))
    errors = sorted(each.error for each in found)
    p95 = errors[math.ceil(0.95 * len(errors)) - 1]
    return [str(len(found)), f"{mean:.2f}", f"{statistics.median(errors):.0%}", f"{p95:.0%}"]
