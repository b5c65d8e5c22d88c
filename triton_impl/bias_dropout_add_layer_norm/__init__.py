"""Bias, dropout, residual sum and LayerNorm in Triton: the sum is made where :mod:`triton_impl.norm.rows` normalises it.

`fused` and `online` are as there; of rows that `cluster` takes the kernel is in :mod:`triton_impl.bias_dropout_add_layer_norm.cluster`.
Backward, the gradient of the sum is LayerNorm's, of which a second kernel draws the mask again and adds up bias's
gradient on the way; a third one, small, adds up the shares of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.norms import forwards
from kernel_ladder.tracing import shapes_only
from triton_impl import layer_norm, register
from triton_impl.bias_dropout_add_layer_norm import cluster
from triton_impl.common.column_sum import row_partition, sum_partials
from triton_impl.common.divisibility import assume_divisible, divisibility_of
from triton_impl.common.elementwise import tile_of
from triton_impl.common.gluon import requirements
from triton_impl.common.pdl import griddepcontrol_wait
from triton_impl.common.philox import ARGUMENTS, arguments, factors_at, factors_of_rows
from triton_impl.norm import rows as norms
from triton_impl.norm import short_backward
from triton_impl.norm.rows import (
    PILOT,
    Needs,
    as_matrix,
    as_parameter,
    normalize_row_again,
    normalize_rows,
    pilot_of,
    rstd_of,
    store_stats,
)
from triton_impl.runtime.aot import Entry, entry
from triton_impl.runtime.autotuned_kernel import AutotunedKernel
from triton_impl.runtime.launch_cache import CachedKernel, Launch, LaunchCache
from triton_impl.runtime.row_configs import blocks_of, forward_shapes, row_configs, suitable_forward

#: Backward: elements of a tile, its columns at most, warps, and programs that run on a multiprocessor at once.
TILE, COLUMNS, WARPS, PROGRAMS = 2048, 256, 4, 7


@triton.jit
def _factors(
    row, column, start, length, key_low, key_high, threshold, scale, EIGHTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # Columns from `start` on. Where rows are of eights, a call of Philox for each eight; else one for each element.
    if EIGHTS:
        return factors_of_rows(row * (length // 8) + start // 8, key_low, key_high, threshold, scale, BLOCK)
    else:
        return factors_at(row[:, None] * length + column[None, :], key_low, key_high, threshold, scale)


@triton.jit
def _sum_of(
    input_ptr, bias_ptr, residual_ptr, row, start, key_low, key_high, threshold, scale,
    in_stride, residual_stride, count, length, EIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of a block of columns, rounded to the dtype; zeros past the end of a row."""
    column = start + tl.arange(0, BLOCK)
    inside = column < length
    mask = (row < count)[:, None] & inside[None, :]
    x = tl.load(input_ptr + row[:, None] * in_stride + column[None, :], mask=mask, other=0.0)
    residual = tl.load(residual_ptr + row[:, None] * residual_stride + column[None, :], mask=mask, other=0.0)
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    factors = _factors(row, column, start, length, key_low, key_high, threshold, scale, EIGHTS, BLOCK)
    return (residual.to(tl.float32) + (x.to(tl.float32) + bias) * factors).to(x.dtype)


