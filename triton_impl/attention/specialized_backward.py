"""Gradients of `warp_specialized`'s attention on Hopper, in Gluon.

Idea      As in the forward pass a producer warp has the copy engine fetch tiles, and two consumer warpgroups compute.
          For dK and dV a consumer keeps 64 keys and their values, and the queries and dO of every head that shares them
          pass by. Scores are transposed: weights and dS are operands of dV and dK in registers, never in shared memory.
          For dQ a consumer keeps 64 queries and their dO, and keys and values pass by.
Kernels   `_delta_kernel` of ``delta.py``, `_of_keys_kernel` for dK and dV, `_of_queries_kernel` for dQ.
Limit now Seven products where five suffice, as in ``backward.py``: each kernel recomputes S and dP.

    dV = Pᵀ dO      dP = dO Vᵀ      dS = P ∘ (dP − delta)      dQ = scale · dS K      dK = scale · dSᵀ Q

Head dimensions up to 128: the sums of dK and dV, in float32, take 128 registers of a thread there. Wider heads have the
kernels of ``backward.py``. A gradient that no descriptor describes, as that of a sum, is copied.
"""

# ruff: noqa: RUF005 — inside a kernel tuples are joined by + alone

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernel_ladder.semantics.strides import has_rows_at
from kernel_ladder.spec import Output
from triton_impl.attention import backward
from triton_impl.attention.call import Call
from triton_impl.attention.delta import launch_delta
from triton_impl.attention.tiles import BELOW_DIAGONAL, LOG2_E, section, seqlen_class
from triton_impl.attention.warp_specialized import (
    PRODUCER_REGISTERS,
    _barriers,
    _described,
    _exp2,
    _fetch_tile,
    _key_range,
    _seen,
    _tile,
)
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.descriptor_launch import DescriptorLaunch, unaligned

#: Rows that a consumer keeps, and consumers.
KEPT = gl.constexpr(64)
CONSUMERS = gl.constexpr(2)
CONSUMER_REGISTERS = gl.constexpr(240)
#: The widest head dimension, padded.
WIDEST = 128

#: (rows that pass by at a time, stages) to time, by the wider head dimension.
KEY_TILES = {64: ((64, 4), (64, 2)), 128: ((64, 2), (32, 4))}
QUERY_TILES = {64: ((128, 2), (64, 4)), 128: ((64, 2), (64, 3))}


class _Smem(NamedTuple):
    """Two operands that consumers keep, a tile each, two that pass by in stages, and their barriers."""

    kept: Any  # keys and values: keys; queries and dO: queries
    kept_other: Any
    passing: Any
    passing_other: Any
    kept_full: Any
    full: Any
    empty: Any


class _Sizes(NamedTuple):
    """Lengths and the band of keys that a query sees (attention.tiles.apply_mask)."""

    seqlen_q: Any
    seqlen_k: Any
    first: Any
    last: Any


# gl.warp_specialize passes named tuples on as plain ones.


@gluon.jit
def _smem_of(x):
    return _Smem(x[0], x[1], x[2], x[3], x[4], x[5], x[6])


@gluon.jit
def _sizes_of(x):
    return _Sizes(x[0], x[1], x[2], x[3])


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
        _barriers(1, 1),
        _barriers(STAGES, 1),
        _barriers(STAGES, CONSUMERS),
    )
    fence_async_shared()
    return smem


