"""Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_ladder.cli.columns import Footnotes


def escape(text: str) -> str:
    """Text for one cell: in one line, without what Markdown or HTML would take for its own."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def grid(header: Sequence[str], lines: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """A table; `right` says which columns are aligned to the right."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(map(escape, cells)) + " |"

    ruler = "|" + "|".join("---:" if r else "---" for r in right) + "|"
    return "\n".join([line(header), ruler, *map(line, lines)])


class Notes(Footnotes):
    """Footnotes by raised numbers, below a table whose rows the sentences would make tall."""

    def mark(self, text: str) -> str:
        """A cell without a figure, for the reason `text`."""
        return f"–{_raised(self.number(text))}"

    def below(self, table: str) -> str:
        lines = [f"- {_raised(number)} {escape(text)}" for number, text in enumerate(self.texts, 1)]
        return "\n".join([table, "", *lines]) if lines else table


def _raised(number: int) -> str:
    return str(number).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
