"""Facts about this machine and the versions it runs, for ``python -m kernel_ladder doctor``."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def _query(*command: str) -> str | None:
    """What a command prints, or None where it is missing or fails."""
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


def gpus() -> list[dict[str, Any]]:
    """Every visible GPU: name, compute capability, multiprocessors, memory and L2 in bytes."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "index": index,
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory": properties.total_memory,
                "l2": getattr(properties, "L2_cache_size", None),
            }
        )
    return found


def driver() -> str | None:
    """The NVIDIA driver's version."""
    found = _query("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0] if found else None


def nvcc() -> str | None:
    """The release of the nvcc that a build would take first: of CUDA_HOME, else of the PATH."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    text = _query(str(Path(home, "bin", "nvcc")) if home else "nvcc", "--version")
    if text is None:
        return None
    return next((line.partition("release ")[2] for line in text.splitlines() if "release " in line), text)


def version_of(package: str) -> str | None:
    """The installed version of a package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Versions of what decides how fast and how right kernels are. ``cuda``: what torch was built with."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "triton": version_of("triton"),
        "nvcc": nvcc(),
        "driver": driver(),
    }
