"""How the benchmark measures: intervals, settling, rounds, cold caches, graphs; and where a sweep's time goes.

Timings are proved on known quantities: twice the work, a tenth more bytes, two copies of one call. See `TRIES` for
what other processes do to them.
"""

from __future__ import annotations

import dataclasses
import math
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench.measure import candidates, cases, ceiling_kernels, ceilings, intervals, phases, timing
from bench.measure.selection import AT_QUICK_CASES, LONG_TUNING, Group, Selection
from kernel_ladder.spec import PASSES, Case
from kernel_ladder.table import Variant

from ..conftest import DEVICE, TRIES, alone, needs_gpu

pytestmark = pytest.mark.xdist_group("timing")

CPU = torch.device("cpu")


@pytest.mark.parametrize("count", [6, 7, 8, 11, 20, 29, 30, 31, 50, 100])
@pytest.mark.parametrize("draw", ["normal", "lognormal", "exponential"])
def test_intervals_cover_the_true_median(draw, count):
    """About five of a hundred miss: the ends are values, and no pair of them holds 95 % exactly.

    The bootstrap's pair holds 93 to 96 %, here within the noise of 4000 draws; from few values it is at least 95 %.
    """
    generator = np.random.default_rng(1)
    true = {"normal": 0.0, "lognormal": 1.0, "exponential": math.log(2)}[draw]
    drawn = getattr(generator, draw)(size=(4000, count))
    found = [intervals.median_interval(values) for values in drawn]
    covered = np.mean([low <= true <= high for low, high in found])
    least, most = (0.92, 0.97) if count >= intervals.FEW else (0.94, 1)
    assert least <= covered <= most


def test_an_interval_narrows_with_the_root_of_the_rounds():
    generator = np.random.default_rng(2)

    def width(count):
        found = [intervals.median_interval(generator.normal(size=count)) for _ in range(200)]
        return np.mean([high - low for low, high in found])

    assert width(25) / width(100) == pytest.approx(2, rel=0.15)


@given(st.lists(st.floats(1e-6, 1e3), min_size=intervals.LEAST_VALUES, max_size=40), st.randoms())
def test_an_interval_is_the_same_in_any_order_and_holds_the_median(values, random):
    low, high = intervals.median_interval(values)
    assert min(values) <= low <= np.median(values) <= high <= max(values)
    shuffled = random.sample(values, len(values))
    assert intervals.median_interval(shuffled) == (low, high)
    assert intervals.median_interval([*values, None]) == (low, high)


def test_no_interval_from_too_few_rounds():
    assert intervals.median_interval([1.0, 2.0, 3.0, 4.0, 5.0, None]) == (None, None)
    assert intervals.median_interval([2.0] * 6) == (2.0, 2.0)


def test_pairing_cancels_drift():
    drift = [1.0, 1.1, 1.3, 1.8, 2.0, 2.5]
    assert intervals.paired_ratio([2 * d for d in drift], drift) == pytest.approx(2)
    low, high = intervals.median_interval(intervals.paired_ratios([2 * d for d in drift], drift))
    assert (low, high) == (pytest.approx(2), pytest.approx(2))
    assert intervals.paired_ratio([2.0, None, 2.6, None], [None, 1.1, 1.3, 1.8]) == pytest.approx(2)
    assert intervals.paired_ratio([1.0, None], [None, 1.0]) is None


