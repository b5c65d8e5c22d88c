"""Attention whose warps have different work, in Gluon, Triton's language below Triton.

One warp has the copy engine fetch keys and values into a ring of tiles in shared memory. Warpgroups of four warps each
have 64 queries; in each, the scores of the next tile and the product of the last tile's weights with its values are
under way while weights are made (Shah et al., FlashAttention-3, arXiv:2407.08608). That takes what Triton does not say:
which warps do what, and which of two products to wait for.
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
from triton_impl.attention.call import Call, launched_by
from triton_impl.attention.tiles import BELOW_DIAGONAL
from triton_impl.common.gluon.requirements import unsupported as unsupported_by_gluon
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.descriptor_launch import DescriptorLaunch

#: Queries of a warpgroup.
BLOCK_M = gl.constexpr(64)
PRODUCER_REGISTERS = gl.constexpr(24)

#: Choices to time, as (keys of a tile, tiles of each in shared memory, warpgroups, whether those start products in
#: turns), by the wider head dimension.
CHOICES = {
    64: ((128, 2, 2, True), (128, 2, 3, True)),
    128: ((128, 2, 2, False), (128, 2, 2, True)),
    256: ((64, 2, 2, False),),
}

# As it is called in later versions.
_fetch_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


class _Extent(NamedTuple):
    """Of the operands, and which keys a query sees: see attention_tiles.hide."""

    num_heads: Any  # of all batches
    heads: Any
    group: Any
    seqlen_q: Any
    seqlen_k: Any
    first: Any
    last: Any
    section: Any
    fold: Any


class _Memory(NamedTuple):
    """Tiles in shared memory, and barriers: what is full has been fetched, what is empty may be fetched anew."""

    q: Any  # one a warpgroup
    k: Any
    v: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    order: Any  # whose turn it is, a warpgroup each; one where there are no turns


# What is handed to warps forgets its names on the way.


@gluon.jit
def _extent_of(x):
    return _Extent(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8])


@gluon.jit
def _memory_of(x):
    return _Memory(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9])


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _tiles(extent, ROWS: gl.constexpr):
    """Tiles of queries of a head."""
    return (extent.seqlen_q + ROWS - 1) // ROWS


@gluon.jit
def _turns(extent, ROWS: gl.constexpr):
    """How many tiles this program takes."""
    share = _tiles(extent, ROWS) * extent.num_heads // extent.fold - gl.program_id(0)
    return extent.fold * ((share + gl.num_programs(0) - 1) // gl.num_programs(0))


@gluon.jit
def _place(turn, extent, BAND: gl.constexpr, ROWS: gl.constexpr):
    """(tile, head) at a turn. Sections of heads come one after another, as in attention_tiles.program_tile, and in a
    section tile by tile, the longest causal tiles first. With a `fold` of two a program takes them in pairs, of a place
    and of that as far from the section's end: under a causal mask all pairs are of one length."""
    fold, section = extent.fold, extent.section
    tiles = _tiles(extent, ROWS)
    share = section * tiles // fold
    unit = gl.program_id(0) + turn // fold * gl.num_programs(0)
    before = unit // share * section
    width = gl.minimum(section, extent.num_heads - before)
    place = unit % share
    if turn % fold == 1:
        place = width * tiles - 1 - place
    tile = place // width
    if BAND == 1:
        tile = tiles - 1 - tile
    return tile, before + place % width


