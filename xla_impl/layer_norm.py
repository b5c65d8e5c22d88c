"""LayerNorm in JAX."""

from __future__ import annotations

from typing import Any

from xla_impl import register, takes_all
from xla_impl.formulas import affine, centred, rms, wide


def formula(
    jax: Any, input: Any, weight: Any = None, bias: Any = None, *, normalized_shape: tuple[int, ...], eps: float
) -> Any:
    axes = tuple(range(-len(normalized_shape), 0))
    x = centred(jax, wide(jax, input), axes)
    return affine(rms(jax, x, axes, float(eps)), weight, bias).astype(input.dtype)


register("layer_norm", formula, refuses=takes_all)
