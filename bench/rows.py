"""One result, one JSON object a line. A later row for the same call on the same machine supersedes an earlier one."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: The operation of rows that measure what the machine can do at most, and no operation.
CEILING = "ceiling"


class ResultsError(ValueError):
    """A results file holds a line that is not a row."""


@dataclass
class Row:
    """What one variant did in one call. No times where it could not run (`unsupported`) or disagreed (`wrong`)."""

    op: str
    backend: str
    level: str
    pass_: str  # "forward" or "backward"; the field is named `pass` in the file
    dtype: str
    shape: str  # the case's id, which names sizes and options
    shapes: list[list[int] | None] = field(default_factory=list)  # of the inputs, null for one that is absent
    options: dict[str, Any] = field(default_factory=dict)
    us: float | None = None  # median over rounds, of one call
    us_q1: float | None = None
    us_q3: float | None = None
    us_low: float | None = None  # 95 % interval of the median (bootstrap); none from fewer than six rounds
    us_high: float | None = None
    rounds: int | None = None
    graph: bool | None = None  # timed inside a CUDA graph, so without launch gaps
    interpreted: bool = False  # Triton's interpreter: right, and no measure of speed
    bytes: int | None = None  # the least that the operation must move
    flops: int | None = None
    gbs: float | None = None
    tflops: float | None = None
    ceiling_gbs: float | None = None  # measured in the same run
    ceiling_tflops: float | None = None
    of_ceiling: float | None = None
    speedup: float | None = None  # over the baseline (Spec.baseline), paired round by round
    speedup_low: float | None = None  # 95 % interval of the median of the paired ratios
    speedup_high: float | None = None
    clock_mhz: float | None = None  # of the multiprocessors, median while this group of rows was timed
    power_w: float | None = None
    temperature_c: float | None = None
    throttled: str | None = None  # what held the clock down then: "power cap", "temperature", …
    clocks_moved: bool | None = None  # the clock of this row's samples was not that of its neighbours'
    host_us: float | None = None  # of one public call, by name, on a tiny case
    host_direct_us: float | None = None  # of the variant's own function, on a tiny case
    compile_s: float | None = None  # the first call's wall time
    error: float | None = None
    bound: float | None = None
    peak_mib: float | None = None  # allocated by one call at most
    unsupported: str | None = None
    wrong: str | None = None
    peer_version: str | None = None  # of the library, where the row is a peer's
    gpu: str | None = None
    driver: str | None = None
    cuda: str | None = None
    torch: str | None = None
    triton: str | None = None
    commit: str | None = None
    dirty: bool | None = None
    when: str = ""  # UTC, ISO 8601

    @property
    def key(self) -> tuple[Any, ...]:
        """What the row measures: rows of one key supersede each other."""
        return (self.op, self.backend, self.pass_, self.dtype, self.shape, self.gpu)

    @property
    def least_us(self) -> float | None:
        """The time that the measured ceilings allow, in microseconds."""
        times = [
            work / ceiling / scale
            for work, ceiling, scale in (
                (self.bytes, self.ceiling_gbs, 1e3),
                (self.flops, self.ceiling_tflops, 1e6),
            )
            if work is not None and ceiling
        ]
        return max(times) if times else None

    @property
    def bytes_bound(self) -> bool:
        """Whether moving the least bytes takes longer than doing the least arithmetic."""
        if not self.ceiling_gbs or not self.ceiling_tflops or self.bytes is None or self.flops is None:
            return True
        return self.bytes / self.ceiling_gbs / 1e3 >= self.flops / self.ceiling_tflops / 1e6


FIELDS = tuple("pass" if f.name == "pass_" else f.name for f in dataclasses.fields(Row))
_BEGINNING = b'{"op": "'  # of every line
_DELETE = "delete the line to go on without it"
_WAY_OUT = "a sweep with --resume drops a last line that was cut short, and goes on from the rows before it"
_REQUIRED = ("op", "backend", "level", "pass", "dtype", "shape", "gpu", "when")


def to_json(row: Row) -> str:
    """One line, without its end."""
    values = {name: getattr(row, "pass_" if name == "pass" else name) for name in FIELDS}
    for name, value in values.items():
        if isinstance(value, float):
            # JSON has neither NaN nor infinity; six digits are far below the noise of any measurement.
            values[name] = float(f"{value:.6g}") if math.isfinite(value) else None
    return json.dumps(values, ensure_ascii=False, allow_nan=False)


def from_json(line: str, where: str, way_out: str = _DELETE) -> Row:
    """A row from one line; `where` says in an error which line it is, `way_out` what to do if it is cut short."""
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ResultsError(f"{where}: not a whole JSON object ({error}); {way_out}") from None
    if not isinstance(values, dict):
        raise ResultsError(f"{where}: expected a JSON object, got {type(values).__name__}")
    if missing := [name for name in _REQUIRED if name not in values]:
        raise ResultsError(f"{where}: not a row of this benchmark: it lacks {', '.join(map(repr, missing))}")
    if unknown := sorted(set(values) - set(FIELDS)):
        raise ResultsError(f"{where}: not a row of this benchmark: unknown fields {', '.join(map(repr, unknown))}")
    return Row(**{"pass_" if name == "pass" else name: value for name, value in values.items()})


def read(path: Path) -> list[Row]:
    """Every row of a file, older ones included; none where there is no file.

    Raises:
        ResultsError: a line is truncated or foreign. The message names it.
    """
    *lines, last = path.read_bytes().split(b"\n") if path.exists() else [b""]
    rows = _parsed(path, lines)
    if last.strip():
        where = f"{path}:{len(lines) + 1}"
        from_json(_text(last, where, _WAY_OUT), where, _WAY_OUT)
        raise ResultsError(f"{where}: the last line has no end: it may be cut short; {_WAY_OUT}")
    return rows


def _parsed(path: Path, lines: Iterable[bytes]) -> list[Row]:
    places = ((line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip())
    return [from_json(_text(line, where), where) for line, where in places]


def _text(line: bytes, where: str, way_out: str = _DELETE) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ResultsError(f"{where}: not UTF-8 ({error}); {way_out}") from None


def drop_unfinished(path: Path) -> str | None:
    """Repair a last line whose writing was cut short, and say what was done; None where there was nothing to do.

    A line without its end that is a whole row is kept and given its end; the beginning of a row is dropped.

    Raises:
        ResultsError: anything else in the file is truncated or foreign. Nothing is changed then.
    """
    *lines, last = path.read_bytes().split(b"\n") if path.exists() else [b""]
    _parsed(path, lines)
    where = f"{path}:{len(lines) + 1}"
    if not last:
        return None
    try:
        from_json(_text(last, where), where)
    except ResultsError:
        if not last.startswith(_BEGINNING[: len(last)]):
            raise
        os.truncate(path, path.stat().st_size - len(last))
        return f"{where}: dropped the last line, a row whose writing was cut short after {len(last)} bytes"
    with path.open("ab") as file:
        file.write(b"\n")
    return f"{where}: the last line is a whole row without its end; gave it one"


def latest(rows: Iterable[Row]) -> list[Row]:
    """The newest row of each key, in the order in which the keys first appeared."""
    newest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row.key not in newest or row.when >= newest[row.key].when:
            newest[row.key] = row
    return list(newest.values())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Keeps other processes of this user from writing to a file meanwhile: one would undo what the other did.

    Raises:
        ResultsError: another one does.
    """
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    lock = Path(tempfile.gettempdir(), f"kernel_ladder-{os.getuid()}-{name}.lock")
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResultsError(
                f"{path}: another process is writing to it; give this one an --output of its own, and join the two "
                "with `python -m bench merge`"
            ) from None
        yield


def append(path: Path, row: Row) -> None:
    """Add a row in one write, so that an interrupted run leaves whole lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (to_json(row) + "\n").encode())
    finally:
        os.close(file)


def write(path: Path, rows: Iterable[Row]) -> None:
    """Rewrite a file with these rows."""
    replace(path, "".join(to_json(row) + "\n" for row in rows))


def picture_file(path: Path, op: str) -> Path:
    """Where the picture of an operation, drawn from the rows of a file, is kept."""
    return path.resolve().parent / "pictures" / f"{op}-{path.stem}.svg"


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
