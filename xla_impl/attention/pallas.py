"""attention, rung 3 of 3: pallas

Idea      FlashAttention-2 (Dao, arXiv:2307.08691) as Pallas kernels: a block of queries per program, keys and values
          in a loop, an online softmax in registers.
Predicts  No scores in memory: reads of 2·S_k·D elements per block of queries, instead of passes over S_q·S_k scores.
Limit now Masks are tested in every tile, tile sizes are fixed, and the backward pass computes the forward again.
Next      triton `flash`: unmasked inner tiles, tuned sizes, any strides.

Takes causal masks, windows and grouped heads. The backward pass has one kernel for the gradient of the queries and one
for those of keys and values; neither needs atomics, so results are the same in every run.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from kernel_ladder.semantics.masks import NO_WINDOW, band
from xla_impl import pallas
from xla_impl.formulas import without_keys
from xla_impl.lazy import jax, jnp, lax, pl

BLOCK_Q = 64
BLOCK_K = 64


class Shape(NamedTuple):
    """What a kernel is compiled for; `first` and `last` are those of :func:`kernel_ladder.semantics.masks.band`."""

    seqlen_q: int
    seqlen_k: int
    group: int  # query heads per head of keys and values
    scale: float
    first: int
    last: int
    block_q: int
    block_k: int
    block_d: int
    block_dv: int


def _scores(q: Any, k: Any, start_q: Any, start_k: Any, shape: Shape) -> Any:
    """Scaled scores of a tile in float32, −inf where a query does not see a key."""
    tile = (shape.block_q, shape.block_k)
    row = start_q + lax.broadcasted_iota(jnp.int32, tile, 0)
    column = start_k + lax.broadcasted_iota(jnp.int32, tile, 1)
    seen = (column < shape.seqlen_k) & (column >= row + shape.first) & (column <= row + shape.last)
    return jnp.where(seen, pallas.dot(q, k, trans_b=True) * shape.scale, -jnp.inf)


def _key_range(start_q: Any, shape: Shape) -> tuple[Any, Any]:
    """The tiles of keys, from and to, that some query of a block sees."""
    first = lax.max(start_q + shape.first, 0) // shape.block_k
    last = lax.min(start_q + shape.block_q + shape.last, shape.seqlen_k)
    return first, lax.max(last + shape.block_k - 1, 0) // shape.block_k


def _query_range(start_k: Any, shape: Shape) -> tuple[Any, Any]:
    """The tiles of queries, from and to, that see some key of a block."""
    first = lax.max(start_k - shape.last, 0) // shape.block_q
    last = lax.min(start_k + shape.block_k - shape.first, shape.seqlen_q)
    return first, lax.max(last + shape.block_q - 1, 0) // shape.block_q


def _forward_kernel(q_ref: Any, k_ref: Any, v_ref: Any, o_ref: Any, lse_ref: Any, *, shape: Shape) -> None:
    """Grid: (batch · query heads, tiles of queries). Log-sum-exp (heads, S_q) is in natural logarithms."""
    head, start_q = pl.program_id(0), pl.program_id(1) * shape.block_q
    kv_head = head // shape.group
    q = pallas.load(q_ref, (head,), (start_q, 0), (shape.block_q, shape.block_d))

    def step(i: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        row_max, row_sum, total = state
        start_k = i * shape.block_k
        k = pallas.load(k_ref, (kv_head,), (start_k, 0), (shape.block_k, shape.block_d))
        v = pallas.load(v_ref, (kv_head,), (start_k, 0), (shape.block_k, shape.block_dv))
        scores = _scores(q, k, start_q, start_k, shape)
        new_max = jnp.maximum(row_max, jnp.max(scores, 1))
        shift = jnp.where(new_max == -jnp.inf, 0.0, new_max)  # of a row that has seen no key yet
        weights = jnp.exp(scores - shift[:, None])
        decay = jnp.exp(row_max - shift)
        total = total * decay[:, None] + pallas.dot(weights.astype(v.dtype), v)
        return new_max, row_sum * decay + jnp.sum(weights, 1), total

    rows = (shape.block_q,)
    state = jnp.full(rows, -jnp.inf), jnp.zeros(rows), jnp.zeros((shape.block_q, shape.block_dv))
    row_max, row_sum, total = lax.fori_loop(*_key_range(start_q, shape), step, state)
    safe = jnp.where(row_sum == 0, 1.0, row_sum)
    pallas.store(o_ref, total / safe[:, None], (head,), (start_q, 0), (shape.block_q, shape.block_dv))
    lse = jnp.where(row_sum == 0, -jnp.inf, row_max + jnp.log(safe))
    pallas.store(lse_ref, lse, (head,), (start_q,), rows)


def _gradient_tile(
    q: Any, k: Any, v: Any, grad: Any, lse: Any, delta: Any, start_q: Any, start_k: Any, shape: Shape
) -> tuple[Any, Any]:
    """Weights P of a tile, and the gradient of its scores, P · (dO · Vᵀ − delta)."""
    shift = jnp.where(lse == -jnp.inf, 0.0, lse)[:, None]
    weights = jnp.exp(_scores(q, k, start_q, start_k, shape) - shift)
    return weights, weights * (pallas.dot(grad, v, trans_b=True) - delta[:, None])


def _load_queries(refs: tuple[Any, ...], head: Any, start_q: Any, shape: Shape) -> tuple[Any, ...]:
    """A block of queries, output gradients, log-sum-exps and deltas. Rows outside see nothing."""
    q_ref, grad_ref, lse_ref, delta_ref = refs
    q = pallas.load(q_ref, (head,), (start_q, 0), (shape.block_q, shape.block_d))
    grad = pallas.load(grad_ref, (head,), (start_q, 0), (shape.block_q, shape.block_dv))
    lse = pallas.load(lse_ref, (head,), (start_q,), (shape.block_q,), jnp.inf)
    return q, grad, lse, pallas.load(delta_ref, (head,), (start_q,), (shape.block_q,))


def _query_gradient_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, grad_ref: Any, lse_ref: Any, delta_ref: Any, out_ref: Any, *, shape: Shape
) -> None:
    """dQ = scale · dS · K. Grid: (batch · query heads, tiles of queries)."""
    head, start_q = pl.program_id(0), pl.program_id(1) * shape.block_q
    q, grad, lse, delta = _load_queries((q_ref, grad_ref, lse_ref, delta_ref), head, start_q, shape)

    def step(i: Any, total: Any) -> Any:
        start_k = i * shape.block_k
        k = pallas.load(k_ref, (head // shape.group,), (start_k, 0), (shape.block_k, shape.block_d))
        v = pallas.load(v_ref, (head // shape.group,), (start_k, 0), (shape.block_k, shape.block_dv))
        _, of_scores = _gradient_tile(q, k, v, grad, lse, delta, start_q, start_k, shape)
        return total + pallas.dot(of_scores.astype(k.dtype), k)

    total = lax.fori_loop(*_key_range(start_q, shape), step, jnp.zeros((shape.block_q, shape.block_d)))
    pallas.store(out_ref, total * shape.scale, (head,), (start_q, 0), (shape.block_q, shape.block_d))


def _key_value_gradient_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    grad_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
    *,
    shape: Shape,
) -> None:
    """dV = Pᵀ · dO and dK = scale · dSᵀ · Q, summed over a group. Grid: (batch · heads of keys, tiles of keys)."""
    kv_head, start_k = pl.program_id(0), pl.program_id(1) * shape.block_k
    k = pallas.load(k_ref, (kv_head,), (start_k, 0), (shape.block_k, shape.block_d))
    v = pallas.load(v_ref, (kv_head,), (start_k, 0), (shape.block_k, shape.block_dv))

    def of_head(member: Any, totals: tuple[Any, Any]) -> tuple[Any, Any]:
        head = kv_head * shape.group + member

        def step(i: Any, totals: tuple[Any, Any]) -> tuple[Any, Any]:
            start_q = i * shape.block_q
            q, grad, lse, delta = _load_queries((q_ref, grad_ref, lse_ref, delta_ref), head, start_q, shape)
            weights, of_scores = _gradient_tile(q, k, v, grad, lse, delta, start_q, start_k, shape)
            dk = totals[0] + pallas.dot(of_scores.astype(q.dtype), q, trans_a=True)
            return dk, totals[1] + pallas.dot(weights.astype(grad.dtype), grad, trans_a=True)

        found: tuple[Any, Any] = lax.fori_loop(*_query_range(start_k, shape), step, totals)
        return found

    zeros = jnp.zeros((shape.block_k, shape.block_d)), jnp.zeros((shape.block_k, shape.block_dv))
    dk, dv = lax.fori_loop(0, shape.group, of_head, zeros)
    pallas.store(dk_ref, dk * shape.scale, (kv_head,), (start_k, 0), (shape.block_k, shape.block_d))
    pallas.store(dv_ref, dv, (kv_head,), (start_k, 0), (shape.block_k, shape.block_dv))


def _forward(q: Any, k: Any, v: Any, shape: Shape) -> tuple[Any, Any]:
    grid = q.shape[0], pl.cdiv(shape.seqlen_q, shape.block_q)
    outputs = [((*q.shape[:2], v.shape[2]), q.dtype), (q.shape[:2], jnp.float32)]
    found = pallas.launch(functools.partial(_forward_kernel, shape=shape), grid, outputs, q, k, v, warps=4, stages=2)
    return found[0], found[1]


def _backward(shape: Shape, saved: tuple[Any, ...], grads: tuple[Any, Any]) -> tuple[Any, Any, Any]:
    q, k, v, output, lse = saved
    grad, of_lse = grads
    # The gradient of the log-sum-exp adds itself times P to that of the scores.
    delta = jnp.sum(output.astype(jnp.float32) * grad.astype(jnp.float32), -1) - of_lse
    arrays = q, k, v, grad, lse, delta
    of_query = functools.partial(_query_gradient_kernel, shape=shape)
    grid = q.shape[0], pl.cdiv(shape.seqlen_q, shape.block_q)
    (dq,) = pallas.launch(of_query, grid, [(q.shape, q.dtype)], *arrays, warps=4, stages=2)
    of_others = functools.partial(_key_value_gradient_kernel, shape=shape)
    grid = k.shape[0], pl.cdiv(shape.seqlen_k, shape.block_k)
    outputs = [(k.shape, k.dtype), (v.shape, v.dtype)]
    dk, dv = pallas.launch(of_others, grid, outputs, *arrays, warps=4, stages=2)
    return dq, dk, dv


@functools.cache
def _flash() -> Any:
    """Attention of (heads, S, D) arrays, and its log-sum-exp, with gradients."""
    flash = jax.custom_vjp(_forward, nondiff_argnums=(3,))

    def forward(q: Any, k: Any, v: Any, shape: Shape) -> tuple[Any, Any]:
        output, lse = _forward(q, k, v, shape)
        return (output, lse), (q, k, v, output, lse)

    flash.defvjp(forward, _backward)
    return flash


def formula(
    _: Any,
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
    """FlashAttention-2, by Pallas kernels."""
    lengths = query.shape[-2], key.shape[-2]
    if 0 in (*query.shape, *key.shape, *value.shape):
        return without_keys(jax, query, key, value, return_lse)
    q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (query, key, value))
    shape = Shape(
        *lengths,
        q.shape[0] // k.shape[0],
        query.shape[-1] ** -0.5 if scale is None else float(scale),
        *band(is_causal, window_size, *lengths),
        pallas.block(lengths[0], BLOCK_Q),
        pallas.block(lengths[1], BLOCK_K),
        pallas.block(q.shape[-1], 256),
        pallas.block(v.shape[-1], 256),
    )
    output, lse = _flash()(q, k, v, shape)
    output = output.reshape(*query.shape[:-1], v.shape[-1])
    return (output, lse.reshape(query.shape[:-1])) if return_lse else output


def unsupported(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    **options: Any,
) -> str | None:
    if attn_mask is not None:
        return "takes positional masks alone, not `attn_mask`"
    if max(query.shape[-1], value.shape[-1]) > 256:
        return f"head dimensions of up to 256 fit in registers, got {max(query.shape[-1], value.shape[-1])}"
    return pallas.unsupported(query)
