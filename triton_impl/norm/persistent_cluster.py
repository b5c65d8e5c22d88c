"""layer_norm, rung 5 of 5: persistent_cluster

Idea      As many clusters as the GPU holds, each of which loops over rows. Weight and bias stay in shared memory, where
          `cluster` reads them from L2 for every row. The next row is copied into shared memory while one is worked on
          (smem_stages.py), and row sums travel during the first pass over the next row (cluster_reduce.py). No warp
          waits for another of its block. Between the passes a row is in registers, so its stage is free for the next.
          In Gluon, for Hopper and 16-bit elements. No backward pass.
Predicts  2·N·sizeof(T) bytes per row, and no L2 traffic for parameters, which is 2·N·sizeof(T) per row in `cluster`.
Limit now Memory bandwidth.

Values are handled as 32-bit words of two, as memory has them: alone, each value would take a register of its own.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton_impl import multiprocessors, unsupported
from triton_impl.common.gluon import cluster
from triton_impl.common.gluon.cluster import floats, row_layout, split_by_warp, store_from_first_block
from triton_impl.common.gluon.cluster_reduce import (
    init_cluster_reduce,
    reduce_arrive,
    reduce_wait,
    row_of,
    wait_for_cluster_reduce,
)
from triton_impl.common.gluon.requirements import unsupported as unsupported_by_gluon
from triton_impl.common.gluon.smem_stages import (
    allocate_stages,
    bulk_copy,
    for_bulk_copies,
    init_stages,
    wait_stage,
    warp_part_layout,
)
from triton_impl.norm.common import Kind, add_pairs, forward_by, rstd_of
from triton_impl.runtime.aot import Entry, entry
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.launch_cache import LaunchCache, to_time
from triton_impl.runtime.persistent_launch import PersistentLaunch

#: Words of a thread's vector, of a warp's, and of the pilot: the start of a row, which each warp loads in advance.
#: Deviations are taken about its mean. The pilot mean may be far from the mean of all, but not in units of how rows
#: vary: at most √(n_cols / pilot), 91 for 262144 elements. Of the 24 bits of a sum of squares that leaves 11, and its
#: root has one more; stored values have 8 or 11.
VECTOR = gl.constexpr(4)
OF_WARP = gl.constexpr(128)
PILOT = gl.constexpr(16)


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
    """The two values of each word. AGAIN: convert anew, because keeping the floats takes twice the registers."""
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
def _fetch(iteration, input_ptr, in_stride, n_rows, n_cols, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    """Start the copy of an iteration's row, if there is one."""
    row = row_of(iteration)
    end = gl.where(row < n_rows, n_cols, 0)
    bulk_copy(iteration % STAGES, iteration % STAGES, (input_ptr + row * in_stride,), end, BLOCK, True)


