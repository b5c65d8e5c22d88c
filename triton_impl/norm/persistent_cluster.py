"""LayerNorm of the longest rows of 16-bit elements, in Gluon: by clusters that stay and go through many rows.

Weight and bias lie in shared memory, where other clusters read them anew for every row, from the L2. Rows are copied
there while those before are worked on (smem_stages.py), and what the blocks tell each other of a row travels during the
first pass over the next one (cluster_reduce.py): no warp waits for another of its block. Between the passes a row is in
registers, so that its place is free for another.

Values are worked on in words of two, as memory has them: kept by themselves, each would take a register of its own.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernel_ladder.tracing import address
from triton_impl import multiprocessors
from triton_impl.common.gluon import cluster
from triton_impl.common.gluon.cluster import by_warp, floats, row_layout, write_once
from triton_impl.common.gluon.cluster_reduce import init_cluster_reduce, receive, row_of, send, wait_for_cluster_reduce
from triton_impl.common.gluon.smem_stages import fetch, init_stages, own_layout, slots, wait
from triton_impl.norm.rows import Kind, add_both, rstd_of
from triton_impl.runtime.aot import Entry, entry
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.launch_cache import LaunchCache, to_time
from triton_impl.runtime.persistent_launch import PersistentLaunch

#: Words of a thread's vector and of a warp's; and words of a row about whose mean deviations are taken, which each warp
#: finds by itself, in advance. It may be far from the mean of all, but not in units of how rows vary: at most by the
#: root of their length over that of the head, of 262144 elements 91. Of the 24 bits of a sum of squares that leaves 11,
#: of which a root has one more; and what is stored has 8 or 11.
VECTOR, OF_WARP, PILOT = gl.constexpr(4), gl.constexpr(128), gl.constexpr(16)


@gluon.constexpr_function
def _unpacking(dtype):
    if dtype == gl.bfloat16:
        return "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"


@gluon.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@gluon.jit
def halves(word, DTYPE: gl.constexpr, AGAIN: gl.constexpr = False):
    """The two values of words; AGAIN, where keeping those of the first time would take twice the registers."""
    text: gl.constexpr = _unpacking(DTYPE) + (" /* again */" if AGAIN else "")
    types: gl.constexpr = floats(2)
    return gl.inline_asm_elementwise(text, "=f,=f,r", [word], dtype=types, is_pure=True, pack=1)


@gluon.constexpr_function
def _packing(dtype):
    return f"cvt.rn.{'bf16' if dtype == gl.bfloat16 else 'f16'}x2.f32 $0, $2, $1;"


@gluon.jit
def word_of(low, high, DTYPE: gl.constexpr):
    text: gl.constexpr = _packing(DTYPE)
    return gl.inline_asm_elementwise(text, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _fetch(turn, input_ptr, in_stride, count, length, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    """Ask for a turn's row, if there is one."""
    row = row_of(turn)
    end = gl.where(row < count, length, 0)
    fetch(turn % STAGES, turn % STAGES, (input_ptr + row * in_stride,), end, BLOCK, True)


