"""GELU in Triton: the whole formula in registers, one read and one write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_ladder.table import register
from triton_impl import unsupported
from triton_impl.aot import entry
from triton_impl.elementwise import layout, offset_of, too_many_dims

SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
CUBIC = tl.constexpr(0.044715)

# 1024 elements over 4 warps are 8 each: one 16-byte load a thread for the 16-bit types.
BLOCK = 1024


@triton.jit
def _sigmoid_of_tanh_form(x):
    # 0.5 · (1 + tanh(u)) = sigmoid(2u) = s. Of exp(−|2u|), neither s nor s · (1 − s) suffers cancellation.
    u = SQRT_2_OVER_PI * (x + CUBIC * x * x * x)
    e = tl.exp(-2 * tl.abs(u))
    p = 1 / (1 + e)
    return tl.where(u >= 0, p, e * p), e * p * p


@triton.jit
def _gelu_kernel(
    out_ptr, input_ptr, numel, size1, size2, size3,
    o0, o1, o2, o3, i0, i1, i2, i3,
    TANH: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    out_offset = index if DENSE else offset_of(index, size1, size2, size3, o0, o1, o2, o3)
    input_offset = index if DENSE else offset_of(index, size1, size2, size3, i0, i1, i2, i3)
    x = tl.load(input_ptr + input_offset, mask=mask).to(tl.float32)
    if TANH:
        s, _ = _sigmoid_of_tanh_form(x)
        y = x * s
    else:
        y = 0.5 * x * (1 + tl.erf(x * SQRT_HALF))
    tl.store(out_ptr + out_offset, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gelu_backward_kernel(
    grad_input_ptr, grad_ptr, input_ptr, numel, size1, size2, size3,
    o0, o1, o2, o3, g0, g1, g2, g3, i0, i1, i2, i3,
    TANH: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    out_offset = index if DENSE else offset_of(index, size1, size2, size3, o0, o1, o2, o3)
    grad_offset = index if DENSE else offset_of(index, size1, size2, size3, g0, g1, g2, g3)
    input_offset = index if DENSE else offset_of(index, size1, size2, size3, i0, i1, i2, i3)
    x = tl.load(input_ptr + input_offset, mask=mask).to(tl.float32)
    grad = tl.load(grad_ptr + grad_offset, mask=mask).to(tl.float32)
    if TANH:
        s, s_slope = _sigmoid_of_tanh_form(x)
        derivative = s + x * s_slope * (2 * SQRT_2_OVER_PI * (1 + 3 * CUBIC * x * x))
    else:
        derivative = 0.5 * (1 + tl.erf(x * SQRT_HALF)) + x * (INV_SQRT_2PI * tl.exp(-0.5 * x * x))
    tl.store(grad_input_ptr + out_offset, (grad * derivative).to(grad_input_ptr.dtype.element_ty), mask=mask)


def gelu(input: torch.Tensor, *, approximate: str) -> tuple[torch.Tensor, tuple]:
    output = torch.empty_like(input)
    numel = input.numel()
    if numel:
        dense, strides = layout(output, input)
        grid = (triton.cdiv(numel, BLOCK),)
        _gelu_kernel[grid](output, input, numel, *strides, TANH=approximate == "tanh", DENSE=dense, BLOCK=BLOCK)
    return output, (input, approximate)


def gelu_backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor]:
    input, approximate = saved
    grad_input = torch.empty_like(input)
    numel = input.numel()
    if numel:
        dense, strides = layout(grad_input, grad, input)
        grid = (triton.cdiv(numel, BLOCK),)
        _gelu_backward_kernel[grid](
            grad_input, grad, input, numel, *strides, TANH=approximate == "tanh", DENSE=dense, BLOCK=BLOCK
        )
    return (grad_input,)


def _unsupported(input: torch.Tensor, **options: object) -> str | None:
    return unsupported(input) or too_many_dims(input)


register("gelu", "triton.fused", forward=gelu, backward=gelu_backward, unsupported=_unsupported)

AOT = [
    entry(kernel, dtype, {"TANH": tanh, "DENSE": dense, "BLOCK": BLOCK})
    for kernel in (_gelu_kernel, _gelu_backward_kernel)
    for dtype, tanh, dense in (("bf16", True, True), ("fp32", False, False))
]
