"""Programmatic dependent launch (Hopper and later): a kernel begins while the one before it in its stream still ends.

Its programs come as those of that one leave, and wait until all that it wrote is there; so does the next kernel, in
its turn. A gap of half a microsecond between two kernels is gone. CUDA C++ Programming Guide, "Programmatic Dependent
Launch".

Kernels that may begin early have a last argument for it, a constant, which :class:`triton_impl.runtime.launch_cache.Launch` decides.
Telling the next kernel to begin costs the GPU 1.2 ns a program. Kernels whose programs end faster than that, with 16
bytes to read and to write a thread, have none.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kernel_ladder import gpu
from triton_impl import interpreted

NAME = "USE_PDL"


@triton.jit
def griddepcontrol_wait(USE_PDL: tl.constexpr):
    """What a kernel that may begin early calls before it touches memory."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@gpu.cached
def possible() -> bool:
    """Whether every GPU here can: a launch is kept for all of them."""
    if interpreted() or not gpu.visible():
        return False
    return all(gpu.of(index).capability >= (9, 0) for index in range(gpu.count()))


def never(kernel: Any) -> dict[str, bool]:
    """The last argument of a kernel that is to begin when the one before has ended; none, for one that always does."""
    return {NAME: False} if kernel.arg_names[-1] == NAME else {}


def decided(kernel: Any, late: bool = False) -> dict[str, bool]:
    """The last argument of a kernel that is to begin early if the GPU lets it, and if it is not to be late."""
    return {name: possible() and not late for name in never(kernel)}


def options(kernel: Any, late: bool = False) -> dict[str, bool]:
    """What is to be said at the launch of such a kernel, beside its arguments."""
    return {"launch_pdl": True} if any(decided(kernel, late).values()) else {}
