"""Divisibility of row lengths and strides, which decides how wide a kernel's loads and stores are.

Triton specialises an integer argument on whether 16 divides it. Without that knowledge it reads rows element by
element, as it would rows of 1000. The constant DIVISIBILITY tells kernels what does divide them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def assume_divisible(n, DIVISIBILITY: tl.constexpr):
    """`n`, which DIVISIBILITY divides: the product shows that to Triton."""
    return n if DIVISIBILITY == 16 else n // DIVISIBILITY * DIVISIBILITY


def divisibility_of(*numbers: int) -> int:
    """The largest power of two that divides all of them, at most 16."""
    unit = 16
    for n in numbers:
        while n % unit != 0:
            unit //= 2
    return unit
