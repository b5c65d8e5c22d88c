"""Sums over a cluster, once per iteration of a persistent kernel, in Gluon; cluster.py has a single exchange.

In an iteration every warp calls :func:`reduce_arrive` with sums over its own elements, then :func:`reduce_wait` for the
iteration before. So values have one iteration to travel, and no warp waits for another of its block. The last warp to
store its values adds up those of all warps. It sends the sum to all blocks with ``st.async``.

Scratch: two buffers for the values of warps, each with a count of arrivals. Four buffers hold those of blocks, each
with an mbarrier that completes when all values are there. No buffer is overwritten before it is read, and no byte is
counted for another iteration:

- A warp that stores values for iteration t + 2 has waited for iteration t. So its block had sent t, and the warp that
  sent it had read what all warps stored.
- Values of iteration t + 4 use the buffer of t. A peer sends them once all of its warps have waited for t + 2, which
  this block sent once all of its own warps had waited for t.
- So the barrier had completed for t by then. It does not complete again before its own block, sending t + 4, sets the
  expected bytes, though some may have come before.
- A block that has waited for the last iteration may exit. All that was sent to it has arrived; the blocks that it sent
  to wait for theirs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton_impl.common.gluon.cluster import floats

#: Bytes of a block buffer, two values of eight blocks, and of a warp buffer, two values of 32 warps. Offsets of the
#: warp buffers, of the barriers and of the arrival counts; and the size of all, a multiple of 128 bytes, so that the
#: shared memory behind it is aligned.
_BLOCK_BUFFER = gl.constexpr(64)
_WARP_BUFFER = gl.constexpr(256)
_WARP_BUFFERS, _BARRIERS, _COUNTS, _BYTES = (gl.constexpr(n) for n in (256, 768, 800, 896))


@gluon.constexpr_function
def wait_on_barrier(barrier, parity):
    """PTX that waits for a barrier's phase, in braces of its own, with a predicate `open`.

    It suspends the thread for some milliseconds at a time: the hardware's own limit is short, and polling takes issue
    slots.
    """
    return f"""not_yet: mbarrier.try_wait.parity.shared.b64 open, [{barrier}], {parity}, 10000000;
        @!open bra not_yet;"""


@gluon.jit
def row_of(iteration):
    """A cluster's row in an iteration: neighbours have neighbouring rows, which spreads the last ones evenly."""
    return (gl.program_id(0) + iteration * gl.num_programs(0)).to(gl.int64)


@gluon.constexpr_function
def _init_ptx():
    """PTX that allocates the scratch, and initialises barriers and arrival counts."""
    reduce_smem = (
        f"@first mbarrier.init.shared.b64 [reduce_smem+{_BARRIERS.value + 8 * buffer}], 1;" for buffer in range(4)
    )
    counts = (f"@first st.shared.b32 [reduce_smem+{_COUNTS.value + 8 * slot}], 0;" for slot in range(2))
    return f"""
        .shared .align 128 .b8 reduce_smem[{_BYTES.value}];
        {{
            .reg .pred first; .reg .b32 thread;
            mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;
            {" ".join([*reduce_smem, *counts])}
            @first fence.mbarrier_init.release.cluster;
            fence.acq_rel.cta; barrier.cluster.arrive.relaxed.aligned;
            mov.u32 $0, 0;
        }}"""


@gluon.constexpr_function
def _buffer_address(iteration):
    """PTX for the addresses of an iteration's block `buffer` and of its barrier, `full`."""
    return f"""
        .reg .b32 number, buffer, full;
        and.b32 number, {iteration}, 3; mov.u32 full, reduce_smem;
        mad.lo.u32 buffer, number, {_BLOCK_BUFFER.value}, full;
        mad.lo.u32 full, number, 8, full; add.u32 full, full, {_BARRIERS.value};"""


