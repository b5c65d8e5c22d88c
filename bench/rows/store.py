"""One result, one JSON object a line. A later row for the same call on the same machine supersedes an earlier one."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
import sys
import tempfile
import types
import typing
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bench.rows import renamed

#: The operation of rows that measure a ceiling of the machine.
CEILING = "ceiling"
#: The level of rows of other libraries.
PEER = "peer"


class ResultsError(ValueError):
    """A results file cannot be read or written, or holds a line that is not a row."""


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
    layouts: list[str] = field(default_factory=list)  # of the inputs; none where all are contiguous
    set: str = "sweep"  # of calls: sweep, models or random:SEED
    names: list[str] = field(default_factory=list)  # of the models that make the call
    chosen: list[str] = field(default_factory=list)  # "auto" and levels that stood for the rung in this call
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
    host_us: float | None = None  # of one public call, by name
    host_direct_us: float | None = None  # of the variant's own function
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
    jax: str | None = None
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
_NAMES = {
    str: "text",
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def _types(hint: Any) -> tuple[type, ...]:
    """What the JSON of a field may be: the types of its annotation."""
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return tuple(typing.get_origin(part) or part for part in parts)


_TYPES = dict(zip(FIELDS, map(_types, typing.get_type_hints(Row).values()), strict=True))
#: Accepted types; an integer is a number. They are compared exactly, because a Python bool is an int.
_TAKEN = {name: frozenset((*given, int) if float in given else given) for name, given in _TYPES.items()}
_INTERVALS = (("us_low", "us_high"), ("speedup_low", "speedup_high"))
_POSITIVE = frozenset(
    ("us", "us_q1", "us_q3", "ceiling_gbs", "ceiling_tflops", "speedup", *itertools.chain(*_INTERVALS))
)
_COUNTS = frozenset({"bytes", "flops", "gbs", "tflops"})
#: What the time of an operation comes with; a ceiling is of bytes or of arithmetic, or of neither.
_TIMED = ("us_q1", "us_q3", "bytes", "flops", "gbs", "tflops")


def to_json(row: Row) -> str:
    """One line, without its end."""
    names = [f.name for f in dataclasses.fields(row)]
    values = {"pass" if name == "pass_" else name: getattr(row, name) for name in names}
    for name, value in values.items():
        if isinstance(value, float):
            # JSON has neither NaN nor infinity; six digits are far below the noise of any measurement.
            values[name] = float(f"{value:.6g}") if math.isfinite(value) else None
    return json.dumps(values, ensure_ascii=False, allow_nan=False)


def from_json(line: str, where: str, way_out: str = _DELETE) -> Row:
    """A row from one line; `where` says in an error which line it is, `way_out` what to do if it is cut short."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ResultsError(f"{where}: not a whole JSON object ({error}); {way_out}") from None
    if not isinstance(values, dict):
        raise ResultsError(f"{where}: expected a JSON object, got {type(values).__name__}")
    if missing := [name for name in _REQUIRED if name not in values]:
        raise ResultsError(f"{where}: not a row of this benchmark: it lacks {', '.join(map(repr, missing))}")
    if unknown := sorted(set(values) - set(FIELDS)):
        raise ResultsError(f"{where}: not a row of this benchmark: unknown fields {', '.join(map(repr, unknown))}")
    for name, value in values.items():
        if fault := _fault(name, value):
            raise ResultsError(f"{where}: {name!r} must be {fault}")
    row = Row(**{"pass_" if name == "pass" else name: value for name, value in values.items()})
    row.backend = renamed.current(row.op, row.backend, row.when)
    if fault := _lacks(row):
        raise ResultsError(f"{where}: {fault}")
    return row


def _fault(name: str, value: Any) -> str | None:
    """Why a field's value is wrong: what it must be, and what it is. None where it is right."""
    if type(value) not in _TAKEN[name]:
        accepted = " or ".join(_NAMES[each] for each in _TYPES[name])
    elif type(value) in (int, float) and not abs(value) <= sys.float_info.max:  # NaN is not less than anything
        accepted = "a finite number"
    elif name == "shapes" and not all(size is None or _is_shape(size) for size in value):
        accepted = "a list of lists of whole numbers from 0, or null for an input that is absent"
    elif name in _POSITIVE and value is not None and value <= 0:
        accepted = "above zero"
    elif name in _COUNTS and value is not None and value < 0:
        accepted = "0 or more"
    else:
        return None
    shown = repr(value)
    return f"{accepted}, got {shown if len(shown) <= 60 else shown[:60] + '…'}"


def _is_shape(value: Any) -> bool:
    return type(value) is list and all(type(n) is int and n >= 0 for n in value)


