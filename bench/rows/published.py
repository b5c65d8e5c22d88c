"""The committed rows that pages, figures and tests quote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.measure import sets
from bench.rows import store
from bench.rows.store import Row
from kernel_ladder import table

FOLDER = Path(__file__).resolve().parents[1] / "results"


def of_gpus(folder: Path = FOLDER) -> list[Path]:
    """The files of rows of GPUs in a folder; those of hardware counters have another ending."""
    return [path for path in sorted(folder.glob("*.jsonl")) if path.stem != "cpu" and "." not in path.stem]


def published(folder: Path = FOLDER) -> Path:
    """The file of rows of the one GPU whose sweep is published. A sweep that another replaced stands in no such file.

    Raises:
        LookupError: there is no such file, or there are several.
    """
    found = of_gpus(folder)
    if len(found) != 1:
        raise LookupError(f"{folder} must have the rows of one GPU, got {[path.name for path in found]}")
    return found[0]


def still_said(rows: Sequence[Row]) -> list[Row]:
    """The rows without those that say that a level has no rung of an operation, where it has one by now."""

    def outdated(row: Row) -> bool:
        said = f"the {row.level} level has no rung of {row.op}"
        return row.unsupported == said and bool(table.variants(row.op, row.level))

    return [row for row in rows if not outdated(row)]


def with_other_sets(path: Path, rows: Sequence[Row]) -> list[Row]:
    """A machine's rows of the sweep, and those of other sets, which lie in folders beside its file."""
    others = (path.parent / name / path.name for name in sets.SETS if name != sets.SWEEP)
    return [*rows, *(row for file in others if file.exists() for row in store.read(file))]