@gluon.constexpr_function
def _arrive_ptx(blocks, warps, values):
    """PTX that stores a warp's values; the last warp to do so sends the block's sums to the buffers of all blocks.

    Whichever warp that is adds in the same order.
    """
    kind = "f32" if values == 1 else "v2.f32"
    own, mine = ("$2", "v0") if values == 1 else ("{$2, $3}", "{v0, v1}")
    zeros = " ".join(f"mov.f32 v{v}, 0f00000000;" for v in range(values))
    lanes = max(warps, blocks)  # that are to know the sums
    steps = [lanes // 2 >> bit for bit in range(lanes.bit_length() - 1)]
    sums = " ".join(
        f"shfl.sync.bfly.b32 other, v{v}, {step}, 31, 0xffffffff; add.f32 v{v}, v{v}, other;"
        for step in steps
        for v in range(values)
    )
    return f"""{{
        {_buffer_address("$1")}
        .reg .pred leaves, reads, sends, others; .reg .b32 lane, warp, slot, left, rank, before; .reg .b64 state;
        .reg .f32 v0, v1, other;
        mov.u32 lane, %tid.x; shr.u32 warp, lane, 5; and.b32 lane, lane, 31;
        setp.eq.u32 leaves, lane, 0; mov.u32 before, 0;
        and.b32 number, $1, 1; mov.u32 left, reduce_smem; mad.lo.u32 slot, number, {_WARP_BUFFER.value}, left;
        mad.lo.u32 left, number, 8, left;
        mad.lo.u32 number, warp, {4 * values}, slot;
        @leaves st.shared.{kind} [number+{_WARP_BUFFERS.value}], {own};
        @leaves atom.acq_rel.cta.shared.add.u32 before, [left+{_COUNTS.value}], 1;
        shfl.sync.idx.b32 before, before, 0, 31, 0xffffffff;
        and.b32 before, before, {warps - 1}; setp.ne.u32 others, before, {warps - 1};
        @others bra.uni sent;
        bar.warp.sync 0xffffffff;
        setp.lt.u32 reads, lane, {warps}; mad.lo.u32 slot, lane, {4 * values}, slot;
        {zeros}
        @reads ld.shared.{kind} {mine}, [slot+{_WARP_BUFFERS.value}];
        {sums}
        setp.lt.u32 sends, lane, {blocks};
        @leaves mbarrier.arrive.expect_tx.shared.b64 state, [full], {4 * blocks * values};
        mov.u32 rank, %cluster_ctarank; mad.lo.u32 buffer, rank, {4 * values}, buffer;
        @sends mapa.shared::cluster.u32 buffer, buffer, lane;
        @sends mapa.shared::cluster.u32 full, full, lane;
        @sends st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.{kind} [buffer], {mine}, [full];
        sent: mov.u32 $0, 0;
    }}"""


@gluon.constexpr_function
def _wait_ptx(blocks, values):
    """PTX that waits until an iteration's buffer is full, and adds its values in the order of the blocks."""
    found = range(0, blocks * values, 2)
    loads = " ".join(f"ld.shared.v2.f32 {{v{i}, v{i + 1}}}, [buffer+{4 * i}];" for i in found)
    sums = " ".join(f"mov.f32 ${v}, v{v};" for v in range(values))
    adds = " ".join(f"add.f32 ${i % values}, ${i % values}, v{i};" for i in range(values, blocks * values))
    return f"""{{
        {_buffer_address(f"${values}")}
        .reg .pred open; .reg .b32 parity; .reg .f32 v<{blocks * values}>;
        shr.u32 parity, ${values}, 2; and.b32 parity, parity, 1;
        {wait_on_barrier("full", "parity")}
        {loads}
        {sums}
        {adds}
    }}"""


@gluon.constexpr_function
def _arrive_constraints(values):
    return ",".join(["=r", "r"] + ["f"] * values)


@gluon.constexpr_function
def _wait_constraints(values):
    return ",".join(["=&f"] * values + ["r"])


@gluon.jit
def init_cluster_reduce():
    """Allocate and initialise the scratch: the first call of a kernel but for the stages'. Later loads do not wait."""
    text: gl.constexpr = _init_ptx()
    gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_cluster_reduce():
    """Wait until all blocks of the cluster have initialised: before the first iteration."""
    text: gl.constexpr = "barrier.cluster.wait.aligned; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def reduce_arrive(iteration, values):
    """Contribute one or two sums, (blocks, warps), each warp's own, to an iteration."""
    text: gl.constexpr = _arrive_ptx(gl.num_ctas(), gl.num_warps(), len(values))
    constraints: gl.constexpr = _arrive_constraints(len(values))
    operands = (gl.zeros_like(values[0]).to(gl.int32) + iteration,)
    operands += values
    gl.inline_asm_elementwise(text, constraints, operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def reduce_wait(iteration, VALUES: gl.constexpr, LAYOUT: gl.constexpr):
    """An iteration's sums over the cluster: a tuple of (blocks,) in LAYOUT."""
    text: gl.constexpr = _wait_ptx(gl.num_ctas(), VALUES)
    constraints: gl.constexpr = _wait_constraints(VALUES)
    types: gl.constexpr = floats(VALUES)
    iterations = gl.full([gl.num_ctas()], 0, gl.int32, LAYOUT) + iteration
    return gl.inline_asm_elementwise(text, constraints, [iterations], dtype=types, is_pure=False, pack=1)
