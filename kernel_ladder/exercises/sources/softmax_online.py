"""Solution of the exercise `softmax_online`."""

import torch
import triton
import triton.language as tl

from kernel_ladder.exercises import not_plain
from kernel_ladder.table import register

EXERCISE = "softmax_online"
BLOCK = 256


@triton.jit
def softmax_online_kernel(out_ptr, input_ptr, n_cols, BLOCK: tl.constexpr):
    """Grid: one program per row. The row is too long for registers: it is read block by block, twice."""
    row = tl.program_id(0).to(tl.int64)
    input_ptr += row * n_cols
    out_ptr += row * n_cols
    columns = tl.arange(0, BLOCK)
    # First pass: the running maximum and the running sum of exp(x - maximum), updated together.
    row_max = -float("inf")
    row_sum = 0.0
    for start in range(0, n_cols, BLOCK):
        i = start + columns
        x = tl.load(input_ptr + i, mask=i < n_cols, other=-float("inf")).to(tl.float32)
        # TODO 1: `new_max`, the maximum of all that has been read.
        # gap
        new_max = tl.maximum(row_max, tl.max(x, axis=0))
        # end
        # TODO 2: the new `row_sum`. The old one was made with `row_max`: rescale it, then add this block's sum.
        # gap
        row_sum = row_sum * tl.exp(row_max - new_max) + tl.sum(tl.exp(x - new_max), axis=0)
        # end
        row_max = new_max
    # Second pass: read the row again and write the quotients.
    for start in range(0, n_cols, BLOCK):
        i = start + columns
        # TODO 3: load the block, compute exp(x - row_max) / row_sum, round and store.
        # gap
        x = tl.load(input_ptr + i, mask=i < n_cols, other=-float("inf")).to(tl.float32)
        y = tl.exp(x - row_max) / row_sum
        tl.store(out_ptr + i, y.to(out_ptr.dtype.element_ty), mask=i < n_cols)
        # end


def softmax(input, *, dim):
    rows, n_cols = input.shape
    output = torch.empty_like(input)
    softmax_online_kernel[(rows,)](output, input, n_cols, BLOCK)
    return output, ()


def unsupported(input, *, dim):
    if input.dim() != 2 or dim != -1:
        return "takes matrices with dim=-1"
    return not_plain(input)


register("softmax", "triton.my_softmax_online", forward=softmax, unsupported=unsupported)
