"""Rotary position embedding in JAX: one loop over pairs, with real and imaginary parts of the table of angles."""

from __future__ import annotations

from typing import Any

from xla_impl.formulas import wide
from xla_impl.rung import register


def formula(jax: Any, input: Any, freqs_cis: Any, *, interleaved: bool, offset: int) -> Any:
    jnp = jax.numpy
    rotated = 2 * freqs_cis.shape[1]
    table = freqs_cis[offset : offset + input.shape[-2]]
    x = wide(jax, input[..., :rotated])
    cos, sin = jnp.real(table).astype(x.dtype), jnp.imag(table).astype(x.dtype)
    if interleaved:
        x1, x2 = x[..., 0::2], x[..., 1::2]
        y = jnp.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).reshape(x.shape)
    else:
        x1, x2 = jnp.split(x, 2, axis=-1)
        y = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return jnp.concatenate([y.astype(input.dtype), input[..., rotated:]], axis=-1)


register("rope", formula)
