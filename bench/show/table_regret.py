"""The block ``table regret``: what ``python -m bench select`` says of each GPU's choices, those held out apart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.rows.store import Row
from bench.show import markdown
from kernel_ladder.selection import tables

BLOCK = "table regret"
COMMAND = "python -m bench select"
NAMES = ("auto", "cuda", "triton")
HEADER = ["GPU", "name", "calls", "within 3 %", "worst", "at", "held out", "within 3 %", "worst", "at"]


def write(machines: Mapping[Path, Sequence[Row]], folder: Path = tables.FOLDER) -> str:
    """A line for each GPU that has a table in `folder` and each name, from the regret that stands in its file."""
    lines = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        for name in NAMES:
            own = [part for part in data["regret"] if part["backend"] == name]
            if own:
                gpu = data["gpu"] if all(line[0] != data["gpu"] for line in lines) else ""
                lines.append([gpu, f"`{name}`", *_cells(own, ""), *_cells(own, "held out, ")])
    return markdown.grid(HEADER, lines, [False, False, *[True] * 3, False, *[True] * 3, False]) if lines else ""


def _cells(parts: Sequence[Mapping[str, Any]], which: str) -> list[str]:
    """Calls, the share within 3 %, the worst and where: by the table where it is kept, elsewhere by the rules."""
    found = [(part, chosen) for part in parts if (chosen := part[f"{which}{'table' if part['kept'] else 'rules'}"])]
    if not found:
        return ["0", "", "", ""]
    calls = sum(chosen["points"] for _, chosen in found)
    near = sum(chosen["within 3 %"] for _, chosen in found)
    part, worst = max(found, key=lambda each: each[1]["worst"])
    at = f"{part['op']} {worst['at']} {part['pass']}, by {'table' if part['kept'] else 'rules'}"
    return [str(calls), f"{near / calls:.1%}", f"{worst['worst']:.2f}", at]