@gluon.jit
def _producer(kept_desc, kept_other_desc, desc, other_desc, smem, b, kept_head, kept_row, head, heads, begin, tiles):
    """Fetch what consumers keep, then the tiles that pass by: `tiles` from row `begin` on of each of `heads` heads."""
    smem = _smem_of(smem)
    STAGES: gl.constexpr = smem.passing.shape[0]
    ROWS: gl.constexpr = smem.passing.shape[3]
    D: gl.constexpr = smem.passing.shape[4]
    OTHER_D: gl.constexpr = smem.passing_other.shape[4]
    kept_full = smem.kept_full.index(0)
    mbarrier.expect(kept_full, CONSUMERS * KEPT * (D + OTHER_D) * 2)
    for j in gl.static_range(CONSUMERS):
        _fetch_tile(kept_desc, [b, kept_head, kept_row + j * KEPT, 0], kept_full, smem.kept.index(j))
        _fetch_tile(kept_other_desc, [b, kept_head, kept_row + j * KEPT, 0], kept_full, smem.kept_other.index(j))
    step = 0
    for i in range(heads):
        for t in range(tiles):
            stage = step % STAGES
            full = smem.full.index(stage)
            mbarrier.wait(smem.empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full, ROWS * (D + OTHER_D) * 2)
            _fetch_tile(desc, [b, head + i, begin + t * ROWS, 0], full, smem.passing.index(stage))
            _fetch_tile(other_desc, [b, head + i, begin + t * ROWS, 0], full, smem.passing_other.index(stage))
            step += 1


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


# ---- dK and dV -----------------------------------------------------------------------------------------------------


@gluon.jit
def _keys_step(
    j: gl.constexpr, step, start_m, grad_k, grad_v, smem, lse_ptr, delta_ptr, start_n, factor, sizes,
    MASKED: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """Add what the queries of a tile give to the gradients of 64 keys and their values."""
    STAGES: gl.constexpr = smem.passing.shape[0]
    ROWS: gl.constexpr = smem.passing.shape[3]
    dtype: gl.constexpr = smem.passing.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    stage = step % STAGES
    queries = start_m + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    lse = _load_lse(lse_ptr, queries, sizes.seqlen_q)
    query, grad = _tile(smem.passing, stage), _tile(smem.passing_other, stage)
    mbarrier.wait(smem.full.index(stage), (step // STAGES) & 1)
    scores = _issue(_tile(smem.kept, j), query, ROWS)
    grads = _issue(_tile(smem.kept_other, j), grad, ROWS)
    scores = warpgroup_mma_wait(1, deps=[scores])
    weights = _exp2(scores * factor - lse[None, :])
    if MASKED:
        keys = start_n + gl.arange(0, KEPT, layout=gl.SliceLayout(1, layout))
        weights = gl.where(_seen(queries[None, :], keys[:, None], sizes, BAND), weights, 0.0)
    of_value = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, grad_v.type.layout, 2))
    grad_v = warpgroup_mma(of_value, grad, grad_v, is_async=True)
    delta = gl.load(delta_ptr + queries, mask=queries < sizes.seqlen_q, other=0.0)
    grads = warpgroup_mma_wait(1, deps=[grads])  # the product of dV is still in flight
    grads = weights * (grads - delta[None, :])
    of_key = gl.convert_layout(grads.to(dtype), gl.DotOperandLayout(0, grad_k.type.layout, 2))
    grad_k = warpgroup_mma(of_key, query, grad_k, is_async=True)
    grad_k, grad_v, _, _ = warpgroup_mma_wait(0, deps=[grad_k, grad_v, of_key, of_value])
    mbarrier.arrive(smem.empty.index(stage), count=1)
    return grad_k, grad_v


@gluon.jit
def _keys_consumer(
    j: gl.constexpr, BAND: gl.constexpr, grad_k_ptr, grad_v_ptr, lse_ptr, delta_ptr, smem, sizes, start_n, first_head,
    heads, begin, masked, tiles, factor, scale, dk_s, dv_s, head_dim, head_dim_v,
):  # fmt: skip
    smem, sizes = _smem_of(smem), _sizes_of(sizes)
    ROWS: gl.constexpr = smem.passing.shape[3]
    D: gl.constexpr = smem.passing.shape[4]
    DV: gl.constexpr = smem.passing_other.shape[4]
    start_n += j * KEPT
    grad_k = gl.full([KEPT, D], 0.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))
    grad_v = gl.full([KEPT, DV], 0.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16]))
    mbarrier.wait(smem.kept_full.index(0), 0)
    step = 0
    for i in range(heads):
        base = (first_head + i).to(gl.int64) * sizes.seqlen_q
        of_lse, of_delta = lse_ptr + base, delta_ptr + base
        for t in range(masked):
            grad_k, grad_v = _keys_step(
                j, step, begin + t * ROWS, grad_k, grad_v, smem, of_lse, of_delta, start_n, factor, sizes,
                True, BAND,
            )  # fmt: skip
            step += 1
        for t in range(masked, tiles):
            grad_k, grad_v = _keys_step(
                j, step, begin + t * ROWS, grad_k, grad_v, smem, of_lse, of_delta, start_n, factor, sizes,
                False, BAND,
            )  # fmt: skip
            step += 1
    _store_rows(grad_k_ptr, grad_k * scale, start_n, dk_s, sizes.seqlen_k, head_dim, smem.passing.dtype)
    _store_rows(grad_v_ptr, grad_v, start_n, dv_s, sizes.seqlen_k, head_dim_v, smem.passing.dtype)


