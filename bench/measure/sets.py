"""The sets of calls that a sweep measures: the specs' own, those of public models, and those drawn from a seed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import kernel_ladder
from bench.measure import drawn, models
from kernel_ladder.spec import Case

SWEEP, MODELS, RANDOM = "sweep", "models", "random"
SETS: Mapping[str, str] = {
    SWEEP: "the cases of each operation's spec",
    MODELS: "layers, attention calls and row lengths of public models",
    RANDOM: "sizes drawn from a seed",
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
    for op, case, name in models.calls() if set_ == MODELS else drawn.calls(seed):
        cases = found.setdefault(op, {})
        known = cases.get(case.id, Member(case))
        names = (*known.names, name) if name and name not in known.names else known.names
        # The case is quick if any of its callers is.
        cases[case.id] = Member(case if case.quick else known.case, names)
    return {op: tuple(cases.values()) for op, cases in found.items()}
