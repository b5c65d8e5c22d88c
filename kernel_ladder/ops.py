"""The public functions: PyTorch's own signatures, plus ``backend``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernel_ladder import autograd, table
from kernel_ladder.spec import Inputs


def _call(op: str, backend: str | None, inputs: Inputs, options: dict[str, Any]) -> Any:
    table.spec(op).check(*inputs, **options)
    return autograd.run(table.resolve(op, backend, inputs, options), inputs, options)


def _hashable(shape: Any) -> Any:
    """A list as a tuple, since options are keys; anything else as it is, for the check to judge."""
    return tuple(shape) if isinstance(shape, list) else shape


def gelu(input: torch.Tensor, *, approximate: str = "none", backend: str | None = None) -> torch.Tensor:
    """Gaussian error linear unit, elementwise: ``x · Φ(x)``, as :func:`torch.nn.functional.gelu`.

    Args:
        input: any shape and strides; float16, bfloat16, float32 (float64 at the torch and compile levels).
        approximate: ``"none"`` for the exact form with erf, ``"tanh"`` for the approximation with tanh.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the same shape and dtype. Differentiable once.

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, arXiv:1606.08415.
    """
    return _call("gelu", backend, (input,), {"approximate": approximate})


def softmax(input: torch.Tensor, dim: int = -1, *, backend: str | None = None) -> torch.Tensor:
    """Softmax along one dimension: ``exp(x − max x) / Σ exp(x − max x)``, as :func:`torch.softmax`.

    Args:
        input: any shape and strides; float16, bfloat16, float32 (float64 at the torch and compile levels).
        dim: the dimension that sums to one, from ``-input.dim()`` to ``input.dim() - 1``.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the same shape and dtype. A row of −inf gives NaN, as in PyTorch. Differentiable once.
    """
    return _call("softmax", backend, (input,), {"dim": dim})


def matmul(input: torch.Tensor, other: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """Matrix product with the shapes of :func:`torch.matmul`: vectors, matrices and broadcast batches of them.

    Args:
        input: ``(K,)``, ``(M, K)`` or ``(..., M, K)``; float16, bfloat16, float32
            (float64 at the torch and compile levels); any strides.
        other: ``(K,)``, ``(K, N)`` or ``(..., K, N)``, of the same dtype on the same device.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        The product, accumulated in float32 or better. Float32 inputs are multiplied as float32 unless
        ``torch.backends.cuda.matmul.allow_tf32`` permits tf32. Differentiable once.
    """
    return _call("matmul", backend, (input, other), {})


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """``softmax(query · keyᵀ · scale) · value``, as :func:`torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query: ``(B, H, S_q, D)``; float16, bfloat16, float32 (float64 at the torch and compile levels); any strides.
        key: ``(B, H_kv, S_k, D)``.
        value: ``(B, H_kv, S_k, D_v)``.
        is_causal: query row i sees keys 0 … i (aligned at the top left, as PyTorch does).
        scale: a positive factor on the scores; ``1/√D`` where None.
        enable_gqa: allow H to be a multiple of H_kv: consecutive query heads share one key and value head.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor ``(B, H, S_q, D_v)``. Differentiable once.

    Source: Vaswani et al., Attention Is All You Need, arXiv:1706.03762.
    """
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return _call("attention", backend, (query, key, value), options)


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
        input: any shape that ends in `normalized_shape`, any strides; float16, bfloat16, float32 (float64 at the torch
            and compile levels). The 16-bit dtypes are computed in float32.
        normalized_shape: the last dimensions, together one row; at least one.
        weight: of shape `normalized_shape` and the input's dtype, or None for ones.
        bias: likewise, or None for zeros.
        eps: added to the variance; from zero up.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the input's shape and dtype. Differentiable once, in `input`, `weight` and `bias`.

    Source: Ba, Kiros and Hinton, Layer Normalization, arXiv:1607.06450.
    """
    options = {"normalized_shape": _hashable(normalized_shape), "eps": eps}
    return _call("layer_norm", backend, (input, weight, bias), options)


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
        input: any shape that ends in `normalized_shape`, any strides; float16, bfloat16, float32 (float64 at the torch
            and compile levels). The 16-bit dtypes are computed in float32.
        normalized_shape: the last dimensions, together one row; at least one.
        weight: of shape `normalized_shape` and the input's dtype, or None for ones.
        eps: added to the mean of squares; from zero up. None stands for the machine epsilon of the dtype of the
            computation: of float32, or of float64 for float64.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor of the input's shape and dtype. Differentiable once, in `input` and `weight`.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    options = {"normalized_shape": _hashable(normalized_shape), "eps": eps}
    return _call("rms_norm", backend, (input, weight), options)


def add_rms_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual sum of a transformer, and :func:`rms_norm` of it over the last dimension.

    Args:
        input: ``(..., N)``, any strides; float16, bfloat16, float32 (float64 at the torch and compile levels).
        residual: of the same shape and dtype.
        weight: ``(N,)`` of the same dtype, or None for ones.
        eps: as for :func:`rms_norm`.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        The normalised sum, and the sum ``input + residual`` rounded to the dtype, of which the norm is. Both of the
        input's shape and dtype. Differentiable once, in all three tensors and through both results.
    """
    return _call("add_rms_norm", backend, (input, residual, weight), {"eps": eps})
