"""The backward pass of normalised rows that outgrow one block, in Gluon: blocks of a cluster have a part of each row.

Input and gradient are read once, where :mod:`triton_impl.norm.rows` reads rows of this length twice. A cluster stays and
goes through many rows. Those to come are copied into shared memory while one is worked on (smem_stages.py), and each
thread keeps the sums of its columns in registers; a second kernel adds them up. What the blocks tell each other of a
row travels while they make the first pass over the next one (cluster_reduce.py): no warp waits for another of its block.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton_impl.common.divisibility import assume_divisible
from triton_impl.common.gluon import cluster
from triton_impl.common.gluon.cluster import by_warp, load, store, widen
from triton_impl.common.gluon.cluster_reduce import init_cluster_reduce, receive, row_of, send, wait_for_cluster_reduce
from triton_impl.common.gluon.requirements import unsupported
from triton_impl.common.gluon.smem_stages import fetch, init_stages, own_layout, slots, wait
from triton_impl.norm import rows as norms
from triton_impl.norm.persistent_backward import StayingBackward
from triton_impl.norm.rows import MAX_FUSED_BACKWARD, Kind, add_both
from triton_impl.runtime.aot import TYPES, Entry, entry
from triton_impl.runtime.launch_cache import to_time


@gluon.jit
def _fetch(turn, input_ptr, grad_ptr, in_stride, grad_stride, count, length, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    """Ask for input and gradient of a turn's row, if there is one."""
    row = row_of(turn)
    end = gl.where(row < count, length, 0)
    stage = turn % STAGES
    fetch(stage, 2 * stage, (input_ptr + row * in_stride, grad_ptr + row * grad_stride), end, BLOCK, True)


