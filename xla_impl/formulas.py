"""What the formulas share: the dtype they compute in, GELU, normalised rows, dropout's mask."""

from __future__ import annotations

import math
from typing import Any

from kernel_ladder.semantics import philox

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


def wide(jax: Any, x: Any) -> Any:
    """`x` in the dtype of the computation: float32 for the 16-bit ones, else its own."""
    return x.astype(jax.numpy.float32) if x.dtype.itemsize == 2 else x


def gelu(jax: Any, x: Any, approximate: str) -> Any:
    """Of what is in float32 or wider."""
    jnp = jax.numpy
    if approximate == "tanh":
        square = jnp.minimum(x * x, 100.0)  # past it tanh is −1 or 1, and a square that overflows gives NaN gradients
        # (1 + tanh u) / 2 as a sigmoid: its slope does not cancel where tanh is near 1.
        return x * jax.nn.sigmoid(2 * SQRT_2_OVER_PI * (x + 0.044715 * x * square))
    return 0.5 * x * (1 + jax.scipy.special.erf(x / math.sqrt(2)))


def rms(jax: Any, x: Any, axes: tuple[int, ...], eps: float) -> Any:
    """Rows divided by their root mean square."""
    return x * jax.lax.rsqrt(jax.numpy.mean(x * x, axes, keepdims=True) + eps)


def centred(jax: Any, x: Any, axes: tuple[int, ...]) -> Any:
    """`x` less its mean; twice, since rounding the first mean leaves a second one."""
    x = x - jax.numpy.mean(x, axes, keepdims=True)
    return x - jax.numpy.mean(x, axes, keepdims=True)


def affine(x: Any, weight: Any, bias: Any) -> Any:
    if weight is not None:
        x = x * weight.astype(x.dtype)
    return x if bias is None else x + bias.astype(x.dtype)


def kept(jax: Any, shape: tuple[int, ...], seed: int, p: float) -> Any:
    """Dropout's mask, bit for bit that of :mod:`kernel_ladder.semantics.philox`, in 32-bit words."""
    jnp = jax.numpy
    index = jnp.arange(math.prod(shape), dtype=jnp.uint32)
    zero = jnp.zeros_like(index)
    place = index & 7

    def halves(part: int) -> Any:
        words = _philox(jax, (index >> 3, zero, zero + jnp.uint32(part), zero), seed)
        of_place = jnp.select([(place & 3) == i for i in range(4)], list(words))
        return jnp.where(place < 4, of_place >> 16, of_place & 0xFFFF)

    word = halves(0) << 16 | halves(1)
    return (word >= jnp.uint32(philox.threshold(p))).reshape(shape)


def _philox(jax: Any, counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[Any, Any, Any, Any]:
    u32 = jax.numpy.uint32
    c0, c1, c2, c3 = counter
    k0, k1 = seed & philox.WORD, seed >> 32
    m0, m1 = u32(philox.M0), u32(philox.M1)
    for _ in range(philox.ROUNDS):
        high0, high1 = jax.lax.mulhi(c0, jax.numpy.full_like(c0, m0)), jax.lax.mulhi(c2, jax.numpy.full_like(c2, m1))
        c0, c1, c2, c3 = high1 ^ c1 ^ u32(k0), c2 * m1, high0 ^ c3 ^ u32(k1), c0 * m0
        k0, k1 = k0 + philox.W0 & philox.WORD, k1 + philox.W1 & philox.WORD
    return c0, c1, c2, c3


def softmax_of_scores(jax: Any, scores: Any, value: Any, matmul: Any) -> tuple[Any, Any]:
    """Weights times values, and the log-sum-exp. A row of nothing but −inf gives zeros, and −inf."""
    jnp = jax.numpy
    row_max = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
    row_max = jnp.where(jnp.isneginf(row_max), 0, row_max)
    exp = jnp.exp(scores - row_max)
    row_sum = jnp.sum(exp, -1, keepdims=True)
    nothing = row_sum == 0
    safe = jnp.where(nothing, 1, row_sum)
    output = matmul(exp / safe, value)
    return output, jnp.where(nothing, -jnp.inf, row_max + jnp.log(safe))[..., 0]


def product(jax: Any, a: Any, b: Any) -> Any:
    """A matrix product of operands in float32 or wider, at their full precision."""
    return jax.numpy.matmul(a, b, precision="highest")
