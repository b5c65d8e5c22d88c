"""bias_dropout_add_layer_norm, rung 2 of 4: fused

Idea      Whole rows in registers, one or several per program: bias, dropout, residual sum and LayerNorm in one kernel.
          Backward: the kernel of :mod:`triton_impl.norm.fused`, then the dropout gradient's (common.py).
Predicts  3·N·sizeof(T) bytes per row forward: two reads, one write; 4·N·sizeof(T) with the sum saved for the backward.
Limit now Registers: rows of up to 32768 elements forward, 8192 backward.
Next      `cluster`: spread a row over the thread blocks of a cluster.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_impl.bias_dropout_add_layer_norm.common import FLAGS, Mask, entry_of, forward_by, residual_sum
from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.pdl import griddepcontrol_wait
from triton_impl.common.philox import ARGUMENTS
from triton_impl.norm.fused import normalize_rows
from triton_impl.runtime.aot import Entry
from triton_impl.runtime.autotuned_kernel import AutotunedKernel
from triton_impl.runtime.launch_cache import Launch
from triton_impl.runtime.row_configs import forward_shapes, row_configs, suitable_forward


@triton.jit(do_not_specialize=ARGUMENTS)
def _fused_kernel(
    out_ptr, sum_ptr, stats_ptr, input_ptr, bias_ptr, residual_ptr, weight_ptr, norm_bias_ptr,
    key_low, key_high, threshold, scale, in_stride, residual_stride, n_rows, n_cols, eps,
    SAVE_STATS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, EIGHTS: tl.constexpr,
    DIVISIBILITY: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """y = layer_norm(residual + dropout(input + bias)).

    Grid: one program per ROWS rows. Layout: input and residual have dense rows, `in_stride` and `residual_stride`
    apart. SAVE_STATS: sum and statistics are stored for the backward pass.
    """
    griddepcontrol_wait(USE_PDL)
    n_cols, in_stride = assume_divisible(n_cols, DIVISIBILITY), assume_divisible(in_stride, DIVISIBILITY)
    residual_stride = assume_divisible(residual_stride, DIVISIBILITY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    total = residual_sum(
        input_ptr, bias_ptr, residual_ptr, row, 0, key_low, key_high, threshold, scale,
        in_stride, residual_stride, n_rows, n_cols, EIGHTS, BLOCK,
    )  # fmt: skip
    if SAVE_STATS:
        mask = (row < n_rows)[:, None] & (col < n_cols)[None, :]
        tl.store(sum_ptr + row[:, None] * n_cols + col[None, :], total, mask=mask)
    normalize_rows(
        total, out_ptr, stats_ptr, weight_ptr, norm_bias_ptr, row, col, n_rows, n_cols, eps,
        True, SAVE_STATS, HAS_WEIGHT, HAS_BIAS, ROWS, False,
    )  # fmt: skip


_kernel = AutotunedKernel(_fused_kernel, row_configs((0,)), ("BLOCK", "SAVE_STATS", "DIVISIBILITY"), suitable_forward)


def _first_launch(
    tensors: tuple[torch.Tensor, ...],
    strides: tuple[int, int],
    present: tuple[bool, bool],
    eps: float,
    save_stats: bool,
    mask: Mask,
) -> Launch:
    n_rows, n_cols = tensors[3].shape
    constants = {
        "SAVE_STATS": save_stats, "HAS_WEIGHT": present[0], "HAS_BIAS": present[1], "EIGHTS": n_cols % 8 == 0,
        "DIVISIBILITY": divisibility_of(n_cols, *strides), "BLOCK": triton.next_power_of_2(n_cols),
    }  # fmt: skip
    arguments = (*strides, n_rows, n_cols, eps)
    return _kernel(lambda meta: (triton.cdiv(n_rows, meta["ROWS"]),), tensors, arguments, constants, mask)


forward = forward_by(_first_launch)


def _entry(block: int, save_stats: bool) -> Entry:
    rows, warps = forward_shapes(block)[0]
    return entry_of(_fused_kernel, warps, {**FLAGS, "SAVE_STATS": save_stats, "BLOCK": block}, ROWS=rows)


def ahead_of_time() -> list[Entry]:
    """Specialisations that stand for the calls."""
    return [_entry(block, save) for block, save in ((256, False), (4096, True), (4096, False), (16384, True))]
