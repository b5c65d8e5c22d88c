"""Where the time of a sweep goes: the cost of measuring is measured too."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

CHECK = "oracle and agreement check"
COMPILE = "first calls: compiling, tuning"
INPUTS = "inputs and their copies"
PREPARE = "preparing, capturing graphs"
SETTLE = "settling of clocks"
TIMING = "timing"
HOST = "host cost"
CEILINGS = "ceilings"
WAIT = "waiting for other jobs of the GPU"
REST = "rest: rows, intervals, start"

#: The harness's own cost: neither the project's kernels nor their compilation.
OWN = (INPUTS, PREPARE, REST)


class Phases:
    """A stopwatch per phase. An inner phase pauses the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.launched = 0.0  # of the timing, in the samples themselves
        self.settled = self.unsettled = 0  # groups whose clocks settled in time, or did not
        self._running = [REST]
        self._since = time.perf_counter()

    def _turn(self) -> None:
        now = time.perf_counter()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._turn()
        self._running.append(name)
        try:
            yield
        finally:
            self._turn()
            self._running.pop()

    @property
    def between(self) -> float:
        """Seconds of the timing outside of samples: emptying the L2, events, waiting."""
        return max(0.0, self.seconds[TIMING] - self.launched)

    @property
    def own(self) -> float:
        """Seconds that are the harness's own."""
        return self.between + sum(self.seconds[name] for name in OWN)

    def show(self, console: Console) -> None:
        """Print seconds and share of each phase, and what share of it all is the harness's own."""
        self._turn()
        total = sum(self.seconds.values()) or 1.0
        measured = max(total - self.seconds[WAIT] - self.own, 1e-9)
        table = Table(title=f"where {total:.0f} s went", title_justify="left", title_style="bold", padding=(0, 1))
        table.add_column("phase", no_wrap=True)
        table.add_column("seconds", justify="right")
        table.add_column("share", justify="right")
        parts = [(name, self.seconds[name]) for name in (CHECK, COMPILE, HOST, CEILINGS, SETTLE, WAIT)]
        parts += [("timing: the samples", self.launched), ("timing: between them", self.between)]
        parts += [(name, self.seconds[name]) for name in OWN]
        for name, seconds in parts:
            table.add_row(name, f"{seconds:.1f}", f"{seconds / total:.0%}")
        console.print(table)
        timing = self.seconds[TIMING]
        if timing:
            console.print(
                f"between samples (emptying the L2, events, waiting): {self.between / timing:.0%} of the timing; the "
                f"harness's own (that, {', '.join(OWN)}): {self.own / measured:.0%} of what it measures, "
                "which is all else",
                soft_wrap=True,
            )
        if self.unsettled:
            console.print(
                f"clocks were still moving at the first counted round of {self.unsettled} of "
                f"{self.settled + self.unsettled} groups",
                soft_wrap=True,
            )
