"""bias_dropout_add_layer_norm, rung 3 of 4: cluster

Idea      One thread-block cluster per row. Each thread makes the sum one vector at a time, with one call of Philox per
          vector, and keeps it as 16-bit values in registers; the blocks exchange their moments through distributed
          shared memory. Backward: the kernel of :mod:`triton_impl.norm.cluster_backward`, then the dropout gradient's
          (common.py). In Gluon, for Hopper and 16-bit elements.
Predicts  3·N·sizeof(T) bytes per row, 4·N·sizeof(T) with the sum saved, at lengths where `fused` runs out of registers.
Limit now Each cluster reads the three parameters from L2.
Next      `persistent_cluster`: keep them in shared memory while clusters loop over rows.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernel_ladder.tracing import address, wants_gradient
from triton_impl import unsupported as unsupported_by_triton
from triton_impl.bias_dropout_add_layer_norm.common import Mask, forward_by
from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.gluon import cluster
from triton_impl.common.gluon.cluster import (
    ALIGNMENT,
    column_index,
    exchange,
    init_exchange,
    load,
    narrow,
    rewiden,
    store,
    store_from_first_block,
    widen,
)
from triton_impl.common.gluon.philox import factors
from triton_impl.common.gluon.requirements import unsupported as unsupported_by_gluon
from triton_impl.common.philox import ARGUMENTS
from triton_impl.norm import cluster_backward
from triton_impl.norm.cluster import block_moments, prefetch, row_moments
from triton_impl.norm.common import rstd_of
from triton_impl.runtime.aot import Entry, entry
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.launch_cache import Launch, to_time

#: Elements of a vector, and of a call of Philox.
EIGHT = gl.constexpr(8)


@gluon.jit(do_not_specialize=ARGUMENTS)
def _cluster_kernel(
    out_ptr, sum_ptr, stats_ptr, input_ptr, bias_ptr, residual_ptr, weight_ptr, norm_bias_ptr,
    key_low, key_high, threshold, scale, in_stride, residual_stride, n_rows, n_cols, eps,
    SAVE_STATS: gl.constexpr, HAS_WEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr,
    DIVISIBILITY: gl.constexpr, BLOCK: gl.constexpr, AHEAD: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """y = layer_norm(residual + dropout(input + bias)).

    Grid: one cluster per row. Layout: each block of the cluster holds BLOCK columns of the row in registers.
    AHEAD: vectors of both operands that a thread loads ahead. SAVE_STATS: sum and statistics are stored.
    """
    init_exchange(3)
    n_cols, in_stride = assume_divisible(n_cols, DIVISIBILITY), assume_divisible(in_stride, DIVISIBILITY)
    residual_stride = assume_divisible(residual_stride, DIVISIBILITY)
    row = gl.program_id(0).to(gl.int64)
    i = column_index(BLOCK, EIGHT)
    STEP: gl.constexpr = i.shape[1]
    V: gl.constexpr = BLOCK // STEP
    LAYOUT: gl.constexpr = i.type.layout
    input_ptr += row * in_stride
    residual_ptr += row * residual_stride
    inputs = ()
    residuals = ()
    for _ in gl.static_range(AHEAD):
        inputs = prefetch(inputs, input_ptr, i, n_cols, True, EVEN)
        residuals = prefetch(residuals, residual_ptr, i, n_cols, True, EVEN)
    # The first column of each eight, which share a call of Philox.
    eight = gl.min(i.reshape([i.shape[0], STEP // EIGHT, EIGHT]), 2)
    x = ()
    for v in gl.static_range(V):
        bias = widen(load(bias_ptr, i + v * STEP, n_cols, 0.0, EVEN))
        call = (row * n_cols + (eight + v * STEP)) // EIGHT
        kept = factors(call, key_low, key_high, threshold, scale, LAYOUT)
        total = narrow(widen(residuals[v]) + (widen(inputs[v]) + bias) * kept, input_ptr.dtype.element_ty)
        inputs = prefetch(inputs, input_ptr, i, n_cols, v + AHEAD < V, EVEN)
        residuals = prefetch(residuals, residual_ptr, i, n_cols, v + AHEAD < V, EVEN)
        if SAVE_STATS:
            store(sum_ptr + row * n_cols, i + v * STEP, n_cols, total, EVEN)
        x += (total,)
    parts = block_moments(x, i, n_cols, BLOCK, True, EVEN)
    weight = prefetch((), weight_ptr, i, n_cols, HAS_WEIGHT, EVEN)
    mean, deviation, variance = row_moments(exchange(parts), n_cols, BLOCK, True)
    rstd = rstd_of(variance, eps)
    shift = (-deviation - mean) * rstd
    offset = prefetch((), norm_bias_ptr, i, n_cols, HAS_BIAS, EVEN)
    if SAVE_STATS:
        store_from_first_block(stats_ptr + row, rstd, True)
        store_from_first_block(stats_ptr + n_rows + row, mean, True)
        store_from_first_block(stats_ptr + 2 * n_rows + row, -deviation * rstd, True)
    for v in gl.static_range(V):
        weight = prefetch(weight, weight_ptr, i, n_cols, HAS_WEIGHT and v + 1 < V, EVEN)
        offset = prefetch(offset, norm_bias_ptr, i, n_cols, HAS_BIAS and v + 1 < V, EVEN)
        y = rewiden(x[v]) * rstd[:, None] + shift[:, None]
        if HAS_WEIGHT:
            y *= widen(weight[v])
        if HAS_BIAS:
            y += widen(offset[v])
        store(out_ptr + row * n_cols, i + v * STEP, n_cols, y, EVEN)


# ---- host ----------------------------------------------------------------------------------------------------------

#: Warps of a block and vectors of a row per thread, the best guess first; registers per thread.
SHAPES = ((16, 4), (8, 4), (8, 2), (16, 2), (4, 4), (32, 4))
REGISTERS = 64
#: Vectors of both operands that a thread loads ahead.
AHEAD = (4, 2)


def _block(warps: int, vectors: int) -> int:
    """Elements of a row that a block of such a shape holds."""
    return warps * 32 * vectors * 8


#: Rows, in elements, of which the longest is that of the best guess, though the widest shape could hold longer ones.
MIN_COLS = 2049
MAX_COLS = cluster.MAX_CLUSTER * _block(*SHAPES[0])


def configs(n_cols: int) -> list[triton.Config]:
    """Configurations for rows of a length, best first."""
    found = []
    for warps, vectors in SHAPES:
        block = _block(warps, vectors)
        blocks = triton.next_power_of_2(triton.cdiv(n_cols, block))
        if blocks <= cluster.MAX_CLUSTER and n_cols > block // 2:
            for ahead in AHEAD:
                if ahead <= vectors:
                    constants = {"BLOCK": block, "AHEAD": ahead, "EVEN": n_cols == blocks * block}
                    found.append(
                        triton.Config(constants, num_warps=warps, num_stages=1, num_ctas=blocks, maxnreg=REGISTERS)
                    )
    return to_time(found)


_choose = Autotuner(_cluster_kernel)


def _first_launch(
    tensors: tuple[torch.Tensor, ...],
    strides: tuple[int, int],
    present: tuple[bool, bool],
    eps: float,
    save_stats: bool,
    mask: Mask,
) -> Launch:
    x = tensors[3]
    n_rows, n_cols = x.shape
    constants = (save_stats, *present)
    fixed = (*strides, n_rows, n_cols, eps, *constants, divisibility_of(n_cols, *strides))

    def launch(config: triton.Config) -> Launch:
        arguments = (*fixed, *config.kwargs.values())
        return Launch(_cluster_kernel, (n_rows,), arguments, cluster.options(config))

    key = (n_cols, str(x.dtype), *constants, cluster.fills_gpu(n_rows, x.device))
    return _choose.launch(key, configs(n_cols), launch, *tensors, values=mask)


forward = forward_by(_first_launch)


def unsupported(input: torch.Tensor, *others: torch.Tensor | None, **options: object) -> str | None:
    """Why a call with input, bias, residual, weight and norm_bias cannot be taken, or None."""
    if (reason := unsupported_rows(input, MIN_COLS, MAX_COLS)) is not None:
        return reason
    if 2 * combined(input, *others) % ALIGNMENT or any_address(input, *others) % ALIGNMENT:
        return f"takes rows whose length, strides and addresses are multiples of {ALIGNMENT} bytes"
    if wants_gradient(input, *others):
        return cluster_backward.unsupported_rows(input.shape[-1], input.dtype)
    return None


def unsupported_rows(input: torch.Tensor, shortest: int, longest: int) -> str | None:
    """Why rows cannot be taken for their device, dtype or length, or None."""
    if (reason := unsupported_by_triton(input) or unsupported_by_gluon(input)) is not None:
        return reason
    if input.dtype.itemsize != 2:
        return f"takes 16-bit elements, got {str(input.dtype).removeprefix('torch.')}"
    if not shortest <= input.shape[-1] <= longest:
        return f"takes rows of {shortest} to {longest} elements, got {input.shape[-1]}"
    return None


def combined(*tensors: torch.Tensor | None) -> int:
    """The bits of row length and strides, in elements: a power of two divides this if it divides them all."""
    bits = 0
    for x in tensors:
        if x is not None:
            bits |= x.shape[-1]
            for size, stride in zip(x.shape[:-1], x.stride(), strict=False):
                bits |= stride if size > 1 else 0
    return bits


def any_address(*tensors: torch.Tensor | None) -> int:
    """The bits of all addresses: a power of two divides this if it divides them all."""
    bits = 0
    for x in tensors:
        if x is not None:
            bits |= address(x)
    return bits


# ---- ahead of time -------------------------------------------------------------------------------------------------


def ahead_of_time() -> list[Entry]:
    """A specialisation that stands for the calls."""
    types = {"stats_ptr": "*fp32", "scale": "fp32", "eps": "fp32"}
    constants = {"SAVE_STATS": False, "HAS_WEIGHT": True, "HAS_BIAS": True, "DIVISIBILITY": 16}
    return [entry(_cluster_kernel, "bf16", constants, configs(4096)[0], types)]
