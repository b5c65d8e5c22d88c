"""softmax, rung 2 of 4: online

Idea      A row of any length, one block of columns at a time. Maximum and sum come from one pass (Milakov and
          Gimelshein, arXiv:1805.02867); the second pass writes the quotient and finds the row in L2.
Predicts  2·N·sizeof(T) bytes per row from memory, N·sizeof(T) more from L2.
Limit now The second read. A row that fits in registers needs none.
Next      `fused`: keep the row in registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.elementwise import offset_of
from triton_impl.common.fast_math import LOG2E
from triton_impl.common.pdl import griddepcontrol_wait
from triton_impl.runtime.aot import Entry, entry
from triton_impl.runtime.autotuned_kernel import AutotunedKernel
from triton_impl.runtime.launch_cache import Launch
from triton_impl.runtime.row_configs import blocks_of
from triton_impl.softmax.rows import Kernels, passes

#: Columns of a block of the strided kernels.
STRIDED_BLOCK = 4096
#: Columns that a lane takes for one correction of its running sum.
PER_LANE = tl.constexpr(4)


# ---- device functions ----------------------------------------------------------------------------------------------


@triton.jit
def _softmax_row(out_ptr, input_ptr, n_cols, out_stride, in_stride, BLOCK: tl.constexpr, PER_LANE: tl.constexpr):
    """One row. Each lane has its own running maximum and sum, so the loop has no reduction across threads. A lane takes
    PER_LANE values per iteration for one correction of its sum.
    """
    LANES: tl.constexpr = BLOCK // PER_LANE
    offsets = tl.arange(0, PER_LANE)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    lane_max = tl.full([LANES], -float("inf"), tl.float32)
    lane_sum = tl.zeros([LANES], tl.float32)
    for start in range(0, n_cols, BLOCK):
        col = start + offsets
        ptrs = input_ptr + col.to(tl.int64) * in_stride
        x = tl.load(ptrs, mask=col < n_cols, other=-float("inf"), eviction_policy="evict_last").to(tl.float32)
        new_max = tl.maximum(lane_max, tl.max(x, axis=0))
        # While all is −inf, the difference of the maxima would be NaN. A NaN that the maximum drops reaches the sum.
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        lane_sum = lane_sum * tl.exp2((lane_max - shift) * LOG2E) + tl.sum(
            tl.exp2((x - shift[None, :]) * LOG2E), axis=0
        )
        lane_max = new_max
    row_max = tl.max(lane_max, axis=0)
    lane_scale = tl.where(lane_max == -float("inf"), 1.0, tl.exp2((lane_max - row_max) * LOG2E))
    scale = 1 / tl.sum(lane_sum * lane_scale, axis=0)
    for start in range(0, n_cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        ptrs = input_ptr + col.to(tl.int64) * in_stride
        x = tl.load(ptrs, mask=col < n_cols, other=-float("inf"), eviction_policy="evict_first").to(tl.float32)
        y = tl.exp2((x - row_max) * LOG2E) * scale
        tl.store(out_ptr + col.to(tl.int64) * out_stride, y.to(out_ptr.dtype.element_ty), mask=col < n_cols)


@triton.jit
def _softmax_backward_row(
    grad_input_ptr, grad_ptr, output_ptr, n_cols, grad_input_stride, grad_stride, output_stride, BLOCK: tl.constexpr
):  # fmt: skip
    """One row: Σ y·dy in a first pass, dx = y · (dy − Σ y·dy) in a second."""
    lane = tl.arange(0, BLOCK)
    lane_dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        col = (start + lane).to(tl.int64)
        col_mask = col < n_cols
        grad_ptrs, y_ptrs = grad_ptr + col * grad_stride, output_ptr + col * output_stride
        grad = tl.load(grad_ptrs, mask=col_mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        y = tl.load(y_ptrs, mask=col_mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        lane_dot += grad * y
    dot = tl.sum(lane_dot, axis=0)
    for start in range(0, n_cols, BLOCK):
        col = (start + lane).to(tl.int64)
        col_mask = col < n_cols
        grad_ptrs, y_ptrs = grad_ptr + col * grad_stride, output_ptr + col * output_stride
        grad = tl.load(grad_ptrs, mask=col_mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        y = tl.load(y_ptrs, mask=col_mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        grad_input = (y * (grad - dot)).to(grad_input_ptr.dtype.element_ty)
        tl.store(grad_input_ptr + col * grad_input_stride, grad_input, mask=col_mask)


# ---- kernels: one program per row ----------------------------------------------------------------------------------


@triton.jit
def _online_kernel(out_ptr, input_ptr, n_cols, DIVISIBILITY: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    """y = exp(x − max x) / Σ exp(x − max x). Grid: one program per row. Layout: dense rows of n_cols elements."""
    griddepcontrol_wait(USE_PDL)
    n_cols = assume_divisible(n_cols, DIVISIBILITY)
    start = tl.program_id(0).to(tl.int64) * n_cols
    _softmax_row(out_ptr + start, input_ptr + start, n_cols, 1, 1, BLOCK, PER_LANE)


@triton.jit
def _online_backward_kernel(
    grad_input_ptr, grad_ptr, output_ptr, n_cols, DIVISIBILITY: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr
):
    """dx = y · (dy − Σ y·dy). Grid: one program per row. Layout: dense rows of n_cols elements."""
    griddepcontrol_wait(USE_PDL)
    n_cols = assume_divisible(n_cols, DIVISIBILITY)
    start = tl.program_id(0).to(tl.int64) * n_cols
    _softmax_backward_row(grad_input_ptr + start, grad_ptr + start, output_ptr + start, n_cols, 1, 1, 1, BLOCK)


@triton.jit
def _online_strided_kernel(
    out_ptr, input_ptr, n_rows, n_cols, out_stride, in_stride, size1, size2, size3, o0, o1, o2, o3, i0, i1, i2, i3,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """As `_online_kernel`. Layout: any strides; a row is found by its number through sizes and strides."""
    row = tl.program_id(0).to(tl.int64)
    out_ptr += offset_of(row, size1, size2, size3, o0, o1, o2, o3)
    input_ptr += offset_of(row, size1, size2, size3, i0, i1, i2, i3)
    _softmax_row(out_ptr, input_ptr, n_cols, out_stride, in_stride, BLOCK, PER_LANE)


@triton.jit
def _online_strided_backward_kernel(
    grad_input_ptr, grad_ptr, output_ptr, n_rows, n_cols, grad_input_stride, grad_stride, output_stride,
    size1, size2, size3, gi0, gi1, gi2, gi3, g0, g1, g2, g3, o0, o1, o2, o3,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """As `_online_backward_kernel`. Layout: any strides; a row is found by its number through sizes and strides."""
    row = tl.program_id(0).to(tl.int64)
    grad_input_ptr += offset_of(row, size1, size2, size3, gi0, gi1, gi2, gi3)
    grad_ptr += offset_of(row, size1, size2, size3, g0, g1, g2, g3)
    output_ptr += offset_of(row, size1, size2, size3, o0, o1, o2, o3)
    _softmax_backward_row(
        grad_input_ptr, grad_ptr, output_ptr, n_cols, grad_input_stride, grad_stride, output_stride, BLOCK
    )


# ---- host ----------------------------------------------------------------------------------------------------------

#: At least 1024 columns a warp, as in ``triton_impl/cross_entropy/online.py``.
_CONFIGS = ((8192, 8), (4096, 4), (16384, 16), (16384, 8))


def _kernels(dense: Any, strided: Any) -> Kernels:
    tuned = AutotunedKernel(dense, blocks_of(*_CONFIGS), ("n_cols",))

    def launch(tensors: tuple[torch.Tensor, ...], n_rows: int, n_cols: int) -> Launch:
        return tuned(lambda meta: (n_rows,), tensors, (n_cols,), {"DIVISIBILITY": divisibility_of(n_cols)})

    return Kernels(launch, strided, lambda n_cols: (STRIDED_BLOCK, 1, 8))


PASSES = passes(
    _kernels(_online_kernel, _online_strided_kernel), _kernels(_online_backward_kernel, _online_strided_backward_kernel)
)


def _entry(kernel: Any, dtype: str, warps: int, **constants: Any) -> Entry:
    return entry(kernel, dtype, constants, triton.Config({}, num_warps=warps, num_stages=1))


_STRIDED = (_online_strided_kernel, _online_strided_backward_kernel)
AOT = [
    *(_entry(k, "bf16", 16, DIVISIBILITY=16, BLOCK=8192) for k in (_online_kernel, _online_backward_kernel)),
    *(_entry(k, "fp32", 8, BLOCK=STRIDED_BLOCK, ROWS=1) for k in _STRIDED),
]
