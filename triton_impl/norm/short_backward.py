"""The backward pass of normalised short rows of 16 bits, in Gluon: a warp has a whole row at a time.

Programs stay and go through many rows, which are copied into shared memory some turns ahead (smem_stages.py). No warp
waits for another before the end, where those of a program add up their sums of columns: so these are fewer than the
sums of programs of one warp each, as :mod:`triton_impl.norm.rows` has them, and a second kernel adds them up sooner.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton_impl.common.divisibility import assume_divisible
from triton_impl.common.gluon.cluster import widen
from triton_impl.common.gluon.requirements import unsupported
from triton_impl.common.gluon.smem_stages import bases, fetch_row, init_stages, wait
from triton_impl.norm import cluster_backward
from triton_impl.norm.persistent_backward import StayingBackward
from triton_impl.norm.rows import Kind, add_both, load_stats
from triton_impl.runtime.aot import Entry, entry


@gluon.constexpr_function
def _layout(warps, block):
    """Of all warps' rows as a matrix: each warp has one, of which a thread loads eight values at once."""
    return gl.DistributedLinearLayout(
        [*bases(1, 8), *bases(256, block // 256)], bases(8, 32), bases(1, warps, 0), [], [warps, block]
    )


@gluon.jit
def _begin(USE_PDL: gl.constexpr):
    """All warps know of the barriers; and what was written before is there."""
    text: gl.constexpr = "bar.sync 0;" + ("griddepcontrol.wait; griddepcontrol.launch_dependents;" if USE_PDL else "")
    gl.inline_asm_elementwise(text + " mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _fetch(turn, input_ptr, grad_ptr, in_stride, grad_stride, count, length, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    programs = gl.num_programs(0)
    first = turn * gl.num_warps() * programs + gl.program_id(0)
    pointers = input_ptr + first.to(gl.int64) * in_stride, grad_ptr + first.to(gl.int64) * grad_stride
    strides = in_stride.to(gl.int64), grad_stride.to(gl.int64)
    stage = turn % STAGES
    fetch_row(stage, 2 * stage, programs, pointers, strides, count - first, length, BLOCK)


@gluon.jit
def _norm_short_backward_kernel(
    grad_input_ptr, partials_ptr, grad_ptr, grad_sum_ptr, input_ptr, stats_ptr, weight_ptr,
    grad_stride, grad_sum_stride, in_stride, count, length, per_element,
    IS_LAYERNORM: gl.constexpr, HAS_RESIDUAL: gl.constexpr, HAS_WEIGHT: gl.constexpr, NEEDS_INPUT: gl.constexpr,
    NEEDS_WEIGHTS: gl.constexpr, DIVISIBILITY: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    length, grad_sum_stride = assume_divisible(length, DIVISIBILITY), assume_divisible(grad_sum_stride, DIVISIBILITY)
    warps: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = _layout(warps, BLOCK)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    DTYPE: gl.constexpr = input_ptr.dtype.element_ty
    programs = gl.num_programs(0)
    apart = warps * programs
    i = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    inside = i < length
    rows = gl.allocate_shared_memory(DTYPE, [2 * STAGES, warps, BLOCK], PLAIN)
    init_stages(2 * STAGES * warps, STAGES, length, BLOCK, DTYPE)
    _begin(USE_PDL)
    for turn in gl.static_range(STAGES):
        _fetch(turn, input_ptr, grad_ptr, in_stride, grad_stride, count, length, BLOCK, STAGES)
    row = gl.arange(0, warps, layout=gl.SliceLayout(1, LAYOUT)) * programs + gl.program_id(0)
    mean, scale, shift = load_stats(stats_ptr, row, count, row < count, IS_LAYERNORM)
    weight = gl.full([BLOCK], 1.0, gl.float32, gl.SliceLayout(0, LAYOUT))
    if HAS_WEIGHT:
        weight = widen(gl.load(weight_ptr + i, mask=inside, other=0.0))
    of_weight = gl.full([warps, BLOCK], 0.0, gl.float32, LAYOUT)
    of_bias = gl.zeros_like(of_weight)
    turns = (count - gl.program_id(0) + apart - 1) // apart
    for turn in range(0, turns):
        live = row < count
        far = row.to(gl.int64)[:, None]
        mask = live[:, None] if EVEN else live[:, None] & inside[None, :]
        more = ()
        if HAS_RESIDUAL and NEEDS_INPUT:
            more = (gl.load(grad_sum_ptr + far * grad_sum_stride + i[None, :], mask=mask, other=0.0),)
        # For the next turn, and so not to be looked at in this one, which would wait for them.
        next_mean, next_scale, next_shift = load_stats(stats_ptr, row + apart, count, row + apart < count, IS_LAYERNORM)
        slot = turn % STAGES * 2
        wait(turn % STAGES, turn // STAGES & 1)
        x, grad = widen(rows.index(slot).load(LAYOUT)), widen(rows.index(slot + 1).load(LAYOUT))
        _fetch(turn + STAGES, input_ptr, grad_ptr, in_stride, grad_stride, count, length, BLOCK, STAGES)
        offset = shift - mean * scale  # of 16 bits that rounds far less than their own spacing
        x_hat = x * scale[:, None]
        if IS_LAYERNORM:
            x_hat += offset[:, None]
        if NEEDS_WEIGHTS:
            of_weight += grad * x_hat
            if IS_LAYERNORM:
                of_bias += grad
        if NEEDS_INPUT:
            value = grad
            if HAS_WEIGHT:
                value *= weight[None, :]
            if IS_LAYERNORM:
                plain, dot = gl.reduce((value, value * x_hat), 1, add_both)
                plain *= per_element
            else:
                dot = gl.sum(value * x_hat, 1)
            dot *= per_element
            # What x is multiplied by, and what is taken away, are the same for all of a row.
            by_x = x * (-scale * scale * dot)[:, None]
            if IS_LAYERNORM:
                by_x -= (scale * (plain + offset * dot))[:, None]
            value = value * scale[:, None] + by_x
            if len(more) > 0:
                value += widen(more[0])
            gl.store(grad_input_ptr + far * length + i[None, :], value.to(DTYPE), mask=mask)
        mean, scale, shift = next_mean, next_scale, next_shift
        row += apart
    if NEEDS_WEIGHTS:
        partials_ptr += gl.program_id(0).to(gl.int64) * length
        # Warps add up by way of shared memory, where vectors are written and read: left to Triton, these are values.
        BY_COLUMN: gl.constexpr = gl.BlockedLayout([warps, max(1, BLOCK // (32 * warps))], [1, 32], [1, warps], [1, 0])
        j = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, BY_COLUMN))
        gl.store(partials_ptr + j, gl.sum(gl.convert_layout(of_weight, BY_COLUMN), 0), mask=j < length)
        if IS_LAYERNORM:
            partials_ptr += programs.to(gl.int64) * length
            gl.store(partials_ptr + j, gl.sum(gl.convert_layout(of_bias, BY_COLUMN), 0), mask=j < length)


# ---- host ----------------------------------------------------------------------------------------------------------

#: Of rows of up to so many elements: warps of a program, turns on the chip, and registers of a thread. They leave an SM
#: 8192 registers, for a program of the kernel that adds up the programs' sums: it is there before these have ended.
SHAPES = {512: (8, 4, 112), 1024: (8, 4, 224)}
#: Programs of a multiprocessor at most; and what part of a block a row is at least, for this to be faster.
PROGRAMS, LEAST = 4, 7 / 8


def _block(length: int) -> int:
    return max(min(SHAPES), triton.next_power_of_2(length))


def configs(length: int, dtype: torch.dtype) -> list[triton.Config]:
    """The configuration for rows of a length. By itself the kernel has others as fast: there is nothing to time."""
    block = _block(length)
    warps, stages, registers = SHAPES[block]
    constants = {"BLOCK": block, "STAGES": stages, "EVEN": length == block}
    return [triton.Config(constants, num_warps=warps, num_stages=1, num_ctas=1, maxnreg=registers)]


def _slots(config: triton.Config, dtype: torch.dtype) -> int:
    return 2 * config.kwargs["STAGES"] * config.num_warps * config.kwargs["BLOCK"] * dtype.itemsize


def _takes(x: torch.Tensor) -> bool:
    count, length = x.shape
    if count == 0 or x.dtype.itemsize != 2 or unsupported(x) is not None:
        return False
    return LEAST * _block(length) <= length <= max(SHAPES)


#: As :func:`triton_impl.norm.rows.backward`; the kernel for the longest rows takes what is not for this one.
backward = StayingBackward(
    _norm_short_backward_kernel, _takes, cluster_backward.backward, configs, _slots, programs=PROGRAMS
)


def ahead_of_time(kind: Kind) -> list[Entry]:
    """Specialisations that stand for a normalisation's calls."""
    constants = {
        "IS_LAYERNORM": kind.centred, "HAS_RESIDUAL": kind.residual, "HAS_WEIGHT": True,
        "NEEDS_INPUT": True, "NEEDS_WEIGHTS": True, "DIVISIBILITY": 16,
    }  # fmt: skip
    types = {"stats_ptr": "*fp32", "partials_ptr": "*fp32", "per_element": "fp32"}
    return [
        entry(_norm_short_backward_kernel, "bf16", constants, configs(length, torch.bfloat16)[0], types)
        for length in (512, 1000)
    ]
