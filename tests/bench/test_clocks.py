"""Clock, power and temperature while calls are timed: a fake NVML, scripted clocks, and the real ones."""

from __future__ import annotations

import math
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from bench.measure import clocks, intervals, timing
from bench.rows.store import Row
from bench.show import table as bench_table

from ..conftest import DEVICE, TRIES, alone, needs_gpu

pytestmark = pytest.mark.xdist_group("timing")

CPU = torch.device("cpu")


class FakeNvml(SimpleNamespace):
    """The part of nvidia-ml-py that is used, for two GPUs of which only the second is visible to CUDA."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_FI_DEV_POWER_INSTANT, NVML_SUCCESS = 1, 0, 186, 0

    class NVMLError(Exception):
        pass

    def __init__(self, known=("GPU-first", "GPU-second"), instant=True):
        super().__init__(known=known, instant=instant, clocks={"GPU-first": 345, "GPU-second": 1980, "whole": 1200})

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.known:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        assert handle.startswith("MIG-")
        return "whole"

    def nvmlDeviceGetClockInfo(self, handle, kind):
        assert kind == self.NVML_CLOCK_SM
        return self.clocks[handle]

    def nvmlDeviceGetFieldValues(self, handle, fields):
        result = self.NVML_SUCCESS if self.instant else 3
        return [SimpleNamespace(nvmlReturn=result, value=SimpleNamespace(uiVal=640_500))]

    def nvmlDeviceGetPowerUsage(self, handle):
        return 600_000

    def nvmlDeviceGetTemperature(self, handle, kind):
        return 47

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return 0x04


@pytest.fixture
def fake_nvml(monkeypatch):
    def install(nvml, uuid="second"):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))
        return clocks.Gpu(torch.device("cuda", 0))

    return install


def test_the_gpu_is_found_by_its_uuid(fake_nvml):
    gpu = fake_nvml(FakeNvml())
    assert gpu.clock_mhz() == 1980, "NVML's first GPU is not CUDA's"
    reading = gpu.read(everything=True)
    assert reading[1:] == (1980, 640.5, 47, 0x04)
    assert gpu.read(everything=False)[2:] == (None, None, None)
    assert fake_nvml(FakeNvml(instant=False)).power_w() == 600


def test_a_part_of_a_gpu_has_the_clock_of_the_whole(fake_nvml):
    assert fake_nvml(FakeNvml(known=("MIG-second",))).clock_mhz() == 1200


def test_why_clocks_cannot_be_read(fake_nvml, monkeypatch):
    with pytest.raises(clocks.Unreadable, match="NVML: Not Found"):
        fake_nvml(FakeNvml(known=()))
    with pytest.raises(clocks.Unreadable, match="pip install nvidia-ml-py"):
        fake_nvml(None)  # what an import of a missing module comes to
    assert clocks.gpu(CPU) == (None, None)


def test_without_clocks_the_fields_stay_empty():
    with clocks.watch(CPU) as watch:
        watch.ran(0, "a", timing.Span(1.0, 0.0, 1.0))
    assert watch.state() == clocks.State()
    assert watch.moved() == {"a": None}


class Scripted:
    """A GPU whose clock is a function of the count of readings, until it breaks."""

    def __init__(self, clock=lambda count: 1500.0, breaks_at=math.inf):
        self.clock, self.breaks_at, self.count = clock, breaks_at, 0

    def read(self, everything):
        self.count += 1
        if self.count > self.breaks_at:
            raise FakeNvml.NVMLError("GPU is lost")
        more = (700.0, 60.0, 0x24) if everything else ()
        return clocks.Reading(time.perf_counter(), self.clock(self.count), *more)


def test_a_watch_reads_while_it_lasts():
    source = Scripted()
    begin = time.perf_counter()
    with clocks.Watch(source) as watch:
        time.sleep(0.1)
        watch.ran(0, "a", timing.Span(0.1, begin, time.perf_counter()))
    count = source.count
    assert 3 <= count <= 0.1 / clocks.PERIOD_S + 2
    time.sleep(3 * clocks.PERIOD_S)
    assert source.count == count, "nothing is read after the block"
    assert watch.state() == clocks.State(1500.0, 700.0, 60.0, "power cap, temperature")


def test_a_slow_driver_is_asked_less_often(monkeypatch):
    source = Scripted(clock=lambda count: time.sleep(0.01) or 1500.0)
    with clocks.Watch(source):
        time.sleep(0.3)
    assert source.count <= 0.3 / (0.01 / clocks.SHARE) + 1


def test_a_driver_that_stops_answering_costs_no_more_than_the_rest():
    begin = time.perf_counter()
    with clocks.Watch(Scripted(breaks_at=2)) as watch:
        time.sleep(0.05)
        watch.ran(0, "a", timing.Span(0.05, begin, time.perf_counter()))
    assert watch.state().clock_mhz == 1500


def watched(rounds: int, per_call: dict[str, tuple[float, float]]) -> clocks.Watch:
    """A watch over `rounds` rounds of calls by name of (seconds, clock), read every 5 ms."""
    watch, now, clock_at = clocks.Watch(None), 0.0, []
    for r in range(rounds):
        for name, (seconds, clock) in per_call.items():
            watch.ran(r, name, timing.Span(seconds, now, now + seconds))
            clock_at.append((now, clock))
            now += seconds
    starts = [start for start, _ in clock_at]
    for at in np.arange(0.0005, now, 0.005):
        watch._readings.append(clocks.Reading(at, clock_at[np.searchsorted(starts, at, side="right") - 1][1]))
    return watch


def test_clocks_that_move_together_have_not_moved():
    drifting = watched(50, {"a": (0.0011, 1900.0), "b": (0.0012, 1905.0), "c": (0.0013, 1890.0)})
    assert drifting.moved() == {"a": False, "b": False, "c": False}


def test_a_clock_unlike_its_neighbours_has_moved():
    watch = watched(
        50, {"tensor": (0.0013, 1700.0), "a": (0.0011, 1900.0), "b": (0.0012, 1905.0), "c": (0.0013, 1890.0)}
    )
    assert watch.moved() == {"tensor": True, "a": False, "b": False, "c": False}
    assert 1850 < watch.state().clock_mhz < 1910


def test_too_few_readings_claim_nothing():
    assert watched(1, {"a": (0.004, 1900.0), "b": (0.02, 1500.0)}).moved()["a"] is None


@alone
@needs_gpu
def test_the_sampler_reads_plausible_numbers():
    source, reason = clocks.gpu(DEVICE)
    if source is None:
        pytest.skip(reason)
    x = torch.randn(4096, 4096, device=DEVICE).bfloat16()
    with timing.side_stream(DEVICE):
        launches = {name: timing.prepare(lambda i: x @ x, 1, DEVICE) for name in "ab"}
        for _ in range(3):  # the GPU may lower its clock meanwhile, by its power or its temperature
            timing.settle(list(launches.values()), cap_s=2.0)
            with clocks.watch(DEVICE) as watch:
                timing.interleave(launches, budget_s=0.2, observe=watch.ran)
            state = watch.state()
            assert 100 <= state.clock_mhz <= 4000
            assert 20 <= state.power_w <= 2000
            assert 10 <= state.temperature_c <= 110
            if not any(watch.moved().values()):
                return
    assert TRIES > 1, "two launches of one product have clocks that differ from their neighbours', thrice"


@alone
@needs_gpu
def test_sampling_does_not_disturb_what_it_watches():
    if (reason := clocks.gpu(DEVICE)[1]) is not None:
        pytest.skip(reason)
    x = torch.randn(2**24, device=DEVICE)
    found = []
    with timing.side_stream(DEVICE):
        launches = {"erfinv": timing.prepare(lambda i: torch.erfinv(x), 1, DEVICE)}
        for _ in range(TRIES):
            timing.settle(list(launches.values()), cap_s=0.3)
            alone = timing.interleave(launches, budget_s=0.1)["erfinv"]
            with clocks.watch(DEVICE) as watch:
                sampled = timing.interleave(launches, budget_s=0.1, observe=watch.ran)["erfinv"]
            assert watch.state().clock_mhz is not None
            found.append(intervals.quartiles(sampled)[1] / intervals.quartiles(alone)[1])
            if abs(found[-1] - 1) <= 0.005:
                return
    pytest.fail(f"expected the same time within 0.5 % with and without sampling, measured ratios of {found}")


@alone
@needs_gpu
def test_spans_on_the_device_lie_within_the_hosts():
    x = torch.randn(2**26, device=DEVICE)
    with timing.side_stream(DEVICE):
        launches = [timing.prepare(lambda i: torch.erfinv(x), 1, DEVICE) for _ in range(2)]
        begin = time.perf_counter()
        first, second = timing.sample(launches)
        end = time.perf_counter()
    assert begin <= first.begin < first.end <= second.begin < second.end <= end
    assert second.end - second.begin == pytest.approx(
        second.seconds * launches[1].calls * launches[1].repeats, rel=0.01
    )


def test_a_moved_clock_is_marked_in_the_table():
    named = {"op": "gelu", "level": "torch", "pass_": "forward", "dtype": "float32", "shape": "2x2", "gpu": "here"}
    timed = {**named, "us": 1.0, "us_q1": 1.0, "us_q3": 1.0, "gbs": 1.0, "tflops": 1.0}
    console = Console(record=True, width=250)
    moved, other = Row(**timed, backend="torch.naive", clocks_moved=True), Row(**timed, backend="torch.builtin")
    bench_table.show([moved, other], console)
    assert console.export_text().count("its SM clock was not that of the rungs beside it") == 1
