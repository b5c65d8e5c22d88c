"""swiglu, rung 1 of 1: fused

Idea      ``silu(gate) · up`` in registers: both operands are read once. Backward, both gradients come from one read of
          three tensors.
Predicts  3 · numel · itemsize bytes forward, 5 · numel · itemsize backward: the time of a copy of as many bytes.
Limit now Memory bandwidth.
Next      cuda `vectorized`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_ladder.tracing import shapes_only
from triton_impl import register, unsupported
from triton_impl.common.cache_policy import EVICTION_OF_SINGLE_USE
from triton_impl.common.elementwise import (
    gradient_for_kernel,
    is_dense,
    offset_of,
    row_indexing,
    tile,
    tile_of,
    too_many_row_dims,
)
from triton_impl.common.fast_math import LOG2E, exp2, rcp
from triton_impl.common.pdl import griddepcontrol_wait
from triton_impl.runtime.launch_cache import CachedKernel

# 1024 elements over 4 warps are 8 each: one 16-byte load a thread and operand for the 16-bit types.
BLOCK = 1024


@triton.jit
def _swiglu(gate, up):
    gate = gate.to(tl.float32)
    return gate * rcp(1 + exp2(gate * -LOG2E)) * up.to(tl.float32)


@triton.jit
def _swiglu_gradients(grad, gate, up):
    grad, gate, up = grad.to(tl.float32), gate.to(tl.float32), up.to(tl.float32)
    # sigmoid and its slope, of exp(−|gate|), which neither overflows nor lets them cancel.
    e = exp2(tl.abs(gate) * -LOG2E)
    p = rcp(1 + e)
    sigmoid = tl.where(gate >= 0, p, e * p)
    return grad * up * (sigmoid + gate * (e * p * p)), grad * (gate * sigmoid)


@triton.jit
def _swiglu_block(out_ptr, gate_ptr, up_ptr, mask):
    gate = tl.load(gate_ptr, mask=mask, eviction_policy=EVICTION_OF_SINGLE_USE)
    up = tl.load(up_ptr, mask=mask, eviction_policy=EVICTION_OF_SINGLE_USE)
    tl.store(out_ptr, _swiglu(gate, up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward_block(grad_gate_ptr, grad_up_ptr, grad_ptr, gate_ptr, up_ptr, mask):
    gate = tl.load(gate_ptr, mask=mask, eviction_policy=EVICTION_OF_SINGLE_USE)
    up = tl.load(up_ptr, mask=mask, eviction_policy=EVICTION_OF_SINGLE_USE)
    grad = tl.load(grad_ptr, mask=mask, eviction_policy=EVICTION_OF_SINGLE_USE)
    grad_gate, grad_up = _swiglu_gradients(grad, gate, up)
    tl.store(grad_gate_ptr, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=mask)
    tl.store(grad_up_ptr, grad_up.to(grad_up_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_kernel(out_ptr, gate_ptr, up_ptr, numel, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    """``out = silu(gate) · up``. Grid: (⌈numel / BLOCK⌉,). Layout: all dense, in one order."""
    griddepcontrol_wait(USE_PDL)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = start + tl.arange(0, BLOCK)
    if start + BLOCK <= numel:  # with a mask, whole vectors would need a `numel` that 16 divides
        _swiglu_block(out_ptr + i, gate_ptr + i, up_ptr + i, None)
    else:
        _swiglu_block(out_ptr + i, gate_ptr + i, up_ptr + i, i < numel)


@triton.jit
def _swiglu_backward_kernel(
    grad_gate_ptr, grad_up_ptr, grad_ptr, gate_ptr, up_ptr, numel, BLOCK: tl.constexpr, USE_PDL: tl.constexpr
):
    """Gradients of ``silu(gate) · up``. Grid: (⌈numel / BLOCK⌉,). Layout: all dense, in one order."""
    griddepcontrol_wait(USE_PDL)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = start + tl.arange(0, BLOCK)
    if start + BLOCK <= numel:
        _swiglu_backward_block(grad_gate_ptr + i, grad_up_ptr + i, grad_ptr + i, gate_ptr + i, up_ptr + i, None)
    else:
        _swiglu_backward_block(grad_gate_ptr + i, grad_up_ptr + i, grad_ptr + i, gate_ptr + i, up_ptr + i, i < numel)


# The same for operands of any strides, in tiles of rows and columns. Where rows are dense, as in the two halves of one
# tensor, Triton specialises on their stride of 1 and loads whole vectors.


@triton.jit
def _swiglu_rows_kernel(
    out_ptr, gate_ptr, up_ptr, rows, columns, size1, size2, size3,
    o0, o1, o2, o3, g0, g1, g2, g3, u0, u1, u2, u3, o_step, g_step, u_step,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    griddepcontrol_wait(USE_PDL)
    row, column, mask = tile(rows, columns, BLOCK_M, BLOCK_N)
    out_ptr += offset_of(row, size1, size2, size3, o0, o1, o2, o3)[:, None] + column * o_step
    gate_ptr += offset_of(row, size1, size2, size3, g0, g1, g2, g3)[:, None] + column * g_step
    up_ptr += offset_of(row, size1, size2, size3, u0, u1, u2, u3)[:, None] + column * u_step
    _swiglu_block(out_ptr, gate_ptr, up_ptr, mask)


@triton.jit
def _swiglu_backward_rows_kernel(
    grad_gate_ptr, grad_up_ptr, grad_ptr, gate_ptr, up_ptr, rows, columns, size1, size2, size3,
    gg0, gg1, gg2, gg3, gu0, gu1, gu2, gu3, gr0, gr1, gr2, gr3, g0, g1, g2, g3, u0, u1, u2, u3,
    gg_step, gu_step, gr_step, g_step, u_step,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    griddepcontrol_wait(USE_PDL)
    row, column, mask = tile(rows, columns, BLOCK_M, BLOCK_N)
    grad_gate_ptr += offset_of(row, size1, size2, size3, gg0, gg1, gg2, gg3)[:, None] + column * gg_step
    grad_up_ptr += offset_of(row, size1, size2, size3, gu0, gu1, gu2, gu3)[:, None] + column * gu_step
    grad_ptr += offset_of(row, size1, size2, size3, gr0, gr1, gr2, gr3)[:, None] + column * gr_step
    gate_ptr += offset_of(row, size1, size2, size3, g0, g1, g2, g3)[:, None] + column * g_step
    up_ptr += offset_of(row, size1, size2, size3, u0, u1, u2, u3)[:, None] + column * u_step
    _swiglu_backward_block(grad_gate_ptr, grad_up_ptr, grad_ptr, gate_ptr, up_ptr, mask)


_forward = CachedKernel(_swiglu_kernel), CachedKernel(_swiglu_rows_kernel)
_backward = CachedKernel(_swiglu_backward_kernel), CachedKernel(_swiglu_backward_rows_kernel)


def _launch(kernels: tuple[CachedKernel, CachedKernel], *tensors: torch.Tensor) -> None:
    """Launch the dense kernel where all tensors are dense in one order, else that of rows. Outputs come first."""
    dense, by_rows = kernels
    output = tensors[0]
    if shapes_only() or output.numel() == 0:
        return
    if is_dense(*tensors):
        dense(triton.cdiv(output.numel(), BLOCK), tensors, (output.numel(), BLOCK))
        return
    rows, columns, strides = row_indexing(*tensors)
    height, width = tile_of(columns, BLOCK)
    programs = triton.cdiv(rows, height) * triton.cdiv(columns, width)
    by_rows(programs, tensors, (rows, columns, *strides, height, width))


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, tuple]:
    output = torch.empty_like(gate)
    _launch(_forward, output, gate, up)
    return output, (gate, up)


def swiglu_backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = saved
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(gate)
    _launch(_backward, grad_gate, grad_up, gradient_for_kernel(grad, grad_gate, gate, up, rows_at=-1), gate, up)
    return grad_gate, grad_up


def _unsupported(gate: torch.Tensor, up: torch.Tensor) -> str | None:
    return unsupported(gate) or too_many_row_dims(gate, up)


register("swiglu", "triton.fused", forward=swiglu, backward=swiglu_backward, unsupported=_unsupported)
