"""Matrix products, and the linear layer, in float8 too."""

from __future__ import annotations

import torch

from kernel_ladder.ops.calls import call, no_out


def matmul(input: torch.Tensor, other: torch.Tensor, *, out: None = None, backend: str | None = None) -> torch.Tensor:
    """Matrix product with the shapes of :func:`torch.matmul`: vectors, matrices and broadcast batches of them.

    Args:
        input: ``(K,)``, ``(M, K)`` or ``(..., M, K)``; float16, bfloat16, float32
            (float64 at the torch, compile and xla levels); any strides.
        other: ``(K,)``, ``(K, N)`` or ``(..., K, N)``, of the same dtype on the same device.
        out: must be None; the result is a new tensor.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        The product, accumulated in float32 or better. Float32 inputs are multiplied as float32 unless
        ``torch.backends.cuda.matmul.allow_tf32`` permits tf32. Differentiable once.
    """
    if out is not None:
        no_out("matmul", out)
    return call("matmul", backend, (input, other), {})


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    out: None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """``activation(input · weightᵀ + bias)``, as :func:`torch.nn.functional.linear` followed by its ``gelu``.

    Args:
        input: ``(K,)`` or ``(..., K)``; float16, bfloat16, float32 (float64 at the torch, compile and xla levels); any
            strides.
        weight: ``(N, K)``, or a vector ``(K,)``, whose output has no feature dimension; of the same dtype on the same
            device; any strides.
        bias: ``(N,)``, or ``()`` if `weight` is a vector; likewise, or None for zeros.
        activation: None, ``"gelu"`` for the exact form with erf, or ``"gelu_tanh"`` for the approximation with tanh.
        out: must be None; the result is a new tensor.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor ``(..., N)``, or ``(...)`` if `weight` is a vector, of the same dtype, accumulated in float32 or
        better. The cuda and triton levels round it once. tf32 as for :func:`matmul`. Differentiable once. A gradient
        through an activation saves the product, a tensor of the output's size. If the leading dimensions do not fold
        into one by their strides, the triton level copies the input, and every backward pass copies the gradient.
    """
    if out is not None:
        no_out("linear", out)
    return call("linear", backend, (input, weight, bias), {"activation": activation})


def linear_float8(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | str = torch.bfloat16,
    out: None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """``(input · weightᵀ) · input_scale · weight_scale + bias`` of float8 operands, for inference.

    :func:`kernel_ladder.quantize_float8` gives a tensor and its scale in the shapes that this function takes.

    Args:
        input: ``(K,)`` or ``(..., K)``; float8_e4m3fn; any strides.
        weight: ``(N, K)``, of the same dtype on the same device; any strides.
        input_scale: float32; ``()``, one for the tensor, or ``(..., 1)``, one per row of `input`.
        weight_scale: float32; ``()``, or ``(N, 1)``, one per row of `weight`. ``torch._scaled_mm`` takes its transpose.
        bias: ``(N,)``; bfloat16, float16 or float32, whatever `out_dtype` is; or None for zeros.
        out_dtype: torch.bfloat16, torch.float16 or torch.float32, or its name.
        out: must be None; the result is a new tensor.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor ``(..., N)`` of `out_dtype`. Scales and bias are applied in float32, then the result is rounded once.
        Every backend refuses a call that wants a gradient.

        Float8 tensor cores of Hopper keep about 14 bits of a sum (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). So
        kernels add it to a float32 accumulator after every 128 products. The agreement check allows for it: its bound
        follows from the error of such sums, not from that of float32 sums.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433; ``torch._scaled_mm``.
    """
    if out is not None:
        no_out("linear_float8", out)
    inputs = (input, weight, input_scale, weight_scale, bias)
    return call("linear_float8", backend, inputs, {"out_dtype": out_dtype})
