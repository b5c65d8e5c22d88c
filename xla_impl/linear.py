"""A linear layer in JAX: the product, bias and GELU as one program."""

from __future__ import annotations

from typing import Any

from kernel_ladder.semantics.linear_shapes import ACTIVATIONS
from xla_impl.formulas import gelu, product, wide
from xla_impl.rung import register


def formula(jax: Any, input: Any, weight: Any, bias: Any = None, *, activation: str | None) -> Any:
    output = wide(jax, product(jax, input, weight.T))
    if bias is not None:
        output = output + wide(jax, bias)
    if activation is not None:
        output = gelu(jax, output, ACTIVATIONS[activation])
    return output.astype(input.dtype)


register("linear", formula)
