"""Sum in Triton: tiles along rows or across columns, whichever way the memory lies; a long sum in two stages."""

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

#: Elements of a tile by the bytes of one: a 16-byte load of each thread of 4 warps. A thread has several on their way.
TILE = {2: 1024, 4: 512, 8: 256}
LOADS = 8
#: Columns of a tile: 256 bytes of them; few for the parts of a long sum, which lie in the L2 and are few rows.
COLUMN_BYTES, COLUMNS_OF_PARTS = 256, 16
#: A sum is split until there are so many programs. A constant, so that every GPU adds in the same order.
ENOUGH_PROGRAMS = 1024
#: Turns of a program's loop that make a part worth its second stage: along rows, whose parts a program adds up at once,
#: and across them, where it goes through the parts of its columns.
ALONG, ACROSS = 2, 4


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
# Tiles are added up element by element, and only in the end across threads. Those of a turn are one load, added up in a
# thread's registers before anything else: of loads one after the other ptxas puts off all but two or three.


@triton.jit
def _sum_rows_kernel(
    out_ptr, input_ptr, count, length, stride, part,
    DIVISIBILITY: tl.constexpr, FLOAT64: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr, LOADS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    griddepcontrol_wait(USE_PDL)
    length, stride, part = (
        assume_divisible(length, DIVISIBILITY),
        assume_divisible(stride, DIVISIBILITY),
        assume_divisible(part, DIVISIBILITY),
    )
    row = tl.program_id(0).to(tl.int64) * BLOCK_O + tl.arange(0, BLOCK_O)
    begin = tl.program_id(1).to(tl.int64) * part
    left = tl.minimum(length - begin, part)
    rows_ptr = input_ptr + begin + (row * stride)[:, None]
    total = _zeros(BLOCK_O, BLOCK_R, FLOAT64)
    for start in range(0, part, LOADS * BLOCK_R):
        i = start + tl.arange(0, LOADS * BLOCK_R)
        x = tl.load(rows_ptr + i[None, :], mask=(row < count)[:, None] & (i < left)[None, :], other=0.0)
        total += tl.sum(x.to(total.dtype).reshape(BLOCK_O, LOADS, BLOCK_R), axis=1)
    # The parts of a sum lie side by side.
    out_ptr += row * tl.num_programs(1) + tl.program_id(1)
    _store(out_ptr, tl.sum(total, axis=1), row < count)


@triton.jit
def _sum_columns_kernel(
    out_ptr, input_ptr, blocks, length, columns, block_stride, stride, part,
    DIVISIBILITY: tl.constexpr, FLOAT64: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr, LOADS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
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
    left = tl.minimum(length - begin, part)
    columns_ptr = input_ptr + block * block_stride + begin * stride + column[None, :]
    total = _zeros(BLOCK_R, BLOCK_O, FLOAT64)
    for start in range(0, part, LOADS * BLOCK_R):
        i = start + tl.arange(0, LOADS * BLOCK_R)
        mask = (i < left)[:, None] & (column < columns)[None, :]
        x = tl.load(columns_ptr + (i.to(tl.int64) * stride)[:, None], mask=mask, other=0.0)
        total += tl.sum(x.to(total.dtype).reshape(LOADS, BLOCK_R, BLOCK_O), axis=0)
    # The parts of a sum lie below each other.
    out_ptr += (tl.program_id(1).to(tl.int64) * blocks + block) * columns + column
    _store(out_ptr, tl.sum(total, axis=0), column < columns)


@triton.jit
def _sum_strided_kernel(
    out_ptr, input_ptr, count, length, part, size1, size2, size3, i0, i1, i2, i3, o0, o1, o2, o3,
    length1, length2, length3, r0, r1, r2, r3,
    FLOAT64: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr, LOADS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    griddepcontrol_wait(USE_PDL)
    o = tl.program_id(0).to(tl.int64) * BLOCK_O + tl.arange(0, BLOCK_O)
    begin = tl.program_id(1).to(tl.int64) * part
    end = tl.minimum(begin + part, length)
    input_ptr += offset_of(o, size1, size2, size3, i0, i1, i2, i3)[:, None]
    total = _zeros(BLOCK_O, BLOCK_R, FLOAT64)
    for start in range(0, part, LOADS * BLOCK_R):
        i = begin + start + tl.arange(0, LOADS * BLOCK_R)
        offset = offset_of(i, length1, length2, length3, r0, r1, r2, r3)
        x = tl.load(input_ptr + offset[None, :], mask=(o < count)[:, None] & (i < end)[None, :], other=0.0)
        total += tl.sum(x.to(total.dtype).reshape(BLOCK_O, LOADS, BLOCK_R), axis=1)
    out_ptr += offset_of(o, size1, size2, size3, o0, o1, o2, o3) * tl.num_programs(1) + tl.program_id(1)
    _store(out_ptr, tl.sum(total, axis=1), o < count)


# ---- host --------------------------------------------------------------------------------------------------------


def _split(length: int, programs: int, least: int) -> tuple[int, int]:
    """Summands of a part, no fewer than `least`, and the number of parts."""
    parts = max(1, min(ENOUGH_PROGRAMS // programs, length // least))
    if parts == 1:
        return length, 1
    part = triton.cdiv(length, 16 * parts) * 16  # a multiple that keeps every part's loads whole
    return part, triton.cdiv(length, part)


def _turn(length: int, block_r: int, most: int = LOADS) -> int:
    """Tiles of a turn of a program's loop: no more than the summands fill."""
    return min(most, triton.next_power_of_2(triton.cdiv(length, block_r)))


def _rows(count: int, length: int, stride: int, itemsize: int, wide: bool, split: bool) -> LaunchPlan:
    block_r = min(triton.next_power_of_2(length), TILE[itemsize])
    loads = _turn(length, block_r)
    # Of rows shorter than all loads of a turn, several: as many as leave float64 sums their registers.
    several = max(1, (LOADS // 2 if wide else LOADS) * TILE[itemsize] // (block_r * loads))
    block_o = min(triton.next_power_of_2(count), several)
    programs = triton.cdiv(count, block_o)
    part, parts = _split(length, programs, ALONG * loads * block_r) if split else (length, 1)
    arguments = (count, length, stride, part, divisibility_of(length, stride, part), wide, block_o, block_r, loads)
    return LaunchPlan(_sum_rows_kernel, (programs, parts), arguments)


def _columns(
    blocks: int, length: int, columns: int, block_stride: int, stride: int, itemsize: int, wide: bool, split: bool
) -> LaunchPlan:
    most = triton.next_power_of_2(columns)
    block_o = min(most, COLUMN_BYTES // itemsize if split else COLUMNS_OF_PARTS)
    block_r = min(triton.next_power_of_2(length), TILE[itemsize] // block_o)
    block_o = min(most, TILE[itemsize] // block_r)
    # Eight loads of float32 values down long columns lost up to a tenth: beside them a thread has its float64 sums.
    loads = _turn(length, block_r, LOADS // 2 if wide else LOADS)
    programs = blocks * triton.cdiv(columns, block_o)
    part, parts = _split(length, programs, ACROSS * loads * block_r) if split else (length, 1)
    unit = divisibility_of(columns, block_stride, stride)
    arguments = (blocks, length, columns, block_stride, stride, part, unit, wide, block_o, block_r, loads)
    return LaunchPlan(_sum_columns_kernel, (programs, parts), arguments)


def _strided(count: int, length: int, kept: list[int], reduced: list[int], itemsize: int, wide: bool) -> LaunchPlan:
    block_r = min(triton.next_power_of_2(length), 128)
    block_o = min(triton.next_power_of_2(count), TILE[itemsize] // block_r)
    loads = _turn(length, block_r)
    programs = triton.cdiv(count, block_o)
    part, parts = _split(length, programs, ACROSS * loads * block_r)
    arguments = (count, length, part, *kept, *reduced, wide, block_o, block_r, loads)
    return LaunchPlan(_sum_strided_kernel, (programs, parts), arguments)


def _collapsed(input: torch.Tensor, dims: tuple[int, ...]) -> tuple[list[int], list[list[int]], list[int], list[int]]:
    """Sizes of the kept dimensions with their strides in input and output, sizes of the summed ones with theirs.

    Each in the order of memory, a dimension that repeats one element outermost, so that as many collapse as can.
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


def _steps(input: torch.Tensor, dims: tuple[int, ...]) -> list[LaunchPlan]:
    """The kernel that adds up a tensor, or the two: none where there is nothing to add."""
    if input.numel() == 0:
        return []
    sizes, (strides, out_strides), lengths, steps = _collapsed(input, dims)
    count, length, itemsize = math.prod(sizes), math.prod(lengths), input.element_size()
    wide = input.dtype == torch.float32
    one_run = len(sizes) == 1 and (count == 1 or out_strides[0] == 1)  # of outputs, as they lie in memory
    if one_run and len(steps) == 1 and (steps[0] == 1 or (length == 1 and strides[0] != 1)):
        first = _rows(count, length, strides[0], itemsize, wide, True)
    elif len(steps) == 1 and strides[-1] == out_strides[-1] == 1 and (one_run or out_strides[:-1] == sizes[1:]):
        blocks, block_stride = (1, 0) if one_run else (sizes[0], strides[0])
        first = _columns(blocks, length, sizes[-1], block_stride, steps[0], itemsize, wide, True)
    else:
        first = _strided(
            count, length, pad_strides(sizes, [strides, out_strides]), pad_strides(lengths, [steps]), itemsize, wide
        )
    parts = first.grid[1]
    if parts == 1:
        return [first]
    itemsize = _part_dtype(input.dtype).itemsize
    if first.kernel is _sum_columns_kernel:
        return [first, _columns(1, parts, count, 0, count, itemsize, True, False)]
    return [first, _rows(count, parts, parts, itemsize, True, False)]


def _part_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float32 else torch.float32


#: By all that decides a sum: the output's shape, the number of parts, and the launches.
_launches: LaunchCache = LaunchCache()


def summed(input: torch.Tensor, dims: tuple[int, ...], keepdim: bool) -> torch.Tensor:
    """The sum over `dims`, which are counted from the first and in order."""
    if shapes_only():
        shape = sum_shape(input.shape, dims, keepdim)
        return torch.empty(shape, dtype=input.dtype, device=input.device)
    key = (input.shape, input.stride(), dims, keepdim, input.dtype, input.device)
    known: Any = _launches.get(key)
    if known is None:
        steps = _steps(input, dims)
        shape, parts = sum_shape(input.shape, dims, keepdim), steps[0].grid[1] if steps else 0
        known = shape, parts, [step.launch() for step in steps]
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
    """The same of a gradient, whose strides no `unsupported` has seen: copied where they need too many dimensions."""
    return summed(grad if too_many_dims(grad, dims) is None else grad.contiguous(), dims, keepdim)


def sum(input: torch.Tensor, *, dim: Dim, keepdim: bool) -> tuple[torch.Tensor, tuple]:
    dims = reduced_dims(dim, input.dim())
    return summed(input, dims, keepdim), (input.shape, dims, keepdim)


def sum_backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor]:
    return (spread(grad, *saved),)


def too_many_dims(input: torch.Tensor, dims: tuple[int, ...]) -> str | None:
    """Why :func:`summed` has no place for a tensor's dimensions, or None."""
    if input.dim() > MAX_DIMS:
        kept, _, reduced, _ = _collapsed(input, dims)
        if (most := max(len(kept), len(reduced))) > MAX_DIMS:
            return f"strides that do not collapse to {MAX_DIMS} dimensions kept or summed over (these need {most})"
    return None


def unsupported(input: torch.Tensor, *, dim: Dim, keepdim: bool) -> str | None:
    return unsupported_by_triton(input) or too_many_dims(input, reduced_dims(dim, input.dim()))
