"""attention, rung 1 of 3: jit

Idea      Product, softmax, product as one program of XLA: masks and softmax fuse between two matrix products.
Predicts  Scores go to memory and come back about twice: 4 passes over them, where the formula's eager kernels make 18.
Limit now The S_q × S_k scores still pass through memory: XLA does not invent the online softmax.
Next      `fused`: the library's kernel.
"""

from __future__ import annotations

from typing import Any

from kernel_ladder.semantics.masks import NO_WINDOW, band, hides_nothing
from xla_impl.formulas import in_groups, scores_of, weighted, without_keys


def formula(
    jax: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    *,
    is_causal: bool | str = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    return_lse: bool = False,
) -> Any:
    jnp = jax.numpy
    if enable_gqa:
        key, value = (in_groups(jax, query, x, -3) for x in (key, value))
    lengths = query.shape[-2], key.shape[-2]
    if lengths[1] == 0:
        return without_keys(jax, query, key, value, return_lse)
    scores = scores_of(jax)(query, key) * (query.shape[-1] ** -0.5 if scale is None else float(scale))
    first, last = band(is_causal, window_size, *lengths)
    if not hides_nothing(first, last, *lengths):
        row, column = jnp.arange(lengths[0])[:, None], jnp.arange(lengths[1])[None, :]
        scores = jnp.where((column >= row + first) & (column <= row + last), scores, -jnp.inf)
    if attn_mask is not None:
        boolean = attn_mask.dtype == bool
        scores = jnp.where(attn_mask, scores, -jnp.inf) if boolean else scores + attn_mask.astype(scores.dtype)
    output, lse = weighted(jax, scores, value)
    return (output, lse) if return_lse else output
