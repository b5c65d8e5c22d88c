"""The machine, software and source commit of a measurement."""

from __future__ import annotations

import functools
import gc
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from kernel_ladder.cli.device import version_of

ROOT = Path(__file__).resolve().parents[2]

#: Where a sweep writes its rows and pictures. git ignores this folder.
MEASURED = ROOT / "bench-results"
#: The committed rows, which README.md and KERNEL_LOG.md show. A command writes here only with an explicit --output.
PUBLISHED = ROOT / "bench" / "results"

#: Override the source's commit, and whether files differ from it: for a copy of the files outside its git repository.
ENV_COMMIT = "KERNEL_LADDER_COMMIT"
ENV_DIRTY = "KERNEL_LADDER_DIRTY"


#: What JAX calls the part of a GPU's memory that it may take, and has called it; it refuses both together.
JAX_MEMORY = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
JAX_PART = "0.4"


#: Bytes that a process may keep on a GPU before it looks for cycles of Python objects, for tenths of a second.
MUCH_MEMORY = 1 << 30


def leave_memory_to_pytorch() -> None:
    """Let JAX take a part of the GPU, because it keeps what it has taken; not where the user says how much.

    Call it before JAX is imported.
    """
    if not any(os.environ.get(name) for name in JAX_MEMORY):
        os.environ[JAX_MEMORY[0]] = JAX_PART


def give_memory_back(device: torch.device) -> None:
    """Give a GPU's cached memory back, with what cycles of Python objects keep.

    An error's traceback and a frame that it names can be such a cycle. It keeps the frame's CUDA graphs, and with them
    their private pools. Python collects cycles by the number of objects, and knows nothing of their memory.
    """
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    if torch.cuda.memory_reserved(device) > MUCH_MEMORY:
        gc.collect()
        torch.cuda.empty_cache()


def device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine_name() -> str:
    """The GPU's name, else the CPU's model, else ``cpu``."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or "cpu"


def results_file(set_: str = "sweep") -> Path:
    """Where this machine's rows go: one file per model of GPU, or of CPU where there is no GPU.

    Rows of a set of calls other than the sweep go to a folder of its name.
    """
    folder = MEASURED if set_ == "sweep" else MEASURED / set_
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', machine_name().lower()).strip('-')}.jsonl"


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _source() -> tuple[str | None, bool | None]:
    """Commit, and whether files differ from it. Changed results do not count: measuring changes no source."""
    if commit := os.environ.get(ENV_COMMIT):
        dirty = os.environ.get(ENV_DIRTY)
        return commit, None if dirty is None else dirty not in ("", "0", "false")
    top = _output("git", "rev-parse", "--show-toplevel")
    # Inside another repository git would return the commit of that one.
    if top is not None and Path(top).resolve() == ROOT:
        commit = _output("git", "rev-parse", "HEAD")
        status = _output("git", "status", "--porcelain", "--", ".", ":(exclude)bench/results")
        if commit is not None:
            return commit, None if status is None else bool(status)
    return None, None


def _driver() -> str | None:
    if not torch.cuda.is_available():
        return None
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0] if found else None


@functools.cache
def facts() -> dict[str, Any]:
    """The fields of a row that are the same for a whole run."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    commit, dirty = _source()
    return {
        "gpu": machine_name(),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton_version,
        "jax": version_of("jax"),
        "commit": commit,
        "dirty": dirty,
    }
