"""add, rung 1 of 1: fused

Idea      One read of each operand and one write, with operands of one dense run, one broadcast row, or any strides.
Predicts  3 · numel · itemsize bytes: the time of a copy of as many bytes.
Limit now Memory bandwidth.
Next      cuda `vectorized`.

Shared openly: the gradient of a broadcast operand is a sum by ``sum/two_stage.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.reduction import gradients_of_broadcast
from kernel_ladder.semantics.strides import collapse
from kernel_ladder.tracing import shapes_only
from triton_impl import register, unsupported
from triton_impl.common.cache_policy import EVICTION_OF_SINGLE_USE
from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.elementwise import MAX_DIMS, offset_of, pad_strides
from triton_impl.common.pdl import griddepcontrol_wait
from triton_impl.runtime.launch_cache import LaunchCache, LaunchPlan
from triton_impl.sum.two_stage import summed_gradient

# 1024 elements over 4 warps are 8 per thread: one 16-byte load for the 16-bit dtypes.
BLOCK = 1024
#: Elements of a tile where one row is added to all rows, and its columns at most.
TILE = 2048
MAX_COLUMNS = 1024


@triton.jit
def _sum_of(x, y):
    return x.to(tl.float32) + y.to(tl.float32)


@triton.jit
def _add_block(out_ptr, input_ptr, other_ptr, i, mask):
    x = tl.load(input_ptr + i, mask=mask, eviction_policy=EVICTION_OF_SINGLE_USE)
    y = tl.load(other_ptr + i, mask=mask, eviction_policy=EVICTION_OF_SINGLE_USE)
    tl.store(out_ptr + i, _sum_of(x, y).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_kernel(out_ptr, input_ptr, other_ptr, numel, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    """``out = input + other``. Grid: (⌈numel / BLOCK⌉,). Layout: all dense, in one order."""
    griddepcontrol_wait(USE_PDL)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = start + tl.arange(0, BLOCK)
    if start + BLOCK <= numel:  # with a mask, whole vectors would need a `numel` that 16 divides
        _add_block(out_ptr, input_ptr, other_ptr, i, None)
    else:
        _add_block(out_ptr, input_ptr, other_ptr, i, i < numel)


@triton.jit
def _add_row_kernel(
    out_ptr, input_ptr, other_ptr, rows, columns,
    DIVISIBILITY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """``out[i, j] = input[i, j] + other[j]``. Grid: (tiles,), row-major. Layout: matrices and row contiguous."""
    griddepcontrol_wait(USE_PDL)
    columns = assume_divisible(columns, DIVISIBILITY)
    tiles = tl.cdiv(columns, BLOCK_N)
    row = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    i = row[:, None] * columns + column[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(input_ptr + i, mask=mask, eviction_policy=EVICTION_OF_SINGLE_USE)
    y = tl.load(other_ptr + column, mask=column < columns)
    tl.store(out_ptr + i, _sum_of(x, y[None, :]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_strided_kernel(
    out_ptr, input_ptr, other_ptr, numel, size1, size2, size3, o0, o1, o2, o3, a0, a1, a2, a3, b0, b1, b2, b3,
    BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """``out = input + other`` of any strides, up to four dimensions. Grid: (⌈numel / BLOCK⌉,)."""
    griddepcontrol_wait(USE_PDL)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(input_ptr + offset_of(i, size1, size2, size3, a0, a1, a2, a3), mask=i < numel)
    y = tl.load(other_ptr + offset_of(i, size1, size2, size3, b0, b1, b2, b3), mask=i < numel)
    out_ptr += offset_of(i, size1, size2, size3, o0, o1, o2, o3)
    tl.store(out_ptr, _sum_of(x, y).to(out_ptr.dtype.element_ty), mask=i < numel)


def _output(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Memory for the sum, in the layout of an operand of the output's shape where there is one."""
    shape = torch.broadcast_shapes(input.shape, other.shape)
    return torch.empty_like(input) if input.shape == shape else input.new_empty(shape)


def _plan(input: torch.Tensor, other: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], LaunchPlan | None]:
    """Shape and strides of the output, and the launch that fills it. `input` is the larger operand."""
    shape = tuple(torch.broadcast_shapes(input.shape, other.shape))
    like = _output(input, other)
    out, a, b = like.stride(), input.expand(shape).stride(), other.expand(shape).stride()
    numel = like.numel()
    if numel == 0:
        return shape, out, None
    grid = (triton.cdiv(numel, BLOCK),)
    if out == a == b:
        return shape, out, LaunchPlan(_add_kernel, grid, (numel, BLOCK))
    sizes, strides = collapse(shape, out, a, b)
    if strides == [[1], [1], [1]]:
        return shape, out, LaunchPlan(_add_kernel, grid, (numel, BLOCK))
    if len(sizes) == 2 and strides == [[sizes[1], 1], [sizes[1], 1], [0, 1]]:
        block_n = min(triton.next_power_of_2(sizes[1]), MAX_COLUMNS)
        block_m = TILE // block_n
        tiles = triton.cdiv(sizes[0], block_m) * triton.cdiv(sizes[1], block_n)
        return shape, out, LaunchPlan(_add_row_kernel, (tiles,), (*sizes, divisibility_of(sizes[1]), block_m, block_n))
    return shape, out, LaunchPlan(_add_strided_kernel, grid, (numel, *pad_strides(sizes, strides), BLOCK))


#: (output shape, output strides, launch) by all that decides an addition.
_launches: LaunchCache = LaunchCache()


def add(input: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, tuple]:
    shapes = input.shape, other.shape
    if input.numel() < other.numel():
        input, other = other, input
    if shapes_only():
        return _output(input, other), shapes
    key = (input.shape, input.stride(), other.shape, other.stride(), input.dtype, input.device)
    known: Any = _launches.get(key)
    if known is None:
        shape, strides, step = _plan(input, other)
        known = shape, strides, None if step is None else step.launch()
        _launches.remember(key, known)
    shape, strides, launch = known
    output = torch.empty_strided(shape, strides, dtype=input.dtype, device=input.device)
    if launch is not None:
        launch(output, input, other)
    return output, shapes


def add_backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
    return gradients_of_broadcast(grad, saved, needs, summed_gradient)


def _unsupported(input: torch.Tensor, other: torch.Tensor) -> str | None:
    if (reason := unsupported(input)) is not None:
        return reason
    if max(input.dim(), other.dim()) > MAX_DIMS:
        shape = torch.broadcast_shapes(input.shape, other.shape)
        out = torch.empty_like(input, device="meta") if input.shape == shape else torch.empty(shape, device="meta")
        strides = (x.expand(shape).stride() for x in (out, input, other))
        if (dims := len(collapse(shape, *strides)[0])) > MAX_DIMS:
            return f"strides that do not collapse to {MAX_DIMS} dimensions (these need {dims})"
    return None


register("add", "triton.fused", forward=add, backward=add_backward, unsupported=_unsupported)
