"""RMSNorm in JAX."""

from __future__ import annotations

from typing import Any

from xla_impl import register, takes_all
from xla_impl.formulas import affine, rms, wide


def formula(jax: Any, input: Any, weight: Any = None, *, normalized_shape: tuple[int, ...], eps: float | None) -> Any:
    axes, x = tuple(range(-len(normalized_shape), 0)), wide(jax, input)
    added = float(jax.numpy.finfo(x.dtype).eps) if eps is None else float(eps)
    return affine(rms(jax, x, axes, added), weight, None).astype(input.dtype)


register("rms_norm", formula, refuses=takes_all)
