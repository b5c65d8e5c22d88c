"""Softmax in Triton.

fused    whole rows in registers, one or several a program: one read, one write
cluster  in Gluon, in the registers of a block or, what outgrows one, of several (softmax/cluster.py)
online   rows too long for that: maximum and sum in one pass (Milakov and Gimelshein, arXiv:1805.02867), then the
         quotient in a second read
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.strides import collapse
from kernel_ladder.tracing import shapes_only
from triton_impl import register, unsupported
from triton_impl.common.cache_policy import EVICTION_OF_SINGLE_USE
from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.elementwise import MAX_DIMS, gradient_for_kernel, offset_of, pad_strides
from triton_impl.common.gluon import requirements
from triton_impl.common.pdl import griddepcontrol_wait
from triton_impl.runtime.aot import Entry, entry
from triton_impl.runtime.autotuned_kernel import AutotunedKernel
from triton_impl.runtime.launch_cache import Launch, LaunchCache
from triton_impl.runtime.row_configs import (
    backward_shapes,
    blocks_of,
    forward_shapes,
    row_configs,
    suitable_backward,
    suitable_forward,
)
from triton_impl.softmax import cluster, naive

#: The longest row that `fused` keeps in registers: 32 values a thread at 1024 threads.
MAX_FUSED = 32768
ONLINE_BLOCK = 4096
LOG2E = tl.constexpr(1.4426950408889634)


# ---- rows, as every kernel below does them ---------------------------------------------------------------------------


@triton.jit
def _fused_rows(out_ptr, input_ptr, live, length, out_step, in_step, BLOCK: tl.constexpr):
    """Rows that begin at these pointers, a block of them."""
    i = tl.arange(0, BLOCK)
    mask = live[:, None] & (i < length)[None, :]
    at = input_ptr[:, None] + (i.to(tl.int64) * in_step)[None, :]
    x = tl.load(at, mask=mask, other=-float("inf"), eviction_policy=EVICTION_OF_SINGLE_USE).to(tl.float32)
    e = tl.exp2((x - tl.max(x, axis=1)[:, None]) * LOG2E)
    y = e * (1 / tl.sum(tl.where(mask, e, 0.0), axis=1))[:, None]
    tl.store(out_ptr[:, None] + (i.to(tl.int64) * out_step)[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_fused_rows(
    grad_input_ptr, grad_ptr, output_ptr, live, length, gi_step, g_step, o_step, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    mask = live[:, None] & (i < length)[None, :]
    i = i.to(tl.int64)
    grad = tl.load(
        grad_ptr[:, None] + (i * g_step)[None, :], mask=mask, other=0.0, eviction_policy=EVICTION_OF_SINGLE_USE
    ).to(tl.float32)
    y = tl.load(
        output_ptr[:, None] + (i * o_step)[None, :], mask=mask, other=0.0, eviction_policy=EVICTION_OF_SINGLE_USE
    ).to(tl.float32)
    value = (y * (grad - tl.sum(grad * y, axis=1)[:, None])).to(grad_input_ptr.dtype.element_ty)
    tl.store(grad_input_ptr[:, None] + (i * gi_step)[None, :], value, mask=mask)


@triton.jit
def _online_row(out_ptr, input_ptr, length, out_step, in_step, BLOCK: tl.constexpr, TURN: tl.constexpr):
    """One row. A lane has a running maximum and sum of its own, so that the loop has no reduction across threads, and
    takes TURN values at a time, for one correction of its sum.
    """
    lane = tl.arange(0, BLOCK // TURN)
    places = tl.arange(0, TURN)[:, None] * (BLOCK // TURN) + lane[None, :]
    lane_max = tl.full([BLOCK // TURN], -float("inf"), tl.float32)
    lane_sum = tl.zeros([BLOCK // TURN], tl.float32)
    for start in range(0, length, BLOCK):
        i = start + places
        at = input_ptr + i.to(tl.int64) * in_step
        x = tl.load(at, mask=i < length, other=-float("inf"), eviction_policy="evict_last").to(tl.float32)
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
    for start in range(0, length, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at = input_ptr + i.to(tl.int64) * in_step
        x = tl.load(at, mask=i < length, other=-float("inf"), eviction_policy="evict_first").to(tl.float32)
        y = tl.exp2((x - row_max) * LOG2E) * scale
        tl.store(out_ptr + i.to(tl.int64) * out_step, y.to(out_ptr.dtype.element_ty), mask=i < length)


@triton.jit
def _backward_online_row(grad_input_ptr, grad_ptr, output_ptr, length, gi_step, g_step, o_step, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    lane_dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, length, BLOCK):
        i = (start + lane).to(tl.int64)
        inside = i < length
        grad = tl.load(grad_ptr + i * g_step, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        y = tl.load(output_ptr + i * o_step, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        lane_dot += grad * y
    dot = tl.sum(lane_dot, axis=0)
    for start in range(0, length, BLOCK):
        i = (start + lane).to(tl.int64)
        inside = i < length
        grad = tl.load(grad_ptr + i * g_step, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        y = tl.load(output_ptr + i * o_step, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        grad_input = (y * (grad - dot)).to(grad_input_ptr.dtype.element_ty)
        tl.store(grad_input_ptr + i * gi_step, grad_input, mask=inside)


# ---- kernels: a program some rows, or one ----------------------------------------------------------------------------
# Dense rows have kernels of their own, with few arguments, because every argument of a kernel costs host time.


@triton.jit
def _fused_kernel(
    out_ptr,
    input_ptr,
    count,
    length,
    DIVISIBILITY: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    griddepcontrol_wait(USE_PDL)
    length = assume_divisible(length, DIVISIBILITY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = row * length
    _fused_rows(out_ptr + start, input_ptr + start, row < count, length, 1, 1, BLOCK)


@triton.jit
def _online_kernel(out_ptr, input_ptr, length, DIVISIBILITY: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    griddepcontrol_wait(USE_PDL)
    length = assume_divisible(length, DIVISIBILITY)
    start = tl.program_id(0).to(tl.int64) * length
    _online_row(out_ptr + start, input_ptr + start, length, 1, 1, BLOCK, 4)


@triton.jit
def _fused_backward_kernel(
    grad_input_ptr, grad_ptr, output_ptr, count, length,
    DIVISIBILITY: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    griddepcontrol_wait(USE_PDL)
    length = assume_divisible(length, DIVISIBILITY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = row * length
    _backward_fused_rows(
        grad_input_ptr + start, grad_ptr + start, output_ptr + start, row < count, length, 1, 1, 1, BLOCK
    )


@triton.jit
def _online_backward_kernel(
    grad_input_ptr, grad_ptr, output_ptr, length, DIVISIBILITY: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr
):
    griddepcontrol_wait(USE_PDL)
    length = assume_divisible(length, DIVISIBILITY)
    start = tl.program_id(0).to(tl.int64) * length
    _backward_online_row(grad_input_ptr + start, grad_ptr + start, output_ptr + start, length, 1, 1, 1, BLOCK)


@triton.jit
def _strided_kernel(
    out_ptr, input_ptr, count, length, out_step, in_step, size1, size2, size3, o0, o1, o2, o3, i0, i1, i2, i3,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    if FUSED:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        out_ptr += offset_of(row, size1, size2, size3, o0, o1, o2, o3)
        input_ptr += offset_of(row, size1, size2, size3, i0, i1, i2, i3)
        _fused_rows(out_ptr, input_ptr, row < count, length, out_step, in_step, BLOCK)
    else:
        row = tl.program_id(0).to(tl.int64)
        out_ptr += offset_of(row, size1, size2, size3, o0, o1, o2, o3)
        input_ptr += offset_of(row, size1, size2, size3, i0, i1, i2, i3)
        _online_row(out_ptr, input_ptr, length, out_step, in_step, BLOCK, 4)


@triton.jit
def _strided_backward_kernel(
    grad_input_ptr, grad_ptr, output_ptr, count, length, gi_step, g_step, o_step, size1, size2, size3,
    gi0, gi1, gi2, gi3, g0, g1, g2, g3, o0, o1, o2, o3,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    if FUSED:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        grad_input_ptr += offset_of(row, size1, size2, size3, gi0, gi1, gi2, gi3)
        grad_ptr += offset_of(row, size1, size2, size3, g0, g1, g2, g3)
        output_ptr += offset_of(row, size1, size2, size3, o0, o1, o2, o3)
        _backward_fused_rows(grad_input_ptr, grad_ptr, output_ptr, row < count, length, gi_step, g_step, o_step, BLOCK)
    else:
        row = tl.program_id(0).to(tl.int64)
        grad_input_ptr += offset_of(row, size1, size2, size3, gi0, gi1, gi2, gi3)
        grad_ptr += offset_of(row, size1, size2, size3, g0, g1, g2, g3)
        output_ptr += offset_of(row, size1, size2, size3, o0, o1, o2, o3)
        _backward_online_row(grad_input_ptr, grad_ptr, output_ptr, length, gi_step, g_step, o_step, BLOCK)


# ---- host ----------------------------------------------------------------------------------------------------------


class _Climb(NamedTuple):
    """The kernels of one pass: for dense rows, tuned, and for any others."""

    fused: AutotunedKernel
    online: AutotunedKernel
    strided: Any


_ONLINE = ((8192, 16), (4096, 8), (8192, 8), (16384, 16), (16384, 32))
_FORWARD = _Climb(
    AutotunedKernel(_fused_kernel, row_configs((0,)), ("BLOCK", "DIVISIBILITY"), suitable_forward),
    AutotunedKernel(_online_kernel, blocks_of(*_ONLINE), ("length",)),
    _strided_kernel,
)
_BACKWARD = _Climb(
    AutotunedKernel(_fused_backward_kernel, row_configs((0,)), ("BLOCK", "DIVISIBILITY"), suitable_backward),
    AutotunedKernel(_online_backward_kernel, blocks_of(*_ONLINE), ("length",)),
    _strided_backward_kernel,
)
_launches = LaunchCache()


def _rows(dim: int, *tensors: torch.Tensor) -> list[int]:
    """Each operand's step along a row, then what :func:`offset_of` takes to find a row among the other dimensions."""
    first = tensors[0]
    others = [d for d in range(first.dim()) if d != dim]
    steps = [t.stride(dim) for t in tensors]
    return steps + pad_strides(
        *collapse([first.shape[d] for d in others], *([t.stride(d) for d in others] for t in tensors))
    )


