"""Softmax of rows that outgrow one block, in Gluon: a row stays in the registers of a cluster (cluster.py)."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton_impl import cluster
from triton_impl import unsupported as unsupported_by_triton
from triton_impl.aot import Entry, entry
from triton_impl.choosing import Chooser
from triton_impl.cluster import begin, columns, over_row
from triton_impl.gluon import unsupported as unsupported_by_gluon
from triton_impl.tuning import Launch, Launches

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _softmax_cluster_kernel(out_ptr, input_ptr, length, VECTOR: gl.constexpr, BLOCK: gl.constexpr):
    begin()
    start = gl.program_id(0).to(gl.int64) * length
    i = columns(BLOCK, VECTOR)
    inside = i < length
    x = gl.load(input_ptr + start + i, mask=inside, other=-float("inf")).to(gl.float32)
    row_max = over_row(gl.max(x, 1), "max.NaN", True)
    # Past the end stands exp(−inf) = 0, but where all is −inf: that row is NaN with it.
    e = gl.exp2((x - row_max[:, None]) * LOG2E)
    y = e * (1 / over_row(gl.sum(e, 1), "add", False))[:, None]
    gl.store(out_ptr + start + i, y.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _softmax_cluster_backward_kernel(
    grad_input_ptr, grad_ptr, output_ptr, length, VECTOR: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    begin()
    start = gl.program_id(0).to(gl.int64) * length
    i = columns(BLOCK, VECTOR)
    inside = i < length
    grad = gl.load(grad_ptr + start + i, mask=inside, other=0.0)
    y = gl.load(output_ptr + start + i, mask=inside, other=0.0)
    dot = over_row(gl.sum(grad.to(gl.float32) * y.to(gl.float32), 1), "add", True)
    value = y.to(gl.float32) * (grad.to(gl.float32) - dot[:, None])
    gl.store(grad_input_ptr + start + i, value.to(grad_input_ptr.dtype.element_ty), mask=inside)


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
            options = {"num_warps": config.num_warps, "num_ctas": config.num_ctas}
            return Launch(kernel, (count,), (length, vector, config.kwargs["BLOCK"]), options)

        return _choosers[kernel].launch((length, str(output.dtype)), cluster.configs(length), launch, *tensors)

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
    return cluster.too_short_or_long(input.shape[-1], shortest)


def _entry(kernel, dtype: str, vector: int, length: int) -> Entry:
    return entry(kernel, dtype, {"VECTOR": vector}, cluster.configs(length)[0])


AOT = [
    _entry(_softmax_cluster_kernel, "bf16", 8, 65536),
    _entry(_softmax_cluster_kernel, "fp32", 4, 65536),
    _entry(_softmax_cluster_backward_kernel, "bf16", 8, 65536),
]
