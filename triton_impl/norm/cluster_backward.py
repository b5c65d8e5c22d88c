"""The backward pass of `cluster` (rung 4 of the norms), in Gluon: persistent clusters that loop over rows.

Idea      Each block of a cluster has a part of the row, so input and gradient are read once, where `online` reads them
          twice. Rows to come are copied into stages of shared memory while one is worked on (smem_stages.py). Threads
          keep the sums of their columns in registers; :mod:`triton_impl.common.column_sum` adds those of all clusters.
          Row sums travel through distributed shared memory during the first pass over the next row
          (cluster_reduce.py), so no warp waits for another of its block.
Predicts  3·N·sizeof(T) bytes per row instead of 5·N·sizeof(T).
Limit now Shared memory and registers of an SM: at most six rows in flight.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton_impl import multiprocessors
from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.gluon import cluster
from triton_impl.common.gluon.cluster import ALIGNMENT, load, split_by_warp, store, widen
from triton_impl.common.gluon.cluster_reduce import (
    init_cluster_reduce,
    reduce_arrive,
    reduce_wait,
    row_of,
    wait_for_cluster_reduce,
)
from triton_impl.common.gluon.smem_stages import (
    allocate_stages,
    bulk_copy,
    for_bulk_copies,
    init_stages,
    wait_stage,
    warp_part_layout,
)
from triton_impl.norm.common import Kind, Needs, add_pairs, backward_by
from triton_impl.runtime.aot import TYPES, Entry, entry
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.launch_cache import LaunchCache, to_time
from triton_impl.runtime.persistent_launch import PersistentLaunch


@gluon.jit
def _fetch(
    iteration, input_ptr, grad_ptr, in_stride, grad_stride, n_rows, n_cols, BLOCK: gl.constexpr, STAGES: gl.constexpr
):
    """Start the copies of an iteration's row of input and gradient, if there is one."""
    row = row_of(iteration)
    end = gl.where(row < n_rows, n_cols, 0)
    stage = iteration % STAGES
    bulk_copy(stage, 2 * stage, (input_ptr + row * in_stride, grad_ptr + row * grad_stride), end, BLOCK, True)