@pytest.fixture
def simulated(monkeypatch):
    """Let samples take what a function says, in a time that passes only there."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def simulate(seconds_at):
        asked = []

        def sample(launches):
            spans = []
            for launch in launches:
                begin, seconds = clock.now, seconds_at(launch.seconds, clock.now)
                clock.now += seconds
                spans.append(timing.Span(seconds, begin, clock.now))
            asked.append(launches)
            return spans

        monkeypatch.setattr(timing, "sample", sample)
        return asked

    simulate.clock = clock
    return simulate


def launch_of(seconds: float) -> timing.Launch:
    return timing.Launch(lambda: None, 1, 1, None, CPU, seconds)


def test_settling_waits_until_the_rounds_agree(simulated):
    # A clock that falls by a fifth over 0.4 s, as under a power limit, and stays there.
    simulated(lambda seconds, now: seconds * (1 + 0.25 * min(now / 0.4, 1)))
    assert timing.settle([launch_of(0.004), launch_of(0.006)], cap_s=2.0)
    assert 0.4 < simulated.clock.now < 0.55


def test_settling_that_does_not_settle_ends_and_says_so(simulated):
    simulated(lambda seconds, now: seconds * (1 + 0.1 * (round(now * 1000) % 2)))
    assert not timing.settle([launch_of(0.001), launch_of(0.0015)], cap_s=0.5)
    assert 0.5 <= simulated.clock.now < 0.51


def test_steady_clocks_settle_at_once_and_slow_calls_are_left_out(simulated):
    asked = simulated(lambda seconds, now: seconds)
    quick = launch_of(0.001)
    assert timing.settle([quick, launch_of(3.0)], cap_s=0.5)
    assert simulated.clock.now == pytest.approx(timing.SETTLE_S, rel=0.05)
    assert all(launches == [quick] for launches in asked)
    assert timing.settle([launch_of(3.0)], cap_s=0.5)


def test_rounds_interleave_and_the_observer_sees_them(simulated):
    simulated(lambda seconds, now: seconds)
    seen = []
    launches = {"a": launch_of(0.001), "b": launch_of(0.001), "slow": launch_of(0.4), "slower": launch_of(3.0)}
    times = timing.interleave(launches, 0.04, "b", lambda r, name, span: seen.append((r, name, span)))
    counts = {name: sum(t is not None for t in each) for name, each in times.items()}
    assert counts == {"a": 10, "b": 10, "slow": 5, "slower": 1}  # 2 s have room for five of 0.4 s, and for none of 3 s
    assert len(seen) == sum(counts.values())
    assert all(times[name][r] == span.seconds for r, name, span in seen)
    first = [next(name for r, name, _ in seen if r == each) for each in range(10)]
    assert {"a", "b"} <= set(first), "the order must turn from round to round"
    ends = [span.end for *_, span in seen]
    assert ends == sorted(ends)


@alone
def test_slow_calls_get_fewer_rounds():
    slow = timing.Launch(lambda: time.sleep(0.03), 1, 1, None, CPU, 0.03)
    fast = timing.Launch(lambda: time.sleep(0.001), 1, 1, None, CPU, 0.001)
    times = timing.interleave({"slow": slow, "fast": fast}, budget_s=0.1, baseline="fast")
    counts = {name: sum(t is not None for t in each) for name, each in times.items()}
    assert counts["slow"] == timing.MIN_ROUNDS
    assert counts["fast"] == len(times["fast"]) > counts["slow"]
    assert intervals.paired_ratio(times["slow"], times["fast"]) > 1


def test_a_call_known_to_be_slow_is_not_made_to_be_estimated():
    calls = []
    launch = timing.prepare(calls.append, 3, CPU, seconds=1.5)
    assert calls == []
    assert (launch.calls, launch.repeats, launch.seconds) == (1, 1, 1.5)


def paired(numerator: timing.Launch, denominator: timing.Launch) -> list[float]:
    """Ratios of two prepared calls, round by round."""
    with timing.side_stream(DEVICE):
        timing.settle([numerator, denominator], cap_s=0.3)
        times = timing.interleave({"a": numerator, "b": denominator}, budget_s=0.3, baseline="b")
    return intervals.paired_ratios(times["a"], times["b"])


def hold(measure, accepts, expected: str) -> None:
    """Measure until the ratios are what is known, at most `TRIES` times."""
    found = []
    for _ in range(TRIES):
        ratios = measure()
        found.append((float(np.median(ratios)), *intervals.median_interval(ratios)))
        if accepts(*found[-1]):
            return
    pytest.fail(f"expected {expected}, measured (median, low, high) {found}")


@alone
def test_twice_the_work_takes_twice_as_long():
    """On a CPU in plain Python arithmetic, which no cache or thread can speed up."""
    if DEVICE.type == "cuda":
        x = torch.randn(2**25, device=DEVICE)

        def work(turns):
            return lambda i: [torch.erfinv(x) for _ in range(turns)]
    else:

        def work(turns):
            return lambda i: sum(k * k for k in range(20_000 * turns))

    def measure():
        with timing.side_stream(DEVICE):
            return paired(timing.prepare(work(2), 1, DEVICE), timing.prepare(work(1), 1, DEVICE))

    hold(measure, lambda ratio, low, high: abs(ratio - 2) <= 0.2, "2 ± 0.2")


@alone
@needs_gpu
def test_a_tenth_more_bytes_takes_a_tenth_longer():
    large = [torch.randn(11 * 2**23, device=DEVICE) for _ in range(3)]
    small = [x[: 10 * 2**23] for x in large]

    def measure():
        with timing.side_stream(DEVICE):
            return paired(
                timing.prepare(lambda i: torch.abs(large[i]), 3, DEVICE),
                timing.prepare(lambda i: torch.abs(small[i]), 3, DEVICE),
            )

    hold(measure, lambda ratio, low, high: 1.08 <= ratio <= 1.12, "1.10 ± 0.02")


@alone
@needs_gpu
def test_two_copies_of_one_variant_come_out_equal():
    """Within their interval, or closer than two buffers of one size are alike: a thousandth.

    The interval misses once in twenty times. Where it is narrower than a few ten-thousandths, where memory lies shows.
    """
    copies = [torch.randn(4096, 4096, device=DEVICE).bfloat16() for _ in range(6)]
    found = []
    for _ in range(max(3, TRIES)):
        with timing.side_stream(DEVICE):
            a, b = (timing.prepare(lambda i: torch.nn.functional.gelu(copies[i]), 6, DEVICE) for _ in range(2))
            ratios = paired(a, b)
        found.append((float(np.median(ratios)), *intervals.median_interval(ratios)))
        ratio, low, high = found[-1]
        assert TRIES > 1 or abs(ratio - 1) <= 0.01
        if low <= 1 <= high or abs(ratio - 1) <= 0.001:
            return
    pytest.fail(f"expected an interval that holds 1, measured (median, low, high) {found}")


@alone
@needs_gpu
def test_what_would_sit_in_the_l2_comes_from_memory():
    """Cold reads are no faster than a large copy, and slower than the same reads of one buffer again and again."""
    nbytes = timing.l2_bytes(DEVICE) // 4
    cold = [torch.ones(nbytes // 4, device=DEVICE) for _ in range(timing.copies_needed(nbytes, DEVICE))]
    ceiling = ceilings.copy_gbs(2**30, DEVICE)
    rates = []

    def measure():
        with timing.side_stream(DEVICE):
            rotating = timing.prepare(lambda i: ceiling_kernels.read(cold[i]), len(cold), DEVICE)
            warm = timing.prepare(lambda i: ceiling_kernels.read(cold[0]), 1, DEVICE)
            times = timing.interleave({"cold": rotating, "warm": warm}, budget_s=0.2)
        assert rotating.graph
        assert warm.graph
        rates.append(nbytes / intervals.quartiles(times["cold"])[1] / 1e9)
        return intervals.paired_ratios(times["cold"], times["warm"])

    hold(measure, lambda ratio, low, high: low > 1, "cold reads slower than warm ones")
    assert min(rates) <= 1.05 * ceiling


@needs_gpu
def test_a_graph_keeps_the_workspaces_of_cublas():
    """Who records another graph frees cuBLAS's workspaces. Others then have that memory, and replays leave it alone."""
    a, b = (torch.randn(64, 2**17, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))  # so that K is split
    output = torch.empty(64, 64, device=DEVICE, dtype=torch.bfloat16)
    with timing.side_stream(DEVICE):
        launch = timing.prepare(lambda i: torch.mm(a, b.T, out=output), 1, DEVICE)
        assert launch.graph
        expected = output.clone()
        torch._C._cuda_clearCublasWorkspaces()
        others = [torch.full((size << 20,), 7, dtype=torch.uint8, device=DEVICE) for size in (1, 4, 8, 16, 32, 64)]
        output.zero_()
        launch()
        torch.testing.assert_close(output, expected)
        assert all((x == 7).all() for x in others)


