"""softmax, rung 3 of 4: fused

Idea      Whole rows in registers, one or several per program, of any strides. One read, one write.
Predicts  2·N·sizeof(T) bytes per row, without `online`'s second read from L2.
Limit now Registers: rows of up to 32768 elements, 32 values per thread at 1024 threads.
Next      `cluster`: spread a row over the thread blocks of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from triton_impl.common.cache_policy import EVICTION_OF_SINGLE_USE
from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.elementwise import offset_of
from triton_impl.common.fast_math import LOG2E
from triton_impl.common.pdl import griddepcontrol_wait
from triton_impl.runtime.aot import Entry, entry
from triton_impl.runtime.autotuned_kernel import AutotunedKernel
from triton_impl.runtime.launch_cache import Launch
from triton_impl.runtime.row_configs import (
    backward_shapes,
    forward_shapes,
    row_configs,
    suitable_backward,
    suitable_forward,
)
from triton_impl.softmax import rows
from triton_impl.softmax.rows import Kernels, passes

#: The longest row.
MAX_COLS = 32768


# ---- device functions ----------------------------------------------------------------------------------------------


@triton.jit
def _softmax_rows(out_ptr, input_ptr, row_mask, n_cols, out_stride, in_stride, BLOCK: tl.constexpr):
    """Whole rows, which begin at these (ROWS,) pointers."""
    col = tl.arange(0, BLOCK)
    mask = row_mask[:, None] & (col < n_cols)[None, :]
    col = col.to(tl.int64)
    x_ptrs = input_ptr[:, None] + (col * in_stride)[None, :]
    x = tl.load(x_ptrs, mask=mask, other=-float("inf"), eviction_policy=EVICTION_OF_SINGLE_USE).to(tl.float32)
    numerator = tl.exp2((x - tl.max(x, axis=1)[:, None]) * LOG2E)
    y = numerator * (1 / tl.sum(tl.where(mask, numerator, 0.0), axis=1))[:, None]
    tl.store(out_ptr[:, None] + (col * out_stride)[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_backward_rows(
    grad_input_ptr, grad_ptr, output_ptr, row_mask, n_cols, grad_input_stride, grad_stride, output_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Whole rows, which begin at these (ROWS,) pointers."""
    col = tl.arange(0, BLOCK)
    mask = row_mask[:, None] & (col < n_cols)[None, :]
    col = col.to(tl.int64)
    grad_ptrs = grad_ptr[:, None] + (col * grad_stride)[None, :]
    grad = tl.load(grad_ptrs, mask=mask, other=0.0, eviction_policy=EVICTION_OF_SINGLE_USE).to(tl.float32)
    y_ptrs = output_ptr[:, None] + (col * output_stride)[None, :]
    y = tl.load(y_ptrs, mask=mask, other=0.0, eviction_policy=EVICTION_OF_SINGLE_USE).to(tl.float32)
    value = (y * (grad - tl.sum(grad * y, axis=1)[:, None])).to(grad_input_ptr.dtype.element_ty)
    tl.store(grad_input_ptr[:, None] + (col * grad_input_stride)[None, :], value, mask=mask)


# ---- kernels: one program per ROWS rows ----------------------------------------------------------------------------


