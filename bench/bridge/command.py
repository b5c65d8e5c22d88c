"""``python -m bench bridge``: the xla level beside plain JAX, in the same rounds, and the host's cost of the bridge.

Plain JAX is the same compiled program, called on arrays of JAX's own. Both are timed by the clock on the wall, over
many calls and until the device is done, because JAX launches on streams that PyTorch's events do not see. At the large
shapes the device is what takes this time. At a tiny shape the host does: there the cost of a call stands apart.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import kernel_ladder
from bench.bridge import rows
from bench.bridge.rows import BridgeRow
from bench.measure import environment, timing
from bench.measure.cases import host_case
from bench.show.table import microseconds
from bench.usage import UsageError, known, split
from kernel_ladder import table
from kernel_ladder.spec import PASSES, Case, as_tuple, has_gradient
from kernel_ladder.testing.samples import make_grad, make_inputs

RUNG = "xla.jit"
#: The shape at which an operation is timed: a call takes the device longer than the host.
SHAPES = {
    "gelu": "8192x16384 tanh",
    "softmax": "8192x16384",
    "layer_norm": "8192x16384",
    "rms_norm": "8192x16384",
    "swiglu": "8192x16384",
    "rope": "B4 H32 S4096 D128",
    "matmul": "8192x8192x8192",
    "attention": "B4 H16 S4096 D128 causal",
}
#: What the host's cost of passing tensors should be at most, in microseconds a call.
TARGET_US = 40
ROUNDS, SAMPLE_S = 15, 0.02
#: Calls issued at once, fewer than the 32 that JAX lets wait for the device; and how often.
ISSUED, BATCHES = 20, 30
HEADER = ["operation", "pass", "plain JAX", "`xla.jit`", "×", "host: JAX", "with tensors", "bridge", "whole call"]


@dataclass(frozen=True)
class Way:
    """A way to call: ``call()`` issues, ``wait(result)`` returns when the device is done."""

    call: Callable[[], Any]
    wait: Callable[[Any], Any]

    def seconds(self, calls: int) -> float:
        """Of one call among `calls`, until the device is done."""
        begin, found = time.perf_counter(), None
        for _ in range(calls):
            found = self.call()
        self.wait(found)
        return (time.perf_counter() - begin) / calls

    def host_seconds(self) -> float:
        """To issue one call among `ISSUED`."""
        begin, found = time.perf_counter(), None
        for _ in range(ISSUED):
            found = self.call()
        taken = time.perf_counter() - begin
        self.wait(found)
        return taken / ISSUED


class Setting:
    """A pass of an operation at a case: the ways to call it, on the same values."""

    def __init__(self, op: str, pass_: str, case: Case, dtype: torch.dtype, device: torch.device) -> None:
        from xla_impl import bridge, rung

        (variant,) = table.named(op, RUNG)  # loads the level
        jax, spec, programs = bridge.jax(), kernel_ladder.spec(op), rung.PROGRAMS[op, RUNG]
        inputs, options = make_inputs(case, dtype, device), dict(case.options)
        static, traced = programs.split(options, inputs[0])
        if pass_ == PASSES[0]:
            tensors, program = inputs, programs.forward(static)
            public, given = getattr(kernel_ladder, op), spec.named(inputs)

            def call() -> Any:
                return public(**given, **options, backend=RUNG)

        else:
            needs = tuple(has_gradient(x) for x in inputs)
            grad, saved = make_grad(spec, inputs, options), variant.forward(*inputs, **options)[1]
            wanted = tuple(i for i, needed in enumerate(needs) if needed)
            tensors, program = (*inputs, *as_tuple(grad)), programs.backward(static, len(inputs), wanted)

            def call() -> Any:
                return variant.backward(saved, grad, needs)

        arrays = [None if x is None else jax.numpy.array(bridge.to_jax(x), copy=True) for x in tensors]
        on_cpu = device.type == "cpu"

        def plain() -> Any:
            found = program(*arrays, traced)
            return jax.block_until_ready(found) if on_cpu else found  # as the bridge waits for a CPU

        def synchronize(_: Any) -> None:
            timing.synchronize(device)

        def imported() -> Any:
            return [bridge.to_jax(x) for x in tensors] if on_cpu else bridge.operands(tensors, bridge.Order(device))

        done = jax.block_until_ready(plain())
        of_done = None if on_cpu else bridge.Order(device)
        self.plain = Way(plain, jax.block_until_ready)
        self.run = Way(lambda: bridge.run(program, tensors, traced), synchronize)
        self.call = Way(call, synchronize)
        self.imported = Way(imported, jax.block_until_ready)
        self.exported = Way(lambda: [bridge.to_torch(y, device, of_done) for y in done], synchronize)
        #: Results of plain JAX and of the bridge, which are equal.
        self.results = self.exported.call(), list(self.run.call())


def _in_rounds(ways: Sequence[Way], one: Callable[[Way], float], rounds: int) -> list[list[float]]:
    """A time of each way in every round, in an order that changes."""
    times: list[list[float]] = [[] for _ in ways]
    order, places = random.Random(0), list(range(len(ways)))
    for way in ways:
        one(way)  # warm
    for _ in range(rounds):
        order.shuffle(places)
        for place in places:
            times[place].append(one(ways[place]))
    return times


def case_of(op: str) -> Case:
    """The case of the sweep that :data:`SHAPES` names."""
    return next(case for case in kernel_ladder.spec(op).sweep if case.id == SHAPES[op])


def measure(op: str, pass_: str, case: Case, dtype: torch.dtype, device: torch.device) -> BridgeRow:
    """The row of a pass.

    Raises:
        AssertionError: the results of the bridge are not plain JAX's.
    """
    from xla_impl import bridge

    with torch.no_grad():
        large = Setting(op, pass_, case, dtype, device)
        torch.testing.assert_close(*large.results, msg=lambda text: f"{op} {pass_}: {text}")
        large.plain.seconds(2)
        calls = max(3, math.ceil(SAMPLE_S / large.plain.seconds(3)))
        plain, ours = _in_rounds([large.plain, large.call], lambda way: way.seconds(calls), ROUNDS)
        small_case = host_case(case)
        small = Setting(op, pass_, small_case, dtype, device)
        ways = [small.plain, small.run, small.call, small.imported, small.exported]
        host = [1e6 * min(times) for times in _in_rounds(ways, Way.host_seconds, BATCHES)]
    facts = environment.facts()
    return BridgeRow(
        op, pass_, str(dtype).removeprefix("torch."), case.id,
        1e6 * statistics.median(plain), 1e6 * statistics.median(ours),
        statistics.median(b / a for a, b in zip(plain, ours, strict=True)), small_case.id, *host,
        facts["gpu"], facts["torch"], bridge.jax().__version__, facts["commit"], facts["dirty"],
        datetime.now(UTC).isoformat(timespec="milliseconds"),
    )  # fmt: skip


def main(argv: Sequence[str], console: Console) -> int:
    """Returns the exit code: 0, or 2 for a bad command line or a machine without JAX."""
    parser = argparse.ArgumentParser(
        prog="python -m bench bridge",
        description="Time the xla level beside plain JAX, and the host's cost of passing tensors. Rows go to "
        "bench-results/bridge/<machine>.jsonl.",
    )
    parser.add_argument("--op", action="append", metavar="NAME[,NAME]", help=f"of {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to try the command")
    args = parser.parse_args(argv)
    environment.leave_memory_to_pytorch()
    try:
        ops = [known("operation", op, list(SHAPES)) for op in split("--op", args.op, SHAPES)] or list(SHAPES)
        if reason := table.unavailable(ops[0], RUNG.partition(".")[0]):
            raise UsageError(reason)
    except UsageError as error:
        print(f"python -m bench bridge: {error}", file=sys.stderr)
        return 2
    device = environment.device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    made = []
    for op in ops:
        case = host_case(case_of(op)) if args.quick else case_of(op)
        for pass_ in PASSES:
            made.append(measure(op, pass_, case, dtype, device))
            environment.give_memory_back(device)
    rows.save(rows.results_file(), made)
    show(made, console)
    console.print(f"the rows are in {rows.results_file()}", soft_wrap=True, highlight=False)
    return 0


def show(made: Sequence[BridgeRow], console: Console) -> None:
    """Print a table of rows, and of what the bridge's cost consists."""
    shown = Table(title="The xla level beside plain JAX", title_justify="left")
    for name in (*(name.replace("`", "") for name in HEADER), "of it import", "export"):
        shown.add_column(name, justify="left" if name in HEADER[:2] else "right")
    for row in made:
        shown.add_row(*cells(row), microseconds(row.host_import_us), microseconds(row.host_export_us))
    console.print(shown)
    console.print(summary(made), highlight=False)


def cells(row: BridgeRow) -> list[str]:
    """A row's values under :data:`HEADER`."""
    host = (row.host_plain_us, row.host_run_us, row.bridge_us, row.host_call_us)
    times = (microseconds(row.plain_us), microseconds(row.ours_us), f"{row.ratio:.2f}")
    return [f"{row.op} {row.shape}", row.pass_, *times, *map(microseconds, host)]


def summary(made: Sequence[BridgeRow]) -> str:
    """The ratios and the bridge's costs in two sentences."""
    ratios, costs = sorted(row.ratio for row in made), sorted(row.bridge_us for row in made)
    within = sum(cost <= TARGET_US for cost in costs)
    return (
        f"xla.jit takes {statistics.median(ratios):.2f} × plain JAX at the median, {ratios[-1]:.2f} at most. "
        f"The bridge costs the host {microseconds(statistics.median(costs))} a call at the median, "
        f"{microseconds(costs[-1])} at most, {TARGET_US} µs or less in {within} of {len(costs)} rows."
    )
