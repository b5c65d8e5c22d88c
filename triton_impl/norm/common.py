"""Shared by the rungs of layer_norm, rms_norm, add_rms_norm and bias_dropout_add_layer_norm: statistics, operands.

A forward pass normalises rows, y = x̂ · w + b. Of each row it saves ``rstd``, for LayerNorm also ``mean`` and
``shift``::

    x̂ = (x − mean) · rstd + shift        shift = −(mean of (x − mean)) · rstd

The shift corrects what rounding the mean to float32 loses. Saved statistics are float32, one row each: ``rstd``, then
``mean``, then ``shift``; RMSNorm has ``rstd`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.norms import as_rows
from kernel_ladder.spec import dtype_name, mixed
from kernel_ladder.tracing import shapes_only
from triton_impl.common.column_sum import sum_partials
from triton_impl.common.dot import INTERPRETED
from triton_impl.runtime.launch_cache import LaunchCache

#: Multiprocessors to assume where there is no GPU: few, because the interpreter runs programs one by one.
MULTIPROCESSORS_INTERPRETED = 3

# ---- device functions ----------------------------------------------------------------------------------------------


@triton.jit
def load_stats(stats_ptr, row, n_rows, row_mask, IS_LAYERNORM: tl.constexpr):
    """Saved statistics of rows: mean, rstd, shift. Without IS_LAYERNORM mean and shift are zeros."""
    rstd = tl.load(stats_ptr + row, mask=row_mask, other=0.0)
    if IS_LAYERNORM:
        mean = tl.load(stats_ptr + n_rows + row, mask=row_mask, other=0.0)
        shift = tl.load(stats_ptr + 2 * n_rows + row, mask=row_mask, other=0.0)
        return mean, rstd, shift
    return rstd * 0, rstd, rstd * 0


@triton.jit
def store_stats(stats_ptr, row, n_rows, row_mask, mean, rstd, shift, IS_LAYERNORM: tl.constexpr):
    """Save statistics of rows for the backward pass."""
    tl.store(stats_ptr + row, rstd, mask=row_mask)
    if IS_LAYERNORM:
        tl.store(stats_ptr + n_rows + row, mean, mask=row_mask)
        tl.store(stats_ptr + 2 * n_rows + row, shift, mask=row_mask)


@triton.jit
def normalize(x, mean, rstd, shift, IS_LAYERNORM: tl.constexpr):
    """x̂ = (x − mean) · rstd + shift, or x · rstd."""
    if IS_LAYERNORM:
        return (x - mean) * rstd + shift
    return x * rstd


@triton.jit
def rstd_of(variance, eps):
    """1 / √(variance + eps). Rounding may leave a variance a little below zero; NaN stays NaN."""
    return tl.math.rsqrt(tl.where(variance < 0, 0.0, variance) + tl.cast(eps, tl.float32))


@triton.jit
def add_pairs(first_a, second_a, first_b, second_b):
    """Combines two sums in one reduction."""
    return first_a + first_b, second_a + second_b


@triton.jit
def subtract_rounded(x, y):
    """x − y without contraction: no compiler fuses the product that made x into this subtraction.

    `y` is a mean of rounded products. Subtracted from an unrounded one, it would give a row of one element a gradient.
    """
    if INTERPRETED:
        return x - y
    return tl.inline_asm_elementwise("sub.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1)


# ---- host: operands ------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """Which normalisation: LayerNorm or RMSNorm, of one operand or of the sum of two."""

    is_layernorm: bool
    has_residual: bool


def as_matrix(x: torch.Tensor, dims: int = 1) -> torch.Tensor:
    """`x` as (n_rows, n_cols) with dense rows: a view where its strides allow one, else a copy."""
    x = as_rows(x, dims)
    if x.dim() != 2:
        x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def dtype_of(x: torch.Tensor | None) -> torch.dtype | None:
    """A parameter's dtype, which its gradient gets; None for an absent one."""
    return None if x is None else x.dtype


def not_one_dtype(*inputs: torch.Tensor | None) -> str | None:
    """Why a rung that takes one dtype refuses a call with a float32 parameter beside 16-bit rows, or None."""
    if inputs[0] is None or not mixed(inputs[0], *inputs[1:]):
        return None
    return f"takes parameters of the input's dtype, got float32 beside {dtype_name(inputs[0].dtype)}"


# ---- host: forward -------------------------------------------------------------------------------------------------