@gluon.jit
def _work(tiles, num_heads, section):
    """(tile, head) of this program: `section` heads tile by tile, then the next ones (attention.tiles.program_tile)."""
    first = gl.program_id(0) // (section * tiles) * section
    inside = gl.program_id(0) - first * tiles
    width = gl.minimum(section, num_heads - first)
    return inside // width, first + inside % width


@gluon.jit(do_not_specialize=["first", "last", "section"])
def _of_keys_kernel(
    grad_k_ptr, grad_v_ptr, g_desc, lse_ptr, delta_ptr, q_desc, k_desc, v_desc, factor, scale,
    dk_b, dk_h, dk_s, dv_b, dv_h, dv_s, num_heads, heads, group, seqlen_q, seqlen_k, head_dim, head_dim_v,
    first, last, section,
    BAND: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``dK = scale · dSᵀ Q`` and ``dV = Pᵀ dO`` of a tile of 128 keys, of `num_heads` heads of keys in all batches.

    Grid: (⌈S_k / 128⌉ · B · H_kv,). Warps: two consumer warpgroups and a producer warp. Layout: Q, K, V and dO
    (B, H, S, D) by descriptors, dK and dV by their strides with dense rows, statistics (B, H, S) contiguous.
    """
    BLOCK: gl.constexpr = CONSUMERS * KEPT
    # Most queries see the first keys: the order of tiles puts the longest first.
    tile, head = _work((seqlen_k + BLOCK - 1) // BLOCK, num_heads, section)
    b, h = head // heads, head % heads
    start_n = tile * BLOCK
    begin, end = 0, seqlen_q
    if BAND != 0:
        begin = gl.maximum(start_n - last, 0) // ROWS * ROWS
    if BAND == 2:
        end = gl.minimum(seqlen_q, gl.maximum(start_n + BLOCK - first, 0))
    tiles = gl.maximum(end - begin + ROWS - 1, 0) // ROWS
    masked = 0
    if BAND == 1:  # up to the first query that sees every key of the tile
        masked = gl.minimum((gl.maximum(start_n + BLOCK - 1 - last, 0) + ROWS - 1) // ROWS - begin // ROWS, tiles)
    if BAND == 2:
        masked = tiles
    smem = _allocate(k_desc, v_desc, q_desc, g_desc, BLOCK_D, BLOCK_DV, ROWS, STAGES)
    sizes = _Sizes(seqlen_q, seqlen_k, first, last)
    grad_k_ptr += b.to(gl.int64) * dk_b + h.to(gl.int64) * dk_h
    grad_v_ptr += b.to(gl.int64) * dv_b + h.to(gl.int64) * dv_h
    consumed = (
        grad_k_ptr, grad_v_ptr, lse_ptr, delta_ptr, smem, sizes, start_n, head * group, group, begin, masked, tiles,
        factor, scale, dk_s, dv_s, head_dim, head_dim_v,
    )  # fmt: skip
    produced = (k_desc, v_desc, q_desc, g_desc, smem, b, h, start_n, h * group, group, begin, tiles)
    gl.warp_specialize(
        [(_keys_consumer, (0, BAND) + consumed), (_keys_consumer, (1, BAND) + consumed), (_producer, produced)],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


# ---- dQ ------------------------------------------------------------------------------------------------------------


@gluon.jit
def _queries_step(
    j: gl.constexpr, step, start_n, grad_q, smem, lse, delta, queries, factor, sizes,
    MASKED: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """Add what a tile of keys gives to the gradient of 64 queries."""
    STAGES: gl.constexpr = smem.passing.shape[0]
    ROWS: gl.constexpr = smem.passing.shape[3]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    stage = step % STAGES
    key = _tile(smem.passing, stage)
    mbarrier.wait(smem.full.index(stage), (step // STAGES) & 1)
    scores = _issue(_tile(smem.kept, j), key, ROWS)
    grads = _issue(_tile(smem.kept_other, j), _tile(smem.passing_other, stage), ROWS)
    scores = warpgroup_mma_wait(1, deps=[scores])
    weights = _exp2(scores * factor - lse[:, None])
    if MASKED:
        keys = start_n + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
        weights = gl.where(_seen(queries[:, None], keys[None, :], sizes, BAND), weights, 0.0)
    grads = warpgroup_mma_wait(0, deps=[grads])
    grads = weights * (grads - delta[:, None])
    of_query = gl.convert_layout(grads.to(smem.passing.dtype), gl.DotOperandLayout(0, grad_q.type.layout, 2))
    grad_q = warpgroup_mma(of_query, key, grad_q, is_async=True)
    grad_q, _ = warpgroup_mma_wait(0, deps=[grad_q, of_query])
    mbarrier.arrive(smem.empty.index(stage), count=1)
    return grad_q


@gluon.jit
def _queries_consumer(
    j: gl.constexpr, BAND: gl.constexpr, grad_q_ptr, lse_ptr, delta_ptr, smem, sizes, start_m, head, begin, whole,
    tiles, factor, scale, dq_s, head_dim,
):  # fmt: skip
    smem, sizes = _smem_of(smem), _sizes_of(sizes)
    ROWS: gl.constexpr = smem.passing.shape[3]
    D: gl.constexpr = smem.passing.shape[4]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    start_m += j * KEPT
    grad_q = gl.full([KEPT, D], 0.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))
    queries = start_m + gl.arange(0, KEPT, layout=gl.SliceLayout(1, layout))
    base = head.to(gl.int64) * sizes.seqlen_q
    lse = _load_lse(lse_ptr + base, queries, sizes.seqlen_q)
    delta = gl.load(delta_ptr + base + queries, mask=queries < sizes.seqlen_q, other=0.0)
    mbarrier.wait(smem.kept_full.index(0), 0)
    for t in range(whole):
        grad_q = _queries_step(j, t, begin + t * ROWS, grad_q, smem, lse, delta, queries, factor, sizes, False, BAND)
    for t in range(whole, tiles):
        grad_q = _queries_step(j, t, begin + t * ROWS, grad_q, smem, lse, delta, queries, factor, sizes, True, BAND)
    _store_rows(grad_q_ptr, grad_q * scale, start_m, dq_s, sizes.seqlen_q, head_dim, smem.passing.dtype)


@gluon.jit(do_not_specialize=["first", "last", "section"])
def _of_queries_kernel(
    grad_q_ptr, g_desc, lse_ptr, delta_ptr, q_desc, k_desc, v_desc, factor, scale, dq_b, dq_h, dq_s,
    num_heads, heads, group, seqlen_q, seqlen_k, head_dim, first, last, section,
    BAND: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``dQ = scale · dS K`` of a tile of 128 queries, of `num_heads` heads in all batches.

    Grid: (⌈S_q / 128⌉ · B · H,). Warps: two consumer warpgroups and a producer warp. Layout: Q, K, V and dO
    (B, H, S, D) by descriptors, dQ by its strides with dense rows, statistics (B, H, S) contiguous.
    """
    BLOCK: gl.constexpr = CONSUMERS * KEPT
    num_tiles = (seqlen_q + BLOCK - 1) // BLOCK
    tile, head = _work(num_tiles, num_heads, section)
    if BAND == 1:
        tile = num_tiles - 1 - tile  # the longest first
    b, h = head // heads, head % heads
    start_m = tile * BLOCK
    sizes = _Sizes(seqlen_q, seqlen_k, first, last)
    begin, whole, tiles = _key_range(start_m, BLOCK, sizes, BAND, ROWS)
    smem = _allocate(q_desc, g_desc, k_desc, v_desc, BLOCK_D, BLOCK_DV, ROWS, STAGES)
    grad_q_ptr += b.to(gl.int64) * dq_b + h.to(gl.int64) * dq_h
    consumed = (
        grad_q_ptr, lse_ptr, delta_ptr, smem, sizes, start_m, head, begin, whole, tiles, factor, scale, dq_s, head_dim,
    )  # fmt: skip
    produced = (q_desc, g_desc, k_desc, v_desc, smem, b, h, start_m, h // group, 1, begin, tiles)
    gl.warp_specialize(
        [(_queries_consumer, (0, BAND) + consumed), (_queries_consumer, (1, BAND) + consumed), (_producer, produced)],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


# ---- host ----------------------------------------------------------------------------------------------------------


def takes(call: Call) -> bool:
    """Whether the kernels take a call that the forward pass has taken."""
    return max(call.constants["BLOCK_D"], call.constants["BLOCK_DV"]) <= WIDEST


def describable(grad: torch.Tensor) -> torch.Tensor:
    """The output's gradient, or a copy, such that a descriptor describes it."""
    apart = all(stride for size, stride in zip(grad.shape, grad.stride(), strict=True) if size > 1)
    return grad if apart and has_rows_at(grad, 8) and not unaligned(grad) else grad.contiguous()


def configs(tiles: tuple[tuple[int, int], ...]) -> list[triton.Config]:
    return [triton.Config({"ROWS": rows, "STAGES": stages}, num_warps=4, num_stages=1) for rows, stages in tiles]


def _arguments_of_keys(call: Call, grad_k: torch.Tensor, grad_v: torch.Tensor) -> tuple[Any, ...]:
    """Those of :func:`_of_keys_kernel` after its tensors, before its constants."""
    batch, heads, seqlen_q, head_dim = call.q.shape
    _, heads_kv, seqlen_k, head_dim_v = call.v.shape
    bytes_per_head = seqlen_q * (head_dim + head_dim_v) * call.q.element_size() * (heads // heads_kv)
    heads_per_section = min(section(call.kind == BELOW_DIAGONAL, 1, bytes_per_head), batch * heads_kv)
    return (
        call.scale * LOG2_E, call.scale, *grad_k.stride()[:3], *grad_v.stride()[:3], batch * heads_kv, heads_kv,
        heads // heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, *call.limits, heads_per_section,
    )  # fmt: skip


def _arguments_of_queries(call: Call, grad_q: torch.Tensor) -> tuple[Any, ...]:
    """Those of :func:`_of_queries_kernel` after its tensors, before its constants."""
    batch, heads, seqlen_q, head_dim = call.q.shape
    _, heads_kv, seqlen_k, _ = call.v.shape
    return (
        call.scale * LOG2_E, call.scale, *grad_q.stride()[:3], batch * heads, heads, heads // heads_kv,
        seqlen_q, seqlen_k, head_dim, *call.limits, call.heads_per_section,
    )  # fmt: skip


_of_keys = Autotuner(_of_keys_kernel)
_of_queries = Autotuner(_of_queries_kernel)


def _launch_of_keys(call: Call, grad_k: torch.Tensor, grad_v: torch.Tensor, grad: torch.Tensor, *others: Any) -> Any:
    """Choose a configuration and run it on (dK, dV, dO, lse, delta, Q, K, V); the returned launch repeats it."""
    d, d_v = call.constants["BLOCK_D"], call.constants["BLOCK_DV"]
    programs = triton.cdiv(call.k.shape[2], CONSUMERS.value * KEPT.value) * call.k.shape[0] * call.k.shape[1]

    def launch(config: triton.Config) -> DescriptorLaunch:
        rows, stages = config.kwargs["ROWS"], config.kwargs["STAGES"]
        kept = _described(call.k, KEPT.value, d), _described(call.v, KEPT.value, d_v)
        describe = (None, None, _described(grad, rows, d_v), None, None, _described(call.q, rows, d), *kept)
        arguments = (*_arguments_of_keys(call, grad_k, grad_v), call.kind, d, d_v, rows, stages)
        return DescriptorLaunch(_of_keys_kernel, programs, describe, arguments, {"num_warps": config.num_warps})

    return _of_keys.launch(_key(call), configs(KEY_TILES[max(64, d, d_v)]), launch, grad_k, grad_v, grad, *others)


def _launch_of_queries(call: Call, grad_q: torch.Tensor, grad: torch.Tensor, *others: Any) -> Any:
    """Choose a configuration and run it on (dQ, dO, lse, delta, Q, K, V); the returned launch repeats it."""
    d, d_v = call.constants["BLOCK_D"], call.constants["BLOCK_DV"]
    programs = triton.cdiv(call.q.shape[2], CONSUMERS.value * KEPT.value) * call.q.shape[0] * call.q.shape[1]

    def launch(config: triton.Config) -> DescriptorLaunch:
        rows, stages = config.kwargs["ROWS"], config.kwargs["STAGES"]
        passing = _described(call.k, rows, d), _described(call.v, rows, d_v)
        describe = (
            None, _described(grad, KEPT.value, d_v), None, None, _described(call.q, KEPT.value, d), *passing,
        )  # fmt: skip
        arguments = (*_arguments_of_queries(call, grad_q), call.kind, d, d_v, rows, stages)
        return DescriptorLaunch(_of_queries_kernel, programs, describe, arguments, {"num_warps": config.num_warps})

    return _of_queries.launch(_key(call), configs(QUERY_TILES[max(64, d, d_v)]), launch, grad_q, grad, *others)


def _key(call: Call) -> tuple[Any, ...]:
    """Equal for calls that share a tuned configuration."""
    constants = call.constants
    return str(call.q.dtype), constants["BLOCK_D"], constants["BLOCK_DV"], call.kind, seqlen_class(call.q.shape[2])


def _first_launches(call: Call, of_delta: tuple, of_keys: tuple, of_queries: tuple) -> backward.Launches:
    """As :func:`backward.first_launches`."""
    for_delta = launch_delta(call, of_delta)
    for_keys = for_queries = None
    if of_keys[0] is not None:
        for_keys = _without_mask(_launch_of_keys(call, *of_keys[:8]), 8)
    if of_queries[0] is not None:
        for_queries = _without_mask(_launch_of_queries(call, *of_queries[:7]), 7)
    return for_delta, for_keys, for_queries


def _without_mask(launch: DescriptorLaunch, count: int) -> Any:
    """A launch on the first `count` of the tensors that the kernels of ``backward.py`` take."""

    def run(*tensors: torch.Tensor, values: tuple[Any, ...] = ()) -> None:
        launch(*tensors[:count])

    return run


def attention_backward(saved: tuple, grad: Output, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
    _, _, _, _, *of_call = saved
    if not takes(Call(*of_call)):
        return backward.attention_backward(saved, grad, needs)
    of_output, *of_lse = grad if isinstance(grad, tuple) else (grad,)
    of_output = describable(of_output)
    return backward.attention_backward(saved, (of_output, *of_lse) if of_lse else of_output, needs, _first_launches)
