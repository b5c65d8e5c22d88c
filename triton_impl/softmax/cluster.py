"""Softmax in Gluon: a row stays in the registers of a block, or, if it outgrows one, of a cluster (cluster.py)."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernel_ladder.tracing import shapes_only
from triton_impl import unsupported as unsupported_by_triton
from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.gluon import cluster
from triton_impl.common.gluon.cluster import (
    begin,
    by_warp,
    columns,
    load_part,
    meet,
    of_rows,
    store,
    widen,
    widen_again,
)
from triton_impl.common.gluon.requirements import unsupported as unsupported_by_gluon
from triton_impl.runtime.aot import TYPES, Entry, entry
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.launch_cache import Launch, LaunchCache

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _finite(highest):
    """A maximum to subtract: of what is −inf throughout, as past a row's end, the sum is then 0, not NaN."""
    return gl.where(highest == -float("inf"), 0.0, highest)


@gluon.jit
def _sum_over_both(highest, total, other_highest, other_total):
    """Of two parts of a row the maximum and the sum over it, from those of each."""
    both = gl.maximum(highest, other_highest)
    over = _finite(both)
    total = total * gl.exp2((highest - over) * LOG2E) + other_total * gl.exp2((other_highest - over) * LOG2E)
    return both, total


@gluon.jit
def _softmax_cluster_kernel(
    out_ptr, input_ptr, length, VECTOR: gl.constexpr, DIVISIBILITY: gl.constexpr, BLOCK: gl.constexpr, EVEN: gl.constexpr
):  # fmt: skip
    """Each warp sums over a maximum of its own, so that maximum and sum travel together."""
    begin(2)
    length = assume_divisible(length, DIVISIBILITY)
    start = gl.program_id(0).to(gl.int64) * length
    i = columns(BLOCK, VECTOR)
    x = load_part(input_ptr + start, i, length, -float("inf"), BLOCK, EVEN)
    highest = x[0].to(gl.float32)
    for k in gl.static_range(1, len(x)):
        highest = gl.maximum(highest, x[k].to(gl.float32))
    of_warp = gl.max(by_warp(highest), 2)
    over = _finite(of_warp)
    sums = gl.zeros_like(by_warp(highest))
    for k in gl.static_range(len(x)):
        sums += gl.exp2((by_warp(widen_again(x[k])) - over[:, :, None]) * LOG2E)
    found = gl.reduce((of_warp, gl.sum(sums, 2)), 1, _sum_over_both)
    of_all = meet((of_rows(found[0], i), of_rows(found[1], i)))
    row_max = of_all[0]
    total = of_all[1]
    for block in gl.static_range(1, gl.num_ctas()):
        row_max, total = _sum_over_both(row_max, total, of_all[2 * block], of_all[2 * block + 1])
    scale = 1 / total
    for k in gl.static_range(len(x)):
        y = gl.exp2((widen_again(x[k]) - row_max[:, None]) * LOG2E) * scale[:, None]
        store(out_ptr + start, i + k * i.shape[1], length, y, EVEN)


@gluon.jit
def _softmax_cluster_backward_kernel(
    grad_input_ptr, grad_ptr, output_ptr, length,
    VECTOR: gl.constexpr, DIVISIBILITY: gl.constexpr, BLOCK: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    begin(1)
    length = assume_divisible(length, DIVISIBILITY)
    start = gl.program_id(0).to(gl.int64) * length
    i = columns(BLOCK, VECTOR)
    grad = load_part(grad_ptr + start, i, length, 0.0, BLOCK, EVEN)
    y = load_part(output_ptr + start, i, length, 0.0, BLOCK, EVEN)
    sums = widen(grad[0]) * widen(y[0])
    for k in gl.static_range(1, len(y)):
        sums += widen(grad[k]) * widen(y[k])
    of_all = meet((gl.sum(sums, 1),))
    dot = of_all[0]
    for block in gl.static_range(1, gl.num_ctas()):
        dot += of_all[block]
    for k in gl.static_range(len(y)):
        value = widen_again(y[k]) * (widen_again(grad[k]) - dot[:, None])
        store(grad_input_ptr + start, i + k * i.shape[1], length, value, EVEN)


# ---- host ----------------------------------------------------------------------------------------------------------

#: Rows that are left to `fused`, which has them as fast.
LEFT_TO_FUSED = 8192

_forward, _backward = Autotuner(_softmax_cluster_kernel), Autotuner(_softmax_cluster_backward_kernel)
_launches = LaunchCache()


def _launch(chooser: Autotuner, *tensors: torch.Tensor) -> None:
    """Launch over the rows of `tensors`, the output first, dense all of them."""
    output = tensors[0]
    if shapes_only():
        return
    length = output.shape[-1]
    count = output.numel() // length
    if count == 0:
        return
    arguments = (length, cluster.vector_of(output.dtype), divisibility_of(length))

    def make() -> Launch:
        def launch(config) -> Launch:
            return Launch(chooser.kernel, (count,), (*arguments, *config.kwargs.values()), cluster.options(config))

        configs = cluster.configs(length, output.dtype, len(tensors) - 1)
        key = (length, str(output.dtype), cluster.fills_gpu(count, output.device))
        return chooser.launch(key, configs, launch, *tensors)

    _launches.run((chooser, count, length, output.dtype, output.device), make, tensors)


def forward(input: torch.Tensor, *, dim: int) -> tuple[torch.Tensor, tuple]:
    output = torch.empty_like(input)
    _launch(_forward, output, input)
    return output, (output,)


def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor]:
    (output,) = saved
    grad_input = torch.empty_like(output)
    _launch(_backward, grad_input, grad.contiguous(), output)
    return (grad_input,)


def unsupported(input: torch.Tensor, *, dim: int) -> str | None:
    """Rows along the last dimension of a dense tensor, but those that are left to `fused`."""
    if (reason := unsupported_by_triton(input) or unsupported_by_gluon(input)) is not None:
        return reason
    if input.dim() == 0 or dim % input.dim() != input.dim() - 1 or not input.is_contiguous():
        return "a cluster takes the rows of a contiguous tensor, along its last dimension"
    return cluster.too_short_or_long(input.shape[-1], LEFT_TO_FUSED + 1, input.dtype)


def _entry(kernel, dtype: torch.dtype, operands: int, length: int = 65536) -> Entry:
    config = cluster.configs(length, dtype, operands)[0]
    return entry(kernel, TYPES[dtype], {"VECTOR": cluster.vector_of(dtype), "DIVISIBILITY": 16}, config)


AOT = [
    _entry(_softmax_cluster_kernel, torch.bfloat16, 1),
    _entry(_softmax_cluster_kernel, torch.bfloat16, 1, 16384),
    _entry(_softmax_cluster_kernel, torch.float32, 1),
    _entry(_softmax_cluster_backward_kernel, torch.bfloat16, 2),
]
