"""layer_norm, rung 4 of 5: cluster
rms_norm, rung 4 of 4: cluster
add_rms_norm, rung 3 of 3: cluster

Idea      One thread-block cluster per row. Each block keeps its part of the row in registers; the blocks exchange their
          moments through distributed shared memory. A row that one block holds has that block alone. Backward:
          cluster_backward.py. In Gluon, for Hopper.
Predicts  2·N·sizeof(T) bytes per row at lengths where `fused` runs out of registers.
Limit now Each cluster reads weight and bias from L2, and waits once for its row and once for the exchange.
Next      `persistent_cluster`: clusters that loop over rows and copy the next row meanwhile.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton_impl import unsupported
from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.gluon import cluster
from triton_impl.common.gluon.cluster import (
    as_row_values,
    column_index,
    exchange,
    init_exchange,
    load,
    rewiden,
    split_by_warp,
    store,
    store_from_first_block,
    widen,
)
from triton_impl.common.gluon.requirements import unsupported as unsupported_by_gluon
from triton_impl.norm import cluster_backward
from triton_impl.norm.common import Kind, add_pairs, by_kind, forward_by, rstd_of
from triton_impl.runtime.aot import TYPES, Entry, entry
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.launch_cache import Launch


@gluon.jit
def merge_moments(n, mean, sum, square, other_n, other_mean, other_sum, other_square):
    """Merges the moments of two parts of a row about the first part's mean, or about the other's if the first is empty.

    Moments are n, any mean, Σ (x − mean) and Σ (x − mean)² (Chan, Golub and LeVeque 1983).
    """
    about = gl.where(n > 0, mean, other_mean)
    off, other_off = mean - about, other_mean - about
    square += off * (n * off + 2 * sum) + other_square + other_off * (other_n * other_off + 2 * other_sum)
    sum += n * off + other_sum + other_n * other_off
    return n + other_n, about, sum, square


@gluon.jit
def _add_deviations(sums, squares, x, mean, i, n_cols, EVEN: gl.constexpr):
    """Adds the deviations from `mean` of a vector at columns `i` to `sums`, and their squares to `squares`."""
    deviation = x - mean
    if not EVEN:
        deviation = gl.where(i < n_cols, deviation, 0.0)
    return sums + deviation, squares + deviation * deviation


@gluon.jit
def _block_moments(x, i, n_cols, BLOCK: gl.constexpr, EVEN: gl.constexpr):
    """Mean, Σ (x − mean) and Σ (x − mean)² of a block's part x of a row, (blocks,) each, about the mean of the block's
    first vectors.
    """
    sums = gl.zeros_like(widen(x[0]))
    squares = sums
    mean = gl.sum(widen(x[0]), 1)
    block = gl.arange(0, gl.num_ctas(), layout=mean.type.layout)
    mean /= gl.maximum(columns_from(block * BLOCK, i.shape[1], n_cols), 1.0)
    for k in gl.static_range(len(x)):
        j = i + k * i.shape[1]
        sums, squares = _add_deviations(sums, squares, widen(x[k]), mean[:, None], j, n_cols, EVEN)
    total, square = gl.reduce((sums, squares), 1, add_pairs)
    return (mean, total, square)


@gluon.jit
def _warp_moments(x, i, n_cols, EVEN: gl.constexpr):
    """The moments of a row that one block holds. Each warp takes deviations from the mean of its own first vectors, so
    that warps wait for each other once. In a cluster, whose blocks wait anyway, that is no faster.
    """
    sums = split_by_warp(gl.zeros_like(widen(x[0])))
    squares = sums
    mean = gl.sum(split_by_warp(widen(x[0])), 2)
    of_warp: gl.constexpr = i.shape[1] // gl.num_warps()
    start = gl.arange(0, gl.num_warps(), layout=gl.SliceLayout(0, mean.type.layout))[None, :] * of_warp
    mean /= gl.maximum(columns_from(start, of_warp, n_cols), 1.0)
    n = gl.zeros_like(mean)
    for k in gl.static_range(len(x)):
        n += columns_from(start + k * i.shape[1], of_warp, n_cols)
        j = split_by_warp(i + k * i.shape[1])
        sums, squares = _add_deviations(sums, squares, split_by_warp(widen(x[k])), mean[:, :, None], j, n_cols, EVEN)
    total, square = gl.reduce((sums, squares), 2, add_pairs)
    merged = gl.reduce((n, mean, total, square), 1, merge_moments)
    return (as_row_values(merged[1], i), as_row_values(merged[2], i), as_row_values(merged[3], i))


@gluon.jit
def block_moments(x, i, n_cols, BLOCK: gl.constexpr, IS_LAYERNORM: gl.constexpr, EVEN: gl.constexpr):
    """Moments of a block's part x of a row: mean, Σ (x − mean), Σ (x − mean)²; for RMSNorm Σ x² alone."""
    if IS_LAYERNORM and gl.num_ctas() == 1:
        return _warp_moments(x, i, n_cols, EVEN)
    elif IS_LAYERNORM:
        return _block_moments(x, i, n_cols, BLOCK, EVEN)
    else:
        squares = gl.zeros_like(widen(x[0]))
        for k in gl.static_range(len(x)):
            value = widen(x[k])
            squares += value * value
        return (gl.sum(squares, 1),)


