"""Attention to keys in pages, in JAX: a gather of each sequence's pages, then the formula under a mask of lengths."""

from __future__ import annotations

from typing import Any

from kernel_ladder.semantics.masks import NO_WINDOW
from xla_impl.formulas import in_groups, scores_of, weighted, without_keys
from xla_impl.rung import register


def formula(
    jax: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    *,
    is_causal: bool | str = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Any:
    jnp = jax.numpy

    def gathered(cache: Any) -> Any:
        """(B, H_kv, capacity, D)."""
        if cache.shape[0] == 0:
            return jnp.zeros((block_table.shape[0], cache.shape[2], 0, cache.shape[3]), cache.dtype)
        of_each = cache[jnp.clip(block_table, 0, cache.shape[0] - 1)]
        batch, columns, page_size, *row = of_each.shape
        return jnp.swapaxes(of_each.reshape(batch, columns * page_size, *row), 1, 2)

    keys, values = gathered(key_cache), gathered(value_cache)
    if enable_gqa:
        keys, values = (in_groups(jax, query, x, 1) for x in (keys, values))
    if keys.shape[-2] == 0:
        return without_keys(jax, query, keys, values, return_lse)
    seen = _seen(jax, cache_seqlens, (query.shape[-2], keys.shape[-2]), is_causal, window_size)
    # Pages hold what was written before, NaN too: what no query sees is zero.
    used = jnp.any(seen, -2)[..., None]
    keys, values = jnp.where(used, keys, 0), jnp.where(used, values, 0)
    scores = scores_of(jax)(query, keys) * (query.shape[-1] ** -0.5 if scale is None else float(scale))
    output, lse = weighted(jax, jnp.where(seen, scores, -jnp.inf), values)
    return (output, lse) if return_lse else output


def _seen(
    jax: Any, cache_seqlens: Any, shape: tuple[int, int], is_causal: bool | str, window_size: tuple[int, int]
) -> Any:
    """Which new token sees which key: (B, 1, L, capacity)."""
    jnp = jax.numpy
    rows, capacity = shape
    lengths = jnp.clip(cache_seqlens, 0, capacity)[:, None, None, None]
    key = jnp.arange(capacity, dtype=lengths.dtype)
    after = key - lengths + (rows - jnp.arange(rows, dtype=lengths.dtype))[:, None]
    left, right = (min(side, rows + capacity) for side in window_size)
    seen = jnp.broadcast_to(key < lengths, after.shape)
    if is_causal:
        right = 0
    if right >= 0:
        seen = seen & (after <= right)
    return seen if left < 0 else seen & (after >= -left)


def unsupported(*inputs: Any, **options: Any) -> str | None:
    if options.get("batch_invariant"):
        return "its products are chosen by the size of the batch; `batch_invariant` needs torch, triton or cuda"
    return None


register("attention_paged", formula, also_unsupported=unsupported)
