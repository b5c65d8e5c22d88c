"""``python -m kernel_ladder list``: every operation and rung, with its status and the reason."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from kernel_ladder import table
from kernel_ladder.cli.columns import Column, Footnotes, LeftOut, Line, fit, say
from kernel_ladder.inspection.heads import heads
from kernel_ladder.level_packages import load as load_package


def note(level: str) -> str | None:
    """A remark of an available level's package about this machine, or None."""
    try:
        package = load_package(table.LEVELS[level])
    except ImportError:
        return None
    return getattr(package, "note", lambda: None)()


def status(level: str, reason: str | None) -> str:
    """A level's state, with markup: available or not, with the reason or remark."""
    if reason is not None:
        return f"[yellow]unavailable:[/] {escape(reason)}"
    return "[green]available[/]" + (f", {escape(more)}" if (more := note(level)) else "")


_heads = functools.cache(heads)


def summary(variant: table.Variant) -> str:
    """The idea at the head of a rung's file; of a rung that a user added, the first line of its docstring."""
    own = variant.forward.__module__.partition(".")[0] == table.LEVELS[variant.level]
    head = _heads(variant.op, variant.level).get(variant.name.partition(".")[2]) if own else None
    return head.idea if head else (inspect.getdoc(variant.forward) or "").partition("\n")[0]


def rows_of_list(ops: list[str]) -> list[dict[str, Any]]:
    """One row per operation and rung, and one for a level that has no rung to show."""
    rows = []
    for op in ops:
        reasons = table.backends(op)
        for level in table.LEVELS:
            for variant in table.variants(op, level):
                reason = reasons[variant.name]
                rows.append({"op": op, "variant": variant.name, "reason": reason, "summary": summary(variant)})
            if level in reasons:  # the level has no rung to show
                rows.append({"op": op, "variant": level, "reason": reasons[level] or "no variant yet", "summary": ""})
    return rows


def print_list(console: Console, rows: list[dict[str, Any]]) -> None:
    """One line per rung under its operation; reasons and remarks are printed once, below."""
    lines, reasons, left_out = [], Footnotes(), LeftOut()
    for op in dict.fromkeys(row["op"] for row in rows):
        lines.append(Line([Text(op, style="bold"), "", ""]))
        for row in (row for row in rows if row["op"] == op):
            said = row["reason"]
            if said is not None:
                state = Text(f"no {reasons.mark(said)}", style="yellow")
            else:
                more = note(row["variant"].partition(".")[0])
                state = Text(f"yes {reasons.mark(more)}" if more else "yes", style="green")
            lines.append(Line([f"  {row['variant']}", state, row["summary"]]))
    columns = [Column("variant"), Column("available"), Column("idea", spare=1, folds=True)]
    console.print(fit(console, columns, lines, left_out))
    available = sum(row["reason"] is None for row in rows)
    say(console, f"\n{available} of {len(rows)} variants are available on this machine.")
    reasons.show(console)
    left_out.show(console, "; so does --json")
