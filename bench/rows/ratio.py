"""Ratios of two measured values, with the interval that follows from theirs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import kernel_ladder
from bench.measure.intervals import LEAST_VALUES
from bench.rows.store import ResultsError, Row

#: Standard normal deviate of a two-sided 95 % interval.
Z = 1.96
#: Standard error of a normal sample's median, in interquartile ranges over √n: 1.2533 σ, and σ is the range over 1.349
#: (McGill, Tukey and Larsen, "Variations of box plots", The American Statistician 32, 1978).
MEDIAN_ERROR = 1.2533 / 1.349


@dataclass(frozen=True)
class Estimate:
    """A positive value with its 95 % interval, whose ends are None where it is not known."""

    value: float
    low: float | None = None
    high: float | None = None

    def over(self, other: Estimate) -> Estimate:
        """The ratio of two independent estimates: half-widths add as squares, in logarithms and each side for itself.

        The interval is that of Donner and Zou ("Closed-form confidence intervals for functions of the normal mean and
        standard deviation", Statistical Methods in Medical Research 21, 2012). It lets intervals be lopsided.
        """
        ratio = self.value / other.value
        if None in (self.low, self.high, other.low, other.high):
            return Estimate(ratio)
        down = math.hypot(math.log(self.value / self.low), math.log(other.high / other.value))
        up = math.hypot(math.log(self.high / self.value), math.log(other.value / other.low))
        return Estimate(ratio, ratio * math.exp(-down), ratio * math.exp(up))

    def widened(self, deviation: float) -> Estimate:
        """The estimate with a further independent standard deviation of its logarithm."""
        if self.low is None or self.high is None:
            return self
        down = math.hypot(math.log(self.value / self.low), Z * deviation)
        up = math.hypot(math.log(self.high / self.value), Z * deviation)
        return Estimate(self.value, self.value * math.exp(-down), self.value * math.exp(up))

    def scaled(self, factor: float) -> Estimate:
        ends = (end if end is None else end * factor for end in (self.low, self.high))
        return Estimate(self.value * factor, *ends)


def has_interval(row: Row) -> bool:
    """Whether the row carries the bootstrap interval of its time; older ones carry quartiles alone."""
    return row.us_low is not None and row.us_high is not None


def quartiles_of(row: Row) -> Estimate:
    """A timed row's median in microseconds with its quartiles for ends; where it has none, with the median itself.

    Raises:
        ResultsError: the row's times are not positive numbers in order.
    """
    known = row.us_q1 is not None and row.us_q3 is not None
    return _in_order(row, row.us_q1, row.us_q3) if known else _in_order(row, row.us, row.us)


def time_of(row: Row) -> Estimate:
    """A timed row's median in microseconds with its interval: its own, else one derived from its quartiles.

    A call of fewer than `LEAST_VALUES` rounds, which takes long, has none: too little is known of its noise.

    Raises:
        ResultsError: the row's times are not positive numbers in order.
    """
    if has_interval(row):
        return _in_order(row, row.us_low, row.us_high)
    spread = quartiles_of(row)
    if (row.rounds or 0) < LEAST_VALUES:
        return Estimate(row.us)
    deviation = MEDIAN_ERROR * math.log(spread.high / spread.low) / math.sqrt(row.rounds)
    return Estimate(row.us, row.us, row.us).widened(deviation)


def _in_order(row: Row, low: float | None, high: float | None) -> Estimate:
    numbers = all(isinstance(us, int | float) for us in (low, row.us, high))
    if not numbers or not 0 < low <= row.us <= high < math.inf:
        name = f"{row.op} {row.backend} {row.pass_} {row.dtype} {row.shape}"
        raise ResultsError(f"{name}: expected times above zero and in order, got {low}, {row.us}, {high}")
    return Estimate(row.us, low, high)


def baseline_of(op: str) -> str:
    """The variant that an operation's speed-ups are over: torch.builtin, or torch.naive where there is none."""
    return kernel_ladder.spec(op).baseline if op in kernel_ladder.OPS else "torch.builtin"


def speedup_of(row: Row) -> Estimate | None:
    """A row's speed-up over the baseline, paired round by round within its run; None where it has none."""
    if row.backend == baseline_of(row.op):
        return Estimate(1.0, 1.0, 1.0)
    return Estimate(row.speedup, row.speedup_low, row.speedup_high) if row.speedup else None
