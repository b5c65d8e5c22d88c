"""A linear layer of float8 operands in JAX: the formula in float32, which XLA may give to a float8 product of cuBLAS.

Operands come as bytes, whose bits are read as float8, because not every DLPack has float8.
"""

from __future__ import annotations

from typing import Any

import torch

from kernel_ladder.semantics.float8 import no_gradient, output_dtype
from kernel_ladder.spec import dtype_name
from xla_impl.formulas import product
from xla_impl.rung import register


def formula(
    jax: Any, input: Any, weight: Any, input_scale: Any, weight_scale: Any, bias: Any, *, out_dtype: torch.dtype | str
) -> Any:
    jnp = jax.numpy
    operands = (jax.lax.bitcast_convert_type(x, jnp.float8_e4m3fn).astype(jnp.float32) for x in (input, weight))
    a, b = operands
    output = product(jax, a, b.T) * input_scale * weight_scale.reshape(-1)
    if bias is not None:
        output = output + bias.astype(jnp.float32)
    return output.astype(dtype_name(output_dtype(out_dtype)))


def unsupported(*inputs: Any, **options: Any) -> str | None:
    return no_gradient(*inputs)


register("linear_float8", formula, also_unsupported=unsupported)
