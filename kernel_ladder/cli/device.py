"""The processor and the software versions of this machine, for ``python -m kernel_ladder doctor``."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def _query(*command: str) -> str | None:
    """A command's output, or None if the command is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def cpu() -> dict[str, Any]:
    """The processor's name and how many of its cores this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = (line for line in info.read_text().splitlines() if line.startswith("model name"))
        name = next(lines, f": {name}").partition(":")[2].strip()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"name": name, "cores": cores}


def driver() -> str | None:
    """The NVIDIA driver's version."""
    found = _query("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0] if found else None


def nvcc() -> str | None:
    """The release of the nvcc that a build uses first: from CUDA_HOME, else from the PATH."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    text = _query(str(Path(home, "bin", "nvcc")) if home else "nvcc", "--version")
    if text is None:
        return None
    return next((line.partition("release ")[2] for line in text.splitlines() if "release " in line), text)


def ptxas() -> str | None:
    """The release of the ptxas that Triton ships."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    text = _query(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"), "--version")
    return next((line.partition("release ")[2] for line in (text or "").splitlines() if "release " in line), None)


def version_of(package: str) -> str | None:
    """The installed version of a package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Versions of the software that affects kernels' speed and results. ``cuda`` is the one torch was built with."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "triton": version_of("triton"),
        "ptxas": ptxas(),
        "jax": version_of("jax"),
        "nvcc": nvcc(),
        "driver": driver(),
    }
