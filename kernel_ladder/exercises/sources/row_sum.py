"""Solution of the exercise `row_sum`."""

import torch
import triton
import triton.language as tl

from kernel_ladder.exercises import not_plain
from kernel_ladder.table import register

EXERCISE = "row_sum"
BLOCK = 1024


@triton.jit
def row_sum_kernel(out_ptr, input_ptr, n_cols, BLOCK: tl.constexpr):
    """Grid: one program per row. A row may be longer than BLOCK: the program loops over it."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    # TODO 1: `partial`, a block of BLOCK sums in float32 that starts at zero.
    # gap
    partial = tl.zeros([BLOCK], tl.float32)
    # end
    for start in range(0, n_cols, BLOCK):
        # TODO 2: add columns start … start + BLOCK - 1 of the row to `partial`. What is past the row's end adds zero.
        # gap
        i = start + columns
        x = tl.load(input_ptr + row * n_cols + i, mask=i < n_cols, other=0.0)
        partial += x.to(tl.float32)
        # end
    # TODO 3: reduce `partial` to one number and store it in out_ptr[row].
    # gap
    total = tl.sum(partial, axis=0)
    tl.store(out_ptr + row, total.to(out_ptr.dtype.element_ty))
    # end


def row_sum(input, *, dim, keepdim):
    rows, n_cols = input.shape
    output = torch.empty(rows, dtype=input.dtype, device=input.device)
    row_sum_kernel[(rows,)](output, input, n_cols, BLOCK)
    return output, ()


def unsupported(input, *, dim, keepdim):
    if input.dim() != 2 or dim != -1 or keepdim:
        return "takes matrices with dim=-1 and keepdim=False"
    return not_plain(input)


register("sum", "triton.my_row_sum", forward=row_sum, unsupported=unsupported)
