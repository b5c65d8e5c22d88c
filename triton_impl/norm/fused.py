"""layer_norm, rung 3 of 5: fused
rms_norm, rung 3 of 4: fused
add_rms_norm, rung 2 of 3: fused

Idea      Whole rows in registers, one or several per program: one read, one write. Backward, persistent programs loop
          over rows and keep the column sums of the parameters' gradients in registers.
Predicts  Forward 2·N·sizeof(T) bytes per row, backward 3·N·sizeof(T): 5/3 over `online` backward.
Limit now Registers: rows of up to 32768 elements forward, 8192 backward.
Next      `cluster`: spread a row over the thread blocks of a cluster.
"""

from __future__ import annotations

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
    add_pairs,
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
from triton_impl.runtime.row_configs import (
    forward_shapes,
    persistent_programs,
    persistent_shapes,
    row_configs,
    suitable_forward,
    suitable_persistent,
)

#: The longest rows that registers hold, forward and backward.
MAX_COLS = 32768
MAX_COLS_BACKWARD = 8192
#: The longest rows whose parameters are loaded into registers before the statistics are known.
MAX_PRELOADED = tl.constexpr(4096)


# ---- forward -------------------------------------------------------------------------------------------------------


@triton.jit
def normalize_rows(
    x, out_ptr, stats_ptr, weight_ptr, bias_ptr, row, col, n_rows, n_cols, eps,
    IS_LAYERNORM: tl.constexpr, SAVE_STATS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, PRELOAD_PARAMS: tl.constexpr,
):  # fmt: skip
    """y = x̂ · w + b of the rows `row`, which are in registers, (ROWS, BLOCK), zeros past their end.

    PRELOAD_PARAMS: weight and bias are loaded before the reductions and wait in registers.
    """
    row_mask, col_mask = row < n_rows, col < n_cols
    mask = row_mask[:, None] & col_mask[None, :]
    SHIFTED: tl.constexpr = IS_LAYERNORM and out_ptr.dtype.element_ty == tl.float32
    if HAS_WEIGHT and PRELOAD_PARAMS:
        weight = tl.load(weight_ptr + col, mask=col_mask, other=0.0)
    if HAS_BIAS and PRELOAD_PARAMS:
        bias = tl.load(bias_ptr + col, mask=col_mask, other=0.0)
    x = x.to(tl.float32)
    mean = tl.sum(x, axis=1) / n_cols if IS_LAYERNORM else tl.zeros([ROWS], tl.float32)
    deviation = tl.where(mask, x - mean[:, None], 0.0) if IS_LAYERNORM else x
    # In 16-bit elements, what rounding the mean loses is far below their own spacing.
    mean_deviation = tl.sum(deviation, axis=1) / n_cols if SHIFTED else tl.zeros([ROWS], tl.float32)
    rstd = rstd_of(tl.sum(deviation * deviation, axis=1) / n_cols - mean_deviation * mean_deviation, eps)
    shift = -mean_deviation * rstd
    if SAVE_STATS:
        store_stats(stats_ptr, row, n_rows, row_mask, mean, rstd, shift, IS_LAYERNORM)
    y = deviation * rstd[:, None] + shift[:, None] if SHIFTED else deviation * rstd[:, None]
    if HAS_WEIGHT:
        if not PRELOAD_PARAMS:
            weight = tl.load(weight_ptr + col, mask=col_mask, other=0.0)
        y *= weight.to(tl.float32)[None, :]
    if HAS_BIAS:
        if not PRELOAD_PARAMS:
            bias = tl.load(bias_ptr + col, mask=col_mask, other=0.0)
        y += bias.to(tl.float32)[None, :]
    tl.store(out_ptr + row[:, None] * n_cols + col[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_fused_kernel(
    out_ptr, sum_ptr, stats_ptr, input_ptr, residual_ptr, weight_ptr, bias_ptr,
    in_stride, residual_stride, n_rows, n_cols, eps,
    IS_LAYERNORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SAVE_STATS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, DIVISIBILITY: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """y = x̂ · w + b, of the sum of input and residual with HAS_RESIDUAL.

    Grid: one program per ROWS rows. Layout: input and residual have dense rows, `in_stride` and `residual_stride`
    apart.
    """
    griddepcontrol_wait(USE_PDL)
    n_cols, in_stride = assume_divisible(n_cols, DIVISIBILITY), assume_divisible(in_stride, DIVISIBILITY)
    residual_stride = assume_divisible(residual_stride, DIVISIBILITY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < n_rows)[:, None] & (col < n_cols)[None, :]
    x_ptrs = input_ptr + row[:, None] * in_stride + col[None, :]
    x = tl.load(x_ptrs, mask=mask, other=0.0, eviction_policy=EVICTION_OF_SINGLE_USE)
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + row[:, None] * residual_stride + col[None, :]
        residual = tl.load(residual_ptrs, mask=mask, other=0.0, eviction_policy=EVICTION_OF_SINGLE_USE)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row[:, None] * n_cols + col[None, :], x, mask=mask)
    normalize_rows(
        x, out_ptr, stats_ptr, weight_ptr, bias_ptr, row, col, n_rows, n_cols, eps,
        IS_LAYERNORM, SAVE_STATS, HAS_WEIGHT, HAS_BIAS, ROWS, BLOCK <= MAX_PRELOADED,
    )  # fmt: skip


# ---- backward ------------------------------------------------------------------------------------------------------


@triton.jit
def _norm_fused_backward_kernel(
    grad_input_ptr, partials_ptr, grad_ptr, grad_sum_ptr, input_ptr, stats_ptr, weight_ptr,
    grad_stride, grad_sum_stride, in_stride, n_rows, n_cols,
    IS_LAYERNORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    NEEDS_INPUT: tl.constexpr, NEEDS_WEIGHTS: tl.constexpr, DIVISIBILITY: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """dx = rstd · (w·dy − mean(w·dy) − x̂ · mean(w·dy·x̂)), and partial sums of dy · x̂ and dy over a program's rows.

    Grid: persistent programs, each of which loops over blocks of ROWS rows. Layout: partials are
    (2 or 1, programs, n_cols), float32.
    """
    griddepcontrol_wait(USE_PDL)
    n_cols, in_stride = assume_divisible(n_cols, DIVISIBILITY), assume_divisible(in_stride, DIVISIBILITY)
    grad_stride = assume_divisible(grad_stride, DIVISIBILITY)
    grad_sum_stride = assume_divisible(grad_sum_stride, DIVISIBILITY)
    col = tl.arange(0, BLOCK)
    col_mask = col < n_cols
    programs = tl.num_programs(0)
    weight = tl.zeros([1, BLOCK], tl.float32) + 1.0
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + col, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    grad_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    grad_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, n_rows, programs * ROWS, num_stages=STAGES):
        row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
        row_mask = row < n_rows
        mask = row_mask[:, None] & col_mask[None, :]
        x_ptrs = input_ptr + row[:, None] * in_stride + col[None, :]
        x = tl.load(x_ptrs, mask=mask, other=0.0, eviction_policy=EVICTION_OF_SINGLE_USE).to(tl.float32)
        grad_ptrs = grad_ptr + row[:, None] * grad_stride + col[None, :]
        grad = tl.load(grad_ptrs, mask=mask, other=0.0, eviction_policy=EVICTION_OF_SINGLE_USE).to(tl.float32)
        mean, rstd, shift = load_stats(stats_ptr, row, n_rows, row_mask, IS_LAYERNORM)
        x_hat = normalize(x, mean[:, None], rstd[:, None], shift[:, None], IS_LAYERNORM)
        if NEEDS_WEIGHTS:
            grad_weight += grad * x_hat
            if IS_LAYERNORM:
                grad_bias += grad
        if NEEDS_INPUT:
            weighted = grad * weight
            value = weighted
            if IS_LAYERNORM:
                # One reduction for both sums: of rows that several warps share, each would cost two barriers.
                total, dot = tl.reduce((weighted, weighted * x_hat), 1, add_pairs)
                value = subtract_rounded(value, (total / n_cols)[:, None])
            else:
                dot = tl.sum(weighted * x_hat, axis=1)
            dot /= n_cols
            value = (value - x_hat * dot[:, None]) * rstd[:, None]
            if HAS_RESIDUAL:
                ptrs = grad_sum_ptr + row[:, None] * grad_sum_stride + col[None, :]
                grad_sum = tl.load(ptrs, mask=mask, other=0.0, eviction_policy=EVICTION_OF_SINGLE_USE)
                value += grad_sum.to(tl.float32)
            out_ptrs = grad_input_ptr + row[:, None] * n_cols + col[None, :]
            tl.store(out_ptrs, value.to(grad_input_ptr.dtype.element_ty), mask=mask)
    if NEEDS_WEIGHTS:
        partials_ptr += tl.program_id(0).to(tl.int64) * n_cols
        tl.store(partials_ptr + col, tl.sum(grad_weight, axis=0), mask=col_mask)
        if IS_LAYERNORM:
            partials_ptr += programs.to(tl.int64) * n_cols
            tl.store(partials_ptr + col, tl.sum(grad_bias, axis=0), mask=col_mask)


# ---- host ----------------------------------------------------------------------------------------------------------

_forward = AutotunedKernel(
    _norm_fused_kernel,
    row_configs((0,)),
    ("BLOCK", "IS_LAYERNORM", "HAS_RESIDUAL", "SAVE_STATS", "DIVISIBILITY"),
    suitable_forward,
)
_backward = AutotunedKernel(
    _norm_fused_backward_kernel,
    row_configs((3, 2)),
    ("BLOCK", "IS_LAYERNORM", "HAS_RESIDUAL", "NEEDS_WEIGHTS", "DIVISIBILITY"),
    suitable_persistent,
)
_launches = LaunchCache()


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
        "BLOCK": triton.next_power_of_2(n_cols),
    }  # fmt: skip
    arguments = (*strides, n_rows, n_cols, eps)
    return _forward(lambda meta: (triton.cdiv(n_rows, meta["ROWS"]),), tensors, arguments, constants)


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
    block = triton.next_power_of_2(n_cols)
    programs = persistent_programs(n_cols, block, n_rows, multiprocessors(x.device, MULTIPROCESSORS_INTERPRETED))
    partials = None
    if needs_weights:
        partials = x.new_empty((2 if kind.is_layernorm else 1, programs, n_cols), dtype=torch.float32)
    s, w = (grad if grad_sum is None else grad_sum), (x if weight is None else weight)
    strides = (grad.stride(0), s.stride(0), x.stride(0))
    tensors = (x if grad_input is None else grad_input, stats if partials is None else partials, grad, s, x, stats, w)

    def make() -> Launch:
        constants = {
            "IS_LAYERNORM": kind.is_layernorm, "HAS_RESIDUAL": kind.has_residual, "HAS_WEIGHT": weight is not None,
            "NEEDS_INPUT": needs.input, "NEEDS_WEIGHTS": needs_weights,
            "DIVISIBILITY": divisibility_of(n_cols, *strides), "BLOCK": block,
        }  # fmt: skip
        return _backward(lambda meta: (programs,), tensors, (*strides, n_rows, n_cols), constants)

    key = (kind, n_rows, n_cols, strides, weight is None, needs, x.dtype, w.dtype, x.device)
    _launches.run(key, make, tensors)
    return partials


forward = forward_by(by_kind(_first_forward))
backward = backward_by(_launch_backward)


def unsupported_rows(kind: Kind, x: torch.Tensor, n_cols: int, gradient: bool) -> str | None:
    """Why rows of `n_cols` elements of `x` cannot be taken, or None."""
    if (reason := unsupported(x)) is not None:
        return reason
    if n_cols > MAX_COLS:
        return f"rows of {n_cols} elements are too long for registers; at most {MAX_COLS}"
    if gradient and n_cols > MAX_COLS_BACKWARD:
        return f"rows of {n_cols} elements are too long for registers backward; at most {MAX_COLS_BACKWARD}"
    return None


# ---- ahead of time -------------------------------------------------------------------------------------------------


def ahead_of_time(kind: Kind) -> list[Entry]:
    """Specialisations that stand for a normalisation's calls: short and long rows, both passes."""
    flags = {
        "IS_LAYERNORM": kind.is_layernorm, "HAS_RESIDUAL": kind.has_residual, "HAS_WEIGHT": True, "DIVISIBILITY": 16,
    }  # fmt: skip
    forward_flags = {**flags, "SAVE_STATS": True, "HAS_BIAS": kind.is_layernorm}
    backward_flags = {**flags, "NEEDS_INPUT": True, "NEEDS_WEIGHTS": True}
    made = []
    for block in (256, 4096, 16384):
        rows, warps = forward_shapes(block)[0]
        config = triton.Config({"ROWS": rows}, num_warps=warps, num_stages=1)
        types = {"stats_ptr": "*fp32", "eps": "fp32"}
        made.append(entry(_norm_fused_kernel, "bf16", {**forward_flags, "BLOCK": block}, config, types))
    for block in (256, 4096, MAX_COLS_BACKWARD):
        rows, warps = persistent_shapes(block)[0]
        config = triton.Config({"ROWS": rows, "STAGES": 3}, num_warps=warps, num_stages=1)
        types = {"stats_ptr": "*fp32", "partials_ptr": "*fp32"}
        made.append(entry(_norm_fused_backward_kernel, "bf16", {**backward_flags, "BLOCK": block}, config, types))
    return made
