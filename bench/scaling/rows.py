"""Rows of several GPUs: those of :mod:`bench.rows.store` with what several GPUs add, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bench.measure import environment
from bench.rows import store
from bench.rows.store import ResultsError, Row

#: The folder of these rows, beside those of the sweep.
FOLDER = "scaling"

OURS = "ours"
BY_MESSAGES = "ours, by messages"  # hops by NCCL, where those of ours go by copy engines
ON_DTENSORS = "ours, on DTensors"  # the collectives are DTensor's, one after the other with our calls
ONE_GPU = "one GPU"
PRODUCT = "product alone"
COMMUNICATION = "communication alone"
UNFUSED = "collective and product, one after the other"
SYMMETRIC = "symmetric memory"
UNPATCHED = "without our kernels"
LINK = "link"
#: What a row's time is of, in the order of the tables.
ROLES = (OURS, BY_MESSAGES, ON_DTENSORS, ONE_GPU, PRODUCT, COMMUNICATION, UNFUSED, SYMMETRIC, UNPATCHED, LINK)


@dataclass
class ScalingRow(Row):
    """One way to do a problem on several GPUs. `us` is of the slowest rank, `flops` of all GPUs, `bytes` of one link.

    `bytes` is what a GPU sends; `gbs` its rate. `tflops` is that of all GPUs.
    """

    role: str = OURS
    gpus: int = 1
    tflops_per_gpu: float | None = None
    efficiency: float | None = None  # time of one GPU for the whole problem / (gpus · time)
    hidden: float | None = None  # share of communication: (unfused − ours) / communication alone
    of_product: float | None = None  # time of the product alone / time
    predicted_us: float | None = None  # by bench/scaling/model.py, from rates measured in the same run

    @property
    def key(self) -> tuple[Any, ...]:
        return (*super().key, self.role, self.gpus)


_FIELDS = {"pass" if f.name == "pass_" else f.name: f.name for f in fields(ScalingRow)}


def results_file() -> Path:
    """Where this machine's rows go."""
    return environment.results_file(FOLDER)


def from_json(line: str, where: str) -> ScalingRow:
    """A row from one line; `where` says in an error which line it is."""
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ResultsError(f"{where}: not a whole JSON object ({error}); delete the line to go on") from None
    required = ("op", "backend", "pass", "dtype", "shape", "gpu", "when", "role", "gpus")
    if not isinstance(values, dict) or any(name not in values for name in required):
        raise ResultsError(f"{where}: not a row of several GPUs, which has {', '.join(map(repr, required))}")
    if unknown := sorted(set(values) - set(_FIELDS)):
        raise ResultsError(f"{where}: not a row of several GPUs: unknown fields {', '.join(map(repr, unknown))}")
    return ScalingRow(**{_FIELDS[name]: value for name, value in values.items()})


def read(path: Path) -> list[ScalingRow]:
    """Every row of a file, older ones included; none where there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [from_json(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def latest(rows: Iterable[ScalingRow]) -> list[ScalingRow]:
    """The newest row of each key, in the order in which keys appeared first."""
    newest: dict[tuple[Any, ...], ScalingRow] = {}
    for row in rows:
        if row.key not in newest or row.when >= newest[row.key].when:
            newest[row.key] = row
    return list(newest.values())


def tidy(path: Path) -> list[ScalingRow]:
    """Rewrite a file without superseded rows; returns the rows that are left."""
    left = latest(read(path))
    store.write(path, left)
    return left
