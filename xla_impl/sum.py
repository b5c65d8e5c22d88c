"""Sum in JAX, in float32 for 16-bit elements."""

from __future__ import annotations

from typing import Any

from kernel_ladder.semantics.reduction import reduced_dims
from xla_impl.formulas import wide
from xla_impl.rung import register


def formula(jax: Any, input: Any, *, dim: Any, keepdim: bool) -> Any:
    axes = reduced_dims(dim, input.ndim)
    return jax.numpy.sum(wide(jax, input), axes, keepdims=keepdim).astype(input.dtype)


register("sum", formula)
