"""What a sweep says before it begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bench import peers
from bench.measure import clocks
from bench.measure.selection import AT_QUICK_CASES, Group

if TYPE_CHECKING:
    from bench.sweep import Sweep


def left_out(sweep: Sweep, todo: Sequence[Group], note: Callable[[str], None]) -> None:
    """Say what will be missing from the rows, and why."""
    if (reason := clocks.gpu(sweep.device)[1]) is not None:
        note(f"clock, power and temperature are not recorded: {reason}")
    for name, reason in AT_QUICK_CASES.items():
        takes = [group for group in todo if name in sweep.known(group)]
        missing = sum(not sweep.selection.has_time_for(name, group) for group in takes)
        if missing and sweep.device.type == "cuda":
            option = "--peers" if name.startswith(f"{peers.LEVEL}.") else "--backend"
            note(
                f"{name} ({reason}) is left out at {missing} of {len(takes)} cases; "
                f"{option} {name.removeprefix(f'{peers.LEVEL}.')} measures it at all of them"
            )