#: ``forward(kind, shape, x, residual, weight, bias, eps, save_stats)`` → output, sum, stats.
Forward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def forward_by(launch: Callable[..., None]) -> Forward:
    """A rung's forward pass. ``launch(kind, tensors, strides, present, eps, save_stats)`` launches its kernel.

    `tensors` are output, sum, stats, input, residual, weight and bias; `strides` those of the rows of input and
    residual; `present` tells whether there are weight and bias.
    """

    def forward(
        kind: Kind,
        shape: torch.Size,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        save_stats: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output and sum, both of `shape`, and the saved statistics of rows, which are (n_rows, n_cols).

        Without a residual the sum is the output; without `save_stats` the statistics are empty. Output and sum are
        allocated in `shape`, because autograd forbids in-place changes of returned views.
        """
        output = x.new_empty(shape)
        total = x.new_empty(shape) if kind.has_residual else output
        stats = x.new_empty((3 if kind.is_layernorm else 1, x.shape[0] if save_stats else 0), dtype=torch.float32)
        if not shapes_only() and output.numel() > 0:
            # An absent operand is replaced by one that is there. The kernel does not read it.
            r = x if residual is None else residual
            w, b = output if weight is None else weight, output if bias is None else bias
            present = weight is not None, bias is not None
            launch(kind, (output, total, stats, x, r, w, b), (x.stride(0), r.stride(0)), present, eps, save_stats)
        return output, total, stats

    return forward


def by_kind(first_launch: Callable[..., Any]) -> Callable[..., None]:
    """A `launch` of :func:`forward_by`: `first_launch`, with its arguments, runs the first call of a kind.

    It returns the launch, which serves all others.
    """
    launches = LaunchCache()

    def launch(
        kind: Kind,
        tensors: tuple[torch.Tensor, ...],
        strides: tuple[int, int],
        present: tuple[bool, bool],
        eps: float,
        save_stats: bool,
    ) -> None:
        x, dtypes = tensors[3], (tensors[3].dtype, tensors[-2].dtype, tensors[-1].dtype)
        key = (kind, save_stats, x.shape, strides, present, *dtypes, x.device, eps)
        launches.run(key, lambda: first_launch(kind, tensors, strides, present, eps, save_stats), tensors)

    return launch


# ---- host: backward ------------------------------------------------------------------------------------------------


class Needs(NamedTuple):
    """Which gradients are wanted."""

    input: bool
    weight: bool
    bias: bool


#: Of the rows (n_rows, n_cols), of weight and of bias (n_cols,); None where not wanted.
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

#: ``backward(kind, x, weight, stats, grad, grad_sum, needs, bias_dtype=None)`` → :data:`Gradients`.
Backward = Callable[..., Gradients]


def empty_gradients(
    x: torch.Tensor, needs: Needs, weight: torch.Tensor | None, bias_dtype: torch.dtype | None
) -> Gradients:
    """Uninitialised memory for the gradients of rows `x` and of parameters, each in its own dtype."""
    n_rows, n_cols = x.shape
    grad_input = x.new_empty((n_rows, n_cols)) if needs.input else None
    grad_weight = x.new_empty((n_cols,), dtype=None if weight is None else weight.dtype) if needs.weight else None
    grad_bias = x.new_empty((n_cols,), dtype=bias_dtype) if needs.bias else None
    return grad_input, grad_weight, grad_bias


def backward_by(launch: Callable[..., torch.Tensor | None]) -> Backward:
    """A rung's backward pass. ``launch`` writes the gradient of the rows and returns the parameters' partial sums.

    It is called with what `backward` takes, and the tensor for the gradient of the rows, or None. The partial sums are
    (2 or 1, groups of rows, n_cols), float32: of dy · x̂, then of dy. :mod:`triton_impl.common.column_sum` sums them up.
    """

    def backward(
        kind: Kind,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        stats: torch.Tensor,
        grad: torch.Tensor,
        grad_sum: torch.Tensor | None,
        needs: Needs,
        bias_dtype: torch.dtype | None = None,
    ) -> Gradients:
        """Gradients of the rows (n_rows, n_cols), of weight and of bias (n_cols,); None where not wanted.

        `bias_dtype` is that of the bias; None is that of the rows.
        """
        grad_input, grad_weight, grad_bias = empty_gradients(x, needs, weight, bias_dtype)
        if shapes_only() or not any(needs):
            return grad_input, grad_weight, grad_bias
        if x.numel() == 0:
            for grad_parameter in (grad_weight, grad_bias):
                if grad_parameter is not None:
                    grad_parameter.zero_()
            return grad_input, grad_weight, grad_bias
        partials = launch(kind, x, weight, stats, grad, grad_sum, needs, grad_input)
        if grad_weight is not None and grad_bias is not None and grad_weight.dtype == grad_bias.dtype:
            assert partials is not None
            sum_partials(grad_weight, partials, grad_bias)
            return grad_input, grad_weight, grad_bias
        for place, grad_parameter in enumerate((grad_weight, grad_bias)):
            if grad_parameter is not None:
                assert partials is not None
                sum_partials(grad_parameter, partials[place])
        return grad_input, grad_weight, grad_bias

    return backward
