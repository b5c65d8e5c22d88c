"""Matrix product in JAX: XLA calls a library, or writes a kernel, for ``dot_general``."""

from __future__ import annotations

from typing import Any

from xla_impl.formulas import product
from xla_impl.rung import register


def formula(jax: Any, input: Any, other: Any) -> Any:
    """``jax.numpy.matmul``."""
    return product(jax, input, other)


register("matmul", formula)
