"""Bias, dropout, residual sum and LayerNorm in JAX, as one program."""

from __future__ import annotations

from typing import Any

from xla_impl.dropout import unsupported
from xla_impl.formulas import affine, dropped, normalised, wide
from xla_impl.rung import register


def formula(
    jax: Any,
    input: Any,
    bias: Any,
    residual: Any,
    weight: Any = None,
    norm_bias: Any = None,
    *,
    p: float,
    seed: Any,
    eps: float,
) -> Any:
    branch = wide(jax, input) + wide(jax, bias)
    total = wide(jax, residual) + dropped(jax, branch, seed, p)
    return affine(normalised(jax, total, (-1,), float(eps)), weight, norm_bias).astype(input.dtype)


register("bias_dropout_add_layer_norm", formula, also_unsupported=unsupported)
