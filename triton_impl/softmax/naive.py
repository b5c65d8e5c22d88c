"""softmax, rung 1 of 4: naive

Idea      One program per row. The whole row is one block of registers, so global memory is read once and written once.
Predicts  2·N·sizeof(T) bytes per row.
Limit now One row per program: short rows leave most lanes of a block idle, and a row ends where registers do.
Next      `online`: loop over a row of any length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_ladder.tracing import shapes_only
from triton_impl import unsupported as unsupported_by_triton
from triton_impl.runtime.aot import entry
from triton_impl.runtime.launch_cache import FUSED
from triton_impl.runtime.row_configs import warps_of_row

#: The longest row: 32 float32 values per thread at 16 warps.
MAX_COLS = 16384


@triton.jit
def _softmax_kernel(out_ptr, input_ptr, n_cols, BLOCK_N: tl.constexpr):
    """y = exp(x − max x) / Σ exp(x − max x). Grid: one program per row. Layout: dense rows of n_cols elements."""
    row_start = tl.program_id(0).to(tl.int64) * n_cols
    col = tl.arange(0, BLOCK_N)
    col_mask = col < n_cols
    x = tl.load(input_ptr + row_start + col, mask=col_mask, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(out_ptr + row_start + col, y.to(out_ptr.dtype.element_ty), mask=col_mask)


@triton.jit
def _softmax_backward_kernel(grad_input_ptr, grad_ptr, output_ptr, n_cols, BLOCK_N: tl.constexpr):
    """dx = y · (dy − Σ y·dy). Grid: one program per row. Layout: dense rows of n_cols elements."""
    row_start = tl.program_id(0).to(tl.int64) * n_cols
    col = tl.arange(0, BLOCK_N)
    col_mask = col < n_cols
    grad = tl.load(grad_ptr + row_start + col, mask=col_mask, other=0.0).to(tl.float32)
    y = tl.load(output_ptr + row_start + col, mask=col_mask, other=0.0).to(tl.float32)
    grad_input = y * (grad - tl.sum(y * grad, axis=0))
    tl.store(grad_input_ptr + row_start + col, grad_input.to(grad_input_ptr.dtype.element_ty), mask=col_mask)


def _launch(kernel, *tensors: torch.Tensor) -> None:
    """Launch over the rows of `tensors`, the output first."""
    numel, n_cols = tensors[0].numel(), tensors[0].shape[-1]
    if shapes_only() or numel == 0:
        return
    block = triton.next_power_of_2(n_cols)
    kernel[(numel // n_cols,)](*tensors, n_cols, BLOCK_N=block, num_warps=warps_of_row(block), **FUSED)


def forward(input: torch.Tensor, *, dim: int) -> tuple[torch.Tensor, tuple]:
    output = torch.empty_like(input)
    _launch(_softmax_kernel, output, input)
    return output, (output,)


def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor]:
    (output,) = saved
    grad_input = torch.empty_like(output)
    _launch(_softmax_backward_kernel, grad_input, grad.contiguous(), output)
    return (grad_input,)


def unsupported(input: torch.Tensor, *, dim: int) -> str | None:
    if (reason := unsupported_by_triton(input)) is not None:
        return reason
    if input.dim() == 0 or dim % input.dim() != input.dim() - 1 or not input.is_contiguous():
        return "takes the rows of a contiguous tensor, along its last dimension"
    if input.shape[-1] > MAX_COLS:
        return f"takes rows of at most {MAX_COLS} elements, got {input.shape[-1]}"
    return None


AOT = [
    entry(kernel, "bf16", {}, triton.Config({"BLOCK_N": block}, num_warps=warps_of_row(block)))
    for kernel in (_softmax_kernel, _softmax_backward_kernel)
    for block in (1024, MAX_COLS)
]
