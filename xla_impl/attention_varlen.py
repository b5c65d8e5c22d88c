"""Attention of packed sequences in JAX: scores of all queries with all keys, those between sequences hidden."""

from __future__ import annotations

from typing import Any

from kernel_ladder.semantics.masks import NO_WINDOW
from xla_impl import register, takes_all
from xla_impl.formulas import product, softmax_of_scores, wide


def formula(
    jax: Any,
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    is_causal: bool | str,
    scale: float | None,
    enable_gqa: bool,
    window_size: tuple[int, int] = NO_WINDOW,
    return_lse: bool = False,
) -> Any:
    jnp = jax.numpy
    q, k, v = (jnp.swapaxes(wide(jax, x), 0, 1) for x in (query, key, value))
    if enable_gqa and k.shape[0]:
        group = q.shape[0] // k.shape[0]
        k, v = jnp.repeat(k, group, 0), jnp.repeat(v, group, 0)
    if k.shape[-2] == 0:
        output = jnp.swapaxes(product(jax, product(jax, q, jnp.swapaxes(k, -1, -2)), v), 0, 1).astype(query.dtype)
        return (output, jnp.full(q.shape[:-1], -jnp.inf, q.dtype)) if return_lse else output
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    scores = product(jax, q * factor, jnp.swapaxes(k, -1, -2))
    scores = jnp.where(
        _seen(jax, cu_seqlens_q, cu_seqlens_k, scores.shape[-2:], is_causal, window_size), scores, -jnp.inf
    )
    output, lse = softmax_of_scores(jax, scores, v, lambda a, b: product(jax, a, b))
    output = jnp.swapaxes(output, 0, 1).astype(query.dtype)
    return (output, lse) if return_lse else output


def _seen(
    jax: Any, cu_q: Any, cu_k: Any, totals: tuple[int, int], is_causal: bool | str, window_size: tuple[int, int]
) -> Any:
    """Which query sees which key: of the same sequence, and within the band aligned to its lower right corner."""
    jnp = jax.numpy
    sequences, to_end = [], []
    for offsets, total in zip((cu_q, cu_k), totals, strict=True):
        place = jnp.arange(total, dtype=offsets.dtype)
        sequence = jnp.searchsorted(offsets, place, side="right") - 1
        sequences.append(sequence)
        to_end.append(offsets[jnp.minimum(sequence + 1, offsets.shape[0] - 1)] - place)
    after = to_end[0][:, None] - to_end[1][None, :]
    left, right = (min(side, sum(totals)) for side in window_size)
    seen = sequences[0][:, None] == sequences[1][None, :]
    if is_causal:
        right = 0
    if right >= 0:
        seen = seen & (after <= right)
    return seen if left < 0 else seen & (after >= -left)


register("attention_varlen", formula, refuses=takes_all)
