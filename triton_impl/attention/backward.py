"""Gradients of attention, shared by the rungs `flash`, `tma`, `warp_specialized` and `split_kv`.

Idea      FlashAttention-2's backward (Dao, arXiv:2307.08691, algorithm 2). Scores and weights are recomputed tile by
          tile from the saved log-sum-exp. With weights P, output gradient dO and delta = Σ_d dO · O per row:

              dV = Pᵀ dO      dP = dO Vᵀ      dS = P ∘ (dP − delta)      dQ = scale · dS K      dK = scale · dSᵀ Q

Kernels   `_delta_kernel` (``delta.py``). `_key_value_kernel` takes a tile of keys and loops over the queries of every
          head that shares them, for dK and dV. `_query_kernel` takes a tile of queries and loops over the keys, for dQ.
Limit now Seven products where five suffice: each of the two kernels recomputes S and dP.
          In return nothing is added atomically, and results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from kernel_ladder.spec import Output
from kernel_ladder.tracing import shapes_only
from triton_impl.attention.call import Call
from triton_impl.attention.delta import launch_delta
from triton_impl.attention.mask_grad import mask_gradient
from triton_impl.attention.tiles import (
    BELOW_DIAGONAL,
    TUNING_KEY,
    UNSPECIALIZED,
    TileTable,
    apply_mask,
    choose,
    configs,
    drop_factors,
    key_range,
    load_lse,
    load_tile,
    mask_pointers,
    needs_int64,
    program_tile,
    recompute_weights,
    section,
    seqlen_class,
    sequence,
    store_tile,
)
from triton_impl.common.dot import dot
from triton_impl.runtime.autotuned_kernel import AutotunedKernel
from triton_impl.runtime.launch_cache import LaunchCache

#: A multiple of every BLOCK_M: a number of queries that it divides leaves no partial tile.
MAX_BLOCK_M = 64


KEY_VALUE_TILES: TileTable = {
    -64: ((32, 64, 4, 1), (32, 32, 4, 1)),
    -128: ((32, 32, 8, 1), (32, 16, 8, 1)),
    -256: ((32, 16, 8, 1), (16, 16, 8, 1)),
    64: ((64, 128, 8, 2), (64, 64, 4, 2), (32, 64, 4, 2)),
    128: ((32, 128, 8, 2), (32, 128, 8, 3), (64, 128, 8, 2), (32, 64, 4, 2)),
    256: ((32, 64, 8, 2), (64, 64, 8, 1), (32, 32, 8, 2)),
}
QUERY_TILES: TileTable = {
    -64: ((64, 32, 4, 1), (32, 32, 4, 1)),
    -128: ((32, 32, 8, 1), (16, 32, 8, 1)),
    -256: ((16, 16, 8, 1),),
    64: ((128, 64, 8, 2), (128, 64, 4, 2), (64, 64, 4, 2)),
    128: ((128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
    256: ((128, 32, 8, 2), (64, 32, 8, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
}


@triton.jit
def _gather_queries(
    grad_k, grad_v, k, v, q_base, g_base, mask_base, lse_base, delta_base, num_rows, start_n, start, end,
    scale_log2, first, last, q_s, q_d, g_s, g_d, m_q, m_k, seqlen_q, seqlen_k, head_dim, head_dim_v,
    head, key_low, key_high, threshold, drop_scale,
    DROPOUT: tl.constexpr, MASKED: tl.constexpr, BAND: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, INT64_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Add the contributions of queries ``start … end`` to the gradients of BLOCK_N keys and values.

    Scores are transposed: keys are rows.
    """
    for start_m in range(start, end, BLOCK_M):
        start_m = tl.multiple_of(start_m, BLOCK_M)
        rows = start_m + tl.arange(0, BLOCK_M)
        q = load_tile(
            q_base, start_m, q_s, q_d, seqlen_q, head_dim, BLOCK_M, BLOCK_D, not MASKED, EVEN_D, INT64_OFFSETS
        )
        inside = rows < seqlen_q if MASKED else None
        row_max, lse = load_lse(lse_base + rows, num_rows, inside, MASK)
        delta = tl.load(delta_base + rows, mask=inside)
        scores = dot(k, tl.trans(q), None, PRECISION)
        if MASKED:
            delta = tl.where(inside, delta, 0.0)
            inner_rows = tl.arange(0, BLOCK_M)[None, :]
            cols = tl.arange(0, BLOCK_N)[:, None]
            mask = mask_pointers(mask_base, start_m, start_n, inner_rows, cols, m_q, m_k, INT64_OFFSETS)
            scores = apply_mask(
                scores, scale_log2, mask, rows[None, :], start_n + cols, seqlen_q, seqlen_k, first, last, BAND, MASK
            )
        weights = recompute_weights(scores, scale_log2, row_max[None, :], lse[None, :], MASK)
        g = load_tile(
            g_base, start_m, g_s, g_d, seqlen_q, head_dim_v, BLOCK_M, BLOCK_DV, not MASKED, EVEN_DV, INT64_OFFSETS
        )
        kept = weights
        if DROPOUT != 0:
            drop = drop_factors(
                head, start_m, start_n, seqlen_q, seqlen_k, key_low, key_high, threshold, drop_scale,
                DROPOUT, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            drop = tl.trans(drop)
            kept = weights * drop
        grad_v = dot(kept.to(g.dtype), g, grad_v, PRECISION)
        grad_weights = dot(v, tl.trans(g), None, PRECISION)
        if DROPOUT != 0:
            grad_weights *= drop
        grad_scores = weights * (grad_weights - delta[None, :])
        grad_k = dot(grad_scores.to(q.dtype), q, grad_k, PRECISION)
    return grad_k, grad_v


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _key_value_kernel(
    grad_k_ptr, grad_v_ptr, grad_ptr, lse_ptr, delta_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, cu_q_ptr, cu_k_ptr,
    key_low, key_high, threshold, drop_scale, scale_log2, scale,
    dk_b, dk_h, dk_s, dk_d, dv_b, dv_h, dv_s, dv_d, g_b, g_h, g_s, g_d,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, m_b, m_h, m_q, m_k, lse_b, lse_h,
    num_heads_kv, heads_kv, group, seqlen_q, seqlen_k, head_dim, head_dim_v, first, last, section, seqlen_class,
    total_q, total_k,
    BAND: tl.constexpr, MASK: tl.constexpr, VARLEN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
    INT64_OFFSETS: tl.constexpr, EVEN_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``dK = scale · dSᵀ Q`` and ``dV = Pᵀ dO`` of a tile of keys.

    Grid: (⌈S_k / BLOCK_N⌉ · B · H_kv,), see :func:`program_tile`. Layout: operands (B, H, S, D) by strides, or packed.
    """
    # Most queries see the first keys: the order of tiles puts the longest first.
    tile, head = program_tile(tl.cdiv(seqlen_k, BLOCK_N), num_heads_kv, section)
    b, h_kv = (head // heads_kv).to(tl.int64), (head % heads_kv).to(tl.int64)
    start_n = tile * BLOCK_N
    row_offset = b * lse_b
    num_rows = tl.cast(num_heads_kv, tl.int64) * group * lse_h
    if VARLEN:
        q_start, seqlen_q = sequence(cu_q_ptr, b, total_q)
        k_start, seqlen_k = sequence(cu_k_ptr, b, total_k)
        first += seqlen_k - seqlen_q
        last += seqlen_k - seqlen_q
        seqlen_q = tl.where(start_n < seqlen_k, seqlen_q, 0)  # a program past the last key has no queries
        q_ptr += q_start * q_s
        grad_ptr += q_start * g_s
        row_offset += q_start
        k_ptr += k_start * k_s
        v_ptr += k_start * v_s
        grad_k_ptr += k_start * dk_s
        grad_v_ptr += k_start * dv_s
    k = load_tile(
        k_ptr + b * k_b + h_kv * k_h, start_n, k_s, k_d, seqlen_k, head_dim, BLOCK_N, BLOCK_D, False, EVEN_D,
        INT64_OFFSETS,
    )  # fmt: skip
    v = load_tile(
        v_ptr + b * v_b + h_kv * v_h, start_n, v_s, v_d, seqlen_k, head_dim_v, BLOCK_N, BLOCK_DV, False, EVEN_DV,
        INT64_OFFSETS,
    )  # fmt: skip
    grad_k = tl.full([BLOCK_N, BLOCK_D], 0.0, dtype=tl.float32)
    grad_v = tl.full([BLOCK_N, BLOCK_DV], 0.0, dtype=tl.float32)

    # Three loops over queries: on the diagonal, those that see every key of the tile, and the partial last tile. One
    # loop where every score must be tested, and for packed sequences, whose offsets leave no registers for three.
    TEST_ALL: tl.constexpr = BAND == 2 or MASK != 0 or VARLEN
    whole = seqlen_q // BLOCK_M * BLOCK_M
    begin, diagonal, end = 0, 0, seqlen_q
    if BAND != 0:
        begin = tl.maximum(start_n - last, 0) // BLOCK_M * BLOCK_M
        diagonal = tl.minimum(tl.cdiv(tl.maximum(start_n + BLOCK_N - 1 - last, 0), BLOCK_M) * BLOCK_M, seqlen_q)
    if BAND == 2:
        end = tl.minimum(seqlen_q, tl.maximum(start_n + BLOCK_N - first, 0))
    if TEST_ALL:
        diagonal = end
    for i in range(group):
        h = h_kv * group + i
        q_base = q_ptr + b * q_b + h * q_h
        g_base = grad_ptr + b * g_b + h * g_h
        mask_base = mask_ptr + b * m_b + h * m_h
        lse_base = lse_ptr + row_offset + h * lse_h
        delta_base = delta_ptr + row_offset + h * lse_h
        if BAND != 0 or TEST_ALL:
            grad_k, grad_v = _gather_queries(
                grad_k, grad_v, k, v, q_base, g_base, mask_base, lse_base, delta_base, num_rows, start_n,
                begin, diagonal, scale_log2, first, last, q_s, q_d, g_s, g_d, m_q, m_k,
                seqlen_q, seqlen_k, head_dim, head_dim_v,
                b * (heads_kv * group) + h, key_low, key_high, threshold, drop_scale, DROPOUT,
                True, BAND, MASK, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, INT64_OFFSETS,
            )  # fmt: skip
        if not TEST_ALL:
            grad_k, grad_v = _gather_queries(
                grad_k, grad_v, k, v, q_base, g_base, mask_base, lse_base, delta_base, num_rows, start_n,
                diagonal, whole, scale_log2, first, last, q_s, q_d, g_s, g_d, m_q, m_k,
                seqlen_q, seqlen_k, head_dim, head_dim_v,
                b * (heads_kv * group) + h, key_low, key_high, threshold, drop_scale, DROPOUT,
                False, 0, 0, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, INT64_OFFSETS,
            )  # fmt: skip
        if not TEST_ALL and not EVEN_Q:
            grad_k, grad_v = _gather_queries(
                grad_k, grad_v, k, v, q_base, g_base, mask_base, lse_base, delta_base, num_rows, start_n,
                tl.maximum(diagonal, whole), seqlen_q, scale_log2, first, last, q_s, q_d, g_s, g_d, m_q, m_k,
                seqlen_q, seqlen_k, head_dim, head_dim_v,
                b * (heads_kv * group) + h, key_low, key_high, threshold, drop_scale, DROPOUT,
                True, 0, 0, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, INT64_OFFSETS,
            )  # fmt: skip

    store_tile(
        grad_k_ptr + b * dk_b + h_kv * dk_h, start_n, dk_s, dk_d, seqlen_k, head_dim, grad_k * scale,
        BLOCK_N, BLOCK_D, INT64_OFFSETS,
    )  # fmt: skip
    store_tile(
        grad_v_ptr + b * dv_b + h_kv * dv_h, start_n, dv_s, dv_d, seqlen_k, head_dim_v, grad_v, BLOCK_N, BLOCK_DV,
        INT64_OFFSETS,
    )  # fmt: skip


@triton.jit
def _gather_keys(
    grad_q, q, g, row_max, lse, delta, k_base, v_base, mask_base, start_m, start, end, scale_log2, first, last,
    k_s, k_d, v_s, v_d, m_q, m_k, seqlen_q, seqlen_k, head_dim, head_dim_v,
    head, key_low, key_high, threshold, drop_scale,
    DROPOUT: tl.constexpr, MASKED: tl.constexpr, BAND: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, INT64_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Add the contributions of keys ``start … end`` to the gradient of BLOCK_M queries."""
    for start_n in range(start, end, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        k = load_tile(
            k_base, start_n, k_s, k_d, seqlen_k, head_dim, BLOCK_N, BLOCK_D, not MASKED, EVEN_D, INT64_OFFSETS
        )
        scores = dot(q, tl.trans(k), None, PRECISION)
        if MASKED:
            rows = tl.arange(0, BLOCK_M)[:, None]
            cols = tl.arange(0, BLOCK_N)[None, :]
            mask = mask_pointers(mask_base, start_m, start_n, rows, cols, m_q, m_k, INT64_OFFSETS)
            scores = apply_mask(
                scores, scale_log2, mask, start_m + rows, start_n + cols, seqlen_q, seqlen_k, first, last, BAND, MASK
            )
        weights = recompute_weights(scores, scale_log2, row_max[:, None], lse[:, None], MASK)
        v = load_tile(
            v_base, start_n, v_s, v_d, seqlen_k, head_dim_v, BLOCK_N, BLOCK_DV, not MASKED, EVEN_DV, INT64_OFFSETS
        )
        grad_weights = dot(g, tl.trans(v), None, PRECISION)
        if DROPOUT != 0:
            grad_weights *= drop_factors(
                head, start_m, start_n, seqlen_q, seqlen_k, key_low, key_high, threshold, drop_scale,
                DROPOUT, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        grad_scores = weights * (grad_weights - delta[:, None])
        grad_q = dot(grad_scores.to(k.dtype), k, grad_q, PRECISION)
    return grad_q


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _query_kernel(
    grad_q_ptr, grad_ptr, lse_ptr, delta_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, cu_q_ptr, cu_k_ptr,
    key_low, key_high, threshold, drop_scale, scale_log2, scale,
    dq_b, dq_h, dq_s, dq_d, g_b, g_h, g_s, g_d, q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d,
    m_b, m_h, m_q, m_k, lse_b, lse_h,
    num_heads, heads, group, seqlen_q, seqlen_k, head_dim, head_dim_v, first, last, section, seqlen_class,
    total_q, total_k,
    BAND: tl.constexpr, MASK: tl.constexpr, VARLEN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
    INT64_OFFSETS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``dQ = scale · dS K`` of a tile of queries.

    Grid: (⌈S_q / BLOCK_M⌉ · B · H,), see :func:`program_tile`. Layout: operands (B, H, S, D) by strides, or packed.
    """
    num_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, head = program_tile(num_tiles, num_heads, section)
    if BAND == 1:
        tile = num_tiles - 1 - tile  # the longest first
    b, h = (head // heads).to(tl.int64), head % heads
    h_kv = (h // group).to(tl.int64)
    h = h.to(tl.int64)
    start_m = tile * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)
    row_offset = b * lse_b + h * lse_h
    if VARLEN:
        q_start, seqlen_q = sequence(cu_q_ptr, b, total_q)
        k_start, seqlen_k = sequence(cu_k_ptr, b, total_k)
        first += seqlen_k - seqlen_q
        last += seqlen_k - seqlen_q
        seqlen_k = tl.where(start_m < seqlen_q, seqlen_k, 0)  # a program past the last query has no keys
        q_ptr += q_start * q_s
        grad_ptr += q_start * g_s
        grad_q_ptr += q_start * dq_s
        row_offset += q_start
        k_ptr += k_start * k_s
        v_ptr += k_start * v_s
    q = load_tile(
        q_ptr + b * q_b + h * q_h, start_m, q_s, q_d, seqlen_q, head_dim, BLOCK_M, BLOCK_D, False, EVEN_D, INT64_OFFSETS
    )
    g = load_tile(
        grad_ptr + b * g_b + h * g_h, start_m, g_s, g_d, seqlen_q, head_dim_v, BLOCK_M, BLOCK_DV, False, EVEN_DV,
        INT64_OFFSETS,
    )  # fmt: skip
    num_rows = tl.cast(num_heads, tl.int64) * lse_h
    row_max, lse = load_lse(lse_ptr + row_offset + rows, num_rows, rows < seqlen_q, MASK)
    delta = tl.load(delta_ptr + row_offset + rows, mask=rows < seqlen_q, other=0.0)
    k_base = k_ptr + b * k_b + h_kv * k_h
    v_base = v_ptr + b * v_b + h_kv * v_h
    grad_q = tl.full([BLOCK_M, BLOCK_D], 0.0, dtype=tl.float32)

    mask_base = mask_ptr + b * m_b + h * m_h
    begin, whole, end = key_range(start_m, seqlen_k, first, last, BAND, BLOCK_M, BLOCK_N)
    if BAND != 2 and MASK == 0:
        grad_q = _gather_keys(
            grad_q, q, g, row_max, lse, delta, k_base, v_base, mask_base, start_m, 0, whole, scale_log2, first, last,
            k_s, k_d, v_s, v_d, m_q, m_k, seqlen_q, seqlen_k, head_dim, head_dim_v,
            head, key_low, key_high, threshold, drop_scale, DROPOUT,
            False, BAND, MASK, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, INT64_OFFSETS,
        )  # fmt: skip
        begin = whole
    grad_q = _gather_keys(
        grad_q, q, g, row_max, lse, delta, k_base, v_base, mask_base, start_m, begin, end, scale_log2, first, last,
        k_s, k_d, v_s, v_d, m_q, m_k, seqlen_q, seqlen_k, head_dim, head_dim_v,
        head, key_low, key_high, threshold, drop_scale, DROPOUT,
        True, BAND, MASK, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN_D, EVEN_DV, INT64_OFFSETS,
    )  # fmt: skip
    store_tile(
        grad_q_ptr + b * dq_b + h * dq_h, start_m, dq_s, dq_d, seqlen_q, head_dim, grad_q * scale,
        BLOCK_M, BLOCK_D, INT64_OFFSETS,
    )  # fmt: skip


def _suitable_for_keys(configs: list[triton.Config], named_args: dict, **kwargs) -> list[triton.Config]:
    return choose(KEY_VALUE_TILES, configs, kwargs)


def _suitable_for_queries(configs: list[triton.Config], named_args: dict, **kwargs) -> list[triton.Config]:
    return choose(QUERY_TILES, configs, kwargs)


_key_value = AutotunedKernel(_key_value_kernel, configs(KEY_VALUE_TILES), TUNING_KEY, _suitable_for_keys)
_query = AutotunedKernel(_query_kernel, configs(QUERY_TILES), TUNING_KEY, _suitable_for_queries)

#: The launches of delta, of dK and dV, and of dQ; None for gradients that are not wanted.
Launches = tuple[Any, Any, Any]
FirstLaunches = Callable[[Call, tuple, tuple, tuple], Launches]

#: Launches by all that decides a backward pass.
_launches: LaunchCache = LaunchCache()


def attention_backward(
    saved: tuple, grad: Output, needs: tuple[bool, ...], first: FirstLaunches | None = None
) -> tuple[torch.Tensor | None, ...]:
    """`first` launches the kernels for the first time: those of this file, if it is None."""
    output, lse, batch_shape, mask_shape, *of_call = saved
    call = Call(*of_call)
    if output.dim() != 4:
        output = output.view(*call.q.shape[:3], output.shape[-1])
    *grads, delta = gradients(call, output, lse, grad, needs, first)
    of_operands = tuple(None if x is None else x.view(*batch_shape, *x.shape[1:]) for x in grads)
    if not any(needs[3:]):
        return (*of_operands, *(None for _ in needs[3:]))
    if delta is None:  # without queries or keys, and where only shapes count
        return (*of_operands, torch.zeros(mask_shape, dtype=call.mask.dtype, device=call.mask.device))
    of_output = (grad[0] if isinstance(grad, tuple) else grad).reshape(output.shape)
    return (*of_operands, mask_gradient(call, lse, delta, of_output, mask_shape, batch_shape))


def gradients(
    call: Call,
    output: torch.Tensor,
    lse: torch.Tensor,
    grad: Output,
    needs: tuple[bool, ...],
    first: FirstLaunches | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of query, key and value, of four dimensions as these are, or packed (total, H, D); and delta.

    Delta, Σ_d dO · O of each row less the gradient of its log-sum-exp, is None where no kernel ran.
    """
    q, k, v = call.q, call.k, call.v
    grad, grad_lse = grad if isinstance(grad, tuple) else (grad, None)
    grad = call.spread(grad) if call.packed else grad.reshape(output.shape)
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    grad_q = call.new_like(q) if needs[0] else None
    # One kernel computes both: where only one is wanted, the other is dropped.
    grad_k, grad_v = (call.new_like(k), call.new_like(v)) if needs[1] or needs[2] else (None, None)
    delta = None
    if shapes_only():
        pass
    elif output.numel() == 0 or k.shape[2] == 0:
        for each in (grad_q, grad_k, grad_v):
            if each is not None:
                each.zero_()
    else:
        delta = torch.empty_like(lse[0] if call.additive else lse)
        others = call.mask_and_offsets
        of_delta = (delta, output, grad, delta if grad_lse is None else grad_lse)
        of_keys = (grad_k, grad_v, grad, lse, delta, q, k, v, *others)
        of_queries = (grad_q, grad, lse, delta, q, k, v, *others)
        what = (
            call.launch_key, output.stride(), grad.stride(), grad_q is None, grad_k is None, grad_lse is None, first
        )  # fmt: skip
        known = _launches.get(what)
        if known is None:
            _launches.remember(what, (first or first_launches)(call, of_delta, of_keys, of_queries))
        else:
            for_delta, for_keys, for_queries = known
            for_delta(*of_delta)
            if for_keys is not None:
                for_keys(*of_keys, values=call.of_mask)
            if for_queries is not None:
                for_queries(*of_queries, values=call.of_mask)
    return grad_q, grad_k if needs[1] else None, grad_v if needs[2] else None, delta


def first_launches(call: Call, of_delta: tuple, of_keys: tuple, of_queries: tuple) -> Launches:
    """Run the kernels on their tensors. Returns the launches that repeat it, None for a gradient that is not wanted."""
    for_delta = launch_delta(call, of_delta)
    grad = of_delta[2]
    grad_k, grad_v, *_ = of_keys
    grad_q, q, k, v, scale = of_queries[0], call.q, call.k, call.v, call.scale
    batch, heads, _, head_dim = q.shape
    _, heads_kv, _, head_dim_v = v.shape
    num_heads, num_heads_kv, group = batch * heads, batch * heads_kv, heads // heads_kv
    seqlen_q, seqlen_k = call.lengths
    constants = call.constants

    inputs = (*grad.stride(), *q.stride(), *k.stride(), *v.stride())
    others = (*call.mask_strides, *call.lse_strides)
    lengths = (seqlen_q, seqlen_k, head_dim, head_dim_v, *call.limits)
    row_bytes = (head_dim + head_dim_v) * q.element_size()
    is_causal = constants["BAND"] == BELOW_DIAGONAL
    for_keys = for_queries = None
    if grad_k is not None:
        heads_per_section = section(is_causal, 1, seqlen_q * row_bytes * group)
        outputs = (*call.strides(grad_k), *call.strides(grad_v))
        for_keys = _key_value(
            lambda meta: (triton.cdiv(seqlen_k, meta["BLOCK_N"]) * num_heads_kv,),
            of_keys,
            (
                call.score_scale, scale, *outputs, *inputs, *others,
                num_heads_kv, heads_kv, group, *lengths, min(heads_per_section, num_heads_kv), seqlen_class(seqlen_k),
                *call.totals,
            ),
            {
                **constants,
                "INT64_OFFSETS": needs_int64(outputs, inputs, call.mask_strides),
                "EVEN_Q": not call.packed and seqlen_q % MAX_BLOCK_M == 0,
            },
            values=call.of_mask,
        )  # fmt: skip
    if grad_q is not None:
        outputs = call.strides(grad_q)
        for_queries = _query(
            lambda meta: (triton.cdiv(seqlen_q, meta["BLOCK_M"]) * num_heads,),
            of_queries,
            (
                call.score_scale, scale, *outputs, *inputs, *others,
                num_heads, heads, group, *lengths, call.heads_per_section, seqlen_class(seqlen_q), *call.totals,
            ),
            {**constants, "INT64_OFFSETS": needs_int64(outputs, inputs, call.mask_strides)},
            values=call.of_mask,
        )  # fmt: skip
    return for_delta, for_keys, for_queries
