"""Time what several ranks do together: interleaved rounds, each as long as its slowest rank."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bench.measure import intervals
from bench.ranks import Group

SAMPLE_S = 4e-3  # least length of a sample: what ranks differ by at its start is far below
MAX_REPEATS = 200
MAX_ROUNDS = 30
MIN_ROUNDS = intervals.LEAST_VALUES + 1
LONG_S = 0.3  # calls this long get the fewest rounds
LONG_ROUNDS = 3
#: Seconds in which the host launches ahead, beside those that it takes for the calls: no kernel waits for it.
HEAD_START_S = 1e-3
#: GPU clock cycles a second, at least as many as any GPU has.
CYCLES = 2e9


@dataclass(frozen=True)
class Way:
    """One way to do a problem: a call of no arguments. `alone`: rank 0 runs it while the others wait."""

    call: Callable[[], Any]
    alone: bool = False


class Cost(NamedTuple):
    """Seconds of a call, of the slowest rank: until the host has launched it, and until the GPU is done."""

    host: float
    whole: float


def _synchronize(group: Group) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)


def _sample(group: Group, way: Way, repeats: int, host_s: float) -> float:
    """Seconds of one call on this rank, which the host launches in `host_s`; zero on a rank that only waits."""
    group.wait()
    if way.alone and group.rank != 0:
        return 0.0
    if group.device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            way.call()
        return (time.perf_counter() - start) / repeats
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(int(CYCLES * (HEAD_START_S + repeats * host_s)))
    if not way.alone and group.size > 1:
        dist.all_reduce(torch.zeros(1, device=group.device))  # every rank's GPU starts at once
    start.record()
    for _ in range(repeats):
        way.call()
    end.record()
    _synchronize(group)
    return start.elapsed_time(end) * 1e-3 / repeats


def warm_up(group: Group, ways: Mapping[str, Way]) -> tuple[dict[str, Cost], dict[str, str]]:
    """Call each way twice on every rank, so that what compiles does so everywhere at once.

    Returns the cost of a second call by name, and of those that raise the reason.
    """
    costs: dict[str, Cost] = {}
    refused: dict[str, str] = {}
    for name, way in ways.items():

        def twice(way: Way = way) -> tuple[float, float]:
            way.call()
            _synchronize(group)
            start = time.perf_counter()
            way.call()
            launched = time.perf_counter() - start
            _synchronize(group)
            return launched, time.perf_counter() - start

        group.wait()
        found, reason = group.agree(twice)
        if reason is not None:
            refused[name] = reason
            if group.device.type == "cuda":
                torch.cuda.empty_cache()
        else:
            costs[name] = Cost(*(max(times) for times in zip(*group.gather(found), strict=True)))
    return costs, refused


def rounds(group: Group, ways: Mapping[str, Way], costs: Mapping[str, Cost], budget_s: float) -> dict[str, list[float]]:
    """Seconds of one call of each way, round by round, of the slowest rank.

    `costs` are those of a call of each; only its ways run. Each gets `budget_s` of rounds, in an order drawn anew.
    """
    plan = {}
    for name, cost in costs.items():
        estimate = max(cost.whole, 1e-6)
        repeats = max(1, min(MAX_REPEATS, math.ceil(SAMPLE_S / estimate)))
        least = LONG_ROUNDS if estimate > LONG_S else MIN_ROUNDS
        plan[name] = repeats, max(least, min(MAX_ROUNDS, int(budget_s / (estimate * repeats))))
    own: dict[str, list[float]] = {name: [] for name in plan}
    order, most = random.Random(0), max((count for _, count in plan.values()), default=0)
    for r in range(most):
        # Spreads the samples of a slow way evenly over the rounds.
        due = [name for name, (_, count) in plan.items() if (r + 1) * count // most > r * count // most]
        order.shuffle(due)  # alike on every rank
        for name in due:
            own[name].append(_sample(group, ways[name], plan[name][0], costs[name].host))
    ranks = group.gather(own)
    return {name: [max(times) for times in zip(*(rank[name] for rank in ranks), strict=True)] for name in plan}
