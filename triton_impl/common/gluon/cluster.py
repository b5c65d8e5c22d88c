"""Rows spread over the blocks of a thread-block cluster, in Gluon. Each block holds a part of a row in registers. The
blocks exchange a maximum or sums through distributed shared memory (PTX ISA, ``mapa``, ``st.async``). A row that one
block can hold may have a block alone.

A part is a tuple of vectors, one per thread, and is worked on a vector at a time. Between load and store it keeps the
type of memory: two 16-bit values per register, so that twice as much is in flight.

Triton 3.9 reduces across a cluster itself. In 3.6 its instruction for an address in another block's shared memory does
not compile, so the exchange is written out here for all versions.
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

#: Largest portable cluster size, in blocks.
MAX_CLUSTER = 8
#: Warps of a block, the best guess first, and registers per thread. Two such blocks fit a multiprocessor.
WARPS = (16, 8, 32)
REGISTERS = 64
#: Warps of a block that has a row alone, the best guess first.
WARPS_OF_ONE_BLOCK = (16, 8, 4)
#: Registers per thread for its part of a row. In a cluster more are the better guess, in one block fewer.
REGISTERS_OF_ROW = (32, 16)
#: Bytes of the longest row. Of two operands a thread holds half as many each.
MAX_BYTES = MAX_CLUSTER * 32 * max(WARPS) * max(REGISTERS_OF_ROW) // 2 * 4

#: Required alignment, in bytes, of row length, strides and addresses where a kernel copies whole vectors.
ALIGNMENT = 16


@gluon.constexpr_function
def row_layout(blocks, warps, vector):
    """Layout of a row as (blocks, part), each block of the cluster with its part; `vector` values a load."""
    bases = [[1 << bit, 0] for bit in range(blocks.bit_length() - 1)]
    return gl.BlockedLayout([1, vector], [1, 32], [1, warps], [1, 0], cga_layout=bases)


@gluon.constexpr_function
def _init_exchange_ptx(blocks, values):
    """PTX that allocates an inbox for the values of all blocks, and a barrier that completes when it is full."""
    return f"""
        .shared .align 8 .b64 inbox_full;
        .shared .align 16 .b8 inbox[{4 * blocks * values}];
        {{
            .reg .pred first; .reg .b32 thread; .reg .b64 state;
            mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;
            @first mbarrier.init.shared.b64 [inbox_full], 1;
            @first mbarrier.arrive.expect_tx.shared.b64 state, [inbox_full], {4 * blocks * values};
            @first fence.mbarrier_init.release.cluster;
            barrier.cluster.arrive.relaxed.aligned;
            mov.u32 $0, 0;
        }}"""


@gluon.constexpr_function
def _exchange_ptx(blocks, values):
    """PTX that sends values, uniform over a block, to the inbox of every block, and reads its own inbox.

    ``st.async`` signals the receiver's mbarrier. So no thread waits for other memory operations in flight, as it would
    at the cluster barrier with release and acquire.
    """
    outputs = blocks * values
    send = "@sends st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32"
    sends = " ".join(f"{send} [place+{4 * v}], ${outputs + v}, [full];" for v in range(values))
    loads = " ".join(f"ld.shared.f32 ${i}, [inbox+{4 * i}];" for i in range(outputs))
    return f"""{{
        .reg .pred sends, open; .reg .b32 thread, rank, place, full;
        mov.u32 thread, %tid.x; mov.u32 rank, %cluster_ctarank; setp.lt.u32 sends, thread, {blocks};
        mov.u32 place, inbox; mad.lo.u32 place, rank, {4 * values}, place; mov.u32 full, inbox_full;
        @sends mapa.shared::cluster.u32 place, place, thread;
        @sends mapa.shared::cluster.u32 full, full, thread;
        barrier.cluster.wait.aligned;
        {sends}
        not_yet: mbarrier.try_wait.parity.shared.b64 open, [inbox_full], 0;
        @!open bra not_yet;
        {loads}
    }}"""


@gluon.constexpr_function
def _exchange_constraints(blocks, values):
    return ",".join(["=f"] * (blocks * values) + ["f"] * values)


@gluon.constexpr_function
def floats(count):
    return (gl.float32,) * count


@gluon.jit
def init_exchange(VALUES: gl.constexpr):
    """Allocate the inbox for VALUES values per block: the first call of a kernel. Later loads do not wait."""
    if gl.num_ctas() > 1:
        text: gl.constexpr = _init_exchange_ptx(gl.num_ctas(), VALUES)
        gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def exchange(values):
    """The values of all blocks, in the order of the blocks, from a tuple of each block's values (blocks,).

    A kernel calls it once.
    """
    blocks: gl.constexpr = gl.num_ctas()
    if blocks == 1:
        return values
    else:
        text: gl.constexpr = _exchange_ptx(blocks, len(values))
        constraints: gl.constexpr = _exchange_constraints(blocks, len(values))
        types: gl.constexpr = floats(blocks * len(values))
        return gl.inline_asm_elementwise(text, constraints, values, dtype=types, is_pure=False, pack=1)


@gluon.jit
def column_index(BLOCK: gl.constexpr, VECTOR: gl.constexpr):
    """The columns of a part's first vectors, (blocks, threads · VECTOR). The next vectors are that many columns on."""
    layout: gl.constexpr = row_layout(gl.num_ctas(), gl.num_warps(), VECTOR)
    step: gl.constexpr = gl.num_warps() * 32 * VECTOR
    part = gl.arange(0, gl.num_ctas(), layout=gl.SliceLayout(1, layout))
    return part[:, None] * BLOCK + gl.arange(0, step, layout=gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def split_by_warp(x):
    """A vector (blocks, elements) as (blocks, warps, elements of a warp)."""
    return x.reshape([x.shape[0], gl.num_warps(), x.shape[1] // gl.num_warps()])


@gluon.jit
def as_row_values(value, i):
    """A value (blocks,) reduced from :func:`split_by_warp`, in the layout of sums over columns `i`. No data moves."""
    return gl.convert_layout(value, gl.SliceLayout(1, i.type.layout))


@gluon.jit
def load(ptr, i, n_cols, other, EVEN: gl.constexpr):
    """The vector at columns `i` of a row or a parameter. EVEN: no column is past the row's end."""
    if EVEN:
        return gl.load(ptr + i, eviction_policy=EVICTION_OF_SINGLE_USE)
    return gl.load(ptr + i, mask=i < n_cols, other=other, eviction_policy=EVICTION_OF_SINGLE_USE)


@gluon.jit
def load_vectors(row_ptr, i, n_cols, other, BLOCK: gl.constexpr, EVEN: gl.constexpr):
    """A block's part of a row, as a tuple of vectors."""
    part = ()
    for k in gl.static_range(0, BLOCK, i.shape[1]):
        part += (load(row_ptr, i + k, n_cols, other, EVEN),)
    return part


@gluon.jit
def widen(x):
    """A vector as float32: one instruction per bfloat16 value, where the compiler takes two for every other."""
    if x.dtype == gl.bfloat16:
        text: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return gl.inline_asm_elementwise(text, "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)
    else:
        return x.to(gl.float32)


@gluon.jit
def narrow(x, DTYPE: gl.constexpr):
    """A float32 vector as 16-bit values, two per register, where LLVM may give each its own."""
    if gl.bfloat16 == DTYPE:
        text: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        return gl.inline_asm_elementwise(text, "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        half: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
        return gl.inline_asm_elementwise(half, "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2)


@gluon.constexpr_function
def _rewiden_ptx(dtype):
    """PTX that converts two 16-bit values to float32, and depends on a register that holds zero."""
    zero = ".reg .b32 zero; mov.u32 zero, %ctaid.y;"
    if dtype == gl.bfloat16:
        low, high = (f"or.b32 pick, zero, {p}; prmt.b32 ${i}, $2, 0, pick;" for i, p in enumerate((0x1044, 0x3244)))
        return f"{{ {zero} .reg .b32 pick; {low} {high} }}"
    unpack = "mov.b32 {low, high}, both; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high;"
    return f"{{ {zero} .reg .b32 both; .reg .b16 low, high; xor.b32 both, $2, zero; {unpack} }}"


@gluon.jit
def rewiden(x):
    """A vector as float32 once more, so that registers hold only its 16-bit values between the two conversions.

    Triton and ptxas would keep the 32-bit values if they saw that both are the same. So this one depends on the block
    index along y, which is zero.
    """
    if x.dtype.primitive_bitwidth == 16:
        text: gl.constexpr = _rewiden_ptx(x.dtype)
        return gl.inline_asm_elementwise(text, "=f,=f,r", [x], dtype=gl.float32, is_pure=False, pack=2)
    else:
        return x


@gluon.jit
def store_from_first_block(ptr, value, row_mask):
    """Store a value (blocks,) that all blocks have, if `row_mask`: the first block stores it."""
    block = gl.arange(0, gl.num_ctas(), layout=value.type.layout)
    gl.store(ptr + gl.zeros_like(block), value, mask=(block == 0) & row_mask)


@gluon.jit
def store(ptr, i, n_cols, value, EVEN: gl.constexpr):
    """Store a vector at columns `i`, in the type of memory."""
    value = value.to(ptr.dtype.element_ty)
    if EVEN:
        gl.store(ptr + i, value)
    else:
        gl.store(ptr + i, value, mask=i < n_cols)


# ---- host ----------------------------------------------------------------------------------------------------------


def vector_of(dtype: torch.dtype) -> int:
    return 16 // dtype.itemsize


def configs(n_cols: int, dtype: torch.dtype, operands: int = 1) -> list[triton.Config]:
    """Configurations for rows of a length with so many operands in registers, best first."""
    found = []
    for least, most, shapes in (
        (1, 1, product(reversed(REGISTERS_OF_ROW), WARPS_OF_ONE_BLOCK)),
        (2, MAX_CLUSTER, product(REGISTERS_OF_ROW, WARPS)),
    ):
        for kept, warps in shapes:
            block = warps * 32 * kept // operands * 4 // dtype.itemsize
            blocks = triton.next_power_of_2(triton.cdiv(n_cols, block))
            if least <= blocks <= most and block < 2 * n_cols:
                constants = {"BLOCK": block, "EVEN": n_cols == blocks * block}
                found.append(
                    triton.Config(constants, num_warps=warps, num_stages=1, num_ctas=blocks, maxnreg=REGISTERS)
                )
    return to_time(found)


def fills_gpu(n_rows: int, device: torch.device) -> bool:
    """Whether there is a row for each multiprocessor. Fewer rows are best spread over larger clusters."""
    return n_rows >= multiprocessors(device, 1)


def options(config: triton.Config) -> dict:
    return {"num_warps": config.num_warps, "num_ctas": config.num_ctas, "maxnreg": config.maxnreg}


def length_unsupported(n_cols: int, shortest: int, dtype: torch.dtype) -> str | None:
    """Why a cluster cannot take rows of a length, or None."""
    longest = MAX_BYTES // dtype.itemsize
    if shortest <= n_cols <= longest:
        return None
    return (
        f"rows of {n_cols} elements are not for a cluster; of {str(dtype).removeprefix('torch.')} "
        f"those of {shortest} to {longest} are"
    )
