"""The host's cost of a Triton launch by the number of a kernel's arguments.

    python -m bench.launch_cost        # needs a GPU

A kernel of attention has up to 73 arguments: strides, lengths, options. This prints what they cost: the time of a
launch by Triton, which looks at every argument, and by :class:`triton_impl.runtime.launch_cache.Launch`, which does
not. Both are medians over rounds, while the GPU has nothing else to do.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

COUNTS = (1, 4, 16, 32, 48, 64, 80)
ROUNDS, CALLS = 15, 200

SOURCE = """import triton
import triton.language as tl


@triton.jit
def kernel(out_ptr, {names}):
    tl.store(out_ptr, {total})
"""


def made(folder: Path, count: int) -> Any:
    """A kernel of a tensor and `count` integers, whose sum it stores."""
    names = [f"i{i}" for i in range(count)]
    path = folder / f"arguments_{count}.py"
    path.write_text(SOURCE.format(names=", ".join(names), total=" + ".join(names)), encoding="utf-8")
    spec = util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def values(count: int) -> tuple[int, ...]:
    """Integers for which a kernel is specialised alike: none is 1, or a multiple of 16."""
    return tuple(16 * i + 3 for i in range(count))


def microseconds(call: Callable[[], object]) -> float:
    """The host's time of a call: the median over rounds that begin with an idle GPU."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(times)


def measure(folder: Path, count: int) -> tuple[float, float]:
    """Microseconds of a launch by Triton, and by ours."""
    from triton_impl.runtime.launch_cache import Launch

    kernel, given = made(folder, count), values(count)
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    launch = Launch(kernel, (1,), given, {})
    for _ in range(2):  # the first compiles
        kernel[(1,)](out, *given)
        launch(out)
    if (found := int(out)) != sum(given):
        raise RuntimeError(f"bench.launch_cost: a kernel of {count} integers stored {found}, expected {sum(given)}")
    return microseconds(lambda: kernel[(1,)](out, *given)), microseconds(lambda: launch(out))


def main() -> int:
    if not torch.cuda.is_available():
        print("python -m bench.launch_cost: no GPU is visible", file=sys.stderr)
        return 2
    table = Table(title=f"Host's cost of a Triton launch, µs, {torch.cuda.get_device_name()}")
    for column in ("integer arguments", "Triton", "Launch", "Launch, each argument more"):
        table.add_column(column, justify="right")
    first: tuple[int, float] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for count in COUNTS:
            by_triton, ours = measure(Path(folder), count)
            more = "" if first is None else f"{(ours - first[1]) / (count - first[0]):.3f}"
            first = first or (count, ours)
            table.add_row(str(count), f"{by_triton:.2f}", f"{ours:.2f}", more)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
