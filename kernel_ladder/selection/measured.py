"""Choices by measurement: ``KERNEL_LADDER_SELECT=measure`` times the candidates at the first call of a kind.

As torch.backends.cudnn.benchmark, but kept on disk: one file for each GPU and versions of PyTorch, Triton and this
package. Where a call can't be timed, as while torch.compile traces or a CUDA graph is captured, tables and rules
choose. So they do for tensors on a CPU. Repetitions read the same tensors, so that the GPU's L2 cache may hold them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kernel_ladder import _version, gpu
from kernel_ladder.errors import VariableError
from kernel_ladder.spec import Inputs, Options, as_leaves, as_tuple
from kernel_ladder.table import Variant
from kernel_ladder.tracing import PLAIN, wants_gradient

ENV_SELECT, MEASURE = "KERNEL_LADDER_SELECT", "measure"
#: Rungs of each level that are timed beside the choice of tables and rules.
CONTENDERS = 4
#: Calls before those that count; rounds that count; and how long a round is, in seconds and calls at most.
WARM_UP = 2
ROUNDS = 5
ROUND_S = 2e-4
ROUND_CALLS = 20


class Found(NamedTuple):
    """The fastest rung, with its time over that of the next."""

    name: str
    reason: str


def enabled() -> bool:
    """Whether ``KERNEL_LADDER_SELECT`` asks for measurements.

    Raises:
        VariableError: it has another value.
    """
    value = os.environ.get(ENV_SELECT, "").strip()
    if value not in ("", MEASURE):
        raise VariableError(
            f"the environment variable {ENV_SELECT} must be {MEASURE}, got {value!r}; unset, tables and rules choose"
        )
    return value == MEASURE


@functools.cache
def warn_of_cpu() -> None:
    """Warn once that calls of tensors on a CPU are not measured."""
    warnings.warn(
        f"{ENV_SELECT}={MEASURE} measures calls on a GPU alone; for tensors on a CPU rules choose",
        RuntimeWarning,
        stacklevel=2,
    )


def can_time(inputs: Inputs) -> bool:
    """Whether a call of these inputs can be timed now: tensors with data, and no stream that is being captured."""
    plain = all(x is None or type(x) in PLAIN for x in inputs)
    x = inputs[0]
    return plain and x is not None and x.is_cuda and not gpu.capturing()


def folder() -> Path:
    """Where choices are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kernel_ladder", "selection")


def _versions(device: int) -> dict[str, str]:
    try:
        import triton

        of_triton = triton.__version__
    except ImportError:
        of_triton = "none"
    name = gpu.of(device).name if gpu.visible() else "cpu"
    return {"gpu": name, "torch": torch.__version__, "triton": of_triton, "kernel_ladder": _version.__version__}


class Store:
    """The choices of one GPU, in memory and on disk."""

    def __init__(self, device: int) -> None:
        self.versions = _versions(device)
        digest = hashlib.sha256(json.dumps(self.versions, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder() / f"{digest}.json"
        self.choices: dict[str, list[Any]] = self._read()

    def _read(self) -> dict[str, list[Any]]:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["versions"] != self.versions:
                raise ValueError("it is of other versions")
            return {key: [name, reason] for key, (name, reason) in data["choices"].items() if isinstance(name, str)}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            warnings.warn(f"{self.path}: measured choices are ignored: {error}", RuntimeWarning, stacklevel=2)
            return {}

    def keep(self, key: str, found: Found) -> None:
        """Add a choice to the file, beside what other processes have written meanwhile."""
        self.choices = {**self._read(), **self.choices, key: list(found)}
        text = json.dumps({"versions": self.versions, "choices": self.choices}, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.path.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, self.path)
        except OSError as error:
            warnings.warn(f"{self.path}: a measured choice is not kept: {error}", RuntimeWarning, stacklevel=2)


@gpu.cached
def store(device: int) -> Store:
    """The choices of a device, read from disk once."""
    return Store(device)


def choice(
    op: str,
    backend: str,
    kind: tuple[Any, ...],
    contenders: Callable[[], Sequence[Variant]],
    inputs: Inputs,
    options: Options,
) -> Found | None:
    """The measured choice of a kind of call: from memory, from disk, or timed now; None where it can't be timed."""
    x = inputs[0]
    assert x is not None
    kept = store(x.get_device())
    name = f"{op} {backend} {list(kind)}"
    if (known := kept.choices.get(name)) is not None:
        return Found(*known)
    if not can_time(inputs):
        return None
    times = {}
    gradient = wants_gradient(*inputs)
    for rung in contenders():
        if (found_s := time_of(rung, inputs, options, gradient)) is not None:
            times[rung.name] = found_s
    if not times:
        return None
    first, *others = sorted(times, key=lambda each: times[each])
    said = f"{1e6 * times[first]:.3g} us"
    beside = f", {times[others[0]] / times[first]:.2f}x {others[0]}" if others else ", the only one that takes the call"
    found = Found(first, f"measured: {said}{beside}")
    kept.keep(name, found)
    return found


def time_of(rung: Variant, inputs: Inputs, options: Options, gradient: bool) -> float | None:
    """Seconds of a call, with its backward pass if `gradient`: the median of a few rounds. None where it fails."""
    from kernel_ladder import autograd

    asked = as_leaves(inputs) if gradient else inputs
    leaves = [x for x in asked if x is not None and x.requires_grad]

    def call() -> None:
        with torch.enable_grad() if gradient else torch.no_grad():
            outputs = [y for y in as_tuple(autograd.run(rung, asked, options)) if y.requires_grad or not gradient]
            if gradient and outputs:
                torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs], allow_unused=True)

    try:
        for _ in range(WARM_UP):
            once = seconds(call, 1)
        calls = min(max(round(ROUND_S / max(once, 1e-9)), 1), ROUND_CALLS)
        return sorted(seconds(call, calls) for _ in range(ROUNDS))[ROUNDS // 2]
    except Exception as error:  # a rung that fails is not chosen; if it is the only one, the call raises
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        return None


def seconds(call: Callable[[], None], calls: int) -> float:
    """The time of one of several calls in a row: that of the GPU where there is one."""
    if not torch.cuda.is_available():
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begun) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls
