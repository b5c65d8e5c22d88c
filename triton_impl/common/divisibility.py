"""What divides the lengths and strides of rows, so that kernels read and write them by vectors.

Of an integer argument Triton looks whether 16 divides it; where nothing is known to, rows are read element by element,
as those of 1000 elements would be. So kernels are told by a constant, UNIT.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def in_units(n, UNIT: tl.constexpr):
    """n, which UNIT divides: Triton sees by the product that it does."""
    return n if UNIT == 16 else n // UNIT * UNIT


def unit_of(*numbers: int) -> int:
    """The largest power of two that divides all of them, at most 16."""
    unit = 16
    for n in numbers:
        while n % unit != 0:
            unit //= 2
    return unit
