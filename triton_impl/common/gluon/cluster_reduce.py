"""How the blocks of a cluster add up values turn after turn, in Gluon; cluster.py has a single meeting.

In a turn every warp calls, in this order: :func:`send`, with sums over its own elements, and :func:`receive` for the
turn before. So the values of a turn have another turn's work to travel, and no warp waits for the others of its block:
the last to leave its own adds up what all left, and sends that to all blocks. There are two slots for each warp's
values, with a count of those that have left theirs, and four boxes for the blocks', each with a barrier that opens when
all is there. Nothing is written over that is yet to be read, and no byte is counted for another turn:

- A warp that leaves values for turn t + 2 has received turn t. So its block had sent that, and the warp that did had
  read what all left.
- What comes for turn t + 4 lies where what came for t did. A peer sends it once all of its warps have received turn
  t + 2, which this block sent once all of its own had received turn t.
- So the box had opened for turn t by then. It does not open again before its own block, as it sends turn t + 4, says
  how many bytes are to come, though some may have come before.
- A block that has received the last turn may leave: all that was sent to it has arrived, and whoever it sent to stays
  until that has.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton_impl.common.gluon.cluster import floats

#: Bytes of a box, two values of eight blocks, and of a slot, two values of 32 warps. Where the slots begin, the
#: barriers of boxes and counts of slots; and bytes of all. The last are whole lines, or the shared memory that comes
#: after them would lie across lines.
_BOX, _SLOT = gl.constexpr(64), gl.constexpr(256)
_SLOTS, _BARRIERS, _COUNTS, _BYTES = (gl.constexpr(n) for n in (256, 768, 800, 896))


@gluon.constexpr_function
def waiting(barrier, parity):
    """PTX that waits for a barrier's phase to end, in braces of its own, with a predicate `open`.

    It waits some milliseconds at a time: without a limit the hardware's own is short, and asking again takes slots.
    """
    return f"""not_yet: mbarrier.try_wait.parity.shared.b64 open, [{barrier}], {parity}, 10000000;
        @!open bra not_yet;"""


@gluon.jit
def row_of(turn):
    """A cluster's row in a turn. The rows of a turn lie side by side, so that the last turn's are spread evenly."""
    return (gl.program_id(0) + turn * gl.num_programs(0)).to(gl.int64)


@gluon.constexpr_function
def _beginning_turns():
    """PTX that makes the boxes and their barriers, and counts of slots."""
    boxes = (f"@first mbarrier.init.shared.b64 [boxes+{_BARRIERS.value + 8 * box}], 1;" for box in range(4))
    counts = (f"@first st.shared.b32 [boxes+{_COUNTS.value + 8 * slot}], 0;" for slot in range(2))
    return f"""
        .shared .align 128 .b8 boxes[{_BYTES.value}];
        {{
            .reg .pred first; .reg .b32 thread;
            mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;
            {" ".join([*boxes, *counts])}
            @first fence.mbarrier_init.release.cluster;
            fence.acq_rel.cta; barrier.cluster.arrive.relaxed.aligned;
            mov.u32 $0, 0;
        }}"""


@gluon.constexpr_function
def _finding(turn):
    """PTX for where a turn's `box` is, and its barrier, `full`."""
    return f"""
        .reg .b32 number, box, full;
        and.b32 number, {turn}, 3; mov.u32 full, boxes; mad.lo.u32 box, number, {_BOX.value}, full;
        mad.lo.u32 full, number, 8, full; add.u32 full, full, {_BARRIERS.value};"""


