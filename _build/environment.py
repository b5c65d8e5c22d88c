"""What the build needs to know of the machine: whether to build the CUDA extension, with which toolkit and which torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

#: The oldest torch that the extension builds against and runs with.
TORCH_REQUIREMENT = "torch>=2.11"
OLDEST_TORCH = (2, 11)


def say(message: str) -> None:
    print(f"kernel_ladder: {message}", file=sys.stderr, flush=True)


def stop(message: str) -> None:
    sys.exit(f"kernel_ladder: {message}")


#: Where the installed package finds why it has no extension (``cuda_impl/not_built.py``).
RECORD = Path(__file__).resolve().parent.parent / "kernel_ladder" / "_not_built.txt"


def leave_out(reason: str, way_out: str = "") -> None:
    """Say that the package is installed without the cuda level, and leave the reason on record."""
    say(f"{reason}: installing without the cuda level{way_out}")
    record(reason)


def record(reason: str | None) -> None:
    """Keep the reason why the extension is left out; None takes an older one away."""
    try:
        if reason is None:
            RECORD.unlink(missing_ok=True)
        else:
            RECORD.write_text(f"{reason}\n", encoding="utf-8")
    except OSError as error:  # sources that may not be written to are installed all the same
        say(f"{RECORD} cannot be written: {error.strerror}")


def environment_path() -> list[str]:
    """``sys.path`` of the environment that is installed into.

    Under build isolation pip runs the same interpreter with a PYTHONPATH that hides the environment's own packages;
    asked again without that variable (``-E``), it names them, ``.pth`` files and system packages included.
    """
    query = "import json, sys; print(json.dumps([p for p in sys.path if p]))"
    answer = subprocess.run([sys.executable, "-E", "-c", query], capture_output=True, text=True, check=True, cwd="/")
    return json.loads(answer.stdout)


def installed_torch() -> str | None:
    """The version of the environment's torch, or None where it has none that is new enough."""
    found = next(iter(metadata.distributions(name="torch", path=environment_path())), None)
    if found is None:
        return None
    major, minor = found.version.split(".")[:2]
    return found.version if (int(major), int(minor)) >= OLDEST_TORCH else None


def show_installed_torch() -> None:
    """Make the environment's torch importable here, behind everything that the build environment has itself."""
    if installed_torch() is not None:
        sys.path += [p for p in environment_path() if p not in sys.path]


def cuda_home() -> Path | None:
    """The toolkit to build with, or None to install without the cuda level.

    ``KERNEL_LADDER_CUDA`` unset builds where there is an nvcc; 1 must build; 0 does not.
    """
    wanted = os.environ.get("KERNEL_LADDER_CUDA", "")
    if wanted not in ("", "0", "1"):
        stop(f"KERNEL_LADDER_CUDA must be 0 or 1, got {wanted!r}")
    if wanted == "0":
        leave_out("KERNEL_LADDER_CUDA=0")
        return None
    home = _find_cuda_home()
    if home is None and wanted == "1":
        stop("KERNEL_LADDER_CUDA=1 but no nvcc was found; put it on the PATH or set CUDA_HOME")
    if home is None:
        leave_out("no nvcc found", " (set CUDA_HOME and install again to add it)")
    else:
        record(None)
    return home


def _find_cuda_home() -> Path | None:
    """CUDA_HOME, else CUDA_PATH, else where the nvcc on the PATH says that it lives, else /usr/local/cuda."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(name):
            if not (Path(home) / "bin" / "nvcc").exists():
                say(f"{name}={home} has no bin/nvcc")
                return None
            return Path(home)
    if nvcc := shutil.which("nvcc"):
        # A wrapper or link can stand on the PATH; a dry run names the real place in its line "#$ _HERE_=…/bin".
        dry_run = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True, check=False).stderr
        for line in dry_run.splitlines():
            if line.startswith("#$ _HERE_="):
                return Path(line.partition("=")[2]).resolve().parent
        return Path(nvcc).resolve().parent.parent
    return None


def check_toolkit(home: Path) -> None:
    """Compile an empty file, so that a toolkit that cannot compile (a host compiler too new for it) says so early."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.cu")
        source.write_text("__global__ void kernel_ladder_probe() {}\n")
        command = [str(home / "bin" / "nvcc"), "-c", str(source), "-o", str(source.with_suffix(".o"))]
        if compiler := os.environ.get("CC"):
            command += ["-ccbin", compiler]  # as torch's build does
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return
    output = (result.stderr + result.stdout).strip().splitlines()
    reason = next((line for line in output if "error" in line.lower()), output[-1] if output else "no message")
    stop(
        f"{home}/bin/nvcc cannot compile an empty file: {reason.strip()}\n"
        "kernel_ladder: set CC and CXX to a host compiler that it accepts (say CC=gcc-13 CXX=g++-13), "
        "or KERNEL_LADDER_CUDA=0 to install without the cuda level"
    )
