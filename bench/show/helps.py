"""The block ``when compilers help``: each compiler beside PyTorch call by call and the kernels by hand, at every call.

A chain is judged at all shapes and dtypes of the sweep, each pass apart. Geometric means say how much a compiler gains
or loses, and a call's name says where most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean

from bench.measure import sets
from bench.rows.store import Row
from bench.show import markdown
from bench.show.fusion import CHAINS, COMPILERS, EQUAL, NAIVE
from bench.show.headlines import OURS
from kernel_ladder.spec import PASSES

BLOCK = "when compilers help"
#: The dtype that a call's name leaves out.
USUAL = "bfloat16"

Ratios = Mapping[str, float]

HEADER = ["operation", "pass", "compiler", "over the formula", "over the best by hand", "behind it", "ahead of it"]


def write(_: Path, found: Sequence[Row]) -> str:
    """A table with a line for each chain, pass and compiler."""
    lines = []
    for op in CHAINS:
        named = op
        for pass_ in PASSES:
            for backend, compiler in COMPILERS.items():
                if cells := judged(*ratios(op, backend, pass_, found)):
                    lines.append([f"**{named}**" if named else "", pass_, compiler, *cells])
                    named = ""
    if not lines:
        return ""
    gpu = next(row.gpu for row in found if row.op in CHAINS)
    table = markdown.grid(HEADER, lines, [False, False, False, True, True, False, False])
    return f"On {gpu}; within {100 * (EQUAL - 1):.0f} % is even. Counts are of calls.\n\n{table}"


def ratios(op: str, backend: str, pass_: str, found: Sequence[Row]) -> tuple[Ratios, Ratios]:
    """By call, the times of the formula call by call and of a compiler's rung, each over what it is held to.

    The first is the formula's time over the rung's; the second the rung's over the best kernel's by hand.
    """
    calls: dict[str, dict[str, Row]] = {}
    for row in found:
        if (row.op, row.pass_, row.set) == (op, pass_, sets.SWEEP) and row.us is not None and not row.wrong:
            name = row.shape if row.dtype == USUAL else f"{row.shape} {row.dtype}"
            calls.setdefault(name, {})[row.backend] = row
    gains, costs = {}, {}
    for name, rows in calls.items():
        if backend not in rows or not (us := rows[backend].us):
            continue
        if NAIVE in rows and (naive := rows[NAIVE].us):
            gains[name] = naive / us
        if by_hand := [row.us for row in rows.values() if row.level in OURS and row.us]:
            costs[name] = us / min(by_hand)
    return gains, costs


def judged(gains: Ratios, costs: Ratios) -> list[str]:
    """Cells: how many times as fast as the formula, times as long as the best by hand, where behind, where ahead."""
    if not gains and not costs:
        return []
    gain = "–"
    if gains:
        slower = {name: 1 / gain for name, gain in gains.items() if gain < 1 / EQUAL}
        gain = f"{geometric_mean(gains.values()):.3g} ×" + (f", slower {_at(slower, len(gains))}" if slower else "")
    if not costs:
        return [gain, "–", "–", "–"]
    behind = {name: cost for name, cost in costs.items() if cost > EQUAL}
    ahead = {name: 1 / cost for name, cost in costs.items() if cost < 1 / EQUAL}
    return [gain, f"{geometric_mean(costs.values()):.3g} ×", _at(behind, len(costs)), _at(ahead, len(costs))]


def _at(some: Ratios, count: int) -> str:
    """How many of all calls, and the farthest of them."""
    if not some:
        return "nowhere"
    farthest = max(some, key=lambda name: some[name])
    share = f"at all {count}" if len(some) == count else f"at {len(some)} of {count}"
    return f"{share}, most by {some[farthest]:.3g} × at {farthest}"
