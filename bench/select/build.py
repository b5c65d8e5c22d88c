"""Makes the entries of a table from measured points, and holds half of them out to tell what a table is worth."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bench.rows.regret import NEAR
from bench.select.points import AUTO_LEVELS, Point
from kernel_ladder.selection import tables
from kernel_ladder.selection.tables import Entry

#: A table is kept where its choices are faster than the rules' by this factor, as geometric mean of its points,
LEAST_MEAN_GAIN = 1.03
#: or where the rules' worst choice takes longer than the best rung by more than this factor, and the table's does not.
MOST_REGRET = 1.10
#: Digits of a regret as the table's file has it.
DIGITS = 4
#: Calls under this many points per name and pass get no table.
LEAST_POINTS = 2


class Regret(NamedTuple):
    """Times of choices over those of the best candidates: geometric mean, 95th percentile, worst and where."""

    mean: float
    p95: float
    worst: float
    call: str
    points: int
    near: int  # points whose regret is at most NEAR


class Part(NamedTuple):
    """What became of one operation, backend's name and pass."""

    op: str
    backend: str
    pass_: str
    entries: tuple[Entry, ...]
    rules: Regret
    table: Regret
    held_out_rules: Regret | None
    held_out_table: Regret | None

    @property
    def kept(self) -> bool:
        """Whether the table is better than the rules: at its points, and no worse at those held out."""
        gain = self.rules.mean / self.table.mean
        mends_the_worst = round(self.rules.worst, DIGITS) > MOST_REGRET >= round(self.table.worst, DIGITS)
        no_worse = self.held_out_table is None or (
            self.held_out_rules is not None and self.held_out_table.mean <= self.held_out_rules.mean
        )
        return (gain >= LEAST_MEAN_GAIN or mends_the_worst) and no_worse

    @property
    def chosen(self) -> Regret:
        """The regret of what selection does: by the table where it is kept, by the rules elsewhere."""
        return self.table if self.kept else self.rules

    @property
    def chosen_held_out(self) -> Regret | None:
        """The same of the calls held out, by the table of the other half."""
        return self.held_out_table if self.kept else self.held_out_rules


def has_choice(point: Point, backend: str) -> bool:
    """Whether the rule's choice and another have times: else the rule stays."""
    return point.usual(backend) is not None and len(point.candidates(backend)) > 1


def entries_of(points: Iterable[Point], backend: str) -> tuple[Entry, ...]:
    """The entries of points; those of equal features are one, of the candidates that all of them timed."""
    alike: dict[tuple[str, tuple[int, ...]], list[Point]] = {}
    for point in points:
        if point.features.category:
            alike.setdefault(point.features, []).append(point)
    found = []
    for (category, sizes), group in alike.items():
        names = set.intersection(*(set(point.candidates(backend)) for point in group))
        gains = {name: _mean(_gain(point, backend, name) for point in group) for name in sorted(names)}
        best = max(gains, key=lambda name: gains[name])
        better, gain = (best, round(gains[best], 4)) if gains[best] >= tables.NEAR_GAIN else (None, 1.0)
        found.append(Entry(category, sizes, better, gain, tuple(gains), f"{group[0].call} {group[0].dtype}"))
    return tuple(found)


def _gain(point: Point, backend: str, name: str) -> float:
    candidates = point.candidates(backend)
    return candidates[point.usual(backend) or ""] / candidates[name]


def _mean(ratios: Iterable[float]) -> float:
    """The geometric mean."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs))


def chosen_by(entries: Sequence[Entry], point: Point, backend: str) -> str:
    """What a table chooses at a point; the rule's choice where it names nothing else."""
    usual = point.usual(backend)
    assert usual is not None
    entry = tables.better_than(usual, tuple(entries), point.features)
    # A candidate without a time refuses the call: the rule's choice follows.
    return entry.better if entry is not None and entry.better in point.candidates(backend) else usual


def regret(choices: Iterable[tuple[Point, str]], backend: str) -> Regret | None:
    """The regret of choices; None of none."""
    found = []
    for point, name in choices:
        candidates = point.candidates(backend)
        found.append((candidates[name] / min(candidates.values()), f"{point.call} {point.dtype}"))
    if not found:
        return None
    found.sort()
    return Regret(
        _mean(ratio for ratio, _ in found), found[math.ceil(0.95 * len(found)) - 1][0], *found[-1], len(found),
        sum(ratio <= NEAR for ratio, _ in found),
    )  # fmt: skip


def is_held_out(point: Point) -> bool:
    """Half of the calls, the same on every machine: all passes and dtypes of a call together."""
    return zlib.crc32(f"{point.op} {point.call}".encode()) % 2 == 1


def parts(points: Sequence[Point]) -> list[Part]:
    """One part for each operation, backend's name and pass that has points."""
    found = []
    kinds = dict.fromkeys((p.op, p.pass_) for p in points)
    for op, pass_ in kinds:
        for backend in ("auto", *AUTO_LEVELS):
            if backend == "torch":
                continue
            own = [p for p in points if (p.op, p.pass_) == (op, pass_) and has_choice(p, backend)]
            if len(own) >= LEAST_POINTS:
                found.append(_part(op, backend, pass_, own))
    return found


def _part(op: str, backend: str, pass_: str, own: Sequence[Point]) -> Part:
    def rules(of: Iterable[Point]) -> Regret | None:
        return regret(((p, p.usual(backend) or "") for p in of), backend)

    def table(learned: Sequence[Entry], of: Iterable[Point]) -> Regret | None:
        return regret(((p, chosen_by(learned, p, backend)) for p in of), backend)

    every = entries_of(own, backend)
    kept, out = [p for p in own if not is_held_out(p)], [p for p in own if is_held_out(p)]
    of_rules, of_table = rules(own), table(every, own)
    assert of_rules is not None
    assert of_table is not None
    return Part(op, backend, pass_, every, of_rules, of_table, rules(out), table(entries_of(kept, backend), out))
