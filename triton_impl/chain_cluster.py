"""Bias, dropout, residual sum and LayerNorm of rows of 16-bit elements, in Gluon, by a block or a cluster's blocks.

Both operands wait in shared memory, and so does their sum: registers hold a vector at a time. Two rows share what they
have in common, three parameters, which come from the L2.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from triton_impl import cluster, unsupported
from triton_impl.aot import Entry, entry
from triton_impl.choosing import Chooser
from triton_impl.cluster import MULTIPLE, begin, columns, copy, load, meet, slot_layout, store, widen, write_once
from triton_impl.gluon import unsupported as unsupported_by_gluon
from triton_impl.norms import add_both, rstd_of
from triton_impl.norms_cluster import held, row_statistics
from triton_impl.philox import ARGUMENTS
from triton_impl.philox_words import factors
from triton_impl.tuning import Launch, Launches, to_time

#: Elements of a vector, of which one call of Philox serves all.
EIGHT = gl.constexpr(8)


@gluon.jit
def _add_four(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@gluon.jit
def _end(row, count, length):
    """Of a row, where there is such a row; else zero."""
    return gl.where(row < count, length, 0)


@gluon.jit
def _fetch(slots, at: gl.constexpr, ptr, i, first, count, stride, length, EVEN: gl.constexpr):
    """Ask for vectors of two rows, for slots `at` and the next; zeros past a row's end, or where there is no row."""
    for r in gl.static_range(2):
        from_ptr = ptr + (first + r) * stride + i
        if EVEN:
            copy(slots.index(at + r), from_ptr)
        else:
            copy(slots.index(at + r), from_ptr, mask=i < _end(first + r, count, length))


