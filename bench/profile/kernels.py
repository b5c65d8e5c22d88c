"""The kernels that one call launches, as PyTorch's profiler sees them, joined with the operators that launch them."""

from __future__ import annotations

import json
import re
import statistics
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from bench.measure import timing
from bench.profile.chain import STEP, Chain, Step

CALL = "kernel_ladder call"
REPEATS = 5
SLOW_S = 1.0  # a call that takes longer is profiled once

#: Categories of a trace: what runs on the device, and what starts it on the host.
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")

#: Template arguments that tell the instances of a general kernel apart.
TELLING = re.compile(r"\b(\w*[Ff]unctor\w*|\w+_kernel_cuda|\w+KernelImpl|\w+Ops|cutlass_\w+)\b")


@dataclass
class Kernel:
    """One kernel (or copy, or fill) on the device; without a GPU, one operator on the host."""

    name: str
    us: float
    grid: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    operator: str | None = None
    bytes: int | None = None  # operands of the operator, on its first kernel

    @property
    def short(self) -> str:
        return short_name(self.name)


@dataclass
class Profile:
    """What one call ran. Times in microseconds, medians over a few calls."""

    device: str  # "cuda" or "cpu": where the times are taken
    kernels: list[Kernel]
    span_us: float  # from the start of the first to the end of the last
    host_us: float | None  # to issue the call, the device not waited for
    steps: list[Step] | None  # None where it does not run as operators of PyTorch
    plain_us: float | None = None  # on a CPU: of the call without the profiler
    apart: bool = False  # the kernels' times are of another run than the span, with more to record
    trace: dict[str, Any] = field(repr=False, default_factory=dict)

    @property
    def device_us(self) -> float:
        """The time of all kernels together."""
        return sum(kernel.us for kernel in self.kernels)

    @property
    def us(self) -> float:
        """What the call costs: its kernels' time on a GPU, the whole call's on a CPU."""
        return self.device_us if self.device == "cuda" else self.span_us

    @property
    def gap_us(self) -> float:
        """Between kernels, where the device waits for the host or for the kernel before to drain.

        On a CPU between operators, which is Python, dispatch, and the profiler itself.
        """
        return max(0.0, self.span_us - self.device_us)

    @property
    def whole_us(self) -> float:
        """The time that is 100 %, of the run that timed the kernels: their sum on a GPU, the whole call on a CPU."""
        return self.device_us if self.device == "cuda" or self.apart else self.span_us

    @property
    def operand_bytes(self) -> int | None:
        return None if self.steps is None else sum(step.bytes for step in self.steps)

    @property
    def operands(self) -> int | None:
        """How many tensors the operators read and write."""
        return None if self.steps is None else sum(len(step.read) + len(step.written) for step in self.steps)


#: An unnamed namespace, as demanglers write it.
UNNAMED = re.compile(r"(<unnamed>|\(anonymous namespace\)|\bunnamed)::")


def short_name(name: str) -> str:
    """A kernel's own name, with what tells it from others of that name: no namespaces, types and parameters.

    >>> short_name("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)")
    'vectorized_elementwise_kernel<CUDAFunctor_add>'
    """
    if name.startswith(("Memcpy", "Memset")):
        return name.partition(" (")[0]
    outside, inside, depth, opened, arguments = "", "", 0, "", ""
    for letter in UNNAMED.sub("", name):
        if letter in "<([{":
            depth += 1
            if depth == 1:
                opened, inside = letter, ""
        elif letter in ">)]}":
            depth -= 1
            if depth == 0 and opened == "<":
                arguments = inside
        elif depth == 0:
            outside += letter
            continue
        inside += letter
    parts = re.split(r"::|\s+", outside.strip())
    base = "::".join(parts[-2:] if parts[-1] == "kernel" else parts[-1:])
    telling = TELLING.findall(arguments)
    return f"{base}<{telling[-1]}>" if telling else base


def profile(call: Callable[[], Any], operators: bool, device: torch.device, *, long: bool = False) -> Profile:
    """Profile a call after warming it up, the L2 flushed before each time.

    `operators` says that the call runs as operators of PyTorch. They are recorded and matched with the kernels, in a
    run of its own because recording takes host time. `long` says that a few calls fill the launch queue, so that the
    host's time is measured one call at a time.
    """
    for _ in range(2):
        call()
    seconds = timing.wall(call, device)[0]
    repeats = 1 if seconds > SLOW_S else REPEATS
    recorded = _record(call, device, repeats) if operators else None
    if device.type != "cuda":
        return _on_host(call, recorded, device, repeats)
    if long:
        seconds = statistics.median(timing.issue(call, device) for _ in range(repeats))
    else:
        (seconds,) = timing.host_seconds([call], device)
    host_us = 1e6 * seconds
    trace = _trace(call, device, repeats)
    runs = [_launched(trace["traceEvents"], window) for window in _ranges(trace, CALL)]
    kernels, span = _medians(runs)
    if recorded is not None:
        _join(kernels, recorded)
    return Profile("cuda", kernels, span, host_us, recorded, trace=trace)


