"""The gradient of an additive mask, shared by the rungs `flash` and `split_kv`, on request.

Idea      The mask is added to the scores, so its gradient is dS, summed over what the mask broadcasts to. A program has
          a tile of the mask. It makes dS of every head, batch entry and tile of scores that the mask's tile is added
          to, and sums them in registers.
Kernels   `_mask_grad_kernel`, beside the two of ``backward.py``: it recomputes S and dP once more.
Limit now A mask of one row or column gives few programs, each of which walks over all scores.
          In return no gradient of S_q × S_k per head is written, and results repeat bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_impl.attention.call import Call
from triton_impl.attention.tiles import apply_mask, load_lse, load_tile, mask_pointers, needs_int64, recompute_weights
from triton_impl.common.dot import dot
from triton_impl.runtime.launch_cache import FUSED

#: (BLOCK_M, BLOCK_N) of operands of 16 bits and head dimensions up to 128; of wider ones, or float32; of both.
TILES = ((32, 64), (16, 32), (16, 16))


@triton.jit(do_not_specialize=["first", "last"])
def _mask_grad_kernel(
    grad_mask_ptr, grad_ptr, lse_ptr, delta_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, scale_log2,
    dm_b, dm_h, dm_q, dm_k, g_b, g_h, g_s, g_d, q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d,
    m_b, m_h, m_q, m_k, lse_b, lse_h,
    tiles_q, tiles_k, mask_heads, sum_batches, sum_heads, num_heads, group,
    seqlen_q, seqlen_k, head_dim, head_dim_v, first, last,
    SUM_Q: tl.constexpr, SUM_K: tl.constexpr, BAND: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
    INT64_OFFSETS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``dMask = Σ dS``: over `sum_batches` batch entries, `sum_heads` heads, and where SUM_Q, SUM_K all rows, columns.

    Grid: (tiles_k · tiles_q · heads · batch entries of the mask,). Layout: operands (B, H, S, D) by strides.
    """
    tile_n = tl.program_id(0) % tiles_k
    tile_m = tl.program_id(0) // tiles_k % tiles_q
    slot = tl.program_id(0) // tiles_k // tiles_q
    mask_h, mask_b = slot % mask_heads, slot // mask_heads
    begin_m, begin_n = tile_m * BLOCK_M, tile_n * BLOCK_N
    end_m, end_n = begin_m + BLOCK_M, begin_n + BLOCK_N
    if SUM_Q:
        end_m = seqlen_q
    if SUM_K:
        end_n = seqlen_k
    inner_rows = tl.arange(0, BLOCK_M)
    inner_cols = tl.arange(0, BLOCK_N)
    num_rows = tl.cast(num_heads, tl.int64) * lse_h
    acc = tl.full([BLOCK_M, BLOCK_N], 0.0, dtype=tl.float32)
    for i in range(sum_batches):
        b = (mask_b + i).to(tl.int64)
        for j in range(sum_heads):
            h = mask_h + j
            h_kv = (h // group).to(tl.int64)
            h = h.to(tl.int64)
            row_offset = b * lse_b + h * lse_h
            mask_base = mask_ptr + b * m_b + h * m_h
            for start_m in range(begin_m, end_m, BLOCK_M):
                rows = start_m + inner_rows
                q = load_tile(
                    q_ptr + b * q_b + h * q_h, start_m, q_s, q_d, seqlen_q, head_dim, BLOCK_M, BLOCK_D, False, EVEN_D,
                    INT64_OFFSETS,
                )  # fmt: skip
                g = load_tile(
                    grad_ptr + b * g_b + h * g_h, start_m, g_s, g_d, seqlen_q, head_dim_v, BLOCK_M, BLOCK_DV, False,
                    EVEN_DV, INT64_OFFSETS,
                )  # fmt: skip
                row_max, lse = load_lse(lse_ptr + row_offset + rows, num_rows, rows < seqlen_q, 2)
                delta = tl.load(delta_ptr + row_offset + rows, mask=rows < seqlen_q, other=0.0)
                for start_n in range(begin_n, end_n, BLOCK_N):
                    k = load_tile(
                        k_ptr + b * k_b + h_kv * k_h, start_n, k_s, k_d, seqlen_k, head_dim, BLOCK_N, BLOCK_D, False,
                        EVEN_D, INT64_OFFSETS,
                    )  # fmt: skip
                    v = load_tile(
                        v_ptr + b * v_b + h_kv * v_h, start_n, v_s, v_d, seqlen_k, head_dim_v, BLOCK_N, BLOCK_DV, False,
                        EVEN_DV, INT64_OFFSETS,
                    )  # fmt: skip
                    scores = dot(q, tl.trans(k), None, PRECISION)
                    mask = mask_pointers(
                        mask_base, start_m, start_n, inner_rows[:, None], inner_cols[None, :], m_q, m_k, INT64_OFFSETS
                    )
                    scores = apply_mask(
                        scores, scale_log2, mask, rows[:, None], (start_n + inner_cols)[None, :], seqlen_q, seqlen_k,
                        first, last, BAND, 2,
                    )  # fmt: skip
                    weights = recompute_weights(scores, scale_log2, row_max[:, None], lse[:, None], 2)
                    acc += weights * (dot(g, tl.trans(v), None, PRECISION) - delta[:, None])

    # Rows past the last query have weights of 0 and count for nothing in the sums.
    out = grad_mask_ptr + mask_b.to(tl.int64) * dm_b + mask_h.to(tl.int64) * dm_h
    rows = (begin_m + inner_rows).to(tl.int64)
    cols = (begin_n + inner_cols).to(tl.int64)
    dtype = grad_mask_ptr.dtype.element_ty
    if SUM_Q and SUM_K:
        tl.store(out, tl.sum(tl.sum(acc, 1), 0).to(dtype))
    elif SUM_Q:
        tl.store(out + cols * dm_k, tl.sum(acc, 0).to(dtype), mask=cols < seqlen_k)
    elif SUM_K:
        tl.store(out + rows * dm_q, tl.sum(acc, 1).to(dtype), mask=rows < seqlen_q)
    else:
        inside = (rows[:, None] < seqlen_q) & (cols[None, :] < seqlen_k)
        tl.store(out + rows[:, None] * dm_q + cols[None, :] * dm_k, acc.to(dtype), mask=inside)


def mask_gradient(
    call: Call,
    lse: torch.Tensor,
    delta: torch.Tensor,
    grad: torch.Tensor,
    mask_shape: tuple[int, ...],
    batch_shape: tuple[int, ...],
) -> torch.Tensor:
    """The gradient of a mask of `mask_shape`, which broadcasts to the scores (*batch_shape, H, S_q, S_k)."""
    q, k, v, mask = call.q, call.k, call.v, call.mask
    assert mask is not None
    full = (*batch_shape, *mask.shape[1:])
    shape = (*(1,) * (len(full) - len(mask_shape)), *mask_shape)
    # The kernels know one batch dimension. Of several, a mask may broadcast to some: summed afterwards.
    batches = 1 if all(n == 1 for n in shape[:-3]) else q.shape[0]
    grad_mask = torch.empty((batches, *shape[-3:]), dtype=mask.dtype, device=mask.device)
    heads, seqlen_q, seqlen_k = full[-3:]
    of_heads, of_queries, of_keys = shape[-3:]
    # A dimension of one row or column needs no sum, but is one all the same.
    names = ("BAND", "PRECISION", "BLOCK_D", "BLOCK_DV", "EVEN_D", "EVEN_DV")
    constants = {name: call.constants[name] for name in names}
    wide = (max(constants["BLOCK_D"], constants["BLOCK_DV"]) > 128) + (q.dtype == torch.float32)
    block_m, block_n = TILES[wide]
    sum_q, sum_k = of_queries == 1, of_keys == 1
    tiles_q = 1 if sum_q else triton.cdiv(seqlen_q, block_m)
    tiles_k = 1 if sum_k else triton.cdiv(seqlen_k, block_n)
    strides = (*grad.stride(), *q.stride(), *k.stride(), *v.stride())
    _mask_grad_kernel[(tiles_q * tiles_k * of_heads * batches,)](
        grad_mask, grad, lse, delta, q, k, v, mask, call.score_scale,
        *grad_mask.stride(), *strides, *call.mask_strides, *call.lse_strides,
        tiles_q, tiles_k, of_heads, q.shape[0] // batches, heads // of_heads, q.shape[0] * heads, heads // k.shape[1],
        seqlen_q, seqlen_k, q.shape[3], v.shape[3], *call.limits,
        SUM_Q=sum_q, SUM_K=sum_k, **constants, INT64_OFFSETS=needs_int64(strides, call.mask_strides),
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4, num_stages=1, **FUSED,
    )  # fmt: skip
    if batches > 1:
        grad_mask = grad_mask.view(*batch_shape, *shape[-3:]).sum_to_size(shape)
    return grad_mask.view(mask_shape)