@gluon.constexpr_function
def _sending(blocks, warps, values):
    """PTX that leaves a warp's values in its slot; and by the last warp to do so puts the sums of all into the turn's
    box of every block, its own among them. Whichever that is adds up in the same order.
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
        {_finding("$1")}
        .reg .pred leaves, reads, sends, others; .reg .b32 lane, warp, slot, left, rank, before; .reg .b64 state;
        .reg .f32 v0, v1, other;
        mov.u32 lane, %tid.x; shr.u32 warp, lane, 5; and.b32 lane, lane, 31;
        setp.eq.u32 leaves, lane, 0; mov.u32 before, 0;
        and.b32 number, $1, 1; mov.u32 left, boxes; mad.lo.u32 slot, number, {_SLOT.value}, left;
        mad.lo.u32 left, number, 8, left;
        mad.lo.u32 number, warp, {4 * values}, slot;
        @leaves st.shared.{kind} [number+{_SLOTS.value}], {own};
        @leaves atom.acq_rel.cta.shared.add.u32 before, [left+{_COUNTS.value}], 1;
        shfl.sync.idx.b32 before, before, 0, 31, 0xffffffff;
        and.b32 before, before, {warps - 1}; setp.ne.u32 others, before, {warps - 1};
        @others bra.uni sent;
        bar.warp.sync 0xffffffff;
        setp.lt.u32 reads, lane, {warps}; mad.lo.u32 slot, lane, {4 * values}, slot;
        {zeros}
        @reads ld.shared.{kind} {mine}, [slot+{_SLOTS.value}];
        {sums}
        setp.lt.u32 sends, lane, {blocks};
        @leaves mbarrier.arrive.expect_tx.shared.b64 state, [full], {4 * blocks * values};
        mov.u32 rank, %cluster_ctarank; mad.lo.u32 box, rank, {4 * values}, box;
        @sends mapa.shared::cluster.u32 box, box, lane;
        @sends mapa.shared::cluster.u32 full, full, lane;
        @sends st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.{kind} [box], {mine}, [full];
        sent: mov.u32 $0, 0;
    }}"""


@gluon.constexpr_function
def _receiving(blocks, values):
    """PTX that waits for the turn's box to be full, and adds up what lies there, in the order of the blocks."""
    found = range(0, blocks * values, 2)
    loads = " ".join(f"ld.shared.v2.f32 {{v{i}, v{i + 1}}}, [box+{4 * i}];" for i in found)
    sums = " ".join(f"mov.f32 ${v}, v{v};" for v in range(values))
    adds = " ".join(f"add.f32 ${i % values}, ${i % values}, v{i};" for i in range(values, blocks * values))
    return f"""{{
        {_finding(f"${values}")}
        .reg .pred open; .reg .b32 parity; .reg .f32 v<{blocks * values}>;
        shr.u32 parity, ${values}, 2; and.b32 parity, parity, 1;
        {waiting("full", "parity")}
        {loads}
        {sums}
        {adds}
    }}"""


@gluon.constexpr_function
def _sent(values):
    return ",".join(["=r", "r"] + ["f"] * values)


@gluon.constexpr_function
def _received(values):
    return ",".join(["=&f"] * values + ["r"])


@gluon.jit
def init_cluster_reduce():
    """To be called before all else, save the slots' beginning. Loads that follow do not wait."""
    text: gl.constexpr = _beginning_turns()
    gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_cluster_reduce():
    """To be called before the first turn."""
    text: gl.constexpr = "barrier.cluster.wait.aligned; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def send(turn, values):
    """Send a tuple of one or two sums (blocks, warps), each warp's own."""
    text: gl.constexpr = _sending(gl.num_ctas(), gl.num_warps(), len(values))
    constraints: gl.constexpr = _sent(len(values))
    operands = (gl.zeros_like(values[0]).to(gl.int32) + turn,)
    operands += values
    gl.inline_asm_elementwise(text, constraints, operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def receive(turn, VALUES: gl.constexpr, LAYOUT: gl.constexpr):
    """The sums over all blocks of the values sent in a turn: a tuple of (blocks,) in this layout."""
    text: gl.constexpr = _receiving(gl.num_ctas(), VALUES)
    constraints: gl.constexpr = _received(VALUES)
    types: gl.constexpr = floats(VALUES)
    turns = gl.full([gl.num_ctas()], 0, gl.int32, LAYOUT) + turn
    return gl.inline_asm_elementwise(text, constraints, [turns], dtype=types, is_pure=False, pack=1)
