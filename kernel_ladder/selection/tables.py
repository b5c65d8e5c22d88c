"""Tables of measured choices: per GPU, operation, pass and backend's name, which rung was the fastest at which call.

``python -m bench select`` makes ``tables/<gpu>.json`` from measured rows. A call takes the choice of the nearest entry:
one of the same category, with no size more than REACH times larger or smaller. The farther the entry, the larger must
its gain be. The rule's choice stays where there is no such entry, or none with a better rung. It also stays where the
entry did not measure it.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kernel_ladder import gpu, table

if TYPE_CHECKING:
    from kernel_ladder.selection.features import Features

#: The passes that have entries of their own: without a gradient, and forward and backward together.
FORWARD, TRAINING = "forward", "training"
#: How many times a size may differ from that of an entry, and the least gain of an entry at that distance and at none.
REACH = 2.0
FAR_GAIN = 1.45
NEAR_GAIN = 1.03
#: Another folder of tables.
ENV_FOLDER = "KERNEL_LADDER_TABLES"
FOLDER = Path(__file__).parent / "tables"
_off = False


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

    def has(self, op: str, backend: str) -> bool:
        """Whether there are entries for what a backend's name chooses in an operation, in any pass."""
        return any((op, backend, pass_) in self.entries for pass_ in (FORWARD, TRAINING))


def slug(gpu_name: str) -> str:
    """A GPU's name as file names spell it."""
    return re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-")


def nearest(entries: tuple[Entry, ...], features: Features) -> tuple[Entry, float] | None:
    """The first entry of a category whose sizes are nearest, within REACH, and the largest ratio of two."""
    best, least = None, REACH * (1 + 1e-9)
    for entry in entries:  # a call of a new shape waits for this: ratios, and no logarithms
        if entry.category != features.category or len(entry.sizes) != len(features.sizes):
            continue
        far = 1.0
        for x, y in zip(entry.sizes, features.sizes, strict=True):
            ratio = x / y if x > y else y / x
            if ratio >= least:
                break
            far = max(far, ratio)
        else:
            best, least = entry, far
    return None if best is None else (best, least)


def better_than(usual: str, entries: tuple[Entry, ...], features: Features) -> Entry | None:
    """The entry whose `better` takes the place of the rule's choice `usual`, or None where that stays."""
    if (found := nearest(entries, features)) is None:
        return None
    entry, far = found
    least = NEAR_GAIN * (FAR_GAIN / NEAR_GAIN) ** math.log(far, REACH)
    return entry if entry.better is not None and entry.gain >= least and usual in entry.measured else None


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
    """The table of a file, or None where there is none. A file that is no table is ignored, with one warning."""
    if not path.exists():
        return None
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")), path.stem)
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"{path}: the table of choices is ignored: {error!r}", RuntimeWarning, stacklevel=2)
        return None


@gpu.cached
def of_device(device: int) -> Table | None:
    """The table of a GPU, or None where it has none: then rules choose. A CPU, whose index is −1, has none."""
    if device < 0 or not gpu.visible() or _off:
        return None
    folder = Path(os.environ.get(ENV_FOLDER) or FOLDER)
    found = load(folder / f"{slug(gpu.of(device).name)}.json")
    return found if found is not None and found.entries else None


def are_off() -> bool:
    """Whether rules choose alone: see :func:`without`."""
    return _off


@contextmanager
def without() -> Iterator[None]:
    """In the block rules choose alone, without tables and measurements."""
    global _off
    before, _off = _off, True
    _forget()
    try:
        yield
    finally:
        _off = before
        _forget()


def _forget() -> None:
    gpu.forget()
    table.forget()