@gluon.jit
def _read(rows, turn, LAYOUT: gl.constexpr):
    """Input and gradient of a turn's row. Behind the rows lies the weight."""
    slot = turn % (rows.shape[0] // 2) * 2
    return widen(rows.index(slot).load(LAYOUT)), widen(rows.index(slot + 1).load(LAYOUT))


@gluon.jit
def _ask_for_stats(stats_ptr, turn, count, IS_LAYERNORM: gl.constexpr):
    """Ask for what is kept of a turn's row, if there is one: each lane of a warp for another value.

    What all of a block share, ptxas would move to uniform registers and wait for it right behind the load.
    """
    text: gl.constexpr = """{
        .reg .b32 lane; .reg .pred asks; .reg .b64 at;
        mov.u32 lane, %laneid; setp.lt.s32 asks, lane, $3;
        cvt.u64.u32 at, lane; mad.lo.u64 at, at, $2, $1; mov.f32 $0, 0f00000000;
        @asks ld.global.f32 $0, [at];
    }"""
    row = row_of(turn)
    kinds = gl.where(row < count, 3 if IS_LAYERNORM else 1, 0)
    operands = (stats_ptr + row, gl.cast(count, gl.int64) * 4, kinds)
    return gl.inline_asm_elementwise(text, "=f,l,l,r", operands, dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _of_lane(asked, LANE: gl.constexpr):
    text: gl.constexpr = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
    return gl.inline_asm_elementwise(text, "=f,f,r", [asked, LANE], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _stats(asked, IS_LAYERNORM: gl.constexpr):
    """Of a row: mean, rstd and shift, with x̂ = (x − mean) · rstd + shift."""
    rstd = _of_lane(asked, 0)
    if IS_LAYERNORM:
        return _of_lane(asked, 1), rstd, _of_lane(asked, 2)
    else:
        return rstd, rstd, rstd


@gluon.jit
def _offset(stats):
    """What x · rstd is to be shifted by for x̂, which of 16 bits rounds far less than their own spacing."""
    mean, rstd, shift = stats
    return shift - mean * rstd


@gluon.jit
def _first_pass(
    rows, turn, stats, of_weight, of_bias, i, IS_LAYERNORM: gl.constexpr, SHIFTED: gl.constexpr,
    HAS_WEIGHT: gl.constexpr, NEEDS_INPUT: gl.constexpr, NEEDS_WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Add a turn's row to the sums of columns, and send the row's."""
    LAYOUT: gl.constexpr = i.type.layout
    STAGES: gl.constexpr = rows.shape[0] // 2
    mean, rstd, shift = stats
    wait(turn % STAGES, turn // STAGES & 1)
    x_hat, grad = _read(rows, turn, LAYOUT)
    if SHIFTED:
        x_hat = (x_hat - mean) * rstd + shift
    elif IS_LAYERNORM:
        x_hat = x_hat * rstd + _offset(stats)
    else:
        x_hat *= rstd
    if NEEDS_WEIGHTS:
        of_weight += grad * x_hat
        if IS_LAYERNORM:
            of_bias += grad
    if NEEDS_INPUT:
        weighted = grad
        if HAS_WEIGHT:
            weighted *= widen(rows.index(rows.shape[0] - 1).load(LAYOUT))
        dot = by_warp(weighted * x_hat)
        if IS_LAYERNORM:
            send(turn, gl.reduce((by_warp(weighted), dot), 2, add_both))
        else:
            send(turn, (gl.sum(dot, 2),))
    return of_weight, of_bias


@gluon.jit
def _difference(x, y):
    """As in norm/rows.py."""
    text: gl.constexpr = "sub.rn.f32 $0, $1, $2;"
    return gl.inline_asm_elementwise(text, "=f,f,f", [x, y], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _second_pass(
    grad_input_ptr, rows, turn, stats, more, i, length, per_element,
    IS_LAYERNORM: gl.constexpr, SHIFTED: gl.constexpr, HAS_WEIGHT: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Receive the sums of a turn's row, and write its gradient; `more` is added to it, where the tuple is not empty."""
    LAYOUT: gl.constexpr = i.type.layout
    mean, rstd, shift = stats
    sums = receive(turn, 2 if IS_LAYERNORM else 1, gl.SliceLayout(1, LAYOUT))
    plain = sums[0] * per_element
    dot = sums[len(sums) - 1] * per_element
    x, value = _read(rows, turn, LAYOUT)
    if HAS_WEIGHT:
        value *= widen(rows.index(rows.shape[0] - 1).load(LAYOUT))
    if SHIFTED:
        value = (_difference(value, plain[:, None]) - ((x - mean) * rstd + shift) * dot[:, None]) * rstd
    else:
        # What x is multiplied by, and what is taken away, are the same for all of the row.
        by_x = x * (-rstd * rstd * dot)[:, None]
        if IS_LAYERNORM:
            by_x -= (rstd * (plain + _offset(stats) * dot))[:, None]
        value = value * rstd + by_x
    if len(more) > 0:
        value += widen(more[0])
    store(grad_input_ptr + row_of(turn) * length, i, length, value, EVEN)


@gluon.jit
def _more(grad_sum_ptr, turn, stride, i, length, HAS_RESIDUAL: gl.constexpr, EVEN: gl.constexpr):
    """What is to be added to the gradient of a turn's row, in a tuple that is empty if nothing is."""
    if HAS_RESIDUAL:
        return (load(grad_sum_ptr + row_of(turn) * stride, i, length, 0.0, EVEN),)
    else:
        return ()


@gluon.jit
def _norm_cluster_backward_kernel(
    grad_input_ptr, partials_ptr, grad_ptr, grad_sum_ptr, input_ptr, stats_ptr, weight_ptr,
    grad_stride, grad_sum_stride, in_stride, count, length, per_element,
    IS_LAYERNORM: gl.constexpr, HAS_RESIDUAL: gl.constexpr, HAS_WEIGHT: gl.constexpr, NEEDS_INPUT: gl.constexpr,
    NEEDS_WEIGHTS: gl.constexpr, VECTOR: gl.constexpr, DIVISIBILITY: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    length, in_stride = assume_divisible(length, DIVISIBILITY), assume_divisible(in_stride, DIVISIBILITY)
    grad_stride, grad_sum_stride = (
        assume_divisible(grad_stride, DIVISIBILITY),
        assume_divisible(grad_sum_stride, DIVISIBILITY),
    )
    blocks: gl.constexpr = gl.num_ctas()
    LAYOUT: gl.constexpr = own_layout(blocks, gl.num_warps(), VECTOR, BLOCK)
    DTYPE: gl.constexpr = input_ptr.dtype.element_ty
    SHIFTED: gl.constexpr = IS_LAYERNORM and VECTOR == 4  # float32, where what rounding the mean loses shows
    part = gl.arange(0, blocks, layout=gl.SliceLayout(1, LAYOUT))
    i = part[:, None] * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    rows = slots(2 * STAGES + 1, BLOCK, DTYPE)
    init_stages(2 * STAGES + 1, STAGES + 1, length, BLOCK, DTYPE)
    init_cluster_reduce()
    wait_for_cluster_reduce()
    if HAS_WEIGHT:
        fetch(STAGES, 2 * STAGES, (weight_ptr,), length, BLOCK, False)
    for turn in gl.static_range(STAGES):
        _fetch(turn, input_ptr, grad_ptr, in_stride, grad_stride, count, length, BLOCK, STAGES)
    before = _stats(_ask_for_stats(stats_ptr, 0, count, IS_LAYERNORM), IS_LAYERNORM)
    stats = _stats(_ask_for_stats(stats_ptr, 1, count, IS_LAYERNORM), IS_LAYERNORM)
    of_weight = gl.full([blocks, BLOCK], 0.0, gl.float32, LAYOUT)
    of_bias = gl.zeros_like(of_weight)
    programs = gl.num_programs(0)
    turns = (count - gl.program_id(0) + programs - 1) // programs
    if HAS_WEIGHT:
        wait(STAGES, 0)
    of_weight, of_bias = _first_pass(
        rows, 0, before, of_weight, of_bias, i,
        IS_LAYERNORM, SHIFTED, HAS_WEIGHT, NEEDS_INPUT, NEEDS_WEIGHTS,
    )  # fmt: skip
    for turn in range(1, turns):
        of_next = _ask_for_stats(stats_ptr, turn + 1, count, IS_LAYERNORM)
        more = _more(grad_sum_ptr, turn - 1, grad_sum_stride, i, length, HAS_RESIDUAL and NEEDS_INPUT, EVEN)
        of_weight, of_bias = _first_pass(
            rows, turn, stats, of_weight, of_bias, i,
            IS_LAYERNORM, SHIFTED, HAS_WEIGHT, NEEDS_INPUT, NEEDS_WEIGHTS,
        )  # fmt: skip
        if NEEDS_INPUT:
            _second_pass(
                grad_input_ptr, rows, turn - 1, before, more, i, length, per_element,
                IS_LAYERNORM, SHIFTED, HAS_WEIGHT, EVEN,
            )  # fmt: skip
        before = stats
        stats = _stats(of_next, IS_LAYERNORM)
        _fetch(turn - 1 + STAGES, input_ptr, grad_ptr, in_stride, grad_stride, count, length, BLOCK, STAGES)
    if NEEDS_INPUT:
        more = _more(grad_sum_ptr, turns - 1, grad_sum_stride, i, length, HAS_RESIDUAL, EVEN)
        _second_pass(
            grad_input_ptr, rows, turns - 1, before, more, i, length, per_element,
            IS_LAYERNORM, SHIFTED, HAS_WEIGHT, EVEN,
        )  # fmt: skip
    if NEEDS_WEIGHTS:
        partials_ptr += gl.program_id(0).to(gl.int64) * length
        store(partials_ptr, i, length, of_weight, EVEN)
        if IS_LAYERNORM:
            store(partials_ptr + programs.to(gl.int64) * length, i, length, of_bias, EVEN)


# ---- host ----------------------------------------------------------------------------------------------------------

#: Warps of a block, bytes of a row that each of its threads has, and rows on the chip, the best guess first. An SM
#: holds 512 threads of 128 registers, and 64 bytes of 16-bit values are 64 of these for sums of columns. With half of
#: that, twice as many rows are on their way. In shared memory, where the weight lies too, an SM has room for one block
#: of 16 warps or three of 4; and of 8 warps for two with half of that, while two with all of it lack 400 bytes.
SHAPES, REGISTERS = ((16, 64, 3), (8, 64, 3), (16, 32, 6), (4, 64, 3), (8, 32, 6)), 128
#: Bytes of the longest row.
MAX_BYTES = cluster.MOST_BLOCKS * max(32 * warps * kept for warps, kept, _ in SHAPES)


def configs(length: int, dtype: torch.dtype) -> list[triton.Config]:
    """Configurations for rows of a length, best first; none for those that are too long."""
    found = []
    for warps, kept, stages in SHAPES:
        block = warps * 32 * kept // dtype.itemsize
        blocks = triton.next_power_of_2(triton.cdiv(length, block))
        if 2 <= blocks <= cluster.MOST_BLOCKS:
            constants = {"BLOCK": block, "STAGES": stages, "EVEN": length == blocks * block}
            found.append(triton.Config(constants, num_warps=warps, num_stages=1, num_ctas=blocks, maxnreg=REGISTERS))
    return to_time(found)


def _slots(config: triton.Config, dtype: torch.dtype) -> int:
    return (2 * config.kwargs["STAGES"] + 1) * config.kwargs["BLOCK"] * dtype.itemsize


def _takes(x: torch.Tensor) -> bool:
    count, length = x.shape
    if count == 0 or length <= MAX_FUSED_BACKWARD or unsupported(x) is not None:
        return False
    return length * x.dtype.itemsize <= MAX_BYTES


#: As :func:`triton_impl.norm.rows.backward`, which takes what is not for this kernel.
backward = StayingBackward(
    _norm_cluster_backward_kernel,
    _takes,
    norms.backward,
    configs,
    _slots,
    more=lambda dtype: (cluster.vector_of(dtype),),
)


def ahead_of_time(kind: Kind) -> list[Entry]:
    constants = {
        "IS_LAYERNORM": kind.centred, "HAS_RESIDUAL": kind.residual, "HAS_WEIGHT": True,
        "NEEDS_INPUT": True, "NEEDS_WEIGHTS": True,
    }  # fmt: skip
    types = {"stats_ptr": "*fp32", "partials_ptr": "*fp32", "per_element": "fp32"}
    # With 32 values of 16 bits a thread, the sums of columns leave a few bytes without a register, up to 8 in Triton
    # 3.6 and 40 in 3.9: listed are 16.
    long = configs(65536, torch.bfloat16)[-1]
    return [
        entry(
            _norm_cluster_backward_kernel,
            TYPES[dtype],
            {**constants, "VECTOR": cluster.vector_of(dtype), "DIVISIBILITY": 16},
            config,
            types,
        )
        for dtype, config in ((torch.bfloat16, long), (torch.float32, configs(50000, torch.float32)[0]))
    ]
