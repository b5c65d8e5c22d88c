"""Normalised rows in Triton, for layer_norm, rms_norm and add_rms_norm: kernels, and how they are launched.

fused    whole rows in registers, one or several a program: one read, one write. Backward, each program goes through
         many rows and keeps the sums of the weights' gradients over them; a second kernel adds those up.
online   rows too long for that, a block of them at a time: statistics in one pass, the result in a second one, which
         finds the row in L2. Backward, sums of rows first, then columns: input and gradient are read twice.
         (`fused` takes long rows to a cluster there, where it may: cluster_backward.py.)

IS_LAYERNORM rows are shifted to mean zero. With a HAS_RESIDUAL the rows are the sum of two operands. What is kept of a row is
``mean``, ``rstd`` and ``shift`` with x̂ = (x − mean) · rstd + shift: the shift puts right what rounding the mean loses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.norms import as_rows
from kernel_ladder.tracing import shapes_only
from triton_impl import multiprocessors, unsupported
from triton_impl.common.cache_policy import EVICTION_OF_SINGLE_USE
from triton_impl.common.column_sum import sum_tile, sum_warps
from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.dot import INTERPRETED
from triton_impl.common.pdl import griddepcontrol_wait
from triton_impl.runtime.aot import Entry, entry
from triton_impl.runtime.autotuned_kernel import AutotunedKernel
from triton_impl.runtime.launch_cache import Launch, LaunchCache
from triton_impl.runtime.row_configs import (
    blocks_of,
    forward_shapes,
    persistent_programs,
    persistent_shapes,
    row_configs,
    suitable_forward,
    suitable_persistent,
)

#: The longest rows that `fused` keeps in registers, forward and backward.
MAX_FUSED = 32768
MAX_FUSED_BACKWARD = 8192
#: The largest block in which `online` goes through a row.
LARGEST_BLOCK = 16384
#: See :func:`pilot_of`; the second is for float32.
PILOT, PILOT_FLOAT32 = 256, 8192
#: The longest rows whose parameters wait in registers too.
MAX_PRELOADED = tl.constexpr(4096)
#: SMs to make programs for where there is no GPU: a few, which the interpreter goes through one by one.
MULTIPROCESSORS_INTERPRETED = 3


# ---- forward -------------------------------------------------------------------------------------------------------


@triton.jit
def load_stats(stats_ptr, row, count, live, IS_LAYERNORM: tl.constexpr):
    rstd = tl.load(stats_ptr + row, mask=live, other=0.0)
    if IS_LAYERNORM:
        mean = tl.load(stats_ptr + count + row, mask=live, other=0.0)
        shift = tl.load(stats_ptr + 2 * count + row, mask=live, other=0.0)
        return mean, rstd, shift
    return rstd * 0, rstd, rstd * 0


@triton.jit
def store_stats(stats_ptr, row, count, live, mean, rstd, shift, IS_LAYERNORM: tl.constexpr):
    tl.store(stats_ptr + row, rstd, mask=live)
    if IS_LAYERNORM:
        tl.store(stats_ptr + count + row, mean, mask=live)
        tl.store(stats_ptr + 2 * count + row, shift, mask=live)


@triton.jit
def _normalized(x, mean, rstd, shift, IS_LAYERNORM: tl.constexpr):
    if IS_LAYERNORM:
        return (x - mean) * rstd + shift
    return x * rstd


@triton.jit
def rstd_of(variance, eps):
    # Rounding may leave a variance a little below zero; NaN stays what it is.
    return tl.math.rsqrt(tl.where(variance < 0, 0.0, variance) + tl.cast(eps, tl.float32))


@triton.jit
def normalize_rows(
    x, out_ptr, stats_ptr, weight_ptr, bias_ptr, row, column, count, length, eps,
    IS_LAYERNORM: tl.constexpr, SAVE_STATS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, PRELOAD_PARAMS: tl.constexpr,
):  # fmt: skip
    """Normalise whole rows that are in registers: ROWS of them, whose numbers are `row`; zeros past their end.

    Their statistics are written where they are to be kept for a backward pass. Parameters that are to come PRELOAD_PARAMS wait
    for them in registers.
    """
    live, inside = row < count, column < length
    mask = live[:, None] & inside[None, :]
    SHIFTED: tl.constexpr = IS_LAYERNORM and out_ptr.dtype.element_ty == tl.float32
    if HAS_WEIGHT and PRELOAD_PARAMS:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if HAS_BIAS and PRELOAD_PARAMS:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0)
    x = x.to(tl.float32)
    mean = tl.sum(x, axis=1) / length if IS_LAYERNORM else tl.zeros([ROWS], tl.float32)
    deviation = tl.where(mask, x - mean[:, None], 0.0) if IS_LAYERNORM else x
    # Of 16-bit elements what rounding the mean loses is far below their own spacing.
    lost = tl.sum(deviation, axis=1) / length if SHIFTED else tl.zeros([ROWS], tl.float32)
    rstd = rstd_of(tl.sum(deviation * deviation, axis=1) / length - lost * lost, eps)
    shift = -lost * rstd
    if SAVE_STATS:
        store_stats(stats_ptr, row, count, live, mean, rstd, shift, IS_LAYERNORM)
    y = deviation * rstd[:, None] + shift[:, None] if SHIFTED else deviation * rstd[:, None]
    if HAS_WEIGHT:
        if not PRELOAD_PARAMS:
            weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
        y *= weight.to(tl.float32)[None, :]
    if HAS_BIAS:
        if not PRELOAD_PARAMS:
            bias = tl.load(bias_ptr + column, mask=inside, other=0.0)
        y += bias.to(tl.float32)[None, :]
    tl.store(out_ptr + row[:, None] * length + column[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_kernel(
    out_ptr, sum_ptr, stats_ptr, input_ptr, residual_ptr, weight_ptr, bias_ptr,
    in_stride, residual_stride, count, length, eps,
    IS_LAYERNORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SAVE_STATS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, DIVISIBILITY: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    griddepcontrol_wait(USE_PDL)
    length, in_stride = assume_divisible(length, DIVISIBILITY), assume_divisible(in_stride, DIVISIBILITY)
    residual_stride = assume_divisible(residual_stride, DIVISIBILITY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    live = row < count
    inside = column < length
    mask = live[:, None] & inside[None, :]
    dense = row[:, None] * length + column[None, :]
    x = tl.load(
        input_ptr + row[:, None] * in_stride + column[None, :],
        mask=mask,
        other=0.0,
        eviction_policy=EVICTION_OF_SINGLE_USE,
    )
    if HAS_RESIDUAL:
        at = residual_ptr + row[:, None] * residual_stride + column[None, :]
        residual = tl.load(at, mask=mask, other=0.0, eviction_policy=EVICTION_OF_SINGLE_USE)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + dense, x, mask=mask)
    normalize_rows(
        x, out_ptr, stats_ptr, weight_ptr, bias_ptr, row, column, count, length, eps,
        IS_LAYERNORM, SAVE_STATS, HAS_WEIGHT, HAS_BIAS, ROWS, BLOCK <= MAX_PRELOADED,
    )  # fmt: skip


@triton.jit
def normalize_row_again(
    x_ptr, out_ptr, weight_ptr, bias_ptr, mean, rstd, shift, length,
    IS_LAYERNORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Normalise one row of any length, whose statistics are known. EVEN: it consists of whole blocks."""
    for start in range(0, length, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = tl.full([BLOCK], True, tl.int1) if EVEN else i < length
        x = tl.load(x_ptr + i, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        y = _normalized(x, mean, rstd, shift, IS_LAYERNORM)
        if HAS_WEIGHT:
            y *= tl.load(weight_ptr + i, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_ptr + i, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        tl.store(out_ptr + i, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm_online_kernel(
    out_ptr, sum_ptr, stats_ptr, input_ptr, residual_ptr, weight_ptr, bias_ptr,
    in_stride, residual_stride, count, length, eps,
    IS_LAYERNORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SAVE_STATS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, DIVISIBILITY: tl.constexpr,
    PILOT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    griddepcontrol_wait(USE_PDL)
    length, in_stride = assume_divisible(length, DIVISIBILITY), assume_divisible(in_stride, DIVISIBILITY)
    residual_stride = assume_divisible(residual_stride, DIVISIBILITY)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    input_ptr += row * in_stride
    out_ptr += row * length
    if HAS_RESIDUAL:
        residual_ptr += row * residual_stride
        sum_ptr += row * length
    # Deviations from the mean of the row's HEAD: close to those from the mean of all, and known in advance.
    mean = 0.0
    if IS_LAYERNORM:
        of_head = tl.arange(0, PILOT)
        head = tl.load(input_ptr + of_head, mask=of_head < length, other=0.0).to(tl.float32)
        mean = tl.sum(head, axis=0) / tl.minimum(length, PILOT)
    sums = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, length, BLOCK):
        i = start + lane
        inside = tl.full([BLOCK], True, tl.int1) if EVEN else i < length
        x = tl.load(input_ptr + i, mask=inside, other=0.0, eviction_policy="evict_last")
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + i, mask=inside, other=0.0, eviction_policy=EVICTION_OF_SINGLE_USE)
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
            tl.store(sum_ptr + i, x, mask=inside)
        deviation = tl.where(inside, x.to(tl.float32) - mean, 0.0)
        if IS_LAYERNORM:
            sums += deviation
        squares += deviation * deviation
    lost = tl.sum(sums, axis=0) / length if IS_LAYERNORM else 0.0
    rstd = rstd_of(tl.sum(squares, axis=0) / length - lost * lost, eps)
    shift = -lost * rstd
    if SAVE_STATS:
        store_stats(stats_ptr, row, count, True, mean, rstd, shift, IS_LAYERNORM)
    x_ptr = input_ptr
    if HAS_RESIDUAL:
        tl.debug_barrier()  # the sum is read by threads that may not have written it
        x_ptr = sum_ptr
    normalize_row_again(
        x_ptr, out_ptr, weight_ptr, bias_ptr, mean, rstd, shift, length, IS_LAYERNORM, HAS_WEIGHT, HAS_BIAS, BLOCK, EVEN
    )


# ---- backward ------------------------------------------------------------------------------------------------------
# d x = rstd · (w·dy − mean(w·dy) − x̂ · mean(w·dy·x̂)), the first of the means only of what was centred.


@triton.jit
def add_both(first_a, second_a, first_b, second_b):
    return first_a + first_b, second_a + second_b


@triton.jit
def _difference(x, y):
    """x − y, which no compiler fuses with the product that x is.

    A mean is of rounded products: taken from one that is not, it would leave a row of one element a gradient.
    """
    if INTERPRETED:
        return x - y
    return tl.inline_asm_elementwise("sub.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _norm_backward_kernel(
    grad_input_ptr, partials_ptr, grad_ptr, grad_sum_ptr, input_ptr, stats_ptr, weight_ptr,
    grad_stride, grad_sum_stride, in_stride, count, length,
    IS_LAYERNORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    NEEDS_INPUT: tl.constexpr, NEEDS_WEIGHTS: tl.constexpr, DIVISIBILITY: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    griddepcontrol_wait(USE_PDL)
    length, in_stride = assume_divisible(length, DIVISIBILITY), assume_divisible(in_stride, DIVISIBILITY)
    grad_stride, grad_sum_stride = (
        assume_divisible(grad_stride, DIVISIBILITY),
        assume_divisible(grad_sum_stride, DIVISIBILITY),
    )
    column = tl.arange(0, BLOCK)
    inside = column < length
    programs = tl.num_programs(0)
    weight = tl.zeros([1, BLOCK], tl.float32) + 1.0
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    grad_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    grad_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, count, programs * ROWS, num_stages=STAGES):
        row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
        live = row < count
        mask = live[:, None] & inside[None, :]
        x_at = input_ptr + row[:, None] * in_stride + column[None, :]
        x = tl.load(x_at, mask=mask, other=0.0, eviction_policy=EVICTION_OF_SINGLE_USE).to(tl.float32)
        grad_at = grad_ptr + row[:, None] * grad_stride + column[None, :]
        grad = tl.load(grad_at, mask=mask, other=0.0, eviction_policy=EVICTION_OF_SINGLE_USE).to(tl.float32)
        mean, rstd, shift = load_stats(stats_ptr, row, count, live, IS_LAYERNORM)
        x_hat = _normalized(x, mean[:, None], rstd[:, None], shift[:, None], IS_LAYERNORM)
        if NEEDS_WEIGHTS:
            grad_weight += grad * x_hat
            if IS_LAYERNORM:
                grad_bias += grad
        if NEEDS_INPUT:
            weighted = grad * weight
            value = weighted
            if IS_LAYERNORM:
                # Both sums at once: of rows that several warps share each would cost them two barriers.
                plain, dot = tl.reduce((weighted, weighted * x_hat), 1, add_both)
                value = _difference(value, (plain / length)[:, None])
            else:
                dot = tl.sum(weighted * x_hat, axis=1)
            dot /= length
            value = (value - x_hat * dot[:, None]) * rstd[:, None]
            if HAS_RESIDUAL:
                at = row[:, None] * grad_sum_stride + column[None, :]
                value += tl.load(grad_sum_ptr + at, mask=mask, other=0.0, eviction_policy=EVICTION_OF_SINGLE_USE).to(
                    tl.float32
                )
            dense = row[:, None] * length + column[None, :]
            tl.store(grad_input_ptr + dense, value.to(grad_input_ptr.dtype.element_ty), mask=mask)
    if NEEDS_WEIGHTS:
        partials_ptr += tl.program_id(0).to(tl.int64) * length
        tl.store(partials_ptr + column, tl.sum(grad_weight, axis=0), mask=inside)
        if IS_LAYERNORM:
            partials_ptr += programs.to(tl.int64) * length
            tl.store(partials_ptr + column, tl.sum(grad_bias, axis=0), mask=inside)


@triton.jit
def _norm_backward_rows_kernel(
    means_ptr, grad_ptr, input_ptr, stats_ptr, weight_ptr, grad_stride, in_stride, count, length,
    IS_LAYERNORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, DIVISIBILITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The means of one row that its gradient needs, for rows of any length."""
    length, in_stride, grad_stride = (
        assume_divisible(length, DIVISIBILITY),
        assume_divisible(in_stride, DIVISIBILITY),
        assume_divisible(grad_stride, DIVISIBILITY),
    )
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    mean, rstd, shift = load_stats(stats_ptr, row, count, True, IS_LAYERNORM)
    plain = tl.zeros([BLOCK], tl.float32)
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, length, BLOCK):
        i = start + lane
        x = tl.load(input_ptr + row * in_stride + i, mask=i < length, other=0.0).to(tl.float32)
        weighted = tl.load(grad_ptr + row * grad_stride + i, mask=i < length, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            weighted *= tl.load(weight_ptr + i, mask=i < length, other=0.0).to(tl.float32)
        plain += weighted
        dot += weighted * _normalized(x, mean, rstd, shift, IS_LAYERNORM)
    tl.store(means_ptr + 2 * row, tl.sum(plain, axis=0) / length)
    tl.store(means_ptr + 2 * row + 1, tl.sum(dot, axis=0) / length)


@triton.jit
def _norm_backward_columns_kernel(
    grad_input_ptr, partials_ptr, means_ptr, grad_ptr, grad_sum_ptr, input_ptr, stats_ptr, weight_ptr,
    grad_stride, grad_sum_stride, in_stride, count, length,
    IS_LAYERNORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    NEEDS_INPUT: tl.constexpr, NEEDS_WEIGHTS: tl.constexpr, DIVISIBILITY: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of columns, over one group of rows."""
    length, in_stride = assume_divisible(length, DIVISIBILITY), assume_divisible(in_stride, DIVISIBILITY)
    grad_stride, grad_sum_stride = (
        assume_divisible(grad_stride, DIVISIBILITY),
        assume_divisible(grad_sum_stride, DIVISIBILITY),
    )
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < length
    groups = tl.num_programs(1)
    weight = tl.zeros([BLOCK], tl.float32) + 1.0
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([BLOCK], tl.float32)
    grad_bias = tl.zeros([BLOCK], tl.float32)
    for row_of_32_bits in tl.range(tl.program_id(1), count, groups, num_stages=STAGES):
        row = tl.cast(row_of_32_bits, tl.int64)
        x = tl.load(input_ptr + row * in_stride + column, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        mean, rstd, shift = load_stats(stats_ptr, row, count, True, IS_LAYERNORM)
        x_hat = _normalized(x, mean, rstd, shift, IS_LAYERNORM)
        if NEEDS_WEIGHTS:
            grad_weight += grad * x_hat
            if IS_LAYERNORM:
                grad_bias += grad
        if NEEDS_INPUT:
            value = grad * weight
            if IS_LAYERNORM:
                value = _difference(value, tl.load(means_ptr + 2 * row))
            value = (value - x_hat * tl.load(means_ptr + 2 * row + 1)) * rstd
            if HAS_RESIDUAL:
                more = tl.load(grad_sum_ptr + row * grad_sum_stride + column, mask=inside, other=0.0)
                value += more.to(tl.float32)
            tl.store(grad_input_ptr + row * length + column, value.to(grad_input_ptr.dtype.element_ty), mask=inside)
    if NEEDS_WEIGHTS:
        partials_ptr += tl.program_id(1).to(tl.int64) * length
        tl.store(partials_ptr + column, grad_weight, mask=inside)
        if IS_LAYERNORM:
            partials_ptr += groups.to(tl.int64) * length
            tl.store(partials_ptr + column, grad_bias, mask=inside)


@triton.jit
def _norm_sum_kernel(
    grad_weight_ptr, grad_bias_ptr, partials_ptr, groups, length,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, DIVISIBILITY: tl.constexpr,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Gradients of weight (programs of the first kind) and bias (of the second) from the sums over groups of rows."""
    griddepcontrol_wait(USE_PDL)
    length = assume_divisible(length, DIVISIBILITY)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < length
    which = tl.program_id(1)
    partials_ptr += which.to(tl.int64) * groups * length
    total = tl.zeros([GROUPS, COLUMNS], tl.float32)
    for start in range(0, groups, GROUPS):
        group = start + tl.arange(0, GROUPS)
        at = group.to(tl.int64)[:, None] * length + column[None, :]
        total += tl.load(partials_ptr + at, mask=(group < groups)[:, None] & inside[None, :], other=0.0)
    value = tl.sum(total, axis=0)
    if which == 0:
        if HAS_WEIGHT:
            tl.store(grad_weight_ptr + column, value.to(grad_weight_ptr.dtype.element_ty), mask=inside)
    else:
        if HAS_BIAS:
            tl.store(grad_bias_ptr + column, value.to(grad_bias_ptr.dtype.element_ty), mask=inside)


# ---- configurations ------------------------------------------------------------------------------------------------

KEY = ("length", "IS_LAYERNORM", "HAS_RESIDUAL")
_fused = AutotunedKernel(
    _norm_kernel,
    row_configs((0,)),
    ("BLOCK", "IS_LAYERNORM", "HAS_RESIDUAL", "SAVE_STATS", "DIVISIBILITY"),
    suitable_forward,
)
_online = AutotunedKernel(
    _norm_online_kernel,
    blocks_of((8192, 16), (16384, 32), (8192, 32), (4096, 8), (4096, 16), (2048, 8)),
    KEY,
)


_fused_backward = AutotunedKernel(
    _norm_backward_kernel,
    row_configs((3, 2)),
    ("BLOCK", "IS_LAYERNORM", "HAS_RESIDUAL", "NEEDS_WEIGHTS", "DIVISIBILITY"),
    suitable_persistent,
)
_backward_rows = AutotunedKernel(
    _norm_backward_rows_kernel, blocks_of((4096, 8), (8192, 16), (4096, 16)), ("length", "IS_LAYERNORM")
)
_backward_columns = AutotunedKernel(
    _norm_backward_columns_kernel,
    blocks_of((2048, 4), (1024, 4), (4096, 8), stages=(3, 1)),
    (*KEY, "NEEDS_WEIGHTS"),
)

#: LaunchCache by all that decides them.
_launches = LaunchCache()


# ---- host ----------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """Which normalisation."""

    centred: bool
    residual: bool


def as_matrix(x: torch.Tensor, dims: int = 1) -> torch.Tensor:
    """(count, length) with dense rows: a view where the strides allow one, else a copy."""
    x = as_rows(x, dims)
    if x.dim() != 2:
        x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def as_parameter(x: torch.Tensor | None) -> torch.Tensor | None:
    """Weight or bias as one dense row."""
    if x is None or (x.dim() == 1 and x.is_contiguous()):
        return x
    return x.reshape(-1).contiguous()


def pilot_of(dtype: torch.dtype) -> int:
    """Of how many of a row's first elements `online` takes the mean in advance.

    The further it is from that of all, the more bits cancel; elements of 16 bits have them to spare.
    """
    return PILOT_FLOAT32 if dtype == torch.float32 else PILOT


def forward_by(launch: Callable[..., None]) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A step's forward pass, of which ``launch(kind, tensors, strides, present, eps, keep)`` launches the kernel.

    It gets the kernel's tensors, output, sum and what is kept of rows first, the strides of rows, and whether there are
    weight and bias.
    """

    def forward(
        kind: Kind,
        shape: torch.Size,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        keep: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output and sum, both of `shape`, and what is kept of rows, which are (count, length).

        The sum is the output again where there is no residual; what is kept is empty where nothing is to be. Output and
        sum are made in the shape that they are returned in: of a view of them autograd would forbid to be modified.
        """
        output = x.new_empty(shape)
        total = x.new_empty(shape) if kind.residual else output
        stats = x.new_empty((3 if kind.centred else 1, x.shape[0] if keep else 0), dtype=torch.float32)
        if not shapes_only() and output.numel() > 0:
            # What is absent is stood for by what is there: its pointer is not looked at.
            r = x if residual is None else residual
            w, b = output if weight is None else weight, output if bias is None else bias
            present = weight is not None, bias is not None
            launch(kind, (output, total, stats, x, r, w, b), (x.stride(0), r.stride(0)), present, eps, keep)
        return output, total, stats

    return forward


def _launch(
    fused: bool,
    kind: Kind,
    tensors: tuple[torch.Tensor, ...],
    strides: tuple[int, int],
    present: tuple[bool, bool],
    eps: float,
    keep: bool,
) -> None:
    x, (has_weight, has_bias) = tensors[3], present
    count, length = x.shape
    key = ("forward", kind, fused, keep, count, length, strides, has_weight, has_bias, x.dtype, x.device, eps)

    def make() -> Launch | None:
        arguments = (*strides, count, length, eps)
        constants = {
            "IS_LAYERNORM": kind.centred, "HAS_RESIDUAL": kind.residual, "SAVE_STATS": keep,
            "HAS_WEIGHT": has_weight, "HAS_BIAS": has_bias, "DIVISIBILITY": divisibility_of(length, *strides),
        }  # fmt: skip
        if not fused:
            constants["EVEN"] = length % LARGEST_BLOCK == 0
            constants["PILOT"] = pilot_of(x.dtype)
            return _online(lambda meta: (count,), tensors, arguments, constants)
        constants["BLOCK"] = triton.next_power_of_2(length)
        return _fused(lambda meta: (triton.cdiv(count, meta["ROWS"]),), tensors, arguments, constants)

    _launches.run(key, make, tensors)


class Needs(NamedTuple):
    """Which gradients are wanted."""

    input: bool
    weight: bool
    bias: bool


#: Of the rows (count, length), of weight and of bias (length,); None where not wanted.
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def unwritten(x: torch.Tensor, needs: Needs) -> Gradients:
    """Memory for the gradients of rows (count, length), of weight and of bias (length,); None where not wanted."""
    count, length = x.shape
    grad_input = x.new_empty((count, length)) if needs.input else None
    grad_weight = x.new_empty((length,)) if needs.weight else None
    grad_bias = x.new_empty((length,)) if needs.bias else None
    return grad_input, grad_weight, grad_bias


def backward(
    kind: Kind,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    stats: torch.Tensor,
    grad: torch.Tensor,
    grad_sum: torch.Tensor | None,
    needs: Needs,
) -> Gradients:
    """Gradients of the rows (count, length), of weight and of bias (length,); None where not wanted."""
    count, length = x.shape
    grad_input, grad_weight, grad_bias = unwritten(x, needs)
    weights = needs.weight or needs.bias
    if shapes_only():
        return grad_input, grad_weight, grad_bias
    if x.numel() == 0:
        for of_parameter in (grad_weight, grad_bias):
            if of_parameter is not None:
                of_parameter.zero_()
        return grad_input, grad_weight, grad_bias
    fused = length <= MAX_FUSED_BACKWARD
    block = triton.next_power_of_2(length)
    sms = multiprocessors(x.device, MULTIPROCESSORS_INTERPRETED)
    # Groups of rows, each with its own sums; a block of columns, as many as the GPU is busy with.
    groups = (
        persistent_programs(length, block, count, sms)
        if fused
        else min(count, max(1, 4 * sms // triton.cdiv(length, 2048)))
    )
    partials = x.new_empty((2 if kind.centred else 1, groups, length), dtype=torch.float32) if weights else stats
    given = x if grad_input is None else grad_input
    s, w = (grad if grad_sum is None else grad_sum), (x if weight is None else weight)
    strides = (grad.stride(0), s.stride(0), x.stride(0))
    key = ("backward", kind, count, length, strides, weight is None, needs, x.dtype, x.device)
    constants = {"IS_LAYERNORM": kind.centred, "HAS_RESIDUAL": kind.residual, "HAS_WEIGHT": weight is not None}
    wanted = {"NEEDS_INPUT": needs.input, "NEEDS_WEIGHTS": weights, "DIVISIBILITY": divisibility_of(length, *strides)}
    if fused:
        tensors = (given, partials, grad, s, x, stats, w)
        _launches.run(
            key,
            lambda: _fused_backward(
                lambda meta: (groups,), tensors, (*strides, count, length), {**constants, **wanted, "BLOCK": block}
            ),
            tensors,
        )
    else:
        means = x.new_empty((count, 2), dtype=torch.float32)
        if needs.input:
            of_rows = (means, grad, x, stats, w)
            of_row = {
                "IS_LAYERNORM": kind.centred,
                "HAS_WEIGHT": weight is not None,
                "DIVISIBILITY": wanted["DIVISIBILITY"],
            }
            arguments = (strides[0], strides[2], count, length)
            _launches.run(
                (*key, "rows"),
                lambda: _backward_rows(lambda meta: (count,), of_rows, arguments, of_row),
                of_rows,
            )
        tensors = (given, partials, means, grad, s, x, stats, w)

        def grid(meta: dict[str, Any]) -> tuple[int, int]:
            return triton.cdiv(length, meta["BLOCK"]), groups

        _launches.run(
            key,
            lambda: _backward_columns(grid, tensors, (*strides, count, length), {**constants, **wanted}),
            tensors,
        )
    if weights:
        add_up(x, partials, grad_weight, grad_bias)
    return grad_input, grad_weight, grad_bias


def add_up(
    x: torch.Tensor, partials: torch.Tensor, grad_weight: torch.Tensor | None, grad_bias: torch.Tensor | None
) -> None:
    _, groups, length = partials.shape
    tensors = (x if grad_weight is None else grad_weight, x if grad_bias is None else grad_bias, partials)
    together, columns = sum_tile(groups)
    grid = (triton.cdiv(length, columns), 1 if grad_bias is None else 2)
    arguments = (
        groups,
        length,
        grad_weight is not None,
        grad_bias is not None,
        divisibility_of(length),
        together,
        columns,
    )
    key = ("sum", arguments, x.dtype, x.device)

    def make() -> Launch | None:
        warps = sum_warps(groups)
        launch = Launch(_norm_sum_kernel, grid, arguments, {"num_warps": warps})
        launch(*tensors)
        return launch

    _launches.run(key, make, tensors)


def refused(fused: bool, x: torch.Tensor, length: int) -> str | None:
    """Why rows of so many elements of `x` cannot be taken, or None."""
    if (reason := unsupported(x)) is not None:
        return reason
    if fused and length > MAX_FUSED:
        return f"rows of {length} elements are too long for registers; at most {MAX_FUSED}"
    return None


#: How these steps of the climb normalise rows, and which they refuse (ladder.py has the table of all).
FORWARD = {
    name: (forward_by(partial(_launch, fused)), partial(refused, fused))
    for name, fused in (("online", False), ("fused", True))
}


def ahead_of_time(kind: Kind) -> list[Entry]:
    """Specialisations that stand for a normalisation's calls: short and long rows, both passes."""
    flags = {"IS_LAYERNORM": kind.centred, "HAS_RESIDUAL": kind.residual, "HAS_WEIGHT": True, "DIVISIBILITY": 16}
    forward_flags = {**flags, "SAVE_STATS": True, "HAS_BIAS": kind.centred}
    backward_flags = {**flags, "NEEDS_INPUT": True, "NEEDS_WEIGHTS": True}
    rows_flags = {"IS_LAYERNORM": kind.centred, "HAS_WEIGHT": True, "DIVISIBILITY": 16}
    sum_flags = {"HAS_WEIGHT": True, "HAS_BIAS": kind.centred, "DIVISIBILITY": 16}
    made = []
    for block in (256, 4096, 16384):
        rows, warps = forward_shapes(block)[0]
        config = triton.Config({"ROWS": rows}, num_warps=warps, num_stages=1)
        made.append(entry(_norm_kernel, "bf16", {**forward_flags, "BLOCK": block}, config))
    for block in (256, 4096, MAX_FUSED_BACKWARD):
        rows, warps = persistent_shapes(block)[0]
        config = triton.Config({"ROWS": rows, "STAGES": 3}, num_warps=warps, num_stages=1)
        made.append(entry(_norm_backward_kernel, "bf16", {**backward_flags, "BLOCK": block}, config))
    for kernel, constants, block, warps in (
        (_norm_online_kernel, {**forward_flags, "PILOT": PILOT, "EVEN": False}, {"BLOCK": 8192}, 16),
        (_norm_backward_rows_kernel, rows_flags, {"BLOCK": 4096}, 8),
        (_norm_backward_columns_kernel, backward_flags, {"BLOCK": 2048, "STAGES": 3}, 4),
        (_norm_sum_kernel, sum_flags, {"GROUPS": 256, "COLUMNS": 16}, sum_warps(256)),
    ):
        made.append(entry(kernel, "bf16", constants, triton.Config(block, num_warps=warps, num_stages=1)))
    of_float32 = dict.fromkeys(("stats_ptr", "partials_ptr", "means_ptr"), "*fp32") | {"eps": "fp32"}
    return [e._replace(signature={n: of_float32.get(n, type) for n, type in e.signature.items()}) for e in made]
