"""GELU in JAX: XLA fuses the formula into one loop."""

from __future__ import annotations

from typing import Any

from xla_impl import register, tanh_in_32_bits
from xla_impl.formulas import gelu, wide


def formula(jax: Any, input: Any, *, approximate: str) -> Any:
    return gelu(jax, wide(jax, input), approximate).astype(input.dtype)


register("gelu", formula, refuses=tanh_in_32_bits)
