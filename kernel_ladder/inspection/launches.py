"""The kernels that a call launches on the GPU, as PyTorch's profiler records them."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernel_ladder.inspection.architecture import ARCHITECTURES
from kernel_ladder.inspection.inspect import Kernel, this_gpu


def launched(call: Callable[[], object]) -> list[Kernel]:
    """Run `call` once and return its kernels in launch order, each with its launch sizes and occupancy.

    Run `call` once before, so that compilation and tuning are not recorded.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # Some releases warn that events are cleared at the end of a cycle. There is one cycle.
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    arch = ARCHITECTURES.get(this_gpu() or 0)
    found = [_kernel(e) for e in sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])]
    for kernel in found:
        if arch is not None:
            kernel.fill_occupancy(arch)
    return found


def _kernel(event: dict[str, Any]) -> Kernel:
    args = event.get("args", {})
    block = args.get("block")
    # The profiler reports static and dynamic shared memory as one number.
    return Kernel(
        name=event["name"],
        registers=args.get("registers per thread"),
        dynamic_shared=args.get("shared memory"),
        threads=block[0] * block[1] * block[2] if block else None,
        grid=args.get("grid"),
    )
