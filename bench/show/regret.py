"""The block ``regret``: what the choices of ``"auto"`` and of levels' names cost over the best rung."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.rows import published, regret
from bench.rows.store import Row
from bench.show import markdown


def write(path: Path, found: Sequence[Row]) -> str:
    """A line for each operation and name, from a machine's rows and those of the other sets beside them."""
    return write_rows(published.with_other_sets(path, found))


def write_rows(rows: Sequence[Row], where: str = "") -> str:
    """The same from rows of one machine; `where` says which calls they are."""
    every = regret.by_name(rows)
    if not every:
        return ""
    lines = []
    for each in every:
        worst, call = each.worst
        first = not lines or each.op not in {line[-1] for line in lines}
        near = f"{each.near} of {len(each.values)}"
        cells = [f"**{each.op}**" if first else "", f"`{each.name}`", near, f"{each.p95:.2f}", f"{worst:.2f}"]
        lines.append([*cells, call if worst > regret.NEAR else "", each.op])
    header = ["operation", "name", "within 3 %", "95th percentile", "worst", "at"]
    table = markdown.grid(header, [line[:-1] for line in lines], [False, False, True, True, True, False])
    return f"{_summary(f'{rows[0].gpu}{where}', every)}\n\n{table}"


def _summary(where: str, every: Sequence[regret.Regret]) -> str:
    said = []
    for name in regret.NAMES:
        own = [each for each in every if each.name == name]
        if own:
            near, count = sum(each.near for each in own), sum(len(each.values) for each in own)
            said.append(f"`{name}`: {near} of {count}")
    return f"Choices within 3 % of the fastest rung measured beside them, on {where}: {'; '.join(said)}."
