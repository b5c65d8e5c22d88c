"""matmul, rung 1 of 2: jit

Idea      `jax.numpy.matmul`: on a GPU XLA calls cuBLAS, or writes a Triton kernel where autotuning finds it faster.
Predicts  The library's rate, less the bridge's host time.
Limit now No say in tiles. float32 takes full precision, without TF32.
Next      `pallas`: the tiles by hand.
"""

from __future__ import annotations

from typing import Any

from xla_impl.formulas import product


def formula(jax: Any, input: Any, other: Any) -> Any:
    """``jax.numpy.matmul``."""
    return product(jax, input, other)
