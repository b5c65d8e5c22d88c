"""Float8 (e4m3): its range, the shapes of scales, and quantization in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from kernel_ladder.spec import dtype_name, dtype_names
from kernel_ladder.tracing import wants_gradient

FLOAT8 = torch.float8_e4m3fn
#: Dtypes of an output, and of a bias.
OUTPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Products that a tensor core may add up before their sum is added to a float32 accumulator.
PROMOTED_EVERY = 128

_NO_GRADIENT = "float8 products are for inference and have no gradient"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def no_gradient(*inputs: torch.Tensor | None) -> str | None:
    """Why no rung of a float8 operation takes these inputs, or None."""
    return f"{_NO_GRADIENT}; call them under torch.no_grad()" if wants_gradient(*inputs) else None


def refuse_gradient(op: str) -> Callable[..., NoReturn]:
    """The backward pass of a float8 rung, for callers who went past :func:`no_gradient`."""

    def backward(saved: tuple[Any, ...], grad: Any, needs: tuple[bool, ...]) -> NoReturn:
        raise RuntimeError(f"{op}: {_NO_GRADIENT}")

    return backward


def output_dtype(out_dtype: torch.dtype | str) -> torch.dtype:
    """The dtype of an output, which may be given by its name: a command line, and rows of results, have names."""
    if isinstance(out_dtype, torch.dtype):
        return out_dtype
    for dtype in OUTPUT_DTYPES:
        if dtype_name(dtype) == out_dtype:
            return dtype
    raise ValueError(f"no dtype of an output: {out_dtype!r}")


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a scale per row of a tensor: its last dimension is 1."""
    return (*shape[:-1], 1)


def quantize_float8(x: torch.Tensor, per_row: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a tensor to float8 (e4m3) with one scale per row, or one for all.

    The scale maps the largest magnitude to 448, the largest number of e4m3: ``x ≈ quantized.float() * scale``. Values
    round to the nearest, ties to even. Rows of zeros have scale 1. Of a row that holds NaN or infinity, the scale is no
    number either, so that all of the row's results are NaN.

    Args:
        x: ``(..., K)``; float16, bfloat16 or float32; any strides. A tensor of no dimension has one scale.
        per_row: one scale for each row along the last dimension, else one for the tensor.

    Returns:
        ``(quantized, scale)``: float8_e4m3fn in the shape of `x`, and float32 in the shape ``(..., 1)``, or ``()``
        without `per_row`. Neither has a gradient. :func:`kernel_ladder.linear_float8` takes both.

    Raises:
        TypeError: `x` is no tensor of these dtypes, or `per_row` is no bool.
        ValueError: `per_row` of a tensor of no dimension.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433.
    """
    op = "quantize_float8"
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: argument `x` must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in _DTYPES:
        raise TypeError(f"{op}: argument `x` has dtype {dtype_name(x.dtype)}; accepted are {dtype_names(_DTYPES)}")
    if not isinstance(per_row, bool):
        raise TypeError(f"{op}: argument `per_row` must be a bool, got {type(per_row).__name__}")
    if per_row and x.dim() == 0:
        raise ValueError(f"{op}: argument `per_row` must be False for a tensor of no dimension, which has no rows")
    with torch.no_grad():
        wide, largest = x.float(), torch.finfo(FLOAT8).max
        if x.numel() == 0:
            top = wide.new_zeros(scale_shape(tuple(x.shape)) if per_row else ())
        else:
            top = wide.abs().amax(-1, keepdim=True) if per_row else wide.abs().amax()
        # A subnormal scale would lose digits.
        scale = torch.where(top == 0, 1.0, (top / largest).clamp(min=torch.finfo(torch.float32).tiny))
        # The quotient may pass the largest number by one digit of float32.
        return (wide / scale).clamp(-largest, largest).to(FLOAT8), scale
