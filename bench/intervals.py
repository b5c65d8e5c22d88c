"""What rounds of times say: quartiles, ratios paired round by round, and how sure their medians are."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 10_000
#: No 95 % interval of a median can be had from fewer values: even the range of five misses it in 1 of 16 cases.
LEAST_VALUES = 6

#: Times of one variant, round by round; None in the rounds that it sat out.
Rounds = Sequence[float | None]


def quartiles(times: Rounds) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the rounds that were run."""
    q1, median, q3 = np.percentile([t for t in times if t is not None], [25, 50, 75])
    return float(q1), float(median), float(q3)


def paired_ratios(numerator: Rounds, denominator: Rounds) -> list[float]:
    """The ratio within each round that both ran: drift hits both alike and cancels."""
    return [a / b for a, b in zip(numerator, denominator, strict=True) if a is not None and b is not None]


def paired_ratio(numerator: Rounds, denominator: Rounds) -> float | None:
    """Median of :func:`paired_ratios`; None where no round ran both."""
    ratios = paired_ratios(numerator, denominator)
    return float(np.median(ratios)) if ratios else None


def median_interval(values: Rounds) -> tuple[float, float] | tuple[None, None]:
    """95 % bootstrap interval of the median of the values that are there (Efron 1979, percentile method).

    It says how far another set of rounds *of the same run* may move the median, not what another day's clocks, another
    GPU or another placement in memory would do. Seeded: the same values have the same interval. A pair of None where
    there are fewer than `LEAST_VALUES`.
    """
    known = np.sort([v for v in values if v is not None])
    if len(known) < LEAST_VALUES:
        return None, None
    lower, upper = _median_places(len(known))
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile((known[lower] + known[upper]) / 2, [tail, 100 - tail])
    return float(low), float(high)


@functools.cache
def _median_places(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The middle two places, in the sorted values, of every resample: they do not depend on the values."""
    drawn = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    drawn.sort(axis=1)
    return drawn[:, (count - 1) // 2], drawn[:, count // 2]
