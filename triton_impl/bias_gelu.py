"""bias_gelu, rung 1 of 1: fused

Idea      ``gelu(input + bias)`` in registers. A program loads its columns of bias once for a tile of rows. Backward, a
          program loops down a part of the rows and sums bias's gradient; a second kernel sums the partials.
Predicts  2 · numel · itemsize bytes forward, 3 · numel · itemsize backward, and the partials.
Limit now Memory bandwidth for tanh; arithmetic for the exact (erf) form.
Next      cuda `vectorized`.

Shared openly: the column sum of the partials (``common/column_sum.py``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_ladder.tracing import shapes_only
from triton_impl import register, unsupported
from triton_impl.common.cache_policy import EVICTION_OF_SINGLE_USE
from triton_impl.common.column_sum import row_partition, sum_partials
from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.elementwise import (
    gradient_for_kernel,
    offset_of,
    row_indexing,
    tile,
    tile_of,
    too_many_row_dims,
)
from triton_impl.common.pdl import griddepcontrol_wait
from triton_impl.gelu import gelu_derivative, gelu_of
from triton_impl.runtime.launch_cache import CachedKernel

#: Elements of a tile: forward four 16-byte loads a thread for the 16-bit types, backward one of each operand.
FORWARD_TILE = 4096
FORWARD_WARPS = 4
BACKWARD_TILE = 2048
BACKWARD_WARPS = 8
#: Columns of a tile, at most. Forward, where the bias is narrower than the program, a thread gets it through shared
#: memory while all loads of the input are in flight; else ptxas puts some off until others are done with. Backward it
#: must be high, so that few programs have partial sums.
FORWARD_COLUMNS = 256
BACKWARD_COLUMNS = 256
#: Tiles of a backward program under way: the next two while one is worked on.
STAGES = tl.constexpr(3)
#: Programs of the backward kernel that run on a multiprocessor at once, with so many registers a thread.
BACKWARD_PROGRAMS = 4
BACKWARD_REGISTERS = 64


@triton.jit
def _bias_gelu(out_ptr, input_ptr, bias_ptr, column, columns, mask, TANH: tl.constexpr):
    bias = tl.load(bias_ptr, mask=column < columns).to(tl.float32)
    x = tl.load(input_ptr, mask=mask, eviction_policy=EVICTION_OF_SINGLE_USE).to(tl.float32) + bias
    tl.store(out_ptr, gelu_of(x, TANH).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gradient(grad_input_ptr, grad_ptr, input_ptr, bias, mask, TANH: tl.constexpr):
    x = tl.load(input_ptr, mask=mask, other=0.0, eviction_policy=EVICTION_OF_SINGLE_USE).to(tl.float32) + bias
    grad = tl.load(grad_ptr, mask=mask, other=0.0, eviction_policy=EVICTION_OF_SINGLE_USE).to(tl.float32)
    grad_input = grad * gelu_derivative(x, TANH)
    tl.store(grad_input_ptr, grad_input.to(grad_input_ptr.dtype.element_ty), mask=mask)
    return grad_input


@triton.jit
def _bias_gelu_kernel(
    out_ptr, input_ptr, bias_ptr, rows, columns,
    DIVISIBILITY: tl.constexpr, TANH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    griddepcontrol_wait(USE_PDL)
    columns = assume_divisible(columns, DIVISIBILITY)
    row, column, mask = tile(rows, columns, BLOCK_M, BLOCK_N)
    i = row[:, None] * columns + column
    _bias_gelu(out_ptr + i, input_ptr + i, bias_ptr + column, column, columns, mask, TANH)


@triton.jit
def _bias_gelu_backward_kernel(
    grad_input_ptr, partials_ptr, grad_ptr, input_ptr, bias_ptr, rows, columns, rows_per_part,
    DIVISIBILITY: tl.constexpr, TANH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    columns = assume_divisible(columns, DIVISIBILITY)
    blocks = tl.cdiv(columns, BLOCK_N)
    share = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    end = tl.minimum((share + 1) * rows_per_part, rows)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(share * rows_per_part, end, BLOCK_M, num_stages=STAGES):
        row = tl.cast(start, tl.int64) + tl.arange(0, BLOCK_M)
        mask = (row < end)[:, None] & (column < columns)[None, :]
        i = row[:, None] * columns + column[None, :]
        # Masked elements have a gradient of zero.
        sums += _gradient(grad_input_ptr + i, grad_ptr + i, input_ptr + i, bias, mask, TANH)
    tl.store(partials_ptr + share * columns + column, tl.sum(sums, axis=0), mask=column < columns)


# The same for operands of any strides.


@triton.jit
def _bias_gelu_strided_kernel(
    out_ptr, input_ptr, bias_ptr, rows, columns, bias_step, size1, size2, size3,
    o0, o1, o2, o3, i0, i1, i2, i3, o_step, i_step,
    TANH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, column, mask = tile(rows, columns, BLOCK_M, BLOCK_N)
    out_ptr += offset_of(row, size1, size2, size3, o0, o1, o2, o3)[:, None] + column * o_step
    input_ptr += offset_of(row, size1, size2, size3, i0, i1, i2, i3)[:, None] + column * i_step
    _bias_gelu(out_ptr, input_ptr, bias_ptr + column * bias_step, column, columns, mask, TANH)


@triton.jit
def _bias_gelu_backward_strided_kernel(
    grad_input_ptr, partials_ptr, grad_ptr, input_ptr, bias_ptr, rows, columns, rows_per_part, bias_step,
    size1, size2, size3, o0, o1, o2, o3, g0, g1, g2, g3, i0, i1, i2, i3, o_step, g_step, i_step,
    TANH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(columns, BLOCK_N)
    share = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    bias = tl.load(bias_ptr + column * bias_step, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    end = tl.minimum((share + 1) * rows_per_part, rows)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(share * rows_per_part, end, BLOCK_M):
        row = tl.cast(start, tl.int64) + tl.arange(0, BLOCK_M)  # interpreted, `start` is a number of no type
        mask = (row < end)[:, None] & (column < columns)[None, :]
        out = grad_input_ptr + offset_of(row, size1, size2, size3, o0, o1, o2, o3)[:, None] + column[None, :] * o_step
        grad = grad_ptr + offset_of(row, size1, size2, size3, g0, g1, g2, g3)[:, None] + column[None, :] * g_step
        input = input_ptr + offset_of(row, size1, size2, size3, i0, i1, i2, i3)[:, None] + column[None, :] * i_step
        sums += _gradient(out, grad, input, bias, mask, TANH)
    tl.store(partials_ptr + share * columns + column, tl.sum(sums, axis=0), mask=column < columns)


_forward = CachedKernel(_bias_gelu_kernel, num_warps=FORWARD_WARPS)
_forward_strided = CachedKernel(_bias_gelu_strided_kernel, num_warps=FORWARD_WARPS)
_backward = CachedKernel(_bias_gelu_backward_kernel, num_warps=BACKWARD_WARPS, maxnreg=BACKWARD_REGISTERS)
_backward_strided = CachedKernel(
    _bias_gelu_backward_strided_kernel, num_warps=BACKWARD_WARPS, maxnreg=BACKWARD_REGISTERS
)


def _tile(columns: int, elements: int, most_columns: int) -> tuple[int, int]:
    _, width = tile_of(columns, most_columns)
    return elements // width, width


def _are_dense(bias: torch.Tensor, *matrices: torch.Tensor) -> bool:
    return bias.is_contiguous() and all(m.is_contiguous() for m in matrices)


def bias_gelu(input: torch.Tensor, bias: torch.Tensor, *, approximate: str) -> tuple[torch.Tensor, tuple]:
    output = torch.empty_like(input)
    if shapes_only() or input.numel() == 0:
        return output, (input, bias, approximate)
    columns = bias.shape[0]
    height, width = _tile(columns, FORWARD_TILE, FORWARD_COLUMNS)
    rows = input.numel() // columns
    programs = triton.cdiv(rows, height) * triton.cdiv(columns, width)
    constants = (approximate == "tanh", height, width)
    if _are_dense(bias, output, input):
        _forward(programs, (output, input, bias), (rows, columns, divisibility_of(columns), *constants))
    else:
        _, _, strides = row_indexing(output, input)
        arguments = (rows, columns, bias.stride(0), *strides, *constants)
        _forward_strided(programs, (output, input, bias), arguments)
    return output, (input, bias, approximate)


def bias_gelu_backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    input, bias, approximate = saved
    grad_input = torch.empty_like(input)
    if shapes_only() or input.numel() == 0:
        return grad_input, bias.new_zeros(bias.shape)
    columns = bias.shape[0]
    height, width = _tile(columns, BACKWARD_TILE, BACKWARD_COLUMNS)
    rows, blocks = input.numel() // columns, triton.cdiv(columns, width)
    shares, rows_per_part = row_partition(rows, blocks, BACKWARD_PROGRAMS, 2 * height, input.device)
    partials = torch.empty((shares, columns), dtype=torch.float32, device=input.device)
    tensors = (grad_input, partials, grad, input, bias)
    constants = (approximate == "tanh", height, width)
    if _are_dense(bias, grad_input, grad, input):
        _backward(shares * blocks, tensors, (rows, columns, rows_per_part, divisibility_of(columns), *constants))
    else:
        grad = gradient_for_kernel(grad, grad_input, input, rows_at=-1)
        _, _, strides = row_indexing(grad_input, grad, input)
        arguments = (rows, columns, rows_per_part, bias.stride(0), *strides, *constants)
        _backward_strided(shares * blocks, (grad_input, partials, grad, input, bias), arguments)
    grad_bias = bias.new_empty(bias.shape)
    sum_partials(grad_bias, partials)
    return grad_input, grad_bias


def _unsupported(input: torch.Tensor, bias: torch.Tensor, **options: object) -> str | None:
    return unsupported(input) or too_many_row_dims(input)


register("bias_gelu", "triton.fused", forward=bias_gelu, backward=bias_gelu_backward, unsupported=_unsupported)
