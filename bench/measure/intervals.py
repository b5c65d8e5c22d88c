"""Statistics of rounds: quartiles, ratios paired within a round, 95 % intervals of medians."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 10_000
#: The bootstrap is unreliable for fewer values.
FEW = 30
#: Fewer values give no 95 % interval of a median: even the range of five values misses it in 1 of 16 cases.
LEAST_VALUES = 6

#: Times of one variant in each round; None in rounds without it.
Rounds = Sequence[float | None]


def quartiles(times: Rounds) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the rounds that were run."""
    q1, median, q3 = np.percentile([t for t in times if t is not None], [25, 50, 75])
    return float(q1), float(median), float(q3)


def paired_ratios(numerator: Rounds, denominator: Rounds) -> list[float]:
    """The ratio within each round that ran both: drift affects both alike and cancels."""
    return [a / b for a, b in zip(numerator, denominator, strict=True) if a is not None and b is not None]


def paired_ratio(numerator: Rounds, denominator: Rounds) -> float | None:
    """Median of :func:`paired_ratios`; None where no round ran both."""
    ratios = paired_ratios(numerator, denominator)
    return float(np.median(ratios)) if ratios else None


def median_interval(values: Rounds) -> tuple[float, float] | tuple[None, None]:
    """95 % interval of the median of the values that are there; a pair of None from fewer than `LEAST_VALUES`.

    Uses the bootstrap (Efron 1979, percentile method) with a fixed seed; it holds the median in 93 to 96 of a hundred
    cases. From fewer than `FEW` values the bootstrap is too narrow (of seven values it misses once in eight times). The
    ends are then two of the values, counted from both sides. They are the narrowest pair that holds the median in at
    least 95 of a hundred cases, whatever the distribution.

    The interval covers the scatter between rounds *of the same run*. It does not cover another day's clocks, another
    GPU or another placement in memory. It takes rounds to be independent, and is too narrow for times whose clock
    drifts over many rounds; that drift cancels in ratios within a round.
    """
    known = np.sort([v for v in values if v is not None])
    if len(known) < LEAST_VALUES:
        return None, None
    if len(known) < FEW:
        outside = _outside(len(known))
        return float(known[outside]), float(known[-1 - outside])
    lower, upper = _median_places(len(known))
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile((known[lower] + known[upper]) / 2, [tail, 100 - tail])
    return float(low), float(high)


def _outside(count: int) -> int:
    """How many of `count` values can be left out on either side: each lies below the median with probability 1/2."""
    below = np.cumsum([math.comb(count, k) / 2**count for k in range(count)])
    return int(np.searchsorted(below, (1 - CONFIDENCE) / 2, side="right")) - 1


@functools.cache
def _median_places(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The middle two places, in the sorted values, of every resample: they do not depend on the values."""
    drawn = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    drawn.sort(axis=1)
    return drawn[:, (count - 1) // 2], drawn[:, count // 2]
