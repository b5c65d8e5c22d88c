"""Softmax in Triton.

fused    one program a row, the whole row in registers: one read, one write
online   rows too long for that: maximum and sum in one pass (Milakov and Gimelshein, arXiv:1805.02867), then the
         quotient in a second read
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_ladder.strides import collapse
from triton_impl import register, unsupported
from triton_impl.aot import entry
from triton_impl.elementwise import MAX_DIMS, offset_of, pad

#: The longest row that `fused` keeps in registers: 32 values a thread at 1024 threads.
MAX_FUSED = 32768
ONLINE_BLOCK = 4096
LOG2E = tl.constexpr(1.4426950408889634)


# ---- one row, as every kernel below does it ------------------------------------------------------------------------


@triton.jit
def _fused_row(out_ptr, input_ptr, length, out_step, in_step, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    mask = i < length
    x = tl.load(input_ptr + i.to(tl.int64) * in_step, mask=mask, other=-float("inf")).to(tl.float32)
    e = tl.exp2((x - tl.max(x, axis=0)) * LOG2E)
    y = e / tl.sum(tl.where(mask, e, 0.0), axis=0)
    tl.store(out_ptr + i.to(tl.int64) * out_step, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_fused_row(grad_input_ptr, grad_ptr, output_ptr, length, gi_step, g_step, o_step, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    mask = i < length
    grad = tl.load(grad_ptr + i.to(tl.int64) * g_step, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(output_ptr + i.to(tl.int64) * o_step, mask=mask, other=0.0).to(tl.float32)
    grad_input = y * (grad - tl.sum(grad * y, axis=0))
    tl.store(grad_input_ptr + i.to(tl.int64) * gi_step, grad_input.to(grad_input_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _online_row(out_ptr, input_ptr, length, out_step, in_step, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    # One running maximum and sum per lane, so that the loop has no reduction across threads.
    lane_max = tl.full([BLOCK], -float("inf"), tl.float32)
    lane_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, length, BLOCK):
        i = start + lane
        x = tl.load(input_ptr + i.to(tl.int64) * in_step, mask=i < length, other=-float("inf")).to(tl.float32)
        new_max = tl.maximum(lane_max, x)
        # While all is −inf, the difference of the maxima would be NaN. A NaN that the maximum drops reaches the sum.
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        lane_sum = lane_sum * tl.exp2((lane_max - shift) * LOG2E) + tl.exp2((x - shift) * LOG2E)
        lane_max = new_max
    row_max = tl.max(lane_max, axis=0)
    lane_scale = tl.where(lane_max == -float("inf"), 1.0, tl.exp2((lane_max - row_max) * LOG2E))
    scale = 1 / tl.sum(lane_sum * lane_scale, axis=0)
    for start in range(0, length, BLOCK):
        i = start + lane
        x = tl.load(input_ptr + i.to(tl.int64) * in_step, mask=i < length, other=-float("inf")).to(tl.float32)
        y = tl.exp2((x - row_max) * LOG2E) * scale
        tl.store(out_ptr + i.to(tl.int64) * out_step, y.to(out_ptr.dtype.element_ty), mask=i < length)


@triton.jit
def _backward_online_row(grad_input_ptr, grad_ptr, output_ptr, length, gi_step, g_step, o_step, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    lane_dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, length, BLOCK):
        i = start + lane
        grad = tl.load(grad_ptr + i.to(tl.int64) * g_step, mask=i < length, other=0.0).to(tl.float32)
        y = tl.load(output_ptr + i.to(tl.int64) * o_step, mask=i < length, other=0.0).to(tl.float32)
        lane_dot += grad * y
    dot = tl.sum(lane_dot, axis=0)
    for start in range(0, length, BLOCK):
        i = start + lane
        grad = tl.load(grad_ptr + i.to(tl.int64) * g_step, mask=i < length, other=0.0).to(tl.float32)
        y = tl.load(output_ptr + i.to(tl.int64) * o_step, mask=i < length, other=0.0).to(tl.float32)
        grad_input = (y * (grad - dot)).to(grad_input_ptr.dtype.element_ty)
        tl.store(grad_input_ptr + i.to(tl.int64) * gi_step, grad_input, mask=i < length)


# ---- kernels: a program a row --------------------------------------------------------------------------------------
# Dense rows have a kernel of their own, with few arguments, because every argument of a kernel costs host time.


@triton.jit
def _softmax_kernel(out_ptr, input_ptr, length, BLOCK: tl.constexpr, FUSED: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * length
    if FUSED:
        _fused_row(out_ptr + start, input_ptr + start, length, 1, 1, BLOCK)
    else:
        _online_row(out_ptr + start, input_ptr + start, length, 1, 1, BLOCK)


@triton.jit
def _softmax_backward_kernel(
    grad_input_ptr, grad_ptr, output_ptr, length, BLOCK: tl.constexpr, FUSED: tl.constexpr
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * length
    if FUSED:
        _backward_fused_row(grad_input_ptr + start, grad_ptr + start, output_ptr + start, length, 1, 1, 1, BLOCK)
    else:
        _backward_online_row(grad_input_ptr + start, grad_ptr + start, output_ptr + start, length, 1, 1, 1, BLOCK)


@triton.jit
def _softmax_strided_kernel(
    out_ptr, input_ptr, length, out_step, in_step, size1, size2, size3,
    o0, o1, o2, o3, i0, i1, i2, i3, BLOCK: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    out_ptr += offset_of(row, size1, size2, size3, o0, o1, o2, o3)
    input_ptr += offset_of(row, size1, size2, size3, i0, i1, i2, i3)
    if FUSED:
        _fused_row(out_ptr, input_ptr, length, out_step, in_step, BLOCK)
    else:
        _online_row(out_ptr, input_ptr, length, out_step, in_step, BLOCK)


@triton.jit
def _softmax_backward_strided_kernel(
    grad_input_ptr, grad_ptr, output_ptr, length, gi_step, g_step, o_step, size1, size2, size3,
    gi0, gi1, gi2, gi3, g0, g1, g2, g3, o0, o1, o2, o3, BLOCK: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    grad_input_ptr += offset_of(row, size1, size2, size3, gi0, gi1, gi2, gi3)
    grad_ptr += offset_of(row, size1, size2, size3, g0, g1, g2, g3)
    output_ptr += offset_of(row, size1, size2, size3, o0, o1, o2, o3)
    if FUSED:
        _backward_fused_row(grad_input_ptr, grad_ptr, output_ptr, length, gi_step, g_step, o_step, BLOCK)
    else:
        _backward_online_row(grad_input_ptr, grad_ptr, output_ptr, length, gi_step, g_step, o_step, BLOCK)


# ---- host ----------------------------------------------------------------------------------------------------------


def _rows(dim: int, *tensors: torch.Tensor) -> list[int]:
    """Each operand's step along a row, then what :func:`offset_of` takes to find a row among the other dimensions."""
    first = tensors[0]
    others = [d for d in range(first.dim()) if d != dim]
    steps = [t.stride(dim) for t in tensors]
    return steps + pad(*collapse([first.shape[d] for d in others], *([t.stride(d) for d in others] for t in tensors)))


