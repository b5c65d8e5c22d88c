"""``python -m bench dynamic``: call an operation at one length after the other, by every way to compile it.

The lengths are the rows of a matrix of fixed width, as tokens are. Every length is new once: its first call shows
whether something is compiled. Caches on disk are left aside, so that what is compiled takes its whole time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import kernel_ladder
from bench.dynamic import rows
from bench.dynamic.rows import DynamicRow
from bench.measure import environment, timing
from bench.measure.correctness import one_line
from bench.show.table import microseconds
from bench.usage import UsageError, known, split
from kernel_ladder import table

#: What a user of PyTorch writes, by operation, and how many matrices it takes.
FUNCTIONS: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "softmax": (lambda x: torch.softmax(x, -1), 1),
    "rms_norm": (lambda x: F.rms_norm(x, x.shape[-1:]), 1),
    "swiglu": (lambda gate, up: F.silu(gate) * up, 2),
}
#: Rows of the matrices, in the order of the calls. PyTorch recompiles a function eight times, and no more. None is the
#: width: PyTorch would take equal sizes for one variable.
LENGTHS = (2048, 1000, 4000, 777, 3000, 512)
WIDTH = 4096
#: Calls of each length whose mean is a later call's time.
CALLS = 20

EAGER = "eager"
#: Of torch.compile: what `dynamic=` is.
COMPILED: dict[str, bool | None] = {
    "torch.compile(dynamic=False)": False,
    "torch.compile": None,
    "torch.compile(dynamic=True)": True,
}
#: Of this package: the backend.
BACKENDS = ("xla.jit", "triton", "cuda")
#: What JAX reports for each program that it compiles.
COMPILES = "/jax/core/compile/backend_compile_duration"


def ways(op: str) -> list[str]:
    """Every way to call an operation, the uncompiled one first."""
    return [EAGER, *COMPILED, *BACKENDS]


def _callable(op: str, way: str) -> Callable[..., torch.Tensor]:
    function, _ = FUNCTIONS[op]
    if way == EAGER:
        return function
    if way in COMPILED:
        return torch.compile(function, dynamic=COMPILED[way])
    ours = getattr(kernel_ladder, op)
    shape = {"rms_norm": lambda x: (x.shape[-1:],)}.get(op, lambda *_: ())
    return lambda *tensors: ours(*tensors, *shape(*tensors), backend=way)


@contextlib.contextmanager
def without_caches() -> Iterator[None]:
    """Nothing that an earlier process compiled is found, and nothing is kept."""
    import torch._inductor.config as inductor

    with (
        tempfile.TemporaryDirectory() as folder,
        inductor.patch(force_disable_caches=True),
        mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": folder}),
    ):
        yield


@contextlib.contextmanager
def counting(way: str) -> Iterator[Callable[[], int | None]]:
    """Yields what tells how many programs were compiled since; None where the compiler does not tell."""
    if way in COMPILED:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    elif way.startswith("xla"):
        from xla_impl import bridge

        events: list[str] = []
        bridge.jax().monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.append(event))
        yield lambda: events.count(COMPILES)
    else:
        yield lambda: None


def measure(
    op: str, way: str, lengths: Sequence[int], width: int, dtype: torch.dtype, device: torch.device
) -> DynamicRow:
    """The row of a way: first calls of all lengths, then later calls of each.

    Raises:
        AssertionError: a result is not PyTorch's own.
    """
    eager, operands = FUNCTIONS[op]
    facts = environment.facts()
    row = DynamicRow(
        op, way, str(dtype).removeprefix("torch."), list(lengths), width, [], None, None, facts["gpu"], facts["torch"],
        facts["commit"], facts["dirty"], datetime.now(UTC).isoformat(timespec="milliseconds"),
    )  # fmt: skip
    if way in BACKENDS and (reason := table.unavailable(op, way.partition(".")[0])):
        return dataclasses.replace(row, unsupported=reason)
    if way == "triton" and device.type == "cpu":
        return dataclasses.replace(row, unsupported="interpreted on a CPU: its times say nothing")
    inputs = [[torch.randn(n, width, device=device).to(dtype) for _ in range(operands)] for n in lengths]
    call = _callable(op, way)
    first, later = [], []
    with counting(way) as programs:
        try:
            for tensors in inputs:
                timing.synchronize(device)
                begin = time.perf_counter()
                found = call(*tensors)
                timing.synchronize(device)
                first.append(time.perf_counter() - begin)
                torch.testing.assert_close(found, eager(*tensors), msg=lambda text: f"{op} {way}: {text}")
            for tensors in inputs:
                timing.synchronize(device)
                begin = time.perf_counter()
                for _ in range(CALLS):
                    call(*tensors)
                timing.synchronize(device)
                later.append((time.perf_counter() - begin) / CALLS)
        except (kernel_ladder.UnsupportedError, kernel_ladder.UnavailableError) as error:
            return dataclasses.replace(row, unsupported=one_line(error))
        count = programs()
    return dataclasses.replace(row, first_s=first, programs=count, later_us=1e6 * sum(later) / len(later))


def _warm_up(device: torch.device) -> None:
    """What a process does once: a context of the GPU, and what Dynamo, Inductor and XLA import."""
    x = torch.ones(8, device=device)
    torch.compile(lambda x: x + 1)(x)
    if table.unavailable("add", "xla") is None:
        kernel_ladder.add(x, x, backend="xla.jit")
    timing.synchronize(device)


def main(argv: Sequence[str], console: Console) -> int:
    """Returns the exit code: 0, or 2 for a bad command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench dynamic",
        description="Call operations at changing lengths: what each compiler does when one is new, and what later "
        "calls cost. Rows go to bench-results/dynamic/<machine>.jsonl.",
    )
    parser.add_argument(
        "--op", action="append", metavar="NAME[,NAME]", help=f"of {', '.join(FUNCTIONS)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="short lengths of narrow rows, to try the command")
    args = parser.parse_args(argv)
    try:
        ops = [known("operation", op, FUNCTIONS) for op in split("--op", args.op, FUNCTIONS)] or list(FUNCTIONS)
    except UsageError as error:
        print(f"python -m bench dynamic: {error}", file=sys.stderr)
        return 2
    device = environment.device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lengths, width = ([max(1, n // 64) for n in LENGTHS], 64) if args.quick else (LENGTHS, WIDTH)
    made = []
    with without_caches():
        _warm_up(device)
        for op in ops:
            made += [measure(op, way, lengths, width, dtype, device) for way in ways(op)]
    rows.save(rows.results_file(), made)
    show(made, console)
    console.print(f"the rows are in {rows.results_file()}", soft_wrap=True, highlight=False)
    return 0


def show(made: Sequence[DynamicRow], console: Console) -> None:
    """Print a table of rows."""
    shown = Table(title="Calls of changing lengths", title_justify="left")
    for name in ("operation", "way", "first call", "each new length", "programs", "later calls"):
        shown.add_column(name, justify="left" if name in ("operation", "way") else "right")
    for row in made:
        shown.add_row(row.op, row.way, *cells(row))
    console.print(shown)


def cells(row: DynamicRow) -> list[str]:
    """First call, median of the first calls of the other lengths, programs, later calls; why there are none."""
    if row.later_us is None:
        return ["–", "–", "–", row.unsupported or "–"]
    others = sorted(row.first_s[1:])
    new = others[len(others) // 2] if others else None
    return [
        microseconds(1e6 * row.first_s[0]),
        "–" if new is None else microseconds(1e6 * new),
        "–" if row.programs is None else str(row.programs),
        microseconds(row.later_us),
    ]
