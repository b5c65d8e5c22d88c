"""Rows of benchmarks other than the sweep: one JSON object a line, in a folder of their own beside the sweep's rows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from bench.measure import environment
from bench.rows import store

Row = TypeVar("Row")


@dataclasses.dataclass(frozen=True)
class RowsOf(Generic[Row]):
    """The rows of one benchmark. Of those that have the same values of the fields in `key`, the newest counts."""

    folder: str
    kind: Any  # the dataclass of a row
    what: str  # such a row, as an error calls it
    key: tuple[str, ...]

    def results_file(self) -> Path:
        """Where this machine's rows are kept."""
        own = environment.results_file()
        return own.parent / self.folder / own.name

    def read(self, path: Path) -> list[Row]:
        """The newest row of each key; none where there is no file.

        Raises:
            store.ResultsError: a line is truncated or foreign. The message names it.
        """
        if not path.exists():
            return []
        found = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                found.append(self.kind(**json.loads(line)))
            except (TypeError, json.JSONDecodeError) as error:
                raise store.ResultsError(f"{path}:{number}: not {self.what} ({error})") from None
        return self._newest(found)

    def save(self, path: Path, rows: Iterable[Row]) -> None:
        """Add rows; each replaces an earlier one of its key."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept: list[Any] = self._newest([*self.read(path), *rows])
        store.replace(path, "".join(json.dumps(dataclasses.asdict(row), ensure_ascii=False) + "\n" for row in kept))

    def _newest(self, rows: Iterable[Row]) -> list[Row]:
        return list({tuple(getattr(row, name) for name in self.key): row for row in rows}.values())
