"""cross_entropy, rung 2 of 2: online

Idea      Maximum and sum come from one pass (Milakov and Gimelshein, arXiv:1805.02867), and so does the sum of all
          logits that label smoothing needs. Each lane has its own state. The backward pass has one program per block of
          columns.
Predicts  N·sizeof(T) bytes per row; backward one read and one write.
Limit now Memory bandwidth; one row per program leaves lanes idle where there are few classes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.elementwise import indexing, offset_of
from triton_impl.common.fast_math import LOG2E
from triton_impl.common.pdl import griddepcontrol_wait
from triton_impl.cross_entropy.rows import Options, counts, gradient_of_loss, passes, settled
from triton_impl.runtime.aot import Entry, entry
from triton_impl.runtime.autotuned_kernel import AutotunedKernel
from triton_impl.runtime.launch_cache import Launch, LaunchCache
from triton_impl.runtime.row_configs import blocks_of

#: Columns that a lane takes for one correction of its running sum.
PER_LANE = tl.constexpr(4)


@triton.jit
def _cross_entropy_online_kernel(
    input_ptr, target_ptr, losses_ptr, stats_ptr, n_rows, n_cols, ignore_index, kept, uniform, z_loss,
    in_stride, size1, size2, size3, i0, i1, i2, i3, t0, t1, t2, t3,
    SMOOTHED: tl.constexpr, PENALIZED: tl.constexpr, DIVISIBILITY: tl.constexpr, BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """loss = kept · (lse − x_label) + uniform · Σ (lse − x) + z_loss · lse², lse = max x + log Σ exp(x − max x).

    Grid: one program per row. Layout: any strides; a row is found from its number through sizes and strides.
    """
    griddepcontrol_wait(USE_PDL)
    LANES: tl.constexpr = BLOCK // PER_LANE
    row = tl.program_id(0).to(tl.int64)
    n_cols = assume_divisible(n_cols, DIVISIBILITY)
    i3 = assume_divisible(i3, DIVISIBILITY)
    input_ptr += offset_of(row, size1, size2, size3, i0, i1, i2, i3)
    label = tl.load(target_ptr + offset_of(row, size1, size2, size3, t0, t1, t2, t3))
    length = tl.where(counts(label, n_cols, ignore_index), n_cols, 0)
    offsets = tl.arange(0, PER_LANE)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    lane_max = tl.full([LANES], -float("inf"), tl.float32)
    lane_sum = tl.zeros([LANES], tl.float32)
    below = tl.zeros([LANES], tl.float32)  # Σ (lane_max − x), and of how many x
    seen = tl.zeros([LANES], tl.float32)
    for start in range(0, length, BLOCK):
        col = start + offsets
        mask = col < n_cols
        x = tl.load(input_ptr + col.to(tl.int64) * in_stride, mask=mask, other=-float("inf")).to(tl.float32)
        new_max = tl.maximum(lane_max, tl.max(x, axis=0))
        # While all is −inf, the difference of the maxima would be NaN. A NaN that the maximum drops reaches the sum.
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        exponentials = tl.exp2((x - shift[None, :]) * LOG2E)
        lane_sum = lane_sum * tl.exp2((lane_max - shift) * LOG2E) + tl.sum(exponentials, axis=0)
        if SMOOTHED:
            grown = tl.where(lane_max == -float("inf"), 0.0, shift - lane_max)
            below += seen * grown + tl.sum(tl.where(mask, shift[None, :] - x, 0.0), axis=0)
            seen += tl.sum(mask.to(tl.float32), axis=0)
        lane_max = new_max
    row_max = tl.max(lane_max, axis=0)
    row_sum = tl.sum(lane_sum * tl.where(lane_max == -float("inf"), 1.0, tl.exp2((lane_max - row_max) * LOG2E)), axis=0)
    log_sum = tl.log(row_sum)
    of_label = tl.load(input_ptr + tl.where(length > 0, label, 0) * in_stride).to(tl.float32)
    loss = kept * (log_sum + (row_max - of_label))
    if SMOOTHED:
        below += tl.where(lane_max == -float("inf"), 0.0, seen * (row_max - lane_max))
        loss += uniform * (n_cols * log_sum + tl.sum(below, axis=0))
    if PENALIZED:
        loss += z_loss * (row_max + log_sum) * (row_max + log_sum)
    tl.store(losses_ptr + row, settled(loss, label, n_cols, ignore_index).to(losses_ptr.dtype.element_ty))
    tl.store(stats_ptr + row, row_max)
    tl.store(stats_ptr + n_rows + row, row_sum)


@triton.jit
def _cross_entropy_backward_online_kernel(
    grad_input_ptr, input_ptr, target_ptr, grad_ptr, stats_ptr, count_ptr, n_rows, n_cols, ignore_index,
    kept, uniform, z_loss, out_stride, in_stride, size1, size2, size3,
    o0, o1, o2, o3, i0, i1, i2, i3, t0, t1, t2, t3, g0, g1, g2, g3,
    SMOOTHED: tl.constexpr, PENALIZED: tl.constexpr, MEAN: tl.constexpr, DIVISIBILITY: tl.constexpr,
    BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """dx = g · (p · (1 + 2 · z_loss · lse) − kept · [x is the label's] − uniform), p = exp(x − max x) / row_sum.

    Grid: one program per block of a row's columns, those of a row next to each other. Layout: as the forward kernel's.
    """
    griddepcontrol_wait(USE_PDL)
    blocks = tl.cdiv(n_cols, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    n_cols = assume_divisible(n_cols, DIVISIBILITY)
    o3 = assume_divisible(o3, DIVISIBILITY)
    i3 = assume_divisible(i3, DIVISIBILITY)
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(target_ptr + offset_of(row, size1, size2, size3, t0, t1, t2, t3))
    length = tl.where(counts(label, n_cols, ignore_index), n_cols, 0)
    grad_ptr += offset_of(row, size1, size2, size3, g0, g1, g2, g3)
    grad = gradient_of_loss(grad_ptr, count_ptr, MEAN)
    row_max = tl.load(stats_ptr + row)
    row_sum = tl.load(stats_ptr + n_rows + row)
    scale = 1 / row_sum
    if PENALIZED:
        scale *= 1 + 2 * z_loss * (row_max + tl.log(row_sum))
    input_ptr += offset_of(row, size1, size2, size3, i0, i1, i2, i3)
    x = tl.load(input_ptr + col.to(tl.int64) * in_stride, mask=col < length, other=0.0).to(tl.float32)
    value = tl.exp2((x - row_max) * LOG2E) * scale - tl.where(col == label, kept, 0.0)
    if SMOOTHED:
        value -= uniform
    value = tl.where(col < length, grad * value, 0.0).to(grad_input_ptr.dtype.element_ty)
    grad_input_ptr += offset_of(row, size1, size2, size3, o0, o1, o2, o3)
    tl.store(grad_input_ptr + col.to(tl.int64) * out_stride, value, mask=col < n_cols)


# ---- host ----------------------------------------------------------------------------------------------------------

# A thread loads 8 lanes of 16 bits at once, so a block has at least 1024 columns a warp. With fewer, several warps have
# a lane's columns, and meet in shared memory for each block.
_CONFIGS = ((8192, 8), (4096, 4), (16384, 16), (8192, 4), (16384, 8))
_SMOOTHED_CONFIGS = ((4096, 4), (8192, 8), (2048, 2), (16384, 16))  # which keep more numbers per lane
_BACKWARD_CONFIGS = ((4096, 8), (2048, 4), (8192, 8), (8192, 16))
_KEY = ("n_cols", "SMOOTHED")
_tuned = {
    smoothed: AutotunedKernel(_cross_entropy_online_kernel, blocks_of(*configs), _KEY)
    for smoothed, configs in ((False, _CONFIGS), (True, _SMOOTHED_CONFIGS))
}
_tuned_backward = AutotunedKernel(_cross_entropy_backward_online_kernel, blocks_of(*_BACKWARD_CONFIGS), _KEY)
_launches = LaunchCache()


def launch_forward(
    input: torch.Tensor, target: torch.Tensor, losses: torch.Tensor, stats: torch.Tensor, options: Options
) -> None:
    n_rows, n_cols = target.numel(), input.shape[-1]
    tensors = (input, target, losses, stats)
    strides = (input.stride(-1), *indexing(input[..., 0], target))

    def make() -> Launch:
        constants = {**options.constants(), "DIVISIBILITY": divisibility_of(n_cols, strides[7])}
        arguments = (n_rows, n_cols, *options.numbers(n_cols), *strides)
        return _tuned[constants["SMOOTHED"]](lambda meta: (n_rows,), tensors, arguments, constants)

    _launches.run(("forward", n_rows, n_cols, strides, options, input.dtype, losses.dtype, input.device), make, tensors)


def launch_backward(
    grad_input: torch.Tensor,
    input: torch.Tensor,
    target: torch.Tensor,
    grad: torch.Tensor,
    stats: torch.Tensor,
    count: torch.Tensor,
    options: Options,
) -> None:
    n_rows, n_cols = target.numel(), input.shape[-1]
    tensors = (grad_input, input, target, grad, stats, count)
    steps = (grad_input.stride(-1), input.stride(-1))
    strides = (*steps, *indexing(grad_input[..., 0], input[..., 0], target, grad))

    def make() -> Launch:
        divisibility = divisibility_of(n_cols, strides[8], strides[12])
        constants = {**options.constants(), "MEAN": options.reduction == "mean", "DIVISIBILITY": divisibility}
        arguments = (n_rows, n_cols, *options.numbers(n_cols), *strides)
        return _tuned_backward(
            lambda meta: (n_rows * triton.cdiv(n_cols, meta["BLOCK"]),), tensors, arguments, constants
        )

    _launches.run(("backward", n_rows, n_cols, strides, options, input.dtype, grad.dtype, input.device), make, tensors)


PASSES = passes(launch_forward, launch_backward)


_TYPES = {
    "target_ptr": "*i64",
    "stats_ptr": "*fp32",
    "count_ptr": "*fp32",
    **dict.fromkeys(("kept", "uniform", "z_loss"), "fp32"),
}
_MATRIX = dict.fromkeys(("size1", "size2", "size3", "in_stride", "out_stride", "t3"), 1)


def _entry(kernel: object, dtype: str, shape: tuple[int, int], options: bool) -> Entry:
    block, warps = shape
    names = kernel.arg_names  # type: ignore[attr-defined]
    constants = {
        "SMOOTHED": options,
        "PENALIZED": options,
        "MEAN": options,
        "DIVISIBILITY": 16,
        "BLOCK": block,
        **_MATRIX,
    }
    types = {name: kind for name, kind in {**_TYPES, "losses_ptr": "*fp32"}.items() if name in names}
    given = {name: value for name, value in constants.items() if name in names}
    return entry(kernel, dtype, given, triton.Config({}, num_warps=warps, num_stages=1), types)


AOT = [
    _entry(_cross_entropy_online_kernel, "bf16", _CONFIGS[0], False),
    _entry(_cross_entropy_online_kernel, "fp32", _SMOOTHED_CONFIGS[0], True),
    _entry(_cross_entropy_backward_online_kernel, "bf16", _BACKWARD_CONFIGS[0], False),
    _entry(_cross_entropy_backward_online_kernel, "fp32", _BACKWARD_CONFIGS[0], True),
]