@gluon.jit
def row_moments(parts, n_cols, BLOCK: gl.constexpr, IS_LAYERNORM: gl.constexpr):
    """A mean, the mean deviation from it, and the variance (or mean square) of a row, (blocks,) each.

    They are merged from the moments of the row's parts in the order of the blocks (Chan, Golub and LeVeque 1983).
    """
    mean = parts[0]
    deviation = gl.zeros_like(mean)
    square = gl.zeros_like(mean)
    if IS_LAYERNORM:
        for b in gl.static_range(gl.num_ctas()):
            deviation += (parts[3 * b] - mean) * columns_from(b * BLOCK, BLOCK, n_cols) + parts[3 * b + 1]
        deviation /= n_cols
        for b in gl.static_range(gl.num_ctas()):
            off = parts[3 * b] - mean - deviation
            square += parts[3 * b + 2] + off * (off * columns_from(b * BLOCK, BLOCK, n_cols) + 2 * parts[3 * b + 1])
    else:
        for b in gl.static_range(gl.num_ctas()):
            square += parts[b]
    return mean, deviation, square / n_cols


@gluon.jit
def columns_from(start, COUNT: gl.constexpr, n_cols):
    """How many of COUNT columns from `start` on a row has."""
    return gl.minimum(gl.maximum(n_cols - start, 0), COUNT).to(gl.float32)


@gluon.jit
def prefetch(loaded, ptr, i, n_cols, WANTED: gl.constexpr, EVEN: gl.constexpr):
    """Appends the next vector of a row or a parameter to the tuple of those `loaded`, if WANTED."""
    if WANTED:
        loaded += (load(ptr, i + len(loaded) * i.shape[1], n_cols, 0.0, EVEN),)
    return loaded


