"""The loss of a linear layer in JAX: one program, whose logits are whole in memory."""

from __future__ import annotations

from typing import Any

from xla_impl import cross_entropy
from xla_impl.formulas import product, wide
from xla_impl.rung import register


def formula(jax: Any, input: Any, linear_weight: Any, target: Any, *, wide_loss: bool, **options: Any) -> Any:
    loss = cross_entropy.formula(jax, wide(jax, product(jax, input, linear_weight.T)), target, **options)
    return loss if wide_loss else loss.astype(input.dtype)


register("linear_cross_entropy", formula)
