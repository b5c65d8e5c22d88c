"""bias_dropout_add_layer_norm, rung 1 of 4: online

Idea      A row of any length, one block of columns at a time. The first pass stores the sum and finds its statistics;
          the second normalises the sum, which it finds in L2. Backward: the kernels of :mod:`triton_impl.norm.online`,
          then the dropout gradient's (common.py).
Predicts  4·N·sizeof(T) bytes per row: two reads, and two writes of one row, the sum and the output.
Limit now The sum goes through memory, and is read once more.
Next      `fused`: keep the row in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_impl.bias_dropout_add_layer_norm.common import FLAGS, Mask, entry_of, forward_by, residual_sum
from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.pdl import griddepcontrol_wait
from triton_impl.common.philox import ARGUMENTS
from triton_impl.norm.common import rstd_of, store_stats
from triton_impl.norm.online import PILOT, normalize_row, pilot_of
from triton_impl.runtime.aot import Entry
from triton_impl.runtime.autotuned_kernel import AutotunedKernel
from triton_impl.runtime.launch_cache import Launch
from triton_impl.runtime.row_configs import blocks_of


@triton.jit(do_not_specialize=ARGUMENTS)
def _online_kernel(
    out_ptr, sum_ptr, stats_ptr, input_ptr, bias_ptr, residual_ptr, weight_ptr, norm_bias_ptr,
    key_low, key_high, threshold, scale, in_stride, residual_stride, n_rows, n_cols, eps,
    SAVE_STATS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, EIGHTS: tl.constexpr,
    DIVISIBILITY: tl.constexpr, PILOT: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """y = layer_norm(residual + dropout(input + bias)).

    Grid: one program per row. Layout: input and residual have dense rows, `in_stride` and `residual_stride` apart.
    Without SAVE_STATS `sum_ptr` is the output, whose memory holds the sum until the second pass.
    """
    griddepcontrol_wait(USE_PDL)
    n_cols, in_stride = assume_divisible(n_cols, DIVISIBILITY), assume_divisible(in_stride, DIVISIBILITY)
    residual_stride = assume_divisible(residual_stride, DIVISIBILITY)
    row = tl.program_id(0).to(tl.int64)
    rows = row + tl.arange(0, 1)
    lane = tl.arange(0, BLOCK)
    # Deviations are taken from the mean of the row's first elements: near the mean of all, and known in advance.
    pilot = residual_sum(
        input_ptr, bias_ptr, residual_ptr, rows, 0, key_low, key_high, threshold, scale,
        in_stride, residual_stride, n_rows, n_cols, EIGHTS, PILOT,
    )  # fmt: skip
    mean = tl.sum(pilot.reshape([PILOT]).to(tl.float32), axis=0) / tl.minimum(n_cols, PILOT)
    sums = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        col_mask = start + lane < n_cols
        total = residual_sum(
            input_ptr, bias_ptr, residual_ptr, rows, start, key_low, key_high, threshold, scale,
            in_stride, residual_stride, n_rows, n_cols, EIGHTS, BLOCK,
        ).reshape([BLOCK])  # fmt: skip
        tl.store(sum_ptr + row * n_cols + start + lane, total, mask=col_mask)
        deviation = tl.where(col_mask, total.to(tl.float32) - mean, 0.0)
        sums += deviation
        squares += deviation * deviation
    mean_deviation = tl.sum(sums, axis=0) / n_cols
    rstd = rstd_of(tl.sum(squares, axis=0) / n_cols - mean_deviation * mean_deviation, eps)
    shift = -mean_deviation * rstd
    if SAVE_STATS:
        store_stats(stats_ptr, row, n_rows, True, mean, rstd, shift, True)
    tl.debug_barrier()  # threads read sums that other threads wrote
    normalize_row(
        sum_ptr + row * n_cols, out_ptr + row * n_cols, weight_ptr, norm_bias_ptr, mean, rstd, shift, n_cols,
        True, HAS_WEIGHT, HAS_BIAS, BLOCK, False,
    )  # fmt: skip


_kernel = AutotunedKernel(_online_kernel, blocks_of((4096, 8), (8192, 16), (4096, 16)), ("n_cols",))


def _first_launch(
    tensors: tuple[torch.Tensor, ...],
    strides: tuple[int, int],
    present: tuple[bool, bool],
    eps: float,
    save_stats: bool,
    mask: Mask,
) -> Launch:
    x = tensors[3]
    n_rows, n_cols = x.shape
    constants = {
        "SAVE_STATS": save_stats, "HAS_WEIGHT": present[0], "HAS_BIAS": present[1], "EIGHTS": n_cols % 8 == 0,
        "DIVISIBILITY": divisibility_of(n_cols, *strides), "PILOT": pilot_of(x.dtype),
    }  # fmt: skip
    return _kernel(lambda meta: (n_rows,), tensors, (*strides, n_rows, n_cols, eps), constants, mask)


forward = forward_by(_first_launch)


def ahead_of_time() -> list[Entry]:
    """A specialisation that stands for the calls."""
    return [entry_of(_online_kernel, 8, {**FLAGS, "SAVE_STATS": True, "PILOT": PILOT}, BLOCK=4096)]