def _launch(climb: _Climb, dim: int, fused: bool, *tensors: torch.Tensor) -> None:
    """Launch over the rows of `tensors`, the output first."""
    output = tensors[0]
    numel = output.numel()
    if shapes_only() or numel == 0:
        return
    last = output.dim() - 1
    if dim < 0:
        dim += max(output.dim(), 1)
    length = output.shape[dim] if output.dim() else 1
    count = numel // length
    if output.dim() == 0 or (dim == last and all(t.is_contiguous() for t in tensors)):
        _launch_dense(climb, fused, tensors, count, length)
        return
    block = triton.next_power_of_2(length) if fused else ONLINE_BLOCK
    rows, num_warps = forward_shapes(block)[0] if fused else (1, 8)
    climb.strided[(triton.cdiv(count, rows),)](
        *tensors, count, length, *_rows(dim, *tensors), BLOCK=block, ROWS=rows, FUSED=fused, num_warps=num_warps
    )


def _launch_dense(climb: _Climb, fused: bool, tensors: tuple[torch.Tensor, ...], count: int, length: int) -> None:
    def make() -> Launch | None:
        constants = {"DIVISIBILITY": divisibility_of(length)}
        if not fused:
            return climb.online(lambda meta: (count,), tensors, (length,), constants)
        constants["BLOCK"] = triton.next_power_of_2(length)
        return climb.fused(lambda meta: (triton.cdiv(count, meta["ROWS"]),), tensors, (count, length), constants)

    key = (len(tensors), fused, count, length, tensors[0].dtype, tensors[0].device)
    _launches.run(key, make, tensors)


