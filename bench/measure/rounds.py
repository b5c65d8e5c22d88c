"""The rounds of one group: fast variants first, slow ones afterwards, each with the GPU's state in its rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from bench.measure import clocks, intervals, timing
from bench.measure.intervals import Rounds
from bench.rows.store import Row


@dataclass(frozen=True)
class Timed:
    """Seconds of one call per round, also beside the baseline's in the rounds that pair them; the GPU's state."""

    times: Rounds
    paired: Rounds
    baseline: Rounds | None
    state: clocks.State
    moved: bool | None  # its clock differed from its neighbours'

    def write_into(self, row: Row) -> None:
        """Fill in a row's times, rates, the GPU's state, and the speedup over the baseline."""
        times, state = self.times, self.state
        row.us_q1, row.us, row.us_q3 = (1e6 * t for t in intervals.quartiles(times))
        row.us_low, row.us_high = (None if t is None else 1e6 * t for t in intervals.median_interval(times))
        row.rounds = sum(t is not None for t in times)
        row.gbs, row.tflops = row.bytes / row.us / 1e3, row.flops / row.us / 1e6
        row.of_ceiling = None if row.least_us is None else row.least_us / row.us
        row.clock_mhz, row.power_w, row.temperature_c = state.clock_mhz, state.power_w, state.temperature_c
        row.throttled, row.clocks_moved = state.throttled, self.moved
        if self.baseline is not None:
            row.speedup = intervals.paired_ratio(self.baseline, self.paired)
            ratios = intervals.paired_ratios(self.baseline, self.paired)
            row.speedup_low, row.speedup_high = intervals.median_interval(ratios)


def run(
    launches: Mapping[str, timing.Launch],
    baseline: str,
    *,
    seconds: float,
    patience: float,
    device: torch.device,
    observe: Callable[[timing.Span], None],
) -> dict[str, Timed]:
    """Time all `launches` for `seconds` in total, slow ones for longer (see :func:`bench.measure.timing.interleave`).

    Slow launches (:func:`bench.measure.timing.apart`) run after the others, in rounds that include the baseline. If the
    baseline is slow itself, the fast ones run again in its few rounds. Times come from their own rounds, ratios from
    the rounds shared with the baseline.
    """
    slow = timing.apart(launches)
    fast = {name: launch for name, launch in launches.items() if name not in slow}
    share = seconds / len(launches)

    def taken(some: Mapping[str, timing.Launch], most: int = timing.MAX_ROUNDS) -> _Taken:
        with clocks.watch(device) as watch:

            def ran(round_: int, name: str, span: timing.Span) -> None:
                watch.ran(round_, name, span)
                observe(span)

            paired_with = baseline if baseline in some else None
            times = timing.interleave(some, share * len(some), paired_with, ran, patience, most)
        return _Taken(times, watch, watch.moved())

    alone = taken(fast)
    found = {name: _timed(alone, name, alone, baseline) for name in fast}
    if slow:
        again = {name: launch for name, launch in launches.items() if name in slow or baseline in (name, *slow)}
        # No more rounds than the slow ones need.
        beside = taken(again, max(timing.MIN_ROUNDS, *(int(share / launches[name].seconds) for name in slow)))
        found |= {name: _timed(beside, name, beside, baseline) for name in slow}
        if baseline in slow:
            found |= {name: _timed(alone, name, beside, baseline) for name in fast}
    return {name: found[name] for name in launches}


@dataclass(frozen=True)
class _Taken:
    """Rounds that several launches shared, and the GPU's state in them."""

    times: Mapping[str, Rounds]
    watch: clocks.Watch
    moved: Mapping[str, bool | None]


def _timed(own: _Taken, name: str, pairs: _Taken, baseline: str) -> Timed:
    return Timed(
        own.times[name],
        pairs.times[name],
        pairs.times.get(baseline),
        own.watch.state(name),
        own.moved.get(name),
    )
