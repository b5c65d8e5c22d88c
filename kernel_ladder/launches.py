"""The kernels that a call launches on the GPU, as PyTorch's profiler saw them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from kernel_ladder.inspect import Kernel


def launched(call: Callable[[], object]) -> list[Kernel]:
    """Run `call` once and return what it launched, in order, each with its launch's sizes and occupancy.

    Call it once before, so that what is compiled or tuned at first is not among it.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    found = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    return [_kernel(event) for event in found]


def _kernel(event: dict) -> Kernel:
    args = event.get("args", {})
    block = args.get("block")
    # The profiler counts the launch's shared memory as one; it is static and dynamic together.
    return Kernel(
        name=event["name"],
        registers=args.get("registers per thread"),
        dynamic_shared=args.get("shared memory"),
        threads=block[0] * block[1] * block[2] if block else None,
        grid=args.get("grid"),
    )
