"""dQ of `warp_specialized`'s attention, in Gluon.

    dP = dO Vᵀ      dS = P ∘ (dP − delta)      dQ = scale · dS K

A consumer keeps 64 queries and their dO, and keys and values pass by. dS is an operand of dQ in registers.
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
from triton_impl.attention.tiles import LOG2_E, blocks
from triton_impl.attention.tma import tuning_key
from triton_impl.attention.warp_specialized import (
    PRODUCER_REGISTERS,
    _described,
    _exp2,
    _Problem,
    _problem_of,
    _seen,
    _tile,
    _tiles,
    _work_tile,
    _work_tiles,
)
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.descriptor_launch import DescriptorLaunch

#: To time, by the wider head dimension.
TILES: dict[int, tuple[Tile, ...]] = {64: ((128, 2),), 128: ((64, 3), (128, 2))}


@gluon.jit
def _producer(BAND: gl.constexpr, q_desc, g_desc, k_desc, v_desc, smem, problem, work_tiles):
    smem, problem = _smem_of(smem), _problem_of(problem)
    step = 0
    for iteration in range(work_tiles):
        head, start_m, begin, _, _, tiles = _work_tile(iteration, problem, BAND, BLOCK, smem.passing.shape[3])
        b, h = head // problem.heads, head % problem.heads
        _fetch_kept(q_desc, g_desc, smem, iteration, b, h, start_m)
        step = _fetch_passing(k_desc, v_desc, smem, step, b, h // problem.group, begin, tiles)


@gluon.jit
def _mainloop_step(
    step, start_n, grad_q, query, grad, smem, lse, delta, queries, factor, problem,
    MASKED: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """Add what a tile of keys gives to the gradient of 64 queries."""
    STAGES: gl.constexpr = smem.passing.shape[0]
    ROWS: gl.constexpr = smem.passing.shape[3]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    stage = step % STAGES
    key = _tile(smem.passing, stage)
    mbarrier.wait(smem.full.index(stage), (step // STAGES) & 1)
    scores = _issue(query, key, ROWS)
    grads = _issue(grad, _tile(smem.passing_other, stage), ROWS)
    scores = warpgroup_mma_wait(1, deps=[scores])
    weights = _exp2(scores * factor - lse[:, None])
    if MASKED:
        keys = start_n + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
        weights = gl.where(_seen(queries[:, None], keys[None, :], problem, BAND), weights, 0.0)
    grads = warpgroup_mma_wait(0, deps=[grads])
    grads = weights * (grads - delta[:, None])
    of_query = gl.convert_layout(grads.to(smem.passing.dtype), gl.DotOperandLayout(0, grad_q.type.layout, 2))
    grad_q = warpgroup_mma(of_query, key, grad_q, is_async=True)
    grad_q, _ = warpgroup_mma_wait(0, deps=[grad_q, of_query])
    mbarrier.arrive(smem.empty.index(stage), count=1)
    return grad_q


@gluon.jit
def _consumer(
    j: gl.constexpr, BAND: gl.constexpr, grad_q_ptr, lse_ptr, delta_ptr, smem, problem,
    work_tiles, factor, scale, dq_b, dq_h, dq_s, head_dim,
):  # fmt: skip
    smem, problem = _smem_of(smem), _problem_of(problem)
    ROWS: gl.constexpr = smem.passing.shape[3]
    D: gl.constexpr = smem.passing.shape[4]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    step = 0
    for iteration in range(work_tiles):
        head, start_m, begin, edge, whole, tiles = _work_tile(iteration, problem, BAND, BLOCK, ROWS)
        start_m += j * KEPT
        grad_q = gl.full([KEPT, D], 0.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))
        queries = start_m + gl.arange(0, KEPT, layout=gl.SliceLayout(1, layout))
        base = head.to(gl.int64) * problem.seqlen_q
        lse = _load_lse(lse_ptr + base, queries, problem.seqlen_q)
        delta = gl.load(delta_ptr + base + queries, mask=queries < problem.seqlen_q, other=0.0)
        mbarrier.wait(smem.kept_full.index(j), iteration & 1)
        query, grad = _tile(smem.kept, j), _tile(smem.kept_other, j)
        if BAND == 2:
            edge = gl.minimum(edge, tiles)
            whole = gl.maximum(edge, whole)
        edges = (0, edge, whole, tiles)
        for part in gl.static_range(3):  # masked, unmasked, masked
            if BAND == 2 or part != 0:
                for t in range(edges[part], edges[part + 1]):
                    grad_q = _mainloop_step(
                        step + t, begin + t * ROWS, grad_q, query, grad, smem, lse, delta, queries, factor, problem,
                        part != 1, BAND,
                    )  # fmt: skip
        step += tiles
        mbarrier.arrive(smem.kept_empty.index(j), count=1)
        at = (head // problem.heads).to(gl.int64) * dq_b + (head % problem.heads).to(gl.int64) * dq_h
        _store_rows(grad_q_ptr + at, grad_q * scale, start_m, dq_s, problem.seqlen_q, head_dim, smem.passing.dtype)


@gluon.jit(do_not_specialize=["first", "last", "section", "fold"])
def _of_queries_kernel(
    grad_q_ptr, g_desc, lse_ptr, delta_ptr, q_desc, k_desc, v_desc, factor, scale, dq_b, dq_h, dq_s,
    num_heads, heads, group, seqlen_q, seqlen_k, head_dim, first, last, section, fold,
    BAND: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``dQ = scale · dS K``, by tiles of 128 queries, of `num_heads` heads in all batches.

    Grid: persistent programs, or one per tile. Warps: two consumer warpgroups and a producer warp. Layout: Q, K, V and
    dO (B, H, S, D) by descriptors, dQ by its strides with dense rows, statistics (B, H, S) contiguous.
    """
    problem = _Problem(num_heads, heads, group, seqlen_q, seqlen_k, first, last, section, fold)
    work_tiles = _work_tiles(problem, _tiles(seqlen_q, BLOCK))
    smem = _allocate(q_desc, g_desc, k_desc, v_desc, BLOCK_D, BLOCK_DV, ROWS, STAGES)
    consumed = (
        grad_q_ptr, lse_ptr, delta_ptr, smem, problem, work_tiles, factor, scale, dq_b, dq_h, dq_s, head_dim,
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


def arguments(call: Call, grad_q: torch.Tensor) -> tuple[Any, ...]:
    """Those of the kernel after its tensors, before its `fold`."""
    batch, heads, seqlen_q, head_dim = call.q.shape
    _, heads_kv, seqlen_k, _ = call.v.shape
    return (
        call.scale * LOG2_E, call.scale, *grad_q.stride()[:3], batch * heads, heads, heads // heads_kv,
        seqlen_q, seqlen_k, head_dim, *call.limits, call.heads_per_section,
    )  # fmt: skip


_autotuner = Autotuner(_of_queries_kernel)


def launch(call: Call, grad_q: torch.Tensor, grad: torch.Tensor, *others: torch.Tensor) -> Any:
    """Choose a configuration and run it on (dQ, dO, lse, delta, Q, K, V); the returned launch repeats it."""
    d, d_v = blocks(call.q.shape[3], call.v.shape[3])
    grid, fold = programs(call, call.q, call.heads_per_section)

    def made(config: triton.Config) -> DescriptorLaunch:
        rows, stages = config.kwargs.values()
        kept = _described(grad, KEPT.value, d_v), None, None, _described(call.q, KEPT.value, d)
        describe = (None, *kept, _described(call.k, rows, d), _described(call.v, rows, d_v))
        given = (*arguments(call, grad_q), fold, call.kind, d, d_v, rows, stages)
        return DescriptorLaunch(_of_queries_kernel, grid, describe, given, {"num_warps": config.num_warps})

    return _autotuner.launch(tuning_key(call), configs(TILES[max(64, d, d_v)]), made, grad_q, grad, *others)
