"""Solution of the exercise `matmul`."""

import torch
import triton
import triton.language as tl

from kernel_ladder.exercises import not_plain
from kernel_ladder.table import register

EXERCISE = "matmul"
BLOCK = 32


@triton.jit
def matmul_kernel(c_ptr, a_ptr, b_ptr, M, N, K, BLOCK: tl.constexpr):
    """Grid: (rows of tiles, columns of tiles). One program per BLOCK x BLOCK tile of C. All matrices are row-major."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        # TODO 1: `a`, the tile A[rows, k], and `b`, the tile B[k, columns]. Mask both dimensions of each with zeros.
        # gap
        a = tl.load(a_ptr + rows[:, None] * K + k[None, :], mask=(rows < M)[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(
            b_ptr + k[:, None] * N + columns[None, :], mask=(k < K)[:, None] & (columns < N)[None, :], other=0.0
        )
        # end
        # TODO 2: add the product of the tiles to `acc`, in float32: tl.dot(a, b, acc, input_precision="ieee").
        # gap
        acc = tl.dot(a, b, acc, input_precision="ieee")
        # end
    # TODO 3: store the tile, rounded to C's dtype, where it is inside C.
    # gap
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)
    # end


def matmul(input, other):
    M, K = input.shape
    N = other.shape[1]
    output = torch.empty((M, N), dtype=input.dtype, device=input.device)
    grid = (triton.cdiv(M, BLOCK), triton.cdiv(N, BLOCK))
    matmul_kernel[grid](output, input, other, M, N, K, BLOCK)
    return output, ()


def unsupported(input, other):
    if input.dim() != 2 or other.dim() != 2:
        return "takes two matrices"
    return not_plain(input, other)


register("matmul", "triton.my_matmul", forward=matmul, unsupported=unsupported)
