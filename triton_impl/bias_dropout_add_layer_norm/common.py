"""Shared by the rungs of bias_dropout_add_layer_norm: the sum before the norm, operands, and the gradient of dropout.

    s = residual + dropout(input + bias)        y = layer_norm(s) · weight + norm_bias

Backward, LayerNorm's gradient is that of s. One more kernel, the same for every rung, draws the dropout mask again for
the gradients of input and bias; :mod:`triton_impl.common.column_sum` adds up the partial sums of the bias's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.norms import as_parameter
from kernel_ladder.tracing import shapes_only
from triton_impl.common.column_sum import row_partition, sum_partials
from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.elementwise import tile_of
from triton_impl.common.philox import ARGUMENTS, factors_at, factors_of_rows
from triton_impl.norm.common import as_matrix
from triton_impl.runtime.aot import Entry, entry
from triton_impl.runtime.launch_cache import CachedKernel, LaunchCache

#: Of the dropout gradient's kernel: elements of a tile, its columns at most, warps, and programs per multiprocessor.
TILE = 2048
TILE_COLS = 256
WARPS = 4
PROGRAMS = 7

#: Key, threshold and scale of a dropout mask: see :func:`triton_impl.common.philox.arguments`.
Mask = tuple[int, int, int, float]


# ---- device functions ----------------------------------------------------------------------------------------------


@triton.jit
def dropout_factors(
    row, col, start, n_cols, key_low, key_high, threshold, scale, EIGHTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Dropout's factors, 0 or `scale`, of BLOCK columns from `start` on.

    EIGHTS: eight divides n_cols, and one call of Philox serves eight elements. Else each element has its own call.
    """
    if EIGHTS:
        return factors_of_rows(row * (n_cols // 8) + start // 8, key_low, key_high, threshold, scale, BLOCK)
    else:
        return factors_at(row[:, None] * n_cols + col[None, :], key_low, key_high, threshold, scale)


@triton.jit
def residual_sum(
    input_ptr, bias_ptr, residual_ptr, row, start, key_low, key_high, threshold, scale,
    in_stride, residual_stride, n_rows, n_cols, EIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """s of BLOCK columns from `start` on, rounded to the dtype; zeros past the end of a row."""
    col = start + tl.arange(0, BLOCK)
    col_mask = col < n_cols
    mask = (row < n_rows)[:, None] & col_mask[None, :]
    x = tl.load(input_ptr + row[:, None] * in_stride + col[None, :], mask=mask, other=0.0)
    residual = tl.load(residual_ptr + row[:, None] * residual_stride + col[None, :], mask=mask, other=0.0)
    bias = tl.load(bias_ptr + col, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    factors = dropout_factors(row, col, start, n_cols, key_low, key_high, threshold, scale, EIGHTS, BLOCK)
    return (residual.to(tl.float32) + (x.to(tl.float32) + bias) * factors).to(x.dtype)


@triton.jit(do_not_specialize=ARGUMENTS)
def _dropout_backward_kernel(
    grad_input_ptr, partials_ptr, grad_ptr, key_low, key_high, threshold, scale, n_rows, n_cols, rows_per_group,
    DIVISIBILITY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """d input = ds · factors, and partial sums of it over a group of rows.

    Grid: one program per group of rows and block of BLOCK_N columns, columns fastest. Layout: dense rows; partials are
    (groups, n_cols), float32.
    """
    n_cols = assume_divisible(n_cols, DIVISIBILITY)
    column_blocks = tl.cdiv(n_cols, BLOCK_N)
    group = (tl.program_id(0) // column_blocks).to(tl.int64)
    start = (tl.program_id(0) % column_blocks) * BLOCK_N
    col = start + tl.arange(0, BLOCK_N)
    end = tl.minimum((group + 1) * rows_per_group, n_rows)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first_row in range(group * rows_per_group, end, BLOCK_M):
        row = tl.cast(first_row, tl.int64) + tl.arange(0, BLOCK_M)
        mask = (row < end)[:, None] & (col < n_cols)[None, :]
        offsets = row[:, None] * n_cols + col[None, :]
        grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        grad *= dropout_factors(
            row, col, start, n_cols, key_low, key_high, threshold, scale, DIVISIBILITY >= 8, BLOCK_N
        )  # fmt: skip
        tl.store(grad_input_ptr + offsets, grad.to(grad_input_ptr.dtype.element_ty), mask=mask)
        sums += grad
    tl.store(partials_ptr + group * n_cols + col, tl.sum(sums, axis=0), mask=col < n_cols)


# ---- host ----------------------------------------------------------------------------------------------------------

#: ``forward(save_stats, mask, eps, *inputs)`` → output, sum, stats.
Forward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def forward_by(first_launch: Callable[..., Any]) -> Forward:
    """A rung's forward pass. ``first_launch(tensors, strides, present, eps, save_stats, mask)`` runs the first call of
    its kind and returns the launch, which serves all others.

    `tensors` are output, sum, stats, input, bias, residual, weight and norm_bias; `strides` those of the rows of input
    and residual; `present` tells whether there are weight and norm_bias.
    """
    launches = LaunchCache()

    def forward(
        save_stats: bool, mask: Mask, eps: float, *inputs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output, sum and LayerNorm's saved statistics. Without `save_stats` the sum is the output's memory.

        The output has the input's shape and is no view, because autograd forbids in-place changes of returned views.
        """
        input, bias, residual, weight, norm_bias = inputs
        x, r = as_matrix(input), as_matrix(residual)
        b, w, n = map(as_parameter, (bias, weight, norm_bias))
        n_rows, n_cols = x.shape
        output = x.new_empty(input.shape)
        total = x.new_empty((n_rows, n_cols)) if save_stats else output
        stats = x.new_empty((3, n_rows if save_stats else 0), dtype=torch.float32)
        if not shapes_only() and x.numel() > 0:
            # An absent parameter is replaced by the bias. The kernel does not read it.
            tensors = (output, total, stats, x, b, r, b if w is None else w, b if n is None else n)
            present = (w is not None, n is not None)
            strides = (x.stride(0), r.stride(0)) if n_rows > 1 else (n_cols, n_cols)  # a single row has any stride
            launches.run(
                (save_stats, n_rows, n_cols, strides, present, x.dtype, x.device, eps),
                lambda: first_launch(tensors, strides, present, eps, save_stats, mask),
                tensors,
                mask,
            )
        return output, total, stats

    return forward


_dropout_backward = CachedKernel(_dropout_backward_kernel, num_warps=WARPS)


def dropout_backward(grad: torch.Tensor, mask: Mask) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of input and bias from that of the sum, (n_rows, n_cols)."""
    n_rows, n_cols = grad.shape
    grad_input, grad_bias = torch.empty_like(grad), grad.new_empty((n_cols,))
    if shapes_only():
        return grad_input, grad_bias
    if grad.numel() == 0:
        return grad_input, grad_bias.zero_()
    _, width = tile_of(n_cols, TILE_COLS)
    height = TILE // width
    column_blocks = triton.cdiv(n_cols, width)
    groups, rows_per_group = row_partition(n_rows, column_blocks, PROGRAMS, 2 * height, grad.device)
    partials = torch.empty((groups, n_cols), dtype=torch.float32, device=grad.device)
    arguments = (n_rows, n_cols, rows_per_group, divisibility_of(n_cols), height, width)
    _dropout_backward(groups * column_blocks, (grad_input, partials, grad), arguments, mask)
    sum_partials(grad_bias, partials)
    return grad_input, grad_bias


# ---- ahead of time -------------------------------------------------------------------------------------------------

FLAGS = {"HAS_WEIGHT": True, "HAS_BIAS": True, "EIGHTS": True, "DIVISIBILITY": 16}
_FLOATS = {"stats_ptr": "*fp32", "partials_ptr": "*fp32", "scale": "fp32", "eps": "fp32"}


def entry_of(kernel: Any, warps: int, constants: dict[str, Any], **tuned: int) -> Entry:
    """A specialisation for bfloat16."""
    types = {name: type for name, type in _FLOATS.items() if name in kernel.arg_names}
    return entry(kernel, "bf16", constants, triton.Config(tuned, num_warps=warps, num_stages=1), types)


def ahead_of_time() -> list[Entry]:
    """A specialisation that stands for the calls of :func:`dropout_backward`."""
    tile = {"BLOCK_M": TILE // TILE_COLS, "BLOCK_N": TILE_COLS}
    return [entry_of(_dropout_backward_kernel, WARPS, {"DIVISIBILITY": 16}, **tile)]
