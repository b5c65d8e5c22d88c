"""Check, then time, every selected variant on every selected case, and write each row at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import kernel_ladder
from bench import announce, peers
from bench.measure import (
    alone,
    candidates,
    ceilings,
    choices,
    correctness,
    environment,
    phases,
    rounds,
    timing,
)
from bench.measure.cases import host_case, layouts_of
from bench.measure.selection import NEVER_CAPTURED, ONE_BACKWARD, TUNES_ITSELF, Group, Selection, groups
from bench.ranks import Board
from bench.rows import resume, store
from bench.rows.ratio import baseline_of
from bench.rows.store import Row
from bench.rows.tidy import tidy
from kernel_ladder import table
from kernel_ladder.errors import is_for_memory
from kernel_ladder.spec import Spec, as_leaves
from kernel_ladder.table import Variant
from kernel_ladder.testing.samples import make_inputs

#: Why a variant that was not found wrong has no time.
NO_MEMORY = "no memory is left for {}"

#: Seconds for the few rounds of a slow call in a quick sweep.
QUICK_PATIENCE_S = 1.0


class _Refused(Exception):
    """A variant gets no time: it does not take the case, is wrong (which its row says), or finds no memory."""

    def __init__(self, reason: str | None, for_memory: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.for_memory = reason, for_memory


class GpuLost(Exception):
    """A kernel has corrupted the CUDA context: this process can measure nothing more."""


class Sweep:
    """One run. Measures ceilings once per size, and skips rows in `standing`."""

    def __init__(
        self,
        selection: Selection,
        emit: Callable[[Row], None],
        device: torch.device,
        standing: Mapping[resume.Key, Row] | None = None,
        board: Board | None = None,
    ) -> None:
        self.selection, self.emit, self.device, self.standing = selection, emit, device, standing or {}
        self.board = board or Board()
        self.phases = phases.Phases()
        self.postponed = 0  # rows of which other jobs of the GPU may have had the memory
        self._chosen_rungs: dict[tuple[str, str, torch.dtype], list[Variant]] = {}
        self._names: dict[tuple[str, str, torch.dtype, str], dict[str, list[str]]] = {}
        self._first_calls: dict[str, float] = {}  # seconds, of the variants of a pass
        for row in self.standing.values():
            if row.host_us is not None:
                self.board.write(_host_cost(row.op, row.backend, row.pass_), (row.host_us, row.host_direct_us))

    def known(self, group: Group) -> dict[str, Variant]:
        """The variants of a group by name, before those are left out whose tuning takes too long."""
        ours = table.variants(group.op) if group.case.climb else self._levels_choices(group)
        theirs = peers.variants(group.op, self.selection.peers)
        return {v.name: v for v in (*filter(self.selection.takes, ours), *theirs)}

    def chosen(self, group: Group) -> list[Variant]:
        """The variants to measure for a group, including those that already have rows."""
        return [v for name, v in self.known(group).items() if self.selection.has_time_for(name, group)]

    def _levels_choices(self, group: Group) -> list[Variant]:
        """The baseline, the rung that each level's name stands for in each pass, and variants selected by name."""
        key = (group.op, group.case.id, group.dtype)
        if key not in self._chosen_rungs:
            wanted = {baseline_of(group.op), *(self.selection.backends or ()), *choices.to_measure(group, self.device)}
            self._chosen_rungs[key] = [v for v in table.variants(group.op) if v.name in wanted]
        return self._chosen_rungs[key]

    def _stands_for(self, group: Group, pass_: str, backend: str) -> list[str]:
        """The names among "auto" and the levels that stand for a rung in a call."""
        key = (group.op, group.case.id, group.dtype, pass_)
        if key not in self._names:
            self._names = {key: choices.names_of_rungs(group, pass_, self.device)}  # groups come one after the other
        return self._names[key].get(backend, [])

    def pending(self, group: Group, pass_: str) -> list[Variant]:
        """The variants of a pass without a row in `standing`, and the baseline that they are paired with."""
        chosen = self.chosen(group)
        missing = {v.name for v in chosen if self._missing(group, pass_, v.name)}
        return [v for v in chosen if v.name in missing or (missing and v.name == baseline_of(group.op))]

    def _missing(self, group: Group, pass_: str, backend: str) -> bool:
        return (group.op, backend, pass_, group.dtype_name, group.case.id) not in self.standing

    def is_finished(self, group: Group) -> bool:
        """Whether every row of a group stands."""
        return not any(self.pending(group, pass_) or [*self._empty_levels(group, pass_)] for pass_ in group.passes)

    def measure(self, group: Group) -> None:
        """Emit a row for every variant and pass of a group that has none yet."""
        spec = kernel_ladder.spec(group.op)
        torch._dynamo.reset()  # each case compiles afresh: past a few shapes torch.compile gives up on a function
        wanted = {pass_: self.pending(group, pass_) for pass_ in group.passes}
        for pass_ in group.passes:
            for level in self._empty_levels(group, pass_):
                self._give_up(self._row(spec, group, pass_, level), table.unavailable(group.op, level))
        if not any(wanted.values()):
            return
        environment.give_memory_back(self.device)
        try:
            with self.phases(phases.CHECK):
                backward = bool(wanted.get("backward"))
                expected = correctness.Expected.of(spec, group.case, group.dtype, self.device, backward)
        except torch.OutOfMemoryError:
            for pass_ in group.passes:
                for variant in wanted[pass_]:
                    self._no_memory(self._row(spec, group, pass_, variant.name), "the float64 oracle")
            return
        for pass_ in group.passes:
            if wanted[pass_]:
                self._measure_pass(spec, group, pass_, expected, wanted[pass_])
            torch.cuda.empty_cache()

    def measure_ceilings(self, failed: Callable[[str], None]) -> None:
        """Emit a row for each ceiling of a GPU that has none yet."""
        if self.device.type == "cuda":
            with self._alone(), self.phases(phases.CEILINGS):
                for row in ceilings.measure(self.device, self.selection.quick, failed, self.standing):
                    self.emit(row)

    def _measure_pass(
        self, spec: Spec, group: Group, pass_: str, expected: correctness.Expected, wanted: Sequence[Variant]
    ) -> None:
        """Time the variants in common rounds; those that ran out of memory again, each with the baseline alone."""
        self._first_calls.clear()
        for variant in self._measure_together(spec, group, pass_, expected, wanted, wanted):
            environment.give_memory_back(self.device)
            pair = [v for v in wanted if v.name in (variant.name, baseline_of(group.op))]
            self._measure_together(spec, group, pass_, expected, pair, [variant])

    def _measure_together(
        self,
        spec: Spec,
        group: Group,
        pass_: str,
        expected: correctness.Expected,
        wanted: Sequence[Variant],
        shown: Sequence[Variant],
    ) -> list[Variant]:
        """Emit the rows of the variants in `shown`.

        Returns those that ran out of memory beside variants other than the baseline, without a row.
        """
        backward, baseline = pass_ == "backward", baseline_of(group.op)
        try:
            with self.phases(phases.INPUTS):
                copies = candidates.Copies.of(expected, backward, self.device, group.case.together)
        except torch.OutOfMemoryError:
            for variant in shown:
                self._no_memory(self._row(spec, group, pass_, variant.name), "copies of the inputs")
            return []
        launches: dict[str, timing.Launch] = {}
        done: list[Row] = []
        short: list[Variant] = []
        with timing.side_stream(self.device):
            for variant in wanted:
                row = self._row(spec, group, pass_, variant.name)
                try:
                    launch = self._admit(variant, group, expected, copies, backward, row)
                except _Refused as refused:
                    if refused.for_memory and any(v.name not in (variant.name, baseline) for v in wanted):
                        short.append(variant)
                    elif variant in shown:
                        self._give_up(row, refused.reason, refused.for_memory)
                    self._check_alive(f"{group} {row.backend} {row.pass_}")
                    continue
                launches[variant.name] = launch
                row.graph = launch.graph
                if variant in shown:
                    done.append(row)
            if not done:
                return short
            try:
                with self._alone():
                    timed = self._time(launches, baseline)
            except Exception as error:
                if not is_for_memory(error):
                    self._check_alive(f"timing {group} {pass_}")
                    raise
                if len(launches.keys() - {baseline}) > 1:
                    return [*short, *(v for v in shown if v.name in launches)]
                for row in done:
                    self._no_memory(row, "emptying the L2 beside what is timed")
                return short
            del copies, launch
            launches.clear()  # frees the memory of their graphs, which a ceiling may need
        bandwidth, rate = self._ceilings_of(group, done[0].bytes)
        for row in done:
            row.ceiling_gbs, row.ceiling_tflops = bandwidth, rate
            timed[row.backend].write_into(row)
            self.emit(row)
        return short

    def _ceilings_of(self, group: Group, nbytes: int) -> tuple[float, float] | tuple[None, None]:
        """GB/s and TFLOP/s of the ceilings; None where there are none, or no memory for them beside the group."""
        if group.op in ceilings.WITHOUT_CEILING:
            return None, None
        with self._alone(), self.phases(phases.CEILINGS):
            try:
                return ceilings.copy_gbs(nbytes, self.device), ceilings.matrix_tflops(group.dtype, self.device)
            except torch.OutOfMemoryError:
                return None, None

    def _time(self, launches: Mapping[str, timing.Launch], baseline: str) -> dict[str, rounds.Timed]:
        """Let the clocks settle, then run the rounds that count."""
        slow = timing.apart(launches)
        with self.phases(phases.SETTLE):
            # At most as long as the measurement itself.
            fast = [launch for name, launch in launches.items() if name not in slow]
            settled = timing.settle(fast, min(self.selection.settle, self.selection.seconds))
            self.phases.settled += settled
            self.phases.unsettled += not settled and self.device.type == "cuda"

        def observe(span: timing.Span) -> None:
            self.phases.launched += span.end - span.begin

        patience = QUICK_PATIENCE_S if self.selection.quick else timing.SLOW_S
        with self.phases(phases.TIMING):
            return rounds.run(
                launches,
                baseline,
                seconds=self.selection.seconds,
                patience=patience,
                device=self.device,
                observe=observe,
            )

    def _admit(
        self,
        variant: Variant,
        group: Group,
        expected: correctness.Expected,
        copies: candidates.Copies,
        backward: bool,
        row: Row,
    ) -> timing.Launch:
        """Check a variant's results and prepare its timing. Raises _Refused where it gets no time."""
        reason = table.unavailable(variant.op, variant.level) if variant.level in table.LEVELS else None
        asked = as_leaves(expected.inputs) if backward else expected.inputs
        reason = reason or variant.unsupported(*asked, **group.case.options)
        if reason is None and backward:
            reason = ONE_BACKWARD.get(variant.name)
        if reason is not None:
            raise _Refused(reason)
        try:
            make = candidates.backward_call if backward else candidates.forward_call
            call = make(variant, copies)
            # One that is admitted again compiles nothing.
            row.compile_s = self._first_calls.setdefault(variant.name, self._first_call(variant, call))
            with self._alone(), self.phases(phases.PREPARE):
                returned, seconds, row.peak_mib = self._another(call)
                if variant.level == "xla":  # whose memory PyTorch does not count
                    row.peak_mib = None
            with self.phases(phases.CHECK):  # checks a later call: a kernel may be right only in its first
                if backward and variant.level == peers.LEVEL:  # may overwrite what it saved: run it on a new graph
                    returned = make(variant, copies)(0)
                found = expected.check(candidates.results(returned, backward))
                del returned
            row.error, row.bound = found.worst.error, found.worst.bound
            if not found.agrees:
                row.wrong = str(found)
                raise _Refused(None)
            with self._alone(), self.phases(phases.PREPARE):
                capture = not {variant.level, variant.name} & NEVER_CAPTURED
                launch = timing.prepare(call, copies.count, self.device, seconds=seconds, capture=capture)
            if not row.interpreted:
                with self._alone(), self.phases(phases.HOST):
                    row.host_us, row.host_direct_us = self._host_us(variant, group, expected, backward, launch)
            return launch
        except _Refused:
            raise
        except Exception as error:  # one broken kernel must not cost the rows of the others
            if correctness.was_interrupted(error):
                raise KeyboardInterrupt from error
            if is_for_memory(error):
                beside = "beside its inputs and the baseline"
                raise _Refused(f"out of memory on {environment.machine_name()}, {beside}", for_memory=True) from None
            row.wrong = f"raised {correctness.one_line(error)}"
            raise _Refused(None) from None

    def _first_call(self, variant: Variant, call: timing.Call) -> float:
        """Seconds of a call that may compile and tune, without those in which other jobs had stopped this one."""
        with self._alone(needed=bool({variant.level, variant.name} & TUNES_ITSELF)), self.phases(phases.COMPILE):
            stopped = alone.Stopped()
            return timing.wall(lambda: call(0), self.device)[0] - stopped.seconds

    @contextmanager
    def _alone(self, needed: bool = True) -> Iterator[None]:
        """The GPU for this process alone, if that is needed. The wait for it is a phase of its own."""
        with ExitStack() as stack:
            if needed:
                with self.phases(phases.WAIT):
                    stack.enter_context(alone.alone(self.device))
            yield

    def _check_alive(self, last: str) -> None:
        """Raise GpuLost where a kernel has left the GPU unusable; otherwise the next variant would get the blame."""
        try:
            timing.synchronize(self.device)
        except Exception as error:
            raise GpuLost(f"after {last} the GPU answers nothing but {correctness.one_line(error)}") from error

    def _give_up(self, row: Row, reason: str | None, for_memory: bool = False) -> None:
        """Emit a row without a time; none where other jobs of the GPU may have the memory that is short."""
        row.unsupported = reason
        if for_memory and alone.is_shared():
            self.postponed += 1
        else:
            self.emit(row)

    def _no_memory(self, row: Row, what: str) -> None:
        self._give_up(row, NO_MEMORY.format(what), for_memory=True)

    def _empty_levels(self, group: Group, pass_: str) -> Iterator[str]:
        """Selected levels that have no variant because they could not be loaded."""
        for level in table.LEVELS:
            wanted = self.selection.backends is None or level in self.selection.backends
            empty = not table.variants(group.op, level) and table.unavailable(group.op, level) is not None
            if wanted and empty and self._missing(group, pass_, level):
                yield level

    def _host_us(
        self,
        variant: Variant,
        group: Group,
        expected: correctness.Expected,
        backward: bool,
        launch: timing.Launch,
    ) -> tuple[float | None, float | None]:
        """Measured once for a variant's pass, by one rank: at a tiny case where this case's kernels take long."""
        if backward and (self.selection.quick or group.case.together):
            return None, None
        name = _host_cost(variant.op, variant.name, "backward" if backward else "forward")
        found = self.board.read(name)
        if found is None:
            case, inputs = group.case, expected.inputs
            if launch.seconds > timing.HOST_CALL_S * launch.calls * launch.repeats:
                case = host_case(case)
                inputs = make_inputs(case, group.dtype, self.device)
            found = candidates.host_us(variant, inputs, case.options, self.device, backward)
            self.board.write(name, found)
        return found[0], found[1]

    def _another(self, call: timing.Call) -> tuple[Any, float, float | None]:
        """What a call returns, its wall time in seconds, and the MiB that it allocates at most (None on a CPU)."""
        if self.device.type != "cuda":
            seconds, returned = timing.wall(lambda: call(0), self.device)
            return returned, seconds, None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds, returned = timing.wall(lambda: call(0), self.device)
        return returned, seconds, (torch.cuda.max_memory_allocated() - before) / 2**20

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
            dtype=group.dtype_name,
            shape=group.case.id,
            shapes=[shape and list(shape) for shape in group.case.shapes],
            options=dict(group.case.options),
            layouts=layouts_of(group.case),
            set=self.selection.set_name,
            names=list(group.names),
            chosen=self._stands_for(group, pass_, backend),
            interpreted=interpreted,
            bytes=spec.bytes(group.case, group.dtype.itemsize, backward),
            flops=spec.flops(group.case, backward),
            peer_version=peers.version(backend),
            when=datetime.now(UTC).isoformat(timespec="milliseconds"),
            **environment.facts(),
        )


