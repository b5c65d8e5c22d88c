"""bias_dropout_add_layer_norm, rung 4 of 4: persistent_cluster

Idea      As many clusters as the GPU holds, each of which loops over rows, as persistent_cluster.py of the norms,
          whose second pass this kernel shares. All three parameters stay in shared memory.
          In Gluon, for Hopper and 16-bit elements. No backward pass.
Predicts  4 bytes per value from memory where `cluster` reads 10 from L2.
Limit now One row in flight per cluster: two make memory slower.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernel_ladder.tracing import wants_gradient
from triton_impl import multiprocessors
from triton_impl.bias_dropout_add_layer_norm.cluster import any_address, combined, unsupported_rows
from triton_impl.bias_dropout_add_layer_norm.common import Mask, forward_by
from triton_impl.common.gluon import cluster
from triton_impl.common.gluon.cluster import row_layout, split_by_warp
from triton_impl.common.gluon.cluster_reduce import init_cluster_reduce, reduce_arrive, row_of, wait_for_cluster_reduce
from triton_impl.common.gluon.philox import factors
from triton_impl.common.gluon.smem_stages import (
    allocate_stages,
    bulk_copy,
    init_stages,
    keep_stages,
    load_vector,
    wait_stage,
)
from triton_impl.common.philox import ARGUMENTS
from triton_impl.norm.common import add_pairs
from triton_impl.norm.persistent_cluster import (
    OF_WARP,
    PILOT,
    VECTOR,
    add_deviations,
    column_index,
    halves,
    head,
    second_pass,
    word_of,
)
from triton_impl.runtime.aot import Entry, entry
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.launch_cache import to_time
from triton_impl.runtime.persistent_launch import PersistentLaunch

#: Stages of a row's operands, and of the parameters, weight and norm_bias behind the bias; and the barriers on which
#: their copies complete. One row is in flight: two make memory slower.
_INPUT = gl.constexpr(0)
_RESIDUAL = gl.constexpr(1)
_BIAS = gl.constexpr(2)
_IN_ALL = gl.constexpr(5)
_OF_ROWS = gl.constexpr(0)
_OF_PARAMETERS = gl.constexpr(1)


@gluon.jit
def _fetch(iteration, input_ptr, residual_ptr, in_stride, residual_stride, n_rows, n_cols, BLOCK: gl.constexpr):
    """Start the copies of an iteration's row of both operands, if there is one."""
    row = row_of(iteration)
    end = gl.where(row < n_rows, n_cols, 0)
    bulk_copy(_OF_ROWS, _INPUT, (input_ptr + row * in_stride, residual_ptr + row * residual_stride), end, BLOCK, True)


@gluon.jit
def _heads(iteration, input_ptr, bias_ptr, residual_ptr, in_stride, residual_stride, n_rows, LAYOUT: gl.constexpr):
    """The first words of an iteration's row of both operands, and of the bias, which all rows share."""
    return (
        head(iteration, input_ptr, in_stride, n_rows, LAYOUT),
        head(iteration, bias_ptr, 0, n_rows, LAYOUT),
        head(iteration, residual_ptr, residual_stride, n_rows, LAYOUT),
    )


@gluon.jit
def _centre(heads, DTYPE: gl.constexpr):
    """The pilot mean, from which deviations are taken: the mean of a row's first sums, were nothing dropped.

    Dropout keeps the mean of a row and does not reduce its variance. So this pilot is as near as LayerNorm's own.
    """
    total = gl.full(heads[0].shape, 0.0, gl.float32, heads[0].type.layout)
    for k in gl.static_range(3):
        low, high = halves(heads[k], DTYPE)
        total += low + high
    return gl.sum(total, 1) * (0.5 / PILOT)


@gluon.jit
def _even_and_odd(x):
    """The even and the odd values of (blocks, elements)."""
    return gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))


@gluon.jit
def _evens(x):
    return _even_and_odd(x)[0]


