"""Bias and GELU in JAX."""

from __future__ import annotations

from typing import Any

from xla_impl.formulas import gelu, wide
from xla_impl.rung import register


def formula(jax: Any, input: Any, bias: Any, *, approximate: str) -> Any:
    return gelu(jax, wide(jax, input) + wide(jax, bias), approximate).astype(input.dtype)


register("bias_gelu", formula)
