"""How the blocks of a cluster add up values turn after turn, in Gluon; cluster.py has a single meeting.

Every block has four boxes, which take turns, each with a barrier that opens when all blocks' values are in it. In a
turn a block calls, in this order: a reduction over its warps, :func:`send`, and :func:`receive` for the turn before. So
the values of a turn have another turn's work to travel. Nothing is written over that is yet to be read, and no byte is
counted for another turn:

- What comes for turn t lies where what came for t − 4 did. A peer sends it once it has received turn t − 2, and so
  after this block sent turn t − 2, which its first warp did behind the barrier in that turn's reduction. Before that
  barrier all warps had received turn t − 4. (Of turn t − 3 some may not have: three boxes would be too few.)
- So the box had opened for turn t − 4 by then. It does not open again before its own block, as it sends turn t, says
  how many bytes are to come, though some may have come before.
- A block that has received the last turn may leave: all that was sent to it has arrived, and whoever it sent to stays
  until that has.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton_impl.cluster import floats

#: Bytes of a box, two values of eight blocks; of all, where their barriers begin; and of both. The last are whole
#: lines, or the shared memory that comes after them would lie across lines.
_BOX, _BARRIERS, _BYTES = gl.constexpr(64), gl.constexpr(256), gl.constexpr(384)


@gluon.constexpr_function
def _beginning_turns():
    """PTX that makes the boxes and their barriers."""
    barriers = range(_BARRIERS.value, _BARRIERS.value + 32, 8)
    inits = " ".join(f"@first mbarrier.init.shared.b64 [boxes+{barrier}], 1;" for barrier in barriers)
    return f"""
        .shared .align 128 .b8 boxes[{_BYTES.value}];
        {{
            .reg .pred first; .reg .b32 thread;
            mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;
            {inits}
            @first fence.mbarrier_init.release.cluster;
            barrier.cluster.arrive.relaxed.aligned;
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
def _sending(blocks, values):
    """PTX that puts a block's values into the turn's box of every block, its own among them."""
    kind, value = ("f32", "$2") if values == 1 else ("v2.f32", "{$2, $3}")
    return f"""{{
        {_finding("$1")}
        .reg .pred sends, first; .reg .b32 thread, rank; .reg .b64 state;
        mov.u32 thread, %tid.x; setp.lt.u32 sends, thread, {blocks}; setp.eq.u32 first, thread, 0;
        @first mbarrier.arrive.expect_tx.shared.b64 state, [full], {4 * blocks * values};
        mov.u32 rank, %cluster_ctarank; mad.lo.u32 box, rank, {4 * values}, box;
        @sends mapa.shared::cluster.u32 box, box, thread;
        @sends mapa.shared::cluster.u32 full, full, thread;
        @sends st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.{kind} [box], {value}, [full];
        mov.u32 $0, 0;
    }}"""


@gluon.constexpr_function
def _receiving(blocks, values):
    """PTX that waits for the turn's box to be full, and adds up what lies there, in the order of the blocks.

    It waits some milliseconds at a time: without a limit the hardware's own is short, and asking again takes slots.
    """
    found = range(0, blocks * values, 2)
    loads = " ".join(f"ld.shared.v2.f32 {{v{i}, v{i + 1}}}, [box+{4 * i}];" for i in found)
    sums = " ".join(f"mov.f32 ${v}, v{v};" for v in range(values))
    adds = " ".join(f"add.f32 ${i % values}, ${i % values}, v{i};" for i in range(values, blocks * values))
    return f"""{{
        {_finding(f"${values}")}
        .reg .pred open; .reg .b32 parity; .reg .f32 v<{blocks * values}>;
        shr.u32 parity, ${values}, 2; and.b32 parity, parity, 1;
        not_yet: mbarrier.try_wait.parity.shared.b64 open, [full], parity, 10000000;
        @!open bra not_yet;
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
def begin_turns():
    """To be called before all else. Loads that follow do not wait."""
    text: gl.constexpr = _beginning_turns()
    gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def all_have_begun():
    """To be called before the first turn."""
    text: gl.constexpr = "barrier.cluster.wait.aligned; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def send(turn, values):
    """Send a block's values, a tuple of one or two (blocks,) that a reduction over its warps has just made."""
    text: gl.constexpr = _sending(gl.num_ctas(), len(values))
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
