"""Bias, dropout, residual sum and LayerNorm of rows of 16-bit elements, in Gluon: a row stays in the registers of a
block, or, if it outgrows one, of a cluster (cluster.py). The longest rows are in persistent_cluster.py.

The sum is made a vector a thread at a time, with one call of Philox each, and kept as what it is in memory.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernel_ladder.tracing import address
from triton_impl import unsupported
from triton_impl.bias_dropout_add_layer_norm import persistent_cluster
from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.gluon import cluster
from triton_impl.common.gluon.cluster import (
    MULTIPLE,
    begin,
    columns,
    load,
    meet,
    narrow,
    store,
    widen,
    widen_again,
    write_once,
)
from triton_impl.common.gluon.philox import factors
from triton_impl.common.gluon.requirements import unsupported as unsupported_by_gluon
from triton_impl.common.philox import ARGUMENTS
from triton_impl.norm.cluster import part_statistics, row_statistics, with_next
from triton_impl.norm.rows import rstd_of
from triton_impl.runtime.aot import Entry, entry
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.launch_cache import Launch, LaunchCache, to_time
from triton_impl.runtime.persistent_launch import PersistentLaunch

#: Elements of a vector, of which one call of Philox serves all.
EIGHT = gl.constexpr(8)


@gluon.jit(do_not_specialize=ARGUMENTS)
def _chain_cluster_kernel(
    out_ptr, sum_ptr, stats_ptr, input_ptr, bias_ptr, residual_ptr, weight_ptr, norm_bias_ptr,
    key_low, key_high, threshold, scale, in_stride, residual_stride, count, length, eps,
    SAVE_STATS: gl.constexpr, HAS_WEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr,
    DIVISIBILITY: gl.constexpr, BLOCK: gl.constexpr, AHEAD: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    begin(3)
    length, in_stride = assume_divisible(length, DIVISIBILITY), assume_divisible(in_stride, DIVISIBILITY)
    residual_stride = assume_divisible(residual_stride, DIVISIBILITY)
    row = gl.program_id(0).to(gl.int64)
    i = columns(BLOCK, EIGHT)
    STEP: gl.constexpr = i.shape[1]
    V: gl.constexpr = BLOCK // STEP
    LAYOUT: gl.constexpr = i.type.layout
    input_ptr += row * in_stride
    residual_ptr += row * residual_stride
    inputs = ()
    residuals = ()
    for _ in gl.static_range(AHEAD):
        inputs = with_next(inputs, input_ptr, i, length, True, EVEN)
        residuals = with_next(residuals, residual_ptr, i, length, True, EVEN)
    # The first of each eight.
    eight = gl.min(i.reshape([i.shape[0], STEP // EIGHT, EIGHT]), 2)
    x = ()
    for v in gl.static_range(V):
        bias = widen(load(bias_ptr, i + v * STEP, length, 0.0, EVEN))
        call = (row * length + (eight + v * STEP)) // EIGHT
        kept = factors(call, key_low, key_high, threshold, scale, LAYOUT)
        total = narrow(widen(residuals[v]) + (widen(inputs[v]) + bias) * kept, input_ptr.dtype.element_ty)
        inputs = with_next(inputs, input_ptr, i, length, v + AHEAD < V, EVEN)
        residuals = with_next(residuals, residual_ptr, i, length, v + AHEAD < V, EVEN)
        if SAVE_STATS:
            store(sum_ptr + row * length, i + v * STEP, length, total, EVEN)
        x += (total,)
    parts = part_statistics(x, i, length, BLOCK, True, EVEN)
    weight = with_next((), weight_ptr, i, length, HAS_WEIGHT, EVEN)
    mean, lost, variance = row_statistics(meet(parts), length, BLOCK, True)
    rstd = rstd_of(variance, eps)
    shift = (-lost - mean) * rstd
    offset = with_next((), norm_bias_ptr, i, length, HAS_BIAS, EVEN)
    if SAVE_STATS:
        write_once(stats_ptr + row, rstd, True)
        write_once(stats_ptr + count + row, mean, True)
        write_once(stats_ptr + 2 * count + row, -lost * rstd, True)
    for v in gl.static_range(V):
        weight = with_next(weight, weight_ptr, i, length, HAS_WEIGHT and v + 1 < V, EVEN)
        offset = with_next(offset, norm_bias_ptr, i, length, HAS_BIAS and v + 1 < V, EVEN)
        y = widen_again(x[v]) * rstd[:, None] + shift[:, None]
        if HAS_WEIGHT:
            y *= widen(weight[v])
        if HAS_BIAS:
            y += widen(offset[v])
        store(out_ptr + row * length, i + v * STEP, length, y, EVEN)


# ---- host ----------------------------------------------------------------------------------------------------------

#: Warps of a block, and vectors of a row that a thread has, the best guess first.
SHAPES, REGISTERS = ((16, 4), (8, 4), (8, 2), (16, 2), (4, 4), (32, 4)), 64
#: Vectors of both operands that a thread has under way at a time.
AHEAD = (4, 2)


def _block(warps: int, vectors: int) -> int:
    """Elements of a row that a block of such a shape has."""
    return warps * 32 * vectors * 8


#: The rows that are taken, in elements: up to those of the best guess, though the widest shape could have longer ones.
SHORTEST, LONGEST = 2049, cluster.MOST_BLOCKS * _block(*SHAPES[0])


def configs(length: int) -> list[triton.Config]:
    """Configurations for rows of a length, best first."""
    found = []
    for warps, vectors in SHAPES:
        block = _block(warps, vectors)
        blocks = triton.next_power_of_2(triton.cdiv(length, block))
        if blocks <= cluster.MOST_BLOCKS and length > block // 2:
            for ahead in AHEAD:
                if ahead <= vectors:
                    constants = {"BLOCK": block, "AHEAD": ahead, "EVEN": length == blocks * block}
                    found.append(
                        triton.Config(constants, num_warps=warps, num_stages=1, num_ctas=blocks, maxnreg=REGISTERS)
                    )
    return to_time(found)


_choose = Autotuner(_chain_cluster_kernel)
_launches = LaunchCache()


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
    stays = persistent_cluster.takes(tensors, strides)

    def make() -> Launch | PersistentLaunch:
        key = (length, str(x.dtype), *constants, cluster.fills_gpu(count, x.device))
        if stays:
            of = persistent_cluster.launch_of(x, strides, eps, constants)
            return persistent_cluster.choose.launch(key, persistent_cluster.configs(length), of, *tensors, values=mask)

        def launch(config: triton.Config) -> Launch:
            arguments = (
                *strides,
                count,
                length,
                eps,
                *constants,
                divisibility_of(length, *strides),
                *config.kwargs.values(),
            )
            return Launch(_chain_cluster_kernel, (count,), arguments, cluster.options(config))

        return _choose.launch(key, configs(length), launch, *tensors, values=mask)

    _launches.run((stays, count, length, strides, constants, x.dtype, x.device, eps), make, tensors, mask)


def refused(input: torch.Tensor, *others: torch.Tensor | None) -> str | None:
    """Why a call with these tensors, input, bias, residual, weight and bias of the norm, cannot be taken, or None."""
    if (reason := unsupported(input) or unsupported_by_gluon(input)) is not None:
        return reason
    if input.dtype.itemsize != 2:
        return f"takes elements of 16 bits alone, got {str(input.dtype).removeprefix('torch.')}"
    length = input.shape[-1]
    if not SHORTEST <= length <= LONGEST:
        return f"takes rows of {SHORTEST} to {LONGEST} elements, got {length}"
    places = 2 * length
    for tensor in (input, *others):
        if tensor is not None:
            places |= address(tensor)
            for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False):
                places |= 2 * stride if size > 1 else 0
    if places % MULTIPLE != 0:
        return f"takes rows whose length, strides and addresses are multiples of {MULTIPLE} bytes"
    return None


def ahead_of_time() -> list[Entry]:
    """A specialisation that stands for the calls."""
    types = {"stats_ptr": "*fp32", "scale": "fp32", "eps": "fp32"}
    constants = {"SAVE_STATS": False, "HAS_WEIGHT": True, "HAS_BIAS": True}
    return [
        entry(_chain_cluster_kernel, "bf16", {**constants, "DIVISIBILITY": 16}, configs(4096)[0], types),
        *persistent_cluster.ahead_of_time(),
    ]
