"""One run on several GPUs: its group and settings, and the rows of each problem."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from bench.measure import environment, intervals
from bench.ranks import Group, RanksError, first_line
from bench.rows import store
from bench.scaling import timing
from bench.scaling.model import Machine
from bench.scaling.rows import (
    BY_MESSAGES,
    COMMUNICATION,
    LINK,
    ON_DTENSORS,
    ONE_GPU,
    OURS,
    PRODUCT,
    SYMMETRIC,
    UNFUSED,
    UNPATCHED,
    ScalingRow,
)
from bench.scaling.timing import Cost, Way
from kernel_ladder import table
from kernel_ladder.distributed import peer_copy
from kernel_ladder.distributed.exchange import messages_only
from kernel_ladder.spec import dtype_name

#: A way to run, by its role (:mod:`bench.scaling.rows`) and backend.
Name = tuple[str, str]
#: Warming up compiles kernels, and so may take this many times the timeout.
COMPILING = 4
#: Errors that are no faults: a backend does not take a call, or is not available.
REFUSALS = ("UnsupportedError", "UnavailableError")
#: One GPU is measured where a call takes fewer seconds.
LONGEST_ALONE_S = 3.0


@dataclass(frozen=True)
class Problem:
    """What all ways compute.

    `flops` is that of all GPUs, `sent` the bytes that each GPU sends, `one_gpu_does` the part of the whole that the row
    of one GPU measures.
    """

    op: str
    pass_: str
    shape: str
    flops: int
    sent: int
    options: dict[str, Any] = field(default_factory=dict)
    one_gpu_does: float = 1.0


@dataclass
class Run:
    """The group, the settings, and the rows so far (on rank 0)."""

    group: Group
    console: Console
    output: Path
    backend: str
    quick: bool
    dry: bool
    timeout_s: float
    seconds: float  # of rounds, for each way
    lengths: tuple[int, ...] = ()  # of the ring; none: those that fit the number of GPUs
    machine: Machine | None = None
    rows: list[ScalingRow] = field(default_factory=list)

    @property
    def gpus(self) -> int:
        return self.group.size

    @property
    def device(self) -> torch.device:
        return self.group.device

    def backends(self, op: str, *levels: str) -> list[str]:
        """The backend that was asked for; where that is "auto", on a GPU, these levels too if they are available."""
        if self.backend != "auto" or self.device.type != "cuda":
            return [self.backend]
        return [self.backend, *(level for level in levels if table.unavailable(op, level) is None)]

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def say(self, text: str) -> None:
        if self.group.rank == 0:
            self.console.print(text, soft_wrap=True, markup=False)

    def free(self) -> None:
        """Give cached memory back to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def guarded(self, what: str, times: float = 1.0) -> Iterator[None]:
        """End this process with a sentence if the block takes longer than the timeout: its peers may be gone."""
        limit = times * self.timeout_s

        def give_up() -> None:
            print(
                f"python -m bench.scaling: rank {self.group.rank} of {self.gpus}: {what} did not end within "
                f"{limit:g} s; another rank may be gone. --timeout sets another limit",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)

        timer = threading.Timer(limit, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def emit(self, row: ScalingRow) -> None:
        """Keep a row, and write it at once. Call it on every rank; rank 0 does."""
        if self.group.rank == 0:
            self.rows.append(row)
            store.append(self.output, row)

    def row(self, problem: Problem, name: Name, **values: Any) -> ScalingRow:
        role, backend = name
        return ScalingRow(
            op=problem.op,
            backend=backend,
            level=backend.partition(".")[0],
            pass_=problem.pass_,
            dtype=dtype_name(self.dtype),
            shape=problem.shape,
            options=dict(problem.options),
            set="scaling",
            role=role,
            gpus=1 if role == ONE_GPU else self.gpus,
            when=datetime.now(UTC).isoformat(timespec="milliseconds"),
            **environment.facts(),
            **values,
        )

    def refuse(self, problem: Problem, name: Name, reason: str) -> None:
        """Emit a row without a time, with the reason."""
        self.emit(self.row(problem, name, unsupported=reason))

    def wrong(self, problem: Problem, backend: str, fault: str) -> None:
        """Emit a row without a time, for ours is wrong, or not there at all."""
        if fault.startswith(REFUSALS):
            self.refuse(problem, (OURS, backend), fault)
            return
        row = self.row(problem, (OURS, backend))
        row.wrong = fault
        self.emit(row)

    def fault(self, check: Callable[[], str | None]) -> str | None:
        """What `check` finds on any rank, or raises; the same on every rank. None where nothing is wrong."""
        with self.guarded("checking", COMPILING):
            found, reason = self.group.agree(check)
            return reason or next((each for each in self.group.gather(found) if each), None)

    def both_transports(self, ways: Mapping[Name, Way]) -> dict[Name, Way]:
        """`ways`, and where hops go by copy engines, ours by messages too. Call it on every rank."""
        found = dict(ways)
        if peer_copy.usable("bench.scaling", dist.group.WORLD, self.device):
            for (role, backend), way in ways.items():
                if role == OURS:
                    found[BY_MESSAGES, backend] = Way(functools.partial(_by_messages, way.call))
        return found

    def measure(
        self,
        problem: Problem,
        ways: Mapping[Name, Way],
        predict: Callable[[Mapping[Name, float], str], float | None] = lambda seconds, backend: None,
    ) -> dict[Name, float]:
        """Time all ways of a problem, and emit their rows. Returns the medians, in seconds.

        `predict` computes what ours by a backend should take, from the medians.
        """
        what = f"{problem.op} {problem.shape} {problem.pass_}"
        self.say(f"… {what}")
        named = {" · ".join(name): name for name in ways}
        plain = {text: ways[name] for text, name in named.items()}
        with self.guarded(f"warming up {what}", COMPILING):
            costs, refused = timing.warm_up(self.group, plain)
        longest = sum(cost.whole for cost in costs.values()) * timing.MAX_ROUNDS + self.seconds * len(costs)
        with self.guarded(what, 1 + longest / self.timeout_s):
            times = self._rounds(what, plain, costs)
        medians = {named[text]: intervals.quartiles(found)[1] for text, found in times.items()}
        for text, reason in refused.items():
            self.refuse(problem, named[text], reason)
        for text, found in times.items():
            row = self._timed(problem, named[text], found, medians)
            row.host_us = 1e6 * costs[text].host
            if row.role == OURS and (predicted := predict(medians, row.backend)) is not None:
                row.predicted_us = 1e6 * predicted
            self.emit(row)
        self.free()
        return medians

    def _rounds(self, what: str, ways: Mapping[str, Way], costs: Mapping[str, Cost]) -> dict[str, list[float]]:
        try:
            return timing.rounds(self.group, ways, costs, self.seconds)
        except RanksError:
            raise
        except Exception as error:  # what ran before fails only where another rank is gone
            raise RanksError(f"rank {self.group.rank} of {self.gpus}, {what}: {first_line(error)}") from error

    def _timed(
        self,
        problem: Problem,
        name: Name,
        times: list[float],
        medians: Mapping[Name, float],
    ) -> ScalingRow:
        role = name[0]
        q1, seconds, q3 = intervals.quartiles(times)
        low, high = intervals.median_interval(times)
        row = self.row(problem, name, us=1e6 * seconds, us_q1=1e6 * q1, us_q3=1e6 * q3, rounds=len(times))
        row.us_low, row.us_high = (None if t is None else 1e6 * t for t in (low, high))
        if role not in (COMMUNICATION, LINK):
            row.flops = round(problem.flops * (problem.one_gpu_does if role == ONE_GPU else 1))
            row.tflops = row.flops / seconds / 1e12
            row.tflops_per_gpu = row.tflops / row.gpus
        if role not in (ONE_GPU, PRODUCT) and problem.sent:
            row.bytes, row.gbs = problem.sent, problem.sent / seconds / 1e9
        if role in (OURS, BY_MESSAGES, ON_DTENSORS, SYMMETRIC, UNFUSED, UNPATCHED):
            shares(row, seconds, medians, problem.one_gpu_does)
        return row


def _by_messages(call: Callable[[], Any]) -> Any:
    with messages_only():
        return call()


def shares(row: ScalingRow, seconds: float, medians: Mapping[Name, float], one_gpu_does: float = 1.0) -> None:
    """Efficiency, share of the product's rate, and share of communication hidden, where what they need is there.

    Where nothing unfused was measured (ring attention), its time is that of communication and of an n-th of one GPU's.
    """
    library = "torch.builtin" if row.role == SYMMETRIC else row.backend
    one, product, unfused = (medians.get((role, library)) for role in (ONE_GPU, PRODUCT, UNFUSED))
    communication = next((found for (role, _), found in medians.items() if role == COMMUNICATION), None)
    if one is not None:
        one /= one_gpu_does
        row.efficiency = one / (row.gpus * seconds)
        if unfused is None and communication is not None:
            unfused = one / row.gpus + communication
    if product is not None:
        row.of_product = product / seconds
    if row.role != UNFUSED and row.gpus > 1 and unfused is not None and communication:
        row.hidden = (unfused - seconds) / communication
