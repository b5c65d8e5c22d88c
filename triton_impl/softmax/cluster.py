"""softmax, rung 4 of 4: cluster

Idea      One thread-block cluster per row. Each block keeps its part of the row in registers; the blocks exchange their
          maximum and sum through distributed shared memory. A row that one block can hold has that block alone.
          In Gluon, for Hopper.
Predicts  2·N·sizeof(T) bytes per row at lengths where `fused` runs out of registers.
Limit now One row per cluster: each waits once for its row and once for the exchange.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernel_ladder.tracing import shapes_only
from triton_impl import unsupported as unsupported_by_triton
from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.fast_math import LOG2E
from triton_impl.common.gluon import cluster
from triton_impl.common.gluon.cluster import (
    as_row_values,
    column_index,
    exchange,
    init_exchange,
    load_vectors,
    rewiden,
    split_by_warp,
    store,
    widen,
)
from triton_impl.common.gluon.requirements import unsupported as unsupported_by_gluon
from triton_impl.runtime.aot import TYPES, Entry, entry
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.launch_cache import Launch, LaunchCache


@gluon.jit
def _finite(highest):
    """A maximum that can be subtracted: a part that is −inf throughout, as past a row's end, then sums to 0."""
    return gl.where(highest == -float("inf"), 0.0, highest)


@gluon.jit
def merge_states(highest, total, other_highest, other_total):
    """Merges the online softmax states of two parts of a row: maximum, and Σ exp(x − maximum)."""
    both = gl.maximum(highest, other_highest)
    over = _finite(both)
    total = total * gl.exp2((highest - over) * LOG2E) + other_total * gl.exp2((other_highest - over) * LOG2E)
    return both, total


@gluon.jit
def _softmax_cluster_kernel(
    out_ptr, input_ptr, n_cols,
    VECTOR: gl.constexpr, DIVISIBILITY: gl.constexpr, BLOCK: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """y = exp(x − max x) / Σ exp(x − max x). Each warp sums about its own maximum, so that both are exchanged at once.

    Grid: one cluster per row. Layout: dense rows; each block of the cluster holds BLOCK columns in registers.
    """
    init_exchange(2)
    n_cols = assume_divisible(n_cols, DIVISIBILITY)
    start = gl.program_id(0).to(gl.int64) * n_cols
    i = column_index(BLOCK, VECTOR)
    x = load_vectors(input_ptr + start, i, n_cols, -float("inf"), BLOCK, EVEN)
    highest = x[0].to(gl.float32)
    for k in gl.static_range(1, len(x)):
        highest = gl.maximum(highest, x[k].to(gl.float32))
    of_warp = gl.max(split_by_warp(highest), 2)
    over = _finite(of_warp)
    sums = gl.zeros_like(split_by_warp(highest))
    for k in gl.static_range(len(x)):
        sums += gl.exp2((split_by_warp(rewiden(x[k])) - over[:, :, None]) * LOG2E)
    found = gl.reduce((of_warp, gl.sum(sums, 2)), 1, merge_states)
    of_all = exchange((as_row_values(found[0], i), as_row_values(found[1], i)))
    row_max = of_all[0]
    total = of_all[1]
    for block in gl.static_range(1, gl.num_ctas()):
        row_max, total = merge_states(row_max, total, of_all[2 * block], of_all[2 * block + 1])
    scale = 1 / total
    for k in gl.static_range(len(x)):
        y = gl.exp2((rewiden(x[k]) - row_max[:, None]) * LOG2E) * scale[:, None]
        store(out_ptr + start, i + k * i.shape[1], n_cols, y, EVEN)


@gluon.jit
def _softmax_cluster_backward_kernel(
    grad_input_ptr, grad_ptr, output_ptr, n_cols,
    VECTOR: gl.constexpr, DIVISIBILITY: gl.constexpr, BLOCK: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """dx = y · (dy − Σ y·dy). Grid and layout as the forward kernel's, of two operands."""
    init_exchange(1)
    n_cols = assume_divisible(n_cols, DIVISIBILITY)
    start = gl.program_id(0).to(gl.int64) * n_cols
    i = column_index(BLOCK, VECTOR)
    grad = load_vectors(grad_ptr + start, i, n_cols, 0.0, BLOCK, EVEN)
    y = load_vectors(output_ptr + start, i, n_cols, 0.0, BLOCK, EVEN)
    sums = widen(grad[0]) * widen(y[0])
    for k in gl.static_range(1, len(y)):
        sums += widen(grad[k]) * widen(y[k])
    of_all = exchange((gl.sum(sums, 1),))
    dot = of_all[0]
    for block in gl.static_range(1, gl.num_ctas()):
        dot += of_all[block]
    for k in gl.static_range(len(y)):
        value = rewiden(y[k]) * (rewiden(grad[k]) - dot[:, None])
        store(grad_input_ptr + start, i + k * i.shape[1], n_cols, value, EVEN)


# ---- host ----------------------------------------------------------------------------------------------------------

#: The shortest rows: of 16-bit elements the smallest block of :func:`triton_impl.common.gluon.cluster.configs` needs
#: more than 2048.
MIN_COLS = 2049

_forward, _backward = Autotuner(_softmax_cluster_kernel), Autotuner(_softmax_cluster_backward_kernel)
_launches = LaunchCache()


def _launch(autotuner: Autotuner, *tensors: torch.Tensor) -> None:
    """Launch over the rows of `tensors`, the output first. All are dense."""
    output = tensors[0]
    if shapes_only():
        return
    n_cols = output.shape[-1]
    n_rows = output.numel() // n_cols
    if n_rows == 0:
        return
    arguments = (n_cols, cluster.vector_of(output.dtype), divisibility_of(n_cols))

    def make() -> Launch:
        def launch(config) -> Launch:
            return Launch(autotuner.kernel, (n_rows,), (*arguments, *config.kwargs.values()), cluster.options(config))

        configs = cluster.configs(n_cols, output.dtype, len(tensors) - 1)
        key = (n_cols, str(output.dtype), cluster.fills_gpu(n_rows, output.device))
        return autotuner.launch(key, configs, launch, *tensors)

    _launches.run((autotuner, n_rows, n_cols, output.dtype, output.device), make, tensors)


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
    """Why a call cannot be taken, or None: rows along the last dimension of a dense tensor can."""
    if (reason := unsupported_by_triton(input) or unsupported_by_gluon(input)) is not None:
        return reason
    if input.dim() == 0 or dim % input.dim() != input.dim() - 1 or not input.is_contiguous():
        return "a cluster takes the rows of a contiguous tensor, along its last dimension"
    return cluster.length_unsupported(input.shape[-1], MIN_COLS, input.dtype)


def _entry(kernel, dtype: torch.dtype, operands: int, n_cols: int = 65536) -> Entry:
    config = cluster.configs(n_cols, dtype, operands)[0]
    return entry(kernel, TYPES[dtype], {"VECTOR": cluster.vector_of(dtype), "DIVISIBILITY": 16}, config)


AOT = [
    _entry(_softmax_cluster_kernel, torch.bfloat16, 1),
    _entry(_softmax_cluster_kernel, torch.bfloat16, 1, 16384),
    _entry(_softmax_cluster_kernel, torch.float32, 1),
    _entry(_softmax_cluster_backward_kernel, torch.bfloat16, 2),
]
