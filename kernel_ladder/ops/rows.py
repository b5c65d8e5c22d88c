"""Functions of rows: softmax, sums, normalisations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernel_ladder import autocast
from kernel_ladder.ops.calls import as_int, as_ints, as_number, call, no_out, to_dtype
from kernel_ladder.semantics.reduction import Dim


def softmax(
    input: torch.Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
    *,
    out: None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Softmax along one dimension: ``exp(x − max x) / Σ exp(x − max x)``, as :func:`torch.softmax`.

    Args:
        input: any shape and strides; float16, bfloat16, float32 (float64 at the torch, compile and xla levels).
        dim: the dimension that sums to one, from ``-input.dim()`` to ``input.dim() - 1``.
        dtype: the dtype to which `input`, of any dtype, is converted first, in a separate pass; None: no conversion.
        out: must be None; the result is a new tensor.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the same shape, and of `dtype` or the input's. A row of −inf gives NaN, as in PyTorch.
        Differentiable once.
    """
    if dtype is not None:
        input = to_dtype("softmax", input, dtype)
        if autocast.is_on() and isinstance(input, torch.Tensor):
            with autocast.off(input.device.type):  # the dtype that is asked for stands
                return softmax(input, dim, out=out, backend=backend)
    if out is not None:
        no_out("softmax", out)
    return call("softmax", backend, (input,), {"dim": dim if type(dim) is int else as_int(dim)})


def sum(
    input: torch.Tensor,
    dim: Dim | list[int] = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Sum over one dimension, several or all, as :func:`torch.sum`.

    Args:
        input: any shape and strides; float16, bfloat16, float32 (float64 at the torch, compile and xla levels).
        dim: the dimensions to sum over, each from ``-input.dim()`` to ``input.dim() - 1``; None or ``()`` for all.
        keepdim: keep them, with size 1.
        dtype: the dtype to which `input`, of any dtype, is converted first, in a separate pass; None: no conversion.
        out: must be None; the result is a new tensor.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the other dimensions, in `dtype` or the input's, accumulated in float32 or wider and rounded once.
        An empty sum is 0. Differentiable once; the gradient is a broadcast view, not a copy. The cuda and triton levels
        add in a fixed order: the same tensor gives the same bits.
    """
    if dtype is not None:
        input = to_dtype("sum", input, dtype)
        if autocast.is_on() and isinstance(input, torch.Tensor):
            with autocast.off(input.device.type):  # the dtype that is asked for stands
                return sum(input, dim, keepdim, out=out, backend=backend)
    if out is not None:
        no_out("sum", out)
    dims = dim if dim is None or type(dim) is int else as_ints(dim)
    return call("sum", backend, (input,), {"dim": dims, "keepdim": keepdim})


def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """``(x − mean x) / √(var x + eps) · weight + bias`` over the last dimensions, as
    :func:`torch.nn.functional.layer_norm`.

    Args:
        input: any shape that ends in `normalized_shape`, any strides; float16, bfloat16, float32 (float64 at the torch,
            compile and xla levels). The 16-bit dtypes are computed in float32.
        normalized_shape: the last dimensions, together one row; at least one.
        weight: of shape `normalized_shape`; of the input's dtype, or float32 beside 16 bits; or None for ones.
        bias: likewise, or None for zeros.
        eps: added to the variance; finite. A sum below zero gives NaN, as in PyTorch.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the input's shape and dtype. Differentiable once, in `input`, `weight` and `bias`.

    Source: Ba, Kiros and Hinton, Layer Normalization, arXiv:1607.06450.
    """
    options = {"normalized_shape": as_ints(normalized_shape), "eps": eps if type(eps) is float else as_number(eps)}
    return call("layer_norm", backend, (input, weight, bias), options)


def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """``x / √(mean x² + eps) · weight`` over the last dimensions, as :func:`torch.nn.functional.rms_norm`.

    Args:
        input: any shape that ends in `normalized_shape`, any strides; float16, bfloat16, float32 (float64 at the torch,
            compile and xla levels). The 16-bit dtypes are computed in float32.
        normalized_shape: the last dimensions, together one row; at least one.
        weight: of shape `normalized_shape`; of the input's dtype, or float32 beside 16 bits; or None for ones.
        eps: added to the mean of squares; finite. A sum below zero gives NaN, as in PyTorch. None means the machine
            epsilon of the computation's dtype: float32, or float64 for float64.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the input's shape and dtype. Differentiable once, in `input` and `weight`.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    options = {
        "normalized_shape": as_ints(normalized_shape),
        "eps": eps if eps is None or type(eps) is float else as_number(eps),
    }
    return call("rms_norm", backend, (input, weight), options)


def add_rms_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A transformer's residual sum, and :func:`rms_norm` of it over the last dimension.

    Args:
        input: ``(..., N)``, any strides; float16, bfloat16, float32 (float64 at the torch, compile and xla levels).
        residual: of the same shape and dtype.
        weight: ``(N,)`` of the same dtype, or float32 beside 16 bits; or None for ones.
        eps: as for :func:`rms_norm`.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        The normalised sum, and the sum ``input + residual``. The norm reads the sum rounded to the dtype. Both have the
        input's shape and dtype. Differentiable once, in all three tensors and through both results.
    """
    options = {"eps": eps if eps is None or type(eps) is float else as_number(eps)}
    return call("add_rms_norm", backend, (input, residual, weight), options)


def bias_dropout_add_layer_norm(
    input: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    p: float = 0.5,
    *,
    seed: int,
    eps: float = 1e-5,
    backend: str | None = None,
) -> torch.Tensor:
    """``layer_norm(residual + dropout(input + bias))`` over the last dimension: the end of a post-norm block.

    Args:
        input: ``(..., N)``, any strides; float16, bfloat16, float32 (float64 at the torch, compile and xla levels).
        bias: ``(N,)`` of the same dtype, added to `input`.
        residual: of the shape and dtype of `input`.
        weight: ``(N,)`` of the same dtype, the norm's scale, or None for ones.
        norm_bias: ``(N,)`` of the same dtype, the norm's bias, or None for zeros.
        p: the probability to drop an element, from 0 up to but not including 1.
        seed: an integer from 0 to 2⁶³ − 1. It gives the mask of :func:`dropout`.
        eps: as for :func:`layer_norm`.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the shape and dtype of `input`. Differentiable once, in all five tensors. For a backward pass, the
        sum before the norm is saved, but no mask.
    """
    inputs = (input, bias, residual, weight, norm_bias)
    options = {
        "p": p if type(p) is float else as_number(p),
        "seed": seed if type(seed) is int else as_int(seed),
        "eps": eps if type(eps) is float else as_number(eps),
    }
    return call("bias_dropout_add_layer_norm", backend, inputs, options)
