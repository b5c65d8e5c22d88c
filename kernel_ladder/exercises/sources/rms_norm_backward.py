"""Solution of the exercise `rms_norm_backward`."""

import torch
import triton
import triton.language as tl

from kernel_ladder.exercises import not_plain
from kernel_ladder.semantics.norms import eps_or_default
from kernel_ladder.table import register

EXERCISE = "rms_norm_backward"
LONGEST_ROW = 8192
#: Programs of the backward pass. Each goes through every PROGRAMS-th row. On a GPU, try two per multiprocessor.
PROGRAMS = 4


@triton.jit
def forward_kernel(out_ptr, rstd_ptr, input_ptr, weight_ptr, n_cols, eps, BLOCK: tl.constexpr):
    """Given. Grid: one program per row. Keeps one number per row, rstd, for the backward pass."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < n_cols
    x = tl.load(input_ptr + row * n_cols + columns, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(x * x, axis=0) / n_cols + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(out_ptr + row * n_cols + columns, (x * rstd * weight).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    grad_input_ptr, partial_ptr, grad_ptr, input_ptr, weight_ptr, rstd_ptr, n_rows, n_cols, BLOCK: tl.constexpr
):
    """Grid: PROGRAMS programs. Program p takes rows p, p + PROGRAMS, … and leaves its share of the weight's gradient
    in row p of `partial_ptr`, a float32 matrix. Rows of x and of the gradient are read once.
    """
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < n_cols
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([BLOCK], tl.float32)
    for row in range(program, n_rows, tl.num_programs(0)):
        i = tl.cast(row, tl.int64) * n_cols + columns
        x = tl.load(input_ptr + i, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + i, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normalized = x * rstd
        # TODO 1: add this row's share, grad · normalized, to `grad_weight`.
        # gap
        grad_weight += grad * normalized
        # end
        # TODO 2: `grad_input` = rstd · (g − normalized · mean(g · normalized)) with g = grad · weight.
        # gap
        g = grad * weight
        mean = tl.sum(g * normalized, axis=0) / n_cols
        grad_input = rstd * (g - normalized * mean)
        # end
        tl.store(grad_input_ptr + i, grad_input.to(grad_input_ptr.dtype.element_ty), mask=mask)
    # TODO 3: store `grad_weight` in row `program` of `partial_ptr`.
    # gap
    tl.store(partial_ptr + program * n_cols + columns, grad_weight, mask=mask)
    # end


def forward(input, weight, *, normalized_shape, eps):
    n_cols = input.shape[-1]
    rows = input.numel() // n_cols
    output = torch.empty_like(input)
    rstd = torch.empty(rows, dtype=torch.float32, device=input.device)
    eps = eps_or_default(eps, input.dtype)
    forward_kernel[(rows,)](output, rstd, input, weight, n_cols, eps, triton.next_power_of_2(n_cols))
    return output, (input, weight, rstd)


def backward(saved, grad, needs):
    input, weight, rstd = saved
    n_cols = input.shape[-1]
    rows = input.numel() // n_cols
    grad = grad.contiguous()
    grad_input = torch.empty_like(input)
    partial = torch.empty((PROGRAMS, n_cols), dtype=torch.float32, device=input.device)
    block = triton.next_power_of_2(n_cols)
    backward_kernel[(PROGRAMS,)](grad_input, partial, grad, input, weight, rstd, rows, n_cols, block)
    # TODO 4: `grad_weight`, the sum of the programs' shares, in the weight's dtype.
    # gap
    grad_weight = partial.sum(0).to(weight.dtype)
    # end
    return grad_input, grad_weight


def unsupported(input, weight, *, normalized_shape, eps):
    if weight is None or len(normalized_shape) != 1:
        return "takes a weight, and rows of one dimension"
    if input.shape[-1] > LONGEST_ROW:
        return f"takes rows of at most {LONGEST_ROW} elements"
    return not_plain(input, weight, backward=True)


register("rms_norm", "triton.my_rms_norm_backward", forward=forward, backward=backward, unsupported=unsupported)