def _launch(kernel, strided_kernel, dim: int, fused: bool, *tensors: torch.Tensor) -> None:
    """Launch one program a row over `tensors`, the output first."""
    output = tensors[0]
    numel = output.numel()
    if numel == 0:
        return
    last = output.dim() - 1
    if dim < 0:
        dim += max(output.dim(), 1)
    length = output.shape[dim] if output.dim() else 1
    # A row of a thousand values or less keeps one or two warps busy; past 16 warps there are registers to spare.
    block = triton.next_power_of_2(length) if fused else ONLINE_BLOCK
    num_warps = min(16, max(1, block // 512)) if fused else 8
    grid = (numel // length,)
    if dim == last and all(t.is_contiguous() for t in tensors):
        kernel[grid](*tensors, length, BLOCK=block, FUSED=fused, num_warps=num_warps)
    elif output.dim() == 0:
        kernel[grid](*tensors, 1, BLOCK=block, FUSED=fused, num_warps=num_warps)
    else:
        strided_kernel[grid](*tensors, length, *_rows(dim, *tensors), BLOCK=block, FUSED=fused, num_warps=num_warps)


def _variant(name: str, fused: bool, unsupported) -> None:
    def forward(input: torch.Tensor, *, dim: int) -> tuple[torch.Tensor, tuple]:
        output = torch.empty_like(input)
        _launch(_softmax_kernel, _softmax_strided_kernel, dim, fused, output, input)
        return output, (output, dim)

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor]:
        output, dim = saved
        grad_input = torch.empty_like(output)
        _launch(_softmax_backward_kernel, _softmax_backward_strided_kernel, dim, fused, grad_input, grad, output)
        return (grad_input,)

    register("softmax", name, forward=forward, backward=backward, unsupported=unsupported)


def _unsupported(input: torch.Tensor, *, dim: int) -> str | None:
    if (reason := unsupported(input)) is not None:
        return reason
    if input.dim() > MAX_DIMS + 1:
        contiguous = torch.empty(input.shape, device="meta")
        others = [d for d in range(input.dim()) if d != dim % input.dim()]
        strides = [[t.stride(d) for d in others] for t in (input, contiguous)]
        dims = len(collapse([input.shape[d] for d in others], *strides)[0])
        if dims > MAX_DIMS:
            return f"rows whose strides do not collapse to {MAX_DIMS} dimensions (these need {dims})"
    return None


def _unsupported_fused(input: torch.Tensor, *, dim: int) -> str | None:
    length = input.shape[dim] if input.dim() else 1
    if length > MAX_FUSED:
        return f"rows of {length} elements are too long for registers; at most {MAX_FUSED}"
    return _unsupported(input, dim=dim)


_variant("triton.online", fused=False, unsupported=_unsupported)
_variant("triton.fused", fused=True, unsupported=_unsupported_fused)

AOT = [
    *(entry(k, "bf16", {"BLOCK": 4096, "FUSED": True}) for k in (_softmax_kernel, _softmax_backward_kernel)),
    *(
        entry(k, "fp32", {"BLOCK": ONLINE_BLOCK, "FUSED": False})
        for k in (_softmax_strided_kernel, _softmax_backward_strided_kernel)
    ),
]