@gluon.jit
def _norm_cluster_kernel(
    out_ptr, sum_ptr, stats_ptr, input_ptr, residual_ptr, weight_ptr, bias_ptr,
    in_stride, residual_stride, n_rows, n_cols, eps,
    IS_LAYERNORM: gl.constexpr, HAS_RESIDUAL: gl.constexpr, SAVE_STATS: gl.constexpr, HAS_WEIGHT: gl.constexpr,
    HAS_BIAS: gl.constexpr, VECTOR: gl.constexpr, DIVISIBILITY: gl.constexpr, BLOCK: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """y = x̂ · w + b, of the sum of input and residual with HAS_RESIDUAL.

    Grid: one cluster per row. Layout: each block of the cluster holds BLOCK columns of the row in registers.
    """
    init_exchange(3 if IS_LAYERNORM else 1)
    n_cols, in_stride = assume_divisible(n_cols, DIVISIBILITY), assume_divisible(in_stride, DIVISIBILITY)
    residual_stride = assume_divisible(residual_stride, DIVISIBILITY)
    row = gl.program_id(0).to(gl.int64)
    i = column_index(BLOCK, VECTOR)
    input_ptr += row * in_stride
    residual_ptr += row * residual_stride
    x = ()
    for k in gl.static_range(0, BLOCK, i.shape[1]):
        part = load(input_ptr, i + k, n_cols, 0.0, EVEN)
        if HAS_RESIDUAL:
            residual = load(residual_ptr, i + k, n_cols, 0.0, EVEN)
            part = (widen(part) + widen(residual)).to(part.dtype)
        x += (part,)
    parts = block_moments(x, i, n_cols, BLOCK, IS_LAYERNORM, EVEN)
    # Weights are loaded one vector ahead, the first before the exchange; registers do not suffice for biases as well.
    weight = prefetch((), weight_ptr, i, n_cols, HAS_WEIGHT, EVEN)
    mean, deviation, variance = row_moments(exchange(parts), n_cols, BLOCK, IS_LAYERNORM)
    rstd = rstd_of(variance, eps)
    shift = -deviation * rstd
    bias = prefetch((), bias_ptr, i, n_cols, HAS_BIAS, EVEN)
    if SAVE_STATS:
        store_from_first_block(stats_ptr + row, rstd, True)
        if IS_LAYERNORM:
            store_from_first_block(stats_ptr + n_rows + row, mean, True)
            store_from_first_block(stats_ptr + 2 * n_rows + row, shift, True)
    for k in gl.static_range(len(x)):
        weight = prefetch(weight, weight_ptr, i, n_cols, HAS_WEIGHT and k + 1 < len(x), EVEN)
        bias = prefetch(bias, bias_ptr, i, n_cols, HAS_BIAS and k + 1 < len(x), EVEN)
        j = i + k * i.shape[1]
        if HAS_RESIDUAL:
            store(sum_ptr + row * n_cols, j, n_cols, x[k], EVEN)
        y = rewiden(x[k])
        if IS_LAYERNORM and y.dtype == out_ptr.dtype.element_ty:
            y = (y - mean[:, None]) * rstd[:, None] + shift[:, None]
        elif IS_LAYERNORM:
            # In 16-bit elements, what this rounds is far below their own spacing.
            y = y * rstd[:, None] + (shift - mean * rstd)[:, None]
        else:
            y *= rstd[:, None]
        if HAS_WEIGHT:
            y *= widen(weight[k])
        if HAS_BIAS:
            y += widen(bias[k])
        store(out_ptr + row * n_cols, j, n_cols, y, EVEN)


# ---- host ----------------------------------------------------------------------------------------------------------

#: The shortest rows: of 16-bit elements the smallest block of :func:`triton_impl.common.gluon.cluster.configs` needs
#: more than 2048.
MIN_COLS = 2049

_choose = Autotuner(_norm_cluster_kernel)


def _first_launch(
    kind: Kind,
    tensors: tuple[torch.Tensor, ...],
    strides: tuple[int, int],
    present: tuple[bool, bool],
    eps: float,
    save_stats: bool,
) -> Launch:
    x = tensors[3]
    n_rows, n_cols = x.shape
    constants = (*kind, save_stats, *present, cluster.vector_of(x.dtype))
    fixed = (*strides, n_rows, n_cols, eps, *constants, divisibility_of(n_cols, *strides))

    def launch(config: triton.Config) -> Launch:
        arguments = (*fixed, *config.kwargs.values())
        return Launch(_norm_cluster_kernel, (n_rows,), arguments, cluster.options(config))

    key = (n_cols, str(x.dtype), *constants, cluster.fills_gpu(n_rows, x.device))
    return _choose.launch(key, cluster.configs(n_cols, x.dtype, 1 + kind.has_residual), launch, *tensors)


forward = forward_by(by_kind(_first_launch))


def unsupported_rows(kind: Kind, x: torch.Tensor, n_cols: int, gradient: bool) -> str | None:
    """Why rows of `n_cols` elements of `x` cannot be taken, or None."""
    reason = unsupported(x) or unsupported_by_gluon(x) or cluster.length_unsupported(n_cols, MIN_COLS, x.dtype)
    return reason or (cluster_backward.unsupported_rows(n_cols, x.dtype) if gradient else None)


# ---- ahead of time -------------------------------------------------------------------------------------------------


def ahead_of_time(kind: Kind) -> list[Entry]:
    """Specialisations that stand for a normalisation's calls, both passes."""
    constants = {
        "IS_LAYERNORM": kind.is_layernorm, "HAS_RESIDUAL": kind.has_residual, "SAVE_STATS": True, "HAS_WEIGHT": True,
        "HAS_BIAS": kind.is_layernorm,
    }  # fmt: skip
    types = {"stats_ptr": "*fp32", "eps": "fp32"}
    return [
        entry(
            _norm_cluster_kernel,
            TYPES[dtype],
            {**constants, "VECTOR": cluster.vector_of(dtype), "DIVISIBILITY": 16},
            cluster.configs(n_cols, dtype, 1 + kind.has_residual)[0],
            types,
        )
        for dtype, n_cols in ((torch.bfloat16, 131072), (torch.float32, 50000), (torch.bfloat16, 4096))
    ] + cluster_backward.ahead_of_time(kind)
