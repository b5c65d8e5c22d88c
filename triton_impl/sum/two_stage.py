"""sum, rung 2 of 2: two_stage

Idea      Tiles along rows or down columns, whichever way the memory lies. A sum too long for its programs is split into
          parts; a second launch of the same kernels adds the partials.
Predicts  numel · itemsize bytes read once, by at least ENOUGH_PROGRAMS programs: the rate of a copy's reads.
Limit now Memory bandwidth; below about a megabyte, the latency of two launches.
Next      cuda `two_stage`.

Sums of float32 are kept in float64 and rounded once, which costs nothing where memory is the limit. Shared openly:
`add` and `linear` sum their gradients with :func:`summed`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.reduction import Dim, reduced_dims, spread, sum_shape
from kernel_ladder.semantics.strides import collapse
from kernel_ladder.tracing import shapes_only
from triton_impl import unsupported as unsupported_by_triton
from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.elementwise import MAX_DIMS, offset_of, pad_strides
from triton_impl.common.pdl import griddepcontrol_wait
from triton_impl.runtime.launch_cache import LaunchCache, LaunchPlan

#: Elements of a tile by the bytes of one: a 16-byte load per thread of 4 warps. An iteration loads LOADS tiles.
TILE = {2: 1024, 4: 512, 8: 256}
LOADS = 8
#: Columns of a tile: 256 bytes of them. Partials are few rows in the L2, and take narrow tiles.
COLUMN_BYTES = 256
PARTIAL_COLUMNS = 16
#: A sum is split until it has so many programs. A constant, so that every GPU adds in the same order.
ENOUGH_PROGRAMS = 1024
#: The least number of iterations of a part's loop, along rows and down columns: fewer are not worth a second stage.
MIN_ROW_ITERATIONS = 2
MIN_COLUMN_ITERATIONS = 4


@triton.jit
def _zeros(BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr, FLOAT64: tl.constexpr):
    # Sums of float32 values are kept in float64 and rounded once: memory is the limit by far.
    if FLOAT64:
        return tl.zeros([BLOCK_O, BLOCK_R], tl.float64)
    else:
        return tl.zeros([BLOCK_O, BLOCK_R], tl.float32)


@triton.jit
def _store(out_ptr, sums, mask):
    if out_ptr.dtype.element_ty.primitive_bitwidth < 32:
        sums = sums.to(tl.float32)  # not every machine rounds float64 to 16 bits
    tl.store(out_ptr, sums.to(out_ptr.dtype.element_ty), mask=mask)


# ---- kernels: program (o, p) adds part p of the summands of a block of outputs ---------------------------------------
# Tiles are added element by element, and across threads only at the end. The LOADS tiles of an iteration are one load,
# added in a thread's registers first. Of separate loads ptxas keeps only two or three in flight.


@triton.jit
def _sum_rows_kernel(
    out_ptr, input_ptr, n_outputs, n_summands, stride, part,
    DIVISIBILITY: tl.constexpr, FLOAT64: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr,
    LOADS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """``out[o, p] = Σ_i input[o, p · part + i]``. Grid: (⌈outputs / BLOCK_O⌉, parts). Layout: dense rows."""
    griddepcontrol_wait(USE_PDL)
    n_summands, stride, part = (
        assume_divisible(n_summands, DIVISIBILITY),
        assume_divisible(stride, DIVISIBILITY),
        assume_divisible(part, DIVISIBILITY),
    )
    row = tl.program_id(0).to(tl.int64) * BLOCK_O + tl.arange(0, BLOCK_O)
    begin = tl.program_id(1).to(tl.int64) * part
    left = tl.minimum(n_summands - begin, part)
    rows_ptr = input_ptr + begin + (row * stride)[:, None]
    total = _zeros(BLOCK_O, BLOCK_R, FLOAT64)
    for start in range(0, part, LOADS * BLOCK_R):
        i = start + tl.arange(0, LOADS * BLOCK_R)
        x = tl.load(rows_ptr + i[None, :], mask=(row < n_outputs)[:, None] & (i < left)[None, :], other=0.0)
        total += tl.sum(x.to(total.dtype).reshape(BLOCK_O, LOADS, BLOCK_R), axis=1)
    # Partials (outputs, parts).
    out_ptr += row * tl.num_programs(1) + tl.program_id(1)
    _store(out_ptr, tl.sum(total, axis=1), row < n_outputs)


@triton.jit
def _sum_columns_kernel(
    out_ptr, input_ptr, blocks, n_summands, columns, block_stride, stride, part,
    DIVISIBILITY: tl.constexpr, FLOAT64: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr,
    LOADS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """``out[p, b, c] = Σ_i input[b, p · part + i, c]``. Grid: (blocks · ⌈columns / BLOCK_O⌉, parts).

    Layout: columns dense; any stride between summands (`stride`) and between blocks (`block_stride`).
    """
    griddepcontrol_wait(USE_PDL)
    columns, stride, block_stride = (
        assume_divisible(columns, DIVISIBILITY),
        assume_divisible(stride, DIVISIBILITY),
        assume_divisible(block_stride, DIVISIBILITY),
    )
    tiles = tl.cdiv(columns, BLOCK_O)
    block = (tl.program_id(0) // tiles).to(tl.int64)
    column = tl.program_id(0) % tiles * BLOCK_O + tl.arange(0, BLOCK_O)
    begin = tl.program_id(1).to(tl.int64) * part
    left = tl.minimum(n_summands - begin, part)
    columns_ptr = input_ptr + block * block_stride + begin * stride + column[None, :]
    total = _zeros(BLOCK_R, BLOCK_O, FLOAT64)
    for start in range(0, part, LOADS * BLOCK_R):
        i = start + tl.arange(0, LOADS * BLOCK_R)
        mask = (i < left)[:, None] & (column < columns)[None, :]
        x = tl.load(columns_ptr + (i.to(tl.int64) * stride)[:, None], mask=mask, other=0.0)
        total += tl.sum(x.to(total.dtype).reshape(LOADS, BLOCK_R, BLOCK_O), axis=0)
    # Partials (parts, outputs).
    out_ptr += (tl.program_id(1).to(tl.int64) * blocks + block) * columns + column
    _store(out_ptr, tl.sum(total, axis=0), column < columns)


@triton.jit
def _sum_strided_kernel(
    out_ptr, input_ptr, n_outputs, n_summands, part, size1, size2, size3, i0, i1, i2, i3, o0, o1, o2, o3,
    length1, length2, length3, r0, r1, r2, r3,
    FLOAT64: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr, LOADS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """``out[o, p] = Σ_i input[at(o) + at(p · part + i)]``, of any strides. Grid: (⌈outputs / BLOCK_O⌉, parts)."""
    griddepcontrol_wait(USE_PDL)
    o = tl.program_id(0).to(tl.int64) * BLOCK_O + tl.arange(0, BLOCK_O)
    begin = tl.program_id(1).to(tl.int64) * part
    end = tl.minimum(begin + part, n_summands)
    input_ptr += offset_of(o, size1, size2, size3, i0, i1, i2, i3)[:, None]
    total = _zeros(BLOCK_O, BLOCK_R, FLOAT64)
    for start in range(0, part, LOADS * BLOCK_R):
        i = begin + start + tl.arange(0, LOADS * BLOCK_R)
        offset = offset_of(i, length1, length2, length3, r0, r1, r2, r3)
        x = tl.load(input_ptr + offset[None, :], mask=(o < n_outputs)[:, None] & (i < end)[None, :], other=0.0)
        total += tl.sum(x.to(total.dtype).reshape(BLOCK_O, LOADS, BLOCK_R), axis=1)
    out_ptr += offset_of(o, size1, size2, size3, o0, o1, o2, o3) * tl.num_programs(1) + tl.program_id(1)
    _store(out_ptr, tl.sum(total, axis=1), o < n_outputs)


# ---- host --------------------------------------------------------------------------------------------------------


def _split(n_summands: int, programs: int, least: int) -> tuple[int, int]:
    """(summands of a part, parts): no part has fewer than `least`."""
    parts = max(1, min(ENOUGH_PROGRAMS // programs, n_summands // least))
    if parts == 1:
        return n_summands, 1
    part = triton.cdiv(n_summands, 16 * parts) * 16  # a multiple of 16 keeps every part aligned
    return part, triton.cdiv(n_summands, part)


def _loads(n_summands: int, block_r: int, most: int = LOADS) -> int:
    """Tiles of one iteration: no more than the summands fill."""
    return min(most, triton.next_power_of_2(triton.cdiv(n_summands, block_r)))


def _rows(n_outputs: int, n_summands: int, stride: int, itemsize: int, float64: bool, split: bool) -> LaunchPlan:
    block_r = min(triton.next_power_of_2(n_summands), TILE[itemsize])
    loads = _loads(n_summands, block_r)
    # Several rows where one is shorter than an iteration; float64 sums need twice the registers.
    several = max(1, (LOADS // 2 if float64 else LOADS) * TILE[itemsize] // (block_r * loads))
    block_o = min(triton.next_power_of_2(n_outputs), several)
    programs = triton.cdiv(n_outputs, block_o)
    part, parts = _split(n_summands, programs, MIN_ROW_ITERATIONS * loads * block_r) if split else (n_summands, 1)
    arguments = (
        n_outputs,
        n_summands,
        stride,
        part,
        divisibility_of(n_summands, stride, part),
        float64,
        block_o,
        block_r,
        loads,
    )
    return LaunchPlan(_sum_rows_kernel, (programs, parts), arguments)


def _columns(
    blocks: int,
    n_summands: int,
    columns: int,
    block_stride: int,
    stride: int,
    itemsize: int,
    float64: bool,
    split: bool,
) -> LaunchPlan:
    most = triton.next_power_of_2(columns)
    block_o = min(most, COLUMN_BYTES // itemsize if split else PARTIAL_COLUMNS)
    block_r = min(triton.next_power_of_2(n_summands), TILE[itemsize] // block_o)
    block_o = min(most, TILE[itemsize] // block_r)
    # Four loads for float32: with eight, and the float64 sums in registers, long columns were up to a tenth slower.
    loads = _loads(n_summands, block_r, LOADS // 2 if float64 else LOADS)
    programs = blocks * triton.cdiv(columns, block_o)
    part, parts = _split(n_summands, programs, MIN_COLUMN_ITERATIONS * loads * block_r) if split else (n_summands, 1)
    unit = divisibility_of(columns, block_stride, stride)
    arguments = (blocks, n_summands, columns, block_stride, stride, part, unit, float64, block_o, block_r, loads)
    return LaunchPlan(_sum_columns_kernel, (programs, parts), arguments)


def _strided(
    n_outputs: int, n_summands: int, kept: list[int], reduced: list[int], itemsize: int, float64: bool
) -> LaunchPlan:
    block_r = min(triton.next_power_of_2(n_summands), 128)
    block_o = min(triton.next_power_of_2(n_outputs), TILE[itemsize] // block_r)
    loads = _loads(n_summands, block_r)
    programs = triton.cdiv(n_outputs, block_o)
    part, parts = _split(n_summands, programs, MIN_COLUMN_ITERATIONS * loads * block_r)
    arguments = (n_outputs, n_summands, part, *kept, *reduced, float64, block_o, block_r, loads)
    return LaunchPlan(_sum_strided_kernel, (programs, parts), arguments)


def _collapsed(input: torch.Tensor, dims: tuple[int, ...]) -> tuple[list[int], list[list[int]], list[int], list[int]]:
    """Sizes of the kept dimensions with their strides in input and output, sizes of the summed ones with theirs.

    Each in memory order, a dimension of stride 0 outermost, so that as many collapse as can.
    """
    stride = input.stride()
    out_stride, next_stride = [0] * input.dim(), 1
    for d in reversed(range(input.dim())):
        if d not in dims:
            out_stride[d], next_stride = next_stride, next_stride * input.shape[d]
    in_memory = sorted(range(input.dim()), key=lambda d: -(stride[d] or math.inf))
    kept, reduced = [d for d in in_memory if d not in dims], [d for d in in_memory if d in dims]
    sizes, (strides, out_strides) = collapse(
        [input.shape[d] for d in kept], [stride[d] for d in kept], [out_stride[d] for d in kept]
    )
    lengths, (steps,) = collapse([input.shape[d] for d in reduced], [stride[d] for d in reduced])
    return sizes, [strides, out_strides], lengths, steps


def _plans(input: torch.Tensor, dims: tuple[int, ...]) -> list[LaunchPlan]:
    """The launches that sum a tensor: one, two where it is split, none where it is empty.

    The kernel follows the layout of memory: along rows, across columns, or by strides. That is the rung's idea, not a
    selection among rungs, and it is made once per shape and strides.
    """
    if input.numel() == 0:
        return []
    sizes, (strides, out_strides), lengths, steps = _collapsed(input, dims)
    n_outputs, n_summands, itemsize = math.prod(sizes), math.prod(lengths), input.element_size()
    float64 = input.dtype == torch.float32
    one_run = len(sizes) == 1 and (n_outputs == 1 or out_strides[0] == 1)  # of outputs, as they lie in memory
    if one_run and len(steps) == 1 and (steps[0] == 1 or (n_summands == 1 and strides[0] != 1)):
        first = _rows(n_outputs, n_summands, strides[0], itemsize, float64, True)
    elif len(steps) == 1 and strides[-1] == out_strides[-1] == 1 and (one_run or out_strides[:-1] == sizes[1:]):
        blocks, block_stride = (1, 0) if one_run else (sizes[0], strides[0])
        first = _columns(blocks, n_summands, sizes[-1], block_stride, steps[0], itemsize, float64, True)
    else:
        first = _strided(
            n_outputs,
            n_summands,
            pad_strides(sizes, [strides, out_strides]),
            pad_strides(lengths, [steps]),
            itemsize,
            float64,
        )
    parts = first.grid[1]
    if parts == 1:
        return [first]
    itemsize = _part_dtype(input.dtype).itemsize
    if first.kernel is _sum_columns_kernel:
        return [first, _columns(1, parts, n_outputs, 0, n_outputs, itemsize, True, False)]
    return [first, _rows(n_outputs, parts, parts, itemsize, True, False)]


def _part_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float32 else torch.float32


#: (output shape, parts, launches) by all that decides a sum.
_launches: LaunchCache = LaunchCache()


def summed(input: torch.Tensor, dims: tuple[int, ...], keepdim: bool) -> torch.Tensor:
    """The sum over `dims`, non-negative and in order."""
    if shapes_only():
        shape = sum_shape(input.shape, dims, keepdim)
        return torch.empty(shape, dtype=input.dtype, device=input.device)
    key = (input.shape, input.stride(), dims, keepdim, input.dtype, input.device)
    known: Any = _launches.get(key)
    if known is None:
        plans = _plans(input, dims)
        shape, parts = sum_shape(input.shape, dims, keepdim), plans[0].grid[1] if plans else 0
        known = shape, parts, [plan.launch() for plan in plans]
        _launches.remember(key, known)
    shape, parts, stages = known
    if parts == 0:
        return input.new_zeros(shape)
    output = torch.empty(shape, dtype=input.dtype, device=input.device)
    if parts == 1:
        stages[0](output, input)
        return output
    partial = torch.empty(parts * output.numel(), dtype=_part_dtype(input.dtype), device=input.device)
    stages[0](partial, input)
    stages[1](output, partial)
    return output


def summed_gradient(grad: torch.Tensor, dims: tuple[int, ...], keepdim: bool) -> torch.Tensor:
    """As :func:`summed`, of a gradient, whose strides no `unsupported` has seen: copied where they do not collapse."""
    return summed(grad if too_many_dims(grad, dims) is None else grad.contiguous(), dims, keepdim)


def sum(input: torch.Tensor, *, dim: Dim, keepdim: bool) -> tuple[torch.Tensor, tuple]:
    dims = reduced_dims(dim, input.dim())
    return summed(input, dims, keepdim), (input.shape, dims, keepdim)


def sum_backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor]:
    return (spread(grad, *saved),)


def too_many_dims(input: torch.Tensor, dims: tuple[int, ...]) -> str | None:
    """Why :func:`summed` cannot index a tensor, or None."""
    if input.dim() > MAX_DIMS:
        kept, _, reduced, _ = _collapsed(input, dims)
        if (most := max(len(kept), len(reduced))) > MAX_DIMS:
            return f"strides that do not collapse to {MAX_DIMS} dimensions kept or summed over (these need {most})"
    return None


def unsupported(input: torch.Tensor, *, dim: Dim, keepdim: bool) -> str | None:
    return unsupported_by_triton(input) or too_many_dims(input, reduced_dims(dim, input.dim()))