def _trace(call: Callable[[], Any], device: torch.device, repeats: int) -> dict[str, Any]:
    """The profiler's trace of a few calls, each in a range of its own."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    flush = torch.empty(2 * timing.l2_bytes(device), dtype=torch.uint8, device=device)
    warnings.filterwarnings("ignore", message=".*Profiler clears events")  # there is one cycle of them
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(repeats):
            flush.zero_()
            timing.synchronize(device)
            with record_function(CALL):
                call()
            timing.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        return json.loads(file.read_text(encoding="utf-8"))


def _ranges(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The host's ranges of a name, in order. (Each has a twin on the device's side of the trace.)"""
    found = [e for e in trace["traceEvents"] if e.get("cat") == "user_annotation" and e["name"] == name]
    return sorted(found, key=lambda e: e["ts"])


def _within(event: dict[str, Any], window: dict[str, Any]) -> bool:
    return window["ts"] <= event["ts"] <= window["ts"] + window["dur"]


def _launched(events: list[dict[str, Any]], window: dict[str, Any]) -> list[dict[str, Any]]:
    """What ran on the device because of launches inside a range of the host, in the order of its start."""
    launches = {
        e["args"]["correlation"]
        for e in events
        if e.get("cat") in LAUNCHES and "correlation" in e.get("args", {}) and _within(e, window)
    }
    found = [e for e in events if e.get("cat") in ON_DEVICE and e["args"].get("correlation") in launches]
    return sorted(found, key=lambda e: e["ts"])


def _medians(runs: list[list[dict[str, Any]]]) -> tuple[list[Kernel], float]:
    """Kernels of a call and their span: medians over the runs that launched what most of them did."""
    names = [tuple(e["name"] for e in run) for run in runs]
    usual = statistics.mode(names)
    runs = [run for run, its in zip(runs, names, strict=True) if its == usual]
    kernels = []
    for same in zip(*runs, strict=True):
        of_first = same[0]["args"]
        kernels.append(
            Kernel(
                name=same[0]["name"],
                us=statistics.median(e["dur"] for e in same),
                grid=tuple(of_first["grid"]) if "grid" in of_first else None,
                block=tuple(of_first["block"]) if "block" in of_first else None,
                registers=of_first.get("registers per thread"),
                shared_bytes=of_first.get("shared memory"),
            )
        )
    spans = [max(e["ts"] + e["dur"] for e in run) - run[0]["ts"] for run in runs if run]
    return kernels, statistics.median(spans) if spans else 0.0


def _record(call: Callable[[], Any], device: torch.device, repeats: int) -> list[Step]:
    """The operators of a call, each with its host time and the names of the kernels that it launched."""
    chain = Chain()

    def recorded() -> None:
        nonlocal chain
        chain = Chain()
        with chain:
            call()

    trace = _trace(recorded, device, repeats)
    for step in chain.steps:
        ranges = _ranges(trace, f"{STEP} {step.number}")
        step.us = statistics.median(window["dur"] for window in ranges)
        step.kernels = [e["name"] for e in _launched(trace["traceEvents"], ranges[-1])]
    return chain.steps


def _join(kernels: list[Kernel], steps: list[Step]) -> None:
    """Give each kernel its operator. Where the two runs launched different kernels, leave all as they are."""
    launched = [(name, step, i == 0) for step in steps for i, name in enumerate(step.kernels)]
    if [kernel.name for kernel in kernels] != [name for name, _, _ in launched]:
        return
    for kernel, (_, step, first) in zip(kernels, launched, strict=True):
        kernel.operator, kernel.bytes = step.name, step.bytes if first else None


def _on_host(call: Callable[[], Any], recorded: list[Step] | None, device: torch.device, repeats: int) -> Profile:
    """The operators of a call and their times on the host, all of the call of median length.

    Operators that were recorded get their times from that call too: the run that recorded them spends more on that than
    on many an operator. Where they cannot be found in it, they keep the times of their own run, and are `apart`.
    """
    plain_us = 1e6 * statistics.median(timing.wall(call, device)[0] for _ in range(repeats))
    trace = _trace(call, device, repeats)
    windows = sorted(_ranges(trace, CALL), key=lambda window: window["dur"])
    window = windows[len(windows) // 2]
    events = [e for e in trace["traceEvents"] if e.get("cat") == "cpu_op" and _within(e, window)]
    apart = False
    if recorded is None:
        kernels = [Kernel(e["name"], e["dur"]) for e in _outermost(events)]
    else:
        times = _times_of(recorded, events)
        apart = times is None
        for step, us in zip(recorded, times or (), strict=not apart):
            step.us = us
        kernels = [Kernel(s.name, s.us or 0.0, operator=s.name, bytes=s.bytes) for s in recorded]
    return Profile("cpu", kernels, window["dur"], None, recorded, plain_us, apart, trace)


def _times_of(steps: list[Step], events: list[dict[str, Any]]) -> list[float] | None:
    """The time of each step in a run that did not record them, by their names in order; None where one is missing."""
    rest = iter(sorted(events, key=lambda e: (e["ts"], -e["dur"])))
    times, end = [], 0.0
    for step in steps:
        space, name, *_ = step.name.split(".")
        # Gradients are summed up in place, save where operators are recorded.
        names = (f"{space}::{name}", f"{space}::{name}_")
        event = next((e for e in rest if e["name"] in names and e["ts"] >= end), None)
        if event is None:
            return None
        times.append(event["dur"])
        end = event["ts"] + event["dur"]
    return times


def _outermost(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events that no other one of the same thread contains, in the order of their start."""
    found: list[dict[str, Any]] = []
    ends: dict[Any, float] = {}
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        if event["ts"] >= ends.get(event["tid"], 0.0):
            found.append(event)
            ends[event["tid"]] = event["ts"] + event["dur"]
    return found
