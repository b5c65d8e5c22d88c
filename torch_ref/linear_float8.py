"""A linear layer of float8 operands, ``(input · weightᵀ) · input_scale · weight_scale + bias``, for inference.

Float8 here is e4m3 (Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433). A scale is one number for a
tensor, or one per row, as ``torch._scaled_mm`` takes them. No rung has a gradient.

naive    operands converted to float32 and multiplied there
builtin  ``torch._scaled_mm``: a float8 product with scales in its epilogue; scales per row in bfloat16 alone
"""

import math
from typing import Any

import torch

from kernel_ladder import gpu
from kernel_ladder.semantics.float8 import (
    FLOAT8,
    OUTPUT_DTYPES,
    PROMOTED_EVERY,
    no_gradient,
    output_dtype,
    scale_shape,
)
from kernel_ladder.semantics.linear_shapes import as_rows, output_shape
from kernel_ladder.spec import Case, Spec, check_tensors, dtype_name, dtype_names
from kernel_ladder.table import register, register_spec
from kernel_ladder.tracing import address, concrete
from torch_ref import linear_float8_samples as samples

OP = "linear_float8"

#: Products that one wgmma instruction of float8 operands adds up.
_INSTRUCTION_K = 32
#: Bits after the leading one that a tensor core keeps of a sum: Zhang et al., SageAttention2, arXiv:2411.10958.
_FRACTION_BITS = 13
#: Products in memory at once, at most, where sums of tensor cores are modelled.
_MODELLED_AT_ONCE = 2**24


def naive(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | str,
) -> torch.Tensor:
    """The formula in float32: both operands are converted first, which float32 holds exactly.

    Of operands in float64, which make the oracle, the result stays in float64.
    """
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    product = torch.matmul(input.to(wide), weight.to(wide).mT)
    output = _scaled(product, input_scale, weight_scale, bias)
    return output if input.dtype == torch.float64 else output.to(output_dtype(out_dtype))


def _scaled(
    product: torch.Tensor, input_scale: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    output = product * input_scale * weight_scale.reshape(-1)
    return output if bias is None else output + bias.to(output.dtype)


def builtin(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | str,
) -> torch.Tensor:
    """``torch._scaled_mm``, with promotion to float32. Of a scale per tensor beside one per row, the first is repeated.

    It reads `input` row by row, and `weight` likewise; others are copied.
    """
    rows = as_rows(input).contiguous()
    if input_scale.dim() or weight_scale.dim():
        input_scale = input_scale.reshape(-1, 1).expand(rows.shape[0], 1).contiguous()
        weight_scale = weight_scale.reshape(1, -1).expand(1, weight.shape[0]).contiguous()
    bias = None if bias is None else _as_read(bias)
    output = torch._scaled_mm(
        rows,
        weight.contiguous().mT,
        scale_a=_as_read(input_scale),
        scale_b=_as_read(weight_scale),
        bias=bias,
        out_dtype=output_dtype(out_dtype),
        use_fast_accum=False,
    )
    return output.view(output_shape(input, weight))


def _as_read(x: torch.Tensor) -> torch.Tensor:
    """A vector as cuBLAS reads it, whatever its strides say: dense, from 16 bytes on."""
    if torch.compiler.is_dynamo_compiling():  # A graph knows no addresses, and Inductor drops a plain copy.
        return torch.maximum(x, x)
    x = x.contiguous()
    return x if address(x) % 16 == 0 else x.clone()


def on_tensor_cores(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | str,
    promoted_every: int = PROMOTED_EVERY,
) -> torch.Tensor:
    """The formula with sums as Hopper's float8 tensor cores make them: the error that a kernel must be allowed.

    An instruction aligns 32 products and the sum before them to the largest, drops digits beyond 13 bits, and adds.
    After `promoted_every` products the sum goes to a float32 accumulator (DeepSeek-V3, arXiv:2412.19437, section 3.3.2,
    measured 14 bits; Zhang et al., SageAttention2, arXiv:2411.10958, found 13 after the leading one).
    """
    a, b = as_rows(input).float(), weight.float()
    (m, k), n = a.shape, b.shape[0]
    product = a.new_zeros((m, n))
    at_once = max(1, _MODELLED_AT_ONCE // max(1, n * _INSTRUCTION_K))
    for rows in range(0, m, at_once):
        of_rows = a[rows : rows + at_once, None]
        for start in range(0, k, promoted_every):
            partial = a.new_zeros((of_rows.shape[0], n))
            end = min(k, start + promoted_every)
            for i in range(start, end, _INSTRUCTION_K):
                upto = min(end, i + _INSTRUCTION_K)
                partial = _instruction(partial, of_rows[..., i:upto] * b[None, :, i:upto])
            product[rows : rows + at_once] += partial
    return _scaled(product.view(output_shape(input, weight)), input_scale, weight_scale, bias).to(
        output_dtype(out_dtype)
    )


def _instruction(sums: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """``sums + products.sum(-1)`` as a tensor core adds: aligned to the largest term, each cut towards zero."""
    largest = torch.maximum(sums.abs(), products.abs().amax(-1))
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1 - _FRACTION_BITS)
    total = (sums / unit).trunc() + (products / unit[..., None]).trunc().sum(-1)
    return _cut(total * unit)


def _cut(x: torch.Tensor) -> torch.Tensor:
    """Float32 cut towards zero to the bits that a tensor core keeps."""
    dropped = 23 - _FRACTION_BITS
    return torch.where(x.isfinite(), (x.view(torch.int32) >> dropped << dropped).view(torch.float32), x)


def check(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out_dtype: torch.dtype | str,
) -> None:
    check_tensors(OP, (FLOAT8,), input=input, weight=weight)
    if input.dim() == 0:
        raise ValueError(f"{OP}: argument `input` must have at least 1 dimension, got a 0-dimensional tensor")
    if weight.dim() != 2:
        raise ValueError(f"{OP}: argument `weight` must have 2 dimensions (N, K), got shape {tuple(weight.shape)}")
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{OP}: the last dimension of `input` must equal that of `weight`, got {input.shape[-1]} and "
            f"{weight.shape[1]} in shapes {tuple(input.shape)} and {tuple(weight.shape)}"
        )
    for name, scale, of, scaled in (
        ("input_scale", input_scale, "input", input),
        ("weight_scale", weight_scale, "weight", weight),
    ):
        _check_number(input, name, scale, (torch.float32,))
        if scale.dim() and scale.shape != scale_shape(scaled.shape):
            raise ValueError(
                f"{OP}: argument `{name}` must have the shape (), one for the tensor, or "
                f"{scale_shape(tuple(scaled.shape))}, one per row of `{of}`, got {tuple(scale.shape)}"
            )
    if bias is not None:
        _check_number(input, "bias", bias, OUTPUT_DTYPES, " or None")
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"{OP}: argument `bias` must have the shape ({weight.shape[0]},) of the rows of `weight`, "
                f"got {tuple(bias.shape)}"
            )
    if not isinstance(out_dtype, (torch.dtype, str)):
        names = ", ".join(repr(dtype_name(dtype)) for dtype in OUTPUT_DTYPES)
        given = type(out_dtype).__name__
        raise TypeError(f"{OP}: argument `out_dtype` must be a torch.dtype or its name ({names}), got {given}")
    name = out_dtype if isinstance(out_dtype, str) else dtype_name(out_dtype)
    if name not in map(dtype_name, OUTPUT_DTYPES):
        raise TypeError(f"{OP}: argument `out_dtype` is {name}; accepted are {dtype_names(OUTPUT_DTYPES)}")


