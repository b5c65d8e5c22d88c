"""Hardware counters beside a file of rows: ``<gpu>.profile.jsonl``, one JSON object a line for each profiled call.

Each has op, backend, pass, dtype and shape, as a row has, and `counters`: numbers by name, and `top_stalls`, which
holds the largest stall reasons with their shares. What a profiler did not give is absent or null.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.rows import ResultsError, Row

Counters = Mapping[str, Any]
_KEY = ("op", "backend", "pass", "dtype", "shape")
SUFFIX = ".profile.jsonl"
MOVED = 0.1  # a smaller share is no reason for a step's gain


def file_beside(results: Path) -> Path:
    """Where the counters of the machine of a results file are kept."""
    return results.with_suffix(SUFFIX)


def read(path: Path) -> dict[tuple[str, ...], Counters]:
    """Counters by key, the last of each; none where there is no file.

    Raises:
        ResultsError: a line is truncated or foreign. The message names it.
    """
    found = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise ResultsError(f"{path}:{number}: not a whole JSON object ({error})") from None
        if not isinstance(values, dict) or not isinstance(values.get("counters"), dict) or set(_KEY) - set(values):
            raise ResultsError(f"{path}:{number}: not a profiled call: expected {', '.join(_KEY)} and counters")
        found[tuple(values[name] for name in _KEY)] = values["counters"]
    return found


def of(row: Row, found: Mapping[tuple[str, ...], Counters]) -> Counters:
    """The counters of a row's call, empty where it was not profiled."""
    return found.get((row.op, row.backend, row.pass_, row.dtype, row.shape), {})


def _over_least(counters: Counters) -> float | None:
    moved, least = counters.get("dram_bytes"), counters.get("least_bytes")
    return None if moved is None or not least else moved / least


def _top_stall(counters: Counters) -> str | None:
    stalls = counters.get("top_stalls") or {}
    return max(stalls, key=stalls.__getitem__) if stalls else None


def _number(name: str) -> Callable[[Counters], Any]:
    return lambda counters: counters.get(name)


#: Heading, value and how it is written.
COLUMNS: tuple[tuple[str, Callable[[Counters], Any], str], ...] = (
    ("DRAM bytes / least", _over_least, "{:.2f}"),
    ("tensor pipe", _number("tensor_pipe_pct"), "{:.0f} %"),
    ("issue slots", _number("issue_pct"), "{:.0f} %"),
    ("occupancy", _number("occupancy_pct"), "{:.0f} %"),
    ("registers", _number("registers"), "{:.0f}"),
    ("shared memory, bytes", _number("shared_bytes"), "{:,.0f}"),
    ("bank conflicts", _number("bank_conflicts"), "{:,.0f}"),
    ("local memory, bytes", _number("local_bytes"), "{:,.0f}"),
    ("largest stall", _top_stall, "{}"),
)


def cells(counters: Counters, before: Counters) -> list[str]:
    """One cell a column, bold where it is not what it was in the step before."""
    found = []
    for _, value, form in COLUMNS:
        now, then = value(counters), value(before)
        text = "" if now is None else form.format(now)
        found.append(f"**{text}**" if text and moved(then, now) else text)
    return found


def moved(then: Any, now: Any) -> bool:
    """Whether a counter changed by more than a small share, or a name by anything."""
    if then is None or now is None:
        return False
    if isinstance(now, str):
        return now != then
    return abs(now - then) > MOVED * max(abs(now), abs(then))
