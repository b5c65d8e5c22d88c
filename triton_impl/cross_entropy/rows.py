"""Shared by `naive` and `online`: how a row's label counts, the sum over rows, and the host code of both passes.

The forward pass keeps two float32 numbers per row, its maximum and its sum of exponentials. The backward pass
recomputes the probabilities from them. Their log-sum-exp alone would lose digits where logits are large.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.cross_entropy import LossOptions, rows_of
from kernel_ladder.semantics.strides import collapse
from kernel_ladder.tracing import shapes_only
from triton_impl import unsupported as unsupported_by_triton
from triton_impl.common.elementwise import MAX_DIMS, indexing, offset_of
from triton_impl.common.pdl import griddepcontrol_wait
from triton_impl.runtime.aot import entry
from triton_impl.runtime.launch_cache import CachedKernel

#: Rows per iteration of the sum over rows.
SUM_BLOCK = 8192


# ---- device functions ----------------------------------------------------------------------------------------------


@triton.jit
def counts(label, n_cols, ignore_index):
    """Whether a row is read: its label is a class, and not the one to ignore."""
    return (label >= 0) & (label < n_cols) & (label != ignore_index)


@triton.jit
def settled(loss, label, n_cols, ignore_index):
    """A row's loss: zero where it is ignored, and NaN where its label is no class."""
    loss = tl.where((label >= 0) & (label < n_cols), loss, float("nan"))
    return tl.where(label == ignore_index, 0.0, loss)


@triton.jit
def gradient_of_loss(grad_ptr, count_ptr, MEAN: tl.constexpr):
    """The gradient of a row's loss, where that of the result is at `grad_ptr`."""
    grad = tl.load(grad_ptr).to(tl.float32)
    return grad / tl.load(count_ptr) if MEAN else grad


@triton.jit
def _cross_entropy_sum_kernel(
    losses_ptr, target_ptr, output_ptr, count_ptr, n_rows, ignore_index, size1, size2, size3, t0, t1, t2, t3,
    MEAN: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Adds up the rows' losses; for a mean divides by the number of rows that are not ignored, and writes it.

    Grid: one program, so that every run gives the same bits. Layout: float32 losses in row-major order; the labels are
    found from a row's number through sizes and strides.
    """
    griddepcontrol_wait(USE_PDL)
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = row < n_rows
        total += tl.load(losses_ptr + row, mask=mask, other=0.0)
        if MEAN:
            offset = offset_of(row.to(tl.int64), size1, size2, size3, t0, t1, t2, t3)
            label = tl.load(target_ptr + offset, mask=mask, other=0)
            count += (mask & (label != ignore_index)).to(tl.int32)
    result = tl.sum(total, axis=0)
    if MEAN:
        rows = tl.sum(count, axis=0).to(tl.float32)
        tl.store(count_ptr, rows)
        result = tl.div_rn(result, rows)
    tl.store(output_ptr, result.to(output_ptr.dtype.element_ty))


# ---- host ----------------------------------------------------------------------------------------------------------

#: By the dtype of the output: a kernel's launches are cached by that of its first tensor, here float32 always.
_sum_of = defaultdict(lambda: CachedKernel(_cross_entropy_sum_kernel, num_warps=16))


class Options(LossOptions):
    """A call's options, as kernels take them."""

    def numbers(self, n_cols: int) -> tuple[int, float, float, float]:
        """(ignore_index, share of the label, share of each class, factor of the z-loss)"""
        share = float(self.label_smoothing)
        return self.ignore_index, 1 - share, share / n_cols, float(self.z_loss)

    def constants(self) -> dict[str, bool]:
        return {"SMOOTHED": self.label_smoothing != 0, "PENALIZED": self.z_loss != 0}


#: ``forward(input, target, losses, stats, options)`` and ``backward(grad_input, input, target, grad, stats, count,
#: options)`` launch a rung's kernels over at least one row. `input` and `grad_input` have their classes last.
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Options], None]
Backward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Options], None]


def launch_sum(
    output: torch.Tensor, count: torch.Tensor, losses: torch.Tensor, target: torch.Tensor, options: Options
) -> None:
    """Write the sum or mean of the rows' losses, and with a mean the number of rows that it divides by."""
    sizes = (target.numel(), options.ignore_index, *indexing(target))
    arguments = (*sizes, options.reduction == "mean", SUM_BLOCK)
    _sum_of[output.dtype](1, (losses, target, output, count), arguments)


def passes(launch_forward: Forward, launch_backward: Backward) -> dict[str, Callable[..., Any]]:
    """A rung's ``forward`` and ``backward``."""

    def forward(
        input: torch.Tensor, target: torch.Tensor, *, wide_loss: bool = False, **named: Any
    ) -> tuple[torch.Tensor, tuple]:
        options, n_rows = Options(**named), target.numel()
        result_shape = () if options.reduced else target.shape
        output = torch.empty(result_shape, dtype=torch.float32 if wide_loss else input.dtype, device=input.device)
        # Maximum and sum of each row, and the number of rows that a mean divides by.
        stats = torch.empty(2 * n_rows, dtype=torch.float32, device=input.device)
        count = torch.empty((), dtype=torch.float32, device=input.device)
        saved = (input, target, stats, count, *options)
        if shapes_only():
            return output, saved
        losses = torch.empty(n_rows, dtype=torch.float32, device=input.device) if options.reduced else output
        if n_rows:
            launch_forward(rows_of(input), target, losses, stats, options)
        if options.reduced:
            launch_sum(output, count, losses, target, options)
        return output, saved

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, None]:
        input, target, stats, count, *named = saved
        options = Options(*named)
        if not needs[0]:
            return None, None
        grad_input = torch.empty_like(input)
        if shapes_only() or target.numel() == 0:
            return grad_input, None
        grad = grad.expand(target.shape)
        x, gradient = rows_of(input), rows_of(grad_input)
        if grad.dim() > MAX_DIMS:  # its strides are autograd's, which no `unsupported` has seen
            grad = grad.contiguous()
        launch_backward(gradient, x, target, grad, stats, count, options)
        return grad_input, None

    return {"forward": forward, "backward": backward}


def unsupported(input: torch.Tensor, target: torch.Tensor, **options: Any) -> str | None:
    """Why no kernel here takes a call, or None."""
    if (reason := unsupported_by_triton(input)) is not None:
        return reason
    if target.dim() <= MAX_DIMS:
        return None
    strides = [rows_of(x).stride()[:-1] for x in (input, torch.empty_like(input, device="meta"))]
    dense = torch.empty(target.shape, device="meta").stride()
    dims = len(collapse(target.shape, *strides, target.stride(), dense)[0])
    if dims > MAX_DIMS:
        return f"rows whose strides do not collapse to {MAX_DIMS} dimensions (these need {dims})"
    return None


_SUM = {**dict.fromkeys(("size1", "size2", "size3"), 1), "BLOCK": SUM_BLOCK}
_SUM_TYPES = {"losses_ptr": "*fp32", "target_ptr": "*i64", "count_ptr": "*fp32"}
AOT = [
    entry(_cross_entropy_sum_kernel, "bf16", {**_SUM, "MEAN": mean}, triton.Config({}, num_warps=16), _SUM_TYPES)
    for mean in (True, False)
]
