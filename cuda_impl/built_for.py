"""Which GPUs run the code that the extension holds, and what of it: an extension is built for some architectures.

Machine code (``sm_86``) runs on GPUs of the same major compute capability and no smaller minor one; that of an ``a``
(``sm_90a``) on its own alone; that of an ``f`` (``sm_100f``) on its family, which is taken to be its major capability.
PTX (``compute_80``) is translated by the driver for every later GPU, but has only what its architecture had. A kernel
that needs thread-block clusters is empty in it. CUDA C++ Programming Guide, "Binary Compatibility" and "PTX
Compatibility".
"""

from __future__ import annotations

import re

import cuda_impl
from kernel_ladder import gpu

#: The oldest code that has thread-block clusters and TMA.
CLUSTERS = 90


def _parsed(code: str) -> tuple[str, int, str]:
    kind, number, suffix = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", code).groups()  # type: ignore[union-attr]
    return kind, int(number), suffix


def runs(code: str, capability: tuple[int, int]) -> bool:
    """Whether a GPU of a compute capability runs code of this name."""
    kind, number, suffix = _parsed(code)
    major, minor = divmod(number, 10)
    if suffix == "a":
        return (major, minor) == capability
    if kind == "sm" or suffix == "f":
        return major == capability[0] and minor <= capability[1]
    return (major, minor) <= capability


def code_for(capability: tuple[int, int], codes: list[str]) -> str | None:
    """The code that the driver takes for a GPU, or None: machine code before PTX, the newest of each."""
    taken = [code for code in codes if runs(code, capability)]

    def preference(code: str) -> tuple[bool, int, str]:
        kind, number, suffix = _parsed(code)
        return kind == "sm", number, {"": "0", "f": "1", "a": "2"}[suffix]

    return max(taken, key=preference, default=None)


def _again(index: int) -> str:
    major, minor = gpu.of(index).capability
    wanted = f"{major}.{minor}{'a' if major == 9 else ''}"
    return f"install again with TORCH_CUDA_ARCH_LIST={wanted}, or {wanted} added to it"


@gpu.cached
def no_code(index: int) -> str | None:
    """Why a GPU runs nothing of the extension, or None."""
    if not gpu.visible():  # `inspect` asks on tensors without memory
        return None
    codes, found = cuda_impl.architectures(), gpu.of(index)
    if found.capability < (8, 0):
        return f"the cuda level needs compute capability 8.0 or later, {found.name} has {_dotted(found.capability)}"
    if code_for(found.capability, codes) is not None:
        return None
    return (
        f"the extension kernel_ladder._C was built for {', '.join(codes)}, of which {found.name} (compute capability "
        f"{_dotted(found.capability)}) runs nothing; {_again(index)}"
    )


@gpu.cached
def without_clusters(index: int) -> str | None:
    """Why a GPU runs no kernel in thread-block clusters, or None."""
    if (reason := no_code(index)) is not None:
        return reason
    if gpu.of(index).capability < (9, 0):
        return "thread-block clusters need compute capability 9.0 or later"
    code = code_for(gpu.of(index).capability, cuda_impl.architectures())
    if code is not None and _parsed(code)[1] < CLUSTERS:
        return f"thread-block clusters are not in {code}, which the extension has for this GPU; {_again(index)}"
    return None


@gpu.cached
def without_wgmma(index: int) -> str | None:
    """Why a GPU runs no kernel that multiplies by wgmma, or None."""
    if (reason := no_code(index)) is not None:
        return reason
    major, minor = gpu.of(index).capability
    if (major, minor) != (9, 0):
        return f"wgmma needs a GPU of compute capability 9.0, this one has {major}.{minor}"
    code = code_for((major, minor), cuda_impl.architectures())
    if code not in ("sm_90a", "compute_90a"):
        return f"wgmma is not in {code}, which the extension has for this GPU; {_again(index)}"
    return None


@gpu.cached
def is_roomy(index: int) -> bool:
    """Whether the code for a GPU expects 228 KiB of shared memory an SM: ``is_roomy`` in csrc/norm/backward.cuh."""
    code = code_for(gpu.of(index).capability, cuda_impl.architectures())
    return code is not None and 90 <= _parsed(code)[1] < 120


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
