"""What a new length costs, and later calls, as Markdown: see :mod:`bench.dynamic`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from bench.dynamic.command import cells
from bench.dynamic.rows import FOLDER, read
from bench.show import markdown

BLOCK = "dynamic"
COMMAND = "python -m bench dynamic"
HEADER = ["way", "first call", "each new length", "programs", "later calls"]


def write(machines: Mapping[Path, object]) -> str:
    """A table for each operation, from the files of rows in the folder `dynamic` beside those of the machines."""
    parts = []
    for file in dict.fromkeys(path.parent / FOLDER / path.name for path in machines):
        for op, members in groupby(read(file), lambda row: row.op):
            rows = list(members)
            first = rows[0]
            source = f"{first.gpu or 'a CPU'}, PyTorch {first.torch}, commit `{(first.commit or 'unknown')[:12]}`"
            lengths = ", ".join(map(str, first.lengths))
            parts.append(f"`{op}`, {first.dtype}, rows of {first.width}, {lengths} of them; {source}:")
            parts.append(markdown.grid(HEADER, [[f"`{row.way}`", *cells(row)] for row in rows], [False, *[True] * 4]))
    return "\n\n".join(parts)
