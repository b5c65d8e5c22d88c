"""The index of KERNEL_LOG.md: every rung of every ladder with what it brought, and where the page about it lies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import kernel_ladder
from bench.rows.store import Row
from bench.show import climb_counters, markdown
from bench.show.climb import gains, in_order, with_step_before
from bench.show.headline import headline
from bench.show.table import microseconds


def write(path: Path, found: Sequence[Row]) -> str:
    """A Markdown table: a line for each timed rung at its operation's headline shape, forward."""
    lines = []
    for op in kernel_ladder.OPS:
        mine = [row for row in found if row.op == op and row.pass_ == "forward" and row.us is not None]
        standing = headline(op, mine)
        if standing is None:
            continue
        profiled = climb_counters.of_operation(op, path)[1]
        steps = in_order([row for row in mine if (row.shape, row.dtype) == standing and row.level != "peer"])
        gained = gains(steps)
        before = {row.key: step for row, step in with_step_before(steps)}
        for number, row in enumerate(steps):
            page = f"[{op}](docs/climb/{op}.md) {standing[0]}" if number == 0 else ""
            gain = f"{gained[row.key][1].value:.3g}" if row.key in gained else ""
            step = before[row.key]
            counter = climb_counters.most_moved(
                climb_counters.of(row, profiled), climb_counters.of(step, profiled) if step else {}
            )
            lines.append([page, f"`{row.backend}`", microseconds(row.us), gain, counter])
    header = ["operation", "rung", "forward", "× before", "counter that moved most"]
    return markdown.grid(header, lines, [False, False, True, True, False]) if lines else ""
