"""A linear layer of float8 operands in CUDA C++: ``csrc/linear_float8/``, for inference."""

from __future__ import annotations

import torch

from cuda_impl import climb, not_hopper, unsupported
from kernel_ladder.semantics.float8 import no_gradient, output_dtype, refuse_gradient
from kernel_ladder.semantics.linear_shapes import as_rows, output_shape
from kernel_ladder.spec import dtype_name
from kernel_ladder.table import register
from kernel_ladder.tracing import address, concrete

OP = "linear_float8"
#: Bytes, and so elements, from one of which to the next TMA takes the beginnings of rows.
_ALIGNMENT = 16


def _naive_unsupported(*inputs: torch.Tensor, **options: object) -> str | None:
    return no_gradient(*inputs) or unsupported(*inputs)


def _persistent_unsupported(*inputs: torch.Tensor, **options: object) -> str | None:
    if (reason := _naive_unsupported(*inputs)) is not None:
        return reason
    input, weight, *_ = inputs
    if (reason := not_hopper(input.get_device())) is not None:
        return reason
    if any(concrete(size) == 0 for size in (*input.shape, *weight.shape)):
        return "TMA takes no empty operands"
    for name, x in (("input", as_rows(input)), ("weight", weight)):
        if x.stride(1) != 1 and x.shape[1] != 1:
            return f"argument `{name}` must be dense along its last dimension: float8 tensor cores read along it"
        if address(x) % _ALIGNMENT or (x.shape[0] != 1 and x.stride(0) % _ALIGNMENT):
            return f"TMA reads rows that begin at multiples of 16 bytes; `{name}` has strides {tuple(x.stride())}"
    return None


_UNSUPPORTED = {"naive": _naive_unsupported, "persistent": _persistent_unsupported}


def _register(name: str) -> None:
    run = getattr(torch.ops.kernel_ladder.linear_float8, name)

    def forward(
        input: torch.Tensor,
        weight: torch.Tensor,
        input_scale: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        out_dtype: torch.dtype | str,
    ) -> tuple[torch.Tensor, tuple]:
        dtype = dtype_name(output_dtype(out_dtype))
        scale = input_scale.reshape(-1, 1) if input_scale.dim() else input_scale
        output = run(as_rows(input), weight, scale, weight_scale, bias, dtype)
        return output.view(output_shape(input, weight)), ()

    @torch.library.register_fake(f"kernel_ladder::linear_float8.{name}")
    def _(input, weight, input_scale, weight_scale, bias, out_dtype):
        return input.new_empty((input.shape[0], weight.shape[0]), dtype=output_dtype(out_dtype))

    register(
        OP,
        f"cuda.{name}",
        forward=forward,
        backward=refuse_gradient(OP),
        unsupported=_UNSUPPORTED[name],
    )


for _name in climb(OP):
    _register(_name)
