"""attention, rung 4 of 5: warp_specialized

Idea      A producer warp has the copy engine fetch K and V into stages of shared memory. Consumer warpgroups of 64
          queries each overlap softmax with wgmma. The scores of the next tile, and the product of the last weights with
          V, are in flight meanwhile (Shah et al., FlashAttention-3, arXiv:2407.08608). In Gluon, the language below
          Triton.
Predicts  max(softmax, products) per tile instead of their sum.
Limit now Registers: a consumer holds scores, weights and accumulator.
Next      `split_kv` for few queries; cuda `pingpong` and `persistent` for many.

Triton cannot say which warps do what, nor which of two products to wait for; Gluon can. The backward pass has a
producer warp too (``specialized_backward.py``). Shared openly with `tma`: what may be described, and the arguments.
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from triton_impl import multiprocessors
from triton_impl.attention import tma as attention_tma
from triton_impl.attention.call import Call, forward_by_launch
from triton_impl.attention.tiles import BELOW_DIAGONAL
from triton_impl.common.gluon.requirements import unsupported as unsupported_by_gluon
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.descriptor_launch import DescriptorLaunch

#: Queries of a consumer warpgroup.
BLOCK_M = gl.constexpr(64)
PRODUCER_REGISTERS = gl.constexpr(24)

#: (BLOCK_N, STAGES, CONSUMERS, PINGPONG) to time, by the wider head dimension. PINGPONG: consumers issue their products
#: in turn.
TILES = {
    64: ((128, 2, 2, True), (128, 2, 3, True)),
    128: ((128, 2, 2, False), (128, 2, 2, True)),
    256: ((64, 2, 2, False),),
}

# The name in later versions, then that in Triton 3.6.
_fetch_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


class _Problem(NamedTuple):
    """Sizes, the band of keys that a query sees (attention.tiles.apply_mask), and the schedule."""

    num_heads: Any  # of all batches
    heads: Any
    group: Any
    seqlen_q: Any
    seqlen_k: Any
    first: Any
    last: Any
    section: Any
    fold: Any


class _Smem(NamedTuple):
    """Stages in shared memory, and their barriers: full, loaded by the producer; empty, released by the consumers."""

    q: Any  # one tile per consumer
    k: Any
    v: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    pingpong: Any  # barrier j lets consumer j issue its products; a single unused one without PINGPONG


# gl.warp_specialize passes named tuples on as plain ones.


@gluon.jit
def _problem_of(x):
    return _Problem(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8])


@gluon.jit
def _smem_of(x):
    return _Smem(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9])


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _tiles(length, ROWS: gl.constexpr):
    """Number of tiles per head, of a sequence of queries or of keys."""
    return (length + ROWS - 1) // ROWS


@gluon.jit
def _work_tiles(problem, tiles):
    """Number of work tiles of this program, of `tiles` a head."""
    share = tiles * problem.num_heads // problem.fold - gl.program_id(0)
    return problem.fold * ((share + gl.num_programs(0) - 1) // gl.num_programs(0))


@gluon.jit
def _schedule(iteration, problem, tiles, LAST_FIRST: gl.constexpr):
    """Tile scheduler: (tile, head) of an iteration.

    Sections of heads follow each other (attention.tiles.program_tile); inside one, the longest causal tiles come first:
    with LAST_FIRST those at the end of the sequence. With a `fold` of 2 a program takes tiles in pairs, one from each
    end of the section. Under a causal mask all pairs are equally long.
    """
    fold, section = problem.fold, problem.section
    share = section * tiles // fold
    unit = gl.program_id(0) + iteration // fold * gl.num_programs(0)
    before = unit // share * section
    width = gl.minimum(section, problem.num_heads - before)
    place = unit % share
    if iteration % fold == 1:
        place = width * tiles - 1 - place
    tile = place // width
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, before + place % width


@gluon.jit
def _key_range(start_m, rows, problem, BAND: gl.constexpr, BLOCK_N: gl.constexpr):
    """(first key, masked tiles before the unmasked ones, end of these, all tiles) of `rows` queries."""
    begin, edge = 0, 0
    seqlen_k = problem.seqlen_k
    whole = seqlen_k // BLOCK_N
    end = seqlen_k
    if BAND != 0:
        end = gl.maximum(gl.minimum(seqlen_k, start_m + rows + problem.last), 0)
        whole = gl.maximum(gl.minimum(seqlen_k, start_m + 1 + problem.last), 0) // BLOCK_N
    if BAND == 2:
        begin = gl.maximum(start_m + problem.first, 0) // BLOCK_N * BLOCK_N
        edge = (gl.maximum(start_m + rows - 1 + problem.first, 0) - begin + BLOCK_N - 1) // BLOCK_N
        whole -= begin // BLOCK_N
    # At least one tile, masked if need be, so that every row has a result.
    return begin, edge, whole, gl.maximum((end - begin + BLOCK_N - 1) // BLOCK_N, 1)


@gluon.jit
def _work_tile(iteration, problem, BAND: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    """(head, first query) of the work tile of an iteration, and its :func:`_key_range`."""
    tile, head = _schedule(iteration, problem, _tiles(problem.seqlen_q, ROWS), BAND == 1)
    begin, edge, whole, tiles = _key_range(tile * ROWS, ROWS, problem, BAND, BLOCK_N)
    return head, tile * ROWS, begin, edge, whole, tiles


@gluon.jit
def _producer(BAND: gl.constexpr, q_desc, k_desc, v_desc, smem, problem, work_tiles):
    smem, problem = _smem_of(smem), _problem_of(problem)
    CONSUMERS: gl.constexpr = smem.q.shape[0]
    STAGES: gl.constexpr = smem.k.shape[0]
    BLOCK_N: gl.constexpr = smem.k.shape[3]
    BLOCK_D: gl.constexpr = smem.k.shape[4]
    BLOCK_DV: gl.constexpr = smem.v.shape[4]
    loaded = 0
    for iteration in range(work_tiles):
        head, start_m, begin, _, _, tiles = _work_tile(iteration, problem, BAND, CONSUMERS * BLOCK_M, BLOCK_N)
        b, h = head // problem.heads, head % problem.heads
        h_kv = h // problem.group
        for i in range(tiles):
            stage = loaded % STAGES
            free = ((loaded // STAGES) & 1) ^ 1
            mbarrier.wait(smem.k_empty.index(stage), free)
            mbarrier.expect(smem.k_full.index(stage), BLOCK_N * BLOCK_D * 2)
            _fetch_tile(k_desc, [b, h_kv, begin + i * BLOCK_N, 0], smem.k_full.index(stage), smem.k.index(stage))
            if i == 0:
                for j in gl.static_range(CONSUMERS):
                    mbarrier.wait(smem.q_empty.index(j), (iteration & 1) ^ 1)
                    mbarrier.expect(smem.q_full.index(j), BLOCK_M * BLOCK_D * 2)
                    _fetch_tile(q_desc, [b, h, start_m + j * BLOCK_M, 0], smem.q_full.index(j), smem.q.index(j))
            mbarrier.wait(smem.v_empty.index(stage), free)
            mbarrier.expect(smem.v_full.index(stage), BLOCK_N * BLOCK_DV * 2)
            _fetch_tile(v_desc, [b, h_kv, begin + i * BLOCK_N, 0], smem.v_full.index(stage), smem.v.index(stage))
            loaded += 1


@gluon.jit
def _seen(queries, keys, problem, BAND: gl.constexpr):
    """Which of the keys each query sees, by positions in shapes that broadcast."""
    seen = keys < problem.seqlen_k
    if BAND != 0:
        seen = seen & (keys <= queries + problem.last)
    if BAND == 2:
        seen = seen & (keys >= queries + problem.first)
    return seen


@gluon.jit
def _apply_mask(scores, start_m, start_n, problem, BAND: gl.constexpr):
    """Scores with −inf where a query does not see a key."""
    layout: gl.constexpr = scores.type.layout
    BLOCK_N: gl.constexpr = scores.shape[1]
    rows = (start_m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout)))[:, None]
    cols = (start_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout)))[None, :]
    return gl.where(_seen(rows, cols, problem, BAND), scores, -float("inf"))


@gluon.jit
def _online_softmax(scores, factor, row_max, row_sum):
    """One step of online softmax: (weights, correction of the state, row_max, row_sum)."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * factor)
    # A row of −inf alone subtracts 0: its exponentials are 0, not NaN.
    shift = gl.where(new_max == -float("inf"), 0.0, new_max)
    weights = _exp2(scores * factor - shift[:, None])
    correction = _exp2(row_max - shift)
    return weights, correction, new_max, row_sum * correction + gl.sum(weights, 1)


