"""Time calls: cold caches, no launch gaps, rounds that interleave what is compared."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from bench.measure import intervals

#: A call under test: takes the index of the copy of the inputs that it is to use.
Call = Callable[[int], Any]

SAMPLE_S = 1e-3  # least length of a sample, far above the resolution of the clock
LONG_CALL_S = 5e-3  # a call this long is a sample by itself: a warm L2 or a launch gap is negligible
HICCUP_S = 0.5  # a first call shorter than this is repeated: the host may have delayed it
HOST_CALL_S = 1e-3  # a call this long is too slow to issue again and again for the host's cost of it
APART = 4  # samples longer than this many times the shortest, and than `LONG_CALL_S`, get rounds of their own
SLOW_S = 2.0  # budget of a call so slow that it gets the least number of rounds
MAX_COPIES = 1024
MAX_ROUNDS = 100
MIN_ROUNDS = intervals.LEAST_VALUES
SETTLE_S = 0.1  # power limits move clocks within tenths of a second
SETTLE_ROUNDS = 5
SETTLE_WITHIN = 0.01


def l2_bytes(device: torch.device) -> int:
    """Size of the L2 cache; zero on a CPU, whose caches the harness does not empty."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def copies_needed(nbytes: int, device: torch.device) -> int:
    """How many copies of `nbytes` of inputs are needed for twice the L2 to pass between two uses of one."""
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
    """A call ready to be timed: ``run()`` issues `calls` calls. A sample is `repeats` runs, about `seconds` long."""

    run: Callable[[], Any]
    calls: int
    repeats: int
    graph: bool | None
    device: torch.device
    seconds: float
    kept: Any = None  # what a graph reads but does not keep alive: copies of inputs, tensors saved by a forward

    def __call__(self) -> None:
        for _ in range(self.repeats):
            self.run()


