"""A comparison as text: tables for a terminal or a pipe, Markdown for a pull request, JSON for a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.compare.changes import DIRECTIONS, FAILING, Change, Comparison, Transition, groups
from bench.compare.changes_context import Difference, notes
from bench.measure.intervals import LEAST_VALUES
from bench.rows.ratio import Estimate, has_interval
from bench.rows.store import Row
from bench.show import markdown
from bench.show.table import microseconds
from kernel_ladder.cli.columns import Column, Footnotes, LeftOut, Line, fit

#: GitHub takes comments of 65,536 characters: the largest changes are shown, the rest counted.
MARKDOWN_LINES = 40


@dataclass(frozen=True)
class Grid:
    """A table with a title above it. What the gate fails for is `alarming`; what few will read can be `folded`."""

    title: str
    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    names: int = 2  # leading columns that hold names; the rest are aligned to the right
    alarming: bool = False
    folded: bool = False


@dataclass(frozen=True)
class Report:
    """Everything that is said about two files. `failures` says what the gate fails for, and is empty where it holds."""

    names: tuple[str, str]
    counts: tuple[int, int]
    threshold: float
    comparison: Comparison
    differences: list[Difference]
    failures: list[str]

    @property
    def share(self) -> str:
        return f"{100 * self.threshold:.3g} %"

    @property
    def outcome(self) -> str:
        return "FAIL" if self.failures else "PASS" if self.comparison.decided else "UNDECIDED"

    @property
    def verdict(self) -> str:
        judged = sum(change.judged for change in self.comparison.changes)
        good = f"nothing slower past {self.share}, nothing broken"
        what = ", ".join(self.failures) or (good if self.comparison.decided else "nothing could be judged")
        undecided = sum(c.undecided and c.ours and not c.control for c in self.comparison.changes)
        rest = f", {undecided} undecided" if undecided else ""
        return f"{self.outcome}: {what}; {judged} calls judged by their time{rest}"


def paragraphs(report: Report) -> list[str]:
    """What must be known before the tables are read."""
    drift, changes = report.comparison.drift, report.comparison.changes
    said = [
        f"{side}: {name}, {count} rows" for side, name, count in zip("AB", report.names, report.counts, strict=True)
    ]
    said += [f"{d.name}: {d.before} → {d.after}" for d in report.differences]
    if drift.known:
        what = "divided out" if drift.applied else f"not divided out: {drift.reason}"
        said.append(f"Drift: {drift.controls} controls took {drift.factor:.3f} × as long in B, at the median; {what}")
        said.append(f"Scatter of the controls between the runs: {100 * drift.scatter:.2g} %; it is in every interval")
        if max(drift.factor, 1 / drift.factor) > 1 + report.threshold:
            said.append("The drift is past the threshold: the machine was in another state, or the clock was changed")
    else:
        said.append(f"Drift: unknown, and so is the scatter between the runs: {drift.reason}")
    if derived := sum(not _own_intervals(change) and change.apart is None for change in changes):
        said.append(
            f"Intervals of {derived} of {len(changes)} ratios are derived from quartiles: older rows have no own"
        )
    if few := sum(change.apart is not None for change in changes):
        said.append(
            f"{few} of {len(changes)} ratios have no interval, for want of {LEAST_VALUES} rounds: they are undecided, "
            "save where the quartiles lie far enough apart"
        )
    return said


def grids(report: Report, everything: bool) -> list[Grid]:
    """The tables, in the order of their weight."""
    changes = report.comparison.changes

    def these(direction: str, past: bool, judged: bool = True) -> list[Change]:
        return [c for c in changes if (c.direction, c.past, c.judged) == (direction, past, judged)]

    share = report.share
    others = [c for c in changes if not c.judged and c.direction in ("slower", "faster")]
    found = [
        _changes(f"Slower past {share}", these("slower", True), alarming=True),
        *_transitions(report.comparison.transitions),
        _wrong(report.comparison.still_wrong),
        _changes(f"Faster past {share}", these("faster", True)),
        _changes("Slower, not past the threshold", these("slower", False), folded=True),
        _changes("Faster, not past the threshold", these("faster", False), folded=True),
        _changes("Undecided: too few rounds to tell", [c for c in changes if c.undecided], folded=True),
        _changes("Changed, not judged (controls, peers, ceilings, interpreted)", others, folded=True),
    ]
    if everything:
        same = [c for c in changes if c.direction == "unchanged"]
        found.append(_changes("Unchanged within the interval", same, folded=True))
    return [grid for grid in [*found, _summary(changes)] if grid.lines]


def _changes(title: str, changes: Sequence[Change], **kind: bool) -> Grid:
    header = ["op", "backend", "pass", "dtype", "shape", "A", "B", "B / A", "corrected", "interval", "paired", "note"]
    lines = [
        [
            *_name(change.after),
            microseconds(change.before.us),
            microseconds(change.after.us),
            f"{change.raw.value:.3f}",
            f"{change.corrected.value:.3f}",
            _interval(change.corrected),
            f"{change.paired.value:.3f}" if change.paired else "",
            ", ".join(notes(change)),
        ]
        for change in changes
    ]
    return Grid(f"{title} ({len(lines)})", header, lines, names=5, **kind)


def _interval(ratio: Estimate) -> str:
    return "none" if ratio.low is None or ratio.high is None else f"{ratio.low:.3f} – {ratio.high:.3f}"


def _own_intervals(change: Change) -> bool:
    return has_interval(change.before) and has_interval(change.after)


def _name(row: Row) -> list[str]:
    return [row.op, row.backend, row.pass_, row.dtype, row.shape]


def _transitions(transitions: Sequence[Transition]) -> list[Grid]:
    """One table a kind, a line for each variant, pass and dtype: shapes share it where they share a reason."""
    kinds = ("became wrong", "became unsupported", "vanished", "mended", "became supported", "now refused", "appeared")
    found = []
    for kind in kinds:
        members = [t for t in transitions if t.kind == kind]
        lines = [
            [*key[:4], "; ".join(t.row.shape for t in same), key[4]]
            for key, same in ((key, list(each)) for key, each in groupby(sorted(members, key=_line), _line))
        ]
        header = ["op", "backend", "pass", "dtype", "shapes", "reason"]
        alarming = any(t.judged for t in members) and kind in FAILING
        title = f"{kind.capitalize()} ({len(members)})"
        found.append(Grid(title, header, lines, names=6, alarming=alarming, folded=not alarming))
    return found


def _line(transition: Transition) -> tuple[str, ...]:
    row = transition.row
    gone = transition.after is None
    return (row.op, row.backend, row.pass_, row.dtype, "" if gone else row.wrong or row.unsupported or "")


def _wrong(found: Sequence[Row]) -> Grid:
    lines = [[*_name(row), row.wrong or ""] for row in found]
    return Grid(f"Wrong in both ({len(lines)})", ["op", "backend", "pass", "dtype", "shape", "reason"], lines, names=6)


def _summary(changes: Sequence[Change]) -> Grid:
    lines = [
        [group.op, group.backend, str(len(group.changes))]
        + [str(group.count(direction)) for direction in DIRECTIONS]
        + [f"{group.raw:.3f}", f"{group.corrected:.3f}"]
        for group in groups(changes)
    ]
    header = ["op", "backend", "calls", *DIRECTIONS, "B / A", "corrected"]
    return Grid("Geometric means", header, lines)


def show(report: Report, console: Console, everything: bool) -> None:
    """Print: boxes and colour in a terminal; in a pipe plain lines, columns two spaces apart, nothing cut."""
    rich = console.is_terminal
    if not rich:
        console = Console(file=console.file, width=10_000, no_color=True, highlight=False, force_terminal=False)

    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    for text in paragraphs(report):
        line(text)
    left_out = LeftOut()
    for grid in grids(report, everything):
        style = "bold red" if grid.alarming else "bold"
        line("")
        line(grid.title, style)
        if rich:
            notes = Footnotes()
            console.print(_fitted(grid, console, left_out, notes))
            notes.show(console)
        else:
            table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
            for i, name in enumerate(grid.header):
                table.add_column(name, justify="left" if i < grid.names or name == "note" else "right")
            for cells in grid.lines:
                table.add_row(*map(Text, cells))
            with console.capture() as capture:
                console.print(table)
            for text in capture.get().splitlines():
                line(text.rstrip())
    left_out.show(console, "; a pipe, --markdown and --json have them all")
    line("")
    line(report.verdict, {"PASS": "bold green", "FAIL": "bold red"}.get(report.outcome, "bold yellow"))


#: How soon a column is left out where a terminal has no room; columns not named here are always shown.
SPARE = {"paired": 5, "interval": 2, "A": 4, "B": 4, "B / A": 3, "dtype": 6, "undecided": 7, "unchanged": 8}
#: Columns of sentences. A terminal shows them below the table.
SENTENCES = ("note", "reason")


def _fitted(grid: Grid, console: Console, left_out: LeftOut, notes: Footnotes) -> Table:
    columns = [
        Column("" if name in SENTENCES else name, i >= grid.names, SPARE.get(name, 0), folds=name == "shapes")
        for i, name in enumerate(grid.header)
    ]
    lines = [
        Line(
            [
                notes.mark(cell) if name in SENTENCES and cell else cell
                for name, cell in zip(grid.header, cells, strict=True)
            ]
        )
        for cells in grid.lines
    ]
    return fit(console, columns, lines, left_out, box=box.ROUNDED)


def to_markdown(report: Report, everything: bool) -> str:
    """For a pull request's comment: the verdict first, then what fails; the rest is folded, and long tables are cut."""
    parts = [f"**{markdown.escape(report.verdict)}**", _markdown_list(paragraphs(report))]
    for grid in grids(report, everything):
        right = [i >= grid.names and name != "note" for i, name in enumerate(grid.header)]
        table = markdown.grid(grid.header, grid.lines[:MARKDOWN_LINES], right)
        left = len(grid.lines) - MARKDOWN_LINES
        cut = f"\n\nand {left} more" if left > 0 else ""
        if grid.folded:
            parts.append(f"<details><summary>{grid.title}</summary>\n\n{table}{cut}\n\n</details>")
        else:
            parts.append(f"{grid.title}:\n\n{table}{cut}")
    return "\n\n".join(parts) + "\n"


