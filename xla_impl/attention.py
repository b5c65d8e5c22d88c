"""Attention in JAX: product, softmax, product. Whether XLA finds a fused kernel in it, `inspect` shows."""

from __future__ import annotations

from typing import Any

from kernel_ladder.semantics.masks import NO_WINDOW, band, hides_nothing
from xla_impl import register, takes_all
from xla_impl.formulas import product, softmax_of_scores, wide


def formula(
    jax: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    *,
    is_causal: bool | str,
    scale: float | None,
    enable_gqa: bool,
    window_size: tuple[int, int] = NO_WINDOW,
    return_lse: bool = False,
) -> Any:
    jnp = jax.numpy
    q, k, v = wide(jax, query), wide(jax, key), wide(jax, value)
    if enable_gqa and k.shape[-3]:
        group = q.shape[-3] // k.shape[-3]
        k, v = jnp.repeat(k, group, -3), jnp.repeat(v, group, -3)
    lengths = q.shape[-2], k.shape[-2]
    if lengths[1] == 0:
        output = product(jax, product(jax, q, jnp.swapaxes(k, -1, -2)), v).astype(query.dtype)
        return (output, jnp.full(q.shape[:-1], -jnp.inf, q.dtype)) if return_lse else output
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    scores = product(jax, q * factor, jnp.swapaxes(k, -1, -2))
    limits = band(is_causal, window_size, *lengths)
    if not hides_nothing(*limits, *lengths):
        seen = jnp.tril(jnp.triu(jnp.ones(lengths, bool), limits[0]), limits[1])
        scores = jnp.where(seen, scores, -jnp.inf)
    if attn_mask is not None:
        boolean = attn_mask.dtype == bool
        scores = jnp.where(attn_mask, scores, -jnp.inf) if boolean else scores + attn_mask.astype(scores.dtype)
    output, lse = softmax_of_scores(jax, scores, v, lambda a, b: product(jax, a, b))
    return (output.astype(query.dtype), lse) if return_lse else output.astype(query.dtype)


register("attention", formula, refuses=takes_all)
