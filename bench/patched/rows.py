"""Rows of whole models, one JSON object a line, in the folder `patched` beside the sweep's rows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from bench.measure import environment
from bench.rows import store

FOLDER = "patched"
#: Who replaced parts of a model: nobody, or Liger; else a backend of this package.
PLAIN, LIGER = "plain", "liger"
#: What is measured of a model.
FORWARD, STEP, DECODE = "forward", "training step", "decode"


@dataclasses.dataclass(frozen=True)
class PatchedRow:
    """One pass of one model, one way."""

    model: str
    like: str
    shape: str  # layers and batch
    by: str
    compiled: bool
    pass_: str
    dtype: str
    us: float | None  # median of the wall time of a call; of decoding, of one token of every sequence
    low_us: float | None  # quartiles
    high_us: float | None
    tokens_per_s: float | None
    peak_bytes: int | None  # of GPU memory, of training with its optimizer
    first_s: float | None  # the first call, with all that it compiles
    gpu: str | None
    torch: str
    triton: str | None
    transformers: str
    liger: str | None
    commit: str | None
    dirty: bool | None
    when: str
    wrong: str | None = None  # how results deviate; such a way has no times
    unsupported: str | None = None


def results_file() -> Path:
    """Where this machine's rows are kept."""
    own = environment.results_file()
    return own.parent / FOLDER / own.name


def read(path: Path) -> list[PatchedRow]:
    """The newest row of each pass of each model, each way; none where there is no file.

    Raises:
        rows.ResultsError: a line is truncated or foreign. The message names it.
    """
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(PatchedRow(**json.loads(line)))
        except (TypeError, json.JSONDecodeError) as error:
            raise store.ResultsError(f"{path}:{number}: not a row of a patched model ({error})") from None
    return _newest(found)


def _newest(rows: Iterable[PatchedRow]) -> list[PatchedRow]:
    return list({(row.model, row.by, row.compiled, row.pass_, row.gpu): row for row in rows}.values())


def save(path: Path, rows: list[PatchedRow]) -> None:
    """Add rows; each replaces an earlier one of its way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = _newest([*read(path), *rows])
    store.replace(path, "".join(json.dumps(dataclasses.asdict(row), ensure_ascii=False) + "\n" for row in kept))
