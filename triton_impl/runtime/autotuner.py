"""Choose among a kernel's configurations: a cost model leaves few, which are compiled side by side and timed in rounds.

Triton's own autotuner compiles one after the other. It cannot keep on disk what it chose for kernels that take tensor
descriptors, whose blocks are a configuration's.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from triton.compiler import make_backend
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.cache import get_cache_manager, triton_key

from triton_impl import interpreted
from triton_impl.runtime import launch_cache
from triton_impl.runtime.cache_key import stabilize

#: Runs of each configuration: as many as fit in the time, within these.
ROUNDS = (5, 40)
SECONDS = 0.5
#: Written between runs, so that none finds its operands in the L2.
FLUSH_BYTES = 256 * 2**20

#: Surrounds the timing. A program that shares its GPU with others sets it, so that they rest meanwhile.
undisturbed: Callable[[], AbstractContextManager[None]] = nullcontext

#: Runs a kernel in a configuration; where True is given, only compiles it and returns what Triton does.
Run = Callable[[triton.Config, bool], Any]


class Autotuner:
    """What was chosen for a kernel, by key. The choice is kept on disk beside the compiled kernels."""

    def __init__(self, kernel: Any) -> None:
        stabilize(kernel)
        self.kernel = kernel
        self._known: dict[Hashable, triton.Config] = {}
        self._lock = threading.Lock()

    def __call__(self, key: tuple[Any, ...], configs: Sequence[triton.Config], run: Run) -> triton.Config:
        """Choose one of `configs`, the best guess first, and leave the kernel run in it.

        `key` says which calls are alike. Without tuning the first configuration is taken that fits on the GPU.
        """
        record = launch_cache.recording()
        with self._lock:
            config = None if record is not None else self._known.get(key)
            if config is not None:
                run(config, False)
                return config
            if interpreted() or not launch_cache.TUNING or len(configs) == 1:
                config, timings = _first_that_fits(configs, run), {}
            else:
                config, timings = self._timed(key, configs, run)
                run(config, False)
            self._known[key] = config
        if record is not None and (interpreted() or launch_cache.TUNING):
            record.append(launch_cache.TuningRecord(self.kernel, config, timings))
        return config

    def launch(
        self,
        key: tuple[Any, ...],
        configs: Sequence[triton.Config],
        make: Callable[[triton.Config], Any],
        *tensors: torch.Tensor,
        values: tuple[Any, ...] = (),
    ) -> Any:
        """Choose one of `configs`, run the launch that `make` gives for it on `tensors`, and return that launch.

        `values` are as for :class:`triton_impl.runtime.launch_cache.Launch`.
        """
        made: dict[triton.Config, Any] = {}
        more = {"values": values} if values else {}  # of which not every launch knows

        def run(config: triton.Config, only_compile: bool) -> Any:
            if config not in made:
                made[config] = make(config)
            of = made[config].compile if only_compile else made[config]
            return of(*tensors, **more)

        return made[self(key, launch_cache.to_time(list(configs)), run)]

    def _timed(
        self, key: tuple[Any, ...], configs: Sequence[triton.Config], run: Run
    ) -> tuple[triton.Config, dict[triton.Config, float]]:
        cache, name = self._cache(key, configs), f"{self.kernel.fn.__name__}.choice.json"
        timings = _read(cache.get_file(name), configs)
        if timings is None:
            if triton.knobs.autotuning.print:
                for config in configs:
                    print(f"Autotuning kernel {self.kernel.fn.__name__} with config {config}")
            compiled = compile_side_by_side(configs, run)
            with undisturbed():
                timings = time_in_rounds(compiled, run)
            stored = {str(config): None if ms == float("inf") else ms for config, ms in timings.items()}
            cache.put(json.dumps(stored), name, binary=False)
        return min(timings, key=timings.__getitem__), timings

    def _cache(self, key: tuple[Any, ...], configs: Sequence[triton.Config]) -> Any:
        target = triton.runtime.driver.active.get_current_target()
        parts = [triton_key(), make_backend(target).hash(), torch.cuda.get_device_name(), self.kernel.cache_key]
        text = "-".join([*parts, str(key), *map(str, configs)])
        return get_cache_manager(hashlib.sha256(text.encode()).hexdigest())


def _read(path: str | None, configs: Sequence[triton.Config]) -> dict[triton.Config, float] | None:
    if path is None:
        return None
    try:
        with open(path) as file:
            stored = json.load(file)
        timings = {c: float("inf") if stored[str(c)] is None else float(stored[str(c)]) for c in configs}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"the tuned choice in {path} cannot be read and is made anew: {error!r}", stacklevel=2)
        return None
    return timings


def _first_that_fits(configs: Sequence[triton.Config], run: Run) -> triton.Config:
    for config in configs:
        try:
            run(config, False)
            return config
        except triton.OutOfResources:
            if config is configs[-1]:
                raise
    raise AssertionError("a kernel has at least one configuration")


def compile_side_by_side(configs: Sequence[triton.Config], run: Run) -> dict[triton.Config, bool]:
    """Compile every configuration, one a thread; which of them compiled."""
    with (
        ThreadPoolExecutor(min(len(configs), os.cpu_count() or 1)) as executor,
        AsyncCompileMode(executor, ignore_errors=True),
    ):
        compiled = {config: run(config, True) for config in configs}
    # What was compiled before is there at once; a kernel in the making has a result.
    return {c: not hasattr(made, "result") or made.result(True) is not None for c, made in compiled.items()}


def time_in_rounds(compiled: dict[triton.Config, bool], run: Run) -> dict[triton.Config, float]:
    """Median milliseconds of each configuration; infinity where it did not compile or does not fit.

    Every round runs all of them, so that a drift of clocks hits all alike.
    """
    timings = dict.fromkeys(compiled, float("inf"))
    runs: dict[triton.Config, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def timed_run(config: triton.Config) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.zero_()
        begin.record()
        run(config, False)
        end.record()
        return begin, end

    for config, made in compiled.items():
        if made:
            try:
                run(config, False)
                runs[config] = [timed_run(config)]
            except triton.OutOfResources:
                pass
    if not runs:
        raise triton.OutOfResources(0, 0, "every configuration's resources")
    torch.cuda.synchronize()
    of_a_round = sum(events[0][0].elapsed_time(events[0][1]) for events in runs.values()) / 1e3
    least, most = ROUNDS
    for _ in range(max(least, min(most, int(SECONDS / max(of_a_round, 1e-6))))):
        for config, events in runs.items():
            events.append(timed_run(config))
    torch.cuda.synchronize()
    for config, events in runs.items():
        timings[config] = statistics.median(begin.elapsed_time(end) for begin, end in events[1:])
    return timings