@gluon.jit
def _tile(smem, i):
    """Stage i, a tile (1, 1, rows, columns), as a matrix."""
    return smem.index(i).reshape([smem.shape[3], smem.shape[4]])


@gluon.jit
def _gemm_qk(q, k_smem, stage):
    """Issue ``Q Kᵀ`` of one tile of keys; the result is in flight."""
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    nothing = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, layout)
    return warpgroup_mma(q, _tile(k_smem, stage).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _pingpong_wait(j: gl.constexpr, step, pingpong):
    if pingpong.shape[0] > 1:
        mbarrier.wait(pingpong.index(j), (step & 1) ^ (j == 0))


@gluon.jit
def _pingpong_arrive(j: gl.constexpr, pingpong):
    if pingpong.shape[0] > 1:
        mbarrier.arrive(pingpong.index((j + 1) % pingpong.shape[0]), count=1)


@gluon.jit
def _mainloop_step(
    j: gl.constexpr, i, acc, weights, row_max, row_sum, q, smem, start_m, start_n, factor, problem, MASKED, BAND
):  # fmt: skip
    """Weights of tile i, while the product of the previous weights with their values is in flight."""
    STAGES: gl.constexpr = smem.k.shape[0]
    stage, before = i % STAGES, (i - 1) % STAGES
    mbarrier.wait(smem.k_full.index(stage), (i // STAGES) & 1)
    _pingpong_wait(j, i, smem.pingpong)
    scores = _gemm_qk(q, smem.k, stage)
    mbarrier.wait(smem.v_full.index(before), ((i - 1) // STAGES) & 1)
    product = warpgroup_mma(weights, _tile(smem.v, before), acc, is_async=True)
    _pingpong_arrive(j, smem.pingpong)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(smem.k_empty.index(stage), count=1)
    if MASKED:
        scores = _apply_mask(scores, start_m, start_n, problem, BAND)
    new_weights, correction, row_max, row_sum = _online_softmax(scores, factor, row_max, row_sum)
    acc, _ = warpgroup_mma_wait(0, deps=[product, weights])  # the product has read the weights from registers
    mbarrier.arrive(smem.v_empty.index(before), count=1)
    acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, gl.convert_layout(new_weights.to(smem.k.dtype), weights.type.layout), row_max, row_sum


@gluon.jit
def _mainloop(
    j: gl.constexpr, BAND: gl.constexpr, q, smem, consumed_tiles, start_m, begin, edge, whole, tiles, factor, problem
):
    """Mainloop of one tile of queries: (acc, row_max, row_sum), with acc not yet divided by row_sum."""
    STAGES: gl.constexpr = smem.k.shape[0]
    BLOCK_N: gl.constexpr = smem.k.shape[3]
    BLOCK_DV: gl.constexpr = smem.v.shape[4]
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    mbarrier.wait(smem.k_full.index(consumed_tiles % STAGES), (consumed_tiles // STAGES) & 1)
    _pingpong_wait(j, consumed_tiles, smem.pingpong)
    scores = _gemm_qk(q, smem.k, consumed_tiles % STAGES)
    _pingpong_arrive(j, smem.pingpong)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(smem.k_empty.index(consumed_tiles % STAGES), count=1)
    scores = _apply_mask(scores, start_m, begin, problem, BAND)
    of_rows: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    row_max = gl.full([BLOCK_M], -float("inf"), gl.float32, of_rows)
    row_sum = gl.full([BLOCK_M], 0.0, gl.float32, of_rows)
    new_weights, _, row_max, row_sum = _online_softmax(scores, factor, row_max, row_sum)
    weights = gl.convert_layout(new_weights.to(smem.k.dtype), gl.DotOperandLayout(0, acc_layout, 2))
    acc = gl.full([BLOCK_M, BLOCK_DV], 0.0, gl.float32, acc_layout)
    first = 1
    if BAND == 2:
        first = gl.minimum(gl.maximum(edge, 1), tiles)
        for i in range(1, first):
            acc, weights, row_max, row_sum = _mainloop_step(
                j, consumed_tiles + i, acc, weights, row_max, row_sum, q, smem, start_m, begin + i * BLOCK_N, factor,
                problem, True, BAND,
            )  # fmt: skip
    for i in range(first, whole):
        acc, weights, row_max, row_sum = _mainloop_step(
            j, consumed_tiles + i, acc, weights, row_max, row_sum, q, smem, start_m, begin + i * BLOCK_N, factor,
            problem, False, BAND,
        )  # fmt: skip
    for i in range(gl.maximum(whole, first), tiles):
        acc, weights, row_max, row_sum = _mainloop_step(
            j, consumed_tiles + i, acc, weights, row_max, row_sum, q, smem, start_m, begin + i * BLOCK_N, factor,
            problem, True, BAND,
        )  # fmt: skip
    mbarrier.arrive(smem.q_empty.index(j), count=1)
    final = consumed_tiles + tiles - 1
    mbarrier.wait(smem.v_full.index(final % STAGES), (final // STAGES) & 1)
    acc = warpgroup_mma(weights, _tile(smem.v, final % STAGES), acc)
    mbarrier.arrive(smem.v_empty.index(final % STAGES), count=1)
    return acc, row_max, row_sum


@gluon.jit
def _consumer(
    j: gl.constexpr, BAND: gl.constexpr, out_ptr, lse_ptr, smem, problem, work_tiles, factor, o_b, o_h, o_s, head_dim_v
):  # fmt: skip
    smem, problem = _smem_of(smem), _problem_of(problem)
    ROWS: gl.constexpr = smem.q.shape[0] * BLOCK_M
    q = _tile(smem.q, j)
    consumed_tiles = 0
    for iteration in range(work_tiles):
        head, start_m, begin, edge, whole, tiles = _work_tile(iteration, problem, BAND, ROWS, smem.k.shape[3])
        start_m += j * BLOCK_M
        mbarrier.wait(smem.q_full.index(j), iteration & 1)
        acc, row_max, row_sum = _mainloop(
            j, BAND, q, smem, consumed_tiles, start_m, begin, edge, whole, tiles, factor, problem
        )
        consumed_tiles += tiles

        rows = start_m + gl.arange(0, BLOCK_M, layout=row_max.type.layout)
        gl.store(
            lse_ptr + head.to(gl.int64) * problem.seqlen_q + rows,
            row_max + gl.log2(row_sum),
            mask=rows < problem.seqlen_q,
        )
        total = gl.where(row_sum == 0.0, 1.0, row_sum)  # zeros for a row that sees nothing
        layout: gl.constexpr = acc.type.layout
        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, layout))[:, None]
        rows = start_m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
        cols = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
        at = (head // problem.heads).to(gl.int64) * o_b + (head % problem.heads).to(gl.int64) * o_h
        at += rows.to(gl.int64)[:, None] * o_s + cols[None, :]
        inside = (rows < problem.seqlen_q)[:, None] & (cols < head_dim_v)[None, :]
        gl.store(out_ptr + at, acc.to(smem.k.dtype), mask=inside)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit(do_not_specialize=["first", "last", "section", "fold"])
def _specialized_kernel(
    out_ptr, lse_ptr, q_desc, k_desc, v_desc, factor, o_b, o_h, o_s,
    num_heads, heads, group, seqlen_q, seqlen_k, head_dim_v, first, last, section, fold,
    BAND: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, PINGPONG: gl.constexpr,
):  # fmt: skip
    """``out = softmax(scale · Q Kᵀ) V`` and the log-sum-exp of every row.

    Grid: persistent programs, or one per tile (:func:`_programs`). Warps: CONSUMERS warpgroups and a producer warp.
    Layout: Q, K and V (B, H, S, D) by descriptors, `out` by its strides with dense rows, `lse` (B, H, S) contiguous.
    """
    problem = _Problem(num_heads, heads, group, seqlen_q, seqlen_k, first, last, section, fold)
    work_tiles = _work_tiles(problem, _tiles(seqlen_q, CONSUMERS * BLOCK_M))
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_DV], v_desc.layout)
    q_full, k_full, v_full = _barriers(CONSUMERS, 1), _barriers(STAGES, 1), _barriers(STAGES, 1)
    q_empty, k_empty, v_empty = _barriers(CONSUMERS, 1), _barriers(STAGES, CONSUMERS), _barriers(STAGES, CONSUMERS)
    pingpong = _barriers(CONSUMERS if PINGPONG else 1, 1)
    fence_async_shared()
    smem = _Smem(q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, pingpong)
    consumed = (out_ptr, lse_ptr, smem, problem, work_tiles, factor, o_b, o_h, o_s, head_dim_v)
    produced = (BAND, q_desc, k_desc, v_desc, smem, problem, work_tiles)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (0, BAND) + consumed), (_consumer, (1, BAND) + consumed), (_producer, produced)],
            [4, 1],
            [240, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, BAND) + consumed),
                (_consumer, (1, BAND) + consumed),
                (_consumer, (2, BAND) + consumed),
                (_producer, produced),
            ],
            [4, 4, 1],
            [160, 160, PRODUCER_REGISTERS],
        )


# ---- host ----------------------------------------------------------------------------------------------------------


def unsupported(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    **options: object,
) -> str | None:
    """Why Gluon or descriptors do not take a call, or None."""
    reason = unsupported_by_gluon(query)
    return reason or attention_tma.unsupported(query, key, value, attn_mask, **options)


def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], element)


