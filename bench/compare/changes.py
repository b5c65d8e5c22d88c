"""What changed between two files of rows: calls paired by key, ratios with intervals, the drift common to all."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.rows.order import by_climb
from bench.rows.ratio import Estimate, baseline_of, quartiles_of, speedup_of, time_of
from bench.rows.store import ResultsError, Row

#: Levels of other libraries and of ceilings: they are shown, and not judged.
FOREIGN = ("peer", "ceiling")
#: Transitions of this project's own code that the gate fails for.
FAILING = ("became wrong", "became unsupported")
#: What can be said of a call that was timed in both files.
DIRECTIONS = ("slower", "faster", "unchanged", "undecided")
#: Ceilings that are the machine's alone, and those that PyTorch's library of products has a part in. The cost of a
#: launch is neither: it is the host's, and does not follow the device's clocks.
BANDWIDTHS = ("ceiling.copy", "ceiling.read", "ceiling.write", "ceiling.l2")
PRODUCTS = ("ceiling.tensor", "ceiling.cuda_core")
#: Fewer controls than this show neither the drift of the machine nor the scatter between two runs.
MIN_CONTROLS = 3
#: One round says nothing of its noise: where there is no other, only a change by a larger share of the time counts.
ONE_ROUND = 0.5
#: Standard deviation of a normal distribution over its median absolute deviation.
MAD_TO_DEVIATION = 1.4826
#: Standard error of the median of n normal values, in standard deviations over √n.
MEDIAN_OF_NORMAL = 1.2533


@dataclass(frozen=True)
class Drift:
    """How much longer the same work took in B than in A, by rows whose code is the same in both (the controls).

    Two runs are not interleaved. Clocks, power and temperature differ between them, for all rows alike (`factor`) and
    for each a little (`scatter`, a standard deviation of the logarithm, estimated robustly). Both come from the
    controls, as with negative controls in the calibration of observational studies.
    """

    factor: float = 1.0
    scatter: float = 0.0
    controls: int = 0
    applied: bool = False
    reason: str | None = None  # why it was not applied

    @property
    def known(self) -> bool:
        return self.controls >= MIN_CONTROLS

    @property
    def deviation(self) -> float:
        """Standard deviation of a corrected ratio's logarithm: the scatter, and the error of the controls' median."""
        unsure = MEDIAN_OF_NORMAL**2 / self.controls if self.applied else 0.0
        return self.scatter * math.sqrt(1 + unsure)


def _side(ratio: Estimate) -> int | None:
    """1 where the whole interval is above one, -1 where it is below, 0 where one is in it; None without an interval."""
    if ratio.low is None or ratio.high is None:
        return None
    return (ratio.low > 1) - (ratio.high < 1)


@dataclass(frozen=True)
class Change:
    """One call that was timed in both files. Ratios are of B's time over A's: above one is slower."""

    before: Row
    after: Row
    raw: Estimate  # with the noise within the two runs
    corrected: Estimate  # the drift divided out, with the scatter between runs too
    paired: Estimate | None  # of the times over the baseline's, each paired within its own run
    apart: Estimate | None  # where there is no interval: corrected, from quartile to quartile
    control: bool
    ours: bool  # neither someone else's nor interpreted
    threshold: float

    @property
    def judged(self) -> bool:
        """Whether the gate judges this change."""
        return self.ours and not self.control and not self.undecided

    @property
    def undecided(self) -> bool:
        return self._side is None

    @property
    def direction(self) -> str:
        """Which side of one the ratio lies on for certain; undecided where too few rounds leave that open."""
        return {1: "slower", -1: "faster", 0: "unchanged", None: "undecided"}[self._side]

    @property
    def _side(self) -> int | None:
        """The side by the whole interval; without one, by quartiles that lie apart past the threshold."""
        if self.apart is None:
            return _side(self.corrected)
        alone = any((row.rounds or 1) < 2 for row in (self.before, self.after))
        least = 1 + max(self.threshold, ONE_ROUND if alone else 0)
        return 1 if self.apart.low > least else -1 if self.apart.high < 1 / least else None

    @property
    def past(self) -> bool:
        """Whether the change is certainly larger than the threshold, by the paired ratio too."""
        side = self._side
        if not side or side * math.log(self.corrected.value) <= math.log1p(self.threshold):
            return False
        if self.paired is None:
            return True
        half = math.log1p(self.threshold / 2)
        return _side(self.paired) in (side, None) and side * math.log(self.paired.value) > half

    @property
    def size(self) -> float:
        return abs(math.log(self.corrected.value))


@dataclass(frozen=True)
class Transition:
    """A call that was timed, refused or found wrong in one file, and not so in the other."""

    kind: str
    before: Row | None
    after: Row | None

    @property
    def row(self) -> Row:
        return self.after or self.before

    @property
    def judged(self) -> bool:
        """Whether it is about this project's own code."""
        return self.row.level not in FOREIGN


