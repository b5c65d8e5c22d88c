"""layer_norm, rung 1 of 5: naive
rms_norm, rung 1 of 4: naive

Idea      One program per row. The whole row is one block of registers, so global memory is read once and written once.
          Backward, a second kernel sums the parameters' gradients: one program per block of columns loops over rows.
Predicts  2·N·sizeof(T) bytes per row forward. Backward reads input and gradient twice: 5·N·sizeof(T).
Limit now One row per program. The column kernel has N / 64 programs, fewer than the GPU has multiprocessors.
Next      `online`: rows of any length, and column sums split over groups of rows.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.norms import eps_or_default
from kernel_ladder.tracing import shapes_only
from triton_impl import unsupported
from triton_impl.runtime.aot import Entry, entry
from triton_impl.runtime.launch_cache import FUSED
from triton_impl.runtime.row_configs import warps_of_row

#: The longest row: 32 float32 values per thread at 16 warps.
MAX_COLS = 16384
#: Tile of the kernel that sums columns.
TILE_ROWS = 32
TILE_COLS = 64

# ---- kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def _layer_norm_kernel(
    out_ptr, mean_ptr, rstd_ptr, input_ptr, weight_ptr, bias_ptr, n_cols, eps, BLOCK_N: tl.constexpr
):  # fmt: skip
    """y = (x − mean) · rstd · w + b, rstd = 1 / √(mean((x − mean)²) + eps).

    Grid: one program per row. Layout: dense rows of n_cols elements; mean and rstd have one float32 per row.
    """
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_N)
    col_mask = col < n_cols
    x = tl.load(input_ptr + row * n_cols + col, mask=col_mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / n_cols
    centred = tl.where(col_mask, x - mean, 0.0)
    rstd = tl.math.rsqrt(tl.sum(centred * centred, axis=0) / n_cols + tl.cast(eps, tl.float32))
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    weight = tl.load(weight_ptr + col, mask=col_mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + col, mask=col_mask, other=0.0).to(tl.float32)
    y = centred * rstd * weight + bias
    tl.store(out_ptr + row * n_cols + col, y.to(out_ptr.dtype.element_ty), mask=col_mask)


@triton.jit
def _rms_norm_kernel(out_ptr, rstd_ptr, input_ptr, weight_ptr, n_cols, eps, BLOCK_N: tl.constexpr):
    """y = x · rstd · w, rstd = 1 / √(mean(x²) + eps). Grid and layout as `_layer_norm_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_N)
    col_mask = col < n_cols
    x = tl.load(input_ptr + row * n_cols + col, mask=col_mask, other=0.0).to(tl.float32)
    rstd = tl.math.rsqrt(tl.sum(x * x, axis=0) / n_cols + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd)
    weight = tl.load(weight_ptr + col, mask=col_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * n_cols + col, (x * rstd * weight).to(out_ptr.dtype.element_ty), mask=col_mask)


@triton.jit
def _layer_norm_backward_kernel(
    grad_input_ptr, grad_ptr, input_ptr, mean_ptr, rstd_ptr, weight_ptr, n_cols, BLOCK_N: tl.constexpr
):  # fmt: skip
    """dx = rstd · (w·dy − mean(w·dy) − x̂ · mean(w·dy·x̂)), x̂ = (x − mean) · rstd. Grid: one program per row."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_N)
    col_mask = col < n_cols
    mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
    x = tl.load(input_ptr + row * n_cols + col, mask=col_mask, other=0.0).to(tl.float32)
    x_hat = (x - mean) * rstd
    weight = tl.load(weight_ptr + col, mask=col_mask, other=0.0).to(tl.float32)
    grad = weight * tl.load(grad_ptr + row * n_cols + col, mask=col_mask, other=0.0).to(tl.float32)
    mean_grad = tl.sum(grad, axis=0) / n_cols
    mean_dot = tl.sum(grad * x_hat, axis=0) / n_cols
    grad_input = rstd * (grad - mean_grad - x_hat * mean_dot)
    tl.store(grad_input_ptr + row * n_cols + col, grad_input.to(grad_input_ptr.dtype.element_ty), mask=col_mask)


@triton.jit
def _rms_norm_backward_kernel(
    grad_input_ptr, grad_ptr, input_ptr, rstd_ptr, weight_ptr, n_cols, BLOCK_N: tl.constexpr
):  # fmt: skip
    """dx = rstd · (w·dy − x̂ · mean(w·dy·x̂)), x̂ = x · rstd. Grid: one program per row."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_N)
    col_mask = col < n_cols
    rstd = tl.load(rstd_ptr + row)
    x_hat = rstd * tl.load(input_ptr + row * n_cols + col, mask=col_mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + col, mask=col_mask, other=0.0).to(tl.float32)
    grad = weight * tl.load(grad_ptr + row * n_cols + col, mask=col_mask, other=0.0).to(tl.float32)
    grad_input = rstd * (grad - x_hat * (tl.sum(grad * x_hat, axis=0) / n_cols))
    tl.store(grad_input_ptr + row * n_cols + col, grad_input.to(grad_input_ptr.dtype.element_ty), mask=col_mask)


@triton.jit
def _parameter_gradients_kernel(
    grad_weight_ptr, grad_bias_ptr, grad_ptr, input_ptr, mean_ptr, rstd_ptr, n_rows, n_cols,
    IS_LAYERNORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dw[c] = Σ dy[r, c] · x̂[r, c] and db[c] = Σ dy[r, c] over rows r. Grid: one program per BLOCK_N columns."""
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    grad_weight = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    grad_bias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, n_rows, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        row_mask = row < n_rows
        mask = row_mask[:, None] & (col < n_cols)[None, :]
        offsets = row[:, None].to(tl.int64) * n_cols + col[None, :]
        grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(input_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if IS_LAYERNORM:
            x -= tl.load(mean_ptr + row, mask=row_mask, other=0.0)[:, None]
            grad_bias += grad
        grad_weight += grad * x * tl.load(rstd_ptr + row, mask=row_mask, other=0.0)[:, None]
    grad_weight = tl.sum(grad_weight, axis=0).to(grad_weight_ptr.dtype.element_ty)
    tl.store(grad_weight_ptr + col, grad_weight, mask=col < n_cols)
    if IS_LAYERNORM:
        grad_bias = tl.sum(grad_bias, axis=0).to(grad_bias_ptr.dtype.element_ty)
        tl.store(grad_bias_ptr + col, grad_bias, mask=col < n_cols)


# ---- host ----------------------------------------------------------------------------------------------------------


def _launch(kernel, n_rows: int, n_cols: int, *arguments) -> None:
    """Launch one program per row. Without fused multiply-adds a row of one element has a gradient of exactly zero."""
    if shapes_only() or n_rows * n_cols == 0:
        return
    block = triton.next_power_of_2(n_cols)
    kernel[(n_rows,)](*arguments, BLOCK_N=block, num_warps=warps_of_row(block), enable_fp_fusion=False)


def _parameter_gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    dtypes: tuple[torch.dtype, torch.dtype],
    n_cols: int,
    is_layernorm: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of weight and bias, in `dtypes`."""
    grad_weight, grad_bias = (x.new_zeros(n_cols, dtype=dtype) for dtype in dtypes)
    if not shapes_only() and x.numel() > 0:
        _parameter_gradients_kernel[(triton.cdiv(n_cols, TILE_COLS),)](
            grad_weight, grad_bias, grad, x, mean, rstd, rstd.numel(), n_cols,
            IS_LAYERNORM=is_layernorm, BLOCK_M=TILE_ROWS, BLOCK_N=TILE_COLS, **FUSED,
        )  # fmt: skip
    return grad_weight, grad_bias


def layer_norm(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, normalized_shape, eps
) -> tuple[torch.Tensor, tuple]:
    n_cols = math.prod(normalized_shape)
    n_rows = math.prod(input.shape[: input.dim() - len(normalized_shape)])
    output = torch.empty_like(input)
    mean, rstd = input.new_empty((2, n_rows), dtype=torch.float32)
    _launch(_layer_norm_kernel, n_rows, n_cols, output, mean, rstd, input, weight, bias, n_cols, float(eps))
    return output, (input, weight, mean, rstd, normalized_shape, bias.dtype)


def layer_norm_backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
    x, weight, mean, rstd, shape, bias_dtype = saved
    grad, n_cols = grad.contiguous(), math.prod(shape)
    grad_input = torch.empty_like(x) if needs[0] else None
    if grad_input is not None:
        arguments = (grad_input, grad, x, mean, rstd, weight, n_cols)
        _launch(_layer_norm_backward_kernel, rstd.numel(), n_cols, *arguments)
    if not (needs[1] or needs[2]):
        return grad_input, None, None
    dtypes = weight.dtype, bias_dtype
    grad_weight, grad_bias = _parameter_gradients(grad, x, mean, rstd, dtypes, n_cols, True)
    return grad_input, grad_weight.view(shape) if needs[1] else None, grad_bias.view(shape) if needs[2] else None


def rms_norm(input: torch.Tensor, weight: torch.Tensor, *, normalized_shape, eps) -> tuple[torch.Tensor, tuple]:
    n_cols = math.prod(normalized_shape)
    n_rows = math.prod(input.shape[: input.dim() - len(normalized_shape)])
    output = torch.empty_like(input)
    rstd = input.new_empty(n_rows, dtype=torch.float32)
    arguments = (output, rstd, input, weight, n_cols, eps_or_default(eps, input.dtype))
    _launch(_rms_norm_kernel, n_rows, n_cols, *arguments)
    return output, (input, weight, rstd, normalized_shape)


def rms_norm_backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
    x, weight, rstd, shape = saved
    grad, n_cols = grad.contiguous(), math.prod(shape)
    grad_input = torch.empty_like(x) if needs[0] else None
    if grad_input is not None:
        _launch(_rms_norm_backward_kernel, rstd.numel(), n_cols, grad_input, grad, x, rstd, weight, n_cols)
    if not needs[1]:
        return grad_input, None
    dtypes = weight.dtype, weight.dtype
    return grad_input, _parameter_gradients(grad, x, rstd, rstd, dtypes, n_cols, False)[0].view(shape)


def layer_norm_unsupported(
    input: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, *, normalized_shape, eps
) -> str | None:
    return _unsupported(normalized_shape, input, weight, bias)


def rms_norm_unsupported(
    input: torch.Tensor, weight: torch.Tensor | None = None, *, normalized_shape, eps
) -> str | None:
    return _unsupported(normalized_shape, input, weight)


def _unsupported(row: tuple[int, ...], input: torch.Tensor, *parameters: torch.Tensor | None) -> str | None:
    if (reason := unsupported(input)) is not None:
        return reason
    if any(x is None for x in parameters):
        return "takes a call that gives every parameter"
    if not all(x.is_contiguous() for x in (input, *parameters) if x is not None):
        return "takes contiguous tensors"
    if (n_cols := math.prod(row)) > MAX_COLS:
        return f"takes rows of at most {MAX_COLS} elements, got {n_cols}"
    return None


def ahead_of_time(is_layernorm: bool) -> list[Entry]:
    """Specialisations that stand for the calls."""
    types = {"mean_ptr": "*fp32", "rstd_ptr": "*fp32", "eps": "fp32"}
    as_row_values = [_rms_norm_kernel, _rms_norm_backward_kernel]
    if is_layernorm:
        as_row_values = [_layer_norm_kernel, _layer_norm_backward_kernel]
    found = [
        (kernel, {}, triton.Config({"BLOCK_N": block}, num_warps=warps_of_row(block)))
        for kernel in as_row_values
        for block in (1024, MAX_COLS)
    ]
    tile = triton.Config({"BLOCK_M": TILE_ROWS, "BLOCK_N": TILE_COLS}, num_warps=4)
    found.append((_parameter_gradients_kernel, {"IS_LAYERNORM": is_layernorm}, tile))
    return [
        entry(kernel, "bf16", constants, config, {n: t for n, t in types.items() if n in kernel.arg_names})
        for kernel, constants, config in found
    ]
