"""Rows over the blocks of a thread-block cluster, in Gluon: each block has a part of a row in registers, and the blocks
agree on a maximum or a sum through each other's shared memory (distributed shared memory, PTX ISA, ``mapa``). A row
that one block has room for may be that block's alone.

A part is worked on a vector a thread at a time, from a tuple of its vectors. Between loading and storing it keeps the
type of memory: of 16 bits, two values a register, so that twice as much of the rows is under way.

Triton 3.9 of its own reduces across a cluster too. In 3.6 its instruction for an address in another block's shared
memory does not compile, so that here it is written out, for all versions.
"""

from __future__ import annotations

from itertools import product

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton_impl import multiprocessors
from triton_impl.common.cache_policy import EVICTION_OF_SINGLE_USE
from triton_impl.runtime.launch_cache import to_time

#: Blocks of a cluster at most; more would have to be asked for.
MOST_BLOCKS = 8
#: Warps of a block, the best guess first, and registers of a thread: with these two such blocks fit a multiprocessor.
WARPS, REGISTERS = (16, 8, 32), 64
#: Warps of a block that has a row alone, likewise.
ALONE = (16, 8, 4)
#: Registers that a thread's part of a row takes: in a cluster the more are the better guess, alone the fewer.
KEPT = (32, 16)
#: Bytes of the longest row: of two operands a thread has half as many.
MAX_BYTES = MOST_BLOCKS * 32 * max(WARPS) * max(KEPT) // 2 * 4

#: What length and strides of rows, and addresses, are multiples of where a kernel takes whole vectors alone, in bytes.
MULTIPLE = 16


@gluon.constexpr_function
def row_layout(blocks, warps, vector):
    """Of a row as a matrix (blocks, part), each block of the cluster with its part; `vector` values a load."""
    bases = [[1 << bit, 0] for bit in range(blocks.bit_length() - 1)]
    return gl.BlockedLayout([1, vector], [1, 32], [1, warps], [1, 0], cga_layout=bases)


@gluon.constexpr_function
def _beginning(blocks, values):
    """PTX that makes a box for values of all blocks, and a barrier that opens when it is full."""
    return f"""
        .shared .align 8 .b64 box_full;
        .shared .align 16 .b8 box[{4 * blocks * values}];
        {{
            .reg .pred first; .reg .b32 thread; .reg .b64 state;
            mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;
            @first mbarrier.init.shared.b64 [box_full], 1;
            @first mbarrier.arrive.expect_tx.shared.b64 state, [box_full], {4 * blocks * values};
            @first fence.mbarrier_init.release.cluster;
            barrier.cluster.arrive.relaxed.aligned;
            mov.u32 $0, 0;
        }}"""


@gluon.constexpr_function
def _meeting(blocks, values):
    """PTX that puts values, each the same in all threads of a block, into every block's box, and reads its own box.

    What is sent to a block that has begun says itself when it has arrived: so nobody waits for what else is under way,
    as they would at the cluster's own barrier with its release and acquire.
    """
    outputs = blocks * values
    send = "@sends st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32"
    sends = " ".join(f"{send} [place+{4 * v}], ${outputs + v}, [full];" for v in range(values))
    loads = " ".join(f"ld.shared.f32 ${i}, [box+{4 * i}];" for i in range(outputs))
    return f"""{{
        .reg .pred sends, open; .reg .b32 thread, rank, place, full;
        mov.u32 thread, %tid.x; mov.u32 rank, %cluster_ctarank; setp.lt.u32 sends, thread, {blocks};
        mov.u32 place, box; mad.lo.u32 place, rank, {4 * values}, place; mov.u32 full, box_full;
        @sends mapa.shared::cluster.u32 place, place, thread;
        @sends mapa.shared::cluster.u32 full, full, thread;
        barrier.cluster.wait.aligned;
        {sends}
        not_yet: mbarrier.try_wait.parity.shared.b64 open, [box_full], 0;
        @!open bra not_yet;
        {loads}
    }}"""


@gluon.constexpr_function
def _constraints(blocks, values):
    return ",".join(["=f"] * (blocks * values) + ["f"] * values)


@gluon.constexpr_function
def floats(count):
    return (gl.float32,) * count


@gluon.jit
def begin(VALUES: gl.constexpr):
    """To be called before all else, with how many values the blocks will exchange. Loads that follow do not wait."""
    if gl.num_ctas() > 1:
        text: gl.constexpr = _beginning(gl.num_ctas(), VALUES)
        gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def meet(values):
    """The values of all blocks, first those of the first block, from a tuple of a block's values (blocks,). Once."""
    blocks: gl.constexpr = gl.num_ctas()
    if blocks == 1:
        return values
    else:
        text: gl.constexpr = _meeting(blocks, len(values))
        constraints: gl.constexpr = _constraints(blocks, len(values))
        types: gl.constexpr = floats(blocks * len(values))
        return gl.inline_asm_elementwise(text, constraints, values, dtype=types, is_pure=False, pack=1)


