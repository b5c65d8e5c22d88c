"""Slow calls are timed apart: what is fast is not seen at the clocks of a GPU that they have rested."""

from __future__ import annotations

import statistics
from types import SimpleNamespace

import pytest
import torch

from bench.measure import clocks, intervals, rounds, timing
from bench.measure.clocks import Reading

from ..conftest import DEVICE, alone, needs_gpu

pytestmark = pytest.mark.xdist_group("timing")

CPU = torch.device("cpu")
FAST, SLOW = 0.001, 0.2


def launch_of(seconds: float) -> timing.Launch:
    return timing.Launch(lambda: None, 1, 1, None, CPU, seconds)


@pytest.fixture
def taken(monkeypatch):
    """Samples of a GPU that is a fifth faster for what shares a round with a slow call; lengths, round by round."""
    asked: list[list[float]] = []

    def sample(launches):
        lengths = [launch.seconds for launch in launches]
        rested = max(lengths) >= SLOW / 2 and min(lengths) < SLOW / 2
        asked.append(lengths)
        return [timing.Span(s / (1.2 if rested and s < SLOW / 2 else 1), 0.0, s) for s in lengths]

    monkeypatch.setattr(timing, "sample", sample)
    return asked


def run(launches: dict[str, float], baseline: str) -> dict[str, rounds.Timed]:
    return rounds.run(
        {name: launch_of(seconds) for name, seconds in launches.items()},
        baseline,
        seconds=0.1,
        patience=2.0,
        device=CPU,
        observe=lambda span: None,
    )


@pytest.mark.parametrize("baseline", ["fast", "another", "slow"])
def test_a_slow_call_rests_no_gpu_for_a_fast_one(taken, baseline):
    found = run({"fast": FAST, "another": 1.5 * FAST, "slow": SLOW}, baseline)
    medians = {name: intervals.quartiles(timed.times)[1] for name, timed in found.items()}
    assert medians == pytest.approx({"fast": FAST, "another": 1.5 * FAST, "slow": SLOW})
    assert sum(t is not None for t in found["fast"].times) > 20
    assert sum(t is not None for t in found["slow"].times) == timing.MIN_ROUNDS


def test_slow_calls_are_paired_with_the_baseline_beside_them(taken):
    found = run({"fast": FAST, "slow": SLOW}, "fast")
    # Both of one round, in which the fast one was rested: its own times are of other rounds.
    assert intervals.paired_ratio(found["slow"].baseline, found["slow"].paired) == pytest.approx(FAST / 1.2 / SLOW)
    assert intervals.paired_ratio(found["fast"].baseline, found["fast"].paired) == 1
    assert sum(len(lengths) == 2 for lengths in taken) == timing.MIN_ROUNDS
    assert all(lengths == [FAST] for lengths in taken if len(lengths) == 1)


def test_a_slow_baseline_has_every_call_beside_it_in_its_few_rounds(taken):
    found = run({"fast": FAST, "another": 2 * FAST, "slow": SLOW}, "slow")
    for name, times in (("fast", FAST), ("another", 2 * FAST)):
        ratios = intervals.paired_ratios(found[name].baseline, found[name].paired)
        assert ratios == pytest.approx([SLOW / (times / 1.2)] * timing.MIN_ROUNDS)


def test_calls_of_like_length_share_their_rounds(taken):
    found = run({"a": 0.02, "b": 0.05}, "a")
    assert all(sorted(lengths) == [0.02, 0.05] for lengths in taken)
    assert found["a"].times is not found["b"].times
    assert intervals.paired_ratio(found["b"].baseline, found["b"].paired) == pytest.approx(0.4)


def test_without_a_baseline_there_is_no_ratio(taken):
    assert {timed.baseline for timed in run({"fast": FAST, "slow": SLOW}, "absent").values()} == {None}


def test_short_samples_are_never_apart():
    assert timing.apart({"a": launch_of(1e-4), "b": launch_of(timing.LONG_CALL_S)}) == set()
    assert timing.apart({}) == set()


def test_a_call_has_the_clock_of_its_own_samples_where_there_are_enough():
    watch = clocks.Watch(None)
    watch._readings = [Reading(i + 0.5, 1000.0 if i % 2 else 1500.0, 500.0 if i == 0 else None) for i in range(8)]
    for i in range(8):
        watch.ran(i // 2, "odd" if i % 2 else "even", timing.Span(1.0, i, i + 1))
    watch.ran(4, "once", timing.Span(0.1, 8.0, 8.1))
    assert watch.state("odd").clock_mhz == 1000
    assert watch.state("even").clock_mhz == 1500
    assert watch.state("once").clock_mhz == watch.state().clock_mhz == 1250
    assert watch.state("odd").power_w == 500, "the only reading"
    assert clocks.Watch(None).state("odd") == clocks.State()


@alone
@needs_gpu
def test_a_product_beside_a_slow_call_runs_at_the_clocks_of_one_alone():
    x = torch.randn(8192, 8192, device=DEVICE).bfloat16()

    def milliseconds(launches: dict[str, timing.Launch]) -> float:
        timing.settle([launches["product"]], cap_s=0.5)
        found = rounds.run(launches, "product", seconds=0.3, patience=2.0, device=DEVICE, observe=lambda span: None)
        return 1e3 * intervals.quartiles(found["product"].times)[1]

    with timing.side_stream(DEVICE):
        product = timing.prepare(lambda i: x @ x, 1, DEVICE)
        timing.settle([product], cap_s=2.0)
        waiting = timing.prepare(lambda i: torch.cuda._sleep(10**8), 1, DEVICE)
        pairs = [{"product": product, "slow": waiting}, {"product": product}]
        found = []
        for i in range(6):  # in turn first and second, because a card that warms up slows what comes second
            measured = [milliseconds(pairs[(i + j) % 2]) for j in range(2)]
            found.append(measured[i % 2] / measured[1 - i % 2])
    # The card's clock drifts by up to 4 % from one measurement to the next. A harness that lets it rest beside a slow
    # call finds other clocks in every pair.
    assert abs(statistics.median(found) - 1) <= 0.03, found


def test_a_hiccup_of_the_host_makes_no_call_long(monkeypatch):
    monkeypatch.setattr(timing, "wall", lambda call, device: (1e-5, call()))
    monkeypatch.setattr(timing, "sample", lambda launches: [SimpleNamespace(seconds=1e-5) for _ in launches])
    assert timing.prepare(lambda i: None, 1, CPU, seconds=0.02).calls > 50
