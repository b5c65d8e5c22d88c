"""rope, rung 1 of 1: fused

Idea      A thread holds both elements of its pairs, so each row is read once and written once. The backward pass is the
          same kernel with the opposite angle. A program has a tile of rows and pairs, of any strides.
Predicts  2 · numel · itemsize bytes a pass, and the table, which heads and batches share in L2: the time of a copy.
Limit now Memory bandwidth; interleaved pairs load at a step of two elements.
Next      cuda `vectorized`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.rotary import angles_from
from kernel_ladder.tracing import shapes_only
from triton_impl import register, unsupported
from triton_impl.common.elementwise import (
    gradient_for_kernel,
    offset_of,
    row_indexing,
    tile,
    tile_of,
    too_many_row_dims,
)
from triton_impl.common.pdl import griddepcontrol_wait
from triton_impl.runtime.launch_cache import CachedKernel

# 512 pairs over 4 warps are 4 each.
BLOCK = 512


@triton.jit
def _rope_kernel(
    out_ptr, input_ptr, table_ptr, rows, pairs, positions, rotated_pairs, width, table_stride,
    size1, size2, size3, o0, o1, o2, o3, x0, x1, x2, x3, o_step, x_step,
    INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """``(y1, y2) = (a · cos − b · sin, b · cos + a · sin)`` for pairs (a, b); other elements are copied.

    Grid: one program per tile of rows and pairs. Layout: rows in row-major order, the position varies fastest; the
    table has (cos, sin) for each pair, float32, `table_stride` apart from position to position.
    """
    griddepcontrol_wait(USE_PDL)
    row, pair, mask = tile(rows, pairs, BLOCK_M, BLOCK_N)
    rotates = pair < rotated_pairs
    first = 2 * pair
    second = 2 * pair + 1
    if not INTERLEAVED:
        first = tl.where(rotates, pair, first)
        second = tl.where(rotates, pair + rotated_pairs, second)
    second_mask = mask & (second < width)
    input_ptr += offset_of(row, size1, size2, size3, x0, x1, x2, x3)[:, None]
    a = tl.load(input_ptr + first * x_step, mask=mask, other=0.0)
    b = tl.load(input_ptr + second * x_step, mask=second_mask, other=0.0)
    table_ptr += (row % positions)[:, None] * table_stride + 2 * pair
    cos = tl.load(table_ptr, mask=mask & rotates, other=1.0)
    sin = tl.load(table_ptr + 1, mask=mask & rotates, other=0.0)
    if BACKWARD:
        sin = -sin
    x, y = a.to(tl.float32), b.to(tl.float32)
    # Elements beyond the rotated ones stay themselves: 0 · inf would be NaN.
    rotated_a = tl.where(rotates, x * cos - y * sin, x).to(out_ptr.dtype.element_ty)
    rotated_b = tl.where(rotates, y * cos + x * sin, y).to(out_ptr.dtype.element_ty)
    out_ptr += offset_of(row, size1, size2, size3, o0, o1, o2, o3)[:, None]
    tl.store(out_ptr + first * o_step, rotated_a, mask=mask)
    tl.store(out_ptr + second * o_step, rotated_b, mask=second_mask)


_kernel = CachedKernel(_rope_kernel)


def _rotate(x: torch.Tensor, freqs_cis: torch.Tensor, interleaved: bool, offset: int, backward: bool) -> torch.Tensor:
    output = torch.empty_like(x)
    if shapes_only() or output.numel() == 0:
        return output
    positions, width = x.shape[-2:]
    table = angles_from(freqs_cis, offset, positions)
    pairs = triton.cdiv(width, 2)
    rows, _, strides = row_indexing(output, x)
    height, columns = tile_of(pairs, BLOCK)
    programs = triton.cdiv(rows, height) * triton.cdiv(pairs, columns)
    sizes = (rows, pairs, positions, table.shape[1], width, table.stride(0))
    _kernel(programs, (output, x, table), (*sizes, *strides, interleaved, backward, height, columns))
    return output


def rope(input: torch.Tensor, freqs_cis: torch.Tensor, *, interleaved: bool, offset: int) -> tuple[torch.Tensor, tuple]:
    return _rotate(input, freqs_cis, interleaved, offset, False), (freqs_cis, interleaved, offset)


def rope_backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, None]:
    if not needs[0]:
        return None, None
    grad = gradient_for_kernel(grad, torch.empty_like(grad, memory_format=torch.contiguous_format), rows_at=-1)
    return _rotate(grad, *saved, True), None


def _unsupported(input: torch.Tensor, freqs_cis: torch.Tensor, *, interleaved: bool, offset: int) -> str | None:
    return unsupported(input) or too_many_row_dims(input)


register("rope", "triton.fused", forward=rope, backward=rope_backward, unsupported=_unsupported)
