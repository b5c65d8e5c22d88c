"""What the processes of a test run share: the cores, and one GPU, whose memory large tests ask for."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import torch

Item = TypeVar("Item")

GIB = 2**30
#: GPU memory that one worker may use without asking: its CUDA context, what its allocator keeps, ordinary tests.
WORKER_BYTES = 3 * GIB
#: Of a GPU's memory, the part that the workers' own shares may take. The rest is for tests that ask.
WORKERS_PART = 0.6
#: How long a test waits, once its turn has come, for memory that other processes are about to free.
PATIENCE_S = 60.0
POLL_S = 0.05


def worker_count(cores: int, gpu_bytes: int | None) -> int:
    """How many pytest workers to start on `cores` CPU cores, where the GPU has `gpu_bytes` of memory (None: no GPU).

    A core is left for the driver's threads where there is a GPU.
    """
    if gpu_bytes is None:
        return max(1, cores)
    return max(1, min(cores - 1, int(WORKERS_PART * gpu_bytes) // WORKER_BYTES))


def long_first(items: Sequence[Item], is_long: Callable[[Item], bool], workers: int) -> list[Item]:
    """`items` in an order in which each worker begins with its share of the long ones.

    ``--dist worksteal`` hands each worker an equal part of the items, one after another. A worker without work takes
    the end of another's part: long items that stand together would run one by one.
    """
    long = [item for item in items if is_long(item)]
    short = [item for item in items if not is_long(item)]
    order: list[Item] = []
    for worker in range(workers):
        size = (len(items) - len(order)) // (workers - worker)
        share = long[worker::workers]
        few = max(0, size - len(share))
        order += [*share, *short[:few]]
        del short[:few]
    return order


class Ledger:
    """Bytes that live processes have asked for, in a file that one process reads or writes at a time."""

    def __init__(self, path: Path, room: int) -> None:
        self.path, self.room = path, room

    @contextlib.contextmanager
    def _entries(self) -> Iterator[dict[str, int]]:
        """What is asked for, by process; written back at the end. A process that died asks for nothing."""
        with open(self.path, "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            entries = {pid: n for pid, n in json.loads(file.read() or "{}").items() if _is_alive(int(pid))}
            yield entries
            file.seek(0)
            file.truncate()
            json.dump(entries, file)

    def take(self, nbytes: int) -> bool:
        """Enter this process's request, unless what others hold leaves no room. The only request always fits."""
        with self._entries() as entries:
            others = [n for pid, n in entries.items() if pid != str(os.getpid())]
            fits = not others or sum(others) + nbytes <= self.room
            if fits:
                entries[str(os.getpid())] = nbytes
            return fits

    def give_back(self) -> None:
        with self._entries() as entries:
            entries.pop(str(os.getpid()), None)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _until(is_so: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (found := is_so()) and time.monotonic() < end:
        time.sleep(POLL_S)
    return found


@contextlib.contextmanager
def gpu_memory(nbytes: int) -> Iterator[None]:
    """Keep `nbytes` of the current GPU's memory for the block, after waiting for the other workers of this run.

    Skips the test, with the two numbers, on a GPU that is too small or whose memory other programs hold.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    needed = f"needs {nbytes / GIB:.1f} GiB of GPU memory"
    if nbytes > total:
        pytest.skip(f"{needed}, the GPU has {total / GIB:.1f}")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ledger = None
    if workers > 1:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "run")
        path = Path(tempfile.gettempdir(), f"kernel-ladder-gpu-memory-{run}.json")
        ledger = Ledger(path, room=total - workers * WORKER_BYTES)
        while not ledger.take(nbytes):  # pytest-timeout ends a wait without end
            time.sleep(POLL_S)
    try:
        if not _until(lambda: torch.cuda.mem_get_info()[0] >= nbytes, PATIENCE_S if ledger else 0):
            free = torch.cuda.mem_get_info()[0]
            pytest.skip(f"{needed}, other programs leave {free / GIB:.1f} free")
        yield
    finally:
        if ledger is not None:
            torch.cuda.empty_cache()
            ledger.give_back()