@gluon.jit
def _arrived(rows, iteration, OWN: gl.constexpr, STAGES: gl.constexpr):
    wait_stage(iteration % STAGES, iteration // STAGES & 1)
    return rows.index(iteration % STAGES).load(OWN)


@gluon.jit
def vectors(x, LAYOUT: gl.constexpr):
    """x, (blocks, elements), as a tuple of vectors (blocks, threads · VECTOR)."""
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
def column_index(BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """The columns, in words, of the first of those vectors. The next vectors are OF_WARP columns on."""
    WARPS: gl.constexpr = gl.num_warps()
    part = gl.arange(0, gl.num_ctas(), layout=gl.SliceLayout(1, LAYOUT))
    word = gl.arange(0, WARPS * OF_WARP, layout=gl.SliceLayout(0, LAYOUT))
    return part[:, None] * BLOCK + (word // OF_WARP * (BLOCK // WARPS) + word % OF_WARP)[None, :]


@gluon.jit
def head(iteration, input_ptr, in_stride, n_rows, LAYOUT: gl.constexpr):
    """The first words of an iteration's row, the same for every block and warp; zeros if there is none."""
    row = row_of(iteration)
    part = gl.arange(0, gl.num_ctas(), layout=gl.SliceLayout(1, LAYOUT))
    at = part[:, None] * 0 + gl.arange(0, PILOT, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.load(input_ptr + row * in_stride + at, mask=(at >= 0) & (row < n_rows), other=0)


@gluon.jit
def _centre(head, DTYPE: gl.constexpr):
    low, high = halves(head, DTYPE)
    return gl.sum(low + high, 1) * (0.5 / PILOT)


@gluon.jit
def add_deviations(sums, squares, word, centre, column, n_cols, DTYPE: gl.constexpr, EVEN: gl.constexpr):
    """Adds the deviations of a vector's words at columns `column` to `sums`, and their squares to `squares`."""
    low, high = halves(word, DTYPE)
    low -= centre[:, None]
    high -= centre[:, None]
    if not EVEN:
        inside = column < n_cols
        low = gl.where(inside, low, 0.0)
        high = gl.where(inside, high, 0.0)
    sums += low + high
    squares += low * low
    squares += high * high
    return sums, squares


@gluon.jit
def _first_pass(row, iteration, centre, i, n_cols, DTYPE: gl.constexpr, EVEN: gl.constexpr):
    """Contribute an iteration's Σ (x − centre) and Σ (x − centre)² to the cluster's."""
    sums = gl.full(i.shape, 0.0, gl.float32, i.type.layout)
    squares = sums
    for v in gl.static_range(len(row)):
        sums, squares = add_deviations(sums, squares, row[v], centre, i + v * OF_WARP, n_cols, DTYPE, EVEN)
    reduce_arrive(iteration, gl.reduce((split_by_warp(sums), split_by_warp(squares)), 2, add_pairs))


@gluon.jit
def second_pass(
    out_ptr, stats_ptr, kept, rows, iteration, centre, i, n_rows, n_cols, per_element, eps,
    SAVE_STATS: gl.constexpr, HAS_WEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr, DTYPE: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Wait for the sums of an iteration's row, which is in registers, and store its statistics and output."""
    LAYOUT: gl.constexpr = i.type.layout
    OWN: gl.constexpr = warp_part_layout(gl.num_ctas(), gl.num_warps(), VECTOR, rows.shape[2])
    row = row_of(iteration)
    sums = reduce_wait(iteration, 2, gl.SliceLayout(1, LAYOUT))
    lost = sums[0] * per_element
    rstd = rstd_of(sums[1] * per_element - lost * lost, eps)
    shift = -lost * rstd
    if SAVE_STATS:
        store_from_first_block(stats_ptr + row, rstd, True)
        store_from_first_block(stats_ptr + n_rows + row, centre, True)
        store_from_first_block(stats_ptr + 2 * n_rows + row, shift, True)
    # In 16-bit elements, what this rounds is far below their own spacing.
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
            gl.store(out_ptr + row * n_cols + j, word, cache_modifier=".cs")
        else:
            gl.store(out_ptr + row * n_cols + j, word, mask=j < n_cols, cache_modifier=".cs")


@gluon.jit
def _norm_persistent_cluster_kernel(
    out_ptr, stats_ptr, input_ptr, weight_ptr, bias_ptr, in_stride, n_rows, n_cols, per_element, eps,
    SAVE_STATS: gl.constexpr, HAS_WEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """y = x̂ · w + b, two 16-bit values per word.

    Grid: persistent clusters, each of which loops over rows. Layout: each block has BLOCK words of a row; n_cols and
    in_stride are in words.
    """
    blocks: gl.constexpr = gl.num_ctas()
    LAYOUT: gl.constexpr = row_layout(blocks, gl.num_warps(), VECTOR)
    DTYPE: gl.constexpr = input_ptr.dtype.element_ty
    words: gl.constexpr = gl.pointer_type(gl.int32)
    out_ptr = out_ptr.to(words, bitcast=True)
    input_ptr = input_ptr.to(words, bitcast=True)
    OWN: gl.constexpr = warp_part_layout(blocks, gl.num_warps(), VECTOR, BLOCK)
    j = column_index(BLOCK, LAYOUT)
    rows = allocate_stages(STAGES + 2, BLOCK, gl.int32)
    init_stages(STAGES + 2, STAGES + 1, n_cols, BLOCK, gl.int32)
    init_cluster_reduce()
    wait_for_cluster_reduce()
    parameters = (weight_ptr.to(words, bitcast=True), bias_ptr.to(words, bitcast=True))
    if HAS_WEIGHT and HAS_BIAS:
        bulk_copy(STAGES, STAGES, parameters, n_cols, BLOCK, False)
    elif HAS_WEIGHT:
        bulk_copy(STAGES, STAGES, (parameters[0],), n_cols, BLOCK, False)
    elif HAS_BIAS:
        bulk_copy(STAGES, STAGES + 1, (parameters[1],), n_cols, BLOCK, False)
    before = _centre(head(0, input_ptr, in_stride, n_rows, LAYOUT), DTYPE)
    for iteration in gl.static_range(STAGES):
        _fetch(iteration, input_ptr, in_stride, n_rows, n_cols, BLOCK, STAGES)
    programs = gl.num_programs(0)
    iterations = (n_rows - gl.program_id(0) + programs - 1) // programs
    centre = _centre(head(1, input_ptr, in_stride, n_rows, LAYOUT), DTYPE)
    if HAS_WEIGHT or HAS_BIAS:
        wait_stage(STAGES, 0)
    kept = _arrived(rows, 0, OWN, STAGES)
    _fetch(STAGES, input_ptr, in_stride, n_rows, n_cols, BLOCK, STAGES)
    _first_pass(vectors(kept, LAYOUT), 0, before, j, n_cols, DTYPE, EVEN)
    for iteration in range(1, iterations):
        next_head = head(iteration + 1, input_ptr, in_stride, n_rows, LAYOUT)
        row = _arrived(rows, iteration, OWN, STAGES)
        _fetch(iteration + STAGES, input_ptr, in_stride, n_rows, n_cols, BLOCK, STAGES)
        _first_pass(vectors(row, LAYOUT), iteration, centre, j, n_cols, DTYPE, EVEN)
        second_pass(
            out_ptr, stats_ptr, vectors(kept, LAYOUT), rows, iteration - 1, before, j, n_rows, n_cols,
            per_element, eps, SAVE_STATS, HAS_WEIGHT, HAS_BIAS, DTYPE, EVEN,
        )  # fmt: skip
        before = centre
        centre = _centre(next_head, DTYPE)
        kept = row
    second_pass(
        out_ptr, stats_ptr, vectors(kept, LAYOUT), rows, iterations - 1, before, j, n_rows, n_cols,
        per_element, eps, SAVE_STATS, HAS_WEIGHT, HAS_BIAS, DTYPE, EVEN,
    )  # fmt: skip


# ---- host ----------------------------------------------------------------------------------------------------------

#: Warps of a block, words of a row per thread, stages for rows, and registers per thread; the best guess first. Weight
#: and bias take two more stages. With one stage, the copy of a row starts when the row before is in registers: more
#: rows in flight make memory slower. Clusters of fewer blocks leave fewer SMs without one.
SHAPES = ((8, 32, 1, 255), (8, 64, 1, 255), (16, 16, 1, 128), (8, 16, 1, 128), (16, 16, 2, 128), (4, 32, 1, 168))


def configs(n_cols: int) -> list[triton.Config]:
    """Configurations for rows of a length, best first; none for those that are too long."""
    found = []
    for warps, kept, stages, registers in SHAPES:
        block = warps * 32 * kept
        blocks = triton.next_power_of_2(triton.cdiv(n_cols // 2, block))
        if 2 <= blocks <= cluster.MAX_CLUSTER:
            constants = {"BLOCK": block, "STAGES": stages, "EVEN": n_cols == 2 * blocks * block}
            found.append(triton.Config(constants, num_warps=warps, num_stages=1, num_ctas=blocks, maxnreg=registers))
    return to_time(found)


#: The normalisation that it is.
KIND = Kind(is_layernorm=True, has_residual=False)
#: Rows, in elements: from the shortest that `configs` has clusters of two blocks for, to the longest; and the multiple,
#: in elements and bytes, of length, strides and addresses.
MIN_COLS = 8193
MAX_COLS = cluster.MAX_BYTES // 2
MULTIPLE = 32

_choose = Autotuner(_norm_persistent_cluster_kernel)
_launches = LaunchCache()


def _launch(
    kind: Kind,
    tensors: tuple[torch.Tensor, ...],
    strides: tuple[int, int],
    present: tuple[bool, bool],
    eps: float,
    save_stats: bool,
) -> None:
    output, _, stats, *inputs = tensors
    x, _, weight, bias = (for_bulk_copies(x, MULTIPLE * x.dtype.itemsize, MULTIPLE) for x in inputs)
    n_rows, n_cols = x.shape
    constants = (save_stats, *present)
    stride = x.stride(0) if n_rows > 1 else n_cols
    tensors = (output, stats, x, weight, bias)

    def make() -> PersistentLaunch:
        arguments = (stride // 2, n_rows, n_cols // 2, 1.0 / n_cols, eps, *constants)
        key = (n_cols, str(x.dtype), *constants, cluster.fills_gpu(n_rows, x.device))
        clusters = min(n_rows, multiprocessors(x.device, 1))

        def launch(config: triton.Config) -> PersistentLaunch:
            smem = (config.kwargs["STAGES"] + 2) * config.kwargs["BLOCK"] * 4
            return PersistentLaunch(_norm_persistent_cluster_kernel, clusters, arguments, config, smem)

        return _choose.launch(key, configs(n_cols), launch, *tensors)

    _launches.run((n_rows, n_cols, stride, constants, x.dtype, x.device, eps), make, tensors)


forward = forward_by(_launch)


def unsupported_rows(kind: Kind, x: torch.Tensor, n_cols: int, gradient: bool) -> str | None:
    """Why rows of `n_cols` elements of `x` cannot be taken, or None."""
    if (reason := unsupported(x) or unsupported_by_gluon(x)) is not None:
        return reason
    if gradient:
        return "has no backward pass; use triton.cluster"
    if x.dtype.itemsize != 2:
        return f"takes 16-bit elements, got {str(x.dtype).removeprefix('torch.')}"
    if not MIN_COLS <= n_cols <= MAX_COLS or n_cols % MULTIPLE != 0:
        return f"takes rows of a multiple of {MULTIPLE} elements, {MIN_COLS} to {MAX_COLS}, got {n_cols}"
    return None


# ---- ahead of time -------------------------------------------------------------------------------------------------


def ahead_of_time(kind: Kind) -> list[Entry]:
    """A specialisation that stands for the calls."""
    types = {"stats_ptr": "*fp32", "per_element": "fp32", "eps": "fp32"}
    constants = {"SAVE_STATS": True, "HAS_WEIGHT": True, "HAS_BIAS": True}
    return [entry(_norm_persistent_cluster_kernel, "bf16", constants, configs(131072)[0], types)]
