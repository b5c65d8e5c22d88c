"""Normalised rows that outgrow one block, in Gluon: a row stays in the registers of a cluster (cluster.py).

The backward pass is that of :mod:`triton_impl.norms`, for which the same is kept of each row.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton_impl import cluster, unsupported
from triton_impl.aot import Entry, entry
from triton_impl.choosing import Chooser
from triton_impl.cluster import begin, columns, over_row
from triton_impl.gluon import unsupported as unsupported_by_gluon
from triton_impl.norms import MAX_FUSED, Kind, prepared
from triton_impl.tuning import Launch, Launches


@gluon.jit
def _norm_cluster_kernel(
    out_ptr, sum_ptr, stats_ptr, input_ptr, residual_ptr, weight_ptr, bias_ptr,
    in_stride, residual_stride, count, length, eps,
    CENTRED: gl.constexpr, RESIDUAL: gl.constexpr, KEEP: gl.constexpr,
    HAS_WEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr, VECTOR: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    begin()
    row = gl.program_id(0).to(gl.int64)
    i = columns(BLOCK, VECTOR)
    inside = i < length
    x = gl.load(input_ptr + row * in_stride + i, mask=inside, other=0.0)
    if RESIDUAL:
        residual = gl.load(residual_ptr + row * residual_stride + i, mask=inside, other=0.0)
        x = (x.to(gl.float32) + residual.to(gl.float32)).to(x.dtype)
        gl.store(sum_ptr + row * length + i, x, mask=inside)
    x = x.to(gl.float32)
    # As normalize_rows of norms.py: deviations from the mean, and of float32 what rounding the mean loses.
    SHIFTED: gl.constexpr = CENTRED and out_ptr.dtype.element_ty == gl.float32
    if CENTRED:
        mean = over_row(gl.sum(x, 1), "add", True) / length
        x = gl.where(inside, x - mean[:, None], 0.0)
    squares = over_row(gl.sum(x * x, 1), "add", not CENTRED) / length
    if SHIFTED:
        lost = over_row(gl.sum(x, 1), "add", False) / length
        squares -= lost * lost
    # Rounding may leave a variance a little below zero; NaN stays what it is.
    rstd = gl.rsqrt(gl.where(squares < 0, 0.0, squares) + eps)
    y = x * rstd[:, None]
    if SHIFTED:
        y -= (lost * rstd)[:, None]
    if KEEP:
        # One value a block of the cluster, the same in all: the first of them writes.
        first = gl.arange(0, gl.num_ctas(), layout=rstd.type.layout) == 0
        gl.store(stats_ptr + row + gl.zeros_like(first).to(gl.int32), rstd, mask=first)
        if CENTRED:
            gl.store(stats_ptr + count + row + gl.zeros_like(first).to(gl.int32), mean, mask=first)
            shift = -lost * rstd if SHIFTED else gl.zeros_like(rstd)
            gl.store(stats_ptr + 2 * count + row + gl.zeros_like(first).to(gl.int32), shift, mask=first)
    if HAS_WEIGHT:
        y *= gl.load(weight_ptr + i, mask=inside, other=0.0).to(gl.float32)
    if HAS_BIAS:
        y += gl.load(bias_ptr + i, mask=inside, other=0.0).to(gl.float32)
    gl.store(out_ptr + row * length + i, y.to(out_ptr.dtype.element_ty), mask=inside)


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
            arguments = (*strides, count, length, eps, *constants, config.kwargs["BLOCK"])
            options = {"num_warps": config.num_warps, "num_ctas": config.num_ctas}
            return Launch(_norm_cluster_kernel, (count,), arguments, options)

        key = (length, str(x.dtype), *constants)
        return _choose.launch(key, cluster.configs(length), launch, *tensors)

    _launches.run((count, length, strides, constants, x.dtype, x.device, eps), make, tensors)
    return output, total, stats


def refused(x: torch.Tensor, length: int) -> str | None:
    """Why rows of so many elements of `x` cannot be taken, or None."""
    return unsupported(x) or unsupported_by_gluon(x) or cluster.too_short_or_long(length, MAX_FUSED + 1)


def ahead_of_time(kind: Kind) -> list[Entry]:
    constants = {
        "CENTRED": kind.centred, "RESIDUAL": kind.residual, "KEEP": True, "HAS_WEIGHT": True, "HAS_BIAS": kind.centred,
    }  # fmt: skip
    types = {"stats_ptr": "*fp32", "eps": "fp32"}
    return [
        entry(_norm_cluster_kernel, dtype, {**constants, "VECTOR": vector}, cluster.configs(length)[0], types)
        for dtype, vector, length in (("bf16", 8, 131072), ("fp32", 4, 65536))
    ]
