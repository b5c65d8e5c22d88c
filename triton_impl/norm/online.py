"""layer_norm, rung 2 of 5: online
rms_norm, rung 2 of 4: online
add_rms_norm, rung 1 of 3: online

Idea      A row of any length, one block of columns at a time. The first pass sums x and x² about a pilot mean, so one
          read gives both statistics; the second pass normalises and finds the row in L2. Backward, one kernel finds
          the two means of each row; another, one program per block of columns and group of rows, writes the gradient.
Predicts  Forward 2·N·sizeof(T) bytes per row from memory, N·sizeof(T) more from L2. Backward 5·N·sizeof(T).
Limit now The second read. A row that fits in registers needs none.
Next      `fused`: keep the row in registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from triton_impl import multiprocessors, unsupported
from triton_impl.common.cache_policy import EVICTION_OF_SINGLE_USE
from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.pdl import griddepcontrol_wait
from triton_impl.norm.common import (
    MULTIPROCESSORS_INTERPRETED,
    Kind,
    Needs,
    backward_by,
    by_kind,
    forward_by,
    load_stats,
    normalize,
    rstd_of,
    store_stats,
    subtract_rounded,
)
from triton_impl.runtime.aot import Entry, entry
from triton_impl.runtime.autotuned_kernel import AutotunedKernel
from triton_impl.runtime.launch_cache import Launch, LaunchCache
from triton_impl.runtime.row_configs import blocks_of

#: The largest block of columns that a configuration has.
LARGEST_BLOCK = 16384
#: Elements at the start of a row whose mean is the pilot: see :func:`pilot_of`.
PILOT = 256
PILOT_FLOAT32 = 8192


# ---- forward -------------------------------------------------------------------------------------------------------


@triton.jit
def normalize_row(
    x_ptr, out_ptr, weight_ptr, bias_ptr, mean, rstd, shift, n_cols,
    IS_LAYERNORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The second pass over one row whose statistics are known. EVEN: the row consists of whole blocks."""
    for start in range(0, n_cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        col_mask = tl.full([BLOCK], True, tl.int1) if EVEN else col < n_cols
        x = tl.load(x_ptr + col, mask=col_mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        y = normalize(x, mean, rstd, shift, IS_LAYERNORM)
        if HAS_WEIGHT:
            y *= tl.load(weight_ptr + col, mask=col_mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_ptr + col, mask=col_mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        tl.store(out_ptr + col, y.to(out_ptr.dtype.element_ty), mask=col_mask)


@triton.jit
def _norm_online_kernel(
    out_ptr, sum_ptr, stats_ptr, input_ptr, residual_ptr, weight_ptr, bias_ptr,
    in_stride, residual_stride, n_rows, n_cols, eps,
    IS_LAYERNORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SAVE_STATS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, DIVISIBILITY: tl.constexpr,
    PILOT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """y = x̂ · w + b, of the sum of input and residual with HAS_RESIDUAL.

    Grid: one program per row. Layout: input and residual have dense rows, `in_stride` and `residual_stride` apart.
    """
    griddepcontrol_wait(USE_PDL)
    n_cols, in_stride = assume_divisible(n_cols, DIVISIBILITY), assume_divisible(in_stride, DIVISIBILITY)
    residual_stride = assume_divisible(residual_stride, DIVISIBILITY)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    input_ptr += row * in_stride
    out_ptr += row * n_cols
    if HAS_RESIDUAL:
        residual_ptr += row * residual_stride
        sum_ptr += row * n_cols
    # Deviations are taken from the mean of the row's first elements: near the mean of all, and known in advance.
    mean = 0.0
    if IS_LAYERNORM:
        pilot_col = tl.arange(0, PILOT)
        pilot = tl.load(input_ptr + pilot_col, mask=pilot_col < n_cols, other=0.0).to(tl.float32)
        mean = tl.sum(pilot, axis=0) / tl.minimum(n_cols, PILOT)
    sums = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        col = start + lane
        col_mask = tl.full([BLOCK], True, tl.int1) if EVEN else col < n_cols
        x = tl.load(input_ptr + col, mask=col_mask, other=0.0, eviction_policy="evict_last")
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + col, mask=col_mask, other=0.0, eviction_policy=EVICTION_OF_SINGLE_USE)
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
            tl.store(sum_ptr + col, x, mask=col_mask)
        deviation = tl.where(col_mask, x.to(tl.float32) - mean, 0.0)
        if IS_LAYERNORM:
            sums += deviation
        squares += deviation * deviation
    mean_deviation = tl.sum(sums, axis=0) / n_cols if IS_LAYERNORM else 0.0
    rstd = rstd_of(tl.sum(squares, axis=0) / n_cols - mean_deviation * mean_deviation, eps)
    shift = -mean_deviation * rstd
    if SAVE_STATS:
        store_stats(stats_ptr, row, n_rows, True, mean, rstd, shift, IS_LAYERNORM)
    x_ptr = input_ptr
    if HAS_RESIDUAL:
        tl.debug_barrier()  # threads read sums that other threads wrote
        x_ptr = sum_ptr
    normalize_row(
        x_ptr, out_ptr, weight_ptr, bias_ptr, mean, rstd, shift, n_cols,
        IS_LAYERNORM, HAS_WEIGHT, HAS_BIAS, BLOCK, EVEN,
    )  # fmt: skip


# ---- backward ------------------------------------------------------------------------------------------------------


@triton.jit
def _norm_online_row_means_kernel(
    means_ptr, grad_ptr, input_ptr, stats_ptr, weight_ptr, grad_stride, in_stride, n_rows, n_cols,
    IS_LAYERNORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, DIVISIBILITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """means[r] = mean(w·dy), mean(w·dy·x̂). Grid: one program per row. Layout: means are (n_rows, 2), float32."""
    n_cols, in_stride = assume_divisible(n_cols, DIVISIBILITY), assume_divisible(in_stride, DIVISIBILITY)
    grad_stride = assume_divisible(grad_stride, DIVISIBILITY)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    mean, rstd, shift = load_stats(stats_ptr, row, n_rows, True, IS_LAYERNORM)
    sums = tl.zeros([BLOCK], tl.float32)
    dots = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        col = start + lane
        col_mask = col < n_cols
        x = tl.load(input_ptr + row * in_stride + col, mask=col_mask, other=0.0).to(tl.float32)
        weighted = tl.load(grad_ptr + row * grad_stride + col, mask=col_mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            weighted *= tl.load(weight_ptr + col, mask=col_mask, other=0.0).to(tl.float32)
        sums += weighted
        dots += weighted * normalize(x, mean, rstd, shift, IS_LAYERNORM)
    tl.store(means_ptr + 2 * row, tl.sum(sums, axis=0) / n_cols)
    tl.store(means_ptr + 2 * row + 1, tl.sum(dots, axis=0) / n_cols)


@triton.jit
def _norm_online_backward_kernel(
    grad_input_ptr, partials_ptr, means_ptr, grad_ptr, grad_sum_ptr, input_ptr, stats_ptr, weight_ptr,
    grad_stride, grad_sum_stride, in_stride, n_rows, n_cols,
    IS_LAYERNORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    NEEDS_INPUT: tl.constexpr, NEEDS_WEIGHTS: tl.constexpr, DIVISIBILITY: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx = rstd · (w·dy − mean(w·dy) − x̂ · mean(w·dy·x̂)), and partial sums of dy · x̂ and dy over a group of rows.

    Grid: (blocks of columns, groups of rows). Group g has the rows g, g + groups, … Layout: partials are
    (2 or 1, groups, n_cols), float32.
    """
    n_cols, in_stride = assume_divisible(n_cols, DIVISIBILITY), assume_divisible(in_stride, DIVISIBILITY)
    grad_stride = assume_divisible(grad_stride, DIVISIBILITY)
    grad_sum_stride = assume_divisible(grad_sum_stride, DIVISIBILITY)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    col_mask = col < n_cols
    groups = tl.num_programs(1)
    weight = tl.zeros([BLOCK], tl.float32) + 1.0
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + col, mask=col_mask, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([BLOCK], tl.float32)
    grad_bias = tl.zeros([BLOCK], tl.float32)
    for row_int32 in tl.range(tl.program_id(1), n_rows, groups, num_stages=STAGES):
        row = tl.cast(row_int32, tl.int64)
        x = tl.load(input_ptr + row * in_stride + col, mask=col_mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * grad_stride + col, mask=col_mask, other=0.0).to(tl.float32)
        mean, rstd, shift = load_stats(stats_ptr, row, n_rows, True, IS_LAYERNORM)
        x_hat = normalize(x, mean, rstd, shift, IS_LAYERNORM)
        if NEEDS_WEIGHTS:
            grad_weight += grad * x_hat
            if IS_LAYERNORM:
                grad_bias += grad
        if NEEDS_INPUT:
            value = grad * weight
            if IS_LAYERNORM:
                value = subtract_rounded(value, tl.load(means_ptr + 2 * row))
            value = (value - x_hat * tl.load(means_ptr + 2 * row + 1)) * rstd
            if HAS_RESIDUAL:
                grad_sum = tl.load(grad_sum_ptr + row * grad_sum_stride + col, mask=col_mask, other=0.0)
                value += grad_sum.to(tl.float32)
            tl.store(grad_input_ptr + row * n_cols + col, value.to(grad_input_ptr.dtype.element_ty), mask=col_mask)
    if NEEDS_WEIGHTS:
        partials_ptr += tl.program_id(1).to(tl.int64) * n_cols
        tl.store(partials_ptr + col, grad_weight, mask=col_mask)
        if IS_LAYERNORM:
            partials_ptr += groups.to(tl.int64) * n_cols
            tl.store(partials_ptr + col, grad_bias, mask=col_mask)


# ---- host ----------------------------------------------------------------------------------------------------------

_KEY = ("n_cols", "IS_LAYERNORM", "HAS_RESIDUAL")
_forward = AutotunedKernel(
    _norm_online_kernel,
    blocks_of((8192, 16), (16384, 32), (8192, 32), (4096, 8), (4096, 16), (2048, 8)),
    _KEY,
)
_row_means = AutotunedKernel(
    _norm_online_row_means_kernel, blocks_of((4096, 8), (8192, 16), (4096, 16)), ("n_cols", "IS_LAYERNORM")
)
_backward = AutotunedKernel(
    _norm_online_backward_kernel,
    blocks_of((2048, 4), (1024, 4), (4096, 8), stages=(3, 1)),
    (*_KEY, "NEEDS_WEIGHTS"),
)
_launches = LaunchCache()


def pilot_of(dtype: torch.dtype) -> int:
    """Elements of a row's pilot mean.

    The further the pilot mean is from the mean of all, the more bits cancel. 16-bit elements have bits to spare.
    """
    return PILOT_FLOAT32 if dtype == torch.float32 else PILOT


def _first_forward(
    kind: Kind,
    tensors: tuple[torch.Tensor, ...],
    strides: tuple[int, int],
    present: tuple[bool, bool],
    eps: float,
    save_stats: bool,
) -> Launch:
    x, (has_weight, has_bias) = tensors[3], present
    n_rows, n_cols = x.shape
    constants = {
        "IS_LAYERNORM": kind.is_layernorm, "HAS_RESIDUAL": kind.has_residual, "SAVE_STATS": save_stats,
        "HAS_WEIGHT": has_weight, "HAS_BIAS": has_bias, "DIVISIBILITY": divisibility_of(n_cols, *strides),
        "PILOT": pilot_of(x.dtype), "EVEN": n_cols % LARGEST_BLOCK == 0,
    }  # fmt: skip
    return _forward(lambda meta: (n_rows,), tensors, (*strides, n_rows, n_cols, eps), constants)


def _launch_backward(
    kind: Kind,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    stats: torch.Tensor,
    grad: torch.Tensor,
    grad_sum: torch.Tensor | None,
    needs: Needs,
    grad_input: torch.Tensor | None,
) -> torch.Tensor | None:
    n_rows, n_cols = x.shape
    needs_weights = needs.weight or needs.bias
    # Programs for four blocks of 2048 columns per multiprocessor.
    sms = multiprocessors(x.device, MULTIPROCESSORS_INTERPRETED)
    groups = min(n_rows, max(1, 4 * sms // triton.cdiv(n_cols, 2048)))
    partials = (
        x.new_empty((2 if kind.is_layernorm else 1, groups, n_cols), dtype=torch.float32) if needs_weights else None
    )
    s, w = (grad if grad_sum is None else grad_sum), (x if weight is None else weight)
    strides = (grad.stride(0), s.stride(0), x.stride(0))
    key = (kind, n_rows, n_cols, strides, weight is None, needs, x.dtype, w.dtype, x.device)
    shared = {
        "IS_LAYERNORM": kind.is_layernorm,
        "HAS_WEIGHT": weight is not None,
        "DIVISIBILITY": divisibility_of(n_cols, *strides),
    }
    means = x.new_empty((n_rows, 2), dtype=torch.float32)
    if needs.input:
        as_row_values = (means, grad, x, stats, w)
        arguments = (grad.stride(0), x.stride(0), n_rows, n_cols)
        _launches.run(
            ("row means", *key),
            lambda: _row_means(lambda meta: (n_rows,), as_row_values, arguments, shared),
            as_row_values,
        )
    tensors = (
        x if grad_input is None else grad_input,
        stats if partials is None else partials,
        *(means, grad, s, x, stats, w),
    )
    constants = {
        **shared, "HAS_RESIDUAL": kind.has_residual, "NEEDS_INPUT": needs.input, "NEEDS_WEIGHTS": needs_weights,
    }  # fmt: skip

    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(n_cols, meta["BLOCK"]), groups

    _launches.run(("backward", *key), lambda: _backward(grid, tensors, (*strides, n_rows, n_cols), constants), tensors)
    return partials


forward = forward_by(by_kind(_first_forward))
backward = backward_by(_launch_backward)


def unsupported_rows(kind: Kind, x: torch.Tensor, n_cols: int, gradient: bool) -> str | None:
    """Why rows of `n_cols` elements of `x` cannot be taken, or None. Every length can."""
    return unsupported(x)


# ---- ahead of time -------------------------------------------------------------------------------------------------


def ahead_of_time(kind: Kind) -> list[Entry]:
    """Specialisations that stand for a normalisation's calls."""
    flags = {"IS_LAYERNORM": kind.is_layernorm, "HAS_WEIGHT": True, "DIVISIBILITY": 16}
    forward_flags = {
        **flags, "HAS_RESIDUAL": kind.has_residual, "SAVE_STATS": True, "HAS_BIAS": kind.is_layernorm, "PILOT": PILOT,
        "EVEN": False,
    }  # fmt: skip
    backward_flags = {**flags, "HAS_RESIDUAL": kind.has_residual, "NEEDS_INPUT": True, "NEEDS_WEIGHTS": True}
    float32 = {"stats_ptr": "*fp32", "partials_ptr": "*fp32", "means_ptr": "*fp32", "eps": "fp32"}
    return [
        entry(
            kernel,
            "bf16",
            constants,
            triton.Config(block, num_warps=warps, num_stages=1),
            {name: type for name, type in float32.items() if name in kernel.arg_names},
        )
        for kernel, constants, block, warps in (
            (_norm_online_kernel, forward_flags, {"BLOCK": 8192}, 16),
            (_norm_online_row_means_kernel, flags, {"BLOCK": 4096}, 8),
            (_norm_online_backward_kernel, backward_flags, {"BLOCK": 2048, "STAGES": 3}, 4),
        )
    ]
