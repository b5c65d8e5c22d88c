"""Programmatic dependent launch (PDL, Hopper and later): a kernel starts while its predecessor still runs.

Its programs take the places that the predecessor's leave, and wait at ``griddepcontrol.wait`` until all that the
predecessor wrote is visible. That closes a gap of half a microsecond between two kernels. CUDA C++ Programming Guide,
"Programmatic Dependent Launch".

A kernel opts in by its signature: its last parameter is ``USE_PDL: tl.constexpr``, and it calls
:func:`griddepcontrol_wait` before it touches memory. Nobody passes that argument by hand:
:class:`triton_impl.runtime.launch_cache.Launch` appends it and sets ``launch_pdl``, both True where every GPU here has
PDL. Telling the next kernel to start costs 1.2 ns per program. Kernels whose programs end faster than that, with 16
bytes to read and to write per thread, do not opt in.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kernel_ladder import gpu
from triton_impl import interpreted

#: The parameter by which a kernel opts in. It must be the last one.
PARAMETER = "USE_PDL"


@triton.jit
def griddepcontrol_wait(USE_PDL: tl.constexpr):
    """Wait for the predecessor's writes, and let the next kernel start. Call it before the first access to memory."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@gpu.cached
def possible() -> bool:
    """Whether every GPU here has PDL: a cached launch serves all of them."""
    if interpreted() or not gpu.visible():
        return False
    return all(gpu.of(index).capability >= (9, 0) for index in range(gpu.count()))


def opted_in(kernel: Any) -> bool:
    """Whether a kernel's signature opts in to PDL.

    Raises:
        TypeError: the parameter is not the last one, where launches append their argument.
    """
    if PARAMETER not in kernel.arg_names:
        return False
    if kernel.arg_names[-1] != PARAMETER:
        raise TypeError(f"{kernel.fn.__name__}: {PARAMETER} must be the last parameter, got {list(kernel.arg_names)}")
    return True


def constexprs(kernel: Any, use: bool) -> dict[str, bool]:
    """The kernel's PDL argument by its name; empty for a kernel that has not opted in."""
    return {PARAMETER: use} if opted_in(kernel) else {}


def options(kernel: Any) -> dict[str, bool]:
    """Launch options of a kernel, beside its arguments."""
    return {"launch_pdl": True} if opted_in(kernel) and possible() else {}
