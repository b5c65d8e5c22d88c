"""Bias, dropout, residual sum and LayerNorm of the longest rows of 16-bit elements, in Gluon: by clusters that stay and
go through many rows, as LayerNorm's alone (persistent_cluster.py), whose second pass is this one's.

All three parameters lie in shared memory. Where every row has a cluster of its own they are read anew for each, from
the L2, which is then the limit: 10 bytes a value where memory gives 4.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernel_ladder.tracing import address
from triton_impl import multiprocessors
from triton_impl.common.gluon import cluster
from triton_impl.common.gluon.cluster import by_warp, row_layout
from triton_impl.common.gluon.cluster_reduce import init_cluster_reduce, row_of, send, wait_for_cluster_reduce
from triton_impl.common.gluon.philox import factors
from triton_impl.common.gluon.smem_stages import fetch, hold, init_stages, slots, vector, wait
from triton_impl.common.philox import ARGUMENTS
from triton_impl.norm.persistent_cluster import (
    OF_WARP,
    PILOT,
    VECTOR,
    add_deviations,
    columns,
    halves,
    head,
    second_pass,
    word_of,
)
from triton_impl.norm.rows import add_both
from triton_impl.runtime.aot import Entry, entry
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.launch_cache import to_time
from triton_impl.runtime.persistent_launch import PersistentLaunch

#: Slots of a row's operands and of the parameters, weight and norm bias behind the bias; and the barriers where they
#: come. There is one row under way: two make memory slower.
_INPUT, _RESIDUAL, _BIAS, _IN_ALL = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(5)
_OF_ROWS, _OF_PARAMETERS = gl.constexpr(0), gl.constexpr(1)


@gluon.jit
def _fetch(turn, input_ptr, residual_ptr, in_stride, residual_stride, count, length, BLOCK: gl.constexpr):
    """Ask for a turn's row of both operands, if there is one."""
    row = row_of(turn)
    end = gl.where(row < count, length, 0)
    fetch(_OF_ROWS, _INPUT, (input_ptr + row * in_stride, residual_ptr + row * residual_stride), end, BLOCK, True)


@gluon.jit
def _heads(turn, input_ptr, bias_ptr, residual_ptr, in_stride, residual_stride, count, LAYOUT: gl.constexpr):
    """The first words of a turn's row of both operands, and of the bias, which all rows have."""
    return (
        head(turn, input_ptr, in_stride, count, LAYOUT),
        head(turn, bias_ptr, 0, count, LAYOUT),
        head(turn, residual_ptr, residual_stride, count, LAYOUT),
    )


@gluon.jit
def _centre(heads, DTYPE: gl.constexpr):
    """About what deviations are taken: the mean of a row's first sums, were nothing dropped.

    Dropping leaves the mean of a row, and does not let it vary less: so this lies as near as LayerNorm's own.
    """
    total = gl.full(heads[0].shape, 0.0, gl.float32, heads[0].type.layout)
    for k in gl.static_range(3):
        low, high = halves(heads[k], DTYPE)
        total += low + high
    return gl.sum(total, 1) * (0.5 / PILOT)


@gluon.jit
def _even_and_odd(x):
    """Every second value of (blocks, elements), from the first and from the second on."""
    return gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))


@gluon.jit
def _evens(x):
    return _even_and_odd(x)[0]


