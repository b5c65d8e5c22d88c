"""Normalised rows that outgrow one block, in Gluon: a row stays in the registers of a cluster (cluster.py).

The backward pass is that of :mod:`triton_impl.norms`, for which the same is kept of each row.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton_impl import cluster, unsupported
from triton_impl.aot import TYPES, Entry, entry
from triton_impl.choosing import Chooser
from triton_impl.cluster import begin, columns, keep, load, meet, store
from triton_impl.gluon import unsupported as unsupported_by_gluon
from triton_impl.norms import MAX_FUSED, Kind, prepared
from triton_impl.tuning import Launch, Launches


@gluon.jit
def _mean_square(x, length):
    """The mean of a row's squares, (blocks,), from a block's part x of it."""
    squares = gl.zeros_like(x[0].to(gl.float32))
    for k in gl.static_range(len(x)):
        value = x[k].to(gl.float32)
        squares += value * value
    of_all = meet((gl.sum(squares, 1),))
    square = of_all[0]
    for block in gl.static_range(1, gl.num_ctas()):
        square += of_all[block]
    return square / length


@gluon.jit
def _mean_and_variance(x, i, length, BLOCK: gl.constexpr, EXACT: gl.constexpr, EVEN: gl.constexpr):
    """A mean, by how much the row's differs from it, and the row's variance, (blocks,) each, from a block's part x.

    A block's sums are about a mean of its own (Chan, Golub and LeVeque 1983), so that blocks meet once. EXACT: what
    rounding that mean loses is not lost.
    """
    sums = x[0].to(gl.float32)
    for k in gl.static_range(1, len(x)):
        sums += x[k].to(gl.float32)
    mean = gl.sum(sums, 1)
    block = gl.arange(0, gl.num_ctas(), layout=mean.type.layout)
    mean /= gl.maximum(_held(block, length, BLOCK), 1.0)
    squares = gl.zeros_like(sums)
    sums = gl.zeros_like(sums)
    for k in gl.static_range(len(x)):
        deviation = keep(x[k]).to(gl.float32) - mean[:, None]
        if not EVEN:
            deviation = gl.where(i + k * i.shape[1] < length, deviation, 0.0)
        if EXACT:
            sums += deviation
        squares += deviation * deviation
    of_all = meet((mean, gl.sum(squares, 1), gl.sum(sums, 1) if EXACT else gl.zeros_like(mean)))
    # About the first block's mean, from which the row's is off by `lost`.
    mean = of_all[0]
    lost = of_all[2]
    for b in gl.static_range(1, gl.num_ctas()):
        lost += (of_all[3 * b] - mean) * _held(b, length, BLOCK) + of_all[3 * b + 2]
    lost /= length
    square = gl.zeros_like(mean)
    for b in gl.static_range(gl.num_ctas()):
        off = of_all[3 * b] - mean - lost
        square += of_all[3 * b + 1] + off * (off * _held(b, length, BLOCK) + 2 * of_all[3 * b + 2])
    return mean, lost, square / length


@gluon.jit
def _held(block, length, BLOCK: gl.constexpr):
    """How many elements of a row a block has."""
    return gl.minimum(gl.maximum(length - block * BLOCK, 0), BLOCK).to(gl.float32)


@gluon.jit
def _rstd(variance, eps):
    # Rounding may leave a variance a little below zero; NaN stays what it is.
    return gl.rsqrt(gl.where(variance < 0, 0.0, variance) + eps)


@gluon.jit
def _write_once(ptr, value):
    """Write a value (blocks,) that all blocks have: the first of them does."""
    block = gl.arange(0, gl.num_ctas(), layout=value.type.layout)
    gl.store(ptr + gl.zeros_like(block), value, mask=block == 0)


@gluon.jit
def _norm_cluster_kernel(
    out_ptr, sum_ptr, stats_ptr, input_ptr, residual_ptr, weight_ptr, bias_ptr,
    in_stride, residual_stride, count, length, eps,
    CENTRED: gl.constexpr, RESIDUAL: gl.constexpr, KEEP: gl.constexpr, HAS_WEIGHT: gl.constexpr,
    HAS_BIAS: gl.constexpr, VECTOR: gl.constexpr, BLOCK: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    begin(3 if CENTRED else 1)
    row = gl.program_id(0).to(gl.int64)
    i = columns(BLOCK, VECTOR)
    input_ptr += row * in_stride
    residual_ptr += row * residual_stride
    x = ()
    for k in gl.static_range(0, BLOCK, i.shape[1]):
        part = load(input_ptr, i + k, length, 0.0, EVEN)
        if RESIDUAL:
            residual = load(residual_ptr, i + k, length, 0.0, EVEN)
            part = keep((part.to(gl.float32) + residual.to(gl.float32)).to(part.dtype))
        x += (part,)
    EXACT: gl.constexpr = CENTRED and out_ptr.dtype.element_ty == gl.float32
    if CENTRED:
        mean, lost, variance = _mean_and_variance(x, i, length, BLOCK, EXACT, EVEN)
        rstd = _rstd(variance, eps)
        shift = -lost * rstd
    else:
        rstd = _rstd(_mean_square(x, length), eps)
    if KEEP:
        _write_once(stats_ptr + row, rstd)
        if CENTRED:
            _write_once(stats_ptr + count + row, mean)
            _write_once(stats_ptr + 2 * count + row, shift)
    for k in gl.static_range(len(x)):
        j = i + k * i.shape[1]
        x_k = keep(x[k])
        if RESIDUAL:
            store(sum_ptr + row * length, j, length, x_k, EVEN)
        y = x_k.to(gl.float32)
        if CENTRED:
            y = (y - mean[:, None]) * rstd[:, None] + shift[:, None]
        else:
            y *= rstd[:, None]
        if HAS_WEIGHT:
            y *= load(weight_ptr, j, length, 0.0, EVEN).to(gl.float32)
        if HAS_BIAS:
            y += load(bias_ptr, j, length, 0.0, EVEN).to(gl.float32)
        store(out_ptr + row * length, j, length, y, EVEN)


# ---- host ----------------------------------------------------------------------------------------------------------

_choose = Chooser(_norm_cluster_kernel)
_launches = Launches()


def forward(
    kind: Kind,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``norms.forward``."""
    tensors, strides, present = prepared(kind, x, residual, weight, bias, keep)
    output, total, stats = tensors[:3]
    count, length = x.shape
    if output.numel() == 0:
        return output, total, stats
    constants = (*kind, keep, *present, cluster.vector_of(x.dtype))

    def make() -> Launch:
        def launch(config) -> Launch:
            arguments = (*strides, count, length, eps, *constants, *config.kwargs.values())
            return Launch(_norm_cluster_kernel, (count,), arguments, cluster.options(config))

        key = (length, str(x.dtype), *constants)
        return _choose.launch(key, cluster.configs(length, x.dtype, 1 + kind.residual), launch, *tensors)

    _launches.run((count, length, strides, constants, x.dtype, x.device, eps), make, tensors)
    return output, total, stats


def refused(x: torch.Tensor, length: int) -> str | None:
    """Why rows of so many elements of `x` cannot be taken, or None."""
    return unsupported(x) or unsupported_by_gluon(x) or cluster.too_short_or_long(length, MAX_FUSED + 1, x.dtype)


def ahead_of_time(kind: Kind) -> list[Entry]:
    constants = {
        "CENTRED": kind.centred, "RESIDUAL": kind.residual, "KEEP": True, "HAS_WEIGHT": True, "HAS_BIAS": kind.centred,
    }  # fmt: skip
    types = {"stats_ptr": "*fp32", "eps": "fp32"}
    return [
        entry(
            _norm_cluster_kernel,
            TYPES[dtype],
            {**constants, "VECTOR": cluster.vector_of(dtype)},
            cluster.configs(length, dtype, 1 + kind.residual)[0],
            types,
        )
        for dtype, length in ((torch.bfloat16, 131072), (torch.float32, 50000))
    ]
