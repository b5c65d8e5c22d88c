"""What each rung was predicted to take: a formula over a row's bytes and operations, read from ``predictions.toml``.

A table ``[OP."LEVEL.RUNG"]`` holds at most one formula, a number or a range of two:

- ``bytes``: times the least bytes at the measured copy rate
- ``share``: the least bytes at this share of the copy rate
- ``matrix``: the operations at this share of the measured matrix rate
- ``over``: times as fast as the rung before
- ``times``: times as long as the rung named by ``as``, ``"OP RUNG"`` where it is of another operation. That one's call
  has the same shape without this one's options, as ``4096x4096x4096 gelu`` without ``gelu``

and beside it ``shape`` and ``dtype`` where the headline shape does not show the idea, ``why`` (the prediction's reason,
in place of the head's `Predicts`), ``verdict`` (what the measurement taught), ``limit`` (in place of the head's `Limit
now`), ``try``, ``counter`` (the heading of the counter that tells most of the step, where that is not its limit's), and
``no_counters``: why none are committed.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.rows.store import Row
from bench.show.climb_counters import SHOWN
from bench.show.table import microseconds

FILE = Path(__file__).with_name("predictions.toml")
FORMULAS = ("bytes", "share", "matrix", "over", "times")
WORDS = ("shape", "dtype", "as", "why", "verdict", "limit", "try", "counter", "no_counters")
#: A measurement this near a prediction confirms it: of bytes or operations, and of a ratio between two rungs.
NEAR = 0.1
NEAR_RATIO = 0.03


class PredictionError(ValueError):
    """A prediction that cannot be understood; the message names its table."""


@dataclass(frozen=True)
class Prediction:
    """A time in µs, or a range of them, with the formula that gave it."""

    formula: str
    low: float
    high: float
    near: float = NEAR

    def __str__(self) -> str:
        number = microseconds(self.low)
        if self.high > self.low:
            number = f"{number} to {microseconds(self.high)}"
        return f"{self.formula} → **{number}**"

    def verdict(self, us: float) -> str:
        """How a measured time compares."""
        if self.low * (1 - self.near) <= us <= self.high * (1 + self.near):
            return "As predicted."
        factor, word = (us / self.high, "slower") if us > self.high else (self.low / us, "faster")
        return f"{factor:.{2 if factor < 10 else 0}f} × {word} than predicted."


@functools.cache
def notes() -> dict[str, dict[str, dict[str, Any]]]:
    """By operation and rung.

    Raises:
        PredictionError: a table has a key that is not known, two formulas, or a range that does not rise.
    """
    found = tomllib.loads(FILE.read_text(encoding="utf-8"))
    for op, rungs in found.items():
        for rung, note in rungs.items():
            where = f'{FILE.name}: [{op}."{rung}"]'
            if unknown := set(note) - {*FORMULAS, *WORDS}:
                raise PredictionError(f"{where}: unknown key {min(unknown)!r}; known are {', '.join(FORMULAS + WORDS)}")
            if len(given := [key for key in FORMULAS if key in note]) > 1:
                raise PredictionError(f"{where}: two formulas, {given[0]} and {given[1]}; give one")
            for key in given:
                low, high = bounds(note[key])
                if not 0 < low <= high:
                    raise PredictionError(f"{where}: {key} = {note[key]}; give a number above 0, or two that rise")
            if ("times" in note) != ("as" in note):
                raise PredictionError(f"{where}: `times` and `as` stand together")
            if note.get("counter", SHOWN[0]) not in SHOWN:
                raise PredictionError(f"{where}: no counter {note['counter']!r}; known are {', '.join(SHOWN)}")
    return found


def bounds(value: Any) -> tuple[float, float]:
    return (value[0], value[1]) if isinstance(value, list) else (value, value)


def predict(
    note: Mapping[str, Any], here: Mapping[str, Row], before: Row | None, found: Iterable[Row] = ()
) -> Prediction | None:
    """The prediction of a note among the rows of one call; None without a formula, or where rows that it needs lack.

    `found` holds the rows of other operations.
    """
    work = next(iter(here.values()), None)
    key = next((key for key in FORMULAS if key in note), None)
    if key is None or work is None:
        return None
    low, high = bounds(note[key])
    text = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    made: dict[str, Callable[[], Prediction | None]] = {
        "bytes": lambda: _of_bytes(work, low, high, "" if text == "1" else f"{text} × "),
        "share": lambda: _of_bytes(work, 1 / high, 1 / low, "", f"{text} of "),
        "matrix": lambda: _of_matrix(work, low, high, text),
        "over": lambda: _of_row(before, 1 / high, 1 / low, "time of `{}` / " + text),
        "times": lambda: _of_row(_other(note, here, work, found), low, high, f"{text} × time of {_owner(note)}`{{}}`"),
    }
    return made[key]()


def _owner(note: Mapping[str, Any]) -> str:
    op = note.get("as", "").rpartition(" ")[0]
    return f"{op}'s " if op else ""


def _other(note: Mapping[str, Any], here: Mapping[str, Row], work: Row, found: Iterable[Row]) -> Row | None:
    """The row of the rung that `as` names: of this call, or of another operation's."""
    op, _, rung = note["as"].rpartition(" ")
    if not op:
        return here.get(rung)
    same = (op, rung, work.pass_, work.dtype, work.gpu)
    shapes = (work.shape, work.shape.partition(" ")[0])
    mine = [row for row in found if (row.op, row.backend, row.pass_, row.dtype, row.gpu) == same]
    return next((row for shape in shapes for row in mine if row.shape == shape), None)


def _of_bytes(work: Row, low: float, high: float, factor: str, share: str = "") -> Prediction | None:
    if not work.bytes or not work.ceiling_gbs:
        return None
    us = work.bytes / work.ceiling_gbs / 1e3
    size = f"{work.bytes / 1e6:,.0f} MB" if work.bytes >= 1e6 else f"{work.bytes / 1e3:,.0f} kB"
    formula = f"{factor}{size} / {share}{work.ceiling_gbs:,.0f} GB/s"
    return Prediction(formula, us * low, us * high)


def _of_matrix(work: Row, low: float, high: float, text: str) -> Prediction | None:
    if not work.flops or not work.ceiling_tflops:
        return None
    us = work.flops / work.ceiling_tflops / 1e6
    share = "" if text == "1" else f"({text} of "
    closing = ")" if share else ""
    formula = f"{work.flops / 1e9:,.0f} GFLOP / {share}{work.ceiling_tflops:,.0f} TFLOP/s{closing}"
    return Prediction(formula, us / high, us / low)


def _of_row(row: Row | None, low: float, high: float, form: str) -> Prediction | None:
    if row is None or row.us is None:
        return None
    formula = form.format(row.backend).removesuffix(" / 1").removeprefix("1 × ")
    return Prediction(f"{formula} ({microseconds(row.us)})", row.us * low, row.us * high, NEAR_RATIO)