@gluon.jit
def _arrived(rows, turn, OWN: gl.constexpr, STAGES: gl.constexpr):
    wait(turn % STAGES, turn // STAGES & 1)
    return rows.index(turn % STAGES).load(OWN)


@gluon.jit
def vectors(x, LAYOUT: gl.constexpr):
    """What a thread has of x, (blocks, elements), as a tuple of vectors (blocks, a vector of each thread)."""
    WARPS: gl.constexpr = gl.num_warps()
    VECTORS: gl.constexpr = x.shape[1] // (WARPS * OF_WARP)
    parts = (x.reshape([x.shape[0], WARPS, VECTORS, OF_WARP]).permute([0, 1, 3, 2]),)
    for level in gl.static_range(_log2(VECTORS)):
        halves = ()
        for p in gl.static_range(len(parts)):
            both = parts[p].reshape([x.shape[0], WARPS, OF_WARP, 2, VECTORS >> level + 1])
            first, second = gl.split(both.permute([0, 1, 2, 4, 3]))
            halves += (first, second)
        parts = halves
    found = ()
    for p in gl.static_range(VECTORS):
        found += (gl.convert_layout(parts[p].reshape([x.shape[0], WARPS * OF_WARP]), LAYOUT),)
    return found


@gluon.jit
def columns(BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """The columns of those vectors, in words: of the first ones. The next come OF_WARP further on."""
    WARPS: gl.constexpr = gl.num_warps()
    part = gl.arange(0, gl.num_ctas(), layout=gl.SliceLayout(1, LAYOUT))
    word = gl.arange(0, WARPS * OF_WARP, layout=gl.SliceLayout(0, LAYOUT))
    return part[:, None] * BLOCK + (word // OF_WARP * (BLOCK // WARPS) + word % OF_WARP)[None, :]


@gluon.jit
def head(turn, input_ptr, in_stride, count, LAYOUT: gl.constexpr):
    """The first words of a turn's row, for every block and warp; zeros if there is none."""
    row = row_of(turn)
    part = gl.arange(0, gl.num_ctas(), layout=gl.SliceLayout(1, LAYOUT))
    at = part[:, None] * 0 + gl.arange(0, PILOT, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.load(input_ptr + row * in_stride + at, mask=(at >= 0) & (row < count), other=0)


@gluon.jit
def _centre(head, DTYPE: gl.constexpr):
    low, high = halves(head, DTYPE)
    return gl.sum(low + high, 1) * (0.5 / PILOT)


@gluon.jit
def add_deviations(sums, squares, word, centre, column, length, DTYPE: gl.constexpr, EVEN: gl.constexpr):
    """Sums of deviations and of their squares, with those of a vector's words at columns `column`."""
    low, high = halves(word, DTYPE)
    low -= centre[:, None]
    high -= centre[:, None]
    if not EVEN:
        inside = column < length
        low = gl.where(inside, low, 0.0)
        high = gl.where(inside, high, 0.0)
    sums += low + high
    squares += low * low
    squares += high * high
    return sums, squares


@gluon.jit
def _first_pass(row, turn, centre, i, length, DTYPE: gl.constexpr, EVEN: gl.constexpr):
    """Send a turn's sums of deviations and of their squares."""
    sums = gl.full(i.shape, 0.0, gl.float32, i.type.layout)
    squares = sums
    for v in gl.static_range(len(row)):
        sums, squares = add_deviations(sums, squares, row[v], centre, i + v * OF_WARP, length, DTYPE, EVEN)
    send(turn, gl.reduce((by_warp(sums), by_warp(squares)), 2, add_both))


@gluon.jit
def second_pass(
    out_ptr, stats_ptr, kept, rows, turn, centre, i, count, length, per_element, eps,
    SAVE_STATS: gl.constexpr, HAS_WEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr, DTYPE: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = i.type.layout
    OWN: gl.constexpr = own_layout(gl.num_ctas(), gl.num_warps(), VECTOR, rows.shape[2])
    row = row_of(turn)
    sums = receive(turn, 2, gl.SliceLayout(1, LAYOUT))
    lost = sums[0] * per_element
    rstd = rstd_of(sums[1] * per_element - lost * lost, eps)
    shift = -lost * rstd
    if SAVE_STATS:
        write_once(stats_ptr + row, rstd, True)
        write_once(stats_ptr + count + row, centre, True)
        write_once(stats_ptr + 2 * count + row, shift, True)
    # Of 16 bits, what this rounds is far below their own spacing.
    offset = shift - centre * rstd
    weight = vectors(rows.index(rows.shape[0] - 2).load(OWN), LAYOUT)
    bias = vectors(rows.index(rows.shape[0] - 1).load(OWN), LAYOUT)
    for v in gl.static_range(len(kept)):
        low, high = halves(kept[v], DTYPE, AGAIN=True)
        low = low * rstd[:, None] + offset[:, None]
        high = high * rstd[:, None] + offset[:, None]
        if HAS_WEIGHT:
            of_low, of_high = halves(weight[v], DTYPE)
            low *= of_low
            high *= of_high
        if HAS_BIAS:
            of_low, of_high = halves(bias[v], DTYPE)
            low += of_low
            high += of_high
        word = word_of(low, high, DTYPE)
        j = i + v * OF_WARP
        if EVEN:
            gl.store(out_ptr + row * length + j, word, cache_modifier=".cs")
        else:
            gl.store(out_ptr + row * length + j, word, mask=j < length, cache_modifier=".cs")


@gluon.jit
def _norm_staying_kernel(
    out_ptr, stats_ptr, input_ptr, weight_ptr, bias_ptr, in_stride, count, length, per_element, eps,
    SAVE_STATS: gl.constexpr, HAS_WEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    blocks: gl.constexpr = gl.num_ctas()
    LAYOUT: gl.constexpr = row_layout(blocks, gl.num_warps(), VECTOR)
    DTYPE: gl.constexpr = input_ptr.dtype.element_ty
    words: gl.constexpr = gl.pointer_type(gl.int32)
    out_ptr = out_ptr.to(words, bitcast=True)
    input_ptr = input_ptr.to(words, bitcast=True)
    OWN: gl.constexpr = own_layout(blocks, gl.num_warps(), VECTOR, BLOCK)
    j = columns(BLOCK, LAYOUT)
    rows = slots(STAGES + 2, BLOCK, gl.int32)
    init_stages(STAGES + 2, STAGES + 1, length, BLOCK, gl.int32)
    init_cluster_reduce()
    wait_for_cluster_reduce()
    parameters = (weight_ptr.to(words, bitcast=True), bias_ptr.to(words, bitcast=True))
    if HAS_WEIGHT and HAS_BIAS:
        fetch(STAGES, STAGES, parameters, length, BLOCK, False)
    elif HAS_WEIGHT:
        fetch(STAGES, STAGES, (parameters[0],), length, BLOCK, False)
    elif HAS_BIAS:
        fetch(STAGES, STAGES + 1, (parameters[1],), length, BLOCK, False)
    before = _centre(head(0, input_ptr, in_stride, count, LAYOUT), DTYPE)
    for turn in gl.static_range(STAGES):
        _fetch(turn, input_ptr, in_stride, count, length, BLOCK, STAGES)
    programs = gl.num_programs(0)
    turns = (count - gl.program_id(0) + programs - 1) // programs
    centre = _centre(head(1, input_ptr, in_stride, count, LAYOUT), DTYPE)
    if HAS_WEIGHT or HAS_BIAS:
        wait(STAGES, 0)
    kept = _arrived(rows, 0, OWN, STAGES)
    _fetch(STAGES, input_ptr, in_stride, count, length, BLOCK, STAGES)
    _first_pass(vectors(kept, LAYOUT), 0, before, j, length, DTYPE, EVEN)
    for turn in range(1, turns):
        next_head = head(turn + 1, input_ptr, in_stride, count, LAYOUT)
        row = _arrived(rows, turn, OWN, STAGES)
        _fetch(turn + STAGES, input_ptr, in_stride, count, length, BLOCK, STAGES)
        _first_pass(vectors(row, LAYOUT), turn, centre, j, length, DTYPE, EVEN)
        second_pass(
            out_ptr, stats_ptr, vectors(kept, LAYOUT), rows, turn - 1, before, j, count, length,
            per_element, eps, SAVE_STATS, HAS_WEIGHT, HAS_BIAS, DTYPE, EVEN,
        )  # fmt: skip
        before = centre
        centre = _centre(next_head, DTYPE)
        kept = row
    second_pass(
        out_ptr, stats_ptr, vectors(kept, LAYOUT), rows, turns - 1, before, j, count, length,
        per_element, eps, SAVE_STATS, HAS_WEIGHT, HAS_BIAS, DTYPE, EVEN,
    )  # fmt: skip


# ---- host ----------------------------------------------------------------------------------------------------------

#: Warps of a block, words of a row that each of its threads has, slots for rows, and registers of a thread; the best
#: guess first. Weight and bias lie in as many as two rows. With one slot, a row is asked for when that before has been
#: taken into registers: more under way make memory slower. Clusters of fewer blocks leave fewer SMs without one.
SHAPES = ((8, 32, 1, 255), (8, 64, 1, 255), (16, 16, 1, 128), (8, 16, 1, 128), (16, 16, 2, 128), (4, 32, 1, 168))


def configs(length: int) -> list[triton.Config]:
    """Configurations for rows of a length, best first; none for those that are too long."""
    found = []
    for warps, kept, stages, registers in SHAPES:
        block = warps * 32 * kept
        blocks = triton.next_power_of_2(triton.cdiv(length // 2, block))
        if 2 <= blocks <= cluster.MOST_BLOCKS:
            constants = {"BLOCK": block, "STAGES": stages, "EVEN": length == 2 * blocks * block}
            found.append(triton.Config(constants, num_warps=warps, num_stages=1, num_ctas=blocks, maxnreg=registers))
    return to_time(found)


#: Elements of a row from which on this is faster than a cluster for every row; and what its length and strides, and
#: addresses in bytes, are multiples of.
SHORTEST, MULTIPLE = 32769, 32
#: Elements of the longest row.
LONGEST = cluster.MAX_BYTES // 2
#: The norm that it is.
KIND = Kind(centred=True, residual=False)

_choose = Autotuner(_norm_staying_kernel)
_launches = LaunchCache()


def takes(kind: Kind, x: torch.Tensor, *parameters: torch.Tensor) -> bool:
    """Whether rows (count, length) are for this kernel."""
    count, length = x.shape
    if kind != KIND or x.dtype.itemsize != 2 or not SHORTEST <= length <= LONGEST:
        return False
    places = length | (x.stride(0) if count > 1 else 0)
    for tensor in (x, *parameters):
        places |= address(tensor)
    return places % MULTIPLE == 0


def launch(tensors: tuple[torch.Tensor, ...], stride: int, present: tuple[bool, bool], eps: float, keep: bool) -> None:
    """Launch on output, what is kept of rows, input, weight and bias."""
    x = tensors[2]
    count, length = x.shape
    constants = (keep, *present)

    def make() -> PersistentLaunch:
        arguments = (stride // 2, count, length // 2, 1.0 / length, eps, *constants)
        key = (length, str(x.dtype), *constants, cluster.fills_gpu(count, x.device))
        programs = min(count, multiprocessors(x.device, 1))

        def launch(config: triton.Config) -> PersistentLaunch:
            slots = (config.kwargs["STAGES"] + 2) * config.kwargs["BLOCK"] * 4
            return PersistentLaunch(_norm_staying_kernel, programs, arguments, config, slots)

        return _choose.launch(key, configs(length), launch, *tensors)

    _launches.run((count, length, stride, constants, x.dtype, x.device, eps), make, tensors)


def ahead_of_time(kind: Kind) -> list[Entry]:
    """A specialisation that stands for the calls."""
    if kind != KIND:
        return []
    types = {"stats_ptr": "*fp32", "per_element": "fp32", "eps": "fp32"}
    constants = {"SAVE_STATS": True, "HAS_WEIGHT": True, "HAS_BIAS": True}
    return [entry(_norm_staying_kernel, "bf16", constants, configs(131072)[0], types)]