@gluon.jit
def columns(BLOCK: gl.constexpr, VECTOR: gl.constexpr):
    """The columns of a part's first vectors, (blocks, a vector of each thread): the next come that much further on."""
    layout: gl.constexpr = row_layout(gl.num_ctas(), gl.num_warps(), VECTOR)
    step: gl.constexpr = gl.num_warps() * 32 * VECTOR
    part = gl.arange(0, gl.num_ctas(), layout=gl.SliceLayout(1, layout))
    return part[:, None] * BLOCK + gl.arange(0, step, layout=gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def by_warp(x):
    """A vector (blocks, elements) as (blocks, warps, elements of a warp)."""
    return x.reshape([x.shape[0], gl.num_warps(), x.shape[1] // gl.num_warps()])


@gluon.jit
def of_rows(value, i):
    """A value (blocks,), found by way of :func:`by_warp`, in the layout of sums over columns `i`: nothing moves."""
    return gl.convert_layout(value, gl.SliceLayout(1, i.type.layout))


@gluon.jit
def load(ptr, i, length, other, EVEN: gl.constexpr):
    """A vector at columns `i`, of a row that is read but once, or of a parameter, which the L2 should keep. EVEN: no
    columns are past the row's end.
    """
    if EVEN:
        return gl.load(ptr + i, eviction_policy=EVICTION_OF_SINGLE_USE)
    return gl.load(ptr + i, mask=i < length, other=other, eviction_policy=EVICTION_OF_SINGLE_USE)


@gluon.jit
def load_part(row_ptr, i, length, other, BLOCK: gl.constexpr, EVEN: gl.constexpr):
    """A block's part of a row, as a tuple of vectors."""
    part = ()
    for k in gl.static_range(0, BLOCK, i.shape[1]):
        part += (load(row_ptr, i + k, length, other, EVEN),)
    return part


@gluon.jit
def widen(x):
    """A vector as float32. Of bfloat16 each takes one instruction so; left to the compiler, every other takes two."""
    if x.dtype == gl.bfloat16:
        text: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return gl.inline_asm_elementwise(text, "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)
    else:
        return x.to(gl.float32)


@gluon.jit
def narrow(x, DTYPE: gl.constexpr):
    """A vector of float32 as 16 bits a value, two in a register: left to LLVM, each may take one of its own."""
    if gl.bfloat16 == DTYPE:
        text: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        return gl.inline_asm_elementwise(text, "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        half: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
        return gl.inline_asm_elementwise(half, "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2)


@gluon.constexpr_function
def _widening(dtype):
    """PTX that makes float32 of two values of 16 bits, and depends on a register that holds nought."""
    nought = ".reg .b32 nought; mov.u32 nought, %ctaid.y;"
    if dtype == gl.bfloat16:
        low, high = (f"or.b32 pick, nought, {p}; prmt.b32 ${i}, $2, 0, pick;" for i, p in enumerate((0x1044, 0x3244)))
        return f"{{ {nought} .reg .b32 pick; {low} {high} }}"
    unpack = "mov.b32 {low, high}, both; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high;"
    return f"{{ {nought} .reg .b32 both; .reg .b16 low, high; xor.b32 both, $2, nought; {unpack} }}"


@gluon.jit
def widen_again(x):
    """A vector as float32, that was so before, and of which 16 bits a value alone are to be kept meanwhile.

    Triton and ptxas would both keep the 32 bits, unless they cannot know that they are the same. So these depend on the
    number of the block along y, of which there is one.
    """
    if x.dtype.primitive_bitwidth == 16:
        text: gl.constexpr = _widening(x.dtype)
        return gl.inline_asm_elementwise(text, "=f,=f,r", [x], dtype=gl.float32, is_pure=False, pack=2)
    else:
        return x


@gluon.jit
def write_once(ptr, value, live):
    """Write a value (blocks,) that all blocks have, if it is live: the first of them does."""
    block = gl.arange(0, gl.num_ctas(), layout=value.type.layout)
    gl.store(ptr + gl.zeros_like(block), value, mask=(block == 0) & live)


@gluon.jit
def store(ptr, i, length, value, EVEN: gl.constexpr):
    """Store a vector at columns `i`, in the type of memory."""
    value = value.to(ptr.dtype.element_ty)
    if EVEN:
        gl.store(ptr + i, value)
    else:
        gl.store(ptr + i, value, mask=i < length)


# ---- host ----------------------------------------------------------------------------------------------------------


def vector_of(dtype: torch.dtype) -> int:
    return 16 // dtype.itemsize


def configs(length: int, dtype: torch.dtype, operands: int = 1) -> list[triton.Config]:
    """Configurations for rows of a length of which so many operands are kept, best first."""
    found = []
    for least, most, shapes in ((1, 1, product(reversed(KEPT), ALONE)), (2, MOST_BLOCKS, product(KEPT, WARPS))):
        for kept, warps in shapes:
            block = warps * 32 * kept // operands * 4 // dtype.itemsize
            blocks = triton.next_power_of_2(triton.cdiv(length, block))
            if least <= blocks <= most and block < 2 * length:
                constants = {"BLOCK": block, "EVEN": length == blocks * block}
                found.append(
                    triton.Config(constants, num_warps=warps, num_stages=1, num_ctas=blocks, maxnreg=REGISTERS)
                )
    return to_time(found)


def fills_gpu(count: int, device: torch.device) -> bool:
    """Whether so many rows are work for all multiprocessors, whatever the cluster: few rows are best spread widely."""
    return count >= multiprocessors(device, 1)


def options(config: triton.Config) -> dict:
    return {"num_warps": config.num_warps, "num_ctas": config.num_ctas, "maxnreg": config.maxnreg}


def too_short_or_long(length: int, shortest: int, dtype: torch.dtype) -> str | None:
    """Why rows of a length are not for a cluster, or None."""
    longest = MAX_BYTES // dtype.itemsize
    if shortest <= length <= longest:
        return None
    return (
        f"rows of {length} elements are not for a cluster; of {str(dtype).removeprefix('torch.')} "
        f"those of {shortest} to {longest} are"
    )
