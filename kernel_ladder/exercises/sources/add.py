"""Solution of the exercise `add`."""

import torch
import triton
import triton.language as tl

from kernel_ladder.exercises import not_plain
from kernel_ladder.table import register

EXERCISE = "add"
BLOCK = 1024


@triton.jit
def add_kernel(out_ptr, input_ptr, other_ptr, numel, BLOCK: tl.constexpr):
    """Grid: one program per BLOCK elements."""
    # TODO 1: `i`, the indices of this program's elements. Program 0 takes 0 … BLOCK-1, program 1 the next BLOCK, …
    # gap
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # end
    # TODO 2: `x` and `y`, loaded at these indices, converted to float32. The last program may overhang: mask the loads.
    # gap
    mask = i < numel
    x = tl.load(input_ptr + i, mask=mask).to(tl.float32)
    y = tl.load(other_ptr + i, mask=mask).to(tl.float32)
    # end
    # TODO 3: store x + y at `out_ptr + i`, converted to out_ptr.dtype.element_ty, with the same mask.
    # gap
    tl.store(out_ptr + i, (x + y).to(out_ptr.dtype.element_ty), mask=mask)
    # end


def add(input, other):
    output = torch.empty_like(input)
    numel = output.numel()
    # TODO 4: `programs`, how many programs cover `numel` elements. Round up.
    # gap
    programs = triton.cdiv(numel, BLOCK)
    # end
    add_kernel[(programs,)](output, input, other, numel, BLOCK)
    return output, ()  # the output, and what a backward would need: nothing, there is none


def unsupported(input, other):
    if input.shape != other.shape:
        return "takes operands of one shape"
    return not_plain(input, other)


register("add", "triton.my_add", forward=add, unsupported=unsupported)
