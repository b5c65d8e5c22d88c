"""Matrix product in JAX: XLA calls a library, or writes a kernel, for ``dot_general``."""

from __future__ import annotations

from typing import Any

from xla_impl import register, takes_all
from xla_impl.formulas import product, wide


def formula(jax: Any, input: Any, other: Any) -> Any:
    return product(jax, wide(jax, input), wide(jax, other)).astype(input.dtype)


register("matmul", formula, refuses=takes_all)
