"""What this machine can do at most, measured in the same run and by the same method as the variants."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from bench import timing

MATRIX_SIZES = {"cuda": (4096, 8192), "cpu": (512, 1024)}


def _best_seconds(calls: Sequence[timing.Call], copies: int, device: torch.device) -> float:
    with timing.side_stream(device):
        launches = {str(i): timing.prepare(call, copies, device) for i, call in enumerate(calls)}
        times = timing.interleave(launches, budget_s=0.15, warmup_s=0.15)
    return min(timing.quartiles(each)[1] for each in times.values())


@functools.cache
def copy_gbs(nbytes: int, device: torch.device) -> float:
    """Rate, in GB/s read and written together, of a device copy that moves `nbytes`: half read, half written.

    The better of the driver's copy and PyTorch's copying kernel (an elementwise one, here the absolute value).
    """
    count = max(nbytes // 2 // 4, 1)
    copies = timing.copies_needed(count * 4, device)
    sources = [torch.ones(count, dtype=torch.float32, device=device) for _ in range(copies)]
    targets = [torch.empty_like(x) for x in sources]
    calls: list[Callable[[int], object]] = [
        lambda i: targets[i].copy_(sources[i]),
        lambda i: torch.abs(sources[i], out=targets[i]),
    ]
    return 2 * count * 4 / _best_seconds(calls, copies, device) / 1e9


@functools.cache
def matrix_tflops(dtype: torch.dtype, device: torch.device) -> float:
    """Rate of the best matrix product in `dtype`: torch.matmul on random squares, the best size."""
    best = 0.0
    for size in MATRIX_SIZES[device.type]:
        generator = torch.Generator(device=device).manual_seed(0)
        a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
        seconds = _best_seconds([lambda i, a=a, b=b: a @ b], 1, device)
        best = max(best, 2 * size**3 / seconds / 1e12)
    return best
