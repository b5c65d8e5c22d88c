"""``python -m kernel_ladder list``: every operation and variant, with its status and the reason."""

from __future__ import annotations

import inspect
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kernel_ladder import table
from kernel_ladder.level_packages import load as load_package


def note(level: str) -> str | None:
    """What a level's package says of itself here though it is available, or None."""
    try:
        package = load_package(table.LEVELS[level])
    except ImportError:
        return None
    return getattr(package, "note", lambda: None)()


def status(level: str, reason: str | None) -> str:
    """A level's state, marked up: available or not, and what there is to say about it."""
    if reason is not None:
        return f"[yellow]unavailable:[/] {escape(reason)}"
    return "[green]available[/]" + (f", {escape(more)}" if (more := note(level)) else "")


def summary(variant: table.Variant) -> str:
    """The first line of what a variant's function says of itself, or nothing."""
    text = inspect.getdoc(variant.forward) or ""
    return text.partition("\n")[0]


def rows_of_list(ops: list[str]) -> list[dict[str, Any]]:
    """One row per operation and variant, and one for a level that has none to show."""
    rows = []
    for op in ops:
        reasons = table.backends(op)
        for level in table.LEVELS:
            for variant in table.variants(op, level):
                reason = reasons[variant.name]
                rows.append({"op": op, "variant": variant.name, "reason": reason, "summary": summary(variant)})
            if level in reasons:  # which has none to show
                rows.append({"op": op, "variant": level, "reason": reasons[level] or "no variant yet", "summary": ""})
    return rows


def print_list(console: Console, rows: list[dict[str, Any]]) -> None:
    with_summaries = any(row["summary"] for row in rows)
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column("op", no_wrap=True)
    grid.add_column("variant", no_wrap=True)
    grid.add_column("status", overflow="fold")
    if with_summaries:
        grid.add_column("idea", overflow="fold")
    shown = None
    for row in rows:
        if shown is not None and row["op"] != shown:
            grid.add_row()
        level = row["variant"].partition(".")[0]
        cells = [row["op"] if row["op"] != shown else "", row["variant"], status(level, row["reason"])]
        grid.add_row(*cells, *([escape(row["summary"])] if with_summaries else []))
        shown = row["op"]
    console.print(grid)
