"""Stages of shared memory for rows in flight, in Gluon. Each warp copies its own part of a row and alone reads it, so
no warp waits for another.

Triton would make all warps of a block wait between its own copies and loads. In Triton 3.6 its copies have no cache
policy, which costs some 4 % of bandwidth. So the copies are written out here: bulk copies (PTX ISA, ``cp.async.bulk``),
one per row and warp. They need a shared-memory address, which Triton does not tell. In a kernel without other shared
memory the stages are at its start; persistent_launch.py checks that.

Copies by thread, ``cp.async``, would need no layout of their own. But ptxas 12.8 makes invalid instructions of those
with a policy where registers are short.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernel_ladder.tracing import address
from triton_impl.common.gluon.cluster import ALIGNMENT
from triton_impl.common.gluon.cluster_reduce import wait_on_barrier

#: The cache policy evict_last (cache_policy.py), as ``createpolicy`` encodes it.
_EVICT_LAST = gl.constexpr(0x14F0000000000000)


@gluon.constexpr_function
def bases(step, count, dim=1):
    """Bases of a linear layout: `count` positions, a power of two, `step` apart along a dimension of a matrix."""
    return [[0, step << bit] if dim else [step << bit, 0] for bit in range(count.bit_length() - 1)]


@gluon.constexpr_function
def warp_part_layout(blocks, warps, vector, block):
    """Layout of a row as (blocks, part): each warp has a contiguous range of a block's part, `vector` values a load."""
    of_warp = block // warps
    return gl.DistributedLinearLayout(
        [*bases(1, vector), *bases(32 * vector, of_warp // (32 * vector))],
        bases(vector, 32),
        bases(of_warp, warps),
        bases(1, blocks, 0),
        [blocks, block],
    )


@gluon.constexpr_function
def _stage_layout(blocks):
    """Shared-memory layout of rows as (blocks, part), each block's part in its own shared memory."""
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0], cga_layout=[[1 << b, 0] for b in range(blocks.bit_length() - 1)])


@gluon.jit
def allocate_stages(COUNT: gl.constexpr, BLOCK: gl.constexpr, DTYPE: gl.constexpr):
    """COUNT stages of BLOCK elements, a block's part of a row each: all the shared memory of a kernel."""
    return gl.allocate_shared_memory(DTYPE, [COUNT, gl.num_ctas(), BLOCK], _stage_layout(gl.num_ctas()))


@gluon.constexpr_function
def _init_ptx(barriers, warps, stages, block):
    return f"""
        .shared .align 8 .b8 stage_full[{8 * barriers * warps}];
        {{
            .reg .pred inits, zeroes, more; .reg .b32 thread, at, to, start, column, barrier, nought;
            mov.u32 thread, %tid.x; setp.lt.u32 inits, thread, {barriers * warps};
            mov.u32 barrier, stage_full; mad.lo.u32 barrier, thread, 8, barrier;
            @inits mbarrier.init.shared.b64 [barrier], 1;
            @inits fence.mbarrier_init.release.cluster;
            mov.u32 start, %cluster_ctarank; mul.lo.u32 start, start, {block};
            mov.u32 to, global_smem; mov.u32 nought, 0; shl.b32 at, thread, 4;
            next:
            and.b32 column, at, {block - 1}; add.u32 column, column, start; setp.ge.u32 zeroes, column, $1;
            add.u32 column, to, at;
            @zeroes st.shared.v4.b32 [column], {{nought, nought, nought, nought}};
            add.u32 at, at, {512 * warps}; setp.lt.u32 more, at, {stages * block};
            @more bra next;
            mov.u32 $0, 0;
        }}"""


