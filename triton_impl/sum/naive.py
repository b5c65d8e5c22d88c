"""sum, rung 1 of 2: naive

Idea      One program per row. It walks over its row block by block and adds the blocks element by element; one
          reduction across threads follows at the end.
Predicts  numel · itemsize bytes read once: memory-bound where there are many rows.
Limit now One program per row leaves a GPU idle where rows are few, and a long row is one chain of additions.
Next      `two_stage`: several rows per program, several programs per long row, and sums down columns.

Takes rows of one contiguous tensor, summed over their last dimension, at most MAX_LENGTH elements each.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.reduction import Dim, reduced_dims, spread, sum_shape
from kernel_ladder.tracing import shapes_only
from triton_impl import unsupported as unsupported_by_triton
from triton_impl.runtime.launch_cache import FUSED

#: Elements that a program loads at a time: 8 per thread of 4 warps.
BLOCK = 1024
#: The longest row, in elements. Each lane adds MAX_LENGTH / BLOCK values in float32, in one chain.
MAX_LENGTH = 2**16


@triton.jit
def _sum_naive_kernel(out_ptr, input_ptr, n_cols, BLOCK: tl.constexpr):
    """``out[row] = Σ_j input[row, j]``, in float32.

    Grid: (rows,). Layout: `input` (rows, n_cols) contiguous, `out` (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.load(input_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty))


def sum(input: torch.Tensor, *, dim: Dim, keepdim: bool) -> tuple[torch.Tensor, tuple]:
    dims = reduced_dims(dim, input.dim())
    output = torch.empty(sum_shape(input.shape, dims, keepdim), dtype=input.dtype, device=input.device)
    if output.numel() and not shapes_only():
        _sum_naive_kernel[(output.numel(),)](output, input, input.numel() // output.numel(), BLOCK, **FUSED)
    return output, (input.shape, dims, keepdim)


def sum_backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor]:
    """The gradient of every summand is the gradient of its sum: a view, without a kernel."""
    return (spread(grad, *saved),)


def unsupported(input: torch.Tensor, *, dim: Dim, keepdim: bool) -> str | None:
    """Why the call is not a sum over contiguous rows, or None."""
    if (reason := unsupported_by_triton(input)) is not None:
        return reason
    dims = reduced_dims(dim, input.dim())
    if dims != tuple(range(input.dim() - len(dims), input.dim())):
        return "sums over the last dimensions only; `two_stage` takes any"
    if not input.is_contiguous():
        return "takes contiguous tensors only; `two_stage` takes any strides"
    length = math.prod([input.shape[d] for d in dims])
    if length > MAX_LENGTH:
        return f"one program would add up {length} elements; rows have at most {MAX_LENGTH}"
    return None
