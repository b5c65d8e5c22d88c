"""Column sums: the gradient of an operand that is broadcast over rows.

Two stages, each in a fixed order, so that results repeat bit by bit. First the programs of an operation's own kernel
sum a group of rows each and store partial sums in float32. Then :func:`sum_partials` sums those.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_impl import multiprocessors
from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.pdl import griddepcontrol_wait
from triton_impl.runtime.launch_cache import CachedKernel

#: Elements of a tile of :func:`sum_partials_kernel`, and the most partials in it. Few columns make few programs, each
#: of which waits for memory once per tile: so tiles are tall.
SUM_TILE = 4096
MAX_TILE_PARTIALS = 512
#: Warps for one tile, for two, for more. Few warps finish one tile soonest, and fit beside the kernel before.
SUM_WARPS = (4, 8, 16)
#: Cost of one more wave of programs, as a part of the time, and the most waves.
WAVE_COST = 0.03
MAX_WAVES = 4


def sum_tile(n_partials: int) -> tuple[int, int]:
    """Partials and columns of a tile."""
    height = min(MAX_TILE_PARTIALS, triton.next_power_of_2(n_partials))
    return height, SUM_TILE // height


def sum_warps(n_partials: int) -> int:
    """Warps of a program that sums so many partials."""
    few, more, many = SUM_WARPS
    return few if n_partials <= MAX_TILE_PARTIALS else more if n_partials <= 2 * MAX_TILE_PARTIALS else many


@triton.jit
def sum_partials_kernel(
    out_ptr, second_out_ptr, partials_ptr, n_partials, n_cols,
    DIVISIBILITY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """out[c] = Σ partials[0, p, c], second_out[c] = Σ partials[1, p, c] over partials p.

    Grid: one program per BLOCK_N columns, first those of `out`, then those of `second_out` if the launch has them.
    Layout: partials are (1 or 2, n_partials, n_cols), float32, dense.
    """
    griddepcontrol_wait(USE_PDL)
    n_cols = assume_divisible(n_cols, DIVISIBILITY)
    column_blocks = tl.cdiv(n_cols, BLOCK_N)
    which = tl.program_id(0) // column_blocks
    col = tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = col < n_cols
    partials_ptr += which.to(tl.int64) * n_partials * n_cols
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, n_partials, BLOCK_M):
        partial = start + tl.arange(0, BLOCK_M)
        mask = (partial < n_partials)[:, None] & col_mask[None, :]
        sums += tl.load(partials_ptr + partial.to(tl.int64)[:, None] * n_cols + col[None, :], mask=mask, other=0.0)
    value = tl.sum(sums, axis=0)
    if which == 0:
        tl.store(out_ptr + col, value.to(out_ptr.dtype.element_ty), mask=col_mask)
    else:
        tl.store(second_out_ptr + col, value.to(second_out_ptr.dtype.element_ty), mask=col_mask)


_sum_partials = {warps: CachedKernel(sum_partials_kernel, num_warps=warps) for warps in SUM_WARPS}


def sum_partials(output: torch.Tensor, partials: torch.Tensor, second: torch.Tensor | None = None) -> None:
    """Write the column sums of `partials` into `output`, (n_cols,), and into `second` if there is one.

    `partials` are (n_partials, n_cols), or (2, n_partials, n_cols) for two outputs, in float32.
    """
    n_partials, n_cols = partials.shape[-2:]
    height, width = sum_tile(n_partials)
    programs = triton.cdiv(n_cols, width) * (1 if second is None else 2)
    tensors = (output, output if second is None else second, partials)
    launch = _sum_partials[sum_warps(n_partials)]
    launch(programs, tensors, (n_partials, n_cols, divisibility_of(n_cols), height, width))


def row_partition(
    n_rows: int, column_blocks: int, programs: int, min_rows: int, device: torch.device
) -> tuple[int, int]:
    """Groups of rows, and rows of each group: at least `min_rows`.

    `programs` run at once on a multiprocessor, and each group has `column_blocks` of them. Programs of a later wave
    wait for memory once more: so all run at once, unless that leaves many multiprocessors idle.
    """
    at_once = multiprocessors(device, 1) * programs

    def used(waves: int) -> float:
        return waves * at_once // column_blocks * column_blocks / (waves * at_once) - WAVE_COST * waves

    wanted = max(range(1, MAX_WAVES + 1), key=used) * at_once // column_blocks
    rows_per_group = triton.cdiv(n_rows, max(1, min(wanted, triton.cdiv(n_rows, min_rows))))
    return triton.cdiv(n_rows, rows_per_group), rows_per_group
