"""dK and dV of `warp_specialized`'s attention, in Gluon.

    dV = Pᵀ dO      dP = dO Vᵀ      dS = P ∘ (dP − delta)      dK = scale · dSᵀ Q

A consumer keeps 64 keys and their values, and the queries and dO of every head that shares them pass by. Scores are
transposed: weights and dS are operands of dV and dK in registers, never in shared memory.
"""

# ruff: noqa: RUF005 — inside a kernel tuples are joined by + alone

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from triton_impl.attention.call import Call
from triton_impl.attention.specialized_passing import (
    BLOCK,
    CONSUMER_REGISTERS,
    KEPT,
    Tile,
    _allocate,
    _fetch_kept,
    _fetch_passing,
    _issue,
    _load_lse,
    _smem_of,
    _store_rows,
    configs,
    programs,
)
from triton_impl.attention.tiles import BELOW_DIAGONAL, LOG2_E, blocks, section
from triton_impl.attention.tma import tuning_key
from triton_impl.attention.warp_specialized import (
    PRODUCER_REGISTERS,
    _described,
    _exp2,
    _Problem,
    _problem_of,
    _schedule,
    _seen,
    _tile,
    _tiles,
    _work_tiles,
)
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.descriptor_launch import DescriptorLaunch

#: To time, by the wider head dimension.
TILES: dict[int, tuple[Tile, ...]] = {64: ((64, 4),), 128: ((64, 3),)}