@dataclass(frozen=True)
class Comparison:
    changes: list[Change]  # largest first
    transitions: list[Transition]
    still_wrong: list[Row]
    drift: Drift
    calls: int  # in both files, whatever became of them

    @property
    def decided(self) -> bool:
        """Whether any call of this project's own code was judged, by its time or by what became of it."""
        kept = (t for t in self.transitions if t.before is not None and t.after is not None)
        return any(change.judged for change in self.changes) or any(t.judged for t in kept)


def state(row: Row | None) -> str:
    if row is None:
        return "absent"
    return "wrong" if row.wrong else "unsupported" if row.unsupported else "timed"


def compare(
    before: Sequence[Row],
    after: Sequence[Row],
    *,
    chosen: Callable[[Row], bool] = lambda row: True,
    threshold: float = 0.05,
    correct: bool = True,
    same_machine: bool = True,
) -> Comparison:
    """Pair the rows of two files, of one machine each. `chosen` narrows the result; the drift is that of all rows.

    What is larger than `threshold`, a share of the time, is past it.

    Raises:
        ResultsError: a row has neither a reason nor a usable time.
    """
    before, after = in_place_of_levels(before, after), in_place_of_levels(after, before)
    old, new = ({row.key[:-1]: row for row in found} for found in (before, after))
    keys = list(dict.fromkeys([*old, *new]))
    both = [key for key in keys if state(old.get(key)) == state(new.get(key)) == "timed"]
    times = {key: (_time(old[key]), _time(new[key])) for key in both}
    raw = {key: b.over(a) for key, (a, b) in times.items()}
    is_control = functools.partial(_is_control, same_machine=same_machine)
    controls = [raw[key] for key in both if is_control(old[key], new[key])]
    drift = _drift([ratio.value for ratio in controls], correct, same_machine)
    pair = correct and same_machine
    changes = [
        _change(old[key], new[key], raw[key], drift, is_control(old[key], new[key]), pair, threshold)
        for key in both
        if chosen(new[key])
    ]
    transitions, still_wrong = [], []
    # Rows in the order of the climb, not of the files, so that the output does not depend on who was measured first.
    for row in by_climb(new.get(key, old.get(key)) for key in keys):
        a, b = old.get(row.key[:-1]), new.get(row.key[:-1])
        if chosen(row) and (kind := _transition(state(a), state(b))):
            transitions.append(Transition(kind, a, b))
        elif chosen(row) and state(b) == "wrong":
            still_wrong.append(b)
    calls = sum(key in old and chosen(row) for key, row in new.items())
    return Comparison(sorted(changes, key=lambda c: -c.size), transitions, still_wrong, drift, calls)


def in_place_of_levels(found: Sequence[Row], other: Sequence[Row]) -> list[Row]:
    """The rows of one file, with a row for each variant that either file names in place of one for its whole level.

    Where a level cannot be loaded, its variants have no names there, and one refusal stands for all of them. It stands
    for those that an older build has left in the same file too, and for none once a row of that level is newer.
    """
    refused = {_level(row): row for row in found if _is_level(row)}
    for row in found:
        if not _is_level(row) and _level(row) in refused and row.when >= refused[_level(row)].when:
            del refused[_level(row)]
    names: dict[tuple[str, ...], dict[str, None]] = {}
    for row in (*found, *other):
        if not _is_level(row):
            names.setdefault(_level(row), {})[row.backend] = None
    told = [row for row in found if _level(row) not in refused and not _is_level(row)]
    for level, row in refused.items():
        told += [dataclasses.replace(row, backend=name) for name in names.get(level, [row.backend])]
    return told


