"""What a reader of a comparison should know beside the ratios: how the runs differ, and what is odd about a row."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.compare.changes import Change
from bench.rows.store import Row


@dataclass(frozen=True)
class Difference:
    """A fact about the two runs that is not the same in both."""

    name: str
    before: str
    after: str


FACTS = {
    "gpu": "machine",
    "driver": "driver",
    "cuda": "CUDA",
    "torch": "PyTorch",
    "triton": "Triton",
    "commit": "commit",
}
#: Smaller differences of the median clock, as a share, and of peak memory are not worth a line.
CLOCK = 0.01
PEAK_MIB = 1


def differences(before: Sequence[Row], after: Sequence[Row]) -> list[Difference]:
    """How the two runs' machine, software and source differ."""
    found = [
        Difference(name, a, b)
        for field, name in FACTS.items()
        if (a := _values(before, field)) != (b := _values(after, field))
    ]
    clocks = [[row.clock_mhz for row in rows if row.clock_mhz] for rows in (before, after)]
    if all(clocks):
        a, b = map(statistics.median, clocks)
        if abs(b / a - 1) > CLOCK:
            found.append(Difference("median clock", f"{a:,.0f} MHz", f"{b:,.0f} MHz"))
    return found


def _values(rows: Sequence[Row], field: str) -> str:
    def text(row: Row) -> str:
        if field != "commit":
            return str(getattr(row, field) or "unknown")
        return f"{(row.commit or 'unknown')[:12]}{' with changes' if row.dirty else ''}"

    return ", ".join(sorted({text(row) for row in rows}))


def notes(change: Change) -> list[str]:
    """What else a reader should know about a change."""
    before, after = change.before, change.after
    found = {
        "control": change.control,
        "interpreted": before.interpreted or after.interpreted,
        "launch gaps in A alone": before.graph is False and after.graph,
        "launch gaps in B alone": after.graph is False and before.graph,
        "few rounds": change.apart is not None,
        "clock moved": before.clocks_moved or after.clocks_moved,
    }
    said = [note for note, holds in found.items() if holds]
    if None not in (before.peak_mib, after.peak_mib) and abs(after.peak_mib - before.peak_mib) > PEAK_MIB:
        said.append(f"peak memory {before.peak_mib:,.0f} → {after.peak_mib:,.0f} MiB")
    return said
