"""What backends' names stand for in the calls of a sweep."""

from __future__ import annotations

import torch

from bench.measure import sets
from bench.measure.selection import CONTENDERS, NAIVE, Group
from kernel_ladder import table
from kernel_ladder.selection import explain, preferred_first
from kernel_ladder.spec import Inputs, as_leaves
from kernel_ladder.testing.samples import empty_inputs


def _asked(inputs: Inputs, pass_: str) -> Inputs:
    return as_leaves(inputs) if pass_ == "backward" else inputs


def to_measure(group: Group, device: torch.device) -> set[str]:
    """The rung that each level's name stands for in each pass; in sets other than the sweep, contenders too.

    Where no rung of a level takes the call, the first in order: its row gives the reason.
    """
    inputs, options = empty_inputs(group.case, group.dtype, device), group.case.options
    wanted: set[str] = set()
    for level in table.LEVELS:
        climb = table.named(group.op, level)
        for pass_ in group.passes if climb else ():
            asked = _asked(inputs, pass_)
            order = preferred_first(climb, asked, options)
            fitting = [v for v in order if v.unsupported(*asked, **options) is None]
            wanted.add(next(iter(fitting), order[0]).name)
            if group.set != sets.SWEEP:
                last = [v.name for v in climb if v in fitting][:CONTENDERS]
                wanted.update(name for name in last if not name.endswith(f".{NAIVE}"))
    return wanted


def names_of_rungs(group: Group, pass_: str, device: torch.device) -> dict[str, list[str]]:
    """By rung, the names among "auto" and the levels that stand for it in a call; none where memory is short."""
    found: dict[str, list[str]] = {}
    try:
        asked = _asked(empty_inputs(group.case, group.dtype, device), pass_)
        for name in ("auto", *table.LEVELS):
            if name == "auto" or (table.variants(group.op, name) and table.unavailable(group.op, name) is None):
                rung, reason = explain(group.op, name, asked, group.case.options)[-1]
                if reason is None:
                    found.setdefault(rung, []).append(name)
    except torch.OutOfMemoryError:
        return {}
    return found
