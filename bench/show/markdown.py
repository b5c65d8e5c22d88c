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


class Notes:
    """Sentences below a table, each once, by raised numbers in its cells, whose rows they would make tall."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, text: str) -> str:
        """A cell without a figure, for the reason `text`."""
        return f"–{_raised(self._numbers.setdefault(' '.join(text.split()), len(self._numbers) + 1))}"

    def below(self, table: str) -> str:
        lines = [f"- {_raised(number)} {escape(text)}" for text, number in self._numbers.items()]
        return "\n".join([table, "", *lines]) if lines else table


def _raised(number: int) -> str:
    return str(number).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
