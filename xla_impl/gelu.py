"""GELU in JAX: XLA fuses the formula into one loop."""

from __future__ import annotations

from typing import Any

from xla_impl.formulas import gelu, wide
from xla_impl.rung import register


def formula(jax: Any, input: Any, *, approximate: str) -> Any:
    return gelu(jax, wide(jax, input), approximate).astype(input.dtype)


register("gelu", formula)
