"""What the formulas share: the dtype they compute in, GELU, normalised rows, dropout's mask."""

from __future__ import annotations

import functools
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
        return x * _sigmoid(jax)(2 * SQRT_2_OVER_PI * (x + 0.044715 * x * square))  # (1 + tanh u) / 2 is σ(2u)
    return 0.5 * x * (1 + jax.scipy.special.erf(x / math.sqrt(2)))


@functools.cache
def _sigmoid(jax: Any) -> Any:
    """σ with the derivative σ(z) · σ(−z). JAX's own, σ · (1 − σ), cancels where σ is near 1."""

    @jax.custom_jvp
    def sigmoid(z: Any) -> Any:
        return jax.nn.sigmoid(z)

    @sigmoid.defjvp
    def derivative(at: tuple[Any], tangent: tuple[Any]) -> tuple[Any, Any]:
        value = jax.nn.sigmoid(at[0])
        return value, value * jax.nn.sigmoid(-at[0]) * tangent[0]

    return sigmoid


def rms_normalised(jax: Any, x: Any, axes: tuple[int, ...], eps: float) -> Any:
    """Rows divided by their root mean square."""
    return x * jax.lax.rsqrt(jax.numpy.mean(x * x, axes, keepdims=True) + eps)


def normalised(jax: Any, x: Any, axes: tuple[int, ...], eps: float) -> Any:
    """Rows of mean zero and variance one, by the corrected two-pass algorithm (Chan, Golub and LeVeque, 1983).

    The first mean is rounded. So the deviations from it have a mean of their own, which is subtracted from them and
    from their mean square. Both means come from one pass. No gradient passes through the first mean, because the result
    does not depend on it.
    """
    jnp = jax.numpy
    deviation = x - jax.lax.stop_gradient(jnp.mean(x, axes, keepdims=True))
    left = jnp.mean(deviation, axes, keepdims=True)
    variance = jnp.mean(deviation * deviation, axes, keepdims=True) - left * left
    return (deviation - left) * jax.lax.rsqrt(variance + eps)


def affine(x: Any, weight: Any, bias: Any) -> Any:
    if weight is not None:
        x = x * weight.astype(x.dtype)
    return x if bias is None else x + bias.astype(x.dtype)


def kept(jax: Any, shape: tuple[int, ...], seed: Any, p: float) -> Any:
    """Dropout's mask, bit for bit that of :mod:`kernel_ladder.semantics.philox`, in 32-bit words.

    Every element computes the words of its group of eight and selects one: a fused loop has no words to share.
    """
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


def dropped(jax: Any, x: Any, seed: Any, p: float) -> Any:
    """`x` with dropout. A dropped infinity or NaN gives NaN, as in a product with the mask.

    XLA's GPU compiler rewrites a product with a mask into a selection of 0, which hides them. So zero times `x` is
    selected here.
    """
    jnp = jax.numpy
    return jnp.where(kept(jax, x.shape, seed, p), x * jnp.asarray(philox.scale(p), x.dtype), x * 0)


def _philox(jax: Any, counter: tuple[Any, Any, Any, Any], seed: Any) -> tuple[Any, Any, Any, Any]:
    """Four words for each counter; `seed` is an array of two words, the lower first."""
    u32 = jax.numpy.uint32
    c0, c1, c2, c3 = counter
    k0, k1 = seed[0], seed[1]
    m0, m1 = u32(philox.M0), u32(philox.M1)
    for _ in range(philox.ROUNDS):
        high0, high1 = jax.lax.mulhi(c0, jax.numpy.full_like(c0, m0)), jax.lax.mulhi(c2, jax.numpy.full_like(c2, m1))
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, c2 * m1, high0 ^ c3 ^ k1, c0 * m0
        k0, k1 = k0 + u32(philox.W0), k1 + u32(philox.W1)
    return c0, c1, c2, c3


def product(jax: Any, a: Any, b: Any) -> Any:
    """A matrix product in the operands' dtype, with float32 sums for the 16-bit ones. No TF32 for float32."""
    return jax.numpy.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


@functools.cache
def scores_of(jax: Any) -> Any:
    """``scores_of(jax)(query, key)``: query · keyᵀ in float32 or wider.

    The gradient of 16-bit operands is rounded to their dtype, as FlashAttention does. Else its products would have one
    operand in float32, and no tensor cores.
    """
    jnp = jax.numpy

    def scores(query: Any, key: Any) -> Any:
        kind = jnp.float32 if query.dtype.itemsize == 2 else query.dtype
        keys = jnp.swapaxes(key, -1, -2)
        return jnp.matmul(query, keys, precision=jax.lax.Precision.HIGHEST, preferred_element_type=kind)

    def backward(saved: tuple[Any, Any], grad: Any) -> tuple[Any, Any]:
        query, key = saved
        grad = grad.astype(query.dtype)
        return product(jax, grad, key), product(jax, jnp.swapaxes(grad, -1, -2), query)

    wrapped = jax.custom_vjp(scores)
    wrapped.defvjp(lambda query, key: (scores(query, key), (query, key)), backward)
    return wrapped


def weighted(jax: Any, scores: Any, value: Any) -> tuple[Any, Any]:
    """Softmax of the scores, times the values; and the log-sum-exp. A row of nothing but −inf gives zeros, and −inf."""
    jnp = jax.numpy
    row_max = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
    row_max = jnp.where(jnp.isneginf(row_max), 0, row_max)
    exp = jnp.exp(scores - row_max)
    row_sum = jnp.sum(exp, -1, keepdims=True)
    nothing = row_sum == 0
    safe = jnp.where(nothing, 1, row_sum)
    output = product(jax, (exp / safe).astype(value.dtype), value)
    return output, jnp.where(nothing, -jnp.inf, row_max + jnp.log(safe))[..., 0]


def in_groups(jax: Any, query: Any, x: Any, heads: int) -> Any:
    """Key or value with a head for every head of `query`: each is repeated for its group. `heads` is their axis."""
    return jax.numpy.repeat(x, query.shape[heads] // x.shape[heads], heads) if x.shape[heads] else x


def without_keys(jax: Any, query: Any, key: Any, value: Any, return_lse: bool) -> Any:
    """The result where there is no key to see: zeros, and −inf as the log-sum-exp."""
    jnp = jax.numpy
    output = product(jax, product(jax, query, jnp.swapaxes(key, -1, -2)), value)
    kind = jnp.float32 if query.dtype.itemsize == 2 else query.dtype
    return (output, jnp.full(query.shape[:-1], -jnp.inf, kind)) if return_lse else output
