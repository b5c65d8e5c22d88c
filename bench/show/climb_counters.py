"""What hardware counters say of a step of the climb: the cells of its table, those that moved in bold.

The counters are those that ``python -m bench profile --ncu --save`` keeps beside a file of rows; what the profiler did
not give is absent or null.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.profile import counters
from bench.rows.store import Row

Counters = Mapping[str, Any]
MOVED = 0.1  # a smaller relative change does not explain a step's gain
POINTS = 3  # nor does a smaller change of a counter in per cent
PER_CENT = " %"
#: Where counters name their GPU: it is not that of the rows.
GPU = "gpu"


def of_operation(op: str, results: Path) -> dict[tuple[str, ...], Counters]:
    """An operation's counters by call, with the number of its ``kernels``.

    They are those of the GPU on which most calls were profiled, so that a step and the one before are of the same. A
    call that was profiled on another alone has that one's. Counters of another GPU than the rows' name it, as `GPU`.
    """
    found: dict[tuple[str, ...], Counters] = {}
    for path, rows in reversed(_files(op, results)):
        other = path != counters.file_beside(results)
        for row in rows:
            named = {GPU: row["gpu"]} if other else {}
            call = tuple(row[name] for name in counters.KEY if name != "gpu")
            found[call] = {**row["counters"], "kernels": len(row["kernels"]), **named}
    return found


def origin(op: str, results: Path, pass_: str) -> str:
    """The GPU and the commits of an operation's counters, as a caption says them; empty without counters."""
    for _, rows in _files(op, results):
        if mine := [row for row in rows if row["pass"] == pass_]:
            commits = dict.fromkeys(str(row["commit"])[:12] for row in mine if row.get("commit"))
            return ", ".join(filter(None, (mine[0]["gpu"], commits and f"commit {' and '.join(commits)}")))
    return ""


def _files(op: str, results: Path) -> list[tuple[Path, list[dict[str, Any]]]]:
    """The files that have counters of an operation, with those: first the one with most, of equals that of the rows."""
    paths = counters.files_beside(results)
    found = [(path, [row for row in counters.read(path) if row["op"] == op]) for path in paths]
    return sorted(((path, rows) for path, rows in found if rows), key=lambda each: -len(each[1]))


def of(row: Row, found: Mapping[tuple[str, ...], Counters]) -> Counters:
    """The counters of a row's call, empty where it was not profiled."""
    return found.get((row.op, row.backend, row.pass_, row.dtype, row.shape), {})


def comparable(mine: Counters, before: Counters) -> Counters:
    """The counters of the step before, if they are of the same GPU; else none."""
    return before if mine.get(GPU) == before.get(GPU) else {}


def over_least(mine: Counters) -> float | None:
    moved, least = mine.get("dram_bytes"), mine.get("least_bytes")
    return None if moved is None or not least else moved / least


def _l2_over_least(mine: Counters) -> float | None:
    moved, least = mine.get("l2_bytes"), mine.get("least_bytes")
    return None if moved is None or not least else moved / least


def _top_stall(mine: Counters) -> str | None:
    stalls = mine.get("top_stalls") or {}
    return max(stalls, key=stalls.__getitem__) if stalls else None


def _number(name: str) -> Callable[[Counters], Any]:
    return lambda mine: mine.get(name)


#: Heading, value and how it is written.
COLUMNS: tuple[tuple[str, Callable[[Counters], Any], str], ...] = (
    ("DRAM bytes / least", over_least, "{:.2f}"),
    ("L2 bytes / least", _l2_over_least, "{:.2f}"),
    ("tensor pipe", _number("tensor_pipe_pct"), "{:.0f} %"),
    ("issue slots", _number("issue_pct"), "{:.0f} %"),
    ("occupancy", _number("occupancy_pct"), "{:.0f} %"),
    ("registers", _number("registers"), "{:.0f}"),
    ("shared memory, bytes", _number("shared_bytes"), "{:,.0f}"),
    ("bank conflicts", _number("bank_conflicts"), "{:,.0f}"),
    ("local memory, bytes", _number("local_bytes"), "{:,.0f}"),
    ("largest stall", _top_stall, "{}"),
)


def cells(mine: Counters, before: Counters) -> list[str]:
    """One cell a column, bold where it is not what it was in the step before, and is seen not to be."""
    found, before = [], comparable(mine, before)
    for _, value, form in COLUMNS:
        now, then = value(mine), value(before)
        text = "" if now is None else form.format(now)
        found.append(f"**{text}**" if moved(then, now, form) and text != form.format(then) else text)
    return found


#: What a card shows of them, in this order.
SHOWN = (
    "DRAM bytes / least",
    "L2 bytes / least",
    "tensor pipe",
    "issue slots",
    "occupancy",
    "registers",
    "largest stall",
)


def changes(mine: Counters, before: Counters) -> list[str]:
    """Each counter that a card shows: ``name before → now``, or ``name now`` where it reads as before or is new."""
    found, before = [], comparable(mine, before)
    for name, value, form in COLUMNS:
        now, then = value(mine), value(before)
        if name in SHOWN and now is not None:
            texts = [form.format(value) for value in (then, now) if value is not None]
            found.append(f"{name} {' → '.join(dict.fromkeys(texts))}")
    return found


#: Counters that say what a kernel does, and which way is better. Fewer issue slots may be less work, or more waiting.
BETTER = {"DRAM bytes / least": -1, "L2 bytes / least": -1, "tensor pipe": 1, "issue slots": 0, "occupancy": 1}
#: What a kernel takes, not what it does: named as moved only where nothing else has.
TAKEN = "registers"


def about(row: Row) -> str:
    """The counter of the limit of a row's call: the tensor cores, or memory, by which its least time is longer."""
    bytes_us = row.bytes / row.ceiling_gbs / 1e3 if row.bytes and row.ceiling_gbs else 0.0
    flops_us = row.flops / row.ceiling_tflops / 1e6 if row.flops and row.ceiling_tflops else 0.0
    return "tensor pipe" if flops_us > bytes_us else "DRAM bytes / least"


def told(mine: Counters, before: Counters, limit: str = "", named: str = "") -> str:
    """The counter that tells most of a step, ``name before → now``; empty where none moved.

    In this order: `named`; `limit`, unless it got worse; of the others that moved, but did not get worse, the one whose
    ratio is farthest from one; one that got worse, `limit` before all; and what the kernel takes.
    """
    found: list[tuple[int, float, str]] = []
    before = comparable(mine, before)
    for name, value, form in COLUMNS:
        now, then = value(mine), value(before)
        if (
            name not in SHOWN
            or not isinstance(now, int | float)
            or then is None
            or form.format(now) == form.format(then)
        ):
            continue
        has_moved = moved(then, now, form)
        if form.endswith(PER_CENT) and name in (limit, named):
            has_moved = abs(now - then) >= POINTS
        if not has_moved:
            continue
        worse = (now - then) * BETTER.get(name, 0) < 0
        ranks = {named: 5, limit: 2 if worse else 4, TAKEN: 0}
        ratio = max(now / then, then / now) if now and then else float("inf")
        found.append((ranks.get(name, 1 if worse else 3), ratio, f"{name} {form.format(then)} → {form.format(now)}"))
    return max(found)[2] if found else ""


def moved(then: Any, now: Any, form: str) -> bool:
    """Whether a counter, written as `form`, changed by more than a small share, or a name by anything."""
    if then is None or now is None:
        return False
    if isinstance(now, str):
        return now != then
    if form.endswith(PER_CENT) and abs(now - then) < POINTS:
        return False
    return abs(now - then) > MOVED * max(abs(now), abs(then))
