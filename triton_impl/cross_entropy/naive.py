"""cross_entropy, rung 1 of 2: naive

Idea      One program per row: a pass for the maximum, one for the sum of exponentials; the label's logit is one load.
          The backward pass recomputes the probabilities.
Predicts  N·sizeof(T) bytes per row from memory and N·sizeof(T) more from L2; backward one read and one write.
Limit now The second read, and a reduction across threads between the passes.
Next      `online`: maximum and sum in one pass.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.cross_entropy import class_dim
from triton_impl.cross_entropy import rows
from triton_impl.cross_entropy.rows import Options, counts, gradient_of_loss, passes, settled
from triton_impl.runtime.aot import entry
from triton_impl.runtime.launch_cache import FUSED

#: Columns of a block, of 8 warps.
BLOCK_N = 4096
WARPS = 8


@triton.jit
def _cross_entropy_naive_kernel(
    input_ptr, target_ptr, losses_ptr, stats_ptr, n_rows, n_cols, ignore_index, BLOCK_N: tl.constexpr
):
    """loss = log Σ exp(x − max x) + max x − x_label. Grid: one program per row. Layout: dense rows, dense labels."""
    row = tl.program_id(0).to(tl.int64)
    input_ptr += row * n_cols
    label = tl.load(target_ptr + row)
    length = tl.where(counts(label, n_cols, ignore_index), n_cols, 0)
    col = tl.arange(0, BLOCK_N)
    highest = tl.full([BLOCK_N], -float("inf"), tl.float32)
    for start in range(0, length, BLOCK_N):
        x = tl.load(input_ptr + start + col, mask=start + col < n_cols, other=-float("inf"))
        highest = tl.maximum(highest, x.to(tl.float32))
    row_max = tl.max(highest, axis=0)
    sums = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, length, BLOCK_N):
        x = tl.load(input_ptr + start + col, mask=start + col < n_cols, other=-float("inf"))
        sums += tl.exp(x.to(tl.float32) - row_max)
    row_sum = tl.sum(sums, axis=0)
    of_label = tl.load(input_ptr + tl.where(length > 0, label, 0)).to(tl.float32)
    loss = settled(tl.log(row_sum) + (row_max - of_label), label, n_cols, ignore_index)
    tl.store(losses_ptr + row, loss.to(losses_ptr.dtype.element_ty))
    tl.store(stats_ptr + row, row_max)
    tl.store(stats_ptr + n_rows + row, row_sum)


@triton.jit
def _cross_entropy_backward_naive_kernel(
    grad_input_ptr, input_ptr, target_ptr, grad_ptr, stats_ptr, count_ptr, n_rows, n_cols, ignore_index, grad_stride,
    MEAN: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dx = g · (exp(x − max x) / Σ exp(x − max x) − [x is the label's]). Grid: one program per row."""
    row = tl.program_id(0).to(tl.int64)
    input_ptr += row * n_cols
    grad_input_ptr += row * n_cols
    label = tl.load(target_ptr + row)
    length = tl.where(counts(label, n_cols, ignore_index), n_cols, 0)
    grad = gradient_of_loss(grad_ptr + row * grad_stride, count_ptr, MEAN)
    row_max = tl.load(stats_ptr + row)
    scale = 1 / tl.load(stats_ptr + n_rows + row)
    for start in range(0, n_cols, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        x = tl.load(input_ptr + col, mask=col < length, other=0.0).to(tl.float32)
        value = grad * (tl.exp(x - row_max) * scale - (col == label).to(tl.float32))
        value = tl.where(col < length, value, 0.0).to(grad_input_ptr.dtype.element_ty)
        tl.store(grad_input_ptr + col, value, mask=col < n_cols)


# ---- host ----------------------------------------------------------------------------------------------------------


def _forward(
    input: torch.Tensor, target: torch.Tensor, losses: torch.Tensor, stats: torch.Tensor, options: Options
) -> None:
    n_rows, n_cols = target.numel(), input.shape[-1]
    arguments = (n_rows, n_cols, options.ignore_index)
    _cross_entropy_naive_kernel[(n_rows,)](
        input, target, losses, stats, *arguments, BLOCK_N=BLOCK_N, num_warps=WARPS, **FUSED
    )


def _backward(
    grad_input: torch.Tensor,
    input: torch.Tensor,
    target: torch.Tensor,
    grad: torch.Tensor,
    stats: torch.Tensor,
    count: torch.Tensor,
    options: Options,
) -> None:
    n_rows, n_cols = target.numel(), input.shape[-1]
    (grad_stride,) = grad.stride() or (0,)
    arguments = (n_rows, n_cols, options.ignore_index, grad_stride, options.reduction == "mean")
    _cross_entropy_backward_naive_kernel[(n_rows,)](
        grad_input, input, target, grad, stats, count, *arguments, BLOCK_N=BLOCK_N, num_warps=WARPS, **FUSED
    )


PASSES = passes(_forward, _backward)


def unsupported(input: torch.Tensor, target: torch.Tensor, **options: Any) -> str | None:
    if (reason := rows.unsupported(input, target)) is not None:
        return reason
    if input.dim() > 2 or not input.is_contiguous() or not target.is_contiguous():
        return "takes the rows of a contiguous matrix, and contiguous labels"
    if options["label_smoothing"] or options["z_loss"]:
        return "takes neither label smoothing nor a z-loss"
    if input.shape[class_dim(input)] >= 2**31:
        return "takes fewer than 2³¹ classes"
    return None


_TYPES = {"target_ptr": "*i64", "stats_ptr": "*fp32"}
_CONFIG = triton.Config({"BLOCK_N": BLOCK_N}, num_warps=WARPS)
AOT = [
    entry(_cross_entropy_naive_kernel, "bf16", {}, _CONFIG, {**_TYPES, "losses_ptr": "*fp32"}),
    entry(_cross_entropy_backward_naive_kernel, "bf16", {"MEAN": True}, _CONFIG, {**_TYPES, "count_ptr": "*fp32"}),
]
