"""Bias, dropout, residual sum and LayerNorm in JAX, as one program."""

from __future__ import annotations

from typing import Any

from kernel_ladder.semantics import philox
from xla_impl import register
from xla_impl.dropout import too_long
from xla_impl.formulas import affine, centred, kept, rms, wide


def formula(
    jax: Any,
    input: Any,
    bias: Any,
    residual: Any,
    weight: Any = None,
    norm_bias: Any = None,
    *,
    p: float,
    seed: int,
    eps: float,
) -> Any:
    branch = wide(jax, input) + wide(jax, bias)
    mask = kept(jax, input.shape, seed, p).astype(branch.dtype)
    total = wide(jax, residual) + branch * mask * jax.numpy.asarray(philox.scale(p), branch.dtype)
    normalised = rms(jax, centred(jax, total, (-1,)), (-1,), float(eps))
    return affine(normalised, weight, norm_bias).astype(input.dtype)


register("bias_dropout_add_layer_norm", formula, refuses=too_long)
