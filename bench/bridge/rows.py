"""Rows of the xla level beside plain JAX, one JSON object a line, in the folder `bridge` beside the sweep's rows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from bench.measure import environment
from bench.rows import store

FOLDER = "bridge"


@dataclasses.dataclass(frozen=True)
class BridgeRow:
    """A pass of an operation: the program of `xla.jit` on JAX's own arrays, and on tensors. Times in microseconds."""

    op: str
    pass_: str
    dtype: str
    shape: str
    plain_us: float  # a call of many, on JAX's arrays: until the device is done
    ours_us: float  # the same of the rung, on tensors
    ratio: float  # ours over plain, the median over rounds
    host_shape: str  # so small that the host is what takes time
    host_plain_us: float  # to issue the program on JAX's arrays
    host_run_us: float  # to issue it on tensors, through the bridge
    host_call_us: float  # forward the public call, backward what autograd calls
    host_import_us: float  # part of host_run_us: operands to JAX, in order
    host_export_us: float  # part of host_run_us: finished results to tensors
    gpu: str | None
    torch: str
    jax: str
    commit: str | None
    dirty: bool | None
    when: str

    @property
    def bridge_us(self) -> float:
        """What passing tensors costs the host."""
        return self.host_run_us - self.host_plain_us


def results_file() -> Path:
    """Where this machine's rows are kept."""
    own = environment.results_file()
    return own.parent / FOLDER / own.name


def read(path: Path) -> list[BridgeRow]:
    """The newest row of each pass of each operation; none where there is no file.

    Raises:
        rows.ResultsError: a line is truncated or foreign. The message names it.
    """
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(BridgeRow(**json.loads(line)))
        except (TypeError, json.JSONDecodeError) as error:
            raise store.ResultsError(f"{path}:{number}: not a row of the bridge ({error})") from None
    return _newest(found)


def _newest(rows: Iterable[BridgeRow]) -> list[BridgeRow]:
    return list({(row.op, row.pass_, row.dtype, row.shape, row.gpu): row for row in rows}.values())


def save(path: Path, rows: list[BridgeRow]) -> None:
    """Add rows; each replaces an earlier one of its operation, pass and shape."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = _newest([*read(path), *rows])
    store.replace(path, "".join(json.dumps(dataclasses.asdict(row), ensure_ascii=False) + "\n" for row in kept))
