"""The kernels that a call launches on the GPU, as PyTorch's profiler records them."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernel_ladder.errors import InspectError
from kernel_ladder.inspection.architecture import ARCHITECTURES
from kernel_ladder.inspection.inspect import Kernel, this_gpu

#: Recordings to make until one is complete: the profiler of some releases loses events, at times all of them.
RECORDINGS = 4
#: In the name of the kernel that fills a tensor.
KNOWN = "FillFunctor"


def launched(call: Callable[[], object]) -> list[Kernel]:
    """Run `call` and return its kernels in launch order, each with its launch sizes and occupancy.

    A known kernel runs before and after it. A recording without both has lost events, and is made again. Run `call`
    once before, so that compilation and tuning are not recorded.

    Raises:
        InspectError: no recording was complete.
    """
    for _ in range(RECORDINGS):
        recorded = sorted((e for e in _recorded(call) if e.get("cat") == "kernel"), key=lambda e: e["ts"])
        if len(recorded) >= 2 and all(KNOWN in recorded[at]["name"] for at in (0, -1)):
            break
    else:
        raise InspectError(f"PyTorch's profiler lost kernels in {RECORDINGS} recordings of the call: try again")
    arch = ARCHITECTURES.get(this_gpu() or 0)
    found = [_kernel(event) for event in recorded[1:-1]]
    for kernel in found:
        if arch is not None:
            kernel.fill_occupancy(arch)
    return found


def _recorded(call: Callable[[], object]) -> list[dict[str, Any]]:
    """The events of a trace of `call`, between two kernels that fill a tensor."""
    from torch.profiler import ProfilerActivity, profile

    filled = torch.empty(1, device="cuda")
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # Some releases warn that events are cleared at the end of a cycle. There is one cycle.
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            filled.fill_(1)
            torch.cuda.synchronize()
            call()
            torch.cuda.synchronize()
            filled.fill_(1)
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        return list(json.loads(trace.read_text())["traceEvents"])


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
