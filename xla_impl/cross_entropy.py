"""Cross-entropy in JAX: XLA fuses the reductions of a row, and the label's logit is taken by its index."""

from __future__ import annotations

from typing import Any

from xla_impl.formulas import wide
from xla_impl.rung import register


def formula(
    jax: Any,
    input: Any,
    target: Any,
    *,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    wide_loss: bool = False,
) -> Any:
    jnp = jax.numpy
    x = wide(jax, input if input.ndim <= 2 else jnp.moveaxis(input, 1, -1))
    ignored, is_class = target == ignore_index, (target >= 0) & (target < x.shape[-1])
    counts = is_class & ~ignored
    x, label = jnp.where(counts[..., None], x, 0), jnp.where(counts, target, 0)
    row_max = jax.lax.stop_gradient(jnp.max(x, -1, keepdims=True))
    shifted = x - row_max
    log_sum = jnp.log(jnp.sum(jnp.exp(shifted), -1, keepdims=True))
    loss = (1 - label_smoothing) * (log_sum - jnp.take_along_axis(shifted, label[..., None], -1))[..., 0]
    if label_smoothing:
        loss = loss + label_smoothing * jnp.mean(log_sum - shifted, -1)
    if z_loss:
        loss = loss + z_loss * jnp.square(log_sum + row_max)[..., 0]
    loss = jnp.where(ignored, 0, jnp.where(is_class, loss, jnp.nan))
    if reduction != "none":
        loss = jnp.sum(loss) / (jnp.sum(~ignored) if reduction == "mean" else 1)
    return loss if wide_loss else loss.astype(input.dtype)


register("cross_entropy", formula)
