"""Tables that fit their console: the least important columns are left out, and long reasons become footnotes.

Rich alone would truncate every column, times and reasons included.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

#: Minimum width of a column whose text folds, in characters.
LEAST_FOLDED = 24
#: Minimum width of a column of names, in characters, where no further column can be left out.
LEAST_NAME = 6


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        heading: its title.
        right: aligned to the right, as numbers are.
        spare: 0 for a column that is always shown. Columns with larger values are left out first.
        folds: holds prose, which may continue on further lines.
    """

    heading: str
    right: bool = False
    spare: int = 0
    folds: bool = False


@dataclass
class Line:
    """A row of a table, one cell per column."""

    cells: Sequence[str | Text]
    style: str = ""
    ends_section: bool = False


@dataclass
class Footnotes:
    """Sentences that many cells share, each printed once, under the number in the cells."""

    texts: list[str] = field(default_factory=list)

    def mark(self, text: str) -> str:
        """The mark of a sentence, ``(n)``."""
        return f"({self.number(text)})"

    def number(self, text: str) -> int:
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1

    def show(self, console: Console) -> None:
        for number, text in enumerate(self.texts, 1):
            say(console, f"({number}) {text}")


@dataclass
class LeftOut:
    """Headings of the columns that did not fit, collected over several tables."""

    headings: list[str] = field(default_factory=list)

    def show(self, console: Console, elsewhere: str = "") -> None:
        """Print which columns are missing, and where to find them."""
        if self.headings:
            names = ", ".join(dict.fromkeys(self.headings))
            say(console, f"Left out at a width of {console.width}: {names}. A wider terminal shows them{elsewhere}.")


def console_for(width: int) -> Console:
    """A console on standard output, as wide as the terminal or ``COLUMNS``; in a pipe, `width` wide."""
    own = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(highlight=False, width=None if own else width)


def say(console: Console, text: str, style: str = "") -> None:
    """Print a sentence: wrapped between words in a terminal, on one line in a pipe."""
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)


def _width(cell: str | Text) -> int:
    text = cell.plain if isinstance(cell, Text) else cell
    return max((cell_len(line) for line in text.split("\n")), default=0)


def kept(widths: Sequence[int], columns: Sequence[Column], room: int, between: int, around: int) -> list[int]:
    """The indices of the columns that fit.

    `widths` are the widths of the columns' widest cells. `between` and `around` count the characters between two
    columns and around all of them.
    """
    needed = [min(w, LEAST_FOLDED) if c.folds else w for w, c in zip(widths, columns, strict=True)]
    places = list(range(len(columns)))
    while sum(needed[i] for i in places) + between * (len(places) - 1) + around > room:
        spare = max((i for i in places), key=lambda i: (columns[i].spare, i))
        if columns[spare].spare == 0:
            break
        places.remove(spare)
    return places


def fit(
    console: Console,
    columns: Sequence[Column],
    lines: Iterable[Line],
    left_out: LeftOut,
    *,
    title: str | Text | None = None,
    box: Box | None = None,
    heads: bool = True,
) -> Table:
    """A table of the columns that fit. The others are added to `left_out`, except empty ones.

    If even the columns that are always shown do not fit, names are folded, but never numbers.
    """
    lines = list(lines)
    filled = [any(_width(line.cells[i]) for line in lines) for i in range(len(columns))]
    widths = [
        max([cell_len(column.heading) if heads else 0, *(_width(line.cells[i]) for line in lines)])
        for i, column in enumerate(columns)
    ]
    between, around = (3, 4) if box else (2, 0)
    present = [i for i in range(len(columns)) if filled[i] or columns[i].spare == 0]
    places = kept([widths[i] for i in present], [columns[i] for i in present], console.width, between, around)
    places = [present[i] for i in places]
    left_out.headings += [columns[i].heading for i in present if i not in places]
    short = sum(widths[i] for i in places) + between * (len(places) - 1) + around > console.width
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box,
        show_header=heads,
        header_style="bold" if box else "dim",
        pad_edge=box is not None,
        padding=(0, 1) if box else (0, 2, 0, 0),
    )
    for i in places:
        column = columns[i]
        rigid = column.right or not (short or column.folds)
        table.add_column(
            column.heading,
            justify="right" if column.right else "left",
            overflow="fold",
            no_wrap=rigid,
            min_width=widths[i] if rigid else min(widths[i], LEAST_FOLDED if column.folds else LEAST_NAME),
        )
    for line in lines:
        cells = (line.cells[i] for i in places)
        texts = [cell.copy() if isinstance(cell, Text) else Text(cell) for cell in cells]
        table.add_row(*texts, style=line.style or None, end_section=line.ends_section)
    return table
