"""cross_entropy, rung 2 of 2: online

Idea      Maximum and sum come from one pass (Milakov and Gimelshein, arXiv:1805.02867), and so does the sum of all
          logits that label smoothing needs. Each lane has its own state. The backward pass has one program per block of
          columns.
Predicts  N·sizeof(T) bytes per row; backward one read and one write.
Limit now Memory bandwidth; short rows wait for their label and for their logits, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
#: Elements of a unit. Rows that begin off 16 bytes are read by whole units where these lie in the row, and at their two
#: edges by elements.
UNIT = tl.constexpr(16)


@triton.jit
def _span(start, length, PEELED: tl.constexpr):
    """Where the row lies that begins at element `start`: a unit at or before it, and from there on the elements to the
    row's start, those to its end, and the units to its first whole one.
    """
    base = start // UNIT * UNIT if PEELED else start
    begin = (start - base).to(tl.int32)
    return base, begin, tl.where(length > 0, begin + length, 0), tl.cdiv(begin, UNIT)


@triton.jit
def _inside(col, end, first_unit, PEELED: tl.constexpr):
    """Which columns lie in the row, or in its whole units: the same for all of a unit, so that loads stay wide."""
    return (col // UNIT >= first_unit) & (col // UNIT < end // UNIT) if PEELED else col < end


@triton.jit
def _edges(begin, end, first_unit):
    """The columns of the units at both edges, and which of them lie in the row but in no whole unit."""
    i = tl.arange(0, 2 * UNIT)
    col = tl.where(i < UNIT, i, tl.maximum(first_unit, end // UNIT) * UNIT + i - UNIT)
    return col, (col < end) & (i >= tl.where(i < UNIT, tl.where(first_unit > 0, begin, UNIT), 0))


@triton.jit
def _cross_entropy_online_kernel(
    input_ptr, target_ptr, losses_ptr, stats_ptr, n_rows, n_cols, ignore_index, kept, uniform, z_loss,
    in_stride, size1, size2, size3, i0, i1, i2, i3, t0, t1, t2, t3,
    SMOOTHED: tl.constexpr, PENALIZED: tl.constexpr, DIVISIBILITY: tl.constexpr, PEELED: tl.constexpr,
    BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """loss = kept · (lse − x_label) + uniform · Σ (lse − x) + z_loss · lse², lse = max x + log Σ exp(x − max x).

    Grid: one program per row. Layout: any strides; a row is found from its number through sizes and strides.
    """
    griddepcontrol_wait(USE_PDL)
    LANES: tl.constexpr = BLOCK // PER_LANE
    row = tl.program_id(0).to(tl.int64)
    n_cols = assume_divisible(n_cols, DIVISIBILITY)
    i3 = assume_divisible(i3, DIVISIBILITY)
    label = tl.load(target_ptr + offset_of(row, size1, size2, size3, t0, t1, t2, t3))
    length = tl.where(counts(label, n_cols, ignore_index), n_cols, 0)
    first = offset_of(row, size1, size2, size3, i0, i1, i2, i3)
    base, begin, end, first_unit = _span(first, length, PEELED)
    input_ptr += base
    offsets = tl.arange(0, PER_LANE)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    lane_max = tl.full([LANES], -float("inf"), tl.float32)
    lane_sum = tl.zeros([LANES], tl.float32)
    below = tl.zeros([LANES], tl.float32)  # Σ (lane_max − x), and of how many x
    seen = tl.zeros([LANES], tl.float32)
    for start in range(0, end, BLOCK):
        col = start + offsets
        mask = _inside(col, end, first_unit, PEELED)
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
    if PEELED:
        edge, of_row = _edges(begin, end, first_unit)
        x_edge = tl.load(input_ptr + edge, mask=of_row, other=-float("inf")).to(tl.float32)
        row_max = tl.maximum(row_max, tl.max(x_edge, axis=0))
    row_sum = tl.sum(lane_sum * tl.where(lane_max == -float("inf"), 1.0, tl.exp2((lane_max - row_max) * LOG2E)), axis=0)
    if PEELED:
        row_sum += tl.sum(tl.where(x_edge == -float("inf"), 0.0, tl.exp2((x_edge - row_max) * LOG2E)), axis=0)
    log_sum = tl.log(row_sum)
    of_label = tl.load(input_ptr + begin + tl.where(length > 0, label, 0) * in_stride).to(tl.float32)
    loss = kept * (log_sum + (row_max - of_label))
    if SMOOTHED:
        below += tl.where(lane_max == -float("inf"), 0.0, seen * (row_max - lane_max))
        total = tl.sum(below, axis=0)
        if PEELED:
            total += tl.sum(tl.where(of_row, row_max - x_edge, 0.0), axis=0)
        loss += uniform * (n_cols * log_sum + total)
    if PENALIZED:
        loss += z_loss * (row_max + log_sum) * (row_max + log_sum)
    tl.store(losses_ptr + row, settled(loss, label, n_cols, ignore_index).to(losses_ptr.dtype.element_ty))
    tl.store(stats_ptr + row, row_max)
    tl.store(stats_ptr + n_rows + row, row_sum)


@triton.jit
def _gradient(x, is_label, reads, grad, row_max, scale, kept, uniform, SMOOTHED: tl.constexpr):
    """The gradient of the logits x; zero in a row that does not count."""
    value = tl.exp2((x - row_max) * LOG2E) * scale - tl.where(is_label, kept, 0.0)
    if SMOOTHED:
        value -= uniform
    return tl.where(reads, grad * value, 0.0)


@triton.jit
def _cross_entropy_backward_online_kernel(
    grad_input_ptr, input_ptr, target_ptr, grad_ptr, stats_ptr, count_ptr, n_rows, n_cols, ignore_index,
    kept, uniform, z_loss, out_stride, in_stride, size1, size2, size3,
    o0, o1, o2, o3, i0, i1, i2, i3, t0, t1, t2, t3, g0, g1, g2, g3,
    SMOOTHED: tl.constexpr, PENALIZED: tl.constexpr, MEAN: tl.constexpr, DIVISIBILITY: tl.constexpr,
    PEELED: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """dx = g · (p · (1 + 2 · z_loss · lse) − kept · [x is the label's] − uniform), p = exp(x − max x) / row_sum.

    Grid: one program per block of a row's columns, those of a row next to each other. Layout: as the forward kernel's.
    """
    griddepcontrol_wait(USE_PDL)
    blocks = tl.cdiv(n_cols + UNIT - 1 if PEELED else n_cols, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    n_cols = assume_divisible(n_cols, DIVISIBILITY)
    o3 = assume_divisible(o3, DIVISIBILITY)
    i3 = assume_divisible(i3, DIVISIBILITY)
    label = tl.load(target_ptr + offset_of(row, size1, size2, size3, t0, t1, t2, t3))
    grad_ptr += offset_of(row, size1, size2, size3, g0, g1, g2, g3)
    grad = gradient_of_loss(grad_ptr, count_ptr, MEAN)
    row_max = tl.load(stats_ptr + row)
    row_sum = tl.load(stats_ptr + n_rows + row)
    scale = 1 / row_sum
    if PENALIZED:
        scale *= 1 + 2 * z_loss * (row_max + tl.log(row_sum))
    first = offset_of(row, size1, size2, size3, i0, i1, i2, i3)
    base, begin, end, first_unit = _span(first, n_cols, PEELED)
    read_end = tl.where(counts(label, n_cols, ignore_index), end, 0)
    input_ptr += base
    grad_input_ptr += _span(offset_of(row, size1, size2, size3, o0, o1, o2, o3), n_cols, PEELED)[0]
    col = block * BLOCK + tl.arange(0, BLOCK)
    mask, read = _inside(col, end, first_unit, PEELED), _inside(col, read_end, first_unit, PEELED)
    col = col.to(tl.int64)
    x = tl.load(input_ptr + col * in_stride, mask=read, other=0.0).to(tl.float32)
    value = _gradient(x, col - begin == label, read_end > 0, grad, row_max, scale, kept, uniform, SMOOTHED)
    tl.store(grad_input_ptr + col * out_stride, value.to(grad_input_ptr.dtype.element_ty), mask=mask)
    if PEELED and block == 0:
        edge, of_row = _edges(begin, end, first_unit)
        x_edge = tl.load(input_ptr + edge, mask=of_row & (edge < read_end), other=0.0).to(tl.float32)
        of_edge = _gradient(x_edge, edge - begin == label, read_end > 0, grad, row_max, scale, kept, uniform, SMOOTHED)
        tl.store(grad_input_ptr + edge, of_edge.to(grad_input_ptr.dtype.element_ty), mask=of_row)


# ---- host ----------------------------------------------------------------------------------------------------------

# A thread loads 8 lanes of 16 bits at once, so a block has at least 1024 columns a warp. With fewer, several warps have
# a lane's columns, and meet in shared memory for each block.
_CONFIGS = ((8192, 8), (4096, 4), (16384, 16), (8192, 4), (16384, 8))
_SMOOTHED_CONFIGS = ((4096, 4), (8192, 8), (2048, 2), (16384, 16))  # which keep more numbers per lane
_BACKWARD_CONFIGS = ((4096, 8), (2048, 4), (8192, 8), (8192, 16))
# Of rows of up to so many columns, where a block of those above would leave most lanes idle.
_SHORT = 2048
_SHORT_CONFIGS = ((1024, 1), (2048, 2))
_SHORT_BACKWARD_CONFIGS = ((1024, 2), (1024, 1), (2048, 4), (1024, 4))
_KEY = ("n_cols", "SMOOTHED", "PEELED")


def _tuned_by_length(
    kernel: Any, configs: tuple[tuple[int, int], ...], short: tuple[tuple[int, int], ...]
) -> Callable[[int], AutotunedKernel]:
    """The kernel by a row's length, tuned over the configurations that suit it."""
    of_long, of_short = (AutotunedKernel(kernel, blocks_of(*choices), _KEY) for choices in (configs, short))
    return lambda n_cols: of_short if n_cols <= _SHORT else of_long


_tuned = {
    smoothed: _tuned_by_length(_cross_entropy_online_kernel, configs, _SHORT_CONFIGS)
    for smoothed, configs in ((False, _CONFIGS), (True, _SMOOTHED_CONFIGS))
}
_tuned_backward = _tuned_by_length(_cross_entropy_backward_online_kernel, _BACKWARD_CONFIGS, _SHORT_BACKWARD_CONFIGS)
_launches = LaunchCache()


def _peeled(divisibility: int, *tensors: torch.Tensor) -> bool:
    """Whether dense rows begin off 16 bytes, at the same places of a unit in all `tensors`."""
    if divisibility * tensors[0].element_size() >= 16 or tensors[0].shape[-1] + UNIT.value >= 2**31:
        return False
    strides = [t.stride() for t in tensors]
    return all(s[-1] == 1 for s in strides) and all(
        len({n % UNIT.value for n in of_dim}) == 1 for of_dim in zip(*strides, strict=True)
    )


def launch_forward(
    input: torch.Tensor, target: torch.Tensor, losses: torch.Tensor, stats: torch.Tensor, options: Options
) -> None:
    n_rows, n_cols = target.numel(), input.shape[-1]
    tensors = (input, target, losses, stats)
    strides = (input.stride(-1), *indexing(input[..., 0], target))

    def make() -> Launch:
        divisibility = divisibility_of(n_cols, strides[7])
        peeled = _peeled(divisibility, input)
        constants = {**options.constants(), "DIVISIBILITY": divisibility, "PEELED": peeled}
        arguments = (n_rows, n_cols, *options.numbers(n_cols), *strides)
        return _tuned[constants["SMOOTHED"]](n_cols)(lambda meta: (n_rows,), tensors, arguments, constants)

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
        peeled = _peeled(divisibility, input, grad_input)
        constants = {**options.constants(), "MEAN": options.reduction == "mean"}
        constants |= {"DIVISIBILITY": divisibility, "PEELED": peeled}
        columns = n_cols + (UNIT.value - 1 if peeled else 0)
        arguments = (n_rows, n_cols, *options.numbers(n_cols), *strides)
        # Timing configurations runs the kernel many times, so in place of its input the first call needs memory apart.
        in_place = grad_input.data_ptr() == input.data_ptr()
        output = grad_input.new_empty_strided(input.shape, grad_input.stride()) if in_place else grad_input
        launch = _tuned_backward(n_cols)(
            lambda meta: (n_rows * triton.cdiv(columns, meta["BLOCK"]),), (output, *tensors[1:]), arguments, constants
        )
        if in_place:
            launch(*tensors)
        return launch

    _launches.run(("backward", n_rows, n_cols, strides, options, input.dtype, grad.dtype, input.device), make, tensors)


PASSES = passes(launch_forward, launch_backward)


_TYPES = {
    "target_ptr": "*i64",
    "stats_ptr": "*fp32",
    "count_ptr": "*fp32",
    **dict.fromkeys(("kept", "uniform", "z_loss"), "fp32"),
}
_MATRIX = dict.fromkeys(("size1", "size2", "size3", "in_stride", "out_stride", "t3"), 1)


def _entry(kernel: object, dtype: str, shape: tuple[int, int], options: bool, divisibility: int = 16) -> Entry:
    block, warps = shape
    names = kernel.arg_names  # type: ignore[attr-defined]
    constants = {
        "SMOOTHED": options,
        "PENALIZED": options,
        "MEAN": options,
        "DIVISIBILITY": divisibility,
        "PEELED": divisibility == 1,
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
    _entry(_cross_entropy_online_kernel, "bf16", _SHORT_CONFIGS[0], False),
    _entry(_cross_entropy_online_kernel, "bf16", _CONFIGS[0], False, divisibility=1),
    _entry(_cross_entropy_backward_online_kernel, "bf16", _BACKWARD_CONFIGS[0], False, divisibility=1),
]