@gluon.jit
def _first_pass(
    sum_ptr, iteration, centre, i, key_low, key_high, threshold, scale, n_rows, n_cols,
    SAVE_STATS: gl.constexpr, DTYPE: gl.constexpr, BLOCK: gl.constexpr, EVEN: gl.constexpr, DRAWN_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Compute an iteration's row of s, and contribute Σ (s − centre) and Σ (s − centre)² to the cluster's."""
    LAYOUT: gl.constexpr = i.type.layout
    row = row_of(iteration)
    wait_stage(_OF_ROWS, iteration & 1)
    # The number of the Philox call of each four words. A row's length is a multiple of four words.
    call = row * (n_cols // 4) + _evens(_evens(i)) // 4
    sums = gl.full(i.shape, 0.0, gl.float32, LAYOUT)
    squares = sums
    made = ()
    for v in gl.static_range(BLOCK // (gl.num_warps() * OF_WARP)):
        j = i + v * OF_WARP
        drawn = factors(call + v * (OF_WARP // 4), key_low, key_high, threshold, scale, DRAWN_LAYOUT)
        kept_low, kept_high = _even_and_odd(drawn)
        in_low, in_high = halves(load_vector(_INPUT, j, BLOCK), DTYPE)
        bias_low, bias_high = halves(load_vector(_BIAS, j, BLOCK), DTYPE)
        low, high = halves(load_vector(_RESIDUAL, j, BLOCK), DTYPE)
        low += (in_low + bias_low) * gl.convert_layout(kept_low, LAYOUT, assert_trivial=True)
        high += (in_high + bias_high) * gl.convert_layout(kept_high, LAYOUT, assert_trivial=True)
        word = word_of(low, high, DTYPE)
        made += (word,)
        if SAVE_STATS:
            if EVEN:
                gl.store(sum_ptr + row * n_cols + j, word)
            else:
                gl.store(sum_ptr + row * n_cols + j, word, mask=j < n_cols)
        sums, squares = add_deviations(sums, squares, word, centre, j, n_cols, DTYPE, EVEN)
    reduce_arrive(iteration, gl.reduce((split_by_warp(sums), split_by_warp(squares)), 2, add_pairs))
    return made


@gluon.jit(do_not_specialize=ARGUMENTS)
def _persistent_cluster_kernel(
    out_ptr, sum_ptr, stats_ptr, input_ptr, bias_ptr, residual_ptr, weight_ptr, norm_bias_ptr,
    key_low, key_high, threshold, scale, in_stride, residual_stride, n_rows, n_cols, per_element, eps,
    SAVE_STATS: gl.constexpr, HAS_WEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr,
    BLOCK: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """y = layer_norm(residual + dropout(input + bias)), two 16-bit values per word.

    Grid: persistent clusters, each of which loops over rows. Layout: each block has BLOCK words of a row; n_cols and
    strides are in words. SAVE_STATS: sum and statistics are stored.
    """
    blocks: gl.constexpr = gl.num_ctas()
    LAYOUT: gl.constexpr = row_layout(blocks, gl.num_warps(), VECTOR)
    DRAWN_LAYOUT: gl.constexpr = row_layout(blocks, gl.num_warps(), 2 * VECTOR)
    DTYPE: gl.constexpr = input_ptr.dtype.element_ty
    words: gl.constexpr = gl.pointer_type(gl.int32)
    out_ptr = out_ptr.to(words, bitcast=True)
    sum_ptr = sum_ptr.to(words, bitcast=True)
    input_ptr = input_ptr.to(words, bitcast=True)
    bias_ptr = bias_ptr.to(words, bitcast=True)
    residual_ptr = residual_ptr.to(words, bitcast=True)
    i = column_index(BLOCK, LAYOUT)
    rows = allocate_stages(_IN_ALL, BLOCK, gl.int32)
    keep_stages(rows)
    init_stages(_IN_ALL, 2, n_cols, BLOCK, gl.int32)
    init_cluster_reduce()
    wait_for_cluster_reduce()
    # The stage of an absent parameter holds the bias, and is not read.
    weight_ptr = weight_ptr.to(words, bitcast=True) if HAS_WEIGHT else bias_ptr
    norm_bias_ptr = norm_bias_ptr.to(words, bitcast=True) if HAS_BIAS else bias_ptr
    bulk_copy(_OF_PARAMETERS, _BIAS, (bias_ptr, weight_ptr, norm_bias_ptr), n_cols, BLOCK, False)
    before = _centre(_heads(0, input_ptr, bias_ptr, residual_ptr, in_stride, residual_stride, n_rows, LAYOUT), DTYPE)
    _fetch(0, input_ptr, residual_ptr, in_stride, residual_stride, n_rows, n_cols, BLOCK)
    programs = gl.num_programs(0)
    iterations = (n_rows - gl.program_id(0) + programs - 1) // programs
    centre = _centre(_heads(1, input_ptr, bias_ptr, residual_ptr, in_stride, residual_stride, n_rows, LAYOUT), DTYPE)
    wait_stage(_OF_PARAMETERS, 0)
    kept = _first_pass(
        sum_ptr, 0, before, i, key_low, key_high, threshold, scale, n_rows, n_cols,
        SAVE_STATS, DTYPE, BLOCK, EVEN, DRAWN_LAYOUT,
    )  # fmt: skip
    _fetch(1, input_ptr, residual_ptr, in_stride, residual_stride, n_rows, n_cols, BLOCK)
    for iteration in range(1, iterations):
        heads = _heads(iteration + 1, input_ptr, bias_ptr, residual_ptr, in_stride, residual_stride, n_rows, LAYOUT)
        made = _first_pass(
            sum_ptr, iteration, centre, i, key_low, key_high, threshold, scale, n_rows, n_cols,
            SAVE_STATS, DTYPE, BLOCK, EVEN, DRAWN_LAYOUT,
        )  # fmt: skip
        _fetch(iteration + 1, input_ptr, residual_ptr, in_stride, residual_stride, n_rows, n_cols, BLOCK)
        second_pass(
            out_ptr, stats_ptr, kept, rows, iteration - 1, before, i, n_rows, n_cols, per_element, eps,
            SAVE_STATS, HAS_WEIGHT, HAS_BIAS, DTYPE, EVEN,
        )  # fmt: skip
        before = centre
        centre = _centre(heads, DTYPE)
        kept = made
    second_pass(
        out_ptr, stats_ptr, kept, rows, iterations - 1, before, i, n_rows, n_cols, per_element, eps,
        SAVE_STATS, HAS_WEIGHT, HAS_BIAS, DTYPE, EVEN,
    )  # fmt: skip


# ---- host ----------------------------------------------------------------------------------------------------------

#: Warps of a block, the best guess first; words of a row and registers per thread.
WARPS = (8, 16)
WORDS = 16
REGISTERS = 128


def configs(n_cols: int) -> list[triton.Config]:
    """Configurations for rows of a length, best first; none for those that are too long."""
    found = []
    for warps in WARPS:
        block = warps * 32 * WORDS
        blocks = triton.next_power_of_2(triton.cdiv(n_cols // 2, block))
        if 2 <= blocks <= cluster.MAX_CLUSTER:
            constants = {"BLOCK": block, "EVEN": n_cols == 2 * blocks * block}
            found.append(triton.Config(constants, num_warps=warps, num_stages=1, num_ctas=blocks, maxnreg=REGISTERS))
    return to_time(found)


#: Rows, in elements: from the shortest that `configs` has clusters of two blocks for, to the longest; and the multiple,
#: in elements and bytes, of length, strides and addresses.
MIN_COLS = 8193
MAX_COLS = cluster.MAX_CLUSTER * 2 * 32 * WORDS * max(WARPS)
MULTIPLE = 32

_choose = Autotuner(_persistent_cluster_kernel)


def _smem_bytes(config: triton.Config) -> int:
    """Shared memory for rows and the three parameters."""
    return _IN_ALL.value * config.kwargs["BLOCK"] * 4


def _first_launch(
    tensors: tuple[torch.Tensor, ...],
    strides: tuple[int, int],
    present: tuple[bool, bool],
    eps: float,
    save_stats: bool,
    mask: Mask,
) -> PersistentLaunch:
    x = tensors[3]
    n_rows, n_cols = x.shape
    constants = (save_stats, *present)
    clusters = min(n_rows, multiprocessors(x.device, 1))
    arguments = (strides[0] // 2, strides[1] // 2, n_rows, n_cols // 2, 1.0 / n_cols, eps, *constants)

    def launch(config: triton.Config) -> PersistentLaunch:
        smem = _smem_bytes(config)
        return PersistentLaunch(_persistent_cluster_kernel, clusters, arguments, config, smem)

    key = (n_cols, str(x.dtype), *constants, cluster.fills_gpu(n_rows, x.device))
    return _choose.launch(key, configs(n_cols), launch, *tensors, values=mask)


forward = forward_by(_first_launch)


def unsupported(input: torch.Tensor, *others: torch.Tensor | None, **options: object) -> str | None:
    """Why a call with input, bias, residual, weight and norm_bias cannot be taken, or None."""
    if (reason := unsupported_rows(input, MIN_COLS, MAX_COLS)) is not None:
        return reason
    if wants_gradient(input, *others):
        return "has no backward pass; use triton.cluster"
    if combined(input, *others) % MULTIPLE or any_address(input, *others) % MULTIPLE:
        return f"takes rows whose length and strides, in elements, and addresses are multiples of {MULTIPLE}"
    return None


# ---- ahead of time -------------------------------------------------------------------------------------------------


def ahead_of_time() -> list[Entry]:
    """A specialisation that stands for the calls."""
    types = {"stats_ptr": "*fp32", "scale": "fp32", "per_element": "fp32", "eps": "fp32"}
    constants = {"SAVE_STATS": False, "HAS_WEIGHT": True, "HAS_BIAS": True}
    return [entry(_persistent_cluster_kernel, "bf16", constants, configs(131072)[0], types)]
