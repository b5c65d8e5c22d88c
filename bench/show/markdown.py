"""Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence


def escape(text: str) -> str:
    """Text for one cell: in one line, without what Markdown or HTML would take for its own."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def grid(header: Sequence[str], lines: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """A table; `right` says which columns are aligned to the right."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(map(escape, cells)) + " |"

    ruler = "|" + "|".join("---:" if r else "---" for r in right) + "|"
    return "\n".join([line(header), ruler, *map(line, lines)])
