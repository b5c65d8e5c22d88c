"""A GPU and its host for one job at a time: who measures stops the other jobs of the same GPU meanwhile.

Most of a sweep's time goes into compiling, on the host. ``python -m bench.jobs --together N`` runs N jobs a GPU: some
compile while one measures. The one that measures holds a lock and has stopped the others (SIGSTOP): their threads take
no core, and their GPU contexts have nothing to run.
"""

from __future__ import annotations

import fcntl
import functools
import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import torch

from bench.measure import timing
from kernel_ladder import table

#: Names the folder of the jobs that share this process's GPU. Absent where it has the GPU for itself.
ENV_FOLDER = "KERNEL_LADDER_TOGETHER"

#: A kernel that does next to nothing ends in less: nothing else is in the GPU's queues.
QUIET_S = 150e-6
QUIET_IN_A_ROW = 10
#: The longest wait for what the others had launched before they were stopped.
PATIENCE_S = 60.0

_DOOR, _LOCK, _STOPS = "door", "lock", "stops"
_depth = 0


class Folder:
    """The jobs of one GPU, by process group, and the seconds in which one of them had stopped the others."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Wait until no job measures, and let none begin to.

        Who has just measured waits at the door until the next one has the lock: none measures twice while others wait.
        """
        with self._locked(_DOOR) as door, self._locked(_LOCK):
            fcntl.flock(door, fcntl.LOCK_UN)
            yield

    @contextmanager
    def _locked(self, name: str) -> Iterator[TextIO]:
        with (self.path / name).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield file
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile holds the file open

    def add(self, group: int) -> None:
        (self.path / str(group)).touch()

    def remove(self, group: int) -> None:
        """A job has ended. If it measured until then, the others go on."""
        (self.path / str(group)).unlink(missing_ok=True)
        with (self.path / _LOCK).open("a") as file, suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # else another measures, and lets them go on itself
            self.send(signal.SIGCONT, but=group)

    def send(self, number: signal.Signals, but: int) -> None:
        for file in self.path.iterdir():
            if file.name.isdecimal() and file.name != str(but):
                with suppress(ProcessLookupError):
                    os.killpg(int(file.name), number)

    def note(self, group: int, begin: float, end: float) -> None:
        with (self.path / _STOPS).open("a") as file:
            file.write(f"{group} {begin!r} {end!r}\n")

    def stopped_s(self, group: int, since: float) -> float:
        """Seconds since a time of ``time.monotonic()`` in which others had stopped this group."""
        with suppress(FileNotFoundError):
            lines = (line.split() for line in (self.path / _STOPS).read_text().splitlines())
            return sum(float(end) - max(float(begin), since) for by, begin, end in lines
                       if int(by) != group and float(end) > since)  # fmt: skip
        return 0.0


def _folder() -> Folder | None:
    path = os.environ.get(ENV_FOLDER)
    return None if path is None else Folder(Path(path))


def is_shared() -> bool:
    """Whether other jobs may be on this process's GPU."""
    return ENV_FOLDER in os.environ


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Within it no other job of this GPU runs. Without such jobs it does nothing."""
    global _depth
    folder, group = _folder(), os.getpgrp()
    if folder is None or _depth:
        yield
        return
    with folder.lock():
        begin = time.monotonic()
        folder.send(signal.SIGSTOP, but=group)
        _depth += 1
        try:
            _wait_until_quiet(device)
            yield
        finally:
            _depth -= 1
            folder.note(group, begin, time.monotonic())  # before they go on: they look it up
            folder.send(signal.SIGCONT, but=group)


def while_tuning(device: torch.device) -> None:
    """Let the Triton level's autotuner have the GPU alone while it times."""
    if is_shared() and table.unavailable("gelu", "triton") is None:
        from triton_impl.runtime import autotuner

        autotuner.undisturbed = functools.partial(alone, device)


class Stopped:
    """A stopwatch of the seconds in which other jobs had stopped this one."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        folder = _folder()
        return 0.0 if folder is None else folder.stopped_s(os.getpgrp(), self._since)


def _wait_until_quiet(device: torch.device) -> None:
    """Wait until the GPU has done what stopped jobs had launched. It runs their contexts and this one's in turn."""
    if device.type != "cuda":
        return
    tiny = torch.zeros(1, device=device)
    until, quiet = time.monotonic() + PATIENCE_S, 0
    while quiet < QUIET_IN_A_ROW and time.monotonic() < until:
        quiet = quiet + 1 if timing.wall(tiny.zero_, device)[0] < QUIET_S else 0
    if quiet < QUIET_IN_A_ROW:
        warnings.warn(f"after {PATIENCE_S:.0f} s the GPU still works for others; times may be too long", stacklevel=2)
