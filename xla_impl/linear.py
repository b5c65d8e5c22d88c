"""A linear layer in JAX: the product, bias and GELU as one program."""

from __future__ import annotations

import math
from typing import Any

from kernel_ladder.semantics.linear_shapes import ACTIVATIONS
from xla_impl.formulas import gelu, product, scores_of, wide
from xla_impl.rung import register


def formula(jax: Any, input: Any, weight: Any, bias: Any = None, *, activation: str | None) -> Any:
    output = wide(jax, product(jax, input, weight.T)) if activation is None else _wide_product(jax, input, weight)
    if bias is not None:
        output = output + wide(jax, bias)
    if activation is not None:
        output = gelu(jax, output, ACTIVATIONS[activation])
    return output.astype(input.dtype)


def _wide_product(jax: Any, input: Any, weight: Any) -> Any:
    """``input · weightᵀ`` in float32 or wider: nothing is rounded to 16 bits before GELU, nor before its gradient."""
    rows = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
    return scores_of(jax)(rows, weight).reshape(*input.shape[:-1], weight.shape[0])


register("linear", formula)
