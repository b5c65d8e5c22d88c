"""Normalised rows in Gluon: a row stays in the registers of a block, or, if it outgrows one, of a cluster (cluster.py).

LayerNorm's longest rows are in persistent_cluster.py, and the backward pass in cluster_backward.py; of each row the
same is kept as in :mod:`triton_impl.norm.rows`.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton_impl import unsupported
from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.gluon import cluster
from triton_impl.common.gluon.cluster import (
    begin,
    by_warp,
    columns,
    load,
    meet,
    of_rows,
    store,
    widen,
    widen_again,
    write_once,
)
from triton_impl.common.gluon.requirements import unsupported as unsupported_by_gluon
from triton_impl.norm import persistent_cluster
from triton_impl.norm.rows import Kind, add_both, forward_by, rstd_of
from triton_impl.runtime.aot import TYPES, Entry, entry
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.launch_cache import Launch, LaunchCache


@gluon.jit
def _about_one_mean(count, mean, lost, square, other_count, other_mean, other_lost, other_square):
    """Of two parts of a row, how many elements, a mean, and the sums of deviations from it and of their squares: those
    of both, about the first one's mean, or if that is empty the other's.
    """
    about = gl.where(count > 0, mean, other_mean)
    off, other_off = mean - about, other_mean - about
    square += off * (count * off + 2 * lost) + other_square + other_off * (other_count * other_off + 2 * other_lost)
    lost += count * off + other_lost + other_count * other_off
    return count + other_count, about, lost, square


@gluon.jit
def _with_deviations(sums, squares, x, mean, i, length, EVEN: gl.constexpr):
    """`sums`, and with them the deviations from `mean` of a vector at columns `i`; and of their squares the same."""
    deviation = x - mean
    if not EVEN:
        deviation = gl.where(i < length, deviation, 0.0)
    return sums + deviation, squares + deviation * deviation


@gluon.jit
def _about_a_block_mean(x, i, length, BLOCK: gl.constexpr, EVEN: gl.constexpr):
    """Of a block's part x of a row, (blocks,) each: a mean, and the sums of deviations from it and of their squares.
    The mean is that of its first vectors.
    """
    sums = gl.zeros_like(widen(x[0]))
    squares = sums
    mean = gl.sum(widen(x[0]), 1)
    block = gl.arange(0, gl.num_ctas(), layout=mean.type.layout)
    mean /= gl.maximum(held(block * BLOCK, i.shape[1], length), 1.0)
    for k in gl.static_range(len(x)):
        j = i + k * i.shape[1]
        sums, squares = _with_deviations(sums, squares, widen(x[k]), mean[:, None], j, length, EVEN)
    lost, square = gl.reduce((sums, squares), 1, add_both)
    return (mean, lost, square)


@gluon.jit
def _about_warp_means(x, i, length, EVEN: gl.constexpr):
    """The same of a row that one block has, each warp's deviations from the mean of its own first vectors: so its warps
    wait for each other but once. In a cluster, whose blocks wait anyway, that is no faster.
    """
    sums = by_warp(gl.zeros_like(widen(x[0])))
    squares = sums
    mean = gl.sum(by_warp(widen(x[0])), 2)
    of_warp: gl.constexpr = i.shape[1] // gl.num_warps()
    start = gl.arange(0, gl.num_warps(), layout=gl.SliceLayout(0, mean.type.layout))[None, :] * of_warp
    mean /= gl.maximum(held(start, of_warp, length), 1.0)
    count = gl.zeros_like(mean)
    for k in gl.static_range(len(x)):
        count += held(start + k * i.shape[1], of_warp, length)
        j = by_warp(i + k * i.shape[1])
        sums, squares = _with_deviations(sums, squares, by_warp(widen(x[k])), mean[:, :, None], j, length, EVEN)
    lost, square = gl.reduce((sums, squares), 2, add_both)
    found = gl.reduce((count, mean, lost, square), 1, _about_one_mean)
    return (of_rows(found[1], i), of_rows(found[2], i), of_rows(found[3], i))


@gluon.jit
def part_statistics(x, i, length, BLOCK: gl.constexpr, IS_LAYERNORM: gl.constexpr, EVEN: gl.constexpr):
    """Of a block's part x of a row: a mean, and the sums of deviations from it and of their squares; or, not IS_LAYERNORM,
    the sum of squares alone.
    """
    if IS_LAYERNORM and gl.num_ctas() == 1:
        return _about_warp_means(x, i, length, EVEN)
    elif IS_LAYERNORM:
        return _about_a_block_mean(x, i, length, BLOCK, EVEN)
    else:
        squares = gl.zeros_like(widen(x[0]))
        for k in gl.static_range(len(x)):
            value = widen(x[k])
            squares += value * value
        return (gl.sum(squares, 1),)


@gluon.jit
def row_statistics(parts, length, BLOCK: gl.constexpr, IS_LAYERNORM: gl.constexpr):
    """Of a row, (blocks,) each: a mean, by how much the row's differs from it, and the variance or mean square, from
    the statistics of its parts (Chan, Golub and LeVeque 1983).
    """
    mean = parts[0]
    lost = gl.zeros_like(mean)
    square = gl.zeros_like(mean)
    if IS_LAYERNORM:
        for b in gl.static_range(gl.num_ctas()):
            lost += (parts[3 * b] - mean) * held(b * BLOCK, BLOCK, length) + parts[3 * b + 1]
        lost /= length
        for b in gl.static_range(gl.num_ctas()):
            off = parts[3 * b] - mean - lost
            square += parts[3 * b + 2] + off * (off * held(b * BLOCK, BLOCK, length) + 2 * parts[3 * b + 1])
    else:
        for b in gl.static_range(gl.num_ctas()):
            square += parts[b]
    return mean, lost, square / length


@gluon.jit
def held(start, COUNT: gl.constexpr, length):
    """How many of COUNT elements from `start` on a row has."""
    return gl.minimum(gl.maximum(length - start, 0), COUNT).to(gl.float32)


@gluon.jit
def with_next(found, ptr, i, length, WANTED: gl.constexpr, EVEN: gl.constexpr):
    """The tuple `found` of the first vectors of a row or a parameter, and the next of them if it is wanted."""
    if WANTED:
        found += (load(ptr, i + len(found) * i.shape[1], length, 0.0, EVEN),)
    return found


@gluon.jit
def _norm_cluster_kernel(
    out_ptr, sum_ptr, stats_ptr, input_ptr, residual_ptr, weight_ptr, bias_ptr,
    in_stride, residual_stride, count, length, eps,
    IS_LAYERNORM: gl.constexpr, HAS_RESIDUAL: gl.constexpr, SAVE_STATS: gl.constexpr, HAS_WEIGHT: gl.constexpr,
    HAS_BIAS: gl.constexpr, VECTOR: gl.constexpr, DIVISIBILITY: gl.constexpr, BLOCK: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    begin(3 if IS_LAYERNORM else 1)
    length, in_stride = assume_divisible(length, DIVISIBILITY), assume_divisible(in_stride, DIVISIBILITY)
    residual_stride = assume_divisible(residual_stride, DIVISIBILITY)
    row = gl.program_id(0).to(gl.int64)
    i = columns(BLOCK, VECTOR)
    input_ptr += row * in_stride
    residual_ptr += row * residual_stride
    x = ()
    for k in gl.static_range(0, BLOCK, i.shape[1]):
        part = load(input_ptr, i + k, length, 0.0, EVEN)
        if HAS_RESIDUAL:
            residual = load(residual_ptr, i + k, length, 0.0, EVEN)
            part = (widen(part) + widen(residual)).to(part.dtype)
        x += (part,)
    parts = part_statistics(x, i, length, BLOCK, IS_LAYERNORM, EVEN)
    # Weights are asked for a vector ahead, the first before the blocks meet; with biases too, registers would not do.
    weight = with_next((), weight_ptr, i, length, HAS_WEIGHT, EVEN)
    mean, lost, variance = row_statistics(meet(parts), length, BLOCK, IS_LAYERNORM)
    rstd = rstd_of(variance, eps)
    shift = -lost * rstd
    bias = with_next((), bias_ptr, i, length, HAS_BIAS, EVEN)
    if SAVE_STATS:
        write_once(stats_ptr + row, rstd, True)
        if IS_LAYERNORM:
            write_once(stats_ptr + count + row, mean, True)
            write_once(stats_ptr + 2 * count + row, shift, True)
    for k in gl.static_range(len(x)):
        weight = with_next(weight, weight_ptr, i, length, HAS_WEIGHT and k + 1 < len(x), EVEN)
        bias = with_next(bias, bias_ptr, i, length, HAS_BIAS and k + 1 < len(x), EVEN)
        j = i + k * i.shape[1]
        if HAS_RESIDUAL:
            store(sum_ptr + row * length, j, length, x[k], EVEN)
        y = widen_again(x[k])
        if IS_LAYERNORM and y.dtype == out_ptr.dtype.element_ty:
            y = (y - mean[:, None]) * rstd[:, None] + shift[:, None]
        elif IS_LAYERNORM:
            # Of 16 bits, what this rounds is far below their own spacing.
            y = y * rstd[:, None] + (shift - mean * rstd)[:, None]
        else:
            y *= rstd[:, None]
        if HAS_WEIGHT:
            y *= widen(weight[k])
        if HAS_BIAS:
            y += widen(bias[k])
        store(out_ptr + row * length, j, length, y, EVEN)


# ---- host ----------------------------------------------------------------------------------------------------------

#: Rows that are left to `fused`. Past these, layer_norm is the faster here; the others are from 8192 on.
LEFT_TO_FUSED = 2048

_choose = Autotuner(_norm_cluster_kernel)
_launches = LaunchCache()


def _launch(
    kind: Kind,
    tensors: tuple[torch.Tensor, ...],
    strides: tuple[int, int],
    present: tuple[bool, bool],
    eps: float,
    keep: bool,
) -> None:
    x = tensors[3]
    count, length = x.shape
    if persistent_cluster.takes(kind, x, *tensors[5:]):
        persistent_cluster.launch((*tensors[:1], *tensors[2:4], *tensors[5:]), strides[0], present, eps, keep)
        return
    constants = (*kind, keep, *present, cluster.vector_of(x.dtype))

    def make() -> Launch:
        def launch(config) -> Launch:
            arguments = (
                *strides,
                count,
                length,
                eps,
                *constants,
                divisibility_of(length, *strides),
                *config.kwargs.values(),
            )
            return Launch(_norm_cluster_kernel, (count,), arguments, cluster.options(config))

        key = (length, str(x.dtype), *constants, cluster.fills_gpu(count, x.device))
        return _choose.launch(key, cluster.configs(length, x.dtype, 1 + kind.residual), launch, *tensors)

    _launches.run((count, length, strides, constants, x.dtype, x.device, eps), make, tensors)


forward = forward_by(_launch)


def refused(x: torch.Tensor, length: int) -> str | None:
    """Why rows of so many elements of `x` cannot be taken, or None."""
    return unsupported(x) or unsupported_by_gluon(x) or cluster.too_short_or_long(length, LEFT_TO_FUSED + 1, x.dtype)


def ahead_of_time(kind: Kind) -> list[Entry]:
    constants = {
        "IS_LAYERNORM": kind.centred, "HAS_RESIDUAL": kind.residual, "SAVE_STATS": True, "HAS_WEIGHT": True, "HAS_BIAS": kind.centred,
    }  # fmt: skip
    types = {"stats_ptr": "*fp32", "eps": "fp32"}
    return [
        entry(
            _norm_cluster_kernel,
            TYPES[dtype],
            {**constants, "VECTOR": cluster.vector_of(dtype), "DIVISIBILITY": 16},
            cluster.configs(length, dtype, 1 + kind.residual)[0],
            types,
        )
        for dtype, length in ((torch.bfloat16, 131072), (torch.float32, 50000), (torch.bfloat16, 4096))
    ]
