"""The xla level beside plain JAX, and the host's cost of the bridge, as Markdown: see :mod:`bench.bridge`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.bridge.command import HEADER, cells, summary
from bench.bridge.rows import FOLDER, read
from bench.show import markdown

BLOCK = "bridge"
COMMAND = "python -m bench bridge"


def write(machines: Mapping[Path, object]) -> str:
    """A table for each machine, from the files of rows in the folder `bridge` beside those of the machines."""
    parts = []
    for file in dict.fromkeys(path.parent / FOLDER / path.name for path in machines):
        if rows := read(file):
            first = rows[0]
            source = f"{first.gpu or 'a CPU'}, JAX {first.jax}, PyTorch {first.torch}, {first.dtype}"
            parts.append(f"{source}, commit `{(first.commit or 'unknown')[:12]}`. {summary(rows)}")
            parts.append(markdown.grid(HEADER, [cells(row) for row in rows], [False, False, *[True] * 7]))
    return "\n\n".join(parts)
