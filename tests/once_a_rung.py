"""Of tests that can never run on this machine, one stands for the others of its kind and tells the reason.

A rung that is unavailable is collected once, by the first test that would skip it, not once a case; so is a function
whose ``skipif`` holds, whatever its parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch

import kernel_ladder
from kernel_ladder import table
from kernel_ladder.spec import DTYPES, as_leaves
from kernel_ladder.table import Variant
from kernel_ladder.testing.samples import empty_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

#: A test that calls one of these skips where a rung is unavailable. Others have something to say of such a rung too.
SKIPPING = {"skip_unless_it_runs", "skip_unless_available"}

_told: set[tuple[str, str]] = set()  # rungs for which a test has been collected


def _holds(marks: Iterable[pytest.Mark]) -> str | None:
    """The reason of the first skip mark that holds, or None."""
    for mark in marks:
        if mark.name == "skip" or (mark.name == "skipif" and mark.args and mark.args[0] is True):
            return mark.kwargs.get("reason", mark.name)
    return None


@functools.cache
def never_runs(variant: Variant) -> str | None:
    """Why this machine cannot run a rung, whatever the inputs, or None.

    Its level is unavailable, or the rung itself is, or it refuses every sample of its operation in every dtype.
    """
    reason = table.unavailable(variant.op, variant.level) or variant.here()
    if reason is not None:
        return reason
    for dtype in DTYPES:
        for case in kernel_ladder.spec(variant.op).samples:
            inputs = as_leaves(empty_inputs(case, dtype, DEVICE))
            with torch.no_grad():
                reason = variant.unsupported(*inputs, **case.options)
            if reason is None:
                return None
    return reason


def _unavailable(params: Mapping[str, Any]) -> tuple[str, str] | None:
    """Operation and backend of the rung in a test's parameters that never runs here, or None."""
    for value in params.values():
        if isinstance(value, Variant) and never_runs(value) is not None:
            return value.op, value.name
    op, level = params.get("op"), params.get("level", params.get("backend"))
    if level not in table.LEVELS:
        return None
    ops = [op] if op in table.OPS else table.OPS  # where no operation is named, one stands for all that lack the level
    return (ops[0], level) if all(table.unavailable(each, level) is not None for each in ops) else None


def keep_marked(metafunc: pytest.Metafunc, name: str) -> None:
    """Leave out all but one call of a function that has no such mark: what is deselected need not be made first."""
    calls = getattr(metafunc, "_calls", [])
    marks = (*metafunc.definition.iter_markers(), *(mark for call in calls for mark in call.marks))
    if not any(mark.name == name for mark in marks):
        del calls[1:]


def keep(metafunc: pytest.Metafunc) -> None:
    """Leave out of a function's calls those that would only repeat a skip."""
    calls = getattr(metafunc, "_calls", [])
    skips = SKIPPING & set(getattr(metafunc.function, "__code__", keep.__code__).co_names)
    never = _holds(metafunc.definition.iter_markers())
    kept, reasons = [], set()
    for call in calls:
        reason = never or _holds(call.marks)
        if reason is not None:
            if reason not in reasons:
                kept.append(call)
            reasons.add(reason)
            continue
        rung = _unavailable(call.params) if skips else None
        if rung is None or rung not in _told:
            kept.append(call)
        if rung is not None:
            _told.add(rung)
    calls[:] = kept
