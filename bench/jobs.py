"""Run commands on the GPUs of one machine, one a GPU at a time: ``python -m bench.jobs FILE``.

    rope: python -m bench --op rope --no-ceilings --no-pictures --resume --output bench-results/rope.jsonl
    counters: python -m bench counters --op gelu
    # a line for each job, its name first; a GPU that is free takes the next one

Each GPU has an equal share of the processor's cores, so that jobs disturb each other as little as they can. A job sees
its GPU alone. With ``--together N`` a GPU has N jobs, which must be of ``python -m bench`` or ``bench patched``: most
of their time goes into compiling, and one that measures stops the others of its GPU meanwhile (bench/measure/alone.py).

What a job prints goes into ``bench-results/jobs/<name>.log``. With ``--seconds`` the jobs that still run are
interrupted at the end, as by Ctrl-C. Those, and the ones that have not begun, stand in ``FILE.left`` for another call.
No job begins where a level is absent that the environment variable ``KERNEL_LADDER_REQUIRE`` names: its rows would lack
that level. The exit code is 1 if a job fails, 2 for a bad command line, file or environment, and else 0.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.measure import alone, environment
from bench.ranks import VISIBLE
from bench.rows import store
from bench.usage import UsageError
from kernel_ladder import table
from kernel_ladder.errors import UnavailableError, VariableError

#: Seconds that an interrupted job has to write what it holds.
GRACE_S = 5.0
_LINE = re.compile(r"([\w.-]+):\s+(\S.*)")


@dataclass(frozen=True)
class Job:
    """A command of the shell, by a name."""

    name: str
    command: str


def read(path: Path) -> list[Job]:
    """The jobs of a file.

    Raises:
        UsageError: there is no such file, a line is no job, or two jobs have one name.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    jobs: dict[str, Job] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None:
            raise UsageError(
                f"{path}:{number}: a job is `name: command`, with a name of letters, digits, '_', '.', '-'"
            )
        if found[1] in jobs:
            raise UsageError(f"{path}:{number}: there are two jobs {found[1]!r}; their logs would be one")
        jobs[found[1]] = Job(found[1], found[2])
    return list(jobs.values())


