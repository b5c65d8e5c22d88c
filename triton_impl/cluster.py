"""Rows over the blocks of a thread-block cluster, in Gluon: each block has a part of a row in registers, and the blocks
agree on a maximum or a sum through each other's shared memory (distributed shared memory, PTX ISA, ``mapa``).

Triton 3.9 of its own reduces across a cluster too. In 3.6 its instruction for an address in another block's shared
memory does not compile, so that here it is written out, for all versions.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton_impl.tuning import to_time

#: Blocks of a cluster, the best guess first; more than eight would have to be asked for.
CLUSTERS = (4, 8, 2)
#: Values of a thread, and threads of a block, at most.
PER_THREAD, MOST_WARPS = (32, 16), 32
MAX_LENGTH = CLUSTERS[1] * MOST_WARPS * 32 * PER_THREAD[0]


@gluon.constexpr_function
def row_layout(blocks, warps, vector):
    """Of a row as a matrix (blocks, part), each block of the cluster with its part; `vector` values a load."""
    bases = [[1 << bit, 0] for bit in range(blocks.bit_length() - 1)]
    return gl.BlockedLayout([1, vector], [1, 32], [1, warps], [1, 0], cga_layout=bases)


@gluon.constexpr_function
def _exchange(operation, blocks, first):
    """PTX that leaves a value, the same in all threads of a block, with every block, and combines all blocks' values.

    Each exchange has a place of its own in shared memory, so that none waits for another to be read. At the `first` it
    is made sure that all blocks have started: before that they have no shared memory.
    """
    combine = "".join(f"ld.shared.f32 other, [box+{4 * i}]; {operation}.f32 all, all, other;" for i in range(1, blocks))
    return f"""{{
        .shared .align 16 .b8 box[{4 * blocks}];
        .reg .pred sends; .reg .b32 thread, rank, place; .reg .f32 other, all;
        mov.u32 thread, %tid.x; mov.u32 rank, %cluster_ctarank; mov.u32 place, box;
        mad.lo.u32 place, rank, 4, place; setp.lt.u32 sends, thread, {blocks};
        @sends mapa.shared::cluster.u32 place, place, thread;
        {"barrier.cluster.wait.acquire.aligned;" if first else ""}
        @sends st.shared::cluster.f32 [place], $1;
        barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
        ld.shared.f32 all, [box]; {combine} mov.f32 $0, all;
    }}"""


@gluon.jit
def begin():
    """To be called once, before all else. What is loaded next is under way while the blocks start."""
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.relaxed.aligned; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def over_row(x, OPERATION: gl.constexpr, FIRST: gl.constexpr):
    """A value of each block (blocks,) combined over the cluster: "add", or "max.NaN". FIRST: there was none before."""
    text: gl.constexpr = _exchange(OPERATION, gl.num_ctas(), FIRST)
    return gl.inline_asm_elementwise(text, "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def columns(BLOCK: gl.constexpr, VECTOR: gl.constexpr):
    """The columns of a row that a block of the cluster has, (blocks, BLOCK), in the layout of its values."""
    layout: gl.constexpr = row_layout(gl.num_ctas(), gl.num_warps(), VECTOR)
    part = gl.arange(0, gl.num_ctas(), layout=gl.SliceLayout(1, layout))
    return part[:, None] * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))[None, :]


# ---- host ----------------------------------------------------------------------------------------------------------


def vector_of(dtype: torch.dtype) -> int:
    return 16 // dtype.itemsize


def configs(length: int) -> list[triton.Config]:
    """Configurations for rows of a length, best first: a thread has some of PER_THREAD values, in powers of two."""
    found = []
    for blocks in CLUSTERS:
        block = triton.next_power_of_2(length) // blocks
        for values in PER_THREAD:
            warps = block // (32 * values)
            if 4 <= warps <= MOST_WARPS:
                found.append(triton.Config({"BLOCK": block}, num_warps=warps, num_stages=1, num_ctas=blocks))
    return to_time(found)


def too_short_or_long(length: int, shortest: int) -> str | None:
    """Why rows of a length are not for a cluster, or None."""
    if shortest <= length <= MAX_LENGTH:
        return None
    return f"rows of {length} elements are not spread over a cluster; those of {shortest} to {MAX_LENGTH} are"
