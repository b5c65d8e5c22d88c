"""The block ``when compilers help``: each compiler beside PyTorch call by call and the kernels by hand, at every call.

A chain is judged at all shapes and dtypes of the sweep, each pass apart. Geometric means say how much a compiler gains
or loses, and names of calls say where.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.measure import sets
from bench.rows.store import Row
from bench.show.fusion import CHAINS, COMPILERS, EQUAL, NAIVE
from bench.show.headlines import OURS
from kernel_ladder.spec import PASSES

BLOCK = "when compilers help"
#: Calls that a sentence names at most; of more it names the farthest.
NAMED = 4
#: The dtype that a call's name leaves out.
USUAL = "bfloat16"

Ratios = Mapping[str, float]


def write(_: Path, found: Sequence[Row]) -> str:
    """A list of the chains; below each a sentence for each compiler and pass."""
    lines = []
    for op in CHAINS:
        said = [
            f"    - {name}, {pass_}: {sentence}"
            for backend, name in COMPILERS.items()
            for pass_ in PASSES
            if (sentence := judged(*ratios(op, backend, pass_, found)))
        ]
        if said:
            lines += [f"- **{op}**", *said]
    if not lines:
        return ""
    gpu = next(row.gpu for row in found if row.op in CHAINS)
    return f"On {gpu}; within {100 * (EQUAL - 1):.0f} % is even. Counts are of calls.\n\n" + "\n".join(lines)


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


def judged(gains: Ratios, costs: Ratios) -> str:
    """A sentence about the gain over the formula, and one about the time over the best by hand; of none nothing."""
    said = []
    if gains:
        behind = {name: 1 / gain for name, gain in gains.items() if gain < 1 / EQUAL}
        where = f"behind it {_at(behind, len(gains))}" if behind else f"behind it at none of {len(gains)}"
        said.append(f"{_mean(gains):.3g} × as fast as the formula call by call, {where}")
    if costs:
        behind = {name: cost for name, cost in costs.items() if cost > EQUAL}
        ahead = {name: 1 / cost for name, cost in costs.items() if cost < 1 / EQUAL}
        parts = [f"{_mean(costs):.3g} × the time of the best by hand"]
        parts += [f"behind {_at(behind, len(costs))}"] if behind else []
        parts += [f"ahead {_at(ahead, len(costs))}"] if ahead else []
        if not behind and not ahead:
            parts.append(f"even at all {len(costs)}")
        said.append(", ".join(parts))
    return f"{'; '.join(said)}." if said else ""


def _at(some: Ratios, count: int) -> str:
    """How many of all calls, and which of them; of many the farthest."""
    farthest = sorted(some, key=lambda name: -some[name])
    named = ", ".join(f"{name} ({some[name]:.3g} ×)" for name in farthest[: NAMED if len(some) <= NAMED else 2])
    share = f"at all {count}" if len(some) == count else f"at {len(some)} of {count}"
    return f"{share}: {named}" if len(some) <= NAMED else f"{share}, most of all {named}"


def _mean(of: Ratios) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, of.values())) / len(of))
