"""``python -m tests [options of pytest]``: every test, with as many workers as this machine has room for.

On a GPU there are two runs of pytest: first, one process with the tests marked ``alone``, then all others side by side.
Without one there is a single run. ``--workers N`` sets the number of workers. The exit status is that of the first run
that failed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from . import resume
from .sharing import worker_count

ROOT = Path(__file__).resolve().parent.parent
#: Each run ends with the tests that took longest.
DURATIONS = ("--durations", "25", "--durations-min", "5")
NOTHING_SELECTED = int(pytest.ExitCode.NO_TESTS_COLLECTED)


def available_cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def plan(gpu_bytes: int | None, workers: int, options: Sequence[str]) -> list[list[str]]:
    """The arguments of each run of pytest, in order."""
    beside = ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
    if gpu_bytes is None or not beside:
        return [[*beside, *options]]
    return [["--alone", "only", *options], ["--alone", "without", *beside, *options]]


def outcome(statuses: Sequence[int]) -> int:
    """One exit status: of the first run that failed. A run may select no test, as long as another selects some."""
    ran = [status for status in statuses if status != NOTHING_SELECTED]
    return next(filter(None, ran), 0) if ran else NOTHING_SELECTED


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests", description=__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument("--workers", type=int)
    parser.add_argument(resume.OPTION)
    args, options = parser.parse_known_args(argv)
    if args.resume is not None:  # in one word: pytest takes the name of a file that exists for a file of tests
        options.append(f"{resume.OPTION}={args.resume}")
    gpu_bytes = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    workers = args.workers or worker_count(available_cores(), gpu_bytes)
    runs = plan(gpu_bytes, workers, [*DURATIONS, *options])
    statuses: list[int] = []
    for number, run in enumerate(runs, 1):
        print(f"== Run {number} of {len(runs)}: pytest {shlex.join(run)}", flush=True)
        statuses.append(subprocess.run([sys.executable, "-m", "pytest", *run], cwd=ROOT, check=False).returncode)
        if statuses[-1] == pytest.ExitCode.INTERRUPTED:
            break
    status = outcome(statuses)
    if len(runs) > 1:
        words = {0: "passed", NOTHING_SELECTED: "selected no test"}
        told = [words.get(each, f"failed with exit status {each}") for each in statuses]
        print("== " + "; ".join(f"run {number} {word}" for number, word in enumerate(told, 1)))
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