@gluon.jit
def init_stages(COUNT: gl.constexpr, BARRIERS: gl.constexpr, n_cols, BLOCK: gl.constexpr, DTYPE: gl.constexpr):
    """Initialise BARRIERS mbarriers per warp, and zero the stages past the end of a row.

    The cluster must synchronise before they are used.
    """
    SIZE: gl.constexpr = DTYPE.primitive_bitwidth // 8
    text: gl.constexpr = _init_ptx(BARRIERS, gl.num_warps(), COUNT, BLOCK * SIZE)
    operands = (n_cols * SIZE,)
    gl.inline_asm_elementwise(text, "=r,r", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _barrier_address(barrier, warps):
    """PTX for `full`, the address of this `warp`'s barrier of a number."""
    return f"""
        .reg .b32 number, full;
        mov.u32 full, stage_full; mad.lo.u32 number, {barrier}, {warps}, warp; mad.lo.u32 full, number, 8, full;"""


@gluon.constexpr_function
def _bulk_copy_ptx(rows, evict_last, warps, block):
    hint, policy = (".L2::cache_hint", f", {_EVICT_LAST.value:#x}") if evict_last else ("", "")
    copy = f"@asks cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{hint}"
    copies = " ".join(
        f"add.u64 from, ${4 + r}, far; {copy} [to], [from], bytes, [full]{policy}; add.u32 to, to, {block};"
        for r in range(rows)
    )
    return f"""{{
        .reg .pred asks; .reg .b32 lane, warp, start, bytes, all, to; .reg .b64 from, far, state;
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid; setp.ne.u32 asks, lane, 0;
        @asks bra asked;
        mov.u32 warp, %tid.x; shr.u32 warp, warp, 5;
        mov.u32 to, global_smem; mad.lo.u32 to, $2, {block}, to; mad.lo.u32 to, warp, {block // warps}, to;
        mov.u32 start, %cluster_ctarank; mul.lo.u32 start, start, {block};
        mad.lo.u32 start, warp, {block // warps}, start;
        sub.s32 bytes, $3, start; max.s32 bytes, bytes, 0; min.s32 bytes, bytes, {block // warps};
        setp.gt.s32 asks, bytes, 0; cvt.u64.u32 far, start; mul.lo.u32 all, bytes, {rows};
        {_barrier_address("$1", warps)}
        mbarrier.arrive.expect_tx.shared.b64 state, [full], all;
        {copies}
        asked: mov.u32 $0, 0;
    }}"""


@gluon.constexpr_function
def _bulk_copy_constraints(rows):
    return ",".join(["=r,r,r,r", *["l"] * rows])


@gluon.jit
def bulk_copy(barrier, stage, pointers, n_cols, BLOCK: gl.constexpr, READ_EVICT_LAST: gl.constexpr):
    """Start copies of the warp's part of one or more rows into successive stages, from `stage` on.

    They complete on `barrier`. Addresses and row length are multiples of 16 bytes. All lanes of the warp have read what
    the stages held. A row without elements completes at once.
    """
    SIZE: gl.constexpr = pointers[0].dtype.element_ty.primitive_bitwidth // 8
    text: gl.constexpr = _bulk_copy_ptx(len(pointers), READ_EVICT_LAST, gl.num_warps(), BLOCK * SIZE)
    constraints: gl.constexpr = _bulk_copy_constraints(len(pointers))
    operands = (barrier, stage, n_cols * SIZE)
    operands += pointers
    gl.inline_asm_elementwise(text, constraints, operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _wait_ptx(warps):
    return f"""{{
        .reg .pred open; .reg .b32 warp;
        mov.u32 warp, %tid.x; shr.u32 warp, warp, 5;
        {_barrier_address("$1", warps)}
        {wait_on_barrier("full", "$2")}
        mov.u32 $0, 0;
    }}"""


@gluon.jit
def wait_stage(barrier, parity):
    """Wait for the copies on `barrier`; parity is 0 for its first phase, then alternates."""
    text: gl.constexpr = _wait_ptx(gl.num_warps())
    gl.inline_asm_elementwise(text, "=r,r,r", [barrier, parity], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_vector(stage, i, BLOCK: gl.constexpr):
    """The 32-bit words of a stage at columns `i`, four side by side per thread.

    Triton would load all vectors of a thread at once, and registers are short.
    """
    text: gl.constexpr = (
        "{ .reg .b32 at; mov.u32 at, global_smem; add.u32 at, at, $4; ld.shared.v4.b32 {$0, $1, $2, $3}, [at]; }"
    )
    at = (stage * BLOCK + i % BLOCK) * 4
    return gl.inline_asm_elementwise(text, "=r,=r,=r,=r,r,r,r,r", [at], dtype=gl.int32, is_pure=False, pack=4)


@gluon.jit
def keep_stages(stages):
    """Keep Triton from dropping stages that only :func:`load_vector` reads, a use that it does not see."""
    LAYOUT: gl.constexpr = warp_part_layout(gl.num_ctas(), gl.num_warps(), 4, stages.shape[2])
    words = stages.index(0).load(LAYOUT)
    gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [words], dtype=gl.int32, is_pure=False, pack=1)


def for_bulk_copies(x: torch.Tensor, of_stride: int = ALIGNMENT, of_address: int = ALIGNMENT) -> torch.Tensor:
    """`x`, rows or one row, or a dense copy where bulk copies cannot read it.

    They can where the bytes between rows are a multiple of `of_stride`, and the address is one of `of_address`.
    """
    stride = x.dtype.itemsize * x.stride(0) if x.dim() == 2 and x.shape[0] > 1 else 0
    if stride % of_stride == 0 and address(x) % of_address == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