@alone
@needs_gpu
def test_a_graph_excludes_launch_gaps():
    x = torch.zeros(1, device=DEVICE)
    with timing.side_stream(DEVICE):
        captured = timing.prepare(lambda i: x.add_(1), 1, DEVICE)
        launched = timing.prepare(lambda i: x.add_(1), 1, DEVICE, capture=False)
        assert (captured.graph, launched.graph) == (True, False)
        ratios = paired(captured, launched)
    assert intervals.median_interval(ratios)[1] < 0.8


@needs_gpu
def test_what_a_graph_reads_stays_in_memory():
    """A graph knows addresses alone: what a forward pass saved must not be given back before the backward is timed."""

    def prepared():
        saved = torch.ones(1024, device=DEVICE)
        return timing.prepare(lambda i: saved * 2, 1, DEVICE), weakref.ref(saved)

    with timing.side_stream(DEVICE):
        launch, saved = prepared()
        assert launch.graph
        assert saved() is not None
        del launch
    assert saved() is None


@needs_gpu
def test_without_memory_for_a_graph_calls_are_timed_one_by_one():
    calls = 0

    def call(i):
        nonlocal calls
        calls += 1
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError
        return torch.ones(1, device=DEVICE)

    with timing.side_stream(DEVICE):
        launch = timing.prepare(call, 1, DEVICE)
    assert launch.graph is False
    assert calls > 1


