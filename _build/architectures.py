"""Which GPUs the extension is compiled for, and a check that every file of ``csrc`` compiles for all that it may be.

    python _build/architectures.py                       every file, for every architecture of CHECKED
    python _build/architectures.py --arch 12.0 --jobs 2  every file, for one
    python _build/architectures.py norm swiglu           files whose path contains one of these words

The check needs nvcc and torch's headers, and no GPU. It compiles device code alone, with the flags of the build.
An architecture is written as TORCH_CUDA_ARCH_LIST has it: ``9.0a``, ``8.0+PTX``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import together
from environment import cuda_home, say, stop

ROOT = Path(__file__).resolve().parent.parent

#: One of each generation that has instructions, or shared memory, of its own.
CHECKED = ("8.0", "8.6", "8.9", "9.0a", "10.0a", "12.0")
#: Without TORCH_CUDA_ARCH_LIST and without a GPU: Ampere for mma.sync and cp.async, Hopper with wgmma and TMA.
DEFAULT = "8.0;9.0a"
#: Older GPUs lack mma.sync of bfloat16, and cp.async.
OLDEST = (8, 0)
#: The stable ABI of torch 2.11, the oldest release that the extension runs with.
TORCH_TARGET_VERSION = "0x020b000000000000ULL"
#: The code of the host alone: checks and launches, on which -O3 spends twice the time. Kernels are made by cicc and
#: ptxas, which do not see it.
NVCC_FLAGS = ["-O1", "-std=c++17", "--threads=1", "-Xcompiler=-Wall"]
#: What torch.utils.cpp_extension adds.
TORCH_NVCC_FLAGS = [
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
]


def of_capabilities(capabilities: Iterable[tuple[int, int]]) -> tuple[list[str], list[tuple[int, int]]]:
    """The architectures of GPUs by compute capability, and the capabilities that are too old to compile for."""
    found = sorted(set(capabilities))
    # wgmma and setmaxnreg need the 'a'
    names = [f"{major}.{minor}{'a' if major == 9 else ''}" for major, minor in found if (major, minor) >= OLDEST]
    return names, [capability for capability in found if capability < OLDEST]


def wanted(requested: str | None, capabilities: Iterable[tuple[int, int]]) -> str | None:
    """What to compile for, as TORCH_CUDA_ARCH_LIST has it, or None where no visible GPU can run the extension.

    Parameters
    ----------
    requested : str or None
        TORCH_CUDA_ARCH_LIST, which is taken as it is, save that 9.0 is left out beside 9.0a.
    capabilities : iterable of (int, int)
        Compute capabilities of the visible GPUs. Those below 8.0 are left out, with a sentence.
    """
    if requested:
        names = [name for name in re.split(r"[;\s]+", requested) if name]
        if "9.0a" in names and "9.0" in names:
            # A GPU of 9.0 would run either, and only one of them has wgmma.
            say("TORCH_CUDA_ARCH_LIST: 9.0a holds all that 9.0 does; 9.0 is left out")
            names = [name for name in names if name != "9.0"]
        return ";".join(names)
    names, too_old = of_capabilities(capabilities)
    if too_old:
        listed = ", ".join(f"{major}.{minor}" for major, minor in too_old)
        say(f"the cuda level needs compute capability 8.0 or later: GPUs of {listed} are left out")
    if names:
        return ";".join(names)
    return None if too_old else DEFAULT


def codes(gencode_flags: Iterable[str]) -> list[str]:
    """What nvcc embeds for ``-gencode=arch=…,code=…`` flags: ``sm_90a`` is machine code, ``compute_80`` is PTX."""
    found = [code for flag in gencode_flags for code in re.findall(r",code=([\w,\[\]]+)", flag)]
    return sorted({name for code in found for name in code.strip("[]").split(",")})


# ---- the check ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """What became of one file for one architecture."""

    file: str
    architecture: str
    seconds: float
    kernels: int
    registers: int  # of the kernel that takes most
    spilled: int  # bytes, stored by all kernels together
    errors: str  # empty where it compiled

    def line(self) -> str:
        outcome = f"{self.kernels:4} kernels, up to {self.registers:3} registers, {self.spilled:5} bytes spilled"
        return f"{'FAILED' if self.errors else 'ok':6} {self.architecture:6} {self.file:45} {self.seconds:6.1f} s  " + (
            "" if self.errors else outcome
        )


def _torch_headers() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        stop("torch is not installed; its headers are needed")
    return Path(found.origin).parent / "include"


def compile_for(nvcc: Path, file: str, architecture: str) -> Compiled:
    """Compile the device code of one file, a path below the project's root, for one architecture."""
    number = architecture.replace(".", "")
    includes = [ROOT / "csrc", _torch_headers(), _torch_headers() / "torch/csrc/api/include"]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(str(nvcc), "-cubin", "-Xptxas", "-v", *NVCC_FLAGS, *TORCH_NVCC_FLAGS),
            f"-gencode=arch=compute_{number},code=sm_{number}",
            f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
            *(f"-I{path}" for path in includes),
            *(str(ROOT / file), "-o", f"{folder}/out.cubin"),
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    output = result.stdout + result.stderr
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", output)]
    return Compiled(
        file=file,
        architecture=architecture,
        seconds=time.monotonic() - begun,
        kernels=len(registers),
        registers=max(registers, default=0),
        spilled=sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", output)),
        errors="" if result.returncode == 0 else output.strip()[-4000:] or f"nvcc exits with {result.returncode}",
    )


def check(files: list[str], architectures: Iterable[str], jobs: int) -> list[Compiled]:
    """Compile every file for every architecture, and print a line for each as it ends."""
    home = cuda_home()
    if home is None:
        stop("no nvcc: set CUDA_HOME, or put nvcc on the PATH")
    begun, found = time.monotonic(), []
    work = [(file, architecture) for file in files for architecture in architectures]
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(compile_for, home / "bin" / "nvcc", *each) for each in work]):
            found.append(done.result())
            print(found[-1].line(), flush=True)
    failed = [each for each in found if each.errors]
    for each in failed:
        print(f"\n{each.file} for {each.architecture}:\n{each.errors}")
    minutes = (time.monotonic() - begun) / 60
    print(f"\n{len(found) - len(failed)} of {len(found)} compiled, in {minutes:.1f} minutes with {jobs} jobs")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile csrc for the architectures that it supports.")
    parser.add_argument("words", nargs="*", help="only files whose path contains one of these (default: all)")
    parser.add_argument("--arch", action="append", help=f"as TORCH_CUDA_ARCH_LIST has it (default: {' '.join(CHECKED)})")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="files at a time")
    chosen = parser.parse_args(arguments)
    files = [file for file in together.sources(ROOT) if file.endswith(".cu")]
    if chosen.words:
        files = [file for file in files if any(word in file for word in chosen.words)]
        if not files:
            stop(f"no file of csrc has {' or '.join(chosen.words)} in its path")
    return int(any(each.errors for each in check(files, chosen.arch or CHECKED, chosen.jobs)))


if __name__ == "__main__":
    sys.exit(main())