def _variant(name: str, fused: bool, unsupported) -> None:
    def forward(input: torch.Tensor, *, dim: int) -> tuple[torch.Tensor, tuple]:
        output = torch.empty_like(input)
        _launch(_FORWARD, dim, fused, output, input)
        return output, (output, dim)

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor]:
        output, dim = saved
        grad_input = torch.empty_like(output)
        _launch(_BACKWARD, dim, fused, grad_input, gradient_for_kernel(grad, grad_input, output, rows_at=dim), output)
        return (grad_input,)

    register("softmax", name, forward=forward, backward=backward, unsupported=unsupported)


def _unsupported(input: torch.Tensor, *, dim: int) -> str | None:
    if (reason := unsupported(input)) is not None:
        return reason
    if input.dim() > MAX_DIMS + 1:
        fresh = torch.empty_like(input, device="meta")
        others = [d for d in range(input.dim()) if d != dim % input.dim()]
        strides = [[t.stride(d) for d in others] for t in (input, fresh)]
        dims = len(collapse([input.shape[d] for d in others], *strides)[0])
        if dims > MAX_DIMS:
            return f"rows whose strides do not collapse to {MAX_DIMS} dimensions (these need {dims})"
    return None


def _unsupported_fused(input: torch.Tensor, *, dim: int) -> str | None:
    length = input.shape[dim] if input.dim() else 1
    if length > MAX_FUSED:
        return f"rows of {length} elements are too long for registers; at most {MAX_FUSED}"
    return _unsupported(input, dim=dim)


register("softmax", "triton.naive", forward=naive.forward, backward=naive.backward, unsupported=naive.unsupported)
_variant("triton.online", fused=False, unsupported=_unsupported)
_variant("triton.fused", fused=True, unsupported=_unsupported_fused)
register(
    "softmax",
    "triton.cluster",
    forward=cluster.forward,
    backward=cluster.backward,
    unsupported=cluster.unsupported,
    here=requirements.here,
)


def _entry(kernel: Any, dtype: str, rows: int, warps: int, **constants: Any) -> Entry:
    return entry(kernel, dtype, constants, triton.Config({"ROWS": rows} if rows else {}, num_warps=warps, num_stages=1))


AOT = [
    *naive.AOT,
    *(_entry(_fused_kernel, "bf16", *forward_shapes(n)[0], DIVISIBILITY=16, BLOCK=n) for n in (256, 4096, MAX_FUSED)),
    *(_entry(_fused_backward_kernel, "bf16", *backward_shapes(n)[0], DIVISIBILITY=16, BLOCK=n) for n in (256, 4096)),
    *(_entry(k, "bf16", 0, 16, DIVISIBILITY=16, BLOCK=8192) for k in (_online_kernel, _online_backward_kernel)),
    *(_entry(k, "fp32", 1, 8, BLOCK=ONLINE_BLOCK, FUSED=False) for k in (_strided_kernel, _strided_backward_kernel)),
    *cluster.AOT,
]
