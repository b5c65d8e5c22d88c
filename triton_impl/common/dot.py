"""tl.dot, correct in Triton's interpreter too."""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_ladder.semantics import float8
from triton_impl import interpreted

INTERPRETED = tl.constexpr(interpreted())
PROMOTED_EVERY = tl.constexpr(float8.PROMOTED_EVERY)
_LARGEST_FLOAT8 = tl.constexpr(448.0)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr = "ieee"):
    """``acc + a @ b``, accumulated in float32. In the interpreter operands are float32, which hold them exactly.

    Hopper's tensor cores keep about 14 bits of a sum of float8 products. So it goes to `acc` after every 128 of them,
    for which their tile must have at least 128 columns.
    """
    if INTERPRETED:
        return tl.dot(_wide(a), _wide(b), acc, input_precision="ieee")
    if a.dtype == tl.float8e4nv:
        return tl.dot(a, b, acc, max_num_imprecise_acc=PROMOTED_EVERY)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _wide(x):
    """`x` in float32. The interpreter makes 480 of e4m3's NaN, whose largest number is 448."""
    wide = x.to(tl.float32)
    if x.dtype == tl.float8e4nv:
        return tl.where(tl.abs(wide) > _LARGEST_FLOAT8, float("nan"), wide)
    return wide