def test_phases_do_not_overlap(monkeypatch):
    now = iter(np.arange(0.0, 100.0, 1.0))
    monkeypatch.setattr(phases, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    watch = phases.Phases()
    with watch(phases.TIMING), watch(phases.CEILINGS):
        pass
    with pytest.raises(KeyboardInterrupt), watch(phases.CHECK):
        raise KeyboardInterrupt
    watch.launched = 1.5
    assert watch.between == 0.5
    console = Console(record=True, width=200)
    watch.show(console)
    assert sum(watch.seconds.values()) == 7
    told = {name: seconds for name, seconds in watch.seconds.items() if seconds}
    assert told == {phases.REST: 3, phases.TIMING: 2, phases.CEILINGS: 1, phases.CHECK: 1}
    text = console.export_text()
    assert "25% of the timing" in text
    assert "100% of what it measures" in text  # 3 s at rest and half of one between samples, of 7


@pytest.mark.parametrize("own", [True, False], ids=["own backward", "autograd"])
def test_both_passes_run_in_each_call(own):
    """A case whose passes are measured together runs the forward pass in every call; others save its results once."""
    calls = []

    def forward(x, *, factor):
        calls.append("forward")
        return x * factor, (factor,)

    def backward(saved, grad, needs):
        return (grad * saved[0],)

    variant = Variant("add", "peer.fake", forward, backward if own else None, lambda *inputs, **options: None)
    x, grad = torch.randn(2, 3)
    for together, runs in ((True, 3), (False, 1)):
        calls.clear()
        call = candidates.backward_call(variant, candidates.Copies([(x,)], [grad], {"factor": 2.0}, together))
        for _ in range(3):
            assert torch.equal(call(0)[0], grad * 2)
        assert len(calls) == runs


@pytest.mark.parametrize("name", AT_QUICK_CASES)
def test_what_takes_long_is_for_the_quick_cases_of_a_sweep_unless_named(name):
    quick, other = (
        Group("matmul", Case("a", ((1,),), quick=is_quick), torch.bfloat16, PASSES) for is_quick in (True, False)
    )
    unnamed = Selection(["matmul"], ["compile"], seconds=0.1)
    assert unnamed.has_time_for(name, quick)
    in_float32 = dataclasses.replace(quick, dtype=torch.float32, in_first_dtype=False)
    assert unnamed.has_time_for(name, in_float32) is (name not in LONG_TUNING)
    assert dataclasses.replace(unnamed, named=[name]).has_time_for(name, in_float32)
    assert not unnamed.has_time_for(name, other)
    assert unnamed.has_time_for("compile.default", other)
    assert Selection(["matmul"], quick=True).has_time_for(name, quick) is (name not in LONG_TUNING)
    for is_quick in (False, True):
        assert Selection(["matmul"], named=[name], quick=is_quick).has_time_for(name, other)


def test_a_quick_sweep_on_a_gpu_is_in_bfloat16():
    gpu, quick, other = torch.device("cuda"), Case("a", ((1,),), quick=True), Case("b", ((1,),))
    assert cases.default_dtypes("gelu", quick, gpu, quick=True) == [torch.bfloat16]
    assert cases.default_dtypes("gelu", quick, gpu, quick=False) == [torch.bfloat16, torch.float32]
    assert cases.default_dtypes("gelu", other, gpu, quick=False) == [torch.bfloat16]
    assert cases.default_dtypes("gelu", quick, torch.device("cpu"), quick=True) == [torch.float32]
    assert cases.default_dtypes("matmul", quick, gpu, quick=False) == [torch.bfloat16, torch.float32, torch.float16]
    assert cases.default_dtypes("matmul", quick, gpu, quick=True) == [torch.bfloat16]
    assert cases.default_dtypes("matmul", other, gpu, quick=False) == [torch.bfloat16]