class _Kept:
    """Keeps the newest results alive, up to twice the L2, so that successive outputs lie in different memory."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held, self.results = limit, 0, deque()

    def __call__(self, result: Any) -> None:
        self.results.append(result)
        self.held += nbytes(result)
        while len(self.results) > 1 and self.held - nbytes(self.results[0]) >= self.limit:
            self.held -= nbytes(self.results.popleft())


def prepare(
    call: Call, copies: int, device: torch.device, *, seconds: float | None = None, capture: bool = True
) -> Launch:
    """Warm a call up, estimate it, and on a GPU capture as many calls as a sample needs in a CUDA graph.

    Must run inside :func:`side_stream` on a GPU. `call` takes indices from 0 to ``copies - 1``. `seconds` is the wall
    time of an earlier call, if there was one: a slow call is then not repeated. Without `capture`, calls are launched
    one by one, with launch gaps.
    """
    keep = _Kept(2 * l2_bytes(device))
    if seconds is None:
        wall(lambda: call(0), device)
        seconds = wall(lambda: call(0), device)[0]
    if 2 * LONG_CALL_S <= seconds < HICCUP_S:
        seconds = min(seconds, wall(lambda: call(0), device)[0])
    if seconds < 2 * LONG_CALL_S:
        seconds = min(seconds, *(wall(lambda: call(0), device)[0] for _ in range(3)))
    if seconds > LONG_CALL_S:
        calls = 1
    else:
        # A whole number of cycles through the copies: the distance between two uses of a copy is always the same.
        calls = copies * math.ceil(SAMPLE_S / seconds / copies)
        for i in range(1, copies):  # the set-up of a copy's first use must not be captured
            call(i)

    def eager() -> None:
        for i in range(calls):
            keep(call(i % copies))

    graph = _capture(eager) if device.type == "cuda" and capture else None
    run = graph.replay if graph is not None else eager
    launch = Launch(run, calls, 1, graph is not None if device.type == "cuda" else None, device, seconds, call)
    if seconds > LONG_CALL_S:
        return launch
    launch()
    once = sample([launch])[0].seconds * launch.calls
    launch.repeats = max(1, math.ceil(SAMPLE_S / once)) if once < SAMPLE_S else 1
    launch.seconds = once * launch.repeats
    return launch


def _capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
    """`run` as a CUDA graph, or None where it does something that cannot be captured, or memory for it is short."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    _drop_workspaces()  # so that cuBLAS's are of the graph's own memory
    try:
        # Not torch.cuda.graph(): it collects garbage and empties the cache each time, a tenth of a second a variant.
        # Other threads stay free to ask for the state of their streams, as XLA's monitor does: refused, it closes them.
        with without_collecting():
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        torch.cuda.synchronize()
    except Exception:  # whatever the implementation raises when captured, it can still be timed call by call
        torch.cuda.synchronize()
        return None
    finally:
        _drop_workspaces()  # nothing else may use those of the graph
    return graph


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """No garbage is collected: it may free what a capture forbids to free, such as the modules of kernels."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _drop_workspaces() -> None:
    """Let cuBLAS allocate its workspaces anew.

    A graph does not keep alive those that are there before it. Who records another, as ``compile.reduce_overhead``
    does, frees them (torch/_inductor/cudagraph_trees.py): replays of the first graph then write over others' memory.
    """
    drop = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if drop is not None:
        drop()


def side_stream(device: torch.device) -> Any:
    """A stream that can be captured, as a context; autograd's backward follows its forward onto it."""
    if device.type != "cuda":
        return torch.cuda.stream(None)
    stream = _side(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


@functools.cache
def _side(device: torch.device) -> Any:
    """One stream for all cases: whoever must order a call after every stream that was used would find 32 of them."""
    return torch.cuda.Stream(device)


class Span(NamedTuple):
    """One sample: seconds of one call, and when the sample began and ended, by ``time.perf_counter()``."""

    seconds: float
    begin: float
    end: float


def sample(launches: Sequence[Launch]) -> list[Span]:
    """One sample of each, one after the other."""
    device = launches[0].device
    if device.type != "cuda":
        spans = []
        for launch in launches:
            begin = time.perf_counter()
            launch()
            end = time.perf_counter()
            spans.append(Span((end - begin) / (launch.calls * launch.repeats), begin, end))
        return spans
    others = torch.empty(2 * l2_bytes(device) // 4, dtype=torch.float32, device=device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in launches]
    for _ in range(3):  # keeps the device busy while the host queues all launches, so that no event waits for the host
        others.amax()
    for launch, (start, end) in zip(launches, events, strict=True):
        # Evicts the inputs from the L2. Reads only: a dirty line would be written back during the timed call.
        others.amax()
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize(device)
    # The end of the last launch, which the host has just seen, aligns the device's clock with the host's.
    now, last = time.perf_counter(), events[-1][1]
    return [
        Span(
            start.elapsed_time(end) * 1e-3 / (launch.calls * launch.repeats),
            now - start.elapsed_time(last) * 1e-3,
            now - end.elapsed_time(last) * 1e-3,
        )
        for launch, (start, end) in zip(launches, events, strict=True)
    ]


def settle(launches: Sequence[Launch], cap_s: float) -> bool:
    """Run uncounted rounds until their times agree, so that counted rounds start with settled clocks.

    Returns whether the rounds of the last `SETTLE_S` (at least `SETTLE_ROUNDS`) agreed within `SETTLE_WITHIN`; else
    `cap_s` seconds have passed. A call so slow that a few would use them up is left out.
    """
    quick = [launch for launch in launches if launch.seconds < cap_s / SETTLE_ROUNDS]
    begin = time.perf_counter()
    rounds: deque[tuple[float, float]] = deque()
    while quick:
        spans = sample(quick)
        now = time.perf_counter()
        rounds.append((now, sum(span.end - span.begin for span in spans)))
        while len(rounds) > SETTLE_ROUNDS and rounds[1][0] < now - SETTLE_S:
            rounds.popleft()
        totals = [total for _, total in rounds]
        enough = len(totals) >= SETTLE_ROUNDS and now - begin >= SETTLE_S
        if enough and max(totals) <= (1 + SETTLE_WITHIN) * min(totals):
            return True
        if now - begin >= cap_s:
            return False
    return True


def apart(launches: Mapping[str, Launch]) -> set[str]:
    """Launches so slow that they need rounds of their own.

    A naive kernel draws a fraction of a fast one's power for a hundred times as long. In one round with it, a fast
    kernel would start on a cool GPU and run at clocks that it cannot sustain.
    """
    shortest = min((launch.seconds for launch in launches.values()), default=0.0)
    return {name for name, launch in launches.items() if launch.seconds > max(LONG_CALL_S, APART * shortest)}


def interleave(
    launches: Mapping[str, Launch],
    budget_s: float,
    baseline: str | None = None,
    observe: Callable[[int, str, Span], None] | None = None,
    patience_s: float = SLOW_S,
    most: int = MAX_ROUNDS,
) -> dict[str, list[float | None]]:
    """Seconds of one call of each, in `most` rounds or fewer; None in those that a slow one sits out.

    Each launch gets an equal share of `budget_s`. A slow one gets at least `MIN_ROUNDS` rounds, or as many as fit into
    `patience_s`, but at least one. `baseline` runs in every round, so that every other launch is paired with it. The
    order is shuffled each round (with a fixed seed), so that heat left by one call affects all alike. `observe`
    receives every sample: round, name, span.
    """
    names = list(launches)
    share = budget_s / max(len(names), 1)

    def affordable(name: str) -> int:
        seconds = launches[name].seconds
        least = min(MIN_ROUNDS, max(1, int(patience_s / seconds)))
        return max(least, min(most, int(share / seconds)))

    rounds = affordable(baseline) if baseline in launches else max(map(affordable, names), default=0)
    turns = {name: min(rounds, affordable(name)) for name in names}
    times: dict[str, list[float | None]] = {name: [None] * rounds for name in names}
    order = random.Random(0)
    for r in range(rounds):
        # Spreads the samples of a slow launch evenly over the rounds.
        due = [n for n in names if (r + 1) * turns[n] // rounds > r * turns[n] // rounds]
        order.shuffle(due)
        for name, span in zip(due, sample([launches[n] for n in due]) if due else [], strict=True):
            times[name][r] = span.seconds
            if observe is not None:
                observe(r, name, span)
    return times


def issue(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds to issue a call to an idle device, without waiting for it."""
    synchronize(device)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def host_seconds(calls: Sequence[Callable[[], Any]], device: torch.device, budget_s: float = 0.04) -> list[float]:
    """Wall time of issuing one call of each, without waiting for the device; the launch queue never fills.

    Returns the smallest over batches, because a disturbance only adds time. Batches of all calls alternate, so that a
    slow phase of the host affects all of them.
    """
    count = 20 if device.type == "cuda" else 1
    for call in calls:
        for _ in range(3):
            wall(call, device)
    best, until = [math.inf] * len(calls), time.perf_counter() + budget_s
    for batch in range(1000):
        if batch >= 5 and time.perf_counter() > until:
            break
        for i, call in enumerate(calls):
            synchronize(device)
            start = time.perf_counter()
            for _ in range(count):
                call()
            best[i] = min(best[i], (time.perf_counter() - start) / count)
    synchronize(device)
    return best
