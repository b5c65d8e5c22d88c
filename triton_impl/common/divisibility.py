"""What divides the lengths and strides of rows, so that kernels read and write them by vectors.

Of an integer argument Triton looks whether 16 divides it; where nothing is known to, rows are read element by element,
as those of 1000 elements would be. So kernels are told by a constant, DIVISIBILITY.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def assume_divisible(n, DIVISIBILITY: tl.constexpr):
    """n, which DIVISIBILITY divides: Triton sees by the product that it does."""
    return n if DIVISIBILITY == 16 else n // DIVISIBILITY * DIVISIBILITY


def divisibility_of(*numbers: int) -> int:
    """The largest power of two that divides all of them, at most 16."""
    unit = 16
    for n in numbers:
        while n % unit != 0:
            unit //= 2
    return unit
