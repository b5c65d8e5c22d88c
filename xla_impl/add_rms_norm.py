"""Residual sum and RMSNorm of it in JAX; both are returned."""

from __future__ import annotations

from typing import Any

from xla_impl.formulas import affine, rms_normalised, wide
from xla_impl.rung import register


def formula(jax: Any, input: Any, residual: Any, weight: Any = None, *, eps: float | None) -> tuple[Any, Any]:
    total = input + residual
    x = wide(jax, total)
    added = float(jax.numpy.finfo(x.dtype).eps) if eps is None else float(eps)
    return affine(rms_normalised(jax, x, (-1,), added), weight, None).astype(total.dtype), total


register("add_rms_norm", formula)