def _is_level(row: Row) -> bool:
    return row.backend == row.level and row.unsupported is not None


def _level(row: Row) -> tuple[str, ...]:
    return (row.op, row.level, row.pass_, row.dtype, row.shape)


def _time(row: Row) -> Estimate:
    if row.us is None:
        raise ResultsError(f"{row.op} {row.backend} {row.pass_} {row.dtype} {row.shape}: neither a time nor a reason")
    return time_of(row)


def _is_control(before: Row, after: Row, same_machine: bool) -> bool:
    """Whether the same code was timed in both, so that a ratio other than one is the machine's."""
    if not same_machine or before.interpreted or after.interpreted:
        return False
    if before.backend in BANDWIDTHS:
        return True
    timed = before.backend == "torch.builtin" or before.backend in PRODUCTS
    return timed and _same_software(before, after)


def _same_software(before: Row, after: Row) -> bool:
    return (before.torch, before.cuda) == (after.torch, after.cuda)


def _drift(ratios: Sequence[float], correct: bool, same_machine: bool) -> Drift:
    if not same_machine:
        return Drift(reason="the machines differ")
    if len(ratios) < MIN_CONTROLS:
        return Drift(controls=len(ratios), reason=f"fewer than {MIN_CONTROLS} controls")
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.median(logs)
    scatter = MAD_TO_DEVIATION * statistics.median(abs(x - middle) for x in logs)
    return Drift(math.exp(middle), scatter, len(ratios), correct, None if correct else "raw ratios were asked for")


def _change(
    before: Row, after: Row, raw: Estimate, drift: Drift, control: bool, pair: bool, threshold: float
) -> Change:
    def corrected(ratio: Estimate) -> Estimate:
        return ratio.scaled(1 / drift.factor if drift.applied else 1.0).widened(drift.deviation)

    apart = None
    if raw.low is None:
        a, b = quartiles_of(before), quartiles_of(after)
        apart = corrected(Estimate(raw.value, b.low / a.high, b.high / a.low))
    pair &= before.backend != baseline_of(before.op) and _same_software(before, after)
    old, new = speedup_of(before), speedup_of(after)
    paired = old.over(new) if old and new and pair else None
    foreign = before.level in FOREIGN or before.interpreted or after.interpreted
    return Change(before, after, raw, corrected(raw), paired, apart, control, not foreign, threshold)


def _transition(before: str, after: str) -> str | None:
    if before == after:
        return None
    if after == "absent":
        return "vanished"
    if after == "wrong":
        return "became wrong"
    if before == "absent":
        return "appeared"
    if after == "timed":
        return "mended" if before == "wrong" else "became supported"
    return "became unsupported" if before == "timed" else "now refused"


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


@dataclass(frozen=True)
class Group:
    """The changes of one operation and backend."""

    op: str
    backend: str
    changes: list[Change]

    def count(self, direction: str) -> int:
        return sum(change.direction == direction for change in self.changes)

    @property
    def raw(self) -> float:
        return geometric_mean([change.raw.value for change in self.changes])

    @property
    def corrected(self) -> float:
        return geometric_mean([change.corrected.value for change in self.changes])


def groups(changes: Sequence[Change]) -> list[Group]:
    """The changes by operation and backend, in the order of the climb."""
    by_key = {change.after.key: change for change in changes}
    found: dict[tuple[str, str], list[Change]] = {}
    for row in by_climb(change.after for change in changes):
        found.setdefault((row.op, row.backend), []).append(by_key[row.key])
    return [Group(op, backend, members) for (op, backend), members in found.items()]
