"""gelu, rung 1 of 1: fused

Idea      The whole formula in registers: one read and one write. Programs take BLOCK consecutive elements.
Predicts  2 · numel · itemsize bytes forward, 3 · numel · itemsize backward: the time of a copy of as many bytes.
Limit now Memory bandwidth for tanh; the exact (erf) form is compute-bound.
Next      cuda `vectorized`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_ladder.tracing import shapes_only
from triton_impl import register, unsupported
from triton_impl.common.cache_policy import EVICTION_OF_SINGLE_USE
from triton_impl.common.elementwise import gradient_for_kernel, indexing, is_dense, offset_of, too_many_dims
from triton_impl.common.fast_math import LOG2E, exp2, rcp
from triton_impl.common.pdl import griddepcontrol_wait
from triton_impl.runtime.launch_cache import CachedKernel

INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
CUBIC = tl.constexpr(0.044715)

# 1024 elements over 4 warps are 8 per thread: one 16-byte load for the 16-bit dtypes.
BLOCK = 1024


@triton.jit
def _sigmoid_and_slope(x):
    # 0.5 · (1 + tanh(u)) = sigmoid(2u) = s. Of exp(−|2u|), neither s nor s · (1 − s) suffers cancellation.
    u = x * (SQRT_2_OVER_PI + x * x * (SQRT_2_OVER_PI * CUBIC))
    e = exp2(tl.abs(u) * (-2 * LOG2E))
    p = rcp(1 + e)
    return tl.where(u >= 0, p, e * p), e * p * p


@triton.jit
def _cdf_and_density(x):
    # Φ(x) = 1 − Q(x) for x ≥ 0, Q(−x) below, with Q(a) = t · P(t) · exp(−a² / 2), t = 1 / (1 + p · a). That is the form
    # of Abramowitz and Stegun 7.1.26 with a fit of our own, within 4e-9, at half the instructions of erf.
    e = exp2(x * (-0.5 * LOG2E) * x)
    t = rcp(1 + 0.27591182796659114 * tl.abs(x))
    poly = 0.44178285414948533 - 0.11357363587977673 * t
    poly = -0.3153362047386208 + poly * t
    poly = 0.3231611938833931 + poly * t
    poly = 0.046326943532836534 + poly * t
    poly = 0.11763884640373531 + poly * t
    tail = poly * t * e
    return tl.where(x < 0, tail, 1 - tail), e * INV_SQRT_2PI


@triton.jit
def gelu_of(x, TANH: tl.constexpr):
    """``gelu(x)`` of a float32: ``x · Φ(x)``, or its tanh approximation."""
    if TANH:
        factor, _ = _sigmoid_and_slope(x)
    else:
        factor, _ = _cdf_and_density(x)
    return x * factor


@triton.jit
def gelu_derivative(x, TANH: tl.constexpr):
    """``gelu'(x)`` of a float32."""
    if TANH:
        s, slope = _sigmoid_and_slope(x)
        # Bounded: where the square overflows, the slope is zero, and zero times infinity would be NaN.
        inner = tl.minimum(x * x * (6 * SQRT_2_OVER_PI * CUBIC) + 2 * SQRT_2_OVER_PI, 1e30)
        return s + x * slope * inner
    cdf, density = _cdf_and_density(x)
    return cdf + x * density