@triton.jit(do_not_specialize=ARGUMENTS)
def _fused_kernel(
    out_ptr, sum_ptr, stats_ptr, input_ptr, bias_ptr, residual_ptr, weight_ptr, norm_bias_ptr,
    key_low, key_high, threshold, scale, in_stride, residual_stride, count, length, eps,
    SAVE_STATS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, EIGHTS: tl.constexpr, DIVISIBILITY: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    griddepcontrol_wait(USE_PDL)
    length, in_stride = assume_divisible(length, DIVISIBILITY), assume_divisible(in_stride, DIVISIBILITY)
    residual_stride = assume_divisible(residual_stride, DIVISIBILITY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    total = _sum_of(
        input_ptr, bias_ptr, residual_ptr, row, 0, key_low, key_high, threshold, scale,
        in_stride, residual_stride, count, length, EIGHTS, BLOCK,
    )  # fmt: skip
    if SAVE_STATS:
        mask = (row < count)[:, None] & (column < length)[None, :]
        tl.store(sum_ptr + row[:, None] * length + column[None, :], total, mask=mask)
    normalize_rows(
        total, out_ptr, stats_ptr, weight_ptr, norm_bias_ptr, row, column, count, length, eps,
        True, SAVE_STATS, HAS_WEIGHT, HAS_BIAS, ROWS, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=ARGUMENTS)
def _online_kernel(
    out_ptr, sum_ptr, stats_ptr, input_ptr, bias_ptr, residual_ptr, weight_ptr, norm_bias_ptr,
    key_low, key_high, threshold, scale, in_stride, residual_stride, count, length, eps,
    SAVE_STATS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, EIGHTS: tl.constexpr, DIVISIBILITY: tl.constexpr,
    PILOT: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Where the sum is not kept, `sum_ptr` is the output, which waits there for its normalisation."""
    griddepcontrol_wait(USE_PDL)
    length, in_stride = assume_divisible(length, DIVISIBILITY), assume_divisible(in_stride, DIVISIBILITY)
    residual_stride = assume_divisible(residual_stride, DIVISIBILITY)
    row = tl.program_id(0).to(tl.int64)
    rows = row + tl.arange(0, 1)
    lane = tl.arange(0, BLOCK)
    # Deviations from the mean of the row's HEAD: close to those from the mean of all, and known in advance.
    head = _sum_of(
        input_ptr, bias_ptr, residual_ptr, rows, 0, key_low, key_high, threshold, scale,
        in_stride, residual_stride, count, length, EIGHTS, PILOT,
    )  # fmt: skip
    mean = tl.sum(head.reshape([PILOT]).to(tl.float32), axis=0) / tl.minimum(length, PILOT)
    sums = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, length, BLOCK):
        inside = start + lane < length
        total = _sum_of(
            input_ptr, bias_ptr, residual_ptr, rows, start, key_low, key_high, threshold, scale,
            in_stride, residual_stride, count, length, EIGHTS, BLOCK,
        ).reshape([BLOCK])  # fmt: skip
        tl.store(sum_ptr + row * length + start + lane, total, mask=inside)
        deviation = tl.where(inside, total.to(tl.float32) - mean, 0.0)
        sums += deviation
        squares += deviation * deviation
    lost = tl.sum(sums, axis=0) / length
    rstd = rstd_of(tl.sum(squares, axis=0) / length - lost * lost, eps)
    shift = -lost * rstd
    if SAVE_STATS:
        store_stats(stats_ptr, row, count, True, mean, rstd, shift, True)
    tl.debug_barrier()  # the sum is read by threads that may not have written it
    normalize_row_again(
        sum_ptr + row * length, out_ptr + row * length, weight_ptr, norm_bias_ptr, mean, rstd, shift, length,
        True, HAS_WEIGHT, HAS_BIAS, BLOCK, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=ARGUMENTS)
def _backward_kernel(
    grad_input_ptr, partials_ptr, grad_ptr, key_low, key_high, threshold, scale, rows, length, rows_a_share,
    DIVISIBILITY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Dropout of the sum's gradient, a share of the rows of a block of columns, and the sums over those rows."""
    length = assume_divisible(length, DIVISIBILITY)
    blocks = tl.cdiv(length, BLOCK_N)
    share = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks) * BLOCK_N
    column = start + tl.arange(0, BLOCK_N)
    end = tl.minimum((share + 1) * rows_a_share, rows)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first_row in range(share * rows_a_share, end, BLOCK_M):
        row = tl.cast(first_row, tl.int64) + tl.arange(0, BLOCK_M)
        mask = (row < end)[:, None] & (column < length)[None, :]
        i = row[:, None] * length + column[None, :]
        grad = tl.load(grad_ptr + i, mask=mask, other=0.0).to(tl.float32)
        grad *= _factors(row, column, start, length, key_low, key_high, threshold, scale, DIVISIBILITY >= 8, BLOCK_N)
        tl.store(grad_input_ptr + i, grad.to(grad_input_ptr.dtype.element_ty), mask=mask)
        sums += grad
    tl.store(partials_ptr + share * length + column, tl.sum(sums, axis=0), mask=column < length)


_fused = AutotunedKernel(_fused_kernel, row_configs((0,)), ("BLOCK", "SAVE_STATS", "DIVISIBILITY"), suitable_forward)
_online = AutotunedKernel(_online_kernel, blocks_of((4096, 8), (8192, 16), (4096, 16)), ("length",))
_backward = CachedKernel(_backward_kernel, num_warps=WARPS)
_launches = LaunchCache()


def _sum_and_norm(
    step: str, keep: bool, mask: tuple[int, int, int, float], eps: float, *inputs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, sum (where it is not kept, something else) and what is kept of rows, as LayerNorm keeps it.

    The output has the input's shape, and is no view, which autograd would forbid to be modified; the sum has rows.
    """
    input, bias, residual, weight, norm_bias = inputs
    x, r = as_matrix(input), as_matrix(residual)
    b, w, n = map(as_parameter, (bias, weight, norm_bias))
    count, length = x.shape
    output = x.new_empty(input.shape)
    total = x.new_empty((count, length)) if keep else output
    stats = x.new_empty((3, count if keep else 0), dtype=torch.float32)
    if shapes_only() or x.numel() == 0:
        return output, total, stats
    # What is absent is stood for by what is there: its pointer is not looked at.
    tensors = (output, total, stats, x, b, r, b if w is None else w, b if n is None else n)
    strides, absent = (x.stride(0), r.stride(0)), (w is None, n is None)
    if step == "cluster":
        cluster.run(tensors, strides, absent, eps, keep, mask)
        return output, total, stats
    key = ("bias_dropout_add_layer_norm", step, keep, count, length, strides, absent, x.dtype, x.device, eps)

    def make() -> Launch | None:
        arguments = (*strides, count, length, eps)
        constants: dict[str, Any] = {
            "SAVE_STATS": keep, "HAS_WEIGHT": w is not None, "HAS_BIAS": n is not None,
            "EIGHTS": length % 8 == 0, "DIVISIBILITY": divisibility_of(length, *strides),
        }  # fmt: skip
        if step == "online":
            constants["PILOT"] = pilot_of(x.dtype)
            return _online(lambda meta: (count,), tensors, arguments, constants, mask)
        constants["BLOCK"] = triton.next_power_of_2(length)
        return _fused(lambda meta: (triton.cdiv(count, meta["ROWS"]),), tensors, arguments, constants, mask)

    _launches.run(key, make, tensors, mask)
    return output, total, stats


def _dropped(grad: torch.Tensor, mask: tuple[int, int, int, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of input and bias from that of the sum, (count, length)."""
    count, length = grad.shape
    grad_input, grad_bias = torch.empty_like(grad), grad.new_empty((length,))
    if shapes_only():
        return grad_input, grad_bias
    if grad.numel() == 0:
        return grad_input, grad_bias.zero_()
    _, width = tile_of(length, COLUMNS)
    height = TILE // width
    blocks = triton.cdiv(length, width)
    shares, rows_a_share = row_partition(count, blocks, PROGRAMS, 2 * height, grad.device)
    partials = torch.empty((shares, length), dtype=torch.float32, device=grad.device)
    arguments_of = (count, length, rows_a_share, divisibility_of(length), height, width)
    _backward(shares * blocks, (grad_input, partials, grad), arguments_of, mask)
    sum_partials(grad_bias, partials)
    return grad_input, grad_bias


def _variant(step: str, gradients: Callable, here: Callable[[], str | None] = lambda: None) -> None:
    def normalise(
        keep: bool, *inputs: torch.Tensor | None, p: float, seed: int, eps: float
    ) -> tuple[torch.Tensor, tuple]:
        mask = arguments(p, seed)
        output, total, stats = _sum_and_norm(step, keep, mask, float(eps), *inputs)
        return output, (total, as_parameter(inputs[3]), stats, mask, tuple(output.shape))

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
        total, weight, stats, mask, shape = saved
        of_branch, of_residual = needs[0] or needs[1], needs[2]
        wanted = Needs(of_branch or of_residual, *needs[3:])
        of_sum, *of_norm = gradients(layer_norm.KIND, total, weight, stats, as_matrix(grad), None, wanted)
        of_input, of_bias = _dropped(of_sum, mask) if of_branch else (None, None)
        return (
            of_input.view(shape) if needs[0] else None,
            of_bias if needs[1] else None,
            of_sum.view(shape) if of_residual else None,
            *of_norm,
        )

    def refused(input: torch.Tensor, *others: torch.Tensor | None, **options: object) -> str | None:
        if step == "cluster":
            return cluster.refused(input, *others)
        return norms.refused(step == "fused", input, input.shape[-1])

    register(
        "bias_dropout_add_layer_norm",
        f"triton.{step}",
        **forwards(normalise),
        backward=backward,
        unsupported=refused,
        here=here,
    )


_variant("online", norms.backward)
_variant("fused", short_backward.backward)
_variant("cluster", short_backward.backward, requirements.here)

_FLAGS = {"HAS_WEIGHT": True, "HAS_BIAS": True, "EIGHTS": True, "DIVISIBILITY": 16}
_FLOATS = {"stats_ptr": "*fp32", "partials_ptr": "*fp32", "scale": "fp32", "eps": "fp32"}


def _entry(kernel: Any, warps: int, constants: dict[str, Any], **tuned: int) -> Entry:
    types = {name: type for name, type in _FLOATS.items() if name in kernel.arg_names}
    return entry(kernel, "bf16", constants, triton.Config(tuned, num_warps=warps, num_stages=1), types)


def _fused_entry(block: int, keep: bool) -> Entry:
    rows, warps = forward_shapes(block)[0]
    return _entry(_fused_kernel, warps, {**_FLAGS, "SAVE_STATS": keep, "BLOCK": block}, ROWS=rows)


AOT = [
    *(_fused_entry(block, keep) for block, keep in ((256, False), (4096, True), (4096, False), (16384, True))),
    _entry(_online_kernel, 8, {**_FLAGS, "SAVE_STATS": True, "PILOT": PILOT}, BLOCK=4096),
    *cluster.ahead_of_time(),
    _entry(_backward_kernel, WARPS, {"DIVISIBILITY": 16}, BLOCK_M=TILE // COLUMNS, BLOCK_N=COLUMNS),
]
