"""Slots in shared memory for rows that come, of which every warp has its own part, in Gluon: what a warp copies there
it alone reads, and so waits for no other.

Triton would have all warps of a block wait between its own copies and loads, and in 3.6 its copies have no cache
policy: without one, memory moves some 4 % less. So they are written out here, as bulk copies (PTX ISA,
``cp.async.bulk``) of a warp's stretch of a row each. They need an address, which Triton does not tell. But where a
kernel has no other shared memory it is known: at the beginning (persistent_launch.py looks at that).

Copies a thread each, ``cp.async``, would need no layout of their own. But of those with a policy ptxas 12.8 makes
invalid instructions where registers are short.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton_impl.common.gluon.cluster_reduce import waiting

#: The policy of lines that leave the L2 after all others (cache_policy.py), as ``createpolicy`` makes it.
_ONCE = gl.constexpr(0x14F0000000000000)


@gluon.constexpr_function
def bases(step, count, dim=1):
    """Of a layout of a matrix: `count` places, a power of two, `step` apart along a dimension."""
    return [[0, step << bit] if dim else [step << bit, 0] for bit in range(count.bit_length() - 1)]


@gluon.constexpr_function
def own_layout(blocks, warps, vector, block):
    """Of a row as a matrix (blocks, part), every warp with a stretch of its block's part; `vector` values a load."""
    of_warp = block // warps
    return gl.DistributedLinearLayout(
        [*bases(1, vector), *bases(32 * vector, of_warp // (32 * vector))],
        bases(vector, 32),
        bases(of_warp, warps),
        bases(1, blocks, 0),
        [blocks, block],
    )


@gluon.constexpr_function
def _slot_layout(blocks):
    """Of rows as matrices (blocks, part), each block's part in its own shared memory."""
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0], cga_layout=[[1 << b, 0] for b in range(blocks.bit_length() - 1)])


@gluon.jit
def slots(COUNT: gl.constexpr, BLOCK: gl.constexpr, DTYPE: gl.constexpr):
    """So many slots for a block's part of rows, BLOCK elements: all that a kernel has of shared memory."""
    return gl.allocate_shared_memory(DTYPE, [COUNT, gl.num_ctas(), BLOCK], _slot_layout(gl.num_ctas()))


@gluon.constexpr_function
def _beginning(barriers, warps, slots, block):
    return f"""
        .shared .align 8 .b8 own_arrived[{8 * barriers * warps}];
        {{
            .reg .pred inits, zeroes, more; .reg .b32 thread, at, to, start, column, barrier, nought;
            mov.u32 thread, %tid.x; setp.lt.u32 inits, thread, {barriers * warps};
            mov.u32 barrier, own_arrived; mad.lo.u32 barrier, thread, 8, barrier;
            @inits mbarrier.init.shared.b64 [barrier], 1;
            @inits fence.mbarrier_init.release.cluster;
            mov.u32 start, %cluster_ctarank; mul.lo.u32 start, start, {block};
            mov.u32 to, global_smem; mov.u32 nought, 0; shl.b32 at, thread, 4;
            next:
            and.b32 column, at, {block - 1}; add.u32 column, column, start; setp.ge.u32 zeroes, column, $1;
            add.u32 column, to, at;
            @zeroes st.shared.v4.b32 [column], {{nought, nought, nought, nought}};
            add.u32 at, at, {512 * warps}; setp.lt.u32 more, at, {slots * block};
            @more bra next;
            mov.u32 $0, 0;
        }}"""


