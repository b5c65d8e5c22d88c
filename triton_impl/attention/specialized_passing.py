"""What the kernels of `warp_specialized`'s gradients share: shared memory, schedule, and the producer's fetches.

A consumer keeps 64 rows of two operands, and tiles of two others pass by. Programs are persistent: while a consumer
stores a gradient, the producer fetches what it keeps next, and the other consumer computes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from triton_impl import multiprocessors
from triton_impl.attention.call import Call
from triton_impl.attention.tiles import BELOW_DIAGONAL
from triton_impl.attention.warp_specialized import _barriers, _fetch_tile, _programs

#: Rows that a consumer keeps, and consumers.
KEPT = gl.constexpr(64)
CONSUMERS = gl.constexpr(2)
CONSUMER_REGISTERS = gl.constexpr(240)
#: Rows of a program's tile.
BLOCK = gl.constexpr(CONSUMERS.value * KEPT.value)

#: Rows that pass by at a time, and stages.
Tile = tuple[int, int]


class _Smem(NamedTuple):
    """Two operands that consumers keep, a tile each, two that pass by in stages, and their barriers."""

    kept: Any  # keys and values: keys; queries and dO: queries
    kept_other: Any
    passing: Any
    passing_other: Any
    kept_full: Any
    kept_empty: Any
    full: Any
    empty: Any


# gl.warp_specialize passes named tuples on as plain ones.


@gluon.jit
def _smem_of(x):
    return _Smem(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7])


@gluon.jit
def _allocate(
    kept_desc, kept_other_desc, desc, other_desc,
    BLOCK_D: gl.constexpr, BLOCK_OTHER: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = kept_desc.dtype
    smem = _Smem(
        gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, KEPT, BLOCK_D], kept_desc.layout),
        gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, KEPT, BLOCK_OTHER], kept_other_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, BLOCK_D], desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, BLOCK_OTHER], other_desc.layout),
        _barriers(CONSUMERS, 1),
        _barriers(CONSUMERS, 1),
        _barriers(STAGES, 1),
        _barriers(STAGES, CONSUMERS),
    )
    fence_async_shared()
    return smem


@gluon.jit
def _fetch_kept(kept_desc, kept_other_desc, smem, iteration, b, head, row):
    """Fetch what each consumer keeps, once it has read what it kept before."""
    D: gl.constexpr = smem.kept.shape[4]
    OTHER_D: gl.constexpr = smem.kept_other.shape[4]
    for j in gl.static_range(CONSUMERS):
        full = smem.kept_full.index(j)
        mbarrier.wait(smem.kept_empty.index(j), (iteration & 1) ^ 1)
        mbarrier.expect(full, KEPT * (D + OTHER_D) * 2)
        _fetch_tile(kept_desc, [b, head, row + j * KEPT, 0], full, smem.kept.index(j))
        _fetch_tile(kept_other_desc, [b, head, row + j * KEPT, 0], full, smem.kept_other.index(j))


@gluon.jit
def _fetch_passing(desc, other_desc, smem, step, b, head, begin, tiles):
    """Fetch `tiles` tiles from row `begin` on, the first as number `step` of all; returns the next number."""
    STAGES: gl.constexpr = smem.passing.shape[0]
    ROWS: gl.constexpr = smem.passing.shape[3]
    D: gl.constexpr = smem.passing.shape[4]
    OTHER_D: gl.constexpr = smem.passing_other.shape[4]
    for t in range(tiles):
        stage = step % STAGES
        full = smem.full.index(stage)
        mbarrier.wait(smem.empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full, ROWS * (D + OTHER_D) * 2)
        _fetch_tile(desc, [b, head, begin + t * ROWS, 0], full, smem.passing.index(stage))
        _fetch_tile(other_desc, [b, head, begin + t * ROWS, 0], full, smem.passing_other.index(stage))
        step += 1
    return step


@gluon.jit
def _issue(kept, passing, COLUMNS: gl.constexpr):
    """Issue the product of a kept tile with a transposed one that passes by; the result is in flight."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    nothing = gl.full([KEPT, COLUMNS], 0.0, gl.float32, layout)
    return warpgroup_mma(kept, passing.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _load_lse(pointer, rows, seqlen_q):
    """Log-sum-exps of queries; +inf, which makes weights 0, of those outside and those that see nothing."""
    lse = gl.load(pointer + rows, mask=rows < seqlen_q, other=float("inf"))
    return gl.where(lse == -float("inf"), float("inf"), lse)


@gluon.jit
def _store_rows(pointer, acc, start, stride_row, rows, columns, dtype: gl.constexpr):
    layout: gl.constexpr = acc.type.layout
    row = start + gl.arange(0, KEPT, layout=gl.SliceLayout(1, layout))
    col = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    inside = (row < rows)[:, None] & (col < columns)[None, :]
    gl.store(pointer + (row.to(gl.int64)[:, None] * stride_row + col[None, :]), acc.to(dtype), mask=inside)


# ---- host ----------------------------------------------------------------------------------------------------------


def configs(tiles: tuple[Tile, ...]) -> list[triton.Config]:
    return [triton.Config({"ROWS": rows, "STAGES": stages}, num_warps=4, num_stages=1) for rows, stages in tiles]


def programs(call: Call, of: torch.Tensor, heads_per_section: int) -> tuple[int, int]:
    """As :func:`triton_impl.attention.warp_specialized._programs`, of the rows of `of`."""
    batch, heads, rows, _ = of.shape
    tiles, is_causal = triton.cdiv(rows, BLOCK.value), call.kind == BELOW_DIAGONAL
    return _programs(tiles, batch * heads, heads_per_section, is_causal, multiprocessors(of.device, 1))