@triton.jit
def _gelu_block(out_ptr, input_ptr, i, mask, TANH: tl.constexpr):
    # The exact (erf) form is compute-bound: no eviction policy.
    x = tl.load(input_ptr + i, mask=mask, eviction_policy=EVICTION_OF_SINGLE_USE if TANH else "").to(tl.float32)
    tl.store(out_ptr + i, gelu_of(x, TANH).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gelu_kernel(out_ptr, input_ptr, numel, TANH: tl.constexpr, BLOCK: tl.constexpr):
    """``out = gelu(input)``. Grid: (⌈numel / BLOCK⌉,). Layout: both dense, in one order."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = start + tl.arange(0, BLOCK)
    if start + BLOCK <= numel:  # with a mask, whole vectors would need a `numel` that 16 divides
        _gelu_block(out_ptr, input_ptr, i, None, TANH)
    else:
        _gelu_block(out_ptr, input_ptr, i, i < numel, TANH)


@triton.jit
def _gelu_backward_block(grad_input_ptr, grad_ptr, input_ptr, i, mask, TANH: tl.constexpr):
    x = tl.load(input_ptr + i, mask=mask, eviction_policy=EVICTION_OF_SINGLE_USE).to(tl.float32)
    grad = tl.load(grad_ptr + i, mask=mask, eviction_policy=EVICTION_OF_SINGLE_USE).to(tl.float32)
    grad_input = grad * gelu_derivative(x, TANH)
    tl.store(grad_input_ptr + i, grad_input.to(grad_input_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gelu_backward_kernel(
    grad_input_ptr, grad_ptr, input_ptr, numel, TANH: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr
):
    """``grad_input = grad · gelu'(input)``. Grid: (⌈numel / BLOCK⌉,). Layout: all dense, in one order."""
    griddepcontrol_wait(USE_PDL)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = start + tl.arange(0, BLOCK)
    if start + BLOCK <= numel:
        _gelu_backward_block(grad_input_ptr, grad_ptr, input_ptr, i, None, TANH)
    else:
        _gelu_backward_block(grad_input_ptr, grad_ptr, input_ptr, i, i < numel, TANH)


# The same for operands of any strides. Kernels of their own, because every argument costs host time.


@triton.jit
def _gelu_strided_kernel(
    out_ptr, input_ptr, numel, size1, size2, size3, o0, o1, o2, o3, i0, i1, i2, i3,
    TANH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    out_ptr += offset_of(i, size1, size2, size3, o0, o1, o2, o3)
    input_ptr += offset_of(i, size1, size2, size3, i0, i1, i2, i3)
    x = tl.load(input_ptr, mask=i < numel, eviction_policy=EVICTION_OF_SINGLE_USE).to(tl.float32)
    tl.store(out_ptr, gelu_of(x, TANH).to(out_ptr.dtype.element_ty), mask=i < numel)


@triton.jit
def _gelu_backward_strided_kernel(
    grad_input_ptr, grad_ptr, input_ptr, numel, size1, size2, size3,
    o0, o1, o2, o3, g0, g1, g2, g3, i0, i1, i2, i3,
    TANH: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    griddepcontrol_wait(USE_PDL)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grad_input_ptr += offset_of(i, size1, size2, size3, o0, o1, o2, o3)
    grad_ptr += offset_of(i, size1, size2, size3, g0, g1, g2, g3)
    input_ptr += offset_of(i, size1, size2, size3, i0, i1, i2, i3)
    x = tl.load(input_ptr, mask=i < numel, eviction_policy=EVICTION_OF_SINGLE_USE).to(tl.float32)
    grad = tl.load(grad_ptr, mask=i < numel, eviction_policy=EVICTION_OF_SINGLE_USE).to(tl.float32)
    grad_input = grad * gelu_derivative(x, TANH)
    tl.store(grad_input_ptr, grad_input.to(grad_input_ptr.dtype.element_ty), mask=i < numel)


_forward = CachedKernel(_gelu_kernel), CachedKernel(_gelu_strided_kernel)
_backward = CachedKernel(_gelu_backward_kernel), CachedKernel(_gelu_backward_strided_kernel)


def _launch(kernels: tuple[CachedKernel, CachedKernel], approximate: str, *tensors: torch.Tensor) -> None:
    """Launch the dense kernel where all tensors are dense in one order, else the strided one. Output first."""
    dense, strided = kernels
    numel = tensors[0].numel()
    if shapes_only() or numel == 0:
        return
    programs, constants = triton.cdiv(numel, BLOCK), (approximate == "tanh", BLOCK)
    if is_dense(*tensors):
        dense(programs, tensors, (numel, *constants))
    else:
        strided(programs, tensors, (numel, *indexing(*tensors), *constants))


def gelu(input: torch.Tensor, *, approximate: str) -> tuple[torch.Tensor, tuple]:
    output = torch.empty_like(input)
    _launch(_forward, approximate, output, input)
    return output, (input, approximate)


def gelu_backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor]:
    input, approximate = saved
    grad_input = torch.empty_like(input)
    _launch(_backward, approximate, grad_input, gradient_for_kernel(grad, grad_input, input), input)
    return (grad_input,)


def _unsupported(input: torch.Tensor, **options: object) -> str | None:
    return unsupported(input) or too_many_dims(input)


register("gelu", "triton.fused", forward=gelu, backward=gelu_backward, unsupported=_unsupported)
