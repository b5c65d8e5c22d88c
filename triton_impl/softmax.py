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
from kernel_ladder.table import register
from triton_impl import unsupported
from triton_impl.elementwise import MAX_DIMS, offset_of

#: The longest row that `fused` keeps in registers: 32 values a thread at 1024 threads.
MAX_FUSED = 32768
ONLINE_BLOCK = 4096
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _softmax_fused_kernel(
    out_ptr, input_ptr, length, out_step, in_step, size1, size2, size3,
    o0, o1, o2, o3, i0, i1, i2, i3, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    out_ptr += offset_of(row, size1, size2, size3, o0, o1, o2, o3)
    input_ptr += offset_of(row, size1, size2, size3, i0, i1, i2, i3)
    i = tl.arange(0, BLOCK)
    mask = i < length
    x = tl.load(input_ptr + i.to(tl.int64) * in_step, mask=mask, other=-float("inf")).to(tl.float32)
    e = tl.exp2((x - tl.max(x, axis=0)) * LOG2E)
    y = e / tl.sum(tl.where(mask, e, 0.0), axis=0)
    tl.store(out_ptr + i.to(tl.int64) * out_step, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_backward_fused_kernel(
    grad_input_ptr, grad_ptr, output_ptr, length, gi_step, g_step, o_step, size1, size2, size3,
    gi0, gi1, gi2, gi3, g0, g1, g2, g3, o0, o1, o2, o3, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    grad_input_ptr += offset_of(row, size1, size2, size3, gi0, gi1, gi2, gi3)
    grad_ptr += offset_of(row, size1, size2, size3, g0, g1, g2, g3)
    output_ptr += offset_of(row, size1, size2, size3, o0, o1, o2, o3)
    i = tl.arange(0, BLOCK)
    mask = i < length
    grad = tl.load(grad_ptr + i.to(tl.int64) * g_step, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(output_ptr + i.to(tl.int64) * o_step, mask=mask, other=0.0).to(tl.float32)
    grad_input = y * (grad - tl.sum(grad * y, axis=0))
    tl.store(grad_input_ptr + i.to(tl.int64) * gi_step, grad_input.to(grad_input_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_online_kernel(
    out_ptr, input_ptr, length, out_step, in_step, size1, size2, size3,
    o0, o1, o2, o3, i0, i1, i2, i3, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    out_ptr += offset_of(row, size1, size2, size3, o0, o1, o2, o3)
    input_ptr += offset_of(row, size1, size2, size3, i0, i1, i2, i3)
    lane = tl.arange(0, BLOCK)
    # One running maximum and sum per lane, so that the loop has no reduction across threads.
    lane_max = tl.full([BLOCK], -float("inf"), tl.float32)
    lane_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, length, BLOCK):
        i = start + lane
        x = tl.load(input_ptr + i.to(tl.int64) * in_step, mask=i < length, other=-float("inf")).to(tl.float32)
        # NaN must pass: dropped from the maximum of a lane that is −inf otherwise, it would not reach the sum either.
        new_max = tl.maximum(lane_max, x, propagate_nan=tl.PropagateNan.ALL)
        # While all is −inf, the difference of the maxima is NaN; the sum so far is of nothing.
        scaled = lane_sum * tl.exp2((lane_max - new_max) * LOG2E) + tl.exp2((x - new_max) * LOG2E)
        lane_sum = tl.where(new_max == -float("inf"), 0.0, scaled)
        lane_max = new_max
    row_max = tl.max(lane_max, axis=0)
    lane_scale = tl.where(lane_max == -float("inf"), 0.0, tl.exp2((lane_max - row_max) * LOG2E))
    scale = 1 / tl.sum(lane_sum * lane_scale, axis=0)
    for start in range(0, length, BLOCK):
        i = start + lane
        x = tl.load(input_ptr + i.to(tl.int64) * in_step, mask=i < length, other=-float("inf")).to(tl.float32)
        y = tl.exp2((x - row_max) * LOG2E) * scale
        tl.store(out_ptr + i.to(tl.int64) * out_step, y.to(out_ptr.dtype.element_ty), mask=i < length)


@triton.jit
def _softmax_backward_online_kernel(
    grad_input_ptr, grad_ptr, output_ptr, length, gi_step, g_step, o_step, size1, size2, size3,
    gi0, gi1, gi2, gi3, g0, g1, g2, g3, o0, o1, o2, o3, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    grad_input_ptr += offset_of(row, size1, size2, size3, gi0, gi1, gi2, gi3)
    grad_ptr += offset_of(row, size1, size2, size3, g0, g1, g2, g3)
    output_ptr += offset_of(row, size1, size2, size3, o0, o1, o2, o3)
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


def _rows(dim: int, *tensors: torch.Tensor) -> tuple[int, int, list[int], list[int]]:
    """Length and number of rows, each operand's step along a row, and what :func:`offset_of` takes to find a row."""
    first = tensors[0]
    if first.dim() == 0:
        return 1, 1, [1] * len(tensors), [1] * 3 + [0] * 4 * len(tensors)
    dim %= first.dim()
    others = [d for d in range(first.dim()) if d != dim]
    sizes, strides = collapse([first.shape[d] for d in others], *([t.stride(d) for d in others] for t in tensors))
    padding = MAX_DIMS - len(sizes)
    indexing = [*([1] * padding), *sizes][1:]
    for s in strides:
        indexing += [*([0] * padding), *s]
    length = first.shape[dim]
    return length, first.numel() // max(length, 1), [t.stride(dim) for t in tensors], indexing


def _num_warps(block: int) -> int:
    return min(16, max(1, block // 512))


def softmax_fused(input: torch.Tensor, *, dim: int) -> tuple[torch.Tensor, tuple]:
    output = torch.empty_like(input)
    if input.numel():
        length, rows, steps, indexing = _rows(dim, output, input)
        block = triton.next_power_of_2(length)
        _softmax_fused_kernel[(rows,)](
            output, input, length, *steps, *indexing, BLOCK=block, num_warps=_num_warps(block)
        )
    return output, (output, dim)


def softmax_backward_fused(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor]:
    output, dim = saved
    grad_input = torch.empty_like(output)
    if output.numel():
        length, rows, steps, indexing = _rows(dim, grad_input, grad, output)
        block = triton.next_power_of_2(length)
        _softmax_backward_fused_kernel[(rows,)](
            grad_input, grad, output, length, *steps, *indexing, BLOCK=block, num_warps=_num_warps(block)
        )
    return (grad_input,)


def softmax_online(input: torch.Tensor, *, dim: int) -> tuple[torch.Tensor, tuple]:
    output = torch.empty_like(input)
    if input.numel():
        length, rows, steps, indexing = _rows(dim, output, input)
        _softmax_online_kernel[(rows,)](output, input, length, *steps, *indexing, BLOCK=ONLINE_BLOCK, num_warps=8)
    return output, (output, dim)


def softmax_backward_online(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor]:
    output, dim = saved
    grad_input = torch.empty_like(output)
    if output.numel():
        length, rows, steps, indexing = _rows(dim, grad_input, grad, output)
        _softmax_backward_online_kernel[(rows,)](
            grad_input, grad, output, length, *steps, *indexing, BLOCK=ONLINE_BLOCK, num_warps=8
        )
    return (grad_input,)


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


register(
    "softmax",
    "triton.online",
    forward=softmax_online,
    backward=softmax_backward_online,
    unsupported=_unsupported,
)
register(
    "softmax",
    "triton.fused",
    forward=softmax_fused,
    backward=softmax_backward_fused,
    unsupported=_unsupported_fused,
)
