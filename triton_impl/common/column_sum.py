"""Sums over rows, one a column: the gradient of what is broadcast over rows.

In two stages, each in a fixed order, so that the result is the same in every run: programs add up a share of the rows
each, then a second kernel adds up the shares.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_impl import multiprocessors
from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.pdl import griddepcontrol_wait
from triton_impl.runtime.launch_cache import CachedKernel

#: Elements of a tile of :func:`sum_shares_kernel`, shares of it at most, and warps. Of few columns there are few
#: programs, which wait for memory once a tile: so tiles are tall. Few warps are soonest done with one tile, and find
#: room beside those of the kernel before.
SUM_TILE, MOST_SHARES, SUM_WARPS = 4096, 512, (4, 8, 16)
#: What a turn of programs costs more than one, about, as a part of the time; and turns at most.
TURN, MOST_TURNS = 0.03, 4


def sum_tile(shares: int) -> tuple[int, int]:
    """How many shares and columns of them to add up at once."""
    height = min(MOST_SHARES, triton.next_power_of_2(shares))
    return height, SUM_TILE // height


def sum_warps(shares: int) -> int:
    """How many warps are to add them up: of one tile, of two, of more."""
    few, more, many = SUM_WARPS
    return few if shares <= MOST_SHARES else more if shares <= 2 * MOST_SHARES else many


@triton.jit
def sum_partials_kernel(
    out_ptr, partials_ptr, shares, columns,
    DIVISIBILITY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """out[c] = Σ partials[s, c] over shares s; partials in float32."""
    griddepcontrol_wait(USE_PDL)
    columns = assume_divisible(columns, DIVISIBILITY)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, shares, BLOCK_M):
        share = start + tl.arange(0, BLOCK_M)
        mask = (share < shares)[:, None] & (column < columns)[None, :]
        sums += tl.load(partials_ptr + share.to(tl.int64)[:, None] * columns + column[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + column, tl.sum(sums, axis=0).to(out_ptr.dtype.element_ty), mask=column < columns)


_sum_shares = {warps: CachedKernel(sum_partials_kernel, num_warps=warps) for warps in SUM_WARPS}


def sum_partials(output: torch.Tensor, partials: torch.Tensor) -> None:
    """Write the sums of partials, ``(shares, columns)`` in float32, into `output`, ``(columns,)``."""
    shares, columns = partials.shape
    height, width = sum_tile(shares)
    launch = _sum_shares[sum_warps(shares)]
    launch(triton.cdiv(columns, width), (output, partials), (shares, columns, divisibility_of(columns), height, width))


def row_partition(rows: int, column_blocks: int, programs: int, least: int, device: torch.device) -> tuple[int, int]:
    """How many shares to make of the rows, and how many rows each then has; no share under `least` rows.

    `programs` run at once on a multiprocessor, and `column_blocks` side by side have a share. What begins after others
    have ended waits for memory once more: so all run at once, unless that would leave many multiprocessors idle.
    """
    at_once = multiprocessors(device, 1) * programs

    def used(turns: int) -> float:
        return turns * at_once // column_blocks * column_blocks / (turns * at_once) - TURN * turns

    wanted = max(range(1, MOST_TURNS + 1), key=used) * at_once // column_blocks
    rows_a_share = triton.cdiv(rows, max(1, min(wanted, triton.cdiv(rows, least))))
    return triton.cdiv(rows, rows_a_share), rows_a_share
