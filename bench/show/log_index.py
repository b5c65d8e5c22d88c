"""The index of KERNEL_LOG.md: every rung of every ladder with what it brought, and where the page about it lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import kernel_ladder
from bench.rows.store import Row
from bench.show import cards, climb_counters, markdown, predictions
from bench.show.climb import gains, in_order, with_step_before
from bench.show.headline import headline
from bench.show.table import microseconds
from kernel_ladder.inspection.heads import ladder

HEADER = ("operation", "rung", "forward", "× before", "counter that moved")


def write(path: Path, found: Sequence[Row]) -> str:
    """A Markdown table: a line for each rung at its operation's headline shape, forward.

    A rung that takes no such call stands at the shape of its card, which its line names; one without rows says so.
    """
    lines = []
    for op in kernel_ladder.OPS:
        mine = [row for row in found if row.op == op and row.pass_ == "forward"]
        standing = headline(op, [row for row in mine if row.us is not None])
        names = _names(op, mine)
        if not names:
            continue
        profiled = climb_counters.of_operation(op, path)
        shape = f" {standing[0]}" if standing else ""
        first = [f"[{op}](docs/climb/{op}.md){shape}", *[""] * (len(names) - 1)]
        lines += [
            [page, f"`{name}`", *_cells(op, name, mine, standing, profiled)]
            for page, name in zip(first, names, strict=True)
        ]
    return markdown.grid(HEADER, lines, [False, False, True, True, False]) if found else ""


def _names(op: str, mine: Sequence[Row]) -> list[str]:
    """PyTorch's functions that were timed, then every rung that somebody wrote, in the order of the ladders."""
    torch = [row.backend for row in in_order([row for row in mine if row.level == "torch" and row.us is not None])]
    climbed = [f"{level}.{rung}" for level in cards.CLIMBED for rung in ladder(op, level)]
    return [*dict.fromkeys(torch), *climbed]


def _cells(
    op: str,
    name: str,
    mine: Sequence[Row],
    standing: tuple[str, str] | None,
    profiled: Mapping[tuple[str, ...], climb_counters.Counters],
) -> list[str]:
    """Time, gain over the step before, and the counter that tells most of the step."""
    at_headline = {row.backend: row for row in mine if (row.shape, row.dtype) == standing and row.us is not None}
    elsewhere = name not in at_headline
    note = predictions.notes().get(op, {}).get(name, {})
    call = cards.call_of(op, name, note, mine, "forward") if elsewhere else at_headline
    row = call.get(name)
    if row is None or row.us is None:
        return ["not timed: see its card" if any(each.backend == name for each in mine) else "no row yet", "", ""]
    steps = in_order([each for each in call.values() if each.level != "peer" and each.us is not None])
    gained = gains(steps)
    step = next(before for each, before in with_step_before(steps) if each is row)
    moved = climb_counters.told(
        climb_counters.of(row, profiled),
        climb_counters.of(step, profiled) if step else {},
        climb_counters.about(row),
        note.get("counter", ""),
    )
    where = row.shape if standing and row.dtype == standing[1] else f"{row.shape}, {row.dtype}"
    said = microseconds(row.us) + (f" ({where})" if elsewhere else "")
    return [said, f"{gained[row.key][1].value:.3g}" if row.key in gained else "", moved]