def _host_cost(op: str, backend: str, pass_: str) -> str:
    """The name of a note on the ranks' board."""
    return f"host cost of {op} {backend} {pass_}"


def run(
    selection: Selection,
    output: Path,
    console: Console,
    standing: Mapping[resume.Key, Row] | None = None,
    board: Board | None = None,
) -> tuple[list[Row], bool]:
    """Measure, appending rows to `output` as they finish. Returns the run's rows, and whether it was interrupted.

    Rows in `standing` are not measured again, and belong to this run. Ranks with a common `board` share the cases.
    """
    device = environment.device()
    environment.leave_memory_to_pytorch()
    alone.while_tuning(device)
    # Gradients are timed again and again on one graph, which donated buffers forbid.
    torch._functorch.config.donated_buffer = False
    # Two variants may compile one formula, each for several shapes and with and without gradients.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    threads = torch.get_num_threads()
    if device.type == "cpu":
        # Shapes this small gain nothing from threads; on a busy machine, waiting for one takes longer than the call.
        torch.set_num_threads(1)
    emitted: list[Row] = []

    def emit(row: Row) -> None:
        store.append(output, row)
        emitted.append(row)

    def note(text: str) -> None:
        console.print(text, soft_wrap=True)

    sweep = Sweep(selection, emit, device, standing, board)
    todo = groups(selection, device)
    if not todo:
        part, parts = selection.share
        note(f"{f'share {part}/{parts}' if parts > 1 else 'what was chosen'} holds no case to measure")
    announce.left_out(sweep, todo, note)
    todo = [group for group in todo if not sweep.is_finished(group)]
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
        task = progress.add_task("ceilings", total=len(todo))
        try:
            if selection.ceilings:
                sweep.measure_ceilings(lambda failure: note(f"no ceiling: {failure}"))
            for group in sweep.board.shared_out(todo):
                progress.update(task, description=str(group))
                sweep.measure(group)
                progress.advance(task)
        except KeyboardInterrupt:
            interrupted = True
            kept = f"{len(emitted)} rows are kept in {output}, and --resume goes on from there"
            print(f"interrupted; {kept if emitted else 'nothing was measured yet'}", file=sys.stderr)
        except GpuLost as lost:
            kept = f"{len(emitted)} rows are kept in {output}, and --resume goes on behind them in a new process"
            print(f"{lost}; {kept}", file=sys.stderr)
        finally:
            torch.set_num_threads(threads)
    if sweep.postponed:
        note(f"{sweep.postponed} calls found no memory beside other jobs: run it again with --resume and the GPU alone")
    whole = [*sweep.standing.values(), *emitted]
    if emitted:
        whole = tidy(output, whole)
        sweep.phases.show(console)
    return [row for row in whole if row.op in (*selection.ops, store.CEILING)], interrupted
