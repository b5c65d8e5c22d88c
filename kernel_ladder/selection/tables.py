"""Tables of measured choices: per GPU, operation, pass and backend's name, which rung was the fastest at which call.

``python -m bench select`` makes ``tables/<gpu>.json`` from measured rows. A call takes the choice of the nearest entry:
one of the same category, with no size more than REACH times larger or smaller. The rule's choice stays where there is
no such entry, where the entry has no better rung, and where the rule chooses a rung that the entry did not measure.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from kernel_ladder import gpu
from kernel_ladder.selection.features import Features

#: The passes that have entries of their own: without a gradient, and forward and backward together.
FORWARD, TRAINING = "forward", "training"
#: How many times a size may differ from that of an entry.
REACH = 2.0
#: Another folder of tables.
ENV_FOLDER = "KERNEL_LADDER_TABLES"
FOLDER = Path(__file__).parent / "tables"


class Entry(NamedTuple):
    """One measured call: `better` is the rung or level to take instead of the rule's choice, None to keep that.

    `gain` is the time of the rule's choice over that of `better`; `measured` are the rungs or levels compared.
    """

    category: str
    sizes: tuple[int, ...]
    better: str | None
    gain: float
    measured: tuple[str, ...]
    call: str


class Table(NamedTuple):
    """A GPU's entries by operation, backend's name and pass, and where they come from."""

    name: str
    entries: dict[tuple[str, str, str], tuple[Entry, ...]]


def slug(gpu_name: str) -> str:
    """A GPU's name as files have it."""
    return re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-")


def distance(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    """The largest ratio of two calls' sizes, as a logarithm of base 2."""
    return max((abs(math.log2(x / y)) for x, y in zip(a, b, strict=True)), default=0.0)


def nearest(entries: tuple[Entry, ...], features: Features, reach: float = REACH) -> Entry | None:
    """The entry of the same category whose sizes are nearest, within `reach`; of equal ones the first."""
    best, best_distance = None, math.log2(reach) + 1e-9
    for entry in entries:
        if entry.category != features.category or len(entry.sizes) != len(features.sizes):
            continue
        far = distance(entry.sizes, features.sizes)
        if far < best_distance:
            best, best_distance = entry, far
    return best


def to_json(found: dict[tuple[str, str, str], tuple[Entry, ...]]) -> list[dict[str, Any]]:
    """The entries as a file has them: one object for each operation, name and pass."""
    return [
        {"op": op, "backend": backend, "pass": pass_, "entries": [list(entry) for entry in entries]}
        for (op, backend, pass_), entries in found.items()
    ]


def parse(data: dict[str, Any], name: str) -> Table:
    """A table from a file's contents."""
    entries = {
        (part["op"], part["backend"], part["pass"]): tuple(
            Entry(category, tuple(sizes), better, gain, tuple(measured), call)
            for category, sizes, better, gain, measured, call in part["entries"]
        )
        for part in data["tables"]
    }
    return Table(name, entries)


@functools.cache
def load(path: Path) -> Table | None:
    """The table of a file, or None where there is none."""
    if not path.exists():
        return None
    return parse(json.loads(path.read_text(encoding="utf-8")), path.stem)


@gpu.cached
def of_device(device: int) -> Table | None:
    """The table of a GPU, or None where it has none: then rules choose."""
    folder = Path(os.environ.get(ENV_FOLDER) or FOLDER)
    return load(folder / f"{slug(gpu.of(device).name)}.json") if gpu.visible() else None
