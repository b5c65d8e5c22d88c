"""Solution of the exercise `matmul_tiled`."""

import torch
import triton
import triton.language as tl

from kernel_ladder.exercises import not_plain
from kernel_ladder.table import register

EXERCISE = "matmul_tiled"
#: Sizes of a tile, and rows of tiles in a group. On a GPU, try 128 x 128 x 64 with GROUP_M = 8.
BLOCK_M = 32
BLOCK_N = 16
BLOCK_K = 32
GROUP_M = 2


@triton.jit
def matmul_kernel(
    c_ptr, a_ptr, b_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Grid: one program per tile, numbered so that programs that run together share tiles of A and B in L2.

    A group is GROUP_M rows of tiles, and all their columns. Inside a group, tiles go down a column first:
    with GROUP_M = 2 and 3 columns the tiles (m, n) are (0,0) (1,0) (0,1) (1,1) (0,2) (1,2), then (2,0) (3,0) …
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    # TODO 1: `group` and `first_m`, this tile's group and the group's first row of tiles.
    # gap
    group = tile // (GROUP_M * tiles_n)
    first_m = group * GROUP_M
    # end
    # TODO 2: `rows_in_group`: GROUP_M, or fewer in the last group.
    # gap
    rows_in_group = tl.minimum(tiles_m - first_m, GROUP_M)
    # end
    # TODO 3: `tile_m` and `tile_n` of this program.
    # gap
    inside = tile % (GROUP_M * tiles_n)
    tile_m = first_m + inside % rows_in_group
    tile_n = inside // rows_in_group
    # end
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_mask = (rows < M)[:, None] & (k < K)[None, :]
        b_mask = (k < K)[:, None] & (columns < N)[None, :]
        a = tl.load(a_ptr + rows[:, None] * K + k[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + columns[None, :], mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)


def matmul(input, other):
    M, K = input.shape
    N = other.shape[1]
    output = torch.empty((M, N), dtype=input.dtype, device=input.device)
    programs = triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N)
    matmul_kernel[(programs,)](output, input, other, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M)
    return output, ()


def unsupported(input, other):
    if input.dim() != 2 or other.dim() != 2:
        return "takes two matrices"
    return not_plain(input, other)


register("matmul", "triton.my_matmul_tiled", forward=matmul, unsupported=unsupported)
