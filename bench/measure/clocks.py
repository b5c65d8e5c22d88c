"""Clock, power and temperature of the GPU while calls are timed: read through NVML, never set.

A thread reads them every few milliseconds. The GPU runs behind the host, so a reading is matched to a call by time. The
spans of :mod:`bench.measure.timing` say when each sample ran on the device, in the host's time. A call gets as many
readings as its share of the time; where those are too few to tell, nothing is claimed.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Any, NamedTuple

import torch

from bench.measure.timing import Span

PERIOD_S = 5e-3
#: At most this share of the time goes into reading, in which the thread waits for the driver without holding Python's
#: lock. A slow driver is asked less often.
SHARE = 0.1
#: Power, temperature and what holds the clock back change slowly, and are read once in so many readings of the clock.
SLOW_EVERY = 10
#: A clock this far from its neighbours' has moved. The driver sets it in steps of 15 MHz, below 1 %.
MOVED = 0.02
LEAST_READINGS = 3

#: Why the driver holds the clock down (`nvmlClocksEventReason…` in NVIDIA's nvml.h); an idle GPU is not held down.
REASONS = {
    0x02: "clocks set by the user",
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


class Unreadable(Exception):
    """Why clocks cannot be read here."""


class Reading(NamedTuple):
    """One look at the GPU: when (``time.perf_counter()``), and what; None for what was not asked this time."""

    at: float
    clock_mhz: float
    power_w: float | None = None
    temperature_c: float | None = None
    reasons: int | None = None


class Gpu:
    """A GPU in NVML, found by the UUID of the torch device: NVML counts devices that CUDA_VISIBLE_DEVICES hides."""

    def __init__(self, device: torch.device) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise Unreadable(f"{error}; `pip install nvidia-ml-py` to have them") from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = self._find(str(torch.cuda.get_device_properties(device).uuid))
            self.clock_mhz()
        except pynvml.NVMLError as error:
            raise Unreadable(f"NVML: {error}") from None

    def _find(self, uuid: str) -> Any:
        nvml = self._nvml
        try:
            return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except nvml.NVMLError:
            # A part of a GPU has no clock of its own: the whole one's.
            part = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
            return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)

    def clock_mhz(self) -> float:
        """Clock of the multiprocessors."""
        return float(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))

    def power_w(self) -> float | None:
        """Power at this moment where the driver tells it, else its average over the last second."""
        nvml = self._nvml
        try:
            (now,) = nvml.nvmlDeviceGetFieldValues(self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
            if now.nvmlReturn == nvml.NVML_SUCCESS:
                return now.value.uiVal / 1e3
            return nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
        except (nvml.NVMLError, AttributeError):
            return None

    def temperature_c(self) -> float | None:
        try:
            return float(self._nvml.nvmlDeviceGetTemperature(self._handle, self._nvml.NVML_TEMPERATURE_GPU))
        except self._nvml.NVMLError:
            return None

    def reasons(self) -> int | None:
        """Why the driver holds the clock down, as bits of `REASONS`; None where it does not tell."""
        try:
            return int(self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle))
        except (self._nvml.NVMLError, AttributeError):
            return None

    def read(self, everything: bool) -> Reading:
        before = time.perf_counter()
        clock = self.clock_mhz()
        at = (before + time.perf_counter()) / 2
        return Reading(at, clock, *((self.power_w(), self.temperature_c(), self.reasons()) if everything else ()))


@functools.cache
def gpu(device: torch.device) -> tuple[Gpu | None, str | None]:
    """The GPU whose clocks can be read, or None and why not. A CPU has none, and no reason is needed."""
    if device.type != "cuda":
        return None, None
    try:
        return Gpu(device), None
    except Unreadable as error:
        return None, str(error)


@dataclass(frozen=True)
class State:
    """The state of the GPU while calls were timed: medians. None for what could not be read."""

    clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttled: str | None = None


class Watch:
    """Reads while a ``with`` block runs. Without a GPU that can be read it does nothing."""

    def __init__(self, source: Gpu | None) -> None:
        self._source = source
        self._readings: list[Reading] = []
        self._spans: list[tuple[float, float, int, str]] = []  # begin, end, round, name
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clocks", daemon=True)

    def __enter__(self) -> Watch:
        if self._source is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._stop.set()
        if self._source is not None:
            self._thread.join()

    def _run(self) -> None:
        count, pause = 0, 0.0
        while not self._stop.wait(pause):
            begin = time.perf_counter()
            try:
                self._readings.append(self._source.read(count % SLOW_EVERY == 0))
            except Exception:  # a driver that stops answering costs the readings, not the measurement
                return
            count += 1
            pause = max(PERIOD_S, (time.perf_counter() - begin) / SHARE)

    def ran(self, round_: int, name: str, span: Span) -> None:
        """Take note of a sample: what :func:`bench.measure.timing.interleave` tells its observer."""
        self._spans.append((span.begin, span.end, round_, name))

    def _owned(self) -> list[tuple[Reading, int, str]]:
        """The readings that fell into a sample, with its round and name."""
        spans = sorted(self._spans)
        owned, place = [], 0
        for reading in self._readings:
            while place < len(spans) and spans[place][1] < reading.at:
                place += 1
            if place < len(spans) and spans[place][0] <= reading.at:
                owned.append((reading, *spans[place][2:]))
        return owned

    def state(self, name: str | None = None) -> State:
        """Medians over the readings from the first sample to the last.

        Of `name`, those that fell into its samples, where there are `LEAST_READINGS`: short samples get few, and none
        of what is read seldom.
        """
        if not self._spans:
            return State()
        first, last = min(s[0] for s in self._spans), max(s[1] for s in self._spans)
        within = [r for r in self._readings if first <= r.at <= last]
        own = [reading for reading, _, owner in self._owned() if owner == name]

        def known(field: str) -> list[Any]:
            mine, all_ = ([v for r in readings if (v := getattr(r, field)) is not None] for readings in (own, within))
            return mine if len(mine) >= LEAST_READINGS else all_

        def middle(field: str) -> float | None:
            return median(values) if (values := known(field)) else None

        return State(middle("clock_mhz"), middle("power_w"), middle("temperature_c"), self._throttled(known("reasons")))

    @staticmethod
    def _throttled(reasons: list[int]) -> str | None:
        """What held the clock down in half of the readings or more."""
        held = [text for bit, text in REASONS.items() if 2 * sum(bool(r & bit) for r in reasons) >= len(reasons) > 0]
        return ", ".join(held) or None

    def moved(self) -> dict[str, bool | None]:
        """By name, whether the clock of its samples was not that of its neighbours in the same rounds.

        The neighbours' is the median of their medians, so that one long call does not stand for all. None where there
        are too few readings to tell.
        """
        clocks: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for reading, round_, name in self._owned():
            clocks[name][round_].append(reading.clock_mhz)
        rounds: dict[str, set[int]] = defaultdict(set)
        for _, _, round_, name in self._spans:
            rounds[name].add(round_)

        def of(name: str, among: set[int]) -> list[float]:
            return [clock for round_, found in clocks.get(name, {}).items() if round_ in among for clock in found]

        verdicts: dict[str, bool | None] = {}
        for name, mine in rounds.items():
            own = of(name, mine)
            others = [found for other in rounds if other != name and (found := of(other, mine))]
            if len(own) < LEAST_READINGS or sum(map(len, others)) < LEAST_READINGS:
                verdicts[name] = None
            else:
                verdicts[name] = abs(median(own) / median(map(median, others)) - 1) > MOVED
        return verdicts


def watch(device: torch.device) -> Watch:
    """A watch over a device."""
    return Watch(gpu(device)[0])
