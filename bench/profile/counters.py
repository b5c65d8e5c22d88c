"""Rows of hardware counters, one JSON object a line: what ``python -m bench profile --ncu --save`` keeps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.measure import environment
from bench.profile import ncu
from bench.profile.targets import Target
from bench.rows import store

#: Rows that have these in common are of one call: the newest counts.
KEY = ("op", "backend", "pass", "dtype", "shape", "gpu")
SUFFIX = ".profile.jsonl"


def file_beside(results: Path) -> Path:
    """Where the counters of the machine of a file of rows are kept."""
    return results.with_suffix(SUFFIX)


def files_beside(results: Path) -> list[Path]:
    """The files of counters in the folder of a file of rows: that of its machine, then those of others by name."""
    own = file_beside(results)
    return [own, *(path for path in sorted(own.parent.glob(f"*{SUFFIX}")) if path != own)]


def results_file() -> Path:
    """Where this machine's counters are kept."""
    return file_beside(environment.results_file())


def make(target: Target, counted: ncu.Counted) -> dict[str, Any]:
    """The row of a call: what and where, the counters of the whole call, and those of each kernel."""
    facts = environment.facts()
    versions = {name: facts[name] for name in ("driver", "cuda", "torch", "triton")}
    return {
        "op": target.op,
        "backend": target.backend,
        "pass": target.pass_,
        "dtype": target.dtype,
        "shape": target.shape,
        "gpu": facts["gpu"],
        "when": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "commit": facts["commit"],
        "dirty": facts["dirty"],
        "versions": {**versions, "ncu": counted.version},
        "counters": _rounded(ncu.totals(counted.kernels, target.least_bytes)),
        "kernels": _rounded(counted.kernels),
    }


def _rounded(value: Any) -> Any:
    """A number in six significant digits, an integer where it is whole."""
    if isinstance(value, float):
        return None if not math.isfinite(value) else int(value) if value.is_integer() else float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def read(path: Path) -> list[dict[str, Any]]:
    """Every row of a file; none where there is no file.

    Raises:
        rows.ResultsError: a line is truncated or foreign. The message names it.
    """
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise store.ResultsError(f"{path}:{number}: not a whole JSON object ({error})") from None
        lacking = [name for name in (*KEY, "counters", "kernels") if not isinstance(row, dict) or name not in row]
        if lacking:
            raise store.ResultsError(f"{path}:{number}: not a row of counters: it lacks {', '.join(lacking)}")
        found.append(row)
    return found


def save(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row; it replaces an earlier one of the same call."""
    kept = [each for each in read(path) if any(each[name] != row[name] for name in KEY)]
    store.replace(path, "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in [*kept, row]))