@gluon.jit
def _key_range(start_m, rows, extent, BAND: gl.constexpr, BLOCK_N: gl.constexpr):
    """The first key that one of `rows` queries sees, and how many tiles from there on all see whole, and one sees."""
    begin = 0
    seqlen_k = extent.seqlen_k
    whole = seqlen_k // BLOCK_N
    end = seqlen_k
    if BAND != 0:
        end = gl.maximum(gl.minimum(seqlen_k, start_m + rows + extent.last), 0)
        whole = gl.maximum(gl.minimum(seqlen_k, start_m + 1 + extent.last), 0) // BLOCK_N
    if BAND == 2:
        begin = gl.maximum(start_m + extent.first, 0) // BLOCK_N * BLOCK_N
        whole = 0
    # At least one, hidden if need be, so that every row comes to a result.
    return begin, whole, gl.maximum((end - begin + BLOCK_N - 1) // BLOCK_N, 1)


@gluon.jit
def _work(turn, extent, BAND: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Head and first query of the tile at a turn, and as _key_range the keys it sees."""
    tile, head = _place(turn, extent, BAND, ROWS)
    begin, whole, tiles = _key_range(tile * ROWS, ROWS, extent, BAND, BLOCK_N)
    return head, tile * ROWS, begin, whole, tiles


@gluon.jit
def _produce(BAND: gl.constexpr, q_desc, k_desc, v_desc, memory, extent, turns):
    memory, extent = _memory_of(memory), _extent_of(extent)
    CONSUMERS: gl.constexpr = memory.q.shape[0]
    STAGES: gl.constexpr = memory.k.shape[0]
    BLOCK_N: gl.constexpr = memory.k.shape[3]
    BLOCK_D: gl.constexpr = memory.k.shape[4]
    BLOCK_DV: gl.constexpr = memory.v.shape[4]
    fetched = 0
    for turn in range(turns):
        head, start_m, begin, _, tiles = _work(turn, extent, BAND, CONSUMERS * BLOCK_M, BLOCK_N)
        b, h = head // extent.heads, head % extent.heads
        h_kv = h // extent.group
        for i in range(tiles):
            stage = fetched % STAGES
            free = ((fetched // STAGES) & 1) ^ 1
            mbarrier.wait(memory.k_empty.index(stage), free)
            mbarrier.expect(memory.k_full.index(stage), BLOCK_N * BLOCK_D * 2)
            _fetch_tile(k_desc, [b, h_kv, begin + i * BLOCK_N, 0], memory.k_full.index(stage), memory.k.index(stage))
            if i == 0:
                for j in gl.static_range(CONSUMERS):
                    mbarrier.wait(memory.q_empty.index(j), (turn & 1) ^ 1)
                    mbarrier.expect(memory.q_full.index(j), BLOCK_M * BLOCK_D * 2)
                    _fetch_tile(q_desc, [b, h, start_m + j * BLOCK_M, 0], memory.q_full.index(j), memory.q.index(j))
            mbarrier.wait(memory.v_empty.index(stage), free)
            mbarrier.expect(memory.v_full.index(stage), BLOCK_N * BLOCK_DV * 2)
            _fetch_tile(v_desc, [b, h_kv, begin + i * BLOCK_N, 0], memory.v_full.index(stage), memory.v.index(stage))
            fetched += 1


@gluon.jit
def _hide(scores, start_m, start_n, extent, BAND: gl.constexpr):
    """Scores, −inf where a query does not see a key."""
    layout: gl.constexpr = scores.type.layout
    BLOCK_N: gl.constexpr = scores.shape[1]
    rows = (start_m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout)))[:, None]
    cols = (start_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout)))[None, :]
    seen = cols < extent.seqlen_k
    if BAND != 0:
        seen = seen & (cols <= rows + extent.last)
    if BAND == 2:
        seen = seen & (cols >= rows + extent.first)
    return gl.where(seen, scores, -float("inf"))


@gluon.jit
def _weigh(scores, factor, row_max, row_sum):
    """Weights of a tile, what those before it are to be multiplied by, and the running sum and maximum."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * factor)
    # While a row has met nothing but −inf, nothing is subtracted: its exponentials are 0, not NaN.
    shift = gl.where(new_max == -float("inf"), 0.0, new_max)
    weights = _exp2(scores * factor - shift[:, None])
    correction = _exp2(row_max - shift)
    return weights, correction, new_max, row_sum * correction + gl.sum(weights, 1)


@gluon.jit
def _tile(smem, i):
    """The i-th of several tiles (1, 1, rows, columns), as a matrix."""
    return smem.index(i).reshape([smem.shape[3], smem.shape[4]])


@gluon.jit
def _scores(q, k_smem, stage):
    """The product of queries and a tile of keys, under way."""
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    nothing = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, layout)
    return warpgroup_mma(q, _tile(k_smem, stage).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _await_turn(j: gl.constexpr, step, order):
    if order.shape[0] > 1:
        mbarrier.wait(order.index(j), (step & 1) ^ (j == 0))


@gluon.jit
def _pass_turn(j: gl.constexpr, order):
    if order.shape[0] > 1:
        mbarrier.arrive(order.index((j + 1) % order.shape[0]), count=1)


@gluon.jit
def _step(
    j: gl.constexpr, i, acc, weights, row_max, row_sum, q, memory, start_m, start_n, factor, extent, MASKED, BAND
):  # fmt: skip
    """Weights of the i-th tile of keys, while those of the tile before are multiplied with its values."""
    STAGES: gl.constexpr = memory.k.shape[0]
    stage, before = i % STAGES, (i - 1) % STAGES
    mbarrier.wait(memory.k_full.index(stage), (i // STAGES) & 1)
    _await_turn(j, i, memory.order)
    scores = _scores(q, memory.k, stage)
    mbarrier.wait(memory.v_full.index(before), ((i - 1) // STAGES) & 1)
    product = warpgroup_mma(weights, _tile(memory.v, before), acc, is_async=True)
    _pass_turn(j, memory.order)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(memory.k_empty.index(stage), count=1)
    if MASKED:
        scores = _hide(scores, start_m, start_n, extent, BAND)
    made, correction, row_max, row_sum = _weigh(scores, factor, row_max, row_sum)
    acc, _ = warpgroup_mma_wait(0, deps=[product, weights])  # which the product reads from registers until now
    mbarrier.arrive(memory.v_empty.index(before), count=1)
    acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, gl.convert_layout(made.to(memory.k.dtype), weights.type.layout), row_max, row_sum


@gluon.jit
def _attend(j: gl.constexpr, BAND: gl.constexpr, q, memory, taken, start_m, begin, whole, tiles, factor, extent):
    """The result of a tile of queries, not yet divided by the sums of its weights, those sums and the maxima."""
    STAGES: gl.constexpr = memory.k.shape[0]
    BLOCK_N: gl.constexpr = memory.k.shape[3]
    BLOCK_DV: gl.constexpr = memory.v.shape[4]
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    mbarrier.wait(memory.k_full.index(taken % STAGES), (taken // STAGES) & 1)
    _await_turn(j, taken, memory.order)
    scores = _scores(q, memory.k, taken % STAGES)
    _pass_turn(j, memory.order)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(memory.k_empty.index(taken % STAGES), count=1)
    scores = _hide(scores, start_m, begin, extent, BAND)
    of_rows: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    row_max = gl.full([BLOCK_M], -float("inf"), gl.float32, of_rows)
    row_sum = gl.full([BLOCK_M], 0.0, gl.float32, of_rows)
    made, _, row_max, row_sum = _weigh(scores, factor, row_max, row_sum)
    weights = gl.convert_layout(made.to(memory.k.dtype), gl.DotOperandLayout(0, acc_layout, 2))
    acc = gl.full([BLOCK_M, BLOCK_DV], 0.0, gl.float32, acc_layout)
    for i in range(1, whole):
        acc, weights, row_max, row_sum = _step(
            j, taken + i, acc, weights, row_max, row_sum, q, memory, start_m, begin + i * BLOCK_N, factor,
            extent, False, BAND,
        )  # fmt: skip
    for i in range(gl.maximum(whole, 1), tiles):
        acc, weights, row_max, row_sum = _step(
            j, taken + i, acc, weights, row_max, row_sum, q, memory, start_m, begin + i * BLOCK_N, factor,
            extent, True, BAND,
        )  # fmt: skip
    mbarrier.arrive(memory.q_empty.index(j), count=1)
    final = taken + tiles - 1
    mbarrier.wait(memory.v_full.index(final % STAGES), (final // STAGES) & 1)
    acc = warpgroup_mma(weights, _tile(memory.v, final % STAGES), acc)
    mbarrier.arrive(memory.v_empty.index(final % STAGES), count=1)
    return acc, row_max, row_sum


@gluon.jit
def _consume(
    j: gl.constexpr, BAND: gl.constexpr, out_ptr, lse_ptr, memory, extent, turns, factor, o_b, o_h, o_s, head_dim_v
):  # fmt: skip
    memory, extent = _memory_of(memory), _extent_of(extent)
    ROWS: gl.constexpr = memory.q.shape[0] * BLOCK_M
    q = _tile(memory.q, j)
    taken = 0
    for turn in range(turns):
        head, start_m, begin, whole, tiles = _work(turn, extent, BAND, ROWS, memory.k.shape[3])
        start_m += j * BLOCK_M
        mbarrier.wait(memory.q_full.index(j), turn & 1)
        acc, row_max, row_sum = _attend(j, BAND, q, memory, taken, start_m, begin, whole, tiles, factor, extent)
        taken += tiles

        rows = start_m + gl.arange(0, BLOCK_M, layout=row_max.type.layout)
        gl.store(
            lse_ptr + head.to(gl.int64) * extent.seqlen_q + rows,
            row_max + gl.log2(row_sum),
            mask=rows < extent.seqlen_q,
        )
        total = gl.where(row_sum == 0.0, 1.0, row_sum)  # zeros for a row that sees nothing
        layout: gl.constexpr = acc.type.layout
        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, layout))[:, None]
        rows = start_m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
        cols = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
        at = (head // extent.heads).to(gl.int64) * o_b + (head % extent.heads).to(gl.int64) * o_h
        at += rows.to(gl.int64)[:, None] * o_s + cols[None, :]
        inside = (rows < extent.seqlen_q)[:, None] & (cols < head_dim_v)[None, :]
        gl.store(out_ptr + at, acc.to(memory.k.dtype), mask=inside)


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
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    extent = _Extent(num_heads, heads, group, seqlen_q, seqlen_k, first, last, section, fold)
    turns = _turns(extent, CONSUMERS * BLOCK_M)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_DV], v_desc.layout)
    q_full, k_full, v_full = _barriers(CONSUMERS, 1), _barriers(STAGES, 1), _barriers(STAGES, 1)
    q_empty, k_empty, v_empty = _barriers(CONSUMERS, 1), _barriers(STAGES, CONSUMERS), _barriers(STAGES, CONSUMERS)
    order = _barriers(CONSUMERS if ORDERED else 1, 1)
    fence_async_shared()
    memory = _Memory(q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, order)
    consumed = (out_ptr, lse_ptr, memory, extent, turns, factor, o_b, o_h, o_s, head_dim_v)
    produced = (BAND, q_desc, k_desc, v_desc, memory, extent, turns)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consume, (0, BAND) + consumed), (_consume, (1, BAND) + consumed), (_produce, produced)],
            [4, 1],
            [240, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, BAND) + consumed),
                (_consume, (1, BAND) + consumed),
                (_consume, (2, BAND) + consumed),
                (_produce, produced),
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
    """As of `triton.tma`; and what Gluon asks for."""
    reason = unsupported_by_gluon(query)
    return reason or attention_tma.unsupported(query, key, value, attn_mask, **options)


def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], element)


def _described(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """(B, H, S, D), fetched by tiles of one head."""
    return TensorDescriptor(x, *attention_tma.tiles_of(x, rows, columns), _layout(rows, columns, x.dtype))


def configs(width: int) -> list[triton.Config]:
    return [
        triton.Config(
            {"BLOCK_N": n, "STAGES": stages, "CONSUMERS": consumers, "ORDERED": ordered}, num_warps=4, num_stages=1
        )
        for n, stages, consumers, ordered in CHOICES[width]
    ]


_choose = Autotuner(_specialized_kernel)


def _programs(tiles: int, num_heads: int, together: int, is_causal: bool, at_once: int) -> tuple[int, int]:
    """How many programs, and the `fold` of _place: as many as run at once where their shares of work are equal, or else
    one for every tile, which start as others end."""
    total = tiles * num_heads
    if not is_causal:
        return min(total, at_once), 1
    in_pairs = tiles % 2 == 0 or together % 2 == num_heads % 2 == 0
    return (at_once, 2) if in_pairs and total // 2 >= 3 * at_once else (total, 1)


def _first(call: Call, output: torch.Tensor, lse: torch.Tensor) -> DescriptorLaunch:
    """Choose a configuration and run it; what is returned does it again."""
    batch, heads, seqlen_q, _ = call.q.shape
    block_d, block_dv = call.constants["BLOCK_D"], call.constants["BLOCK_DV"]
    at_once = multiprocessors(call.q.device, 1)

    def launch(config: triton.Config) -> DescriptorLaunch:
        block_n, stages, consumers, ordered = config.kwargs.values()
        rows = consumers * BLOCK_M.value
        is_causal = call.kind == BELOW_DIAGONAL
        programs, fold = _programs(triton.cdiv(seqlen_q, rows), batch * heads, call.together, is_causal, at_once)
        describe = attention_tma.descriptors(call, _described, BLOCK_M.value, block_n)
        constants = (fold, call.kind, block_d, block_dv, block_n, stages, consumers, ordered)
        arguments = (*attention_tma.arguments(call, output), *constants)
        return DescriptorLaunch(_specialized_kernel, programs, describe, arguments, {"num_warps": config.num_warps})

    candidates = configs(max(64, block_d, block_dv))
    return _choose.launch(attention_tma.tuning_key(call), candidates, launch, output, lse, call.q, call.k, call.v)


attention = launched_by(_first)