def _lacks(row: Row) -> str | None:
    """Why a row is incomplete: the fields that it lacks. None where it can be shown and compared."""
    for ends in _INTERVALS:
        given = [name for name in ends if getattr(row, name) is not None]
        if len(given) == 1:
            return f"{' and '.join(map(repr, ends))} come together, got {given[0]!r} alone"
    if row.us is None or row.op == CEILING:
        return None
    if missing := [name for name in _TIMED if getattr(row, name) is None]:
        return f"a timed row of an operation lacks {', '.join(map(repr, missing))}"
    for work, rate in (("bytes", "gbs"), ("flops", "tflops")):
        if getattr(row, work) > 0 >= getattr(row, rate):
            return f"{rate!r} must be above zero where {work!r} is, got {getattr(row, rate)!r}"
    return None


def read(path: Path) -> list[Row]:
    """Every row of a file, older ones included; none where there is no file.

    Raises:
        ResultsError: a line is truncated or foreign, or the file cannot be read. The message names it.
    """
    *lines, last = _content(path).split(b"\n")
    rows = _parsed(path, lines)
    if last.strip():
        where = f"{path}:{len(lines) + 1}"
        from_json(_text(last, where, _WAY_OUT), where, _WAY_OUT)
        raise ResultsError(f"{where}: the last line has no end: it may be cut short; {_WAY_OUT}")
    return rows


def read_given(path: Path) -> list[Row]:
    """Every row of a file that was named, which must be there."""
    if not path.exists():
        raise ResultsError(
            f"{path} does not exist; expected rows, as `python -m bench --output {path.name}` writes them"
        )
    return read(path)


def _content(path: Path) -> bytes:
    try:
        if not path.exists():
            return b""
        if not path.is_file():  # a device file may have no end
            raise ResultsError(f"{path} is no regular file; expected rows, as `python -m bench` writes them")
        return path.read_bytes()
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read: {error.strerror}") from None


def check_writable(path: Path) -> None:
    """Find out, before there is anything to lose, that a file can be written and replaced. Makes its folder.

    Raises:
        ResultsError: the message says why it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
        tempfile.TemporaryFile(dir=path.parent).close()  # `replace` writes beside the file
    except FileExistsError:
        raise ResultsError(f"{path}: cannot be written: {path.parent} is no folder") from None
    except OSError as error:
        raise ResultsError(f"{path}: cannot be written: {error.strerror}") from None


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
    *lines, last = _content(path).split(b"\n")
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
    """The newest row of each key, in the order in which the keys first appeared.

    The reason of a peer that could not run (not installed, or not importable) counts only where no run has measured it.
    """
    newest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        other = newest.get(row.key)
        if other is None or (_is_of_use(row), row.when) >= (_is_of_use(other), other.when):
            newest[row.key] = row
    return list(newest.values())


def _is_of_use(row: Row) -> bool:
    return row.level != PEER or row.unsupported is None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Keeps other processes of this user from writing to a file meanwhile: one would undo what the other did.

    Raises:
        ResultsError: another one does.
    """
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    lock = Path(tempfile.gettempdir(), f"kernel_ladder-{os.getuid()}-{name}.lock")
    held = False
    while not held:
        with lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ResultsError(
                    f"{path}: another process is writing to it; give this one an --output of its own, and join the two "
                    "with `python -m bench merge`"
                ) from None
            held = _is_at(file, lock)  # else the one who held it has removed it since
            if held:
                try:
                    yield
                finally:
                    lock.unlink()


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether an open file still is what a path names."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def append(path: Path, row: Row) -> None:
    """Add a row in one write, so that an interrupted run leaves whole lines; what a full disk cuts short is undone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (to_json(row) + "\n").encode()
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        written = os.write(file, line)
        if written < len(line):
            if written:  # before the first write the position is not the end of the file
                os.ftruncate(file, os.lseek(file, 0, os.SEEK_CUR) - written)
            raise OSError(errno.EIO, f"only {written} of the {len(line)} bytes of a row could be written", str(path))
    finally:
        os.close(file)


def write(path: Path, rows: Iterable[Row]) -> None:
    """Rewrite a file with these rows."""
    replace(path, "".join(to_json(row) + "\n" for row in rows))


def of_one_machine(rows: Iterable[Row], gpu: str | None = None) -> list[Row]:
    """The rows of the machine `gpu`, or of the one that made the newest row: a picture carries one machine's name."""
    rows = list(rows)
    if gpu is None and rows:
        gpu = max(rows, key=lambda row: row.when).gpu
    return [row for row in rows if row.gpu == gpu]


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
