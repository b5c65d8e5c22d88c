"""The rounds of one group: what is fast among itself, then what is slow, each with the state of the GPU meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from bench import clocks, timing
from bench.intervals import Rounds


@dataclass(frozen=True)
class Timed:
    """Seconds of one call, round by round; its own and the baseline's in the rounds that pair them; the GPU's state."""

    times: Rounds
    paired: Rounds
    baseline: Rounds | None
    state: clocks.State
    moved: bool | None  # its clock was not its neighbours'


def run(
    launches: Mapping[str, timing.Launch],
    baseline: str,
    *,
    seconds: float,
    patience: float,
    device: torch.device,
    observe: Callable[[timing.Span], None],
) -> dict[str, Timed]:
    """Time all `launches` for `seconds` together, slow ones for longer (see :func:`bench.timing.interleave`).

    Those that are :func:`bench.timing.apart` come after the others, with the baseline beside them. Where that is slow
    itself, all come again beside it, in its few rounds: their times are those of the many before, their ratios those of
    the few.
    """
    slow = timing.apart(launches)
    fast = {name: launch for name, launch in launches.items() if name not in slow}
    share = seconds / len(launches)
    taking = functools.partial(_rounds, baseline=baseline, patience=patience, device=device, observe=observe)
    alone = taking(fast, seconds=share * len(fast))
    found = {name: _timed(alone, name, alone, baseline) for name in fast}
    if slow:
        again = {name: launch for name, launch in launches.items() if name in slow or baseline in (name, *slow)}
        # No more rounds than the slow ones need.
        most = max(timing.MIN_ROUNDS, *(int(share / launches[name].seconds) for name in slow))
        beside = taking(again, seconds=share * len(again), most=most)
        found |= {name: _timed(beside, name, beside, baseline) for name in slow}
        if baseline in slow:
            found |= {name: _timed(alone, name, beside, baseline) for name in fast}
    return {name: found[name] for name in launches}


@dataclass(frozen=True)
class _Taken:
    times: Mapping[str, Rounds]
    watch: clocks.Watch


def _rounds(
    launches: Mapping[str, timing.Launch],
    *,
    baseline: str,
    seconds: float,
    patience: float,
    device: torch.device,
    observe: Callable[[timing.Span], None],
    most: int = timing.MAX_ROUNDS,
) -> _Taken:
    with clocks.watch(device) as watch:

        def ran(round_: int, name: str, span: timing.Span) -> None:
            watch.ran(round_, name, span)
            observe(span)

        paired_with = baseline if baseline in launches else None
        return _Taken(timing.interleave(launches, seconds, paired_with, ran, patience, most), watch)


def _timed(own: _Taken, name: str, pairs: _Taken, baseline: str) -> Timed:
    return Timed(
        own.times[name],
        pairs.times[name],
        pairs.times.get(baseline),
        own.watch.state(name),
        own.watch.moved().get(name),
    )
