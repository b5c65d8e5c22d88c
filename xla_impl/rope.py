"""Rotary position embedding in JAX: one loop over pairs, with real and imaginary parts of the table of angles."""

from __future__ import annotations

from typing import Any

from xla_impl.formulas import wide
from xla_impl.rung import register


def formula(jax: Any, input: Any, freqs_cis: Any, offsets: Any = None, *, interleaved: bool, offset: int) -> Any:
    jnp = jax.numpy
    rotated = 2 * freqs_cis.shape[1]
    if offsets is None:
        table = freqs_cis[offset : offset + input.shape[-2]]
    else:
        table = _of_sequences(jnp, freqs_cis, offsets, offset, input)
    x = wide(jax, input[..., :rotated])
    cos, sin = jnp.real(table).astype(x.dtype), jnp.imag(table).astype(x.dtype)
    if interleaved:
        x1, x2 = x[..., 0::2], x[..., 1::2]
        y = jnp.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).reshape(x.shape)
    else:
        x1, x2 = jnp.split(x, 2, axis=-1)
        y = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return jnp.concatenate([y.astype(input.dtype), input[..., rotated:]], axis=-1)


def _of_sequences(jnp: Any, freqs_cis: Any, offsets: Any, offset: int, input: Any) -> Any:
    """The angles of each sequence's rows, ``(B, 1, ..., 1, S, pairs)``. Those of no position are NaN."""
    (positions, _), rows = freqs_cis.shape, input.shape[-2]
    # Offsets past which no row is in the table. Between them no sum leaves the 32 bits.
    lowest, highest = max(-offset - rows, -(2**31)), min(positions - offset, 2**31 - 1)
    first = jnp.clip(offsets, lowest, highest) - lowest + (lowest + offset)
    position = first[:, None] + jnp.arange(rows, dtype=first.dtype)
    inside = (position >= 0) & (position < positions)
    chosen = jnp.take(freqs_cis, jnp.where(inside, position, 0), axis=0, mode="clip")
    angles = jnp.where(inside[..., None], chosen, complex(jnp.nan, jnp.nan))
    return angles.reshape(angles.shape[0], *(1,) * (input.ndim - 3), *angles.shape[1:])


register("rope", formula)