def shares(cores: Sequence[int], parts: int) -> list[set[int]]:
    """`cores` in equal parts, neighbours together; every part has at least one."""
    each = max(1, len(cores) // parts)
    return [set(cores[i * each : (i + 1) * each]) or {cores[i % len(cores)]} for i in range(parts)]


@dataclass
class Queue:
    """The jobs that have not ended, and how the others did."""

    waiting: deque[Job]
    logs: Path
    end: float | None = None  # of time.monotonic()
    failed: list[str] = field(default_factory=list)
    left: list[Job] = field(default_factory=list)
    shared: Path | None = None  # a folder for those that share GPUs
    together: int = 1  # of them on each
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self) -> Job | None:
        with self._lock:
            over = self.end is not None and time.monotonic() >= self.end
            return self.waiting.popleft() if self.waiting and not over else None

    def serve(self, gpu: str | None, cores: set[int]) -> None:
        """Run jobs on a GPU, or on none, until there are no more."""
        with tempfile.TemporaryDirectory() as folder:  # Nsight Compute locks a file there: one for each GPU
            own = {"TMPDIR": folder} | ({} if gpu is None else {VISIBLE: gpu})
            others = None if self.shared is None else alone.Folder(self.shared / f"gpu-{gpu}")
            if others is not None:
                own[alone.ENV_FOLDER] = str(others.path)
                if not any(os.environ.get(name) for name in environment.JAX_MEMORY):
                    own[environment.JAX_MEMORY[0]] = f"{float(environment.JAX_PART) / self.together:.3f}"
            while (job := self.next()) is not None:
                begin = time.monotonic()
                code = self._run(job, {**os.environ, **own}, cores, others)
                with self._lock:
                    said = "left" if code is None else f"exit code {code}"
                    print(f"{job.name}: {said}, {time.monotonic() - begin:.0f} s", flush=True)
                    if code is None:
                        self.left.append(job)
                    elif code != 0:
                        self.failed.append(job.name)

    def _run(
        self, job: Job, variables: dict[str, str], cores: set[int], others: alone.Folder | None = None
    ) -> int | None:
        """The exit code; None where the time was over before the job."""
        with (self.logs / f"{job.name}.log").open("ab") as log:
            with nullcontext() if others is None else others.lock():
                process = subprocess.Popen(
                    ["bash", "-c", job.command], cwd=environment.ROOT, env=variables, stdout=log,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
                if others is not None:
                    others.add(process.pid)
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(process.pid, cores)
            try:
                return process.wait(None if self.end is None else max(0.0, self.end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._end(process)
                return None
            finally:
                if others is not None:
                    others.remove(process.pid)

    @staticmethod
    def _end(process: subprocess.Popen) -> None:
        """Interrupt a job, which may be stopped; kill it if it does not end."""
        os.killpg(process.pid, signal.SIGINT)
        os.killpg(process.pid, signal.SIGCONT)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def interruptible() -> Iterator[None]:
    """What is started here hears of an interrupt, also where this process does not, as one in the background.

    An ignored signal stays ignored in children; one with a handler has its default there.
    """
    in_main = threading.current_thread() is threading.main_thread()  # no other may set handlers
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def run(jobs: Sequence[Job], gpus: Sequence[str | None], logs: Path, seconds: float | None, together: int = 1) -> Queue:
    """Run jobs, each on the GPU that is free first; `together` of them share a GPU."""
    logs.mkdir(parents=True, exist_ok=True)
    queue = Queue(deque(jobs), logs, None if seconds is None else time.monotonic() + seconds)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]
    places = [gpu for gpu in gpus for _ in range(together)]
    with tempfile.TemporaryDirectory() as folder, interruptible():
        queue.shared, queue.together = Path(folder) if together > 1 else None, together
        threads = [
            threading.Thread(target=queue.serve, args=(gpu, part))
            for gpu, part in zip(places, shares(cores, len(places)), strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    queue.left += queue.waiting
    return queue


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.jobs", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="a line `name: command` for each job")
    parser.add_argument("--gpus", metavar="N[,N]", help="which GPUs (default: all that are visible)")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="sweeps a GPU; one at a time measures")
    parser.add_argument("--seconds", type=float, metavar="S", help="interrupt what still runs then (default: never)")
    args = parser.parse_args(argv)
    try:
        jobs = read(args.file)
        for level in table.required():
            table.unavailable("gelu", level)  # raises
        if args.seconds is not None and not args.seconds > 0:
            raise UsageError(f"--seconds must be positive, got {args.seconds}")
        if args.together < 1:
            raise UsageError(f"--together must be at least 1, got {args.together}")
        count = torch.cuda.device_count()
        visible = os.environ.get(VISIBLE, ",".join(map(str, range(count)))).split(",")[:count]
        gpus = [*(visible or [None])] if args.gpus is None else args.gpus.split(",")
        if args.gpus is not None and (unknown := set(gpus) - set(visible)):
            raise UsageError(f"--gpus names {', '.join(sorted(unknown))}; visible are {', '.join(visible) or 'none'}")
    except (UsageError, UnavailableError, VariableError) as error:
        print(f"python -m bench.jobs: {error}", file=sys.stderr)
        return 2
    queue = run(jobs, gpus, environment.MEASURED / "jobs", args.seconds, args.together)
    if queue.left:
        left = args.file.with_name(args.file.name.removesuffix(".left") + ".left")
        store.replace(left, "".join(f"{job.name}: {job.command}\n" for job in queue.left))
        print(f"{len(queue.left)} jobs are left: {left}")
    if queue.failed:
        print(f"failed: {', '.join(queue.failed)}; their logs are in {queue.logs}", file=sys.stderr)
    return int(bool(queue.failed))


if __name__ == "__main__":
    sys.exit(main())
