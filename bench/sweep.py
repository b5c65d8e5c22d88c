"""Check, then time, every chosen variant on every chosen case, and write rows as they come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch._dynamo
import torch._functorch.config
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import kernel_ladder
from bench import candidates, ceilings, environment, gate, peers, rows, timing
from bench.cases import default_dtypes, host_case, sweep_cases
from bench.order import by_climb
from bench.rows import Row
from kernel_ladder import table
from kernel_ladder.spec import Case, Spec
from kernel_ladder.table import Variant

BASELINE = "torch.builtin"


@dataclass(frozen=True)
class Choice:
    """What to measure, and how long."""

    ops: Sequence[str]
    backends: Sequence[str] | None = None  # levels and variants; None for all
    dtypes: Sequence[torch.dtype] | None = None  # None for the default of each case
    passes: Sequence[str] = ("forward", "backward")
    quick: bool = False
    seconds: float = 0.7  # measuring, for all variants of one case, dtype and pass together
    warmup: float = 0.3
    peers: Sequence[str] = ()

    def takes(self, name: str) -> bool:
        """Whether a variant is to be measured. The baseline always is: speedups are paired with it."""
        if self.backends is None or name == BASELINE:
            return True
        return name in self.backends or name.partition(".")[0] in self.backends


@dataclass(frozen=True)
class Group:
    """What is measured together: the variants of one case, dtype and pass."""

    op: str
    case: Case
    dtype: torch.dtype
    passes: Sequence[str]

    def __str__(self) -> str:
        return f"{self.op} {self.case.id} {_name(self.dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def groups(choice: Choice, device: torch.device) -> list[Group]:
    return [
        Group(op, case, dtype, choice.passes)
        for op in choice.ops
        for case in sweep_cases(kernel_ladder.spec(op), device, choice.quick)
        for dtype in choice.dtypes or default_dtypes(case, device)
    ]


class Sweep:
    """One run. Host costs are measured once a variant, ceilings once a size."""

    def __init__(self, choice: Choice, emit: Callable[[Row], None], device: torch.device) -> None:
        self.choice, self.emit, self.device = choice, emit, device
        self._host: dict[tuple[str, str, str, torch.dtype], tuple[float | None, float | None]] = {}

    def measure(self, group: Group) -> None:
        """Emit a row for every variant and pass of a group."""
        spec = kernel_ladder.spec(group.op)
        torch._dynamo.reset()  # each case compiles afresh: past a few shapes torch.compile gives up on a function
        chosen = [v for v in table.variants(group.op) if self.choice.takes(v.name)]
        chosen += peers.variants(group.op, self.choice.peers)
        try:
            expected = gate.Expected.of(spec, group.case, group.dtype, self.device, "backward" in group.passes)
        except torch.OutOfMemoryError:
            for pass_ in group.passes:
                for variant in chosen:
                    self._give_up(self._row(spec, group, pass_, variant.name), "the float64 oracle needs more memory")
            return
        for pass_ in group.passes:
            self._measure_pass(spec, group, pass_, expected, chosen)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _measure_pass(
        self, spec: Spec, group: Group, pass_: str, expected: gate.Expected, chosen: Iterable[Variant]
    ) -> None:
        backward = pass_ == "backward"
        copies = candidates.Copies(expected, backward, self.device)
        launches: dict[str, timing.Launch] = {}
        done: list[Row] = []
        for level in self._empty_levels(group.op):
            self._give_up(self._row(spec, group, pass_, level), table.unavailable(group.op, level))
        with timing.side_stream(self.device):
            for variant in chosen:
                row = self._row(spec, group, pass_, variant.name)
                launch = self._admit(variant, group, expected, copies, backward, row)
                if launch is not None:
                    launches[variant.name] = launch
                    done.append(row)
            times = timing.interleave(
                launches, self.choice.seconds, BASELINE if BASELINE in launches else None, self.choice.warmup
            )
        if not done:
            return
        bandwidth = ceilings.copy_gbs(done[0].bytes, self.device)
        rate = ceilings.matrix_tflops(group.dtype, self.device)
        for row in done:
            row.graph = launches[row.backend].graph
            row.ceiling_gbs, row.ceiling_tflops = bandwidth, rate
            self._finish(row, times[row.backend], times.get(BASELINE))

    def _admit(
        self,
        variant: Variant,
        group: Group,
        expected: gate.Expected,
        copies: candidates.Copies,
        backward: bool,
        row: Row,
    ) -> timing.Launch | None:
        """Check a variant and make it ready to be timed; or emit its row with the reason, and return None."""
        reason = table.unavailable(variant.op, variant.level) if variant.level in table.LEVELS else None
        reason = reason or variant.unsupported(*expected.inputs, **group.case.options)
        if reason is not None:
            return self._give_up(row, reason)
        try:
            row.compile_s = timing.wall(lambda: expected.first_call(variant, backward), self.device)[0]
            found = expected.check(variant, backward)
            row.error, row.bound = found.worst.error, found.worst.bound
            if not found.agrees:
                row.wrong = str(found)
                return self._give_up(row, None)
            make = candidates.backward_call if backward else candidates.forward_call
            call = make(variant, copies)
            call(0)
            row.peak_mib = self._peak_mib(call)
            launch = timing.prepare(call, copies.count, self.device)
            if not row.interpreted:
                row.host_us, row.host_direct_us = self._host_us(variant, group, backward)
            return launch
        except torch.OutOfMemoryError:
            return self._give_up(row, f"out of memory on {environment.machine_name()}")
        except Exception as error:  # one broken kernel must not cost the rows of the others
            row.wrong = f"raised {gate.one_line(error)}"
            return self._give_up(row, None)

    def _give_up(self, row: Row, reason: str | None) -> None:
        row.unsupported = reason
        self.emit(row)

    def _empty_levels(self, op: str) -> Iterator[str]:
        """Levels that are wanted and have no variant to show, because they could not be loaded at all."""
        for level in table.LEVELS:
            wanted = self.choice.backends is None or level in self.choice.backends
            if wanted and not table.variants(op, level) and table.unavailable(op, level) is not None:
                yield level

    def _host_us(self, variant: Variant, group: Group, backward: bool) -> tuple[float | None, float | None]:
        key = (variant.op, variant.name, "backward" if backward else "forward", group.dtype)
        if key not in self._host:
            # Without a GPU the case is tiny itself.
            case = host_case(group.case) if self.device.type == "cuda" else group.case
            self._host[key] = candidates.host_us(variant, case, group.dtype, self.device, backward)
        return self._host[key]

    def _peak_mib(self, call: timing.Call) -> float | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(0)
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def _row(self, spec: Spec, group: Group, pass_: str, backend: str) -> Row:
        level = backend.partition(".")[0]
        backward = pass_ == "backward"
        interpreted = False
        if level == "triton" and table.unavailable(group.op, level) is None:
            import triton_impl

            interpreted = triton_impl.interpreted()
        return Row(
            op=group.op,
            backend=backend,
            level=level,
            pass_=pass_,
            dtype=_name(group.dtype),
            shape=group.case.id,
            shapes=[list(shape) for shape in group.case.shapes if shape is not None],
            options=dict(group.case.options),
            interpreted=interpreted,
            bytes=spec.bytes(group.case, group.dtype.itemsize, backward),
            flops=spec.flops(group.case, backward),
            peer_version=peers.version(backend),
            when=datetime.now(UTC).isoformat(timespec="milliseconds"),
            **environment.facts(),
        )

    def _finish(self, row: Row, times: list[float | None], baseline: list[float | None] | None) -> None:
        row.us_q1, row.us, row.us_q3 = (1e6 * t for t in timing.quartiles(times))
        row.rounds = sum(t is not None for t in times)
        row.gbs, row.tflops = row.bytes / row.us / 1e3, row.flops / row.us / 1e6
        row.of_ceiling = row.least_us / row.us
        row.speedup = None if baseline is None else timing.paired_ratio(baseline, times)
        self.emit(row)


def run(choice: Choice, output: Path, console: Console) -> tuple[list[Row], bool]:
    """Measure, appending rows to `output` as they finish. Returns them, and whether the run was interrupted."""
    device = environment.device()
    # Gradients are timed again and again on one graph, which donated buffers forbid.
    torch._functorch.config.donated_buffer = False
    # Two variants may compile one formula, each for several shapes and with and without gradients.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    threads = torch.get_num_threads()
    if device.type == "cpu":
        # Shapes this small do not gain by threads, and on a busy machine waiting for one drowns the call.
        torch.set_num_threads(1)
    emitted: list[Row] = []

    def emit(row: Row) -> None:
        rows.append(output, row)
        emitted.append(row)

    sweep = Sweep(choice, emit, device)
    interrupted = False
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with progress:
        todo = groups(choice, device)
        task = progress.add_task("", total=len(todo))
        try:
            for group in todo:
                progress.update(task, description=str(group))
                sweep.measure(group)
                progress.advance(task)
        except KeyboardInterrupt:
            interrupted = True
            print(f"interrupted; {len(emitted)} rows are kept in {output}", file=sys.stderr)
        finally:
            torch.set_num_threads(threads)
    if emitted:
        rows.write(output, by_climb(rows.latest(rows.read(output))))  # tidy: superseded rows go
    return emitted, interrupted