@gluon.jit
def _work_tile(iteration, problem, BAND: gl.constexpr, ROWS: gl.constexpr):
    """(head of keys, first key, first query) of an iteration, and its tiles of queries.

    As :func:`triton_impl.attention.warp_specialized._key_range`: masked ones before the unmasked, end of these, all.
    """
    # Most queries see the first keys: these are the longest tiles of a causal mask.
    tile, head = _schedule(iteration, problem, _tiles(problem.seqlen_k, BLOCK), False)
    start_n = tile * BLOCK
    begin, end = 0, problem.seqlen_q
    if BAND != 0:
        begin = gl.maximum(start_n - problem.last, 0) // ROWS * ROWS
    if BAND == 2:
        end = gl.minimum(problem.seqlen_q, gl.maximum(start_n + BLOCK - problem.first, 0))
    tiles = gl.maximum(end - begin + ROWS - 1, 0) // ROWS
    edge, whole = 0, tiles
    if BAND != 0:  # up to the first query that sees every key of the tile
        whole_from = (gl.maximum(start_n + BLOCK - 1 - problem.last, 0) + ROWS - 1) // ROWS
        edge = gl.minimum(whole_from - begin // ROWS, tiles)
    if BAND == 2:  # up to the last one
        whole = gl.minimum(gl.maximum(start_n - problem.first + 1, 0) // ROWS - begin // ROWS, tiles)
    return head, start_n, begin, edge, whole, tiles


@gluon.jit
def _producer(BAND: gl.constexpr, q_desc, g_desc, k_desc, v_desc, smem, problem, work_tiles):
    smem, problem = _smem_of(smem), _problem_of(problem)
    step = 0
    for iteration in range(work_tiles):
        head, start_n, begin, _, _, tiles = _work_tile(iteration, problem, BAND, smem.passing.shape[3])
        b, h = head // problem.heads, head % problem.heads
        _fetch_kept(k_desc, v_desc, smem, iteration, b, h, start_n)
        for i in range(problem.group):
            step = _fetch_passing(q_desc, g_desc, smem, step, b, h * problem.group + i, begin, tiles)


@gluon.jit
def _mainloop_step(
    step, start_m, grad_k, grad_v, key, value, smem, lse_ptr, delta_ptr, start_n, factor, problem,
    MASKED: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """Add what the queries of a tile give to the gradients of 64 keys and their values."""
    STAGES: gl.constexpr = smem.passing.shape[0]
    ROWS: gl.constexpr = smem.passing.shape[3]
    dtype: gl.constexpr = smem.passing.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    stage = step % STAGES
    queries = start_m + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    lse = _load_lse(lse_ptr, queries, problem.seqlen_q)
    query, grad = _tile(smem.passing, stage), _tile(smem.passing_other, stage)
    mbarrier.wait(smem.full.index(stage), (step // STAGES) & 1)
    scores = _issue(key, query, ROWS)
    grads = _issue(value, grad, ROWS)
    scores = warpgroup_mma_wait(1, deps=[scores])
    weights = _exp2(scores * factor - lse[None, :])
    if MASKED:
        keys = start_n + gl.arange(0, KEPT, layout=gl.SliceLayout(1, layout))
        weights = gl.where(_seen(queries[None, :], keys[:, None], problem, BAND), weights, 0.0)
    of_value = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, grad_v.type.layout, 2))
    grad_v = warpgroup_mma(of_value, grad, grad_v, is_async=True)
    delta = gl.load(delta_ptr + queries, mask=queries < problem.seqlen_q, other=0.0)
    grads = warpgroup_mma_wait(1, deps=[grads])  # the product of dV is still in flight
    grads = weights * (grads - delta[None, :])
    of_key = gl.convert_layout(grads.to(dtype), gl.DotOperandLayout(0, grad_k.type.layout, 2))
    grad_k = warpgroup_mma(of_key, query, grad_k, is_async=True)
    grad_k, grad_v, _, _ = warpgroup_mma_wait(0, deps=[grad_k, grad_v, of_key, of_value])
    mbarrier.arrive(smem.empty.index(stage), count=1)
    return grad_k, grad_v


@gluon.jit
def _consumer(
    j: gl.constexpr, BAND: gl.constexpr, grad_k_ptr, grad_v_ptr, lse_ptr, delta_ptr, smem,
    problem, work_tiles, factor, scale, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s, head_dim, head_dim_v,
):  # fmt: skip
    smem, problem = _smem_of(smem), _problem_of(problem)
    ROWS: gl.constexpr = smem.passing.shape[3]
    D: gl.constexpr = smem.passing.shape[4]
    DV: gl.constexpr = smem.passing_other.shape[4]
    step = 0
    for iteration in range(work_tiles):
        head, start_n, begin, edge, whole, tiles = _work_tile(iteration, problem, BAND, ROWS)
        start_n += j * KEPT
        mbarrier.wait(smem.kept_full.index(j), iteration & 1)
        key, value = _tile(smem.kept, j), _tile(smem.kept_other, j)
        grad_k = gl.full([KEPT, D], 0.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))
        grad_v = gl.full([KEPT, DV], 0.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16]))
        edges = (0, edge, gl.maximum(edge, whole), tiles)
        for i in range(problem.group):
            base = (head * problem.group + i).to(gl.int64) * problem.seqlen_q
            of_lse, of_delta = lse_ptr + base, delta_ptr + base
            for part in gl.static_range(3):  # masked, unmasked, masked
                if BAND == 2 or part != 2:
                    for t in range(edges[part], edges[part + 1]):
                        grad_k, grad_v = _mainloop_step(
                            step, begin + t * ROWS, grad_k, grad_v, key, value, smem, of_lse, of_delta, start_n,
                            factor, problem, part != 1, BAND,
                        )  # fmt: skip
                        step += 1
        mbarrier.arrive(smem.kept_empty.index(j), count=1)
        b, h = (head // problem.heads).to(gl.int64), (head % problem.heads).to(gl.int64)
        of_keys, of_values = grad_k_ptr + (b * dk_b + h * dk_h), grad_v_ptr + (b * dv_b + h * dv_h)
        _store_rows(of_keys, grad_k * scale, start_n, dk_s, problem.seqlen_k, head_dim, smem.passing.dtype)
        _store_rows(of_values, grad_v, start_n, dv_s, problem.seqlen_k, head_dim_v, smem.passing.dtype)


@gluon.jit(do_not_specialize=["first", "last", "section", "fold"])
def _of_keys_kernel(
    grad_k_ptr, grad_v_ptr, g_desc, lse_ptr, delta_ptr, q_desc, k_desc, v_desc, factor, scale,
    dk_b, dk_h, dk_s, dv_b, dv_h, dv_s, num_heads, heads, group, seqlen_q, seqlen_k, head_dim, head_dim_v,
    first, last, section, fold,
    BAND: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``dK = scale · dSᵀ Q`` and ``dV = Pᵀ dO``, by tiles of 128 keys, of `num_heads` heads of keys in all batches.

    Grid: persistent programs, or one per tile. Warps: two consumer warpgroups and a producer warp. Layout: Q, K, V and
    dO (B, H, S, D) by descriptors, dK and dV by their strides with dense rows, statistics (B, H, S) contiguous.
    """
    problem = _Problem(num_heads, heads, group, seqlen_q, seqlen_k, first, last, section, fold)
    work_tiles = _work_tiles(problem, _tiles(seqlen_k, BLOCK))
    smem = _allocate(k_desc, v_desc, q_desc, g_desc, BLOCK_D, BLOCK_DV, ROWS, STAGES)
    consumed = (
        grad_k_ptr, grad_v_ptr, lse_ptr, delta_ptr, smem, problem, work_tiles, factor, scale,
        dk_b, dk_h, dk_s, dv_b, dv_h, dv_s, head_dim, head_dim_v,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer, (0, BAND) + consumed),
            (_consumer, (1, BAND) + consumed),
            (_producer, (BAND, q_desc, g_desc, k_desc, v_desc, smem, problem, work_tiles)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


# ---- host ----------------------------------------------------------------------------------------------------------


def arguments(call: Call, grad_k: torch.Tensor, grad_v: torch.Tensor, heads_per_section: int) -> tuple[Any, ...]:
    """Those of the kernel after its tensors, before its `fold`."""
    batch, heads, seqlen_q, head_dim = call.q.shape
    _, heads_kv, seqlen_k, head_dim_v = call.v.shape
    return (
        call.scale * LOG2_E, call.scale, *grad_k.stride()[:3], *grad_v.stride()[:3], batch * heads_kv, heads_kv,
        heads // heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, *call.limits, heads_per_section,
    )  # fmt: skip


def _section(call: Call) -> int:
    """Heads of keys in a section (attention.tiles.program_tile): their queries and dO share the L2."""
    batch, heads, seqlen_q, head_dim = call.q.shape
    _, heads_kv, _, head_dim_v = call.v.shape
    bytes_per_head = seqlen_q * (head_dim + head_dim_v) * call.q.element_size() * (heads // heads_kv)
    return min(section(call.kind == BELOW_DIAGONAL, 1, bytes_per_head), batch * heads_kv)


_autotuner = Autotuner(_of_keys_kernel)


def launch(call: Call, grad_k: torch.Tensor, grad_v: torch.Tensor, grad: torch.Tensor, *others: torch.Tensor) -> Any:
    """Choose a configuration and run it on (dK, dV, dO, lse, delta, Q, K, V); the returned launch repeats it."""
    d, d_v = blocks(call.q.shape[3], call.v.shape[3])
    heads_per_section = _section(call)
    grid, fold = programs(call, call.k, heads_per_section)

    def made(config: triton.Config) -> DescriptorLaunch:
        rows, stages = config.kwargs.values()
        kept = _described(call.k, KEPT.value, d), _described(call.v, KEPT.value, d_v)
        describe = (None, None, _described(grad, rows, d_v), None, None, _described(call.q, rows, d), *kept)
        given = (*arguments(call, grad_k, grad_v, heads_per_section), fold, call.kind, d, d_v, rows, stages)
        return DescriptorLaunch(_of_keys_kernel, grid, describe, given, {"num_warps": config.num_warps})

    return _autotuner.launch(tuning_key(call), configs(TILES[max(64, d, d_v)]), made, grad_k, grad_v, grad, *others)
