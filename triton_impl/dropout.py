"""dropout, rung 1 of 1: fused

Idea      The mask is drawn in registers (Philox, ``common/philox.py``) and never stored. The gradient is dropout of the
          output's gradient with the same seed.
Predicts  2 · numel · itemsize bytes: the time of a copy of as many bytes.
Limit now The integer multiplications of Philox, one call per eight elements, beside memory bandwidth.
Next      cuda `vectorized`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_ladder.tracing import shapes_only
from triton_impl import register, unsupported
from triton_impl.common.cache_policy import EVICTION_OF_SINGLE_USE
from triton_impl.common.elementwise import indexing, offset_of, too_many_dims
from triton_impl.common.philox import ARGUMENTS, arguments, factors_at, factors_in_order
from triton_impl.runtime.launch_cache import CachedKernel

# 1024 elements over 4 warps are 8 per thread: one 16-byte load for the 16-bit dtypes.
BLOCK = 1024


@triton.jit
def _dropout_block(
    out_ptr, input_ptr, key_low, key_high, threshold, scale, start, mask, BLOCK: tl.constexpr, VECTOR: tl.constexpr
):
    i = start + tl.arange(0, BLOCK)
    x = tl.load(input_ptr + i, mask=mask, eviction_policy=EVICTION_OF_SINGLE_USE).to(tl.float32)
    y = x * factors_in_order(start, key_low, key_high, threshold, scale, BLOCK, VECTOR)
    tl.store(out_ptr + i, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=ARGUMENTS)
def _dropout_kernel(
    out_ptr, input_ptr, key_low, key_high, threshold, scale, numel,
    EVEN: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """``out[i] = mask(seed, i) · input[i] / (1 − p)``. Grid: (⌈numel / BLOCK⌉,). Layout: both contiguous.

    EVEN: 16 divides `numel`. Then a mask has whole vectors, and one block of code is enough.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    mask = start + tl.arange(0, BLOCK) < numel
    if EVEN:
        _dropout_block(out_ptr, input_ptr, key_low, key_high, threshold, scale, start, mask, BLOCK, VECTOR)
    elif start + BLOCK <= numel:
        _dropout_block(out_ptr, input_ptr, key_low, key_high, threshold, scale, start, None, BLOCK, VECTOR)
    else:
        _dropout_block(out_ptr, input_ptr, key_low, key_high, threshold, scale, start, mask, BLOCK, VECTOR)


@triton.jit(do_not_specialize=ARGUMENTS)
def _dropout_strided_kernel(
    out_ptr, input_ptr, key_low, key_high, threshold, scale, numel, size1, size2, size3,
    o0, o1, o2, o3, i0, i1, i2, i3, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same of any strides. Elements are counted in row-major order. Grid: (⌈numel / BLOCK⌉,)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    out_ptr += offset_of(i, size1, size2, size3, o0, o1, o2, o3)
    input_ptr += offset_of(i, size1, size2, size3, i0, i1, i2, i3)
    x = tl.load(input_ptr, mask=i < numel, eviction_policy=EVICTION_OF_SINGLE_USE).to(tl.float32)
    y = x * factors_at(i, key_low, key_high, threshold, scale)
    tl.store(out_ptr, y.to(out_ptr.dtype.element_ty), mask=i < numel)


_dense, _strided = CachedKernel(_dropout_kernel), CachedKernel(_dropout_strided_kernel)


def _dropout(input: torch.Tensor, mask: tuple[int, int, int, float]) -> torch.Tensor:
    output = torch.empty_like(input)
    if shapes_only():
        return output
    numel = input.numel()
    programs = triton.cdiv(numel, BLOCK)
    if numel and input.is_contiguous():
        _dense(programs, (output, input), (numel, numel % 16 == 0, BLOCK, 16 // input.element_size()), mask)
    elif numel:
        _strided(programs, (output, input), (numel, *indexing(output, input), BLOCK), mask)
    return output


def dropout(input: torch.Tensor, *, p: float, seed: int) -> tuple[torch.Tensor, tuple]:
    mask = arguments(p, seed)
    return _dropout(input, mask), (mask,)


def dropout_backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor]:
    return (_dropout(grad if too_many_dims(grad) is None else grad.contiguous(), *saved),)


def _unsupported(input: torch.Tensor, **options: object) -> str | None:
    return unsupported(input) or too_many_dims(input)


register("dropout", "triton.fused", forward=dropout, backward=dropout_backward, unsupported=_unsupported)
