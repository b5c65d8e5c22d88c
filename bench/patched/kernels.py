"""Which kernels the passes of a model spend their time in: ``python -m bench patched --kernels``.

The time of a pass's kernels beside its span tells whether the GPU waits for the host.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from rich.console import Console
from rich.table import Table

from bench.measure import alone, environment
from bench.patched import measure
from bench.patched.rows import FORWARD, STEP
from bench.patched.subjects import Subject
from bench.profile import kernels
from bench.show.table import microseconds

#: Passes of which each call launches the same kernels.
PASSES = (FORWARD, STEP)
#: Lines of a table: the kernels that take longest.
LINES = 20


def look(subject: Subject, by: str, compiled: bool, passes: list[str], quick: bool, console: Console) -> None:
    """Print a table for each pass of one way, in a process that has run no other."""
    device = environment.device()
    alone.while_tuning(device)
    model = subject.make(quick, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    measure.patched(model, by)
    call = torch.compile(model) if compiled else model
    make = {FORWARD: measure.forward_of, STEP: measure.step_of}
    for pass_ in passes:
        once = make[pass_](subject, model, call, quick)
        once()  # compiles and tunes
        with alone.alone(device):
            found = kernels.profile(once, False, device, long=True)
        _show(f"{subject.family}, {'compiled' if compiled else 'eager'}, {by}: {pass_}", found, console)


def _show(title: str, found: kernels.Profile, console: Console) -> None:
    alike: dict[str, list[float]] = defaultdict(list)
    for kernel in found.kernels:
        alike[kernel.short].append(kernel.us)
    longest = sorted(alike.items(), key=lambda item: -sum(item[1]))
    table = Table(title=title, title_justify="left")
    table.add_column("kernel" if found.device == "cuda" else "operator", overflow="fold")
    for name in ("count", "time", "share"):
        table.add_column(name, justify="right")
    for name, times in longest[:LINES]:
        table.add_row(name, str(len(times)), microseconds(sum(times)), f"{sum(times) / found.whole_us:.1%}")
    console.print(table)
    rest = sum(sum(times) for _, times in longest[LINES:])
    said = f"{len(found.kernels)} in all: {microseconds(found.device_us)} of {microseconds(found.span_us)}"
    said += f", {microseconds(rest)} in others than these" if rest else ""
    if found.host_us is not None:
        said += f"; the host takes {microseconds(found.host_us)} to issue the pass"
    console.print(said, soft_wrap=True, highlight=False)