def _described(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The descriptor of (B, H, S, D), with tiles of one head."""
    return TensorDescriptor(x, *attention_tma.tiles_of(x, rows, columns), _layout(rows, columns, x.dtype))


def configs(width: int) -> list[triton.Config]:
    return [
        triton.Config(
            {"BLOCK_N": n, "STAGES": stages, "CONSUMERS": consumers, "PINGPONG": pingpong}, num_warps=4, num_stages=1
        )
        for n, stages, consumers, pingpong in TILES[width]
    ]


_autotuner = Autotuner(_specialized_kernel)


def _programs(tiles: int, num_heads: int, heads_per_section: int, is_causal: bool, at_once: int) -> tuple[int, int]:
    """(programs, `fold` of :func:`_schedule`).

    Persistent, as many as run at once, where their work is equal; else one program per tile, started as others end.
    """
    total = tiles * num_heads
    if not is_causal:
        return min(total, at_once), 1
    in_pairs = tiles % 2 == 0 or heads_per_section % 2 == num_heads % 2 == 0
    return (at_once, 2) if in_pairs and total // 2 >= 3 * at_once else (total, 1)


def _first(call: Call, output: torch.Tensor, lse: torch.Tensor) -> DescriptorLaunch:
    """Choose a configuration and run it; the returned launch repeats it."""
    batch, heads, seqlen_q, _ = call.q.shape
    block_d, block_dv = call.constants["BLOCK_D"], call.constants["BLOCK_DV"]
    at_once = multiprocessors(call.q.device, 1)

    def launch(config: triton.Config) -> DescriptorLaunch:
        block_n, stages, consumers, pingpong = config.kwargs.values()
        rows = consumers * BLOCK_M.value
        is_causal = call.kind == BELOW_DIAGONAL
        programs, fold = _programs(
            triton.cdiv(seqlen_q, rows), batch * heads, call.heads_per_section, is_causal, at_once
        )
        describe = attention_tma.descriptors(call, _described, BLOCK_M.value, block_n)
        constants = (fold, call.kind, block_d, block_dv, block_n, stages, consumers, pingpong)
        arguments = (*attention_tma.arguments(call, output), *constants)
        return DescriptorLaunch(_specialized_kernel, programs, describe, arguments, {"num_warps": config.num_warps})

    candidates = configs(max(64, block_d, block_dv))
    return _autotuner.launch(attention_tma.tuning_key(call), candidates, launch, output, lse, call.q, call.k, call.v)


attention = forward_by_launch(_first)
