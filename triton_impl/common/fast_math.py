"""The hardware's exp2 and reciprocal: one instruction each, within two ulp, subnormal results flushed to zero.

``tl.exp2`` and ``1 / x`` take several instructions more, for subnormal numbers and the last bit.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from triton_impl.common.dot import INTERPRETED

#: log2 e: exp(x) = 2^(x · log2 e).
LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def exp2(x):
    """2 to the power of a float32."""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def rcp(x):
    """One divided by a float32."""
    if INTERPRETED:
        return 1 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
