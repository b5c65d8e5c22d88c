"""The sets of calls that a sweep measures: the specs' own, and those that nobody tuned for."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import kernel_ladder
from bench.measure import drawn, models, row_lengths
from kernel_ladder.spec import Case

SWEEP, MODELS, RANDOM, LENGTHS = "sweep", "models", "random", "lengths"
SETS: Mapping[str, str] = {
    SWEEP: "the cases of each operation's spec",
    MODELS: "layers, attention calls and row lengths of public models",
    RANDOM: "sizes drawn from a seed",
    LENGTHS: "row-wise operations at lengths of rows that no tile divides",
}


class Member(NamedTuple):
    """A case of a set, and the names of those who make the call."""

    case: Case
    names: tuple[str, ...] = ()


@functools.cache
def members(set_: str, op: str, seed: int = drawn.SEED) -> tuple[Member, ...]:
    """The cases of a set for an operation. Calls that several make are one case with all of their names."""
    if set_ == SWEEP:
        return tuple(Member(case) for case in kernel_ladder.spec(op).sweep)
    return _by_op(set_, seed).get(op, ())


@functools.cache
def _by_op(set_: str, seed: int) -> dict[str, tuple[Member, ...]]:
    found: dict[str, dict[str, Member]] = {}
    calls = {MODELS: models.calls, LENGTHS: row_lengths.calls}
    for op, case, name in calls[set_]() if set_ in calls else drawn.calls(seed):
        cases = found.setdefault(op, {})
        known = cases.get(case.id, Member(case))
        names = (*known.names, name) if name and name not in known.names else known.names
        # The case is quick if any of its callers is.
        cases[case.id] = Member(case if case.quick else known.case, names)
    return {op: tuple(cases.values()) for op, cases in found.items()}
