"""SwiGLU's gate in JAX."""

from __future__ import annotations

from typing import Any

from xla_impl.formulas import wide
from xla_impl.rung import register


def formula(jax: Any, gate: Any, up: Any) -> Any:
    return (jax.nn.silu(wide(jax, gate)) * wide(jax, up)).astype(gate.dtype)


register("swiglu", formula)
