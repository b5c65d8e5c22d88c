"""Softmax of rows that outgrow one block, in Gluon: a row stays in the registers of a cluster (cluster.py)."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton_impl import cluster
from triton_impl import unsupported as unsupported_by_triton
from triton_impl.aot import TYPES, Entry, entry
from triton_impl.choosing import Chooser
from triton_impl.cluster import begin, columns, load_part, meet, store, widen, widen_again
from triton_impl.gluon import unsupported as unsupported_by_gluon
from triton_impl.tuning import Launch, Launches

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _softmax_cluster_kernel(
    out_ptr, input_ptr, length, VECTOR: gl.constexpr, BLOCK: gl.constexpr, EVEN: gl.constexpr
):  # fmt: skip
    """Each block sums over a maximum of its own, so that maximum and sum travel together."""
    begin(2)
    start = gl.program_id(0).to(gl.int64) * length
    i = columns(BLOCK, VECTOR)
    x = load_part(input_ptr + start, i, length, -float("inf"), BLOCK, EVEN)
    highest = x[0].to(gl.float32)
    for k in gl.static_range(1, len(x)):
        highest = gl.maximum(highest, x[k].to(gl.float32))
    of_part = gl.max(highest, 1)
    # Of a part that is −inf throughout, as past the row's end, the sum is 0, not NaN.
    over = gl.where(of_part == -float("inf"), 0.0, of_part)
    sums = gl.zeros_like(highest)
    for k in gl.static_range(len(x)):
        sums += gl.exp2((widen_again(x[k]) - over[:, None]) * LOG2E)
    of_all = meet((of_part, gl.sum(sums, 1)))
    row_max = of_all[0]
    for block in gl.static_range(1, gl.num_ctas()):
        row_max = gl.maximum(row_max, of_all[2 * block])
    total = gl.zeros_like(row_max)
    for block in gl.static_range(gl.num_ctas()):
        total += of_all[2 * block + 1] * gl.exp2((of_all[2 * block] - row_max) * LOG2E)
    scale = 1 / total
    for k in gl.static_range(len(x)):
        y = gl.exp2((widen_again(x[k]) - row_max[:, None]) * LOG2E) * scale[:, None]
        store(out_ptr + start, i + k * i.shape[1], length, y, EVEN)


@gluon.jit
def _softmax_cluster_backward_kernel(
    grad_input_ptr, grad_ptr, output_ptr, length, VECTOR: gl.constexpr, BLOCK: gl.constexpr, EVEN: gl.constexpr
):  # fmt: skip
    begin(1)
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

_choosers = {kernel: Chooser(kernel) for kernel in (_softmax_cluster_kernel, _softmax_cluster_backward_kernel)}
_launches = Launches()


def _launch(kernel, *tensors: torch.Tensor) -> None:
    """Launch over the rows of `tensors`, the output first, dense all of them."""
    output = tensors[0]
    length = output.shape[-1]
    count = output.numel() // length
    if count == 0:
        return
    vector = cluster.vector_of(output.dtype)

    def make() -> Launch:
        def launch(config) -> Launch:
            return Launch(kernel, (count,), (length, vector, *config.kwargs.values()), cluster.options(config))

        configs = cluster.configs(length, output.dtype, len(tensors) - 1)
        key = (length, str(output.dtype), cluster.fills_gpu(count, output.device))
        return _choosers[kernel].launch(key, configs, launch, *tensors)

    _launches.run((kernel, count, length, output.dtype, output.device), make, tensors)


def forward(input: torch.Tensor, *, dim: int) -> tuple[torch.Tensor, tuple]:
    output = torch.empty_like(input)
    _launch(_softmax_cluster_kernel, output, input)
    return output, (output,)


def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor]:
    (output,) = saved
    grad_input = torch.empty_like(output)
    _launch(_softmax_cluster_backward_kernel, grad_input, grad.contiguous(), output)
    return (grad_input,)


def unsupported(input: torch.Tensor, *, dim: int, shortest: int) -> str | None:
    """Rows along the last dimension of a dense tensor, from `shortest` elements on."""
    if (reason := unsupported_by_triton(input) or unsupported_by_gluon(input)) is not None:
        return reason
    if input.dim() == 0 or dim % input.dim() != input.dim() - 1 or not input.is_contiguous():
        return "a cluster takes the rows of a contiguous tensor, along its last dimension"
    return cluster.too_short_or_long(input.shape[-1], shortest, input.dtype)


def _entry(kernel, dtype: torch.dtype, operands: int) -> Entry:
    config = cluster.configs(65536, dtype, operands)[0]
    return entry(kernel, TYPES[dtype], {"VECTOR": cluster.vector_of(dtype)}, config)


AOT = [
    _entry(_softmax_cluster_kernel, torch.bfloat16, 1),
    _entry(_softmax_cluster_kernel, torch.float32, 1),
    _entry(_softmax_cluster_backward_kernel, torch.bfloat16, 2),
]
