"""A rung's time beside those of the ladder, on one case."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import kernel_ladder
from kernel_ladder import table
from kernel_ladder.exercises.exercise import SLOW, Exercise
from kernel_ladder.level_packages import load as load_package
from kernel_ladder.spec import Case, Inputs, Output, as_leaves, as_tuple, dtype_name, each, has_gradient
from kernel_ladder.table import Variant
from kernel_ladder.testing.samples import make_grad, make_inputs

#: Levels that are timed: a compiler takes seconds for each call, so torch.compile's rungs are timed on a GPU alone.
LEVELS_ON_CPU = ("torch", "triton")
#: Tuned for up to a minute a shape.
LEFT_OUT = ("compile.max_autotune",)
SECONDS_A_RUNG = 0.3
REPEATS = 5
WARM_UPS = 1


def times(variant: Variant, exercise: Exercise | None, device: torch.device) -> Iterator[dict[str, Any]]:
    """One event: the case, and the median time of the variant and of every rung that takes it, in microseconds."""
    spec = kernel_ladder.spec(variant.op)
    case = _case(variant, exercise, device)
    if case is None:
        return
    wide = device.type == "cpu" or (exercise is not None and exercise.level == "cuda")
    dtype = torch.float32 if wide else torch.bfloat16
    inputs = make_inputs(case, dtype, device)
    if variant.unsupported(*inputs, **case.options) is not None:
        return
    calls: dict[str, Callable[[int], Any]] = {}
    copies = _copies(inputs, device)
    grad = make_grad(spec, inputs, case.options) if exercise is not None and exercise.backward else None
    with torch.no_grad():
        for rung in table.variants(variant.op):
            if rung is not variant and not _is_timed(rung, device):
                continue
            if rung is not variant and rung.unsupported(*inputs, **case.options) is not None:
                continue
            calls[rung.name] = _call(rung, copies, case) if grad is None else _backward_call(rung, copies, case, grad)
        found = _by_bench(calls, len(copies), device) if device.type == "cuda" else None
        if found is None:
            found = {name: _median(call, len(copies), device) for name, call in calls.items()}
    yield {
        "event": "times",
        "op": variant.op,
        "rung": variant.name,
        "solution": None if exercise is None else exercise.rung,
        "case": case.id,
        "dtype": dtype_name(dtype),
        "pass": "forward" if grad is None else "backward",
        "bytes": spec.bytes(case, inputs[0].element_size(), grad is not None),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "us": {name: 1e6 * seconds for name, seconds in found.items()},
        "slow": None if exercise is None else _slow(exercise, variant.name, found),
    }


def _slow(exercise: Exercise, own: str, seconds: dict[str, float]) -> str | None:
    """What probably makes a right solution slow, where it is slower than the rung of the table by much."""
    by_table = seconds.get(exercise.rung)
    return exercise.slow or None if by_table is not None and seconds[own] > SLOW * by_table else None


def _case(variant: Variant, exercise: Exercise | None, device: torch.device) -> Case | None:
    """On a GPU the exercise's case of the sweep, or the first quick one; interpreted, a small sample."""
    spec = kernel_ladder.spec(variant.op)
    if device.type == "cuda":
        wanted = [c for c in spec.sweep if exercise is not None and c.id == exercise.timed]
        return next(iter([*wanted, *(c for c in spec.sweep if c.quick)]), None)

    def taken(case: Case) -> bool:
        plain = case.values == "normal" and case.layout == "contiguous" and not case.kinds
        if not plain or (exercise is not None and not exercise.asks(case)):
            return False
        inputs = make_inputs(case, torch.float32, device)
        return inputs[0].numel() > 0 and variant.unsupported(*inputs, **case.options) is None

    small = [case for case in spec.samples if _elements(case) <= 20_000]
    return max(filter(taken, small), key=_elements, default=None)


def _elements(case: Case) -> int:
    return torch.Size(case.shapes[0] or ()).numel()


def _is_timed(rung: Variant, device: torch.device) -> bool:
    if rung.name in LEFT_OUT or (device.type == "cpu" and rung.level not in LEVELS_ON_CPU):
        return False
    return table.unavailable(rung.op, rung.level) is None and rung.here() is None


def _call(rung: Variant, copies: list[Inputs], case: Case) -> Callable[[int], Any]:
    return lambda i: rung.output(*copies[i], **case.options)


def _backward_call(rung: Variant, copies: list[Inputs], case: Case, grad: Output) -> Callable[[int], Any]:
    """The backward pass alone; a rung without one is differentiated by PyTorch."""
    needs = tuple(has_gradient(x) for x in copies[0])
    kept: dict[int, Any] = {}

    def own(i: int) -> Any:
        if i not in kept:
            kept[i] = rung.forward(*copies[i], **case.options)[1]
        assert rung.backward is not None
        return rung.backward(kept[i], grad, needs)

    def by_autograd(i: int) -> Any:
        if i not in kept:
            leaves = as_leaves(copies[i])
            with torch.enable_grad():
                kept[i] = as_tuple(rung.forward(*leaves, **case.options)[0]), [x for x in leaves if has_gradient(x)]
        outputs, wanted = kept[i]
        return torch.autograd.grad(outputs, wanted, as_tuple(grad), retain_graph=True)

    return by_autograd if rung.backward is None else own


def _copies(inputs: Inputs, device: torch.device) -> list[Inputs]:
    """So many copies that none is in the L2 cache when it is used again."""
    if device.type == "cpu":
        return [inputs]
    nbytes = sum(x.numel() * x.element_size() for x in inputs if x is not None)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    count = min(32, 1 + -(-2 * l2 // max(nbytes, 1)))
    return [inputs, *(each(torch.clone, inputs) for _ in range(count - 1))]


def _by_bench(calls: dict[str, Callable[[int], Any]], copies: int, device: torch.device) -> dict[str, float] | None:
    """Medians of the benchmark's interleaved rounds, or None where ``bench`` cannot be imported."""
    try:
        load_package("bench")
        timing = importlib.import_module("bench.measure.timing")
    except ImportError:
        return None
    with timing.side_stream(device):
        launches = {name: timing.prepare(call, copies, device) for name, call in calls.items()}
        rounds = timing.interleave(launches, SECONDS_A_RUNG * len(launches))
    return {name: statistics.median(t for t in found if t is not None) for name, found in rounds.items()}


def _median(call: Callable[[int], Any], copies: int, device: torch.device) -> float:
    """The median of a few calls, in seconds, until the device is done."""
    seconds = []
    for i in range(WARM_UPS + REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call(i % copies)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UPS:])