@gluon.jit
def _of_calls(x):
    """Elements (blocks, n) as (blocks, n / 8, 8)."""
    return x.reshape([x.shape[0], x.shape[1] // EIGHT, EIGHT])


@gluon.jit
def _plus(found, here):
    """Four sums, to which others are added; the first time there are none yet."""
    if len(found) == 0:
        return here
    else:
        return found[0] + here[0], found[1] + here[1], found[2] + here[2], found[3] + here[3]


@gluon.jit
def _parts(means, sums, LAYOUT: gl.constexpr):
    """What a block says of its part of two rows: a mean, and the sums of deviations from it and of their squares."""
    parts = ()
    for r in gl.static_range(2):
        parts += (gl.convert_layout(means[r], LAYOUT),)
        parts += (gl.convert_layout(sums[2 * r], LAYOUT), gl.convert_layout(sums[2 * r + 1], LAYOUT))
    return parts


@gluon.jit
def _of_row(parts, r: gl.constexpr):
    """Of what all blocks said, that of the r-th row."""
    found = ()
    for b in gl.static_range(len(parts) // 6):
        found += (parts[6 * b + 3 * r], parts[6 * b + 3 * r + 1], parts[6 * b + 3 * r + 2])
    return found


@gluon.jit(do_not_specialize=ARGUMENTS)
def _chain_cluster_kernel(
    out_ptr, sum_ptr, stats_ptr, input_ptr, bias_ptr, residual_ptr, weight_ptr, norm_bias_ptr,
    key_low, key_high, threshold, scale, in_stride, residual_stride, count, length, eps,
    KEEP: gl.constexpr, HAS_WEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr,
    BLOCK: gl.constexpr, RING: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    begin(6)
    blocks: gl.constexpr = gl.num_ctas()
    first = gl.program_id(0).to(gl.int64) * 2
    i = columns(BLOCK, EIGHT)
    STEP: gl.constexpr = i.shape[1]
    V: gl.constexpr = BLOCK // STEP
    LAYOUT: gl.constexpr = i.type.layout
    DTYPE: gl.constexpr = input_ptr.dtype.element_ty
    xs = gl.allocate_shared_memory(DTYPE, [2 * V, blocks, STEP], slot_layout(blocks))
    residuals = gl.allocate_shared_memory(DTYPE, [2 * RING, blocks, STEP], slot_layout(blocks))
    for v in gl.static_range(V):
        _fetch(xs, 2 * v, input_ptr, i + v * STEP, first, count, in_stride, length, EVEN)
        if v < RING:
            _fetch(residuals, 2 * v, residual_ptr, i + v * STEP, first, count, residual_stride, length, EVEN)
        async_copy.commit_group()
    # The first of each eight.
    eight = gl.min(_of_calls(i), 2)
    means = ()
    found = ()
    for v in gl.static_range(V):
        bias = widen(load(bias_ptr, i + v * STEP, length, 0.0, EVEN))
        async_copy.wait_group(V - 1 if v < RING else RING - 1)
        made = ()
        for r in gl.static_range(2):
            call = ((first + r) * length + (eight + v * STEP)) // EIGHT
            x = widen(xs.index(2 * v + r).load(LAYOUT)) + bias
            more = widen(residuals.index(2 * (v % RING) + r).load(LAYOUT))
            total = (more + x * factors(call, key_low, key_high, threshold, scale, LAYOUT)).to(DTYPE)
            xs.index(2 * v + r).store(total)
            if KEEP:
                store(sum_ptr + (first + r) * length, i + v * STEP, _end(first + r, count, length), total, EVEN)
            made += (widen(total),)
        if v + RING < V:
            j = i + (v + RING) * STEP
            _fetch(residuals, 2 * (v % RING), residual_ptr, j, first, count, residual_stride, length, EVEN)
        async_copy.commit_group()
        if v == 0:
            means = gl.reduce(made, 1, add_both)
            block = gl.arange(0, blocks, layout=means[0].type.layout)
            of_first = gl.maximum(held(block * BLOCK, STEP, length), 1.0)
            means = (means[0] / of_first, means[1] / of_first)
        here = ()
        for r in gl.static_range(2):
            deviation = made[r] - means[r][:, None]
            if not EVEN:
                deviation = gl.where(i + v * STEP < length, deviation, 0.0)
            here += (gl.sum(_of_calls(deviation), 2), gl.sum(_of_calls(deviation * deviation), 2))
        found = _plus(found, here)
    parts = meet(_parts(means, gl.reduce(found, 1, _add_four), gl.SliceLayout(1, LAYOUT)))
    rstds = ()
    shifts = ()
    for r in gl.static_range(2):
        mean, lost, variance = row_statistics(_of_row(parts, r), length, BLOCK, True)
        rstd = rstd_of(variance, eps)
        if KEEP:
            live = first + r < count
            write_once(stats_ptr + first + r, rstd, live)
            write_once(stats_ptr + count + first + r, mean, live)
            write_once(stats_ptr + 2 * count + first + r, -lost * rstd, live)
        rstds += (rstd,)
        shifts += ((-lost - mean) * rstd,)
    for v in gl.static_range(V):
        if HAS_WEIGHT:
            weight = widen(load(weight_ptr, i + v * STEP, length, 0.0, EVEN))
        if HAS_BIAS:
            offset = widen(load(norm_bias_ptr, i + v * STEP, length, 0.0, EVEN))
        for r in gl.static_range(2):
            y = widen(xs.index(2 * v + r).load(LAYOUT)) * rstds[r][:, None] + shifts[r][:, None]
            if HAS_WEIGHT:
                y *= weight
            if HAS_BIAS:
                y += offset
            store(out_ptr + (first + r) * length, i + v * STEP, _end(first + r, count, length), y, EVEN)


# ---- host ----------------------------------------------------------------------------------------------------------

#: Warps of a block, and vectors of each row that a thread has, the best guess first: an SM holds four blocks of 8
#: warps, and two of 16, by registers and by shared memory.
SHAPES, REGISTERS = ((8, 4), (16, 4), (8, 2)), 64
#: Vectors of the residual, of each row, that a thread has on the chip at a time.
RING = 2


def _block(warps: int, vectors: int) -> int:
    """Elements of a row that a block of such a shape has."""
    return warps * 32 * vectors * 8


#: The rows that are taken, in elements.
SHORTEST, LONGEST = 2049, cluster.MOST_BLOCKS * max(_block(*shape) for shape in SHAPES)


def configs(length: int, even: bool) -> list[triton.Config]:
    """Configurations for rows of a length, best first. `even`: an even number of rows."""
    found = []
    for shape in SHAPES:
        block = _block(*shape)
        blocks = triton.next_power_of_2(triton.cdiv(length, block))
        if blocks <= cluster.MOST_BLOCKS and length > block // 2:
            constants = {"BLOCK": block, "RING": RING, "EVEN": even and length == blocks * block}
            found.append(triton.Config(constants, num_warps=shape[0], num_stages=1, num_ctas=blocks, maxnreg=REGISTERS))
    return to_time(found)


_choose = Chooser(_chain_cluster_kernel)
_launches = Launches()


def run(
    tensors: tuple[torch.Tensor, ...],
    strides: tuple[int, int],
    absent: tuple[bool, bool],
    eps: float,
    keep: bool,
    mask: tuple[int, int, int, float],
) -> None:
    """Launch on what the kernel takes. `absent` are weight and bias of the norm."""
    x = tensors[3]
    count, length = x.shape
    if count == 1:
        strides = (length, length)  # the only row's is any number
    constants = (keep, *(not of for of in absent))

    def make() -> Launch:
        def launch(config: triton.Config) -> Launch:
            arguments = (*strides, count, length, eps, *constants, *config.kwargs.values())
            return Launch(_chain_cluster_kernel, (triton.cdiv(count, 2),), arguments, cluster.options(config))

        key = (length, str(x.dtype), *constants, count % 2, cluster.fills_gpu(count, x.device))
        return _choose.launch(key, configs(length, count % 2 == 0), launch, *tensors, values=mask)

    _launches.run((count, length, strides, constants, x.dtype, x.device, eps), make, tensors, mask)


def refused(input: torch.Tensor, *others: torch.Tensor | None) -> str | None:
    """Why a call with these tensors, input, bias, residual, weight and bias of the norm, cannot be taken, or None."""
    if (reason := unsupported(input) or unsupported_by_gluon(input)) is not None:
        return reason
    if input.dtype.itemsize != 2:
        return f"takes elements of 16 bits alone, got {str(input.dtype).removeprefix('torch.')}"
    length = input.shape[-1]
    if not SHORTEST <= length <= LONGEST:
        return f"takes rows of {SHORTEST} to {LONGEST} elements, got {length}"
    places = length
    for tensor in (input, *others):
        if tensor is not None:
            places |= tensor.data_ptr()
            for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False):
                places |= stride if size > 1 else 0
    if places % MULTIPLE != 0:
        return f"takes rows whose length, strides and addresses are multiples of {MULTIPLE}"
    return None


def ahead_of_time() -> list[Entry]:
    """A specialisation that stands for the calls."""
    types = {"stats_ptr": "*fp32", "scale": "fp32", "eps": "fp32"}
    constants = {"KEEP": False, "HAS_WEIGHT": True, "HAS_BIAS": True}
    return [entry(_chain_cluster_kernel, "bf16", constants, configs(4096, True)[-1], types)]
