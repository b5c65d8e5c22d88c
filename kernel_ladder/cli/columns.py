"""Tables that fit their console: the columns that matter least are left out, and long reasons stand below as footnotes.

Rich would cut every column short instead, and the times and reasons with them.
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

#: Characters that a column whose text folds needs at least.
LEAST_FOLDED = 24
#: Characters to which a column of names is narrowed at most where nothing is left to leave out.
LEAST_NAME = 6


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        heading: its title.
        right: aligned to the right, as numbers are.
        spare: 0 for a column that is always shown; the larger, the sooner it is left out.
        folds: holds prose, which may go on in further lines; no other column does while all fit.
    """

    heading: str
    right: bool = False
    spare: int = 0
    folds: bool = False


@dataclass
class Line:
    """A row of a table, a cell a column."""

    cells: Sequence[str | Text]
    style: str = ""
    ends_section: bool = False


@dataclass
class Footnotes:
    """Sentences that many cells share, each said once, under the number that stands in the cells."""

    texts: list[str] = field(default_factory=list)

    def mark(self, text: str) -> str:
        """``(n)``, the mark of a sentence."""
        if text not in self.texts:
            self.texts.append(text)
        return f"({self.texts.index(text) + 1})"

    def show(self, console: Console) -> None:
        for number, text in enumerate(self.texts, 1):
            say(console, f"({number}) {text}")


@dataclass
class LeftOut:
    """Headings of the columns that did not fit, over several tables."""

    headings: list[str] = field(default_factory=list)

    def show(self, console: Console, elsewhere: str = "") -> None:
        """Say what is missing, and where it is to be had."""
        if self.headings:
            names = ", ".join(dict.fromkeys(self.headings))
            say(console, f"Left out at a width of {console.width}: {names}. A wider terminal shows them{elsewhere}.")


def console_for(width: int) -> Console:
    """A console on standard output: as wide as the terminal or as ``COLUMNS`` says, `width` where it is piped."""
    own = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(highlight=False, width=None if own else width)


def say(console: Console, text: str, style: str = "") -> None:
    """A sentence: broken between words in a terminal, whole in a pipe."""
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)


def _width(cell: str | Text) -> int:
    text = cell.plain if isinstance(cell, Text) else cell
    return max((cell_len(line) for line in text.split("\n")), default=0)


def kept(widths: Sequence[int], columns: Sequence[Column], room: int, between: int, around: int) -> list[int]:
    """The places of the columns that fit.

    `widths` are those of the columns' widest cells; `between` and `around` are the characters between two columns and
    around all of them.
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
    """A table of the columns that fit; those that do not are added to `left_out`, empty ones are not missed.

    Where even those that are always shown do not fit, names are folded, numbers never.
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
