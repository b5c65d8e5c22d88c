"""rope, rung 1 of 1: fused

Idea      A program rotates a tile of positions, of several heads: it reads the angles once, and each row once. A thread
          holds both elements of its pairs. Neighbouring elements load together: both halves of a row are runs, and
          interleaved pairs are one run that is split in registers. The backward pass has the opposite angle. Where each
          sequence has an offset of its own, a program's heads are of one sequence, so that they still share the angles.
Predicts  2 · numel · itemsize bytes a pass, and half of the table's reads from L2: the time of a copy.
Limit now Memory bandwidth.
Next      cuda `vectorized`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.rotary import all_angles, angles_from, check_common_offset
from kernel_ladder.semantics.strides import collapse
from kernel_ladder.tracing import shapes_only
from triton_impl import register, unsupported
from triton_impl.common.elementwise import gradient_for_kernel, offset_of, pad_strides, too_many_row_dims
from triton_impl.common.pdl import griddepcontrol_wait
from triton_impl.runtime.launch_cache import CachedKernel

# 1024 pairs over 4 warps are 8 each: in 16 bits a load of 16 bytes from each half.
PAIRS = 1024
# Rows that a program rotates by the angles that it has. Of four, loads and stores alternate: 10 to 20 % slower.
HEADS = 2


@triton.jit
def _both(x, PAIRS_M: tl.constexpr, PAIRS_N: tl.constexpr):
    """First and second elements of the pairs in the rows of a tile."""
    return tl.split(tl.reshape(x, (PAIRS_M, PAIRS_N, 2)))


@triton.jit(do_not_specialize=["offset"])
def _rope_kernel(
    out_ptr, input_ptr, table_ptr, offsets_ptr, offset, table_rows, sequence_heads,
    heads, positions, pairs, width, table_stride,
    size1, size2, size3, o0, o1, o2, o3, x0, x1, x2, x3, o_row, x_row, o_step, x_step,
    INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """``(y1, y2) = (a · cos − b · sin, b · cos + a · sin)`` for pairs (a, b); elements after the pairs are copied.

    Grid: one program per BLOCK_M positions of HEADS heads; `heads` counts all dimensions before the position. The table
    has (cos, sin) for each pair, float32, `table_stride` apart from position to position.

    `offsets_ptr` is None, and so are the three arguments after it, where the table starts at the first row's position.
    Else it has an integer for each sequence of `sequence_heads` heads; its rows stand `offset` and that integer on. The
    table has `table_rows` positions. Angles of any other are NaN.
    """
    griddepcontrol_wait(USE_PDL)
    tiles = tl.cdiv(positions, BLOCK_M)
    position = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    if offsets_ptr is None:
        first_head = (tl.program_id(0) // tiles).to(tl.int64) * HEADS
    else:
        groups = tl.cdiv(sequence_heads, HEADS)
        sequence = (tl.program_id(0) // tiles // groups).to(tl.int64)
        first_head = sequence * sequence_heads + tl.program_id(0) // tiles % groups * HEADS
        heads = (sequence + 1) * sequence_heads
        table_row = position + tl.load(offsets_ptr + sequence).to(tl.int64) + offset
    for start in range(0, pairs, BLOCK_N):
        pair = start + tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
        columns = 2 * start + tl.arange(0, 2 * BLOCK_N).to(tl.int64)[None, :]
        angles_mask = (position < positions) & (columns < 2 * pairs)
        if offsets_ptr is None:
            angles = tl.load(table_ptr + position * table_stride + columns, mask=angles_mask)
        else:
            angles_mask = angles_mask & (table_row >= 0) & (table_row < table_rows)
            angles = tl.load(table_ptr + table_row * table_stride + columns, mask=angles_mask, other=float("nan"))
        cos, sin = _both(angles, BLOCK_M, BLOCK_N)
        if BACKWARD:
            sin = -sin
        for i in tl.static_range(HEADS):
            head = first_head + i
            x_ptr = input_ptr + offset_of(head, size1, size2, size3, x0, x1, x2, x3) + position * x_row
            y_ptr = out_ptr + offset_of(head, size1, size2, size3, o0, o1, o2, o3) + position * o_row
            there = position < tl.where(head < heads, positions, 0)
            if INTERLEAVED:
                mask = there & (columns < 2 * pairs)
                a, b = _both(tl.load(x_ptr + columns * x_step, mask=mask), BLOCK_M, BLOCK_N)
            else:
                mask = there & (pair < pairs)
                a = tl.load(x_ptr + pair * x_step, mask=mask)
                b = tl.load(x_ptr + (pairs + pair) * x_step, mask=mask)
            x, y = a.to(tl.float32), b.to(tl.float32)
            a = (x * cos - y * sin).to(out_ptr.dtype.element_ty)
            b = (y * cos + x * sin).to(out_ptr.dtype.element_ty)
            if INTERLEAVED:
                tl.store(y_ptr + columns * o_step, tl.reshape(tl.join(a, b), (BLOCK_M, 2 * BLOCK_N)), mask=mask)
            else:
                tl.store(y_ptr + pair * o_step, a, mask=mask)
                tl.store(y_ptr + (pairs + pair) * o_step, b, mask=mask)
    for start in range(2 * pairs, width, 2 * BLOCK_N):
        columns = start + tl.arange(0, 2 * BLOCK_N).to(tl.int64)[None, :]
        for i in tl.static_range(HEADS):
            head = first_head + i
            x_ptr = input_ptr + offset_of(head, size1, size2, size3, x0, x1, x2, x3) + position * x_row
            y_ptr = out_ptr + offset_of(head, size1, size2, size3, o0, o1, o2, o3) + position * o_row
            mask = (position < tl.where(head < heads, positions, 0)) & (columns < width)
            tl.store(y_ptr + columns * o_step, tl.load(x_ptr + columns * x_step, mask=mask), mask=mask)


_kernel = CachedKernel(_rope_kernel)


def _rotate(
    x: torch.Tensor,
    freqs_cis: torch.Tensor,
    offsets: torch.Tensor | None,
    interleaved: bool,
    offset: int,
    backward: bool,
) -> torch.Tensor:
    output = torch.empty_like(x)
    if shapes_only() or output.numel() == 0:
        return output
    positions, width = x.shape[-2:]
    heads = math.prod(x.shape[:-2])
    if offsets is None:
        table, groups = angles_from(freqs_cis, offset, positions), triton.cdiv(heads, HEADS)
        tensors, values, of_sequences = (output, x, table), (), (None,) * 4
    else:
        check_common_offset(offset, positions, freqs_cis.shape[0])
        table, sequence_heads = all_angles(freqs_cis), heads // x.shape[0]
        groups = x.shape[0] * triton.cdiv(sequence_heads, HEADS)
        tensors, values = (output, x, table, offsets.contiguous()), (offset,)
        of_sequences = (table.shape[0], sequence_heads)
    pairs = table.shape[1]
    sizes_and_strides = pad_strides(*collapse(x.shape[:-2], output.stride()[:-2], x.stride()[:-2]))
    steps = (output.stride(-2), x.stride(-2), output.stride(-1), x.stride(-1))
    columns = min(triton.next_power_of_2(max(pairs, 1)), PAIRS)
    height = min(PAIRS // columns, triton.next_power_of_2(positions))
    programs = triton.cdiv(positions, height) * groups
    sizes = (heads, positions, pairs, width, table.stride(0))
    options = (interleaved, backward, height, columns, HEADS)
    _kernel(programs, tensors, (*of_sequences, *sizes, *sizes_and_strides, *steps, *options), values)
    return output


def rope(
    input: torch.Tensor,
    freqs_cis: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *,
    interleaved: bool,
    offset: int,
) -> tuple[torch.Tensor, tuple]:
    saved = (freqs_cis, offsets, interleaved, offset)
    return _rotate(input, *saved, False), saved


def rope_backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
    others = (None,) * (len(needs) - 1)
    if not needs[0]:
        return None, *others
    grad = gradient_for_kernel(grad, torch.empty_like(grad, memory_format=torch.contiguous_format), rows_at=-1)
    return _rotate(grad, *saved, True), *others


def _unsupported(input: torch.Tensor, *others: torch.Tensor | None, interleaved: bool, offset: int) -> str | None:
    return unsupported(input) or too_many_row_dims(input)


register("rope", "triton.fused", forward=rope, backward=rope_backward, unsupported=_unsupported)