@gluon.jit
def _first_pass(
    sum_ptr, turn, centre, i, key_low, key_high, threshold, scale, count, length,
    SAVE_STATS: gl.constexpr, DTYPE: gl.constexpr, BLOCK: gl.constexpr, EVEN: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Make a turn's sums, two in a word, and send their deviations and the squares of these."""
    LAYOUT: gl.constexpr = i.type.layout
    row = row_of(turn)
    wait(_OF_ROWS, turn & 1)
    # The number of the call of Philox for each four words, of which a row's length is a multiple.
    call = row * (length // 4) + _evens(_evens(i)) // 4
    sums = gl.full(i.shape, 0.0, gl.float32, LAYOUT)
    squares = sums
    made = ()
    for v in gl.static_range(BLOCK // (gl.num_warps() * OF_WARP)):
        j = i + v * OF_WARP
        drawn = factors(call + v * (OF_WARP // 4), key_low, key_high, threshold, scale, WIDE)
        kept_low, kept_high = _even_and_odd(drawn)
        in_low, in_high = halves(vector(_INPUT, j, BLOCK), DTYPE)
        bias_low, bias_high = halves(vector(_BIAS, j, BLOCK), DTYPE)
        low, high = halves(vector(_RESIDUAL, j, BLOCK), DTYPE)
        low += (in_low + bias_low) * gl.convert_layout(kept_low, LAYOUT, assert_trivial=True)
        high += (in_high + bias_high) * gl.convert_layout(kept_high, LAYOUT, assert_trivial=True)
        word = word_of(low, high, DTYPE)
        made += (word,)
        if SAVE_STATS:
            if EVEN:
                gl.store(sum_ptr + row * length + j, word)
            else:
                gl.store(sum_ptr + row * length + j, word, mask=j < length)
        sums, squares = add_deviations(sums, squares, word, centre, j, length, DTYPE, EVEN)
    send(turn, gl.reduce((by_warp(sums), by_warp(squares)), 2, add_both))
    return made


@gluon.jit(do_not_specialize=ARGUMENTS)
def _chain_staying_kernel(
    out_ptr, sum_ptr, stats_ptr, input_ptr, bias_ptr, residual_ptr, weight_ptr, norm_bias_ptr,
    key_low, key_high, threshold, scale, in_stride, residual_stride, count, length, per_element, eps,
    SAVE_STATS: gl.constexpr, HAS_WEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr,
    BLOCK: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    blocks: gl.constexpr = gl.num_ctas()
    LAYOUT: gl.constexpr = row_layout(blocks, gl.num_warps(), VECTOR)
    WIDE: gl.constexpr = row_layout(blocks, gl.num_warps(), 2 * VECTOR)
    DTYPE: gl.constexpr = input_ptr.dtype.element_ty
    words: gl.constexpr = gl.pointer_type(gl.int32)
    out_ptr = out_ptr.to(words, bitcast=True)
    sum_ptr = sum_ptr.to(words, bitcast=True)
    input_ptr = input_ptr.to(words, bitcast=True)
    bias_ptr = bias_ptr.to(words, bitcast=True)
    residual_ptr = residual_ptr.to(words, bitcast=True)
    i = columns(BLOCK, LAYOUT)
    rows = slots(_IN_ALL, BLOCK, gl.int32)
    hold(rows)
    init_stages(_IN_ALL, 2, length, BLOCK, gl.int32)
    init_cluster_reduce()
    wait_for_cluster_reduce()
    # Of an absent parameter the slot holds the bias, and is not looked at.
    weight_ptr = weight_ptr.to(words, bitcast=True) if HAS_WEIGHT else bias_ptr
    norm_bias_ptr = norm_bias_ptr.to(words, bitcast=True) if HAS_BIAS else bias_ptr
    fetch(_OF_PARAMETERS, _BIAS, (bias_ptr, weight_ptr, norm_bias_ptr), length, BLOCK, False)
    before = _centre(_heads(0, input_ptr, bias_ptr, residual_ptr, in_stride, residual_stride, count, LAYOUT), DTYPE)
    _fetch(0, input_ptr, residual_ptr, in_stride, residual_stride, count, length, BLOCK)
    programs = gl.num_programs(0)
    turns = (count - gl.program_id(0) + programs - 1) // programs
    centre = _centre(_heads(1, input_ptr, bias_ptr, residual_ptr, in_stride, residual_stride, count, LAYOUT), DTYPE)
    wait(_OF_PARAMETERS, 0)
    kept = _first_pass(
        sum_ptr, 0, before, i, key_low, key_high, threshold, scale, count, length,
        SAVE_STATS, DTYPE, BLOCK, EVEN, WIDE,
    )  # fmt: skip
    _fetch(1, input_ptr, residual_ptr, in_stride, residual_stride, count, length, BLOCK)
    for turn in range(1, turns):
        heads = _heads(turn + 1, input_ptr, bias_ptr, residual_ptr, in_stride, residual_stride, count, LAYOUT)
        made = _first_pass(
            sum_ptr, turn, centre, i, key_low, key_high, threshold, scale, count, length,
            SAVE_STATS, DTYPE, BLOCK, EVEN, WIDE,
        )  # fmt: skip
        _fetch(turn + 1, input_ptr, residual_ptr, in_stride, residual_stride, count, length, BLOCK)
        second_pass(
            out_ptr, stats_ptr, kept, rows, turn - 1, before, i, count, length, per_element, eps,
            SAVE_STATS, HAS_WEIGHT, HAS_BIAS, DTYPE, EVEN,
        )  # fmt: skip
        before = centre
        centre = _centre(heads, DTYPE)
        kept = made
    second_pass(
        out_ptr, stats_ptr, kept, rows, turns - 1, before, i, count, length, per_element, eps,
        SAVE_STATS, HAS_WEIGHT, HAS_BIAS, DTYPE, EVEN,
    )  # fmt: skip


# ---- host ----------------------------------------------------------------------------------------------------------

#: Warps of a block, the best guess first. A thread has so many words of a row, and so many registers.
WARPS, WORDS, REGISTERS = (8, 16), 16, 128


def configs(length: int) -> list[triton.Config]:
    """Configurations for rows of a length, best first; none for those that are too long."""
    found = []
    for warps in WARPS:
        block = warps * 32 * WORDS
        blocks = triton.next_power_of_2(triton.cdiv(length // 2, block))
        if 2 <= blocks <= cluster.MOST_BLOCKS:
            constants = {"BLOCK": block, "EVEN": length == 2 * blocks * block}
            found.append(triton.Config(constants, num_warps=warps, num_stages=1, num_ctas=blocks, maxnreg=REGISTERS))
    return to_time(found)


#: Elements of a row from which on this is faster than a cluster for every row, and of the longest; and what its length
#: and strides, and addresses in bytes, are multiples of.
SHORTEST, LONGEST, MULTIPLE = 16385, cluster.MOST_BLOCKS * 2 * 32 * WORDS * max(WARPS), 32

choose = Autotuner(_chain_staying_kernel)


def slot_bytes(config: triton.Config) -> int:
    """Of shared memory, for rows and the three parameters."""
    return _IN_ALL.value * config.kwargs["BLOCK"] * 4


def takes(tensors: tuple[torch.Tensor, ...], strides: tuple[int, int]) -> bool:
    """Whether a call with these tensors, as the kernel takes them, is for it."""
    length = tensors[3].shape[1]
    if not SHORTEST <= length <= LONGEST:
        return False
    places = length | strides[0] | strides[1]
    for tensor in tensors:
        places |= address(tensor)
    return places % MULTIPLE == 0


def launch_of(
    x: torch.Tensor, strides: tuple[int, int], eps: float, constants: tuple[bool, bool, bool]
) -> Callable[[triton.Config], PersistentLaunch]:
    """The launch of each configuration."""
    count, length = x.shape
    programs = min(count, multiprocessors(x.device, 1))
    arguments = (strides[0] // 2, strides[1] // 2, count, length // 2, 1.0 / length, eps, *constants)
    return lambda config: PersistentLaunch(_chain_staying_kernel, programs, arguments, config, slot_bytes(config))


def ahead_of_time() -> list[Entry]:
    """A specialisation that stands for the calls."""
    types = {"stats_ptr": "*fp32", "scale": "fp32", "per_element": "fp32", "eps": "fp32"}
    constants = {"SAVE_STATS": False, "HAS_WEIGHT": True, "HAS_BIAS": True}
    return [entry(_chain_staying_kernel, "bf16", constants, configs(131072)[0], types)]