@gluon.jit
def _read(rows, iteration, LAYOUT: gl.constexpr):
    """An iteration's row of input and gradient. The last stage holds the weight."""
    slot = iteration % (rows.shape[0] // 2) * 2
    return widen(rows.index(slot).load(LAYOUT)), widen(rows.index(slot + 1).load(LAYOUT))


@gluon.jit
def _load_stats(stats_ptr, iteration, n_rows, IS_LAYERNORM: gl.constexpr):
    """Load the saved statistics of an iteration's row, if there is one: each lane of a warp loads another value.

    What all of a block share, ptxas would move to uniform registers and wait for it right behind the load.
    """
    text: gl.constexpr = """{
        .reg .b32 lane; .reg .pred asks; .reg .b64 at;
        mov.u32 lane, %laneid; setp.lt.s32 asks, lane, $3;
        cvt.u64.u32 at, lane; mad.lo.u64 at, at, $2, $1; mov.f32 $0, 0f00000000;
        @asks ld.global.f32 $0, [at];
    }"""
    row = row_of(iteration)
    kinds = gl.where(row < n_rows, 3 if IS_LAYERNORM else 1, 0)
    operands = (stats_ptr + row, gl.cast(n_rows, gl.int64) * 4, kinds)
    return gl.inline_asm_elementwise(text, "=f,l,l,r", operands, dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _of_lane(asked, LANE: gl.constexpr):
    text: gl.constexpr = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
    return gl.inline_asm_elementwise(text, "=f,f,r", [asked, LANE], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _stats(asked, IS_LAYERNORM: gl.constexpr):
    """mean, rstd and shift of a row."""
    rstd = _of_lane(asked, 0)
    if IS_LAYERNORM:
        return _of_lane(asked, 1), rstd, _of_lane(asked, 2)
    else:
        return rstd, rstd, rstd


@gluon.jit
def _offset(stats):
    """x̂ − x · rstd of a row. In 16-bit elements, what this rounds is far below their own spacing."""
    mean, rstd, shift = stats
    return shift - mean * rstd


@gluon.jit
def _first_pass(
    rows, iteration, stats, grad_weight, grad_bias, i, IS_LAYERNORM: gl.constexpr, SHIFTED: gl.constexpr,
    HAS_WEIGHT: gl.constexpr, NEEDS_INPUT: gl.constexpr, NEEDS_WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Add an iteration's row to the column sums, and contribute the row's sums to the cluster's."""
    LAYOUT: gl.constexpr = i.type.layout
    STAGES: gl.constexpr = rows.shape[0] // 2
    mean, rstd, shift = stats
    wait_stage(iteration % STAGES, iteration // STAGES & 1)
    x_hat, grad = _read(rows, iteration, LAYOUT)
    if SHIFTED:
        x_hat = (x_hat - mean) * rstd + shift
    elif IS_LAYERNORM:
        x_hat = x_hat * rstd + _offset(stats)
    else:
        x_hat *= rstd
    if NEEDS_WEIGHTS:
        grad_weight += grad * x_hat
        if IS_LAYERNORM:
            grad_bias += grad
    if NEEDS_INPUT:
        weighted = grad
        if HAS_WEIGHT:
            weighted *= widen(rows.index(rows.shape[0] - 1).load(LAYOUT))
        dot = split_by_warp(weighted * x_hat)
        if IS_LAYERNORM:
            reduce_arrive(iteration, gl.reduce((split_by_warp(weighted), dot), 2, add_pairs))
        else:
            reduce_arrive(iteration, (gl.sum(dot, 2),))
    return grad_weight, grad_bias


@gluon.jit
def _subtract_rounded(x, y):
    """x − y without contraction: see :func:`triton_impl.norm.common.subtract_rounded`."""
    text: gl.constexpr = "sub.rn.f32 $0, $1, $2;"
    return gl.inline_asm_elementwise(text, "=f,f,f", [x, y], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _second_pass(
    grad_input_ptr, rows, iteration, stats, grad_sum, i, n_cols, per_element,
    IS_LAYERNORM: gl.constexpr, SHIFTED: gl.constexpr, HAS_WEIGHT: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Wait for the sums of an iteration's row and store its gradient, plus `grad_sum` unless that tuple is empty."""
    LAYOUT: gl.constexpr = i.type.layout
    mean, rstd, shift = stats
    sums = reduce_wait(iteration, 2 if IS_LAYERNORM else 1, gl.SliceLayout(1, LAYOUT))
    plain = sums[0] * per_element
    dot = sums[len(sums) - 1] * per_element
    x, value = _read(rows, iteration, LAYOUT)
    if HAS_WEIGHT:
        value *= widen(rows.index(rows.shape[0] - 1).load(LAYOUT))
    if SHIFTED:
        value = (_subtract_rounded(value, plain[:, None]) - ((x - mean) * rstd + shift) * dot[:, None]) * rstd
    else:
        # What x is multiplied by, and what is taken away, are the same for all of the row.
        by_x = x * (-rstd * rstd * dot)[:, None]
        if IS_LAYERNORM:
            by_x -= (rstd * (plain + _offset(stats) * dot))[:, None]
        value = value * rstd + by_x
    if len(grad_sum) > 0:
        value += widen(grad_sum[0])
    store(grad_input_ptr + row_of(iteration) * n_cols, i, n_cols, value, EVEN)


@gluon.jit
def _load_grad_sum(grad_sum_ptr, iteration, stride, i, n_cols, HAS_RESIDUAL: gl.constexpr, EVEN: gl.constexpr):
    """The sum's gradient of an iteration's row in a tuple, which is empty without HAS_RESIDUAL."""
    if HAS_RESIDUAL:
        return (load(grad_sum_ptr + row_of(iteration) * stride, i, n_cols, 0.0, EVEN),)
    else:
        return ()


@gluon.jit
def _norm_cluster_backward_kernel(
    grad_input_ptr, partials_ptr, grad_ptr, grad_sum_ptr, input_ptr, stats_ptr, weight_ptr,
    grad_stride, grad_sum_stride, in_stride, n_rows, n_cols, per_element,
    IS_LAYERNORM: gl.constexpr, HAS_RESIDUAL: gl.constexpr, HAS_WEIGHT: gl.constexpr, NEEDS_INPUT: gl.constexpr,
    NEEDS_WEIGHTS: gl.constexpr, VECTOR: gl.constexpr, DIVISIBILITY: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """dx = rstd · (w·dy − mean(w·dy) − x̂ · mean(w·dy·x̂)), and partial sums of dy · x̂ and dy over a cluster's rows.

    Grid: persistent clusters, each of which loops over rows. Layout: each block has BLOCK columns of a row; partials
    are (2 or 1, clusters, n_cols), float32.
    """
    n_cols, in_stride = assume_divisible(n_cols, DIVISIBILITY), assume_divisible(in_stride, DIVISIBILITY)
    grad_stride, grad_sum_stride = (
        assume_divisible(grad_stride, DIVISIBILITY),
        assume_divisible(grad_sum_stride, DIVISIBILITY),
    )
    blocks: gl.constexpr = gl.num_ctas()
    LAYOUT: gl.constexpr = warp_part_layout(blocks, gl.num_warps(), VECTOR, BLOCK)
    DTYPE: gl.constexpr = input_ptr.dtype.element_ty
    SHIFTED: gl.constexpr = IS_LAYERNORM and VECTOR == 4  # float32, where what rounding the mean loses shows
    part = gl.arange(0, blocks, layout=gl.SliceLayout(1, LAYOUT))
    i = part[:, None] * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    rows = allocate_stages(2 * STAGES + 1, BLOCK, DTYPE)
    init_stages(2 * STAGES + 1, STAGES + 1, n_cols, BLOCK, DTYPE)
    init_cluster_reduce()
    wait_for_cluster_reduce()
    if HAS_WEIGHT:
        bulk_copy(STAGES, 2 * STAGES, (weight_ptr,), n_cols, BLOCK, False)
    for iteration in gl.static_range(STAGES):
        _fetch(iteration, input_ptr, grad_ptr, in_stride, grad_stride, n_rows, n_cols, BLOCK, STAGES)
    before = _stats(_load_stats(stats_ptr, 0, n_rows, IS_LAYERNORM), IS_LAYERNORM)
    stats = _stats(_load_stats(stats_ptr, 1, n_rows, IS_LAYERNORM), IS_LAYERNORM)
    grad_weight = gl.full([blocks, BLOCK], 0.0, gl.float32, LAYOUT)
    grad_bias = gl.zeros_like(grad_weight)
    programs = gl.num_programs(0)
    iterations = (n_rows - gl.program_id(0) + programs - 1) // programs
    if HAS_WEIGHT:
        wait_stage(STAGES, 0)
    grad_weight, grad_bias = _first_pass(
        rows, 0, before, grad_weight, grad_bias, i,
        IS_LAYERNORM, SHIFTED, HAS_WEIGHT, NEEDS_INPUT, NEEDS_WEIGHTS,
    )  # fmt: skip
    for iteration in range(1, iterations):
        next_stats = _load_stats(stats_ptr, iteration + 1, n_rows, IS_LAYERNORM)
        grad_sum = _load_grad_sum(
            grad_sum_ptr, iteration - 1, grad_sum_stride, i, n_cols, HAS_RESIDUAL and NEEDS_INPUT, EVEN
        )
        grad_weight, grad_bias = _first_pass(
            rows, iteration, stats, grad_weight, grad_bias, i,
            IS_LAYERNORM, SHIFTED, HAS_WEIGHT, NEEDS_INPUT, NEEDS_WEIGHTS,
        )  # fmt: skip
        if NEEDS_INPUT:
            _second_pass(
                grad_input_ptr, rows, iteration - 1, before, grad_sum, i, n_cols, per_element,
                IS_LAYERNORM, SHIFTED, HAS_WEIGHT, EVEN,
            )  # fmt: skip
        before = stats
        stats = _stats(next_stats, IS_LAYERNORM)
        _fetch(iteration - 1 + STAGES, input_ptr, grad_ptr, in_stride, grad_stride, n_rows, n_cols, BLOCK, STAGES)
    if NEEDS_INPUT:
        grad_sum = _load_grad_sum(grad_sum_ptr, iterations - 1, grad_sum_stride, i, n_cols, HAS_RESIDUAL, EVEN)
        _second_pass(
            grad_input_ptr, rows, iterations - 1, before, grad_sum, i, n_cols, per_element,
            IS_LAYERNORM, SHIFTED, HAS_WEIGHT, EVEN,
        )  # fmt: skip
    if NEEDS_WEIGHTS:
        partials_ptr += gl.program_id(0).to(gl.int64) * n_cols
        store(partials_ptr, i, n_cols, grad_weight, EVEN)
        if IS_LAYERNORM:
            store(partials_ptr + programs.to(gl.int64) * n_cols, i, n_cols, grad_bias, EVEN)


# ---- host ----------------------------------------------------------------------------------------------------------

#: Warps of a block, bytes of a row per thread, and stages of shared memory, the best guess first. An SM holds 512
#: threads of 128 registers; 64 bytes of 16-bit values need 64 of these for column sums. With half of that, twice as
#: many rows are in flight. Shared memory, which holds the weight too, has room for one block of 16 warps, for three of
#: 4, or for two of 8 with half of that; two of 8 with all of it lack 400 bytes.
SHAPES = ((16, 64, 3), (8, 64, 3), (16, 32, 6), (4, 64, 3), (8, 32, 6))
REGISTERS = 128
#: Bytes of the shortest row, more than one block, and of the longest.
MIN_BYTES = 1 + min(32 * warps * size for warps, size, _ in SHAPES)
MAX_BYTES = cluster.MAX_CLUSTER * max(32 * warps * size for warps, size, _ in SHAPES)


def configs(n_cols: int, dtype: torch.dtype) -> list[triton.Config]:
    """Configurations for rows of a length, best first; none for those that are too short or too long.

    Column sums of 64 bytes of 16-bit values per thread spill registers, up to 112 bytes: 32 bytes are the better guess.
    """
    found = []
    for warps, size, stages in sorted(SHAPES, key=lambda shape: shape[1]) if dtype.itemsize == 2 else SHAPES:
        block = warps * 32 * size // dtype.itemsize
        blocks = triton.next_power_of_2(triton.cdiv(n_cols, block))
        if 2 <= blocks <= cluster.MAX_CLUSTER:
            constants = {"BLOCK": block, "STAGES": stages, "EVEN": n_cols == blocks * block}
            found.append(triton.Config(constants, num_warps=warps, num_stages=1, num_ctas=blocks, maxnreg=REGISTERS))
    return to_time(found)


def _smem_bytes(config: triton.Config, dtype: torch.dtype) -> int:
    return (2 * config.kwargs["STAGES"] + 1) * config.kwargs["BLOCK"] * dtype.itemsize


_choose = Autotuner(_norm_cluster_backward_kernel)
_launches = LaunchCache()


def _launch(
    kind: Kind,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    stats: torch.Tensor,
    grad: torch.Tensor,
    grad_sum: torch.Tensor | None,
    needs: Needs,
    grad_input: torch.Tensor | None,
) -> torch.Tensor | None:
    n_rows, n_cols = x.shape
    x, grad = for_bulk_copies(x), for_bulk_copies(grad)
    # An absent operand is replaced by one that is there. The kernel does not read it.
    s, w = (grad if grad_sum is None else for_bulk_copies(grad_sum)), (x if weight is None else for_bulk_copies(weight))
    needs_weights = needs.weight or needs.bias
    strides = (grad.stride(0), s.stride(0), x.stride(0))
    key = (kind, n_rows, n_cols, strides, weight is None, needs, x.dtype, x.device)
    known = _launches.get(key)
    clusters = min(n_rows, multiprocessors(x.device, 1)) if known is None else known.programs
    n_sums = 2 if kind.is_layernorm else 1
    partials = x.new_empty((n_sums * clusters * n_cols,), dtype=torch.float32) if needs_weights else stats
    tensors = (x if grad_input is None else grad_input, partials, grad, s, x, stats, w)

    def make() -> PersistentLaunch:
        constants = (*kind, weight is not None, needs.input, needs_weights, cluster.vector_of(x.dtype))
        arguments = (*strides, n_rows, n_cols, 1.0 / n_cols, *constants, divisibility_of(n_cols, *strides))
        # One choice whichever gradients are wanted, so that each has the same bits.
        alike = (n_cols, str(x.dtype), *kind, weight is None, cluster.fills_gpu(n_rows, x.device))

        def launch(config: triton.Config) -> PersistentLaunch:
            smem = _smem_bytes(config, x.dtype)
            return PersistentLaunch(_norm_cluster_backward_kernel, clusters, arguments, config, smem)

        return _choose.launch(alike, configs(n_cols, x.dtype), launch, *tensors)

    # As many clusters as the GPU holds: known once the kernel has been compiled.
    clusters = _launches.run(key, make, tensors).programs
    return partials[: n_sums * clusters * n_cols].view(n_sums, clusters, n_cols) if needs_weights else None


backward = backward_by(_launch)


def unsupported_rows(n_cols: int, dtype: torch.dtype) -> str | None:
    """Why rows of `n_cols` elements cannot be differentiated, or None."""
    if n_cols * dtype.itemsize % ALIGNMENT != 0:
        return f"the backward pass takes rows of a multiple of {ALIGNMENT} bytes, got {n_cols} elements"
    if not MIN_BYTES <= n_cols * dtype.itemsize <= MAX_BYTES:
        shortest, longest = MIN_BYTES // dtype.itemsize + 1, MAX_BYTES // dtype.itemsize
        return f"the backward pass takes rows of {shortest} to {longest} elements, got {n_cols}"
    return None


# ---- ahead of time -------------------------------------------------------------------------------------------------


def ahead_of_time(kind: Kind) -> list[Entry]:
    """Specialisations that stand for a normalisation's calls."""
    constants = {
        "IS_LAYERNORM": kind.is_layernorm, "HAS_RESIDUAL": kind.has_residual, "HAS_WEIGHT": True,
        "NEEDS_INPUT": True, "NEEDS_WEIGHTS": True,
    }  # fmt: skip
    types = {"stats_ptr": "*fp32", "partials_ptr": "*fp32", "per_element": "fp32"}
    return [
        entry(
            _norm_cluster_backward_kernel,
            TYPES[dtype],
            {**constants, "VECTOR": cluster.vector_of(dtype), "DIVISIBILITY": 16},
            config,
            types,
        )
        for dtype, config in ((d, configs(n, d)[0]) for d, n in ((torch.bfloat16, 65536), (torch.float32, 50000)))
    ]
