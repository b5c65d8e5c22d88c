"""The climb of an operation: the gain of each step at each level, and the counters that changed with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.rows.ratio import Estimate, baseline_of, speedup_of, time_of
from bench.rows.store import Row
from bench.show import climb_counters, markdown
from bench.show.climb_counters import Counters
from bench.show.headline import headline
from bench.show.table import mark, microseconds, rate, with_legend
from kernel_ladder.spec import PASSES
from kernel_ladder.table import LEVELS

#: Levels whose members are alternatives, not successive steps, with the step that all of them start from.
#: What a user would write is compared with the formula, as in the torch level. Peers have no such step.
BESIDE = {"torch": "torch.naive", "compile": "compile.formula", "xla": "xla.jit", "peer": None}
#: What the tables' words mean, for a page of ``docs/climb``.
LEGEND = (
    "*×* compares speed: above 1 the step is faster; in brackets its 95 % interval. Ratios are paired within rounds: "
    "they differ a little from the quotient of two times. *Of ceiling* is the share of the measured copy rate, or of "
    "the best product. Counters are of one call: registers and shared memory are the largest of its kernels, shares "
    "the mean over their time. The [glossary](../glossary.md) explains stalls."
)
#: Beside a rung whose counters are of another GPU than the rest.
OTHER = "§"
BOLD = "Bold: moved by more than a tenth from the step before"


def write(op: str, path: Path, found: Sequence[Row]) -> str:
    """Markdown tables of an operation, one a pass at that pass's headline shape; with counters where there are any."""
    profiled = climb_counters.of_operation(op, path)
    parts = []
    for pass_ in PASSES:
        mine = [row for row in found if row.op == op and row.pass_ == pass_]
        standing = headline(op, (row for row in mine if row.us is not None))
        if standing is None:
            continue
        steps = in_order([row for row in mine if (row.shape, row.dtype) == standing])
        parts.append(f"{op} {pass_}, {standing[0]}, {standing[1]}, {steps[0].gpu}:\n\n{_times(steps)}")
        if any(climb_counters.of(row, profiled) for row in steps):
            parts.append(_counters(steps, profiled, climb_counters.origin(op, path, pass_)))
    return "\n\n".join([LEGEND, *parts] if parts else parts)


def in_order(rows: Sequence[Row]) -> list[Row]:
    """By level, and within one in the order of the file, which is the climb's. Unknown levels come last."""
    levels = list(LEVELS)
    return sorted(rows, key=lambda row: levels.index(row.level) if row.level in levels else len(levels))


def with_step_before(steps: Sequence[Row]) -> list[tuple[Row, Row | None]]:
    """Each row with the last one before it that was timed, in its own level; see `BESIDE`."""
    pairs: list[tuple[Row, Row | None]] = []
    for level, members in groupby(steps, key=lambda row: row.level):
        before = None
        for row in members:
            pairs.append((row, before))
            if row.us is not None and row.backend == BESIDE.get(level, row.backend):
                before = row
    return pairs


def gain(row: Row, before: Row) -> Estimate:
    """How many times faster a step is than the one before: by their speed-ups over one baseline, else by their times.

    Both speed-ups are paired within rounds, so that the clock's drift between the two cancels. They share
    the baseline's noise; taken for independent here, which makes the interval too wide rather than too narrow.
    """
    new, old = speedup_of(row), speedup_of(before)
    return new.over(old) if new and old else time_of(before).over(time_of(row))


def by_call(rows: Iterable[Row]) -> list[list[Row]]:
    """The climbs that rows make up: one for each call on each machine, its steps in order."""
    calls: dict[tuple[str | None, ...], list[Row]] = {}
    for row in rows:
        calls.setdefault((row.gpu, row.op, row.pass_, row.dtype, row.shape), []).append(row)
    return [in_order(steps) for steps in calls.values()]


def gains(rows: Iterable[Row]) -> dict[tuple[Any, ...], tuple[Row, Estimate]]:
    """By the key of every timed row that has a step before it: that step, and the gain over it."""
    return {
        row.key: (before, gain(row, before))
        for steps in by_call(rows)
        for row, before in with_step_before(steps)
        if row.us is not None and before
    }


def _times(steps: Sequence[Row]) -> str:
    gained = gains(steps)
    header = ["step", "time", "rate", "× step before", "of ceiling", f"× `{baseline_of(steps[0].op)}`"]
    lines, notes = [], markdown.Notes()
    for row in steps:
        if row.us is None:
            said = f"wrong: {row.wrong}" if row.wrong else notes.mark(str(row.unsupported))
            lines.append([f"`{row.backend}`", said, *[""] * 4])
            continue
        speedup = speedup_of(row)
        lines.append(
            [
                f"`{row.backend}`",
                microseconds(row.us) + (" *interpreted*" if row.interpreted else "") + mark(row),
                rate(row),
                _text(gained[row.key][1]) if row.key in gained else "",
                _share(row.of_ceiling),
                _text(speedup) if speedup else "",
            ]
        )
    return notes.below(with_legend(markdown.grid(header, lines, [False, *[True] * 5])))


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value >= 0.01 else f"{value:.1g}"


def _text(ratio: Estimate) -> str:
    """Three digits; the interval too where it is known and wider than they are."""
    value, low, high = (f"{x:.3g}" if x is not None else "" for x in (ratio.value, ratio.low, ratio.high))
    return f"{value} ({low} – {high})" if low and low != high else value


def _counters(steps: Sequence[Row], profiled: Mapping[tuple[str, ...], Counters], origin: str) -> str:
    lines, others = [], {}
    for row, before in with_step_before(steps):
        if mine := climb_counters.of(row, profiled):
            gpu = mine.get(climb_counters.GPU, "")
            if gpu and not origin.startswith(gpu):
                others[gpu] = OTHER
            old = climb_counters.of(before, profiled) if before else {}
            lines.append([f"`{row.backend}`{others.get(gpu, '')}", *climb_counters.cells(mine, old)])
    used = [0, *(i for i in range(1, len(climb_counters.COLUMNS) + 1) if any(line[i] for line in lines))]
    header = ["counters", *(heading for heading, _, _ in climb_counters.COLUMNS)]
    lines = [[line[i] for i in used] for line in lines]
    table = markdown.grid([header[i] for i in used], lines, [i > 0 for i in used])
    commits = " and ".join(dict.fromkeys(row.commit[:12] for row in steps if row.commit))
    timed = f"; times: {steps[0].gpu}, commit {commits}" if commits else ""
    elsewhere = "".join(f"; {mark} {gpu}" for gpu, mark in others.items())
    bold = "Bold: moved by more than a tenth from the step before, on one GPU" if others else BOLD
    return f"{table}\n\n{bold}. Counters: {origin}{elsewhere}{timed}."
