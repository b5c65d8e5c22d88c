"""tl.dot, correct in Triton's interpreter too."""

from __future__ import annotations

import triton
import triton.language as tl

from triton_impl import interpreted

INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr = "ieee"):
    """``acc + a @ b``, accumulated in float32. The interpreter gets bfloat16 wrong: there operands are float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)
