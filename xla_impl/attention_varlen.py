"""Attention of packed sequences in JAX: scores of all queries with all keys, those between sequences hidden."""

from __future__ import annotations

from typing import Any

from kernel_ladder.semantics.masks import NO_WINDOW
from xla_impl.formulas import in_groups, scores_of, weighted, without_keys
from xla_impl.rung import register


def formula(
    jax: Any,
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    is_causal: bool | str = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    return_lse: bool = False,
) -> Any:
    jnp = jax.numpy
    q, k, v = (jnp.swapaxes(x, 0, 1) for x in (query, key, value))
    if enable_gqa:
        k, v = (in_groups(jax, q, x, 0) for x in (k, v))
    if k.shape[-2] == 0:
        output, lse = without_keys(jax, q, k, v, True)
    else:
        scores = scores_of(jax)(q, k) * (q.shape[-1] ** -0.5 if scale is None else float(scale))
        seen = _seen(jax, cu_seqlens_q, cu_seqlens_k, scores.shape[-2:], is_causal, window_size)
        output, lse = weighted(jax, jnp.where(seen, scores, -jnp.inf), v)
    output = jnp.swapaxes(output, 0, 1)
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


register("attention_varlen", formula)