def _check_number(input: torch.Tensor, name: str, x: object, dtypes: tuple[torch.dtype, ...], absent: str = "") -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{OP}: argument `{name}` must be a torch.Tensor{absent}, got {type(x).__name__}")
    if x.layout is not torch.strided:
        raise TypeError(f"{OP}: argument `{name}` must be a dense (strided) tensor, got layout {x.layout}")
    if x.dtype not in dtypes:
        raise TypeError(f"{OP}: argument `{name}` has dtype {dtype_name(x.dtype)}; accepted are {dtype_names(dtypes)}")
    if x.device != input.device:
        raise ValueError(
            f"{OP}: arguments `input` and `{name}` must be on the same device, got {input.device} and {x.device}"
        )


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    # Operands have a byte an element. Scales and bias are negligible. There is no backward pass.
    input, weight, *_ = case.shapes
    output = output_dtype(case.options["out_dtype"]).itemsize * math.prod(input[:-1]) * weight[0]
    return 0 if backward else math.prod(input) + math.prod(weight) + output


def _flops(case: Case, backward: bool) -> int:
    input, weight, *_ = case.shapes
    return 0 if backward else 2 * math.prod(input) * weight[0]


SPEC = register_spec(
    Spec(
        name=OP,
        reference=naive,
        builtin=builtin,
        check=check,
        samples=samples.cases(),
        errors=samples.ERRORS,
        sweep=samples.sweep(),
        bytes=_bytes,
        flops=_flops,
        yardstick=on_tensor_cores,
    )
)

#: Compute capability of the first GPUs with float8 tensor cores, Ada.
_FIRST = 8, 9


def builtin_unsupported(*inputs: Any, **options: Any) -> str | None:
    """Why ``torch._scaled_mm`` does not take a call, or None."""
    input, weight, input_scale, weight_scale, bias = inputs
    out_dtype = output_dtype(options["out_dtype"])
    if (reason := no_gradient(*inputs)) is not None:
        return reason
    if not input.is_cuda:
        return f"torch._scaled_mm is for CUDA tensors here, got {input.device.type}"
    if gpu.visible() and (found := gpu.of(input.get_device())).capability < _FIRST:
        major, minor = found.capability
        return f"torch._scaled_mm needs compute capability 8.9 or later, {found.name} has {major}.{minor}"
    n, k = map(concrete, weight.shape)
    if n % 16 or k % 16:
        return f"torch._scaled_mm needs N and K that are multiples of 16, got {n} and {k}"
    if any(concrete(size) == 0 for size in (*input.shape, n)):
        return "torch._scaled_mm takes no empty matrices"
    if any(x.is_contiguous() and address(x) % 16 for x in (input, weight)):
        return "torch._scaled_mm needs operands that start on 16 bytes"
    if (input_scale.dim() or weight_scale.dim()) and out_dtype != torch.bfloat16:
        return f"torch._scaled_mm gives bfloat16 alone with scales per row, got {dtype_name(out_dtype)}"
    if bias is not None and (bias.dtype != out_dtype or out_dtype == torch.float32):
        return f"torch._scaled_mm adds a 16-bit bias of the output's dtype, got {dtype_name(bias.dtype)}"
    return None


def _naive_unsupported(*inputs: Any, **options: Any) -> str | None:
    return no_gradient(*inputs)


register(
    OP,
    "torch.naive",
    forward=lambda *inputs, **options: (naive(*inputs, **options), ()),
    unsupported=_naive_unsupported,
)
register(
    OP,
    "torch.builtin",
    forward=lambda *inputs, **options: (builtin(*inputs, **options), ()),
    unsupported=builtin_unsupported,
)
