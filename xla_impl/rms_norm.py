"""RMSNorm in JAX."""

from __future__ import annotations

from typing import Any

from xla_impl.formulas import affine, rms_normalised, wide
from xla_impl.rung import register


def formula(jax: Any, input: Any, weight: Any = None, *, normalized_shape: tuple[int, ...], eps: float | None) -> Any:
    axes, x = tuple(range(-len(normalized_shape), 0)), wide(jax, input)
    added = float(jax.numpy.finfo(x.dtype).eps) if eps is None else float(eps)
    return affine(rms_normalised(jax, x, axes, added), weight, None).astype(input.dtype)


register("rms_norm", formula)
