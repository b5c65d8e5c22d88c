"""LayerNorm in JAX."""

from __future__ import annotations

from typing import Any

from xla_impl.formulas import affine, normalised, wide
from xla_impl.rung import register


def formula(
    jax: Any, input: Any, weight: Any = None, bias: Any = None, *, normalized_shape: tuple[int, ...], eps: float
) -> Any:
    axes = tuple(range(-len(normalized_shape), 0))
    return affine(normalised(jax, wide(jax, input), axes, float(eps)), weight, bias).astype(input.dtype)


register("layer_norm", formula)