@gluon.jit
def init_stages(COUNT: gl.constexpr, BARRIERS: gl.constexpr, length, BLOCK: gl.constexpr, DTYPE: gl.constexpr):
    """Make so many barriers for every warp, and zeros of all slots past the ends of rows. All must meet before they are
    used.
    """
    SIZE: gl.constexpr = DTYPE.primitive_bitwidth // 8
    text: gl.constexpr = _beginning(BARRIERS, gl.num_warps(), COUNT, BLOCK * SIZE)
    operands = (length * SIZE,)
    gl.inline_asm_elementwise(text, "=r,r", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _barrier_of(barrier, warps):
    """PTX for where the barrier of a number is, `full`, of this `warp`."""
    return f"""
        .reg .b32 number, full;
        mov.u32 full, own_arrived; mad.lo.u32 number, {barrier}, {warps}, warp; mad.lo.u32 full, number, 8, full;"""


@gluon.constexpr_function
def _fetching(rows, once, warps, block):
    hint, policy = (".L2::cache_hint", f", {_ONCE.value:#x}") if once else ("", "")
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
        {_barrier_of("$1", warps)}
        mbarrier.arrive.expect_tx.shared.b64 state, [full], all;
        {copies}
        asked: mov.u32 $0, 0;
    }}"""


@gluon.constexpr_function
def _fetched(rows):
    return ",".join(["=r,r,r,r", *["l"] * rows])


@gluon.jit
def fetch(barrier, slot, pointers, length, BLOCK: gl.constexpr, READ_ONCE: gl.constexpr):
    """Ask for the warp's part of one row or more, which come into as many slots from this one on. Addresses and length
    are multiples of 16 bytes. What lay there its lanes have read. A row of no elements arrives at once.
    """
    SIZE: gl.constexpr = pointers[0].dtype.element_ty.primitive_bitwidth // 8
    text: gl.constexpr = _fetching(len(pointers), READ_ONCE, gl.num_warps(), BLOCK * SIZE)
    constraints: gl.constexpr = _fetched(len(pointers))
    operands = (barrier, slot, length * SIZE)
    operands += pointers
    gl.inline_asm_elementwise(text, constraints, operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _fetching_row(operands, warps, size):
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
    copies = " ".join(
        f"mad.lo.u64 from, far, ${7 + 2 * o}, ${6 + 2 * o}; add.u32 at, to, {o * warps * size};"
        f"@live {copy} [at], [from], $4, [full], {_ONCE.value:#x};"
        for o in range(operands)
    )
    zeros = " ".join(
        f"st.shared.v4.b32 [at+{o * warps * size + byte}], {{n, n, n, n}};"
        for o in range(operands)
        for byte in range(0, size, 512)
    )
    return f"""{{
        .reg .pred live, others; .reg .b32 lane, warp, first, all, to, at, n; .reg .b64 from, far, state;
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid; mov.u32 warp, %tid.x; shr.u32 warp, warp, 5;
        mov.u32 to, global_smem; mad.lo.u32 to, $2, {warps * size}, to; mad.lo.u32 to, warp, {size}, to;
        mul.lo.u32 first, warp, $3; setp.lt.s32 live, first, $5;
        setp.ne.u32 others, lane, 0;
        @others bra asked;
        {_barrier_of("$1", warps)}
        mul.lo.u32 all, $4, {operands}; selp.b32 all, all, 0, live;
        mbarrier.arrive.expect_tx.shared.b64 state, [full], all;
        cvt.u64.u32 far, first;
        {copies}
        asked:
        @live bra there;
        mad.lo.u32 at, lane, 16, to; mov.u32 n, 0;
        {zeros}
        there: mov.u32 $0, 0;
    }}"""


@gluon.constexpr_function
def _fetched_row(operands):
    return ",".join(["=r", *["r"] * 5, *["l"] * (2 * operands)])


@gluon.jit
def fetch_row(barrier, slot, apart, pointers, strides, left, length, BLOCK: gl.constexpr):
    """Ask for a whole row of each operand for every warp, which come into as many slots from this one on. A warp's row
    is `apart` rows after that of the warp before; past the last of `left` rows come zeros.
    """
    SIZE: gl.constexpr = pointers[0].dtype.element_ty.primitive_bitwidth // 8
    text: gl.constexpr = _fetching_row(len(pointers), gl.num_warps(), BLOCK * SIZE)
    constraints: gl.constexpr = _fetched_row(len(pointers))
    operands = (barrier, slot, apart, length * SIZE, left)
    for o in gl.static_range(len(pointers)):
        operands += (pointers[o], strides[o] * SIZE)
    gl.inline_asm_elementwise(text, constraints, operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _waiting(warps):
    return f"""{{
        .reg .pred open; .reg .b32 warp;
        mov.u32 warp, %tid.x; shr.u32 warp, warp, 5;
        {_barrier_of("$1", warps)}
        {waiting("full", "$2")}
        mov.u32 $0, 0;
    }}"""


@gluon.jit
def wait(barrier, parity):
    """Wait for what was asked for at this barrier: the first time with parity 0, then with 1, and so on."""
    text: gl.constexpr = _waiting(gl.num_warps())
    gl.inline_asm_elementwise(text, "=r,r,r", [barrier, parity], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def vector(slot, i, BLOCK: gl.constexpr):
    """Of what lies in a slot, words at columns `i`, of which a thread has four side by side.

    Triton would load a thread's vectors all at once, and registers are short.
    """
    text: gl.constexpr = (
        "{ .reg .b32 at; mov.u32 at, global_smem; add.u32 at, at, $4; ld.shared.v4.b32 {$0, $1, $2, $3}, [at]; }"
    )
    at = (slot * BLOCK + i % BLOCK) * 4
    return gl.inline_asm_elementwise(text, "=r,=r,=r,=r,r,r,r,r", [at], dtype=gl.int32, is_pure=False, pack=4)


@gluon.jit
def hold(slots):
    """Have Triton keep slots which are only read as vectors: memory that it finds no use of it does not ask for."""
    LAYOUT: gl.constexpr = own_layout(gl.num_ctas(), gl.num_warps(), 4, slots.shape[2])
    words = slots.index(0).load(LAYOUT)
    gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [words], dtype=gl.int32, is_pure=False, pack=1)