@triton.jit
def _fused_kernel(
    out_ptr, input_ptr, n_rows, n_cols,
    DIVISIBILITY: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """y = exp(x − max x) / Σ exp(x − max x). Grid: one program per ROWS rows. Layout: dense rows of n_cols elements."""
    griddepcontrol_wait(USE_PDL)
    n_cols = assume_divisible(n_cols, DIVISIBILITY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = row * n_cols
    _softmax_rows(out_ptr + start, input_ptr + start, row < n_rows, n_cols, 1, 1, BLOCK)


@triton.jit
def _fused_backward_kernel(
    grad_input_ptr, grad_ptr, output_ptr, n_rows, n_cols,
    DIVISIBILITY: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """dx = y · (dy − Σ y·dy). Grid: one program per ROWS rows. Layout: dense rows of n_cols elements."""
    griddepcontrol_wait(USE_PDL)
    n_cols = assume_divisible(n_cols, DIVISIBILITY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = row * n_cols
    _softmax_backward_rows(
        grad_input_ptr + start, grad_ptr + start, output_ptr + start, row < n_rows, n_cols, 1, 1, 1, BLOCK
    )


@triton.jit
def _fused_strided_kernel(
    out_ptr, input_ptr, n_rows, n_cols, out_stride, in_stride, size1, size2, size3, o0, o1, o2, o3, i0, i1, i2, i3,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """As `_fused_kernel`. Layout: any strides; a row is found by its number through sizes and strides."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    out_ptr += offset_of(row, size1, size2, size3, o0, o1, o2, o3)
    input_ptr += offset_of(row, size1, size2, size3, i0, i1, i2, i3)
    _softmax_rows(out_ptr, input_ptr, row < n_rows, n_cols, out_stride, in_stride, BLOCK)


@triton.jit
def _fused_strided_backward_kernel(
    grad_input_ptr, grad_ptr, output_ptr, n_rows, n_cols, grad_input_stride, grad_stride, output_stride,
    size1, size2, size3, gi0, gi1, gi2, gi3, g0, g1, g2, g3, o0, o1, o2, o3,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """As `_fused_backward_kernel`. Layout: any strides; a row is found by its number through sizes and strides."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    grad_input_ptr += offset_of(row, size1, size2, size3, gi0, gi1, gi2, gi3)
    grad_ptr += offset_of(row, size1, size2, size3, g0, g1, g2, g3)
    output_ptr += offset_of(row, size1, size2, size3, o0, o1, o2, o3)
    _softmax_backward_rows(
        grad_input_ptr, grad_ptr, output_ptr, row < n_rows, n_cols, grad_input_stride, grad_stride, output_stride, BLOCK
    )


# ---- host ----------------------------------------------------------------------------------------------------------


def _strided_shape(n_cols: int) -> tuple[int, int, int]:
    block = triton.next_power_of_2(n_cols)
    return (block, *forward_shapes(block)[0])


def _kernels(dense: Any, strided: Any, suitable: Callable[..., list[triton.Config]]) -> Kernels:
    tuned = AutotunedKernel(dense, row_configs((0,)), ("BLOCK", "DIVISIBILITY"), suitable)

    def launch(tensors: tuple[torch.Tensor, ...], n_rows: int, n_cols: int) -> Launch:
        constants = {"DIVISIBILITY": divisibility_of(n_cols), "BLOCK": triton.next_power_of_2(n_cols)}
        return tuned(lambda meta: (triton.cdiv(n_rows, meta["ROWS"]),), tensors, (n_rows, n_cols), constants)

    return Kernels(launch, strided, _strided_shape)


PASSES = passes(
    _kernels(_fused_kernel, _fused_strided_kernel, suitable_forward),
    _kernels(_fused_backward_kernel, _fused_strided_backward_kernel, suitable_backward),
)


def unsupported(input: torch.Tensor, *, dim: int) -> str | None:
    n_cols = input.shape[dim] if input.dim() else 1
    if n_cols > MAX_COLS:
        return f"rows of {n_cols} elements are too long for registers; at most {MAX_COLS}"
    return rows.unsupported(input, dim=dim)


def _entry(kernel: Any, dtype: str, shape: tuple[int, int], **constants: Any) -> Entry:
    n_rows, warps = shape
    return entry(kernel, dtype, constants, triton.Config({"ROWS": n_rows}, num_warps=warps, num_stages=1))


AOT = [
    *(_entry(_fused_kernel, "bf16", forward_shapes(n)[0], DIVISIBILITY=16, BLOCK=n) for n in (256, 4096, MAX_COLS)),
    *(_entry(_fused_backward_kernel, "bf16", backward_shapes(n)[0], DIVISIBILITY=16, BLOCK=n) for n in (256, 4096)),
    _entry(_fused_strided_kernel, "fp32", (1, 8), BLOCK=4096),
    _entry(_fused_strided_backward_kernel, "fp32", (1, 8), BLOCK=4096),
]
