"""Rows of calls of changing lengths, one JSON object a line, in the folder `dynamic` beside the sweep's rows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from bench.measure import environment
from bench.rows import store

FOLDER = "dynamic"


@dataclasses.dataclass(frozen=True)
class DynamicRow:
    """One way to call an operation, over all lengths in turn."""

    op: str
    way: str
    dtype: str
    lengths: list[int]
    width: int
    first_s: list[float]  # seconds of the first call of each length, in their order
    programs: int | None  # that were compiled, where the compiler tells
    later_us: float | None  # of a call of a length that was called before, mean over lengths
    gpu: str | None
    torch: str
    commit: str | None
    dirty: bool | None
    when: str
    unsupported: str | None = None


def results_file() -> Path:
    """Where this machine's rows are kept."""
    own = environment.results_file()
    return own.parent / FOLDER / own.name


def read(path: Path) -> list[DynamicRow]:
    """The newest row of each way of each operation; none where there is no file.

    Raises:
        rows.ResultsError: a line is truncated or foreign. The message names it.
    """
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(DynamicRow(**json.loads(line)))
        except (TypeError, json.JSONDecodeError) as error:
            raise store.ResultsError(f"{path}:{number}: not a row of changing lengths ({error})") from None
    return _newest(found)


def _newest(rows: Iterable[DynamicRow]) -> list[DynamicRow]:
    return list({(row.op, row.way, row.dtype, row.width, row.gpu): row for row in rows}.values())


def save(path: Path, rows: list[DynamicRow]) -> None:
    """Add rows; each replaces an earlier one of its way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = _newest([*read(path), *rows])
    store.replace(path, "".join(json.dumps(dataclasses.asdict(row), ensure_ascii=False) + "\n" for row in kept))
