"""Time calls: cold caches, no launch gaps, rounds that interleave what is compared."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

#: A call under test: takes the index of the copy of the inputs that it is to use.
Call = Callable[[int], Any]

SAMPLE_S = 1e-3  # one sample lasts at least this long, so that the clock's resolution does not show
LONG_CALL_S = 5e-3  # from here on one call is a sample: neither a warm L2 nor a launch gap shows any more
SLOW_S = 2.0  # from here on one round must do
MAX_COPIES = 1024
MAX_ROUNDS = 25
MIN_ROUNDS = 3


def l2_bytes(device: torch.device) -> int:
    """Size of the L2 cache; zero on a CPU, whose caches are left as they come."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def copies_needed(nbytes: int, device: torch.device) -> int:
    """How many copies of inputs of `nbytes` make at least twice the L2 pass between two uses of one."""
    return min(MAX_COPIES, 1 + math.ceil(2 * l2_bytes(device) / max(nbytes, 1)))


def nbytes(value: Any) -> int:
    """Bytes of the tensors in a (nested) result."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(nbytes, value)) if isinstance(value, (tuple, list)) else 0


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Wall time of one call in seconds, until the device is done, and what it returned."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return time.perf_counter() - start, result


@dataclass
class Launch:
    """Something ready to be timed: ``run()`` issues `calls` calls, `repeats` times a sample."""

    run: Callable[[], Any]
    calls: int
    repeats: int
    graph: bool | None
    device: torch.device

    def __call__(self) -> None:
        for _ in range(self.repeats):
            self.run()


class _Kept:
    """Keeps the newest results alive, twice the L2 of them, so that outputs take turns in memory as inputs do."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held, self.results = limit, 0, deque()

    def __call__(self, result: Any) -> None:
        self.results.append(result)
        self.held += nbytes(result)
        while len(self.results) > 1 and self.held - nbytes(self.results[0]) >= self.limit:
            self.held -= nbytes(self.results.popleft())


def prepare(call: Call, copies: int, device: torch.device) -> Launch:
    """Warm a call up, estimate it, and on a GPU capture as many calls as a sample needs in a CUDA graph.

    Must run inside :func:`side_stream` on a GPU. `call` takes indices from 0 to ``copies - 1``.
    """
    keep = _Kept(2 * l2_bytes(device))
    wall(lambda: call(0), device)
    estimate = wall(lambda: call(0), device)[0]
    if estimate < SLOW_S / 10:
        estimate = min(estimate, *(wall(lambda: call(0), device)[0] for _ in range(3)))
    if estimate > LONG_CALL_S:
        calls = 1
    else:
        # Whole turns through the copies, so that the last use of a copy is as far from the next as any other.
        calls = copies * math.ceil(SAMPLE_S / estimate / copies)
        for i in range(1, copies):  # whatever a copy's first use sets up must not be captured
            call(i)

    def eager() -> None:
        for i in range(calls):
            keep(call(i % copies))

    graph = _capture(eager) if device.type == "cuda" else None
    run = graph.replay if graph is not None else eager
    launch = Launch(run, calls, 1, graph is not None if device.type == "cuda" else None, device)
    if estimate > LONG_CALL_S:
        return launch
    launch()
    once = sample([launch])[0] * launch.calls
    launch.repeats = max(1, math.ceil(SAMPLE_S / once)) if once < SAMPLE_S else 1
    return launch


def _capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
    """`run` as a CUDA graph, or None where it does something that cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # Not torch.cuda.graph(): it collects garbage and empties the cache each time, a tenth of a second a variant.
    # Garbage collected during the capture could free what the capture forbids to free, so it waits.
    collecting = gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin()
        try:
            run()
        finally:
            graph.capture_end()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever the implementation raises when captured, it can still be timed call by call
        torch.cuda.synchronize()
        return None
    finally:
        if collecting:
            gc.enable()
    return graph


def side_stream(device: torch.device) -> Any:
    """A stream that can be captured, as a context; autograd's backward follows its forward onto it."""
    if device.type != "cuda":
        return torch.cuda.stream(None)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


def sample(launches: Sequence[Launch]) -> list[float]:
    """Seconds of one call of each, launched one after the other."""
    if launches[0].device.type != "cuda":
        times = []
        for launch in launches:
            start = time.perf_counter()
            launch()
            times.append((time.perf_counter() - start) / (launch.calls * launch.repeats))
        return times
    device = launches[0].device
    flush = torch.empty(2 * l2_bytes(device), dtype=torch.uint8, device=device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in launches]
    for _ in range(3):  # keeps the device busy while the host gets ahead, so that no event waits for the host
        flush.zero_()
    for launch, (start, end) in zip(launches, events, strict=True):
        flush.zero_()  # leaves nothing of the call before in the L2
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize(device)
    return [
        start.elapsed_time(end) * 1e-3 / (launch.calls * launch.repeats)
        for launch, (start, end) in zip(launches, events, strict=True)
    ]


def interleave(
    launches: Mapping[str, Launch], budget_s: float, baseline: str | None = None, warmup_s: float = 0.0
) -> dict[str, list[float | None]]:
    """Seconds of one call of each, round by round; None in the rounds that a slow one sits out.

    Each gets an equal share of `budget_s`, at least a few rounds, and one where a call takes seconds. `baseline`
    is in every round, so that every other can be paired with it. The order turns from round to round.
    """
    names = list(launches)
    until = time.perf_counter() + warmup_s
    cost = {name: sample([launches[name]])[0] * launches[name].calls * launches[name].repeats for name in names}
    quick = [launches[name] for name in names if cost[name] < warmup_s / 4]
    while quick and time.perf_counter() < until:
        sample(quick)
    share = budget_s / max(len(names), 1)

    def affordable(name: str) -> int:
        if cost[name] > SLOW_S:
            return 1
        return max(MIN_ROUNDS, min(MAX_ROUNDS, int(share / cost[name])))

    rounds = affordable(baseline) if baseline in launches else max(map(affordable, names), default=0)
    turns = {name: min(rounds, affordable(name)) for name in names}
    times: dict[str, list[float | None]] = {name: [None] * rounds for name in names}
    for r in range(rounds):
        # Spread a slow one's turns evenly over the rounds.
        due = [n for n in names if (r + 1) * turns[n] // rounds > r * turns[n] // rounds]
        due = due[r % len(due) :] + due[: r % len(due)] if due else due
        for name, seconds in zip(due, sample([launches[n] for n in due]) if due else [], strict=True):
            times[name][r] = seconds
    return times


def quartiles(times: Sequence[float | None]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the rounds that were run."""
    q1, median, q3 = np.percentile([t for t in times if t is not None], [25, 50, 75])
    return float(q1), float(median), float(q3)


def paired_ratio(numerator: Sequence[float | None], denominator: Sequence[float | None]) -> float | None:
    """Median over the rounds that both ran of the ratio within the round: drift hits both alike and cancels."""
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True) if a is not None and b is not None]
    return statistics.median(ratios) if ratios else None


def host_seconds(call: Callable[[], Any], device: torch.device, budget_s: float = 0.05) -> float:
    """Wall time of issuing one call, without waiting for the device; the launch queue never fills.

    The smallest over batches: whatever disturbs the host only ever adds.
    """
    calls = 20 if device.type == "cuda" else 1
    for _ in range(3):
        wall(call, device)
    best, until = math.inf, time.perf_counter() + budget_s
    for batch in range(1000):
        if batch >= 5 and time.perf_counter() > until:
            break
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    synchronize(device)
    return best
