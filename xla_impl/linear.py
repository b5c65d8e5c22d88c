"""A linear layer in JAX: the product, bias and GELU as one program."""

from __future__ import annotations

from typing import Any

from kernel_ladder.semantics.linear_shapes import ACTIVATIONS
from xla_impl import register, tanh_in_32_bits
from xla_impl.formulas import gelu, product, wide


def formula(jax: Any, input: Any, weight: Any, bias: Any = None, *, activation: str | None) -> Any:
    output = product(jax, wide(jax, input), wide(jax, weight).T)
    if bias is not None:
        output = output + wide(jax, bias)
    if activation is not None:
        output = gelu(jax, output, ACTIVATIONS[activation])
    return output.astype(input.dtype)


register("linear", formula, refuses=tanh_in_32_bits)