def _markdown_list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {markdown.escape(line)}" for line in lines)


def to_json(report: Report) -> dict[str, Any]:
    """The whole comparison, unchanged calls included, as plain values."""
    comparison = report.comparison
    return {
        "a": report.names[0],
        "b": report.names[1],
        "threshold": report.threshold,
        "outcome": report.outcome,
        "passed": report.outcome == "PASS",
        "failures": report.failures,
        "environment": [dataclasses.asdict(d) for d in report.differences],
        "drift": dataclasses.asdict(comparison.drift),
        "changes": [_change_json(change) for change in comparison.changes],
        "transitions": [
            {"kind": t.kind, "judged": t.judged, **_key_json(t.row), "reason": _line(t)[-1] or None}
            for t in comparison.transitions
        ],
        "still_wrong": [{**_key_json(row), "reason": row.wrong} for row in comparison.still_wrong],
        "groups": [
            {"op": g.op, "backend": g.backend, "calls": len(g.changes), "raw": g.raw, "corrected": g.corrected}
            | {direction: g.count(direction) for direction in DIRECTIONS}
            for g in groups(comparison.changes)
        ],
    }


def _key_json(row: Row) -> dict[str, str]:
    return dict(zip(("op", "backend", "pass", "dtype", "shape"), _name(row), strict=True))


def _change_json(change: Change) -> dict[str, Any]:
    return {
        **_key_json(change.after),
        "us_a": change.before.us,
        "us_b": change.after.us,
        "raw": dataclasses.asdict(change.raw),
        "corrected": dataclasses.asdict(change.corrected),
        "paired": dataclasses.asdict(change.paired) if change.paired else None,
        "quartiles": dataclasses.asdict(change.apart) if change.apart else None,
        "direction": change.direction,
        "past_threshold": change.past,
        "control": change.control,
        "judged": change.judged,
        "own_intervals": _own_intervals(change),
        "notes": notes(change),
    }
